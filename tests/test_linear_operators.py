"""The Hessian and the Gauss–Newton matrix as operators, against dense matrices and curvlinops."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import peers
import pytest
import torch
from cases import BY_NAME, Case
from scipy.sparse.linalg import LinearOperator, cg, eigsh
from torch import Tensor, nn

import saltflat as sf

NAMES = ["mlp", "residual", "mlp Tanh", "attention", "indefinite", "dice", "frozen", "siamese"]
MAKE = {"hessian": sf.hessian, "ggn": sf.ggn}


def operator_of(case: Case, curvature: str, dtype: torch.dtype = torch.float64) -> sf.Operator:
    return MAKE[curvature](case.model(dtype), case.data(dtype), case.loss)


def split(case: Case, flat: Tensor) -> dict[str, Tensor]:
    parameters = case.dense().parameters
    parts = flat.split([p.numel() for p in parameters.values()])
    pairs = zip(parameters.items(), parts, strict=True)
    return {name: part.reshape(p.shape) for (name, p), part in pairs}


@pytest.mark.parametrize("curvature", MAKE)
@pytest.mark.parametrize("name", NAMES)
def test_every_form_of_a_vector(name: str, curvature: str) -> None:
    case = BY_NAME[name]
    matrix = getattr(case.dense(), curvature)
    operator = operator_of(case, curvature)
    assert operator.shape == matrix.shape
    assert operator.dtype == np.float64
    assert list(operator.names) == case.dense().names
    v = torch.randn(len(matrix), 3, generator=torch.Generator().manual_seed(2)).double()
    want = matrix @ v
    room: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-11 * float(matrix.abs().max())}
    torch.testing.assert_close(operator @ v, want, **room)
    torch.testing.assert_close(operator @ v[:, 0], want[:, 0], **room)
    np.testing.assert_allclose(operator @ v.numpy(), want.numpy(), **room)
    np.testing.assert_allclose(operator @ v[:, 1].numpy(), want[:, 1].numpy(), **room)
    np.testing.assert_allclose(operator.T @ v[:, 1].numpy(), want[:, 1].numpy(), **room)
    np.testing.assert_allclose(v[:, 1].numpy() @ operator, want[:, 1].numpy(), **room)
    image = operator @ split(case, v[:, 2])
    assert list(image) == case.dense().names
    for key, part in split(case, want[:, 2]).items():
        torch.testing.assert_close(image[key], part, **room)


@pytest.mark.parametrize("curvature", MAKE)
@pytest.mark.parametrize("name", ["mlp GELU", "branches", "lstm", "cross entropy soft", "bce"])
def test_curvlinops(name: str, curvature: str) -> None:
    case = BY_NAME[name]
    theirs = peers.curvlinops_matrix(case, curvature)
    ours = operator_of(case, curvature) @ torch.eye(len(theirs)).double()
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_the_two_differ_where_the_network_bends() -> None:
    case = BY_NAME["mlp GELU"]
    v = torch.ones(len(case.dense().hessian)).double()
    images = [operator_of(case, curvature) @ v for curvature in MAKE]
    assert float((images[0] - images[1]).norm()) > 1e-2 * float(images[0].norm())


def test_scipy_solves_with_it() -> None:
    case = BY_NAME["mlp Tanh"]
    matrix, operator = case.dense().ggn.numpy(), operator_of(case, "ggn")
    assert isinstance(operator, LinearOperator)
    values = eigsh(operator, k=3, which="LA", return_eigenvectors=False)
    np.testing.assert_allclose(np.sort(values), np.linalg.eigvalsh(matrix)[-3:], rtol=1e-9)
    damped = operator + 0.1 * LinearOperator(operator.shape, matvec=np.array, dtype=np.float64)
    right = np.ones(len(matrix))
    answer, failed = cg(damped, right, rtol=1e-12)
    assert not failed
    want = np.linalg.solve(matrix + 0.1 * np.eye(len(matrix)), right)
    np.testing.assert_allclose(answer, want, rtol=1e-7)


def test_copies_multiply_as_it_does() -> None:
    case = BY_NAME["mlp"]
    operator = operator_of(case, "hessian")
    v = torch.ones(operator.shape[0]).double()
    for twin in (copy.deepcopy(operator), pickle.loads(pickle.dumps(operator))):
        assert isinstance(twin, sf.Operator)
        assert isinstance(twin, LinearOperator)
        torch.testing.assert_close(twin @ v, case.dense().hessian @ v)


def test_dtypes_are_those_of_the_vector() -> None:
    case = BY_NAME["mlp"]
    operator = operator_of(case, "hessian", torch.float32)
    size = operator.shape[0]
    assert (operator @ torch.ones(size)).dtype == torch.float32
    assert (operator @ torch.ones(size, dtype=torch.float64)).dtype == torch.float64
    assert (operator @ torch.ones(size, dtype=torch.long)).dtype == torch.float64
    assert (operator @ np.ones(size, dtype=np.float32)).dtype == np.float64
    mapping = operator @ split(case, torch.ones(size))
    assert {v.dtype for v in mapping.values()} == {torch.float32}
    want = case.dense(torch.float32).hessian @ torch.ones(size).double()
    got = torch.cat([v.reshape(-1) for v in mapping.values()])
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)


def test_a_product_belongs_to_the_model_as_it_is_then() -> None:
    """Also where a parameter is another object since."""
    case = BY_NAME["mlp"]
    model, data = case.model(), case.data()
    operator = sf.hessian(model, data)
    v = torch.ones(operator.shape[0]).double()
    before = operator @ v
    with torch.no_grad():
        model[0].weight.mul_(0.5)
    halved = operator @ v
    assert float((halved - before).norm()) > 1e-2 * float(before.norm())
    torch.testing.assert_close(halved, sf.hessian(model, data) @ v)
    model[0].weight = nn.Parameter(model[0].weight.detach() * 2)
    torch.testing.assert_close(operator @ v, before)
    model[0] = nn.Linear(4, 6).double()
    model[2] = nn.Linear(6, 3).double()
    with pytest.raises(sf.ModelError, match="when the operator was made"):
        operator @ v


def test_the_model_is_left_as_it_was_found() -> None:
    case = BY_NAME["residual"]
    model, data = case.model().train(), case.data()
    model.conv1.weight.grad = torch.ones_like(model.conv1.weight)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    operator = sf.hessian(model, data)
    v = torch.ones(operator.shape[0], dtype=torch.float64, requires_grad=True)
    for _ in range(2):
        assert not (operator @ v).requires_grad
        assert model.training
        assert torch.equal(model.conv1.weight.grad, torch.ones_like(model.conv1.weight))
        assert all(torch.equal(value, state[n]) for n, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)


def test_some_parameters() -> None:
    case = BY_NAME["mlp"]
    operator = sf.hessian(case.model(), case.data(), parameters=iter(["2.weight"]))
    matrix = case.dense().blocks(case.dense().hessian)["2.weight"]
    eye = torch.eye(len(matrix)).double()
    for _ in range(2):
        torch.testing.assert_close(operator @ eye, matrix)


@pytest.mark.parametrize(
    ("vector", "words"),
    [
        (torch.ones(4), "A vector must have 15 entries, a matrix 15 rows. Got shape"),
        (torch.ones(15, 1, 1), "A vector must have 15 entries"),
        (torch.ones(15, dtype=torch.complex64), "real vectors"),
        (np.ones(15, dtype=complex), "real vectors"),
        ({"weight": torch.ones(3, 4)}, "must have 'bias' of shape .3,.. Got nothing"),
        ({"weight": torch.ones(4, 3), "bias": torch.ones(3)}, "'weight' of shape .3, 4.. Got .4"),
        ({"weight": torch.ones(3, 4), "bais": torch.ones(3)}, "'bais'.*Nearest is 'bias'"),
    ],
)
def test_refusals(vector: object, words: str) -> None:
    case = BY_NAME["linear alone"]
    with pytest.raises(sf.SaltflatError, match=words):
        operator_of(case, "hessian") @ vector
