"""The directions of BN-Sharpness: one sphere for every filter that feeds BatchNorm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from saltflat.geometry import Matrix
from saltflat.vectors import Vector, together, total_norm


@final
@dataclass(frozen=True)
class Filters:
    """The filters of a weight, each of which makes one output unit.

    `fed` marks those that have spheres of their own; None: all of them. Numbers of filters are in a
    shape that broadcasts against the weight.
    """

    weight: Tensor
    matrix: Matrix
    fed: Tensor | None = None

    @property
    def count(self) -> int:
        groups = self.matrix.groups if self.matrix.out == 1 else 1
        return self.weight.shape[self.matrix.out] * groups

    @cached_property
    def own(self) -> Tensor | None:
        return None if self.fed is None else self.spread(self.fed.to(self.weight.device))

    def sums(self, entries: Tensor) -> Tensor:
        """Sums over every filter."""
        return self.spread(self.matrix.rows(entries))

    def norms(self, entries: Tensor) -> Tensor:
        """The length of every filter."""
        grouped = self.matrix.grouped(entries)
        return self.spread(torch.linalg.vector_norm(grouped, dim=(2, 3)).flatten())

    def zeros(self) -> int:
        """How many filters with spheres are zero, and so have no direction."""
        zero = self.matrix.rows(self.weight.abs()) == 0
        return int(zero[... if self.fed is None else self.fed.to(zero.device)].sum())

    def spread(self, values: Tensor) -> Tensor:
        """One number a filter, laid out so that it multiplies the weight."""
        kernel = [1] * (self.weight.ndim - 2)
        if self.matrix.out == 0:
            return values.view(-1, 1, *kernel)
        grouped = values.view(self.matrix.groups, 1, -1)
        inputs = self.weight.shape[0] // self.matrix.groups
        return grouped.expand(-1, inputs, -1).reshape(self.weight.shape[0], -1, *kernel)


@final
@dataclass(frozen=True)
class Spheres:
    """φ(θ): ‖v_i‖ = ‖θ_i‖ for every filter i, one joint unit sphere for all other entries.

    Yi et al. 2019, definition 3.1. `filters` holds those of every parameter, or None where it has
    none with spheres. Directions are kept as unit vectors u_i.
    """

    parameters: Vector
    filters: Sequence[Filters | None]

    @cached_property
    def radii(self) -> list[Tensor]:
        """‖θ_i‖, or 1 for the rest."""
        result = []
        for p, f in zip(self.parameters, self.filters, strict=True):
            one = torch.ones((), dtype=p.dtype, device=p.device)
            result.append(_where(f, one if f is None else f.norms(p), one))
        return result

    def lengths(self, vector: Vector) -> list[Tensor]:
        """‖t_i‖ of every filter, and the joint length of the rest."""
        rest = self._rest(vector)
        norms = [f.norms(t) if f else None for t, f in zip(vector, self.filters, strict=True)]
        return self._with_rest(norms, total_norm(rest) if rest else None, vector)

    def units(self, vector: Vector) -> list[Tensor]:
        """Every part divided by its length; a part that vanishes stays zero."""
        lengths = self.lengths(vector)
        return [t / at_least_tiny(length) for t, length in zip(vector, lengths, strict=True)]

    def tangent(self, vector: Vector, units: Vector) -> list[Tensor]:
        """The part of `vector` that is orthogonal to u on every sphere (eq. 14)."""
        products = [t * u for t, u in zip(vector, units, strict=True)]
        rest = [t.sum() for t in self._rest(products)]
        sums = [f.sums(t) if f else None for t, f in zip(products, self.filters, strict=True)]
        inner = self._with_rest(sums, together(rest).sum() if rest else None, vector)
        return [t - u * i for t, u, i in zip(vector, units, inner, strict=True)]

    def slope(self, gradient: Vector, units: Vector) -> Tensor:
        """⟨g, v⟩, the largest for the unit vectors of g itself: Σ_i ‖θ_i‖‖g_i‖ + ‖g_rest‖."""
        triples = zip(gradient, self.radii, units, strict=True)
        return together([(g * r * u).sum() for g, r, u in triples]).sum()

    def _rest(self, vector: Vector) -> list[Tensor]:
        """What is on the joint sphere, with zeros elsewhere."""
        return [
            t if f is None or f.own is None else t.masked_fill(f.own, 0.0)
            for t, f in zip(vector, self.filters, strict=True)
            if f is None or f.own is not None
        ]

    def _with_rest(
        self, numbers: Sequence[Tensor | None], joint: Tensor | None, like: Vector
    ) -> list[Tensor]:
        """The numbers of filters where they have spheres, and the joint one for the rest."""
        result = []
        for number, f, t in zip(numbers, self.filters, like, strict=True):
            rest = number if joint is None else joint.to(t)
            assert rest is not None, "a parameter without filters is on the joint sphere"
            result.append(_where(f, rest if number is None else number, rest))
        return result


def _where(filters: Filters | None, numbers: Tensor, rest: Tensor) -> Tensor:
    if filters is None or filters.own is None:
        return numbers
    return torch.where(filters.own, numbers, rest)


def at_least_tiny(norms: Tensor) -> Tensor:
    """What can be divided by."""
    return norms.clamp_min(torch.finfo(norms.dtype).tiny)
