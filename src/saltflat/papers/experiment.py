"""What an experiment consists of, how one is run, and what is kept of it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, final

import torch
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

from saltflat.report import store
from saltflat.sweep import Folder, Run, Settings, Work, sweep
from saltflat.version import __version__

# "small" takes minutes on two cores; "full" is for one GPU.
Size = Literal["small", "full"]


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


@final
@dataclass(frozen=True)
class Experiment:
    """A figure or table of a paper.

    `runs` lists what is run for a size, `work` runs some of them, `rows` makes the table of what
    came out, and `draw` the picture. Runs with the same `together` are given to `work` at once,
    `most` at a time.
    """

    name: str
    title: str
    paper: str  # a key of `saltflat.bibliography`
    changed: Sequence[str]  # what differs from the paper, one sentence each
    runs: Callable[[Size], Sequence[Settings]]
    work: Work
    rows: Callable[[Sequence[Run]], Sequence[Row]]
    draw: Callable[[Sequence[Run]], Any]  # a matplotlib Figure
    together: Callable[[Settings], Hashable] | None = None
    most: int = 1


@final
@dataclass(frozen=True)
class Reproduction:
    """What came out of an experiment: all runs, and how and where they were made."""

    name: str
    size: str
    runs: tuple[Run, ...]
    rows: tuple[Row, ...]
    changed: tuple[str, ...]
    command: str
    versions: Mapping[str, str] = field(default_factory=dict)
    created: str = ""

    @property
    def machines(self) -> tuple[str, ...]:
        return tuple(sorted({run.machine for run in self.runs}))

    @property
    def hours(self) -> float:
        """Of all runs together."""
        return sum(run.seconds for run in self.runs) / 3600

    def table(self) -> Table:
        view = Table(title=f"{self.name}, {self.size}: {len(self.runs)} runs", title_justify="left")
        for column in ("", "published", "ours", "difference", ""):
            view.add_column(column, justify="left" if not column else "right")
        for row in self.rows:
            view.add_row(
                row.what,
                _digits(row.published),
                _with_error(row),
                _digits(row.difference),
                row.note,
            )
        return view

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.table()
        yield from (f"Changed: {sentence}" for sentence in self.changed)

    def save(self, path: str | Path) -> Path:
        return store.save(path, "A reproduction", "reproduction", store.plain(self))

    @classmethod
    def load(cls, path: str | Path) -> Reproduction:
        return store.decoded(cls, store.read(path, "reproduction"), f"{path} is damaged")


def _digits(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _with_error(row: Row) -> str:
    return _digits(row.ours) if row.error is None else f"{row.ours:.4g} ± {row.error:.2g}"


def reproduce(
    experiment: Experiment,
    size: Size = "small",
    *,
    folder: str | Path = "reproduced",
    device: torch.device | str = "cpu",
    workers: int = 1,
    progress: bool = True,
) -> Reproduction:
    """Run an experiment, or go on with it, and write its results, table and picture.

    Below `folder`, in a folder named after the experiment and the size: `runs/` with one file a
    run, `results.json`, `table.txt` and `figure.png`.
    """
    place = Path(folder) / experiment.name / size
    runs = sweep(
        experiment.runs(size),
        experiment.work,
        Folder(place / "runs"),
        device=device,
        workers=workers,
        together=experiment.together,
        most=experiment.most,
        progress=progress,
        title=experiment.name,
    )
    result = Reproduction(
        name=experiment.name,
        size=size,
        runs=tuple(runs),
        rows=tuple(experiment.rows(runs)),
        changed=tuple(experiment.changed),
        command=f"saltflat reproduce {experiment.name} --size {size}",
        versions={"saltflat": __version__, "torch": torch.__version__},
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    result.save(place / "results.json")
    experiment.draw(runs).savefig(place / "figure.png", dpi=150)
    return result
