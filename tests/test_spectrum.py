"""Eigenvalues and densities, against numpy's of the dense matrix, SciPy's and a count of work."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import BY_NAME, Case
from dense import Dense
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor, nn

import saltflat as sf
from saltflat.curvature import Curvature, Settings
from saltflat.curvature.products import Products
from saltflat.curvature.spectrum import (
    Coordinates,
    Directions,
    Eigenpair,
    Gradients,
    Images,
    _Krylov,
    drive,
    eigenpairs,
    quadrature,
    quadratures,
)
from saltflat.curvature.sweep import Chunk, ExactPass
from saltflat.measures import HessianMaxEigenvalue, Kappa
from saltflat.risk import Risk

NAMES = ["mlp", "residual", "mlp Tanh", "attention", "indefinite", "dice", "mse", "tied weights"]
CURVATURES = ["hessian", "ggn"]


def flat(vector: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([v.reshape(-1) for v in vector.values()]).double()


def dense_eigenvalues(matrix: Tensor, k: int) -> np.ndarray:
    return np.linalg.eigvalsh(matrix.numpy())[::-1][:k]


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by an entry with every product."""
    calls: list[str] = []
    product = Products.__call__

    def call(self: Products, vector: Mapping[str, Tensor]) -> dict[str, Tensor]:
        calls.append(self.matrix)
        return product(self, vector)

    monkeypatch.setattr(Products, "__call__", call)
    return calls


@pytest.mark.parametrize("curvature", CURVATURES)
@pytest.mark.parametrize("name", NAMES)
def test_eigenvalues(name: str, curvature: str) -> None:
    case = BY_NAME[name]
    matrix = getattr(case.dense(), curvature)
    options = {"curvature": curvature, "tol": 1e-8}
    found = sf.eigenvalues(case.model(), case.data(), case.loss, **options)
    want = dense_eigenvalues(matrix, 5)
    size = float(matrix.abs().max())
    np.testing.assert_allclose(found.values, want, rtol=1e-8, atol=1e-12 * size)
    vectors = torch.stack([flat(v) for v in found.vectors])
    torch.testing.assert_close(vectors @ vectors.T, torch.eye(5).double(), rtol=0, atol=1e-6)
    for pair, vector in zip(found, vectors, strict=True):
        assert list(pair.vector) == case.dense().names
        residual = float((matrix @ vector - pair.value * vector).norm())
        assert pair.residual == pytest.approx(residual, rel=1e-2, abs=1e-12 * size)
        assert residual <= 1.01e-8 * abs(pair.value) + 1e-12 * size


@pytest.mark.parametrize("curvature", CURVATURES)
@pytest.mark.parametrize(
    ("name", "block"), [("mlp Tanh", "0.weight"), ("residual", "conv1.weight")]
)
def test_a_block(name: str, block: str, curvature: str) -> None:
    case = BY_NAME[name]
    matrix = case.dense().blocks(getattr(case.dense(), curvature))[block]
    found = sf.eigenvalues(
        case.model(), case.data(), case.loss, k=3, block=block, curvature=curvature, tol=1e-8
    )
    np.testing.assert_allclose(found.values, dense_eigenvalues(matrix, 3), rtol=1e-8)
    assert found.block == block
    assert [list(v) for v in found.vectors] == [[block]] * 3
    assert found[0].vector[block].shape == case.model().get_parameter(block).shape
    top = sf.max_eigenvalue(
        case.model(), case.data(), case.loss, block=block, curvature=curvature, tol=1e-8
    )
    assert top.value == pytest.approx(found[0].value, rel=1e-8)


@pytest.mark.parametrize("name", ["mlp", "residual", "attention"])
def test_float32(name: str) -> None:
    case = BY_NAME[name]
    model, data = case.model(torch.float32), case.data(torch.float32)
    want = dense_eigenvalues(case.dense(torch.float32).hessian, 3)
    for tol in (1e-4, 0.0):  # the second is more than there is to be had
        found = sf.eigenvalues(model, data, case.loss, k=3, tol=tol)
        np.testing.assert_allclose(found.values, want, rtol=1e-4)


@pytest.mark.parametrize("k", [1, 7, 15])
def test_all_eigenvalues_of_a_small_matrix(k: int) -> None:
    case = BY_NAME["linear alone"]
    found = sf.eigenvalues(case.model(), case.data(), case.loss, k=k, tol=1e-8)
    want = dense_eigenvalues(case.dense().hessian, k)
    np.testing.assert_allclose(found.values, want, rtol=1e-8, atol=1e-12)


def test_copies_of_an_eigenvalue_are_counted() -> None:
    """Under a squared error every eigenvalue of a last layer comes once for every output.

    ARPACK at the same tolerance returns each of them once, and is wrong from the second on.
    """
    torch.manual_seed(0)
    x, y = torch.randn(60, 20).double() * torch.linspace(1, 3, 20), torch.randn(60, 4).double()
    model = nn.Linear(20, 4, bias=False).double()
    found = sf.eigenvalues(model, (x, y), "mse", k=6, tol=1e-3)
    matrix = torch.kron(torch.eye(4).double(), x.T @ x * 2 / y.numel())
    want = dense_eigenvalues(matrix, 6)
    np.testing.assert_allclose(found.values, want, rtol=1e-4)
    theirs = eigsh(matrix.numpy(), k=6, which="LA", tol=1e-3, v0=np.ones(80) + np.arange(80))[0]
    assert abs(theirs[::-1] / want - 1).max() > 1e-2, "the case shows nothing"


@pytest.mark.parametrize("tol", [1e-3, 1e-9])
@pytest.mark.parametrize("spectrum", ["outliers", "decay", "band"])
def test_scipy_agrees_where_the_basis_is_restarted(spectrum: str, tol: float) -> None:
    generator = torch.Generator().manual_seed(0)
    size, k = 300, 4
    values = {
        "outliers": torch.cat([torch.tensor([3.0, 2.5, 2.4, 1.5]), torch.linspace(-1, 1, 296)]),
        "decay": 1 / torch.arange(1, 301),
        "band": torch.linspace(-2, 1, 300),
    }[spectrum].double()
    turn = torch.linalg.qr(torch.randn(size, size, generator=generator).double())[0]
    matrix = turn @ values.diag() @ turn.T
    space, calls = Coordinates({"w": matrix[0]}), []

    def product(vector: Mapping[str, Tensor]) -> dict[str, Tensor]:
        calls.append(1)
        return {"w": matrix @ vector["w"]}

    pairs = eigenpairs(product, space, k, tol, seed=1)
    operator = LinearOperator(matrix.shape, matvec=lambda v: matrix.numpy() @ v, dtype=np.float64)
    want = eigsh(operator, k=k, which="LA", tol=0, v0=turn.sum(0).numpy())[0][::-1]
    assert len(calls) > 100 or spectrum != "band", "no basis was full"
    for (value, residual, vector, _), truth in zip(pairs, want, strict=True):
        assert residual <= 1.01 * tol * abs(value) + 1e-12
        assert abs(value - truth) <= residual + 1e-12
        error = float((matrix @ vector["w"] - value * vector["w"]).norm())
        assert residual == pytest.approx(error, rel=1e-6, abs=1e-13)


def test_giving_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saltflat.curvature.spectrum._RESTARTS", 1)
    values = torch.linspace(0, 1, 300).double()
    space = Coordinates({"w": values})
    with pytest.raises(sf.SaltflatError, match="did not converge to tol=1e-12"):
        eigenpairs(lambda v: {"w": values * v["w"]}, space, 1, 1e-12, seed=0)


def wide_network() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 10)).double()
    return model, (torch.randn(100, 20).double(), torch.arange(100) % 10)


def test_a_coarse_answer_costs_less(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, costs = counted(monkeypatch), []
    model, data = wide_network()
    for tol in (1e-1, 1e-3, 1e-6):
        calls.clear()
        found = sf.max_eigenvalue(model, data, tol=tol)
        costs.append(len(calls))
        assert found.residual <= tol * found.value
    assert costs[0] < costs[1] < costs[2]
    assert costs[0] < 32


def diagonal_matrix(values: Tensor) -> tuple[Any, Coordinates]:
    return lambda v: {"w": values * v["w"]}, Coordinates({"w": values})


def spread(*values: Tensor) -> Tensor:
    """These, and many small ones."""
    generator = torch.Generator().manual_seed(0)
    small = torch.rand(5000, generator=generator, dtype=torch.float64)
    return torch.cat([*(v.double() for v in values), 0.01 * small])


TOPS = {
    "one and copies": spread(torch.ones(1), torch.full((300,), 0.97)),
    "even": spread(torch.linspace(0.98, 1, 99)),
    "decay": spread(torch.linspace(0.1, 1, 99)),
    "pairs": spread(torch.linspace(0.9, 1, 50).repeat(2), torch.linspace(0.9, 1, 50) - 1e-11),
    "powers": torch.arange(1, 5000).double() ** -0.5,
}


@pytest.mark.parametrize("top", TOPS)
def test_of_eigenvalues_that_are_close_the_largest_is_found(top: str) -> None:
    """Also by starts that have next to nothing of it; to 1e-10 with the usual tolerance."""
    product, space = diagonal_matrix(TOPS[top])
    for seed in range(30):
        (pair,) = eigenpairs(product, space, 1, 1e-3, seed)
        assert pair.value == pytest.approx(1, rel=1.01e-10)
        assert pair.gap < 1e-3
    pairs = eigenpairs(product, space, 4, 1e-3, seed=0)
    want = TOPS[top].sort(descending=True).values[:4]
    np.testing.assert_allclose([pair.value for pair in pairs], want, rtol=1e-3)


@pytest.mark.parametrize("scale", [1e-300, 1e-170, 1e-160, 1e160, 1e300])
def test_sizes_whose_squares_are_no_numbers(scale: float) -> None:
    """As of the curvature of samples that a network is very sure of."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(60, 60, generator=generator, dtype=torch.float64)
    matrix = matrix + matrix.T
    space = Coordinates({"w": torch.zeros(60)})
    for k in (1, 3):
        pairs = eigenpairs(lambda v: {"w": scale * (matrix @ v["w"])}, space, k, 1e-3, 0)
        values = torch.tensor([pair.value for pair in pairs], dtype=torch.float64) / scale
        np.testing.assert_allclose(values, dense_eigenvalues(matrix, k), rtol=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_what_a_start_may_hide(seed: int) -> None:
    """p(H) start is the next vector, with the same p after restarts: so its part of an eigenvector
    above all values of the basis is p(λ) times the start's."""
    values = torch.cat([torch.linspace(0, 1, 199), torch.tensor([1.02])]).double()
    start = Directions(200, seed, values.device).draw()
    start[-1] *= 1e-6  # as long as its part is small it is no value of the basis
    basis, seen = _Krylov(14, start / start.norm()), 0
    part = float(basis.next[-1].abs().log())
    for _ in range(4):
        while basis.count < 14:
            basis.add(values * basis.next)
            found, _ = basis.ritz()
            if found[0] < 1.0:
                hidden = float(basis.next[-1].abs().log())
                assert basis.growth(found, 1.02) + part == pytest.approx(hidden, abs=1e-4)
                seen += 1
        basis.compress(6)
    assert seen > 20, "some of it after restarts"


@pytest.mark.parametrize("classes", [30, 100])
def test_many_classes_have_one_kappa(classes: int) -> None:
    torch.manual_seed(classes)
    x, y = torch.randn(200, 12).double() + 0.5, torch.arange(200) % classes
    model = nn.Linear(12, classes, bias=False).double()
    p, weight = model(x).detach().softmax(1), model.weight.detach()
    matrix = torch.einsum("nk,ni,nj->kij", p, x, x).div(len(x))
    whole = torch.block_diag(*matrix) - torch.einsum("nk,ni,nl,nj->kilj", p, x, p, x).div(
        len(x)
    ).reshape(12 * classes, -1)
    want = float(torch.linalg.eigvalsh(whole)[-1] * weight.square().sum())
    for seed in range(5):
        found = sf.measure(model, (x, y), measures=["kappa"], seed=seed)["kappa"]
        assert found.value == pytest.approx(want, rel=1e-10)
        assert abs(found.value - want) <= found.gap <= 1e-3 * want


@pytest.mark.parametrize("measure", [Kappa, HessianMaxEigenvalue])
def test_measures_are_coarse_and_audits_fine(
    measure: type[Kappa] | type[HessianMaxEigenvalue], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drift of 1e-4 must not hide behind the residuals of a thousandth that a measure has."""
    calls, costs = counted(monkeypatch), []
    model, data = wide_network()
    for each in (measure(tol=1e-1), measure(), measure().for_comparison()):
        calls.clear()
        found = sf.measure(model, data, measures=[each])[each.name]
        costs.append(len(calls))
        assert found.gap <= each.tol * found.value
    assert costs[0] < costs[1] < costs[2]
    assert found.gap <= 1e-6 * found.value
    assert measure(tol=1e-9).for_comparison() == measure(tol=1e-9)
    audit = sf.audit(nn.Sequential(model[0], nn.ReLU(), model[2]), data, measures=[measure(0.1)])
    drifts = [drift for row in audit.values() for drift in row.values()]
    assert drifts
    assert all(drift.tolerance < 1e-5 * (1 + drift.drift) for drift in drifts)


def test_the_seed_is_the_start() -> None:
    model, data = wide_network()
    found = [sf.max_eigenvalue(model, data, tol=1e-2, seed=seed).value for seed in (0, 0, 1)]
    assert found[0] == found[1] != found[2]


def test_what_rounding_hides_is_told(recwarn: pytest.WarningsRecorder) -> None:
    """Of samples of which a network is so sure that 1 − p is 0, gradients have no digits."""
    torch.manual_seed(1)
    x, model = torch.randn(40, 4), nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    top = model(x).detach().topk(2).values
    sure = top[:, 0] - top[:, 1]
    data = x[sure > 0.3], model(x)[sure > 0.3].argmax(1)
    sf.max_eigenvalue(model, data)
    assert not [w for w in recwarn if "rounding" in str(w.message)]
    with torch.no_grad():
        for parameter in model[2].parameters():
            parameter.mul_(20 / 0.3)
    with pytest.warns(UserWarning, match="hidden by rounding in torch.float32"):
        sf.max_eigenvalue(model, data)
    with pytest.warns(UserWarning, match="hidden by rounding in torch.float32"):
        report = sf.measure(model, data, measures=["hessian_max_eigenvalue"])
    assert report["hessian_max_eigenvalue"].gap > 0.01 * report["hessian_max_eigenvalue"].value
    truth = sf.max_eigenvalue(copy.deepcopy(model).double(), (data[0].double(), data[1]))
    assert truth.residual <= 1e-2 * truth.value


def test_zero() -> None:
    model = nn.Linear(3, 1).double()
    found = sf.eigenvalues(model, (torch.randn(4, 3).double(), torch.zeros(4).long()), k=2)
    assert found.values == (0.0, 0.0)
    assert found.residuals == (0.0, 0.0)


def test_printing() -> None:
    case = BY_NAME["mlp"]
    found = sf.eigenvalues(case.model(), case.data(), k=2, block="2.weight")
    assert "Eigenvalues of the hessian, the block of 2.weight" in " ".join(str(found).split())
    assert f"{found[1].value:.6g}" in str(found)
    assert found[:1] == (found[0],)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"k": 0}, "k must be an integer of at least 1"),
        ({"k": 2.0}, "k must be an integer of at least 1"),
        ({"k": 16}, "k must be at most 15, the size of the matrix. Got 16"),
        ({"k": 13, "block": "weight"}, "k must be at most 12"),
        ({"block": "wieght"}, "block must name a measured parameter.*Nearest is 'weight'"),
        ({"block": "bias", "parameters": ["weight"]}, "block must name a measured parameter"),
        ({"tol": -1.0}, "tol must be a finite number at least 0"),
        ({"curvature": "fisher"}, "curvature must be 'hessian' or 'ggn'"),
    ],
)
def test_refusals(options: dict[str, object], words: str) -> None:
    case = BY_NAME["linear alone"]
    with pytest.raises(sf.SaltflatError, match=words):
        sf.eigenvalues(case.model(), case.data(), **{"k": 1, **options})
    with pytest.raises(sf.InvalidType, match="seed must be an integer"):
        sf.eigenvalues(case.model(), case.data(), seed=0.5)


# the blocks of all layers from one sweep

SWEPT = [
    *("mlp", "residual", "siamese", "tied weights", "segmentation", "indefinite", "conv2d groups"),
    *("conv2d stride uneven", "transposed 2d", "embedding", "cross entropy weights sum", "frozen"),
    *("mlp Tanh", "module called in a chain", "dice", "time first", "raw parameters"),
]


def block_eigenvalues(
    case: Case, curvature: str, data: Any = None, **settings: Any
) -> dict[str, Eigenpair]:
    risk = Risk(case.model(), data or case.data(), case.loss)
    engine = Curvature(risk, curvature, settings=Settings(**settings))
    with risk.session():
        return engine.block_eigenvalues(list(risk.parameters), 1e-9)


def agree(found: Mapping[str, Eigenpair], case: Case, curvature: str) -> None:
    matrix = getattr(case.dense(), curvature)
    size = float(matrix.abs().max())
    assert list(found) == case.dense().names
    for name, block in case.dense().blocks(matrix).items():
        value, residual, vector, _ = found[name]
        want = float(torch.linalg.eigvalsh(block)[-1])
        assert value == pytest.approx(want, rel=1e-9, abs=1e-12 * size), name
        v = flat(vector)
        truth = float((block @ v - value * v).norm())
        assert residual == pytest.approx(truth, rel=1e-2, abs=1e-12 * size), name
        assert residual <= 1e-9 * abs(value) + 1e-12 * size, name


@pytest.mark.parametrize("curvature", CURVATURES)
@pytest.mark.parametrize("name", SWEPT)
def test_block_eigenvalues(name: str, curvature: str) -> None:
    case = BY_NAME[name]
    agree(block_eigenvalues(case, curvature), case, curvature)


@pytest.mark.parametrize("name", ["mlp", "residual", "conv2d groups", "segmentation", "indefinite"])
def test_stored_gradients_spare_the_products(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, case = counted(monkeypatch), BY_NAME[name]
    agree(block_eigenvalues(case, "ggn"), case, "ggn")
    assert not calls
    agree(block_eigenvalues(case, "ggn", max_directions=1), case, "ggn")
    assert calls, "more directions than allowed: by products"


def swept(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A list that gets the store of every sweep from now on."""
    stores, run = list[Any](), ExactPass.run

    def noted(self: ExactPass, *arguments: Any) -> Any:
        stores.append(self.store)
        return run(self, *arguments)

    monkeypatch.setattr(ExactPass, "run", noted)
    return stores


@pytest.mark.parametrize("name", ["mlp", "residual"])
def test_stored_gradients_of_several_batches_and_too_little_memory(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, case = counted(monkeypatch), BY_NAME[name]
    x, y = case.data()
    batches = [(x[:2], y[:2]), (x[2:], y[2:])]
    agree(block_eigenvalues(case, "hessian", batches), case, "hessian")
    assert not calls
    sweeps = swept(monkeypatch)
    agree(block_eigenvalues(case, "hessian", batches, memory_budget=1 << 30), case, "hessian")
    assert [type(store) for store in sweeps] == [Gradients]
    least = sum(sweeps[0].sizes.values())
    sweeps.clear()
    agree(block_eigenvalues(case, "hessian", batches, memory_budget=least // 2), case, "hessian")
    assert [type(store) for store in sweeps[:2]] == [Gradients, Gradients], "in portions"
    sweeps.clear()
    agree(block_eigenvalues(case, "hessian", batches, memory_budget=100), case, "hessian")
    assert [type(store) for store in sweeps[:2]] == [Gradients, Images], "nothing fits"
    assert not calls


@pytest.mark.parametrize("name", ["mlp", "residual", "conv2d groups", "segmentation", "indefinite"])
@pytest.mark.parametrize("curvature", CURVATURES)
def test_iterations_advance_together(
    name: str, curvature: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no gradients fit in memory, a sweep is a step of all layers."""
    case, sweeps = BY_NAME[name], swept(monkeypatch)
    monkeypatch.setattr(Gradients, "_reserve", lambda self, name, _: self.dropped.add(name))
    calls = counted(monkeypatch)
    found = block_eigenvalues(case, curvature)
    agree(found, case, curvature)
    assert not calls
    # As many sweeps as the slowest block takes: no more than it has entries, twice for rounding.
    assert 2 < len(sweeps) <= 2 + 2 * max(len(flat(pair[2])) for pair in found.values())


def test_a_chunk_that_is_swept_again_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    case, measure, failed = BY_NAME["mlp"], ExactPass.measure, list[int]()

    def fails_now_and_then(self: ExactPass, chunk: Chunk) -> Any:
        done = measure(self, chunk)
        failed.append(chunk.batch.size)
        if len(failed) % 7 == 3 and chunk.batch.size > 1:
            raise torch.OutOfMemoryError
        return done

    monkeypatch.setattr(ExactPass, "measure", fails_now_and_then)
    monkeypatch.setattr(Gradients, "_reserve", lambda self, name, _: self.dropped.add(name))
    agree(block_eigenvalues(case, "hessian"), case, "hessian")
    assert len(set(failed)) > 1


def test_blocks_that_bend_go_by_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Gauss–Newton part of their gradients would be another matrix."""
    calls, case = counted(monkeypatch), BY_NAME["mlp Tanh"]
    agree(block_eigenvalues(case, "hessian"), case, "hessian")
    assert calls
    with pytest.raises(AssertionError):
        agree(block_eigenvalues(case, "ggn"), case, "hessian")


def test_a_chunk_that_ran_out_of_memory_is_not_stored_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case, measure = BY_NAME["mlp"], ExactPass.measure
    failed: list[Chunk] = []

    def fails_once(self: ExactPass, chunk: Chunk) -> Any:
        done = measure(self, chunk)
        if not failed:
            failed.append(chunk)
            raise torch.OutOfMemoryError
        return done

    monkeypatch.setattr(ExactPass, "measure", fails_once)
    agree(block_eigenvalues(case, "hessian"), case, "hessian")
    assert failed


# densities


def gaussians(values: np.ndarray, grid: Tensor, width: float) -> Tensor:
    """The density of some eigenvalues, each a normal distribution."""
    each = torch.distributions.Normal(torch.from_numpy(values.copy()), width)
    return each.log_prob(grid[:, None]).exp().mean(1)


def smooth_network() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 12), nn.Tanh())
    model.append(nn.Linear(12, 4)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    return model, (torch.randn(40, 8).double(), torch.arange(40) % 4)


@pytest.mark.parametrize("curvature", CURVATURES)
def test_density_is_the_dense_one_within_its_band(curvature: str) -> None:
    """A matrix of 400: the nodes of 40 steps are not its eigenvalues."""
    model, data = smooth_network()
    dense = Dense(model, *data)
    found = sf.density(model, data, curvature=curvature, probes=40, steps=40)
    assert found.size == len(dense.hessian) == 400
    far = {}
    for name in CURVATURES:
        matrix = getattr(dense, name)
        want = gaussians(dense_eigenvalues(matrix, 400), found.grid, found.width)
        far[name] = (found.density - want).abs() / (found.error + 2e-4 * want.max())
    assert float(far.pop(curvature).max()) < 5
    assert float(next(iter(far.values())).max()) > 10, "the other matrix's would do too"
    matrix = getattr(dense, curvature)
    for order in (1, 2):
        mean, error = found.moment(order)
        truth = float(torch.linalg.matrix_power(matrix, order).trace()) / 400
        assert abs(mean - truth) < 4 * error
        assert error < 0.3 * abs(truth)


def test_the_band_is_calibrated() -> None:
    """The error that probes claim is the spread over seeds."""
    model, data = smooth_network()
    matrix = Dense(model, *data).hessian
    values, space = dense_eigenvalues(matrix, 400), Coordinates({"w": matrix[0]})
    drawn = []
    for seed in range(60):
        rules = quadratures(lambda v: {"w": matrix @ v["w"]}, space, 4, 30, seed)
        nodes, weights = zip(*rules, strict=True)
        drawn.append(sf.Density(nodes, weights, 0.1, 400, 30, "hessian"))
    points = torch.linspace(float(values[-1]), float(values[0]), 40).double()
    each = torch.stack([interpolated(points, d.grid, d.density) for d in drawn])
    claimed = torch.stack([interpolated(points, d.grid, d.error) for d in drawn])
    ratio = each.std(0) / claimed.square().mean(0).sqrt()
    assert 0.7 < float(ratio.median()) < 1.4
    bias = (each.mean(0) - gaussians(values, points, 0.1)) / (each.std(0) / 60**0.5)
    assert float(bias.abs().max()) < 5


def interpolated(at: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return torch.from_numpy(np.interp(at.numpy(), x.numpy(), y.numpy()))


@pytest.mark.parametrize("name", ["mlp Tanh", "mse", "indefinite"])
def test_a_basis_of_starts_gives_the_spectrum_itself(name: str) -> None:
    """Σ_i eᵢᵀ f(H) eᵢ is Tr f(H), without chance; copies of eigenvalues end a start early."""
    matrix = BY_NAME[name].dense().hessian
    size = len(matrix)
    rules = [drive(quadrature(e, size), lambda v: matrix @ v) for e in torch.eye(size).double()]
    nodes, weights = zip(*rules, strict=True)
    found = sf.Density(nodes, weights, 0.05, size, size, "hessian")
    want = gaussians(dense_eigenvalues(matrix, size), found.grid, 0.05)
    torch.testing.assert_close(found.density, want, rtol=1e-8, atol=1e-10)
    assert found.moment(1)[0] == pytest.approx(float(matrix.trace()) / size, rel=1e-10)
    assert found.moment(2)[0] == pytest.approx(float(matrix.square().sum()) / size, rel=1e-10)


def test_density_of_a_block_and_of_zero() -> None:
    case = BY_NAME["mlp"]
    found = sf.density(case.model(), case.data(), block="2.weight", probes=50)
    block = case.dense().blocks(case.dense().hessian)["2.weight"]
    mean, error = found.moment(1)
    assert abs(mean - float(block.trace()) / len(block)) < 4 * error
    flat_model = nn.Linear(3, 1).double()
    zero = sf.density(flat_model, (torch.randn(4, 3).double(), torch.zeros(4).long()))
    assert zero.moment(2) == (0.0, 0.0)
    assert float(torch.trapezoid(zero.density, zero.grid)) == pytest.approx(1, rel=1e-4)


def test_a_density_draws_and_prints_itself(tmp_path: Path) -> None:
    case = BY_NAME["mlp"]
    found = sf.density(case.model(), case.data(), probes=3, steps=10)
    assert found.width == pytest.approx(float(found.grid[-1] - found.grid[0]) / 20)
    axes = found.plot()
    axes.figure.savefig(tmp_path / "density.png")
    assert (tmp_path / "density.png").stat().st_size > 1000
    assert found.plot(axes) is axes
    assert "3 probes of 10 steps" in str(found)
    assert found.smoothed(0.5).width == 0.5
    assert float(found.smoothed(0.5).density.max()) < float(found.density.max())
    with pytest.raises(sf.InvalidValue, match="width must be a finite number above 0"):
        found.smoothed(0.0)


def test_a_picture_needs_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    case = BY_NAME["mlp"]
    found = sf.density(case.model(), case.data(), probes=2, steps=3)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(sf.MissingDependency, match="pip install matplotlib"):
        found.plot()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"probes": 1}, "probes must be an integer of at least 2"),
        ({"steps": 1}, "steps must be an integer of at least 2"),
        ({"width": 0.0}, "width must be a finite number above 0"),
        ({"block": "0.wieght"}, "Nearest is '0.weight'"),
        ({"seed": "x"}, "seed must be an integer"),
    ],
)
def test_refusals_of_densities(options: dict[str, object], words: str) -> None:
    case = BY_NAME["mlp"]
    with pytest.raises(sf.SaltflatError, match=words):
        sf.density(case.model(), case.data(), **options)
