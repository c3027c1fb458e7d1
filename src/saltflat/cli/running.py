"""How a command ends: what is printed where, and the exit code."""

from __future__ import annotations

import json
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, TextIO, final

import typer
from rich.console import Console

from saltflat.errors import Interrupted, LoadError, SaltflatError
from saltflat.report import ASK, store


@final
class Code(IntEnum):
    """Exit codes; `EXIT_CODES` says what they mean."""

    OK = 0
    FAILED = 1
    USAGE = 2
    NOT_LOADED = 3
    DISAGREES = 4
    INTERRUPTED = 130


EXIT_CODES = """Exit codes: 0 done; 1 refused or failed while computing; 2 wrong usage; 3 a model,
weights or data cannot be loaded; 4 an audit found a measure that moved and declares that it does
not; 130 interrupted, and what is printed is partial."""


@final
@dataclass(frozen=True)
class Voice:
    """Where a command speaks: results to stdout, as a table or as JSON; all else to stderr."""

    json: bool = False
    quiet: bool = False
    traceback: bool = False
    out: TextIO = field(default_factory=lambda: sys.stdout)

    def note(self, text: str) -> None:
        """Something to know that is no result."""
        if not self.quiet:
            _tell(text)

    def result(self, result: Any, content: Callable[[], Any] | None = None) -> None:
        """Print a result; `content` makes what stands for it in JSON, if it cannot be saved."""
        if self.json:
            self._json(store.plain(content()) if content else saved(result))
        elif self.out.isatty() and not isinstance(result, str):
            Console(highlight=False).print(result)
        else:
            print(result, file=self.out)

    def _json(self, content: Any) -> None:
        print(json.dumps(content, indent=1, allow_nan=False), file=self.out)

    def failure(self, error: BaseException, words: str, code: Code) -> None:
        """Say what went wrong: in words, and to a program that reads JSON too."""
        if self.json:
            content = {"kind": type(error).__name__, "message": words, "exit": int(code)}
            self._json({"saltflat": 1, "error": content})
        if self.traceback:
            traceback.print_exception(error, file=sys.stderr)
        _tell(words)


def _tell(text: str) -> None:
    """On stderr, in a terminal with lines that end between words."""
    text = f"saltflat: {text}"
    if sys.stderr.isatty():
        Console(stderr=True, highlight=False, markup=False).print(text)
    else:
        print(text, file=sys.stderr)


@contextmanager
def speaking(voice: Voice, save: tuple[Path | None, ...] = ()) -> Iterator[None]:
    """Ends the command with the exit code of what happens inside.

    After Ctrl-C, what was computed is printed and saved to the files in `save`, and says that it
    is partial. What the user's own code prints does not come between a program and its JSON.
    """
    aside = redirect_stdout(sys.stderr) if voice.json else nullcontext()
    with warnings.catch_warnings(), aside:
        warnings.showwarning = lambda message, *_, **__: voice.note(str(message))
        asked = ASK.set("-m all")
        try:
            yield
        except Interrupted as stop:
            voice.result(stop.partial)
            keep(voice, stop.partial, *save)
            _tell("interrupted; the result is partial.")
            raise typer.Exit(Code.INTERRUPTED) from stop
        except KeyboardInterrupt as stop:
            voice.failure(stop, "interrupted before there was a result.", Code.INTERRUPTED)
            raise typer.Exit(Code.INTERRUPTED) from stop
        except (typer.Exit, typer.BadParameter, BrokenPipeError):
            raise
        except Exception as error:
            code = Code.NOT_LOADED if isinstance(error, LoadError) else Code.FAILED
            voice.failure(error, _in_words(error, voice), code)
            raise typer.Exit(code) from error
        finally:
            ASK.reset(asked)


def _in_words(error: Exception, voice: Voice) -> str:
    """The message, and what to do about an error that saltflat did not raise."""
    if isinstance(error, SaltflatError):
        return str(error)
    words = f"{type(error).__name__}: {(str(error) or 'no message').splitlines()[0]}"
    if isinstance(error, MemoryError) or "memory" in words.lower():
        return f"{words} Take fewer samples (--samples), or another device (--device cpu)."
    return words if voice.traceback else f"{words} Run it again with --traceback to see where."


def keep(voice: Voice, result: Any, *paths: Path | None) -> None:
    """Save a result to files, each in the format that its suffix names."""
    for path in paths:
        if path is not None:
            voice.note(f"wrote {result.save(path)}")


def saved(result: Any) -> Any:
    """What a result is in a saved file, so that what is printed can be loaded again."""
    with tempfile.TemporaryDirectory(prefix="saltflat-") as folder:  # readable by its owner alone
        return json.loads(result.save(Path(folder) / "result.json").read_text(encoding="utf-8"))
