"""Figure 5: the time of the trace of a layer's Hessian against the size of the layer.

The paper compares functorch's Hessian, whose diagonal is then summed, with Hutchinson's estimate.
The third curve is `sf.trace`, which is exact here: the network is proved piecewise linear, on every
call anew, which is most of its time for layers as small as these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.func import hessian as functorch_hessian

import saltflat as sf
from saltflat.papers.columns import column, largest
from saltflat.papers.experiment import Experiment, Row, Size
from saltflat.papers.relative_flatness.figure_4 import Layer, draw_times, ratios
from saltflat.papers.timed import Call, by_turns, median_row
from saltflat.sweep import Outcome, Run, Settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METHODS = {
    "functorch": "functorch's Hessian",
    "hutchinson": "Hutchinson's estimate",
    "ours": "exact without the Hessian (ours)",
}


def runs(size: Size) -> list[Settings]:
    sizes = (8, 16, 32, 64, 96, 512, 2048) if size == "full" else (4, 8, 16, 24, 64)
    most = 96 if size == "full" else 24  # beyond it the Hessian is not written out
    common: Settings = {"batch": 64, "probes": 100, "rounds": 20, "seconds": 5.0}
    return [{"size": each, "dense": each <= most, **common} for each in sizes]


def work(settings: Sequence[Settings], device: torch.device) -> list[Outcome]:
    return [_timed(each, device) for each in settings]


def _timed(settings: Mapping[str, Any], device: torch.device) -> Outcome:
    layer = Layer.of_size(settings["size"], settings["batch"], device)
    weight, probes = layer.weight, settings["probes"]
    signs = torch.Generator(device).manual_seed(0)

    def exact() -> sf.Trace:
        return sf.trace(layer.model, (layer.x, layer.y), parameters=[layer.name], progress=False)

    truth, estimates = exact(), _estimates(layer, weight, probes, signs)
    calls: dict[str, Call] = {
        "hutchinson": lambda: _estimates(layer, weight, probes, signs),
        "ours": exact,
    }
    if settings["dense"]:
        calls["functorch"] = lambda: _dense(layer, weight)
    often = {"rounds": settings["rounds"], "seconds": settings["seconds"]}
    times = by_turns(calls, layer.gradient, device, **often)
    dense = float(_dense(layer, weight)) if settings["dense"] else None
    return {
        **{name: times[name].units if name in times else None for name in METHODS},
        "gradient_seconds": median(times["ours"].unit),
        "trace": truth.total,
        "exact": truth.exact,
        "ours_error": None if dense is None else abs(truth.total - dense) / abs(dense),
        "hutchinson_error": float(estimates.std()) / probes**0.5 / truth.total,
    }


def _dense(layer: Layer, weight: Tensor) -> Tensor:
    return torch.einsum("stst->", functorch_hessian(layer.loss)(weight)).detach()


def _estimates(layer: Layer, weight: Tensor, probes: int, signs: torch.Generator) -> Tensor:
    """vᵀHv for so many vectors v of random signs, one product with the Hessian each."""
    weight = weight.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(layer.loss(weight), weight, create_graph=True)
    found = []
    for _ in range(probes):
        v = 2 * torch.randint(2, weight.shape, generator=signs, device=weight.device) - 1
        v = v.to(weight)
        (product,) = torch.autograd.grad(gradient, weight, v, retain_graph=True)
        found.append((product.detach() * v).sum())
    return torch.stack(found)


def rows(runs: Sequence[Run]) -> list[Row]:
    """Times in gradients; what the estimate leaves open; and the ratios to the exact trace."""
    table = []
    for run in runs:
        what = f"{run['size']}×{run['size']} weights"
        for method, title in METHODS.items():
            if run[method] is not None:
                table.append(median_row(f"{what}, {title}", run[method], _note(run, method)))
    dense = [run for run in runs if run["functorch"] is not None]
    last = max(dense, key=lambda run: run["size"])
    what = f"functorch / exact without the Hessian, {last['size']}×{last['size']} weights"
    table.append(median_row(what, ratios(last, "functorch", "ours")))
    ratio = fmean(median(ratios(run, "hutchinson", "ours")) for run in runs)
    table.append(Row("Hutchinson / exact without the Hessian, mean over sizes", ratio))
    worst = largest(column(dense, "ours_error"))
    table.append(Row("exact trace, largest relative difference to functorch's", worst))
    return table


def _note(run: Run, method: str) -> str:
    if method != "hutchinson":
        return "gradients"
    error = f"standard error {100 * run['hutchinson_error']:.1f} %"
    return f"gradients, {run['probes']} probes, {error}"


def draw(runs: Sequence[Run]) -> Figure:
    return draw_times(runs, METHODS, "trace of one layer's Hessian")


FIGURE_5 = Experiment(
    name="relative-flatness/figure-5",
    title="Figure 5: the cost of the trace of one layer's Hessian",
    paper="adilova2023fam",
    changed=(
        "The paper names neither its network, nor its sizes, nor how many probes it takes: here "
        "20-m-m-10 with ReLU, a batch of 64 and 100 probes.",
        "The paper's times are of a GPU, an NVIDIA RTX A6000, on which a Hessian's rows are "
        "computed at once; the machine here is named below.",
        "Times are in gradients of the same network: medians of up to 20 rounds, with quartiles. "
        "The exact trace without the Hessian is added.",
        "Beyond 96 × 96 weights (24 × 24 in the small size) the Hessian is not written out.",
    ),
    runs=runs,
    work=work,
    rows=rows,
    draw=draw,
    minutes={"small": 0.5, "full": 1},
    alone=True,
)
