"""The one rule for linear maps: matrix products, convolutions, attention scores.

In `out[n, m] = Σ_k A[n, k] · B[k, m]` all terms of a sum must carry the same scale,

    s(A[n, k]) + s(B[k, m]) = s(out[n, m])     for all k,

so that A[n, k] = p[n] − q[k], B[k, m] = q[k] + t[m] and out = p[n] + t[m]. The first use of a
weight defines its scales by this; a later use, or a product of activations, writes equations.
Rows and columns that look alike are treated once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor

from saltflat.symmetries.rules import Operand, Outputs, Step, pinned, rules_of
from saltflat.symmetries.rules.entrywise import join, padded_windows, spread
from saltflat.symmetries.scales import (
    ANY,
    PINNED,
    NotUnderstood,
    Scales,
    View,
    has_any,
    repeat,
    squash,
    unique_rows,
)

#: products with more terms than this are not written out but pinned
LARGEST = 20_000_000


def _pivot(x: Tensor) -> int | None:
    """A column without zeros."""
    full = (x != ANY).all(0).nonzero().flatten()
    return int(full[0]) if len(full) else None


def _filled(x: Tensor) -> Tensor:
    """The column by which a weight is defined; what meets zero alone may be anything."""
    column = x[:, _pivot(x) or 0]
    return torch.where(column == ANY, PINNED, column)


def _spread(out: Tensor, inverse: Tensor) -> Tensor:
    return out.expand(-1, len(inverse)) if out.shape[1] == 1 else out[:, inverse]


@final
class Contraction:
    """The rule, for one network's scales."""

    def __init__(self, scales: Scales) -> None:
        self.scales = scales

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        """Ids of the batched product of `a` (batch, n, k) and `b` (batch, k, m)."""
        a, b = repeat(self.scales.find(a)), repeat(self.scales.find(b))
        batch, n, m = a.shape[0], a.shape[1], b.shape[2]
        if a.shape[2] == 0 or a.numel() == 0 or b.numel() == 0:
            return a.new_full((batch, n, m), ANY)
        a_once, b_once = batch == 1 or a.stride(0) == 0, batch == 1 or b.stride(0) == 0
        if a_once and b_once:
            return self._matrix(a[0], b[0]).expand(batch, n, m)
        if a_once:
            out = self._matrix(a[0], b.transpose(0, 1).reshape(b.shape[1], batch * m))
            return out.reshape(n, batch, m).transpose(0, 1)
        if b_once:
            return self._matrix(a.reshape(batch * n, -1), b[0]).reshape(batch, n, m)
        if a.stride(1) == 0 and b.stride(2) == 0 and not self._is_fresh(a, b):
            return self._sum(a[:, 0], b[:, :, 0], 1)[:, :, None].expand(batch, n, m)
        grouped = self._grouped(a, b)
        return grouped if grouped is not None else self._batched(a, b)

    def _is_fresh(self, *ids: Tensor) -> bool:
        """Whether something is among them that nothing is known about."""
        return any(bool(self.scales.is_fresh(i).any()) for i in ids)

    def _grouped(self, a: Tensor, b: Tensor) -> Tensor | None:
        """Many small weights at once, as in a depthwise convolution."""
        scales = self.scales
        if b.shape[2] > 1 and b.stride(2) != 0:
            return None
        if not scales.is_fresh(a).all() or (b == ANY).any():
            return None
        column = b[:, :, 0]
        unit = scales.fresh(a.shape[0] * a.shape[1], scales.label(a)).reshape(a.shape[:2])
        self._define(a, scales.combine(unit[:, :, None], column[:, None, :], 1.0, -1.0))
        return unit[:, :, None].expand(*a.shape[:2], b.shape[2])

    def _batched(self, a: Tensor, b: Tensor) -> Tensor:
        joined = torch.cat([a.flatten(1), b.flatten(1)], 1)
        first, inverse = unique_rows(joined)
        return torch.stack([self._matrix(a[i], b[i]) for i in first.tolist()])[inverse]

    def _matrix(self, a: Tensor, b: Tensor) -> Tensor:
        """The rule for one matrix product; the weight comes first."""
        a, b = self.scales.find(a), self.scales.find(b)
        if self._is_weight(a):
            return self._weight(a, b)
        if self._is_weight(b):
            return self._weight(b.T, a.T).T
        if has_any(a) or has_any(b):
            return self._explicit(a, b)
        first, second = unique_rows(a), unique_rows(b.T)
        a, b = a[first[0]], b[:, second[0]]
        out = self._factored(a, b)
        if out is None:
            transposed = self._factored(b.T, a.T)
            out = transposed.T if transposed is not None else self._explicit(a, b)
        return out[first[1]][:, second[1]]

    def _is_weight(self, ids: Tensor) -> bool:
        ids = squash(ids)
        fresh = self.scales.is_fresh(ids)
        return bool((fresh | (ids == ANY)).all() and fresh.any())

    def first(self, view: View, x: Tensor) -> Tensor:
        """The first use of a weight (n, …), flattened to (n, k), on columns `x` (k, m)."""
        scales = self.scales
        x = repeat(scales.find(x))
        columns, inverse = unique_rows(x.T)
        x = x[:, columns]
        if x.shape[1] > 1 and (self._is_weight(x) or _pivot(x) is None):
            return self._matrix(view.ids.reshape(len(view.ids), -1), x)[:, inverse]
        p = scales.fresh(view.shape[0], view.weight.label)
        q = _filled(x)
        tail = view.shape[1:]
        view.define((p.reshape(-1, *[1] * len(tail)), 1.0), (q.reshape(1, *tail), -1.0))
        return _spread(self._out(p, q, x), inverse)

    def again(self, p: Tensor, q: Tensor, factor: float, x: Tensor) -> Tensor | None:
        """A weight that is known by its rows and columns, p[n] + factor · q[k], used again."""
        x = repeat(self.scales.find(x))
        if has_any(x) or self._is_weight(x):
            return None
        columns, inverse = unique_rows(x.T)
        p, q = self.scales.find(p), self.scales.find(q)
        factors = torch.full_like(q, factor, dtype=torch.float64)
        return _spread(self._repeated(p, q, factors, x[:, columns]), inverse)

    def _weight(self, w: Tensor, x: Tensor) -> Tensor:
        """The first use of a weight `w` (n, k): it is defined by what it is multiplied with."""
        scales = self.scales
        columns, inverse = unique_rows(x.T)
        x = x[:, columns]
        if x.shape[1] > 1 and self._is_weight(x):
            x = self._structure(x)
        if x.shape[1] > 1 and ((w == ANY).any() or _pivot(x) is None):
            return self._explicit(w, x)[:, inverse]
        p = scales.fresh(len(w), scales.label(w[w != ANY]))
        # A row of zeros gives zero.
        p = torch.where((w == ANY).all(1), ANY, p)
        q = _filled(x)
        self._define(w, scales.outer(p, q, -1.0))
        return _spread(self._out(p, q, x), inverse)

    def _out(self, p: Tensor, q: Tensor, x: Tensor) -> Tensor:
        """The product of a weight p[n] − q[k] with different columns x."""
        if x.shape[1] == 1:
            return p[:, None] if not (x == ANY).all() else torch.full_like(p[:, None], ANY)
        return self.scales.outer(p, self._offsets(x, q))

    def _offsets(self, x: Tensor, q: Tensor) -> Tensor:
        """t with x[k, m] = q[k] + t[m], and the equations that make it so."""
        scales = self.scales
        some = (x != ANY).to(torch.int64).argmax(0)  # an entry of each column that is not zero
        x0, q0 = x.gather(0, some[None])[0], q[some]
        scales.relate([x, x0.expand_as(x), q[:, None], q0.expand_as(x)], [1.0, -1.0, -1.0, 1.0])
        return scales.combine(x0, q0, 1.0, -1.0)

    def _structure(self, x: Tensor) -> Tensor:
        """Two weights meet: the second one is of the form q[k] + t[m] with q[0] = 0."""
        scales = self.scales
        if (x == ANY).any():
            scales.touch(x)
            return x
        label = scales.label(x)
        q, t = scales.fresh(len(x), label), scales.fresh(x.shape[1], label)
        scales.pin(q[0])
        self._define(x, scales.outer(q, t))
        return scales.find(x)

    def _define(self, ids: Tensor, value: Tensor) -> None:
        used = ids != ANY
        self.scales.define(ids[used], value[used])

    def _factored(self, a: Tensor, b: Tensor) -> Tensor | None:
        """A matrix whose scales are p[n] + q[k] already: the equations do not depend on n."""
        scales = self.scales
        p, q, fp, fq = scales.parts(a)
        same_rows = (p == p[:, :1]).all() and (fp == 1).all()
        same_columns = (q == q[:1]).all() and (fq == fq[:1]).all()
        if not (same_rows and same_columns):
            return None
        return self._repeated(p[:, 0], q[0], fq[0], b)

    def _repeated(self, p: Tensor, q: Tensor, fq: Tensor, b: Tensor) -> Tensor:
        """The product of p[n] + fq[k] · q[k] with `b`."""
        scales = self.scales
        q, fq = q[:, None], fq[:, None]
        scales.relate(
            [b, b[:1].expand_as(b), q.expand_as(b), q[:1].expand_as(b)],
            [1.0, -1.0, fq.expand_as(b), -fq[:1].expand_as(b)],
        )
        start = b[0] if float(fq[0]) == 0 else scales.combine(b[0], q[0], 1.0, float(fq[0]))
        return scales.outer(p, start)

    def _explicit(self, a: Tensor, b: Tensor) -> Tensor:
        """Every term written out, if there are not too many."""
        (rows, back_rows), (columns, back_columns) = unique_rows(a), unique_rows(b.T)
        a, b = a[rows], b[:, columns]
        if a.shape[0] * a.shape[1] * b.shape[1] > LARGEST:
            raise NotUnderstood
        shape = (len(a), a.shape[1], b.shape[1])
        out = self._sum(a[:, :, None].expand(shape), b[None].expand(shape), 1)
        return out[:, 0][back_rows][:, back_columns]

    def _sum(self, a: Tensor, b: Tensor, dim: int) -> Tensor:
        """Ids of Σ a · b along a dimension, which is kept: all terms have one scale."""
        some = ((a != ANY) & (b != ANY)).to(torch.int64).argmax(dim, keepdim=True)
        a0, b0 = a.gather(dim, some), b.gather(dim, some)
        self.scales.relate([a, b, a0.expand_as(a), b0.expand_as(b)], [1.0, 1.0, -1.0, -1.0])
        return self.scales.combine(a0, b0)


def bmm(step: Step, a: Operand, b: Operand) -> Tensor:
    x, y = step.scales.find(a.ids), step.scales.find(b.ids)
    if not (step.scales.is_fresh(x).any() or step.scales.is_fresh(y).any()):
        step.scales.bilinear += [x, y]
    return step.contract(x, y)


def mm(step: Step, a: Operand, b: Operand) -> Tensor:
    if 0 not in (*a.shape, *b.shape):
        known = _known(step, a, b)
        if known is None:
            turned = _known(step, _turned(b), _turned(a))
            known = None if turned is None else turned.T
        if known is not None:
            return known
    return step.contract(a.ids[None], b.ids[None])[0]


def _known(step: Step, w: Operand, x: Operand) -> Tensor | None:
    """The product, where the entries of the first factor need no ids for it."""
    contraction = Contraction(step.scales)
    if w.first is not None and x.first is None:
        return contraction.first(w.first, x.ids)
    split = w.view.split() if w.view is not None else None
    return None if split is None or x.view is not None else contraction.again(*split, x.ids)


def _turned(x: Operand) -> Operand:
    if x.view is None:
        return Operand(x.shape[::-1], x.dtype, x.ids.T)
    return Operand(x.shape[::-1], x.dtype, view=x.view.permuted((1, 0)))


def addmm(step: Step, bias: Operand, a: Operand, b: Operand, **factors: float) -> Outputs:
    return _plus(step, mm(step, a, b), bias, factors)


def baddbmm(step: Step, bias: Operand, a: Operand, b: Operand, **factors: float) -> Outputs:
    return _plus(step, bmm(step, a, b), bias, factors)


def _plus(step: Step, product: Tensor, bias: Operand, factors: Mapping[str, float]) -> Tensor:
    return product if factors.get("beta", 1) == 0 else join(step, product, bias.ids)


def mv(step: Step, a: Operand, b: Operand) -> Outputs:
    return step.contract(a.ids[None], b.ids[None, :, None])[0, :, 0]


def dot(step: Step, a: Operand, b: Operand) -> Outputs:
    return step.contract(a.ids[None, None], b.ids[None, :, None])[0, 0, 0]


def trilinear(
    step: Step, x: Operand, weight: Operand, y: Operand, *geometry: Any, **kwargs: Any
) -> Outputs:
    """`nn.Bilinear`, Σ_ij x[n, i] · W[o, i, j] · y[n, j]: W meets the products of x with y."""
    if tuple(map(tuple, geometry[:4])) != ((1, 3), (0,), (1, 2), (2, 3)):
        raise NotUnderstood
    pairs = step.scales.combine(x.ids[:, :, None], y.ids[:, None, :]).flatten(1)
    return step.contract(weight.ids.flatten(1)[None], pairs.T[None])[0].T


def convolution(
    step: Step,
    x: Operand,
    weight: Operand,
    bias: Operand | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
) -> Outputs:
    """A matrix product of the kernels with the patches under them."""
    n = weight.ndim - 2
    ids = repeat(step.scales.find(x.ids))
    flat = all(ids.stride(d) == 0 or ids.shape[d] == 1 for d in (0, *range(2, n + 2)))
    if transposed and not flat:
        ids, flat = step.scales.tie(ids, [0, *range(2, n + 2)]).expand(ids.shape), True
    taps = math.prod(weight.shape[2:])
    if flat:
        column = ids[0].flatten(1)[:, 0].reshape(groups, -1, 1)
        patches = column.expand(-1, -1, taps).reshape(groups, -1, 1)
        out = _kernels(step, weight, patches, transposed).reshape(1, -1, *[1] * n)
    else:
        pad, *geometry = (spread(each, n) for each in (padding, weight.shape[2:], stride, dilation))
        view = padded_windows(ids, pad, *geometry)
        out = _kernels(step, weight, _columns(view, groups, n), transposed)
        out = out.reshape(-1, view.shape[0], *step.shape[2:]).transpose(0, 1)
    if bias is not None:
        out = join(step, out, bias.ids.reshape(1, -1, *[1] * n))
    return out.expand(step.shape)


def _kernels(step: Step, weight: Operand, patches: Tensor, transposed: bool) -> Tensor:
    """The product of the kernels, (groups, outputs, inputs · taps), with patches."""
    groups = len(patches)
    if (
        (view := weight.first) is not None
        and groups == 1
        and 0 not in (*weight.shape, *patches.shape)
    ):
        swap = (1, 0, *range(2, weight.ndim))
        return Contraction(step.scales).first(
            view.permuted(swap) if transposed else view, patches[0]
        )[None]
    ids = weight.ids
    if not transposed:
        return step.contract(ids.reshape(groups, ids.shape[0] // groups, -1), patches)
    split = ids.reshape(groups, ids.shape[0] // groups, ids.shape[1], -1)
    return step.contract(split.transpose(1, 2).reshape(groups, ids.shape[1], -1), patches)


def _columns(view: Tensor, groups: int, n: int) -> Tensor:
    """Windows (N, C, *positions, *kernel) as (groups, C/groups · taps, N · positions)."""
    batch, channels = view.shape[:2]
    positions = view.shape[2 : 2 + n].numel()
    columns = view.reshape(batch, groups, channels // groups, positions, -1)
    return columns.permute(1, 2, 4, 0, 3).reshape(groups, -1, batch * positions)


def batch_norm(
    step: Step,
    x: Operand,
    weight: Operand | None,
    bias: Operand | None,
    mean: Operand,
    var: Operand,
    *args: Any,
) -> Outputs:
    """Evaluation mode: γ (x − mean) / √(var + eps) + β.

    The statistics move with the input, mean' = a·mean and var' + eps = a² (var + eps); the output
    has the scale of γ. A variance that is not a statistic of this layer alone does not move so.
    """
    if var.statistic != "deviation":
        raise NotUnderstood
    scales = step.scales
    channel = scales.tie(x.ids, [d for d in range(x.ndim) if d != 1]).flatten()
    scales.equate(channel, mean.ids)
    scales.equate(channel, var.ids)
    return _affine(step, weight, bias, 1)


def _affine(step: Step, weight: Operand | None, bias: Operand | None, first: int) -> Outputs:
    """The output of a normalisation: what γ carries, from dimension `first` on."""
    if weight is None:
        if bias is not None:
            step.scales.pin(bias.ids)
        return step.only(pinned(step.shape))
    step.scales.touch(step.scales.find(weight.ids))
    tail = len(step.shape) - first - weight.ndim
    both = weight.ids if bias is None else join(step, weight.ids, bias.ids)
    return step.only(both.reshape(*[1] * first, *weight.shape, *[1] * tail))


def _normalise(step: Step, ids: Tensor, dims: list[int]) -> None:
    """What is divided by its own size: the scale would cancel, were it not for the eps."""
    step.scales.soften(step.scales.tie(ids, dims), step.where)


def layer_norm(
    step: Step, x: Operand, shape: list[int], weight: Operand | None, bias: Operand | None, *a: Any
) -> Outputs:
    first = x.ndim - len(shape)
    _normalise(step, x.ids, list(range(first, x.ndim)))
    return _affine(step, weight, bias, first)


def group_norm(
    step: Step,
    x: Operand,
    weight: Operand | None,
    bias: Operand | None,
    n: int,
    channels: int,
    size: int,
    groups: int,
    *args: Any,
) -> Outputs:
    _normalise(step, x.ids.reshape(n, groups, -1), [2])
    return _affine(step, weight, bias, 1)


def batch_statistics(step: Step, x: Operand, weight: Any, bias: Any, *args: Any) -> Outputs:
    """BatchNorm without running statistics, and InstanceNorm."""
    if any(isinstance(a, Operand) for a in args):
        raise NotUnderstood
    _normalise(step, x.ids, [d for d in range(x.ndim) if d != 1])
    return _affine(step, weight, bias, 1)


RULES = rules_of({
    "bmm": bmm, "mm": mm, "addmm": addmm, "baddbmm": baddbmm, "mv": mv, "dot": dot,
    "convolution": convolution, "native_layer_norm": layer_norm,
    "_native_batch_norm_legit_no_training": batch_norm, "native_group_norm": group_norm,
    "_trilinear": trilinear,
})  # fmt: skip
RULES[torch.ops.aten._native_batch_norm_legit.no_stats] = batch_statistics
