"""Jobs as tasks of a Ray cluster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from saltflat.errors import InvalidValue, optional
from saltflat.sweep.jobs import TRIES, Failure, Job, done
from saltflat.sweep.runs import Run, Work


def on_ray(
    jobs: Sequence[Job], work: Work, device: torch.device, share: int
) -> Iterator[list[Run] | Failure]:
    """What comes of the jobs, as they are done; Ray repeats the task of a worker that dies.

    It takes the cluster that this process is connected to, or else what `ray.init()` finds or
    starts. On GPUs, `share` tasks are on one at a time.
    """
    ray = optional("ray", "A sweep on Ray")
    connected = ray.is_initialized()
    if not connected:
        ray.init(log_to_driver=False)
    under_way: dict[Any, Job] = {}
    try:
        gpus = _gpus(ray, device, share)
        task = ray.remote(max_retries=TRIES - 1, num_cpus=1, num_gpus=gpus)(done)
        shared = ray.put(work)  # once for all, for data may come with it
        under_way |= {task.remote(job, shared, device): job for job in jobs}
        while under_way:
            for ref in ray.wait(list(under_way))[0]:
                yield _answer(ray, ref, under_way.pop(ref))
    finally:
        for ref in under_way:
            ray.cancel(ref, force=True)
        if not connected:
            ray.shutdown()


def _gpus(ray: Any, device: torch.device, share: int) -> float:
    """Of one task."""
    if device.type != "cuda":
        return 0.0
    if not ray.cluster_resources().get("GPU"):
        raise InvalidValue("The Ray cluster has no GPU. Give it one, or use device='cpu'.")
    return 1 / share


def _answer(ray: Any, ref: Any, job: Job) -> list[Run] | Failure:
    try:
        answer: list[Run] | Failure = ray.get(ref)
    except ray.exceptions.RayError as error:  # of the cluster: the job's own come as a Failure
        return Failure(job, f"{type(error).__name__}: {error}")
    return answer
