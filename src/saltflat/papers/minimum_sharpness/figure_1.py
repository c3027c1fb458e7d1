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
from statistics import median
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from torch import Tensor, nn

import saltflat as sf
from saltflat.papers.columns import column, largest, mean_row
from saltflat.papers.experiment import Experiment, Row, Size
from saltflat.papers.minimum_sharpness.small_networks import (
    SAMPLES,
    TITLES,
    case,
    looped_diagonal,
)
from saltflat.papers.timed import Call, by_turns
from saltflat.sweep import Outcome, Run, Settings

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Seconds for n = 10, 100 and 1000, on the authors' machine.
_BASELINE = {"fcnn": (11.11, 11.05, 12.23), "cnn": (10.19, 10.73, 21.22)}
_PROPOSAL = {"fcnn": (0.018, 0.019, 0.021), "cnn": (0.026, 0.036, 0.334)}
_SEEDS: dict[Size, int] = {"small": 5, "full": 10}
_ENTRIES = 200  # of the diagonal, of 13,750 and 16,330, that the loop is timed on at full size
_CHECKED = 30  # entries that are compared in float64


@final
@dataclass(frozen=True)
class _Case:
    network: str
    n: int
    seed: int
    entries: int  # of the diagonal that the loop is timed on
    rounds: int
    seconds: float  # for all rounds of one way


def _runs(size: Size) -> list[Settings]:
    often = (_ENTRIES, 20, 0.5) if size == "full" else (_CHECKED, 10, 1.0)
    return [
        asdict(_Case(network, n, seed, *often))
        for network in TITLES
        for n in SAMPLES
        for seed in range(_SEEDS[size])
    ]


def work(settings: Sequence[Settings], device: torch.device) -> list[Outcome]:
    """Time the three ways in float32, and compare them in float64."""
    return [_compared(_Case(**each), device) for each in settings]  # type: ignore[arg-type]


def _compared(setting: _Case, device: torch.device) -> Outcome:
    model, x, y = case(setting.network, setting.n, setting.seed, device)
    count = sum(p.numel() for p in model.parameters())
    drawn = torch.randperm(count, generator=torch.Generator().manual_seed(setting.seed)).tolist()
    timed = drawn[: setting.entries]
    calls: dict[str, Call] = {"loop": lambda: looped_diagonal(model, x, y, timed)}
    if find_spec("backpack") is not None:
        calls["backpack"] = _backpack(model, x, y)

    def ours() -> sf.Trace:
        return sf.trace(model, (x, y), progress=False)

    times = by_turns(calls, ours, device, rounds=setting.rounds, seconds=setting.seconds)
    outcome = {"saltflat_seconds": median(times["loop"].unit), "trace": ours().total}
    for way, parts in (("loop", count / len(timed)), ("backpack", 1.0)):
        known = way in times
        outcome[f"{way}_seconds"] = parts * times[way].seconds if known else nan
        outcome[f"{way}_ratio"] = parts * median(times[way].units) if known else nan
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
        other = _backpack(model, x, y)()
        result["backpack_error"] = (
            abs(sf.trace(model, (x, y), progress=False).total - other) / other
        )
    return result


def _backpack(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], float]:
    """The trace by BackPACK, of a copy that is made before."""
    import backpack
    from backpack.extensions import DiagGGNExact

    extended, loss = backpack.extend(deepcopy(model)), backpack.extend(nn.CrossEntropyLoss())

    def trace() -> float:
        extended.zero_grad()
        with backpack.backpack(DiagGGNExact()), warnings.catch_warnings():
            # Of its hooks, where the inputs of a network need no gradient.
            warnings.filterwarnings("ignore", "Full backward hook is firing", UserWarning)
            loss(extended(x), y).backward()
        return float(sum(p.diag_ggn_exact.sum() for p in extended.parameters()))

    return trace


def rows(runs: Sequence[Run]) -> list[Row]:
    """Ratios of times, means over seeds of their medians, and the largest differences."""
    table = []
    for network, title in TITLES.items():
        for index, n in enumerate(SAMPLES):
            some = [run for run in runs if run["network"] == network and run["n"] == n]
            published = _BASELINE[network][index] / _PROPOSAL[network][index]
            what = f"{title}, n = {n}, times faster than"
            table.append(mean_row(f"{what} the loop", column(some, "loop_ratio"), published))
            table.append(mean_row(f"{what} BackPACK", column(some, "backpack_ratio")))
    others = {"loop_error": "the loop's entries", "backpack_error": "BackPACK's trace"}
    for name, other in others.items():
        what = f"largest relative difference from {other}"
        table.append(Row(what, largest(column(runs, name)), note="float64"))
    return table


def draw(runs: Sequence[Run]) -> Figure:
    """Seconds against samples, with standard errors over seeds, and the differences in float64."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    times, errors = figure.subplots(1, 2)
    ways = {"loop": "autograd loop", "backpack": "BackPACK", "saltflat": "saltflat"}
    for (network, title), line in zip(TITLES.items(), ["-", "--"], strict=True):
        some = [run for run in runs if run["network"] == network]
        for (way, name), colour in zip(ways.items(), ["C3", "C0", "C2"], strict=True):
            found = [mean_row("", _seconds(some, way, n)) for n in SAMPLES]
            times.errorbar(
                SAMPLES,
                [row.ours for row in found],
                [row.error or 0.0 for row in found],
                fmt=f"o{line}",
                markersize=4,
                capsize=3,
                color=colour,
                label=f"{name}, {title}",
            )
            if way != "saltflat":
                errors.plot(
                    column(some, "n"),
                    column(some, f"{way}_error"),
                    "o" if network == "fcnn" else "^",
                    color=colour,
                    alpha=0.7,
                    label=f"{name}, {title}",
                )
    times.set_ylabel("seconds for Tr H, float32")
    errors.axhline(np.finfo(float).eps, color="grey", lw=1, label="rounding of one float64")
    errors.set(ylim=(1e-17, 1e-9), ylabel="relative difference of saltflat, float64")
    for axes in (times, errors):
        _dress(axes)
    return figure


def _dress(axes: Axes) -> None:
    """Logarithmic, with a grid and a legend above, in which dashes show."""
    axes.set(xscale="log", yscale="log", xlabel="samples")
    axes.grid(alpha=0.3)
    where: dict[str, Any] = {"loc": "lower center", "bbox_to_anchor": (0.5, 1)}
    axes.legend(**where, ncols=2, frameon=False, fontsize=8, handlelength=4)


def _seconds(runs: Sequence[Run], way: str, n: int) -> list[float]:
    return column([run for run in runs if run["n"] == n], f"{way}_seconds")


FIGURE_1 = Experiment(
    name="minimum-sharpness/figure-1",
    title="Time and exactness of the Hessian's trace: autograd's loop, BackPACK, saltflat",
    paper="ibayashi2021minimum",
    changed=(
        "The published times are of the authors' machine; compared are ratios of times that are "
        "taken by turns, on one thread: medians of up to 20 rounds (10 in the small size).",
        f"The loop is timed on {_ENTRIES} random entries of the diagonal ({_CHECKED} in the small "
        f"size, which has {_SEEDS['small']} seeds instead of 10), and its time multiplied up to "
        "all of them.",
        "BackPACK is added. Differences are taken in float64, from the loop on "
        f"{_CHECKED} random entries of the diagonal and from BackPACK on the whole trace.",
    ),
    runs=_runs,
    work=work,
    rows=rows,
    draw=draw,
    minutes={"small": 9, "full": 3},
    alone=True,
)
