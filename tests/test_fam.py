"""FAM against the paper's double sum over a dense Hessian, and in the loops that people write."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dense import Dense
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

import saltflat as sf
from saltflat.training.fam import FAM

N, K = 6, 3


def kappa(
    model: nn.Module, x: Tensor, y: Any, loss: Any, name: str, *, simplified: bool = False
) -> float:
    """Σ_{s,s'} ⟨w_s, w_s'⟩ Tr H_{s,s'} as printed, rows s, s' of the same group."""
    dense = Dense(model, x, y, loss, names=[f"{name}.weight"])
    w = dense.parameters[f"{name}.weight"].detach().flatten(1)
    out, width = w.shape
    h = dense.hessian.reshape(out, width, out, width)
    if simplified:
        return float(
            w.square().sum() * sum(h[s, k, s, k] for s in range(out) for k in range(width))
        )
    size = out // getattr(model.get_submodule(name), "groups", 1)
    total = 0.0
    for s in range(out):
        for t in range(out):
            if s // size == t // size:
                total += float(w[s] @ w[t] * h[s, :, t].trace())
    return total


def penalty(model: nn.Module, x: Any, y: Any, layer: str, **options: Any) -> float:
    with FAM(model, layer, 1.0, **options) as fam:
        model(x)
        return float(fam(y).detach())


def batch_dice(o: Tensor, y: Tensor) -> Tensor:
    p, q = o.softmax(1), F.one_hot(y, K).to(o)
    return 1 - 2 * (p * q).sum() / (p.sum() + q.sum())


def sample_dice(o: Tensor, y: Tensor) -> Tensor:
    p, q = o.softmax(1), F.one_hot(y, K).to(o)
    return (1 - 2 * (p * q).sum(1) / (p.square().sum(1) + q.sum(1))).mean()


WEIGHTED = nn.CrossEntropyLoss(
    weight=torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64), label_smoothing=0.1, ignore_index=1
)
LOSSES: dict[str, Any] = {
    "cross entropy": "cross_entropy",
    "weighted": WEIGHTED,
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "mse": "mse",
    "bce": "bce",
    "normalized": "normalized_cross_entropy",
    "dice of a sample": sample_dice,
    "dice of the batch": batch_dice,
}


def relu() -> nn.Module:
    layers = nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 4), nn.LeakyReLU()
    return nn.Sequential(*layers, nn.Linear(4, K))


def smooth() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4), nn.GELU(), nn.Linear(4, K))


def conv() -> nn.Module:
    """Kernels, strides, dilation, groups, padding of each kind, and more positions than inputs."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 2, padding=1, stride=2, padding_mode="circular"),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, (3, 2), groups=2, dilation=(1, 2), padding="same"),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16, K),
    )


def smooth_conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(1, 2, 2),
        nn.Softplus(),
        nn.Conv1d(2, 4, 2, groups=2),
        nn.Sigmoid(),
        nn.Flatten(),
        nn.Linear(12, K),
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], list[str]]] = {
    "relu": (relu, (4,), ["0", "2", "4"]),
    "smooth": (smooth, (4,), ["0", "2", "4"]),
    "conv": (conv, (1, 7, 7), ["0", "2", "6"]),
    "smooth conv": (smooth_conv, (1, 5), ["0", "2", "5"]),
}


def make(name: str, seed: int = 0) -> tuple[nn.Module, Tensor]:
    build, shape, _ = MODELS[name]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build().double(), torch.randn(N, *shape, dtype=torch.float64)


def targets(loss: str) -> Tensor:
    if loss in ("mse", "bce"):
        return torch.linspace(0, 1, N * K, dtype=torch.float64).reshape(N, K)
    return torch.arange(N) % K


LABELS = targets("cross entropy")


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
    w = dense.parameters["0.weight"].detach()
    ggn = torch.einsum("sktk->st", dense.ggn.reshape(*w.shape, *w.shape))
    with FAM(model, "0", 1.0) as fam:
        model(x)
        value = float(fam(LABELS).detach())
        assert fam.last["0"].rule == "loss and network"
    assert abs(float(((w @ w.T) * ggn).sum()) - value) > 0.05 * abs(value)


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
    gradients = [torch.autograd.grad(v, model.parameters()) for v in (closed, general)]
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
    (batch_normed, (3,), ["0"], {"estimator": sf.Hutchinson(2), "loss": batch_dice}),
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
    for module in frozen:
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
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with FAM(model, "fc", strength, loss="mse") as fam:
        for step in range(600):
            fam.strength = strength if step < 300 else 0.0  # then settle in the valley
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

    with FAM(model, "0", 1.0, estimator=sf.Hutchinson(2)) as fam:
        first = values(fam, 2)
        state = fam.state_dict()
        after = values(fam, 2)
    assert len({*first, *after}) == 4
    with FAM(model, "0", 0.5, estimator=sf.Hutchinson(2)) as fam:
        fam.load_state_dict(state)
        assert values(fam, 2) == after


# In training loops


def test_strength_zero_changes_nothing() -> None:
    def train(strength: float | None) -> list[Tensor]:
        model, x = make("relu")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        fam = None if strength is None else FAM(model, ["2", "4"], strength)
        for _ in range(4):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), LABELS)
            (loss if fam is None else loss + fam(LABELS)).backward()
            optimizer.step()
        return list(model.parameters())

    plain, zero, one = train(None), train(0.0), train(1.0)
    assert all(torch.equal(a, b) for a, b in zip(plain, zero, strict=True))
    assert not torch.equal(plain[0], one[0])


def test_gradient_accumulation() -> None:
    model, x = make("relu")
    with FAM(model, "2", 0.3) as fam:
        for part in (slice(0, 2), slice(2, N)):
            (F.cross_entropy(model(x[part]), LABELS[part]) + fam(LABELS[part])).backward()
    want = 0.0
    for part in (slice(0, 2), slice(2, N)):
        with FAM(model, "2", 1.0) as fam:
            o = model(x[part])
            want = want + F.cross_entropy(o, LABELS[part]) + 0.3 * fam(LABELS[part])
    for p, g in zip(model.parameters(), torch.autograd.grad(want, model.parameters()), strict=True):
        assert torch.allclose(p.grad, g, rtol=1e-10)


def test_layers_add_up() -> None:
    model, x = make("smooth")
    parts = [penalty(model, x, LABELS, layer) for layer in ("4", "0")]
    with FAM(model, ["4", "0"], 2.0) as fam:
        model(x)
        assert fam(LABELS).item() == pytest.approx(2 * sum(parts), rel=1e-12)
        assert [float(p.value) for p in fam.last.values()] == pytest.approx(parts, rel=1e-12)
        assert fam.layers == tuple(fam.last) == ("4", "0")
        assert not any(p.value.requires_grad for p in fam.last.values())


@pytest.mark.parametrize("layer", ["2", "4"])
def test_autocast(layer: str) -> None:
    model, x = make("relu")
    model, x = model.float(), x.float()
    want = penalty(model, x, LABELS, layer)
    with FAM(model, layer, 1.0) as fam, torch.autocast("cpu", torch.bfloat16):
        outputs = model(x)
        value = fam(LABELS)
    assert outputs.dtype == torch.bfloat16
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(want, rel=0.05)
    value.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("order", ["compile first", "FAM first"])
def test_compiled(order: str) -> None:
    torch._dynamo.reset()
    model, x = make("smooth")
    want = penalty(model, x, LABELS, "2")
    if order == "compile first":
        compiled = torch.compile(model, backend="eager")
        fam = FAM(compiled, "2", 1.0)
    else:
        fam = FAM(model, "2", 1.0)
        compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        compiled(x)
        assert fam(LABELS).item() == pytest.approx(want, rel=1e-10)
    fam.remove()


@pytest.mark.filterwarnings("ignore")
def test_compiled_before_the_hooks_came() -> None:
    torch._dynamo.reset()
    model, x = make("smooth")
    compiled = torch.compile(model, backend="eager")
    compiled(x)
    with FAM(compiled, "2", 1.0) as fam:
        compiled(x)
        with pytest.raises(sf.ModelError, match=r"torch.compiler.reset\(\) after making FAM"):
            fam(LABELS)
        torch.compiler.reset()
        compiled(x)
        assert fam(LABELS) != 0


@pytest.mark.filterwarnings("ignore")
def test_compiled_without_second_derivatives() -> None:
    torch._dynamo.reset()
    model, x = Odd("plain").double(), make("relu")[1]
    want = penalty(model, x, LABELS, "b")
    compiled = torch.compile(model, backend="aot_eager")
    with FAM(compiled, "b", 1.0) as fam:
        compiled(x)
        assert fam(LABELS).item() == pytest.approx(want, rel=1e-10)
    torch.compiler.reset()
    with FAM(compiled, "a", 1.0) as fam:
        compiled(x)
        with pytest.raises(sf.ModelError, match="compiled to a kernel without second derivatives"):
            fam(LABELS)


def test_checkpointing_does_not_count_as_a_pass() -> None:
    model, x = make("smooth")
    want = penalty(model, x, LABELS, "2")

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            h = checkpoint(self.inner[:3], x, use_reentrant=False)
            return self.inner[3:](h)

    wrapped = Checkpointed()
    with FAM(wrapped, "inner.4", 1.0) as fam:
        (F.cross_entropy(wrapped(x), LABELS) + fam(LABELS)).backward()
        with pytest.raises(sf.ModelError, match="already used"):
            fam(LABELS)
    with FAM(wrapped, "inner.2", 1.0) as fam:
        o = wrapped(x)
        assert fam(LABELS).item() == pytest.approx(want, rel=1e-10)
        F.cross_entropy(o, LABELS).backward()
        with pytest.raises(sf.ModelError, match="already used"):
            fam(LABELS)


def test_parametrized_weights() -> None:
    model, x = make("relu")
    spectral_norm(model[2])
    weight_norm(model[4])
    model.train()
    with FAM(model, ["2", "4"], 1.0) as fam:
        model(x)
        vector = model[2].parametrizations.weight[0]._u.clone()
        fam(LABELS).backward()
        assert torch.equal(vector, model[2].parametrizations.weight[0]._u)
        values = {name: float(p.value) for name, p in fam.last.items()}
    model.eval()
    for name, layer in (("2", model[2]), ("4", model[4])):
        plain = copy.deepcopy(model)
        with torch.no_grad():
            fixed = nn.Linear(*reversed(layer.weight.shape)).double()
            fixed.weight.copy_(layer.weight)
            fixed.bias.copy_(layer.bias)
        plain[int(name)] = fixed
        want = kappa(plain, x, LABELS, "cross_entropy", name)
        assert values[name] == pytest.approx(want, rel=1e-10)
    assert model[2].parametrizations.training is False


# The life of the hooks


def test_which_forward_pass() -> None:
    model, x = make("relu")
    fam = FAM(model, "2", 1.0)
    with pytest.raises(sf.ModelError, match="There was no forward pass since FAM was made"):
        fam(LABELS)
    with torch.no_grad():
        model(x)
    with pytest.raises(sf.ModelError, match="ran without gradients"):
        fam(LABELS)
    model(x)
    with torch.no_grad():
        model(x[:2])  # an evaluation in between does not matter
    value = fam(LABELS)
    assert value.requires_grad
    with pytest.raises(sf.ModelError, match="already used"):
        fam(LABELS)
    model(x)
    with torch.no_grad():
        again = fam(LABELS)
    assert not again.requires_grad
    assert again.item() == value.item()
    with pytest.raises(RuntimeError):
        model(x[:, :2])
    model(x)
    assert fam(LABELS).item() == value.item()
    fam.remove()
    model(x)
    with pytest.raises(sf.ModelError, match="hooks were removed"):
        fam(LABELS)


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_hooks_come_off() -> None:
    model, x = make("relu")
    with FAM(model, ["0", "2"]):
        assert hooks(model) == 4
    assert hooks(model) == 0
    fam = FAM(model, "2")
    model(x)
    del fam
    gc.collect()
    assert hooks(model) == 0
    with pytest.raises(ZeroDivisionError), FAM(model, "2"):
        raise ZeroDivisionError
    assert hooks(model) == 0


def test_activations_are_freed() -> None:
    model, x = make("relu")
    kept: list[weakref.ref[Tensor]] = []
    model[3].register_forward_hook(lambda m, a, out: kept.append(weakref.ref(out)))
    with FAM(model, "4") as fam:
        model(x)
        assert kept[0]() is not None
        fam(LABELS)
        gc.collect()
        assert kept[0]() is None


def test_copies_of_the_model() -> None:
    model, x = make("relu")
    with FAM(model, "2", 1.0) as fam:
        o = model(x)
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        copies = [
            copy.deepcopy(model),
            pickle.loads(pickle.dumps(model)),
            torch.load(buffer, weights_only=False),
        ]
        for other in copies:
            assert torch.allclose(other(x[:2]), o[:2])  # and does not count as a pass of the model
            assert other.state_dict().keys() == model.state_dict().keys()
        value = fam(LABELS).item()
    assert value == pytest.approx(kappa(model, x, LABELS, "cross_entropy", "2"), rel=1e-10)


def test_copies_of_fam() -> None:
    model, x = make("relu")
    with FAM(model, "2", 0.7, simplified=True, loss=WEIGHTED) as fam:
        model(x)
        value = fam(LABELS).item()
        for other in (copy.deepcopy(fam), pickle.loads(pickle.dumps(fam))):
            assert repr(other) == repr(fam)
            assert other.model is not model
            other.model(x)
            assert other(LABELS).item() == value
        one, two = copy.deepcopy((model, fam))
        assert two.model is one


def test_default_layer_is_said_aloud() -> None:
    model, _ = make("conv")
    with pytest.warns(UserWarning, match="FAM regularizes '6', the last Linear layer"):
        fam = FAM(model)
    assert fam.layers == ("6",)
    assert repr(fam) == "FAM(relative flatness of '6', strength=0.1)"
    fam.remove()
    encoder = nn.TransformerEncoderLayer(4, 2, 8)
    with pytest.warns(UserWarning, match="'linear2'"), FAM(encoder):
        pass  # not self_attn.out_proj, which attention never calls
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FAM(model, "6").remove()


# Errors


@pytest.mark.parametrize(
    ("layer", "error", "words"),
    [
        ("fc9", ValueError, "Got 'fc9'; nearest is 'fc1'."),
        ("act", ValueError, "must name a Linear or Conv layer of the model. Got 'act'"),
        (["fc1", "fc"], ValueError, "Got 'fc'; nearest is 'fc1'"),
        ([], ValueError, "empty list"),
        (3, TypeError, "must be a name or a list of names. Got int"),
    ],
)
def test_bad_layers(layer: Any, error: type[Exception], words: str) -> None:
    model = nn.Sequential()
    model.add_module("fc1", nn.Linear(2, 2))
    model.add_module("act", nn.ReLU())
    with pytest.raises(error, match=words) as caught:
        FAM(model, layer)
    assert isinstance(caught.value, sf.SaltflatError)
    assert hooks(model) == 0


def test_bad_arguments() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"must be a torch.nn.Module. Got int"):
        FAM(3, "fc")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no Linear layer"):
        FAM(nn.Conv1d(1, 1, 1))
    for strength in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="finite and not negative"):
            FAM(model, "", strength)
    for wrong in ("1", None, True):
        with pytest.raises(TypeError, match="strength must be a number"):
            FAM(model, "", wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"must be saltflat.Hutchinson or None. Got XTrace"):
        FAM(model, "", estimator=sf.XTrace())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Unknown loss"):
        FAM(model, "", loss="crossentropy")
    assert hooks(model) == 0


class Odd(nn.Module):
    """Ways to use a layer that FAM must notice."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.a, self.b = how, nn.Linear(4, 4), nn.Linear(4, K)

    def forward(self, x: Tensor) -> Any:
        if self.how == "in place":
            x = x * 1.0
        h = self.a(x)
        if self.how == "twice":
            h = self.a(h.relu())
        elif self.how == "in place":
            x += 1
        elif self.how == "coupled":
            h = h - h.mean(0)
        elif self.how == "unused":
            h = x
        elif self.how == "scalar":
            return h.sum()
        elif self.how == "list":
            return [self.b(h)]
        return self.b(h.relu())


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("twice", "'a' ran 2 times in the forward pass"),
        ("coupled", "must not interact in the layers above"),
        ("unused", "The outputs do not depend on layer 'a'"),
        ("scalar", "a floating point tensor with a row for each sample"),
        ("list", "neither a tensor nor has logits"),
        ("in place", "was changed in place"),
    ],
)
def test_odd_models(how: str, words: str) -> None:
    model, x = Odd(how), torch.randn(N, 4, generator=torch.Generator().manual_seed(0))
    with FAM(model, "a") as fam:
        model(x)
        with pytest.raises(sf.ModelError, match=words):
            fam(LABELS)
    with FAM(model, "a", output=lambda out: out[0]) as fam:
        if how == "list":
            model(x)
            assert fam(LABELS) > 0


def test_a_layer_that_never_ran() -> None:
    model = nn.MultiheadAttention(4, 2)
    with FAM(model, "out_proj", output=lambda out: out[0].mean(0)) as fam:
        model(*[torch.randn(2, N, 4)] * 3)
        with pytest.raises(sf.ModelError, match="'out_proj' ran 0 times"):
            fam(LABELS)


def test_a_layer_that_is_not_linear() -> None:
    model, x = make("relu")
    model[2].register_forward_hook(lambda m, a, out: out + 1)
    with FAM(model, "2"), pytest.raises(sf.ModelError, match="does not compute W x"):
        model(x)


def test_unbatched_rows() -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, K)

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([self.a(x.mean(0))] * len(x))

    model = Rows()
    with FAM(model, "a") as fam:
        model(torch.ones(N, 4))
        with pytest.raises(sf.ModelError, match="cannot tell which rows"):
            fam(LABELS)


def test_frozen_layers() -> None:
    model, x = make("relu")
    model[:3].requires_grad_(False)
    with FAM(model, "2") as fam:
        model(x)
        with pytest.raises(sf.ModelError, match="'2' and all below it are frozen"):
            fam(LABELS)
    assert penalty(model, x, LABELS, "4") > 0
    model.requires_grad_(True)
    want = penalty(model, x, LABELS, "2")
    model[2].requires_grad_(False)  # what it says still depends on the layers around it
    assert penalty(model, x, LABELS, "2") == want


def test_fused_attention() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.TransformerEncoderLayer(4, 2, 8, 0.0)).double()
    x = torch.randn(5, N, 4, generator=torch.Generator().manual_seed(0)).double()

    def last(out: Tensor) -> Tensor:
        return out[-1, :, :K]

    with FAM(model, "0", output=last) as fam:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            model(x)
        with pytest.raises(sf.ModelError, match="Fused attention above the layer"):
            fam(LABELS)
    dense = Dense(model, x, LABELS, names=["0.weight"], output=last)
    w = model[0].weight.detach()
    traces = torch.einsum("sktk->st", dense.hessian.reshape(4, 4, 4, 4))
    with FAM(model, "0", 1.0, output=last) as fam, sdpa_kernel(SDPBackend.MATH):
        model(x)
        assert fam(LABELS).item() == pytest.approx(((w @ w.T) * traces).sum().item(), rel=1e-10)


def test_bad_targets_and_losses() -> None:
    model, x = make("relu")
    with FAM(model, "2") as fam:
        model(x)
        with pytest.raises(sf.DataError, match="Targets do not fit"):
            fam(LABELS[:2])
    with FAM(model, "4", loss=nn.CrossEntropyLoss(ignore_index=0)) as fam:
        model(x)
        with pytest.raises(sf.DataError, match="all targets are ignored"):
            fam(torch.zeros_like(LABELS))
    wide = nn.Linear(4, 700).double()
    with FAM(wide, "", loss=lambda o, y: o.square().mean() ** 2) as fam:
        wide(x)
        with pytest.raises(sf.LossError, match=r"couples the samples .* 4200 outputs"):
            fam(LABELS)


def test_warns_of_the_price() -> None:
    model = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 1030)).double()
    x = torch.ones(2, 4, dtype=torch.float64)
    with FAM(model, "0") as fam:
        model(x)
        with pytest.warns(UserWarning, match="1030 outputs per sample"):
            fam(LABELS[:2])
