"""Report: the measures of one model. Comparison: several reports side by side."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from math import inf, nan
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any, final

from rich.box import HEAVY_HEAD, SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from saltflat.bibliography import bibtex
from saltflat.errors import InvalidType, InvalidValue, NotMeasured, listed, nearest, optional
from saltflat.measurement import Measurement
from saltflat.printed import Printed
from saltflat.report import html, sections, store
from saltflat.report.provenance import Provenance
from saltflat.report.standing import Standing
from saltflat.report.verdict import SAME, Verdict, alike, judged, without_minimum
from saltflat.report.words import ASK, absent, gradients, invariance, settings
from saltflat.result import Density, Diagonal, Results

if TYPE_CHECKING:
    import pandas


@final
@dataclass(frozen=True, repr=False)
class Report(Results[Measurement]):
    """Measurements by name.

    `skipped` says why a measure is not among them. `left_out` are those that nobody asked for and
    that are not computed unasked, with their prices in gradients. `standing` tells the loss, and
    whether the model is at a minimum of it; None in files of before there was one.

    The column "sampling" holds `Measurement.sampling` as a share of the value: what is exact on
    these samples is still an estimate for the population that they come from.

    The column "cost, gradients" holds what was spent: passes over the data, counted at fixed prices
    (see `saltflat.work`), a gradient being one forward and one backward pass. The sweep that
    measures share stands once, in a row at the end; what a measure took besides is in its own.

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
    standing: Standing | None = None

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
        known = [*self.measurements, *self.skipped, *self.left_out]
        raise NotMeasured(f"{name!r} was not asked for. {nearest(name, known)}")

    def save(
        self,
        path: str | Path,
        *,
        audit: html.Sectioned | None = None,
        density: Density | None = None,
        diagonal: Diagonal | None = None,
        landscape: html.Sectioned | Sequence[html.Sectioned] = (),
        comparison: Comparison | None = None,
        history: Sequence[sections.Moment] | sections.Monitored = (),
    ) -> Path:
        """Write the report to a file, whole or not at all: .json to be loaded again, or .html.

        A page is one file that opens without a network. It also shows what is passed along, for a
        report never computes anything: an `Audit`, a `Density`, a `Diagonal`, one `Landscape` or
        several, a `Comparison`, and a `Monitor` or its history.
        """
        parts = {
            "audit": audit,
            "density": density,
            "diagonal": diagonal,
            "landscape": landscape,
            "comparison": comparison,
            "history": history,
        }
        given = {name: part for name, part in parts.items() if part not in (None, (), [])}
        if Path(path).suffix == ".html":
            title = f"Flatness of {self.provenance.model}"
            return html.write(path, title, [*self.sections(), *sections.further(given)])
        if given:
            raise InvalidValue(
                f"A report is saved as .json without {', '.join(given)}, which only a .html file "
                f"shows. Got {Path(path).name!r}."
            )
        return store.save(path, "A report", "report", store.plain(self))

    def sections(self) -> list[html.Section]:
        """What a page shows of it."""
        p = self.provenance
        return [
            sections.summary(p, self.standing, self.notes),
            sections.measures(self.measurements, self.skipped, self.left_out, p.gradients),
            *sections.layers(self.measurements),
            *sections.neurons(self.measurements),
        ]

    @classmethod
    def load(cls, path: str | Path) -> Report:
        """Read a report that `save` wrote."""
        complaint = f"{path} is a damaged report"
        return store.decoded(cls, store.read(path, "report"), complaint, _upgraded)

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
                "sampling": nan if m.sampling is None else m.sampling,
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
            word = f"not computed: {ASK.get()}"
            rows.append({"measure": name, "value": nan, "skipped": word, "cost_gradients": price})
        frame: pandas.DataFrame = optional("pandas", "A DataFrame").DataFrame(rows)
        return frame.set_index("measure")

    def compare(self, other: Report, names: tuple[str, str] = ("this", "other")) -> Comparison:
        """The two side by side, and whether that is meaningful."""
        if not isinstance(other, Report):
            raise InvalidType(
                f"A report is compared with another report. Got {type(other).__name__}; measure it "
                "first, or write sf.compare({'a': model, 'b': model}, data)."
            )
        return Comparison({names[0]: self, names[1]: other})

    def layers(self) -> Grid:
        """The values by layer, a column a measure; it prints itself."""
        columns = {m.name: dict(m.by_layer) for m in self.values() if m.by_layer}
        return Grid("By layer", "layer", columns)

    def neurons(self, layer: str) -> Grid:
        """The values by neuron of one layer, a column a measure; it prints itself."""
        columns = {
            f"{m.name}, {m.neurons}" if m.neurons else m.name: m.by_neuron[layer]
            for m in self.values()
            if layer in m.by_neuron
        }
        if not columns:
            known = {name: None for m in self.values() for name in m.by_neuron}
            raise InvalidValue(f"No values by neuron of layer {layer!r}. {nearest(layer, known)}")
        by_number = {k: dict(enumerate(v.tolist())) for k, v in columns.items()}
        return Grid(f"By neuron, layer {layer}", "neuron", by_number)

    def cite(self) -> str:
        """BibTeX of the papers that the measures are from, each once."""
        return bibtex(*dict.fromkeys(key for m in self.values() for key in m.references))

    def table(self, width: int) -> Table:
        p, wide = self.provenance, width >= WIDE
        title = escape(f"{p.model}, {p.parameters:,} parameters, {p.used}, {p.loss}")
        if p.curvature == "ggn":
            title += "; of the Gauss–Newton matrix, not the Hessian"
        table, sampled = framed(wide, title), any(m.sampled for m in self.values())
        kept = {"sampling": sampled, "cost, gradients": wide, "with": wide}
        columns = [column for column in _COLUMNS if kept.get(column, True)]
        rows = [self._row(m, wide) for m in self.values()]
        if below := not wide and _needed(rows, columns) > width:
            columns.remove("invariant to")
        for column in columns:
            right = column in ("value", "sampling", "cost, gradients")
            wraps = column in ("invariant to", "with", "cost, gradients")
            folds = below and column == "measure"  # rather than cut a value
            table.add_column(
                column,
                justify="right" if right else "left",
                no_wrap=not (wraps or folds),
                overflow="fold",
            )
        for row in rows + self._others() if wide else rows:
            table.add_row(*(row.get(column, "") for column in columns))
        if wide and p.gradients:
            table.add_section()
            for row in self._shared():
                table.add_row(*(row.get(column, "") for column in columns))
        table.caption = escape("\n".join(self._captions(wide, sampled, below))) or None
        return table

    def _row(self, m: Measurement, wide: bool) -> dict[str, str]:
        return {
            "measure": escape(m.name),
            "value": f"{m.value:.6g}",
            "certainty": m.certainty,
            "sampling": m.sampled,
            "cost, gradients": gradients(self.provenance.gradients.get(m.name)),
            "invariant to": invariance(m.invariant_to, short=not wide),
            "with": escape(settings(m)),
        }

    def _others(self) -> list[dict[str, str]]:
        """The rows of what was not measured."""
        skipped = [
            {"measure": name, "certainty": f"[dim]{absent(why)}[/]", "with": escape(why)}
            for name, why in self.skipped.items()
        ]
        left_out = [
            {
                "measure": name,
                "certainty": "[dim]not computed[/]",
                "cost, gradients": f"about {price:.0f}",
                "with": ASK.get(),
            }
            for name, price in self.left_out.items()
        ]
        return [{**row, "value": "–"} for row in skipped + left_out]

    def _shared(self) -> list[dict[str, str]]:
        """The rows of what all measures share."""
        steps = {
            "shared by all": "curvature",
            "is it a minimum?": "standing",
            "fewer samples": "looks",
        }
        spent = self.provenance.gradients
        return [
            {"measure": words, "cost, gradients": gradients(spent[step])}
            for words, step in steps.items()
            if step in spent
        ]

    def _captions(self, wide: bool, sampled: bool, below: bool) -> list[str]:
        lines = [] if self.standing is None else [str(self.standing)]
        lines += self.notes
        if below:
            kinds = (f"{m.name} {invariance(m.invariant_to, short=True)}" for m in self.values())
            lines.append(f"invariant to: {'; '.join(kinds)}")
        if sampled:
            lines.append("sampling: standard error for the population that the samples come from")
        if not wide:
            lines += [f"{name} {absent(why)}: {why}" for name, why in self.skipped.items()]
            chosen = {m.name: settings(m) for m in self.values()}
            if told := [f"{name} {text}" for name, text in chosen.items() if text]:
                lines.append(f"with {'; '.join(told)}")
            if prices := [f"{n} (about {cost:.0f} gradients)" for n, cost in self.left_out.items()]:
                lines.append(f"not computed: {', '.join(prices)}; {ASK.get()}")
            if spent := sum(self.provenance.gradients.values()):
                lines.append(f"cost: {spent:.0f} gradients")
        notes = [f"{m.name}: {note}" for m in self.values() for note in m.notes]
        return [*lines, *notes]


_COLUMNS = "measure", "value", "certainty", "sampling", "cost, gradients", "invariant to", "with"


def _needed(rows: Sequence[Mapping[str, str]], columns: Sequence[str]) -> int:
    """The least width of a narrow report: "invariant to" wraps between words, nothing else does."""
    widths = [max(len(each) for each in (c, *(row.get(c, "") for row in rows))) for c in columns]
    widths[columns.index("invariant to")] = len("invariant")
    return sum(widths) + _GAP * (len(columns) - 1)


_GAP = 3  # between columns without lines


@final
@dataclass(frozen=True, repr=False)
class Comparison(Results[Report]):
    """Reports by name. `problems` says why their numbers cannot be compared, if so; `verdicts` what
    the measures say of any two of them; `failed` which models could not be measured, and why.

    Examples
    --------
    >>> import torch, saltflat as sf
    >>> model, x, y = torch.nn.Linear(2, 1, bias=False), torch.eye(2), torch.zeros(2, 1)
    >>> few, many = (sf.measure(model, (x[:n], y[:n]), "mse") for n in (1, 2))
    >>> sf.Comparison({"few": few, "many": many}).problems[1]
    'the number of samples differs (few: 1, many: 2)'
    """

    reports: Mapping[str, Report]
    failed: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.reports, Mapping):
            raise InvalidType(
                "A Comparison needs a mapping from names to reports, e.g. {'sgd': a, 'sam': b}. "
                f"Got {type(self.reports).__name__}."
            )
        if not self.reports:
            raise InvalidValue("There is nothing to compare: no reports were given.")

    @cached_property
    def problems(self) -> tuple[str, ...]:
        lines = []
        for key, text in SAME.items():
            sources = {name: r.provenance for name, r in self.items()}
            if not all(alike(key, *pair) for pair in combinations(sources.values(), 2)):
                shown = ", ".join(f"{name}: {_shown(key, p)}" for name, p in sources.items())
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
    def standing(self) -> dict[str, Standing | None]:
        """Where every model stands."""
        return {name: report.standing for name, report in self.items()}

    @property
    def left_out(self) -> dict[str, float]:
        """The measures that no report has because nobody asked for them, and their prices."""
        known = self.measures
        prices = {n: cost for report in self.values() for n, cost in report.left_out.items()}
        return {name: cost for name, cost in prices.items() if name not in known}

    def verdict(self, measure: str, first: str, second: str) -> Verdict:
        """What a measure says of two of the models: which is flatter, or why that is not known."""
        if measure not in self.measures:
            raise NotMeasured(f"{measure!r} was not measured. {nearest(measure, self.measures)}")
        return judged(measure, (first, second), (self[first], self[second]))

    @cached_property
    def verdicts(self) -> tuple[Verdict, ...]:
        """Of every measure and every two of the models."""
        pairs = list(combinations(self.reports.items(), 2))
        return tuple(
            judged(measure, (first, second), (one, two))
            for measure in self.measures
            for (first, one), (second, two) in pairs
        )

    def flattest(self, measure: str) -> str:
        """`b flatter` of two models and `b flattest` of several, or what else is to be said."""
        found = [v for v in self.verdicts if v.measure == measure]
        for name in self:
            own = [v for v in found if name in (v.first, v.second)]
            if own and all(v.flatter == name for v in own):
                return f"{name} {'flatter' if len(self) == 2 else 'flattest'}"
        words = {v.word for v in found}
        if len(words) == 1:
            (word,) = words
            return word if word != "flatter" else ""
        return "some not comparable" if "not comparable" in words else "not distinguishable"

    def save(self, path: str | Path) -> Path:
        """Write all to one .json file, or as a page to a .html file, whole or not at all."""
        if Path(path).suffix == ".html":
            names = " and ".join(self) if len(self) <= _TITLED else f"{len(self)} models"
            return html.write(path, f"Comparison of {names}", self.sections())
        return store.save(path, "A comparison", "comparison", store.plain(self))

    def sections(self) -> list[html.Section]:
        """What a page shows of it."""
        values = {name: report.measurements for name, report in self.items()}
        stands = {name: report.standing for name, report in self.items()}
        verdicts = {measure: self.flattest(measure) for measure in self.measures}
        return [sections.comparison(values, verdicts, stands, self._captions(wide=False))]

    @classmethod
    def load(cls, path: str | Path) -> Comparison:
        """Read a comparison that `save` wrote."""
        content = store.read(path, "comparison")
        return store.decoded(cls, content, f"{path} is a damaged comparison", _all_upgraded)

    def to_pandas(self) -> pandas.DataFrame:
        """One row for each model and measure, as in `Report.to_pandas`, with the losses, and the
        answers to whether they are minima (`Standing.word`).

        Models that failed have no row; the frame's `attrs["failed"]` has them.
        """
        frames = []
        for name, report in self.items():
            frame = report.to_pandas().reset_index()
            frame.insert(0, "model", name)
            stand = report.standing
            frame["loss"] = nan if stand is None else stand.loss
            frame["a minimum?"] = "" if stand is None else stand.word
            frames.append(frame)
        joined: pandas.DataFrame = optional("pandas", "A DataFrame").concat(frames)
        joined = joined.set_index(["model", "measure"])
        joined.attrs["failed"] = dict(self.failed)
        return joined

    def table(self, width: int) -> Table:
        values = [
            (measure, [_cell(r.measurements.get(measure)) for r in self.values()])
            for measure in self.measures
        ]
        rows = [*self._standings(), *values]
        longest = [max(map(len, cells)) for cells in zip(self, *(c for _, c in rows), strict=True)]
        need = max(len(name) for name, _ in rows) + sum(3 + length for length in longest)
        need += (3 + _VERDICT) * (len(self) > 1)
        if need > width:
            columns = [max(map(len, (*_broken(n).split("\n"), *cells))) for n, cells in rows]
            turned = max(map(len, self)) + sum(3 + length for length in columns)
            return self._long(rows) if turned > width else self._by_model(rows)
        return self._side_by_side(rows, wide=width >= max(WIDE, need + 40))

    def _side_by_side(self, rows: list[tuple[str, list[str]]], wide: bool) -> Table:
        """A column a model."""
        several, table = len(self) > 1, framed(wide, "")
        table.add_column("measure", no_wrap=True)
        for name in self:
            table.add_column(escape(name), justify="right", no_wrap=True)
        if several:
            table.add_column("verdict")
        if wide:
            table.add_column("invariant to")
        before = len(rows) - len(self.measures)
        for index, (name, cells) in enumerate(rows):
            own = index >= before
            verdict = [escape(self.flattest(name)) if own else ""] if several else []
            invariant = [self._invariance(name) if own else ""] if wide else []
            cells = [escape(name), *cells, *verdict, *invariant]
            table.add_row(*cells, end_section=index == before - 1)
        for name, price in self.left_out.items() if wide else ():
            words = f"[dim]not computed, about {price:.0f} gradients: {ASK.get()}[/]"
            table.add_row(name, *("–" for _ in self), *([""] * several), words)
        table.caption = escape("\n".join(self._captions(wide))) or None
        return table

    def _by_model(self, rows: list[tuple[str, list[str]]]) -> Table:
        """A row a model, for many models and few measures; the caption has their names whole."""
        table, known = framed(False, ""), self.measures
        table.add_column("model", no_wrap=True)
        for name, _ in rows:
            table.add_column(escape(_broken(name)), justify="right", no_wrap=True)
        for model, *cells in zip(self, *(cells for _, cells in rows), strict=True):
            table.add_row(escape(model), *cells)
        if len(self) > 1:
            table.add_section()
            verdicts = [self.flattest(name) if name in known else "" for name, _ in rows]
            table.add_row("verdict", *(escape(words.replace(" ", "\n")) for words in verdicts))
        kinds = [f"{name} is invariant to {self._invariance(name)}" for name in known]
        table.caption = escape("\n".join([*self._captions(False), *kinds]))
        return table

    def _long(self, rows: list[tuple[str, list[str]]]) -> Table:
        """A row a model and measure, where there is no room for a column a model."""
        table, before = framed(False, ""), len(rows) - len(self.measures)
        table.add_column("measure", no_wrap=True)
        table.add_column("model", overflow="fold")
        table.add_column("value", justify="right", no_wrap=True)
        for index, (name, cells) in enumerate(rows):
            for k, (model, cell) in enumerate(zip(self, cells, strict=True)):
                table.add_row("" if k else escape(name), escape(model), cell)
            if index >= before:
                verdict = self.flattest(name) if len(self) > 1 else ""
                table.add_row("", f"[dim]{escape(verdict)}[/]", "")
        kinds = [f"{name} is invariant to {self._invariance(name)}" for name in self.measures]
        table.caption = escape("\n".join([*self._captions(False), *kinds]))
        return table

    def _invariance(self, measure: str) -> str:
        return invariance(next(r[measure] for r in self.values() if measure in r).invariant_to)

    def _standings(self) -> Iterator[tuple[str, list[str]]]:
        stands = list(self.standing.values())
        if not any(stands):
            return
        yield "loss", ["–" if s is None else f"{s.loss:.4g}" for s in stands]
        if any(s is not None and s.accuracy is not None for s in stands):
            right = [None if s is None else s.accuracy for s in stands]
            yield "accuracy", ["–" if each is None else f"{100 * each:.4g} %" for each in right]
        yield "a minimum?", ["–" if s is None else s.word for s in stands]

    def _captions(self, wide: bool) -> list[str]:
        lines = [f"{name} FAILED: {shorten(why, _WHY)}" for name, why in self.failed.items()]
        if self.problems:
            lines += ["Not comparable:", *(f"  {problem}" for problem in self.problems)]
        parts: dict[str, list[str]] = {}
        for name, report in self.items():
            if report.provenance.population:
                parts.setdefault(report.provenance.used, []).append(name)
        lines += [f"on {used}, drawn at random: {_joined(who)}" for used, who in parts.items()]
        for measure in self.measures:
            found = {name: r[measure] for name, r in self.items() if measure in r}
            if unsure := [name for name, m in found.items() if not m.sign_known]:
                lines.append(f"sign of {measure} unknown, within its error: {_joined(unsure)}")
        lines += [f"{' and '.join(group)} are the same function" for group in self._twins()]
        away = without_minimum(self.standing)
        lines += [f"{what}, and so not comparable: {_joined(who)}" for what, who in away.items()]
        apart = {name for who in away.values() for name in who}
        reasons: dict[str, dict[str, None]] = {}
        for v in self.verdicts:
            who = v.measure if v.word == "flatter" else f"{v.first} and {v.second}"
            if v.reason and v.reason not in SAME.values() and not {v.first, v.second} & apart:
                reasons.setdefault(v.reason, {})[who] = None
        told = [f"{_joined(who)}: {reason}" for reason, who in reasons.items()]
        lines += told if len(told) <= _TOLD else [*told[:_TOLD], "and more: see verdicts"]
        if self.left_out and not wide:
            prices = [f"{n} (about {cost:.0f} gradients)" for n, cost in self.left_out.items()]
            lines.append(f"not computed: {', '.join(prices)}; {ASK.get()}")
        return lines

    def _twins(self) -> list[dict[str, None]]:
        """The models that are the same function, together."""
        groups: list[dict[str, None]] = []
        for v in self.verdicts:
            if v.word == "same function":
                own = [group for group in groups if v.first in group or v.second in group]
                if not own:
                    groups.append({})
                (own or groups[-1:])[0].update({v.first: None, v.second: None})
        return groups


def _shown(key: str, source: Provenance) -> str:
    """What a report was measured with; a user's loss with a hash of its code."""
    code = f" with code {source.loss_code}" if key == "loss" and source.loss_code else ""
    return f"{getattr(source, key)}{code}"


def _cell(m: Measurement | None) -> str:
    if m is None:
        return "–"
    return f"{m.value:.5g}" + (f" ± {m.stderr:.2g}" if m.stderr else "")


def _joined(names: Collection[str]) -> str:
    """All of them, or the first few of many."""
    return ", ".join(names) if len(names) <= _NAMED else listed(names)


def _broken(name: str) -> str:
    """A measure's name in lines that end where its words do."""
    return name.replace("_", "_\n")


# From so many columns on, tables have frames and all their columns.
WIDE = 110
# Columns that a verdict takes at least, in two lines.
_VERDICT = 15
# Reasons that are told below a comparison, and the letters that a failure has there.
_TOLD, _WHY = 8, 300
# Models that the title of a page names, and that a line below a table does.
_TITLED, _NAMED = 4, 12


def framed(wide: bool, title: str) -> Table:
    """An empty table; where room is scarce, without lines between columns."""
    box = HEAVY_HEAD if wide else SIMPLE_HEAD
    return Table(
        title=title or None,
        title_justify="left",
        caption_justify="left",
        box=box,
        pad_edge=wide,
        show_edge=wide,
    )


@final
@dataclass(frozen=True, repr=False)
class Grid(Printed):
    """Values of several measures side by side: `columns` by name, each by what is in the rows."""

    title: str
    rows: str
    columns: Mapping[str, Mapping[Any, float]]

    def table(self, width: int) -> Table:
        table = framed(width >= WIDE, escape(self.title))
        numbers = all(isinstance(key, int) for key in self._keys())
        table.add_column(self.rows, justify="right" if numbers else "left", overflow="fold")
        for name in self.columns:
            table.add_column(name, justify="right", overflow="fold")
        for key in self._keys():
            cells = [f"{v[key]:.5g}" if key in v else "" for v in self.columns.values()]
            table.add_row(escape(str(key)), *cells)
        return table

    def _keys(self) -> list[Any]:
        return list(dict.fromkeys(key for values in self.columns.values() for key in values))

    def to_pandas(self) -> pandas.DataFrame:
        """A row for each layer or neuron, a column a measure."""
        frame: pandas.DataFrame = optional("pandas", "A DataFrame").DataFrame(self.columns)
        return frame.rename_axis(self.rows)


def _all_upgraded(content: dict[str, Any]) -> dict[str, Any]:
    return content | {"reports": {n: _upgraded(r) for n, r in content["reports"].items()}}


def _upgraded(content: dict[str, Any]) -> dict[str, Any]:
    """As written before bounds had a direction, errors degrees of freedom and neurons a field."""
    for m in content.get("measurements", {}).values():
        if m.get("lower_bound"):
            m["bound"] = "lower"
        if "neurons" not in m:
            m["neurons"] = m["details"].pop("neurons", "")
        m.setdefault("degrees", inf if m["exact"] or m.get("bound") else nan)
    return content
