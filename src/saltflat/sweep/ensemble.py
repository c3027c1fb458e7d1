"""Small networks of one shape, trained together as one batched network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import BuiltinFunctionType, CodeType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.modules.dropout import _DropoutNd

from saltflat.errors import InvalidValue, listed
from saltflat.sweep.stacked import Descent, Replayed, stacked, write_back

Loss = Callable[[Tensor, Tensor], Tensor]
_COMPARED = (bool, int, float, str, tuple, list, CodeType, BuiltinFunctionType)


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

    Member m's step t is on the samples `rows(t)[m]` of `x`, which all share, with labels `y[m]`.
    It computes what `torch.optim.SGD` does for each model by itself, up to the order of sums. On a
    GPU the step is one CUDA graph, so that small networks do not wait for Python. What would not be
    the same as one by one is refused: buffers, as those of BatchNorm, dropout that is on, models of
    different shapes. The models' gradients and modes stay as they are, and where an exception
    passes through, their parameters too.

    Parameters
    ----------
    models : of one architecture, on one device
    x : inputs, the samples first
    y : labels, of shape (models, samples, …)
    rows : of step t, of shape (models, batch), of which all have the same batch
    steps : how many
    lr : of step t, one for all or one a model
    momentum : as of `torch.optim.SGD`, without dampening
    weight_decay : one for all or one a model
    loss : of outputs and labels of a batch

    Examples
    --------
    >>> import torch
    >>> from saltflat.sweep import train_together
    >>> _ = torch.manual_seed(0)
    >>> models, x = [torch.nn.Linear(2, 2) for _ in range(3)], torch.randn(8, 2)
    >>> y = (x[:, 0] > 0).long().repeat(3, 1)
    >>> train_together(models, x, y, lambda t: torch.arange(8).repeat(3, 1), 50, lr=lambda t: 1.0)
    >>> [bool((model(x).argmax(1) == y[0]).all()) for model in models]
    [True, True, True]
    """
    _refuse(models, x, y)
    ensemble = _Ensemble(models, x, y, loss, momentum, weight_decay)
    step = Replayed(ensemble.step, x.device)
    for t in range(steps):
        ensemble.set(rows(t), lr(t))
        step()
    write_back(ensemble.parameters, models)


def _refuse(models: Sequence[nn.Module], x: Tensor, y: Tensor) -> None:
    """What cannot be stacked, or would not be trained as it is by itself."""
    if not models:
        raise InvalidValue("train_together needs at least one model. Got none.")
    for index, model in enumerate(models):
        _refuse_random_and_buffers(model)
        _refuse_unlike(index, model, models[0])
    parameters = [p for model in models for p in model.parameters()]
    if len(set(map(id, parameters))) < len(parameters):
        raise InvalidValue("Each model must be given once and share no parameters with the others.")
    if frozen := [n for m in models for n, p in m.named_parameters() if not p.requires_grad]:
        raise InvalidValue(f"All parameters are trained. Got frozen ones: {listed(frozen)}.")
    devices = {str(tensor.device) for tensor in (x, y, *parameters)}
    if len(devices) > 1:
        raise InvalidValue(
            "Models, inputs and labels must be on one device. "
            f"Got {', '.join(sorted(devices))}; move them by .to(device)."
        )
    if tuple(y.shape[:2]) != (len(models), len(x)):
        raise InvalidValue(
            f"Labels must be of shape ({len(models)}, {len(x)}, …), models and samples. "
            f"Got {tuple(y.shape)}."
        )


def _refuse_random_and_buffers(model: nn.Module) -> None:
    if buffers := [name for name, _ in model.named_buffers()]:
        raise InvalidValue(
            "Networks that are trained together must have no buffers, for running statistics "
            f"cannot be kept apart. Got {listed(buffers)}. Train them one by one."
        )
    on = [
        f"{name} ({type(module).__name__})"
        for name, module in model.named_modules()
        if isinstance(module, _DropoutNd) and module.training and module.p > 0
    ]
    if on:
        raise InvalidValue(
            "Dropout draws other numbers for networks that are trained together than one by one. "
            f"Got {listed(on)}. Set p=0, call eval() on it, or train them one by one."
        )


def _refuse_unlike(index: int, model: nn.Module, first: nn.Module) -> None:
    """Those that would not compute the first one's function of their own parameters."""
    shapes = {name: tuple(p.shape) for name, p in first.named_parameters()}
    own = {name: tuple(p.shape) for name, p in model.named_parameters()}
    for name in {**shapes, **own}:
        if shapes.get(name) != own.get(name):
            raise InvalidValue(
                "Networks that are trained together must have the same parameters. "
                f"{name}: {shapes.get(name, 'none')} in model 0, {own.get(name, 'none')} in "
                f"model {index}."
            )
    modes = [[module.training for module in each.modules()] for each in (first, model)]
    if repr(model) != repr(first) or modes[0] != modes[1]:
        raise InvalidValue(
            "Networks that are trained together must be built alike, and all be in train mode or "
            f"all in eval mode. Got model 0: {first!r} and model {index}: {model!r}."
        )
    for module, other in zip(first.modules(), model.modules(), strict=True):
        others = _attributes(other)
        for name, value in _attributes(module).items():
            if value != others.get(name):
                raise InvalidValue(
                    "Networks that are trained together must be built alike. "
                    f"{type(module).__name__}.{name}: {value} in model 0, {others.get(name)} in "
                    f"model {index}."
                )


def _attributes(module: nn.Module) -> dict[str, Any]:
    """What a module computes with and need not show, as numbers of its own or a function."""
    seen = {n: v.tolist() if isinstance(v, Tensor) else v for n, v in vars(module).items()}
    seen |= {n: v.__code__ for n, v in seen.items() if isinstance(v, FunctionType)}
    return {n: v for n, v in seen.items() if isinstance(v, _COMPARED)}


class _Ensemble:
    """The stacked parameters of the models, and a step on them."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        x: Tensor,
        y: Tensor,
        loss: Loss,
        momentum: float,
        weight_decay: float | Tensor,
    ) -> None:
        self.parameters = stacked(models)
        self.x, self.y = x, y
        self.members = torch.arange(len(models), device=x.device)[:, None]
        self.lr = next(iter(self.parameters.values())).new_zeros(len(models))
        decay = torch.as_tensor(weight_decay, dtype=self.lr.dtype, device=x.device)
        self.descent = Descent(self.parameters, momentum, decay.expand_as(self.lr).clone())
        self.rows: Tensor | None = None
        template = models[0]

        def risk(parameters: dict[str, Tensor], inputs: Tensor, labels: Tensor) -> Tensor:
            return loss(functional_call(template, parameters, (inputs,)), labels)

        self.gradients = vmap(grad(risk), randomness="error")

    def set(self, rows: Tensor, lr: float | Tensor) -> None:
        """What the next step is on. The tensors stay where they are: a graph reads them there."""
        if self.rows is None:
            self.rows = torch.empty_like(rows, device=self.x.device)
        if rows.dim() != 2 or len(rows) != len(self.members) or rows.shape != self.rows.shape:
            raise InvalidValue(
                f"Rows must be of shape ({len(self.members)}, batch), with the same batch in every "
                f"step. Got {tuple(rows.shape)} after {tuple(self.rows.shape)}."
            )
        self.rows.copy_(rows, non_blocking=True)
        rate = torch.as_tensor(lr, dtype=self.lr.dtype)
        self.lr.copy_(rate.expand_as(self.lr), non_blocking=True)

    @torch.no_grad()
    def step(self) -> None:
        assert self.rows is not None
        gradients = self.gradients(
            self.parameters, self.x[self.rows], self.y[self.members, self.rows]
        )
        self.descent.step(gradients, self.lr)
