"""Figure 4: the time of a layer's full Hessian against the size of the layer, and of κ without it.

The paper times three ways to write out the Hessian of one layer: `torch.autograd.functional` row by
row, the same vectorized, and functorch. It needs the Hessian for κ = Σ ⟨w_s, w_s'⟩ Tr H_ss'; the
fourth curve is FAM's penalty here, which is that number without a Hessian. Times are in gradients
(a forward and a backward pass of the same network on the same batch) that are timed beside them,
for times alone say nothing about another machine: medians of rounds, with their quartiles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.functional import hessian
from torch.func import functional_call
from torch.func import hessian as functorch_hessian

import saltflat as sf
from saltflat import zoo
from saltflat.papers.columns import column, label_decades, largest
from saltflat.papers.experiment import Experiment, Row, Size
from saltflat.papers.timed import by_turns, median_row, quartiles
from saltflat.sweep import Outcome, Run, Settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LAYER = "3"  # of the network below: the one in the middle, of size × size weights
_INPUTS, _CLASSES = 20, 10
METHODS = {
    "rows": "autograd, row by row",
    "vectorized": "autograd, vectorized",
    "functorch": "functorch",
    "fam": "κ without the Hessian (ours)",
}


@final
@dataclass(frozen=True)
class Layer:
    """A layer of a network on a batch of noise, and the loss as a function of its weight."""

    model: nn.Sequential
    x: Tensor
    y: Tensor

    @classmethod
    def of_size(cls, size: int, batch: int, device: torch.device) -> Layer:
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            model = zoo.mlp([_INPUTS, size, size, _CLASSES])
            x, y = torch.randn(batch, _INPUTS), torch.randint(_CLASSES, (batch,))
        return cls(model.to(device), x.to(device), y.to(device))

    @property
    def name(self) -> str:
        return f"{LAYER}.weight"

    @property
    def weight(self) -> Tensor:
        return self.model.get_parameter(self.name).detach()

    def loss(self, weight: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(self.model, {self.name: weight}, (self.x,)), self.y)

    def gradient(self) -> None:
        self.model.zero_grad()
        F.cross_entropy(self.model(self.x), self.y).backward()


def runs(size: Size) -> list[Settings]:
    """Every way is timed in 20 rounds, or for as many seconds, but once at least."""
    sizes, seconds = ((8, 16, 32, 64, 96), 20.0) if size == "full" else ((4, 8, 16, 24), 5.0)
    return [{"size": each, "batch": 64, "rounds": 20, "seconds": seconds} for each in sizes]


def work(settings: Sequence[Settings], device: torch.device) -> list[Outcome]:
    return [_timed(each, device) for each in settings]


def _timed(settings: Mapping[str, Any], device: torch.device) -> Outcome:
    layer = Layer.of_size(settings["size"], settings["batch"], device)
    weight = layer.weight
    with sf.FAM(layer.model, LAYER, strength=1.0) as fam:

        def penalty() -> Tensor:
            layer.model(layer.x)
            return fam(layer.y)

        value = penalty().item()
        calls = {
            "rows": lambda: hessian(layer.loss, weight),
            "vectorized": lambda: hessian(layer.loss, weight, vectorize=True),
            "functorch": lambda: functorch_hessian(layer.loss)(weight),
            "fam": penalty,
        }
        often = {"rounds": settings["rounds"], "seconds": settings["seconds"]}
        times = by_turns(calls, layer.gradient, device, **often)
    dense = relative_flatness(weight, functorch_hessian(layer.loss)(weight)).item()
    return {
        **{name: each.units for name, each in times.items()},
        "gradient_seconds": median(times["fam"].unit),
        "relative_flatness": dense,
        "fam_error": abs(value - dense) / abs(dense),
    }


def relative_flatness(weight: Tensor, hessian: Tensor) -> Tensor:
    """κ(W) = Σ_{s,s'} ⟨w_s, w_s'⟩ Tr H_{s,s'}, as section 1 has it."""
    traces = torch.einsum("sktk->st", hessian)
    return (weight @ weight.T * traces).sum()


def rows(runs: Sequence[Run]) -> list[Row]:
    """Times in gradients, and the two ratios that appendix A.1 tells of."""
    table = [
        median_row(f"{_shape(run)}, {title}", run[method], "gradients")
        for run in runs
        for method, title in METHODS.items()
    ]
    ratio = largest([median(ratios(run, "rows", "vectorized")) for run in runs])
    said = "there up to three orders of magnitude"
    table.append(Row("row by row / vectorized, largest ratio", ratio, note=said))
    last = max(runs, key=lambda run: run["size"])
    said = "there an order of magnitude for larger Hessians"
    what = f"vectorized / functorch, {_shape(last)}"
    table.append(median_row(what, ratios(last, "vectorized", "functorch"), said))
    what = f"functorch / κ without the Hessian, {_shape(last)}"
    table.append(median_row(what, ratios(last, "functorch", "fam")))
    worst = largest(column(runs, "fam_error"))
    table.append(Row("κ without the Hessian, largest relative difference", worst))
    return table


def ratios(run: Run, slow: str, fast: str) -> list[float]:
    """Of the rounds in which both were timed, which are the first ones."""
    return [one / other for one, other in zip(run[slow], run[fast], strict=False)]


def _shape(run: Run) -> str:
    return f"{run['size']}×{run['size']} weights"


def draw(runs: Sequence[Run]) -> Figure:
    return draw_times(runs, METHODS, "full Hessian of one layer, and κ without it")


def draw_times(runs: Sequence[Run], methods: Mapping[str, str], title: str) -> Figure:
    """Medians and quartiles in gradients against the number of weights, on logarithmic axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5, 4), layout="constrained")
    axes = figure.subplots()
    ordered = sorted(runs, key=lambda run: run["size"])
    for place, (method, label) in enumerate(methods.items()):
        known = [run for run in ordered if run[method] is not None]
        low, middle, high = np.transpose([quartiles(run[method]) for run in known])
        weights, spread = [run["size"] ** 2 for run in known], [middle - low, high - middle]
        axes.errorbar(weights, middle, spread, fmt="osD^"[place] + "-", capsize=3, label=label)
    axes.set(xscale="log", yscale="log")
    sizes = [run["size"] for run in ordered]
    names = [f"{size}×{size}" for size in sizes]
    axes.set_xticks([size**2 for size in sizes], names, rotation=30, ha="right")
    axes.minorticks_off()
    label_decades(axes.yaxis)
    axes.set_xlabel("weights of the layer")
    axes.set_ylabel("time in gradients (median, quartiles)")
    axes.set_title(f"{title} ({ordered[0].machine or 'unknown machine'})", fontsize=10)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    return figure


FIGURE_4 = Experiment(
    name="relative-flatness/figure-4",
    title="Figure 4: the cost of the Hessian of one layer",
    paper="adilova2023fam",
    changed=(
        "The paper names neither its network nor its sizes: here 20-m-m-10 with ReLU, a batch of "
        "64 and the Hessian of the m × m weights in the middle.",
        "The paper's times are of a GPU, an NVIDIA RTX A6000, on which a Hessian's rows are "
        "computed at once; the machine here is named below.",
        "Times are in gradients of the same network: medians of up to 20 rounds, with quartiles. "
        "FAM's penalty is added, which needs no Hessian.",
        "functorch is what PyTorch has of it now, `torch.func.hessian`.",
    ),
    runs=runs,
    work=work,
    rows=rows,
    draw=draw,
    minutes={"small": 0.5, "full": 1.5},
    alone=True,
)
