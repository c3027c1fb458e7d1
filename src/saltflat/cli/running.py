"""How a command ends: what is printed where, and the exit code."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Any, TextIO, final

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from saltflat.distributed import Reduction, origin, reduction
from saltflat.errors import DistributedError, Interrupted, LoadError, SaltflatError
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


_TORCHRUN = "torchrun --nproc-per-node 2 -m saltflat COMMAND … --distributed"
_MEETING = timedelta(minutes=5)  # until all processes have begun
_PATIENCE = timedelta(days=1)  # between two exchanges; a process that ends is noticed at once
_TELLING = timedelta(seconds=10)  # until the process that tells of an error has done so


@final
class World:
    """The processes that torchrun has started for one command, of which this is one.

    What the command does goes through `reduction`, so that an error of one is one of all.
    """

    reduction: Reduction

    def __init__(self, device: str) -> None:
        needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if missing := [name for name in needed if not os.environ.get(name)]:
            raise typer.BadParameter(
                f"It is for several processes, which torchrun starts: {_TORCHRUN}. "
                f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not in the "
                "environment.",
                param_hint="--distributed",
            )
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.device = self._own(device)
        self._store: Any = None

    def _own(self, device: str) -> str:
        """The device of this process: of GPUs, one each."""
        count = torch.cuda.device_count() if device.startswith("cuda") else 0
        if not count or self.size == 1:
            return device
        here = int(os.environ.get("LOCAL_WORLD_SIZE") or min(self.size, count))
        if device != "cuda" or here > count:
            raise typer.BadParameter(
                "Every process takes a GPU of its own: write --device cuda, and start as many "
                f"processes as there are GPUs, {count}. Got {device} and {here} processes.",
                param_hint="--device",
            )
        return f"cuda:{int(os.environ.get('LOCAL_RANK') or self.rank % count)}"

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Within, there is a process group, and all leave it together."""
        self._begin()
        try:
            with reduction(True, "saltflat") as self.reduction:
                yield
        finally:
            dist.destroy_process_group()

    def _begin(self) -> None:
        cuda = self.device.startswith("cuda")
        if cuda:
            torch.cuda.set_device(self.device)
        try:
            store, _, _ = next(rendezvous("env://", timeout=_MEETING))
            self._store = PrefixStore("saltflat", store)
            here = [f"here {rank}" for rank in range(self.size)]
            self._store.set(here[self.rank], "")
            self._store.wait(here, _MEETING)
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if cuda else "gloo",
                store=PrefixStore("group", store),
                rank=self.rank,
                world_size=self.size,
                timeout=_PATIENCE,
            )
        except (RuntimeError, ValueError) as error:
            where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            why = (str(error) or type(error).__name__).splitlines()[0]
            raise DistributedError(
                f"The {self.size} processes did not meet at {where} within {_MEETING}, as rank "
                f"{self.rank} sees it: {why}"
            ) from error

    def ended(self, code: Code, tell: Callable[[], None]) -> Code:
        """The exit code of all processes, and why, which the first of them to end tells."""
        mine = f"{self.rank} {int(code)}"
        with suppress(RuntimeError):  # the store is gone, or who was to tell
            first = self._store.compare_set("ended", "", mine).decode() if self._store else mine
            if first != mine:
                self._store.wait(["told"], _TELLING)
                return Code(int(first.split()[1]))
        tell()
        with suppress(RuntimeError):
            if self._store:
                self._store.set("told", "")
        return code


@final
@dataclass(frozen=True)
class Voice:
    """Where a command speaks: results to stdout, as a table or as JSON; all else to stderr.

    Of several processes the first speaks, and of an error one alone.
    """

    json: bool = False
    quiet: bool = False
    traceback: bool = False
    world: World | None = None
    out: TextIO = field(default_factory=lambda: sys.stdout)
    _warnings: list[str] = field(default_factory=list)  # of the command, until there is a result

    @property
    def first(self) -> bool:
        return self.world is None or self.world.rank == 0

    def note(self, text: str) -> None:
        """Something to know that is no result."""
        if self.first and not self.quiet:
            _tell(text)

    def warn(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        """Shows a warning; what the command itself is warned of, once it is known whether the
        result says it too."""
        if Path(filename).parent == Path(__file__).parent:
            self._warnings.append(str(message))
        else:
            self.note(str(message))

    def flush(self, told: str = "") -> None:
        """Show the warnings that are not among what is told."""
        said = " ".join(told.split())
        for words in self._warnings:
            if " ".join(words.split()) not in said:
                self.note(words)
        self._warnings.clear()

    def result(self, result: Any, content: Callable[[], Any] | None = None) -> None:
        """Print a result; `content` makes what stands for it in JSON, if it cannot be saved."""
        if not self.first:
            return
        self.flush("" if self.json else str(result))
        if self.json:
            self._json(store.plain(content()) if content else saved(result))
        elif self.out.isatty() and not isinstance(result, str):
            Console(highlight=False).print(result)
        else:
            print(result, file=self.out)

    def _json(self, content: Any) -> None:
        print(json.dumps(content, indent=1, allow_nan=False), file=self.out)

    def failure(self, error: BaseException, words: str, code: Code) -> Code:
        """Say what went wrong: in words, and to a program that reads JSON too."""

        def tell() -> None:
            if self.json:
                content = {"kind": type(error).__name__, "message": words, "exit": int(code)}
                self._json({"saltflat": 1, "error": content})
            if self.traceback:
                print(origin(error), file=sys.stderr, end="")
            _tell(words)

        return self.ended(code, tell)

    def ended(self, code: Code, tell: Callable[[], None]) -> Code:
        """The exit code, once it was told why."""
        if self.world is not None:
            return self.world.ended(code, tell)
        tell()
        return code


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
        warnings.showwarning = voice.warn
        asked = ASK.set("-m all")
        try:
            with voice.world.joined() if voice.world else nullcontext():
                yield
        except Interrupted as stop:
            voice.result(stop.partial)
            keep(voice, stop.partial, *save)
            tell = partial(_tell, "interrupted; the result is partial.")
            raise typer.Exit(voice.ended(Code.INTERRUPTED, tell)) from stop
        except KeyboardInterrupt as stop:
            raise typer.Exit(voice.failure(stop, _INTERRUPTED, Code.INTERRUPTED)) from stop
        except (typer.Exit, BrokenPipeError):
            raise
        except typer.BadParameter as error:
            if voice.world is None:
                raise  # which typer shows with the usage
            raise typer.Exit(voice.failure(error, error.format_message(), Code.USAGE)) from error
        except Exception as error:
            raise typer.Exit(voice.failure(error, _in_words(error, voice), _code(error))) from error
        finally:
            voice.flush()
            ASK.reset(asked)


_INTERRUPTED = "interrupted before there was a result."


def _code(error: Exception) -> Code:
    if isinstance(error, DistributedError) and error.interrupted:
        return Code.INTERRUPTED
    return Code.NOT_LOADED if isinstance(error, LoadError) else Code.FAILED


def _in_words(error: Exception, voice: Voice) -> str:
    """The message, and what to do about an error that saltflat did not raise."""
    where = "".join(f" {note}" for note in getattr(error, "__notes__", ()) if voice.world)
    if _code(error) == Code.INTERRUPTED:
        return f"{_INTERRUPTED}{where}"
    if isinstance(error, SaltflatError):
        return f"{error}{where}"
    words = f"{type(error).__name__}: {(str(error) or 'no message').splitlines()[0]}{where}"
    if isinstance(error, MemoryError) or "memory" in words.lower():
        return f"{words} Take fewer samples (--samples), or another device (--device cpu)."
    return words if voice.traceback else f"{words} Run it again with --traceback to see where."


def keep(voice: Voice, result: Any, *paths: Path | None) -> None:
    """Save a result to files, each in the format that its suffix names."""
    for path in paths if voice.first else ():
        if path is not None:
            voice.note(f"wrote {result.save(path)}")


def saved(result: Any) -> Any:
    """What a result is in a saved file, so that what is printed can be loaded again."""
    with tempfile.TemporaryDirectory(prefix="saltflat-") as folder:  # readable by its owner alone
        return json.loads(result.save(Path(folder) / "result.json").read_text(encoding="utf-8"))
