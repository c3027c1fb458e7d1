"""What is measured: networks, sample sizes, and what saltflat has to reach on each."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from saltflat import zoo

CLASSES = 10
PROBES = 100  # the number of Hutchinson probes that every case is compared with


@dataclass(frozen=True)
class Bars:
    """What saltflat must reach. None: nothing is asked.

    `trace` and `diagonal` are the most gradients that they may cost; `backpack` and `per_sample`
    are how many times faster than these the trace must be.
    """

    trace: float | None = None
    diagonal: float | None = None
    backpack: float | None = None
    per_sample: float | None = None


@dataclass(frozen=True)
class Case:
    """One network on `n` random samples.

    Where a whole run of the slow peers would take the better part of an hour, `probes` says how
    many of the Hutchinson probes and `samples` how many samples of the per-sample passes are run;
    their times are scaled up from that.
    """

    network: str
    n: int
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    bars: Bars = Bars()
    probes: int = PROBES
    samples: int | None = None

    @property
    def name(self) -> str:
        return f"{self.network}/{self.n}"


@dataclass(frozen=True)
class Problem:
    """A model in eval mode and the one batch of data that it is measured on."""

    model: nn.Module
    x: Tensor
    y: Tensor

    def head(self, n: int) -> Problem:
        """The same model on the first `n` samples, to warm up with."""
        return Problem(self.model, self.x[:n], self.y[:n])

    def double(self) -> Problem:
        """A float64 copy, for reference values."""
        return Problem(copy.deepcopy(self.model).double(), self.x.double(), self.y)


_MNIST, _CIFAR = (1, 28, 28), (3, 32, 32)

_ALL = [
    Case("mlp", 10, zoo.ibayashi_mlp, _MNIST),
    Case("mlp", 100, zoo.ibayashi_mlp, _MNIST, Bars(backpack=1)),
    Case("mlp", 1000, zoo.ibayashi_mlp, _MNIST, Bars(4, 3, backpack=1, per_sample=20)),
    Case("cnn", 10, zoo.ibayashi_cnn, _MNIST),
    Case("cnn", 100, zoo.ibayashi_cnn, _MNIST, Bars(backpack=1)),
    Case("cnn", 1000, zoo.ibayashi_cnn, _MNIST, Bars(5, 9, backpack=1.5)),
    Case("lenet5", 1000, zoo.lenet5, _MNIST, Bars(5, 9, backpack=1)),
    Case("vgg11", 64, lambda: zoo.vgg11(batch_norm=False), _CIFAR, Bars(4, 9, backpack=8), 4, 16),
    Case("vgg11-bn", 64, lambda: zoo.vgg11(batch_norm=True), _CIFAR, Bars(4, 9, backpack=1), 4, 16),
    Case("resnet18", 64, zoo.resnet18, _CIFAR, Bars(5, 9, backpack=1), 4, 16),
    Case("wrn16-4", 64, zoo.wide_resnet16_4, _CIFAR, Bars(5, 9, backpack=1), 4, 16),
]

CASES = {case.name: case for case in _ALL}
NETWORKS = tuple(dict.fromkeys(case.network for case in _ALL))


def prepare(case: Case, device: str = "cpu") -> Problem:
    """The case's model with its default initialisation and normal data with random labels.

    The same numbers on every call.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = case.make()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(case.n, *case.shape, generator=generator)
    y = torch.randint(CLASSES, (case.n,), generator=generator)
    _settle_batch_norm(model, x)
    return Problem(model.eval().to(device), x.to(device), y.to(device))


def _settle_batch_norm(model: nn.Module, x: Tensor) -> None:
    """Set the running statistics to those of `x`, as a trained network's fit its data."""
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    if not norms:
        return
    for norm in norms:
        norm.momentum = 1.0
    with torch.no_grad():
        model.train()(x)
    for norm in norms:
        norm.momentum = 0.1
