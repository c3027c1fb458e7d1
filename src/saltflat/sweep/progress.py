"""How far a sweep is: a bar in a terminal, a line now and then in a log."""

from __future__ import annotations

import sys
from time import perf_counter
from types import TracebackType
from typing import final

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task
from rich.table import Column
from rich.text import Text

from saltflat.work import spelled

_EVERY = 30.0  # seconds between two lines of a log


@final
class Tally:
    """Counts runs on the error stream, with their rate and the time that the others will take."""

    def __init__(self, title: str, total: int, found: int, shown: bool = True) -> None:
        self.title, self.total, self.found = title, total, found
        self.done = self.failed = 0
        self._start = self._last = self._told = perf_counter()
        console = Console(stderr=True)
        self._bar = Progress(
            SpinnerColumn(),
            _Words(self),
            _Left(self),
            BarColumn(bar_width=10),
            console=console,
            transient=True,
            disable=not (shown and console.is_terminal),
        )
        self._task = self._bar.add_task(title, total=total, completed=found)
        self._logged = shown and not console.is_terminal

    def __enter__(self) -> Tally:
        self._bar.start()
        if self._logged and self.found < self.total:
            self._log()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._bar.stop()
        if self._logged and self._last > self._told:  # since the last line
            self._log()

    def advance(self, runs: int = 0, failed: int = 0) -> None:
        """So many more are done."""
        self.done, self.failed = self.done + runs, self.failed + failed
        self._last = perf_counter()
        self._bar.advance(self._task, runs + failed)
        if self._logged and self._last - self._told >= _EVERY:
            self._log()

    def __str__(self) -> str:
        return f"{self.counts}, {self.left}" if self.left else self.counts

    @property
    def counts(self) -> str:
        """How many are done, and how fast they were."""
        text = f"{self.title}: {self.found + self.done} of {self.total} runs"
        if self.failed:
            text += f", {self.failed} failed"
        if not self._over:
            return f"{text} were done before" if self.found else text
        pace = self._pace
        rate = f"{60 / pace:.1f} a minute" if pace > 1 else f"{1 / pace:.1f} a second"
        return f"{text}, {rate}"

    @property
    def left(self) -> str:
        """The time that is left; nothing as long as it is not known, and in the end."""
        missing = self.total - self.found - self._over
        if not (self._over and missing):
            return ""
        seconds = self._pace * missing - (perf_counter() - self._last)
        return f"about {spelled(max(0.0, seconds))} left"

    @property
    def _over(self) -> int:
        return self.done + self.failed

    @property
    def _pace(self) -> float:
        """Seconds a run."""
        return max(self._last - self._start, 1e-9) / self._over

    def _log(self) -> None:
        self._told = perf_counter()
        print(f"saltflat: {self}", file=sys.stderr, flush=True)


@final
class _Words(ProgressColumn):
    """What the tally counts, anew whenever it is drawn; cut off where a terminal is too narrow."""

    def __init__(self, tally: Tally) -> None:
        super().__init__(Column(no_wrap=False))  # gives way to the others
        self._tally = tally

    def render(self, task: Task) -> Text:
        counts, more = self._tally.counts, bool(self._tally.left)
        return Text(f"{counts}," if more else counts, no_wrap=True, overflow="ellipsis")


@final
class _Left(ProgressColumn):
    """The time that is left, in full."""

    def __init__(self, tally: Tally) -> None:
        super().__init__(Column(no_wrap=True))
        self._tally = tally

    def render(self, task: Task) -> Text:
        return Text(self._tally.left)
