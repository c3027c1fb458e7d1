"""Terms: a parameter's per-sample gradients at one use, kept in the form that is cheap to square.

For D directions and n samples a term stands for gradients of shape (D, n, *parameter.shape).
`gradient()` writes them out; `trace` and `diagonal` avoid that where they can.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from saltflat.curvature import contract, quadratic
from saltflat.curvature.layout import Layout
from saltflat.curvature.quadratic import Form, Weight, signed, triangle


class Term(ABC):
    """Gradients of one parameter, for D directions and n samples."""

    @abstractmethod
    def gradient(self) -> Tensor:
        """The gradients themselves, (D, n, *shape)."""

    def weighted(self, weights: Tensor) -> Tensor:
        """Σ_i weights[i] · G of the first direction, of the parameter's shape."""
        gradient = self.gradient()[0]
        summed = weights.to(gradient) @ gradient.reshape(len(gradient), -1)
        return summed.reshape(gradient.shape[1:])

    def trace(self, sign: Tensor | None) -> Tensor:
        """Σ s ‖G‖², a float64 scalar; `sign` is (D, n) or None."""
        return self.diagonal(sign).sum(dtype=torch.float64)

    def diagonal(self, sign: Tensor | None) -> Tensor:
        """Σ s G², of the parameter's shape."""
        squares = self.gradient().square()
        if sign is not None:
            squares = squares * sign.reshape(*sign.shape, *[1] * (squares.ndim - 2))
        return squares.sum((0, 1))

    def form(self, form: Form, weight: Weight, sign: Tensor | None) -> Tensor:
        """A quadratic form of the gradients and the weight, in float64."""
        return quadratic.written_out(self.gradient(), weight, sign, form)

    def outer(self) -> Outer | None:
        """The same gradients as sums of outer products, if they are."""
        return None


@final
@dataclass(frozen=True, slots=True)
class Explicit(Term):
    """Gradients written out: biases, normalisation parameters, anything small."""

    values: Tensor

    def gradient(self) -> Tensor:
        return self.values

    def trace(self, sign: Tensor | None) -> Tensor:
        flat = self.values.reshape(*self.values.shape[:2], -1)
        norms: Tensor = torch.linalg.vector_norm(flat, dim=2)
        squares = norms.double().square()  # one a direction and sample, added up in float64
        return (squares if sign is None else squares * sign).sum()


@final
@dataclass(frozen=True, slots=True)
class Outer(Term):
    """Σ_t l_t r_tᵀ in groups; `layout` turns (…, g, a, b) into the parameter's shape."""

    left: contract.Each
    right: Tensor
    layout: Layout

    def outer(self) -> Outer:
        return self

    def gradient(self) -> Tensor:
        inner = self.right.mT
        return self.layout.assemble(torch.stack([delta @ inner for delta in self.left]))

    def weighted(self, weights: Tensor) -> Tensor:
        left = self.left[0] * weights.to(self.right)[:, None, None, None]
        return self.layout.assemble(contract.gradient(left, self.right))

    def trace(self, sign: Tensor | None) -> Tensor:
        return contract.trace(self.left, self.right, sign)

    def diagonal(self, sign: Tensor | None) -> Tensor:
        return self.layout.assemble(contract.diagonal(self.left, self.right, sign))

    def form(self, form: Form, weight: Weight, sign: Tensor | None) -> Tensor:
        if form == "flatness" and not self.layout.rows_are_units:
            return quadratic.written_out(self.gradient(), weight, sign, form)
        return quadratic.factored(self.left, self.right, self.layout, weight, sign, form)


@final
@dataclass(frozen=True, slots=True)
class Lookup(Term):
    """Rows of an embedding: `index` is (n, T), −1 where nothing flows; `deltas[d]` is (n, T, d)."""

    index: Tensor
    deltas: Sequence[Tensor]
    rows: int

    def gradient(self) -> Tensor:
        kept = (self.index >= 0).unsqueeze(-1)
        at = self.index.clamp(min=0).unsqueeze(-1)
        written = []
        for delta in self.deltas:
            rows = delta.new_zeros(len(delta), self.rows, delta.shape[-1])
            written.append(rows.scatter_add_(1, at.expand_as(delta), delta * kept))
        return torch.stack(written)

    def weighted(self, weights: Tensor) -> Tensor:
        kept = (self.index >= 0).unsqueeze(-1)
        rows = (self.deltas[0] * kept * weights[:, None, None]).flatten(0, 1)
        result = rows.new_zeros(self.rows, rows.shape[-1])
        return result.index_add_(0, self.index.clamp(min=0).flatten(), rows)

    def trace(self, sign: Tensor | None) -> Tensor:
        return self._squares(sign).sum(dtype=torch.float64)

    def diagonal(self, sign: Tensor | None) -> Tensor:
        squares = self._squares(sign).flatten(0, 1)
        result = squares.new_zeros(self.rows, squares.shape[-1])
        return result.index_add_(0, self.index.clamp(min=0).flatten(), squares)

    def form(self, form: Form, weight: Weight, sign: Tensor | None) -> Tensor:
        """The table is a matrix whose input units are its rows."""
        rows = weight.values[self.index.clamp(min=0)]
        if weight.scale is not None:
            return quadratic.written_out(self.gradient(), weight, sign, form)
        width = self.rows if form == "columns" else rows.shape[-1] if form == "rows" else 1
        total = rows.new_zeros(width, dtype=torch.float64)
        root = rows
        if form == "flatness":
            root = triangle(weight.values.mT, len(self.deltas) * self.index.numel())
        for d, delta in enumerate(self._distinct()):
            part = None if sign is None else sign[d]
            if form == "columns":
                sums = signed((delta * rows).sum(2).double().square(), part)
                total.index_add_(0, self.index.clamp(min=0).flatten(), sums.flatten())
            elif form == "rows":
                total += signed((delta * rows).sum(1).double().square(), part).sum(0)
            else:
                pulled = delta.to(root.dtype) @ root.mT
                total += signed(pulled.square_().sum(2).double(), part).sum()
        return total if form != "flatness" else total[0]

    def _distinct(self) -> Iterator[Tensor]:
        """Deltas added up at the first position of every distinct row of a sample, 0 elsewhere."""
        same = (self.index.unsqueeze(2) == self.index.unsqueeze(1)).int()
        first = same.argmax(dim=2).unsqueeze(-1)
        kept = (self.index >= 0).unsqueeze(-1)
        for delta in self.deltas:
            yield torch.zeros_like(delta).scatter_add_(1, first.expand_as(delta), delta * kept)

    def _squares(self, sign: Tensor | None) -> Tensor:
        """Σ_d s G² at the first position of every distinct row of a sample, 0 elsewhere."""
        total = torch.zeros_like(self.deltas[0])
        for d, rows in enumerate(self._distinct()):
            squares = rows.square_()
            total += squares if sign is None else squares * sign[d, :, None, None]
        return total


def combine(terms: Sequence[Term]) -> Term:
    """One term for a parameter that is used several times: its gradients add up."""
    if len(terms) == 1:
        return terms[0]
    outer = [t for t in (term.outer() for term in terms) if t is not None]
    if len(outer) == len(terms) and len({t.layout for t in outer}) == 1:
        directions = range(len(outer[0].left))
        left = [torch.cat([t.left[d] for t in outer], dim=3) for d in directions]
        right = torch.cat([t.right for t in outer], dim=3)
        return Outer(left, right, outer[0].layout)
    gradient = terms[0].gradient()
    for term in terms[1:]:
        gradient = gradient + term.gradient()
    return Explicit(gradient)
