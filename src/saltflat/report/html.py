"""A page: sections of facts, tables and figures in one HTML file that asks the network for nothing.

Figures are plotly's, as plain data; the script that draws them is in the file. A colour of "@0",
"@1", … is that of a palette, light or dark as the reader has it, and "@ink" that of the text.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from html import escape
from itertools import count
from math import ceil, floor, isfinite, log10
from pathlib import Path
from typing import Any, Protocol, final

from saltflat.errors import InvalidValue
from saltflat.report.store import plain
from saltflat.report.store import write as write_text
from saltflat.version import __version__


@final
@dataclass(frozen=True)
class Cell:
    """Text in a table; `order` is what it is sorted by, if that is not the text."""

    text: str
    order: float | str | None = None
    detail: str = ""  # a second line, smaller

    @property
    def key(self) -> float | str:
        """What a script sorts by; numbers that are not finite go last, as text."""
        if isinstance(self.order, float | int) and isfinite(self.order):
            return self.order
        return self.order if isinstance(self.order, str) else self.text


def number(value: float | None, digits: int = 6) -> Cell:
    """A cell with a number in it, or a dash."""
    return Cell("–", "") if value is None else Cell(f"{value:.{digits}g}", value)


@final
@dataclass(frozen=True)
class Table:
    """A table that the reader can sort by any column; those in `numeric` are set right."""

    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    numeric: frozenset[int] = frozenset()


@final
@dataclass(frozen=True)
class Figure:
    """Traces and layout as plotly takes them, and the same data in columns, for a CSV file.

    Names that come from users go through `label` where plotly is to show them. Where a screen has
    no room for annotations that are called "label" (see `ends`), a legend takes their place.
    """

    title: str
    caption: str
    traces: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any]
    columns: Mapping[str, Sequence[Any]]
    height: int = 360
    small: bool = False  # one of several side by side

    def csv(self) -> str:
        """The columns with a head, as a spreadsheet reads them."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows(zip(*self.columns.values(), strict=True))
        return text.getvalue()


@final
@dataclass(frozen=True)
class Section:
    """A part of a page, under a heading."""

    title: str
    text: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    table: Table | None = None
    figures: Sequence[Figure] = ()
    notes: Sequence[str] = ()


class Sectioned(Protocol):
    """A result that a page can show."""

    def sections(self) -> list[Section]: ...


def label(name: str) -> str:
    """A name as plotly is to show it: what looks like its markup comes out as text."""
    return escape(name, quote=False)


def ticks(values: Iterable[float]) -> dict[str, Any]:
    """Marks at 1, 2 and 5 times powers of ten for a logarithmic axis, decades if these are many."""
    sizes = [log10(value) for value in values if value > 0 and isfinite(value)]
    if not sizes:
        return {}
    low, high = min(sizes), max(sizes)
    steps = (1, 2, 5) if high - low < 3 else (1,)
    every = max(1, ceil((high - low) / 8))
    powers = range(floor(low) - 1, ceil(high) + 2)
    marks = [m * 10.0**k for k in powers if k % every == 0 for m in steps]
    return {"tickvals": marks, "ticktext": [f"{mark:g}" for mark in marks]}


def ends(
    heights: Mapping[tuple[str, int], float], bottom: float, top: float, gap: float
) -> list[dict[str, Any]]:
    """Names beside the ends of lines, by (name, colour) and height on the axis.

    They are moved apart to at least `gap` of the axis, and stay between `bottom` and `top`.
    """
    order = sorted(heights, key=lambda key: heights[key])
    places = [(heights[key] - bottom) / (top - bottom) for key in order]
    for k in range(1, len(places)):
        places[k] = max(places[k], places[k - 1] + gap)
    limit = max(1.0, gap * len(places))
    for k in reversed(range(len(places))):
        places[k] = min(places[k], limit - gap * (len(places) - 1 - k))
    return [
        {
            "name": "label",
            "text": label(name),
            "font": {"color": f"@{colour}", "size": 11},
            "x": 1.01,
            "xref": "paper",
            "xanchor": "left",
            "y": place,
            "yref": "paper",
            "yanchor": "middle",
            "showarrow": False,
        }
        for (name, colour), place in zip(order, places, strict=True)
    ]


def write(path: str | Path, title: str, sections: Sequence[Section]) -> Path:
    """Write the page to a .html file, whole or not at all."""
    path = Path(path)
    if path.suffix != ".html":
        raise InvalidValue(f"A page is saved as .html. Got {path.name!r}.")
    write_text(path, render(title, sections))
    return path


def render(title: str, sections: Sequence[Section]) -> str:
    """The page as text."""
    from plotly.offline import get_plotlyjs

    numbers = count()
    figures = {id(figure): next(numbers) for each in sections for figure in each.figures}
    content = [
        {
            "traces": _finite(figure.traces),
            "layout": _finite(figure.layout),
            "csv": figure.csv(),
            "name": figure.title,
        }
        for each in sections
        for figure in each.figures
    ]
    page: str = _template().render(
        title=title,
        sections=sections,
        index=lambda figure: figures[id(figure)],
        content=content,
        plotly=get_plotlyjs() if content else "",
        version=__version__,
    )
    return page


def _finite(value: Any) -> Any:
    """As JSON has it: numbers that are not finite are null, which plotly leaves empty."""
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return _finite(plain(value)) if not isinstance(value, str | int | None) else value


@cache
def _template() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("saltflat.report", "page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html")
