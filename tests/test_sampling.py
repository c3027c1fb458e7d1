"""Standard errors for the population: against single samples, and against other samples of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import BY_NAME
from torch import Tensor, nn

import saltflat as sf
from saltflat.measures import NormalizedSharpness, RelativeFlatness

NAMES = ["hessian_trace", "kappa_trace", "rho", "relative_flatness", "fisher_rao_norm"]
CURVED = ["matrix_normalized_sharpness", "minimum_sharpness"]


def single_values(case: Any, name: str) -> Tensor:
    """The measure of every sample alone; if it is linear in the Hessian, their mean is it."""
    x, y = case.data()
    model = case.model()
    options: Any = {"measures": [name], "standing": False}
    each = [
        sf.measure(model, (x[k : k + 1], y[k : k + 1]), case.loss, **options)[name].value
        for k in range(len(x))
    ]
    return torch.tensor(each, dtype=torch.float64)


@pytest.mark.parametrize("case", ["mlp", "residual", "branches", "embedding", "mse"])
@pytest.mark.parametrize("name", NAMES)
def test_linear_measures_have_the_spread_of_single_samples(case: str, name: str) -> None:
    chosen = BY_NAME[case]
    found = sf.measure(chosen.model(), chosen.data(), chosen.loss, measures=NAMES)[name]
    each = single_values(chosen, name)
    assert float(each.mean()) == pytest.approx(found.value, rel=1e-9)
    error = float(each.std()) / math.sqrt(len(each))
    assert found.sampling == pytest.approx(error, rel=1e-8)


@pytest.mark.parametrize("measures", [["hessian_trace"], None])
def test_traces_alone_and_from_diagonals(measures: Any) -> None:
    """However they come, and however the data are cut."""
    case = BY_NAME["mlp"]
    x, y = case.data(n=9)
    error = sf.measure(case.model(), (x, y), measures=measures)["hessian_trace"].sampling
    parts = [(x[:1], y[:1]), (x[1:6], y[1:6]), (x[6:], y[6:])]
    split = sf.measure(case.model(), parts, measures=measures)["hessian_trace"].sampling
    assert split == pytest.approx(error, rel=1e-10)
    alone = sf.measure(case.model(), (x, y), measures=["hessian_trace"])["hessian_trace"].sampling
    assert error == pytest.approx(alone, rel=1e-10)


def pool(size: int = 4000) -> tuple[nn.Module, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    x = torch.randn(size, 6, generator=generator, dtype=torch.float64)
    return model.double(), x, torch.randint(3, (size,), generator=generator)


def scores(names: list[str], n: int, draws: int, dependent: bool = False) -> dict[str, float]:
    """The root mean square of errors over standard errors, of samples from a large pool."""
    model, x, y = pool()
    truth = sf.measure(model, (x, y), measures=names, standing=False)
    generator = torch.Generator().manual_seed(1)
    squares = dict.fromkeys(names, 0.0)
    for _ in range(draws):
        picked = torch.randint(len(x), (n // 4 if dependent else n,), generator=generator)
        picked = picked.repeat(4) if dependent else picked
        found = sf.measure(model, (x[picked], y[picked]), measures=names, standing=False)
        for name in names:
            score = (found[name].value - truth[name].value) / found[name].sampling
            squares[name] += score**2 / draws
    return {name: math.sqrt(square) for name, square in squares.items()}


def test_errors_are_calibrated() -> None:
    """Of 400 samples of a population, errors are as large as they are said to be: the root mean
    square of 60 normal scores is 1 ± 0.09. (Of 60 samples it is more: single traces are skewed.)"""
    for name, score in scores([*NAMES, *CURVED], 400, 60).items():
        assert 0.7 < score < 1.35, (name, score)


def test_samples_that_are_not_independent_are_seen_to_be_underestimated() -> None:
    """A negative control: each sample four times makes errors twice as large as they seem."""
    for name, score in scores(["hessian_trace", "minimum_sharpness"], 400, 30, True).items():
        assert score > 1.5, (name, score)


def test_where_samples_do_not_count_alike_there_is_none() -> None:
    model, x, y = pool(30)
    weights = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5]).double())
    ignored = nn.CrossEntropyLoss(ignore_index=2)
    total = nn.CrossEntropyLoss(reduction="sum")

    def joint(o: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(o, t).square()

    for loss in (weights, ignored, total):
        found = sf.measure(model, (x, y), loss, measures=[*NAMES, *CURVED])
        assert all(m.sampling is None for m in found.values())
    few = sf.Hutchinson(4)
    with pytest.warns(UserWarning, match="estimated"):
        found = sf.measure(model, (x, y), joint, measures=["hessian_trace"], estimator=few)
    assert found["hessian_trace"].sampling is None
    assert sf.measure(model, (x[:1], y[:1]), measures=NAMES)["rho"].sampling is None
    own = sf.measure(model, (x, y), lambda o, t: F.cross_entropy(o, t), measures=NAMES)
    same = sf.measure(model, (x, y), measures=NAMES)
    assert own["rho"].sampling == pytest.approx(same["rho"].sampling, rel=1e-9)


def test_what_is_estimated_or_no_mean_has_none() -> None:
    case = BY_NAME["mlp GELU"]
    with pytest.warns(UserWarning, match="estimated"):
        found = sf.measure(
            case.model(), case.data(), measures=["hessian_trace"], estimator=sf.Hutchinson(4)
        )
    assert found["hessian_trace"].sampling is None
    model, x, y = pool(20)
    others = [
        NormalizedSharpness(),
        RelativeFlatness(normalize_features=True),
        "neuronwise_minimum_sharpness",
        "sam_sharpness",
    ]
    assert all(m.sampling is None for m in sf.measure(model, (x, y), measures=others).values())


def test_the_balanced_twin_tells_the_error_of_the_least_trace() -> None:
    """To first order a minimum changes as what is minimised does where it is: against the
    jackknife, which minimises anew without each sample. The model's own trace tells another."""
    name, n = "neuronwise_minimum_sharpness", 24
    model, x, y = pool(n)
    group = sf.symmetries(model, x)
    model = group.random(seed=0)(model)

    def least(kept: Tensor) -> float:
        return sf.measure(model, (x[kept], y[kept]), measures=[name], standing=False)[name].value

    without = torch.tensor([least(torch.arange(n) != k) for k in range(n)])
    jackknife = float(without.std(correction=0)) * math.sqrt(n - 1)
    twin = group.balance(model, (x, y))
    found, own = (
        sf.measure(m, (x, y), measures=["hessian_trace"], standing=False)["hessian_trace"]
        for m in (twin, model)
    )
    assert found.value == pytest.approx(least(torch.ones(n, dtype=torch.bool)), rel=1e-6)
    assert found.sampling == pytest.approx(jackknife, rel=0.1)
    assert own.sampling > 2 * jackknife
