"""Every rescaling that keeps the function is found, and nothing else."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scaling_networks import BY_NAME, CASES, Case, RandomGraph, answer, brute_force, ready
from torch import Tensor, nn

from saltflat import SaltflatError, zoo
from saltflat.symmetries import symmetries, verify


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_found_is_all_there_is(case: Case) -> None:
    """As many generators as brute force counts, and each keeps the function."""
    model, example = ready(case)
    group = symmetries(model, example)
    assert len(group) == brute_force(case)
    assert case.dimension in (None, len(group))
    before = answer(model, example)
    for i in range(len(group)):
        for log in (math.log(1e3), -math.log(1e3)):
            u = torch.zeros(len(group))
            u[i] = log
            moved = group.element(u)(model)
            after = answer(moved, example)
            assert torch.allclose(after, before, rtol=0, atol=1e-10 * before.abs().max().item())
            assert any(
                not torch.equal(a, b)
                for a, b in zip(model.parameters(), moved.parameters(), strict=True)
            ), "a generator that moves nothing"
    for some in (group, group.only("layer")):
        for seed, spread in ((0, 10.0), (1, 1e3)):
            assert verify(model, some.random(seed, spread), example, tolerance=1e-10) <= 1e-10


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.sampled_from(RandomGraph.STEPS), min_size=1, max_size=5))
def test_random_graphs(steps: list[str]) -> None:
    case = Case("random", lambda: RandomGraph(steps), lambda: torch.randn(30, 3).double())
    model, example = ready(case)
    group = symmetries(model, example)
    assert verify(model, group.random(0, 1e3), example, tolerance=1e-10) <= 1e-10
    # A chain of linear maps says little at each point.
    assert len(group) == brute_force(case, points=20)


class Then(nn.Module):
    """Two linear layers with something between them."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc1, self.fc2, self.between = nn.Linear(3, 4), nn.Linear(4, 2), between

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.between(self.fc1(x)))


OPERATIONS: list[tuple[Callable[[Tensor], Tensor], int]] = [
    (F.relu, 4),
    (F.gelu, 0),
    (torch.tanh, 0),
    (F.silu, 0),
    (F.softplus, 0),
    (F.elu, 0),
    (F.relu6, 0),
    (lambda h: F.softmax(h, 1), 0),
    (lambda h: h + 0.3, 0),
    (lambda h: h + torch.tensor([0.0, 0.0, 1.0, 0.0]), 3),
    (lambda h: h + torch.zeros(4), 4),
    (lambda h: h.clamp(min=0), 4),
    (lambda h: h.clamp(min=0.5), 0),
    (lambda h: h.round(), 0),
    (lambda h: h.to(torch.int64).float(), 0),
    (lambda h: torch.where(h > 0.5, h, 0 * h), 0),
    (lambda h: torch.where(h > 0, h, 0.1 * h), 4),
    (lambda h: h.masked_fill(torch.tensor([True, False, False, False]), 0.0), 3),
    (lambda h: h * torch.tensor([1.0, 2.0, -1.0, 3.0]), 4),
    (lambda h: h.sum(1, keepdim=True).expand(-1, 4), 1),
    (lambda h: h.max(1, keepdim=True)[0].expand(-1, 4), 1),
    (lambda h: h.sort(1)[0], 1),
    (lambda h: h.topk(4)[0], 1),
    (lambda h: h.roll(1, 1), 4),
    (lambda h: h + h.flip(1), 2),
    (lambda h: h.maximum(h.roll(1, 1)), 1),
    (lambda h: h.view(-1, 2, 2).transpose(1, 2).flatten(1), 4),
    (lambda h: h.square(), 4),
    (lambda h: h.abs().sqrt(), 4),
    (lambda h: h.sign(), 4),
    (lambda h: h / h.abs().sum(1, keepdim=True), 1),
    (lambda h: F.layer_norm(h, (4,)), 0),
    (lambda h: F.normalize(h, dim=1), 0),
    (lambda h: h / (1 + h.abs()), 0),
    (lambda h: h * h.sigmoid(), 0),
    (lambda h: F.dropout(h, training=False), 4),
    (lambda h: h.index_add(0, torch.tensor([0, 1]), h[:2]), 4),
    (lambda h: F.threshold(h, 0.0, 0.0), 4),
    (lambda h: F.threshold(h, 0.1, 0.0), 0),
    (lambda h: h[:, [0, 0, 1, 1]], 2),
    (lambda h: torch.cat([h[:, :2], h[:, :2].detach()], 1), 2),
    (lambda h: h.clone().copy_(h).mul_(2).relu_(), 4),
]


class Many(nn.Module):
    """All of them side by side, so that one trace serves them all."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(Then(between) for between, _ in OPERATIONS)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [branch(x) for branch in self.branches]


def test_operations() -> None:
    torch.manual_seed(0)
    model, example = Many(), torch.randn(5, 3)
    group = symmetries(model, example, output=lambda out: out)
    found = Counter(g.label.split(".")[1] for g in group)
    wrong = {
        i: (found[str(i)], dimension)
        for i, (_, dimension) in enumerate(OPERATIONS)
        if found[str(i)] != dimension
    }
    assert not wrong, "operation: (found, true)"
    moved = group.random(0, 100.0)(model)
    for before, after in zip(model(example), moved(example), strict=True):
        assert torch.allclose(before, after, rtol=1e-4, atol=1e-5)


def test_a_wrong_generator_is_caught() -> None:
    model, example = ready(BY_NAME["mlp"])
    group = symmetries(model, example)
    right = group.random(0)
    verify(model, right, example)
    # Outgoing weights grow with the incoming ones instead of shrinking.
    wrong = replace(right, exponents=group.exponents().mapped(abs))
    with pytest.raises(SaltflatError, match="does not keep the function"):
        verify(model, wrong, example)


@pytest.mark.parametrize(
    ("make", "size", "dimension"),
    [(zoo.lenet5, (1, 28, 28), 226), (zoo.ibayashi_mlp, (784,), 40)],
)
def test_zoo(make: Callable[[], nn.Module], size: tuple[int, ...], dimension: int) -> None:
    assert len(symmetries(make(), torch.randn(2, *size))) == dimension


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "dimension"),
    [
        (zoo.resnet18, 7680),
        (zoo.vgg11, 2 * 2752),
        (lambda: zoo.vgg11(batch_norm=False), 2752),
        (zoo.wide_resnet16_4, 3168),
    ],
)
def test_large_networks(make: Callable[[], nn.Module], dimension: int) -> None:
    torch.manual_seed(0)
    model, example = make(), torch.randn(2, 3, 32, 32)
    group = symmetries(model, example)
    assert len(group) == dimension
    verify(model, group.random(0, 10.0), example)
    verify(model, group.only("layer").random(0, 10.0), example)
