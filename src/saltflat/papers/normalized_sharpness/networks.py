"""The networks of figures 3 and 4: trained on partly random labels, tested and measured."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass, replace
from math import isfinite, nan
from typing import TYPE_CHECKING, final

import numpy as np
import torch
from torch import nn

import saltflat as sf
from saltflat.datasets import Data
from saltflat.papers.columns import column, mean_row
from saltflat.papers.correlations import correlation
from saltflat.papers.experiment import Row, Size
from saltflat.papers.normalized_sharpness.adam import adam_together
from saltflat.papers.random_labels import RATIOS, Order, images, scores, started, with_noise
from saltflat.papers.trained import fit
from saltflat.session import full_precision
from saltflat.sweep import Outcome, Run, Settings
from saltflat.zoo import lenet5, mlp, wide_resnet16_4

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TEST = 10_000
_NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "mlp-mnist": lambda: mlp([784, 512, 512, 512, 10]),
    "lenet-mnist": lenet5,
    "lenet-cifar10": lambda: lenet5(channels=3),
    "wrn-cifar10": wide_resnet16_4,
}
_TITLES = {
    "mlp-mnist": "MLP, MNIST",
    "lenet-mnist": "LeNet, MNIST",
    "lenet-cifar10": "LeNet, CIFAR-10",
    "wrn-cifar10": "WRN-16-4, CIFAR-10",
}


@final
@dataclass(frozen=True)
class Recipe:
    """Of one network, as its settings say; `network` names its data too."""

    network: str
    samples: int
    epochs: int
    measured: int  # training samples that the sharpness is measured on
    batch: int = 128
    seed: int = 0
    noise: float = 0.0

    def settings(self, seeds: int, ratios: Sequence[float] = RATIOS) -> list[Settings]:
        """Every ratio of random labels with every seed."""
        return [
            asdict(replace(self, seed=seed, noise=noise))
            for seed in range(seeds)
            for noise in ratios
        ]


_SEEDS = 5  # of the full size
_SMALL = Recipe("mlp-mnist", samples=500, epochs=40, measured=500, batch=50)
CHANGED = (
    "Full size, with five seeds: 55 MLPs on MNIST, 30 LeNets on MNIST and 30 on CIFAR-10 (50 "
    "epochs), and 30 WRN-16-4 on 5,000 images of CIFAR-10 (40 epochs), instead of 100 networks "
    "each, LeNet on CIFAR-10 for 100 epochs and WRN-16-4 on all images for 200. MLPs have all "
    "eleven ratios of random labels, the others every second one.",
    f"Small size: 33 MLPs on {_SMALL.samples} images of MNIST, {_SMALL.epochs} epochs in batches "
    f"of {_SMALL.batch}.",
    "Ratios of random labels are given, and the same for all seeds; the paper draws one for every "
    "network. A label that is random is drawn from all classes alike.",
    "The paper does not print the MLP's hidden sizes, which are 512 here, nor how inputs are "
    "scaled, which are in [-1, 1] here.",
    "WRN-16-4 is trained in bfloat16 on a GPU, all others in float32 without TF32.",
    "The diagonal and the minimum over σ and σ' are exact, where the paper draws and descends; "
    "they are of at most 10,000 training images (5,000 for WRN-16-4).",
    "A network that gives every training image one label, or whose loss is not finite, is left out "
    "of the correlations, drawn as a cross and counted.",
)


def runs(size: Size) -> list[Settings]:
    """The cheap ones first."""
    if size == "small":
        return _SMALL.settings(seeds=3)
    few = RATIOS[::2]
    return [
        *Recipe("mlp-mnist", samples=60_000, epochs=50, measured=10_000).settings(_SEEDS),
        *Recipe("lenet-mnist", samples=60_000, epochs=50, measured=10_000).settings(_SEEDS, few),
        *Recipe("lenet-cifar10", samples=50_000, epochs=50, measured=10_000).settings(_SEEDS, few),
        *Recipe("wrn-cifar10", samples=5_000, epochs=40, measured=5_000).settings(_SEEDS, few),
    ]


def together(settings: Settings) -> Hashable:
    """Networks of one kind and seed are trained as one, but for those with BatchNorm."""
    apart = ["noise"] if settings["network"] == "wrn-cifar10" else []
    return tuple(
        settings[name] for name in ["network", "samples", "epochs", "batch", "seed", *apart]
    )


def work(settings: Sequence[Settings], device: torch.device) -> list[Outcome]:
    """Train networks that are alike, then test and measure one after the other."""
    recipes = [Recipe(**each) for each in settings]  # type: ignore[arg-type]
    clean = images(recipes[0].network.split("-")[1], recipes[0].samples, _TEST, device)
    parts = [with_noise(clean, each.noise, each.seed, how="uniform") for each in recipes]
    models = [started(_NETWORKS[each.network], each.seed, device) for each in recipes]
    with full_precision(device):
        _train(models, recipes, parts)
        return [
            _outcome(model, data, each.measured)
            for model, data, each in zip(models, parts, recipes, strict=True)
        ]


def _train(models: Sequence[nn.Module], recipes: Sequence[Recipe], parts: Sequence[Data]) -> None:
    """By Adam with its defaults, without augmentation or weight decay."""
    first, x = recipes[0], parts[0].train_x
    if any(True for _ in models[0].buffers()):  # BatchNorm's, which an ensemble would share
        for model, data, each in zip(models, parts, recipes, strict=True):
            fit(
                model,
                data,
                epochs=each.epochs,
                batch=each.batch,
                optimizer=lambda net: torch.optim.Adam(net.parameters()),
                seed=each.seed,
                fast=True,
            )
        return
    order = Order([each.seed for each in recipes], len(x), first.batch, x.device)
    labels = torch.stack([data.train_y for data in parts])
    adam_together(models, x, labels, order, first.epochs * order.epoch_steps)


def _outcome(model: nn.Module, data: Data, measured: int) -> Outcome:
    result = scores(model, data)
    if not isfinite(result["train_loss"]):
        return {**result, "normalized_sharpness": nan, "hessian_trace": nan, "clipped": nan}
    some = data.train_x[:measured], data.train_y[:measured]
    normalized = _measured(model, some, "normalized_cross_entropy", "normalized_sharpness")
    trace = _measured(model, some, "cross_entropy", "hessian_trace")
    return {
        **result,
        "normalized_sharpness": nan if normalized is None else normalized.value,
        "clipped": nan if normalized is None else normalized.details.get("clipped", nan),
        "hessian_trace": nan if trace is None else trace.value,
    }


def _measured(
    model: nn.Module, data: tuple[torch.Tensor, torch.Tensor], loss: str, name: str
) -> sf.Measurement | None:
    report = sf.measure(
        model,
        data,
        loss,
        measures=[name],
        on_error="skip",
        standing=False,
        progress=False,
    )
    return report.get(name)


def rows(runs: Sequence[Run], name: str, title: str, published: float) -> list[Row]:
    """Correlations of a sharpness with the gap; the paper's, of WRN-16-4, does not say which."""
    table = []
    for network, some in _by_network(runs).items():
        whole = [run for run in some if not run["collapsed"]]
        what = f"{_TITLES[network]}: {title} and gap"
        value = published if network == "wrn-cifar10" else None
        columns = column(whole, name), column(whole, "gap")
        table.append(correlation(*columns, "Pearson").row(f"{what}, Pearson", value))
        table.append(correlation(*columns, "Spearman").row(f"{what}, Spearman"))
        noisiest = max(column(some, "noise"))
        learned = [float(run["train_accuracy"]) for run in some if run["noise"] == noisiest]
        what = f"{_TITLES[network]}: training accuracy, noise {noisiest:g}"
        table.append(mean_row(what, learned))
    lost = sum(bool(run["collapsed"]) for run in runs)
    return [*table, Row("collapsed networks", lost, note=f"of {len(runs)}")]


def draw(runs: Sequence[Run], name: str, title: str) -> Figure:
    """The gap against a sharpness that is rescaled to [0, 1], one panel a network."""
    from matplotlib.figure import Figure

    groups = _by_network(runs)
    across, down = (2, 2) if len(groups) > 2 else (len(groups), 1)
    figure = Figure(figsize=(1 + 4 * across, 3.5 * down), layout="constrained")
    panels = figure.subplots(down, across, squeeze=False).flatten()
    for axes in panels[len(groups) :]:
        axes.remove()
    for axes, (network, some) in zip(panels, groups.items(), strict=False):
        for collapsed, marker in [(False, "o"), (True, "x")]:
            these = [run for run in some if bool(run["collapsed"]) == collapsed]
            points = axes.scatter(
                _rescaled(these, some, name),
                column(these, "gap"),
                c=column(these, "noise"),
                marker=marker,
                vmin=0,
                vmax=1,
                label="collapsed" if collapsed else None,
            )
            if collapsed and these:
                axes.legend(frameon=False)
        axes.set(title=_TITLES[network], xlabel=f"{title}, rescaled", ylabel="accuracy gap")
        axes.grid(alpha=0.3)
    figure.colorbar(points, ax=list(panels[: len(groups)]), label="ratio of random labels")
    return figure


def _rescaled(some: Sequence[Run], every: Sequence[Run], name: str) -> list[float]:
    """By the least and the largest of all networks that have not collapsed; others are cut off."""
    values = [float(run[name]) for run in every if not run["collapsed"]]
    values = [value for value in values if isfinite(value)] or [0.0]
    low, high = min(values), max(values)
    places = (np.array(column(some, name)) - low) / ((high - low) or 1)
    return np.clip(np.nan_to_num(places), 0, 1).tolist()  # type: ignore[no-any-return]


def _by_network(runs: Sequence[Run]) -> dict[str, list[Run]]:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(str(run["network"]), []).append(run)
    return groups
