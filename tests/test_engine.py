"""The engine that measures share: what it keeps from one request to the next."""

from __future__ import annotations

import pytest
import torch
from cases import BY_NAME
from dense import Dense, flat
from torch import nn

import saltflat as sf
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


@pytest.mark.parametrize(("samples", "looked_at"), [(6, 6), (16, 16), (17, 8), (40, 8)])
def test_a_pass_over_few_samples_is_looked_at_and_measured(samples: int, looked_at: int) -> None:
    """One pass is recorded, two are in other company, two are at the ends of a difference; of more
    samples a pass of their own is measured."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3)).double()
    x, y = torch.randn(samples, 3).double(), torch.arange(samples) % 3
    sizes: list[int] = []
    hook = model.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    diagonal = sf.diagonal(model, (x, y))
    hook.remove()
    beside = [1, looked_at - 1, looked_at, looked_at]
    assert sizes == [looked_at, *beside, *[samples] * (samples > looked_at)]
    assert diagonal.exact
    dense = Dense(model, x, y).hessian.diagonal()
    torch.testing.assert_close(flat(diagonal.values()), dense, rtol=1e-10, atol=1e-14)


def test_a_pass_that_was_looked_at_is_let_go_of() -> None:
    case = BY_NAME["mlp"]
    engine = engine_of(case.model(), case.data())
    with engine.risk.session():
        plan = engine.look(keep=True)
        (passed,) = plan.passed
        engine.quantities(frozenset({"trace"}))
        assert not plan.passed, "it was measured"
        assert passed.outputs.requires_grad
        engine.risk.plans.clear()
        assert not engine.look().passed, "nobody wanted it"
