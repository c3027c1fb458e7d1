"""What is run: settings, one file for what came out of each, and who has been run already."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import isfinite
from pathlib import Path
from typing import Any, final

import torch

from saltflat.errors import InvalidType, InvalidValue
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


def checked(settings: Settings) -> Settings:
    """The same, if it tells runs apart and a file can hold it."""
    if not isinstance(settings, Mapping) or not all(isinstance(name, str) for name in settings):
        raise InvalidType(f"Settings must be a mapping of names to values. Got {settings!r}.")
    for name, value in settings.items():
        if value is not None and type(value) not in (str, int, float, bool):
            raise InvalidType(
                "Settings must be plain words, numbers, booleans or None, by which a run is found "
                f"again. Got {name}={value!r}, of type {type(value).__name__}; convert it first, "
                "as by float(…)."
            )
        if isinstance(value, float) and not isfinite(value):
            raise InvalidValue(f"Settings must be finite. Got {name}={value!r}.")
    return settings


@final
@dataclass(frozen=True)
class Run:
    """A finished run: what came out, how long it took, on what with how many threads, and when.

    `code` is a hash of the files that the work was written in, `versions` are those of Python and
    of packages. Both are empty where they are not known, as `created` is.
    """

    settings: Settings
    outcome: Outcome
    seconds: float = 0.0
    machine: str = ""
    threads: int = 1
    code: str = ""
    created: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        """Of the outcome, or else of the settings."""
        return self.outcome[name] if name in self.outcome else self.settings[name]


@final
@dataclass(frozen=True)
class Folder:
    """One file a run, named after its settings and written whole or not at all.

    A process that is killed while it writes leaves a hidden file beside, which nothing reads.
    """

    path: Path

    def file(self, settings: Settings) -> Path:
        text = json.dumps(dict(checked(settings)), sort_keys=True)
        return self.path / f"{hashlib.sha256(text.encode()).hexdigest()[:20]}.json"

    def keep(self, run: Run) -> Run:
        """Write a run down; what is returned is as it will be found."""
        file = store.save(self.file(run.settings), "A run", "run", store.plain(run))
        return self._read(file, run.settings)

    def find(self, settings: Settings) -> Run | None:
        """The run of these settings, if it is finished."""
        file = self.file(settings)
        return self._read(file, settings) if file.exists() else None

    def _read(self, file: Path, settings: Settings) -> Run:
        complaint = f"{file} is damaged; delete it to run {dict(settings)} again"
        try:
            content = store.read(file, "run")
        except InvalidValue as error:
            raise InvalidValue(f"{complaint}. {error}") from error
        run = store.decoded(Run, content, complaint)
        if dict(run.settings) != dict(settings):
            raise InvalidValue(f"{complaint}: it holds the run of {dict(run.settings)}.")
        return run
