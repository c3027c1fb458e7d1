"""A watch on the data: whether every pass sees the same samples, in whatever order."""

from __future__ import annotations

import copy
import random
import sys
import warnings
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler

from saltflat.errors import ChangedData
from saltflat.session import RandomState

_WORD = 0x9E3779B97F4A7C15 - (1 << 64)  # as a signed integer
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@final
@dataclass(slots=True)
class Tally:
    """What one pass has seen so far."""

    checksum: int = 0
    values: int = 0  # the checksum of the same values in float32 and int64; of a first pass
    types: frozenset[str] = frozenset()
    samples: int = 0
    batches: int = 0
    largest: int = 0  # samples of the largest batch

    def joined(self, other: Tally) -> Tally:
        """What two ranks have seen together."""
        return Tally(
            (self.checksum + other.checksum) % 2**64,
            (self.values + other.values) % 2**64,
            self.types | other.types,
            self.samples + other.samples,
            self.batches + other.batches,
            max(self.largest, other.largest),
        )


@final
class Watch:
    """Checksums of passes over the data; off until `on` is set.

    A pass's checksum is the sum over samples of a hash of each sample's bytes, so that the order
    does not matter; integers wrap around, so that rounding does not either.
    """

    def __init__(self, *, on: bool = False) -> None:
        self.on = on
        self.first: Tally | None = None  # the first full pass
        self._words: dict[tuple[int, torch.device], Tensor] = {}

    def see(self, tally: Tally, content: Any, size: int) -> None:
        if not self.on:
            return
        leaves = tree_leaves(content)
        found = self._sum(leaves, size)
        tally.checksum = (tally.checksum + found) % 2**64
        if self.first is None:
            plain = [_plain(leaf) for leaf in leaves]
            changed = any(a is not b for a, b in zip(leaves, plain, strict=True))
            found = self._sum(plain, size) if changed else found
            tally.values = (tally.values + found) % 2**64
            kinds = {str(x.dtype).removeprefix("torch.") for x in leaves if isinstance(x, Tensor)}
            tally.types |= kinds
        tally.samples += size
        tally.batches += 1
        tally.largest = max(tally.largest, size)

    def _sum(self, leaves: list[Any], size: int) -> int:
        """The sum of the samples' hashes."""
        hashes = torch.zeros(size, dtype=torch.int64)
        for leaf in leaves:
            if isinstance(leaf, list):  # an entry a sample
                words = [zlib.crc32(repr(entry).encode()) for entry in leaf]
                hashes = hashes * 31 + torch.tensor(words)
            if not isinstance(leaf, Tensor):
                continue
            # What all samples share (a mask) is part of each of them.
            own = leaf.ndim > 0 and len(leaf) == size
            hashes = hashes * 31 + self._hash(leaf if own else leaf.reshape(1, -1)).cpu()
        mixed = (hashes ^ (hashes >> 29)) * _WORD
        return int(mixed.sum())

    def end(self, tally: Tally) -> bool:
        """A pass is over: whether it was the first; an error if it differs from the first."""
        if not self.on:
            return False
        if self.first is None:
            self.first = tally
            return True
        if tally.checksum != self.first.checksum:
            raise ChangedData(
                f"The data differ between two passes ({self.first.samples} samples, then "
                f"{tally.samples}): random augmentation, perhaps. What is measured must be the "
                "same samples on every pass, whatever the state of the random generators; switch "
                "the augmentation off, or pass list(loader)."
            )
        return False

    def _hash(self, leaf: Tensor) -> Tensor:
        """One integer a sample, from the bytes of its entries, eight at a time."""
        flat = leaf.detach().reshape(len(leaf), -1).contiguous()
        if flat.is_complex():
            flat = torch.view_as_real(flat).flatten(1)
        size = flat.element_size()
        if not flat.shape[1]:
            return torch.zeros(len(flat), dtype=torch.int64, device=flat.device)
        if missing := -flat.shape[1] * size % 8:
            flat = torch.nn.functional.pad(flat.view(_INTEGERS[size]), (0, missing // size))
        elif flat.storage_offset() * size % 8:
            flat = flat.clone()
        bits = flat.view(torch.int64)
        # A product keeps but one bit of what is at the top, where float64 has its signs.
        bits = bits ^ (bits >> 32)
        words = self._weights(bits.shape[1], bits.device)
        # There is no product of integer matrices on a GPU; on a CPU it is the fastest way.
        return bits @ words if bits.is_cpu else (bits * words).sum(1)

    def _weights(self, size: int, device: torch.device) -> Tensor:
        key = size, device
        if key not in self._words:
            generator = torch.Generator().manual_seed(0)
            words = torch.randint(-(2**62), 2**62, (size,), generator=generator) * 2 + 1
            self._words[key] = words.to(device)
        return self._words[key]


def _plain(leaf: Any) -> Any:
    """Numbers as float32 and int64, of whatever type they are."""
    if not isinstance(leaf, Tensor) or leaf.is_complex():
        return leaf
    return leaf.to(torch.float32 if leaf.is_floating_point() else torch.int64)


@final
class Kept:
    """A loader with worker processes, whose batches stay in memory once they are known.

    Each pass over such a loader may start its workers anew, which takes longer than most
    measurements. The two readings of a watch are made; if both gave the same samples, and these
    take no more than `_MOST_KEPT` bytes, `settle` makes all further passes give copies of what was
    read. One is made for a call, so that the next call reads again.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader
        self.settled = False
        self._items: list[Any] | None = None  # those of the last pass, if it was read to its end
        # What the random numbers of a pass are drawn from.
        self.generator, self.sampler = loader.generator, loader.sampler
        self.batch_sampler = loader.batch_sampler

    def __iter__(self) -> Iterator[Any]:
        return self._copies() if self.settled else self._reading()

    def __len__(self) -> int:
        return len(self.loader)

    def settle(self) -> None:
        """The samples of the last pass are those of every pass."""
        self.settled = self._items is not None

    def _copies(self) -> Iterator[Any]:
        assert self._items is not None
        return map(copy.deepcopy, self._items)

    def _reading(self) -> Iterator[Any]:
        self._items = None
        items: list[Any] = []
        room: float = _MOST_KEPT
        for item in self.loader:
            room -= _bytes(item)
            if room >= 0:
                items.append(copy.deepcopy(item))
            else:
                items.clear()
            yield item
        self._items = items if room >= 0 else None


_MOST_KEPT = 1 << 28


def _bytes(item: Any) -> float:
    """What a batch takes in memory; infinity for what is not made of tensors, arrays and words."""
    if isinstance(item, Tensor):
        return item.numel() * item.element_size()
    if isinstance(item, np.ndarray):
        return item.nbytes
    if isinstance(item, Mapping):
        return sum(map(_bytes, item.values()))
    if isinstance(item, list | tuple):
        return sum(map(_bytes, item))
    return sys.getsizeof(item) if isinstance(item, str | bytes | int | float | None) else inf


def kept(data: Any) -> Any:
    """The data, as `Kept` where worker processes read them."""
    return Kept(data) if isinstance(data, DataLoader) and data.num_workers > 0 else data


def in_memory(data: Iterable[Any]) -> bool:
    """Whether passes cannot differ: the batches are held in a list or a tuple, or `Kept`."""
    plain = getattr(type(data), "__iter__", None) in (list.__iter__, tuple.__iter__)
    return plain or (isinstance(data, Kept) and data.settled)


def second_reading(data: Iterable[Any], state: RandomState) -> Iterable[Any]:
    """The data once more, drawn from another random state than `state`.

    A sampler's order is kept, so that batches that are padded to their longest sample come out the
    same: only what is drawn for the samples themselves (augmentation) differs. That the sampler
    draws the same samples from either state, in whatever order, is checked here, without reading
    them.
    """
    if isinstance(data, Kept) and not data.settled:
        data = data.loader
    if not has_sampler(data):
        disturb(state)
        return data
    assert isinstance(data, DataLoader)
    order = fixed_order(data, state)
    disturb(state)
    return in_order(data, order)


def fixed_order(loader: DataLoader[Any], state: RandomState, most: int | None = None) -> list[Any]:
    """The indices that a pass over the loader reads from `state`, in batches, without reading the
    samples; they must be the same ones, in whatever order, from every other state.

    With `most` they are the first so many, of a loader that makes batches.
    """
    state.restore()
    order = _order(loader, most)
    samples = _multiset(order)
    # Two draws of few samples may agree by chance; several hardly do, and cost next to nothing.
    for k in range(1 + min(7, _DRAWN // (1 + samples.total()))):
        disturb(state, k)
        if _multiset(_order(loader, most)) != samples:
            raise ChangedData(
                f"The data differ between two passes: {_sampling(loader)}. What is measured must "
                "be the same samples on every pass; give a loader without it, or pass list(loader)."
            )
    return order


_DRAWN = 10_000  # indices


def disturb(state: RandomState, which: int = 0) -> None:
    """Put every generator that `state` knows into another state; its `restore` undoes that."""
    seed = (torch.initial_seed() ^ (0x5A17F1A7 + which)) % 2**63
    torch.default_generator.manual_seed(seed)
    if state.cuda is not None:
        with torch.cuda.device(state.device):
            torch.cuda.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    for generator, _ in state.own:
        generator.manual_seed(seed)


def has_sampler(data: Iterable[Any]) -> bool:
    """Whether it is torch's DataLoader over a dataset that is indexed, read in the usual way."""
    return (
        isinstance(data, DataLoader)
        and type(data).__iter__ is DataLoader.__iter__
        and not isinstance(data.dataset, IterableDataset)
    )


@final
class _Indices:
    """A dataset whose samples are their own indices."""

    def __getitem__(self, index: Any) -> Any:
        return index


@final
class _InOrder(Sampler[Any]):
    """A fixed order of what a sampler draws, which it holds: whoever asks which rank's samples
    these are must find it."""

    def __init__(self, order: list[Any], drawn: Iterable[Any]) -> None:
        self.order, self.sampler = order, drawn

    def __iter__(self) -> Iterator[Any]:
        return iter(self.order)

    def __len__(self) -> int:
        return len(self.order)


def _sampler(loader: DataLoader[Any], order: list[Any] | None = None) -> dict[str, Any]:
    """What makes a DataLoader draw as this one does, or in a given order."""
    batches = loader.batch_sampler
    drawn = loader.sampler if batches is None else batches
    given = drawn if order is None else _InOrder(order, drawn)
    return {"sampler": given, "batch_size": None} if batches is None else {"batch_sampler": given}


def _order(loader: DataLoader[Any], most: int | None = None) -> list[Any]:
    """The indices that a pass over the loader reads, with its own random numbers."""
    indices: Any = _Indices()
    drawn = _sampler(loader)
    order = list(DataLoader(indices, **drawn, collate_fn=_itself, generator=loader.generator))
    return order if most is None else stretch(order, 0, most)


def stretch(batches: list[Any], start: int, stop: int) -> list[Any]:
    """What batches of indices have from `start` to `stop`, in batches."""
    ends = accumulate(map(len, batches))
    begun = [(batch, end - len(batch)) for batch, end in zip(batches, ends, strict=True)]
    parts = (batch[max(0, start - k) : max(0, stop - k)] for batch, k in begun)
    return [part for part in parts if len(part)]


def _itself(batch: Any) -> Any:
    return batch


def in_order(loader: DataLoader[Any], order: list[Any]) -> DataLoader[Any]:
    """The loader with its samples in a fixed order."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of too many workers: the loader's maker was told
        return DataLoader(
            loader.dataset,
            **_sampler(loader, order),
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            prefetch_factor=loader.prefetch_factor,
        )


def _multiset(order: list[Any]) -> Counter[Any]:
    return Counter(i.item() if isinstance(i, Tensor) else i for i in tree_leaves(order))


def _sampling(loader: DataLoader[Any]) -> str:
    """What draws other samples each time, in words."""
    sampler = loader.sampler
    if isinstance(sampler, RandomSampler) and loader.drop_last and not sampler.replacement:
        return "shuffle=True with drop_last=True leaves out other samples on every pass"
    own = type(loader.batch_sampler) is torch.utils.data.BatchSampler
    who = sampler if own or loader.batch_sampler is None else loader.batch_sampler
    return f"{type(who).__name__} draws other samples on every pass"
