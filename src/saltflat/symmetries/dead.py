"""Parameters that a function does not depend on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from saltflat.session import RandomState, lend
from saltflat.symmetries.rescale import duplicate
from saltflat.symmetries.verify import Widen, run, widened

#: relative to the most influential parameter; rounding in float64 leaves about 1e-16
NOTHING = 1e-10


def without_influence(
    model: nn.Module, example: Any, output: Callable[[Any], Any], names: Iterable[str]
) -> set[str]:
    """Parameters that change nothing, whatever they are, at two random points.

    The bias of attention's keys is one: it adds the same number to all scores of a query, which
    the softmax ignores. A derivative of zero makes a suspect (what runs under `no_grad` is one,
    too); other values of the parameter decide.
    """
    suspects = set(names)
    copied = duplicate(model)
    state = RandomState(None, next(copied.parameters()).device)
    try:
        with lend(copied, {id(p) for p in copied.parameters()}, torch.float64), Widen():  # type: ignore[no-untyped-call]
            for seed in range(2):
                if suspects:
                    suspects &= _Point(copied, example, output, seed).idle(suspects)
    finally:
        state.restore()
    return suspects


class _Point:
    """A copy of the model with randomly moved parameters."""

    def __init__(
        self, model: nn.Module, example: Any, output: Callable[[Any], Any], seed: int
    ) -> None:
        self.model, self.example, self.output = model, widened(example), output
        self.generator = torch.Generator().manual_seed(seed)
        self.parameters = {n: p for n, p in model.named_parameters() if p.is_floating_point()}
        for p in self.parameters.values():
            self._move(p)

    def _noise(self, like: Tensor) -> Tensor:
        drawn = torch.randn(like.shape, generator=self.generator, dtype=torch.float64)
        return drawn.to(like.device)

    def _move(self, p: Tensor) -> None:
        with torch.no_grad():
            size = float(p.abs().mean()) if p.numel() else 0.0
            p.add_((size or 1.0) * 0.5 * self._noise(p))

    def _answers(self) -> list[Tensor]:
        raw = self.output(run(self.model, self.example))
        return [t for t in tree_leaves(raw) if isinstance(t, Tensor) and t.is_floating_point()]

    def idle(self, names: set[str]) -> set[str]:
        answers = self._answers()
        flowing = [t for t in answers if t.requires_grad]
        chosen = list(self.parameters.values())
        total = sum(((t * self._noise(t)).sum() for t in flowing), torch.zeros(()))
        grads = torch.autograd.grad(total, chosen, allow_unused=True) if flowing else [None]
        size = {
            n: 0.0 if g is None or g.numel() == 0 else float(g.abs().max())
            for n, g in zip(self.parameters, [*grads, *[None] * len(chosen)], strict=False)
        }
        largest = max(size.values())
        suspects = {n for n in names if size[n] <= NOTHING * largest}
        return {n for n in suspects if not self._matters(n, answers)}

    @torch.no_grad()
    def _matters(self, name: str, before: list[Tensor]) -> bool:
        p = self.parameters[name]
        kept = p.clone()
        self._move(p)
        after = self._answers()
        p.copy_(kept)
        return any(
            float((a - b).abs().max()) > NOTHING * float(a.abs().max())
            for a, b in zip(before, after, strict=True)
            if a.numel()
        )
