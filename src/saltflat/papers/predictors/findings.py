"""What the pool says: a table of all statistics, which measures predict what, and a picture."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import numpy as np

from saltflat.errors import optional
from saltflat.papers.experiment import Row
from saltflat.papers.predictors import statistics as st
from saltflat.papers.predictors.controls import CONTROLS
from saltflat.sweep import Run

AXES = (
    "width",
    "depth",
    "batch",
    "lr",
    "weight_decay",
    "optimizer",
    "augmentation",
    "noise",
)
GIVEN = "weight_norm"
DRAWS = 500
INFORMATION_DRAWS = 100
SHOWN = (
    "hessian_trace",
    "minimum_sharpness",
    "normalized_sharpness",
    "relative_flatness",
    "fisher_rao_norm",
    "weight_norm",
)
# What the picture shows, and in which words.
_PANELS = {"tau": "τ with the gap", "psi": "mean Ψ", "partial": "partial τ, given weight norm"}
_COLOURS = {"measure": "#1f4e8c", "control": "#b3591d"}
TITLES = {
    "tau": "τ with the gap",
    "psi": "mean Ψ over the hyperparameters",
    "partial": "partial τ with the gap given the weight norm",
    "partial_spearman": "partial Spearman ρ with the gap given the weight norm",
    "equal_noise": "τ with the gap among networks with equal label noise",
    "loss_gap": "τ with the gap of the loss",
    "information": "K, least information given two hyperparameters",
}


@final
@dataclass(frozen=True)
class Pool:
    """The networks that reached the training loss: what each is, and its numbers."""

    settings: Sequence[Mapping[str, Any]]
    numbers: Mapping[str, np.ndarray]  # gaps and predictors by name, one entry a network
    predictors: tuple[str, ...]

    @classmethod
    def of(cls, runs: Sequence[Run]) -> Pool:
        kept = [run for run in runs if run["epochs"] is not None]
        predictors = tuple(dict.fromkeys(name for run in kept for name in run["predictors"]))
        numbers = {name: _numbers([run[name] for run in kept]) for name in ("gap", "loss_gap")}
        for name in predictors:
            numbers[name] = _numbers([run["predictors"].get(name, math.nan) for run in kept])
        settings = [{name: run.settings[name] for name in (*AXES, "seed")} for run in kept]
        return cls(settings, numbers, predictors)

    def __len__(self) -> int:
        return len(self.settings)

    def known(self, predictor: str) -> Pool:
        """The networks for which there is a value."""
        finite = np.isfinite(self.numbers[predictor]) & np.isfinite(self.numbers["gap"])
        numbers = {name: values[finite] for name, values in self.numbers.items()}
        settings = [
            each for each, is_finite in zip(self.settings, finite, strict=True) if is_finite
        ]
        return Pool(settings, numbers, self.predictors)

    def cells(self) -> list[tuple[Any, ...]]:
        """What is drawn as one: the seeds of a setting."""
        return [tuple(each[name] for name in AXES) for each in self.settings]


def _numbers(values: Sequence[Any]) -> np.ndarray:
    return np.array([float(value) for value in values])


@final
@dataclass(frozen=True)
class Finding:
    """One predictor: its statistics by name, Ψ by hyperparameter, and of how many networks."""

    statistics: Mapping[str, st.Estimate]
    psi: Mapping[str, float]
    networks: int


def findings(pool: Pool, sought: frozenset[str] = frozenset(TITLES)) -> dict[str, Finding]:
    """The statistics that are sought, of every predictor."""
    return {name: _finding(pool.known(name), name, sought) for name in pool.predictors}


def _finding(pool: Pool, name: str, sought: frozenset[str]) -> Finding:
    if len(pool) < 3:
        unknown = st.Estimate(math.nan, math.nan, math.nan)
        return Finding(dict.fromkeys(sought, unknown), {}, len(pool))
    a, gap = st.signs(pool.numbers[name]), st.signs(pool.numbers["gap"])
    axes = {axis: pairs for axis in AXES if len(pairs := st.axis_pairs(pool.settings, axis))}
    weights = st.draws(pool.cells(), DRAWS)
    statistics = {
        key: st.estimate(
            statistic, weights[:INFORMATION_DRAWS] if key == "information" else weights
        )
        for key, statistic in _statistics(pool, name, a, gap, axes).items()
        if key in sought
    }
    once = np.ones((1, len(pool)), np.float32)
    psi = {axis: float(st.granulated(a, gap, pairs, once)[0]) for axis, pairs in axes.items()}
    return Finding(statistics, psi, len(pool))


def _statistics(
    pool: Pool, name: str, a: st.Array, gap: st.Array, axes: Mapping[str, st.Pairs]
) -> dict[str, st.Statistic]:
    """By the keys of TITLES; those that are not defined for this predictor are left out."""
    given, loss_gap = st.signs(pool.numbers[GIVEN]), st.signs(pool.numbers["loss_gap"])
    noise = np.array([each["noise"] for each in pool.settings])
    equal = (noise[:, None] == noise[None, :]).astype(np.float32)
    known = [[each[axis] for each in pool.settings] for axis in axes]
    result: dict[str, Callable[[st.Weights], Any]] = {
        "tau": partial(st.tau, a, gap),
        "psi": partial(st.mean_granulated, a, gap, list(axes.values())),
        "partial": partial(st.partial_tau, a, gap, given),
        "partial_spearman": partial(st.partial_spearman, a, gap, given),
        "equal_noise": partial(st.tau, a, gap, pairs=equal),
        "loss_gap": partial(st.tau, a, loss_gap),
        "information": partial(st.information, a, gap, known),
    }
    if name == GIVEN:
        del result["partial"], result["partial_spearman"]
    if not axes:
        del result["psi"]
    return result


def rows(runs: Sequence[Run]) -> list[Row]:
    """How many reached the training loss, which predict what, and every statistic."""
    pool = Pool.of(runs)
    found = findings(pool)
    return [*_reached_rows(runs), *_statements(found), *_statistic_rows(found, len(pool))]


def _reached_rows(runs: Sequence[Run]) -> Iterator[Row]:
    note = "the others are not in the statistics"
    reached = [run["epochs"] is not None for run in runs]
    yield Row(f"networks of {len(runs)} that reached the training loss", sum(reached), note=note)
    lost = sum(not math.isfinite(float(run["train_loss"])) for run in runs)
    yield Row("networks whose training loss is not finite", lost)
    for (axis, value), share in reached_shares(runs).items():
        yield Row(f"share that reached it, {axis} = {value}", share)


def reached_shares(runs: Sequence[Run]) -> dict[tuple[str, Any], float]:
    """Of the networks with each value of each hyperparameter that has several."""
    result = {}
    for axis in AXES:
        values = list(dict.fromkeys(run.settings[axis] for run in runs))
        for value in values if len(values) > 1 else []:
            those = [run["epochs"] is not None for run in runs if run.settings[axis] == value]
            result[axis, value] = sum(those) / len(those)
    return result


def _statements(found: Mapping[str, Finding]) -> Iterator[Row]:
    """Plainly: which predict the gap, which do so beyond the weight norm, and which do not."""

    def those(*signs: tuple[str, int]) -> list[str]:
        return [
            name
            for name, finding in found.items()
            if all(_sign(finding, key) == sign for key, sign in signs)
        ]

    given = (("partial", 1), ("partial_spearman", 1))
    larger, always = those(("tau", 1)), those(("tau", 1), ("psi", 1), *given)
    for what, names in (
        ("larger where the gap is larger (τ)", larger),
        ("smaller where the gap is larger (τ)", those(("tau", -1))),
        ("not shown to go with the gap (τ)", those(("tau", 0))),
        ("larger with the gap also at equal label noise", those(("equal_noise", 1))),
        ("larger with the gap also given the weight norm", those(*given)),
        ("larger with the gap as one hyperparameter moves (mean Ψ)", those(("psi", 1))),
        ("larger with the gap by τ, mean Ψ and given the weight norm", always),
        ("larger with the gap by τ, but not by all three", [n for n in larger if n not in always]),
    ):
        yield Row(f"predictors: {what}", len(names), note=", ".join(names) or "none")


def _sign(finding: Finding, key: str) -> int:
    return finding.statistics[key].sign if key in finding.statistics else 0


def _statistic_rows(found: Mapping[str, Finding], networks: int) -> Iterator[Row]:
    for key, title in TITLES.items():
        for name, finding in found.items():
            if key not in finding.statistics:
                continue
            value = finding.statistics[key]
            notes = [f"[{value.low:.3f}, {value.high:.3f}]"]
            if key == "psi":
                notes += [f"{axis} {psi:+.2f}" for axis, psi in finding.psi.items()]
            if finding.networks < networks:
                notes += [f"{finding.networks} networks"]
            yield Row(f"{title}: {name}", value.value, value.error, note="; ".join(notes))


def draw(runs: Sequence[Run]) -> Any:
    """Intervals of three statistics, who reached the training loss, and scatter plots."""
    figure = optional("matplotlib.figure", "A picture").Figure((13, 13), layout="constrained")
    pool = Pool.of(runs)
    above, below = figure.subfigures(2, 1, height_ratios=[1.25, 1])
    _draw_intervals(above, findings(pool, frozenset(_PANELS)), runs)
    _draw_scatter(below, pool)
    return figure


def _draw_intervals(figure: Any, found: Mapping[str, Finding], runs: Sequence[Run]) -> None:
    *panels, last = figure.subplots(1, 4, width_ratios=[1, 1, 1, 0.7])
    order = sorted(found, key=lambda name: (name in CONTROLS, list(found).index(name)))[::-1]
    for index, (axes, key) in enumerate(zip(panels, _PANELS, strict=True)):
        for height, name in enumerate(order):
            if key in found[name].statistics:
                value = found[name].statistics[key]
                colour = _COLOURS["control" if name in CONTROLS else "measure"]
                axes.plot([value.low, value.high], [height, height], color=colour, lw=2)
                axes.plot(value.value, height, "o", color=colour, ms=5)
        axes.axvline(0, color="0.6", lw=0.8)
        axes.set(xlim=(-1, 1), ylim=(-0.7, len(order) - 0.3), xlabel=_PANELS[key])
        axes.set_yticks(range(len(order)), order if index == 0 else [""] * len(order))
        axes.grid(axis="x", color="0.9")
    shares = reached_shares(runs)
    names = [f"{axis} = {value}" for axis, value in shares]
    last.barh(range(len(names)), list(shares.values()), color="0.6")
    last.set_yticks(range(len(names)), names, fontsize=8)
    last.invert_yaxis()
    last.set(xlim=(0, 1), xlabel="share that reached it")
    reached = sum(run["epochs"] is not None for run in runs)
    figure.suptitle(
        f"{reached} of {len(runs)} networks reached the training loss; 95 % bootstrap intervals\n"
        "blue: measures of sharpness, brown: controls"
    )


def _draw_scatter(figure: Any, pool: Pool) -> None:
    names = [name for name in SHOWN if name in pool.predictors]
    if not names:
        return
    panels = figure.subplots(2, math.ceil(len(names) / 2), sharey=True, squeeze=False)
    noise = np.array([each["noise"] for each in pool.settings])
    levels = sorted(set(noise.tolist()))
    colours = optional("matplotlib", "A picture").colormaps["viridis"]
    for axes, name in zip(panels.flat, names, strict=False):
        for index, level in enumerate(levels):
            those = noise == level
            colour = colours(0.85 * index / max(len(levels) - 1, 1))
            x, y = pool.numbers[name][those], 100 * pool.numbers["gap"][those]
            axes.scatter(x, y, s=10, alpha=0.7, color=colour, label=f"{100 * level:.0f} %")
        axes.set(xlabel=name, xscale="log")
        positive = pool.numbers[name][pool.numbers[name] > 0]
        if len(positive):
            ticks = np.geomspace(positive.min(), positive.max(), 4)
            axes.set_xticks(ticks, [f"{float(f'{tick:.3g}'):g}" for tick in ticks])
            axes.set_xticks([], minor=True)
    for first in panels[:, 0]:
        first.set_ylabel("gap of accuracy (percentage points)")
    panels[0, 0].legend(title="label noise", fontsize=8)
