"""What is run in one call, what comes of it, and on which machine."""

from __future__ import annotations

import hashlib
import inspect
import platform
import sys
import traceback
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache, partial
from numbers import Number
from pathlib import Path, PurePath
from time import perf_counter
from types import FunctionType, ModuleType
from typing import final

import torch

from saltflat.errors import InvalidType, InvalidValue
from saltflat.report import store
from saltflat.sweep.runs import Run, Settings, Work
from saltflat.version import __version__

# How often a job is begun whose process is killed.
TRIES = 3


@final
@dataclass(frozen=True)
class Job:
    """Settings that are run in one call."""

    settings: Sequence[Settings]

    def __str__(self) -> str:
        others = len(self.settings) - 1
        return f"{dict(self.settings[0])}" + (f" and {others} with it" if others else "")


@final
@dataclass(frozen=True)
class Failure:
    """A job that failed, and why; in words, for not every exception comes through a pipe."""

    job: Job
    why: str
    traceback: str = ""


def jobs_of(
    settings: Sequence[Settings], together: Callable[[Settings], Hashable] | None, most: int
) -> list[Job]:
    """Settings for which `together` says the same go into one job, `most` at a time."""
    groups: dict[Hashable, list[Settings]] = {}
    for index, each in enumerate(settings):
        groups.setdefault(index if together is None else together(each), []).append(each)
    return [
        Job(group[start : start + most])
        for group in groups.values()
        for start in range(0, len(group), most)
    ]


def done(
    job: Job, work: Work, device: torch.device, code: str | None = None
) -> list[Run] | Failure:
    """One call, timed; its time is shared equally by its runs.

    `code` is that of the work as this process has loaded it; by default that of its files now.
    """
    code = code_of(work) if code is None else code
    try:
        start = perf_counter()
        # Of their own: a run is kept by its settings, whatever work makes of them.
        outcomes = list(work([dict(each) for each in job.settings], device))
        seconds = (perf_counter() - start) / len(job.settings)
        if len(outcomes) != len(job.settings):
            raise InvalidValue(
                f"Work must return one outcome a run, {len(job.settings)}. Got {len(outcomes)}."
            )
        for outcome in outcomes:
            if not isinstance(outcome, Mapping):
                raise InvalidType(f"An outcome must be a mapping. Got {type(outcome).__name__}.")
        outcomes = store.plain(outcomes)  # which goes through every pipe
    except Exception as error:
        return Failure(job, f"{type(error).__name__}: {error}", traceback.format_exc())
    made = Run(
        {},
        {},
        seconds,
        machine_name(device),
        torch.get_num_threads(),
        code,
        datetime.now(UTC).isoformat(timespec="seconds"),
        versions(),
    )
    return [
        replace(made, settings=settings, outcome=outcome)
        for settings, outcome in zip(job.settings, outcomes, strict=True)
    ]


def code_of(work: Work) -> str:
    """A hash of the file that work was written in, and of its own modules that it uses.

    Its own are those of its package, and those in its folder. Used are modules that a file names,
    or of which it names a function or class; and what these use. Where a file has only the name of
    the whole package, as in `import saltflat`, what it takes of that is not followed. Numbers and
    words that work was given beforehand are in it too: by `partial`, as defaults, or by the
    function that it was made in.
    """
    owner = work.func if isinstance(work, partial) else work
    files = sorted(_used(str(getattr(owner, "__module__", "")), {}).items())
    digest = hashlib.sha256()
    for _, file in files:
        digest.update(file.read_bytes())
    if given := list(_plain(_given(work))):
        digest.update(repr(given).encode())
    return digest.hexdigest()[:12] if files else ""


def _given(work: object) -> list[object]:
    if isinstance(work, partial):
        return [work.args, work.keywords, *_given(work.func)]
    if not isinstance(work, FunctionType):
        return []
    around = inspect.getclosurevars(work).nonlocals.items()
    # Lists and dicts around it may be what it writes to.
    fixed = {name: value for name, value in around if not isinstance(value, Mapping | list)}
    return [work.__defaults__, work.__kwdefaults__, fixed]


def _plain(value: object) -> Iterator[object]:
    """The numbers and words in it, with their names, in their order."""
    if isinstance(value, Mapping):
        for name, each in sorted(value.items(), key=str):
            yield from ((name, inner) for inner in _plain(each))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _plain(each)
    elif isinstance(value, str | bytes | Number | PurePath):  # Number: NumPy's are too
        yield value


def _used(name: str, found: dict[str, Path]) -> dict[str, Path]:
    """Modules and their files: this one, and those of its own that it leads to."""
    module, file = sys.modules.get(name), _file(name)
    if name in found or file is None:
        return found
    found[name] = file
    package = name.partition(".")[0]
    for value in list(vars(module).values()):
        other = value.__name__ if isinstance(value, ModuleType) else _module_of(value)
        if value is sys.modules.get(package):
            continue
        beside = _file(other)
        if other.partition(".")[0] == package or (beside and beside.parent == file.parent):
            _used(other, found)
    return found


def _file(name: str) -> Path | None:
    file = Path(getattr(sys.modules.get(name), "__file__", None) or "")
    return file if file.is_file() else None


def _module_of(value: object) -> str:
    return value.__module__ if isinstance(value, FunctionType | type) else ""


def versions() -> dict[str, str]:
    """Of what a run is made with."""
    return {
        "saltflat": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


@cache
def machine_name(device: torch.device) -> str:
    """The GPU, or the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    description = Path("/proc/cpuinfo")  # of Linux, where platform.processor() knows nothing
    lines = description.read_text().splitlines() if description.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(iter(models), "") or platform.processor() or platform.machine()
