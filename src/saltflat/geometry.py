"""How a parameter acts as a matrix: which of its entries lead from which unit to which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor


@final
@dataclass(frozen=True, slots=True)
class Matrix:
    """The layout of a weight: output units along `out`, input units along the other of its first
    two dimensions; what follows are kernel positions.

    With `groups` > 1 (grouped convolutions) the first dimension holds the groups one after the
    other, and the second the units of one group.
    """

    out: int = 0
    groups: int = 1

    def grouped(self, values: Tensor, lead: int = 0) -> Tensor:
        """`values`, shaped as the weight after `lead` more dimensions, as
        (…, groups, outputs of a group, inputs of a group, kernel positions)."""
        split = torch.unflatten(values, lead, (self.groups, -1))
        flat = split.flatten(lead + 3) if split.ndim > lead + 3 else split.unsqueeze(-1)
        return flat.transpose(lead + 1, lead + 2) if self.out == 1 else flat

    def columns(self, values: Tensor, lead: int = 0) -> Tensor:
        """Sums over all that leaves each input unit: (…, inputs)."""
        return self.grouped(values, lead).sum((lead + 1, lead + 3)).flatten(lead)

    def rows(self, values: Tensor, lead: int = 0) -> Tensor:
        """Sums over all that enters each output unit: (…, outputs)."""
        return self.grouped(values, lead).sum((lead + 2, lead + 3)).flatten(lead)

    def ungrouped(self, values: Tensor, shape: torch.Size) -> Tensor:
        """The way back from `grouped` (without leading dimensions) to the weight's shape."""
        whole = values.transpose(1, 2) if self.out == 1 else values
        return whole.reshape(shape)


def windows(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """What a kernel sees at each position, a view (N, C, *positions, *kernel)."""
    for i, (k, s, d) in enumerate(zip(kernel, stride, dilation, strict=True)):
        x = x.unfold(2 + i, (k - 1) * d + 1, s)[..., ::d]
    return x
