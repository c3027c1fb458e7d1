"""Tensors of ids: what the special ids mean, and how to work on few of many equal ones."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

#: the entry is zero (or infinite) whatever the parameters are: any scale is right for it
ANY = 0
#: the scale is 1
PINNED = 1
#: ids from here on are linear combinations of others
DERIVED = 1 << 40


class NotUnderstood(Exception):
    """A rule meets what it does not know; the operation pins all of its operands instead."""


def cancels(table: Tensor, weights: Tensor) -> Tensor:
    """Equations that say 0 = 0: equal ids whose factors add up to nothing."""
    total = torch.zeros(table.shape[1], dtype=torch.float64)
    for i in range(len(table)):
        mine = ((table == table[i]) * weights).sum(0).abs()
        total += torch.where(table[i] == PINNED, 0.0, mine)
    return total == 0


def squash(ids: Tensor) -> Tensor:
    """The ids with every repeated dimension (stride 0) cut to size 1."""
    for d in range(ids.ndim):
        if ids.shape[d] > 1 and ids.stride(d) == 0:
            ids = ids.narrow(d, 0, 1)
    return ids


def shrink(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """Two tensors broadcast to one shape with what both repeat cut to size 1, and the way back."""
    shape = torch.broadcast_shapes(a.shape, b.shape)
    a, b = a.expand(shape), b.expand(shape)
    for d, size in enumerate(shape):
        if size > 1 and a.stride(d) == 0 and b.stride(d) == 0:
            a, b = a.narrow(d, 0, 1), b.narrow(d, 0, 1)
    return a, b, lambda out: out.expand(shape)


def repeat(ids: Tensor) -> Tensor:
    """The same ids with stride 0 along every dimension in which they do not differ."""
    shape = ids.shape
    ids = squash(ids)
    for d in range(ids.ndim):
        first = ids.narrow(d, 0, 1) if ids.shape[d] > 1 else None
        if first is not None and bool((ids == first).all()):
            ids = first
    return ids.expand(shape)


def unique_rows(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Indices of the distinct rows, and for every row the position of its own among them."""
    if len(ids) == 1 or ids.stride(0) == 0:
        return torch.zeros(1, dtype=torch.int64), torch.zeros(len(ids), dtype=torch.int64)
    generator = torch.Generator().manual_seed(0)
    weights = torch.randint(2**62, (ids.shape[1],), generator=generator)
    _, inverse = torch.unique((ids * weights).sum(1), return_inverse=True)
    first = _first_of_each(inverse)
    if not torch.equal(ids[first][inverse], ids):  # two different rows with one hash
        _, inverse = torch.unique(ids, dim=0, return_inverse=True)
        first = _first_of_each(inverse)
    return first, inverse


def _first_of_each(inverse: Tensor) -> Tensor:
    count = int(inverse.max()) + 1
    first = torch.full((count,), len(inverse))
    return first.scatter_reduce(0, inverse, torch.arange(len(inverse)), "amin")


def unique_pairs(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The distinct pairs, and for every pair the position of its own among them."""
    first, i = torch.unique(a, return_inverse=True)
    second, j = torch.unique(b, return_inverse=True)
    key, inverse = torch.unique(i * len(second) + j, return_inverse=True)
    return first[key // len(second)], second[key % len(second)], inverse
