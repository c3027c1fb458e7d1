"""Every rescaling that keeps the function is found, and nothing else."""

from __future__ import annotations

import pytest
import torch
from scaling_networks import CASES, Case, brute_force, randomise

from saltflat.symmetries import symmetries


def ready(case: Case, seed: int = 0) -> tuple[torch.nn.Module, object]:
    torch.manual_seed(seed)
    model = case.make()
    randomise(model, seed)
    return model, case.draw()


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_dimension_is_that_of_brute_force(case: Case) -> None:
    model, example = ready(case)
    found = len(symmetries(model, example))
    assert found == brute_force(case)
    assert case.dimension in (None, found)
