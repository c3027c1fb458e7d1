"""Small networks of one shape, trained together as one batched network."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

from saltflat.errors import InvalidValue

Loss = Callable[[Tensor, Tensor], Tensor]
_WARM = 3  # steps before the graph is captured: libraries set themselves up in them


def train_together(
    models: Sequence[nn.Module],
    x: Tensor,
    y: Tensor,
    rows: Callable[[int], Tensor],
    steps: int,
    *,
    lr: Callable[[int], float | Tensor],
    momentum: float = 0.0,
    weight_decay: float | Tensor = 0.0,
    loss: Loss = F.cross_entropy,
) -> None:
    """Train all models by SGD, each on its own batches and labels, and leave them trained.

    Member m's step t is on the samples `rows(t)[m]`, of shape (models, batch), of `x`, which all
    share, with the labels `y[m]`. `lr` gives the step's learning rate, one for all or one a member.
    It computes what `torch.optim.SGD` does for each model by itself, up to the order of sums. On a
    GPU the step is one CUDA graph, so that small networks do not wait for Python. Networks whose
    buffers change in training, as BatchNorm's do, are refused: they would share them.
    """
    _refuse_buffers(models[0])
    ensemble = _Ensemble(models, x, y, loss, momentum, weight_decay)
    step: Callable[[], None] = ensemble.step
    for t in range(steps):
        ensemble.set(rows(t), lr(t))
        if t == _WARM and x.is_cuda:
            step = _captured(step)
        step()
    ensemble.write_back(models)


def _refuse_buffers(model: nn.Module) -> None:
    buffers = [name for name, _ in model.named_buffers()]
    if buffers:
        raise InvalidValue(
            "Networks that are trained together must have no buffers, for running statistics "
            f"cannot be kept apart. Got {', '.join(buffers)}. Train them one by one."
        )


class _Ensemble:
    """The stacked parameters and velocities of the models, and a step on them."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        x: Tensor,
        y: Tensor,
        loss: Loss,
        momentum: float,
        weight_decay: float | Tensor,
    ) -> None:
        stacked, _ = stack_module_state(list(models))
        self.parameters = {name: p.detach().clone() for name, p in stacked.items()}
        self.velocities = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        self.x, self.y = x, y
        self.members = torch.arange(len(models), device=x.device)[:, None]
        self.momentum = momentum
        count = len(models)
        self.weight_decay = torch.as_tensor(weight_decay, device=x.device).expand(count).clone()
        self.lr = torch.zeros(count, device=x.device)
        self.rows: Tensor | None = None
        template = models[0]

        def risk(parameters: dict[str, Tensor], inputs: Tensor, labels: Tensor) -> Tensor:
            return loss(functional_call(template, parameters, (inputs,)), labels)

        self.gradients = vmap(grad(risk), randomness="different")

    def set(self, rows: Tensor, lr: float | Tensor) -> None:
        """What the next step is on. The tensors stay where they are: a graph reads them there."""
        if self.rows is None:
            self.rows = torch.empty_like(rows, device=self.x.device)
        self.rows.copy_(rows, non_blocking=True)
        self.lr.copy_(torch.as_tensor(lr).expand_as(self.lr), non_blocking=True)

    @torch.no_grad()
    def step(self) -> None:
        assert self.rows is not None
        gradients = self.gradients(
            self.parameters, self.x[self.rows], self.y[self.members, self.rows]
        )
        for name, parameter in self.parameters.items():
            shape = (-1, *[1] * (parameter.dim() - 1))
            gradient = gradients[name] + self.weight_decay.view(shape) * parameter
            velocity = self.velocities[name].mul_(self.momentum).add_(gradient)
            parameter.sub_(self.lr.view(shape) * velocity)

    @torch.no_grad()
    def write_back(self, models: Sequence[nn.Module]) -> None:
        for index, model in enumerate(models):
            for name, parameter in model.named_parameters():
                parameter.copy_(self.parameters[name][index])


def _captured(step: Callable[[], None]) -> Callable[[], None]:
    """The step as one CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay
