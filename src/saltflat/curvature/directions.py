"""Directions sent backwards through the graph, and what arrives at the operations."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from saltflat.curvature.layers import Rows, Use
from saltflat.curvature.memory import out_of_memory
from saltflat.curvature.plan import Plan

# Below this many entries a direction, on a CPU, the overhead of separate backward passes is
# larger than what batching them costs.
_SMALL = 300_000


def live_uses(uses: Sequence[Use], plan: Plan, names: frozenset[str]) -> list[Use]:
    """The uses of wanted parameters that a fast rule serves."""
    return [use for use in uses if names & set(use.names.values()) & set(plan.dims)]


def sample_dim(use: Use, plan: Plan) -> int:
    return next(plan.dims[name] for name in use.names.values() if name in plan.dims)


def backward(outputs: Tensor, uses: Sequence[Use], plan: Plan, columns: Tensor) -> list[Any]:
    """Send directions backwards; for every use, what is to be kept of each, or None if unreached.

    Small networks take all directions at once through vmap; large ones go direction by direction,
    which is as fast there and needs less memory.
    """
    if not uses:
        return []
    edges = [use.edge for use in uses]
    rows = [Rows(columns.shape[1], sample_dim(use, plan)) for use in uses]
    entries = plan.activations * columns.shape[1]
    if len(columns) > 1 and entries <= _SMALL:
        try:
            return _all_at_once(outputs, uses, rows, edges, columns)
        except RuntimeError as error:
            if out_of_memory(error):
                raise
    kept: list[list[Any] | None] = [[] for _ in uses]
    for column in columns:
        deltas = torch.autograd.grad(outputs, edges, column, retain_graph=True, allow_unused=True)
        for k, (use, delta) in enumerate(zip(uses, deltas, strict=True)):
            entry = kept[k]
            if delta is None or entry is None:
                kept[k] = None
            else:
                with torch.no_grad():
                    entry.append(use.keep(delta, rows[k]))
    return list(kept)


def _all_at_once(
    outputs: Tensor, uses: Sequence[Use], rows: Sequence[Rows], edges: Any, columns: Tensor
) -> list[Any]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")
        deltas = torch.autograd.grad(
            outputs, edges, columns, retain_graph=True, allow_unused=True, is_grads_batched=True
        )
    with torch.no_grad():
        return [
            None if delta is None else use.keep_all(delta, row)
            for use, row, delta in zip(uses, rows, deltas, strict=True)
        ]
