"""What else of a model moves under a rescaling that keeps its function in evaluation mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from saltflat.landscape import BatchStatistics, batch_mode
from saltflat.risk import logits
from saltflat.session import RandomState, lend
from saltflat.symmetries.evaluate import run, widened
from saltflat.symmetries.verify import answers

Output = Callable[[Any], Any]


def narrow(model: nn.Module, example: Any, output: Output | None) -> bool:
    """Whether a float64 model rounds to a narrower type on the way."""
    return _change(answers(model, example, output), _plain(model, example, output)) > 1e-12


def batch_drift(before: nn.Module, after: nn.Module, example: Any, output: Output | None) -> float:
    """The relative change of the outputs with batch statistics: BatchNorm's eps is not rescaled."""
    return _change(*(_plain(m, example, output, batch=True) for m in (before, after)))


def _plain(
    model: nn.Module, example: Any, output: Output | None, *, batch: bool = False
) -> list[Tensor]:
    state = RandomState(None, next(model.parameters()).device)
    try:
        with lend(model, set(), torch.float64), torch.no_grad():
            if batch:
                with batch_mode(model), BatchStatistics("the example"):
                    raw = (output or logits)(run(model, widened(example)))
            else:
                raw = (output or logits)(run(model, widened(example)))
    finally:
        state.restore()
    return [t.detach().double() for t in tree_leaves(raw) if isinstance(t, Tensor)]


def _change(before: list[Tensor], after: list[Tensor]) -> float:
    found = 0.0
    for a, b in zip(before, after, strict=True):
        if a.numel():
            size = float(a.abs().max())
            found = max(found, float((a.double() - b).abs().max()) / (size or 1.0))
    return found
