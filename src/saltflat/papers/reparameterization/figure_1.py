"""Figures 1 and 2: LeNet-5 on CIFAR-10, as trained and after a random reparameterisation.

The paper trains LeNet-5 from four kinds of random weights with four batch sizes, nine times each,
and draws κ^5 and κ_τ^5 against the generalisation error (figure 1). Then it multiplies the layers
of all networks by random factors that keep the function, and draws them beside λ_max and the trace
of the layer's Hessian, which have no norm in them (figure 2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import nan
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import saltflat as sf
from saltflat.datasets import Data
from saltflat.measures import Kappa, KappaTrace
from saltflat.papers.columns import column, label_decades
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
from saltflat.zoo import lenet5

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Section 3: the batch sizes, and the learning rate of each.
_RATES = {4: 0.001, 32: 0.008, 64: 0.02, 512: 0.1}
_EPOCHS = {4: 12, 32: 20, 64: 20, 512: 30}
_MOMENTUM = 0.9
_SEEDS = 9
_PUBLISHED = 0.91  # of κ_τ^5
_STARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "Xavier normal": nn.init.xavier_normal_,
    "Kaiming uniform": nn.init.kaiming_uniform_,
    "uniform": lambda weight: nn.init.uniform_(weight, -0.1, 0.1),
    "normal": lambda weight: nn.init.normal_(weight, 0.0, 0.1),
}
# The fifth layer, which reads the last hidden one, and the one before.
_FIFTH, _FOURTH = "11", "9"
_SYMBOLS = {
    "kappa_trace": "κ_τ⁵ = ‖w₅‖² Tr H₅",
    "kappa": "κ⁵ = ‖w₅‖² λ_max(H₅)",
    "trace": "Tr H₅",
    "eigenvalue": "λ_max(H₅)",
}


def runs(size: Size) -> list[Settings]:
    """Four starts, four batch sizes and nine seeds; the small size has two and three."""
    full = size == "full"
    return [
        {
            "samples": 50_000 if full else 256,
            "tested": 10_000 if full else 1000,
            "measured": 2048 if full else 128,
            "batch": batch,
            "lr": rate if full else 4 * rate,
            "momentum": _MOMENTUM,
            "epochs": _EPOCHS[batch] if full else 20,
            "start": start,
            "seed": seed,
        }
        for batch, rate in _RATES.items()
        for start in _STARTS
        for seed in range(_SEEDS if full else 3)
        if full or batch <= 32
    ]


def work(settings: Sequence[Settings], device: torch.device) -> list[Outcome]:
    """Train networks that differ in their start, test them, measure, reparameterise, measure."""
    first: Any = settings[0]
    data = images("cifar10", first["samples"], first["tested"], device)
    models = [_started(str(each["start"]), int(each["seed"]), device) for each in settings]  # type: ignore[arg-type]
    x, y = data.train_x[: first["measured"]].double(), data.train_y[: first["measured"]]
    layers = sf.symmetries(_started("uniform", 0, device).double(), x[:8]).only("layer")
    with full_precision(device):
        train(models, settings, data)
        return [
            _outcome(model, data, x, y, layers.uniform(_factors(each), low=5.0, high=25.0))
            for model, each in zip(models, settings, strict=True)
        ]


def _factors(settings: Settings) -> int:
    """The seed of a network's factors, another one for each."""
    place = [*_RATES].index(int(settings["batch"])), [*_STARTS].index(str(settings["start"]))  # type: ignore[arg-type]
    return 1000 * (4 * place[0] + place[1]) + int(settings["seed"])  # type: ignore[arg-type]


def _started(start: str, seed: int, device: torch.device) -> nn.Module:
    """Weights as the start says, and no biases."""

    def make() -> nn.Sequential:
        model = lenet5(channels=3)
        for parameter in model.parameters():
            _STARTS[start](parameter) if parameter.dim() > 1 else nn.init.zeros_(parameter)
        return model

    return started(make, seed, device)


def _outcome(
    model: nn.Module,
    data: Data,
    x: Tensor,
    y: Tensor,
    rescaling: Callable[[nn.Module], nn.Module],
) -> Outcome:
    """Measured in float64, as it is and after the rescaling; NaN for a network that diverged."""
    outcome = generalisation(model, data)
    if not finite(outcome):
        names = [*_SYMBOLS, "kappa_trace_fourth"]
        return {**outcome, **dict.fromkeys([*names, *(f"{n}_moved" for n in names)], nan)}
    model = model.double()
    moved = {f"{name}_moved": value for name, value in _measured(rescaling(model), x, y).items()}
    return {**outcome, **_measured(model, x, y), **moved}


def _measured(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, float]:
    report = sf.measure(
        model,
        (x, y),
        measures=[Kappa(), KappaTrace(neurons=False)],
        parameters=[f"{_FOURTH}.weight", f"{_FIFTH}.weight"],
        standing=False,
        progress=False,
    )
    norm = float(model.get_parameter(f"{_FIFTH}.weight").detach().square().sum())
    kappa, trace = report["kappa"].by_layer, report["kappa_trace"].by_layer
    return {
        "kappa": kappa[_FIFTH],
        "kappa_trace": trace[_FIFTH],
        "eigenvalue": kappa[_FIFTH] / norm,
        "trace": trace[_FIFTH] / norm,
        "kappa_trace_fourth": trace[_FOURTH],
    }


def rows(runs: Sequence[Run]) -> list[Row]:
    """Correlations with the gap as trained and reparameterised, and how far the measures moved."""
    whole = [run for run in runs if not run["collapsed"]]
    kinds: tuple[Kind, ...] = ("Pearson", "Spearman")
    table = []
    for name, symbol in _SYMBOLS.items():
        published = _PUBLISHED if name == "kappa_trace" else None
        table += [_with_gap(whole, name, symbol, kind, published) for kind in kinds]
        moved = f"{symbol}, reparameterised"
        table += [_with_gap(whole, f"{name}_moved", moved, kind, published) for kind in kinds]
    fourth = "κ_τ of the fourth layer"
    table += [_with_gap(whole, "kappa_trace_fourth", fourth, kind, None) for kind in kinds]
    if len(whole) < len(runs):
        words = f"{_SYMBOLS['kappa_trace']}, collapsed networks too"
        table += [_with_gap(runs, "kappa_trace", words, kind, None) for kind in kinds]
    for name, symbol in _SYMBOLS.items():
        change = largest_change(runs, name, f"{name}_moved")
        table.append(Row(f"largest relative change of {symbol}", change))
    table.append(Row("collapsed networks", len(runs) - len(whole), note=f"of {len(runs)}"))
    return table + reached(runs)


def _with_gap(
    runs: Sequence[Run], name: str, symbol: str, kind: Kind, published: float | None
) -> Row:
    found = correlation(column(runs, name), column(runs, "gap"), kind)
    return found.row(f"{kind}, {symbol} and gap", published)


def draw(runs: Sequence[Run]) -> Figure:
    """Figure 1 above, figure 2 below it, where every network is there twice.

    Those that have collapsed are at the left edge: their measures are 0.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7.5), layout="constrained")
    axes = figure.subplots(2, 2, sharey=True)
    for column_, (ours, bare) in enumerate([("kappa_trace", "trace"), ("kappa", "eigenvalue")]):
        above, below = axes[0][column_], axes[1][column_]
        _scatter(above, runs, ours, "o")
        above.set_xlabel(_SYMBOLS[ours])
        _scatter(below, runs, f"{ours}_moved", "o")
        _scatter(below, runs, f"{bare}_moved", "x")
        below.set_xlabel(f"{_SYMBOLS[ours]} (o), {_SYMBOLS[bare]} (×)")
        above.set_title("as trained")
        below.set_title("reparameterised")
        for panel, name in ((above, ours), (below, f"{ours}_moved")):
            _collapsed(panel, runs, name)
            label_decades(panel.xaxis)
    for row in axes:
        row[0].set_ylabel("test loss − training loss (nats)")
    axes[0][0].legend(title="batch size", fontsize="small")
    return figure


def _scatter(axes: Axes, runs: Sequence[Run], name: str, marker: str) -> None:
    """A colour for each batch size, the brightest being the largest, as in the paper."""
    from matplotlib import colormaps

    batches = sorted({int(run["batch"]) for run in runs})
    for index, batch in enumerate(batches):
        some = [run for run in runs if run["batch"] == batch and not run["collapsed"]]
        colour = colormaps["viridis"](0.9 * index / max(1, len(batches) - 1))
        x, y = column(some, name), column(some, "gap")
        axes.scatter(x, y, s=18, marker=marker, color=colour, alpha=0.8, label=str(batch))
    axes.set_xscale("log")
    axes.grid(alpha=0.3)


def _collapsed(axes: Axes, runs: Sequence[Run], name: str) -> None:
    """Left of all others, for a logarithmic axis has no place for 0."""
    lost = [run for run in runs if run["collapsed"]]
    if lost:
        edge = min((value for value in column(runs, name) if value > 0), default=1.0) / 1.5
        gaps = column(lost, "gap")
        axes.scatter(
            [edge] * len(lost), gaps, s=30, marker="D", c="none", ec="k", label="collapsed"
        )


FIGURE_1 = Experiment(
    name="reparameterization/figure-1",
    title="κ and κ_τ against the generalisation error, LeNet-5 on CIFAR-10 (figures 1 and 2)",
    paper="petzka2019reparameterization",
    changed=(
        "The paper trains by standard SGD until convergence, without saying for how long: here it "
        "is momentum 0.9 and 12, 20, 20 and 30 epochs for batch sizes 4, 32, 64 and 512; the loss "
        "that was reached is in the table.",
        "The normal start has standard deviation 0.1. With the variance 0.1 that is printed the "
        "loss starts above 200, and at the larger learning rates networks collapse or diverge at "
        "once.",
        "Biases start at 0 and pixels are scaled to [-1, 1]; the paper gives neither.",
        "The gap is the difference of the mean losses, which is the paper's, of sums, over 50,000.",
        "The measures are of 2048 training images, in float64.",
        "The paper does not say which correlation coefficient its 0.91 is: both are given.",
        "The small size has 256 training images, the batch sizes 4 and 32 at four times the "
        "learning rate, three seeds, 20 epochs, and measures on 128 images.",
    ),
    runs=runs,
    work=work,
    rows=rows,
    draw=draw,
    together=alike,
    most=len(_STARTS) * _SEEDS,
    minutes={"full": 17},
)
