"""Whether saltflat reached what it must."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from bench.cases import Case
from bench.contest import Entry


@dataclass(frozen=True)
class Check:
    """A demand in words, and whether it was met."""

    demand: str
    met: bool


def ratio(entries: Mapping[str, Entry], slow: str, fast: str) -> float | None:
    """How many times longer `slow` took than `fast`, best run against best run."""
    a, b = entries[slow].times, entries[fast].times
    return None if a is None or b is None else a.best / b.best


def checks(case: Case, name: str, entries: Mapping[str, Entry]) -> list[Check]:
    """The demands on the trace or the diagonal (`name`) of this case."""
    return list(_checks(case, name, entries)) if name in ("trace", "diagonal") else []


def _checks(case: Case, name: str, entries: Mapping[str, Entry]) -> Iterator[Check]:
    bars = case.bars
    most = bars.trace if name == "trace" else bars.diagonal
    cost = ratio(entries, name, "gradient")
    if most is not None and cost is not None:
        yield Check(f"≤ {most:g} gradients", cost <= most)
    # The larger factors are asked of the trace; the diagonal must only never be slower.
    least = bars.backpack if name == "trace" or bars.backpack is None else 1
    faster = ratio(entries, "backpack", name)
    if least is not None and faster is not None:
        yield Check(f"≥ {least:g}× BackPACK", faster >= least)
        ours, theirs = entries[name].mib, entries["backpack"].mib
        if ours is not None and theirs is not None:
            yield Check("less memory than BackPACK", ours < theirs)
    faster = ratio(entries, "per-sample", name)
    if name == "trace" and bars.per_sample is not None and faster is not None:
        yield Check(f"≥ {bars.per_sample:g}× K+1 passes", faster >= bars.per_sample)
