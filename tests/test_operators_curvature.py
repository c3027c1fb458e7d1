"""Every operator of PyTorch's own database: what is proved of it, and what is called exact."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from operators import OPERATORS, Sample, real, samples
from torch import Tensor, nn

import saltflat as sf
from saltflat.curvature import proof
from saltflat.curvature.proof import InPlace, prove

N, K, MOST = 4, 3, 8


class Scales(nn.Module):
    """o_i = (x_i ∘ f(parameters)) R: an operator of the database between parameters and data."""

    def __init__(self, sample: Sample) -> None:
        super().__init__()
        self.sample = sample
        self.operands = nn.ParameterList(nn.Parameter(v.clone()) for v in sample.operands())
        generator = torch.Generator().manual_seed(1)
        self.register_buffer("readout", torch.randn(MOST, K, generator=generator).double())
        self.size = 1.0
        self.size = max(1.0, float(self.values().detach().abs().max()))  # no saturated softmax

    def values(self) -> Tensor:
        """Up to eight entries of what the operator gives, spread over all of them."""
        outputs = [real(t) for t in self.sample(list(self.operands))]
        flat = [t.flatten().double() for t in outputs if t.is_floating_point() and t.numel()]
        whole = torch.cat(flat) if flat else torch.zeros(1, dtype=torch.float64)
        chosen = whole[torch.linspace(0, len(whole) - 1, MOST).round().long()]
        return chosen.nan_to_num(0.0, 0.0, 0.0) / self.size

    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(0)  # operators that draw numbers draw the same
        return (x * self.values()) @ self.readout


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(N, MOST, generator=generator).double(), torch.arange(N) % K


def gradients(model: Scales, parameter: Tensor, create_graph: bool = False) -> Tensor | None:
    x, y = data()
    (found,) = torch.autograd.grad(
        F.cross_entropy(model(x), y), parameter, create_graph=create_graph, allow_unused=True
    )
    return found


def block(model: Scales, parameter: nn.Parameter) -> Tensor:
    """A block of the Hessian, by autograd, or by differences of gradients where that has none."""
    try:
        first = gradients(model, parameter, create_graph=True)
        if first is not None and first.requires_grad:
            rows = [
                torch.autograd.grad(entry, parameter, retain_graph=True, allow_unused=True)[0]
                for entry in first.flatten()
            ]
            size = parameter.numel()
            zero = torch.zeros(size, dtype=torch.float64)
            return torch.stack([zero if r is None else r.flatten() for r in rows])
    except RuntimeError:
        pass
    return by_differences(model, parameter)


def by_differences(model: Scales, parameter: nn.Parameter, step: float = 1e-6) -> Tensor:
    columns = []
    flat = parameter.data.view(-1)
    for i in range(len(flat)):
        ends = []
        for signed in (step, -2 * step):
            flat[i] += signed
            found = gradients(model, parameter)
            ends.append(torch.zeros_like(flat) if found is None else found.to_dense().flatten())
        flat[i] += step
        columns.append((ends[0] - ends[1]) / (2 * step))
    return torch.stack(columns, 1)


def by_values(model: Scales, parameter: nn.Parameter, step: float = 1e-4) -> Tensor:
    """The diagonal of a block, by second differences of the loss."""
    x, y = data()
    flat, found = parameter.data.view(-1), []
    for i in range(len(flat)):
        middle, values = flat[i].clone(), []
        for shift in (-step, 0.0, step):
            flat[i] = middle + shift
            values.append(float(F.cross_entropy(model(x), y)))
        flat[i] = middle
        found.append((values[0] - 2 * values[1] + values[2]) / step**2)
    return torch.diag(torch.tensor(found, dtype=torch.float64))


def bend(function: Callable[[], Tensor], parameter: Tensor) -> float:
    """A random second derivative of a function's values, relative to the first."""
    generator = torch.Generator().manual_seed(3)
    values = function()
    cotangent = torch.randn(values.shape, generator=generator).double()
    (first,) = torch.autograd.grad(
        values, parameter, cotangent, create_graph=True, allow_unused=True
    )
    if first is None or not first.requires_grad:
        return 0.0
    direction = torch.randn(first.shape, generator=generator).double()
    (second,) = torch.autograd.grad(first, parameter, direction, allow_unused=True)
    if second is None:
        return 0.0
    return float(second.abs().max()) / max(float(first.detach().abs().max()), 1e-30)


def checked(name: str, count: int) -> set[str]:
    """The operations that were seen in the graphs of an operator's samples."""
    seen = set[str]()
    for sample in samples(name, count):
        try:
            model = Scales(sample)
            outputs = model(data()[0])
        except (RuntimeError, NotImplementedError, AssertionError):  # torch cannot run it so
            continue
        if not outputs.requires_grad or not outputs.isfinite().all():
            continue
        seen |= proved_is_true(name, model, outputs)
        if sum(v.numel() for v in sample.operands()) <= 60:
            exact_is_true(name, model)
    return seen


def proved_is_true(name: str, model: Scales, outputs: Tensor) -> set[str]:
    """No second derivative in what is proved; returns the operations of the graph."""
    parameters = dict(model.named_parameters())

    def writes() -> frozenset[str]:
        with InPlace() as log:
            model(data()[0])
        return frozenset(log.seen)

    found = prove(outputs, parameters, writes)
    for n in found.reached - found.curved.keys():
        with suppress(RuntimeError):  # no second derivative in torch; `block` takes differences
            assert bend(lambda: model(data()[0]), parameters[n]) < 1e-9, (name, n)
    return set(found.trail)


# What these operators cast to: neither autograd's second derivatives nor ours have more digits.
DIGITS = {"bfloat16": torch.bfloat16, "half": torch.float16}


def exact_is_true(name: str, model: Scales) -> None:
    try:
        result = sf.trace(model, data(), estimator=sf.Hutchinson(probes=4))
    except sf.SaltflatError:
        return  # refused: random, not differentiable, not a derivative
    oracle = deepcopy(model)  # without options that change gradients and no values
    oracle.sample = model.sample.having(sparse=False, scale_grad_by_freq=False)
    rounding = torch.finfo(DIGITS[name]).eps if name in DIGITS else 1e-6
    for n, detail in result.details.items():
        parameter = oracle.get_parameter(n)
        if detail.exact and parameter.numel():
            # Torch's own derivatives are not always right; differences decide.
            right = agree(detail.value, block(oracle, parameter), rounding)
            assert right or agree(detail.value, by_values(oracle, parameter), 1e-4), (name, n)


def agree(value: float, truth: Tensor, tolerance: float = 1e-6) -> bool:
    return abs(value - float(truth.trace())) <= tolerance * (float(truth.abs().max()) + 1e-2)


# Linear in pieces, linear in some operands, and not at all; views, writes, complex numbers.
SLICE = [
    "abs", "addcdiv", "addcmul", "addmm", "as_strided", "bmm", "cat", "clamp", "complex",
    "copysign",
    "cummax", "cumsum", "diag_embed", "div.no_rounding_mode", "einsum", "exp", "fft.fft",
    "fft.irfft", "gather", "grid_sampler_2d", "index_add", "index_put", "index_reduce.amax",
    "index_reduce.prod", "kthvalue", "lerp", "linalg.solve", "linalg.vector_norm", "logsumexp",
    "masked_fill", "masked_scatter", "matmul", "maximum", "median", "mul",
    "nn.functional.adaptive_max_pool2d", "nn.functional.batch_norm", "nn.functional.bilinear",
    "nn.functional.conv2d", "nn.functional.gelu", "nn.functional.group_norm",
    "nn.functional.hardshrink", "nn.functional.hardswish", "nn.functional.layer_norm",
    "nn.functional.pad.circular", "nn.functional.prelu", "nn.functional.rms_norm",
    "nn.functional.rrelu", "nn.functional.silu", "nn.functional.softplus", "polar", "pow", "prod",
    "remainder", "renorm", "scatter_add", "scatter_reduce.mean", "sgn", "sort", "std", "tanh",
    "topk", "tril", "unfold", "where",
]  # fmt: skip


@pytest.mark.parametrize("name", SLICE)
def test_a_slice_of_the_operators(name: str) -> None:
    checked(name, 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_every_operator(name: str) -> None:
    checked(name, 12)


# Nodes that operators of the database do not make here: those of other devices, and forms that
# torch 2.13 takes apart on a CPU.
ELSEWHERE = {
    "BatchNormWithUpdate", "ConvDepthwise2D", "ConvDepthwise3D", "ConvTbc",
    "ConvolutionOverrideable", "CudnnBatchNorm", "CudnnConvolution",
    "CudnnConvolutionTranspose", "CudnnGridSampler", "FusedRmsNorm", "LiftFresh", "Linear",
    "MaxPool2D", "MiopenBatchNorm", "MiopenConvolution", "MiopenConvolutionTranspose",
    "MiopenDepthwiseConvolution", "MkldnnAdaptiveAvgPool2D", "MkldnnConvolution",
    "MkldnnLinear", "MkldnnMaxPool2D", "MkldnnMaxPool3D", "MpsConvolution",
    "MpsConvolutionTranspose", "MpsMaxPool2D", "NativeChannelShuffle", "NativeDropout",
    "SlowConv2D", "SlowConv3D", "SlowConvDilated2D", "SlowConvDilated3D", "SlowConvTranspose2D",
    "SlowConvTranspose3D", "SparseMm", "SparseSampledAddmm", "ThnnConv2D", "UnsafeIndex",
    "UnsafeIndexPut",
}  # fmt: skip


@pytest.mark.slow
def test_every_verdict_is_tried() -> None:
    """Each operation that is called linear in something was seen in a graph that was checked."""
    from test_proof import LINEAR, PRODUCTS

    seen = set[str]().union(*(checked(name, 12) for name in OPERATORS))
    known = proof._LINEAR | proof._PRODUCTS.keys() | proof._CONDITIONAL.keys()
    assert known - seen - LINEAR.keys() - PRODUCTS.keys() - ELSEWHERE == set()
