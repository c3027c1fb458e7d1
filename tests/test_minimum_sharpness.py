"""Minimum sharpness against the closed form, a naive minimiser, and the rescaled network."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from dense import Dense
from scipy.optimize import minimize
from torch import Tensor, nn

import saltflat as sf
from saltflat.errors import NotApplicable

NAMES = ["hessian_trace", "minimum_sharpness", "neuronwise_minimum_sharpness"]


def data(n: int = 12, inputs: int = 5, classes: int = 3) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(3)
    x = torch.randn(n, inputs, generator=g, dtype=torch.float64)
    return x, torch.randint(classes, (n,), generator=g)


def chain(bias: bool, seed: int = 0, widths: tuple[int, ...] = (5, 6, 4, 3)) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(pairwise(widths)):
        layers += [nn.Linear(a, b, bias=bias)] + ([nn.ReLU()] if i < len(widths) - 2 else [])
    net = nn.Sequential(*layers).double()
    with torch.no_grad():  # layers of different sizes, so that there is something to balance
        net[0].weight *= 4
        net[2].weight *= 0.2
    return net


def traces(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, float]:
    oracle = Dense(model, x, y)
    return {n: float(b.trace()) for n, b in oracle.blocks(oracle.hessian).items()}


def test_without_biases_it_is_the_geometric_mean() -> None:
    """D (Π Tr H_d)^{1/D} (Ibayashi et al., Theorem 1 with the squared norm)."""
    model, (x, y) = chain(bias=False), data()
    blocks = list(traces(model, x, y).values())
    want = len(blocks) * math.prod(blocks) ** (1 / len(blocks))
    found = sf.measure(model, (x, y), measures=NAMES)
    assert found["minimum_sharpness"].value == pytest.approx(want, rel=1e-10)
    assert found["minimum_sharpness"].exact
    assert want < 0.9 * found["hessian_trace"].value  # there was something to gain
    alpha = found["minimum_sharpness"].details["alpha"]
    root = (math.prod(blocks)) ** (1 / len(blocks))
    for (_, a), t in zip(alpha.items(), blocks, strict=True):
        assert a**2 == pytest.approx(t / root, rel=1e-7)


def test_with_biases_against_a_naive_program() -> None:
    model, (x, y) = chain(bias=True), data()
    t = traces(model, x, y)
    w = np.array([t[n] for n in ("0.weight", "2.weight", "4.weight")])
    b = np.array([t[n] for n in ("0.bias", "2.bias", "4.bias")])

    def total(free: np.ndarray) -> float:
        a = np.append(free, -free.sum())
        return float((w * np.exp(-2 * a)).sum() + (b * np.exp(-2 * np.cumsum(a))).sum())

    best = minimize(total, np.zeros(2), method="BFGS", options={"gtol": 1e-13})
    found = sf.measure(model, (x, y), measures=NAMES)["minimum_sharpness"]
    assert found.value == pytest.approx(best.fun, rel=1e-9)
    assert found.value >= t["4.bias"]  # the last bias cannot be rescaled
    assert found.value < 0.9 * sum(t.values())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", NAMES[1:])
def test_the_rescaled_network_has_that_trace(bias: bool, name: str) -> None:
    """Apply the optimal rescaling, recompute Tr H, get the minimum; outputs stay."""
    model, (x, y) = chain(bias), data()
    found = sf.measure(model, (x, y), measures=[name])[name]
    group = sf.symmetries(model, x)
    group = group.only("layer") if name == "minimum_sharpness" else group
    moved = group.element(found.details["logs"])(model)
    torch.testing.assert_close(moved(x), model(x), rtol=1e-12, atol=1e-14)
    after = traces(moved, x, y)
    assert sum(after.values()) == pytest.approx(found.value, rel=1e-10)
    for key, value in found.by_parameter.items():
        assert value == pytest.approx(after[key], rel=1e-8)


def test_neuronwise_against_a_naive_program() -> None:
    model, (x, y) = chain(bias=True), data()
    oracle = Dense(model, x, y)
    blocks = oracle.blocks(oracle.hessian)
    h = {n: b.diagonal().reshape(oracle.parameters[n].shape).numpy() for n, b in blocks.items()}

    def total(e: np.ndarray) -> float:
        one, two = np.exp(e[:6]), np.exp(e[6:])
        parts = (
            h["0.weight"] / one[:, None] ** 2,
            h["0.bias"] / one**2,
            h["2.weight"] * one[None] ** 2 / two[:, None] ** 2,
            h["2.bias"] / two**2,
            h["4.weight"] * two[None] ** 2,
            h["4.bias"],
        )
        return float(sum(p.sum() for p in parts))

    best = minimize(total, np.zeros(10), method="BFGS", options={"gtol": 1e-12})
    report = sf.measure(model, (x, y), measures=NAMES)
    found = report["neuronwise_minimum_sharpness"]
    assert found.value == pytest.approx(best.fun, rel=1e-8)
    assert found.value < report["minimum_sharpness"].value < report["hessian_trace"].value


def test_a_layer_without_curvature() -> None:
    """Zero weights at the top leave the layers below without curvature: the infimum is 0."""
    model, (x, y) = chain(bias=False), data()
    with torch.no_grad():
        model[4].weight.zero_()
    t = traces(model, x, y)
    assert t["0.weight"] == t["2.weight"] == 0 < t["4.weight"]
    found = sf.measure(model, (x, y), measures=["minimum_sharpness"])["minimum_sharpness"]
    assert found.value == pytest.approx(0.0, abs=1e-15)
    assert "not attained" in found.notes[0]


def test_negative_curvature_is_refused_by_name() -> None:
    """The normalized cross-entropy is indefinite; the Gauss–Newton matrix of MSE never is."""
    model, (x, y) = chain(bias=True), data()
    loss = lambda o, t: (o**4 / 12 - o**2).mean()  # noqa: E731
    with pytest.raises(NotApplicable, match=r"weight.*negative.*ggn"):
        sf.measure(model, (x, y), loss, measures=["neuronwise_minimum_sharpness"])
    report = sf.measure(model, (x, y), loss)
    assert "negative" in report.skipped["neuronwise_minimum_sharpness"]
    whole = sf.measure(model, (x, y), measures=["minimum_sharpness"], curvature="ggn")
    assert whole["minimum_sharpness"].value > 0


class Joined(nn.Module):
    """Two branches side by side: one weight whose columns belong to two scales."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = nn.Linear(5, 3, bias=False), nn.Linear(5, 2, bias=False)
        self.c = nn.Linear(5, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.cat([self.a(x).relu(), self.b(x).relu() * 3], 1))


def test_a_weight_with_two_scales() -> None:
    model, (x, y) = Joined().double(), data()
    oracle = Dense(model, x, y)
    blocks = oracle.blocks(oracle.hessian)
    t = {n: float(b.trace()) for n, b in blocks.items()}
    c = blocks["c.weight"].diagonal().reshape(3, 5).sum(0)
    left, right = float(c[:3].sum()), float(c[3:].sum())
    want = 2 * math.sqrt(t["a.weight"] * left) + 2 * math.sqrt(t["b.weight"] * right)
    found = sf.measure(model, (x, y), measures=["minimum_sharpness"])["minimum_sharpness"]
    assert found.value == pytest.approx(want, rel=1e-9)


def test_batchnorm_vanishes_and_is_named() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).double()
    x, y = data()
    model(x)  # statistics
    model.eval()
    found = sf.measure(model, (x, y), measures=["minimum_sharpness"])["minimum_sharpness"]
    assert "0.weight" in found.notes[0]
    t = traces(model, x, y)
    assert 0 < found.value < sum(t.values())
    # on the sphere: every filter at unit norm
    w = model[0].weight.detach()
    oracle = Dense(model, x, y)
    h = oracle.blocks(oracle.hessian)["0.weight"].diagonal().reshape(6, 5)
    sphere = float((w.square().sum(1) * h.sum(1)).sum())
    assert found.details["on_sphere"] == pytest.approx(found.value + sphere, rel=1e-9)


def test_balance_returns_the_flattest_twin() -> None:
    model, (x, y) = chain(bias=True), data()
    group = sf.symmetries(model, x)
    twin = group.balance(model, (x, y))
    torch.testing.assert_close(twin(x), model(x), rtol=1e-11, atol=1e-13)
    least = sf.measure(model, (x, y), measures=NAMES)
    assert sf.trace(twin, (x, y)).total == pytest.approx(
        least["neuronwise_minimum_sharpness"].value, rel=1e-8
    )
    fresh = chain(bias=True, seed=5)
    fresh.load_state_dict(twin.state_dict())  # an ordinary state dict
    layers = group.only("layer").balance(model, (x, y))
    assert sf.trace(layers, (x, y)).total == pytest.approx(
        least["minimum_sharpness"].value, rel=1e-8
    )


def test_estimates_carry_their_error() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.GELU(), nn.Linear(6, 3, bias=False)).double()
    x, y = data(40)
    t = traces(model, x, y)
    few = sf.Hutchinson(probes=30)
    report = sf.measure(model, (x, y), measures=["minimum_sharpness"], estimator=few)
    found = report["minimum_sharpness"]
    assert not found.exact
    assert found.stderr > 0
    # GELU lets no scale through, so nothing can be rescaled
    assert abs(found.value - sum(t.values())) < 5 * found.stderr
