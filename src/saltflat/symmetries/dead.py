"""Which entries of which parameters a function depends on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
import torch.nn.functional as F
from scipy.sparse import csr_matrix
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from saltflat.session import RandomState, lend
from saltflat.symmetries.rescale import duplicate
from saltflat.symmetries.verify import Widen, run, widened

#: relative to the largest derivative; rounding in float64 leaves about 1e-16
NOTHING = 1e-13
#: random points at which a unit must be without effect; one is inactive there by chance, not at all
POINTS = 12

Array = np.ndarray[Any, Any]


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
    number to all scores of a query, which the softmax ignores.
    """
    alive, seen = np.zeros(matrix.shape[0], bool), set[str]()
    copied = duplicate(model)
    start = {n: p.detach().double() for n, p in copied.named_parameters() if n in classes}
    state = RandomState(None, next(copied.parameters()).device)
    try:
        everything = {id(p) for p in copied.parameters()}
        with lend(copied, everything, torch.float64), Widen(), _Leaky():  # type: ignore[no-untyped-call]
            point = _Point(copied, widened(example), output, start)
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
    finally:
        state.restore()
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
    """A copy of the model whose parameters are drawn anew, with the size that they had."""

    def __init__(
        self,
        model: nn.Module,
        example: Any,
        output: Callable[[Any], Any],
        start: dict[str, Tensor],
    ) -> None:
        self.model, self.example, self.output, self.start = model, example, output, start
        self.parameters = {n: p for n, p in model.named_parameters() if n in start}
        self.generator = torch.Generator()

    def _draw(self, name: str) -> None:
        size = float(self.start[name].abs().mean()) or 0.1
        with torch.no_grad():
            self.parameters[name].copy_(size * self._noise(self.parameters[name]))

    def _noise(self, like: Tensor) -> Tensor:
        drawn = torch.randn(like.shape, generator=self.generator, dtype=torch.float64)
        return drawn.to(like.device)

    def _answers(self) -> list[Tensor]:
        raw = self.output(run(self.model, self.example))
        return [t for t in tree_leaves(raw) if isinstance(t, Tensor) and t.is_floating_point()]

    def effects(self, seed: int) -> dict[str, Tensor]:
        """Where the derivative of a random combination of the outputs does not vanish."""
        self.generator.manual_seed(seed)
        for name in self.parameters:
            self._draw(name)
        flowing = [t for t in self._answers() if t.requires_grad]
        if not flowing:
            return {}
        total = torch.stack([(t * self._noise(t)).sum() for t in flowing]).sum()
        chosen = list(self.parameters.values())
        try:
            grads = torch.autograd.grad(total, chosen, allow_unused=True)
        except RuntimeError:  # written in a way that has no derivative: all may have an effect
            return {n: torch.ones(p.shape, dtype=torch.bool) for n, p in self.parameters.items()}
        named = zip(self.parameters, grads, strict=True)
        sizes = {n: g.abs().cpu() for n, g in named if g is not None}
        largest = max((float(s.max()) for s in sizes.values() if s.numel()), default=0.0)
        return {n: s > NOTHING * largest for n, s in sizes.items()}

    @torch.no_grad()
    def matters(self, name: str) -> bool:
        """Do the outputs change with the parameter?"""
        before, kept = self._answers(), self.parameters[name].clone()
        self._draw(name)
        after = self._answers()
        self.parameters[name].copy_(kept)
        return any(
            float((a - b).abs().max()) > NOTHING * float(a.abs().max())
            for a, b in zip(before, after, strict=True)
            if a.numel()
        )
