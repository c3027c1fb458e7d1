"""Training for the demonstrations: plain SGD on the digits."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saltflat.zoo import mlp


def network(widths: list[int], seed: int) -> nn.Module:
    """A ReLU network whose initial weights depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return mlp(widths)


def train(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    epochs: int,
    batch: int = 128,
    lr: float = 0.1,
    seed: int = 0,
    stop: Callable[[float], bool] = lambda loss: False,
) -> None:
    """SGD with momentum, in an order that depends on the seed alone; `stop` sees the mean loss."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    for _ in range(epochs):
        total = 0.0
        for rows in torch.randperm(len(x), generator=generator).split(batch):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[rows]), y[rows])
            loss.backward()
            optimizer.step()
            total += float(loss.detach()) * len(rows)
        if stop(total / len(x)):
            return


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return float((model(x).argmax(1) == y).float().mean())
