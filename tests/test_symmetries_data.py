"""`symmetries` takes inputs, or data in the forms that every other call takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import saltflat as sf

X, Y = torch.randn(6, 3), torch.tensor([0, 1, 0, 1, 0, 1])


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


class Sum(nn.Module):
    """Two inputs, by position or by name."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, a: Tensor, b: Tensor) -> Any:
        return self.net(a + b)


class Optional(Sum):
    def forward(self, a: Tensor, b: Tensor | None = None) -> Any:
        return self.net(a if b is None else a + b)


class Labelled(Sum):
    def forward(self, a: Tensor, labels: Tensor | None = None) -> Any:
        assert labels is not None
        return self.net(a)


class Batches:
    """A re-iterable of one's own, in an order that it draws."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for k in torch.randperm(3):
            yield X[2 * k : 2 * k + 2], Y[2 * k : 2 * k + 2]


FORMS: dict[str, Any] = {
    "inputs": X,
    "list of one input": [X],
    "pair": (X, Y),
    "pair with numpy": (X.numpy(), Y.numpy()),
    "list of a pair": [(X, Y)],
    "list of pairs": [(X[:3], Y[:3]), (X[3:], Y[3:])],
    "tuple of pairs": ((X[:3], Y[:3]), (X[3:], Y[3:])),
    "loader": DataLoader(TensorDataset(X, Y), 4, shuffle=True),
    "dataset": TensorDataset(X, Y),
    "re-iterable": Batches(),
    "dict": {"input": X},
    "dict with labels": {"input": X, "labels": Y},
    "list of dicts": [{"input": X, "labels": Y}],
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form(form: str) -> None:
    model = net()
    before = torch.get_rng_state()
    assert len(sf.symmetries(model, FORMS[form])) == 4
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("model", "example"),
    [
        (Sum(), (X, X)),
        (Sum(), {"a": X, "b": X}),
        (Sum(), [((X, X), Y)]),
        (Sum(), [({"a": X, "b": X}, Y)]),
        (Optional(), (X, X)),
        (Optional(), [(X, Y)]),
        (Labelled(), {"a": X, "labels": Y}),
    ],
)
def test_what_forward_takes_is_inputs_and_a_list_of_pairs_is_data(
    model: nn.Module, example: Any
) -> None:
    assert len(sf.symmetries(model, example)) == 4


def test_unpack_makes_everything_data() -> None:
    data = [{"image": X, "class": Y, "name": "first"}]
    group = sf.symmetries(net(), data, unpack=lambda item: (item["image"], item["class"]))
    assert len(group) == 4


def test_half_precision_data_in_float32() -> None:
    assert len(sf.symmetries(net().half(), (X, Y))) == 4


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ((X, X, X), "tuple of 3 inputs.*nor a list of such pairs"),
        (["image", X], "list of 2 inputs"),
        ((), "tuple of 0 inputs"),
        (iter([(X, Y)]), "iterable more than once"),
        ({"image": X}, "cannot be run on the inputs"),
        (3, "cannot be run on the inputs"),
    ],
)
def test_what_is_neither_is_an_error(example: Any, message: str) -> None:
    with pytest.raises(sf.InvalidType, match=message):
        sf.symmetries(net(), example)


def test_items_that_cannot_be_split_are_an_error() -> None:
    with pytest.raises(sf.DataError, match="unpack"):
        sf.symmetries(net(), DataLoader(TensorDataset(X, X, Y), 4))
