"""Small models, a hand-made context and naive losses for measures that move the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import minimize
from torch import Tensor, nn
from torch.func import functional_call

from saltflat.curvature.curvature import Layer
from saltflat.geometry import Matrix
from saltflat.measures.base import Context, Measure
from saltflat.risk import Risk

Data = tuple[Tensor, Tensor]


def layers_of(model: nn.Module) -> list[Layer]:
    """Every Linear and convolution of a model, in order."""
    found = []
    for name, m in model.named_modules():
        if isinstance(m, nn.Linear):
            matrix, kind = Matrix(), "linear"
        elif isinstance(m, nn.ConvTranspose1d | nn.ConvTranspose2d):
            matrix, kind = Matrix(out=1, groups=m.groups), "conv_transpose"
        elif isinstance(m, nn.Conv1d | nn.Conv2d):
            matrix, kind = Matrix(groups=m.groups), "conv"
        else:
            continue
        if m.weight.requires_grad:
            found.append(Layer(name, f"{name}.weight", matrix, m.weight.detach(), kind))
    return found


@contextmanager
def context_of(model: nn.Module, data: Any, loss: Any = "cross_entropy") -> Iterator[Context]:
    risk = Risk(model, data, loss)
    with risk.session():
        yield Context(risk, layers_of(risk.model), {}, seed=0)


def compute(measure: Measure, model: nn.Module, data: Any, loss: Any = "cross_entropy") -> Any:
    with context_of(model, data, loss) as context:
        return measure.compute(context)


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return make().double()


def tiny() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2, bias=False))


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2, bias=False))


def relu(bias: bool = True) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5, bias=bias), nn.ReLU(), nn.Linear(5, 3, bias=bias))


def normed(eps: float = 1e-5) -> nn.Module:
    return nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4, eps=eps), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 2)
    )


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.grouped, self.bn1 = nn.Conv1d(2, 4, 2, groups=2), nn.BatchNorm1d(4)
        self.up, self.bn2 = nn.ConvTranspose1d(4, 6, 2, groups=2), nn.BatchNorm1d(6)
        self.head = nn.Conv1d(6, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn1(self.grouped(x)).tanh()
        return self.head(self.bn2(self.up(x)).tanh()).sum(2)


def points(n: int = 12, features: int = 2, classes: int = 2, seed: int = 1) -> Data:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, features, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, classes, (n,), generator=generator)


def loss_at(model: nn.Module, data: Data, v: dict[str, Tensor]) -> Tensor:
    """Cross-entropy at θ + v by `functional_call`, in the mode that the model is in."""
    moved = {n: p.detach() + v.get(n, 0.0) for n, p in model.named_parameters()}
    return F.cross_entropy(functional_call(model, moved, (data[0],)), data[1])


def supremum(function: Callable[[Tensor], Tensor], size: int, starts: int = 12) -> float:
    """The largest value of a function of a free vector, by BFGS from many starts."""

    def negative(z: np.ndarray) -> tuple[float, np.ndarray]:
        t = torch.tensor(z, requires_grad=True)
        value = function(t)
        (gradient,) = torch.autograd.grad(value, t)
        return -value.item(), -gradient.numpy()

    rng = np.random.default_rng(0)
    found = []
    for _ in range(starts):
        start = rng.standard_normal(size)
        found.append(minimize(negative, start, jac=True, method="BFGS", options={"gtol": 1e-9}))
    return -min(each.fun for each in found)


def unflatten(model: nn.Module, flat: Tensor) -> dict[str, Tensor]:
    weights = {layer.parameter: layer.weight for layer in layers_of(model)}
    parts = flat.split([w.numel() for w in weights.values()])
    return {n: part.view(w.shape) for (n, w), part in zip(weights.items(), parts, strict=True)}


def flat_weights(model: nn.Module) -> Tensor:
    return torch.cat([layer.weight.flatten() for layer in layers_of(model)])


def unflatten_all(model: nn.Module) -> dict[str, Tensor]:
    return unflatten(model, flat_weights(model))
