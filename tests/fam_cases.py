"""Networks and losses for the tests of FAM, and what its penalty must be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from dense import Dense
from papers import kappa_trace, layers, relative_flatness
from torch import Tensor, nn

from saltflat.training.fam import FAM

N, K = 6, 3


def kappa(
    model: nn.Module, x: Tensor, y: Any, loss: Any, name: str, *, simplified: bool = False
) -> float:
    """What the penalty of a layer must be."""
    layer = layers(Dense(model, x, y, loss, names=[f"{name}.weight"]))[name]
    return kappa_trace(layer) if simplified else relative_flatness(layer)


def penalty(model: nn.Module, x: Any, y: Any, layer: str, **options: Any) -> float:
    with FAM(model, layer, 1.0, **options) as fam:
        model(x)
        return float(fam(y).detach())


def batch_dice(o: Tensor, y: Tensor) -> Tensor:
    p, q = o.softmax(1), F.one_hot(y, K).to(o)
    return 1 - 2 * (p * q).sum() / (p.sum() + q.sum())


def sample_dice(o: Tensor, y: Tensor) -> Tensor:
    p, q = o.softmax(1), F.one_hot(y, K).to(o)
    return (1 - 2 * (p * q).sum(1) / (p.square().sum(1) + q.sum(1))).mean()


WEIGHTED = nn.CrossEntropyLoss(
    weight=torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64), label_smoothing=0.1, ignore_index=1
)
LOSSES: dict[str, Any] = {
    "cross entropy": "cross_entropy",
    "weighted": WEIGHTED,
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "mse": "mse",
    "bce": "bce",
    "normalized": "normalized_cross_entropy",
    "dice of a sample": sample_dice,
    "dice of the batch": batch_dice,
}


def relu() -> nn.Module:
    layers = nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 4), nn.LeakyReLU()
    return nn.Sequential(*layers, nn.Linear(4, K))


def smooth() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4), nn.GELU(), nn.Linear(4, K))


def conv() -> nn.Module:
    """Kernels, strides, dilation, groups, padding of each kind, and more positions than inputs."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 2, padding=1, stride=2, padding_mode="circular"),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, (3, 2), groups=2, dilation=(1, 2), padding="same"),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16, K),
    )


def smooth_conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(1, 2, 2),
        nn.Softplus(),
        nn.Conv1d(2, 4, 2, groups=2),
        nn.Sigmoid(),
        nn.Flatten(),
        nn.Linear(12, K),
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], list[str]]] = {
    "relu": (relu, (4,), ["0", "2", "4"]),
    "smooth": (smooth, (4,), ["0", "2", "4"]),
    "conv": (conv, (1, 7, 7), ["0", "2", "6"]),
    "smooth conv": (smooth_conv, (1, 5), ["0", "2", "5"]),
}


def make(name: str, seed: int = 0) -> tuple[nn.Module, Tensor]:
    build, shape, _ = MODELS[name]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build().double(), torch.randn(N, *shape, dtype=torch.float64)


def targets(loss: str) -> Tensor:
    if loss in ("mse", "bce"):
        return torch.linspace(0, 1, N * K, dtype=torch.float64).reshape(N, K)
    return torch.arange(N) % K


LABELS = targets("cross entropy")
