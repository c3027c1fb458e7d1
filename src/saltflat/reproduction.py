"""What came out of an experiment of a paper: our numbers beside the published ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from rich.markup import escape
from rich.table import Table

from saltflat.printed import Printed
from saltflat.report import store
from saltflat.sweep import Run
from saltflat.work import spelled

_COLUMNS = ("what", "published", "ours", "difference", "note")
_NONE = "–"


@final
@dataclass(frozen=True)
class Row:
    """One number of a paper beside ours, with the standard error over seeds where there is one."""

    what: str
    ours: float
    error: float | None = None
    published: float | None = None
    note: str = ""

    @property
    def difference(self) -> float | None:
        return None if self.published is None else self.ours - self.published

    @property
    def cells(self) -> tuple[str, ...]:
        """In words: what, published, ours, difference, note."""
        ours = _digits(self.ours) + ("" if self.error is None else f" ± {self.error:.2g}")
        return self.what, _digits(self.published), ours, _digits(self.difference), self.note


def _digits(value: float | None) -> str:
    return _NONE if value is None else f"{value:.4g}"


@final
@dataclass(frozen=True, repr=False)
class Reproduction(Printed):
    """What came out of an experiment: all runs, and how and where they were made.

    `saltflat reproduce` makes one, `sf.load` reads it from the `results.json` that it wrote.
    Runs may be older than it: `command`, `device`, `versions` and `created` are of the last call,
    and every run has its own machine, versions and time.
    """

    name: str
    size: str
    runs: tuple[Run, ...]
    rows: tuple[Row, ...]
    changed: tuple[str, ...]
    command: str
    title: str = ""
    paper: str = ""
    device: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    created: str = ""

    @property
    def seeds(self) -> tuple[int, ...]:
        """Of the runs, each once."""
        seeds = {run.settings.get("seed") for run in self.runs}
        return tuple(sorted(seed for seed in seeds if isinstance(seed, int)))

    @property
    def machines(self) -> tuple[str, ...]:
        """Processors and GPUs, with the threads of a run."""
        return tuple(sorted({_machine(run) for run in self.runs}))

    @property
    def hours(self) -> float:
        """Of all runs together."""
        return sum(run.seconds for run in self.runs) / 3600

    @property
    def finished(self) -> str:
        """When the last run was; when all was written, where runs do not say."""
        return max((run.created for run in self.runs if run.created), default=self.created)

    @property
    def circumstances(self) -> str:
        """How many runs on what, when, and by how many states of the code, in a sentence."""
        seeds = f" with seeds {', '.join(map(str, self.seeds))}" if self.seeds else ""
        codes = {run.code for run in self.runs if run.code}
        mixed = f", of {len(codes)} states of its code" if len(codes) > 1 else ""
        made = [run.versions or self.versions for run in self.runs]
        versions = dict.fromkeys(", ".join(map(" ".join, each.items())) for each in made)
        return (
            f"{len(self.runs)} runs{seeds}{mixed} on {'; '.join(self.machines)}; "
            f"{spelled(3600 * self.hours)} of computing, finished {self.finished} "
            f"({'; '.join(versions)})."
        )

    def table(self, width: int) -> Table:
        """Published and ours; what was changed, and how it was made, below.

        Columns without an entry are left out.
        """
        view = Table(title=f"{self.name}, {self.size}: {escape(self.title)}")
        view.title_justify = view.caption_justify = "left"
        cells = [row.cells for row in self.rows]
        shown = [k for k in range(len(_COLUMNS)) if any(row[k] not in ("", _NONE) for row in cells)]
        for column in (_COLUMNS[k] for k in shown):
            right = column in ("published", "ours", "difference")
            view.add_column("" if column in ("what", "note") else column, no_wrap=right)
            view.columns[-1].justify = "right" if right else "left"
        for row in cells:
            view.add_row(*(escape(row[k]) for k in shown))
        changed = [f"Changed: {sentence}" for sentence in self.changed]
        view.caption = escape("\n".join([*changed, self.circumstances]))
        return view

    def markdown(self) -> str:
        """The table, what was changed, the command and the machine."""
        lines = [_line(_COLUMNS), "|---|---:|---:|---:|---|"]
        lines += [_line(row.cells) for row in self.rows]
        lines += ["", "What we changed:", "", *(f"- {sentence}" for sentence in self.changed)]
        if not self.changed:
            lines[-2:] = ["What we changed: nothing."]
        return "\n".join([*lines, "", f"`{self.command}`", "", self.circumstances, ""])

    def save(self, path: str | Path) -> Path:
        return store.save(path, "A reproduction", "reproduction", store.plain(self))

    @classmethod
    def load(cls, path: str | Path) -> Reproduction:
        return store.decoded(cls, store.read(path, "reproduction"), f"{path} is damaged")


def _machine(run: Run) -> str:
    return f"{run.machine} ({run.threads} thread{'s' if run.threads > 1 else ''})"


def _line(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
