"""Report: the measures of one model. Comparison: several reports side by side."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import inf, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, final, get_args

from rich.markup import escape
from rich.table import Table

from saltflat.errors import InvalidValue, NotMeasured, nearest, optional
from saltflat.measurement import EVERY_RESCALING, Measurement, Symmetry
from saltflat.report import store
from saltflat.report.provenance import Provenance
from saltflat.result import Results

if TYPE_CHECKING:
    import pandas


@final
@dataclass(frozen=True, repr=False)
class Report(Results[Measurement]):
    """Measurements by name.

    `skipped` says why a measure is not among them. `left_out` are those that nobody asked for and
    that are not computed unasked, with their prices in gradients.

    The column "cost, gradients" holds what was spent: passes over the data, counted at fixed prices
    (see `saltflat.work`), a gradient being one forward and one backward pass. The sweep that
    measures share stands once, in the last row; what a measure took besides is in its own.

    Examples
    --------
    >>> import torch, saltflat as sf
    >>> model, x, y = torch.nn.Linear(2, 1, bias=False), torch.eye(2), torch.zeros(2, 1)
    >>> report = sf.measure(model, (x, y), "mse", measures=["hessian_trace"])
    >>> path = report.save("run.json")
    >>> sf.Report.load(path) == report
    True
    """

    measurements: Mapping[str, Measurement]
    skipped: Mapping[str, str]
    provenance: Provenance
    notes: tuple[str, ...] = ()
    left_out: Mapping[str, float] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Measurement:
        if name in self.measurements:
            return self.measurements[name]
        if name in self.skipped:
            raise NotMeasured(f"{name} was not measured: {self.skipped[name]}")
        if name in self.left_out:
            raise NotMeasured(
                f"{name} was not computed: it costs about {self.left_out[name]:.0f} gradients. "
                f'Write sf.measure(model, data, measures=["{name}"]), or measures="all".'
            )
        raise NotMeasured(f"{name!r} was not asked for. {nearest(name, self.measurements)}")

    def save(self, path: str | Path) -> Path:
        """Write the report to a .json file, whole or not at all."""
        return store.save(path, "A report", store.plain(self))

    @classmethod
    def load(cls, path: str | Path) -> Report:
        """Read a report that `save` wrote."""
        complaint = f"{path} is a damaged report"
        return store.decoded(cls, store.read(path), complaint, _upgraded)

    def to_pandas(self) -> pandas.DataFrame:
        """One row a measure; one that was skipped or left out has the value NaN, and says why."""
        spent = self.provenance.gradients
        rows = [
            {
                "measure": m.name,
                "value": m.value,
                "exact": m.exact,
                "stderr": m.stderr,
                "degrees": m.degrees,
                "gap": m.gap,
                "bound": m.bound,
                "invariant_to": ", ".join(sorted(m.invariant_to)),
                "cost_gradients": spent.get(m.name, nan),
            }
            for m in self.values()
        ]
        for name, reason in self.skipped.items():
            rows.append({"measure": name, "value": nan, "skipped": reason})
        for name, price in self.left_out.items():
            word = f"not computed: {ASK}"
            rows.append({"measure": name, "value": nan, "skipped": word, "cost_gradients": price})
        frame: pandas.DataFrame = optional("pandas", "A DataFrame").DataFrame(rows)
        return frame.set_index("measure")

    def compare(self, other: Report, names: tuple[str, str] = ("this", "other")) -> Comparison:
        """The two side by side, and whether that is meaningful."""
        return Comparison({names[0]: self, names[1]: other})

    def layers(self) -> Table:
        """The values by layer, a column a measure."""
        columns = {m.name: m.by_layer for m in self.values() if m.by_layer}
        return _grid("By layer", "layer", columns)

    def neurons(self, layer: str) -> Table:
        """The values by neuron of one layer, a column a measure."""
        columns = {
            f"{m.name}, {m.neurons}" if m.neurons else m.name: m.by_neuron[layer]
            for m in self.values()
            if layer in m.by_neuron
        }
        if not columns:
            known = {name: None for m in self.values() for name in m.by_neuron}
            raise InvalidValue(f"No values by neuron of layer {layer!r}. {nearest(layer, known)}")
        by_number = {k: dict(enumerate(v.tolist())) for k, v in columns.items()}
        return _grid(f"By neuron, layer {layer}", "neuron", by_number, justify="right")

    def __rich__(self) -> Table:
        p = self.provenance
        title = escape(f"{p.model}, {p.parameters:,} parameters, {p.samples:,} samples, {p.loss}")
        if p.curvature == "ggn":
            title += "; of the Gauss–Newton matrix, not the Hessian"
        table = Table(title=title, title_justify="left", caption_justify="left")
        table.add_column("measure", no_wrap=True)
        table.add_column("value", justify="right", no_wrap=True)
        table.add_column("certainty", no_wrap=True)
        table.add_column("cost, gradients", justify="right")
        table.add_column("invariant to")
        table.add_column("with")
        for m in self.values():
            kinds, cost = invariance(m.invariant_to), _gradients(p.gradients.get(m.name))
            row = m.name, f"{m.value:.6g}", m.certainty, cost, kinds
            table.add_row(*row, escape(_settings(m)))
        for name, reason in self.skipped.items():
            table.add_row(name, "–", "[dim]does not apply[/]", "", "", escape(reason))
        for name, price in self.left_out.items():
            words = "[dim]not computed[/]", f"about {price:.0f}", "", ASK
            table.add_row(name, "–", *words)
        if p.gradients:
            table.add_section()
            table.add_row("shared by all", "", "", _gradients(p.gradients["curvature"]), "", "")
        notes = [f"{m.name}: {note}" for m in self.values() for note in m.notes]
        table.caption = escape("\n".join([*self.notes, *notes])) or None
        return table

    def _width(self) -> int:
        return 130


# What is to be written for a measure that was left out.
ASK = 'measures="all"'


def _gradients(count: float | None) -> str:
    """A number of gradients; nothing for what is made of what is shared."""
    return "" if not count else f"{count:.1f}" if count < 10 else f"{count:.0f}"


# What must be equal for numbers to be comparable, and how to say that it is not.
_SAME = {
    "data_hash": "the data differ",
    "samples": "the number of samples differs",
    "loss": "the loss differs",
    "curvature": "the curvature differs",
}


@final
@dataclass(frozen=True, repr=False)
class Comparison(Results[Report]):
    """Reports by name. `problems` says why their numbers cannot be compared, if so.

    Examples
    --------
    >>> import torch, saltflat as sf
    >>> model, x, y = torch.nn.Linear(2, 1, bias=False), torch.eye(2), torch.zeros(2, 1)
    >>> few, many = (sf.measure(model, (x[:n], y[:n]), "mse") for n in (1, 2))
    >>> sf.Comparison({"few": few, "many": many}).problems[1]
    'the number of samples differs (few: 1, many: 2)'
    """

    reports: Mapping[str, Report]

    def __post_init__(self) -> None:
        if not self.reports:
            raise InvalidValue("There is nothing to compare: no reports were given.")

    @cached_property
    def problems(self) -> tuple[str, ...]:
        lines = []
        for key, text in _SAME.items():
            values = {name: getattr(r.provenance, key) for name, r in self.items()}
            if len(set(values.values())) > 1:
                shown = ", ".join(f"{name}: {value}" for name, value in values.items())
                lines.append(f"{text} ({shown})")
        for name in self.measures:
            settings = {n: repr(dict(r[name].settings)) for n, r in self.items() if name in r}
            if len(set(settings.values())) > 1:
                lines.append(f"the settings of {name} differ")
        return tuple(lines)

    @property
    def measures(self) -> list[str]:
        """Names of the measures that any report has."""
        return list(dict.fromkeys(name for report in self.values() for name in report))

    @property
    def left_out(self) -> dict[str, float]:
        """The measures that no report has because nobody asked for them, and their prices."""
        known = self.measures
        prices = {n: cost for report in self.values() for n, cost in report.left_out.items()}
        return {name: cost for name, cost in prices.items() if name not in known}

    def save(self, path: str | Path) -> Path:
        """Write the comparison to a .json file, whole or not at all."""
        return store.save(path, "A comparison", store.plain(self))

    def __rich__(self) -> Table:
        table = Table(caption_justify="left")
        table.add_column("measure", no_wrap=True)
        for name in self:
            table.add_column(escape(name), justify="right", no_wrap=True)
        table.add_column("invariant to")
        for measure in self.measures:
            cells = []
            for report in self.values():
                m = report.measurements.get(measure)
                error = f" ± {m.stderr:.2g}" if m is not None and m.stderr else ""
                cells.append("–" if m is None else f"{m.value:.5g}{error}")
            one = next(r[measure] for r in self.values() if measure in r)
            table.add_row(measure, *cells, invariance(one.invariant_to))
        for name, price in self.left_out.items():
            words = f"[dim]not computed, about {price:.0f} gradients: {ASK}[/]"
            table.add_row(name, *("–" for _ in self), words)
        if self.problems:
            lines = "\n".join(f"  {problem}" for problem in self.problems)
            table.caption = escape(f"Not comparable:\n{lines}")
        return table

    def _width(self) -> int:
        return max(120, 60 + sum(max(14, len(name) + 3) for name in self))


def invariance(kinds: Collection[str]) -> str:
    """`every rescaling`, `layer, neuron`, or `nothing`."""
    if set(kinds) == EVERY_RESCALING:
        return "every rescaling"
    return ", ".join(kind for kind in get_args(Symmetry) if kind in kinds) or "nothing"


def _grid(
    title: str,
    rows: str,
    columns: Mapping[str, Mapping[Any, float]],
    justify: Literal["left", "right"] = "left",
) -> Table:
    """A column for each name, a row for each key that any of them has."""
    table = Table(title=escape(title), title_justify="left")
    table.add_column(rows, justify=justify)
    for name in columns:
        table.add_column(name, justify="right")
    for key in dict.fromkeys(key for values in columns.values() for key in values):
        cells = [f"{values[key]:.5g}" if key in values else "" for values in columns.values()]
        table.add_row(str(key), *cells)
    return table


def _upgraded(content: dict[str, Any]) -> dict[str, Any]:
    """As written before bounds had a direction, errors degrees of freedom and neurons a field."""
    for m in content.get("measurements", {}).values():
        if m.get("lower_bound"):
            m["bound"] = "lower"
        if "neurons" not in m:
            m["neurons"] = m["details"].pop("neurons", "")
        m.setdefault("degrees", inf if m["exact"] or m.get("bound") else nan)
    return content


def _settings(m: Measurement) -> str:
    shown = {k: v for k, v in m.settings.items() if v is not None and v is not False}
    return ", ".join(f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in shown.items())
