"""Measures keep their value under the rescalings they claim, and move under the others.

A rescaling is written out by hand here, layer by layer or unit by unit; it leaves the network's
function as it is. Every measure that has a name is covered, new ones too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import saltflat as sf
from saltflat.measures import MEASURES, NotApplicable

# Searched suprema: their invariance is tested where the search is, in the perturbation tests.
SEARCHED = {"bn_sharpness", "delta_sharpness", "sam_sharpness", "adaptive_sharpness"}
CHECKED = [name for name in MEASURES if name not in SEARCHED]
UNITS = 4  # of every hidden layer


def mlp(bias: bool) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(3, UNITS, bias=bias),
        nn.ReLU(),
        nn.Linear(UNITS, UNITS, bias=bias),
        nn.LeakyReLU(0.1),
        nn.Linear(UNITS, 3, bias=bias),
    )


def conv() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, UNITS, 2),
        nn.ReLU(),
        nn.Conv2d(UNITS, UNITS, 2, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(UNITS * 4, 3),
    )


NETWORKS: dict[str, tuple[Callable[[], nn.Sequential], tuple[int, ...]]] = {
    "mlp": (lambda: mlp(bias=True), (3,)),
    "mlp without bias": (lambda: mlp(bias=False), (3,)),
    "conv": (conv, (2, 6, 6)),
}


@cache
def network(name: str) -> tuple[nn.Sequential, tuple[Tensor, Tensor]]:
    build, shape = NETWORKS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        model = build().double()
        return model, (torch.randn(7, *shape, dtype=torch.float64), torch.arange(7) % 3)


def layers(model: nn.Sequential) -> list[nn.Linear | nn.Conv2d]:
    return [m for m in model if isinstance(m, nn.Linear | nn.Conv2d)]


def by_layer(model: nn.Sequential) -> nn.Sequential:
    """W_d → α_d W_d and b_d → (α_1 ⋯ α_d) b_d, with α_1 α_2 α_3 = 1."""
    moved, sofar = copy.deepcopy(model), 1.0
    with torch.no_grad():
        for layer, factor in zip(layers(moved), (1e3, 1e-2, 1e-1), strict=True):
            sofar *= factor
            layer.weight *= factor
            if layer.bias is not None:
                layer.bias *= sofar
    return moved


def by_neuron(model: nn.Sequential) -> nn.Sequential:
    """What enters a hidden unit times its factor, what leaves it divided by that."""
    moved = copy.deepcopy(model)
    chain = layers(moved)
    factors = torch.tensor([[1e3, 1e-3, 1.0, 40.0], [2.0, 1e-2, 1e3, 0.3]], dtype=torch.float64)
    with torch.no_grad():
        for first, second, factor in zip(chain, chain[1:], factors, strict=False):
            first.weight *= factor.reshape(-1, *[1] * (first.weight.ndim - 1))
            if first.bias is not None:
                first.bias *= factor
            places = second.weight.shape[1] // UNITS  # a flattened image keeps its channels apart
            each = factor.repeat_interleave(places)
            second.weight /= each.reshape(1, -1, *[1] * (second.weight.ndim - 2))
    return moved


RESCALINGS = {"layer": by_layer, "neuron": by_neuron}


@cache
def report(name: str, rescaling: str | None) -> dict[str, sf.Measurement]:
    """All that apply, from one call if they all do."""
    model, data = network(name)
    moved = RESCALINGS[rescaling](model) if rescaling else model
    return applicable(moved, data, CHECKED)


def applicable(
    model: nn.Module, data: tuple[Tensor, Tensor], names: list[str], **options: str
) -> dict[str, sf.Measurement]:
    try:
        measures = [MEASURES[name]().for_comparison() for name in names]
        return dict(sf.measure(model, data, measures=measures, **options))
    except NotApplicable:
        if len(names) == 1:
            return {}
        half = len(names) // 2
        first, second = names[:half], names[half:]
        return applicable(model, data, first, **options) | applicable(
            model, data, second, **options
        )


def value(name: str, measure: str, rescaling: str | None) -> sf.Measurement | None:
    return report(name, rescaling).get(measure)


@pytest.mark.parametrize("rescaling", RESCALINGS)
@pytest.mark.parametrize("name", NETWORKS)
def test_the_function_is_unchanged(name: str, rescaling: str) -> None:
    model, (x, _) = network(name)
    moved = RESCALINGS[rescaling](model)
    torch.testing.assert_close(moved(x), model(x), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(layers(moved)[0].weight, layers(model)[0].weight)


@pytest.mark.parametrize("rescaling", RESCALINGS)
@pytest.mark.parametrize("measure", CHECKED)
@pytest.mark.parametrize("name", NETWORKS)
def test_invariance_is_as_declared(name: str, measure: str, rescaling: str) -> None:
    before, after = value(name, measure, None), value(name, measure, rescaling)
    if before is None or after is None:
        assert before is after, "it applies to one and not to the other"
        pytest.skip(f"{measure} does not apply to {name}")
    change = abs(after.value - before.value)
    if rescaling in MEASURES[measure].invariant_to:
        assert change <= 1e-8 * abs(before.value) + before.gap + after.gap
        assert before.gap <= 1e-6 * abs(before.value), "a gap that hides the change"
        assert after.gap <= 1e-6 * abs(after.value), "a gap that hides the change"
    else:
        assert change > 1e-2 * abs(before.value), "declares too little, or the control is weak"


def test_every_measure_is_checked_somewhere() -> None:
    applies = {m for m in CHECKED for name in NETWORKS if value(name, m, None) is not None}
    assert applies == set(CHECKED)
    assert set(MEASURES) >= SEARCHED


def test_both_kinds_are_there() -> None:
    """A negative control of the table: some claim each rescaling, some do not."""
    for rescaling in RESCALINGS:
        claims = {rescaling in MEASURES[name].invariant_to for name in CHECKED}
        assert claims == {True, False}


@pytest.mark.parametrize("name", ["mlp", "conv"])
def test_views_are_invariant_too(name: str) -> None:
    before, after = value(name, "rho", None), value(name, "rho", "neuron")
    assert before is not None
    assert after is not None
    for layer, values in before.by_neuron.items():
        torch.testing.assert_close(after.by_neuron[layer], values, rtol=1e-8, atol=1e-14)


# Symmetries of normalisation and attention


def drawn(build: Callable[[], nn.Module], *shape: int) -> tuple[nn.Module, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build().double(), torch.randn(*shape, dtype=torch.float64)


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3)
        self.fc = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.bn(self.conv(x)).relu().mean((2, 3)))


def test_batchnorm() -> None:
    """Filters times their factors, statistics along with them: the function stays."""
    model, x = drawn(Normalised, 9, 2, 4, 4)
    model.train()(x)
    model.eval()
    moved = copy.deepcopy(model)
    factor = torch.tensor([1e2, 1e-2, 3.0], dtype=torch.float64)
    with torch.no_grad():
        moved.conv.weight *= factor[:, None, None, None]
        moved.conv.bias *= factor
        moved.bn.running_mean *= factor
        variance = (model.bn.running_var + model.bn.eps) * factor**2 - model.bn.eps
        moved.bn.running_var.copy_(variance)
    torch.testing.assert_close(moved(x), model(x))
    compared(model, moved, x, "batchnorm", curvature="hessian")


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(3, 4) for _ in range(3))
        self.out, self.fc = nn.Linear(4, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        weights = (self.q(x) @ self.k(x).mT).softmax(-1)
        return self.fc((x + self.out(weights @ self.v(x))).mean(1))


def test_attention() -> None:
    """Queries times a factor, keys over it; values times a factor, the projection over it."""
    model, x = drawn(Attends, 9, 3, 3)
    moved = copy.deepcopy(model)
    factor = torch.tensor([1e2, 1e-2, 3.0, 0.5], dtype=torch.float64)
    with torch.no_grad():
        for name, each in (("q", factor), ("k", 1 / factor), ("v", factor)):
            layer = getattr(moved, name)
            layer.weight *= each[:, None]
            layer.bias *= each
        moved.out.weight /= factor
    torch.testing.assert_close(moved(x), model(x))
    compared(model, moved, x, "attention", curvature="ggn")


def compared(model: nn.Module, moved: nn.Module, x: Tensor, kind: str, curvature: str) -> None:
    data = (x, torch.arange(len(x)) % 3)
    stays = [name for name in CHECKED if kind in MEASURES[name].invariant_to]
    assert "rho" in stays
    names = [*stays, "hessian_trace"]
    old, new = (applicable(m, data, names, curvature=curvature) for m in (model, moved))
    assert old.keys() == new.keys()
    for name, before in old.items():
        after = new[name]
        change = abs(after.value - before.value)
        if name in stays:
            assert change <= 1e-8 * abs(before.value) + before.gap + after.gap, name
        else:
            assert change > 1e-2 * abs(before.value), "the control is weak"
