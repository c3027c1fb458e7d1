"""How a command ends: what is printed where, and the exit code."""

from __future__ import annotations

import json
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, final

import typer
from rich.console import Console

from saltflat.audit import Audit
from saltflat.errors import Interrupted, LoadError, SaltflatError
from saltflat.report import Comparison, Report, store


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

    def note(self, text: str) -> None:
        """Something to know that is no result."""
        if not self.quiet:
            print(f"saltflat: {text}", file=sys.stderr)

    def result(self, result: Any, content: Callable[[], Any] | None = None) -> None:
        """Print a result; `content` makes what stands for it in JSON, if it cannot be saved."""
        if self.json:
            print(json.dumps(content() if content else saved(result), indent=1, allow_nan=False))
        elif sys.stdout.isatty():
            Console(highlight=False).print(result)
        else:
            print(result)

    def failure(self, error: BaseException, code: Code) -> None:
        """Say what went wrong: in words, and to a program that reads JSON too."""
        words = str(error) or type(error).__name__
        if self.json:
            content = {"kind": type(error).__name__, "message": words, "exit": int(code)}
            print(json.dumps({"saltflat": 1, "error": content}, indent=1))
        if self.traceback:
            traceback.print_exception(error, file=sys.stderr)
        print(f"saltflat: {words}", file=sys.stderr)


@contextmanager
def speaking(voice: Voice, save: tuple[Path | None, ...] = ()) -> Iterator[None]:
    """Ends the command with the exit code of what happens inside.

    After Ctrl-C, what was computed is printed and saved to the files in `save`, and says that it
    is partial.
    """
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: voice.note(str(message))
        try:
            yield
        except Interrupted as stop:
            voice.result(stop.partial)
            keep(voice, stop.partial, *save)
            print("saltflat: interrupted; the result is partial.", file=sys.stderr)
            raise typer.Exit(Code.INTERRUPTED) from None
        except KeyboardInterrupt as stop:
            voice.failure(KeyboardInterrupt("interrupted before there was a result"), _CODES[-1][1])
            raise typer.Exit(Code.INTERRUPTED) from stop
        except (typer.Exit, typer.BadParameter):
            raise
        except Exception as error:
            code = next((code for kind, code in _CODES if isinstance(error, kind)), Code.FAILED)
            voice.failure(_in_words(error, voice), code)
            raise typer.Exit(code) from None


_CODES: list[tuple[type[BaseException], Code]] = [
    (LoadError, Code.NOT_LOADED),
    (SaltflatError, Code.FAILED),
    (KeyboardInterrupt, Code.INTERRUPTED),
]


def _in_words(error: Exception, voice: Voice) -> Exception:
    """The error itself, or what to do about one that saltflat did not raise."""
    if isinstance(error, SaltflatError):
        return error
    words = (str(error) or "no message").splitlines()[0]
    hint = "" if voice.traceback else " Run it again with --traceback to see where."
    if "memory" in words.lower() or isinstance(error, MemoryError):
        hint = " Take fewer samples (--samples), or another device (--device cpu)."
    kind = f"{type(error).__name__}: {words}"
    return type(error)(f"{kind}{hint}") if type(error) in _PLAIN else SaltflatError(f"{kind}{hint}")


_PLAIN = (MemoryError, RuntimeError, OSError)


def keep(voice: Voice, result: Any, *paths: Path | None) -> None:
    """Save a result to files, each in the format that its suffix names."""
    for path in paths:
        if path is not None:
            if isinstance(result, Comparison):
                store.save(path, "A comparison", store.plain(result))
            else:
                result.save(path)
            voice.note(f"wrote {path}")


def saved(result: Any) -> Any:
    """What a result is in a saved file, so that what is printed can be loaded again."""
    if isinstance(result, Comparison):
        problems = list(result.problems)
        return {"saltflat": 1, "reports": store.plain(result.reports), "problems": problems}
    assert isinstance(result, Report | Audit)
    with tempfile.TemporaryDirectory(prefix="saltflat-") as folder:  # readable by its owner alone
        return json.loads(result.save(Path(folder) / "result.json").read_text(encoding="utf-8"))
