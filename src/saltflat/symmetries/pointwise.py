"""Sums, products, powers and comparisons, entry by entry."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from saltflat.symmetries.ids import ANY, PINNED, NotUnderstood
from saltflat.symmetries.step import Operand, Outputs, Rule, Step, ids_of, pinned
from saltflat.symmetries.views import overloads

#: a positive number no larger than this, added before a root, is an eps
EPS = 1e-3


def join(step: Step, a: Tensor, b: Tensor) -> Tensor:
    """Sums, maxima and choices: both sides have one scale, where neither is zero."""
    step.scales.equate(a, b)
    a, b = torch.broadcast_tensors(step.scales.find(a), step.scales.find(b))
    return a if not (a == ANY).any() else torch.where(a == ANY, b, a)


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
    scales = step.scales
    x, y = scales.find(ids_of(a)), scales.find(ids_of(b))
    return scales.combine(x, y).expand(step.shape)


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
    if high is None and isinstance(low, float) and 0 < low <= EPS:
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


def _rules() -> dict[Any, Rule]:
    rules: dict[Any, Rule] = {}
    for name, rule in {
        "add": add, "sub": subtract, "rsub": subtract, "maximum": subtract, "minimum": subtract,
        "fmax": subtract, "fmin": subtract, "mul": multiply, "div": divide, "pow": power,
        "sqrt": fixed_power(0.5), "rsqrt": fixed_power(-0.5), "square": fixed_power(2.0),
        "reciprocal": fixed_power(-1.0), "where": where, "masked_fill": masked_fill, "copy": copy,
        "clamp": clamp, "clamp_min": clamp, "clamp_max": clamp_max, "gt": compare, "lt": compare,
        "ge": compare, "le": compare, "eq": compare, "ne": compare, "sign": sign, "sgn": sign,
        "isnan": sign, "isinf": sign, "_prelu_kernel": prelu, "threshold": threshold,
    }.items():  # fmt: skip
        rules |= dict.fromkeys(overloads(name), rule)
    return rules


RULES = _rules()
