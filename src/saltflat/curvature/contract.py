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
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

# One tensor a direction, or all of them stacked.
Each = Sequence[Tensor] | Tensor

# Entries of the temporaries: small enough for a CPU's cache, large enough to feed a GPU.
_CPU_BLOCK = 1 << 20
_GPU_BLOCK = 1 << 28

# How much larger than the sum of an expanded square its terms with t = t' may be.
CANCELLATION = 8.0


def trace(left: Each, right: Tensor, sign: Tensor | None) -> Tensor:
    """Σ s ‖G_d‖² over directions and samples, as a float64 scalar."""
    _, _, a, positions = left[0].shape
    b, directions = right.shape[2], len(left)
    if positions * (directions * a + b) >= directions * a * b:
        return _trace_gradient(left, right, sign)
    if sign is None:
        return _trace_gram(left, right)
    return _trace_gram(_only(left, sign > 0), right) - _trace_gram(_only(left, sign < 0), right)


def diagonal(left: Each, right: Tensor, sign: Tensor | None) -> Tensor:
    """Σ s G_d² over directions and samples, shape (g, a, b)."""
    positions = right.shape[3]
    # The sum over directions first costs T(T+1)/2 products an entry instead of D·T, and leaves
    # one large product instead of n·D small ones whose results must each be squared.
    if positions + 1 > 3 * len(left):
        return _diagonal_gradient(left, right, sign)
    if sign is None:
        return _diagonal_pairs(left, right)
    up, down = _only(left, sign > 0), _only(left, sign < 0)
    return _diagonal_pairs(up, right) - _diagonal_pairs(down, right)


def gradient(left: Tensor, right: Tensor) -> Tensor:
    """Σ G over samples for one direction, shape (g, a, b)."""
    _, groups, a, _ = left.shape
    outer = left.permute(1, 2, 0, 3).reshape(groups, a, -1)
    inner = right.permute(1, 0, 3, 2).reshape(groups, -1, right.shape[2])
    return outer @ inner


def stack(each: Each) -> Tensor:
    """All directions as one tensor (D, …)."""
    return each if isinstance(each, Tensor) else torch.stack(list(each))


def squares_by_gram(
    parts: Sequence[Tensor], inner: Tensor, cancellation: float = CANCELLATION
) -> Tensor:
    """Σ_d ‖G_d‖² of m matrices by `gram_squares`, once more where too many digits cancel: in
    float64, or from the gradients if it was that already."""
    squares, lost = gram_squares(parts, inner, inner.mT @ inner, cancellation)
    if not bool(lost.any()):
        return squares
    parts, inner = [part[lost] for part in parts], inner[lost]
    if inner.dtype != torch.float64:
        room = wide_cancellation(inner.dtype, cancellation)
        again = squares_by_gram([part.double() for part in parts], inner.double(), room)
    else:
        gradients = (part @ inner.mT for part in parts)
        norms = [torch.linalg.vector_norm(each, dim=(1, 2)) for each in gradients]
        again = torch.stack(norms).square().sum(0)
    squares[lost] = again.to(squares)
    return squares


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


def _trace_gram(left: Each, right: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=right.device)
    positions = right.shape[3]
    for rows in row_blocks(right, positions * positions):
        parts = [flat(delta[rows]) for delta in left]
        total += squares_by_gram(parts, flat(right[rows])).sum(dtype=torch.float64)
    return total


def _trace_gradient(left: Each, right: Tensor, sign: Tensor | None) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=right.device)
    for d, rows, gradient in _gradients(left, right):
        squares = torch.linalg.vector_norm(gradient, dim=(1, 2)).square()
        if sign is not None:
            squares = squares * _per_row(sign[d, rows], right.shape[1]).flatten()
        total += squares.sum(dtype=torch.float64)
    return total


def _diagonal_pairs(left: Each, right: Tensor) -> Tensor:
    """Σ_{t≤t'} (Σ_d l_t l_t') (r_t r_t'), off-diagonal pairs twice."""
    groups, b, positions = right.shape[1:]
    a = left[0].shape[2]
    first, second = torch.triu_indices(positions, positions, device=right.device)
    twice = torch.where(first == second, 1.0, 2.0).to(right)
    result = right.new_zeros(groups, a, b)
    for rows in row_blocks(right, len(first) * (b + a)):
        pairs: Tensor | None = None
        for delta in left:
            part = delta[rows]
            product = part[..., first] * part[..., second]
            pairs = product if pairs is None else pairs.add_(product)
        assert pairs is not None
        inner = right[rows][..., first] * right[rows][..., second] * twice
        result.baddbmm_(_side_by_side(pairs), _side_by_side(inner).mT)
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
        chosen = [delta.index_select(2, rows) for delta in left]
        result[:, rows] = _diagonal_gradient(chosen, right, None)


def _diagonal_gradient(left: Each, right: Tensor, sign: Tensor | None) -> Tensor:
    _, groups, b, _ = right.shape
    a = left[0].shape[2]
    result = right.new_zeros(groups, a, b)
    for d, rows, gradient in _gradients(left, right):
        each = torch.unflatten(gradient, 0, (-1, groups))
        if sign is None:
            result += each.square_().sum(0)
        else:
            result += (each.square_() * sign[d, rows, None, None, None]).sum(0)
    return result


def _gradients(left: Each, right: Tensor) -> Iterator[tuple[int, slice, Tensor]]:
    """Per-sample gradients (rows·g, a, b), a direction and a block of samples at a time."""
    for rows in row_blocks(right, left[0].shape[2] * right.shape[2]):
        inner = flat(right[rows]).mT
        for d, delta in enumerate(left):
            yield d, rows, torch.bmm(flat(delta[rows]), inner)


def _only(left: Each, chosen: Tensor) -> list[Tensor]:
    """The deltas with 0 for every direction and sample that is not chosen, (D, n)."""
    return [delta * chosen[d, :, None, None, None] for d, delta in enumerate(left)]


def flat(x: Tensor) -> Tensor:
    """(n, g, a, T) as a batch of matrices."""
    return x.flatten(0, 1) if x.shape[1] > 1 else x[:, 0]


def _per_row(sign: Tensor, groups: int) -> Tensor:
    return sign.repeat_interleave(groups)[:, None, None]


def row_blocks(right: Tensor, entries: int) -> Iterator[slice]:
    """Slices of samples whose temporaries stay within the block size."""
    n, groups = right.shape[:2]
    block = _CPU_BLOCK if right.device.type == "cpu" else _GPU_BLOCK
    step = max(1, block // max(1, groups * entries))
    for start in range(0, n, step):
        yield slice(start, min(n, start + step))
