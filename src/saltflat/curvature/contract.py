"""Contractions of per-sample gradients that are sums of outer products over positions.

For one direction d and one sample, the gradient of a weight is G_d = Σ_t l_{d,t} r_tᵀ, summed over
the T positions at which the weight is used (pixels, tokens, calls). Wanted are, over directions
and samples with signs s = ±1,

    trace      Σ s ‖G_d‖²          diagonal      Σ s G_d²   (entry by entry).

Each can be had in several ways that differ only in cost; the cheapest is taken.
Shapes: `left[d]` is (n, g, a, T), `right` is (n, g, b, T) with g groups; `sign` is (D, n) or None.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

# One tensor a direction, or all of them stacked.
Each = Sequence[Tensor] | Tensor

# Entries of the temporaries: small enough for a CPU's cache, large enough to feed a GPU.
_CPU_BLOCK = 1 << 20
_GPU_BLOCK = 1 << 28


def trace(left: Each, right: Tensor, sign: Tensor | None) -> Tensor:
    """Σ s ‖G_d‖² over directions and samples, as a float64 scalar."""
    _, _, a, positions = left[0].shape
    b, directions = right.shape[2], len(left)
    gram = positions * (directions * a + b)
    if gram < directions * a * b:
        return _trace_gram(left, right, sign)
    return _trace_gradient(left, right, sign)


def diagonal(left: Each, right: Tensor, sign: Tensor | None) -> Tensor:
    """Σ s G_d² over directions and samples, shape (g, a, b)."""
    positions = right.shape[3]
    # The sum over directions first costs T(T+1)/2 products an entry instead of D·T, and leaves
    # one large product instead of n·D small ones whose results must each be squared.
    if positions + 1 <= 3 * len(left):
        return _diagonal_pairs(left, right, sign)
    return _diagonal_gradient(left, right, sign)


def gradient(left: Tensor, right: Tensor) -> Tensor:
    """Σ G over samples for one direction, shape (g, a, b)."""
    _, groups, a, _ = left.shape
    outer = left.permute(1, 2, 0, 3).reshape(groups, a, -1)
    inner = right.permute(1, 0, 3, 2).reshape(groups, -1, right.shape[2])
    return outer @ inner


def stack(each: Each) -> Tensor:
    """All directions as one tensor (D, …)."""
    return each if isinstance(each, Tensor) else torch.stack(list(each))


def _trace_gram(left: Each, right: Tensor, sign: Tensor | None) -> Tensor:
    """‖G‖² = Σ_{t,t'} (l_t·l_t')(r_t·r_t'): positions × positions matrices, never a gradient."""
    total = torch.zeros((), dtype=torch.float64, device=right.device)
    positions = right.shape[3]
    for rows in row_blocks(right, positions * positions):
        inner = _flat(right[rows])
        gram = inner.mT @ inner
        outer = torch.zeros_like(gram)
        for d, delta in enumerate(left):
            part = _flat(delta[rows])
            signed = part if sign is None else part * _per_row(sign[d, rows], delta.shape[1])
            outer.baddbmm_(signed.mT, part)
        total += (gram * outer).sum((1, 2)).sum(dtype=torch.float64)
    return total


def _trace_gradient(left: Each, right: Tensor, sign: Tensor | None) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=right.device)
    for d, rows, gradient in _gradients(left, right):
        squares = torch.linalg.vector_norm(gradient, dim=(1, 2)).square()
        if sign is not None:
            squares = squares * _per_row(sign[d, rows], right.shape[1]).flatten()
        total += squares.sum(dtype=torch.float64)
    return total


def _diagonal_pairs(left: Each, right: Tensor, sign: Tensor | None) -> Tensor:
    """Σ_{t≤t'} (Σ_d s l_t l_t') (r_t r_t'), off-diagonal pairs twice."""
    groups, b, positions = right.shape[1:]
    a = left[0].shape[2]
    first, second = torch.triu_indices(positions, positions, device=right.device)
    twice = torch.where(first == second, 1.0, 2.0).to(right)
    result = right.new_zeros(groups, a, b)
    for rows in row_blocks(right, len(first) * (b + a)):
        pairs: Tensor | None = None
        for d, delta in enumerate(left):
            part = delta[rows]
            signed = part if sign is None else part * sign[d, rows, None, None, None]
            product = signed[..., first] * part[..., second]
            pairs = product if pairs is None else pairs.add_(product)
        assert pairs is not None
        inner = right[rows][..., first] * right[rows][..., second] * twice
        result += torch.einsum("ngap,ngbp->gab", pairs, inner)
    return result


def _diagonal_gradient(left: Each, right: Tensor, sign: Tensor | None) -> Tensor:
    _, groups, b, _ = right.shape
    a = left[0].shape[2]
    result = right.new_zeros(groups, a, b)
    for d, rows, gradient in _gradients(left, right):
        each = torch.unflatten(gradient, 0, (-1, groups))
        if sign is None:
            result += each.square_().sum(0)
        else:
            result += (each.square_() * sign[d, rows, None, None, None]).sum(0)
    return result


def _gradients(left: Each, right: Tensor) -> Iterator[tuple[int, slice, Tensor]]:
    """Per-sample gradients (rows·g, a, b), a direction and a block of samples at a time."""
    for rows in row_blocks(right, left[0].shape[2] * right.shape[2]):
        inner = _flat(right[rows]).mT
        for d, delta in enumerate(left):
            yield d, rows, torch.bmm(_flat(delta[rows]), inner)


def _flat(x: Tensor) -> Tensor:
    """(n, g, a, T) as a batch of matrices."""
    return x.flatten(0, 1) if x.shape[1] > 1 else x[:, 0]


def _per_row(sign: Tensor, groups: int) -> Tensor:
    return sign.repeat_interleave(groups)[:, None, None]


def row_blocks(right: Tensor, entries: int) -> Iterator[slice]:
    """Slices of samples whose temporaries stay within the block size."""
    n, groups = right.shape[:2]
    block = _CPU_BLOCK if right.device.type == "cpu" else _GPU_BLOCK
    step = max(1, block // max(1, groups * entries))
    for start in range(0, n, step):
        yield slice(start, min(n, start + step))
