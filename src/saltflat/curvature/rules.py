"""The fast rules: how the gradient of a parameter follows from what one operation saw.

A `Use` is one call of an operation with a measured parameter. It keeps the operation's input and
the place of its output in the autograd graph; given what arrives there (`deltas`, one tensor a
direction), `terms` gives the per-sample gradients of the parameters, in factored form.

Every rule relies on two things that the operation cannot know: that its rows are the samples, and
that the parameter reaches the outputs through these calls alone. Both are checked at run time
against autograd (see `plan`), so a rule may be wrong about a model, but never in silence.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge

from saltflat.curvature.contractions import (
    Bias,
    ConvLayout,
    ConvTransposeLayout,
    Deltas,
    Each,
    Explicit,
    LinearLayout,
    Lookup,
    Outer,
    RankOne,
    Term,
    stack,
)
from saltflat.geometry import Matrix


@dataclass(frozen=True, slots=True)
class Rows:
    """Where the samples are: `count` of them along dimension `dim`, each maybe several rows."""

    count: int
    dim: int = 0

    def first(self, x: Tensor) -> Tensor:
        """x as (samples, rows per sample, …)."""
        return torch.unflatten(x.movedim(self.dim, 0), 0, (self.count, -1))

    def fits(self, shape: Sequence[int]) -> bool:
        if self.dim >= len(shape) - 1:
            return False
        size = shape[self.dim]
        return size > 0 and (size % self.count == 0 if self.dim == 0 else size == self.count)


@dataclass(slots=True)
class Use(ABC):
    """One call of an operation that a rule knows."""

    rule: ClassVar[str]
    dims: ClassVar[tuple[int, ...]] = (0, 1)  # where the samples may lie
    keeps: ClassVar[bool] = True  # whether `keep` keeps the whole delta
    names: dict[str, str]  # role ("weight", "bias") -> parameter name
    input: Tensor
    edge: GradientEdge
    shape: torch.Size  # of the output

    def keep(self, delta: Tensor, rows: Rows) -> Any:
        """What must be kept of one direction's delta until `terms`; by default all of it."""
        return delta

    def keep_all(self, deltas: Tensor, rows: Rows) -> Sequence[Any] | Tensor:
        """The same for all directions at once, (D, *output)."""
        return deltas

    def matrix(self) -> Matrix | None:
        """How the weight acts as a matrix, if it does."""
        return None

    def features(self) -> Tensor | None:
        """What the weight meets, a row for every position, if that is not looked up."""
        return self.input.movedim(1, -1).flatten(0, -2)

    @property
    def has_constants(self) -> bool:
        """Whether entries of the weight have no gradient by agreement."""
        return False

    @property
    def may_be_a_product(self) -> bool:
        """Whether the input may be made of parameters alone, as in b @ a."""
        return False

    @abstractmethod
    def terms(self, kept: Any, rows: Rows) -> Iterator[tuple[str, Term]]:
        """(parameter name, its gradients) from what was kept, one entry a direction."""


def _positions(x: Tensor, rows: Rows) -> Tensor:
    """(samples, 1, features, positions) of a tensor whose last dimension is features."""
    return rows.first(x).flatten(1, -2).mT.unsqueeze(1)


@final
@dataclass(slots=True)
class LinearUse(Use):
    """z = x Wᵀ + b, or z = x W + b where `transposed`."""

    rule: ClassVar[str] = "linear"
    transposed: bool = False

    def matrix(self) -> Matrix:
        return LinearLayout(self.transposed).matrix

    def features(self) -> Tensor:
        return self.input.flatten(0, -2)

    @property
    def may_be_a_product(self) -> bool:
        return self.transposed

    def terms(self, kept: Each, rows: Rows) -> Iterator[tuple[str, Term]]:
        layout = LinearLayout(self.transposed)
        if len(self.shape) == 2 and self.shape[0] == rows.count:
            deltas = Deltas(stack(kept))
            if "weight" in self.names:
                yield self.names["weight"], RankOne(deltas, self.input, layout)
            if "bias" in self.names:
                yield self.names["bias"], Bias(deltas)
            return
        left = [_positions(d, rows) for d in kept]
        if "weight" in self.names:
            yield self.names["weight"], Outer(left, _positions(self.input, rows), layout)
        if "bias" in self.names:
            yield self.names["bias"], Explicit(torch.stack([d.sum((1, 3)) for d in left]))


@dataclass(frozen=True, slots=True)
class Window:
    """The geometry of a convolution, one entry a spatial dimension."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    before: tuple[int, ...]  # padding
    after: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def patches(self, x: Tensor, size: Sequence[int]) -> Tensor:
        """What each kernel element saw at each of `size` positions, a view (n, c, *kernel, *size).

        Only the copy that padding needs is made.
        """
        if any(self.before) or any(self.after):
            sides = zip(reversed(self.before), reversed(self.after), strict=True)
            x = F.pad(x, [p for side in sides for p in side])
        n, channels, *space = x.stride()
        step = [s * d for s, d in zip(space, self.dilation, strict=True)]
        jump = [s * d for s, d in zip(space, self.stride, strict=True)]
        shape = (*x.shape[:2], *self.kernel, *size)
        return x.as_strided(shape, (n, channels, *step, *jump), x.storage_offset())


def _channels_last(x: Tensor) -> bool:
    return x.shape[1] > 1 and x.stride(1) == 1


def _side_by_side(x: Tensor, rows: Rows) -> Tensor:
    """(samples·q, g, a, T) as (samples, g, a, q·T)."""
    split = rows.first(x)
    return split[:, 0] if split.shape[1] == 1 else split.movedim(1, 3).flatten(3)


def _patch_matrix(window: Window, x: Tensor, size: Sequence[int]) -> Tensor:
    """Patches as (n, g, c/g · kernel, positions), kernel elements last; for channels-last
    tensors without groups kernel elements come first, which copies whole runs of channels."""
    view = window.patches(x, size)
    n, channels, dims = len(x), x.shape[1], len(size)
    positions, taps = prod(size), prod(window.kernel)
    if window.groups == 1 and _channels_last(x):
        order = (0, *range(2 + dims, 2 + 2 * dims), *range(2, 2 + dims), 1)
        return view.permute(order).reshape(n, 1, positions, taps * channels).mT
    return view.reshape(n, window.groups, channels // window.groups * taps, positions)


@final
@dataclass(slots=True)
class ConvUse(Use):
    """A convolution in one, two or three dimensions."""

    rule: ClassVar[str] = "conv"
    dims: ClassVar[tuple[int, ...]] = (0,)
    window: Window

    def matrix(self) -> Matrix:
        return Matrix(groups=self.window.groups)

    def terms(self, kept: Each, rows: Rows) -> Iterator[tuple[str, Term]]:
        groups = self.window.groups
        left = [_side_by_side(_grouped(d, groups), rows) for d in kept]
        if "weight" in self.names:
            patches = _patch_matrix(self.window, self.input, self.shape[2:])
            last = groups == 1 and _channels_last(self.input)
            layout = ConvLayout(self.window.kernel, groups, last)
            yield self.names["weight"], Outer(left, _side_by_side(patches, rows), layout)
        if "bias" in self.names:
            yield self.names["bias"], Explicit(torch.stack([d.sum(3).flatten(1) for d in left]))


def _grouped(x: Tensor, groups: int) -> Tensor:
    """(n, c, *space) as (n, g, c/g, positions)."""
    return torch.unflatten(x.flatten(2), 1, (groups, -1))


@final
@dataclass(slots=True)
class ConvTransposeUse(Use):
    """A transposed convolution: the patches are those of what arrives, not of the input."""

    rule: ClassVar[str] = "conv_transpose"
    dims: ClassVar[tuple[int, ...]] = (0,)
    window: Window

    def matrix(self) -> Matrix:
        return Matrix(out=1, groups=self.window.groups)

    def terms(self, kept: Each, rows: Rows) -> Iterator[tuple[str, Term]]:
        groups, size = self.window.groups, self.input.shape[2:]
        if "weight" in self.names:
            window = self.window
            left = [
                _side_by_side(window.patches(d, size).reshape(len(d), groups, -1, prod(size)), rows)
                for d in kept
            ]
            right = _side_by_side(_grouped(self.input, groups), rows)
            layout = ConvTransposeLayout(window.kernel, groups)
            yield self.names["weight"], Outer(left, right, layout)
        if "bias" in self.names:
            summed = [rows.first(d.flatten(2).sum(2)).sum(1) for d in kept]
            yield self.names["bias"], Explicit(torch.stack(summed))


@final
@dataclass(slots=True)
class EmbeddingUse(Use):
    """Rows of a table, looked up by integers."""

    rule: ClassVar[str] = "embedding"
    rows: int
    padding: int | None

    def matrix(self) -> Matrix:
        return Matrix(out=1)

    def features(self) -> None:
        return None

    @property
    def has_constants(self) -> bool:
        return self.padding is not None

    def terms(self, kept: Each, rows: Rows) -> Iterator[tuple[str, Term]]:
        index = rows.first(self.input.unsqueeze(-1)).flatten(1)
        if self.padding is not None:
            index = index.masked_fill(index == self.padding % self.rows, -1)
        flat = [rows.first(d).flatten(1, -2) for d in kept]
        yield self.names["weight"], Lookup(index, flat, self.rows)


@dataclass(slots=True)
class SpreadUse(Use, ABC):
    """z = multiplier ∘ w + b with parameters spread over the output by broadcasting.

    `align[role]` is the parameter's shape as it is broadcast against the output: as many
    dimensions as the output has, each 1 or the output's own. `shapes[role]` is its own shape.
    """

    keeps: ClassVar[bool] = False
    align: dict[str, tuple[int, ...]]
    shapes: dict[str, torch.Size]

    @abstractmethod
    def multiplier(self) -> Tensor:
        """∂z/∂w, of the output's shape."""

    def keep(self, delta: Tensor, rows: Rows) -> dict[str, Tensor]:
        """The sums themselves: far smaller than the delta."""
        one_row = rows.dim == 0 and len(delta) == rows.count
        sums = {}
        for role, shape in self.shapes.items():
            align = self.align[role]
            if align[rows.dim] != 1:
                continue  # the parameter differs between samples: not a case for this rule
            product = delta * self.multiplier() if role == "weight" else delta
            if one_row:
                spread = [d for d, size in enumerate(align) if size == 1 and d > 0]
                summed = product.sum(spread) if spread else product
            else:
                moved = [size for d, size in enumerate(align) if d != rows.dim]
                spread = [1, *(d + 2 for d, size in enumerate(moved) if size == 1)]
                summed = rows.first(product).sum(spread)
            sums[role] = summed.reshape(-1, *shape)
        return sums

    def keep_all(self, deltas: Tensor, rows: Rows) -> list[dict[str, Tensor]]:
        return [self.keep(delta, rows) for delta in deltas]

    def terms(self, kept: Sequence[dict[str, Tensor]], rows: Rows) -> Iterator[tuple[str, Term]]:
        for role in kept[0]:
            yield self.names[role], Explicit(torch.stack([sums[role] for sums in kept]))


@final
@dataclass(slots=True)
class NormUse(SpreadUse):
    """The affine part of a normalisation; `normalize` gives the normalised input."""

    rule: ClassVar[str] = "norm"
    normalize: Callable[[], Tensor]
    normalized: Tensor | None = None

    def multiplier(self) -> Tensor:
        if self.normalized is None:
            self.normalized = self.normalize()
        return self.normalized


@final
@dataclass(slots=True)
class ElementwiseUse(SpreadUse):
    """x ∘ w, x + b, or the slope of a PReLU: `input` is what multiplies the parameter."""

    rule: ClassVar[str] = "elementwise"

    def multiplier(self) -> Tensor:
        return self.input
