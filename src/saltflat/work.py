"""The work of a call: counted in gradients, announced if it is long, and shown while it lasts.

A gradient is one forward and one backward pass over the same data. Passes are counted as they are
made, each at a price that is fixed; the clock is asked only to tell how long they will take.
`bench/prices.py` compares the two. What is no pass over the data is not counted: finding the
rescalings, say, or balancing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from shutil import get_terminal_size
from threading import Event, Lock, Thread
from time import perf_counter
from typing import Any, TextIO, final

from saltflat.errors import InvalidType

# Called with the step at hand, how many are done, and how many there are.
Callback = Callable[[str, int, int], None]

# Prices in gradients: of a forward pass, and of a product with the Hessian.
FORWARD = 1 / 3
PRODUCT = 2.5

# Seconds: what lasts longer is announced; in a terminal the line comes sooner, since it goes again.
LONG = 10.0
_SOON = 2.0
# Seconds between two looks at the work, and columns of a line in a log.
_EVERY = 1.0
_WIDTH = 88

QUIET = "SALTFLAT_PROGRESS"


@final
class Work:
    """What a call has done so far and is to do, in gradients of one sample.

    `tell` is called at every step.
    """

    def __init__(self, tell: Callback | None = None, line: Line | None = None) -> None:
        self.done = 0.0
        self.total = 0.0  # expected; 0 if nobody knows
        self.seconds = 0.0  # the same
        self.step = ""
        self.counted = True  # whether the step at hand is made of passes
        self._tell, self._line = tell, line
        if line is not None:
            line.work = self

    @property
    def silent(self) -> bool:
        """Whether nobody is told."""
        return self._tell is None and self._line is None

    def add(self, samples: int, price: float) -> None:
        """A pass over some samples was made."""
        self.done += samples * price

    def at(self, step: str, done: int, total: int) -> None:
        """A step begins, the first of which is the 0-th."""
        self.step = step
        if self._line is not None and self._line.eager:
            self._line.tell()
        if self._tell is not None:
            self._tell(step, done, total)

    @contextmanager
    def within(self, step: str) -> Iterator[None]:
        """A part of the step that is no pass over the data; the line names it while it lasts."""
        outer, self.step, self.counted = self.step, step, False
        if self._line is not None and self._line.eager:
            self._line.tell()
        try:
            yield
        finally:
            self.step, self.counted = outer, True

    def announce(self, gradients: float, samples: int, seconds: float) -> None:
        """So many gradients are to be computed, each of which takes so many seconds."""
        self.total, self.seconds = gradients * samples, gradients * seconds
        if self.seconds <= LONG:
            return
        words = f"about {spelled(self.seconds)}: {gradients:.0f} gradients at {seconds:.2g} s"
        if self._line is not None:
            self._line.begin(f"saltflat: {words}")
        if self._tell is not None:
            self._tell(words, 0, 1)


@final
class Line:
    """A line on the error stream that moves every second, once work has lasted for a while.

    In a terminal or a notebook it is written over and vanishes in the end. In a log it grows, and
    goes on below when it is full.
    """

    def __init__(self, stream: TextIO, eager: bool) -> None:
        kernel = type(stream).__module__.startswith("ipykernel")
        # From the beginning on, and at every step; but a saved notebook may keep all that is said.
        self.eager = eager and not kernel
        self.work = Work()
        self._stream = stream
        self._rewritten = kernel or stream.isatty()
        self._patience = 0.0 if eager else _SOON if self._rewritten else LONG
        self._start = perf_counter()
        self._column, self._step = 0, ""
        self._writing = Lock()
        self._ticker = _Ticker() if eager else _SHARED

    def __enter__(self) -> Line:
        self._ticker.add(self)
        return self

    def __exit__(self, *_: Any) -> None:
        self._ticker.remove(self)
        self._end()

    def begin(self, words: str) -> None:
        """Say something that stays, and be patient no longer."""
        with self._writing:
            self._end()
            self._write(f"{words}\n")
        self._patience = 0.0

    def tick(self) -> None:
        """Move, unless work has only just begun: ticks come when they come."""
        if perf_counter() - self._start >= _EVERY:
            self.tell()

    def tell(self) -> None:
        """Move, if work has lasted for long enough."""
        elapsed = perf_counter() - self._start
        if elapsed >= self._patience:
            with self._writing:
                self._move(elapsed)

    def _move(self, elapsed: float) -> None:
        work = self.work
        known = work.counted and work.total
        share = f", {min(work.done / work.total, 0.99):.0%}" if known else ""
        if self._rewritten:
            text = f"saltflat: {work.step}{share}, {spelled(elapsed)}{self._pace(elapsed)}"
            text = text[: get_terminal_size().columns - 1]  # a longer one could not be written over
            self._write("\r" + text.ljust(self._column))
            self._column = len(text)
            return
        if self._column > _WIDTH or work.step != self._step:
            self._end()
        if not self._column:
            self._step = work.step
        text = f" {elapsed:.0f} s{share}" + ";"
        text = text if self._column else f"saltflat: {work.step}:{text}"
        self._write(text)
        self._column += len(text)

    def _pace(self, elapsed: float) -> str:
        """How many gradients of a sample a second, and how long it takes at that pace."""
        work = self.work
        if not work.counted:
            return ""
        if not work.done:
            return f" of about {spelled(work.seconds)}" if work.seconds else ""
        rate = work.done / elapsed
        left = max(work.total - work.done, 0.0) / rate
        remaining = f", about {spelled(left)} left" if work.total else ""
        shown = f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
        return f", {shown} samples/s{remaining}"

    def _end(self) -> None:
        if self._column:
            self._write("\r" + " " * self._column + "\r" if self._rewritten else "\n")
        self._column = 0

    def _write(self, text: str) -> None:
        if not self._stream.closed:
            self._stream.write(text)
            self._stream.flush()


@final
class _Ticker:
    """Moves lines every second, in a thread of its own.

    It ends with the last of the lines, or at the next tick if it `lingers`: to start and end a
    thread for each of many calls in a row would take longer than the shortest of them.
    """

    def __init__(self, *, lingers: bool = False) -> None:
        self._lingers = lingers
        self._lines: list[Line] = []
        self._lock, self._over = Lock(), Event()
        self._thread: Thread | None = None

    def add(self, line: Line) -> None:
        with self._lock:
            self._lines.append(line)
            if self._thread is None or not self._thread.is_alive():
                self._thread = Thread(target=self._run, name="saltflat-progress", daemon=True)
                self._thread.start()

    def remove(self, line: Line) -> None:
        """Move it no more; a move that is under way is waited for."""
        with self._lock:
            self._lines.remove(line)
        if not self._lingers and self._thread is not None:
            self._over.set()
            self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(_EVERY):
            with self._lock:
                for line in self._lines:
                    line.tick()
                if not self._lines:
                    self._thread = None
                    return


_SHARED = _Ticker(lingers=True)
if hasattr(os, "register_at_fork"):  # a child has no thread, and might have a lock that it held
    os.register_at_fork(after_in_child=lambda: _SHARED.__init__(lingers=True))


def spelled(seconds: float) -> str:
    """A duration, roughly."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@contextmanager
def reporting(progress: bool | Callback | None) -> Iterator[Work]:
    """The work of a call, told to a user's callback or by a line on the error stream.

    `None` has a line if the work is long, unless the environment variable SALTFLAT_PROGRESS is 0;
    `True` has one from the beginning.
    """
    if callable(progress):
        yield Work(progress)
        return
    if progress is not None and not isinstance(progress, bool):
        raise InvalidType(
            "progress must be True, False, None or a callable of (step, done, total). "
            f"Got {type(progress).__name__}."
        )
    wanted = os.environ.get(QUIET) != "0" if progress is None else progress
    if not wanted or sys.stderr is None:
        yield Work()
        return
    with Line(sys.stderr, eager=progress is True) as line:
        yield Work(line=line)
