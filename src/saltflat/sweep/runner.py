"""Run what has not been run yet, a few at a time, and keep each as soon as it is done."""

from __future__ import annotations

import platform
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from time import perf_counter
from typing import Literal, final

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from saltflat.errors import SaltflatError
from saltflat.sweep.runs import Folder, Run, Settings, Work

# "here" is a pool of processes, or this one; "ray" is the cluster that Ray is connected to.
Where = Literal["here", "ray"]
_TRIES = 3


@final
@dataclass(frozen=True)
class Job:
    """Settings that are run in one call, and how often that was tried."""

    settings: Sequence[Settings]
    tries: int = 0


def sweep(
    settings: Iterable[Settings],
    work: Work,
    folder: Folder,
    *,
    device: torch.device | str = "cpu",
    workers: int = 1,
    together: Callable[[Settings], Hashable] | None = None,
    most: int = 1,
    progress: bool = True,
    title: str = "runs",
) -> list[Run]:
    """Runs of all settings, in their order; those that the folder holds are not run again.

    Settings for which `together` says the same are given to `work` in one call, `most` at a time.
    A run is kept as soon as it is done: a sweep that was killed goes on where it stopped.
    """
    settings, device = list(settings), torch.device(device)
    found = {folder.file(each): folder.find(each) for each in settings}
    missing = [each for each in settings if found[folder.file(each)] is None]
    with _bar(progress) as bar:
        task = bar.add_task(title, total=len(settings), completed=len(settings) - len(missing))
        for run in _done(_jobs(missing, together, most), work, device, workers):
            folder.keep(run)
            found[folder.file(run.settings)] = run
            bar.advance(task)
    return [run for each in settings if (run := found[folder.file(each)]) is not None]


def _bar(shown: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeRemainingColumn(), disable=not shown, transient=True)


def _jobs(
    settings: Sequence[Settings], together: Callable[[Settings], Hashable] | None, most: int
) -> list[Job]:
    """What is run in one call each."""
    groups: dict[Hashable, list[Settings]] = {}
    for index, each in enumerate(settings):
        groups.setdefault(index if together is None else together(each), []).append(each)
    return [
        Job(group[start : start + most])
        for group in groups.values()
        for start in range(0, len(group), most)
    ]


def _done(jobs: Sequence[Job], work: Work, device: torch.device, workers: int) -> Iterator[Run]:
    """Runs, as they are done; the failure of one job is told once the others are done."""
    failures: list[tuple[Job, BaseException]] = []
    if workers == 1:
        for job in jobs:
            try:
                runs = attempt(job, work, device)
            except Exception as error:
                failures.append((job, error))
            else:
                yield from runs
    else:
        yield from _pooled(jobs, work, device, workers, failures)
    if failures:
        job, first = failures[0]
        raise SaltflatError(
            f"{len(failures)} of {len(jobs)} jobs failed; what the others found is kept. "
            f"The first, {dict(job.settings[0])}: {type(first).__name__}: {first}"
        ) from first


def attempt(job: Job, work: Work, device: torch.device) -> list[Run]:
    """One call, timed; its time is shared equally by its runs."""
    start = perf_counter()
    outcomes = work(job.settings, device)
    seconds = (perf_counter() - start) / len(job.settings)
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return [
        Run(settings, outcome, seconds, machine)
        for settings, outcome in zip(job.settings, outcomes, strict=True)
    ]


def _pooled(
    jobs: Sequence[Job],
    work: Work,
    device: torch.device,
    workers: int,
    failures: list[tuple[Job, BaseException]],
) -> Iterator[Run]:
    """In processes; where one is killed, what was under way is done again."""
    waiting = list(jobs)
    while waiting:
        threads = max(1, torch.get_num_threads() // workers)
        with ProcessPoolExecutor(
            workers, get_context("spawn"), torch.set_num_threads, (threads,)
        ) as pool:
            under_way: dict[Future[list[Run]], Job] = {
                pool.submit(attempt, job, work, device): job for job in waiting
            }
            waiting = []
            while under_way:
                for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                    job, error = under_way.pop(future), future.exception()
                    if error is None:
                        yield from future.result()
                    elif isinstance(error, BrokenProcessPool) and job.tries + 1 < _TRIES:
                        waiting.append(Job(job.settings, job.tries + 1))
                    else:
                        failures.append((job, error))
