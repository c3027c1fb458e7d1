"""What an experiment consists of, and how one is run."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, final

import torch

from saltflat.errors import optional
from saltflat.report import store
from saltflat.reproduction import Reproduction, Row
from saltflat.sweep import Folder, Run, Settings, Where, Work, sweep, versions

__all__ = ["Experiment", "Reproduction", "Row", "Size", "reproduce"]

# "small" takes minutes on two cores; "full" is for one GPU.
Size = Literal["small", "full"]


@final
@dataclass(frozen=True)
class Experiment:
    """A figure or table of a paper.

    `runs` lists what is run for a size, `work` runs some of them, `rows` makes the table of what
    came out, and `draw` the picture. On a GPU runs with the same `together` are given to `work` at
    once, `most` at a time, so that they train as one; on a CPU, where that gains little, each comes
    by itself, so that a kill loses no other. Where runs are timed, `alone` keeps them from
    disturbing one another: they go one after the other, in this process, on one thread, whatever
    `reproduce` is told. Where another experiment has the same runs, `runs_of` names it, so that
    they are run once.
    """

    name: str  # "paper/figure"
    title: str
    paper: str  # a key of `saltflat.bibliography`
    changed: Sequence[str]  # what differs from the paper, one sentence each
    runs: Callable[[Size], Sequence[Settings]]
    work: Work
    rows: Callable[[Sequence[Run]], Sequence[Row]]
    draw: Callable[[Sequence[Run]], Any]  # a matplotlib Figure
    together: Callable[[Settings], Hashable] | None = None
    most: int = 1
    minutes: Mapping[Size, float] = field(default_factory=dict)  # expected, where it is known
    alone: bool = False
    runs_of: str | None = None


def reproduce(
    experiment: Experiment,
    size: Size = "small",
    *,
    folder: str | Path = "reproduced",
    on: Where = "here",
    device: torch.device | str = "cpu",
    workers: int = 1,
    progress: bool = True,
) -> Reproduction:
    """Run an experiment, or go on with it, and write its results, table and picture.

    Below `folder`, in a folder named after the experiment and the size: `runs/` with one file a
    run, unless it has the runs of another one, `results.json`, `table.md` and `figure.png`.
    """
    pyplot = optional("matplotlib.pyplot", "The figure of an experiment")  # before hours of work
    place, cuda = Path(folder) / experiment.name / size, torch.device(device).type == "cuda"
    with _one_thread() if experiment.alone else nullcontext():
        runs = sweep(
            experiment.runs(size),
            experiment.work,
            Folder(Path(folder) / (experiment.runs_of or experiment.name) / size / "runs"),
            on="here" if experiment.alone else on,
            device=device,
            workers=1 if experiment.alone else workers,
            together=experiment.together,
            most=experiment.most if cuda else 1,
            progress=progress,
            title=experiment.name,
        )
    result = Reproduction(
        name=experiment.name,
        size=size,
        runs=tuple(runs),
        rows=tuple(experiment.rows(runs)),
        changed=tuple(experiment.changed),
        command=f"saltflat reproduce {experiment.name} --size {size} --device {device}",
        title=experiment.title,
        paper=experiment.paper,
        device=str(device),
        versions=versions(),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    result.save(place / "results.json")
    store.write(place / "table.md", f"# {experiment.title}\n\n{result.markdown()}")
    picture, figure = BytesIO(), experiment.draw(runs)
    figure.savefig(picture, format="png", dpi=150)
    pyplot.close(figure)
    store.write(place / "figure.png", picture.getvalue())
    return result


@contextmanager
def _one_thread() -> Iterator[None]:
    """Threads that wait for work take processor time, and more of it where others want it too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
