"""What is run: settings, one file for what came out of each, and who has been run already."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, final

import torch

from saltflat.report import store

# Of one run: what it is called with. Numbers, words and None, so that a file can hold them.
Settings = Mapping[str, str | int | float | bool | None]
# Of one run: what came out; anything that `store.plain` makes JSON of.
Outcome = Mapping[str, Any]
# Runs that are trained together, on a device; one outcome each, in their order. It is called in
# another process, so it lies at the top of a module.
Work = Callable[[Sequence[Settings], torch.device], Sequence[Outcome]]


def grid(**axes: Sequence[str | int | float | bool | None]) -> list[Settings]:
    """All combinations: `grid(lr=[0.1, 0.01], seed=range(3))` are six settings."""
    return [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]


@final
@dataclass(frozen=True)
class Run:
    """A finished run."""

    settings: Settings
    outcome: Outcome
    seconds: float = 0.0
    machine: str = ""

    def __getitem__(self, name: str) -> Any:
        """Of the outcome, or else of the settings."""
        return self.outcome[name] if name in self.outcome else self.settings[name]


@final
@dataclass(frozen=True)
class Folder:
    """One file a run, named after its settings and written whole or not at all."""

    path: Path

    def file(self, settings: Settings) -> Path:
        text = json.dumps(store.plain(settings), sort_keys=True)
        return self.path / f"{hashlib.sha256(text.encode()).hexdigest()[:20]}.json"

    def keep(self, run: Run) -> None:
        """Write a run down."""
        store.save(self.file(run.settings), "A run", "run", store.plain(run))

    def find(self, settings: Settings) -> Run | None:
        """The run of these settings, if it is finished."""
        file = self.file(settings)
        if not file.exists():
            return None
        complaint = f"{file} is not a whole run; delete it to run that one again"
        return store.decoded(Run, store.read(file, "run"), complaint)
