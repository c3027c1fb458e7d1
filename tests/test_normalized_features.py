"""Relative flatness with normalised features, where features or layers are out of the ordinary."""

from __future__ import annotations

import warnings

import networks as net
import papers
import pytest
import torch
import torch.nn.functional as F
from cases import BY_NAME, Case, classes, normal
from dense import Dense
from torch import Tensor, nn

import saltflat as sf
from saltflat.measures import RelativeFlatness


def measured(model: nn.Module, data: object, layer: str, **options: object) -> sf.Measurement:
    measures = [RelativeFlatness(layer=layer, normalize_features=True)]
    return sf.measure(model, data, measures=measures, **options)["relative_flatness"]


def truth(model: nn.Module, data: tuple[Tensor, Tensor], layer: str, scale: Tensor) -> float:
    others = {"weight": papers.plain(3, 4)}
    found = papers.layers(Dense(model, *data), others=others)[layer]
    value = papers.relative_flatness(found, scale)
    assert abs(value - papers.relative_flatness(found)) > 1e-3 * abs(value), "it must matter"
    return value


def of_rounding(n: int) -> float:
    """A number whose n copies have a variance above zero, by rounding alone."""
    for k in range(1, 1000):
        x = torch.full((n,), k / 7, dtype=torch.float64)
        if x.square().sum() / n - (x.sum() / n) ** 2 > 0:
            return k / 7
    raise AssertionError("there should be one")


def test_a_feature_that_never_changes_is_measured_by_its_size() -> None:
    case = BY_NAME["mlp"]
    x, y = case.data(n=12)
    x[:, 1], x[:, 2] = -3.0, of_rounding(12)
    scale = x.std(0, correction=0)
    scale[1:3] = x[0, 1:3].abs()
    model = case.model()
    want = truth(case.model(), (x, y), "0", scale)
    for data in ((x, y), [(x[:5], y[:5]), (x[5:], y[5:])]):
        assert measured(model, data, "0").value == pytest.approx(want, rel=1e-10)


@pytest.mark.parametrize("groups", [1, 2])
def test_transposed_convolutions(groups: int) -> None:
    def build() -> nn.Module:
        up = nn.ConvTranspose2d(4, 4, 2, stride=2, groups=groups)
        return net.seq(up, nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))

    case = Case("transposed", build, normal(4, 2, 2), classes(3), n=7)
    x, _ = case.data()
    scale = x.movedim(1, -1).flatten(0, -2).std(0, correction=0)
    want = truth(case.model(), case.data(), "0", scale)
    assert measured(case.model(), case.data(), "0").value == pytest.approx(want, rel=1e-10)


class Twice(nn.Module):
    """The outputs are linear in a weight of which only one of two uses is seen as a layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) + F.linear(x.flip(1), self.weight.clone() * 1.5)


def test_gradients_that_are_written_out() -> None:
    torch.manual_seed(0)
    model = Twice().double()
    nn.init.normal_(model.weight)
    x, y = BY_NAME["mlp"].data(n=10)
    x = x * torch.tensor([1.0, 2.0, 5.0, 0.1], dtype=torch.float64)
    assert sf.trace(model, (x, y)).details["weight"].rule == "per-sample"
    found = measured(model, (x, y), "weight")
    assert found.exact
    want = truth(model, (x, y), "weight", x.std(0, correction=0))
    assert found.value == pytest.approx(want, rel=1e-10)


def bent(zero: bool) -> tuple[nn.Module, tuple[Tensor, Tensor], Tensor]:
    """A network that is not piecewise linear, its data, and the scales of its inputs."""
    case = BY_NAME["mlp GELU"]
    x, y = case.data(n=12)
    x = x * torch.tensor([0.2, 1.0, 4.0, 0.0 if zero else 2.0], dtype=torch.float64)
    scale = x.std(0, correction=0)
    if zero:
        scale[3] = 1e-9  # so little that its weights do not count; there is no curvature
    return case.model(), (x, y), scale


@pytest.mark.parametrize("zero", [False, True])
def test_products_that_write_it_out(zero: bool) -> None:
    model, data, scale = bent(zero)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is estimated, so there is nothing to say
        found = measured(model, data, "0", estimator=sf.Hutchinson(probes=1000))
    assert found.exact
    assert found.value == pytest.approx(truth(model, data, "0", scale), rel=1e-10)


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.filterwarnings("ignore:.*estimated by Hutchinson")
def test_estimates_from_products(zero: bool) -> None:
    model, data, scale = bent(zero)
    found = measured(model, data, "0", estimator=sf.Hutchinson(probes=15))
    want = truth(model, data, "0", scale)
    assert not found.exact
    assert abs(found.value - want) < 4.5 * found.stderr
    values = [
        measured(model, data, "0", estimator=sf.Hutchinson(probes=15, seed=seed)).value
        for seed in range(60)
    ]
    mean, error = torch.tensor(values).mean(), torch.tensor(values).std() / 60**0.5
    assert abs(float(mean) - want) < 4 * float(error) < 0.5 * want
