"""Audit: which measures moved under rescalings that keep the function, and by how much."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, final

from rich.markup import escape
from rich.table import Table

from saltflat.checks import check_number
from saltflat.errors import InvalidValue, NotMeasured, nearest, optional
from saltflat.measurement import Measurement, unknown
from saltflat.report import ASK, WIDE, Cell, Figure, Section, framed, html, invariance, store
from saltflat.report import Table as HtmlTable
from saltflat.result import Results

if TYPE_CHECKING:
    import pandas

Verdict = Literal["invariant", "undecided", "moved"]
ORDER: tuple[Verdict, ...] = ("invariant", "undecided", "moved")

# An error of more than this share of the value decides nothing.
_USELESS = 0.5
# A change of the function by r (BatchNorm's eps, with batch statistics) excuses one of 100 r.
_EXCUSED = 100.0

_MARKS: dict[str, str] = {"invariant": "✓", "undecided": "?", "moved": "✗"}
_COLOURS: dict[str, str] = {"invariant": "green", "undecided": "yellow", "moved": "red"}

# Neighbours that the colour-blind tell apart (after Paul Tol); markers tell the rest.
_PALETTE = (
    *("#000000", "#CC6677", "#332288", "#DDCC77", "#117733", "#88CCEE"),
    *("#882255", "#E69F00", "#44AA99", "#999933", "#AA4499"),
)
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*", "p", "h", "d")
# A drift of nothing at all is drawn here: logarithms have no zero.
_FLOOR = 1e-17


@final
@dataclass(frozen=True)
class Tolerances:
    """How much a measure may drift, relative to its value, and still be called invariant.

    `closed` for closed forms and users' functions; what has a stated optimality gap may drift by
    the gaps on top, an estimate by `errors` combined standard errors, and a supremum that was
    searched for by `searched`.

    Examples
    --------
    >>> import saltflat as sf
    >>> sf.Tolerances(closed=1e-6)
    Tolerances(closed=1e-06, errors=4.0, searched=0.01)
    """

    closed: float = 1e-8
    errors: float = 4.0
    searched: float = 0.01

    def __post_init__(self) -> None:
        for name in ("closed", "errors", "searched"):
            check_number(f"{name} of Tolerances", getattr(self, name))


@final
@dataclass(frozen=True)
class Judgement:
    drift: float
    tolerance: float
    verdict: Verdict


def judge(
    before: Measurement, after: Measurement, tolerances: Tolerances, excuse: float = 0.0
) -> Judgement:
    """Compare a measure of two models; `excuse` is how far the function itself moved."""
    change = abs(after.value - before.value)
    size = abs(before.value)
    allowed = before.gap + after.gap + tolerances.errors * math.hypot(before.stderr, after.stderr)
    tolerance = tolerances.closed + _EXCUSED * excuse + _relative(allowed, size)
    if before.lower_bound or after.lower_bound:
        tolerance += tolerances.searched
    drift = _relative(change, size)
    if math.isnan(drift):
        return Judgement(math.inf, tolerance, "moved")
    if drift <= tolerance:
        return Judgement(drift, tolerance, "invariant" if tolerance < _USELESS else "undecided")
    sure = all(_resolved(m, tolerances.errors) for m in (before, after))
    return Judgement(drift, tolerance, "moved" if sure else "undecided")


def _resolved(m: Measurement, errors: float) -> bool:
    """Whether the value is told from zero, so that its standard error can be believed.

    An upper bound is not: it may exceed its measure by more than its error.
    """
    return m.bound != "upper" and (m.stderr == 0 or abs(m.value) > errors * m.stderr)


def _relative(change: float, size: float) -> float:
    if change == 0:
        return 0.0
    return change / size if size > 0 else math.inf


@final
@dataclass(frozen=True)
class Drift:
    """The largest change of a measure under one kind of rescaling.

    Attributes
    ----------
    drift : |value after − value before| / |value before|, of the element that tells most.
    tolerance : what the measure may drift by on that element and still be called invariant.
    verdict : invariant, moved, or undecided where the measure's own error hides the answer.
    element : the element, e.g. `random 1`, or `fc1[3] × 1000`.
    declared : whether the measure says that it is invariant; None for a user's function.
    reason : why the measure has no value there, if so.
    curve : the drift along one random direction, by spread.
    """

    drift: float
    tolerance: float
    verdict: Verdict
    element: str
    declared: bool | None
    reason: str = ""
    curve: Mapping[float, float] = field(default_factory=dict)

    @property
    def disagrees(self) -> bool:
        """Declared invariant and seen to move. The converse is no contradiction: a measure may
        be invariant on one model and not on another."""
        return self.declared is True and self.verdict == "moved"

    def __str__(self) -> str:
        size = f"{self.drift:.1e}" if self.drift else "0"
        return f"{size} {_MARKS[self.verdict]}"


@final
@dataclass(frozen=True)
class Audited(Mapping[str, Drift]):
    """One measure under audit: drifts by kind of rescaling."""

    name: str
    value: float
    certainty: str
    declared: tuple[str, ...] | None  # None for a user's function
    drifts: Mapping[str, Drift]

    def __getitem__(self, kind: str) -> Drift:
        if kind not in self.drifts:
            raise unknown(f"The audit of {self.name}", kind, self.drifts)
        return self.drifts[kind]

    def __iter__(self) -> Iterator[str]:
        return iter(self.drifts)

    def __len__(self) -> int:
        return len(self.drifts)

    @property
    def ok(self) -> bool:
        return not any(d.disagrees for d in self.values())

    @property
    def verdict(self) -> str:
        """`invariant`, `moved` (by every kind), `moved by neuron`, `DISAGREES: moved by layer`."""
        if not self.ok:
            return "DISAGREES: moved by " + self._kinds(lambda d: d.disagrees)
        if not self.drifts:
            return "not tested"
        if all(d.verdict == "moved" for d in self.values()):
            return "moved"
        moved = self._kinds(lambda d: d.verdict == "moved")
        unknown = self._kinds(lambda d: d.verdict == "undecided")
        parts = [f"moved by {moved}"] if moved else []
        parts += [f"undecided: {unknown}"] if unknown else []
        return "; ".join(parts) or "invariant"

    def _kinds(self, condition: Any) -> str:
        return ", ".join(kind for kind, d in self.items() if condition(d))

    @property
    def promise(self) -> str:
        """What is declared, in words."""
        return "–" if self.declared is None else invariance(self.declared)


@final
@dataclass(frozen=True, repr=False)
class Audit(Results[Audited]):
    """Audited measures by name. `ok` is False if one moved that declares it does not.

    Attributes
    ----------
    rows : the measures and functions by name.
    skipped : measures that do not apply to the model, and why.
    kinds : the kinds of rescaling that the model has, and how many dimensions each has.
    spread : the largest factor, and 1/spread the least.
    elements : how many rescalings of each kind were applied.
    output_drift : the largest relative change of the outputs over all of them, in float64.
    left_out : measures that nobody asked for, and their prices in gradients, for all rescalings.

    Examples
    --------
    >>> import torch, saltflat as sf
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    >>> data = torch.randn(8, 3), torch.arange(8) % 2
    >>> audit = sf.audit(model, data, measures=["rho"], elements=1)
    >>> path = audit.save("audit.json")
    >>> sf.Audit.load(path) == audit
    True
    """

    rows: Mapping[str, Audited]
    skipped: Mapping[str, str]
    kinds: Mapping[str, int]
    spread: float
    elements: Mapping[str, int]
    output_drift: float
    tolerances: Tolerances
    model: str = ""
    notes: tuple[str, ...] = ()
    left_out: Mapping[str, float] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Audited:
        if name in self.rows:
            return self.rows[name]
        if name in self.skipped:
            raise NotMeasured(f"{name} does not apply: {self.skipped[name]}")
        if name in self.left_out:
            raise NotMeasured(
                f"{name} was not audited: it costs about {self.left_out[name]:.0f} gradients. "
                f'Write sf.audit(model, data, measures=["{name}"]), or measures="all".'
            )
        raise NotMeasured(f"{name!r} was not audited. {nearest(name, self.rows)}")

    @property
    def ok(self) -> bool:
        return all(row.ok for row in self.values())

    def save(self, path: str | Path) -> Path:
        """Write the audit to a .json file, or as a page to a .html file, whole or not at all."""
        if Path(path).suffix == ".html":
            return html.write(path, f"Audit of {self.model}", self.sections())
        return store.save(path, "An audit", "audit", {"audit": self})

    @classmethod
    def load(cls, path: str | Path) -> Audit:
        """Read an audit that `save` wrote."""
        content = store.read(path, "audit").get("audit")
        return store.decoded(cls, content, f"{path} is a damaged audit")

    def to_pandas(self) -> pandas.DataFrame:
        """One row for each measure and kind of rescaling."""
        rows = [
            {
                "measure": row.name,
                "kind": kind,
                "value": row.value,
                "drift": d.drift,
                "tolerance": d.tolerance,
                "verdict": d.verdict,
                "declared": d.declared,
                "element": d.element,
                "reason": d.reason,
            }
            for row in self.values()
            for kind, d in row.items()
        ]
        frame: pandas.DataFrame = optional("pandas", "A DataFrame").DataFrame(rows)
        return frame.set_index(["measure", "kind"])

    def plot(self, path: str | Path) -> Path:
        """Draw drift against spread as a picture, a panel for each kind of rescaling."""
        return _plot(self, Path(path))

    def table(self, width: int) -> Table:
        title = f"Audit of {self.model}: " + (
            ", ".join(f"{count} {kind}" for kind, count in self.kinds.items())
            or "no rescaling keeps its function"
        )
        wide = width >= WIDE
        table = framed(wide, escape(title))
        table.add_column("measure", no_wrap=True)
        for column in (*(["value"] if wide else []), *self.kinds):
            table.add_column(column, justify="right", no_wrap=True)
        for column in ("verdict", *(["declared"] if wide else [])):
            table.add_column(column)
        for row in self.values():
            cells = [f"[{_COLOURS[d.verdict]}]{d}[/]" for d in row.values()]
            verdict = row.verdict if row.ok else f"[bold red]{row.verdict}[/]"
            value, promise = ([f"{row.value:.5g}"], [row.promise]) if wide else ([], [])
            table.add_row(escape(row.name), *value, *cells, verdict, *promise)
        if wide:
            for name in self.skipped:
                table.add_row(name, "–", *["" for _ in self.kinds], "does not apply", "")
            for name, price in self.left_out.items():
                verdict = f"not computed, about {price:.0f} gradients"
                table.add_row(name, "–", *["" for _ in self.kinds], verdict, ASK.get())
        table.caption = escape("\n".join([*self._legend(), *self.notes, *self._missing(wide)]))
        return table

    def _missing(self, wide: bool) -> list[str]:
        """What is not in the rows, or not why."""
        word = "" if wide else " does not apply"
        lines = [f"{name}{word}: {reason}" for name, reason in self.skipped.items()]
        if self.left_out and not wide:
            prices = [f"{n} (about {cost:.0f} gradients)" for n, cost in self.left_out.items()]
            lines.append(f"not computed: {', '.join(prices)}; {ASK.get()}")
        return lines

    def sections(self) -> list[Section]:
        """What a page shows of it: the verdicts, and drift against spread for each kind."""
        rows = [
            [
                Cell(row.name),
                html.number(row.value),
                *(Cell(str(drift), drift.drift, detail=drift.element) for drift in row.values()),
                Cell(row.verdict),
                Cell(row.promise),
            ]
            for row in self.values()
        ]
        head = ["measure", "value", *self.kinds, "verdict", "declared invariant to"]
        numeric = frozenset(range(1, 2 + len(self.kinds)))
        counts = ", ".join(f"{count} {kind}" for kind, count in self.kinds.items())
        text = f"Same function, other weights. Rescalings of {self.model}: {counts or 'none'}."
        reasons = [f"{name}: {reason}" for name, reason in self.skipped.items()]
        return [
            Section(
                "Audit",
                text,
                table=HtmlTable(head, rows, numeric),
                figures=[_drifts(self, kind) for kind in self.kinds],
                notes=[*self._legend(), *self.notes, *reasons],
            )
        ]

    def _legend(self) -> list[str]:
        if not self.kinds:
            return []
        t = self.tolerances
        return [
            f"Largest relative drift over {sum(self.elements.values())} rescalings by up to "
            f"{self.spread:g} that moved the outputs by at most {self.output_drift:.0e}.",
            f"✓ invariant: at most {t.closed:g}, plus gaps, {t.errors:g} standard errors of an "
            f"estimate, {t.searched:g} for a searched supremum. ✗ moved. ? hidden by its error.",
        ]


def _drifts(audit: Audit, kind: str) -> Figure:
    """A line a measure, with its name at the end."""
    curves = {name: row[kind].curve for name, row in audit.items()}
    shown = {name: [_drawn(d) for d in curve.values()] for name, curve in curves.items()}
    traces = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": html.label(name),
            "x": list(curves[name]),
            "y": drifts,
            "line": {"color": f"@{index}", "width": 1.8},
            "marker": {"color": f"@{index}", "symbol": index, "size": 7},
            "hovertemplate": "%{fullData.name}, spread %{x:.3g}: drift %{y:.2e}<extra></extra>",
        }
        for index, (name, drifts) in enumerate(shown.items())
    ]
    rows = [(name, *pair) for name, curve in curves.items() for pair in curve.items()]
    columns = {
        key: [row[k] for row in rows] for k, key in enumerate(("measure", "spread", "drift"))
    }
    title = f"{kind.capitalize()} rescaling"
    caption = "Along one random direction; a drift of nothing at all is drawn at the bottom."
    return Figure(title, caption, traces, _drift_layout(audit, shown, columns), columns, height=480)


def _drift_layout(
    audit: Audit, shown: Mapping[str, list[float]], columns: Mapping[str, list[Any]]
) -> dict[str, Any]:
    logs = [math.log10(d) for drifts in shown.values() for d in drifts if math.isfinite(d)]
    bottom, top = math.log10(_FLOOR) - 0.5, max([0.0, *logs]) + 0.5
    ends = {
        (name, index): math.log10(drifts[-1])
        for index, (name, drifts) in enumerate(shown.items())
        if drifts and math.isfinite(drifts[-1])
    }
    return {
        "xaxis": {
            "title": {"text": "spread of the factors"},
            "type": "log",
            "tickvals": sorted(set(columns["spread"])),
        },
        "yaxis": {
            "title": {"text": "relative drift of the measure"},
            "type": "log",
            "range": [bottom, top],
            "exponentformat": "power",
            "nticks": 8,
        },
        "shapes": [_threshold(audit.tolerances.closed)],
        "annotations": html.ends(ends, bottom, top, 0.036),
        "margin": {"r": 230},
    }


def _drawn(drift: float) -> float:
    """Where a drift is drawn: logarithms have no zero, and no infinity."""
    return max(drift, _FLOOR) if math.isfinite(drift) else math.nan


def _threshold(drift: float) -> dict[str, Any]:
    """A line below which a closed form is called invariant."""
    return {
        "type": "line",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "y0": drift,
        "y1": drift,
        "line": {"color": "@faint", "width": 1, "dash": "dot"},
        "label": {
            "text": "invariant below",
            "textposition": "start",
            "yanchor": "top",
            "font": {"color": "@faint", "size": 11},
        },
    }


def _plot(audit: Audit, path: Path) -> Path:
    """One panel for each kind of rescaling, one line a measure; both axes are logarithmic."""
    if not audit.kinds or not len(audit):
        raise InvalidValue("There is nothing to draw: the audit has no measure or no rescaling.")
    figures = optional("matplotlib.figure", "A picture")
    count = len(audit.kinds)
    figure = figures.Figure(figsize=(2.6 + 3.0 * count, 4.2), layout="constrained")
    axes = figure.subplots(1, count, sharex=True, sharey=True, squeeze=False)[0]
    for axis, kind in zip(axes, audit.kinds, strict=True):
        _panel(axis, audit, kind)
    axes[0].set_ylim(bottom=_FLOOR / 5)  # of all panels; only now, since it ends autoscaling
    axes[0].set_ylabel("relative drift of the measure")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=8, frameon=False)
    figure.suptitle(f"{audit.model}: same function, other weights", x=0.01, ha="left", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)
    return path


def _panel(axis: Any, audit: Audit, kind: str) -> None:
    axis.set_xscale("log")
    axis.set_yscale("log")
    tolerance = audit.tolerances.closed
    axis.axhspan(_FLOOR / 5, tolerance, color="0.93", zorder=0)
    axis.text(
        *(0.98, tolerance), "invariant", transform=axis.get_yaxis_transform(), color="0.45"
    ).set(ha="right", va="top", fontsize=8)
    for index, (name, row) in enumerate(audit.items()):
        curve = row[kind].curve
        axis.plot(
            list(curve),
            [_drawn(drift) for drift in curve.values()],
            color=_PALETTE[index % len(_PALETTE)],
            marker=_MARKERS[index % len(_MARKERS)],
            linewidth=1.4,
            markersize=5,
            label=name,
        )
    axis.set_title(f"{kind} rescaling", fontsize=10, loc="left")
    axis.set_xlabel("spread of the factors")
    axis.grid(True, which="major", linewidth=0.4, color="0.85")
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
