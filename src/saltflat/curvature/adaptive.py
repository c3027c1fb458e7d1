"""Adaptive rank: of every sample as many mixes of its directions are sent backwards as it takes.

What all directions u of a sample give to a trace, Σ ‖Jᵀu‖², is had on average from a single mix of
them with random signs, ‖Jᵀ Σ ±u‖². The products of directions are its noise, and trained networks
are confident: next to no sample has more than one direction that is not tiny. Further looks at a
sample take the same signs times a row of a Walsh matrix, and two directions have no product left in
the mean of L = 2, 4, … looks unless they are in the same of L classes; which are such that products
of large ones go first. As many looks as there are directions, or more, have no noise. So

1. a survey sends all samples forwards, proves the blocks on them as a sweep does, and sends one mix
   of all directions of each backwards;
2. samples have the more looks the larger the products of their directions' sizes |u|² are that are
   left: the least work for a sum of squares of these. That alone decides, never what a look gave:
   who looks again where a look gave much, and not where it gave little, has less than there is. But
   a sample whose ‖Jᵀu‖²/|u|² is r > 10 times the mean, having inputs of another scale, has all
   looks if it holds more than 10/r of the tolerance of a block: others do not vouch for it;
3. some samples, drawn with chances in proportion to what is left, have twice as many looks. By how
   much their means change is what products are left of the others, who were not drawn.

A mix is longer or shorter than its directions are together, by chance: what arrives is corrected by
that, times the mean of ‖Jᵀu‖²/|u|². (That mean is of all looks of the survey, and makes a bias of
about the square of its error.) The variance is

    Σ ((1 − π)/π + b/a) a/(a − b) Δ²

over those drawn, of chances π, whose means changed by Δ, with a and b the products of sizes that
were left and are left, and has 2 (Σ v)²/Σ v² degrees of freedom, v the terms of that sum. Where
samples matter that were not drawn it may be too small, and it is not less than what it would be if
in all samples products were to their sizes, and squares of what a look gave, as in those drawn; of
samples with more than three times the mean ratio, the root of the sum of squares is added, by which
that is off if it varies by about one from sample to sample. Nor is an error stated that is less
than a two-hundredth of the tolerance. Where an error is larger than the tolerance, there are more
looks, by what was seen of the products; no look is made again. Where it leaves too little to save,
all directions are sent: an ordinary sweep.

Entries, of which products do not cancel as in their sum, are made of as many looks as if no product
did, in a pass of their own. Their error is what the drawn samples' changes come to in groups.

Signs and draws belong to samples. Samples are gathered by how many of their looks travel, so that
the passes are dense; one with many is there several times.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations
from math import inf, sqrt
from typing import Any, final

import torch
from torch import Tensor

from saltflat.curvature.contractions import Term, Weight
from saltflat.curvature.estimators import Quantity, mean_error, uniforms
from saltflat.curvature.loss_hessian import Factor, direction_count, ranked
from saltflat.curvature.plan import Plan, Refutation, Settings
from saltflat.curvature.sweep import (
    CURVATURE,
    FORMS,
    Chunk,
    Kind,
    Pass,
    Requests,
    backward,
    beside_largest,
    direction_price,
    insist_on_order,
    joinable,
    live_uses,
    reduce,
)
from saltflat.losses import Loss, divisor
from saltflat.risk import Batch, Risk, join
from saltflat.work import FORWARD

# Kinds with more than one number a block. What they add up to is a number for every look, and has
# an error. Single entries have none that holds: one that few samples feed is 0 ± 0 if none of them
# is drawn.
WHOLE: frozenset[Kind] = frozenset({"diagonal", "columns", "rows"})
_ADDED: dict[Kind, Kind] = {"diagonal": "trace"}
Key = tuple[Kind, str]  # of a block, or of all of them, by the name ""

LEAST_DIRECTIONS = 3  # of a sample
_FEWEST = 256  # samples, of which fewer do not vouch for each other
_DRAWN = 128  # samples that tell errors, about
_GUESS = 2.25  # what products of directions have of those of their sizes, times their number
_PARTS = 5  # of the sum of all blocks, within whose tolerance an error of any block is small
_AIM = 0.95  # of the tolerance: to miss it costs the looks that were wanting
_FAR, _STRANGE = 10.0, 3.0  # times the mean of ‖Jᵀu‖²/|u|²
_HALVINGS = 24  # of a range of prices
_FINEST = 0.005  # of the tolerance: no error is stated that is less
_ROUNDS = 6
_WORTH = 0.7  # of the price of a sweep
GROUPS = 16  # of the drawn samples, where nobody asks for another number
_ROWS = 1024  # of a batch of gathered samples
_WIDEST = 16  # looks that a sample of a batch is sent with
_BATCH = 25.0  # gradients of a sample that a batch less is worth
_SIGNS, _DRAWS = 1, 2  # among the keys of random numbers

_TRACE: frozenset[Kind] = frozenset({"trace"})
_APART = "mixes of directions are for the classes of one place and cross-entropy"


def signs_of(samples: range, directions: int, seed: int) -> Tensor:
    """Random signs that belong to samples, for their directions."""
    return 1 - 2 * (uniforms(samples, directions, seed, _SIGNS) < 0.5).to(torch.int8)


def classes(directions: int) -> Tensor:
    """In which of L = 1, 2, 4, … classes directions are is their number here modulo L.

    It is the Gray code of their rank: the first L are in L classes, and the next L in these from
    the last to the first, so that the largest is with the smallest.
    """
    rank = torch.arange(directions)
    return rank ^ (rank >> 1)


def finest(directions: int) -> int:
    """The exponent of the least power of two that is no less."""
    return (directions - 1).bit_length()


def walsh(directions: int) -> Tensor:
    """Signs of all looks for directions: in the mean of the first L looks, products of two that are
    in the same of L classes are left, and no others."""
    both = torch.arange(1 << finest(directions))[:, None] & classes(directions)
    odd = torch.zeros_like(both)
    while bool(both.any()):
        odd, both = odd ^ (both & 1), both >> 1
    return (1 - 2 * odd).to(torch.int8)


def residues(sizes: Tensor) -> Tensor:
    """The products of two directions' sizes that are left in the mean of 1, 2, 4, … looks, times 4,
    (n, exponents): that of a look's noise where the two arrive as the same."""
    count, found = sizes.shape[1], []
    for exponent in range(finest(count)):
        sums = sizes.new_zeros(len(sizes), 1 << exponent)
        sums.index_add_(1, (classes(count) % (1 << exponent)).to(sizes.device), sizes)
        found.append(2 * (sums.square().sum(1) - sizes.square().sum(1)).clamp_(min=0))
    return torch.stack([*found, torch.zeros_like(found[0])], 1)


@final
@dataclass(frozen=True, slots=True)
class Looks:
    """Those that are sent backwards, by samples."""

    samples: Tensor
    numbers: Tensor  # rows of the Walsh matrix
    weights: Tensor
    lots: Tensor  # whose sums are kept apart, of so many
    count: int = 1

    def among(self, samples: range) -> Looks:
        """Those at some samples, which are counted from the first of them."""
        here = (self.samples >= samples.start) & (self.samples < samples.stop)
        parts = self.samples - samples.start, self.numbers, self.weights, self.lots
        return Looks.of([tuple(part[here] for part in parts)], self.count)

    @classmethod
    def of(cls, parts: Iterable[tuple[Tensor, ...]], count: int) -> Looks:
        samples, numbers, weights, lots = map(torch.cat, zip(*parts, strict=True))
        return cls(samples, numbers, weights, lots, count)


def looks(first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """The samples and numbers of looks from `first` to before `last` of every sample."""
    counts = (last - first).clamp(min=0)
    samples = torch.repeat_interleave(torch.arange(len(counts)), counts)
    starts = (counts.cumsum(0) - counts - first)[samples]
    return samples, torch.arange(len(samples)) - starts


@dataclass
class LookPass(Pass):
    """Mixes of samples' directions, sent backwards: `parts` has a number for every look, `whole`
    sums of more than a number by lots."""

    apart: bool = field(kw_only=True)  # whether `whole` is wanted
    parts: dict[Key, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)
    lengths: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # |u|² of the mixes
    whole: dict[Key, dict[int, Tensor]] = field(default_factory=dict)
    _whole: dict[Key, Tensor] = field(default_factory=dict)  # of the chunk at hand
    _length: Tensor = field(init=False)  # the same
    _table: Tensor = field(init=False)  # (directions, samples) of looks, or −1
    _lot: int = 0

    def send(self, chunk: Chunk, columns: Tensor) -> None:
        """The looks of the table, and what comes of them into `pending` and `whole`."""
        self._whole = {}
        self._length = columns.detach().cpu().double().square().flatten(2).sum(2)
        names, size = frozenset(self.requests), chunk.batch.size
        live = live_uses(chunk.uses, chunk.plan, names)
        price = direction_price(frozenset[Kind]().union(*self.requests.values()))
        self.risk.work.add(size, FORWARD + len(columns) * price)
        group = self.together(chunk)
        for start in range(0, len(columns), group):
            part = columns[start : start + group]
            arrived = backward(chunk.outputs, live, chunk.plan, part)
            with torch.no_grad():
                for name, term in self.terms(chunk, live, arrived, names):
                    self._add(name, term, start, len(part), slice(size))
            written = self.written_out(chunk.plan, CURVATURE)
            for rows, name, term in self.generic_terms(chunk, part, written):
                self._add(name, term, start, len(part), rows)

    def _add(self, name: str, term: Term, start: int, count: int, rows: slice) -> None:
        wanted, weight = self.requests[name], self.weights.get(name)
        self._place("trace", name, start, rows, term.squares(count))
        if "diagonal" in wanted and self.apart:
            self._more("diagonal", name, term.diagonal(None))
        forms = wanted & FORMS.keys()
        for d in range(count if forms else 0):
            apart: dict[Kind, Tensor] = {}
            for kind, value in reduce(term.direction(d), forms, weight, None, apart):
                if kind in WHOLE and self.apart:
                    self._more(kind, name, value)
                self._place(kind, name, start + d, rows, apart[kind].unsqueeze(0))

    def _place(self, kind: Kind, name: str, start: int, rows: slice, values: Tensor) -> None:
        """Numbers of some looks at some of the chunk's samples."""
        if (kind, name) not in self.pending:
            self.pending[kind, name] = values.new_zeros(self._table.shape)
        self.pending[kind, name][start : start + len(values), rows] = values

    def _more(self, kind: Kind, name: str, value: Tensor) -> None:
        known = self._whole.get((kind, name))
        self._whole[kind, name] = value.double() if known is None else known.add_(value)

    def _count(self, size: int, normaliser: float, counted: int, even: bool) -> None:
        super()._count(size, normaliser, counted, even)
        if self.pending:
            real = self._table >= 0
            self.lengths.append((self._table[real], self._length[real]))

    def commit(self, key: Key, value: Tensor) -> None:
        real = self._table >= 0
        self.parts.setdefault(key, []).append((self._table[real], value[real.to(value.device)]))
        if (whole := self._whole.pop(key, None)) is not None:
            self._put(key, whole)
        # The diagonal comes with the trace.
        other: Key = "diagonal", key[1]
        if key[0] == "trace" and other in self._whole:
            self._put(other, self._whole.pop(other))

    def _put(self, key: Key, value: Tensor) -> None:
        lots = self.whole.setdefault(key, {})
        lots[self._lot] = lots[self._lot].add_(value) if self._lot in lots else value

    def told(self, count: int) -> tuple[Tensor, dict[Key, Tensor]]:
        """The lengths of so many looks here, and what came of them, not divided by the loss's
        normaliser, on all ranks in the order of samples."""
        keys = self._keys()
        parts = [self.lengths, *(self.parts.get(key, []) for key in keys)]
        own = [_filled(part, count) for part in parts]
        ranks = self.reduction.each(lambda: own)
        lengths, *values = (torch.cat(each) for each in zip(*ranks, strict=True))
        return lengths, dict(_with_sums(dict(zip(keys, values, strict=True))))

    def _keys(self) -> list[Key]:
        """What has a number for every look."""
        wanted = {(kind, n) for n, kinds in self.requests.items() for kind in kinds - {"magnitude"}}
        return sorted({(_ADDED.get(kind, kind), name) for kind, name in wanted})

    def totals(self) -> dict[tuple[Kind, str, int], Tensor]:
        """The sums of `whole`, by lots, of all ranks."""
        lots = {(*key, lot): x for key, whole in self.whole.items() for lot, x in whole.items()}
        return self.reduction.totals(lots, self.risk.device)


def _filled(parts: Iterable[tuple[Tensor, Tensor]], count: int) -> Tensor:
    numbers = torch.zeros(count, dtype=torch.float64)
    for places, values in parts:
        numbers[places] = values.cpu().double()
    return numbers


def _with_sums(parts: Mapping[Key, Tensor]) -> Iterator[tuple[Key, Tensor]]:
    """The numbers of every block, and under the name "" those of all of them."""
    yield from parts.items()
    for kind in sorted({kind for kind, _ in parts}):
        yield (kind, ""), torch.stack([y for (k, _), y in parts.items() if k == kind]).sum(0)


@final
@dataclass
class Survey(LookPass):
    """The first look at all samples, and what the others are made of."""

    must_be_linear: bool = field(kw_only=True)
    seed: int = field(kw_only=True)
    factors: list[Factor] = field(default_factory=list)
    signs: list[Tensor] = field(default_factory=list)
    sizes: list[Tensor] = field(default_factory=list)  # of all directions together, and residues
    outputs: list[Tensor] = field(default_factory=list)
    unsuited: str = ""
    _latest: tuple[Factor, Tensor, Tensor, Tensor] | None = None

    def copes(self, plan: Plan) -> bool:
        return not self.must_be_linear or all(map(plan.allows, self.requests))

    def run(self, batches: Iterable[Batch], first: Plan | None = None) -> Refutation | None:
        self._offset = self.risk.offset  # signs go by the place in all data
        return super().run(batches, first)

    def measure(self, chunk: Chunk) -> Refutation | None:
        count = direction_count(self.loss, chunk.outputs, chunk.batch.targets)
        if count > self.settings.max_directions:
            return Refutation(directions=count)
        sides = ranked(self.loss, chunk.outputs, chunk.batch)
        if sides is None:
            self.unsuited = _APART
            return None
        here = range(chunk.place, chunk.place + chunk.batch.size)
        signs = signs_of(here, sides.count, self.seed)
        self._latest = sides, signs, sides.sizes(), chunk.outputs.detach()
        self._table = torch.arange(self.samples, self.samples + chunk.batch.size)[None]
        self.send(chunk, sides.mixed(signs.to(chunk.outputs.device)[None]))
        return None

    def _count(self, size: int, normaliser: float, counted: int, even: bool) -> None:
        super()._count(size, normaliser, counted, even)
        if self._latest is None:
            self.unsuited = self.unsuited or "some samples have no curvature"
            return
        factor, signs, sizes, outputs = self._latest
        self.factors.append(factor)
        self.signs.append(signs)
        self.sizes.append(torch.cat([sizes.sum(1, keepdim=True), residues(sizes)], 1).cpu())
        self.outputs.append(outputs)
        self._latest = None
        if outputs.shape[1:] != self.outputs[0].shape[1:]:
            self.unsuited = "outputs have unlike shapes"

    def side(self) -> tuple[Factor, Tensor]:
        """The directions of all samples here, and their signs."""
        if len(self.factors) > 1:
            self.factors = [self.factors[0].joined(self.factors[1:])]
            self.signs = [torch.cat(self.signs)]
        return self.factors[0], self.signs[0]


@final
class Packing:
    """Gathers samples that have as many looks to send, from all batches.

    A row is a sample with some of its looks, of one lot; one with many is several rows.
    """

    def __init__(self, sent: Looks) -> None:
        rows, row, every = torch.unique(
            sent.samples * sent.count + sent.lots, return_inverse=True, return_counts=True
        )
        self.members = row.argsort(stable=True)
        piece, self.width, place = _pieces(every, sent.count)
        self.samples, self.lots = rows[piece] // sent.count, rows[piece] % sent.count
        self.starts = (every.cumsum(0) - every)[piece] + place
        self.counts = torch.minimum(every[piece] - place, self.width)
        self.packs: list[tuple[int, Tensor]] = []  # lot, and (directions, rows) of looks, or −1

    def batches(self, risk: Risk) -> Iterator[Batch]:
        """Gathered samples; `packs` has what they are to send, in the same order."""
        waiting: dict[tuple[int, int], tuple[list[Batch], list[Tensor]]] = {}
        start = 0
        for batch in risk.batches():
            here = torch.searchsorted(self.samples, torch.tensor([start, start + batch.size]))
            for key, rows in self._by_key(range(*here.tolist())):
                part = batch.take((self.samples[rows] - start).tolist())
                parts, ids = waiting.setdefault(key, ([], []))
                if parts and not joinable(parts[0], part):
                    yield self._pack(key, *waiting.pop(key))
                    parts, ids = waiting.setdefault(key, ([], []))
                parts.append(part)
                ids.append(rows)
                if sum(map(len, ids)) >= _ROWS:
                    yield self._pack(key, *waiting.pop(key))
            start += batch.size
        for key, (parts, ids) in sorted(waiting.items(), key=lambda item: item[0]):
            yield self._pack(key, parts, ids)

    def _by_key(self, rows: range) -> Iterator[tuple[tuple[int, int], Tensor]]:
        here = slice(rows.start, rows.stop)
        keys = self.lots[here] * (1 + _WIDEST) + self.width[here]
        for key in keys.unique().tolist():
            same = (keys == key).nonzero()[:, 0]
            yield divmod(key, 1 + _WIDEST), same + rows.start

    def _pack(self, key: tuple[int, int], parts: list[Batch], ids: list[Tensor]) -> Batch:
        lot, width = key
        rows = torch.cat(ids)
        place = torch.arange(width)[:, None]
        at = (self.starts[rows] + place).clamp(max=len(self.members) - 1)
        table = torch.where(place < self.counts[rows], self.members[at], -1)
        self.packs.append((lot, table))
        return join(parts)


@cache
def _cuts() -> tuple[Tensor, Tensor, Tensor]:
    """For every set of widths, what it costs to send 0 … _WIDEST looks at a sample in rows of
    these widths; the width of the row to begin with; and how many widths there are."""
    widths = [w for k in range(_WIDEST.bit_length()) for w in ((1 << k) - 1, 1 << k) if w > 0]
    widths = sorted(set(widths))
    prices, firsts, sizes = [], [], []
    for few in (c for r in range(1, 1 + len(widths)) for c in combinations(widths, r)):
        price, first = [0.0], [0]
        for count in range(1, 1 + _WIDEST):
            offers = [
                (FORWARD + direction_price(_TRACE) * w + price[max(0, count - w)], -w) for w in few
            ]
            price.append(min(offers)[0])
            first.append(-min(offers)[1])
        prices.append(price)
        firsts.append(first)
        sizes.append(len(few))
    return torch.tensor(prices), torch.tensor(firsts), torch.tensor(sizes)


def _pieces(counts: Tensor, lots: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows for samples with so many looks: whose they are, their widths, and which of the sample's
    looks is their first.

    A row more is a forward pass more, wider rows have empty directions, and a width more is a batch
    more in each of so many lots.
    """
    prices, firsts, sizes = _cuts()
    whole, left = counts // _WIDEST, counts % _WIDEST
    many = torch.bincount(left, minlength=1 + _WIDEST)
    many[_WIDEST] += whole.sum()
    cut = firsts[(prices @ many.to(prices) + _BATCH * lots * sizes).argmin()]
    of, place, found = torch.arange(len(counts)), torch.zeros_like(counts), []
    while len(of):
        width = cut[(counts[of] - place).clamp(max=_WIDEST)]
        found.append((of, width, place))
        place = place + width
        more = place < counts[of]
        of, place = of[more], place[more]
    if not found:  # of several ranks, one may have no looks to send
        return of, of, place
    of, width, place = (torch.cat(each) for each in zip(*found, strict=True))
    order = of.argsort(stable=True)
    return of[order], width[order], place[order]


@final
@dataclass
class PackedPass(LookPass):
    """Further looks at gathered samples."""

    survey: Survey = field(kw_only=True)
    sent: Looks = field(kw_only=True)
    packing: Packing = field(kw_only=True)
    outputs: Tensor = field(init=False)
    rows: Tensor = field(init=False)  # of the Walsh matrix

    def __post_init__(self) -> None:
        super().__post_init__()
        outputs = self.survey.outputs
        self.outputs = torch.cat(outputs) if outputs else torch.empty(0)
        self.rows = walsh(self.survey.side()[0].count) if outputs else torch.empty(0)

    def copes(self, plan: Plan) -> bool:
        return self.survey.copes(plan)

    def measure(self, chunk: Chunk) -> Refutation | None:
        self._lot, table = self.packing.packs[chunk.index]
        self._table = table[:, chunk.first : chunk.first + chunk.batch.size]
        self.send(chunk, self._columns(chunk))
        return None

    def _columns(self, chunk: Chunk) -> Tensor:
        """The mixes, (D, n, …), each times the root of its weight.

        They are of the outputs of the survey: a sample's outputs may round otherwise in other
        company, and rank otherwise.
        """
        sent, at = self.sent, self._table.clamp(min=0)
        here = sent.samples[self._table[0]]
        rows = here.to(self.outputs.device)
        insist_on_order(beside_largest(self.outputs[rows]), beside_largest(chunk.outputs))
        side, signs = self.survey.side()
        root = (sent.weights[at] * (self._table >= 0)).sqrt()
        taken = root[..., None] * (signs[here] * self.rows[sent.numbers[at]])
        return side.mixed(taken.to(rows.device), rows)


@final
class Seen:
    """What all looks gave so far, and how many every sample had."""

    def __init__(self, survey: Survey, sizes: Tensor, left: Tensor, each_block: bool) -> None:
        self.sizes, self.residues = sizes, left
        self.exponents = torch.zeros(len(sizes), dtype=torch.long)
        lengths, values = survey.told(survey.own)
        # ‖Jᵀu‖²/|u|², on average.
        self.means = {key: float(y.sum() / lengths.sum()) for key, y in values.items()}
        self.totals = {key: mean * float(sizes.sum()) for key, mean in self.means.items()}
        self.samples, self.numbers = torch.arange(len(sizes)), torch.zeros_like(self.exponents)
        self.values = self._corrected(self.samples, lengths, values)
        # How many times the tolerance a block's error may be: of one that is next to nothing of
        # the sum of all, what of the sum is next to nothing.
        self.bars = {
            (kind, name): max(1.0, self.totals[kind, ""] / (_PARTS * total))
            if total > 0 and not each_block
            else 1.0
            for (kind, name), total in self.totals.items()
        }
        self.squares = {key: self._square(key, y / lengths) for key, y in values.items()}

    def _corrected(
        self, samples: Tensor, lengths: Tensor, values: Mapping[Key, Tensor]
    ) -> dict[Key, Tensor]:
        over = lengths - self.sizes[samples]
        return {key: y - self.means[key] * over for key, y in values.items()}

    def _square(self, key: Key, ratios: Tensor) -> Tensor:
        """Of every sample's ratio of what arrives to size, but the mean where that is more, in
        parts of the block: what the noise of its looks goes by."""
        if self.totals[key] <= 0:
            return torch.zeros_like(ratios)
        ratios = ratios.nan_to_num(0, 0, 0).clamp(min=self.means[key])
        return (ratios / self.totals[key]).square()

    def add(
        self, sent: Looks, lengths: Tensor, values: Mapping[Key, Tensor], exponents: Tensor
    ) -> None:
        """More looks, by which samples have had so many."""
        new = self._corrected(sent.samples, lengths, values)
        self.samples = torch.cat([self.samples, sent.samples])
        self.numbers = torch.cat([self.numbers, sent.numbers])
        self.values = {key: torch.cat([y, new[key]]) for key, y in self.values.items()}
        self.exponents = exponents
        for key, known in self.squares.items():
            ratios = self.mean(key, exponents) / self.sizes
            self.squares[key] = torch.maximum(known, self._square(key, ratios))

    def mean(self, key: Key, exponents: Tensor) -> Tensor:
        """That of the first looks of every sample."""
        counts = 1 << exponents
        y = self.values[key] * (self.numbers < counts[self.samples])
        return torch.zeros_like(self.sizes).index_add_(0, self.samples, y) / counts

    def strange(self, squares: Tensor, design: Design) -> Tensor:
        """These, of samples that are not drawn and that others do not quite tell of."""
        far = squares * float(self.sizes.sum()) ** 2 > _STRANGE**2
        return squares * (far & ~design.drawn)

    def left(self, exponents: Tensor) -> Tensor:
        """The products of sizes that are left after so many looks."""
        return self.residues.gather(1, exponents[:, None])[:, 0]


@final
@dataclass(frozen=True, slots=True)
class Design:
    """How many looks samples have, as exponents, and with what chances they are drawn for twice as
    many."""

    exponents: Tensor
    chances: Tensor
    drawn: Tensor

    @property
    def all(self) -> Tensor:
        return self.exponents + self.drawn.long()


@final
class Designer:
    """Finds the cheapest looks that keep a tolerance."""

    def __init__(self, seen: Seen, each: float, tolerance: float, seed: int) -> None:
        self.seen, self.tolerance = seen, tolerance
        count = 1 << torch.arange(seen.residues.shape[1])
        self.prices = (FORWARD + each * (count - 1)) * (count > 1)
        self.numbers = uniforms(range(len(seen.sizes)), 1, seed, _DRAWS)[:, 0]
        self.squares = torch.stack([*seen.squares.values()])
        # What other samples do not vouch for.
        most, whole = self.squares.amax(0), float(seen.sizes.sum())
        apart = (most * whole**2 > _FAR**2) & (most * whole * seen.sizes > _FAR * tolerance)
        self.least = torch.where(apart, len(count) - 1, 0)

    def design(self, shares: Mapping[Key, float], aim: float) -> Design:
        """The one for which every block's error is about `aim` of the tolerance; products have such
        shares of those of their sizes."""
        by = torch.tensor([shares[key] for key in self.seen.squares], dtype=torch.float64)
        bars = torch.tensor([self.seen.bars[key] for key in self.seen.squares]).double()
        low, high = 0.0, 24.0
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            noise = self._noise(self._at(middle), by)
            if bool((noise <= (aim * self.tolerance * bars).square()).all()):
                high = middle
            else:
                low = middle
        return self._at(high)

    def _at(self, price: float) -> Design:
        """The one for a price of noise, as its logarithm."""
        seen = self.seen
        scale = 10**price / max(float(seen.sizes.sum()), 1e-300) ** 2
        exponents = (self.prices + scale * seen.residues).argmin(1)
        exponents = torch.maximum(exponents, self.least)
        left = seen.left(exponents)
        chances = (_DRAWN * left / left.sum().clamp(min=1e-300)).clamp(max=1)
        return Design(exponents, chances, self.numbers < chances)

    def _noise(self, design: Design, shares: Tensor) -> Tensor:
        """The variances of all blocks, in parts of their squares."""
        before, after = self.seen.left(design.exponents), self.seen.left(design.all)
        every = self.squares @ torch.where(design.drawn, after, before)
        more = (before * self.seen.strange(self.squares, design)).square().sum(1).sqrt()
        return shares * every + more


@final
class Estimate:
    """What looks tell."""

    def __init__(self, seen: Seen, design: Design, scale: float, tolerance: float) -> None:
        self.seen, self.design, self.scale, self.tolerance = seen, design, scale, tolerance
        before, after = seen.left(design.exponents), seen.left(design.all)
        self.before, self.after = before, after
        self.drawn = design.drawn.nonzero()[:, 0]
        gone = (before - after)[self.drawn]
        self.more = before[self.drawn] / gone  # Δ² has what is gone, not what was left
        chances = design.chances[self.drawn]
        self.weights = ((1 - chances) / chances + (after / before)[self.drawn]) * self.more
        self.means = {key: seen.mean(key, design.all) for key in seen.values}
        self.changes = {
            key: (y - seen.mean(key, design.exponents))[self.drawn] for key, y in self.means.items()
        }
        self.totals = {key: float(y.sum()) / scale for key, y in self.means.items()}
        self._errors: dict[Key, tuple[float, float]] = {}

    def share(self, key: Key) -> float:
        """What products of directions have of those of their sizes, by those drawn."""
        chances = self.design.chances[self.drawn]
        squares = self.seen.squares[key][self.drawn] * self.seen.totals[key] ** 2
        known = float((self.before[self.drawn] * squares / chances).sum())
        found = float((self.changes[key].square() * self.more / chances).sum())
        return found / known if known > 0 else 0.0

    @property
    def shares(self) -> dict[Key, float]:
        return {key: self.share(key) for key in self.totals}

    def plain(self, key: Key) -> tuple[float, float]:
        """The variance of a block by those drawn alone, and its degrees of freedom."""
        terms = self.weights * (self.changes[key] / self.scale).square()
        total = float(terms.sum())
        return total, 2 / float((terms / total).square().sum()) if total > 0 else inf

    def error(self, key: Key) -> tuple[float, float]:
        """The standard error of a block's sum over samples, and its degrees of freedom."""
        if key not in self._errors:
            variance, degrees = self.plain(key)
            left = torch.where(self.design.drawn, self.after, self.before)
            squares = self.seen.squares[key]
            more = (self.seen.strange(squares, self.design) * self.before).norm()
            every = self.share(key) * float(squares @ left) + float(more)
            variance = max(variance, every * (self.seen.totals[key] / self.scale) ** 2)
            least = (_FINEST * self.tolerance * self.totals[key]) ** 2
            self._errors[key] = sqrt(max(variance, least)), degrees if variance > least else inf
        return self._errors[key]

    def within(self) -> bool:
        allowed = {key: self.tolerance * bar for key, bar in self.seen.bars.items()}
        return all(self.error(key)[0] <= allowed[key] * y for key, y in self.totals.items())


@final
class Result:
    """An estimate within the tolerance, with independent ones, one a group of the drawn samples,
    that scatter about it as it does about the truth."""

    def __init__(self, estimate: Estimate, requests: Requests, folds: int, seed: int) -> None:
        self.estimate, self.requests, self.folds = estimate, requests, folds
        samples = range(len(estimate.seen.sizes))
        numbers = uniforms(samples, 1, seed, _DRAWS, 1)[estimate.drawn, 0]
        self.groups = (numbers * folds).long()
        self.values: dict[Key, Tensor] = {}  # of more than a number …
        self.spread: dict[Key, Tensor] = {}  # … and what the groups' noise is

    @property
    def often(self) -> int:
        """Samples that had more than one look."""
        return int((self.estimate.seen.exponents > 0).sum())

    @property
    def count(self) -> int:
        """Those drawn."""
        return len(self.estimate.drawn)

    def lots(self) -> Looks:
        """The looks that sums of more than a number are made of, besides the survey.

        In lot 0 are those that count, in lot 1 what the survey has too much, in the next the later
        and then the earlier looks of the drawn samples, by groups.
        """
        design, count = self.estimate.design, 2 + 2 * self.folds
        levels = design.all
        found = [self._lot(torch.ones_like(levels), 1 << levels, 0.5**levels, 0)]
        found.append(self._lot(0 * levels, (levels > 0).long(), 1 - 0.5**levels, 1))
        weight = torch.zeros_like(self.estimate.seen.sizes)
        weight[self.estimate.drawn] = self.estimate.weights.sqrt()
        weight *= 0.5**levels
        group = torch.zeros_like(levels)
        group[self.estimate.drawn] = self.groups
        middle, last = 1 << design.exponents, design.drawn << levels
        found.append(self._lot(middle, last, weight, 2 + group))
        first = torch.where(design.drawn, 0 * middle, middle)
        found.append(self._lot(first, middle, weight, 2 + self.folds + group))
        return Looks.of(found, count)

    @staticmethod
    def _lot(first: Tensor, last: Tensor, weight: Tensor, lot: Tensor | int) -> tuple[Tensor, ...]:
        samples, numbers = looks(first, last)
        return samples, numbers, weight[samples], (lot + torch.zeros_like(first))[samples]

    def take(self, survey: Survey, done: PackedPass) -> None:
        """The sums of lots."""
        first, lots, scale = survey.totals(), done.totals(), self.estimate.scale
        for name, kinds in self.requests.items():
            if "magnitude" in kinds:
                self.values["magnitude", name] = done.zeros("magnitude", name).cpu()
            for kind in kinds & WHOLE:
                zeros = done.zeros(kind, name).cpu()
                every = [lots.get((kind, name, lot), zeros).cpu() for lot in range(done.sent.count)]
                value = first.get((kind, name, 0), zeros).cpu() + every[0] - every[1]
                later, earlier = every[2 : 2 + self.folds], every[2 + self.folds :]
                self.values[kind, name] = value / scale
                self.spread[kind, name] = (torch.stack(later) - torch.stack(earlier)) / scale

    def _numbers(self, kind: Kind, name: str) -> tuple[Tensor, Tensor]:
        """A block's value, and the noise of its groups."""
        if kind in WHOLE:
            return self.values[kind, name], self.spread[kind, name]
        estimate, key = self.estimate, (kind, name)
        noise = estimate.weights.sqrt() * estimate.changes[key] / estimate.scale
        spread = torch.zeros(self.folds, dtype=torch.float64).index_add_(0, self.groups, noise)
        return torch.tensor(estimate.totals[key], dtype=torch.float64), spread

    def quantity(self, kind: Kind) -> Quantity:
        result = Quantity({}, sizes=(1,) * self.folds)
        names = [name for name, wanted in self.requests.items() if kind in wanted]
        if kind == "magnitude":  # of what nothing is negative in
            result.values = {name: self.values[kind, name] for name in names}
            return result
        added = _ADDED.get(kind, kind)
        for name in names:
            value, spread = self._numbers(kind, name)
            stderr, degrees = self.estimate.error((added, name))
            more = max(1.0, stderr / (sqrt(self.estimate.plain((added, name))[0]) or inf))
            draws = value + self.folds * more * (spread - spread.mean(0))
            result.values[name], result.draws[name] = value, draws
            result.errors[name] = mean_error(draws, result.sizes)[1]
            if kind not in WHOLE:
                result.errors[name] = torch.tensor(stderr, dtype=torch.float64)
                result.freedom[name] = degrees
        result.total_stderr, result.total_degrees = self.estimate.error((added, ""))
        return result


@final
@dataclass(slots=True)
class AdaptiveRank:
    """The search for looks that keep a tolerance, and the passes that it takes."""

    risk: Risk
    loss: Loss
    settings: Settings
    weights: Mapping[str, Weight]
    requests: Requests
    plan: Plan
    seed: int
    hessian: bool
    folds: int  # groups of the drawn samples, whose sums tell errors
    each_block: bool  # whether small blocks too must have errors within the tolerance of their own
    spent: float = field(default=0.0, init=False)  # of the price of a sweep
    sent: int = field(default=0, init=False)  # looks
    pairs: int = field(default=0, init=False)  # of a sample and a direction
    samples: int = field(default=0, init=False)
    rules: dict[str, set[str]] = field(default_factory=dict, init=False)

    @property
    def kinds(self) -> frozenset[Kind]:
        return frozenset[Kind]().union(*self.requests.values())

    def run(self, stream: Iterable[Batch]) -> Result | Refutation | str:
        """Estimates within the tolerance; or why a sweep is no dearer."""
        parts: tuple[Any, ...] = self.risk, self.loss, self.requests, self.settings, self.weights
        apart = bool(self.kinds & WHOLE)
        survey = Survey(*parts, must_be_linear=self.hessian, seed=self.seed, apart=apart)
        if refutation := survey.run(stream, self.plan):
            return refutation
        told = self.risk.reduction.each(
            lambda: (survey.unsuited, [f.count for f in survey.factors], survey.sizes)
        )
        if reasons := [unsuited for unsuited, *_ in told if unsuited]:
            return reasons[0]
        counts = {count for _, each, _ in told for count in each}
        if len(counts) != 1:
            return "samples have unlike numbers of directions"
        self.samples = survey.samples
        self.pairs = self.samples * counts.pop()
        if self.samples < _FEWEST:
            return f"there are only {self.samples} samples"
        left = torch.cat([part for *_, parts in told for part in parts])
        seen = Seen(survey, left[:, 0], left[:, 1:], self.each_block)
        if float(seen.sizes.sum()) == 0:
            return "the outputs have no curvature"
        return self._search(survey, seen)

    def _search(self, survey: Survey, seen: Seen) -> Result | Refutation | str:
        scale, tolerance = divisor(self.loss, survey.normaliser), self.settings.tolerance
        self.sent, self.rules = self.samples, {n: set(r) for n, r in survey.rules.items()}
        # Products that cancel where entries are added up do not in each of them.
        least = 1.0 if self.kinds & WHOLE else 0.0
        each, guess = direction_price(self.kinds), max(_GUESS * self.samples / self.pairs, least)
        shares = dict.fromkeys(seen.values, guess)
        for attempt in range(_ROUNDS):
            designer = Designer(seen, each, tolerance, self.seed)
            design = designer.design(shares, _AIM * 0.9 ** max(0, attempt - 1))
            levels = torch.maximum(design.all, seen.exponents)
            samples, numbers = looks(1 << seen.exponents, 1 << levels)
            sent = Looks(samples, numbers, torch.ones(len(samples)).double(), 0 * samples)
            if not self._worth(sent):
                return "so many directions matter that to mix them saves too little"
            done = self._pass(survey, sent, apart=False)
            if isinstance(done, Refutation):
                return done
            seen.add(sent, *done.told(len(done.sent.samples)), levels)
            estimate = Estimate(seen, design, scale, tolerance)
            fewest = Designer(seen, each, tolerance, self.seed).least
            if estimate.within() and bool((fewest <= levels).all()):
                return self._result(survey, estimate)
            shares = {key: max(share, least) for key, share in estimate.shares.items()}
        return "the tolerance was missed again and again"

    def _result(self, survey: Survey, estimate: Estimate) -> Result | Refutation:
        result = Result(estimate, self.requests, self.folds, self.seed)
        if self.kinds & WHOLE:
            done = self._pass(survey, result.lots(), apart=True)
            if isinstance(done, Refutation):
                return done
            result.take(survey, done)
        return result

    def _worth(self, sent: Looks) -> bool:
        """Whether a pass is worth its price, which is then spent; twice, where what is more than a
        number is made by a pass of its own."""
        each, times = direction_price(self.kinds), 2 if self.kinds & WHOLE else 1
        price = FORWARD * len(sent.samples.unique()) + each * len(sent.samples)
        self.spent += times * price / (each * self.pairs)
        return self.spent <= _WORTH

    def _pass(self, survey: Survey, sent: Looks, *, apart: bool) -> PackedPass | Refutation:
        """One pass over gathered samples."""
        self.sent += len(sent.samples)
        first = self.risk.offset
        own = sent.among(range(first, first + survey.own))
        packing = Packing(own)
        parts: tuple[Any, ...] = self.risk, self.loss, self.requests, self.settings, self.weights
        done = PackedPass(*parts, survey=survey, sent=own, packing=packing, apart=apart)
        # Gathered samples are elsewhere in their batch than those that were looked at.
        plan = replace(self.plan, places=())
        if refutation := done.run(packing.batches(self.risk), plan):
            return refutation
        for name, rules in done.rules.items():
            self.rules.setdefault(name, set()).update(rules)
        return done
