"""Layouts: how the gradient of a weight, written as products of two vectors, becomes its shape.

In factored form a weight is (g, a, b): g groups of matrices whose rows meet what arrives at the
layer's output (`left`) and whose columns meet the layer's input (`right`). A layout turns
(…, g, a, b) into the parameter's own shape and back, and sums over kernel positions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import prod
from typing import final

import torch
from torch import Tensor

from saltflat.curvature.matrix import Matrix


class Layout(ABC):
    """Frozen, so that equal layouts compare equal: their positions can be put side by side."""

    @property
    @abstractmethod
    def matrix(self) -> Matrix:
        """The layout of the parameter itself."""

    @abstractmethod
    def assemble(self, factored: Tensor) -> Tensor:
        """(…, g, a, b) as (…, *shape of the parameter)."""

    @abstractmethod
    def factored(self, weight: Tensor) -> Tensor:
        """The parameter's shape as (g, a, b)."""

    def inputs(self, values: Tensor) -> Tensor:
        """(…, g, b), summed over kernel positions: (…, input units)."""
        return values.flatten(-2)

    def outputs(self, values: Tensor) -> Tensor:
        """(…, g, a), summed over kernel positions: (…, output units)."""
        return values.flatten(-2)

    def spread(self, units: Tensor) -> Tensor:
        """One value an input unit as (g, b), repeated over kernel positions."""
        return units.reshape(self.matrix.groups, -1)

    @property
    def rows_are_units(self) -> bool:
        """Whether each of the a rows is one output unit."""
        return True


@final
@dataclass(frozen=True, slots=True)
class LinearLayout(Layout):
    """(1, out, in), stored as it is or transposed."""

    transposed: bool = False

    @property
    def matrix(self) -> Matrix:
        return Matrix(out=1 if self.transposed else 0)

    def assemble(self, factored: Tensor) -> Tensor:
        square = factored.squeeze(-3)
        return square.mT if self.transposed else square

    def factored(self, weight: Tensor) -> Tensor:
        return (weight.mT if self.transposed else weight).unsqueeze(0)


@final
@dataclass(frozen=True, slots=True)
class ConvLayout(Layout):
    """(g, out/g, in/g · kernel); with channels last (1, out, kernel · in)."""

    kernel: tuple[int, ...]
    groups: int
    last: bool = False

    @property
    def matrix(self) -> Matrix:
        return Matrix(groups=self.groups)

    def assemble(self, factored: Tensor) -> Tensor:
        if not self.last:
            return torch.unflatten(factored.flatten(-3, -2), -1, (-1, *self.kernel))
        split = torch.unflatten(factored.squeeze(-3), -1, (*self.kernel, -1))
        return split.movedim(-1, -1 - len(self.kernel))

    def factored(self, weight: Tensor) -> Tensor:
        if not self.last:
            return weight.reshape(self.groups, len(weight) // self.groups, -1)
        return weight.movedim(1, -1).reshape(1, len(weight), -1)

    def inputs(self, values: Tensor) -> Tensor:
        taps = prod(self.kernel)
        if self.last:
            return torch.unflatten(values.squeeze(-2), -1, (taps, -1)).sum(-2)
        return torch.unflatten(values, -1, (-1, taps)).sum(-1).flatten(-2)

    def spread(self, units: Tensor) -> Tensor:
        taps = prod(self.kernel)
        if self.last:
            return units.repeat(taps).unsqueeze(0)
        return units.repeat_interleave(taps).reshape(self.groups, -1)


@final
@dataclass(frozen=True, slots=True)
class ConvTransposeLayout(Layout):
    """(g, out/g · kernel, in/g)."""

    kernel: tuple[int, ...]
    groups: int

    @property
    def matrix(self) -> Matrix:
        return Matrix(out=1, groups=self.groups)

    def assemble(self, factored: Tensor) -> Tensor:
        return torch.unflatten(factored.mT.flatten(-3, -2), -1, (-1, *self.kernel))

    def factored(self, weight: Tensor) -> Tensor:
        return weight.reshape(self.groups, len(weight) // self.groups, -1).mT

    def outputs(self, values: Tensor) -> Tensor:
        return torch.unflatten(values, -1, (-1, prod(self.kernel))).sum(-1).flatten(-2)

    @property
    def rows_are_units(self) -> bool:
        return False
