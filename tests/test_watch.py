"""Several passes over the data must see the same samples, in whatever order."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from agree import agrees
from cases import BY_NAME
from dense import Dense
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
)

import saltflat as sf
from saltflat.watch import Kept, Tally, Watch

CASE = BY_NAME["mlp"]
X, Y = CASE.data(n=12)
ONE_PASS = ["hessian_trace", "normalized_sharpness", "rho", "relative_flatness", "fisher_rao_norm"]
SEVERAL = ["hessian_max_eigenvalue", "kappa"]


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Noise from a generator of its own, or from the global one; counts how often it is read."""

    def __init__(self, own: bool, size: float = 0.1) -> None:
        self.generator = torch.Generator().manual_seed(0) if own else None
        self.size, self.reads = size, 0

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.reads += 1
        noise = torch.randn(X[index].shape, generator=self.generator, dtype=X.dtype)
        return X[index] + self.size * noise, Y[index]


def measured(data: Any, names: list[str]) -> sf.Report:
    return sf.measure(CASE.model(), data, measures=names)


@pytest.mark.parametrize("name", SEVERAL)
def test_augmentation_is_refused_by_what_needs_several_passes(name: str) -> None:
    with pytest.raises(sf.DataError, match=r"differ between two passes \(12 samples, then 12\)"):
        measured(DataLoader(Augmented(own=True), 4), [name])


def test_augmentation_is_refused_by_everything_at_once() -> None:
    with pytest.raises(sf.DataError, match="switch the augmentation off, or pass list"):
        sf.measure(CASE.model(), DataLoader(Augmented(own=True), 4))


def test_augmentation_is_refused_by_estimates() -> None:
    model, few = BY_NAME["mlp GELU"].model(), sf.Hutchinson(5)  # fewer probes than entries
    options: dict[str, Any] = {"measures": ["hessian_trace"], "estimator": few}
    assert not sf.measure(model, (X, Y), **options)["hessian_trace"].exact
    with pytest.raises(sf.DataError, match="differ between two passes"):
        sf.measure(model, DataLoader(Augmented(own=True), 4), **options)


def test_augmentation_is_refused_before_a_second_measure_reads() -> None:
    """The first pass is the curvature's; what is read next is compared with it, and no more."""
    data = Augmented(own=True)
    with pytest.raises(sf.DataError, match="differ between two passes"):
        measured(DataLoader(data, 4), [*ONE_PASS, "kappa"])
    assert data.reads == 2 * len(X)


def test_augmentation_is_refused_where_one_pass_would_do() -> None:
    steady = Augmented(own=True, size=0.0)
    measured(DataLoader(steady, 4), ONE_PASS)
    # One pass, the one that it is compared with, and those that tell whether it is a minimum.
    assert 2 * len(X) < steady.reads <= 7 * len(X) + 4
    with pytest.raises(sf.DataError, match="differ between two passes"):
        measured(DataLoader(Augmented(own=True), 4), ONE_PASS)


# From the global generators, which every pass winds back

NOISE: dict[str, Callable[[], float]] = {
    "torch": lambda: float(torch.rand(())),
    "numpy": lambda: float(np.random.rand()),
    "python": random.random,
}
CALLS = {"trace": sf.trace, "diagonal": sf.diagonal, "max_eigenvalue": sf.max_eigenvalue}


class Jittered(Dataset[tuple[Tensor, Tensor]]):
    """One sample of the twelve is moved, by a global generator; none if there is no noise."""

    def __init__(self, noise: str | None) -> None:
        self.noise = noise

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        moved = index == 7 and self.noise is not None
        return X[index] + NOISE[str(self.noise)]() if moved else X[index], Y[index]


LOADERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "shuffled": {"shuffle": True},
    "own generator": {"shuffle": True, "generator": torch.Generator().manual_seed(3)},
    "worker": {"num_workers": 1},
    "persistent workers": {"num_workers": 2, "persistent_workers": True, "shuffle": True},
    "evenly dropped": {"shuffle": True, "drop_last": True},
    "no batches": {"batch_size": None, "sampler": BatchSampler(RandomSampler(range(12)), 5, False)},
}


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Indexed by lists, as a loader with `batch_size=None` does."""

    def __getitem__(self, index: list[int]) -> tuple[Tensor, Tensor]:
        return X[index], Y[index]


def loader(noise: str | None, options: dict[str, Any]) -> DataLoader[Any]:
    dataset = Rows() if "sampler" in options else Jittered(noise)
    return DataLoader(dataset, **{"batch_size": 4, **options})


@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize("options", ["plain", "shuffled", "worker"])
def test_augmentation_from_global_generators_is_refused(noise: str, options: str) -> None:
    with pytest.raises(sf.DataError, match="differ between two passes"):
        sf.trace(CASE.model(), loader(noise, LOADERS[options]))


@pytest.mark.parametrize("call", [*CALLS.values(), sf.measure, sf.audit])
def test_augmentation_is_refused_by_every_call(call: Callable[..., Any]) -> None:
    with pytest.raises(sf.DataError, match="differ between two passes"):
        call(CASE.model(), loader("torch", LOADERS["shuffled"]))


@pytest.mark.parametrize("options", LOADERS.values(), ids=LOADERS)
def test_honest_loaders_are_accepted(options: dict[str, Any]) -> None:
    """Every one of them moves the random state, and none of them the samples."""
    oracle = Dense(CASE.model(), X, Y)
    agrees(sf.trace(CASE.model(), loader(None, options)), oracle.blocks(oracle.hessian))


def test_random_states_are_given_back() -> None:
    own = torch.Generator().manual_seed(3)
    data = DataLoader(TensorDataset(X, Y), 5, shuffle=True, generator=own)
    before = torch.get_rng_state(), own.get_state(), random.getstate(), np.random.get_state()[1]
    sf.trace(CASE.model(), data)
    assert torch.equal(before[0], torch.get_rng_state())
    assert torch.equal(before[1], own.get_state())
    assert before[2] == random.getstate()
    assert np.array_equal(before[3], np.random.get_state()[1])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"shuffle": True, "drop_last": True}, "shuffle=True with drop_last=True"),
        ({"sampler": WeightedRandomSampler([1.0] * 12, 12)}, "WeightedRandomSampler"),
        ({"sampler": RandomSampler(range(12), replacement=True)}, "RandomSampler"),
        ({"sampler": RandomSampler(range(12), num_samples=7)}, "RandomSampler"),
    ],
)
def test_samplers_that_draw_other_samples_are_named(options: dict[str, Any], words: str) -> None:
    torch.manual_seed(0)
    data = DataLoader(TensorDataset(X, Y), 5, **options)
    for call in CALLS.values():
        with pytest.raises(sf.DataError, match=r"pass list\(loader\)") as caught:
            call(CASE.model(), data)
        assert words in str(caught.value)
    assert sf.trace(CASE.model(), list(data)).exact


class SomeBatches(Sampler[list[int]]):
    """All samples but one of three."""

    def __iter__(self) -> Iterator[list[int]]:
        out = int(torch.randint(3, ()))
        yield [i for i in range(12) if i != out]


def test_batch_samplers_that_draw_other_samples_are_named() -> None:
    data = DataLoader(TensorDataset(X, Y), batch_sampler=SomeBatches())
    for seed in range(5):
        torch.manual_seed(seed)
        with pytest.raises(sf.DataError, match="SomeBatches draws other samples"):
            sf.trace(CASE.model(), data)


class Sentences(Dataset[tuple[Tensor, Tensor]]):
    """Token ids of several lengths."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return 1 + torch.arange(2 + index % 5) * index % 6, Y[index]


def padded(items: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """To the longest of the batch."""
    ids, labels = zip(*items, strict=True)
    return pad_sequence(list(ids), batch_first=True), torch.stack(labels)


class Bag(nn.Module):
    """The mean over tokens that are not padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 4, padding_idx=0), nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        real = (ids > 0).unsqueeze(2)
        return self.head((self.embedding(ids) * real).sum(1) / real.sum(1))


def test_padding_to_the_longest_of_a_shuffled_batch_is_accepted() -> None:
    """Other batches are padded otherwise, so the second reading keeps the order."""
    torch.manual_seed(0)
    model = Bag().double()
    data = DataLoader(Sentences(), 3, shuffle=True, collate_fn=padded)
    plain = sf.trace(model, padded([Sentences()[i] for i in range(12)]))
    for _ in range(3):
        torch.rand(1)
        assert sf.trace(model, data).total == pytest.approx(plain.total, rel=1e-10)


class Streamed(IterableDataset[tuple[Tensor, Tensor]]):
    """Samples one by one, with noise or without."""

    def __init__(self, noise: float) -> None:
        self.noise = noise

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for x, y in zip(X, Y, strict=True):
            yield x + self.noise * torch.rand(()), y


class Batched:
    """An iterable of batches that nobody knows, from the global generator."""

    def __init__(self, noise: float) -> None:
        self.noise = noise

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield X + self.noise * torch.rand(()), Y


class Moved(DataLoader[Any]):
    """A loader that does something to its batches."""

    noise: float

    def __iter__(self) -> Any:
        return ((x + self.noise * torch.rand(()), y) for x, y in super().__iter__())


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("form", ["stream", "iterable", "subclass", "unpack"])
def test_every_other_form_is_read_twice(form: str, noise: float) -> None:
    options: dict[str, Any] = {}
    data: Any = DataLoader(Streamed(noise), 5)
    if form == "iterable":
        data = Batched(noise)
    elif form == "subclass":
        data = Moved(TensorDataset(X, Y), 5)
        data.noise = noise
    elif form == "unpack":
        data = [(X, Y)]
        options["unpack"] = lambda item: (item[0] + noise * torch.rand(()), item[1])
    if noise:
        with pytest.raises(sf.DataError, match="differ between two passes"):
            sf.trace(CASE.model(), data, **options)
    else:
        oracle = Dense(CASE.model(), X, Y)
        agrees(sf.trace(CASE.model(), data, **options), oracle.blocks(oracle.hessian))


class Counted:
    """How often it is read."""

    def __init__(self, data: Any) -> None:
        self.data, self.passes, self.items = data, 0, 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        for item in self.data:
            self.items += 1
            yield item


def test_the_price_is_one_more_reading() -> None:
    data = Counted([(X[:6], Y[:6]), (X[6:], Y[6:])])
    sf.trace(CASE.model(), data)
    assert (data.passes, data.items) == (2, 4)


@pytest.mark.parametrize(
    "data", [(X, Y), [(X, Y)], ((X[:5], Y[:5]), (X[5:], Y[5:])), {"input": X, "labels": Y}]
)
def test_data_in_memory_are_not_even_summed(data: Any, monkeypatch) -> None:
    def fails(*_: Any) -> Tensor:
        raise AssertionError("data that cannot change need no checksum")

    monkeypatch.setattr(Watch, "_hash", fails)
    for call in CALLS.values():
        call(CASE.model(), data)


def test_a_list_is_the_way_out() -> None:
    data = list(DataLoader(Augmented(own=True), 4))
    assert set(measured(data, SEVERAL)) == set(SEVERAL)


class Reordered:
    """Shuffles and batches anew at every pass, by a generator that nobody winds back."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.orders: list[list[int]] = []

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(len(X), generator=self.generator)
        self.orders.append(order.tolist())
        for part in order.split(3 + len(self.orders) % 3):
            yield X[part], Y[part]


def test_shuffling_is_harmless() -> None:
    data = Reordered()
    found = measured(Hidden(data), [*ONE_PASS, *SEVERAL])
    assert len({tuple(order) for order in data.orders}) > 2, "it must have been shuffled"
    plain = measured((X, Y), [*ONE_PASS, *SEVERAL])
    for name in found:
        assert found[name].value == pytest.approx(plain[name].value, rel=1e-6)
    assert found.provenance.data_hash == plain.provenance.data_hash


class Hidden:
    """An iterable whose generator cannot be found."""

    def __init__(self, data: Reordered) -> None:
        self.data = data

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self.data)


@pytest.mark.parametrize("estimator", [None, sf.PropagatedCurvature(8), sf.ActivationProbes(8)])
def test_shuffling_does_not_look_like_coupling(estimator: Any) -> None:
    """Draws read the data again, in another order than that in which the model was looked at."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(X.shape[1], 9), nn.GELU(), nn.Linear(9, 3)).double()
    found = sf.trace(model, Hidden(Reordered()), estimator=estimator)
    assert found.details["2.weight"].exact
    assert found.details["0.weight"].rule in ("propagated", "activation probes")
    assert "depend on the other samples" not in found.details["0.weight"].reason


@pytest.mark.parametrize("own", [True, False])
def test_shuffling_loaders(own: bool) -> None:
    generator = torch.Generator().manual_seed(1) if own else None
    data = DataLoader(TensorDataset(X, Y), 5, shuffle=True, generator=generator)
    assert set(measured(data, SEVERAL)) == set(SEVERAL)


class Shrinking:
    """Has its last batch once only."""

    def __init__(self) -> None:
        self.last = True

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield X[:6], Y[:6]
        if self.last:
            self.last = False
            yield X[6:], Y[6:]


def test_samples_that_go_missing() -> None:
    with pytest.raises(sf.DataError, match=r"\(12 samples, then 6\)"):
        measured(Shrinking(), ["hessian_max_eigenvalue"])


# The checksum itself


def checksum(*batches: Any) -> int:
    watch, tally = Watch(), Tally()
    watch.on = True
    for content in batches:
        watch.see(tally, content, len(content[1]))
    return tally.checksum


def test_checksum_knows_what_but_not_in_which_order() -> None:
    order = torch.randperm(12, generator=torch.Generator().manual_seed(2))
    whole = checksum((X, Y))
    assert 2**32 < whole < 2**64, "all of its 64 bits are used"
    assert checksum((X[order], Y[order])) == whole
    assert checksum((X[:5], Y[:5]), (X[5:], Y[5:])) == whole
    assert checksum((X[order], Y)) != whole, "inputs and targets belong together"
    assert checksum((X, Y[order])) != whole
    assert checksum((X, Y), (X[:1], Y[:1])) != whole
    assert checksum((X.flip(1), Y)) != whole, "entries have places"
    assert checksum((-X, Y)) != whole, "entries have signs, also an even number of them"
    swapped = X.clone()
    swapped[0, 0], swapped[1, 0] = X[1, 0], X[0, 0]
    assert checksum((swapped, Y)) != whole, "samples are whole"


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.int8,
        torch.int64,
        torch.bool,
        torch.complex64,
        torch.complex128,
    ],
    ids=str,
)
def test_checksum_of_every_dtype(dtype: torch.dtype) -> None:
    x = (X * 10).to(dtype)
    other = x.clone()
    other[3, 1] = ~other[3, 1] if dtype == torch.bool else other[3, 1] + 1
    assert checksum((x, Y)) == checksum((x.clone(), Y))
    assert checksum((x, Y)) != checksum((other, Y))


def test_checksum_of_structures() -> None:
    ids = torch.arange(24).reshape(12, 2)
    first = checksum(({"ids": ids, "scale": torch.tensor(2.0), "name": "x"}, Y))
    assert checksum(({"ids": ids, "scale": torch.tensor(2.0), "name": "x"}, Y)) == first
    assert checksum(({"ids": ids.flip(0), "scale": torch.tensor(2.0), "name": "x"}, Y)) != first
    other = ids.flip(0)
    assert checksum(((ids, other), Y)) != checksum(((other, ids), Y)), "arguments have places"
    masks = [torch.ones(3, 2), torch.eye(3, 2)]
    shared = [checksum(((ids, mask), Y)) for mask in masks]
    assert shared[0] != shared[1], "what samples share is seen too"
    halves = (((ids[:5], masks[0]), Y[:5]), ((ids[5:], masks[0]), Y[5:]))
    assert checksum(*halves) == shared[0]
    noncontiguous = torch.arange(24).reshape(2, 12).T
    assert checksum((noncontiguous, Y)) == checksum((noncontiguous.contiguous(), Y))


def test_a_watch_that_is_off_sees_nothing() -> None:
    watch, tally = Watch(), Tally()
    watch.see(tally, (X, Y), 12)
    watch.end(tally)
    assert tally == Tally()
    assert watch.first is None


def test_counts() -> None:
    watch, tally = Watch(), Tally()
    watch.on = True
    watch.see(tally, (X[:7], Y[:7]), 7)
    watch.see(tally, (X[7:], Y[7:]), 5)
    watch.end(tally)
    assert (tally.samples, tally.batches, tally.largest) == (12, 2, 7)
    assert watch.first is tally


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("width", [1, 2, 3, 7, 8, 9])
def test_checksum_of_rows_of_any_width_and_place(dtype: torch.dtype, width: int) -> None:
    """Bytes are read eight at a time, also where they do not begin or end there."""
    content = torch.arange(1, 12 * width + 2, dtype=dtype)
    first, shifted = content[:-1].reshape(12, width), content[1:].reshape(12, width)
    assert checksum((shifted, Y)) == checksum((shifted.clone(), Y))
    assert checksum((first, Y)) != checksum((shifted, Y))
    for place in ((0, 0), (11, width - 1)):
        other = first.clone()
        other[place] += 1
        assert checksum((other, Y)) != checksum((first, Y))


@pytest.mark.parametrize("shape", [(12, 0), (12, 3, 0)])
def test_inputs_without_entries_are_watched_too(shape: tuple[int, ...]) -> None:
    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = CASE.model()

        def forward(self, x: Tensor, empty: Tensor) -> Tensor:
            return self.model(x)

    data = TensorDataset(X, X.new_zeros(shape), Y)
    loader = DataLoader(data, 5)
    found = sf.trace(First(), loader, CASE.loss, unpack=lambda i: ((i[0], i[1]), i[2]))
    same = sf.trace(CASE.model(), (X, Y), CASE.loss)
    assert found.total == pytest.approx(same.total)


# ---------------------------------------------------------------------------------------------
# worker processes


class Workers(DataLoader[Any]):
    """Starts its workers at every pass, and counts the passes."""

    def __init__(self, dataset: Any, **options: Any) -> None:
        super().__init__(dataset, batch_size=5, num_workers=1, **options)
        self.passes = 0

    def __iter__(self) -> Any:
        self.passes += 1
        return super().__iter__()


class Labelled(Dataset[dict[str, Tensor]]):
    def __init__(self, x: Tensor = X) -> None:
        self.x = x

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input": self.x[index], "labels": Y[index]}


SEARCHED = ["hessian_trace", *SEVERAL]


def test_workers_start_for_two_readings_and_no_more() -> None:
    data = Workers(Labelled(), shuffle=True)
    report = sf.measure(CASE.model(), data, measures=SEARCHED)
    assert data.passes == 2
    exact = sf.measure(CASE.model(), (X, Y), measures=SEARCHED)
    for name in SEARCHED:
        assert report[name].value == pytest.approx(exact[name].value, rel=1e-9)
    data.passes = 0
    sf.audit(CASE.model(), data, measures=["hessian_trace"], elements=2)
    assert data.passes == 3  # one of them for an example


def test_what_is_too_much_for_memory_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saltflat.watch._MOST_KEPT", 5 * X[0].nbytes)
    data = Workers(Labelled())
    report = sf.measure(CASE.model(), data, measures=SEARCHED)
    assert data.passes > 2
    exact = sf.measure(CASE.model(), (X, Y), measures=SEARCHED)
    assert report["kappa"].value == pytest.approx(exact["kappa"].value, rel=1e-9)


def test_batches_that_are_taken_apart_are_whole_in_the_next_pass() -> None:
    def unpack(item: dict[str, Tensor]) -> Any:
        targets = item.pop("labels")
        return item["input"].mul_(2), targets

    data = Workers(Labelled())
    report = sf.measure(CASE.model(), data, measures=SEARCHED, unpack=unpack)
    assert data.passes == 2
    exact = sf.measure(CASE.model(), (2 * X, Y), measures=SEARCHED)
    assert report["kappa"].value == pytest.approx(exact["kappa"].value, rel=1e-9)


def test_every_call_reads_anew() -> None:
    model, dataset = CASE.model(), Labelled(X.clone())
    data = Workers(dataset)
    for _ in range(2):
        oracle = Dense(model, dataset.x, Y)
        agrees(sf.trace(model, data), oracle.blocks(oracle.hessian))
        dataset.x += 1
    assert data.passes == 4


def test_products_share_what_was_read() -> None:
    data = Workers(Labelled())
    operator = sf.hessian(CASE.model(), data)
    v = torch.ones(operator.shape[0]).double()
    want = Dense(CASE.model(), X, Y).hessian @ v
    for _ in range(3):
        torch.testing.assert_close(operator @ v, want)
    assert data.passes == 3  # one of them for a look at the model


def test_augmentation_by_unpacking_is_refused_though_batches_are_kept() -> None:
    data = Kept(Workers(Labelled()))
    sf.trace(CASE.model(), data)
    assert data.settled
    with pytest.raises(sf.ChangedData):
        sf.trace(CASE.model(), data, unpack=lambda i: (i["input"] + torch.rand(()), i["labels"]))


def test_only_what_can_be_counted_is_kept() -> None:
    unknown = Kept(DataLoader([object(), object()], collate_fn=list, num_workers=1))
    known = Kept(DataLoader([("a", 1, X[0].numpy())] * 2, collate_fn=list, num_workers=1))
    for data in (unknown, known):
        first = next(iter(data))
        data.settle()
        assert not data.settled  # it was not read to its end
        assert len(list(data)) == len(data) == 2
        data.settle()
        assert len(first) == 1
    assert not unknown.settled
    assert known.settled
    one, other = (next(iter(known))[0][2] for _ in range(2))
    one += 1
    assert not (one == other).any()
