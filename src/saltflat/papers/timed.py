"""Times of calls that are compared with one another.

A machine drifts: its clock rate, other load, the state of its caches. So calls are timed by turns,
in many rounds, and each beside the call that it is compared with, its unit: what a drift does to
one it does to the other. The median of such ratios says how many units a call takes, and their
quartiles how far one round is from another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter, process_time
from typing import final

import numpy as np
import torch

from saltflat.papers.experiment import Row

Call = Callable[[], object]
_SHORT = 0.01  # seconds; shorter calls are repeated within a turn, until they fill that time
_LONG = 1.0  # seconds; of longer calls the first is hardly slower than the others


@final
@dataclass(frozen=True)
class Times:
    """Of one call and of its unit, in seconds, one a round."""

    call: tuple[float, ...]
    unit: tuple[float, ...]

    @property
    def seconds(self) -> float:
        return median(self.call)

    @property
    def units(self) -> list[float]:
        """How many units the call took, one a round."""
        return [one / other for one, other in zip(self.call, self.unit, strict=True)]


def by_turns(
    calls: Mapping[str, Call],
    unit: Call,
    device: torch.device,
    *,
    rounds: int = 20,
    seconds: float = 5.0,
) -> dict[str, Times]:
    """Time so many rounds of all calls, each right after its unit.

    All are called before, which is not counted. A call that has taken `seconds` in all is left out
    of further rounds. On a CPU processor time is taken, which other programs do not count in.
    """
    turns = {name: _Turn.of(call, device) for name, call in calls.items()}
    units, found = _Turn.of(unit, device), {name: list[tuple[float, float]]() for name in calls}
    for _ in range(rounds):
        for name, turn in turns.items():
            if turn.times * sum(call for call, _ in found[name]) < seconds:
                before = units.seconds(device)
                found[name].append((turn.seconds(device), before))
    return {name: Times(*zip(*pairs, strict=True)) for name, pairs in found.items()}


@final
@dataclass(frozen=True)
class _Turn:
    """A call, and how often it is made in a row."""

    call: Call
    times: int

    @classmethod
    def of(cls, call: Call, device: torch.device) -> _Turn:
        """Made twice, to warm up and to see how long it takes; a long one is made once."""
        once = _clocked(call, device)
        if once < _LONG:
            once = _clocked(call, device)
        return cls(call, max(1, math.ceil(_SHORT / once)))

    def seconds(self, device: torch.device) -> float:
        """Of one call; each is waited for."""
        return sum(_clocked(self.call, device) for _ in range(self.times)) / self.times


def _clocked(call: Call, device: torch.device) -> float:
    clock = perf_counter if device.type == "cuda" else process_time
    _wait(device)
    start = clock()
    call()
    _wait(device)
    return clock() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The median is the second."""
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
    return float(low), float(middle), float(high)


def median_row(what: str, values: Sequence[float], note: str = "") -> Row:
    """The median of rounds, with their quartiles in the note."""
    low, middle, high = quartiles(values)
    spread = f"quartiles {low:.3g} to {high:.3g} of {len(values)} rounds"
    spread = spread if len(values) > 1 else "one round"
    return Row(what, middle, note=f"{note}, {spread}" if note else spread)
