"""Jobs in processes of this machine, each of which may be killed."""

from __future__ import annotations

import os
import pickle
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import get_context, parent_process, resource_tracker
from multiprocessing.connection import Connection, wait
from typing import final

import torch

from saltflat.errors import InvalidValue, SaltflatError, uninterrupted
from saltflat.sweep.jobs import TRIES, Failure, Job, code_of, done
from saltflat.sweep.runs import Run, Work

_PATIENCE = 2.0  # seconds that a process has to end once it is asked to


def in_processes(
    jobs: Sequence[Job], work: Work, device: torch.device, workers: int
) -> Iterator[list[Run] | Failure]:
    """What comes of the jobs, as they are done; where a process dies, its job is done again."""
    _refuse_unsendable(work)
    waiting = [(job, 1) for job in reversed(jobs)]  # with the number of the try it will be
    threads = max(1, torch.get_num_threads() // workers)
    team: list[_Process] = []
    try:
        while waiting or any(each.job for each in team):
            while len(team) < min(workers, len(jobs)):
                with uninterrupted():  # until it is known as one to end
                    team.append(_Process(work, device, threads))
            for each in team:
                if waiting and each.idle:
                    each.begin(*waiting.pop())
            for each in _heard(team):
                job, answer = each.job, each.answer()
                if answer is not None:
                    yield answer
                elif each.dead:
                    team.remove(each)
                    if job and each.tries < TRIES:
                        waiting.append((job, each.tries + 1))
                    elif job:
                        yield Failure(job, f"its process died {TRIES} times, {each.death}")
    finally:
        with uninterrupted():
            for each in team:
                each.end()


def _refuse_unsendable(work: Work) -> None:
    try:
        pickle.dumps(work)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise InvalidValue(
            "work is called in other processes, so it must be a function at the top of a module. "
            f"Got {work!r} ({error}). Move it there, or take one worker."
        ) from error


def _heard(team: Sequence[_Process]) -> list[_Process]:
    """Those that have something to say or died, once there are some."""
    heard = wait([each.connection for each in team])
    return [each for each in team if each.connection in heard]


@final
class _Process:
    """Does one job after the other, and ends when this process does, however that ends."""

    def __init__(self, work: Work, device: torch.device, threads: int) -> None:
        context = get_context("spawn")  # CUDA does not survive a fork
        self.connection, theirs = context.Pipe()
        self.job: Job | None = None
        self.tries = 0
        self.ready = self.dead = False
        self._process = context.Process(target=_serve, args=(theirs, work, device, threads))
        with _deaf():
            self._process.start()
        theirs.close()  # so that its death is the end of the pipe

    @property
    def idle(self) -> bool:
        return self.ready and self.job is None

    def begin(self, job: Job, tries: int) -> None:
        self.job, self.tries = job, tries
        with suppress(BrokenPipeError):  # if it died, the next look at the connection tells
            self.connection.send(job)

    def answer(self) -> list[Run] | Failure | None:
        """What came of the job; None of a process that is ready now, or dead."""
        try:
            answer: list[Run] | Failure | None = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.dead = True
            self.end()
            if not self.ready and (self._process.exitcode or 0) > 0:
                raise SaltflatError(
                    f"A process of the sweep could not begin, and ended {self.death}; what it said "
                    "is on the error stream. The module of work must be importable, and a script "
                    "that sweeps with several workers needs `if __name__ == '__main__':`."
                ) from None
            return None
        self.ready, self.job = True, None
        return answer

    @property
    def death(self) -> str:
        code = self._process.exitcode or 0
        return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"

    def end(self) -> None:
        """Ask it to, and end it if it does not or has something under way."""
        self.connection.close()
        self._process.join(_PATIENCE if self.idle or self.dead else 0.0)
        for stop in (self._process.terminate, self._process.kill):
            if self._process.is_alive():
                stop()
                self._process.join(_PATIENCE)


@contextmanager
def _deaf() -> Iterator[None]:
    """What is started inside does not hear Ctrl-C: this process does, afterwards, and ends it.

    The signal is blocked, which a process inherits; ignored, it would be lost here too.
    """
    if not hasattr(signal, "pthread_sigmask"):  # on Windows
        yield
        return
    resource_tracker.ensure_running()  # which starts a process too, and unblocks the signal then
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(connection: Connection, work: Work, device: torch.device, threads: int) -> None:
    """The life of a process: it says that it is ready, and does jobs until the pipe ends."""
    threading.Thread(target=_die_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    code = code_of(work)
    with suppress(EOFError, ConnectionError):
        connection.send(None)
        while True:
            job = connection.recv()
            connection.send(done(job, work, device, code))


def _die_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
