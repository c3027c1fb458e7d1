"""FAM's value and gradient: the paper's double sum over a dense Hessian, and finite differences."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dense import Dense
from fam_cases import (
    LABELS,
    LOSSES,
    MODELS,
    K,
    N,
    batch_dice,
    kappa,
    make,
    penalty,
    relu,
    sample_dice,
    smooth,
    smooth_conv,
    targets,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from papers import layers, relative_flatness
from torch import Tensor, nn

import saltflat as sf
from saltflat.training.fam import FAM


@pytest.mark.parametrize("simplified", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", MODELS)
def test_is_the_double_sum(name: str, loss: str, simplified: bool) -> None:
    model, x = make(name)
    y = targets(loss)
    for layer in MODELS[name][2]:
        want = kappa(model, x, y, LOSSES[loss], layer, simplified=simplified)
        got = penalty(model, x, y, layer, loss=LOSSES[loss], simplified=simplified)
        assert got == pytest.approx(want, rel=1e-10), layer


def test_gauss_newton_is_not_enough_above_a_smooth_layer() -> None:
    """The control of the smooth cases: without the network's own part the value is wrong."""
    model, x = make("smooth")
    dense = Dense(model, x, LABELS, names=["0.weight"])
    without = relative_flatness(layers(dense, "ggn")["0"])
    with FAM(model, "0", 1.0) as fam:
        model(x)
        value = float(fam(LABELS).detach())
        assert fam.last["0"].rule == "loss and network"
    assert abs(without - value) > 0.05 * abs(value)


class Scaled(nn.Module):
    """Outputs that are not the layer's own, so that the closed form does not apply."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *x: Tensor) -> Tensor:
        out: Tensor = self.inner(*x)
        return out * 1.0


@pytest.mark.parametrize("loss", ["cross entropy", "weighted", "sum"])
@pytest.mark.parametrize("options", [{}, {"simplified": True}, {"normalize_features": True}])
def test_closed_form_is_the_general_path(loss: str, options: dict[str, bool]) -> None:
    model, x = make("relu")
    with FAM(model, "4", 1.0, loss=LOSSES[loss], **options) as fam:
        model(x)
        closed = fam(LABELS)
        assert fam.last["4"].rule == "closed form"
    wrapped = Scaled(model)
    with FAM(wrapped, "inner.4", 1.0, loss=LOSSES[loss], **options) as fam:
        wrapped(x)
        general = fam(LABELS)
        assert fam.last["inner.4"].rule == "loss"
    assert closed.item() == pytest.approx(general.item(), rel=1e-12)
    gradients = [torch.autograd.grad(v, list(model.parameters())) for v in (closed, general)]
    for a, b in zip(*gradients, strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-14)


class Swapped(nn.Module):
    """A recurrent network's layout: time first, samples second."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(2, 4), nn.Linear(4, K)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.transpose(0, 1)).relu().mean(0))


class Folded(nn.Module):
    """Several rows of each sample folded into the first dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.conv, self.head = nn.Linear(2, 4), nn.Conv1d(1, 2, 2), nn.Linear(6, K)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.body(x.flatten(0, 1)).relu()
        return self.head(self.conv(rows.unsqueeze(1)).flatten(1)).unflatten(0, (len(x), -1)).sum(1)


POSITIONS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[int, ...], list[str]]]
POSITIONS = {
    "tokens, classes last": (
        lambda: nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, K)),
        (N, 4, 2),
        (N, 4),
        ["0", "2"],
    ),
    "pixels": (
        lambda: nn.Sequential(nn.Conv2d(1, 2, 2), nn.ReLU(), nn.Conv2d(2, K, 2, padding=1)),
        (N, 1, 4, 3),
        (N, 4, 3),
        ["0", "2"],
    ),
    "time first": (Swapped, (N, 4, 2), (N,), ["body", "head"]),
    "as many steps as samples": (Swapped, (N, N, 2), (N,), ["body"]),
    "folded": (Folded, (N, 4, 2), (N,), ["body", "conv", "head"]),
}


@pytest.mark.parametrize("name", POSITIONS)
def test_several_positions(name: str) -> None:
    build, shape, target, layers = POSITIONS[name]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model, x = build().double(), torch.randn(shape, dtype=torch.float64)
        y = torch.randint(0, K, target)

    def loss(o: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(o.movedim(-1, 1) if "tokens" in name else o, y)

    for layer in layers:
        want = kappa(model, x, y, loss, layer)
        assert penalty(model, x, y, layer) == pytest.approx(want, rel=1e-10), layer


@settings(max_examples=15, deadline=None)
@given(
    groups=st.sampled_from([1, 2]),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 2)),
    stride=st.integers(1, 2),
    padding=st.integers(0, 2),
    dilation=st.integers(1, 2),
    act=st.sampled_from([nn.ReLU, nn.Tanh]),
    simplified=st.booleans(),
)
def test_any_convolution(
    groups: int,
    kernel: tuple[int, int],
    stride: int,
    padding: int,
    dilation: int,
    act: type[nn.Module],
    simplified: bool,
) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        conv = nn.Conv2d(2, 2, kernel, stride, padding, dilation, groups)
        model = nn.Sequential(conv, act(), nn.Flatten(), nn.LazyLinear(K)).double()
        x = torch.randn(3, 2, 5, 4, dtype=torch.float64)
        model(x)
    y = LABELS[:3]
    want = kappa(model, x, y, "cross_entropy", "0", simplified=simplified)
    got = penalty(model, x, y, "0", simplified=simplified)
    assert got == pytest.approx(want, rel=1e-10, abs=1e-14)


def test_soft_targets() -> None:
    model, x = make("relu")
    soft = torch.randn(N, K, generator=torch.Generator().manual_seed(0)).double().softmax(1)
    for layer in ("2", "4"):
        want = kappa(model, x, soft, F.cross_entropy, layer)
        assert penalty(model, x, soft, layer) == pytest.approx(want, rel=1e-10)


class Doubled(torch.autograd.Function):
    """2x, with a derivative that looks at its values and so cannot be batched."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * (2 if gradient.sum().item() < 1e9 else 0)


def test_derivatives_that_cannot_be_batched() -> None:
    class Twice(nn.Module):
        def __init__(self, batched: bool) -> None:
            super().__init__()
            self.batched, self.inner = batched, make("smooth")[0]

        def forward(self, x: Tensor) -> Tensor:
            out = self.inner(x)
            return out * 2 if self.batched else Doubled.apply(out)

    def loss(o: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(Doubled.apply(o), y)

    x = make("smooth")[1]
    want = kappa(Twice(True), x, LABELS, lambda o, y: F.cross_entropy(o * 2, y), "inner.0")
    for batched, used in ((False, lambda o, y: F.cross_entropy(o * 2, y)), (True, loss)):
        got = penalty(Twice(batched), x, LABELS, "inner.0", loss=used)
        assert got == pytest.approx(want, rel=1e-10)


def test_many_classes_and_confident_samples() -> None:
    """More classes than a matrix of distances should hold, and a softmax that float32 rounds."""
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(3, 1100).double()
    x = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    p, gram = layer(x).softmax(1), layer.weight @ layer.weight.T
    want = (x.square().sum(1) * (p @ gram.diagonal() - ((p @ gram) * p).sum(1))).mean()
    got = penalty(layer, x, torch.arange(5), "")
    assert got == pytest.approx(want.item(), rel=1e-10)
    want = layer.weight.square().sum() * (x.square().sum(1) * (1 - p.square().sum(1))).mean()
    got = penalty(layer, x, torch.arange(5), "", simplified=True)
    assert got == pytest.approx(want.item(), rel=1e-10)

    model, x = make("relu")
    with torch.no_grad():
        model[4].weight *= 60
    for m in (model, Scaled(model)):
        layers = [n for n, layer in m.named_modules() if isinstance(layer, nn.Linear)]
        exact = [penalty(m, x, LABELS, name) for name in layers]
        m.float()
        narrow = [penalty(m, x.float(), LABELS, name) for name in layers]
        m.double()
        assert narrow == pytest.approx(exact, rel=1e-4)


def slopes(model: nn.Module, value: Callable[[], Tensor], steps: list[Tensor]) -> list[float]:
    """Derivatives along a step in each parameter, by central differences of fourth order."""
    result = []
    for p, step in zip(model.parameters(), steps, strict=True):
        here, values = p.detach().clone(), []
        for length in (2, 1, -1, -2):
            with torch.no_grad():
                p.copy_(here + 1e-4 * length * step)
            values.append(value().item())
        with torch.no_grad():
            p.copy_(here)
        a, b, c, d = values
        result.append((8 * (b - c) - (a - d)) / 12e-4)
    return result


def batch_normed() -> nn.Module:
    layers = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3), nn.BatchNorm1d(3)
    model = nn.Sequential(*layers, nn.LeakyReLU(0.3, inplace=True), nn.Linear(3, K))
    for module in model:
        if isinstance(module, nn.BatchNorm1d):
            nn.init.uniform_(module.weight, 0.5, 2.0)
    return model


GRADIENTS: list[tuple[Callable[[], nn.Module], tuple[int, ...], list[str], dict[str, Any]]] = [
    (relu, (4,), ["0", "2", "4"], {}),
    (smooth, (4,), ["0", "2"], {}),
    (smooth, (4,), ["0", "2", "4"], {"simplified": True, "loss": sample_dice}),
    (smooth, (4,), ["0", "2"], {"normalize_features": True, "loss": batch_dice}),
    (smooth_conv, (1, 5), ["0", "2"], {}),
    (smooth_conv, (1, 5), ["0", "2"], {"normalize_features": True, "loss": "bce"}),
    (batch_normed, (3,), ["0", "3", "6"], {}),
    (batch_normed, (3,), ["0"], {"estimator": sf.Hutchinson(4), "loss": batch_dice}),
]


@pytest.mark.filterwarnings("ignore:BatchNorm in training mode")
@pytest.mark.parametrize("case", GRADIENTS)
def test_gradient_through_all_layers(case: Any) -> None:
    build, shape, layers, options = case
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model, x = build().double(), torch.randn(N, *shape, dtype=torch.float64)
    y = targets("bce" if options.get("loss") == "bce" else "cross entropy")
    fam = FAM(model, layers, 1.0, **options)
    state = fam.state_dict()

    def value() -> Tensor:
        fam.load_state_dict(state)  # the same random signs
        model(x)
        return fam(y)

    got = torch.autograd.grad(value(), list(model.parameters()), materialize_grads=True)
    scale = max(float(g.norm()) for g in got)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        steps = [torch.randn(p.shape, generator=generator).to(p) for p in model.parameters()]
        want = slopes(model, value, steps)
        along = [float((g * s).sum()) for g, s in zip(got, steps, strict=True)]
        assert along == pytest.approx(want, abs=1e-7 * scale)
    assert got[0].norm() > 1e-3 * scale, "the third derivative reaches the first layer"


@pytest.mark.parametrize("name", ["0", "3"])
def test_batch_statistics_are_constants(name: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model, x = batch_normed().double(), torch.randn(N, 3, dtype=torch.float64)
    with pytest.warns(UserWarning, match="batch statistics are held constant"):
        got = penalty(model, x, LABELS, name)
    frozen = copy.deepcopy(model)
    h = x
    for module in frozen.children():
        if isinstance(module, nn.BatchNorm1d):
            module.running_mean, module.running_var = h.mean(0).detach(), h.var(0, False).detach()
            h = F.batch_norm(h, None, None, module.weight, module.bias, True, eps=module.eps)
        else:
            h = module(h.clone())
    assert got == pytest.approx(kappa(frozen, x, LABELS, "cross_entropy", name), rel=1e-10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is above the last layer, or in evaluation mode
        penalty(model, x, LABELS, "6")
        penalty(frozen, x, LABELS, name)


def test_instance_norm_couples_no_samples() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv1d(1, 2, 2), nn.InstanceNorm1d(2), nn.Flatten(), nn.Linear(8, K)
        ).double()
        x = torch.randn(N, 1, 5, dtype=torch.float64)
    want = kappa(model, x, LABELS, "cross_entropy", "0")
    assert penalty(model.train(), x, LABELS, "0") == pytest.approx(want, rel=1e-10)


# What it is invariant to


def rescaled(model: nn.Module, units: Tensor) -> nn.Module:
    """The same function, units of the first hidden layer multiplied by `units`."""
    moved = copy.deepcopy(model)
    with torch.no_grad():
        moved[0].weight *= units[:, None]
        moved[0].bias *= units
        moved[2].weight /= units
    return moved


@settings(max_examples=10, deadline=None)
@given(st.floats(0.01, 100.0), st.booleans())
def test_layer_rescaling(factor: float, simplified: bool) -> None:
    model, x = make("relu")
    moved = rescaled(model, torch.full((5,), factor).double())
    assert torch.allclose(moved(x), model(x), rtol=1e-9)
    for layer in ("0", "2", "4"):
        before, after = (
            penalty(m, x, LABELS, layer, simplified=simplified) for m in (model, moved)
        )
        assert after == pytest.approx(before, rel=1e-9)


def test_unit_rescaling() -> None:
    model, x = make("relu")
    moved = rescaled(model, torch.tensor([1.0, 5.0, 0.2, 1.0, 3.0]).double())

    def both(layer: str, **options: bool) -> tuple[float, float]:
        return penalty(model, x, LABELS, layer, **options), penalty(
            moved, x, LABELS, layer, **options
        )

    before, after = both("0")  # units it feeds
    assert after == pytest.approx(before, rel=1e-10)
    before, after = both("2")  # units it reads
    assert abs(after - before) > 0.1 * before
    before, after = both("2", normalize_features=True)
    assert after == pytest.approx(before, rel=1e-10)


def test_normalized_features_by_hand() -> None:
    model, x = make("relu")
    with torch.no_grad():
        hidden = model[:2](x)
        std = hidden.std(0)
        std[std == 0] = 1.0  # units that are off on the whole batch
        head = copy.deepcopy(nn.Sequential(*model[2:]))
        head[0].weight *= std
    want = kappa(head, hidden / std, LABELS, "cross_entropy", "0")
    got = penalty(model, x, LABELS, "2", normalize_features=True)
    assert got == pytest.approx(want, rel=1e-10)


class TwoValleys(nn.Module):
    """φ(θ) = (1 + a(θ² − 1), 1 + θ), W = (1, 0), squared error to the target 1.

    The loss a²(θ² − 1)² has two minima of the same loss and curvature in θ. With H = 2 φ φᵀ,
    κ = 2 ‖W‖² ‖φ‖² is 10 at θ = 1 and 2 at θ = −1.
    """

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.tensor([0.2], dtype=torch.float64))
        self.fc = nn.Linear(2, 1, bias=False).double()
        self.fc.weight = nn.Parameter(torch.tensor([[1.0, 0.0]], dtype=torch.float64), False)

    def forward(self, x: Tensor) -> Tensor:
        bend = 1 + 0.5 * (self.theta**2 - 1)
        return self.fc(torch.stack([bend, 1 + self.theta], 1) * x)


def descend(strength: float) -> TwoValleys:
    model = TwoValleys()
    x = y = torch.ones(4, 1, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    with FAM(model, "fc", strength, loss="mse") as fam:
        for step in range(200):
            fam.strength = strength if step < 100 else 0.0  # then settle in the valley
            optimizer.zero_grad()
            (F.mse_loss(model(x), y) + fam(y)).backward()
            optimizer.step()
    return model


def test_ends_in_the_flatter_of_two_valleys() -> None:
    x = y = torch.ones(4, 1, dtype=torch.float64)
    plain, flat = descend(0.0), descend(0.1)
    assert plain.theta.item() == pytest.approx(1.0, abs=1e-6)
    assert flat.theta.item() == pytest.approx(-1.0, abs=1e-6)
    assert penalty(plain, x, y, "fc", loss="mse") == pytest.approx(10.0, rel=1e-5)
    assert penalty(flat, x, y, "fc", loss="mse") == pytest.approx(2.0, rel=1e-5)


# What is negative


def concave(outputs: Tensor, _: Tensor) -> Tensor:
    return 2 - outputs.square().sum(1).mean()


def warnings_of(fam: FAM, model: nn.Module, x: Tensor, calls: int) -> list[str]:
    with fam, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(calls):
            model(x)
            fam(LABELS)
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("options", [{"strength": 1.0}, {"share": 0.5}, {"simplified": True}])
def test_a_negative_penalty_is_told_once(options: dict[str, Any]) -> None:
    model, x = make("relu")
    value = penalty(model, x, LABELS, "2", loss=concave, simplified="simplified" in options)
    (told,) = warnings_of(FAM(model, "2", loss=concave, **options), model, x, 3)
    assert f"of 2 is negative ({value:.3g})" in told
    assert ("‖W‖² Tr H" in told) == ("simplified" in options)


@pytest.mark.parametrize(("strength", "loss"), [(1.0, "cross_entropy"), (1e-6, concave)])
def test_one_that_is_not_or_next_to_nothing_is_not(strength: float, loss: Any) -> None:
    model, x = make("relu")
    assert not warnings_of(FAM(model, "2", strength, loss=loss), model, x, 1)


@pytest.mark.parametrize("entry", [math.nan, 1e200])
@pytest.mark.parametrize("loss", ["cross_entropy", concave])
def test_what_overflows_is_not_told(loss: Any, entry: float) -> None:
    """As of a step that a scaler of gradients passes over; of later ones it still is."""
    model, x = make("relu")
    fam = FAM(model, "2", 1.0, loss=loss)
    wrong = x.clone()
    wrong[0, 0] = entry
    model(wrong)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not fam(LABELS).isfinite()
    assert len(warnings_of(fam, model, x, 2)) == (loss is concave)


def test_chance_is_not_told() -> None:
    """What is estimated is positive, and some estimates are not."""
    model, x = make("relu")

    def saddle(outputs: Tensor, _: Tensor) -> Tensor:
        return (outputs[:, 0].square() - outputs[:, 1].square()).mean()

    negative = []
    assert penalty(model, x, LABELS, "2", simplified=True, loss=saddle) > 0
    for seed in range(16):
        estimator = sf.Hutchinson(4, seed=seed)
        fam = FAM(model, "2", 1.0, simplified=True, loss=saddle, estimator=estimator)
        assert not warnings_of(fam, model, x, 1)
        negative.append(fam.last["2"].value.item() < 0 < fam.current_share)
    assert any(negative)


# Estimates


@pytest.mark.parametrize("loss", ["cross entropy", "dice of the batch"])
@pytest.mark.parametrize("simplified", [False, True])
@pytest.mark.parametrize("layer", ["0", "2"])
def test_hutchinson_is_unbiased(layer: str, simplified: bool, loss: str) -> None:
    model, x = make("smooth conv")
    options = {"simplified": simplified, "loss": LOSSES[loss]}
    exact = penalty(model, x, LABELS, layer, **options)
    with FAM(model, layer, 1.0, estimator=sf.Hutchinson(3000, seed=1), **options) as fam:
        model(x)
        value = fam(LABELS).item()
        stderr = fam.last[layer].stderr.item()
        assert fam.last[layer].rule == "hutchinson"
    assert 0 < stderr < max(abs(exact), 1e-3)
    assert abs(value - exact) < 4 * stderr


def test_probes_change_with_every_call_and_continue_from_a_state() -> None:
    model, x = make("relu")

    def values(fam: FAM, count: int) -> list[float]:
        out = []
        for _ in range(count):
            model(x)
            out.append(fam(LABELS).item())
        return out

    with FAM(model, "0", 1.0, estimator=sf.Hutchinson(4)) as fam:
        first = values(fam, 2)
        state = fam.state_dict()
        after = values(fam, 2)
    assert len({*first, *after}) == 4
    with FAM(model, "0", 0.5, estimator=sf.Hutchinson(4)) as fam:
        fam.load_state_dict(state)
        assert values(fam, 2) == after
