"""One number of many runs: the column of them, its largest, and its mean over seeds as a row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from saltflat.papers.experiment import Row
from saltflat.sweep import Run


def column(runs: Sequence[Run], name: str) -> list[float]:
    """One number of each run. (Files hold those that are not finite as words.)"""
    return [float(run[name]) for run in runs]


def largest(values: Sequence[float]) -> float:
    """NaN where one is, wherever it stands."""
    return float(np.max(values))


def mean_row(
    what: str, values: Sequence[float], published: float | None = None, note: str = ""
) -> Row:
    """The mean with its standard error, which one value alone does not have."""
    error = float(np.std(values, ddof=1) / len(values) ** 0.5) if len(values) > 1 else None
    return Row(what, float(np.mean(values)), error, published, note)
