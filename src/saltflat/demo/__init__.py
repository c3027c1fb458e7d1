"""`python -m saltflat.demo`: the main jobs on data that come with scikit-learn.

Here is what they share: training by SGD on the digits, the same on every machine. Training that
fits random labels is chaotic: in a few hundred steps the last bit of a sum, which differs by CPU
and number of threads, becomes another network. So training is in float64, and after every step the
weights are rounded to multiples of 2⁻¹⁶, which takes such differences out before they grow: they
are of the order of 1e-16, and one in 1e10 meets the middle between two multiples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saltflat.datasets import digits
from saltflat.zoo import mlp

_GRID = 2.0**-16

# On a batch of inputs and labels; returns the loss there.
Step = Callable[[Tensor, Tensor], Tensor]


def samples() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The digits, with pixels in float64."""
    train_x, train_y, test_x, test_y = digits()
    return train_x.double(), train_y, test_x.double(), test_y


def network(widths: list[int], seed: int) -> nn.Module:
    """A ReLU network in float64 whose initial weights depend on the seed alone.

    They are drawn in float64 too: in float32 their rounding is no longer small beside the grid.
    """
    with torch.random.fork_rng(devices=[]):
        model = mlp(widths).double()
        torch.manual_seed(seed)
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                layer.reset_parameters()
    settle(model.parameters())
    return model


@torch.no_grad()
def settle(parameters: Iterable[Tensor]) -> None:
    """Round to the nearest multiple of 2⁻¹⁶."""
    for parameter in parameters:
        parameter.div_(_GRID).round_().mul_(_GRID)


def sgd(model: nn.Module, penalty: Callable[[Tensor], Tensor] | None = None) -> Step:
    """Steps of SGD with momentum, on the loss and what the penalty of the labels adds to it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        (loss if penalty is None else loss + penalty(y)).backward()
        optimizer.step()
        return loss

    return step


def train(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    step: Step,
    *,
    epochs: int,
    seed: int = 0,
    stop: Callable[[float], bool] = lambda loss: False,
) -> None:
    """Batches of 128 in an order that depends on the seed alone; `stop` sees the mean loss."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        total = 0.0
        for rows in torch.randperm(len(x), generator=generator).split(128):
            loss = step(x[rows], y[rows])
            settle(model.parameters())
            total += float(loss.detach()) * len(rows)
        if stop(total / len(x)):
            return


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return float((model(x).argmax(1) == y).float().mean())
