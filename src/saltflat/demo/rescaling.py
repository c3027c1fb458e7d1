"""The rescaling attack: the same function with other weights, and what measures make of it."""

from __future__ import annotations

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import saltflat as sf

SPREAD = 128.0
MEASURES = (
    "hessian_trace",
    "hessian_max_eigenvalue",
    "sam_sharpness",
    "minimum_sharpness",
    "neuronwise_minimum_sharpness",
    "normalized_sharpness",
    "rho",
    "fisher_rao_norm",
)


def table(before: sf.Report, after: sf.Report) -> Table:
    """Both side by side; the last column is by which factor a measure changed."""
    view = Table(title="Measures of the network and of its twin", title_justify="left")
    for column in ("measure", "network", "twin", "factor"):
        view.add_column(column, justify="left" if column == "measure" else "right")
    for name, m in before.items():
        factor = after[name].value / m.value
        still = abs(factor - 1) < 1e-6
        words = "1" if still else f"{factor:.3g}"
        view.add_row(name, f"{m.value:.5g}", f"{after[name].value:.5g}", words)
    return view


def run(console: Console, model: nn.Module, data: tuple[Tensor, Tensor]) -> sf.Audit:
    x, _ = data
    group = sf.symmetries(model, x[:8])
    console.print(
        f"{len(group)} independent rescalings keep the function of this network. Drawn at random, "
        f"with factors from 1/{SPREAD:g} to {SPREAD:g}:\n"
    )
    twin = group.random(seed=0, spread=SPREAD)(model)
    with torch.no_grad():
        first, second = model(x), twin(x)
    apart = float((first - second).abs().max() / first.abs().max())
    before, after = (
        sf.measure(each, data, measures=MEASURES, progress=False) for each in (model, twin)
    )
    console.print(table(before, after))
    console.print(
        f"\nOutputs differ by at most {apart:.0e} of the largest: it is the same function, and "
        "its test accuracy is the same. What moved measures the weights' scales, too. The audit "
        "tries rescalings of every kind, and the worst that it can find:\n"
    )
    audit = sf.audit(model, data, measures=MEASURES, progress=False)
    console.print(audit)
    console.print()
    return audit
