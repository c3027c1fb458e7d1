"""The engine against BackPACK and curvlinops, on the networks that they can run."""

from __future__ import annotations

import peers
import pytest
import torch
from cases import BY_NAME

import saltflat as sf


@pytest.mark.parametrize("name", peers.BACKPACK)
def test_backpack(name: str) -> None:
    case = BY_NAME[name]
    result = sf.diagonal(case.model(), case.data(), case.loss, curvature="ggn")
    theirs = peers.backpack_diagonal(case)
    assert list(result) == list(theirs)
    for key, value in theirs.items():
        torch.testing.assert_close(result[key], value, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("curvature", ["hessian", "ggn"])
@pytest.mark.parametrize("name", peers.CURVLINOPS)
def test_curvlinops(name: str, curvature: str) -> None:
    case = BY_NAME[name]
    matrix = peers.curvlinops_matrix(case, curvature)
    blocks = case.dense().blocks(matrix)
    result = sf.trace(case.model(), case.data(), case.loss, curvature=curvature)
    for key, block in blocks.items():
        detail = result.details[key]
        assert abs(result[key] - float(block.trace())) <= (
            1e-10 * float(block.abs().max()) + 1e-14 if detail.exact else 4 * detail.stderr
        ), key
