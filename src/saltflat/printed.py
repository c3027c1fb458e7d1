"""How results show themselves: as text that fits the terminal, to rich, and in notebooks."""

from __future__ import annotations

import html
import shutil
from abc import abstractmethod
from collections.abc import Iterator, Sequence

from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Column, Table
from rich.text import Text

# Columns where nothing tells how many there are, and the least that a table is made for.
USUAL, LEAST = 80, 40
# Columns of a page, which scrolls.
_PAGE = 200


def columns() -> int:
    """The width of the terminal, or what COLUMNS in the environment says; 80 without either."""
    return max(LEAST, shutil.get_terminal_size((USUAL, 24)).columns)


def plain_text(renderable: RenderableType, width: int | None = None) -> str:
    """What rich would print, without colours, also in a notebook, where it would show pages."""
    console = Console(
        width=width or columns(), color_system=None, highlight=False, force_jupyter=False
    )
    with console.capture() as capture:
        console.print(renderable)
    return "\n".join(line.rstrip() for line in capture.get().rstrip().splitlines())


class Told:
    """Says what it is in a sentence, `str`, which is its representation too."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self}>"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


class Printed:
    """Is a table, drawn for the width that there is."""

    __slots__ = ()

    @abstractmethod
    def table(self, width: int) -> Table:
        """For so many columns; a narrow one leaves out what can be done without."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        yield self.table(options.max_width)

    def __str__(self) -> str:
        return plain_text(self.table(columns()))

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return html_table(self.table(_PAGE))


def html_table(table: Table) -> str:
    """A table of rich's for a page, with everything in it escaped."""
    styles = [_style(column) for column in table.columns]
    head = _row("th", [column.header for column in table.columns], styles)
    rows = zip(*(column.cells for column in table.columns), strict=True)
    body = "\n".join(_row("td", cells, styles) for cells in rows)
    title = f"<caption>{_text(table.title)}</caption>\n" if table.title else ""
    shown = f"<table>\n{title}<thead>\n{head}\n</thead>\n<tbody>\n{body}\n</tbody>\n</table>"
    notes = _text(table.caption).replace("\n", "<br>\n") if table.caption else ""
    return f"{shown}\n<p>{notes}</p>" if notes else shown


def _style(column: Column) -> str:
    """Spelt out, as notebooks have everything to the right, and break 1e-06 at its minus."""
    right = column.justify == "right"
    unbroken = "; white-space: nowrap" if right or column.no_wrap else ""
    return f"text-align: {'right' if right else 'left'}{unbroken}"


def _row(tag: str, cells: Sequence[RenderableType], styles: Sequence[str]) -> str:
    inner = "".join(
        f'<{tag} style="{style}">{_text(cell)}</{tag}>'
        for cell, style in zip(cells, styles, strict=True)
    )
    return f"<tr>{inner}</tr>"


def _text(cell: object) -> str:
    """A cell without markup, escaped."""
    return html.escape(Text.from_markup(cell).plain if isinstance(cell, str) else str(cell))
