"""Quadratic forms of a layer's curvature that need its weight W beside its gradients G_d.

    columns    ρ(j) = Σ s (Σ_{o,k} G_d[o,j,k] W[o,j,k])²     one an input unit j
    rows              Σ s (Σ_{j,k} G_d[o,j,k] W[o,j,k])²     one an output unit o
    flatness          Σ s ‖Wᵀ G_d‖²_F                        one number

summed over directions d and samples, with signs s = ±1 (Petzka et al. 2019 and 2021). With
G_d = Σ_t l_{d,t} r_tᵀ none of them needs G itself: all that is needed are Wᵀ l_{d,t} and W r_t.
Shapes as in `contract`: `left[d]` is (n, g, a, T), `right` (n, g, b, T), `weight` (g, a, b).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor

from saltflat.curvature.contract import Each, row_blocks
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
    flat = gradient.flatten(0, 1)
    flat_sign = None if sign is None else sign.reshape(lead)
    matrix = weight.matrix
    if form == "flatness":
        return signed(_flatness(flat, weight), flat_sign).sum(dtype=torch.float64)
    sums = matrix.columns if form == "columns" else matrix.rows
    return signed(sums(flat * weight.values, 1).double().square(), flat_sign).sum(0)


def _flatness(gradient: Tensor, weight: Weight) -> Tensor:
    """‖Wᵀ G‖² of each of (m, *shape)."""
    g, w = weight.matrix.grouped(gradient, 1), weight.matrix.grouped(weight.values)
    if weight.scale is not None:
        scale = weight.scale.reshape(w.shape[0], 1, w.shape[2], 1)
        g, w = divide(g, scale), w * scale
    g, w = g.flatten(-2), w.flatten(-2)
    return ((w @ w.mT) @ g * g).sum((1, 2, 3))


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
    parts = []
    b, positions = right.shape[2:]
    for rows in row_blocks(right, positions * (2 * b + left[0].shape[2])):
        for d, delta in enumerate(left):
            sums = layout.inputs((w.mT @ delta[rows] * right[rows]).sum(3))
            part = None if sign is None else sign[d, rows]
            parts.append(signed(sums.double().square(), part).sum(0))
    return torch.stack(parts).sum(0)


def _flat(left: Each, right: Tensor, w: Tensor, sign: Tensor | None) -> Tensor:
    """By Gram matrices of positions, or by W Wᵀ and the gradients: whichever is smaller."""
    total = torch.zeros((), dtype=torch.float64, device=right.device)
    a, positions = left[0].shape[2:]
    b = right.shape[2]
    by_gram = positions <= a
    square = w @ w.mT
    each = positions * (b + positions) if by_gram else a * b
    for rows in row_blocks(right, 2 * each):
        inner = right[rows]
        gram = inner.mT @ inner
        for d, delta in enumerate(left):
            if by_gram:
                pulled = w.mT @ delta[rows]
                values = (pulled.mT @ pulled * gram).sum((1, 2, 3))
            else:
                gradient = delta[rows] @ inner.mT
                values = (square @ gradient * gradient).sum((1, 2, 3))
            part = None if sign is None else sign[d, rows]
            total += signed(values.double(), part).sum()
    return total
