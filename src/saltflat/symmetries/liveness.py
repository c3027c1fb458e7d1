"""Which entries of which parameters a function depends on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
import torch.nn.functional as F
from scipy.sparse import csr_matrix
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from saltflat.symmetries.evaluate import Evaluation, evaluation
from saltflat.symmetries.solve import Array

#: relative to the largest derivative; rounding in float64 leaves about 1e-16
NOTHING = 1e-13
#: random points at which a unit must be without effect; one is inactive there by chance, not at all
POINTS = 12


@dataclass(frozen=True)
class Liveness:
    """`classes` marks the classes that hold an entry with an effect; `idle` names parameters."""

    classes: Array
    idle: set[str]


def liveness(
    model: nn.Module,
    example: Any,
    output: Callable[[Any], Any],
    classes: Mapping[str, Tensor],
    matrix: csr_matrix,
) -> Liveness:
    """Look at derivatives at random points until every column of `matrix` has shown an effect.

    Features that are sliced away have none, nor has the bias of attention's keys: it adds the same
    number to all scores of a query, which the softmax ignores. A model that does not run at such
    points (it takes a logarithm, a Cholesky factor, bits) is believed to use all of its parameters.
    """
    with (
        suppress(Exception),
        evaluation(model, example, output, wide=True, differentiable=True) as lent,
        _Leaky(),
    ):
        return _observed(_Point(lent, set(classes)), classes, matrix)
    return Liveness(np.ones(matrix.shape[0], bool), set())


def _observed(point: _Point, classes: Mapping[str, Tensor], matrix: csr_matrix) -> Liveness:
    alive, seen = np.zeros(matrix.shape[0], bool), set[str]()
    for seed in range(POINTS):
        for name, mask in point.effects(seed).items():
            if bool(mask.any()):
                seen.add(name)
                alive[classes[name][mask].numpy()] = True
        # A parameter without any derivative is looked at below.
        if seed > 0 or len(seen) == len(classes):
            columns = np.asarray(abs(matrix[alive]).sum(0)).ravel() > 0
            if columns.all():
                break
    # What runs without gradients has an effect all the same.
    for name in set(classes) - seen:
        if point.matters(name):
            seen.add(name)
            alive[classes[name].numpy()] = True
    return Liveness(alive, set(classes) - seen)


@final
class _Leaky(TorchFunctionMode):
    """LeakyReLU for ReLU: the same parameters have an effect, and no unit is inactive."""

    RELU = (torch.relu, F.relu, torch.Tensor.relu, torch.relu_, torch.Tensor.relu_)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in self.RELU:
            return F.leaky_relu(args[0] if args else kwargs["input"], 0.5)
        return func(*args, **kwargs)


@final
class _Point:
    """A lent model at parameters that are drawn anew, with the size that they had."""

    def __init__(self, lent: Evaluation, names: set[str]) -> None:
        self.lent = lent
        self.parameters = {n: p for n, p in lent.parameters.items() if n in names}
        self.generator = torch.Generator()
        self.values: dict[str, Tensor] = {}

    def _draw(self, name: str) -> Tensor:
        start = self.lent.start[name]
        size = float(start.abs().mean()) if start.numel() else 0.0
        return (size or 0.1) * self._noise(start)

    def _noise(self, like: Tensor) -> Tensor:
        drawn = torch.randn(like.shape, generator=self.generator, dtype=torch.float64)
        return drawn.to(like.device)

    def _answers(self) -> list[Tensor]:
        return [t for t in self.lent.answers(self.values) if t.is_floating_point()]

    def effects(self, seed: int) -> dict[str, Tensor]:
        """Where the derivative of a random combination of the outputs does not vanish."""
        self.generator.manual_seed(seed)
        self.values = {name: self._draw(name) for name in self.parameters}
        flowing = [t for t in self._answers() if t.requires_grad]
        if not flowing:
            return {}
        total = torch.stack([(t * self._noise(t)).sum() for t in flowing]).sum()
        leaves = [self.lent.parameters[name] for name in self.parameters]
        try:
            grads = torch.autograd.grad(total, leaves, allow_unused=True)
        except RuntimeError:  # written in a way that has no derivative: all may have an effect
            return {n: torch.ones(p.shape, dtype=torch.bool) for n, p in self.parameters.items()}
        named = zip(self.parameters, grads, strict=True)
        sizes = {n: g.abs().cpu() for n, g in named if g is not None}
        most = [float(s.max()) for s in sizes.values() if s.numel()]
        largest = max((m for m in most if math.isfinite(m)), default=0.0)
        return {n: ~(s <= NOTHING * largest) for n, s in sizes.items()}

    @torch.no_grad()
    def matters(self, name: str) -> bool:
        """Do the outputs change with the parameter?"""
        before, value = self._answers(), self.values[name]
        self.values[name] = self._draw(name)
        after = self._answers()
        self.values[name] = value
        return any(
            float((a - b).abs().max()) > NOTHING * float(a.abs().max())
            for a, b in zip(before, after, strict=True)
            if a.numel()
        )
