"""Groups of wide networks: no entry of a weight has an id of its own unless it needs one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scaling_networks import BY_NAME, Case, brute_force, ready
from torch import Tensor, nn

from saltflat.symmetries import find, liveness, symmetries, verify
from saltflat.symmetries import scales as variables
from saltflat.symmetries.liveness import forest


@pytest.mark.parametrize("seed", range(20))
def test_a_forest_spans_what_the_mask_does(seed: int) -> None:
    """Against the rank of all rows, p[i] + q[j], that the mask leaves."""
    generator = torch.Generator().manual_seed(seed)
    share = [0.0, 0.1, 0.3, 1.0][seed % 4]
    mask = torch.rand(6, 5, generator=generator) < share
    rows, columns = forest(mask)
    assert bool(mask[rows, columns].all())
    every = np.eye(11)
    i, j = mask.nonzero().T.numpy()
    whole = np.linalg.matrix_rank(every[i] + every[6 + j]) if len(i) else 0
    assert len(rows) == whole
    chosen = every[rows.numpy()] + every[6 + columns.numpy()]
    assert len(rows) == 0 or np.linalg.matrix_rank(chosen) == whole


def test_weights_in_products_have_no_ids_of_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of variables grows with the width, not with its square."""
    counts = []
    assembled = find.Assembly.__init__  # type: ignore[attr-defined]

    def spy(self: Any, propagation: Any) -> None:
        counts.append(propagation.scales.count)
        assembled(self, propagation)

    monkeypatch.setattr(find.Assembly, "__init__", spy)  # type: ignore[attr-defined]
    model = nn.Sequential(
        nn.Linear(50, 60), nn.ReLU(), nn.Linear(60, 70), nn.ReLU(), nn.Linear(70, 3)
    )
    group = symmetries(model.double(), torch.randn(4, 50).double())
    assert len(group) == 130
    assert counts[0] < 500
    verify(model, group.random(0, 1e3), torch.randn(4, 50).double())


@pytest.mark.parametrize("name", ["mlp", "vgg_bn", "siamese", "bert", "gpt2", "encoder"])
def test_entry_by_entry_gives_the_same_group(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight all of whose entries get ids at once: no short cut is taken anywhere."""
    model, example = ready(BY_NAME[name])
    fast = symmetries(model, example).exponents()
    made = variables.Weight.__init__

    def entries(self: Any, *args: Any) -> None:
        made(self, *args)
        self.entries()

    monkeypatch.setattr(variables.Weight, "__init__", entries)
    slow = symmetries(model, example).exponents()
    assert set(fast.classes) == set(slow.classes)
    a, b = (
        np.concatenate([e.matrix.toarray()[e.classes[n].reshape(-1)] for n in sorted(e.classes)])
        for e in (fast, slow)
    )
    rank = np.linalg.matrix_rank(a)
    assert a.shape == b.shape
    assert rank == a.shape[1] == np.linalg.matrix_rank(np.concatenate([a, b], 1))


class Shared(nn.Module):
    """Two uses of one weight: whole, then whole again or without a row and with a mask."""

    def __init__(self, split: bool) -> None:
        super().__init__()
        self.fc1, self.fc2, self.split = nn.Linear(3, 4), nn.Linear(4, 2), split

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.fc1.weight, self.fc1.bias
        h = F.relu(F.linear(x, weight, bias))
        if self.split:
            part = F.linear(x, weight * torch.tensor([1.0, 0.0, 1.0]).to(x), bias)[:, :2]
            return self.fc2(h) + part.sin()
        return self.fc2(h) + self.fc2(F.relu(F.linear(2 * x, weight, bias)))


@pytest.mark.parametrize(("split", "dimension"), [(False, 4), (True, 2)])
def test_ids_are_split_where_the_graph_splits_them(
    split: bool, dimension: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is used in part has an id an entry, what is used as a whole has none."""
    written = []
    entries = variables.Weight.entries

    def spy(self: Any) -> Tensor:
        written.append(self.label)
        return entries(self)

    monkeypatch.setattr(variables.Weight, "entries", spy)
    case = Case("shared", lambda: Shared(split), lambda: torch.randn(30, 3).double())
    model, example = ready(case)
    group = symmetries(model, example)
    assert ("fc1.weight" in written) == split
    assert "fc2.weight" not in written
    assert len(group) == dimension == brute_force(case)
    verify(model, group.random(0, 1e3), example, tolerance=1e-10)


@pytest.mark.parametrize("name", ["vgg_bn", "siamese", "bert", "gpt2", "encoder", "unet"])
def test_points_with_overlapping_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "OVERLAPPING", 0)
    monkeypatch.setattr(liveness, "STEP", 2)
    model, example = ready(BY_NAME[name])
    group = symmetries(model, example)
    assert len(group) == brute_force(BY_NAME[name])


class Flat(nn.Module):
    """Its weight is viewed as a vector, which needs it in one piece."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.fc = nn.Parameter(torch.randn(4, 3)), nn.Linear(4, 2)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.view(-1).view(4, 3)
        return self.fc(F.relu(self.norm(F.linear(x, weight))))


@pytest.mark.parametrize("least", [0, 1 << 16])
def test_graphs_that_the_user_holds_survive(least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is called with other tensors, never given other parameters for a while."""
    monkeypatch.setattr(liveness, "OVERLAPPING", least)
    monkeypatch.setattr(liveness, "STEP", 2)
    torch.manual_seed(0)
    model, x = Flat(), torch.randn(5, 3)
    model(x)  # BatchNorm has statistics
    loss = model.eval()(x).square().sum()
    group = symmetries(model, x)
    assert len(group) == 8, "four filters before BatchNorm, four units after it"
    grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    assert all(g is not None and g.abs().sum() > 0 for g in grads)


def test_classes_are_of_parameters_alone_and_of_distinct_exponents() -> None:
    model, example = ready(BY_NAME["vgg_bn"])
    group = symmetries(model, example)
    assert set(group.exponents().classes) == {n for n, _ in model.named_parameters()}
    wide = nn.Sequential(nn.Linear(9, 20), nn.ReLU(), nn.Linear(20, 30), nn.ReLU())
    model = nn.Sequential(*wide, nn.Linear(30, 2)).double()
    units = symmetries(model, torch.randn(4, 9).double())
    layers = units.only("layer").exponents()
    assert len(layers.kinds("2.weight")) == 1, "one factor for the whole weight"
    assert layers.factors.uniform("2.weight")
    assert len(units.exponents().kinds("2.weight")) == 600, "one for every entry"
    assert not units.exponents().factors.uniform("2.weight")
    for group in (units, units.only("layer")):
        e, element = group.exponents(), group.random(0)
        factor = torch.from_numpy(np.exp(e.matrix @ element.logs.numpy()))
        for name, told in element.factors().items():
            assert torch.allclose(factor[e.classes[name]], told)


class Tied(nn.Module):
    """A table that is the head too, and one that has no effect."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.unused = nn.Embedding(30, 6), nn.Parameter(torch.randn(30, 6))
        self.fc1, self.fc2 = nn.Linear(6, 5), nn.Linear(5, 6)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.fc2(F.relu(self.fc1(self.table(tokens).sin())))
        return F.linear(h.sin(), self.table.weight) + (self.unused * 0).sum()


@pytest.mark.parametrize("large", [0, 10**9])
def test_large_parameters_that_stay(large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether they have an effect is found with a derivative and without."""
    monkeypatch.setattr(liveness, "LARGE", large)
    torch.manual_seed(0)
    model, tokens = Tied().double(), torch.randint(30, (3, 4))
    group = symmetries(model, tokens)
    assert group.dead == ("unused",)
    assert len(group) == 5
    verify(model, group.random(0, 1e3), tokens)


def test_entries_without_effect_are_seen_in_a_wide_layer() -> None:
    """Inputs that are zero take nothing from the group; units that nothing reads do."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))
    x = torch.randn(5, 8).double()
    x[:, 3:] = 0
    assert len(symmetries(model.double(), x)) == 10

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.head = model[:3], nn.Linear(2, 2).double()

        def forward(self, x: Tensor) -> Any:
            return self.head(F.relu(self.net(x))[:, :2])

    group = symmetries(Part(), x)
    verify(Part(), symmetries(Part(), x).random(0), x)
    assert len(group) == 8, "six units, and two of four that are read"
