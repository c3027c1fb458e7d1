"""Times of several runs, taken in turns.

Another process or a change of clock speed then hits all of them alike, which a ratio survives.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

import torch

T = TypeVar("T")

_SHORT = 0.05  # seconds: a run that is shorter is repeated within its turn
_LONG = 40.0  # seconds: about as long as one contender may take over all of its turns


@dataclass(frozen=True)
class Timed:
    """Something to time, and how long it took at first."""

    run: Callable[[], object]
    first: float


@dataclass(frozen=True)
class Times:
    """The seconds that each run took."""

    seconds: tuple[float, ...]

    @property
    def best(self) -> float:
        return min(self.seconds)

    @property
    def median(self) -> float:
        return median(self.seconds)

    def scaled(self, factor: float) -> Times:
        return Times(tuple(factor * s for s in self.seconds))


def clocked(run: Callable[[], T], device: str) -> tuple[float, T]:
    """The seconds of one run and what it returned; the device's queue is empty on both ends."""
    _wait(device)
    start = time.perf_counter()
    result = run()
    _wait(device)
    return time.perf_counter() - start, result


def in_turns(contenders: Mapping[str, Timed], repeats: int, device: str) -> dict[str, Times]:
    """`repeats` rounds over all contenders, fewer for the slow ones.

    One that is slower than `_LONG` is left with its first run.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    gc.collect()
    gc.disable()
    try:
        for done in range(repeats):
            for name, timed in contenders.items():
                if done < int(_LONG / timed.first):
                    seconds[name] += turn_of(timed, device)
            gc.collect()
    finally:
        gc.enable()
    return {name: Times(tuple(s or [contenders[name].first])) for name, s in seconds.items()}


def turn_of(timed: Timed, device: str) -> list[float]:
    """The seconds of one run, or of several where one is too short to trust."""
    seconds = []
    for _ in range(max(1, min(10, int(_SHORT / timed.first)))):
        seconds.append(clocked(timed.run, device)[0])
    return seconds


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
