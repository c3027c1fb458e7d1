"""Sharpness against the generalisation gap of networks trained on noisy labels: figures 2 and 4."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass, replace
from math import isfinite, nan
from typing import TYPE_CHECKING, final

import numpy as np
import torch
from torch import Tensor, nn

import saltflat as sf
from saltflat.datasets import Data
from saltflat.papers.columns import column, mean_row
from saltflat.papers.correlations import correlation
from saltflat.papers.experiment import Row
from saltflat.papers.random_labels import RATIOS, Order, images, scores, started, with_noise
from saltflat.session import full_precision
from saltflat.sweep import Outcome, Run, Settings, train_together
from saltflat.zoo import ibayashi_fcnn, lenet5

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NETWORKS: dict[str, Callable[[], nn.Module]] = {"fcnn": ibayashi_fcnn, "lenet": lenet5}
_TEST = 10_000
_MOMENTUM, _WEIGHT_DECAY = 0.9, 1e-5  # appendix D
_DECAY = 1e-4  # of the learning rate, a step: in the public code, not in the paper
MEASURES = {
    "minimum_sharpness": "minimum sharpness",
    "normalized_sharpness": "normalized sharpness",
}
CHANGED = (
    "The order of the FCNN's hidden sizes, 512, 128 and 512, the biases, inputs in [-1, 1], noise "
    "that permutes the labels of a random part, and the learning rate's factor 1/(1 + 0.0001 step) "
    "are of the public code: the paper does not give them.",
    "Training is in full float32, without TF32. A network that gives every training image one "
    "label, or whose loss is not finite, has collapsed: it is drawn as a cross and counted, and "
    "correlations are given without such networks and with them.",
    "Both sharpnesses are exact minima. The public code descends with a fixed rate, which stops "
    "short of them, so that the scale of its figure is another one.",
    "The last images of an epoch, less than a batch, are dropped.",
)


@final
@dataclass(frozen=True)
class Recipe:
    """Of one network, as its settings say."""

    network: str
    samples: int
    epochs: int
    batch: int
    lr: float
    seed: int = 0
    noise: float = 0.0

    def settings(self, seeds: int) -> list[Settings]:
        """Every ratio of random labels with every seed."""
        return [
            asdict(replace(self, seed=seed, noise=noise))
            for seed in range(seeds)
            for noise in RATIOS
        ]


def alike(settings: Settings) -> Hashable:
    """Networks that differ in noise and seed alone can be trained together."""
    return tuple(value for name, value in settings.items() if name not in ("noise", "seed"))


def work(settings: Sequence[Settings], device: torch.device) -> list[Outcome]:
    """Train networks that are alike, then test and measure one after the other."""
    recipes = [Recipe(**each) for each in settings]  # type: ignore[arg-type]
    clean = images("mnist", recipes[0].samples, _TEST, device)
    parts = [with_noise(clean, each.noise, each.seed) for each in recipes]
    models = [started(_NETWORKS[each.network], each.seed, device) for each in recipes]
    with full_precision(device):
        _train(models, recipes, clean.train_x, torch.stack([part.train_y for part in parts]))
        return [_outcome(model, data) for model, data in zip(models, parts, strict=True)]


def _train(models: Sequence[nn.Module], recipes: Sequence[Recipe], x: Tensor, y: Tensor) -> None:
    order = Order([each.seed for each in recipes], len(x), recipes[0].batch, x.device)
    steps = recipes[0].epochs * order.epoch_steps
    rates = recipes[0].lr / (1 + _DECAY * torch.arange(steps, device=x.device))
    train_together(
        models,
        x,
        y,
        order,
        steps,
        lr=lambda step: rates[step],
        momentum=_MOMENTUM,
        weight_decay=_WEIGHT_DECAY,
    )


def _outcome(model: nn.Module, data: Data) -> Outcome:
    result = scores(model, data)
    return {**result, **_measured(model, data, isfinite(result["train_loss"]))}


def _measured(model: nn.Module, data: Data, finite: bool) -> dict[str, float]:
    """On the training set with its noisy labels; NaN where there is nothing to measure."""
    names = ["hessian_trace", *MEASURES]
    if not finite:
        return dict.fromkeys(names, nan)
    report = sf.measure(
        model,
        (data.train_x, data.train_y),
        measures=names,
        on_error="skip",
        standing=False,
        progress=False,
    )
    return {name: report[name].value if name in report else nan for name in names}


def rows(runs: Sequence[Run]) -> list[Row]:
    """Correlations with the gap, whether sharpness rises with the noise, and what has collapsed."""
    whole = [run for run in runs if not run["collapsed"]]
    table = []
    for name, title in MEASURES.items():
        table += [
            correlation(column(whole, name), column(whole, "gap"), kind).row(
                f"{kind}, {title} and gap"
            )
            for kind in ("Spearman", "Kendall")
        ]
        table.append(_rise(whole, name, title))
    if len(whole) < len(runs):
        table += [
            correlation(column(runs, name), column(runs, "gap")).row(
                f"Spearman, {title} and gap, collapsed networks too"
            )
            for name, title in MEASURES.items()
        ]
    table.append(Row("collapsed networks", len(runs) - len(whole), note=f"of {len(runs)}"))
    return table + _accuracies(whole)


def _rise(runs: Sequence[Run], name: str, title: str) -> Row:
    """Of the means over seeds: from how many ratios to the next do they rise."""
    known = [run for run in runs if isfinite(float(run[name]))]
    means = [np.mean(values) for values in by_noise(known, name).values()]
    note = f"of {max(len(means) - 1, 0)} steps of the noise, {len(known)} networks"
    return Row(f"rises of the mean {title}", float((np.diff(means) > 0).sum()), note=note)


def _accuracies(runs: Sequence[Run]) -> list[Row]:
    """How well networks that have not collapsed learned the least and the most random labels."""
    learned = by_noise(runs, "train_accuracy")
    ends = dict.fromkeys([min(learned), max(learned)]) if learned else {}
    return [
        mean_row(
            f"training accuracy, noise {noise:g}",
            learned[noise],
            note=f"{len(learned[noise])} networks",
        )
        for noise in ends
    ]


def by_noise(runs: Sequence[Run], name: str) -> dict[float, list[float]]:
    """One number of all seeds, from the least noise to the most."""
    groups: dict[float, list[float]] = {}
    for run in sorted(runs, key=lambda each: float(each["noise"])):
        groups.setdefault(float(run["noise"]), []).append(float(run[name]))
    return groups


def draw(runs: Sequence[Run]) -> Figure:
    """The gap against each sharpness, coloured by the noise; without sharpness at the left edge."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    panels = figure.subplots(1, len(MEASURES), sharey=True)
    for axes, (name, title) in zip(panels, MEASURES.items(), strict=True):
        edge = min((value for value in column(runs, name) if value > 0), default=1.0) / 2
        for collapsed, marker in [(False, "o"), (True, "x")]:
            some = [run for run in runs if bool(run["collapsed"]) == collapsed]
            points = axes.scatter(
                [value if value > edge else edge for value in column(some, name)],
                column(some, "gap"),
                c=column(some, "noise"),
                marker=marker,
                s=28,
                vmin=0,
                vmax=1,
                label="collapsed" if collapsed else None,
            )
            if collapsed and some:
                axes.legend(frameon=False)
        axes.set(xlabel=title, xscale="log")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("accuracy gap, training − test")
    figure.colorbar(points, ax=list(panels), label="ratio of random labels")
    return figure
