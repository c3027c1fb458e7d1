"""One case: times, errors and memory of all contenders."""

from __future__ import annotations

import os
from dataclasses import dataclass

from bench.cases import CLASSES, PROBES, Case, Problem, prepare
from bench.contender_memory import peak_mib
from bench.contenders import CONTENDERS, Contender, reference
from bench.peers import Values
from bench.timing import Timed, Times, clocked, in_turns, turn_of

PEERS = ("backpack", "per-sample", "hutchinson")


@dataclass(frozen=True)
class Settings:
    """How to measure. `full` runs the slow peers in full where a case would scale them up."""

    repeats: int = 7
    device: str = "cpu"
    tf32: bool = False
    memory: bool = True
    full: bool = False
    peers: bool = True


@dataclass(frozen=True)
class Entry:
    """What one contender did on one case. `failure` says why there is nothing else."""

    times: Times | None = None
    error: float | None = None
    mib: float | None = None
    note: str = ""
    failure: str = ""


@dataclass(frozen=True)
class Job:
    """One contender's work: its samples, its batch size or probes, and the share this is of all."""

    contender: Contender
    problem: Problem
    size: int
    share: float
    note: str


@dataclass(frozen=True)
class _Done:
    """A job after its first run, with the error that this had."""

    job: Job
    timed: Timed
    error: float | None


def measure(case: Case, settings: Settings) -> dict[str, Entry]:
    """All contenders on one case, timed in turns."""
    problem = prepare(case, settings.device)
    exact = reference(problem)
    done: dict[str, _Done] = {}
    entries: dict[str, Entry] = {}
    for name in CONTENDERS:
        if name in PEERS and not settings.peers:
            entries[name] = Entry(failure="not run")
            continue
        try:
            job = _job(name, case, problem, settings)
            goal = exact if job.problem is problem else reference(job.problem)
            done[name] = _first_run(job, goal, settings.device)
        except Exception as failure:
            if name not in PEERS:
                raise
            # A peer that cannot run is a result, whatever it raises.
            entries[name] = Entry(failure=f"{type(failure).__name__}: {failure}".split("\n")[0])
    times = in_turns({n: d.timed for n, d in done.items()}, settings.repeats, settings.device)
    for name, d in done.items():
        mib = _memory(case, name, d.job, settings)
        entries[name] = Entry(times[name].scaled(1 / d.job.share), d.error, mib, d.job.note)
    return {name: entries[name] for name in CONTENDERS}


def _job(name: str, case: Case, problem: Problem, settings: Settings) -> Job:
    """What the contender is to run on this case."""
    contender = CONTENDERS[name]
    if name == "hutchinson":
        probes = PROBES if settings.full else case.probes
        note = f"from {probes} probes" if probes < PROBES else ""
        return Job(contender, problem, probes, probes / PROBES, note)
    if name == "per-sample" and case.samples and not settings.full:
        note = f"from {case.samples} samples"
        return Job(contender, problem.head(case.samples), case.samples, case.samples / case.n, note)
    if contender.batched:
        size = _best_batch_size(contender, problem, settings.device)
        return Job(contender, problem, size, 1, f"batches of {size}" if size < case.n else "")
    return Job(contender, problem, case.n, 1, "")


def _best_batch_size(contender: Contender, problem: Problem, device: str) -> int:
    """The size with the least seconds a sample, found on one batch of each."""
    cost: dict[int, float] = {}
    for size in _batch_sizes(problem):
        run = contender.build(problem.head(size), size)
        first, _ = clocked(run, device)
        # The first run of a shape is slow, which matters where runs are short.
        again = turn_of(Timed(run, first), device) if first < 1 else []
        cost[size] = min([first, *again]) / size
    return min(cost, key=cost.__getitem__)


def _batch_sizes(problem: Problem) -> list[int]:
    """All samples at once and some fractions, without those that could exhaust the memory.

    Peers hold, for the largest weight, a gradient of every sample and direction, a few times over.
    """
    n = len(problem.x)
    largest = max(p.numel() * p.element_size() for p in problem.model.parameters())
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    fits = max(1, free // (4 * CLASSES * largest))
    return sorted({min(fits, max(1, n // part)) for part in (1, 4, 8, 16)})


def _first_run(job: Job, exact: Values, device: str) -> _Done:
    """Warm up on two samples, then run and take the error."""
    job.contender.build(job.problem.head(2), 2)()
    run = job.contender.build(job.problem, job.size)
    seconds, values = clocked(run, device)
    timed = Timed(run, seconds)
    return _Done(job, timed, error_of(job.contender.gives, values, exact))


def error_of(gives: str, values: Values, exact: Values) -> float | None:
    """Σ|value − exact| / Σ|exact|, over parameters (traces) or over all entries (diagonals).

    Where fewer than all probes were drawn, the standard error that all would have takes the place
    of the deviation.
    """
    if gives == "gradient":
        return None
    deviation, size = 0.0, 0.0
    for name, block in exact.items():
        goal = block if gives == "diagonal" else block.sum()
        got = values[name].to(block)
        size += float(goal.abs().sum())
        if gives == "draws" and len(got) < PROBES:
            deviation += float(got.std()) / PROBES**0.5
        else:
            deviation += float(((got.mean() if gives == "draws" else got) - goal).abs().sum())
    return deviation / size


def _memory(case: Case, name: str, job: Job, settings: Settings) -> float | None:
    """Peak memory; of one batch or one probe where there are several, which need the same."""
    if not settings.memory:
        return None
    samples = job.size if job.contender.batched else case.n
    size = 1 if name == "hutchinson" else job.size
    return peak_mib(case.name, name, samples, size, settings.device, settings.tf32)
