"""What is run in one call, what comes of it, and on which machine."""

from __future__ import annotations

import hashlib
import platform
import sys
import traceback
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from time import perf_counter
from typing import final

import torch

from saltflat.errors import InvalidType, InvalidValue
from saltflat.report import store
from saltflat.sweep.runs import Run, Settings, Work

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


def done(job: Job, work: Work, device: torch.device) -> list[Run] | Failure:
    """One call, timed; its time is shared equally by its runs."""
    try:
        start = perf_counter()
        outcomes = list(work(job.settings, device))
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
    machine, threads, code = machine_name(device), torch.get_num_threads(), code_of(work)
    return [
        Run(settings, outcome, seconds, machine, threads, code)
        for settings, outcome in zip(job.settings, outcomes, strict=True)
    ]


def code_of(work: Work) -> str:
    """A hash of the file that work was written in, constants and helpers beside it too."""
    owner = work.func if isinstance(work, partial) else work
    module = sys.modules.get(str(getattr(owner, "__module__", "")))
    file = Path(getattr(module, "__file__", None) or "")
    return hashlib.sha256(file.read_bytes()).hexdigest()[:12] if file.is_file() else ""


@cache
def machine_name(device: torch.device) -> str:
    """The GPU, or the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    description = Path("/proc/cpuinfo")  # of Linux, where platform.processor() knows nothing
    lines = description.read_text().splitlines() if description.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(iter(models), "") or platform.processor() or platform.machine()
