"""A Linear with one row a sample: every gradient is G_d = δ_d xᵀ, and nothing needs it written out.

trace      Σ s ‖G_d‖²      = Σ_n ‖x‖² Σ_d s ‖δ_d‖²
diagonal   Σ s G_d²        = Σ_n (Σ_d s δ_d²) (x²)ᵀ
columns    Σ s (Wᵀδ_d ∘ x)² = Σ_n x² ∘ Σ_d s (Wᵀδ_d)²
rows       Σ s (δ_d ∘ Wx)²  = Σ_n (Wx)² ∘ Σ_d s δ_d²
flatness   Σ s ‖WᵀG_d‖²    = Σ_n ‖x‖² Σ_d s ‖Wᵀδ_d‖²
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from saltflat.curvature.contract import row_blocks
from saltflat.curvature.layout import LinearLayout
from saltflat.curvature.quadratic import Form, Weight, divide, triangle
from saltflat.curvature.terms import Outer, Term


@final
class Deltas:
    """What arrived at one operation, (D, n, a), squared once for its weight and its bias."""

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self._squares: dict[bool, Tensor] = {}  # without signs, and with them
        self._norms: dict[bool, Tensor] = {}

    def squares(self, sign: Tensor | None) -> Tensor:
        """Σ_d s δ_d², (n, a); `sign` is (D, n), the same in every call that has one, or None."""
        key = sign is not None
        if key not in self._squares:
            self._squares[key] = _weighted(self.values.square(), sign)
        return self._squares[key]

    def norms(self, sign: Tensor | None) -> Tensor:
        """Σ_d s ‖δ_d‖², (n,), without writing the squares out."""
        key = sign is not None
        if key not in self._norms:
            self._norms[key] = _weighted(_squared_norms(self.values), sign)
        return self._norms[key]


@final
@dataclass(frozen=True, slots=True)
class Bias(Term):
    """The gradients are the deltas themselves."""

    deltas: Deltas

    def gradient(self) -> Tensor:
        return self.deltas.values

    def diagonal(self, sign: Tensor | None) -> Tensor:
        return self.deltas.squares(sign).sum(0)

    def trace(self, sign: Tensor | None) -> Tensor:
        return self.deltas.norms(sign).sum(dtype=torch.float64)


@final
@dataclass(frozen=True, slots=True)
class RankOne(Term):
    """δ_d xᵀ: `inputs` is (n, b)."""

    deltas: Deltas
    inputs: Tensor
    layout: LinearLayout

    def outer(self) -> Outer:
        """The same with an axis of positions, to be put beside other uses of the weight."""
        return Outer(
            self.deltas.values[:, :, None, :, None], self.inputs[:, None, :, None], self.layout
        )

    def gradient(self) -> Tensor:
        return self.outer().gradient()

    def weighted(self, weights: Tensor) -> Tensor:
        left = self.deltas.values[0] * weights.to(self.inputs)[:, None]
        return self._assemble(left.mT @ self.inputs)

    def trace(self, sign: Tensor | None) -> Tensor:
        return (self.deltas.norms(sign) * _squared_norms(self.inputs)).sum(dtype=torch.float64)

    def diagonal(self, sign: Tensor | None) -> Tensor:
        squares = self.deltas.squares(sign)
        result = self.inputs.new_zeros(squares.shape[1], self.inputs.shape[1])
        for rows in self._blocks(self.inputs.shape[1]):
            result.addmm_(squares[rows].mT, self.inputs[rows].square())
        return self._assemble(result)

    def form(self, form: Form, weight: Weight, sign: Tensor | None) -> Tensor:
        (w,) = self.layout.factored(weight.values)
        if form == "rows":
            outputs: Tensor = (self.inputs @ w.mT).square_()
            return outputs.mul_(self.deltas.squares(sign)).sum(0, dtype=torch.float64)
        if form == "columns":
            return self._columns(w, sign)
        inputs = self.inputs
        if weight.scale is not None:
            w, inputs = w * weight.scale, divide(inputs, weight.scale)
        root = triangle(w, self.deltas.values.shape[:2].numel())
        pulled = self.deltas.values.to(root.dtype) @ root.mT
        each = _weighted(_squared_norms(pulled), sign)
        return (each * _squared_norms(inputs)).sum(dtype=torch.float64)

    def _columns(self, w: Tensor, sign: Tensor | None) -> Tensor:
        deltas = self.deltas.values
        total = torch.zeros(w.shape[1], dtype=torch.float64, device=w.device)
        for rows in self._blocks(len(deltas) * w.shape[1]):
            part = None if sign is None else sign[:, rows]
            pulled = _weighted((deltas[:, rows] @ w).square_(), part)
            total += pulled.mul_(self.inputs[rows].square()).sum(0, dtype=torch.float64)
        return total

    def _assemble(self, matrix: Tensor) -> Tensor:
        return self.layout.assemble(matrix.unsqueeze(0))

    def _blocks(self, entries: int) -> Iterator[slice]:
        """Rows at a time: a quarter of the usual block, whose squares stay in a CPU's cache."""
        return row_blocks(self.inputs.unsqueeze(1), 4 * entries)


def _squared_norms(x: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(x, dim=-1)
    return norms.square_()


def _weighted(squares: Tensor, sign: Tensor | None) -> Tensor:
    """Σ_d s_{d,n} squares[d, n, …]."""
    if sign is None:
        return squares.sum(0)
    return (squares * sign.reshape(*sign.shape, *[1] * (squares.ndim - 2))).sum(0)
