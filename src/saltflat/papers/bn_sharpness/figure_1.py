"""Figure 1: LeNet with BatchNorm on CIFAR-10 in batches of 10,000, by SGD and by SGDS."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from saltflat.papers.bn_sharpness import accuracies
from saltflat.papers.bn_sharpness.algorithms import CHANGED, work
from saltflat.papers.experiment import Experiment, Row, Size
from saltflat.sweep import Run, Settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DECAY = 5e-4
_PUBLISHED: accuracies.Published = {  # section 5
    ("SGD", _DECAY): 69.87,
    ("SGDS-0", _DECAY): 71.84,
    ("SGDS-5", _DECAY): 70.95,
}


def runs(size: Size) -> list[Settings]:
    """Three algorithms with five seeds; a batch is a fifth of the images in both."""
    full = size == "full"
    return [
        {
            "network": "LeNet",
            "samples": 50_000 if full else 500,
            "tested": 10_000 if full else 1000,
            "batch": 10_000 if full else 100,
            "epochs": 60 if full else 20,
            "algorithm": algorithm,
            "decay": decay,
            "lr": 0.2,
            "delta": 1e-3,
            "seed": seed,
        }
        for algorithm, decay in _PUBLISHED
        for seed in range(5)
    ]


def rows(runs: Sequence[Run]) -> list[Row]:
    return accuracies.rows(runs, _PUBLISHED)


def draw(runs: Sequence[Run]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4), layout="constrained")
    left, right, last = figure.subplots(1, 3, width_ratios=(2, 2, 1))
    accuracies.curves(left, runs, "accuracies", _PUBLISHED)
    left.set_ylabel("test accuracy (%)")
    accuracies.curves(right, runs, "losses", _PUBLISHED)
    right.set_ylabel("training loss, augmented images (nats)")
    right.legend()
    accuracies.seeds(last, runs, _PUBLISHED)
    return figure


FIGURE_1 = Experiment(
    name="bn-sharpness/figure-1",
    title="LeNet with BatchNorm on CIFAR-10, batches of 10,000 (figure 1)",
    paper="yi2019bn",
    changed=(
        "60 epochs; the paper has at least 160.",
        *CHANGED,
        "The small size has 500 training images, batches of 100 and 20 epochs.",
    ),
    runs=runs,
    work=work,
    rows=rows,
    draw=draw,
    minutes={"small": 4},
)
