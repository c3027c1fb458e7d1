"""One number of many runs: the column of them, and what tables and pictures show of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import TYPE_CHECKING

import numpy as np

from saltflat.papers.experiment import Row
from saltflat.sweep import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

_FEWEST = 5  # values; of fewer the standard error is hardly known itself, and none is shown


def column(runs: Sequence[Run], name: str) -> list[float]:
    """One number of each run. (Files hold those that are not finite as words.)"""
    return [float(run[name]) for run in runs]


def differences(runs: Sequence[Run], others: Sequence[Run], name: str) -> list[float]:
    """`name` of runs less that of the others of the same seed; seeds that both have."""
    base = {run["seed"]: float(run[name]) for run in others}
    return [float(run[name]) - base[run["seed"]] for run in runs if run["seed"] in base]


def largest(values: Sequence[float]) -> float:
    """NaN where one is, wherever it stands."""
    return float(np.max(values))


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean, NaN where one is not finite, and its standard error from five values on."""
    if not values or not all(map(math.isfinite, values)):
        return math.nan, None
    return fmean(values), stdev(values) / len(values) ** 0.5 if len(values) >= _FEWEST else None


def mean_row(
    what: str, values: Sequence[float], published: float | None = None, note: str = ""
) -> Row:
    """The mean with its standard error, where there are seeds enough."""
    mean, error = mean_and_error(values)
    return Row(what, mean, error, published, note)


def draw_seeds(
    axes: Axes, place: float, values: Sequence[float], colour: str, label: str | None = None
) -> None:
    """Every seed as a point, and beside them the mean with its standard error."""
    mean, error = mean_and_error(values)
    axes.plot([place - 0.15] * len(values), values, "o", ms=4, alpha=0.6, c=colour, label=label)
    axes.errorbar(place + 0.1, mean, error or 0.0, fmt="_", ms=14, capsize=4, c=colour)


def label_decades(axis: Axis) -> None:
    """Numbers along a logarithmic axis, once all is drawn: also where it has hardly a decade."""
    from matplotlib.ticker import LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())  # they would run into each other
