"""Figure 2 of Minimum Sharpness: fully connected networks on MNIST with noisy labels.

Published: a scatter plot without numbers, in which both sharpnesses rise with the gap.
"""

from __future__ import annotations

from saltflat.papers.experiment import Experiment, Size
from saltflat.papers.minimum_sharpness.label_noise import CHANGED, Recipe, alike, draw, rows, work
from saltflat.sweep import Settings

_FULL = Recipe("fcnn", samples=60_000, epochs=300, batch=1024, lr=0.1)
_SMALL = Recipe("fcnn", samples=500, epochs=120, batch=100, lr=0.1)


def _runs(size: Size) -> list[Settings]:
    return _FULL.settings(seeds=10) if size == "full" else _SMALL.settings(seeds=3)


FIGURE_2 = Experiment(
    name="minimum-sharpness/figure-2",
    title="Minimum and normalized sharpness against the gap, FCNN on MNIST with noisy labels",
    paper="ibayashi2021minimum",
    changed=(
        f"Full size: {_FULL.epochs} epochs instead of 3000, 10 seeds. Small size: {_SMALL.samples} "
        f"training images in batches of {_SMALL.batch}, {_SMALL.epochs} epochs, 3 seeds.",
        *CHANGED,
    ),
    runs=_runs,
    work=work,
    rows=rows,
    draw=draw,
    together=alike,
    most=22,
    minutes={"full": 10},
)
