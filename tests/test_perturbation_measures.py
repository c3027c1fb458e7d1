"""Measures of the loss in a ball around the weights, against naive transcriptions."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from perturbed import (
    Data,
    compute,
    context_of,
    flat_weights,
    layers_of,
    linear,
    loss_at,
    normed,
    points,
    relu,
    seeded,
    supremum,
    tiny,
    unflatten,
    unflatten_all,
)
from torch import Tensor, nn
from torch.func import functional_call
from untouched import assert_untouched, dressed, fingerprint

from saltflat.errors import InvalidValue
from saltflat.landscape import Ball, ascend
from saltflat.measures import (
    AdaptiveSharpness,
    BNSharpness,
    DeltaSharpness,
    Measure,
    NotApplicable,
    SamSharpness,
)


def ball_supremum(model: nn.Module, data: Data, radius: float, scale: Tensor | float) -> float:
    size = sum(layer.weight.numel() for layer in layers_of(model))

    loss = loss_at(model, data, {})

    def on_the_sphere(z: Tensor) -> Tensor:
        return (
            loss_at(model, data, unflatten(model, radius * z / z.norm() * scale)) - loss
        ) / radius

    return supremum(on_the_sphere, size) * radius


@pytest.mark.parametrize(("radius", "tolerance"), [(1e-3, 1e-9), (0.05, 1e-9), (1.0, 1e-4)])
def test_sam_and_delta_sharpness_find_the_supremum(radius: float, tolerance: float) -> None:
    model, data = seeded(tiny), points()
    expected = ball_supremum(model, data, radius, 1.0)
    found = compute(SamSharpness(rho=radius, steps=20, restarts=2), model, data)
    assert (found.lower_bound, found.exact, found.stderr) == (True, False, 0.0)
    assert found.value == pytest.approx(expected, rel=tolerance)
    assert found.value <= expected * (1 + 1e-9)
    assert found.settings["rho"] == radius
    delta = compute(DeltaSharpness(delta=radius, steps=20, restarts=2), model, data)
    loss = loss_at(model, data, {}).item()
    assert delta.value == pytest.approx(expected / (1 + loss), rel=tolerance)
    assert (delta.lower_bound, delta.exact) == (True, False)


@pytest.mark.parametrize("radius", [0.1, 0.5])
def test_adaptive_sharpness_finds_the_supremum(radius: float) -> None:
    model, data = seeded(tiny), points()
    expected = ball_supremum(model, data, radius, flat_weights(model).abs())
    found = compute(AdaptiveSharpness(rho=radius), model, data)
    assert found.value == pytest.approx(expected, rel=1e-9)
    assert found.value <= expected * (1 + 1e-9)


def test_the_largest_on_a_cube_beats_all_its_corners() -> None:
    model, data = seeded(tiny), points()
    w = flat_weights(model).abs()
    corners = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=torch.float64)] * len(w))
    names = unflatten(model, w)
    values = []
    for part in corners.split(512):
        stacked = {
            n: torch.stack([unflatten(model, 0.3 * u * w)[n] for u in part]) + p
            for n, p in dict(model.named_parameters()).items()
            if n in names
        }
        outputs = torch.func.vmap(
            lambda s: F.cross_entropy(functional_call(model, s, (data[0],)), data[1])
        )({n: s.detach() for n, s in stacked.items()})
        values.append(outputs)
    expected = (torch.cat(values).max() - loss_at(model, data, {})).item()
    found = compute(AdaptiveSharpness(rho=0.3, p=math.inf, restarts=3), model, data)
    assert found.value >= expected * (1 - 1e-9)
    assert found.value <= expected * 1.05  # corners are nearly the largest


def test_one_step_is_sams_own_point() -> None:
    model, data = seeded(tiny), points()
    v = {n: torch.zeros_like(p, requires_grad=True) for n, p in unflatten_all(model).items()}
    gradient = dict(
        zip(v, torch.autograd.grad(loss_at(model, data, v), list(v.values())), strict=True)
    )
    length = torch.cat([g.flatten() for g in gradient.values()]).norm()
    expected = loss_at(model, data, {n: 0.05 * g / length for n, g in gradient.items()})
    found = compute(SamSharpness(steps=1, restarts=0), model, data)
    rise = (expected - loss_at(model, data, {})).item()
    assert found.value == pytest.approx(rise, rel=1e-10)
    assert found.details["one_step"] == pytest.approx(rise, rel=1e-10)
    assert found.details["evaluations"] == 2


def test_more_search_is_never_worse_and_repeats_itself() -> None:
    model, data = seeded(relu), points(features=4, classes=3)
    values = [compute(SamSharpness(rho=2.0, steps=k), model, data).value for k in (1, 3, 9, 27)]
    assert values == sorted(values)
    assert values[0] < values[-1]
    assert compute(SamSharpness(rho=2.0, steps=27), model, data).value == values[-1]


def test_never_negative() -> None:
    def downhill(outputs: Tensor, targets: Tensor) -> Tensor:
        return -outputs.square().sum() + 3.0

    model = seeded(linear)
    assert compute(SamSharpness(), model, points(), downhill).value > 0.0
    nn.init.zeros_(model[0].weight)
    assert compute(SamSharpness(), model, points(), downhill).value == 0.0
    nn.init.constant_(model[0].weight, 1e-4)
    past = compute(SamSharpness(steps=1, restarts=0), model, points(), downhill)
    assert past.details["one_step"] < 0.0  # one step goes past the summit
    assert past.value == 0.0


def test_a_maximum_inside_the_ball_is_found() -> None:
    target = {"w": torch.tensor([0.3, -0.2], dtype=torch.float64)}

    def bump(u: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
        away = u["w"] - target["w"]
        return -float(away.square().sum()), {"w": -2 * away}

    for p in (2.0, math.inf):
        start = {"w": torch.tensor([1.0, 0.0], dtype=torch.float64)}
        found = ascend(bump, Ball(1.0, p), [start], steps=60)
        assert found.value == pytest.approx(0.0, abs=1e-4)


def test_the_best_of_all_starts_is_kept() -> None:
    def line(u: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
        return float(u["w"][0]), {"w": torch.zeros(1, dtype=torch.float64)}

    starts = [{"w": torch.tensor([x], dtype=torch.float64)} for x in (0.2, 0.7, 0.4)]
    found = ascend(line, Ball(1.0), starts, steps=3)
    assert (found.value, found.first, found.point["w"].item()) == (0.7, 0.2, 0.7)


def test_the_mean_over_gaussian_perturbations() -> None:
    model, data = seeded(tiny), points()
    w = flat_weights(model)
    generator = torch.Generator().manual_seed(5)
    base = loss_at(model, data, {}).item()
    for measure, scale in (
        (SamSharpness(rho=1.0, average=True), torch.ones_like(w)),
        (AdaptiveSharpness(rho=1.0, average=True), w.abs()),
    ):
        found = compute(measure, model, data)
        z = torch.randn(4000, len(w), generator=generator, dtype=torch.float64) / len(w) ** 0.5
        many = [loss_at(model, data, unflatten(model, u * scale)).item() - base for u in z]
        error = np.std(many) / len(many) ** 0.5
        assert (found.lower_bound, found.exact) == (False, False)
        assert abs(found.value - np.mean(many)) < 4 * math.hypot(found.stderr, error)
        assert found.stderr < np.std(many) / 32**0.5  # pairs do better than single draws


def test_the_mean_over_a_cube() -> None:
    """For a quadratic loss the mean is Σ_i H_ii w_i² ρ² / 6."""
    model, (x, _) = seeded(linear), points()
    y = torch.zeros(12, 2, dtype=torch.float64)
    measure = AdaptiveSharpness(rho=0.5, p=math.inf, average=True, draws=400)
    found = compute(measure, model, (x, y), "mse")
    w = flat_weights(model).view(2, 2)
    diagonal = x.square().mean(0)  # the mean over 2 outputs halves the 2 of the square
    expected = float((diagonal * w.square()).sum()) * 0.25 / 6
    assert abs(found.value - expected) < 4 * found.stderr < 0.4 * expected


# Invariance


def rescale(model: nn.Module, factors: Tensor) -> nn.Module:
    """Unit i of the first Linear times factors[i], and what it feeds divided by it."""
    moved = copy.deepcopy(model)
    with torch.no_grad():
        moved[0].weight *= factors[:, None]
        moved[0].bias *= factors
        moved[2].weight /= factors
    return moved


RESCALINGS = [
    torch.full((5,), 1e3, dtype=torch.float64),
    torch.full((5,), 1e-3, dtype=torch.float64),
    torch.tensor([1e3, 1e-3, 7.0, 0.2, 1.0], dtype=torch.float64),
]


@pytest.mark.parametrize("factors", RESCALINGS, ids=["up", "down", "units"])
def test_adaptive_sharpness_does_not_feel_rescalings_and_others_do(factors: Tensor) -> None:
    model, data = seeded(relu), points(features=4, classes=3)
    moved = rescale(model, factors)
    torch.testing.assert_close(moved(data[0]), model(data[0]), rtol=1e-10, atol=1e-12)
    for measure in (
        AdaptiveSharpness(),
        AdaptiveSharpness(average=True),
        AdaptiveSharpness(rho=0.2, p=math.inf),
        AdaptiveSharpness(rho=0.2, p=math.inf, average=True),
    ):
        before = compute(measure, model, data)
        assert compute(measure, moved, data).value == pytest.approx(before.value, rel=1e-8)
        assert before.invariant_to >= {"layer", "neuron", "batchnorm", "attention"}
    for control in (SamSharpness(), DeltaSharpness(), SamSharpness(average=True)):
        before = compute(control, model, data)
        assert compute(control, moved, data).value != pytest.approx(before.value, rel=0.1)
        assert not before.invariant_to


# What a model and its data must not notice, or must not matter


MEASURES: list[Measure] = [
    DeltaSharpness(steps=2),
    SamSharpness(steps=2),
    SamSharpness(average=True, draws=4),
    AdaptiveSharpness(steps=2),
    BNSharpness(steps=2),
    BNSharpness(strategy="small_delta"),
]


@pytest.mark.parametrize("measure", MEASURES, ids=lambda m: m.name)
def test_the_model_is_left_as_found(measure: Measure) -> None:
    model = dressed(seeded(normed))
    before = fingerprint(model)
    compute(measure, model, points(features=3))
    assert_untouched(model, before)


@pytest.mark.parametrize("measure", MEASURES, ids=lambda m: m.name)
def test_the_model_is_left_as_found_when_an_error_passes(measure: Measure) -> None:
    model = dressed(seeded(normed))
    weight = model[0].weight
    home = weight.data_ptr()

    def fragile(outputs: Tensor, targets: Tensor) -> Tensor:
        if weight.data_ptr() != home or measure == MEASURES[-1]:  # which moves nothing
            raise KeyError("injected")
        return F.cross_entropy(outputs, targets)

    before = fingerprint(model)
    with context_of(model, points(features=3), fragile) as context:
        inside = {n: p.data_ptr() for n, p in model.named_parameters()}
        with pytest.raises(KeyError, match="injected"):
            measure.compute(context)
        assert inside == {n: p.data_ptr() for n, p in model.named_parameters()}
        assert not any(m.training for m in model.modules())
    assert_untouched(model, before)


@pytest.mark.parametrize("measure", MEASURES[:4], ids=lambda m: m.name)
def test_batches_do_not_matter_in_evaluation_mode(measure: Measure) -> None:
    model, (x, y) = seeded(normed), points(features=3)
    parts = [(x[:5], y[:5]), (x[5:6], y[5:6]), (x[6:], y[6:])]
    whole, split = compute(measure, model, (x, y)), compute(measure, model, parts)
    assert split.value == pytest.approx(whole.value, rel=1e-9)


def test_a_growth_near_rounding_is_said() -> None:
    model, (x, y) = seeded(tiny), points()
    assert compute(DeltaSharpness(delta=1e-6), model, (x, y)).notes == ()
    (note,) = compute(DeltaSharpness(delta=1e-6), model.float(), (x.float(), y)).notes
    assert "float64" in note


def test_delta_sharpness_needs_a_loss_that_is_not_negative() -> None:
    def negative(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets) - 5.0

    with pytest.raises(NotApplicable, match="not negative"):
        compute(DeltaSharpness(), seeded(tiny), points(), negative)


@pytest.mark.parametrize(
    "make",
    [
        lambda: DeltaSharpness(delta=0.0),
        lambda: DeltaSharpness(delta=math.inf),
        lambda: SamSharpness(rho=-1.0),
        lambda: SamSharpness(steps=0),
        lambda: SamSharpness(restarts=-1),
        lambda: AdaptiveSharpness(draws=3),
        lambda: AdaptiveSharpness(p=1.0),
        lambda: BNSharpness(p=0.5),
        lambda: BNSharpness(p=math.inf),
        lambda: BNSharpness(nodes=0),
        lambda: BNSharpness(delta=math.nan),
        lambda: BNSharpness(strategy="guess"),
    ],
)
def test_settings_that_make_no_sense(make: Callable[[], Measure]) -> None:
    with pytest.raises(InvalidValue, match="Got"):
        make()
