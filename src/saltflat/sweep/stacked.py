"""What training networks of one shape as one takes: stacked parameters, SGD on them, a graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import final

import torch
from torch import Tensor, nn
from torch.func import stack_module_state

Parameters = dict[str, Tensor]  # by name, those of all members stacked
_WARM = 3  # steps before the graph is captured: libraries set themselves up in them


def stacked(models: Sequence[nn.Module]) -> Parameters:
    """A copy of their parameters, the members first."""
    parameters, _ = stack_module_state(list(models))
    return {name: p.detach().clone() for name, p in parameters.items()}


@torch.no_grad()
def write_back(parameters: Parameters, models: Sequence[nn.Module]) -> None:
    """Give each member its own."""
    for index, model in enumerate(models):
        for name, parameter in model.named_parameters():
            parameter.copy_(parameters[name][index])


def beside(numbers: Tensor, parameter: Tensor) -> Tensor:
    """One number a member, in a shape that multiplies its parameter."""
    return numbers.view(-1, *[1] * (parameter.dim() - 1))


@final
class Descent:
    """SGD as `torch.optim.SGD` has it, without dampening, with one weight decay a member."""

    def __init__(self, parameters: Parameters, momentum: float, weight_decay: Tensor) -> None:
        self.parameters, self.momentum, self.weight_decay = parameters, momentum, weight_decay
        self.velocities = {name: torch.zeros_like(p) for name, p in parameters.items()}

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor], lr: Tensor) -> None:
        for name, parameter in self.parameters.items():
            gradient = gradients[name] + beside(self.weight_decay, parameter) * parameter
            velocity = self.velocities[name].mul_(self.momentum).add_(gradient)
            parameter.sub_(beside(lr, parameter) * velocity)


@final
class Replayed:
    """A step; on a GPU one CUDA graph from the fourth on, so that it does not wait for Python.

    What the step reads must then stay where it is in memory, for the graph reads it there.
    """

    def __init__(self, step: Callable[[], None], device: torch.device) -> None:
        self._step, self._cuda, self._done = step, device.type == "cuda", 0

    def __call__(self) -> None:
        if self._cuda and self._done == _WARM:
            self._step = _captured(self._step)
        self._step()
        self._done += 1


def _captured(step: Callable[[], None]) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay
