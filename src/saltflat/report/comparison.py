"""Several reports side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import final

from rich.markup import escape
from rich.table import Table

from saltflat.errors import InvalidValue
from saltflat.printing import plain_text
from saltflat.report.report import Report, invariance

# What must be equal for numbers to be comparable, and how to say that it is not.
_SAME = {
    "data_hash": "the data differ",
    "samples": "the number of samples differs",
    "loss": "the loss differs",
    "curvature": "the curvature differs",
}


@final
@dataclass(frozen=True, repr=False)
class Comparison(Mapping[str, Report]):
    """Reports by name. `problems` says why their numbers cannot be compared, if so."""

    reports: Mapping[str, Report]

    def __post_init__(self) -> None:
        if not self.reports:
            raise InvalidValue("There is nothing to compare: no reports were given.")

    def __getitem__(self, name: str) -> Report:
        return self.reports[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.reports)

    def __len__(self) -> int:
        return len(self.reports)

    @cached_property
    def problems(self) -> tuple[str, ...]:
        found = []
        for key, text in _SAME.items():
            values = {name: getattr(r.provenance, key) for name, r in self.items()}
            if len(set(values.values())) > 1:
                shown = ", ".join(f"{name}: {value}" for name, value in values.items())
                found.append(f"{text} ({shown})")
        for name in self.measures:
            settings = {n: repr(dict(r[name].settings)) for n, r in self.items() if name in r}
            if len(set(settings.values())) > 1:
                found.append(f"the settings of {name} differ")
        return tuple(found)

    @property
    def measures(self) -> list[str]:
        """Names of the measures that any report has."""
        return list(dict.fromkeys(name for report in self.values() for name in report))

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
            table.add_row(measure, *cells, invariance(one))
        if self.problems:
            lines = "\n".join(f"  {problem}" for problem in self.problems)
            table.caption = escape(f"Not comparable:\n{lines}")
        return table

    def __str__(self) -> str:
        wide = 60 + sum(max(14, len(name) + 3) for name in self)
        return plain_text(self, width=max(120, wide))

    __repr__ = __str__
