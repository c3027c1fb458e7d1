"""The oracle itself: against two other libraries, the papers' formulas, and the table's claims."""

from __future__ import annotations

from fnmatch import fnmatch

import dense
import peers
import pytest
import torch
from cases import BY_NAME, CASES, Case
from torch import nn


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_table_says_truly_which_blocks_bend(case: Case) -> None:
    oracle = case.dense()
    bend, hessian, ggn = map(oracle.blocks, (oracle.bend, oracle.hessian, oracle.ggn))
    for name in oracle.names:
        if any(fnmatch(name, p) for p in case.dead):
            assert hessian[name].abs().max() < 1e-12
            continue
        curved = any(fnmatch(name, p) for p in case.curved)
        if not isinstance(case.loss, nn.NLLLoss):  # of which a log-softmax is a part
            assert bool(bend[name].abs().max() > 1e-6) == curved, name
        same = torch.allclose(hessian[name], ggn[name], rtol=1e-10, atol=1e-13)
        assert same != curved, name


@pytest.mark.parametrize("name", peers.BACKPACK)
def test_backpack_agrees_with_the_oracle(name: str) -> None:
    oracle = BY_NAME[name].dense()
    for key, value in peers.backpack_diagonal(BY_NAME[name]).items():
        torch.testing.assert_close(value.reshape(-1), oracle.blocks(oracle.ggn)[key].diagonal())


@pytest.mark.parametrize("curvature", ["hessian", "ggn"])
@pytest.mark.parametrize("name", peers.CURVLINOPS)
def test_curvlinops_agrees_with_the_oracle(name: str, curvature: str) -> None:
    # blocks only: under a layer norm curvlinops' Hessian is not symmetric (so it is wrong)
    # between the normalisation's weight and the layers before it
    oracle = BY_NAME[name].dense()
    theirs = oracle.blocks(peers.curvlinops_matrix(BY_NAME[name], curvature))
    for key, block in oracle.blocks(getattr(oracle, curvature)).items():
        torch.testing.assert_close(theirs[key], block)


def test_surrogate_loss_ignores_the_scale_of_the_logits() -> None:
    logits, y = torch.randn(4, 3, dtype=torch.float64), torch.tensor([0, 1, 2, 0])
    loss = dense.normalized_cross_entropy(logits, y)
    torch.testing.assert_close(dense.normalized_cross_entropy(7 * logits, y), loss)
    unit = logits / logits.std(1, keepdim=True, correction=0)
    torch.testing.assert_close(torch.nn.functional.cross_entropy(unit, y), loss)


def test_an_indefinite_loss_has_eigenvalues_of_both_signs() -> None:
    values = torch.linalg.eigvalsh(BY_NAME["indefinite"].dense().hessian)
    assert values[0] < -1e-3
    assert values[-1] > 1e-3
