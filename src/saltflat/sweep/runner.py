"""Run what has not been run yet, a few at a time, and keep each as soon as it is done."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Literal, get_args

import torch

from saltflat.errors import InvalidValue, SaltflatError, listed
from saltflat.sweep.cluster import on_ray
from saltflat.sweep.jobs import Failure, Job, code_of, done, jobs_of
from saltflat.sweep.processes import in_processes
from saltflat.sweep.progress import Tally
from saltflat.sweep.runs import Folder, Run, Settings, Work

# "here" is this process, or several of this machine; "ray" is a cluster.
Where = Literal["here", "ray"]
_TOLD = 5  # failures


def sweep(
    settings: Iterable[Settings],
    work: Work,
    folder: Folder,
    *,
    on: Where = "here",
    device: torch.device | str = "cpu",
    workers: int = 1,
    together: Callable[[Settings], Hashable] | None = None,
    most: int = 1,
    progress: bool = True,
    title: str = "sweep",
    failed: Callable[[Failure], None] | None = None,
) -> list[Run]:
    """Runs of all settings, in their order; those that the folder holds are not run again.

    Runs are found by their settings. Where the file that `work` is written in has changed since a
    run was made, or one of its package or folder that it uses, or a number that it was given, as by
    `partial`, a warning tells so, and the run is taken as it is.

    Settings for which `together` says the same are given to `work` in one call, `most` at a time.
    A run is kept as soon as it is done: a sweep that was killed goes on where it stopped. A job
    that raises does not stop the others, and is told in the end; one whose process dies is done
    again, three times at most.

    Parameters
    ----------
    settings : what to run, each once: words, numbers, booleans and None by name
    work : called with some of the settings and the device, at the top of a module if it is called
        in other processes; it returns one mapping a run
    folder : of the results, a file a run
    on : "here", or "ray": the cluster that Ray is connected to or finds
    device : given to `work`
    workers : processes at a time, if more than one; on Ray, how many share one GPU
    together, most : which settings make one call, and how many at most
    progress : whether to tell on the error stream how far it is
    title : of the progress
    failed : called with every job that failed, in place of the error in the end; the runs of the
        others are returned

    Examples
    --------
    >>> from pathlib import Path
    >>> from saltflat.sweep import Folder, grid, sweep
    >>> def work(settings, device):
    ...     return [{"square": each["x"] ** 2} for each in settings]
    >>> runs = sweep(grid(x=[1, 2, 3]), work, Folder(Path("squares")), progress=False)
    >>> [run["square"] for run in runs]
    [1, 4, 9]
    """
    if on not in get_args(Where):
        raise InvalidValue(f"A sweep runs on 'here' or 'ray'. Got {on!r}.")
    if workers < 1 or most < 1:
        raise InvalidValue(f"workers and most must be 1 or more. Got {workers} and {most}.")
    files, device = _files(settings, folder), torch.device(device)
    found = {file: run for file, each in files.items() if (run := folder.find(each))}
    _tell_older(found.values(), work, folder)
    jobs = jobs_of([each for file, each in files.items() if file not in found], together, most)
    failures: list[Failure] = []
    with (
        Tally(title, len(files), len(found), progress) as tally,
        closing(_answers(jobs, work, on, device, workers)) as answers,
    ):
        for answer in answers:
            if isinstance(answer, Failure):
                (failed or failures.append)(answer)
                tally.advance(failed=len(answer.job.settings))
                continue
            for run in answer:
                found[folder.file(run.settings)] = folder.keep(run)
            tally.advance(len(answer))
    if failures:
        raise _told(failures, len(jobs))
    return [found[file] for file in files if file in found]


def _files(settings: Iterable[Settings], folder: Folder) -> dict[Path, Settings]:
    """Where the run of each is kept."""
    files: dict[Path, Settings] = {}
    for each in settings:
        file = folder.file(each)
        if file in files:
            raise InvalidValue(f"Settings must differ from one another. Got twice: {dict(each)}.")
        files[file] = each
    return files


def _tell_older(runs: Iterable[Run], work: Work, folder: Folder) -> None:
    """Of runs that another state of the code made: its constants are not among the settings."""
    code = code_of(work)
    older = [folder.file(run.settings) for run in runs if code and run.code not in ("", code)]
    if older:
        warnings.warn(
            f"{len(older)} of the runs found in {folder.path} were made before the code of their "
            "work was changed. They are taken as they are. If the change concerns them, delete "
            f"them: {listed([file.name for file in older])}.",
            stacklevel=3,
        )


def _answers(
    jobs: Sequence[Job], work: Work, on: Where, device: torch.device, workers: int
) -> Generator[list[Run] | Failure, None, None]:
    if not jobs:
        return
    if on == "ray":
        yield from on_ray(jobs, work, device, workers)
    elif workers > 1:
        yield from in_processes(jobs, work, device, workers)
    else:
        code = code_of(work)  # now: the files may be edited while this process runs them
        yield from (done(job, work, device, code) for job in jobs)


def _told(failures: Sequence[Failure], jobs: int) -> SaltflatError:
    """With where it happened in the notes, which a traceback shows."""
    first = [f"{each.job}: {each.why}" for each in failures[:_TOLD]]
    rest = f" … and {len(failures) - _TOLD} more." if len(failures) > _TOLD else ""
    error = SaltflatError(
        f"{len(failures)} of {jobs} jobs failed; what the others found is kept. "
        f"{'; '.join(first)}{rest}"
    )
    for each in failures[:_TOLD]:
        if each.traceback:
            error.add_note(each.traceback)
    return error
