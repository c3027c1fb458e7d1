"""The same samples in every form that users have them in."""

from __future__ import annotations

from typing import Any

import networks as net
import numpy as np
import pytest
import torch
from agree import agrees
from cases import BY_NAME, Case
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

import saltflat as sf
from saltflat.risk import Batch, Risk, alike, join


def check(case: Case, data: object, model: nn.Module | None = None, **options: object) -> None:
    oracle = case.dense()
    model = case.model() if model is None else model
    result = sf.trace(model, data, case.loss, estimator=sf.Hutchinson(probes=30), **options)
    agrees(result, oracle.blocks(oracle.hessian))


class Stream(torch.utils.data.IterableDataset):
    """Can be read again and again, but has no length."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = tensors

    def __iter__(self):
        return iter(zip(*self.tensors, strict=True))


@pytest.mark.parametrize(
    "form",
    [
        lambda x, y: (x, y),
        lambda x, y: [x, y],
        lambda x, y: [(x, y)],
        lambda x, y: [(x[:2], y[:2]), (x[2:], y[2:])],
        lambda x, y: ([x[:1], y[:1]], [x[1:], y[1:]]),
        lambda x, y: DataLoader(TensorDataset(x, y), batch_size=2),
        lambda x, y: DataLoader(TensorDataset(x, y), batch_size=2, shuffle=True),
        lambda x, y: DataLoader(Stream(x, y), batch_size=2),
    ],
)
def test_forms_of_pairs(form) -> None:
    check(BY_NAME["mlp"], form(*BY_NAME["mlp"].data()))


@pytest.mark.parametrize("name", ["mlp Tanh", "dice", "variance", "weighted mean function"])
def test_shuffling_loaders(name: str) -> None:
    """Each reading comes in another order, and the same probes give the same answer."""
    case = BY_NAME[name]
    loader = DataLoader(TensorDataset(*case.data()), batch_size=2, shuffle=True)
    check(case, loader)
    for curvature in ("hessian", "ggn"):
        shuffled, plain = (
            sf.trace(case.model(), data, case.loss, curvature=curvature, estimator=sf.Hutchinson(5))
            for data in (loader, case.data())
        )
        assert list(shuffled.values()) == pytest.approx(list(plain.values()), rel=1e-9)


def test_two_batches_are_not_a_pair() -> None:
    """A list of two (x, y) batches has length two as well."""
    x, y = BY_NAME["mlp"].data()
    check(BY_NAME["mlp"], [(x[:3], y[:3]), (x[3:], y[3:])])


def test_dict_with_labels() -> None:
    case = BY_NAME["bert"]
    inputs, labels = case.data()
    items = [{**{k: v[i] for k, v in inputs.items()}, "labels": labels[i]} for i in range(case.n)]
    check(case, {**inputs, "labels": labels})
    check(case, [{**inputs, "labels": labels}])
    check(case, DataLoader(items, batch_size=2))


def test_tuple_inputs_in_a_list_of_batches() -> None:
    case = BY_NAME["tuple of inputs"]
    (a, b), y = case.data()
    check(case, [((a[:2], b[:2]), y[:2]), ((a[2:], b[2:]), y[2:])])


def test_unpack() -> None:
    case = BY_NAME["mlp"]
    x, y = case.data()
    check(case, [(x, "extra", y)], unpack=lambda item: (item[0], item[2]))
    check(case, [{"image": x, "class": y}], unpack=lambda item: (item["image"], item["class"]))


def test_output() -> None:
    case = BY_NAME["dict of outputs"]
    model = net.Wrapped("prediction").double()
    model.load_state_dict(case.model().state_dict())
    check(case, case.data(), model, output=lambda out: out["prediction"])


def test_callable_loss_with_any_targets() -> None:
    """A callable loss sees the targets as they come, here a dict."""
    case = BY_NAME["mlp"]
    x, y = case.data()
    result = sf.trace(
        case.model(), [(x, {"y": y})], lambda o, t: nn.functional.cross_entropy(o, t["y"])
    )
    oracle = case.dense()
    agrees(result, oracle.blocks(oracle.hessian))


def test_wrappers_are_seen_through() -> None:
    """torch.compile, DataParallel and DDP: the names are those of the model inside."""
    case = BY_NAME["mlp"]
    check(case, case.data(), torch.compile(case.model(), backend="eager"))
    check(case, case.data(), nn.DataParallel(case.model()))
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        check(case, case.data(), nn.parallel.DistributedDataParallel(case.model()))
    finally:
        torch.distributed.destroy_process_group()


# numpy arrays, and datasets without a loader


def readonly(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)
    return array


@pytest.mark.parametrize(
    "form",
    [
        lambda x, y: (x, y),
        lambda x, y: [x, y],
        lambda x, y: [(x[:2], y[:2]), (x[2:], y[2:])],
        lambda x, y: (torch.from_numpy(x), y),
        lambda x, y: (x, torch.from_numpy(y)),
        lambda x, y: (readonly(x.copy()), readonly(y.copy())),
        lambda x, y: (x[::-1][::-1], np.asfortranarray(y)),
        lambda x, y: {"input": x, "labels": y},
    ],
)
def test_numpy_arrays(form) -> None:
    case = BY_NAME["mlp"]
    x, y = case.data()
    check(case, form(x.numpy(), y.numpy()))


def test_numpy_arrays_in_dicts_and_tuples() -> None:
    case = BY_NAME["tuple of inputs"]
    (a, b), y = case.data()
    check(case, [((a.numpy(), b.numpy()), y.numpy())])


class Untorched(Dataset[tuple[np.ndarray, int]]):
    """Samples as many datasets have them: an array and a number."""

    def __len__(self) -> int:
        return BY_NAME["mlp"].n

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        x, y = BY_NAME["mlp"].data()
        return x[index].numpy(), int(y[index])


@pytest.mark.parametrize(
    "form",
    [
        TensorDataset,
        lambda x, y: Subset(TensorDataset(x.flip(0), y.flip(0)), range(len(x))),
        lambda x, y: ConcatDataset([TensorDataset(x[:2], y[:2]), TensorDataset(x[2:], y[2:])]),
        lambda x, y: Untorched(),
    ],
)
def test_datasets_are_read(form) -> None:
    check(BY_NAME["mlp"], form(*BY_NAME["mlp"].data()))


def test_datasets_are_read_in_batches() -> None:
    x, y = BY_NAME["mlp"].data(n=300)
    report = sf.measure(BY_NAME["mlp"].model(), TensorDataset(x, y), measures=["hessian_trace"])
    assert report.provenance.samples == 300
    assert (report.provenance.batches, report.provenance.batch_size) == (3, 128)


# nodes of a graph: one row a node, and edges that are not per sample

NODES = torch.arange(36.0).reshape(12, 3)
EDGES = torch.arange(60).reshape(2, 30) % 12


def graph(edges: torch.Tensor = EDGES) -> Batch:
    class Nodes(nn.Linear):
        def forward(self, input: torch.Tensor, edges: Any = EDGES) -> torch.Tensor:
            return super().forward(input.index_add(0, edges[0], input[edges[1]]))

    risk = Risk(Nodes(3, 2), [((NODES, edges), torch.zeros(12, dtype=torch.long))])
    with risk.session():
        batch = next(risk.batches())
        assert risk.forward(batch).shape == (12, 2)
    return batch


def test_edges_are_not_cut() -> None:
    batch = graph()
    assert batch.size == 12
    part = batch.part(3, 5)
    assert part.size == 2
    assert torch.equal(part.inputs[0], NODES[3:5])
    assert torch.equal(part.inputs[1], EDGES)


def test_two_graphs_do_not_make_one() -> None:
    """What is not per sample must be the same in all batches that are taken together."""
    same, other = graph(), graph((EDGES + 1) % 12)
    assert alike([same, graph()])
    assert join([same, graph()]).size == 24
    assert not alike([same, other])
    with pytest.raises(sf.DataError, match="neither one row a sample nor the same in both"):
        join([same, other])
    flagged = [Batch((NODES, flag), NODES, 12, "a batch") for flag in (True, False, 1)]
    assert not alike(flagged[:2])
    assert not alike([flagged[0], flagged[2]])
    assert alike(flagged[:1] * 2)
    assert not alike([same, Batch(NODES, NODES, 12, "a batch")])
