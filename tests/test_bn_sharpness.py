"""BN-Sharpness: who feeds BatchNorm, the integral, the supremum and the invariance."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from perturbed import (
    Convolutions,
    Data,
    compute,
    context_of,
    flat_weights,
    loss_at,
    normed,
    points,
    seeded,
    supremum,
    tiny,
    unflatten,
    unflatten_all,
)
from scipy.integrate import quad
from torch import Tensor, nn

from saltflat.landscape import BatchSurface, Filters
from saltflat.measures import BNSharpness, NotApplicable
from saltflat.measures.bn_sharpness import Directions, feeding


class Shapes(nn.Module):
    """Ways to BatchNorm and past it."""

    def __init__(self) -> None:
        super().__init__()
        self.straight, self.bn1 = nn.Linear(4, 3), nn.BatchNorm1d(3)
        self.positions, self.bn2 = nn.Linear(3, 2), nn.BatchNorm1d(2)  # (n, T, C) is transposed
        self.skipped, self.bn3 = nn.Linear(3, 3), nn.BatchNorm1d(3)  # used past it too
        self.joined, self.bn4 = nn.Linear(3, 2), nn.BatchNorm1d(5)  # concatenated first
        self.shared, self.bn5 = nn.Linear(5, 4), nn.BatchNorm1d(2)  # two units a channel
        self.halved, self.bn6 = nn.Linear(4, 4), nn.BatchNorm1d(2)  # half of the units only
        self.late, self.bn7 = nn.Linear(4, 3), nn.BatchNorm1d(3)  # behind a ReLU
        self.weighed, self.bn8 = nn.Linear(3, 3), nn.BatchNorm1d(3)  # its weight is used again
        # a channel each in one, two units a channel in the other
        self.both, self.bn9, self.bn10 = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(2)
        self.fc = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn1(self.straight(x)).relu()
        t = self.positions(x.unsqueeze(1).repeat(1, 2, 1) * torch.tensor([[1.0], [2.0]]).to(x))
        t = self.bn2(t.transpose(1, 2).contiguous()).relu().sum((1, 2)).unsqueeze(1)
        z = self.skipped(x)
        x = self.bn3(z).relu() + 0.1 * z + t
        x = self.bn4(torch.cat([F.dropout(self.joined(x), 0.5, self.training), x], 1)).relu()
        x = self.bn5(self.shared(x).view(-1, 2, 2)).flatten(1).relu()
        a, b = self.halved(x).chunk(2, 1)
        x = torch.cat([self.bn6(a), b], 1)
        x = self.bn7(self.late(x).relu())
        x = self.bn8(self.weighed(x)) + self.weighed.weight.mean()
        z = self.both(x)
        x = self.bn9(z) + self.bn10(z.view(-1, 2, 2)).flatten(1)
        return self.fc(x)


class Returned(nn.Module):
    """What feeds BatchNorm is also what the model returns."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.bn, self.seen = nn.Linear(4, 2), nn.BatchNorm1d(2), torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        z = self.fc(x)
        self.seen = self.bn(z)
        return z


def images() -> Data:
    x, y = points(features=10)
    return x.view(12, 2, 5), y


SHAPES = [
    (
        Shapes,
        points(features=4),
        {
            "straight": [0, 1, 2],
            "positions": [0, 1],
            "joined": [0, 1],
            "halved": [0, 1],
        },
    ),
    (Convolutions, images(), {"grouped": [0, 1, 2, 3], "up": [0, 1, 2, 3, 4, 5]}),
    (lambda: nn.Sequential(nn.Linear(4, 2)), points(features=4), {}),
    (Returned, points(features=4), {}),
]


@pytest.mark.parametrize(
    ("make", "data", "expected"), SHAPES, ids=["linear", "conv", "none", "returned"]
)
def test_units_that_feed_batchnorm(
    make: Callable[[], nn.Module], data: Data, expected: dict[str, list[int]]
) -> None:
    model = seeded(make)
    for m in model.modules():
        if isinstance(m, nn.BatchNorm1d):
            m.eps = 1e-14
    with context_of(model, data) as context:
        fed = feeding(context.risk, context.layers)
        found = {
            layer.name: fed[layer.parameter].nonzero().flatten().tolist()
            for layer in context.layers
            if fed[layer.parameter].any()
        }
        assert found == expected
        surface = BatchSurface(context.risk, list(fed))
        base = surface.value()
        for layer in context.layers:
            for unit, here in enumerate(fed[layer.parameter]):
                grow = torch.zeros(len(fed[layer.parameter]), dtype=torch.float64)
                grow[unit] = 2.0
                shift = layer.weight * Filters(layer.weight, layer.matrix).spread(grow)
                change = abs(surface.value({layer.parameter: shift}) - base)
                assert (change < 1e-11) if here else (change > 1e-7)


# BN-Sharpness: the value


def trained(model: nn.Module) -> nn.Module:
    """The model with batch statistics and without dropout."""
    moving = copy.deepcopy(model)
    for m in moving.modules():
        m.training = not isinstance(m, nn.Dropout)
    return moving


def on_spheres(model: nn.Module, z: dict[str, Tensor]) -> dict[str, Tensor]:
    """φ(θ) for `normed`: the first Linear feeds BatchNorm, the second does not."""
    first = z["0.weight"] / z["0.weight"].norm(dim=1, keepdim=True)
    own = model[0].weight.detach().norm(dim=1, keepdim=True)
    return {"0.weight": first * own, "4.weight": z["4.weight"] / z["4.weight"].norm()}


def slope_of(model: nn.Module, data: Data) -> dict[str, Tensor]:
    v = {n: torch.zeros_like(w, requires_grad=True) for n, w in unflatten_all(model).items()}
    gradient = torch.autograd.grad(loss_at(trained(model), data, v), list(v.values()))
    return dict(zip(v, gradient, strict=True))


def naive_limit(model: nn.Module, data: Data, p: float) -> float:
    g = slope_of(model, data)
    own = model[0].weight.detach()
    total = sum(float(w.norm() * each.norm()) for w, each in zip(own, g["0.weight"], strict=True))
    return (2 / (p + 1)) ** (1 / p) * (total + float(g["4.weight"].norm()))


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, 4.5])
def test_the_limit_of_small_delta(p: float) -> None:
    model, data = seeded(normed), points(features=3)
    expected = naive_limit(model, data, p)
    limit = compute(BNSharpness(p=p, strategy="small_delta"), model, data)
    assert limit.value == pytest.approx(expected, rel=1e-10)
    assert limit.exact
    found = compute(BNSharpness(p=p, delta=1e-6, nodes=8), model, data)
    assert found.value == pytest.approx(expected, rel=1e-4)
    assert found.details["small_delta"] == limit.value
    assert found.details["batch_size"] == 12
    assert found.details["feeds_batchnorm"] == ["0"]
    assert found.lower_bound
    assert not found.exact


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("delta", [1e-3, 0.3])
def test_the_integral_along_the_gradient(p: float, delta: float) -> None:
    model, data = seeded(normed), points(features=3)
    v = on_spheres(model, slope_of(model, data))
    moving = trained(model)
    base = loss_at(moving, data, {}).item()

    def integrand(t: float) -> float:
        there = loss_at(moving, data, {n: t * x for n, x in v.items()}).item()
        return abs((there - base) / delta) ** p

    integral = sum(
        quad(integrand, a, b, epsabs=0, epsrel=1e-10)[0] for a, b in [(-delta, 0), (0, delta)]
    )
    expected = delta ** (-1 / p) * integral ** (1 / p)
    found = compute(BNSharpness(p=p, delta=delta, steps=1, restarts=0, nodes=8), model, data)
    assert found.value == pytest.approx(expected, rel=1e-7)
    few = compute(BNSharpness(p=p, delta=delta, steps=1, restarts=0), model, data)
    assert few.value == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(("delta", "tolerance"), [(1e-3, 1e-7), (0.3, 1e-4)])
def test_the_supremum_over_the_spheres(delta: float, tolerance: float) -> None:
    model, data = seeded(normed), points(features=3)
    moving = trained(model)
    base = loss_at(moving, data, {}).item()
    s, w = np.polynomial.legendre.leggauss(6)

    def height(flat: Tensor) -> Tensor:
        v = on_spheres(model, unflatten(model, flat))
        rises = [
            (loss_at(moving, data, {n: float(t) * delta * x for n, x in v.items()}) - base) / delta
            for t in s
        ]
        return (torch.tensor(w) * torch.stack(rises).square()).sum().sqrt()

    expected = supremum(height, flat_weights(model).numel(), starts=2)
    found = compute(BNSharpness(delta=delta, steps=25, nodes=4), model, data)
    assert found.value == pytest.approx(expected, rel=tolerance)
    assert found.value <= expected * (1 + 1e-7)
    assert compute(BNSharpness(delta=delta), model, data).value > 0.98 * expected


def test_the_mean_is_over_batches() -> None:
    model, (x, y) = seeded(normed), points(features=3)
    whole = compute(BNSharpness(), model, (x, y))
    split = compute(BNSharpness(), model, [(x[:6], y[:6]), (x[6:], y[6:])])
    assert (split.details["batch_size"], split.details["batches"]) == (6, 2)
    assert abs(split.value - whole.value) > 0.01 * whole.value
    assert "batch size 6" in split.notes[0]


def test_zero_filters_have_no_direction() -> None:
    model, data = seeded(normed), points(features=3)
    with torch.no_grad():
        model[0].weight[1] = 0.0
    for strategy in ("ascent", "small_delta"):
        found = compute(BNSharpness(strategy=strategy), model, data)
        assert math.isfinite(found.value)
        assert any(note.endswith("stay: 1") for note in found.notes)


def test_a_change_near_rounding_is_said() -> None:
    model, (x, y) = seeded(normed), points(features=3)
    assert len(compute(BNSharpness(delta=1e-6), model, (x, y)).notes) == 1
    notes = compute(BNSharpness(delta=1e-6), model.float(), (x.float(), y)).notes
    assert any("float64" in note for note in notes)


def test_where_the_gradient_vanishes_the_direction_stays_on_the_spheres() -> None:
    model, data = seeded(normed), points(features=3)
    with context_of(model, data) as context:
        spheres = Directions(context.layers, feeding(context.risk, context.layers))
    zero = {n: torch.zeros_like(w) for n, w in unflatten_all(model).items()}
    v = spheres.farthest(zero)
    torch.testing.assert_close(v, on_spheres(model, unflatten_all(model)))


def test_bn_sharpness_needs_batchnorm() -> None:
    with pytest.raises(NotApplicable, match="BatchNorm"):
        compute(BNSharpness(), seeded(tiny), points())


def test_bn_sharpness_does_not_feel_the_scale_of_filters_that_feed_batchnorm() -> None:
    factors = torch.tensor([1e3, 1e-3, 7.0, 0.2], dtype=torch.float64)

    def values(eps: float, scale: Tensor, head: float = 1.0) -> list[float]:
        model = seeded(lambda: normed(eps))
        with torch.no_grad():
            model[0].weight *= scale[:, None]
            model[4].weight *= head
        measures = [BNSharpness(), BNSharpness(delta=0.1), BNSharpness(strategy="small_delta")]
        return [compute(m, model, points(features=3)).value for m in measures]

    one = torch.ones(4, dtype=torch.float64)
    assert values(1e-30, factors) == pytest.approx(values(1e-30, one), rel=1e-8)
    for moved in (values(1e-3, factors), values(1e-30, one, head=2.0)):
        for a, b in zip(moved, values(1e-30, one), strict=True):
            assert a != pytest.approx(b, rel=1e-3)
