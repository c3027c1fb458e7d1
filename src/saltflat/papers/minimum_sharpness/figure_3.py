"""Figure 3 of Minimum Sharpness: how far two approximations of the Hessian's diagonal are from it.

Both are of Normalized Flat Minima, by finite differences of the gradient along random directions:
normal ones in its first version, and signs times the size of each weight in the later one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, final

import numpy as np
import torch
from torch import Generator, Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import saltflat as sf
from saltflat.papers.columns import column, mean_row
from saltflat.papers.experiment import Experiment, Row, Size
from saltflat.papers.minimum_sharpness.small_networks import SAMPLES, TITLES, case, loss_gradient
from saltflat.papers.timed import by_turns
from saltflat.sweep import Outcome, Run, Settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SEEDS = 10
_DRAWS = 100
_PORTION = 100  # samples; larger portions of the CNN leave the caches
_RADIUS = 1e-5  # as in the public code
_ZERO = 1e-8  # likewise: what is added to denominators
Draw = Callable[[Tensor, Generator], tuple[Tensor, Tensor]]


def _normal(weights: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
    """A shift, and what ε ∘ (difference of gradients) is divided by; as arXiv's eq. 61."""
    noise = torch.randn(len(weights), generator=generator, dtype=torch.float64).to(weights)
    return _RADIUS * noise, 2 * _RADIUS / noise


def _relative(weights: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
    """Signs times the weights' sizes: what the later version's denominator belongs to."""
    sign = _signs(weights, generator)
    return _RADIUS * weights.abs() * sign, (2 * _RADIUS * weights.abs() + _ZERO) * sign


def _coded(weights: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
    """As the public code has it: that denominator with a shift that is not relative."""
    sign = _signs(weights, generator)
    return _RADIUS * sign, (2 * _RADIUS * weights.abs() + _ZERO) * sign


def _signs(weights: Tensor, generator: Generator) -> Tensor:
    return (2 * torch.randint(2, (len(weights),), generator=generator) - 1).to(weights)


_WAYS: dict[str, tuple[str, Draw, bool]] = {  # title, directions, whether clipped at zero
    "arxiv": ("arXiv version", _normal, False),
    "icml": ("ICML version", _relative, True),
    "coded": ("ICML version as coded", _coded, True),
}


@final
@dataclass(frozen=True)
class _Case:
    network: str
    n: int
    seed: int
    draws: int


def _runs(size: Size) -> list[Settings]:
    return [
        asdict(_Case(network, n, seed, _DRAWS))
        for network in TITLES
        for n in (SAMPLES if size == "full" else SAMPLES[:2])
        for seed in range(_SEEDS)
    ]


def work(settings: Sequence[Settings], device: torch.device) -> list[Outcome]:
    """Errors after 1, 2, 4, … draws, relative to the diagonal; and the exact one's price."""
    return [_approximated(_Case(**each), device) for each in settings]  # type: ignore[arg-type]


def checkpoints(draws: int) -> list[int]:
    """Powers of two, and the last draw."""
    return sorted({2**k for k in range(draws.bit_length())} | {draws})


def _approximated(setting: _Case, device: torch.device) -> Outcome:
    model, x, y = case(setting.network, setting.n, setting.seed, device)
    model, x = model.double(), x.double()
    shifted, weights = deepcopy(model), parameters_to_vector(model.parameters()).detach()
    portions = [*zip(x.split(_PORTION), y.split(_PORTION), strict=True)]

    def gradient(shift: Tensor) -> Tensor:
        vector_to_parameters(weights + shift, shifted.parameters())
        sums = [len(labels) * loss_gradient(shifted, some, labels) for some, labels in portions]
        return torch.stack(sums).sum(0) / len(x)

    at_rest = torch.zeros_like(weights)

    def diagonal() -> Mapping[str, Tensor]:
        return sf.diagonal(model, (x, y), progress=False)

    times = by_turns({"exact": diagonal}, lambda: gradient(at_rest), device, seconds=2.0)
    exact = torch.cat([each.flatten() for each in diagonal().values()]).to(weights)
    outcome: dict[str, object] = {"exact_price": median(times["exact"].units)}
    for name, (_, directions, clipped) in _WAYS.items():
        outcome[name] = _errors(gradient, weights, exact, directions, clipped, setting)
    return outcome


def _errors(
    gradient: Callable[[Tensor], Tensor],
    weights: Tensor,
    exact: Tensor,
    directions: Draw,
    clipped: bool,
    setting: _Case,
) -> list[float]:
    generator = Generator().manual_seed(setting.seed)
    total, errors = torch.zeros_like(weights), []
    for draw in range(1, setting.draws + 1):
        shift, denominator = directions(weights, generator)
        total += (gradient(shift) - gradient(-shift)) / denominator
        if draw in checkpoints(setting.draws):
            mean = (total / draw).clamp(min=0) if clipped else total / draw
            errors.append(float((mean - exact).norm() / exact.norm()))
    return errors


def rows(runs: Sequence[Run]) -> list[Row]:
    """The error after the last draw, and what the exact diagonal costs beside it."""
    table = []
    for network, n in dict.fromkeys((run["network"], run["n"]) for run in runs):
        some = [run for run in runs if (run["network"], run["n"]) == (network, n)]
        where, spent = f"{TITLES[network]}, n = {n}", f"{2 * some[0]['draws']} gradients"
        for name, (title, *_) in _WAYS.items():
            last = [run[name][-1] for run in some]
            table.append(mean_row(f"{where}: relative error, {title}", last, note=spent))
        what, note = f"{where}: exact diagonal, in gradients", "medians of up to 20 rounds"
        table.append(mean_row(what, column(some, "exact_price"), note=note))
    return table


def draw(runs: Sequence[Run]) -> Figure:
    """Means of errors against gradients, with bands from the least seed to the largest.

    The vertical lines are the exact diagonal's price, with such bands too.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    panels = figure.subplots(1, len(TITLES), sharey=True)
    for axes, (network, title) in zip(panels, TITLES.items(), strict=True):
        some = [run for run in runs if run["network"] == network]
        for n, line in zip(dict.fromkeys(run["n"] for run in some), ["-", "--", ":"], strict=False):
            these = [run for run in some if run["n"] == n]
            gradients = [2 * k for k in checkpoints(these[0]["draws"])]
            for name, colour in zip(_WAYS, ["C0", "C1", "C3"], strict=True):
                errors, label = [run[name] for run in these], f"{_WAYS[name][0]}, n = {n}"
                axes.plot(gradients, np.mean(errors, 0), line, color=colour, label=label)
                ends = np.min(errors, 0), np.max(errors, 0)
                axes.fill_between(gradients, *ends, color=colour, alpha=0.15)
            prices = column(these, "exact_price")
            axes.axvline(np.mean(prices), color="C2", ls=line, label=f"exact, n = {n}")
            axes.axvspan(min(prices), max(prices), color="C2", alpha=0.15)
        axes.set(title=title, xscale="log", yscale="log", xlabel="gradients of the loss")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("relative error of diag H, L2")
    lines = panels[0].get_legend_handles_labels()
    figure.legend(*lines, loc="outside right upper", frameon=False, fontsize=8)
    return figure


FIGURE_3 = Experiment(
    name="minimum-sharpness/figure-3",
    title="Error of two approximations of the Hessian's diagonal",
    paper="ibayashi2021minimum",
    changed=(
        "Errors are divided by the norm of the diagonal, and drawn against the number of gradients "
        "instead of seconds.",
        "All is in float64, so that rounding plays no part. Where a shift crosses the kink of a "
        "ReLU, the gradient jumps, which finite differences take for curvature.",
        "The paper does not print the later version's formula. The public code shifts every weight "
        "by one radius and divides by twice the radius times the weight's size, which do not "
        "belong together; here the shift is relative too, and the code's way is drawn beside it.",
        f"{_SEEDS} seeds, {_DRAWS} draws. A gradient is summed over portions of {_PORTION} "
        "samples, which is faster. Small size: n = 10 and 100.",
    ),
    runs=_runs,
    work=work,
    rows=rows,
    draw=draw,
    alone=True,
)
