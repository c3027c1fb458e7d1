"""Test accuracies of the algorithms beside the published ones, and their curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from saltflat.papers.columns import column, draw_seeds, mean_row
from saltflat.papers.experiment import Row
from saltflat.sweep import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# An algorithm and its weight decay, and the accuracy in percent that the paper has for it.
Published = Mapping[tuple[str, float], float]


def rows(runs: Sequence[Run], published: Published) -> list[Row]:
    """The accuracy of each algorithm, and how much each is above SGD, both over seeds."""
    accuracies = {key: _of(runs, *key) for key in published if _of(runs, *key)}
    table = [
        _row(f"test accuracy, {label(*key)} (%)", [*accuracies[key].values()], published[key])
        for key in accuracies
    ]
    for (name, decay), ours in accuracies.items():
        plain = accuracies.get(("SGD", decay), {})
        if name != "SGD" and plain:
            gains = [value - plain[seed] for seed, value in ours.items() if seed in plain]
            above = published[name, decay] - published["SGD", decay]
            table.append(_row(f"{label(name, decay)} above SGD (points)", gains, above))
    losses = {key: column(_some(runs, *key), "loss") for key in accuracies}
    table += [_row(f"training loss, {label(*k)}", v, None) for k, v in losses.items()]
    return [replace(row, note=f"{_here(runs[0])}, {row.note}") for row in table]


def _here(run: Run) -> str:
    images = f"{run['samples']:,} images in batches of {run['batch']:,}"
    return f"here {run['network']}, {images}, {run['epochs']} epochs"


def label(algorithm: str, decay: float) -> str:
    """As in the paper, which puts the weight decay behind the name."""
    return f"{algorithm}-{decay:.0e}".replace("e-0", "e-") if decay else f"{algorithm}-0"


def _some(runs: Sequence[Run], algorithm: str, decay: float) -> list[Run]:
    return [run for run in runs if run["algorithm"] == algorithm and run["decay"] == decay]


def _of(runs: Sequence[Run], algorithm: str, decay: float) -> dict[int, float]:
    """By seed."""
    return {int(run["seed"]): float(run["accuracy"]) for run in _some(runs, algorithm, decay)}


def _row(what: str, values: Sequence[float], published: float | None) -> Row:
    return mean_row(what, values, published, f"{len(values)} seeds")


def curves(axes: Axes, runs: Sequence[Run], name: str, published: Published) -> None:
    """The mean over seeds of a number of every epoch, with a band from the least to the largest."""
    for index, (algorithm, decay) in enumerate(published):
        some = _some(runs, algorithm, decay)
        if not some:
            continue
        values: NDArray[np.float64] = np.array([run[name] for run in some], dtype=float)
        epochs = 1 + np.arange(values.shape[1])
        colour, style = _colour(index), "-" if decay else "--"
        axes.plot(epochs, values.mean(0), style, color=colour, label=label(algorithm, decay))
        axes.fill_between(epochs, values.min(0), values.max(0), color=colour, alpha=0.15)
    axes.set_xlabel("epoch")
    axes.locator_params(axis="x", integer=True)
    axes.grid(alpha=0.3)


def seeds(axes: Axes, runs: Sequence[Run], published: Published) -> None:
    """The accuracy of every network in the end, and the means with their standard errors."""
    shown = [(index, key) for index, key in enumerate(published) if _of(runs, *key)]
    for place, (index, key) in enumerate(shown):
        draw_seeds(axes, place, [*_of(runs, *key).values()], _colour(index))
    axes.set_xticks(range(len(shown)), [label(*key) for _, key in shown], rotation=30, ha="right")
    axes.set_title("in the end: seeds, mean ± s.e.", fontsize=10)
    axes.grid(alpha=0.3)


def _colour(index: int) -> str:
    """By algorithm: the papers' tables list them in the same order with and without decay."""
    return f"C{index % 4}"
