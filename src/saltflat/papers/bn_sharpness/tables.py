"""Tables 1 and 2: VGG-11 with BatchNorm on CIFAR-10, in batches of 128 and of 2048.

The headline is the part of table 2 for which the paper claims most: SGD and SGDS-0, in large
batches with weight decay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from saltflat.papers.bn_sharpness import accuracies
from saltflat.papers.bn_sharpness.algorithms import CHANGED, work
from saltflat.papers.experiment import Experiment, Size
from saltflat.sweep import Run, Settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DECAY = 5e-4
_SMALL_BATCH: accuracies.Published = {  # table 1
    ("SGD", _DECAY): 91.67,
    ("SGDS-0", _DECAY): 91.78,
    ("E-SGD", _DECAY): 91.03,
    ("SGDS-5", _DECAY): 91.55,
    ("SGD", 0.0): 90.5,
    ("SGDS-0", 0.0): 90.53,
    ("E-SGD", 0.0): 89.96,
    ("SGDS-5", 0.0): 90.53,
}
_LARGE_BATCH: accuracies.Published = {  # table 2
    ("SGD", _DECAY): 89.6,
    ("SGDS-0", _DECAY): 90.51,
    ("E-SGD", _DECAY): 89.67,
    ("SGDS-5", _DECAY): 90.35,
    ("SGD", 0.0): 88.5,
    ("SGDS-0", 0.0): 88.58,
    ("E-SGD", 0.0): 87.13,
    ("SGDS-5", 0.0): 88.9,
}
_HEADLINE: accuracies.Published = {key: _LARGE_BATCH[key] for key in [*_LARGE_BATCH][:2]}
# Whole rounds of Entropy-SGD fit in. With 16 epochs in batches of 2048 and the full learning rate
# from the first step on, VGG-11 stayed at 26 %.
_EPOCHS = {128: 20, 2048: 48}
_SMALL = {128: 16, 2048: 64}  # batches of the small size


def runs(published: accuracies.Published, batch: int, size: Size) -> list[Settings]:
    """All algorithms of a table with five seeds."""
    return [
        {
            "network": "VGG-11" if size == "full" else "LeNet",
            "samples": 50_000 if size == "full" else 512,
            "tested": 10_000 if size == "full" else 1000,
            "batch": batch if size == "full" else _SMALL[batch],
            "epochs": _EPOCHS[batch] if size == "full" else 20,
            "algorithm": algorithm,
            "decay": decay,
            "lr": _rate(algorithm, batch),
            "delta": 5e-4,
            "seed": seed,
        }
        for algorithm, decay in published
        for seed in range(5)
    ]


def _rate(algorithm: str, batch: int) -> float:
    """0.2 with BN-Sharpness and 0.1 without; 0.01 for Entropy-SGD in small batches."""
    if algorithm.startswith("SGDS"):
        return 0.2
    return 0.01 if algorithm == "E-SGD" and batch == 128 else 0.1


def draw(published: accuracies.Published, runs: Sequence[Run]) -> Figure:
    from matplotlib.figure import Figure

    decays = sorted({run["decay"] for run in runs}, reverse=True)
    figure = Figure(figsize=(4.5 * (len(decays) + 1), 4.2), layout="constrained")
    *panels, last = figure.subplots(1, len(decays) + 1)
    for axes, decay in zip(panels, decays, strict=True):
        some = [run for run in runs if run["decay"] == decay]
        accuracies.curves(axes, some, "accuracies", published)
        axes.set_title(f"weight decay {decay:g}: mean, least and largest", fontsize=10)
        axes.legend(fontsize="small")
    accuracies.seeds(last, runs, published)
    panels[0].set_ylabel("test accuracy (%)")
    return figure


def _experiment(
    name: str,
    title: str,
    published: accuracies.Published,
    batch: int,
    runs_of: str | None = None,
) -> Experiment:
    listed: Callable[[Size], list[Settings]] = partial(runs, published, batch)
    return Experiment(
        name=f"bn-sharpness/{name}",
        title=title,
        paper="yi2019bn",
        changed=(
            f"{_EPOCHS[batch]} epochs; the paper has at least 160.",
            "VGG-11's learning rate rises linearly over the first 15 % of the training; the paper "
            "tells of no such rise.",
            "On a GPU networks run in bfloat16, their weights and optimizers in float32.",
            *CHANGED,
            "Entropy-SGD moves its centre to the average of 20 inner steps of momentum 0.9 at a "
            f"learning rate of {_rate('E-SGD', batch):g}, inner and outer; no dropout, γ constant. "
            "Its curve is of the weights as an epoch leaves them, within such steps, and ends with "
            "the centre.",
            "The small size has the LeNet with BatchNorm in place of VGG-11, 512 training images, "
            f"batches of {_SMALL[batch]} and 20 epochs.",
        ),
        runs=listed,
        work=work,
        rows=lambda runs: accuracies.rows(runs, published),
        draw=partial(draw, published),
        minutes={"small": 10},
        runs_of=runs_of,
    )


HEADLINE = _experiment(
    "table-2-headline",
    "SGD and SGDS-0 of table 2, batches of 2048",
    _HEADLINE,
    2048,
    runs_of="bn-sharpness/table-2",
)
TABLE_2 = _experiment("table-2", "VGG-11 on CIFAR-10, batches of 2048", _LARGE_BATCH, 2048)
TABLE_1 = _experiment("table-1", "VGG-11 on CIFAR-10, batches of 128", _SMALL_BATCH, 128)
