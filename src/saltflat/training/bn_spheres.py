"""The directions of BN-Sharpness: one sphere for every filter that feeds BatchNorm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from saltflat.training.bn_filters import Filters
from saltflat.training.vectors import Vector, together, total_norm


@final
@dataclass(frozen=True)
class Spheres:
    """φ(θ): ‖v_i‖ = ‖θ_i‖ for every filter i, one unit sphere for all other entries together.

    Directions are kept as unit vectors u_i; `filters` holds, for every parameter, its filters.
    """

    parameters: list[Tensor]
    filters: Sequence[Filters | None]

    def units(self, vector: Vector) -> Vector:
        """Every part divided by its length; a part that vanishes stays zero."""
        rest = [t for t, f in zip(vector, self.filters, strict=True) if f is None]
        length = at_least_tiny(total_norm(rest)) if rest else None
        return [
            t / (at_least_tiny(f.norms(t)) if f else length.to(t))  # type: ignore[union-attr]
            for t, f in zip(vector, self.filters, strict=True)
        ]

    @cached_property
    def radii(self) -> Vector:
        """‖θ_i‖, or 1 for the rest."""
        return [
            f.norms(p) if f else torch.ones((), dtype=p.dtype, device=p.device)
            for p, f in zip(self.parameters, self.filters, strict=True)
        ]

    def tangent(self, vector: Vector, units: Vector) -> Vector:
        """The part of `vector` that is orthogonal to u on every sphere (eq. 14)."""
        rest = [(t * u).sum() for t, u, f in zip(vector, units, self.filters, strict=True) if not f]
        joint = together(rest).sum() if rest else None
        return [
            t - u * (along(f, t * u) if f else joint.to(t))  # type: ignore[union-attr]
            for t, u, f in zip(vector, units, self.filters, strict=True)
        ]


def along(filters: Filters, product: Tensor) -> Tensor:
    """Sums over every filter of products of entries."""
    dims = [d for d in range(product.ndim) if d != filters.axis]
    return product.sum(dim=dims, keepdim=True)


def at_least_tiny(norms: Tensor) -> Tensor:
    """What can be divided by."""
    return norms.clamp_min(torch.finfo(norms.dtype).tiny)


def slope(gradient: Vector, radii: Vector, units: Vector) -> Tensor:
    """s = ⟨g, v⟩."""
    parts = [(g * r * u).sum() for g, r, u in zip(gradient, radii, units, strict=True)]
    return together(parts).sum()
