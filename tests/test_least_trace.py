"""The least trace over a group, from made-up curvature: what is noise, and what depends on what."""

from __future__ import annotations

from math import sqrt

import pytest
import torch
from torch import Tensor, nn

import saltflat as sf
from saltflat.errors import NegativeCurvature
from saltflat.symmetries import (
    Group,
    class_masses,
    least_trace,
    uniform_parameters,
)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(3, 4, bias=False), nn.ReLU(), nn.Linear(4, 2, bias=False)
    ).double()


def group_of(model: nn.Module, only: str | None = None) -> Group:
    group = sf.symmetries(model, torch.ones(2, 3).double())
    return group.only(only) if only else group


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def test_two_layers_by_hand() -> None:
    """T1/α² + T2 α² is least at 2 sqrt(T1 T2); its derivatives in T1 and T2 are the slopes."""
    curvature = {"0.weight": number(9.0), "2.weight": number(4.0)}
    least = least_trace(group_of(net(), "layer"), curvature)
    assert least.value == pytest.approx(12.0, rel=1e-12)
    assert least.slopes["0.weight"] == pytest.approx(sqrt(4 / 9), rel=1e-8)
    assert least.slopes["2.weight"] == pytest.approx(sqrt(9 / 4), rel=1e-8)
    assert least.by_parameter == pytest.approx({"0.weight": 6.0, "2.weight": 6.0}, rel=1e-8)
    assert not least.vanishing


def test_parameters_that_the_group_does_not_move_add_to_it() -> None:
    model = nn.Sequential(*net(), nn.Tanh(), nn.Linear(2, 2, bias=False)).double()
    curvature = {"0.weight": number(9.0), "2.weight": number(4.0), "4.weight": number(5.0)}
    curvature["unknown"] = torch.tensor([2.0, 1.0], dtype=torch.float64)
    least = least_trace(group_of(model, "layer"), curvature)
    assert least.value == pytest.approx(20.0, rel=1e-12)
    assert (least.slopes["unknown"], least.by_parameter["unknown"]) == (1.0, 3.0)
    assert least.slopes["4.weight"] == 1.0
    assert least.by_parameter["4.weight"] == 5.0
    assert list(least.by_parameter) == list(curvature)


def test_what_vanishes() -> None:
    """A unit without curvature on one side: the other side's can be driven to zero."""
    first = torch.ones(4, 3, dtype=torch.float64)
    second = torch.ones(2, 4, dtype=torch.float64)
    second[:, 1] = 0.0
    least = least_trace(group_of(net(), "neuron"), {"0.weight": first, "2.weight": second})
    # three units with masses 3 and 2, each 2 sqrt(6); of the fourth the mass 3 is lost
    assert least.value == pytest.approx(6 * sqrt(6), rel=1e-10)
    assert least.vanishing == pytest.approx({"0.weight": 3.0})
    slopes = least.slopes["0.weight"]
    assert isinstance(slopes, Tensor)
    assert torch.equal(slopes == 0, torch.arange(4)[:, None].expand(4, 3) == 1)
    assert sum(least.by_parameter.values()) == pytest.approx(least.value, rel=1e-10)


def test_rounding_below_zero_is_neither_refused_nor_reported() -> None:
    curvature = {"0.weight": number(9.0), "2.weight": number(-9e-12)}
    least = least_trace(group_of(net(), "layer"), curvature)
    assert (least.value, least.negative) == (0.0, ())
    curvature["2.weight"] = number(-9e-8)
    with pytest.raises(NegativeCurvature, match=r"curvature of 2\.weight is negative"):
        least_trace(group_of(net(), "layer"), curvature)


def test_noise_adds_up_by_squares() -> None:
    """Four standard errors of the mass that moves as one, here a row of three entries."""
    first = torch.ones(4, 3, dtype=torch.float64)
    first[1] = -1 / 3
    curvature = {"0.weight": first, "2.weight": torch.ones(2, 4, dtype=torch.float64)}
    group = group_of(net(), "neuron")
    each = 1 / (4 * sqrt(3))  # 4 sqrt(3 each²) = 1, the size of the mass below zero
    for factor in (1.01, 0.99):
        noise = {"0.weight": torch.full((4, 3), each * factor, dtype=torch.float64)}
        if factor > 1:
            assert least_trace(group, curvature, noise).negative == ("0.weight",)
        else:
            with pytest.raises(NegativeCurvature):
                least_trace(group, curvature, noise)
    elsewhere = {"2.weight": torch.full((2, 4), 9.0, dtype=torch.float64)}
    with pytest.raises(NegativeCurvature):
        least_trace(group, curvature, elsewhere)


def test_few_degrees_of_freedom_refuse_less() -> None:
    """Five standard errors below zero are sure of many draws, and nothing unusual of four."""
    group = group_of(net(), "layer")
    curvature = {"0.weight": number(9.0), "2.weight": number(-5.0)}
    noise = {"0.weight": number(1.0), "2.weight": number(1.0)}
    with pytest.raises(NegativeCurvature, match=r"2\.weight"):
        least_trace(group, curvature, noise)
    with pytest.raises(NegativeCurvature):
        least_trace(group, curvature, noise, degrees=60.0)
    assert least_trace(group, curvature, noise, degrees=2.0).negative == ("2.weight",)


def test_masses_draw_by_draw() -> None:
    """Entries of a class are added in every draw, so that what they share is not averaged out."""
    group = group_of(net(), "neuron")
    first = torch.arange(24.0, dtype=torch.float64).reshape(2, 4, 3)
    second = torch.ones(2, 4, dtype=torch.float64)
    curvature = {"0.weight": first.mean(0), "2.weight": second}
    masses = class_masses(group, curvature, {"0.weight": first})
    classes = group.exponents().classes
    for k in range(2):
        want = torch.zeros(masses.shape[1], dtype=torch.float64)
        want.index_add_(0, classes["0.weight"].reshape(-1), first[k].reshape(-1))
        want.index_add_(0, classes["2.weight"].reshape(-1), second.reshape(-1))
        torch.testing.assert_close(torch.from_numpy(masses[k]), want)


def test_which_parameters_need_but_a_trace() -> None:
    names = {"0.weight": None, "2.weight": None, "other": None}
    assert uniform_parameters(group_of(net(), "layer"), names) == set(names)
    assert uniform_parameters(group_of(net(), "neuron"), names) == {"other"}
