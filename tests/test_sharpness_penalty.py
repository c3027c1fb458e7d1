"""Sharpness penalties: their gradient against finite differences of the measure itself."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import saltflat as sf
from saltflat.training.sharpness_penalty import SharpnessPenalty

MEASURES = ["minimum_sharpness", "neuronwise_minimum_sharpness", "normalized_sharpness"]


def problem(seed: int = 0) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 5), nn.LeakyReLU(), nn.Linear(5, 3, bias=False)).double()
    x = torch.randn(20, 4, dtype=torch.float64)
    return model, x, torch.randint(3, (20,))


def every_direction(penalty: SharpnessPenalty, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unit vectors instead of random signs: as many probes as entries make the sum exact."""
    sizes = {name: w.numel() for name, w in penalty._weights.items()}
    total = sum(sizes.values())
    count = {"k": -1}

    def probe(name: str) -> Tensor:
        if name == next(iter(sizes)):
            count["k"] += 1
        start = sum(size for n, size in list(sizes.items())[: list(sizes).index(name)])
        root = penalty._weights[name]
        flat = torch.zeros(root.numel(), dtype=root.dtype)
        at = count["k"] % total - start
        if 0 <= at < root.numel():
            flat[at] = root.flatten()[at] * total**0.5
        return flat.reshape(root.shape)

    monkeypatch.setattr(penalty, "_probe", probe)
    penalty.probes = total


@pytest.mark.parametrize("measure", MEASURES)
def test_gradient_of_the_measure(measure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = problem()
    penalty = SharpnessPenalty(model, (x, y), strength=1.0, measure=measure)
    penalty._find()
    penalty.calls = 1
    every_direction(penalty, monkeypatch)
    value = penalty(F.cross_entropy(model(x), y))
    want = sf.measure(model, (x, y), measures=[measure])[measure]
    assert float(value.detach()) == pytest.approx(want.value, rel=1e-8)
    value.backward()
    g = torch.Generator().manual_seed(1)
    step = 1e-5
    for _ in range(3):
        direction: list[Any] = [
            torch.randn(p.shape, generator=g).double() for p in model.parameters()
        ]
        slope = sum(
            float((p.grad * d).sum()) for p, d in zip(model.parameters(), direction, strict=True)
        )
        ends = []
        for side in (1, -1):
            with torch.no_grad():
                for p, d in zip(model.parameters(), direction, strict=True):
                    p.add_(side * step * d)
            ends.append(sf.measure(model, (x, y), measures=[measure])[measure].value)
            with torch.no_grad():
                for p, d in zip(model.parameters(), direction, strict=True):
                    p.sub_(side * step * d)
        assert slope == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-4)


def test_random_signs_are_unbiased() -> None:
    model, x, y = problem()
    penalty = SharpnessPenalty(model, (x, y), strength=1.0)
    values = torch.stack([penalty(F.cross_entropy(model(x), y)).detach() for _ in range(300)])
    want = sf.measure(model, (x, y), measures=["minimum_sharpness"])["minimum_sharpness"].value
    error = float(values.std() / 300**0.5)
    assert error > 0
    assert abs(float(values.mean()) - want) < 4 * error
    assert abs(float(values.mean()) - 1.3 * want) > 4 * error  # the test has the power to fail


def test_training_with_it_gets_flatter() -> None:
    values = {}
    for strength in (0.0, 0.05):
        model, x, y = problem(3)
        penalty = SharpnessPenalty(model, (x, y), strength=strength, refresh=5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(60):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            (loss + penalty(loss)).backward()
            optimizer.step()
        values[strength] = sf.measure(model, (x, y), measures=["minimum_sharpness"])
    flat, plain = (values[s]["minimum_sharpness"].value for s in (0.05, 0.0))
    assert flat < 0.9 * plain


def test_errors() -> None:
    model, x, y = problem()
    with pytest.raises(sf.InvalidValue, match="measure must be one of"):
        SharpnessPenalty(model, (x, y), measure="rho")
    with pytest.raises(sf.InvalidValue, match="refresh must be an integer of at least 1"):
        SharpnessPenalty(model, (x, y), refresh=0)
    with pytest.raises(sf.InvalidValue, match="probes must be an integer of at least 1"):
        SharpnessPenalty(model, (x, y), probes=True)
    with pytest.raises(sf.InvalidValue, match="strength"):
        SharpnessPenalty(model, (x, y), strength=-1.0)
    with pytest.raises(sf.LossError, match="with its graph"):
        SharpnessPenalty(model, (x, y))(torch.tensor(1.0))


def test_the_state_of_another_model_is_refused() -> None:
    model, x, y = problem()
    penalty = SharpnessPenalty(model, (x, y))
    penalty(F.cross_entropy(model(x), y))
    state = penalty.state_dict()
    other = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(sf.InvalidValue, match="state is that of another model"):
        SharpnessPenalty(other, (x, y)).load_state_dict(state)
    wider = copy.deepcopy(model)
    wider[0] = nn.Linear(7, 7)
    with pytest.raises(sf.InvalidValue, match=r"has \(7"):
        SharpnessPenalty(wider, (x, y)).load_state_dict(state)


def test_a_loss_of_another_model_is_refused() -> None:
    model, x, y = problem()
    other, _, _ = problem()
    with pytest.raises(sf.LossError, match="does not depend"):
        SharpnessPenalty(model, (x, y))(F.cross_entropy(other(x), y))


def test_negative_curvature_is_no_penalty() -> None:
    model, x, y = problem()

    def downward(o: Tensor, y: Tensor) -> Tensor:
        return -o.square().mean()

    value = downward(model(x), y)
    with pytest.raises(sf.ModelError, match="measure='normalized_sharpness'"):
        SharpnessPenalty(model, (x, y), loss=downward)(value)
    SharpnessPenalty(model, (x, y), loss=downward, measure="normalized_sharpness")(value)
