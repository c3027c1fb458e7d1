"""Figure 4 of Minimum Sharpness: figure 2 once more with LeNet.

Published: a scatter plot without numbers.
"""

from __future__ import annotations

from saltflat.papers.experiment import Experiment, Size
from saltflat.papers.minimum_sharpness.label_noise import CHANGED, Recipe, draw, rows, work
from saltflat.sweep import Settings

_FULL = Recipe("lenet", samples=10_000, epochs=1000, batch=1024, lr=0.01)
_SMALL = Recipe("lenet", samples=500, epochs=100, batch=50, lr=0.01)


def _runs(size: Size) -> list[Settings]:
    return _FULL.settings(seeds=5) if size == "full" else _SMALL.settings(seeds=3)


# Convolutions with a network's own weights are slow in ensembles: one is trained after the other.
FIGURE_4 = Experiment(
    name="minimum-sharpness/figure-4",
    title="Minimum and normalized sharpness against the gap, LeNet on MNIST with noisy labels",
    paper="ibayashi2021minimum",
    changed=(
        f"Full size: {_FULL.samples} training images instead of 60,000, 5 seeds. Small size: "
        f"{_SMALL.samples} images in batches of {_SMALL.batch}, {_SMALL.epochs} epochs, 3 seeds.",
        "LeNet is LeNet-5, as appendix D says. The public code's first pooling has stride 1, which "
        "makes the linear layer behind the convolutions 49 times as large.",
        *CHANGED,
    ),
    runs=_runs,
    work=work,
    rows=rows,
    draw=draw,
)
