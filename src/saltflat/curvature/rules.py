"""The fast rules: how the gradient of a parameter follows from what one operation saw.

A `Use` is one call of an operation with a measured parameter. It keeps the operation's input and
the place of its output in the autograd graph; given what arrives there (`deltas`, one tensor a
direction), `terms` gives the per-sample gradients of the parameters, in factored form.

Every rule relies on two things that the operation cannot know: that its rows are the samples, and
that the parameter reaches the outputs through these calls alone. Both are checked at run time
against autograd (see `plan`), so a rule may be wrong about a model, but never in silence.

**Recording.** A torch function mode sees each call before it is carried out, by whatever module or
function it is made. Nothing is attached to the model, and a weight that is used functionally is
seen too. What is noted is the autograd edge of the output, taken before anything can change that
output in place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from types import FunctionType
from typing import Any, ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from saltflat.curvature import fused
from saltflat.curvature.contractions import (
    Bias,
    Deltas,
    Each,
    Explicit,
    Layout,
    Lookup,
    Outer,
    RankOne,
    Term,
)
from saltflat.geometry import Matrix, windows


@dataclass(frozen=True, slots=True)
class Rows:
    """Where the samples are: `count` of them along dimension `dim`, each maybe several rows."""

    count: int
    dim: int = 0

    def first(self, x: Tensor) -> Tensor:
        """x as (samples, rows per sample, …)."""
        return torch.unflatten(x.movedim(self.dim, 0), 0, (self.count, -1))

    def back(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        """What `first` makes of a tensor of this shape, as it was."""
        sizes = list(shape)
        moved = [sizes.pop(self.dim), *sizes]
        return x.reshape(moved).movedim(0, self.dim)

    def fits(self, shape: Sequence[int]) -> bool:
        if self.dim >= len(shape) - 1:
            return False
        size = shape[self.dim]
        return size > 0 and (size % self.count == 0 if self.dim == 0 else size == self.count)


@final
@dataclass(frozen=True, slots=True)
class Shift:
    """How a sample's own change V of a parameter moves the results of an operation, in noise.

    `of(signs)` has the covariance that the first-order effect of signs for the parameter has. Where
    the signs tell V itself, `term(signs, deltas)` is (V + G)/2 and (V − G)/2, with G the gradients
    that come of some deltas: the difference of their squares is G Vᵀ, made symmetric.
    """

    signs: torch.Size
    of: Callable[[Tensor], Tensor]
    term: Callable[[Tensor, Tensor], Term] | None


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

    @abstractmethod
    def terms(self, deltas: Any, rows: Rows) -> Iterator[tuple[str, Term]]:
        """(parameter name, its gradients) from what `keep` gave, one entry a direction."""

    def shifts(self, rows: Rows, written: bool) -> Iterator[tuple[str, Shift]]:
        """(parameter name, its shifts) for those that have some; `written`: with their terms."""
        return iter(())


def _halves(change: Tensor, gradient: Tensor) -> list[Tensor]:
    return [(change + gradient) / 2, (change - gradient) / 2]


def _matrix_shift(
    right: Tensor,
    outputs: int,
    written: bool,
    layout: Layout,
    positioned: Callable[[Tensor], Tensor],  # of deltas, as (n, g, outputs, T)
) -> Shift:
    """V x for (n, g, b, T) inputs x and signs V (n, g, outputs, b), as (n, g, outputs, T).

    At a single position V = v xᵀ/‖x‖ has the same effect with one sign an output; and where V is
    not needed, the roots of the positions' products do with as many signs as there are positions.
    """
    n, groups, inputs, positions = right.shape
    root, term = right, None
    if positions == 1:
        root = torch.linalg.vector_norm(right, dim=2, keepdim=True)
        inverse = torch.where(root > 0, 1 / root, 0.0)

        def term(v: Tensor, deltas: Tensor) -> Term:
            return Outer(_halves(v * inverse, positioned(deltas)), right, layout)

    elif written:

        def term(v: Tensor, deltas: Tensor) -> Term:
            both = _halves(v, positioned(deltas) @ right.mT)
            return Explicit(layout.assemble(torch.stack(both)))

    elif 2 * positions <= inputs:
        root = _gram_root(right)
    return Shift(torch.Size((n, groups, outputs, root.shape[2])), lambda v: v @ root, term)


def _gram_root(right: Tensor) -> Tensor:
    """A root R of the Gram matrix of positions, Rᵀ R = xᵀ x; x itself if rounding hides it."""
    wide = right.double()
    gram = wide.mT @ wide
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    diagonal += 1e-13 * diagonal.amax(-1, keepdim=True)  # positions may repeat each other
    lower, failed = torch.linalg.cholesky_ex(gram)
    return right if bool(failed.any()) else lower.mT.to(right.dtype)


def _placed(shift: Shift, place: Callable[[Tensor], Tensor]) -> Shift:
    return Shift(shift.signs, lambda v: place(shift.of(v)), shift.term)


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
        return Matrix(out=int(self.transposed))

    def features(self) -> Tensor:
        return self.input.flatten(0, -2)

    def terms(self, deltas: Each, rows: Rows) -> Iterator[tuple[str, Term]]:
        layout = Layout(transposed=self.transposed)
        if len(self.shape) == 2 and self.shape[0] == rows.count:
            arrived = Deltas(deltas if isinstance(deltas, Tensor) else torch.stack(list(deltas)))
            if "weight" in self.names:
                yield self.names["weight"], RankOne(arrived, self.input, layout)
            if "bias" in self.names:
                yield self.names["bias"], Bias(arrived)
            return
        left = [_positions(d, rows) for d in deltas]
        if "weight" in self.names:
            yield self.names["weight"], Outer(left, _positions(self.input, rows), layout)
        if "bias" in self.names:
            yield self.names["bias"], Explicit(torch.stack([d.sum((1, 3)) for d in left]))

    def shifts(self, rows: Rows, written: bool) -> Iterator[tuple[str, Shift]]:
        outputs = self.shape[-1]
        if "weight" in self.names:
            right, layout = _positions(self.input, rows), Layout(transposed=self.transposed)
            parts = outputs, written, layout, lambda d: _positions(d, rows)
            yield (
                self.names["weight"],
                _placed(
                    _matrix_shift(right, *parts),
                    lambda t: rows.back(t.squeeze(1).mT, self.shape),
                ),
            )
        if "bias" in self.names:
            positions = self.shape.numel() // (rows.count * outputs)

            def term(v: Tensor, deltas: Tensor) -> Term:
                summed = rows.first(deltas).flatten(1, -2).sum(1)
                return Explicit(torch.stack(_halves(v.squeeze(1), summed)))

            shift = Shift(
                torch.Size((rows.count, 1, outputs)), lambda v: v.expand(-1, positions, -1), term
            )
            yield self.names["bias"], _placed(shift, lambda t: rows.back(t, self.shape))


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
        """What each kernel element saw at each of `size` positions, a view (n, c, *size, *kernel).

        Only the copy that padding needs is made.
        """
        if any(self.before) or any(self.after):
            sides = zip(reversed(self.before), reversed(self.after), strict=True)
            x = F.pad(x, [p for side in sides for p in side])
        view = windows(x, self.kernel, self.stride, self.dilation)
        for dim, count in enumerate(size, 2):
            view = view.narrow(dim, 0, count)
        return view


_RUN = 8  # channels that are worth to be laid side by side


def _channels_last(x: Tensor) -> bool:
    return x.shape[1] > 1 and x.stride(1) == 1


def _run_of_channels(x: Tensor) -> bool:
    """Whether patches are had sooner with the channels of a position side by side: where they are,
    and on a CPU also where they have to be put there, unless they are few."""
    return _channels_last(x) or (x.is_cpu and x.shape[1] >= _RUN)


def _laid_last(x: Tensor) -> Tensor:
    """The same with channels last."""
    return x if _channels_last(x) else x.movedim(1, -1).contiguous().movedim(-1, 1)


def _side_by_side(x: Tensor, rows: Rows) -> Tensor:
    """(samples·q, g, a, T) as (samples, g, a, q·T)."""
    split = rows.first(x)
    return split[:, 0] if split.shape[1] == 1 else split.movedim(1, 3).flatten(3)


def _patch_matrix(window: Window, x: Tensor, size: Sequence[int]) -> Tensor:
    """Patches as (n, g, c/g · kernel, positions), kernel elements last."""
    if len(size) == 2 and prod(window.kernel) > 1:
        geometry = window.kernel, window.stride, window.before, window.dilation, size
        if (seen := fused.patches(x, *geometry)) is not None:
            return seen.reshape(len(x), window.groups, -1, prod(size))
    view, dims = window.patches(x, size), len(size)
    places = range(2, 2 + dims), range(2 + dims, 2 + 2 * dims)
    return view.permute(0, 1, *places[1], *places[0]).reshape(len(x), window.groups, -1, prod(size))


@final
@dataclass(slots=True)
class ConvUse(Use):
    """A convolution in one, two or three dimensions."""

    rule: ClassVar[str] = "conv"
    dims: ClassVar[tuple[int, ...]] = (0,)
    window: Window

    def matrix(self) -> Matrix:
        return Matrix(groups=self.window.groups)

    def terms(self, deltas: Each, rows: Rows) -> Iterator[tuple[str, Term]]:
        groups = self.window.groups
        left = [_side_by_side(_grouped(d, groups), rows) for d in deltas]
        if "weight" in self.names:
            last, size = groups == 1 and _run_of_channels(self.input), self.shape[2:]
            if last:  # kernel elements first, which copies whole runs of channels
                view = self.window.patches(_laid_last(self.input), size).movedim(1, -1)
                patches = view.reshape(len(view), 1, prod(size), -1).mT
            else:
                patches = _patch_matrix(self.window, self.input, size)
            layout = Layout(self.window.kernel, groups, last=last)
            yield self.names["weight"], Outer(left, _side_by_side(patches, rows), layout)
        if "bias" in self.names:
            yield self.names["bias"], Explicit(torch.stack([d.sum(3).flatten(1) for d in left]))

    def shifts(self, rows: Rows, written: bool) -> Iterator[tuple[str, Shift]]:
        if len(self.input) != rows.count:  # several images a sample
            return
        channels, groups = self.shape[1], self.window.groups
        if "weight" in self.names:
            patches = _patch_matrix(self.window, self.input, self.shape[2:])
            layout = Layout(self.window.kernel, groups)
            parts = channels // groups, written, layout, lambda d: _grouped(d, groups)
            shift = _matrix_shift(patches, *parts)
            yield self.names["weight"], _placed(shift, lambda t: t.reshape(self.shape))
        if "bias" in self.names:

            def term(v: Tensor, deltas: Tensor) -> Term:
                both = _halves(v.flatten(1), deltas.flatten(2).sum(2))
                return Explicit(torch.stack(both))

            signs = torch.Size((rows.count, channels, *[1] * (len(self.shape) - 2)))
            yield self.names["bias"], Shift(signs, lambda v: v.expand(self.shape), term)


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

    def terms(self, deltas: Each, rows: Rows) -> Iterator[tuple[str, Term]]:
        groups, size = self.window.groups, self.input.shape[2:]
        if "weight" in self.names:
            left = [_side_by_side(_patch_matrix(self.window, d, size), rows) for d in deltas]
            right = _side_by_side(_grouped(self.input, groups), rows)
            layout = Layout(self.window.kernel, groups, transposed=True)
            yield self.names["weight"], Outer(left, right, layout)
        if "bias" in self.names:
            summed = [rows.first(d.flatten(2).sum(2)).sum(1) for d in deltas]
            yield self.names["bias"], Explicit(torch.stack(summed))


@final
@dataclass(slots=True)
class EmbeddingUse(Use):
    """Rows of a table, looked up by integers."""

    rule: ClassVar[str] = "embedding"
    rows: int
    padding: int | None
    lookup: Any = None  # done once for all samples, in this node; `edge` is a sum with their rows

    def matrix(self) -> Matrix:
        return Matrix(out=1)

    def features(self) -> None:
        return None

    def terms(self, deltas: Each, rows: Rows) -> Iterator[tuple[str, Term]]:
        index = rows.first(self.input.unsqueeze(-1)).flatten(1)
        if self.padding is not None:
            index = index.masked_fill(index == self.padding % self.rows, -1)
        flat = [rows.first(d).flatten(1, -2) for d in deltas]
        yield self.names["weight"], Lookup(index, flat, self.rows)

    def shifts(self, rows: Rows, written: bool) -> Iterator[tuple[str, Shift]]:
        index = rows.first(self.input.unsqueeze(-1)).flatten(1)
        # Every token of a sample takes the noise of the first that is its like.
        same = index[:, :, None] == index[:, None]
        first = same.to(torch.uint8).argmax(2).unsqueeze(-1)
        live = torch.ones_like(first)
        if self.padding is not None:
            live = (index != self.padding % self.rows).unsqueeze(-1)
        alone = first == torch.arange(index.shape[1], device=index.device).unsqueeze(-1)
        table = index.masked_fill(~live.bool().squeeze(-1), -1)

        def of(v: Tensor) -> Tensor:
            return rows.back(v.gather(1, first.expand_as(v)) * live, self.shape)

        def term(v: Tensor, deltas: Tensor) -> Term:
            flat = rows.first(deltas).flatten(1, -2)
            return Lookup(table, _halves(v * alone, flat), self.rows)

        signs = torch.Size((*index.shape, self.shape[-1]))
        yield self.names["weight"], Shift(signs, of, term)


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
        if one_row and (both := self._by_kernel(delta)) is not None:
            return {role: both[role].reshape(-1, *shape) for role, shape in self.shapes.items()}
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

    def _by_kernel(self, delta: Tensor) -> dict[str, Tensor] | None:
        """Both sums in one go, where the parameters belong to channels and there is a kernel."""
        if not delta.is_cuda or "weight" not in self.align:
            return None
        channels = (1, delta.shape[1], *[1] * (delta.ndim - 2))
        if any(align != channels for align in self.align.values()):
            return None
        both = fused.sums_over_positions(delta, self.multiplier())
        return None if both is None else {"weight": both[0], "bias": both[1]}

    def keep_all(self, deltas: Tensor, rows: Rows) -> list[dict[str, Tensor]]:
        return [self.keep(delta, rows) for delta in deltas]

    def terms(self, sums: Sequence[dict[str, Tensor]], rows: Rows) -> Iterator[tuple[str, Term]]:
        for role in sums[0]:
            yield self.names[role], Explicit(torch.stack([each[role] for each in sums]))

    def shifts(self, rows: Rows, written: bool) -> Iterator[tuple[str, Shift]]:
        if self.shape[rows.dim] != rows.count:
            return
        for role, align in self.align.items():
            if align[rows.dim] == 1:
                sizes = list(align)
                sizes[rows.dim] = rows.count
                yield self.names[role], self._shift(role, torch.Size(sizes), rows)

    def _shift(self, role: str, signs: torch.Size, rows: Rows) -> Shift:
        by = self.multiplier() if role == "weight" else 1.0

        def term(v: Tensor, deltas: Tensor) -> Term:
            gradient = self.keep(deltas, rows)[role]
            change = v.movedim(rows.dim, 0).reshape(gradient.shape)
            return Explicit(torch.stack(_halves(change, gradient)))

        return Shift(signs, lambda v: (v * by).expand(self.shape), term)


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


Arguments = dict[str, Any]
Names = Mapping[int, str]  # id of a parameter -> its name
Builder = Callable[[Names, Arguments, Tensor], Use | None]


class Safe(TorchFunctionMode):
    """Carries out a forward pass in a form that can be differentiated rightly and twice."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _ALTERED:
            return func(*args, **kwargs)
        if func in _OPENED:
            with self:
                return _OPENED[func](*args, **kwargs)
        if func in _REPLACED:
            return _REPLACED[func](*args, **kwargs)
        bound = dict(zip(_OPERATIONS[func][0], args, strict=False)) | kwargs
        return func(**bound | _ADJUSTED[func](bound))


@final
class Recorder(Safe):
    """Context manager around a forward pass; afterwards `uses` holds what was seen, in order."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.names = {id(p): name for name, p in parameters.items()}
        self.uses: list[Use] = []
        self.cuts = False  # whether something was hidden from autograd
        self._looked_up: dict[int, tuple[Tensor, EmbeddingUse]] = {}  # once for all samples

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        output = super().__torch_function__(func, types, args, kwargs)
        self.cuts = self.cuts or func in _CUTS or not torch.is_grad_enabled()
        known = _OPERATIONS.get(func)
        if known and isinstance(output, Tensor) and output.requires_grad and output.ndim > 1:
            signature, build = known
            bound = dict(zip(signature, args, strict=False)) | (kwargs or {})
            use = build(self.names, bound, output)
            if use is not None:
                self.uses.append(use)
            if isinstance(use, EmbeddingUse) and len(output) == 1:
                self._looked_up[id(output)] = output, use
            elif build is _PLUS and use is None:
                self._spread_rows(bound, output)
        return output

    def _spread_rows(self, bound: Arguments, output: Tensor) -> None:
        """Rows that were looked up once are added to those of all samples: as if for each of them.

        So models do with places. Of a single sample they are its own.
        """
        if len(output) == 1:
            return
        for one, other in (("input", "other"), ("other", "input")):
            _, use = self._looked_up.get(id(bound[one]), (None, None))
            if use is None or bound[one].grad_fn is not use.edge.node:
                continue  # of another origin, or changed in place
            shape = getattr(bound[other], "shape", ())
            each = output.shape == shape and use.shape[1:] == shape[1:]
            if each and bound.get("alpha", 1) == 1:
                del self._looked_up[id(bound[one])]
                use.lookup, use.edge = use.edge.node, get_gradient_edge(output)
                use.shape = output.shape
                use.input = use.input.expand(len(output), *use.input.shape[1:])


_CUTS = {Tensor.detach, Tensor.detach_, Tensor.data.__get__}  # type: ignore[attr-defined]


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """v g / ‖v‖ with the norm over all dimensions but `dim`; over all of them for dim = −1."""
    others = [d for d in range(v.ndim) if d != dim]
    norm: Tensor = torch.linalg.vector_norm(v, dim=others, keepdim=True)
    return v * (g / norm)


def _hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    """min(max(x + 3, 0), 6) / 6."""
    if inplace:
        return input.add_(3).clamp_(0, 6).div_(6)
    return (input + 3).clamp(0, 6) / 6


_REPLACED: dict[Any, Callable[..., Any]] = {
    # Its second derivative is wrong in torch (2.13): not even symmetric.
    torch._weight_norm: _weight_norm,
    # Torch has no second derivative of it.
    F.hardsigmoid: _hardsigmoid,
    torch._C._nn.hardsigmoid: _hardsigmoid,
    torch._C._nn.hardsigmoid_: lambda input: _hardsigmoid(input, inplace=True),
}


def _attention(query: Tensor, *args: Any, **kwargs: Any) -> Any:
    """`F.multi_head_attention_forward`, its calls seen one by one and not as one.

    The rows of its last one are those of all samples for every place in turn: it gets them apart.
    """

    def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if query.ndim != 3 or input.ndim != 2:
            return F.linear(input, weight, bias)
        return F.linear(input.unflatten(0, (-1, query.shape[1])), weight, bias).flatten(0, 1)

    whole = F.multi_head_attention_forward
    names = {**whole.__globals__, "has_torch_function": lambda _: False, "linear": linear}
    opened = FunctionType(whole.__code__, names, whole.__name__, whole.__defaults__)
    return opened(query, *args, **kwargs)


# Functions whose own calls are to be seen.
_OPENED: dict[Any, Callable[..., Any]] = {F.multi_head_attention_forward: _attention}

# The same functions with other arguments.
_ADJUSTED: dict[Any, Callable[[Arguments], Arguments]] = {
    # Both options change what autograd calls the gradient, not the function.
    F.embedding: lambda bound: {"sparse": False, "scale_grad_by_freq": False},
    # Its second derivative crashes torch (2.13) on channels-last inputs.
    F.group_norm: lambda bound: {"input": bound["input"].contiguous()},
}


_ALTERED = frozenset({*_REPLACED, *_OPENED, *_ADJUSTED})


def _roles(names: Names, arguments: Arguments, **roles: str) -> dict[str, str]:
    """role -> parameter name, for the arguments that are measured parameters."""
    known = {role: names.get(id(arguments.get(key))) for role, key in roles.items()}
    return {role: name for role, name in known.items() if name is not None}


def _linear(
    keys: tuple[str, str, str], transposed: bool, names: Names, a: Arguments, z: Tensor
) -> Use | None:
    """`keys` are the arguments for the input, the weight and the bias."""
    x, weight, bias = keys
    roles = _roles(names, a, weight=weight, bias=bias)
    plain = a.get("beta", 1) == 1 and a.get("alpha", 1) == 1
    rows = bias not in a or a[bias] is None or a[bias].ndim == 1  # the same bias for every row
    if not (roles and plain and rows) or a[weight].ndim != 2 or (transposed and a[x].ndim < 2):
        return None
    return LinearUse(roles, a[x].detach(), get_gradient_edge(z), z.shape, transposed=transposed)


def _tuple(value: Any, dims: int) -> tuple[int, ...]:
    values = tuple(value) if isinstance(value, tuple | list) else (value,)
    return values * dims if len(values) == 1 else values


def _window(a: Arguments, dims: int) -> Window:
    kernel = tuple(a["weight"].shape[2:])
    dilation = _tuple(a.get("dilation", 1), dims)
    padding = a.get("padding", 0)
    if padding == "same":
        whole = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        before = tuple(w // 2 for w in whole)
        after = tuple(w - w // 2 for w in whole)
    else:
        before = after = _tuple(0 if padding == "valid" else padding, dims)
    stride = _tuple(a.get("stride", 1), dims)
    return Window(kernel, stride, before, after, dilation, a.get("groups", 1))


def _conv(
    use: type[ConvUse | ConvTransposeUse], names: Names, a: Arguments, z: Tensor
) -> Use | None:
    dims = a["weight"].ndim - 2
    roles = _roles(names, a, weight="weight", bias="bias")
    if not roles or a["input"].ndim != dims + 2:
        return None
    return use(roles, a["input"].detach(), get_gradient_edge(z), z.shape, _window(a, dims))


def _embedding(names: Names, a: Arguments, z: Tensor) -> Use | None:
    roles = _roles(names, a, weight="weight")
    if not roles:
        return None
    rows = len(a["weight"])
    padding = a.get("padding_idx")
    return EmbeddingUse(roles, a["input"], get_gradient_edge(z), z.shape, rows, padding)


def _norm(
    call: Callable[..., Tensor], trailing: bool, names: Names, a: Arguments, z: Tensor
) -> Use | None:
    """Channels are the trailing dimensions (layer norm) or dimension 1 (all others)."""
    roles = _roles(names, a, weight="weight", bias="bias")
    if not roles or a.get("training"):
        return None
    shapes = {role: a[role].shape for role in roles}
    align = {
        role: _aligned(shape, z) if trailing else _by_channel(shape, z)
        for role, shape in shapes.items()
    }
    x = a["input"].detach()
    bare = {key: value for key, value in a.items() if key not in ("weight", "bias")}
    normalize = partial(call, **bare | {"input": x})
    return NormUse(roles, x, get_gradient_edge(z), z.shape, align, shapes, normalize)


def _aligned(shape: torch.Size, z: Tensor) -> tuple[int, ...]:
    return (1,) * (z.ndim - len(shape)) + tuple(shape)


def _by_channel(shape: torch.Size, z: Tensor) -> tuple[int, ...]:
    return 1, *shape, *(1,) * (z.ndim - 2)


def _spread(role: str, names: Names, a: Arguments, z: Tensor) -> Use | None:
    """x ∘ w or x + b, whichever operand is the parameter."""
    one, other = a["input"], a["other"]
    if id(one) in names and id(other) not in names:
        one, other = other, one
    name = names.get(id(other))
    if a.get("alpha", 1) != 1 or name is None or id(one) in names or other.ndim > z.ndim:
        return None
    x = one.detach() if isinstance(one, Tensor) else torch.as_tensor(one, device=z.device)
    align, shapes = {role: _aligned(other.shape, z)}, {role: other.shape}
    return ElementwiseUse({role: name}, x, get_gradient_edge(z), z.shape, align, shapes)


def _prelu(names: Names, a: Arguments, z: Tensor) -> Use | None:
    roles = _roles(names, a, weight="weight")
    if not roles:
        return None
    shape = a["weight"].shape
    align = {"weight": _by_channel(shape, z)}
    below = a["input"].detach().clamp(max=0)
    return ElementwiseUse(roles, below, get_gradient_edge(z), z.shape, align, {"weight": shape})


_CONV = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSE = (*_CONV[:5], "output_padding", "groups", "dilation")
_LOOKUP = (
    "input",
    "weight",
    "padding_idx",
    "max_norm",
    "norm_type",
    "scale_grad_by_freq",
    "sparse",
)
_STATISTICS = ("input", "running_mean", "running_var", "weight", "bias")
_PAIR = ("input", "other")
_PLUS = partial(_spread, "bias")

# What a call is known by -> (names of its positional arguments, what notes it).
_RULES: list[tuple[tuple[Any, ...], tuple[str, ...], Builder]] = [
    (
        (F.linear,),
        ("input", "weight", "bias"),
        partial(_linear, ("input", "weight", "bias"), False),
    ),
    ((torch.addmm,), ("input", "mat1", "mat2"), partial(_linear, ("mat1", "mat2", "input"), True)),
    (
        (torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__),
        _PAIR,
        partial(_linear, ("input", "other", ""), True),
    ),
    ((torch.conv1d, torch.conv2d, torch.conv3d), _CONV, partial(_conv, ConvUse)),
    (
        (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d),
        _TRANSPOSE,
        partial(_conv, ConvTransposeUse),
    ),
    ((F.embedding,), _LOOKUP, _embedding),
    (
        (F.batch_norm,),
        (*_STATISTICS, "training", "momentum", "eps"),
        partial(_norm, F.batch_norm, False),
    ),
    (
        (F.instance_norm,),
        (*_STATISTICS, "use_input_stats", "momentum", "eps"),
        partial(_norm, F.instance_norm, False),
    ),
    (
        (F.layer_norm,),
        ("input", "normalized_shape", "weight", "bias", "eps"),
        partial(_norm, F.layer_norm, True),
    ),
    (
        (F.rms_norm,),
        ("input", "normalized_shape", "weight", "eps"),
        partial(_norm, F.rms_norm, True),
    ),
    (
        (F.group_norm,),
        ("input", "num_groups", "weight", "bias", "eps"),
        partial(_norm, F.group_norm, False),
    ),
    ((F.prelu,), ("input", "weight"), _prelu),
    ((torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__), _PAIR, partial(_spread, "weight")),
    ((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__), _PAIR, _PLUS),
]
_OPERATIONS: dict[Any, tuple[tuple[str, ...], Builder]] = {
    function: (signature, build) for functions, signature, build in _RULES for function in functions
}
