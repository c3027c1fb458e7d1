"""Figure 1 of Minimum Sharpness: the trace of the Hessian by three ways, its time and exactness.

The paper compares its formula with a loop of autograd. Here the formula is saltflat's `trace`, and
BackPACK's diagonal of the Gauss–Newton matrix stands beside it, which is the Hessian's here.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from math import nan
from time import perf_counter
from typing import TYPE_CHECKING, final

import numpy as np
import torch
from torch import Tensor, nn

import saltflat as sf
from saltflat.papers.columns import column, mean_row
from saltflat.papers.experiment import Experiment, Row, Size
from saltflat.papers.minimum_sharpness.small_networks import (
    SAMPLES,
    TITLES,
    case,
    looped_diagonal,
)
from saltflat.sweep import Outcome, Run, Settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Seconds for n = 10, 100 and 1000, on the authors' machine.
_BASELINE = {"fcnn": (11.11, 11.05, 12.23), "cnn": (10.19, 10.73, 21.22)}
_PROPOSAL = {"fcnn": (0.018, 0.019, 0.021), "cnn": (0.026, 0.036, 0.334)}
_REPEATS = 3
_CHECKED = 30  # entries that are compared in float64


@final
@dataclass(frozen=True)
class _Case:
    network: str
    n: int
    seed: int
    entries: int  # of the diagonal that the loop is timed on; 0 for all


def _runs(size: Size) -> list[Settings]:
    """At full size the loop goes over all entries."""
    seeds, entries = (3, 0) if size == "full" else (3, _CHECKED)
    return [
        asdict(_Case(network, n, seed, entries))
        for network in TITLES
        for n in SAMPLES
        for seed in range(seeds)
    ]


def work(settings: Sequence[Settings], device: torch.device) -> list[Outcome]:
    """Time the three ways in float32, and compare them in float64."""
    return [_compared(_Case(**each), device) for each in settings]  # type: ignore[arg-type]


def _compared(setting: _Case, device: torch.device) -> Outcome:
    model, x, y = case(setting.network, setting.n, setting.seed, device)
    count = sum(p.numel() for p in model.parameters())
    drawn = torch.randperm(count, generator=torch.Generator().manual_seed(setting.seed)).tolist()
    timed = drawn[: setting.entries or count]
    looped = _seconds(lambda: looped_diagonal(model, x, y, timed), repeats=1)
    outcome = {
        "loop_seconds": looped * count / len(timed),
        "saltflat_seconds": _seconds(lambda: sf.trace(model, (x, y), progress=False).total),
        "backpack_seconds": nan,
        "trace": sf.trace(model, (x, y), progress=False).total,
    }
    if find_spec("backpack") is not None:
        outcome["backpack_seconds"] = _seconds(lambda: _backpack(model, x, y))
    return outcome | _errors(model.double(), x.double(), y, drawn[:_CHECKED])


def _errors(model: nn.Module, x: Tensor, y: Tensor, entries: Sequence[int]) -> dict[str, float]:
    """Relative differences of saltflat's from the two others', in float64."""
    found = torch.cat(
        [each.flatten() for each in sf.diagonal(model, (x, y), progress=False).values()]
    )
    looped = looped_diagonal(model, x, y, entries)
    off = found[list(entries)].to(looped) - looped
    result = {"loop_error": float(off.norm() / looped.norm()), "backpack_error": nan}
    if find_spec("backpack") is not None:
        other = _backpack(model, x, y)
        result["backpack_error"] = (
            abs(sf.trace(model, (x, y), progress=False).total - other) / other
        )
    return result


def _backpack(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """The trace by BackPACK."""
    import backpack
    from backpack.extensions import DiagGGNExact

    extended, loss = backpack.extend(deepcopy(model)), backpack.extend(nn.CrossEntropyLoss())
    with backpack.backpack(DiagGGNExact()), warnings.catch_warnings():
        # Of its hooks, where the inputs of a network need no gradient.
        warnings.filterwarnings("ignore", "Full backward hook is firing", UserWarning)
        loss(extended(x), y).backward()
    return float(sum(p.diag_ggn_exact.sum() for p in extended.parameters()))


def _seconds(call: Callable[[], float | Tensor], repeats: int = _REPEATS) -> float:
    """The least of some calls, each waited for."""
    best = float("inf")
    for _ in range(repeats):
        start = perf_counter()
        float(torch.as_tensor(call()).sum())
        best = min(best, perf_counter() - start)
    return best


def rows(runs: Sequence[Run]) -> list[Row]:
    """Times as ratios of one run, and the largest differences."""
    table = []
    for network, title in TITLES.items():
        for index, n in enumerate(SAMPLES):
            some = [run for run in runs if run["network"] == network and run["n"] == n]
            published = _BASELINE[network][index] / _PROPOSAL[network][index]
            what = f"{title}, n = {n}, times faster than"
            table.append(_ratio(some, "loop_seconds", f"{what} the loop", published))
            table.append(_ratio(some, "backpack_seconds", f"{what} BackPACK"))
    largest = [("loop_error", "the loop's entries"), ("backpack_error", "BackPACK's trace")]
    return table + [
        Row(
            f"largest relative difference from {what}",
            float(np.max(column(runs, name))),  # NaN where one is, wherever it stands
            note="float64",
        )
        for name, what in largest
    ]


def _ratio(runs: Sequence[Run], name: str, what: str, published: float | None = None) -> Row:
    """Of times, mean over seeds."""
    pairs = zip(column(runs, name), column(runs, "saltflat_seconds"), strict=True)
    return mean_row(what, [other / ours for other, ours in pairs], published)


def draw(runs: Sequence[Run]) -> Figure:
    """Seconds against samples, and the differences in float64."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    times, errors = figure.subplots(1, 2)
    ways = {"loop": "autograd loop", "backpack": "BackPACK", "saltflat": "saltflat"}
    for (network, title), line in zip(TITLES.items(), ["-", "--"], strict=True):
        some = [run for run in runs if run["network"] == network]
        for (way, name), colour in zip(ways.items(), ["C3", "C0", "C2"], strict=True):
            means = [_mean(some, n, f"{way}_seconds") for n in SAMPLES]
            times.plot(SAMPLES, means, f"o{line}", color=colour, label=f"{name}, {title}")
            if way != "saltflat":
                errors.plot(
                    column(some, "n"),
                    column(some, f"{way}_error"),
                    "o" if network == "fcnn" else "^",
                    color=colour,
                    alpha=0.7,
                    label=f"{name}, {title}",
                )
    times.set(xscale="log", yscale="log", xlabel="samples", ylabel="seconds for Tr H, float32")
    errors.axhline(np.finfo(float).eps, color="grey", lw=1, label="rounding of one float64")
    errors.set(xscale="log", yscale="log", xlabel="samples", ylim=(1e-17, 1e-9))
    errors.set_ylabel("relative difference of saltflat, float64")
    for axes in (times, errors):
        axes.grid(alpha=0.3)
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2, frameon=False, fontsize=8)
    return figure


def _mean(runs: Sequence[Run], n: int, name: str) -> float:
    return float(np.mean(column([run for run in runs if run["n"] == n], name)))


FIGURE_1 = Experiment(
    name="minimum-sharpness/figure-1",
    title="Time and exactness of the Hessian's trace: autograd's loop, BackPACK, saltflat",
    paper="ibayashi2021minimum",
    changed=(
        "The published times are of the authors' machine; compared are ratios of times of one run.",
        "3 seeds instead of 10. At the small size the loop is timed on "
        f"{_CHECKED} random entries of the diagonal, and its time is multiplied up to all of them.",
        "BackPACK is added. Differences are taken in float64, from the loop on "
        f"{_CHECKED} random entries of the diagonal and from BackPACK on the whole trace.",
    ),
    runs=_runs,
    work=work,
    rows=rows,
    draw=draw,
    alone=True,
)
