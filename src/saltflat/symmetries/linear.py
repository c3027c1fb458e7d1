"""Matrix products, convolutions and normalisations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from saltflat.symmetries.ids import NotUnderstood, repeat
from saltflat.symmetries.pointwise import join
from saltflat.symmetries.reductions import windows
from saltflat.symmetries.step import Operand, Outputs, Rule, Step, pinned
from saltflat.symmetries.views import overloads


def bmm(step: Step, a: Operand, b: Operand) -> Outputs:
    x, y = step.scales.find(a.ids), step.scales.find(b.ids)
    if not (step.scales.is_fresh(x).any() or step.scales.is_fresh(y).any()):
        step.scales.bilinear += [x, y]
    return step.contract(x, y)


def mm(step: Step, a: Operand, b: Operand) -> Outputs:
    return step.contract(a.ids[None], b.ids[None])[0]


def addmm(step: Step, bias: Operand, a: Operand, b: Operand, **factors: float) -> Outputs:
    out = mm(step, a, b)
    assert isinstance(out, Tensor)
    return out if factors.get("beta", 1) == 0 else join(step, out, bias.ids)


def baddbmm(step: Step, bias: Operand, a: Operand, b: Operand, **factors: float) -> Outputs:
    out = bmm(step, a, b)
    assert isinstance(out, Tensor)
    return out if factors.get("beta", 1) == 0 else join(step, out, bias.ids)


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
    w = _kernels(weight.ids, groups, transposed)
    taps = weight.ids[0, 0].numel()
    if flat:
        column = ids[0].flatten(1)[:, 0].reshape(groups, -1, 1)
        patches = column.expand(-1, -1, taps).reshape(groups, -1, 1)
        out = step.contract(w, patches).reshape(1, -1, *[1] * n)
    else:
        kernel = weight.shape[2:]
        view = windows(ids, kernel, _each(stride, n), _each(padding, n), _each(dilation, n))
        out = step.contract(w, _columns(view, groups, n))
        out = out.reshape(-1, view.shape[0], *step.shape[2:]).transpose(0, 1)
    if bias is not None:
        out = join(step, out, bias.ids.reshape(1, -1, *[1] * n))
    return out.expand(step.shape)


def _each(values: list[int], n: int) -> list[int]:
    return list(values) * n if len(values) == 1 else list(values)


def _kernels(ids: Tensor, groups: int, transposed: bool) -> Tensor:
    """(groups, outputs, inputs · taps)."""
    if not transposed:
        return ids.reshape(groups, ids.shape[0] // groups, -1)
    split = ids.reshape(groups, ids.shape[0] // groups, ids.shape[1], -1)
    return split.transpose(1, 2).reshape(groups, ids.shape[1], -1)


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
    return [_affine(step, weight, bias, 1), *[None] * (len(step.shapes) - 1)]


def _affine(step: Step, weight: Operand | None, bias: Operand | None, first: int) -> Tensor:
    """The output of a normalisation: what γ carries, from dimension `first` on."""
    shape = step.shape
    out = pinned(shape)
    if weight is not None:
        step.scales.touch(step.scales.find(weight.ids))
        tail = len(shape) - first - weight.ndim
        both = weight.ids if bias is None else join(step, weight.ids, bias.ids)
        out = both.reshape(*[1] * first, *weight.shape, *[1] * tail).expand(shape)
    elif bias is not None:
        step.scales.pin(bias.ids)
    return out


def _normalise(step: Step, ids: Tensor, dims: list[int]) -> None:
    """What is divided by its own size: the scale would cancel, were it not for the eps."""
    step.scales.soften(step.scales.tie(ids, dims), step.where)


def layer_norm(
    step: Step, x: Operand, shape: list[int], weight: Operand | None, bias: Operand | None, *a: Any
) -> Outputs:
    first = x.ndim - len(shape)
    _normalise(step, x.ids, list(range(first, x.ndim)))
    return [_affine(step, weight, bias, first), *[None] * (len(step.shapes) - 1)]


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
    return [_affine(step, weight, bias, 1), *[None] * (len(step.shapes) - 1)]


def batch_statistics(step: Step, x: Operand, weight: Any, bias: Any, *args: Any) -> Outputs:
    """BatchNorm without running statistics, and InstanceNorm."""
    if any(isinstance(a, Operand) for a in args):
        raise NotUnderstood
    _normalise(step, x.ids, [d for d in range(x.ndim) if d != 1])
    return [_affine(step, weight, bias, 1), *[None] * (len(step.shapes) - 1)]


def _rules() -> dict[Any, Rule]:
    rules: dict[Any, Rule] = {}
    for name, rule in {
        "bmm": bmm, "mm": mm, "addmm": addmm, "baddbmm": baddbmm, "mv": mv, "dot": dot,
        "convolution": convolution, "native_layer_norm": layer_norm,
        "_native_batch_norm_legit_no_training": batch_norm, "native_group_norm": group_norm,
        "_trilinear": trilinear,
    }.items():  # fmt: skip
        rules |= dict.fromkeys(overloads(name), rule)
    rules[torch.ops.aten._native_batch_norm_legit.no_stats] = batch_statistics
    return rules


RULES = _rules()
