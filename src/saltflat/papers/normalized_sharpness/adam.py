"""Small networks of one shape, trained together by Adam as one batched network."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from saltflat.sweep import Parameters, Replayed, stacked, write_back


def adam_together(
    models: Sequence[nn.Module], x: Tensor, y: Tensor, rows: Callable[[int], Tensor], steps: int
) -> None:
    """Train all models by Adam with its defaults, each on its own batches and labels.

    As `saltflat.sweep.train_together` does by SGD: member m's step t is on the samples `rows(t)[m]`
    of `x`, with the labels `y[m]`. Adam treats every number by itself, so that one optimizer of the
    stacked parameters is one for each model. On a GPU the step is one CUDA graph.
    """
    parameters = stacked(models)
    adam = torch.optim.Adam(parameters.values(), capturable=x.is_cuda)
    members = torch.arange(len(models), device=x.device)[:, None]
    chosen = rows(0).clone()

    def risk(member: Parameters, inputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(models[0], member, (inputs,)), labels)

    @torch.no_grad()
    def step() -> None:
        slopes = vmap(grad(risk))(parameters, x[chosen], y[members, chosen])
        for name, parameter in parameters.items():
            parameter.grad = slopes[name]
        adam.step()

    replayed = Replayed(step, x.device)
    for t in range(steps):
        if t:
            chosen.copy_(rows(t))
        replayed()
    write_back(parameters, models)
