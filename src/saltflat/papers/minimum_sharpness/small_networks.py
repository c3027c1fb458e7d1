"""The two small networks of figures 1 and 3 (appendix F), and the diagonal of their Hessian."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saltflat.papers.random_labels import images, started
from saltflat.zoo import ibayashi_cnn, ibayashi_mlp

NETWORKS = {"fcnn": ibayashi_mlp, "cnn": ibayashi_cnn}
TITLES = {"fcnn": "FCNN", "cnn": "CNN"}
SAMPLES = (10, 100, 1000)
_ALL = 60_000


def case(network: str, n: int, seed: int, device: torch.device) -> tuple[nn.Module, Tensor, Tensor]:
    """A network as its seed starts it, and so many images of the seed's choice."""
    data = images("mnist", _ALL, 1, device).first(n, 1, seed=seed)
    return started(NETWORKS[network], seed, device), data.train_x, data.train_y


def loss_gradient(model: nn.Module, x: Tensor, y: Tensor, create_graph: bool = False) -> Tensor:
    """Of the mean cross-entropy, all parameters in one vector."""
    loss = F.cross_entropy(model(x), y)
    parts = torch.autograd.grad(loss, list(model.parameters()), create_graph=create_graph)
    return torch.cat([part.flatten() for part in parts])


def looped_diagonal(model: nn.Module, x: Tensor, y: Tensor, entries: Sequence[int]) -> Tensor:
    """The paper's baseline: each entry of the gradient is differentiated once more by autograd.

    By the parameter alone that the entry belongs to, which is the cheapest such loop.
    """
    gradient = loss_gradient(model, x, y, create_graph=True)
    owners, starts = _owners(model)
    second = []
    for entry in entries:
        owner, start = owners[entry], starts[entry]
        (row,) = torch.autograd.grad(gradient[entry], owner, retain_graph=True)
        second.append(row.flatten()[entry - start])
    return torch.stack(second)


def _owners(model: nn.Module) -> tuple[list[nn.Parameter], list[int]]:
    """Of every entry of the vector of parameters: its parameter, and where that begins."""
    owners: list[nn.Parameter] = []
    starts: list[int] = []
    for parameter in model.parameters():
        start = len(owners)
        owners += [parameter] * parameter.numel()
        starts += [start] * parameter.numel()
    return owners, starts
