"""Operations entry by entry, and those that bring entries together.

Sums, products, powers and comparisons; sums over dimensions, means, maxima and pooling, whose
entries have one scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from saltflat.geometry import windows
from saltflat.symmetries.rules import Operand, Outputs, Rule, Step, ids_of, pinned, rules_of
from saltflat.symmetries.scales import ANY, PINNED, NotUnderstood, Scales, has_any, repeat

#: a positive number no larger than this, added before a root, is an eps
EPS = 1e-3


def join(step: Step, a: Tensor, b: Tensor) -> Tensor:
    """Sums, maxima and choices: both sides have one scale, where neither is zero."""
    step.scales.equate(a, b)
    a, b = torch.broadcast_tensors(step.scales.find(a), step.scales.find(b))
    return torch.where(a == ANY, b, a) if has_any(a) else a


def add(step: Step, a: Any, b: Any, *args: Any, **kwargs: Any) -> Outputs:
    if isinstance(a, Operand) and _is_eps(b) and kwargs.get("alpha", 1) == 1:
        # RMSNorm and its like: the scale would cancel, were it not for the eps.
        return _softened(step, a.ids).expand(step.shape)
    return join(step, ids_of(a), ids_of(b)).expand(step.shape)


def _softened(step: Step, ids: Tensor) -> Tensor:
    """Nearly the same scale; where there was zero there is the eps, which has none."""
    step.scales.soften(ids, step.where)
    ids = step.scales.find(ids)
    return torch.where(ids == ANY, PINNED, ids)


def _is_eps(value: Any) -> bool:
    if isinstance(value, Operand):
        value = value.constant
        if value is None or value.numel() != 1 or not value.is_floating_point():
            return False
        value = float(value)
    return isinstance(value, float) and 0 < value <= EPS


def subtract(step: Step, a: Any, b: Any, *args: Any, **kwargs: Any) -> Outputs:
    return join(step, ids_of(a), ids_of(b)).expand(step.shape)


def multiply(step: Step, a: Any, b: Any) -> Outputs:
    """s_out = s_a + s_b; a weight that meets its first activation is defined by the result."""
    return step.scales.combine(ids_of(a), ids_of(b)).expand(step.shape)


def divide(step: Step, a: Any, b: Any, **kwargs: Any) -> Outputs:
    if kwargs.get("rounding_mode"):
        raise NotUnderstood
    return step.scales.combine(ids_of(a), ids_of(b), 1.0, -1.0).expand(step.shape)


def power(step: Step, x: Any, exponent: Any) -> Outputs:
    if not isinstance(x, Operand) or isinstance(exponent, Operand | complex):
        raise NotUnderstood
    return step.scales.power(x.ids, float(exponent))


def fixed_power(exponent: float) -> Rule:
    def rule(step: Step, x: Operand) -> Outputs:
        return step.scales.power(x.ids, exponent)

    return rule


def where(step: Step, condition: Operand, a: Any, b: Any) -> Outputs:
    """A constant condition chooses ids; any other ties the two sides."""
    x, y = ids_of(a), ids_of(b)
    if condition.constant is not None:
        return torch.where(condition.constant.cpu(), x, y)
    return join(step, x, y).expand(step.shape)


def masked_fill(step: Step, x: Operand, mask: Operand, value: Any) -> Outputs:
    return where(step, mask, value, x)


def copy(step: Step, x: Operand, source: Operand, *args: Any) -> Outputs:
    return source.ids.expand(step.shape)


def clamp(step: Step, x: Operand, low: Any = None, high: Any = None) -> Outputs:
    """Bounds of zero and infinity scale with everything; an eps below a norm is nearly one."""
    if isinstance(low, Operand) or isinstance(high, Operand):
        raise NotUnderstood
    if high is None and _is_eps(low):
        return _softened(step, x.ids)
    for bound in (low, high):
        if bound is not None and bound != 0 and not math.isinf(bound):
            raise NotUnderstood
    return x.ids


def clamp_max(step: Step, x: Operand, high: Any) -> Outputs:
    return clamp(step, x, None, high)


def compare(step: Step, a: Any, b: Any) -> Outputs:
    """Of two numbers with one scale the larger stays the larger; all are compared with zero."""
    join(step, ids_of(a), ids_of(b))
    return None


def sign(step: Step, x: Operand) -> Outputs:
    """Does not see the scale."""
    step.scales.touch(step.scales.find(x.ids))
    return pinned(step.shape)


def prelu(step: Step, x: Operand, slope: Operand) -> Outputs:
    step.scales.pin(slope.ids)
    return x.ids


def threshold(step: Step, x: Operand, limit: float, value: float) -> Outputs:
    if limit != 0 or value != 0:
        raise NotUnderstood
    return x.ids


def _dims(x: Operand, dim: Any) -> list[int]:
    # `var` of an older form has a truth value where the others have dimensions.
    if dim is None or isinstance(dim, bool) or (isinstance(dim, list | tuple) and not dim):
        return list(range(x.ndim))
    return [d % max(x.ndim, 1) for d in (dim if isinstance(dim, list | tuple) else [dim])]


def reduce(step: Step, x: Operand, dim: Any = None, *args: Any, **kwargs: Any) -> Outputs:
    """sum, mean, amax and the like: homogeneous of degree one."""
    return step.only(step.scales.tie(x.ids, _dims(x, dim)).reshape(step.shape))


def extreme(step: Step, x: Operand, *args: Any, **kwargs: Any) -> Outputs:
    """max and min, over everything, along a dimension, or of two tensors."""
    if args and isinstance(args[0], Operand):
        raise NotUnderstood
    return reduce(step, x, *args, **kwargs)


def norm(step: Step, x: Operand, p: Any = 2, dim: Any = None, *args: Any, **kw: Any) -> Outputs:
    if p == 0:
        raise NotUnderstood
    return reduce(step, x, dim)


def variance(step: Step, x: Operand, dim: Any = None, *args: Any, **kwargs: Any) -> Outputs:
    one = step.scales.tie(x.ids, _dims(x, dim))
    squared = step.scales.power(one, 2.0).reshape(step.shape)
    return squared if len(step.shapes) == 1 else [squared, one.reshape(step.shapes[1])]


def running(step: Step, x: Operand, dim: int = -1, *args: Any, **kwargs: Any) -> Outputs:
    """cumsum and sort: the shape stays."""
    return step.only(step.scales.tie(x.ids, _dims(x, dim)))


def top(step: Step, x: Operand, k: int, dim: int = -1, *args: Any, **kwargs: Any) -> Outputs:
    return running(step, x, dim)


def order(step: Step, x: Operand, *args: Any, **kwargs: Any) -> Outputs:
    """argmax and argsort do not see a scale that all share."""
    step.scales.tie(x.ids, list(range(x.ndim)))
    return pinned(step.shape)


def padded_windows(ids: Tensor, pad: Sequence[int], *geometry: Sequence[int]) -> Tensor:
    """The ids under each position of a kernel: (N, C, *positions, *kernel); padding is zero."""
    widths = [w for p in reversed(list(pad)) for w in (p, p)]
    return windows(torch.ops.aten.constant_pad_nd.default(ids, widths, ANY), *geometry)


def pool_ids(scales: Scales, ids: Tensor, shape: Sequence[int], *geometry: Any) -> Tensor:
    """One scale under each window; positions that ceil_mode adds take that of the whole channel."""
    n = ids.ndim - 2
    ids = repeat(scales.find(ids))
    if all(ids.stride(2 + i) == 0 or ids.shape[2 + i] == 1 for i in range(n)):
        return ids[(slice(None), slice(None), *[slice(1)] * n)].expand(*shape)
    view = padded_windows(ids, *geometry)
    if list(view.shape[2 : 2 + n]) != list(shape[2:]):
        return scales.tie(ids, range(2, 2 + n)).expand(*shape)
    return scales.tie(view, range(2 + n, 2 + 2 * n)).reshape(*shape)


def spread(value: Any, n: int, default: Sequence[int] = ()) -> list[int]:
    """One number for every dimension."""
    if value is None or (isinstance(value, list | tuple) and not value):
        return list(default)
    values = list(value) if isinstance(value, list | tuple) else [value]
    return values * n if len(values) == 1 else values


def pool(n: int, dilated: bool) -> Rule:
    """Max and average pooling over `n` dimensions."""

    def rule(
        step: Step, x: Operand, kernel: Any, stride: Any = None, padding: Any = 0, *rest: Any
    ) -> Outputs:
        size = spread(kernel, n)
        gap = spread(rest[0] if dilated and rest else 1, n)
        geometry = spread(padding, n), size, spread(stride, n, size), gap
        batch = x.ids if x.ndim == n + 2 else x.ids[None]
        shape = step.shape if x.ndim == n + 2 else (1, *step.shape)
        return step.only(pool_ids(step.scales, batch, shape, *geometry).reshape(step.shape))

    return rule


def resample(n: int) -> Rule:
    """Adaptive pooling and interpolation: one scale in each channel."""

    def rule(step: Step, x: Operand, *args: Any, **kwargs: Any) -> Outputs:
        return step.only(step.scales.tie(x.ids, range(x.ndim - n, x.ndim)))

    return rule


RULES = rules_of({
    "add": add, "sub": subtract, "rsub": subtract, "maximum": subtract, "minimum": subtract,
    "fmax": subtract, "fmin": subtract, "mul": multiply, "div": divide, "pow": power,
    "sqrt": fixed_power(0.5), "rsqrt": fixed_power(-0.5), "square": fixed_power(2.0),
    "reciprocal": fixed_power(-1.0), "where": where, "masked_fill": masked_fill, "copy": copy,
    "clamp": clamp, "clamp_min": clamp, "clamp_max": clamp_max, "gt": compare, "lt": compare,
    "ge": compare, "le": compare, "eq": compare, "ne": compare, "sign": sign, "sgn": sign,
    "isnan": sign, "isinf": sign, "_prelu_kernel": prelu, "threshold": threshold,
    "sum": reduce, "mean": reduce, "nansum": reduce, "amax": reduce, "amin": reduce,
    "max": extreme, "min": extreme, "median": extreme,
    "linalg_vector_norm": norm, "norm": norm, "var": variance, "var_mean": variance,
    "cumsum": running, "sort": running, "topk": top, "argmax": order, "argmin": order,
    "argsort": order, "max_pool2d_with_indices": pool(2, True), "avg_pool2d": pool(2, False),
    "max_pool3d_with_indices": pool(3, True), "avg_pool3d": pool(3, False),
    "avg_pool1d": pool(1, False), "_adaptive_avg_pool2d": resample(2),
    "_adaptive_avg_pool3d": resample(3), "adaptive_avg_pool1d": resample(1),
    "adaptive_max_pool2d": resample(2), "adaptive_max_pool3d": resample(3),
    "upsample_nearest1d": resample(1), "upsample_nearest2d": resample(2),
    "upsample_nearest3d": resample(3), "upsample_linear1d": resample(1),
    "upsample_bilinear2d": resample(2), "upsample_bicubic2d": resample(2),
    "upsample_trilinear3d": resample(3), "_upsample_nearest_exact2d": resample(2),
    "_upsample_bilinear2d_aa": resample(2),
})  # fmt: skip
