"""Several passes over the data must see the same samples, in whatever order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cases import BY_NAME
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

import saltflat as sf
from saltflat.watch import Tally, Watch

CASE = BY_NAME["mlp"]
X, Y = CASE.data(n=12)
ONE_PASS = ["hessian_trace", "normalized_sharpness", "rho", "relative_flatness", "fisher_rao_norm"]
SEVERAL = ["hessian_max_eigenvalue", "kappa"]


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Noise from a generator of its own, or from the global one."""

    def __init__(self, own: bool) -> None:
        self.generator = torch.Generator().manual_seed(0) if own else None

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.randn(X[index].shape, generator=self.generator, dtype=X.dtype)
        return X[index] + 0.1 * noise, Y[index]


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
    case = BY_NAME["mlp GELU"]
    with pytest.raises(sf.DataError, match="differ between two passes"):
        sf.measure(case.model(), DataLoader(Augmented(own=True), 4), measures=["hessian_trace"])


def test_augmentation_is_refused_after_a_pass() -> None:
    """The first pass is the curvature's, the second another measure's."""
    with pytest.raises(sf.DataError, match="differ between two passes"):
        measured(DataLoader(Augmented(own=True), 4), [*ONE_PASS, "kappa"])


def test_one_pass_alone_is_fine() -> None:
    found = measured(DataLoader(Augmented(own=True), 4), ONE_PASS)
    assert list(found) == ONE_PASS
    assert found.provenance.samples == 12


def test_augmentation_from_the_global_generator_is_wound_back() -> None:
    found = measured(DataLoader(Augmented(own=False), 4), [*ONE_PASS, *SEVERAL])
    assert list(found) == [*ONE_PASS, *SEVERAL]


def test_a_list_is_the_way_out() -> None:
    data = list(DataLoader(Augmented(own=True), 4))
    assert set(measured(data, SEVERAL)) == set(SEVERAL)


def test_traces_alone_do_not_watch() -> None:
    """`sf.trace` takes one pass, and does not pay for checksums."""
    sf.trace(CASE.model(), DataLoader(Augmented(own=True), 4))


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
