"""Quadratic forms of a layer's curvature that need its weight W beside its gradients G_d.

    columns    ρ(j) = Σ s (Σ_{o,k} G_d[o,j,k] W[o,j,k])²     one an input unit j
    rows              Σ s (Σ_{j,k} G_d[o,j,k] W[o,j,k])²     one an output unit o
    flatness          Σ s ‖Wᵀ G_d‖²_F                        one number

summed over directions d and samples, with signs s = ±1 (Petzka et al. 2019 and 2021). With
G_d = Σ_t l_{d,t} r_tᵀ none of them needs G itself: all that is needed are Wᵀ l_{d,t} and W r_t.
Shapes as in `contract`: `left[d]` is (n, g, a, T), `right` (n, g, b, T), `weight` (g, a, b).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor

from saltflat.curvature.contract import (
    Each,
    flat,
    gram_squares,
    row_blocks,
    squares_by_gram,
    wide_cancellation,
)
from saltflat.curvature.layout import Layout
from saltflat.curvature.matrix import Matrix

Form = Literal["columns", "rows", "flatness"]


@final
@dataclass(frozen=True, slots=True)
class Weight:
    """A weight as a matrix; `scale` (one an input unit) divides the features for `flatness`."""

    values: Tensor
    matrix: Matrix
    scale: Tensor | None = None


def signed(values: Tensor, sign: Tensor | None) -> Tensor:
    """values[n, …] times sign[n]."""
    return values if sign is None else values * sign.reshape(-1, *[1] * (values.ndim - 1))


def written_out(gradient: Tensor, weight: Weight, sign: Tensor | None, form: Form) -> Tensor:
    """A form of gradients (D, n, *shape), as they stand."""
    lead = gradient.shape[:2].numel()
    each = gradient.flatten(0, 1)
    flat_sign = None if sign is None else sign.reshape(lead)
    matrix = weight.matrix
    if form == "flatness":
        return signed(_flatness(each, weight), flat_sign).sum(dtype=torch.float64)
    sums = matrix.columns if form == "columns" else matrix.rows
    return signed(sums(each * weight.values, 1).double().square(), flat_sign).sum(0)


def _flatness(gradient: Tensor, weight: Weight) -> Tensor:
    """‖Wᵀ G‖² of each of (m, *shape)."""
    g, w = weight.matrix.grouped(gradient, 1), weight.matrix.grouped(weight.values)
    if weight.scale is not None:
        scale = weight.scale.reshape(w.shape[0], 1, w.shape[2], 1)
        g, w = divide(g, scale), w * scale
    g, w = g.flatten(-2), w.flatten(-2)
    root = triangle(w, len(g) * g.shape[-1])
    return (root @ g.to(root.dtype)).square_().sum((1, 2, 3))


def triangle(w: Tensor, count: int) -> Tensor:
    """A matrix R, (…, k, a), with ‖R v‖ = ‖Wᵀ v‖: Wᵀ itself, or the triangle of Wᵀ = Q R.

    `count` is of how many vectors v: the triangle is for many, and for W of far more columns than
    rows. It is in float64, as its rounding would be the same for all v and not average out.
    (vᵀ (W Wᵀ) v would cost as much and lose twice the digits: it may even be negative.)
    """
    a, b = w.shape[-2:]
    if count * (b - 2 * a) <= 4 * a * b:
        return w.mT
    upper: Tensor = torch.linalg.qr(w.mT.double(), mode="r").R
    return upper


def divide(values: Tensor, scale: Tensor) -> Tensor:
    """values / scale, 0 where the scale is 0: a unit that is always 0 carries nothing."""
    return torch.where(scale > 0, values / torch.where(scale > 0, scale, 1.0), 0.0)


def factored(
    left: Each, right: Tensor, layout: Layout, weight: Weight, sign: Tensor | None, form: Form
) -> Tensor:
    """A form of gradients that are sums of outer products."""
    w = layout.factored(weight.values)
    if form == "rows":
        return _rows(left, right, layout, w, sign)
    if form == "columns":
        return _columns(left, right, layout, w, sign)
    if weight.scale is not None:
        spread = layout.spread(weight.scale)
        w, right = w * spread[:, None], divide(right, spread[..., None])
    return _flat(left, right, w, sign)


def _rows(left: Each, right: Tensor, layout: Layout, w: Tensor, sign: Tensor | None) -> Tensor:
    parts = []
    a, positions = left[0].shape[2:]
    for rows in row_blocks(right, positions * (2 * a + right.shape[2])):
        outputs = w @ right[rows]
        for d, delta in enumerate(left):
            sums = layout.outputs((delta[rows] * outputs).sum(3))
            part = None if sign is None else sign[d, rows]
            parts.append(signed(sums.double().square(), part).sum(0))
    return torch.stack(parts).sum(0)


def _columns(left: Each, right: Tensor, layout: Layout, w: Tensor, sign: Tensor | None) -> Tensor:
    """Σ_o W G of every column, from the gradients or from Wᵀ l: whichever is smaller."""
    parts = []
    a, positions = left[0].shape[2:]
    b = right.shape[2]
    for rows in row_blocks(right, 2 * b * min(a, positions)):
        inner = right[rows]
        for d, delta in enumerate(left):
            if a <= positions:
                sums = (delta[rows] @ inner.mT).mul_(w).sum(2)
            else:
                sums = (w.mT @ delta[rows]).mul_(inner).sum(3)
            part = None if sign is None else sign[d, rows]
            parts.append(signed(layout.inputs(sums).double().square(), part).sum(0))
    return torch.stack(parts).sum(0)


def _flat(left: Each, right: Tensor, w: Tensor, sign: Tensor | None) -> Tensor:
    """By Gram matrices of positions, or by the gradients: whichever is smaller."""
    total = torch.zeros((), dtype=torch.float64, device=right.device)
    a, positions = left[0].shape[2:]
    b = right.shape[2]
    by_gram = positions <= a
    norms = _norms_by_gram if by_gram else _norms_by_gradient
    each = positions * (b + positions) if by_gram else a * b
    root = triangle(w, len(left) * len(right) * (positions if by_gram else b))
    for rows in row_blocks(right, 2 * each):
        deltas = (delta[rows] for delta in left)
        for d, values in enumerate(norms(deltas, right[rows], root)):
            part = None if sign is None else sign[d, rows]
            total += signed(values.double(), part).sum()
    return total


def _norms_by_gram(deltas: Iterable[Tensor], right: Tensor, root: Tensor) -> Iterator[Tensor]:
    """‖Wᵀ G_d‖² = Σ_{t,t'} (R l_t · R l_t') (r_t · r_t') of every sample."""
    inner, groups = flat(right), right.shape[:2]
    gram = inner.mT @ inner
    for delta in deltas:
        pulled = (root @ delta.to(root.dtype)).to(right.dtype)
        squares, lost = (v.reshape(groups) for v in gram_squares([flat(pulled)], inner, gram))
        if bool(lost.any()):
            rows = lost.any(1)
            squares[rows] = _squares_again(delta[rows], right[rows], root).to(squares)
        yield squares.sum(1)


def _squares_again(delta: Tensor, right: Tensor, root: Tensor) -> Tensor:
    """The same in float64, R l_t included: its rounding would not average out; (n, g)."""
    pulled = flat(root.double() @ delta.double())
    room = wide_cancellation(right.dtype)
    return squares_by_gram([pulled], flat(right.double()), room).reshape(right.shape[:2])


def _norms_by_gradient(deltas: Iterable[Tensor], right: Tensor, root: Tensor) -> Iterator[Tensor]:
    """‖Wᵀ G_d‖² = ‖R G_d‖² of every sample."""
    for delta in deltas:
        yield (root @ (delta @ right.mT).to(root.dtype)).square_().sum((1, 2, 3))
