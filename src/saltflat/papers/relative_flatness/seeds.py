"""Means over seeds, and of differences between runs of the same seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

from saltflat.sweep import Run


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean and its standard error; of a single value there is none. NaN where one is NaN."""
    mean = fmean(values)
    if len(values) == 1:
        return mean, None
    return mean, stdev(values) / math.sqrt(len(values)) if math.isfinite(mean) else math.nan


def differences(runs: Sequence[Run], others: Sequence[Run], name: str) -> list[float]:
    """`name` of runs less that of the others of the same seed; seeds that both have."""
    base = {run["seed"]: run[name] for run in others}
    return [run[name] - base[run["seed"]] for run in runs if run["seed"] in base]
