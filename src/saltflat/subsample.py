"""Measuring on some of the samples: growing random parts of the data, until an interval is tight;
and the stretch of them that is one rank's (`shard`).

*The rule.* The samples are put in a random order once, and measured in the first 256 of it, or 512,
or 1024, …, up to half of them. These sizes are fixed beforehand, and the interval at each of them
misses the value on all samples with a probability of 5 % over their number: so the one at which
the measuring stops misses it with at most 5 %, whatever makes it stop there. It stops where the
interval reaches at most 2 `tolerance` of the value to either side. Sizes at which the interval will
hardly be tight enough are passed over. What is not tight enough on half of the samples is measured
on all of them, and has no such error.

*The interval.* Single samples are skewed: few carry most of the trace of a trained network, and
where they are missing from a part both its mean and its spread are small. Student's interval is
then too low. This is Hall's (1992), for parts that are drawn without replacement: the studentised
mean is transformed by the cubic function that takes its skewness away, which reaches farther to
the side of the long tail.
It does not hold where a few samples of the part make up its skewness: no part is enough that has
fewer than 25 times the square of that (Cochran, 1977).

No rule can know of samples that it has not seen: where one in ten thousand holds half of the trace,
a part will miss it without a trace. `bench/subsamples.py` counts how often intervals hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import hypot, sqrt
from typing import Any, Literal, TypeVar, final, get_args

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

from saltflat.checks import check_choice
from saltflat.distributed import LOCAL, Reduction
from saltflat.errors import DataError, InvalidType, InvalidValue
from saltflat.prints import in_words
from saltflat.risk import Unpack, has_rows, items_of, size_of, split_item, with_entries
from saltflat.session import RandomState
from saltflat.shards import is_shard
from saltflat.watch import Kept, fixed_order, has_sampler, in_memory, in_order, stretch

Samples = Literal["all", "auto"]
Result = TypeVar("Result")

LEVEL = 0.95  # of intervals
_FIRST = 256  # samples at the first look
_GROWTH = 2
_JUMP = 8  # a look is at no more than this many times the samples of the one before
_SKEWED = 25  # samples at least, times the square of their skewness
_AGREE = 1e-9  # samples that differ by less than this share of their mean say nothing of others


# Of what has no error over samples.
NO_PARTS = (
    "samples='auto' needs each sample's own part of {0}, to tell how far the value on all samples "
    "may be, and there is none: {0} is no smooth function of means over samples of equal weight, "
    "or some blocks are estimated and others exact, or draws are shared by samples. Pass "
    "samples='all'."
)


def check_samples(samples: Any) -> str:
    """The word, if it is one."""
    check_choice("samples", samples, get_args(Samples))
    return str(samples)


@final
@dataclass(frozen=True, slots=True)
class Part:
    """A number on some samples: its standard error, and the skewness of the single samples.

    `stderr` is that of samples that are independent draws, √(1 − n/N) of which is left for a part
    of n among N; but not of `drawn`, the part of it that comes from draws of what is not exact.
    """

    value: float
    stderr: float
    skewness: float
    drawn: float = 0.0


@final
class Rule:
    """When to stop, for a population of so many samples."""

    def __init__(self, population: int, tolerance: float) -> None:
        self.population, self.tolerance = population, tolerance
        self.sizes = [_FIRST]
        while self.sizes[-1] * _GROWTH <= population // 2:
            self.sizes.append(self.sizes[-1] * _GROWTH)
        if population // 2 < _FIRST:
            self.sizes = []

    def left(self, size: int) -> float:
        """The share of a standard error that is left where no sample is drawn twice."""
        return sqrt(1 - size / self.population)

    def error(self, stderr: float, drawn: float, size: int) -> float:
        """The standard error for the value on all samples, of which `drawn` is left whole."""
        return hypot(self.left(size) * sqrt(max(0.0, stderr**2 - drawn**2)), drawn)

    def used(self, size: int) -> str:
        """What was done, in words."""
        return (
            f"measured on {size:,} of {self.population:,} samples, drawn at random: each interval "
            f"holds its value on all of them with a probability of {100 * LEVEL:g} %"
        )

    def interval(self, part: Part, size: int) -> tuple[float, float]:
        """That of one look."""
        from scipy.stats import t

        q = float(t.ppf(1 - (1 - LEVEL) / (2 * len(self.sizes)), size - 1))
        skew, share = part.skewness / (self.left(size) * sqrt(size)), size / self.population
        error = self.error(part.stderr, part.drawn, size)
        low, high = (error * _untwisted(x, skew, share) for x in (q, -q))
        return part.value - low, part.value - high

    def certainty(self, part: Part, size: int) -> dict[str, Any]:
        """What a result on so many samples says of its value on all of them, as its fields."""
        return {
            "stderr": self.error(part.stderr, part.drawn, size),
            "degrees": size - 1,
            "interval": self.interval(part, size),
        }

    def excess(self, part: Part, size: int) -> float:
        """How many times as wide as it may be the interval is; more if the part is too small for
        its skewness."""
        if part.stderr <= _AGREE * abs(part.value) or part.value == 0:
            return float("inf")
        low, high = self.interval(part, size)
        wide = max(high - part.value, part.value - low) / (2 * self.tolerance * abs(part.value))
        return max(wide, abs(part.skewness) * sqrt(_SKEWED / size))

    def following(self, size: int, excess: float) -> int | None:
        """The next size at which the interval may be tight enough; None for all samples."""
        for each in self.sizes:
            if each <= size:
                continue
            wide = excess * self.left(each) / self.left(size) * sqrt(size / each)
            if wide <= 1 or each >= _JUMP * size:
                return each
        return None


def _untwisted(x: float, skew: float, share: float) -> float:
    """The inverse of y ↦ y + a y² + a² y³/3 + b, which takes its skewness from a studentised mean.

    To first order P(T ≤ y) = Φ(y) + (a y² + b) φ(y) with a = (2 − f) s/6 and b = (1 − 2f) s/6,
    where a share f of the samples is drawn without replacement and s = γ/√(n (1 − f)), γ the
    skewness of single samples. For f = 0 it is Hall's.
    """
    a, b = (2 - share) * skew / 6, (1 - 2 * share) * skew / 6
    return x if abs(a) < 1e-6 else (float(np.cbrt(1 + 3 * a * (x - b))) - 1) / a


def grown(
    population: Population,
    rule: Rule,
    look: Callable[[Any], tuple[Result, Sequence[Part]]],
) -> tuple[Result, int] | None:
    """The first look at which all parts are tight enough, and its size; None if only all samples
    are enough. `look` measures the data that it is given."""
    size = next(iter(rule.sizes), None)
    while size is not None:
        result, parts = look(population.first(size))
        excess = max(rule.excess(part, size) for part in parts)
        if excess <= 1:
            return result, size
        size = rule.following(size, excess)
    return None


@final
class Population:
    """All samples of the data, in a random order that the seed fixes; nothing else is drawn.

    Of several ranks, each with data of its own, the order is one of all samples of all ranks, and
    `first` gives those that are here.
    """

    def __init__(
        self, data: Any, unpack: Unpack | None, seed: int, ranks: Reduction = LOCAL
    ) -> None:
        self.data = data

        def opened() -> int:
            self._source = _source(items_of(data), unpack or split_item)
            return self._source.size

        sizes = ranks.each(opened)
        self.size, start = sum(sizes), sum(sizes[: ranks.rank])
        if not self.size:
            raise DataError("The data are empty: there is no batch to measure.")
        self._own = range(start, start + sizes[ranks.rank])
        self._order = torch.randperm(
            self.size, generator=torch.Generator().manual_seed(seed % 2**63)
        )

    def first(self, size: int) -> Any:
        """Data that hold the first samples in the random order, those of this rank."""
        chosen = self._order[:size].sort().values
        own = chosen[(chosen >= self._own.start) & (chosen < self._own.stop)]
        return self._source.part(own - self._own.start)


def _source(items: Any, unpack: Unpack) -> _Held | _Indexed:
    """What gives single samples of the data."""
    items = items.loader if isinstance(items, Kept) else items
    if in_memory(items):
        return _Held(list(items), unpack)
    if has_sampler(items) and items.batch_sampler is not None:
        return _Indexed(items)
    raise InvalidType(
        "samples='auto' draws single samples, which takes tensors, a list of batches, a "
        "map-style Dataset, or a DataLoader over one that makes the batches itself. Got "
        f"{type(items).__name__}, which can only be read from its beginning; pass one of "
        "these, or samples='all'."
    )


@final
class _Held:
    """Batches in a list."""

    def __init__(self, items: Sequence[Any], unpack: Unpack) -> None:
        self.items = items
        sizes = [_size(unpack(item), f"batch {k}") for k, item in enumerate(items)]
        self.sizes, self.size = sizes, sum(sizes)

    def part(self, chosen: Tensor) -> list[Any]:
        parts, start = [], 0
        for item, size in zip(self.items, self.sizes, strict=True):
            rows = chosen[(chosen >= start) & (chosen < start + size)] - start
            if len(rows):
                parts.append(_cut(item, rows, size))
            start += size
        return parts

    def stretch(self, start: int, stop: int) -> list[Any]:
        return self.part(torch.arange(start, stop))

    def print(self) -> str:
        """By which ranks see whether they have the same data."""
        return f"{self.size} samples, {in_words(self.items)}"


def _size(pair: tuple[Any, Any], where: str) -> int:
    """How many samples inputs and targets hold."""

    def outline(leaf: Any) -> Any:
        return torch.empty(leaf.shape, device="meta") if isinstance(leaf, np.ndarray) else leaf

    plain = (dict(part) if isinstance(part, Mapping) else part for part in pair)
    inputs, targets = (tree_map(outline, part) for part in plain)
    return size_of(inputs, targets, where)


def _cut(item: Any, rows: Tensor, size: int) -> Any:
    """Some samples of a batch; what they share stays whole."""

    def cut(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):
            return leaf[rows.numpy()] if leaf.ndim and len(leaf) == size else leaf
        if not has_rows(leaf, size):
            return leaf
        return leaf[rows.to(leaf.device)] if isinstance(leaf, Tensor) else leaf[rows.tolist()]

    plain = dict(item) if isinstance(item, Mapping) else item
    return tree_map(cut, with_entries(plain, size))


@final
class _Indexed:
    """A DataLoader over a dataset that is read by index."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader
        state = RandomState(loader, torch.device("cpu"))
        try:
            order = fixed_order(loader, state)
        finally:
            state.restore()
        # An index may be of any kind: a pair, for a dataset that is asked for pairs.
        indices = [index for batch in order for index in batch]
        # A loader that shuffles has another order in every random state.
        numbers = all(isinstance(index, int) for index in indices)
        self.indices: list[Any] = sorted(indices) if numbers else indices
        self.batch = loader.batch_size or max((len(each) for each in order), default=1)
        self.size = len(self.indices)

    def part(self, chosen: Tensor) -> DataLoader[Any]:
        indices = [self.indices[k] for k in chosen.tolist()]
        starts: Iterable[int] = range(0, len(indices), self.batch)
        return in_order(self.loader, [indices[k : k + self.batch] for k in starts])


@final
class _Ordered:
    """The batches of a DataLoader over a dataset that is read by index, in one order on all ranks,
    however each of them shuffles."""

    def __init__(self, loader: DataLoader[Any], reduction: Reduction, most: int | None) -> None:
        self.loader, self._cut = loader, loader.batch_sampler is not None
        if most is not None and not self._cut:
            raise InvalidType(
                f"A number of samples, {most}, was asked for of a DataLoader with batch_size=None, "
                "whose items may be of any length. Give one that makes batches, or take all."
            )
        self._state = RandomState(loader, torch.device("cpu"))
        try:
            order = fixed_order(loader, self._state, most)
        finally:
            self._state.restore()
        self._own = sum(self._sizes(order))
        self.batches = reduction.each(lambda: order if reduction.rank == 0 else [])[0]
        self.sizes = self._sizes(self.batches)

    def _sizes(self, batches: list[Any]) -> list[int]:
        """In samples; or one of each item that the dataset makes as a whole, and that stays so."""
        return [len(batch) if self._cut else 1 for batch in batches]

    def _part(self, start: int, stop: int) -> list[Any]:
        return stretch(self.batches, start, stop) if self._cut else self.batches[start:stop]

    def stretch(self, start: int, stop: int) -> DataLoader[Any]:
        return in_order(self.loader, self._part(start, stop))

    def print(self) -> str:
        """By which ranks see whether they have the same data: some of the samples."""
        size = sum(self.sizes)
        places = sorted({0, size // 2, size - 1}) if size == self._own > 0 else []
        try:
            few = list(in_order(self.loader, [b for k in places for b in self._part(k, k + 1)]))
        finally:
            self._state.restore()
        return f"{self._own} samples, {in_words(few)}"


def shard(
    data: Any, reduction: Reduction, unpack: Unpack | None = None, most: int | None = None
) -> Any:
    """This rank's part of data that all ranks have: a stretch of their first `most` samples.

    Put one after the other, the ranks' parts are the data in the order of one pass. Batches stay
    whole where there are as many as ranks. A loader whose sampler leaves samples to other ranks
    stays as it is.
    """
    items = items_of(data)
    if is_shard(items):
        if most is not None:
            raise InvalidValue(
                f"The first {most} samples cannot be had of a loader with a sampler that gives "
                "each rank its part. Leave that sampler out, or take all samples."
            )
        return data
    source: _Held | _Ordered
    if in_memory(items):
        source = _Held(list(items), unpack or split_item)
    elif has_sampler(items):
        source = _Ordered(items, reduction, most)  # type: ignore[arg-type]
    else:
        raise InvalidType(
            "What can be divided among ranks are tensors, a list of batches, a map-style Dataset, "
            f"and a DataLoader over one. Got {type(items).__name__}, which can only be read from "
            f"its beginning. {_OWN}"
        )
    first, *others = reduction.each(source.print)
    for rank, other in enumerate(others, 1):
        if first != other:
            raise DataError(
                f"All ranks must have the same data, which are then divided among them. Rank 0 has "
                f"{_outlined(first)} and rank {rank} {_outlined(other)}. Files must be listed in "
                f"the same order everywhere, as by sorted(). {_OWN}"
            )
    cuts = _cuts(source.sizes, most, reduction.ranks)
    return source.stretch(cuts[reduction.rank], cuts[reduction.rank + 1])


_OWN = (
    "A function with the parameters rank and world, named to the command line, divides the data "
    "itself: it is given both, and returns the samples of that rank."
)


def _outlined(words: str) -> str:
    return words if len(words) < 120 else f"{words[:120]}…"


def _cuts(sizes: Sequence[int], most: int | None, ranks: int) -> list[int]:
    """Where stretches of batches of these sizes begin and end, in samples."""
    total = sum(sizes) if most is None else min(most, sum(sizes))
    ends = [end for end in accumulate(sizes, initial=0) if end < total] + [total]
    if len(ends) > ranks:
        return [ends[(len(ends) - 1) * k // ranks] for k in range(ranks + 1)]
    return [total * k // ranks for k in range(ranks + 1)]
