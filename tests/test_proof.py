"""Proofs that are read off the graph: every known operation is what it is taken for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import BY_NAME, NETWORKS, Case
from torch import Tensor

import saltflat as sf
from saltflat.curvature import proof
from saltflat.curvature.proof import InPlace, Proof, prove

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
    "AffineGridGenerator": lambda w: F.affine_grid(
        w[:1].reshape(1, 2, 3), [1, 1, 3, 3], align_corners=False
    ),
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
    "Col2Im": lambda w: F.fold(w[:4, :4].reshape(1, 4, 4), 3, 2),
    "ConstantPadNd": lambda w: F.pad(w, (1, 1)),
    "Embedding": lambda w: F.embedding(INDEX, w),
    "Expand": lambda w: w.expand(2, 6, 6),
    "Flip": lambda w: w.flip(0),
    "Gather": lambda w: w.gather(1, INDEX),
    "Hardtanh": F.hardtanh,
    "Im2Col": lambda w: F.unfold(image(w), 2),
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
    "ToDense": lambda w: w.to_sparse().to_dense(),
    "ToSparse": lambda w: w.to_sparse().to_dense(),
    "ToCopy": lambda w: torch.ops.aten._to_copy(w, dtype=torch.float32),
    "Transpose": lambda w: w.transpose(0, 1),
    "Unbind": lambda w: w.unbind(0)[1],
    "Unfold": lambda w: w.unfold(0, 2, 1),
    "UnsafeSplit": lambda w: torch.unsafe_split(w, 3)[0],
    "UnsafeSplitWithSizes": lambda w: torch.unsafe_split_with_sizes(w, [2, 4])[1],
    "UnsafeView": lambda w: torch.ops.aten._unsafe_view(w, [36]),
    "Unsqueeze": lambda w: w.unsqueeze(0),
    "UpsampleBicubic2DAa": lambda w: F.interpolate(
        image(w), scale_factor=0.5, mode="bicubic", antialias=True
    ),
    "UpsampleNearestExact3D": lambda w: F.interpolate(
        volume(w), scale_factor=2, mode="nearest-exact"
    ),
    "UpsampleBilinear2D": lambda w: F.interpolate(image(w), scale_factor=2, mode="bilinear"),
    "UpsampleNearest1D": lambda w: F.interpolate(w[None], scale_factor=2),
    "UpsampleNearest2D": lambda w: F.interpolate(image(w), scale_factor=2),
    "UpsampleNearest3D": lambda w: F.interpolate(volume(w), scale_factor=2),
    "Values": lambda w: w.to_sparse().coalesce().values(),
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
    "NativeBatchNormLegit": lambda v, w: torch.ops.aten._native_batch_norm_legit(
        v, w[0], A[0], ZEROS, ONES, False, 0.1, 1e-5
    )[0],
    "SparseAddmm": lambda v, w: torch.sparse.mm(v.to_sparse(), w),
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


def proved(function: Callable[[], Tensor], parameters: Mapping[str, Tensor]) -> Proof:
    def writes() -> frozenset[str]:
        with InPlace() as log:
            function()
        return frozenset(log.seen)

    return prove(function(), parameters, writes)


def curved(function: Callable[[], Tensor], parameters: Mapping[str, Tensor]) -> set[str]:
    return set(proved(function, parameters).curved)


@pytest.mark.parametrize("name", LINEAR)
def test_linear(name: str) -> None:
    w = leaf()
    output = LINEAR[name](w)
    assert name in node_names(output)
    assert second_difference(LINEAR[name], w) < (1e-7 if output.dtype == torch.float64 else 10)
    assert curved(lambda: LINEAR[name](w), {"w": w}) == set()


LISTS: dict[str, Callable[[list[Tensor]], Any]] = {
    "foreach": torch._foreach_exp_,
    "foreach, out of order": lambda parts: torch._foreach_mul_(parts, parts),
    "out": lambda parts: torch.sin(parts[0].detach(), out=parts[0].detach()),
}


@pytest.mark.parametrize("name", LISTS)
def test_writes_to_lists_are_noted(name: str) -> None:
    w = torch.rand(4, 2, dtype=torch.float64)
    with InPlace() as log:
        LISTS[name]([w[:, 0]])
    assert log.seen - proof._LINEAR


def test_lists_of_views_are_curved() -> None:
    w = leaf()

    def function() -> Tensor:
        h = w * 2
        torch._foreach_exp_([h[:, 0]])
        return h

    assert curved(function, {"w": w}) == {"w"}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name: str) -> None:
    """Linear in each factor, and not in what both of them hold."""
    v, w = leaf(), leaf()
    output = PRODUCTS[name](v, w)
    assert name in node_names(output)
    assert second_difference(lambda v: PRODUCTS[name](v, w.detach()), v) < 1e-7
    assert second_difference(lambda w: PRODUCTS[name](v.detach(), w), w) < 1e-7
    assert curved(lambda: PRODUCTS[name](v, w), {"v": v, "w": w}) == set()
    assert second_difference(lambda v: PRODUCTS[name](v, v), v) > 1e-2
    assert curved(lambda: PRODUCTS[name](v, v), {"v": v, "w": w}) == {"v"}


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


def part_of(function: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    """A function that writes into a part of a tensor, which hides it from the graph."""

    def whole(w: Tensor) -> Tensor:
        h = w * 1
        function(h[:, 0])
        return h

    return whole


NOT_PROVEN: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "a user's own": lambda w: Relu.apply(w),
    "below another": lambda w: torch.tanh(A @ w) @ A,
    "size of a complex number": lambda w: (w[:3] + 1j * w[3:]).abs(),
    "phase of a complex number": lambda w: torch.sgn(w[:3] + 1j * w[3:]).real,
    "length of a complex vector": lambda w: torch.linalg.vector_norm(w[:3] + 1j * w[3:], 1, 0),
    "denominator": lambda w: A / w,
    "in its own denominator": lambda w: w / w.sum(),
    "statistics of a batch": lambda w: F.batch_norm(w, None, None, ONES, ZEROS, training=True),
    "statistics that are updated": lambda w: torch.ops.aten._batch_norm_with_update(
        w, ONES, ZEROS, ZEROS.clone(), ONES.clone(), 0.1, 1e-5
    )[0],
    "sine in a part": part_of(lambda h: h.sin_()),
    "square in a part": part_of(lambda h: h.mul_(h.clone())),
    "product of all": lambda w: w.prod(0),
    "largest product": lambda w: w.scatter_reduce(0, INDEX, w, "prod"),
    "euclidean length": lambda w: torch.linalg.vector_norm(w, 2, 0),
    "square": lambda w: w**2,
    "interpolated by itself": lambda w: torch.lerp(w, A, w),
    "normalised": lambda w: F.layer_norm(w, (6,)),
    "its own place": lambda w: F.grid_sample(
        image(w), w.reshape(1, 9, 2, 2).tanh(), align_corners=False
    ),
    "random slopes": lambda w: F.rrelu(w, training=True) * w,
}


@pytest.mark.parametrize("name", NOT_PROVEN)
def test_not_proven(name: str) -> None:
    w = leaf()
    assert curved(lambda: NOT_PROVEN[name](w), {"w": w}) == {"w"}


PROVEN: dict[str, Callable[[Tensor], Tensor]] = {
    "rows added in place": lambda w: (w * 1).index_add_(0, INDEX[0, :3], A[:3]),
    "a part that is set": part_of(lambda h: h.fill_(2.0)),
    "a part that is cut off": part_of(lambda h: h.relu_()),
    "a part that is scaled": part_of(lambda h: h.mul_(A[0])),
    "circular padding": lambda w: F.pad(image(w), (1, 1, 1, 1), "circular"),
    "a sum of sizes": lambda w: torch.linalg.vector_norm(w, 1, 0),
    "the largest size": lambda w: torch.linalg.vector_norm(w, float("inf"), 0),
    "sizes": torch.abs,
    "first power": lambda w: w**1,
    "scattered maxima": lambda w: w.scatter_reduce(0, INDEX, w, "amax"),
    "random slopes in evaluation": lambda w: F.rrelu(w, training=False),
    "rounded quotient": lambda w: torch.div(w, 7 * A, rounding_mode="trunc") + w,
    "Fourier": lambda w: torch.fft.fft2(w).real,
    "shrinkage": F.softshrink,
    "sorted": lambda w: w.sort(0).values,
    "running sum": lambda w: w.cumsum(0),
    "folded": lambda w: F.fold(w[:4, :4].reshape(1, 4, 4), 3, 2),
    "cubic interpolation": lambda w: F.interpolate(image(w), scale_factor=2.0, mode="bicubic"),
}


@pytest.mark.parametrize("name", PROVEN)
def test_proven(name: str) -> None:
    w = leaf()
    assert curved(lambda: PROVEN[name](w), {"w": w}) == set()
    assert second_difference(PROVEN[name], w) < 1e-7


def test_a_norm_is_curved_in_what_it_normalises_alone() -> None:
    x, gain, bias = leaf(), leaf(), leaf()
    named = {"x": x, "gain": gain, "bias": bias}
    assert curved(lambda: F.layer_norm(x, (6,), gain[0], bias[0]), named) == {"x"}
    assert curved(lambda: F.group_norm(x, 2, gain[0], bias[0]), named) == {"x"}
    assert curved(lambda: F.rms_norm(x, (6,), gain[0]), named) == {"x"}
    # A gain that is made of the input too is curved with it.
    assert curved(lambda: F.layer_norm(x, (6,), x[0], bias[0]), named) == {"x"}
    assert curved(lambda: F.layer_norm(A, (6,), gain[0], bias[0]), named) == set()


def test_operands_of_one_operation() -> None:
    v, w, u = leaf(), leaf(), leaf()
    named = {"v": v, "w": w, "u": u}
    places = w.reshape(1, 9, 2, 2)
    assert curved(lambda: torch.lerp(v, w, u), named) == set()
    assert curved(lambda: torch.lerp(v, w, v), named) == {"v"}
    assert curved(lambda: torch.addcmul(v, v, w), named) == set()
    assert curved(lambda: torch.addcmul(v, w, w), named) == {"w"}
    assert curved(lambda: torch.addcdiv(v, w, u.abs() + 1), named) == {"u"}
    assert curved(lambda: F.bilinear(v, w, u.reshape(1, 6, 6)), named) == set()
    assert curved(lambda: F.bilinear(v, v, u.reshape(1, 6, 6)), named) == {"v"}
    assert curved(lambda: F.grid_sample(image(v), places, align_corners=False), named) == {"w"}


def test_constants() -> None:
    w = leaf()
    numbers = torch.ops.aten.mul.Scalar(w, 2.0) + torch.ops.aten.div.Scalar(w, 3.0)
    assert curved(lambda: w / 3 + w / A.abs() + w * 2 + numbers, {"w": w}) == set()


def test_only_what_is_below() -> None:
    v, w = leaf(), leaf()
    found = proved(lambda: torch.tanh(A @ v) @ w, {"v": v, "w": w, "other": leaf()})
    assert dict(found.curved) == {"v": "Tanh"}
    assert found.reached == {"v", "w"}


class Bent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


@torch.library.custom_op("saltflat_tests::half", mutates_args=())
def half(x: Tensor) -> Tensor:
    return x / 2


half.register_autograd(lambda ctx, grad: grad / 2)


@pytest.mark.parametrize(("function", "call"), [(Bent, Bent.apply), (half, half)])
def test_what_a_user_declares(function: Any, call: Callable[[Tensor], Tensor], monkeypatch) -> None:
    monkeypatch.setattr(proof, "_declared", {})
    w = leaf()
    assert curved(lambda: call(w), {"w": w}) == {"w"}
    assert sf.piecewise_linear(function) is function
    found = proved(lambda: call(w), {"w": w})
    assert not found.curved
    assert set(found.given) == {"w"}
    assert proved(lambda: call(w).tanh(), {"w": w}).curved


@pytest.mark.parametrize("wrong", [torch.relu, "Relu", object])
def test_only_functions_can_be_declared(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"torch\.autograd\.Function"):
        sf.piecewise_linear(wrong)


ROWS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "pointwise": (lambda w: w.relu() + A, True),
    "matrix product": (lambda w: w @ A, True),
    "from the left": (lambda w: A @ w, False),
    "flattened and back": (lambda w: w.reshape(6, 2, 3).reshape(18, 2).reshape(6, 6), True),
    "rows as columns": (lambda w: w.T, False),
    "columns of each row": (lambda w: w.reshape(6, 2, 3).transpose(1, 2).flatten(1), True),
    "a sum over a row": (lambda w: w + w.sum(1, keepdim=True), True),
    "a sum over rows": (lambda w: w + w.sum(0, keepdim=True), False),
    "running over rows": (lambda w: w.cumsum(0), False),
    "running in a row": (lambda w: w.cumsum(1), True),
    "rolled rows": (lambda w: w.roll(1, 0), False),
    "rolled flat": (lambda w: w.roll(1), False),
    "flipped in a row": (lambda w: w.flip(1), True),
    "picked rows": (lambda w: w[[1, 0, 2, 3, 4, 5]], False),
    "rows in two parts": (lambda w: torch.cat([w[3:], w[:3]]), False),
    "two parts of each row": (lambda w: torch.cat([w[:, 3:], w[:, :3]], 1), True),
    "batch statistics": (lambda w: F.batch_norm(w, None, None, training=True), False),
    "running statistics": (lambda w: F.batch_norm(w, ZEROS, ONES), True),
    "layer norm": (lambda w: F.layer_norm(w, (6,)), True),
    "layer norm of all": (lambda w: F.layer_norm(w, (6, 6)), False),
    "softmax of a row": (lambda w: w.softmax(1), True),
    "softmax over rows": (lambda w: w.softmax(0), False),
    "safe softmax of a row": (lambda w: torch.ops.aten._safe_softmax(w, -1), True),
    "safe softmax over rows": (lambda w: torch.ops.aten._safe_softmax(w, 0), False),
    "alias": (lambda w: torch.ops.aten.alias(w), True),
    "padded": (lambda w: F.pad(w, (1, 1)), True),
    "padded rows": (lambda w: F.pad(w, (0, 0, 1, -1)), False),
    "convolution": (lambda w: F.conv1d(w[:, None], A[:1, None, :3]), True),
    "convolution over time": (
        lambda w: torch.conv_tbc(w[:, None], A.expand(3, 6, 6), ZEROS, 1)[:, 0],
        False,
    ),
    "convolution over rows": (lambda w: F.conv1d(w.T[None], A[:, :, None])[0].T, False),
    "pooled, channels last": (
        lambda w: F.adaptive_avg_pool2d(
            w.reshape(6, 2, 1, 3).contiguous(memory_format=torch.channels_last), 1
        ).flatten(1),
        True,
    ),
    "rows by strides": (lambda w: w.as_strided((6, 6), (1, 6)), False),
    "turned and turned back": (lambda w: w.T.relu().T, True),
    "queries, keys, values": (
        lambda w: torch.stack(list(w.reshape(6, 1, 3, 2).permute(2, 0, 1, 3)), 1).sum(1),
        True,
    ),
    "selected from the end": (lambda w: w.reshape(6, 3, 2).movedim(1, 0)[-1], True),
    "the wrong third": (lambda w: w.reshape(3, 2, 6).movedim(1, 0).reshape(6, 6), False),
    "turned in another way": (lambda w: w.reshape(6, 2, 3).transpose(0, 1).reshape(6, 6), False),
    "both ways": (lambda w: w + w.T, False),
    "columns cut": (lambda w: w.T.reshape(2, 3, 6).flatten(0, 1).T, True),
    "columns of two": (lambda w: w.T.reshape(12, 3).reshape(6, 6).T, False),
    "the last first, of three": (lambda w: w[:, None].permute(-1, 0, 1).flatten(1), False),
    "the last first, of five": (lambda w: w[:, None, None, None].permute(-1, 0, 1, 2, 3), False),
    "the last back, of three": (lambda w: w[:, None].permute(0, -1, 1).flatten(1), True),
    "rows for every product": (
        lambda w: torch.baddbmm(w, A.expand(6, 6, 6), A.expand(6, 6, 6)),
        False,
    ),
    "scattered": (lambda w: torch.zeros_like(w).scatter_add(0, INDEX, w), False),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows(name: str) -> None:
    """What is said to keep its rows does; and what honest networks do is seen to."""
    function, keeps = ROWS[name]
    z = (leaf() * 1).detach().requires_grad_()
    middle = z * 1
    outputs = function(middle)
    found = prove(outputs, {"z": z}, frozenset)
    assert found.keeps_rows(middle.grad_fn) is keeps
    for i in range(6):
        cotangent = torch.zeros_like(outputs)
        cotangent[i] = torch.randn(outputs.shape[1:], generator=torch.Generator().manual_seed(i))
        (gradient,) = torch.autograd.grad(outputs, z, cotangent, retain_graph=True)
        others = torch.arange(6) != i
        assert not keeps or not gradient[others].any()


@pytest.mark.parametrize("case", NETWORKS, ids=str)
def test_nothing_is_proven_that_is_not_so(case: Case) -> None:
    model, (x, *_) = case.model().eval(), case.data()
    parameters = dict(model.named_parameters())
    inputs = x if isinstance(x, tuple | list) else (x,)

    def output() -> Tensor:
        raw = model(**x) if isinstance(x, dict) else model(*inputs)
        return raw if isinstance(raw, Tensor) else raw["logits"]

    doubtful = curved(output, parameters)
    for name in parameters:
        assert name in doubtful or case.certified(name) is not False, name


@pytest.mark.parametrize(
    "name", ["mlp", "residual in place", "batch norm 2d", "conv2d groups", "mlp PReLU", "branches"]
)
def test_plain_networks_are_proven(name: str) -> None:
    case = BY_NAME[name]
    model, (x, _) = case.model().eval(), case.data()
    assert curved(lambda: model(x), dict(model.named_parameters())) == set()
