"""A measure of one layer touches one layer: nothing below it is differentiated."""

from __future__ import annotations

from typing import Any

import papers
import pytest
import torch
from dense import Dense
from torch import Tensor, nn

import saltflat as sf
from saltflat.measures import RelativeFlatness


class Tripwire(torch.autograd.Function):
    """The identity, which counts how often it is gone through backwards."""

    passed = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        Tripwire.passed += 1
        return slope


class Wired(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.low, self.middle, self.last = nn.Linear(4, 5), nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(Tripwire.apply(self.low(x).tanh())).relu())


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    Tripwire.passed = 0
    return Wired().double()


X = torch.randn(9, 4, generator=torch.Generator().manual_seed(1)).double()
Y = torch.arange(9) % 3


@pytest.mark.parametrize(
    ("settings", "layer"),
    [({}, "last"), ({"layer": "last"}, "last"), ({"layer": "middle"}, "middle")],
)
@pytest.mark.parametrize("simplified", [False, True])
def test_nothing_below_is_differentiated(model, settings, layer: str, simplified: bool) -> None:
    measure = RelativeFlatness(**settings, simplified=simplified)
    found = sf.measure(model, (X, Y), measures=[measure])["relative_flatness"]
    assert Tripwire.passed == 0
    true = papers.layers(Dense(model, X, Y))[layer]
    want = papers.kappa_trace(true) if simplified else papers.relative_flatness(true)
    assert found.value == pytest.approx(want, rel=1e-10)
    assert found.exact
    assert dict(found.by_layer) == {layer: found.value}


def test_the_wire_is_tripped_by_what_lies_below(model) -> None:
    sf.measure(model, (X, Y), measures=[RelativeFlatness(layer="low")])
    assert Tripwire.passed > 0


def test_a_trace_of_one_parameter_touches_nothing_below(model) -> None:
    sf.trace(model, (X, Y), parameters=["middle.weight"])
    sf.eigenvalues(model, (X, Y), parameters=["last.weight"], k=1)
    assert Tripwire.passed == 0


def test_other_measures_have_all_layers(model) -> None:
    # The values must not depend on what else is asked for.
    alone = sf.measure(model, (X, Y), measures=["relative_flatness"])["relative_flatness"]
    estimator = sf.Hutchinson(300)  # more than there are entries: products give all of it
    both = sf.measure(
        model, (X, Y), measures=["relative_flatness", "hessian_trace"], estimator=estimator
    )
    assert both["relative_flatness"].value == pytest.approx(alone.value, rel=1e-12)
    assert set(both["relative_flatness"].by_layer) == {"last"}
    want = float(Dense(model, X, Y).hessian.trace())
    assert both["hessian_trace"].value == pytest.approx(want, rel=1e-9)


def test_every_layer_on_request(model) -> None:
    found = sf.measure(
        model, (X, Y), measures=[RelativeFlatness(by_layer=True)], estimator=sf.Hutchinson(300)
    )["relative_flatness"]
    for name, layer in papers.layers(Dense(model, X, Y)).items():
        assert found.by_layer[name] == pytest.approx(papers.relative_flatness(layer), rel=1e-9)
    assert found.details["layer"] == "last"


def test_the_model_is_left_as_it_was(model) -> None:
    model.middle.bias.requires_grad_(False)
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    sf.measure(model, (X, Y), measures=["relative_flatness"])
    assert {name: p.requires_grad for name, p in model.named_parameters()} == before


class Late(nn.Module):
    """The last Linear that is called is not the last one that is made, and is called by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5))
        self.first = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.first(x).relu(), self.weight)


def test_the_last_to_be_called() -> None:
    torch.manual_seed(0)
    late = Late().double()
    found = sf.measure(late, (X, Y), measures=["relative_flatness"])["relative_flatness"]
    assert found.details["layer"] == "weight"
    (layer,) = papers.layers(
        Dense(late, X, Y, names=["weight"]), others={"weight": papers.plain(3, 5)}
    ).values()
    assert found.value == pytest.approx(papers.relative_flatness(layer), rel=1e-10)
