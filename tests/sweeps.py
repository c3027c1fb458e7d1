"""What the tests of sweeps run in other processes: it lies in a module that those can import."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from saltflat.papers import EXPERIMENTS, Experiment, Row
from saltflat.sweep import Folder, Run, Settings, grid, sweep


class Stubborn(Exception):
    """Cannot be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("never")


def _mark(name: str) -> bool:
    """Whether this is the first time; the folder comes by the environment."""
    file = Path(os.environ["MARKS"]) / name
    first = not file.exists()
    file.touch()
    return first


def square(settings: Sequence[Settings], device: torch.device) -> list[dict[str, Any]]:
    return [
        {"y": each["x"] ** 2, "curve": torch.arange(3), "gap": float("nan")} for each in settings
    ]


def meddling(settings: Sequence[dict[str, Any]], device: torch.device) -> list[dict[str, Any]]:
    """Changes what it was given."""
    return [{"y": each.pop("x"), "was": each.update(seed=0)} for each in settings]


def quick(settings: Sequence[Settings], device: torch.device) -> list[dict[str, Any]]:
    time.sleep(0.002)
    return [{"y": each["x"] ** 2} for each in settings]


def troubled(settings: Sequence[Settings], device: torch.device) -> list[dict[str, Any]]:
    """Does what the setting `how` says."""
    for each in settings:
        how = each["how"]
        if how == "dies" or (how == "dies once" and _mark(f"died-{each['x']}")):
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "raises":
            raise ValueError("no such luck")
        if how == "stubborn":
            raise Stubborn("not to be pickled")
    return [{"y": each["x"] ** 2, "threads": torch.get_num_threads()} for each in settings]


def asleep(settings: Sequence[Settings], device: torch.device) -> list[dict[str, Any]]:
    """The first is done; the others wait to be ended, and say who they are."""
    if settings[0]["x"]:
        _mark(f"pid-{os.getpid()}")
        time.sleep(600)
    return [{"y": 0} for _ in settings]


def rows(runs: Sequence[Run]) -> list[Row]:
    values = [run["y"] for run in runs]
    mean = sum(values) / len(values)
    return [Row("mean of | squares", mean, 0.25, 3.5, "a [note]"), Row("largest", max(values))]


def draw(runs: Sequence[Run]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    figure.subplots().plot([run["x"] for run in runs], [run["y"] for run in runs])
    return figure


def _runs(size: str) -> list[Settings]:
    return grid(x=range(4 if size == "small" else 8), seed=[0, 1])


SQUARES = Experiment(
    name="made-up/squares",
    title="Squares of numbers",
    paper="saltflat",
    changed=("Nothing was published.", "Numbers are squared twice."),
    runs=_runs,
    work=quick,
    rows=rows,
    draw=draw,
    minutes={"small": 0.1},
)


def main() -> None:
    """What a test starts as a process of its own."""
    if sys.argv[1] == "asleep":
        sweep(grid(x=[0, 1, 2]), asleep, Folder(Path(sys.argv[2])), workers=2)
    elif sys.argv[1] == "reproduce":
        from saltflat.cli import app

        EXPERIMENTS[SQUARES.name] = SQUARES
        app(sys.argv[1:], prog_name="saltflat")


if __name__ == "__main__":
    main()
