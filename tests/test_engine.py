"""The engine that measures share: what it keeps from one request to the next."""

from __future__ import annotations

import pytest
import torch
from cases import BY_NAME
from torch import nn

from saltflat.curvature.curvature import Curvature
from saltflat.curvature.estimators import Hutchinson
from saltflat.curvature.plan import Settings
from saltflat.risk import Risk


def engine_of(model: nn.Module, data: object, probes: int = 100) -> Curvature:
    return Curvature(Risk(model, data), "hessian", Hutchinson(probes=probes), Settings(), 0)


def bent(probes: int, name: str = "mlp GELU") -> Curvature:
    case = BY_NAME[name]
    return engine_of(case.model(), case.data(), probes)


@pytest.mark.parametrize(("probes", "groups"), [(40, 20), (8, 8)])
def test_draws_are_kept_in_groups_whose_mean_is_the_value(probes: int, groups: int) -> None:
    engine = bent(probes, "attention")
    with engine.risk.session():
        found = engine.quantities(frozenset({"diagonal"}))["diagonal"]
    assert found.draws
    assert not found.exact(found.draws)
    for name, draws in found.draws.items():
        assert len(draws) == groups
        torch.testing.assert_close(draws.mean(0), found.values[name], rtol=1e-10, atol=1e-14)


def test_the_first_sweep_speaks_for_all_and_warns_once() -> None:
    engine = bent(8)
    with engine.risk.session():
        engine.quantities(frozenset({"trace"}))
        first = engine.first
        engine.quantities(frozenset({"diagonal"}))
    assert engine.first is first
    assert first is not None
    assert list(first.quantities) == ["trace"]
    assert len(engine.warnings) == 1
    assert "estimated by Hutchinson" in engine.warnings[0]


def test_an_eigenvalue_is_found_anew_for_another_tolerance() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(60, 40).double(), torch.arange(60) % 3
    engine = engine_of(nn.Linear(40, 3, bias=False).double(), (x, y))
    with engine.risk.session():
        (rough, off), (fine, little) = (
            engine.largest_eigenvalue(["weight"], tol)[:2] for tol in (0.5, 1e-12)
        )
        passes = engine.risk._passes
        assert engine.largest_eigenvalue(["weight"], 1e-12)[:2] == (fine, little)
        assert engine.risk._passes == passes, "this one was known"
    assert little < 1e-9 * fine < off
    assert rough < fine
