"""Backward passes that are not the derivative of the forward pass are refused; honest ones not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import networks as net
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import saltflat as sf
from saltflat import zoo
from saltflat.curvature import derivative


class Between(nn.Module):
    """Two layers with something between them."""

    def __init__(self, between: Callable[[Tensor], Tensor], width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.fc = nn.Linear(4, width), nn.Linear(width, 3)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fc(self.between(self.body(x).relu()))
        return result


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return -grads[0]


def hooked(h: Tensor) -> Tensor:
    h = h * 1.0
    if h.requires_grad:
        h.register_hook(lambda g: 2 * g)
    return h


def data(dtype: torch.dtype = torch.float32, n: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, 4, generator=generator).to(dtype), torch.arange(n) % 3


WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "straight through": lambda h: h + ((h * 4).round() / 4 - h).detach(),
    "reversed": Reversal.apply,
    "a hook on an activation": hooked,
    "detached size": lambda h: h / h.norm(dim=1, keepdim=True).detach().clamp(min=1e-3),
    "half of it detached": lambda h: 0.5 * h + 0.5 * h.detach(),
}
ENTRIES: list[Callable[..., Any]] = [sf.trace, sf.diagonal, sf.max_eigenvalue, sf.measure]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", WRONG)
def test_refused(name: str, dtype: torch.dtype) -> None:
    model = Between(WRONG[name]).to(dtype)
    with pytest.raises(sf.ModelError, match="not the derivative") as caught:
        sf.trace(model, data(dtype))
    assert "body.weight" in str(caught.value)
    assert "fc.weight" not in str(caught.value)


@pytest.mark.parametrize("entry", ENTRIES)
def test_refused_everywhere(entry: Callable[..., Any]) -> None:
    with pytest.raises(sf.ModelError, match="not the derivative"):
        entry(Between(WRONG["straight through"]), data())


class Interleaved(nn.Module):
    """Every other unit of a wide layer without bias is detached."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.fc = nn.Linear(4, 8192, bias=False), nn.Linear(8192, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x).relu()
        result: Tensor = self.fc(torch.where(torch.arange(8192) % 2 == 0, h, h.detach()))
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_rows_of_large_parameters(dtype: torch.dtype) -> None:
    """Some rows are moved at first: even and odd ones."""
    with pytest.raises(sf.ModelError, match="not the derivative"):
        sf.trace(Interleaved().to(dtype), data(dtype))


class Rows(nn.Module):
    """An embedding of six rows, one of which is detached in part."""

    def __init__(self, row: int, share: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.fc, self.row, self.share = nn.Embedding(6, 4), nn.Linear(4, 3), row, share

    def forward(self, x: Tensor) -> Tensor:
        h = self.table(x)
        part = (1 - self.share) * h + self.share * h.detach()
        result: Tensor = self.fc(torch.where((x == self.row)[:, None], part, h))
        return result


def test_a_part_of_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundredth of one row of six adds little to a slope; the second derivative is off all the
    same. With a tolerance of 1e-3 it is not seen."""
    x, y = torch.arange(8) % 6, torch.arange(8) % 3
    assert sf.trace(Rows(0, 0.0).double(), (x, y)).exact
    for row in range(6):
        with pytest.raises(sf.ModelError, match=r"along table\.weight"):
            sf.trace(Rows(row, 0.01).double(), (x, y))
    monkeypatch.setattr(derivative, "_FINE", replace(derivative._FINE, tolerance=1e-3))
    unseen = []
    for row in range(6):
        with suppress(sf.ModelError):
            unseen.append(sf.trace(Rows(row, 0.01).double(), (x, y)))
    assert unseen


class Asleep(nn.Module):
    """Most parameters have no gradient: branches behind a gain of zero, as many networks start."""

    def __init__(self, how: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.fc, self.how = nn.Linear(4, 8), nn.Linear(8, 3), how
        self.branches = nn.ModuleList(nn.Linear(4, 8) for _ in range(5))
        self.gain = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        branches = sum(branch(x) for branch in self.branches)
        result: Tensor = self.fc((self.how(h) + self.gain * branches).relu())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_where_most_parameters_have_no_gradient(dtype: torch.dtype) -> None:
    wrong = Asleep(lambda h: h + (3 * h.sin() - h).detach()).to(dtype)
    with pytest.raises(sf.ModelError, match=r"along body\.weight"):
        sf.trace(wrong, data(dtype))
    assert sf.trace(Asleep(lambda h: 3 * h).to(dtype), data(dtype)).exact


class ZeroHead(nn.Module):
    """A layer that starts with zeros, its weight changed on the way of its gradient alone."""

    def __init__(self, wrong: Callable[[Tensor], Tensor], above: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.fc = nn.Linear(4, 10), nn.Linear(10, 10 if above else 3)
        self.above = nn.Linear(10, 3) if above else nn.Identity()
        nn.init.zeros_(self.fc.weight)
        self.wrong = wrong

    def forward(self, x: Tensor) -> Tensor:
        weight = self.wrong(self.fc.weight)
        result: Tensor = self.above(F.linear(self.body(x).relu(), weight, self.fc.bias))
        return result


@pytest.mark.parametrize("above", [False, True])
@pytest.mark.parametrize("share", [0.05, 0.5, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_of_weights_that_are_zero(dtype: torch.dtype, share: float, above: bool) -> None:
    """Their slopes are small, and no less wrong."""
    sf.trace(ZeroHead(lambda w: w, above).to(dtype), data(dtype))  # nothing is wrong
    wrong = ZeroHead(lambda w: (1 - share) * w + share * w.detach(), above).to(dtype)
    with pytest.raises(sf.ModelError, match=r"not the derivative.*fc\.weight"):
        sf.trace(wrong, data(dtype))


def test_gradients_that_are_not_numbers() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.zero = nn.Linear(4, 3), nn.Parameter(torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.fc(x) + self.zero.square().sum().sqrt()
            return result

    with pytest.raises(sf.ModelError, match="gradient of the outputs in zero is NaN"):
        sf.trace(Root(), data())
    sf.trace(Root(), data(), parameters=["fc.weight"])


def test_what_is_below_may_be_left_out() -> None:
    """The parameters above are differentiated rightly."""
    model = Between(WRONG["reversed"])
    assert sf.trace(model, data(), parameters=["fc.weight", "fc.bias"]).exact


class Detached(nn.Module):
    """A body that is run without gradients, as people freeze a backbone."""

    def __init__(self, how: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.fc, self.how = nn.Linear(4, 8), nn.Linear(8, 3), how
        self.spare = nn.Linear(2, 2)  # has no effect at all

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fc(self.how(self.body, x).relu())
        return result


def silently(body: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return body(x)


UNREACHED: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "no_grad": silently,
    "detach": lambda body, x: body(x).detach(),
    "reentrant": lambda body, x: checkpoint(body, x, use_reentrant=True),
}


@pytest.mark.parametrize("name", UNREACHED)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_parameters_that_autograd_does_not_reach(name: str) -> None:
    model = Detached(UNREACHED[name])
    with pytest.raises(sf.ModelError, match="autograd does not reach") as caught:
        sf.trace(model, data())
    assert "body.weight, body.bias" in str(caught.value)
    assert "spare" not in str(caught.value)
    for p in model.body.parameters():
        p.requires_grad_(False)
    found = sf.trace(model, data())
    assert found.exact
    assert found.details["spare.weight"].reason == "no effect on outputs"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["no_grad", "detach"])
def test_unreached_parameters_that_float32_does_not_show(name: str, dtype: torch.dtype) -> None:
    """They are too small to move outputs by more than rounding, and their slopes are not."""
    model = Detached(UNREACHED[name]).to(dtype)
    with torch.no_grad():
        for p in model.body.parameters():
            p.mul_(1e-9)
    with pytest.raises(sf.ModelError, match="autograd does not reach") as caught:
        sf.trace(model, data(dtype))
    assert "body.weight, body.bias" in str(caught.value)
    assert "spare" not in str(caught.value)
    assert {p.dtype for p in model.parameters()} == {dtype}


def test_reentrant_checkpointing_in_the_middle() -> None:
    model = Between(lambda h: checkpoint(torch.tanh, h, use_reentrant=True))
    with pytest.raises(sf.ModelError, match="use_reentrant=False"):
        sf.trace(model, data())
    assert sf.trace(Between(lambda h: checkpoint(F.relu, h, use_reentrant=False)), data()).exact


# Honest ones: ties, saturation, zeros, tiny and huge scales, discontinuities.


def zero_bias_cnn() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, 3))
    for module in model:
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.zeros_(module.bias)
    return model


def background(n: int = 6) -> tuple[Tensor, Tensor]:
    images = torch.zeros(n, 1, 10, 10)
    images[:, :, 4:6, 4:6] = torch.rand(n, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    return images, torch.arange(n) % 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_ties_at_the_start_are_accepted(dtype: torch.dtype) -> None:
    """A constant background and no bias: ReLU and maxima sit at their kinks."""
    x, y = background()
    assert sf.trace(zero_bias_cnn().to(dtype), (x.to(dtype), y)).exact


def zeros_at_the_end() -> nn.Module:
    model = net.mlp()
    nn.init.zeros_(model[-1].weight)
    nn.init.zeros_(model[-1].bias)
    return model.float()


HONEST: dict[str, Callable[[], nn.Module]] = {
    "last layer zero": zeros_at_the_end,
    "dead": lambda: Between(lambda h: h * 0),
    "hard gate": lambda: Between(lambda h: h * (h > 0.5)),
    "clamped": lambda: Between(lambda h: h.clamp(-0.1, 0.1)),
    "tiny": lambda: Between(lambda h: h * 1e-12),
    "huge": lambda: Between(lambda h: h * 1e12),
    "far from zero": lambda: Between(lambda h: h + 1e4),
    "rounded": lambda: Between(torch.round),
    "tanh": lambda: Between(torch.tanh),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", HONEST)
def test_accepted(name: str, dtype: torch.dtype) -> None:
    sf.trace(HONEST[name]().to(dtype), data(dtype), estimator=sf.Hutchinson(probes=4))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("spread", [100.0, 1000.0])
def test_rescaled_networks_are_taken(dtype: torch.dtype, spread: float) -> None:
    """Small steps along the gradients of units that were scaled down are large for them."""
    torch.manual_seed(0)
    widths = nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4)
    model = nn.Sequential(*widths).double()
    x, y = torch.randn(128, 16).double(), torch.arange(128) % 4
    group = sf.symmetries(model, x[:4])
    before = sf.trace(model, (x, y))
    for seed in range(4):
        twin = group.random(seed=seed, spread=spread)(model).to(dtype)
        assert sf.trace(twin, (x.to(dtype), y)).total > 10 * before.total
        rounds = nn.Sequential(*twin[:3], Through(), *twin[3:])
        with pytest.raises(sf.ModelError, match="not the derivative"):
            sf.trace(rounds, (x.to(dtype), y))


class Through(nn.Module):
    """Larger in the forward pass alone."""

    def forward(self, x: Tensor) -> Tensor:
        return x + (x * 0.3).detach()


class Deep(nn.Sequential):
    """So many layers that gradients vanish, with something before the last."""

    def __init__(self, last: nn.Module) -> None:
        torch.manual_seed(0)
        layers = (each for _ in range(32) for each in (nn.Linear(64, 64), nn.ReLU()))
        super().__init__(*layers, last, nn.Linear(64, 3))


def test_vanishing_gradients_take_a_larger_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the smallest one there is but rounding; samples need not be asked two by two for that."""
    torch.manual_seed(1)
    x, y = torch.randn(12, 64), torch.arange(12) % 3
    asked = []
    slope = derivative._Question.slope

    def counted(self: Any, *args: Any) -> float:
        asked.append((self.batch.size, self.how.steps[0]))
        return slope(self, *args)

    monkeypatch.setattr(derivative._Question, "slope", counted)
    assert sf.trace(Deep(nn.Identity()), (x, y)).exact
    assert {size for size, _ in asked} == {12}
    assert asked[-1][1] == 1e-6
    with pytest.raises(sf.ModelError, match="not the derivative"):
        sf.trace(Deep(Through()), (x, y))


class Multiplied(torch.autograd.Function):
    """The identity, its gradients multiplied."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.factor, None


class Small(nn.Module):
    """One parameter is far smaller than the others, and its gradients may be multiplied."""

    def __init__(self, use: str, size: float, factor: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.branch, self.fc = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.small = nn.Parameter(size * torch.randn(8))
        self.use, self.factor = USES[use], factor

    def forward(self, x: Tensor) -> Tensor:
        wrong = self.factor != 1.0
        small = Multiplied.apply(self.small, self.factor) if wrong else self.small
        result: Tensor = self.fc(self.use(self, self.body(x).relu(), small))
        return result


USES: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "bias": lambda model, h, small: (h + small).relu(),
    "scale of a branch": lambda model, h, small: h + small * model.branch(h),
    "with kinks of its own": lambda model, h, small: h + (small * (h[:, :1] - 0.3)).relu(),
}


@pytest.mark.parametrize("size", [1e-3, 1e-5, 1e-7, 1e-9])
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_of_a_parameter_that_is_small_beside_the_others(
    dtype: torch.dtype, use: str, size: float
) -> None:
    """Its slope is as small, and no less wrong."""
    sf.trace(Small(use, size, 1.0).to(dtype), data(dtype), curvature="ggn")  # nothing is wrong
    for factor in (1.5, 3.0, 10.0, -1.0):
        with pytest.raises(sf.ModelError, match=r"not the derivative.*along small"):
            sf.trace(Small(use, size, factor).to(dtype), data(dtype), curvature="ggn")


@pytest.mark.parametrize("size", [1e-5, 1e-9])
def test_of_a_parameter_whose_gradient_is_small(size: float) -> None:
    """A branch that hardly counts; in float32 that is the size of what rounding leaves."""
    model = Small("scale of a branch", size, 1.0).double()
    assert sf.trace(model, data(torch.float64)).exact
    model.branch = Wrong(8, 8).double()
    with pytest.raises(sf.ModelError, match=r"not the derivative.*along branch\.weight"):
        sf.trace(model, data(torch.float64))


class Wrong(nn.Linear):
    """Its slopes in the weight are too large."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, Multiplied.apply(self.weight, 1.5), self.bias)


def test_float64_takes_the_smallest_step_too() -> None:
    """Of a million ReLUs some change sides at every larger one."""
    torch.manual_seed(0)
    model = zoo.wide_resnet16_4().double().eval()
    x = torch.randn(2, 3, 32, 32).double()
    assert sf.trace(model, (x, torch.arange(2))).exact


class Narrow(nn.Module):
    """Layers that are curved at small steps, their norms in float32 or whatever `norm` makes them;
    the gradient of one weight may be multiplied."""

    def __init__(
        self,
        scale: float,
        factor: float = 1.0,
        norm: Callable[[Tensor], Tensor] = Tensor.float,
        last: Callable[[Tensor], Tensor] = lambda h: h,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.fc = nn.Linear(4, 8), nn.Linear(8, 3)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))
        self.factor, self.norm, self.last = factor, norm, last
        with torch.no_grad():
            for p in self.parameters():
                p.mul_(scale)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        for k, layer in enumerate(self.layers):
            wrong = k == 1 and self.factor != 1.0
            weight = Multiplied.apply(layer.weight, self.factor) if wrong else layer.weight
            narrow = self.norm(h)
            narrow = narrow * (narrow.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
            h = torch.tanh(F.linear(narrow.to(h.dtype), weight, layer.bias))
        result: Tensor = self.fc(self.last(h))
        return result


@pytest.mark.parametrize("factor", [1.1, 3.0, -1.0])
@pytest.mark.parametrize("scale", [1.0, 3.0, 10.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_models_that_cast_to_float32(dtype: torch.dtype, scale: float, factor: float) -> None:
    """Asked in float64 they are answered in float64, at steps as small as others'."""
    assert sf.trace(Narrow(scale).to(dtype), data(dtype), curvature="ggn").exact
    with pytest.raises(sf.ModelError, match="not the derivative") as caught:
        sf.trace(Narrow(scale, factor).to(dtype), data(dtype), curvature="ggn")
    assert str(caught.value).count("along ") == 1
    assert "along layers.1.weight" in str(caught.value)


def aside(h: Tensor) -> Tensor:
    with torch.no_grad():
        return h.clone()


@pytest.mark.parametrize("share", [1e-3, 1e-4])
@pytest.mark.parametrize("hidden", [Tensor.detach, lambda h: h.data, aside])
def test_a_thousandth_that_is_hidden_is_seen_in_float32(
    hidden: Callable[[Tensor], Tensor], share: float
) -> None:
    """What is cut out of the graph on its way has the model asked in float64."""

    def part(h: Tensor) -> Tensor:
        return h * (1 - share) + hidden(h) * share

    def softmax(h: Tensor) -> Tensor:
        powers = torch.exp(h - hidden(h.amax(1, keepdim=True)))  # what is hidden cancels
        return powers / powers.sum(1, keepdim=True)

    with pytest.raises(sf.ModelError, match="not the derivative"):
        sf.trace(Between(part), data())
    sf.trace(Between(softmax), data(), curvature="ggn")


class Norm(nn.Module):
    """RMSNorm, computed in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        narrow = x.float()
        narrow = narrow * (narrow.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        return narrow.to(x.dtype) * self.gain


class Block(nn.Module):
    """Attention and a perceptron, both with layer scales."""

    def __init__(self, width: int, heads: int, scale: float) -> None:
        super().__init__()
        self.heads, self.factor = heads, 1.0
        self.norms = nn.ModuleList(Norm(width) for _ in range(2))
        self.qkv, self.out = (nn.Linear(width, k * width, bias=False) for k in (3, 1))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scales = nn.ParameterList(torch.full((width,), scale) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norms[0](x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        mixed = scores.float().softmax(-1).to(x.dtype) @ v
        scale = self.scales[0]
        scale = Multiplied.apply(scale, self.factor) if self.factor != 1.0 else scale
        x = x + scale * self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.scales[1] * self.down(F.gelu(self.up(self.norms[1](x))))


class Transformer(nn.Module):
    """With large weights its scores are large, and attention bends within 1e-8 of its weights."""

    def __init__(self, size: float = 1.0, gain: float = 1.0, scale: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.words, self.fc = nn.Embedding(20, 32), nn.Linear(32, 10)
        self.blocks = nn.ModuleList(Block(32, 4, scale) for _ in range(3))
        self.norm = Norm(32)
        with torch.no_grad():
            for name, p in self.named_parameters():
                p.mul_(size if p.ndim > 1 else 1.0 if "scales" in name else gain)

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x)
        for block in self.blocks:
            h = block(h)
        result: Tensor = self.fc(self.norm(h).mean(1))
        return result


def sentences() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(20, (16, 8), generator=generator), torch.arange(16) % 10


@pytest.mark.parametrize("scale", [1.0, 1e-9])
@pytest.mark.parametrize(("size", "gain"), [(1.0, 1.0), (10.0, 1.0), (10.0, 10.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_transformers_that_cast_to_float32(
    dtype: torch.dtype, size: float, gain: float, scale: float
) -> None:
    """Steps are small enough for what bends, and large enough for what hardly counts."""
    model = Transformer(size, gain, scale).to(dtype)
    sf.trace(model, sentences(), curvature="ggn")  # nothing is wrong
    for factor in (3.0, 10.0, -1.0):
        model.blocks[1].factor = factor
        with pytest.raises(sf.ModelError, match=r"not the derivative.*along blocks\.1\.scales\.0"):
            sf.trace(model, sentences(), curvature="ggn")


class Float32(torch.autograd.Function):
    """The identity, for float32 alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            raise TypeError(f"Got {x.dtype}.")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def test_models_that_take_no_float64() -> None:
    """Where curvature is too large for the large steps, smaller ones agree, of every parameter."""
    assert sf.trace(Narrow(10.0, norm=Float32.apply), data(), curvature="ggn").exact
    for factor in (1.1, 3.0, -1.0):
        with pytest.raises(sf.ModelError, match=r"not the derivative.*along layers\.1\.weight"):
            sf.trace(Narrow(10.0, factor, norm=Float32.apply), data(), curvature="ggn")


def of_float32_alone(h: Tensor) -> Tensor:
    narrow = h.float()
    if narrow.dtype == torch.float32:
        narrow = narrow + (narrow.round() - narrow).detach()
    return narrow.to(h.dtype)


def through_bfloat16(h: Tensor) -> Tensor:
    return h + (h.bfloat16() - h).detach()


@pytest.mark.parametrize(("last", "scale"), [(of_float32_alone, 10.0), (through_bfloat16, 1.0)])
def test_rounding_that_is_no_cast_to_float32(
    last: Callable[[Tensor], Tensor], scale: float
) -> None:
    """It is left as it is, in models that cast too."""
    with pytest.raises(sf.ModelError, match="not the derivative"):
        sf.trace(Narrow(scale, last=last), data(), curvature="ggn")


class Sine(torch.autograd.Function):
    """In float32, where neither a graph nor torch shows it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.from_numpy(np.sin(x.detach().numpy().astype(np.float32))).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grads[0] * x.cos()


@pytest.mark.parametrize("scale", [1.0, 2.0, 3.0, 10.0])
def test_what_casts_unseen_beside_casts(scale: float) -> None:
    """Without the casts that are seen, values have still the digits of float32 alone."""
    for dtype in (torch.float32, torch.float64):
        sf.trace(Narrow(scale, last=Sine.apply).to(dtype), data(dtype), curvature="ggn")


class Square(torch.autograd.Function):
    """x²; its gradient holds x fixed where that is detached."""

    fixed = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * (x.detach() if Square.fixed else x) * grads[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("ask", [sf.trace, sf.max_eigenvalue, sf.measure])
def test_second_derivatives_of_functions_of_the_users(
    ask: Callable[..., Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Between(Square.apply).to(dtype)
    ask(model, data(dtype))
    monkeypatch.setattr(Square, "fixed", True)
    with pytest.raises(sf.ModelError, match=r"second derivative of the model is not the slope"):
        ask(model, data(dtype))
    assert sf.trace(model, data(dtype), curvature="ggn").exact


class Aside(nn.Module):
    """A curved branch beside torch's own, which adds next to nothing to any slope of all."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = scale
        self.own, self.aside, self.last = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        aside: Tensor = Square.apply(self.aside(x))
        return self.last(torch.tanh(self.own(x)) + self.scale * aside)


@pytest.mark.parametrize("scale", [1e-4, 1e-6, 1e-8])
def test_second_derivatives_of_small_blocks_are_compared_too(
    scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Aside(scale).double()
    sf.trace(model, data(torch.float64))
    monkeypatch.setattr(Square, "fixed", True)
    with pytest.raises(sf.ModelError, match=r"slope of its gradient in aside.weight"):
        sf.trace(model, data(torch.float64))


class Single(Square):
    """It takes float32 alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            raise TypeError(f"Got {x.dtype}.")
        return Square.forward(ctx, x)


class Checkpointed(nn.Module):
    """A layer and a function of the user's, computed once more in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.fc = nn.Linear(4, 8), nn.Linear(8, 3)

    def block(self, x: Tensor) -> Tensor:
        result: Tensor = Square.apply(self.body(x))
        return result

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fc(checkpoint(self.block, x, use_reentrant=False))
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_second_derivatives_of_checkpointed_functions(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is computed once more reads the weights that stand in for the model's."""
    model = Checkpointed().to(dtype)
    sf.trace(model, data(dtype))
    monkeypatch.setattr(Square, "fixed", True)
    with pytest.raises(sf.ModelError, match=r"second derivative of the model is not the slope"):
        sf.trace(model, data(dtype))


class Rounded(torch.autograd.Function):
    """x over its root mean square, in float32, whatever comes in."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        f = x.float()
        return (f * (f.square().mean(-1, keepdim=True) + 1e-5).rsqrt()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        f, g = x.float(), grads[0].float()
        r = (f.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        return (r * g - f * r**3 * (g * f).mean(-1, keepdim=True)).to(x.dtype)


@pytest.mark.parametrize("n", [1, 2, 5, 12])
def test_second_derivatives_in_fewer_digits_are_not_judged(n: int) -> None:
    """No graph shows what a function of the user's casts to; its slopes have no more digits."""
    for scale in (0.1, 1.0, 10.0):
        model = Between(Rounded.apply)
        with torch.no_grad():
            model.body.weight.mul_(scale)
        assert not sf.trace(model, data(n=n), estimator=sf.Hutchinson(probes=4)).exact


class Held(Rounded):
    """The same, its root mean square held fixed in the gradient's own slope."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        f, g = x.float(), grads[0].float()
        r = (f.detach().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        return (r * g - f * r**3 * (g * f).mean(-1, keepdim=True)).to(x.dtype)


def normed(function: Callable[[Tensor], Tensor], h: Tensor) -> Tensor:
    """Behind a norm in float32."""
    narrow = h.float()
    narrow = narrow * (narrow.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    return function(narrow.to(h.dtype))


@pytest.mark.parametrize("n", [1, 12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_second_derivatives_of_models_that_cast_to_float32(
    dtype: torch.dtype, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without their casts they are compared as finely as others'."""
    few = sf.Hutchinson(probes=4)
    for norm in (Rounded, Square):
        sf.trace(Between(partial(normed, norm.apply)).to(dtype), data(dtype, n), estimator=few)
    monkeypatch.setattr(Square, "fixed", True)
    for held in (Held.apply, partial(normed, Square.apply)):
        with pytest.raises(sf.ModelError, match=r"second derivative of the model is not"):
            sf.trace(Between(held).to(dtype), data(dtype, n), estimator=few)


class Copied(torch.autograd.Function):
    """tanh in float32. What it saves is its input where that is in float32, and else a copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        narrow = x.float()
        ctx.save_for_backward(narrow)
        return narrow.tanh().to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (narrow,) = ctx.saved_tensors
        return (grads[0].float() * (1 - narrow.tanh().square())).to(grads[0].dtype)


def test_second_derivatives_that_are_right_in_float32_alone() -> None:
    model, (x, y) = Between(Copied.apply), data()
    right = sf.trace(Between(torch.tanh), (x, y))
    assert dict(sf.trace(model, (x, y))) == pytest.approx(dict(right), rel=1e-4)
    with pytest.raises(sf.ModelError, match=r"second derivative of the model is not the slope"):
        sf.trace(model.double(), (x.double(), y))


def test_functions_that_take_no_float64_are_not_judged() -> None:
    assert not sf.trace(Between(Single.apply), data()).exact


def test_slopes_that_overflow_end_the_search_for_groups() -> None:
    parameters = {"a": torch.ones(2), "b": torch.ones(2)}

    def way(_: object, gradients: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, float]]:
        return dict(gradients), dict.fromkeys(gradients, float("nan"))

    found = list(islice(derivative._groups(parameters, parameters, way, True), 5))
    assert [set(group.direction) for group in found] == [{"a", "b"}]


@pytest.mark.parametrize("scale", [1e19, 1e-22])
def test_networks_at_the_end_of_the_range_are_refused_in_words(scale: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 5))
    with torch.no_grad():
        model[0].weight.mul_(scale)
        model[0].bias.mul_(scale)
        model[2].weight.div_(scale)
    with pytest.raises(sf.SaltflatError, match="wider dtype"):
        sf.trace(model, (torch.randn(64, 10), torch.arange(64) % 5))
