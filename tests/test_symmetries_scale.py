"""Groups of wide networks: no entry of a weight has an id of its own unless it needs one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scaling_networks import BY_NAME, ready
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
