"""Random estimates: right within their own standard error, which is itself right."""

from __future__ import annotations

from dataclasses import replace

import networks as net
import pytest
import torch
from agree import agrees
from cases import BY_NAME, Case, classes, dice, normal
from dense import Dense
from torch import Tensor, nn

import saltflat as sf

ESTIMATORS = [sf.Hutchinson(probes=20)]
WIDE = Case("wide", lambda: net.seq(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 3)), normal(6), n=8)
COUPLED = replace(WIDE, name="wide dice", loss=dice)
CURVED = [WIDE, COUPLED, *(BY_NAME[name] for name in ("attention", "lstm", "contrastive"))]


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=repr)
@pytest.mark.parametrize("case", CURVED, ids=str)
def test_within_four_standard_errors(case: Case, estimator) -> None:
    oracle = case.dense()
    for seed in range(3):
        chosen = replace(estimator, seed=seed)
        result = sf.trace(case.model(), case.data(), case.loss, estimator=chosen)
        agrees(result, oracle.blocks(oracle.hessian))
        assert not result.exact
        assert result.stderr > 0
        assert abs(result.total - float(oracle.hessian.trace())) < 4 * result.stderr


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=repr)
@pytest.mark.parametrize("case", [WIDE, COUPLED], ids=str)
def test_standard_errors_are_calibrated(case: Case, estimator) -> None:
    """Over seeds, the spread of the estimates is what each one says of itself."""
    truth = float(case.dense().hessian.trace())
    results = [
        sf.trace(case.model(), case.data(), case.loss, estimator=replace(estimator, seed=seed))
        for seed in range(40)
    ]
    totals = torch.tensor([r.total for r in results])
    claimed = torch.tensor([r.stderr for r in results]).square().mean().sqrt()
    assert 0.7 < float(totals.std() / claimed) < 1.4
    assert abs(float(totals.mean()) - truth) < 4 * float(totals.std()) / 40**0.5


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=repr)
def test_the_seed_decides(estimator) -> None:
    a, b, c = (
        sf.trace(WIDE.model(), WIDE.data(), estimator=replace(estimator, seed=s)).total
        for s in (0, 0, 1)
    )
    assert a == b != c


def test_the_global_generator_has_no_say() -> None:
    case = BY_NAME["mlp Tanh"]
    totals = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        totals.append(sf.trace(case.model(), case.data()).total)
    assert totals[0] == totals[1]


def test_more_probes_are_better() -> None:
    case = replace(WIDE, build=lambda: net.seq(nn.Linear(6, 30), nn.GELU(), nn.Linear(30, 3)))
    few, many = (sf.trace(case.model(), case.data(), estimator=sf.Hutchinson(k)) for k in (12, 192))
    assert 0 < many.stderr < 0.5 * few.stderr


def test_exact_blocks_stay_exact_beside_estimated_ones() -> None:
    case = BY_NAME["mlp Tanh"]
    oracle = case.dense()
    result = sf.trace(case.model(), case.data(), estimator=sf.Hutchinson(probes=5))
    assert result.details["2.weight"].exact
    assert result["2.weight"] == pytest.approx(
        float(oracle.blocks(oracle.hessian)["2.weight"].trace()), rel=1e-10
    )
    assert not result.details["0.weight"].exact


def test_diagonal_estimates_have_entrywise_errors() -> None:
    case = BY_NAME["mlp Tanh"]
    result = sf.diagonal(case.model(), case.data(), estimator=sf.Hutchinson(probes=20))
    detail = result.details["0.weight"]
    assert detail.stderr.shape == detail.value.shape
    assert bool((detail.stderr > 0).all())


# above max_directions: a signed sketch


@pytest.mark.parametrize("measure", [sf.trace, sf.diagonal])
@pytest.mark.parametrize("curvature", ["hessian", "ggn"])
@pytest.mark.parametrize("name", ["segmentation", "sequences", "mse of images"])
def test_sketch(name: str, curvature: str, measure) -> None:
    case = BY_NAME[name]
    oracle = case.dense()
    result = measure(case.model(), case.data(), case.loss, curvature=curvature, max_directions=2)
    agrees(result, oracle.blocks(getattr(oracle, curvature)))
    assert not result.exact
    assert result.stderr > 0
    exact = sum(
        abs(float(torch.as_tensor(v).sum()) - float(b.trace())) < 1e-12
        for v, b in zip(result.values(), oracle.blocks(oracle.ggn).values(), strict=True)
    )
    assert exact < len(result), "negative control: two directions cannot be exact"


def test_the_sketch_says_what_exactness_would_cost() -> None:
    case = BY_NAME["segmentation"]  # 8 positions × (3 − 1) directions
    enough = sf.trace(case.model(), case.data(), max_directions=16)
    assert enough.exact
    result = sf.trace(case.model(), case.data(), max_directions=15)
    assert not result.exact
    for detail in result.details.values():
        assert "max_directions" in detail.reason
        assert "16" in detail.reason


def test_sketch_is_calibrated() -> None:
    case = BY_NAME["segmentation"]
    oracle = case.dense()
    truth = float(oracle.hessian.trace())
    totals, errors = [], []
    for seed in range(40):
        result = sf.trace(
            case.model(),
            case.data(),
            max_directions=8,
            estimator=sf.Hutchinson(probes=20, seed=seed),
        )
        totals.append(result.total)
        errors.append(result.stderr)
    spread, claimed = torch.tensor(totals).std(), torch.tensor(errors).square().mean().sqrt()
    assert 0.6 < float(spread / claimed) < 1.6
    assert abs(sum(totals) / 40 - truth) < 4 * float(spread) / 40**0.5


# the top of the spectrum

TOP = ["mlp", "residual", "mlp Tanh", "attention", "indefinite", "dice", "embedding", "mse"]


@pytest.mark.parametrize("curvature", ["hessian", "ggn"])
@pytest.mark.parametrize("name", TOP)
def test_max_eigenvalue(name: str, curvature: str) -> None:
    case = BY_NAME[name]
    matrix = getattr(case.dense(), curvature)
    options = {"curvature": curvature, "tol": 1e-6}
    top = sf.max_eigenvalue(case.model(), case.data(), case.loss, **options)
    values = torch.linalg.eigvalsh(matrix)
    assert top.value == pytest.approx(float(values[-1]), rel=1e-6)
    vector = torch.cat([v.reshape(-1) for v in top.vector.values()]).double()
    assert list(top.vector) == case.dense().names
    assert float(vector.norm()) == pytest.approx(1, rel=1e-8)
    residual = float((matrix @ vector - top.value * vector).norm())
    assert top.residual == pytest.approx(residual, rel=1e-2, abs=1e-9 * float(values.abs().max()))
    assert residual < 1e-4 * float(values.abs().max())


def test_the_largest_eigenvalue_is_the_algebraic_one() -> None:
    """Not the largest by magnitude: here the most negative one is larger."""
    case = BY_NAME["mlp"]

    def loss(outputs: Tensor, _: Tensor) -> Tensor:
        return -(outputs**2).mean()

    matrix = Dense(case.model(), *case.data(), loss).hessian
    values = torch.linalg.eigvalsh(matrix)
    assert -values[0] > 2 * values[-1]
    top = sf.max_eigenvalue(case.model(), case.data(), loss, tol=1e-6)
    assert top.value == pytest.approx(float(values[-1]), rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("names", [["0.weight"], ["2.weight", "2.bias"]])
def test_max_eigenvalue_of_a_block(names: list[str]) -> None:
    case = BY_NAME["mlp Tanh"]
    matrix = Dense(case.model(), *case.data(), names=names).hessian
    top = sf.max_eigenvalue(case.model(), case.data(), parameters=names, tol=1e-6)
    assert top.value == pytest.approx(float(torch.linalg.eigvalsh(matrix)[-1]), rel=1e-6)
    assert list(top.vector) == names


@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
def test_max_eigenvalue_of_one_parameter(loss: str) -> None:
    """A 1 × 1 matrix, for which Lanczos libraries raise."""
    model = nn.Linear(1, 1, bias=False).double()
    x = torch.tensor([[1.0], [2.0]]).double()
    y = classes(1)(2, torch.Generator()) if loss == "cross_entropy" else x
    want = 0.0 if loss == "cross_entropy" else 5.0
    assert sf.max_eigenvalue(model, (x, y), loss).value == pytest.approx(want)


@pytest.mark.parametrize("estimator", [sf.Hutchinson(probes=20), None], ids=repr)
def test_one_block_is_one(estimator) -> None:
    names = [name for name, _ in WIDE.model().named_parameters()][:2]
    options = {"parameters": names[:1], "estimator": estimator}
    with pytest.warns(UserWarning, match="Hessian block of 1 parameter is estimated"):
        sf.trace(WIDE.model(), WIDE.data(), WIDE.loss, **options)
    with pytest.warns(UserWarning, match="Hessian blocks of 2 parameters are estimated"):
        sf.trace(WIDE.model(), WIDE.data(), WIDE.loss, **options | {"parameters": names})
