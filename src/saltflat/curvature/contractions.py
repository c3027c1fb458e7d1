"""Contractions of per-sample gradients that are sums of outer products over positions.

For one direction d and one sample, the gradient of a weight is G_d = Σ_t l_{d,t} r_tᵀ, summed over
the T positions at which the weight is used (pixels, tokens, calls). Wanted are, over directions
and samples with signs s = ±1,

    trace      Σ s ‖G_d‖²          diagonal      Σ s G_d²   (entry by entry).

Writing the gradients out is one way; the others expand the squares,

    ‖G‖² = Σ_{t,t'} (l_t·l_t') (r_t·r_t'),      G[o,i]² = Σ_{t,t'} (l_t l_t')[o] (r_t r_t')[i],

and are cheaper where T is small. The cheapest way is taken, and checked: where the positions'
gradients l_t r_tᵀ nearly cancel each other (inputs with a large common offset, deltas that add up
to 0), the expansion adds large terms of both signs. Let S be its terms with t = t'. All its terms
together are at most T S in size (Cauchy–Schwarz); their rounding leaves an error of the order of
ε S in ‖G‖², that of G itself one of 2 ε sqrt(S) ‖G‖. So where S exceeds 8 ‖G‖² the expansion is
given up, for single samples of a trace and for single rows and columns of a diagonal: scaling a
unit scales both sides alike.

Shapes: `left[d]` is (n, g, a, T), `right` is (n, g, b, T) with g groups; `sign` is (D, n) or None.

**Terms** hold a parameter's per-sample gradients at one use in the form that is cheap to square:
of D directions and n samples, shape (D, n, *parameter.shape). `gradient()` writes them out; `trace`
and `diagonal` avoid that where they can.

**Layouts.** In factored form a weight is (g, a, b): g groups of matrices whose rows meet what
arrives at the layer's output (`left`) and whose columns meet the layer's input (`right`). A layout
turns (…, g, a, b) into the parameter's own shape and back, and sums over kernel positions.

**Forms.** Quadratic forms of a layer's curvature that need its weight W beside its gradients G_d.

    columns    ρ(j) = Σ s (Σ_{o,k} G_d[o,j,k] W[o,j,k])²     one an input unit j
    rows              Σ s (Σ_{j,k} G_d[o,j,k] W[o,j,k])²     one an output unit o
    flatness          Σ s ‖Wᵀ G_d‖²_F                        one number

summed over directions d and samples, with signs s = ±1 (Petzka et al. 2019 and 2021). With
G_d = Σ_t l_{d,t} r_tᵀ none of them needs G itself: all that is needed are Wᵀ l_{d,t} and W r_t.
Here `weight` is (g, a, b).

**Rank one.** For a Linear with one row a sample every gradient is G_d = δ_d xᵀ, and nothing needs
it written out:

    trace      Σ s ‖G_d‖²      = Σ_n ‖x‖² Σ_d s ‖δ_d‖²
    diagonal   Σ s G_d²        = Σ_n (Σ_d s δ_d²) (x²)ᵀ
    columns    Σ s (Wᵀδ_d ∘ x)² = Σ_n x² ∘ Σ_d s (Wᵀδ_d)²
    rows       Σ s (δ_d ∘ Wx)²  = Σ_n (Wx)² ∘ Σ_d s δ_d²
    flatness   Σ s ‖WᵀG_d‖²    = Σ_n ‖x‖² Σ_d s ‖Wᵀδ_d‖²
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, final

import torch
from torch import Tensor

from saltflat.geometry import Matrix


@final
@dataclass(frozen=True, slots=True)
class Layout:
    """A weight (out, in/g, *kernel) as (g, out/g, in/g · kernel), with channels `last` as
    (1, out, kernel · in); or, `transposed`, (in, out/g, *kernel) as (g, out/g · kernel, in/g).

    Equal layouts compare equal: their positions can be put side by side.
    """

    kernel: tuple[int, ...] = ()
    groups: int = 1
    transposed: bool = False
    last: bool = False

    @property
    def rows_are_units(self) -> bool:
        """Whether each of the a rows is one output unit."""
        return not (self.transposed and self.kernel)

    def assemble(self, factored: Tensor) -> Tensor:
        """(…, g, a, b) as (…, *shape of the parameter)."""
        if self.last:
            split = torch.unflatten(factored.squeeze(-3), -1, (*self.kernel, -1))
            return split.movedim(-1, -1 - len(self.kernel))
        lines = factored.mT if self.transposed else factored
        return torch.unflatten(lines.flatten(-3, -2), -1, (-1, *self.kernel))

    def factored(self, weight: Tensor) -> Tensor:
        """The parameter's shape as (g, a, b)."""
        if self.last:
            return weight.movedim(1, -1).reshape(1, len(weight), -1)
        lines = weight.reshape(self.groups, len(weight) // self.groups, -1)
        return lines.mT if self.transposed else lines

    def inputs(self, values: Tensor) -> Tensor:
        """(…, g, b), summed over kernel positions: (…, input units)."""
        if self.last:
            return torch.unflatten(values.squeeze(-2), -1, (prod(self.kernel), -1)).sum(-2)
        return values.flatten(-2) if self.transposed else self._over_kernel(values)

    def outputs(self, values: Tensor) -> Tensor:
        """(…, g, a), summed over kernel positions: (…, output units)."""
        return self._over_kernel(values) if self.transposed else values.flatten(-2)

    def _over_kernel(self, values: Tensor) -> Tensor:
        if not self.kernel:
            return values.flatten(-2)
        return torch.unflatten(values, -1, (-1, prod(self.kernel))).sum(-1).flatten(-2)

    def spread(self, units: Tensor) -> Tensor:
        """One value an input unit as (g, b), repeated over kernel positions."""
        if self.last:
            return units.repeat(prod(self.kernel)).unsqueeze(0)
        taps = 1 if self.transposed else prod(self.kernel)
        return units.repeat_interleave(taps).reshape(self.groups, -1)


# One tensor a direction, or all of them stacked.
Each = Sequence[Tensor] | Tensor

# Entries of the temporaries: small enough for a CPU's cache, large enough to feed a GPU.
_CPU_BLOCK = 1 << 20
_GPU_BLOCK = 1 << 28
# Entries that the pairs of positions of one sample may have.
_PAIRS = 1 << 24

# How much larger than the sum of an expanded square its terms with t = t' may be.
CANCELLATION = 8.0


def squares_by_gram(
    parts: Sequence[Tensor],
    inner: Tensor,
    cancellation: float = CANCELLATION,
    gram: Tensor | None = None,
) -> Tensor:
    """Σ_d ‖G_d‖² of m matrices by `gram_squares`, once more where too many digits cancel: in
    float64, or from the gradients if it was that already."""
    gram = inner.mT @ inner if gram is None else gram
    squares, lost = gram_squares(parts, inner, gram, cancellation)
    if bool(lost.any()):
        squares[lost] = _once_more(parts, inner, lost, cancellation).to(squares)
    return squares


def _once_more(
    parts: Sequence[Tensor], inner: Tensor, lost: Tensor, cancellation: float = CANCELLATION
) -> Tensor:
    """Σ_d ‖G_d‖² of those of the matrices that are lost."""
    parts, inner = [part[lost] for part in parts], inner[lost]
    if inner.dtype != torch.float64:
        room = wide_cancellation(inner.dtype, cancellation)
        return squares_by_gram([part.double() for part in parts], inner.double(), room)
    gradients = (part @ inner.mT for part in parts)
    norms = [torch.linalg.vector_norm(each, dim=(1, 2)) for each in gradients]
    return torch.stack(norms).square().sum(0)


def gram_squares(
    parts: Sequence[Tensor], inner: Tensor, gram: Tensor, cancellation: float = CANCELLATION
) -> tuple[Tensor, Tensor]:
    """Σ_d ‖G_d‖² = Σ_{t,t'} (Σ_d l_t·l_t') (r_t·r_t') of m matrices, and where it is lost.

    `parts[d]` is (m, a, T), `inner` (m, b, T) and `gram` its r_t·r_t'.
    """
    terms = torch.zeros_like(gram)
    for part in parts:
        terms.baddbmm_(part.mT, part)
    terms.mul_(gram)
    squares = terms.sum((1, 2))
    alone = squares if inner.shape[2] == 1 else terms.diagonal(dim1=1, dim2=2).sum(1)
    return squares, ~(alone <= cancellation * squares)  # also where large terms make it NaN


def wide_cancellation(dtype: torch.dtype, cancellation: float = CANCELLATION) -> float:
    """How much may cancel in float64 before fewer digits are left than `dtype` holds."""
    return cancellation * torch.finfo(dtype).eps / torch.finfo(torch.float64).eps


@final
@dataclass(frozen=True, slots=True)
class _Doubt:
    """Squares of some samples by a Gram matrix, of which some may be lost."""

    rows: slice
    parts: Sequence[Tensor]
    inner: Tensor
    squares: Tensor
    lost: Tensor


@final
@dataclass(frozen=True, slots=True)
class Begun:
    """Totals of samples that a GPU is at work on.

    `settled` computes those once more in which too many digits cancel. To ask for them waits for
    the GPU, which should have other work by then.
    """

    totals: Tensor
    doubts: Sequence[_Doubt] = ()

    def settled(self) -> Tensor:
        for doubt in self.doubts:
            if bool(doubt.lost.any()):
                again = _once_more(doubt.parts, doubt.inner, doubt.lost)
                doubt.squares[doubt.lost] = again.to(doubt.squares)
                self.totals[doubt.rows] = _over_groups(doubt.squares, self.totals[doubt.rows])
        return self.totals


def _trace_gram(left: Each, right: Tensor) -> Begun:
    n, _, _, positions = right.shape
    totals, doubts = torch.zeros(n, dtype=torch.float64, device=right.device), []
    for rows in row_blocks(right, positions * positions):
        parts, inner = [flat(delta[rows]) for delta in left], flat(right[rows])
        squares, lost = gram_squares(parts, inner, inner.mT @ inner)
        doubts.append(_Doubt(rows, parts, inner, squares, lost))
        totals[rows] = _over_groups(squares, totals[rows])
    return Begun(totals, doubts)


def _settled_gram(left: Each, right: Tensor) -> Tensor:
    return _trace_gram(left, right).settled()


def _over_groups(squares: Tensor, totals: Tensor) -> Tensor:
    """The squares of every sample's groups, added up to what becomes its total."""
    return squares.reshape(len(totals), -1).sum(1, dtype=totals.dtype)


def _squares_gram(left: Each, right: Tensor) -> Tensor:
    """‖G_d‖² of every direction: the positions' products of the inputs serve all of them."""
    n, groups, _, positions = right.shape
    totals = torch.zeros(len(left), n, dtype=torch.float64, device=right.device)
    for rows in row_blocks(right, positions * positions):
        inner = flat(right[rows])
        gram = inner.mT @ inner
        for d, delta in enumerate(left):
            squares = squares_by_gram([flat(delta[rows])], inner, gram=gram)
            totals[d, rows] = squares.reshape(-1, groups).sum(1, dtype=torch.float64)
    return totals


def _trace_gradient(left: Each, right: Tensor, sign: Tensor | None) -> Tensor:
    n, groups = right.shape[:2]
    totals = torch.zeros(n, dtype=torch.float64, device=right.device)
    for some, rows, gradients in _gradients(left, right):
        squares = torch.linalg.vector_norm(gradients, dim=(2, 3)).square()
        each = torch.unflatten(squares, 0, (-1, groups)).sum(1, dtype=torch.float64)
        totals[rows] += (each if sign is None else each * sign[some, rows].mT).sum(1)
    return totals


def _diagonal_pairs(left: Each, right: Tensor) -> Tensor:
    """Σ_{t,t'} (Σ_d l_t l_t') (r_t r_t'): a Gram matrix over directions for every row, then one
    product."""
    groups, b, positions = right.shape[1:]
    a = left[0].shape[2]
    result = right.new_zeros(groups, a, b)
    for rows in row_blocks(right, positions * (positions * (a + b) + a * len(left))):
        deltas, inputs = torch.stack([d[rows] for d in left], -2), right[rows].unsqueeze(-1)
        outer, inner = deltas.mT @ deltas, inputs * inputs.mT
        result.baddbmm_(_side_by_side(outer.flatten(-2)), _side_by_side(inner.flatten(-2)).mT)
    if positions > 1:
        lost = _lost_lines(result, left, right)
        _write_again(result.clamp_(min=0), *lost, left, right)
    return result


def _side_by_side(x: Tensor) -> Tensor:
    """(n, g, a, p) as (g, a, n·p)."""
    return x.permute(1, 2, 0, 3).flatten(2)


def _lost_lines(result: Tensor, left: Each, right: Tensor) -> tuple[Tensor, Tensor]:
    """The rows (a) and columns (b) of a diagonal by pairs in which too many digits cancel."""
    outer = left[0].square()
    for delta in left[1:]:
        outer.addcmul_(delta, delta)
    inner = right.square()
    rows = torch.einsum("ngat,ngt->ga", outer, inner.sum(2))
    columns = torch.einsum("ngt,ngbt->gb", outer.sum(2), inner)
    sound = rows <= CANCELLATION * result.sum(2), columns <= CANCELLATION * result.sum(1)
    return ~sound[0].all(0), ~sound[1].all(0)


def _write_again(
    result: Tensor, lost_rows: Tensor, lost_columns: Tensor, left: Each, right: Tensor
) -> None:
    """Some rows (a) and columns (b) of a diagonal once more, from the gradients."""
    rows, columns = lost_rows.nonzero()[:, 0], lost_columns.nonzero()[:, 0]
    if len(columns):
        result[:, :, columns] = _diagonal_gradient(left, right.index_select(2, columns), None)
    if len(rows) and len(columns) < len(lost_columns):
        some = [delta.index_select(2, rows) for delta in left]
        result[:, rows] = _diagonal_gradient(some, right, None)


def _diagonal_gradient(
    left: Each, right: Tensor, sign: Tensor | None, traces: Tensor | None = None
) -> Tensor:
    """Σ s G², and its sum for every sample into `traces`, if these are wanted."""
    _, groups, b, _ = right.shape
    a = left[0].shape[2]
    result = right.new_zeros(groups, a, b)
    for some, rows, gradients in _gradients(left, right):
        each = torch.unflatten(gradients, 0, (-1, groups))  # (n, g, D, a, b)
        if sign is None and _on_gpu(right):
            if traces is not None:
                norms = torch.linalg.vector_norm(each, dim=(3, 4), dtype=torch.float64)
                traces[rows] += norms.square_().sum((1, 2))
            result += torch.linalg.vector_norm(each, dim=(0, 2)).square_()  # reads them once
            continue
        each.square_()
        if sign is not None:
            each = each * sign[some, rows].mT[:, None, :, None, None]
        result += each.sum((0, 2))
        if traces is not None:
            traces[rows] += each.sum((1, 2, 3, 4), dtype=torch.float64)
    return result


def _on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def _gradients(left: Each, right: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
    """Per-sample gradients (rows·g, D, a, b), of some directions and a block of samples at a time.

    On a GPU directions go together, by which the inputs are read once for all of them; on a CPU one
    by one, so that their gradients stay in its cache.
    """
    entries, count = left[0].shape[2] * right.shape[2], len(left) if _on_gpu(right) else 1
    for rows in row_blocks(right, entries * count):
        inner = flat(right[rows]).mT
        for d in range(0, len(left), count):
            some = [flat(delta[rows]) for delta in left[d : d + count]]
            stacked = some[0] if len(some) == 1 else torch.cat(some, 1)
            gradients = torch.unflatten(torch.bmm(stacked, inner), 1, (len(some), -1))
            yield slice(d, d + count), rows, gradients


def _apart(
    square: Callable[[Each, Tensor], Tensor], left: Each, right: Tensor, sign: Tensor | None
) -> Tensor:
    """Σ s G² from sums of squares: those of the positive directions less those of the others."""
    if sign is None:
        return square(left, right)
    sides = [
        square([delta * side[d, :, None, None, None] for d, delta in enumerate(left)], right)
        for side in (sign > 0, sign < 0)
    ]
    return sides[0] - sides[1]


def flat(x: Tensor) -> Tensor:
    """(n, g, a, T) as a batch of matrices."""
    return x.flatten(0, 1) if x.shape[1] > 1 else x[:, 0]


def row_blocks(right: Tensor, entries: int) -> Iterator[slice]:
    """Slices of samples whose temporaries stay within the block size."""
    n, groups = right.shape[:2]
    block = _CPU_BLOCK if right.device.type == "cpu" else _GPU_BLOCK
    step = max(1, block // max(1, groups * entries))
    for start in range(0, n, step):
        yield slice(start, min(n, start + step))


Form = Literal["columns", "rows", "flatness"]


@final
@dataclass(frozen=True, slots=True)
class Weight:
    """A weight as a matrix; `scale` (one an input unit) divides the features for `flatness`."""

    values: Tensor
    matrix: Matrix
    scale: Tensor | None = None


def _of(sign: Tensor | None, d: int, rows: slice) -> Tensor | None:
    """The signs of some samples in one direction."""
    return None if sign is None else sign[d, rows]


def signed(values: Tensor, sign: Tensor | None) -> Tensor:
    """values[n, …] times sign[n]."""
    return values if sign is None else values * sign.reshape(-1, *[1] * (values.ndim - 1))


# A form summed over all samples, and the total of every sample.
Formed = tuple[Tensor, Tensor]


def written_out(gradient: Tensor, weight: Weight, sign: Tensor | None, form: Form) -> Formed:
    """A form of gradients (D, n, *shape), as they stand."""
    lead = gradient.shape[:2]
    each = gradient.flatten(0, 1)
    flat_sign = None if sign is None else sign.reshape(lead.numel())
    matrix = weight.matrix
    if form == "flatness":
        values = signed(_flatness(each, weight), flat_sign).double().reshape(lead).sum(0)
        return values.sum(), values
    sums = matrix.columns if form == "columns" else matrix.rows
    units = signed(sums(each * weight.values, 1).double().square(), flat_sign)
    return units.sum(0), units.sum(1).reshape(lead).sum(0)


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


def _sides(
    left: Each, right: Tensor, layout: Layout, w: Tensor, sign: Tensor | None, form: Form
) -> Formed:
    """Σ (Σ W G)² of every row or column; for columns from the gradients or from Wᵀ l: whichever is
    smaller."""
    parts, each = [], torch.zeros(len(right), dtype=torch.float64, device=right.device)
    a, positions = left[0].shape[2:]
    b, by_row = right.shape[2], form == "rows"
    for rows in row_blocks(right, positions * (2 * a + b) if by_row else 2 * b * min(a, positions)):
        inner = right[rows]
        outputs = w @ inner if by_row else inner
        for d, delta in enumerate(left):
            if by_row:
                sums = layout.outputs((delta[rows] * outputs).sum(3))
            elif a <= positions:
                sums = layout.inputs((delta[rows] @ inner.mT).mul_(w).sum(2))
            else:
                sums = layout.inputs((w.mT @ delta[rows]).mul_(inner).sum(3))
            squares = signed(sums.double().square(), _of(sign, d, rows))
            parts.append(squares.sum(0))
            each[rows] += squares.sum(1)
    return torch.stack(parts).sum(0), each


def _flat(left: Each, right: Tensor, w: Tensor, sign: Tensor | None) -> Formed:
    """By Gram matrices of positions, or by the gradients: whichever is smaller."""
    totals = torch.zeros(len(right), dtype=torch.float64, device=right.device)
    a, positions = left[0].shape[2:]
    b = right.shape[2]
    by_gram = positions <= a
    norms = _norms_by_gram if by_gram else _norms_by_gradient
    each = positions * (b + positions) if by_gram else a * b
    root = triangle(w, len(left) * len(right) * (positions if by_gram else b))
    for rows in row_blocks(right, 2 * each):
        deltas = (delta[rows] for delta in left)
        for d, values in enumerate(norms(deltas, right[rows], root)):
            totals[rows] += signed(values.double(), _of(sign, d, rows))
    return totals.sum(), totals


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


class Term(ABC):
    """Gradients of one parameter, for D directions and n samples."""

    @abstractmethod
    def gradient(self) -> Tensor:
        """The gradients themselves, (D, n, *shape)."""

    def weighted(self, weights: Tensor | None) -> Tensor:
        """Σ_i weights[i] · G of the first direction, of the parameter's shape; None for ones."""
        gradient = self.gradient()[0]
        if weights is None:
            return gradient.sum(0)
        summed = weights.to(gradient) @ gradient.reshape(len(gradient), -1)
        return summed.reshape(gradient.shape[1:])

    def traces(self, sign: Tensor | None) -> Tensor:
        """Σ_d s ‖G‖² of every sample, in float64; `sign` is (D, n) or None."""
        gradient = self.gradient()
        each = gradient.reshape(*gradient.shape[:2], -1)
        norms: Tensor = torch.linalg.vector_norm(each, dim=2)
        return _weighted(norms.double().square(), sign)

    def begun_traces(self, sign: Tensor | None) -> Begun:
        """The same, at which a GPU may still be at work."""
        return Begun(self.traces(sign))

    @abstractmethod
    def direction(self, d: int) -> Term:
        """One direction of it."""

    def squares(self, count: int) -> Tensor:
        """‖G‖² of each of so many directions and of every sample, (D, n), in float64."""
        return torch.stack([self.direction(d).traces(None) for d in range(count)])

    def trace(self, sign: Tensor | None) -> Tensor:
        """Σ s ‖G‖² over directions and samples."""
        return self.traces(sign).sum()

    def diagonal(self, sign: Tensor | None) -> Tensor:
        """Σ s G², of the parameter's shape."""
        squares = self.gradient().square()
        if sign is not None:
            squares = squares * sign.reshape(*sign.shape, *[1] * (squares.ndim - 2))
        return squares.sum((0, 1))

    def diagonal_and_traces(self, sign: Tensor | None) -> tuple[Tensor, Tensor]:
        """Both, where the second is had from what the first takes."""
        return self.diagonal(sign), self.traces(sign)

    def form(self, form: Form, weight: Weight, sign: Tensor | None) -> Formed:
        """A quadratic form of the gradients and the weight, in float64."""
        return written_out(self.gradient(), weight, sign, form)

    def weighted_squares(self, weights: Tensor) -> Tensor:
        """Σ weights · G² of every sample, over entries and directions, in float64."""
        squares = self.gradient().square().sum(0)
        return (squares.reshape(len(squares), -1) @ weights.flatten().to(squares)).double()

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

    def direction(self, d: int) -> Explicit:
        return Explicit(self.values[d : d + 1])


@final
@dataclass(frozen=True, slots=True)
class Outer(Term):
    """Σ_t l_t r_tᵀ in groups; `layout` turns (…, g, a, b) into the parameter's shape."""

    left: Each
    right: Tensor
    layout: Layout

    def outer(self) -> Outer:
        return self

    def direction(self, d: int) -> Outer:
        return Outer(self.left[d : d + 1], self.right, self.layout)

    def gradient(self) -> Tensor:
        inner = self.right.mT
        return self.layout.assemble(torch.stack([delta @ inner for delta in self.left]))

    def weighted(self, weights: Tensor | None) -> Tensor:
        (a, positions), b = self.left[0].shape[2:], self.right.shape[2]
        result = self.right.new_zeros(self.right.shape[1], a, b)
        for rows in row_blocks(self.right, positions * (2 * a + b)):
            left = self.left[0][rows].to(self.right)
            if weights is not None:
                left = left * weights[rows].to(self.right)[:, None, None, None]
            result.baddbmm_(_side_by_side(left), _side_by_side(self.right[rows]).mT)
        return self.layout.assemble(result)

    def traces(self, sign: Tensor | None) -> Tensor:
        return self.begun_traces(sign).settled()

    def begun_traces(self, sign: Tensor | None) -> Begun:
        left, right = self.left, self.right
        a, positions = left[0].shape[2:]
        b, directions = right.shape[2], len(left)
        if positions * (directions * a + b) >= directions * a * b:
            return Begun(_trace_gradient(left, right, sign))
        return self._traces_by_gram(sign)

    def _traces_by_gram(self, sign: Tensor | None) -> Begun:
        if sign is None:
            return _trace_gram(self.left, self.right)
        return Begun(_apart(_settled_gram, self.left, self.right, sign))

    def squares(self, count: int) -> Tensor:
        left, right = self.left, self.right
        a, positions = left[0].shape[2:]
        if positions * (count * a + right.shape[2]) >= count * a * right.shape[2]:
            return torch.stack(
                [_trace_gradient(left[d : d + 1], right, None) for d in range(count)]
            )
        return _squares_gram(left, right)

    def diagonal(self, sign: Tensor | None) -> Tensor:
        if self._by_gradient():
            return self.layout.assemble(_diagonal_gradient(self.left, self.right, sign))
        return self.layout.assemble(_apart(_diagonal_pairs, self.left, self.right, sign))

    def _by_gradient(self) -> bool:
        # The sum over directions first costs T² (D + b) products a row instead of D T b, and leaves
        # one large product instead of n·D small ones whose results must each be squared.
        a, positions = self.left[0].shape[2:]
        b, directions = self.right.shape[2], len(self.left)
        many = positions**2 * (a + b) > _PAIRS
        return many or positions * (directions + b) > 2 * directions * b

    def diagonal_and_traces(self, sign: Tensor | None) -> tuple[Tensor, Tensor]:
        # Gram matrices of the positions take T² (D a + b) products; to add up the squares that a
        # diagonal by the gradients has written out takes D a b additions.
        a, positions = self.left[0].shape[2:]
        b, directions = self.right.shape[2], len(self.left)
        few = positions**2 * (directions * a + b) < directions * a * b
        if few or not self._by_gradient():
            return self.diagonal(sign), self._traces_by_gram(sign).settled()
        traces = torch.zeros(len(self.right), dtype=torch.float64, device=self.right.device)
        diagonal = _diagonal_gradient(self.left, self.right, sign, traces)
        return self.layout.assemble(diagonal), traces

    def weighted_squares(self, weights: Tensor) -> Tensor:
        each = self.layout.factored(weights).flatten().to(self.right)
        totals = torch.zeros(len(self.right), dtype=torch.float64, device=self.right.device)
        groups = self.right.shape[1]
        for _, rows, gradients in _gradients(self.left, self.right):
            squares = torch.unflatten(gradients.square_().sum(1), 0, (-1, groups))
            totals[rows] += squares.reshape(-1, len(each)) @ each
        return totals

    def form(self, form: Form, weight: Weight, sign: Tensor | None) -> Formed:
        left, right, layout = self.left, self.right, self.layout
        if form == "flatness" and not layout.rows_are_units:
            return written_out(self.gradient(), weight, sign, form)
        w = layout.factored(weight.values)
        if form != "flatness":
            return _sides(left, right, layout, w, sign, form)
        if weight.scale is not None:
            spread = layout.spread(weight.scale)
            w, right = w * spread[:, None], divide(right, spread[..., None])
        return _flat(left, right, w, sign)


@final
@dataclass(frozen=True, slots=True)
class Lookup(Term):
    """Rows of an embedding: `index` is (n, T), −1 where nothing flows; `deltas[d]` is (n, T, d)."""

    index: Tensor
    deltas: Sequence[Tensor]
    rows: int

    def direction(self, d: int) -> Lookup:
        return Lookup(self.index, self.deltas[d : d + 1], self.rows)

    def gradient(self) -> Tensor:
        mask = (self.index >= 0).unsqueeze(-1)
        at = self.index.clamp(min=0).unsqueeze(-1)
        written = []
        for delta in self.deltas:
            rows = delta.new_zeros(len(delta), self.rows, delta.shape[-1])
            written.append(rows.scatter_add_(1, at.expand_as(delta), delta * mask))
        return torch.stack(written)

    def weighted(self, weights: Tensor | None) -> Tensor:
        mask = (self.index >= 0).unsqueeze(-1)
        each = mask if weights is None else mask * weights[:, None, None]
        rows = (self.deltas[0] * each).flatten(0, 1)
        result = rows.new_zeros(self.rows, rows.shape[-1])
        return result.index_add_(0, self.index.clamp(min=0).flatten(), rows)

    def traces(self, sign: Tensor | None) -> Tensor:
        return self._squares(sign).sum((1, 2), dtype=torch.float64)

    def diagonal(self, sign: Tensor | None) -> Tensor:
        return self.diagonal_and_traces(sign)[0]

    def diagonal_and_traces(self, sign: Tensor | None) -> tuple[Tensor, Tensor]:
        squares = self._squares(sign)
        result = squares.new_zeros(self.rows, squares.shape[-1])
        result.index_add_(0, self.index.clamp(min=0).flatten(), squares.flatten(0, 1))
        return result, squares.sum((1, 2), dtype=torch.float64)

    def weighted_squares(self, weights: Tensor) -> Tensor:
        return (self._squares(None) * weights[self.index.clamp(min=0)]).sum((1, 2)).double()

    def form(self, form: Form, weight: Weight, sign: Tensor | None) -> Formed:
        """The table is a matrix whose input units are its rows."""
        rows = weight.values[self.index.clamp(min=0)]
        if weight.scale is not None:
            return written_out(self.gradient(), weight, sign, form)
        width = self.rows if form == "columns" else rows.shape[-1] if form == "rows" else 1
        total = rows.new_zeros(width, dtype=torch.float64)
        each = rows.new_zeros(len(rows), dtype=torch.float64)
        root = rows
        if form == "flatness":
            root = triangle(weight.values.mT, len(self.deltas) * self.index.numel())
        for d, delta in enumerate(self._distinct()):
            part = _of(sign, d, slice(None))
            if form == "columns":
                sums = signed((delta * rows).sum(2).double().square(), part)
                total.index_add_(0, self.index.clamp(min=0).flatten(), sums.flatten())
            elif form == "rows":
                sums = signed((delta * rows).sum(1).double().square(), part)
                total += sums.sum(0)
            else:
                pulled = delta.to(root.dtype) @ root.mT
                sums = signed(pulled.square_().sum(2).double(), part)
                total += sums.sum()
            each += sums.sum(1)
        return total if form != "flatness" else total[0], each

    def _distinct(self) -> Iterator[Tensor]:
        """Deltas added up at the first position of every distinct row of a sample, 0 elsewhere."""
        same = (self.index.unsqueeze(2) == self.index.unsqueeze(1)).int()
        first = same.argmax(dim=2).unsqueeze(-1)
        mask = (self.index >= 0).unsqueeze(-1)
        for delta in self.deltas:
            yield torch.zeros_like(delta).scatter_add_(1, first.expand_as(delta), delta * mask)

    def _squares(self, sign: Tensor | None) -> Tensor:
        """Σ_d s G² at the first position of every distinct row of a sample, 0 elsewhere."""
        total = torch.zeros_like(self.deltas[0])
        for d, rows in enumerate(self._distinct()):
            total += signed(rows.square_(), _of(sign, d, slice(None)))
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


@final
class Deltas:
    """What arrived at one operation, (D, n, a), squared once for its weight and its bias."""

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self._known: dict[tuple[Callable[[Tensor], Tensor], bool], Tensor] = {}

    def squares(self, sign: Tensor | None) -> Tensor:
        """Σ_d s δ_d², (n, a); `sign` is (D, n), the same in every call that has one, or None."""
        return self._sum(torch.square, sign)

    def norms(self, sign: Tensor | None) -> Tensor:
        """Σ_d s ‖δ_d‖², (n,), without writing the squares out if they are not."""
        squares = self._known.get((torch.square, sign is not None))
        return self._sum(_squared_norms, sign) if squares is None else squares.sum(1)

    def _sum(self, square: Callable[[Tensor], Tensor], sign: Tensor | None) -> Tensor:
        key = square, sign is not None
        if key not in self._known:
            self._known[key] = _weighted(square(self.values), sign)
        return self._known[key]


@final
@dataclass(frozen=True, slots=True)
class Bias(Term):
    """The gradients are the deltas themselves."""

    deltas: Deltas

    def direction(self, d: int) -> Bias:
        return Bias(Deltas(self.deltas.values[d : d + 1]))

    def gradient(self) -> Tensor:
        return self.deltas.values

    def squares(self, count: int) -> Tensor:
        return _squared_norms(self.deltas.values).double()

    def diagonal(self, sign: Tensor | None) -> Tensor:
        return self.deltas.squares(sign).sum(0)

    def traces(self, sign: Tensor | None) -> Tensor:
        return self.deltas.norms(sign).double()


@final
@dataclass(frozen=True, slots=True)
class RankOne(Term):
    """δ_d xᵀ: `inputs` is (n, b)."""

    deltas: Deltas
    inputs: Tensor
    layout: Layout

    def direction(self, d: int) -> RankOne:
        return RankOne(Deltas(self.deltas.values[d : d + 1]), self.inputs, self.layout)

    def outer(self) -> Outer:
        """The same with an axis of positions, to be put beside other uses of the weight."""
        return Outer(
            self.deltas.values[:, :, None, :, None], self.inputs[:, None, :, None], self.layout
        )

    def gradient(self) -> Tensor:
        return self.outer().gradient()

    def weighted(self, weights: Tensor | None) -> Tensor:
        left = self.deltas.values[0].to(self.inputs)
        if weights is not None:
            left = left * weights.to(self.inputs)[:, None]
        return self._assemble(left.mT @ self.inputs)

    def squares(self, count: int) -> Tensor:
        return (_squared_norms(self.deltas.values) * _squared_norms(self.inputs)).double()

    def traces(self, sign: Tensor | None) -> Tensor:
        return (self.deltas.norms(sign) * _squared_norms(self.inputs)).double()

    def diagonal(self, sign: Tensor | None) -> Tensor:
        squares = self.deltas.squares(sign)
        result = self.inputs.new_zeros(squares.shape[1], self.inputs.shape[1])
        for rows in self._blocks(self.inputs.shape[1]):
            result.addmm_(squares[rows].mT, self.inputs[rows].square())
        return self._assemble(result)

    def weighted_squares(self, weights: Tensor) -> Tensor:
        (each,) = self.layout.factored(weights.to(self.inputs))
        pulled: Tensor = (self.deltas.squares(None) @ each).mul_(self.inputs.square())
        return pulled.sum(1, dtype=torch.float64)

    def form(self, form: Form, weight: Weight, sign: Tensor | None) -> Formed:
        (w,) = self.layout.factored(weight.values)
        if form == "rows":
            outputs: Tensor = (self.inputs @ w.mT).square_()
            squares = outputs.mul_(self.deltas.squares(sign))
            return squares.sum(0, dtype=torch.float64), squares.sum(1, dtype=torch.float64)
        if form == "columns":
            return self._columns(w, sign)
        inputs = self.inputs
        if weight.scale is not None:
            w, inputs = w * weight.scale, divide(inputs, weight.scale)
        root = triangle(w, self.deltas.values.shape[:2].numel())
        pulled = self.deltas.values.to(root.dtype) @ root.mT
        each = (_weighted(_squared_norms(pulled), sign) * _squared_norms(inputs)).double()
        return each.sum(), each

    def _columns(self, w: Tensor, sign: Tensor | None) -> Formed:
        deltas = self.deltas.values
        total = torch.zeros(w.shape[1], dtype=torch.float64, device=w.device)
        each = torch.zeros(len(self.inputs), dtype=torch.float64, device=w.device)
        for rows in self._blocks(len(deltas) * w.shape[1]):
            part = None if sign is None else sign[:, rows]
            pulled = _weighted((deltas[:, rows] @ w).square_(), part)
            squares = pulled.mul_(self.inputs[rows].square())
            total += squares.sum(0, dtype=torch.float64)
            each[rows] = squares.sum(1, dtype=torch.float64)
        return total, each

    def _assemble(self, matrix: Tensor) -> Tensor:
        return matrix.mT if self.layout.transposed else matrix

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
