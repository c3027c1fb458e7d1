"""Figures 3 to 6: the measures by layer, by neuron and for the network, of networks on MNIST.

The paper trains a network of four hidden layers with four batch sizes, leaves out those with more
than 0.07 "training error", and draws against the generalisation error: κ_τ of every hidden layer
(figure 3), the sums ρ_σ (figure 4) and the maxima ρ (figure 5) over its neurons, and the sums and
maxima over layers (figure 6). Its other errors are losses, so that this one is taken for a loss;
what comes out if it is the part of the training images that are wrong is in the table too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import nan
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import saltflat as sf
from saltflat.datasets import Data
from saltflat.measures import KappaTrace, Rho
from saltflat.papers.columns import column
from saltflat.papers.correlations import Kind, correlation
from saltflat.papers.experiment import Experiment, Row, Size
from saltflat.papers.random_labels import images, started
from saltflat.papers.reparameterization.minima import (
    alike,
    finite,
    generalisation,
    largest_change,
    reached,
    train,
)
from saltflat.session import full_precision
from saltflat.sweep import Outcome, Run, Settings
from saltflat.zoo import petzka_mlp

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_RATES = {1000: 0.02, 2000: 0.04, 4000: 0.08, 8000: 0.16}
_SMALL = {50: 0.02, 100: 0.04, 200: 0.08, 400: 0.16}
_SEEDS = 10
_MOST_ERROR = 0.07
_HIDDEN = (1, 2, 3, 4)
_STRONG = 0.7  # "strong (with ρ ≥ 0.7)", of figure 3
# Of a layer: figures 3, 4 and 5. Of the network: figure 6.
_BY_LAYER = {"kappa_trace": "κ_τ", "rho_sum": "ρ_σ", "rho_max": "ρ"}
_OF_NETWORK = {
    "kappa_trace_max": "κ_τ^max",
    "kappa_trace_sum": "κ_τ^Σ",
    "rho_max": "ρ^max",
    "rho_sum": "ρ^Σ",
}
_ALL = [f"{name}_{layer}" for name in _BY_LAYER for layer in _HIDDEN] + [*_OF_NETWORK]


def runs(size: Size) -> list[Settings]:
    """Four batch sizes with ten seeds, or three."""
    full = size == "full"
    return [
        {
            "samples": 60_000 if full else 2000,
            "tested": 10_000 if full else 4000,
            "measured": 10_000 if full else 1000,
            "batch": batch,
            "lr": rate,
            "momentum": 0.0,
            "epochs": 300 if full else 150,
            "seed": seed,
        }
        for batch, rate in (_RATES if full else _SMALL).items()
        for seed in range(_SEEDS if full else 3)
    ]


def work(settings: Sequence[Settings], device: torch.device) -> list[Outcome]:
    """Train networks of one batch size, test and measure; rescale their neurons and measure."""
    first: Any = settings[0]
    data = images("mnist", first["samples"], first["tested"], device)
    models = [started(_network, int(each["seed"]), device) for each in settings]  # type: ignore[arg-type]
    x, y = data.train_x[: first["measured"]].double(), data.train_y[: first["measured"]]
    neurons = sf.symmetries(_network().to(device).double(), x[:8])
    with full_precision(device):
        train(models, settings, data)
        return [
            _outcome(model, data, x, y, neurons.uniform(1000 * first["batch"] + int(each["seed"])))  # type: ignore[arg-type]
            for model, each in zip(models, settings, strict=True)
        ]


def _outcome(
    model: nn.Module,
    data: Data,
    x: Tensor,
    y: Tensor,
    rescaling: Callable[[nn.Module], nn.Module],
) -> Outcome:
    """As it is and after the rescaling; NaN for a network that diverged."""
    outcome = generalisation(model, data)
    if not finite(outcome):
        return {**outcome, **dict.fromkeys([*_ALL, *(f"{name}_moved" for name in _ALL)], nan)}
    model = model.double()
    moved = {f"{name}_moved": value for name, value in _measured(rescaling(model), x, y).items()}
    return {**outcome, **_measured(model, x, y), **moved}


def _network() -> nn.Sequential:
    """From Xavier's normal distribution, and no biases."""
    model = petzka_mlp()
    for parameter in model.parameters():
        nn.init.xavier_normal_(parameter) if parameter.dim() > 1 else nn.init.zeros_(parameter)
    return model


def _measured(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, float]:
    """In float64, by layer for the hidden ones, and over all five layers for the network."""
    measures = [KappaTrace(neurons=False), Rho()]
    report = sf.measure(model, (x, y), measures=measures, standing=False, progress=False)
    kappa, rho = report["kappa_trace"], report["rho"]
    by_layer = {
        "kappa_trace": kappa.by_layer,
        "rho_sum": rho.by_layer,
        "rho_max": rho.by_layer_max,
    }
    return {
        f"{name}_{layer}": list(values.values())[layer - 1]
        for name, values in by_layer.items()
        for layer in _HIDDEN
    } | {
        "kappa_trace_max": kappa.max,
        "kappa_trace_sum": kappa.value,
        "rho_max": rho.max,
        "rho_sum": rho.value,
    }


def rows(runs: Sequence[Run]) -> list[Row]:
    """Correlations of the networks that count, and how far rescaled neurons move the measures."""
    some = _counted(runs)
    table = []
    for name, symbol in _BY_LAYER.items():
        for layer in _HIDDEN:
            published = _STRONG if name == "kappa_trace" else None
            row = _with_gap(some, f"{name}_{layer}", f"{symbol} of layer {layer}", "Pearson")
            note = f"{row.note}; published: at least" if published else row.note
            table.append(Row(row.what, row.ours, row.error, published, note))
    kinds: tuple[Kind, ...] = ("Pearson", "Spearman")
    for name, symbol in _OF_NETWORK.items():
        table += [_with_gap(some, name, symbol, kind) for kind in kinds]
    for name, symbol in _OF_NETWORK.items():
        change = largest_change(runs, name, f"{name}_moved")
        table.append(Row(f"largest relative change of {symbol}, neurons rescaled", change))
    table.append(_left_out("training loss", runs, some))
    return table + _by_images(runs) + reached(runs)


def _by_images(runs: Sequence[Run]) -> list[Row]:
    """κ_τ by layer, and the network's measures, where the error is of the training images."""
    some = [run for run in runs if 1 - float(run["train_accuracy"]) <= _MOST_ERROR]
    layers = {f"kappa_trace_{layer}": f"κ_τ of layer {layer}" for layer in _HIDDEN}
    where = f"at most {_MOST_ERROR} of the training images wrong"
    table = []
    for name, symbol in (layers | _OF_NETWORK).items():
        row = _with_gap(some, name, symbol, "Pearson")
        published = _STRONG if name in layers else None
        note = f"{row.note}; published: at least" if published else row.note
        table.append(Row(f"{row.what}, {where}", row.ours, row.error, published, note))
    return [*table, _left_out("wrong training images", runs, some)]


def _left_out(what: str, runs: Sequence[Run], some: Sequence[Run]) -> Row:
    note = f"of {len(runs)} networks"
    return Row(f"{what} above {_MOST_ERROR}, left out", len(runs) - len(some), note=note)


def _counted(runs: Sequence[Run]) -> list[Run]:
    """By the loss; one that is not a number is not below the limit."""
    return [run for run in runs if float(run["train_loss"]) <= _MOST_ERROR]


def _with_gap(runs: Sequence[Run], name: str, symbol: str, kind: Kind) -> Row:
    found = correlation(column(runs, name), column(runs, "gap"), kind)
    return found.row(f"{kind}, {symbol} and gap")


def draw(runs: Sequence[Run]) -> Figure:
    """A row for each of the paper's figures 3 to 6."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    some = _counted(runs)
    batches = sorted({int(run["batch"]) for run in some})
    figure = Figure(figsize=(12, 11), layout="constrained")
    axes = figure.subplots(4, 4, sharey=True)
    panels = [
        [(f"{name}_{layer}", f"{symbol}, layer {layer}") for layer in _HIDDEN]
        for name, symbol in _BY_LAYER.items()
    ]
    for line, row in zip(axes, [*panels, [*_OF_NETWORK.items()]], strict=True):
        line[0].set_ylabel("test loss − training loss (nats)")
        for place, (name, symbol) in zip(line, row, strict=True):
            for index, batch in enumerate(batches):
                these = [run for run in some if run["batch"] == batch]
                colour = colormaps["viridis"](0.9 * index / max(1, len(batches) - 1))
                x, y = column(these, name), column(these, "gap")
                place.scatter(x, y, s=16, color=colour, label=str(batch))
            place.set_xlabel(symbol)
            place.locator_params(axis="x", nbins=4)
            place.grid(alpha=0.3)
    if some:
        axes[0][0].legend(title="batch size", fontsize="small")
    return figure


FIGURE_3 = Experiment(
    name="reparameterization/figure-3",
    title="Measures by layer, by neuron and of the network, MNIST (figures 3 to 6)",
    paper="petzka2019reparameterization",
    changed=(
        "Learning rates are 0.02, 0.04, 0.08 and 0.16. The paper prints 0.02 to 1.6, which does "
        "not keep the ratio to the batch size, as its text does; at 1.6 networks diverge or "
        "collapse at once.",
        "Training takes 300 epochs of SGD without momentum, from biases of 0; the paper says until "
        "convergence. Ten seeds a batch size; the paper does not give their number.",
        "The paper leaves out networks with more than 0.07 training error. This is taken for the "
        "loss, as its other errors are; correlations are also given for where it is the part of "
        "the training images that are wrong. The figure shows the former.",
        "Pixels are scaled to [-1, 1]. Images left over at an epoch's end, less than a batch, are "
        "dropped.",
        "The measures are of 10,000 training images, in float64.",
        "Rescaled neurons are not in the paper's figures: they show what its Table 1 says of ρ.",
        "The small size has 2000 training images, batch sizes 50 to 400 with the same learning "
        "rates, three seeds, 150 epochs, and measures on 1000 images.",
    ),
    runs=runs,
    work=work,
    rows=rows,
    draw=draw,
    together=alike,
    most=_SEEDS,
)
