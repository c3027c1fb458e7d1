"""The fast and the slow way to a tape give the same group, and each is taken where it should."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from scaling_networks import CASES, Case, ready
from torch import Tensor, nn

from saltflat.symmetries import find, symmetries, tape, verify


@pytest.fixture
def decomposed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The programs that the exporter itself has taken apart."""
    seen: list[Any] = []
    exported = tape._exported

    def spy(program: Any, answer: Any) -> Any:
        seen.append(program)
        return exported(program, answer)

    monkeypatch.setattr(tape, "_exported", spy)
    return seen


FAST = ["mlp", "vgg_bn", "post_activation", "dense", "separable", "siamese"]


@pytest.mark.parametrize("case", [c for c in CASES if c.name in FAST], ids=lambda c: c.name)
def test_both_ways_agree(
    case: Case, decomposed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, example = ready(case)
    fast = symmetries(model, example)
    assert not decomposed, "this network is meant to go the fast way"
    monkeypatch.setattr(find, "RULES", {})
    slow = symmetries(model, example)
    assert len(decomposed) == 1
    assert fast.generators == slow.generators
    assert fast.notes == slow.notes == ()
    assert fast.dead == slow.dead
    u = torch.linspace(-1, 1, len(fast))
    pairs = zip(
        fast.element(u)(model).parameters(), slow.element(u)(model).parameters(), strict=True
    )
    assert all(torch.equal(a, b) for a, b in pairs)


class Conditional(nn.Module):
    """The data choose between two operations in a way that export can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.fc1(x))
        h = torch.cond(h.sum() > 0, lambda h: h * 2, lambda h: h.sin(), (h,))
        return self.fc2(h)


class Sized(nn.Module):
    """A size that comes from the data."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.fc1(x))
        return self.fc2(h) + (x > 0).nonzero().shape[0]


def test_branches_are_not_replayed(decomposed: list[Any]) -> None:
    """On the example's own branch there is nothing but multiplication; the other has a sine."""
    torch.manual_seed(0)
    answer = tape.Answer(Conditional(), lambda out: out)
    found = tape.record(answer, (torch.randn(5, 3),), {}, find.RULES)  # type: ignore[attr-defined]
    assert len(decomposed) == 1
    assert not found.recorded
    assert any(str(call.op) == "cond" for call in found.live())


def test_sizes_from_data_are_recorded(decomposed: list[Any]) -> None:
    torch.manual_seed(0)
    model, x = Sized(), torch.randn(5, 3)
    group = symmetries(model, x)
    assert not decomposed
    assert "values decide what is computed" in group.notes[0]
    assert len(group) == 4
    verify(model, group.random(0, 1e3), x)


class BranchingNorm(nn.Module):
    """Export cannot follow, so that BatchNorm is recorded as it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.norm, self.fc2 = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.fc1(x))
        return self.fc2(F.relu(h)) if x.sum() > 0 else self.fc2(h)


def test_recorded_batch_norm_moves_with_its_input() -> None:
    torch.manual_seed(0)
    model, x = BranchingNorm().double().eval(), torch.rand(5, 3).double()
    with torch.no_grad():
        model.norm.running_var.uniform_(0.5, 2)
        model.norm.running_mean.normal_()
    group = symmetries(model, x)
    assert group.notes
    assert len(group) == 8, "into the norm and out of it, for each of four units"
    assert {g.kind for g in group.generators} == {"batchnorm", "neuron"}
    verify(model, group.random(0, 10.0), x)
