"""Linearity that is read off the graph: every known operation is what it is taken for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import BY_NAME, NETWORKS, Case
from torch import Tensor

from saltflat.curvature.structure import _LINEAR, _PRODUCTS, unproven

A = torch.linspace(-1.7, 1.9, 36, dtype=torch.float64).reshape(6, 6)
INDEX = torch.arange(36).reshape(6, 6) % 5


def image(w: Tensor, *lead: int) -> Tensor:
    return w.reshape(*(lead or (1, 1)), 6, 6)


def volume(w: Tensor) -> Tensor:
    return w.reshape(1, 1, 3, 3, 4)


LINEAR: dict[str, Callable[[Tensor], Tensor]] = {
    "AdaptiveAvgPool2D": lambda w: F.adaptive_avg_pool2d(image(w), 2),
    "AdaptiveAvgPool3D": lambda w: F.adaptive_avg_pool3d(volume(w), 2),
    "AdaptiveMaxPool2D": lambda w: F.adaptive_max_pool2d(image(w), 2),
    "AdaptiveMaxPool3D": lambda w: F.adaptive_max_pool3d(volume(w), 2),
    "Add": lambda w: w + A,
    "Alias": lambda w: torch.ops.aten.alias(w),
    "Amax": lambda w: w.amax(1),
    "Amin": lambda w: w.amin(1),
    "AsStrided": lambda w: w.as_strided((3, 3), (6, 2)),
    "AvgPool2D": lambda w: F.avg_pool2d(image(w), 2),
    "AvgPool3D": lambda w: F.avg_pool3d(volume(w), 2),
    "Cat": lambda w: torch.cat([w, A]),
    "Clamp": lambda w: w.clamp(-0.5, 0.5),
    "ClampMax": lambda w: w.clamp_max(0.5),
    "ClampMin": lambda w: w.clamp_min(0.5),
    "Clone": lambda w: w.clone(),
    "ConstantPadNd": lambda w: F.pad(w, (1, 1)),
    "Embedding": lambda w: F.embedding(INDEX, w),
    "Expand": lambda w: w.expand(2, 6, 6),
    "Flip": lambda w: w.flip(0),
    "Gather": lambda w: w.gather(1, INDEX),
    "Hardtanh": F.hardtanh,
    "Index": lambda w: w[:, [0, 2]],
    "IndexSelect": lambda w: w.index_select(0, INDEX[0]),
    "LeakyRelu": F.leaky_relu,
    "Max": lambda w: w.max(1).values,
    "MaxPool2DWithIndices": lambda w: F.max_pool2d(image(w), 2),
    "MaxPool3DWithIndices": lambda w: F.max_pool3d(volume(w), 2),
    "Maximum": lambda w: torch.maximum(w, A.flip(0)),
    "Mean": lambda w: w.mean(1),
    "Min": lambda w: w.min(1).values,
    "Minimum": lambda w: torch.minimum(w, A.flip(0)),
    "Neg": lambda w: -w,
    "Permute": lambda w: w.permute(1, 0),
    "PixelShuffle": lambda w: F.pixel_shuffle(w.reshape(1, 4, 3, 3), 2),
    "ReflectionPad1D": lambda w: F.pad(w[None], (1, 1), "reflect"),
    "ReflectionPad2D": lambda w: F.pad(image(w), (1, 1, 1, 1), "reflect"),
    "ReflectionPad3D": lambda w: F.pad(volume(w), (1,) * 6, "reflect"),
    "Relu": torch.relu,
    "Repeat": lambda w: w.repeat(2, 2),
    "ReplicationPad1D": lambda w: F.pad(w[None], (1, 1), "replicate"),
    "ReplicationPad2D": lambda w: F.pad(image(w), (1, 1, 1, 1), "replicate"),
    "ReplicationPad3D": lambda w: F.pad(volume(w), (1,) * 6, "replicate"),
    "ReshapeAlias": lambda w: torch.ops.aten._reshape_alias(w, [36], [1]),
    "Roll": lambda w: w.roll(1, 0),
    "Rsub": lambda w: torch.rsub(w, A),
    "Select": lambda w: w.select(0, 1),
    "Slice": lambda w: w[1:4],
    "Split": lambda w: w.split(3)[1],
    "SplitWithSizes": lambda w: w.split([2, 4])[1],
    "Squeeze": lambda w: w.unsqueeze(0).squeeze(0),
    "Stack": lambda w: torch.stack([w, A]),
    "Sub": lambda w: A - w,
    "Sum": lambda w: w.sum(0),
    "T": lambda w: w.t(),
    "Threshold": lambda w: F.threshold(w, 0.3, -2.0),
    "ToCopy": lambda w: torch.ops.aten._to_copy(w, dtype=torch.float32),
    "Transpose": lambda w: w.transpose(0, 1),
    "Unbind": lambda w: w.unbind(0)[1],
    "Unfold": lambda w: w.unfold(0, 2, 1),
    "UnsafeSplit": lambda w: torch.unsafe_split(w, 3)[0],
    "UnsafeView": lambda w: torch.ops.aten._unsafe_view(w, [36]),
    "Unsqueeze": lambda w: w.unsqueeze(0),
    "UpsampleBilinear2D": lambda w: F.interpolate(image(w), scale_factor=2, mode="bilinear"),
    "UpsampleNearest1D": lambda w: F.interpolate(w[None], scale_factor=2),
    "UpsampleNearest2D": lambda w: F.interpolate(image(w), scale_factor=2),
    "UpsampleNearest3D": lambda w: F.interpolate(volume(w), scale_factor=2),
    "View": lambda w: w.view(36),
    "Where": lambda w: torch.where(A > 0, w, A),
}

ONES, ZEROS = torch.ones(6).double(), torch.zeros(6).double()
PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Mul": lambda v, w: v * w,
    "Mm": lambda v, w: v @ w,
    "Bmm": lambda v, w: torch.bmm(v[None], w[None]),
    "Mv": lambda v, w: v @ w[0],
    "Dot": lambda v, w: v[0] @ w[0],
    "Addmm": lambda v, w: torch.addmm(A, v, w),
    "Addmv": lambda v, w: torch.addmv(A[0], v, w[0]),
    "Baddbmm": lambda v, w: torch.baddbmm(A[None], v[None], w[None]),
    "Convolution": lambda v, w: F.conv2d(image(v), image(w)[..., :3, :3]),
    "PreluKernel": lambda v, w: F.prelu(v, w[0, :6]),
    "NativeBatchNorm": lambda v, w: F.batch_norm(v, ZEROS, ONES, w[0], A[0]),
}


def leaf() -> Tensor:
    """Distinct entries, none at a kink of what stands above."""
    generator = torch.Generator().manual_seed(0)
    shuffled = torch.randperm(36, generator=generator).reshape(6, 6)
    return (torch.linspace(-2.13, 2.21, 36, dtype=torch.float64)[shuffled]).requires_grad_()


def node_names(output: Tensor) -> set[str]:
    found, stack = set(), [output.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None:
            found.add(node.name().split("Backward")[0])
            stack += [child for child, _ in node.next_functions]
    return found


def second_difference(function: Callable[[Tensor], Tensor], w: Tensor) -> float:
    """What a small step does beyond the linear, by values alone."""
    w = w.detach()
    step = 1e-3 * torch.randn(w.shape, generator=torch.Generator().manual_seed(1)).to(w)
    values = [function(w + k * step).double() for k in (-1, 0, 1)]
    return float((values[0] - 2 * values[1] + values[2]).abs().max() / 1e-6)


def test_every_known_operation_is_tried() -> None:
    assert set(LINEAR) == _LINEAR
    assert set(PRODUCTS) == _PRODUCTS.keys() - {"CudnnBatchNorm"}  # it takes a GPU


@pytest.mark.parametrize("name", LINEAR)
def test_linear(name: str) -> None:
    w = leaf()
    output = LINEAR[name](w)
    assert name in node_names(output)
    assert second_difference(LINEAR[name], w) < (1e-7 if output.dtype == torch.float64 else 10)
    assert unproven(output, {"w": w}) == set()


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name: str) -> None:
    """Linear in each factor, and not in what both of them hold."""
    v, w = leaf(), leaf()
    output = PRODUCTS[name](v, w)
    assert name in node_names(output)
    assert second_difference(lambda v: PRODUCTS[name](v, w.detach()), v) < 1e-7
    assert second_difference(lambda w: PRODUCTS[name](v.detach(), w), w) < 1e-7
    assert unproven(output, {"v": v, "w": w}) == set()
    both = PRODUCTS[name](v, v)
    assert second_difference(lambda v: PRODUCTS[name](v, v), v) > 1e-2
    assert unproven(both, {"v": v, "w": w}) == {"v"}


class Relu(torch.autograd.Function):
    """A user's function with a known name."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grads[0] * (1 - x.tanh() ** 2)


NOT_PROVEN: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "a user's own": lambda w: Relu.apply(w),
    "below another": lambda w: torch.tanh(A @ w) @ A,
    "size of a complex number": lambda w: (w[:3] + 1j * w[3:]).abs(),
    "denominator": lambda w: A / w,
    "in its own denominator": lambda w: w / w.sum(),
    "statistics of a batch": lambda w: F.batch_norm(w, None, None, ONES, ZEROS, training=True),
    "in place in a part": lambda w: (w * 1).index_add_(0, INDEX[0, :3], A[:3]),
}


@pytest.mark.parametrize("name", NOT_PROVEN)
def test_not_proven(name: str) -> None:
    w = leaf()
    assert unproven(NOT_PROVEN[name](w), {"w": w}) == {"w"}


def test_constants() -> None:
    w = leaf()
    numbers = torch.ops.aten.mul.Scalar(w, 2.0) + torch.ops.aten.div.Scalar(w, 3.0)
    assert unproven(w / 3 + w / A.abs() + w * 2 + numbers, {"w": w}) == set()


def test_only_what_is_below() -> None:
    v, w = leaf(), leaf()
    assert unproven(torch.tanh(A @ v) @ w, {"v": v, "w": w}) == {"v"}


@pytest.mark.parametrize("case", NETWORKS, ids=str)
def test_nothing_is_proven_that_is_not_so(case: Case) -> None:
    model, (x, *_) = case.model().eval(), case.data()
    parameters = dict(model.named_parameters())
    inputs = x if isinstance(x, tuple | list) else (x,)
    raw = model(**x) if isinstance(x, dict) else model(*inputs)
    output = raw if isinstance(raw, Tensor) else raw["logits"]
    doubtful = unproven(output, parameters)
    for name in parameters:
        assert name in doubtful or case.certified(name) is not False, name


@pytest.mark.parametrize(
    "name", ["mlp", "residual in place", "batch norm 2d", "conv2d groups", "mlp PReLU", "branches"]
)
def test_plain_networks_are_proven(name: str) -> None:
    case = BY_NAME[name]
    model, (x, _) = case.model().eval(), case.data()
    assert unproven(model(x), dict(model.named_parameters())) == set()
