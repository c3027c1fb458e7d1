"""Adaptive rank: of all pairs (sample, direction), those that matter are sent backwards.

What a direction u of a sample gives to a trace is ‖Jᵀu‖², on trained networks about proportional
to its size |u|², which ranges over many orders of magnitude: confident samples have next to no
curvature in their outputs. But nothing bounds the ratio ‖Jᵀu‖²/|u|²: one sample with inputs of
another scale may hold all of a trace and next to nothing of the sizes. So

1. a survey sends all samples forwards, proves the blocks on them as a sweep does, and sends the
   largest direction of each backwards. That is most of what a confident sample has, is had without
   error, and tells the sample's ratio in every block: that of all its directions, where classes are
   told from the same features. Whether it is shows in a random mix of all the others, which is sent
   too: where that gives far more than it should, any of them may be why, and each is taken for as
   important as the mix. Places of a sequence, or targets, may each have features of their own, of
   which these two do not tell: with these, all pairs are sent;
2. a pilot sends a few others, some of them for every entry of the outputs, which tells by how much
   every entry's ratio is larger than that;
3. a direction's importance s is its size, each entry's square times what the entry gains, times the
   ratio of its sample, in the block where they are largest.
   Pairs with s ≥ τ are all sent backwards. Any other is with the chance s/τ, drawn by a number that
   belongs to the sample and the direction, and then has the weight S/(m s), for S the sum of s
   below τ and m the pairs drawn there. The number is the same for every τ and in the pilot: where
   τ turns out to be too large, those drawn are drawn again for a lower one, and not sent again.

Drawn pairs are sent at their weight, u √(S/(m s)). What arrives, y, adds up to an estimate for all
that are below τ. (It is a ratio, whose bias is about its error over √m.) Its error is the spread of
the y,

    variance = m/(m − 1) Σ (1 − s/τ)(y − ȳ)²,

with 2 (Σ v)²/Σ v² degrees of freedom, v the terms of that sum. Where pairs matter that were not
drawn this is too small, and the variance is then what it would be if all directions of a sample had
the ratio of its largest, which is known of all samples. Where all mixes together, whose mean is
what all other directions give, gave far more than the estimate, all pairs are sent. Nor is an error
stated that is less than a two-hundredth of the tolerance: single directions may matter that much of
which neither tells. τ is the largest that keeps every block's error within the tolerance, with a
margin, by what y/s varies by in the pilot, which looks where τ will about be. Where it leaves too
little to save, all pairs are sent: an ordinary sweep.

Samples are gathered by how many of their directions travel, so that the passes are dense; one with
many is there several times.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations
from math import inf, isfinite, sqrt
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
    SURPRISE,
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

# Kinds with more than one number a block. What they add up to is a number for every pair, and has
# an error. Single entries have none that holds: one that few pairs feed is 0 ± 0 if none is drawn.
WHOLE: frozenset[Kind] = frozenset({"diagonal", "columns", "rows"})
_ADDED: dict[Kind, Kind] = {"diagonal": "trace"}

LEAST_DIRECTIONS = 3  # of a sample, of which the largest is always sent
_LEAST_RATIO = 0.25  # of ‖Jᵀu‖²/|u|², to its mean
_LEAST = 128  # pairs to be drawn, about
_PILOT = 192, 64  # the same of a pilot, below and above the threshold that is looked for
_STEPS = 60  # of a pilot's search for gains
_OFFERS = 1024  # thresholds to choose from
_OF_EACH = 4  # pairs of a pilot for every entry of the outputs, as their first and their second
_SPARE = 8  # times as many, that are ranked
_FEW = 192  # samples that they are of, about
_GUESS = 0.5  # what ‖Jᵀu‖²/|u|² varies by, of its mean
_AIM = 0.9  # of the tolerance: to miss it costs the pairs that were wanting
_FAR = 3.0  # standard errors of mixes, and of directions: too far apart
_MIXED = 2  # among the keys of random numbers
_FINEST = 0.005  # of the tolerance: no error is stated that is less
_ROUNDS = 3
_WORTH = 0.7  # of the price of a sweep
GROUPS = 16  # of the drawn pairs, where nobody asks for another number
_ROWS = 1024  # of a batch of gathered samples
_BLOCK = 4096  # samples that are drawn from at a time
_WIDEST = 16  # directions that a sample of a batch is sent with
_BATCH = 150.0  # gradients of a sample that a batch less is worth

_TRACE: frozenset[Kind] = frozenset({"trace"})
_HIDDEN = "mixes of directions gave far more than the directions that were chosen from them"
_APART = "one direction tells of the others only with the classes of one place and cross-entropy"


def mixing(samples: range, classes: int, *key: int) -> Tensor:
    """Noise for the mixes of a survey, which belongs to samples: signs, times magnitudes that make
    it unlikely for two directions to cancel. Their squares are spread evenly over [1/2, 3/2]."""
    numbers = uniforms(samples, classes, *key, _MIXED)
    sizes = (2 * numbers % 1 + 0.5).sqrt_()
    return torch.where(numbers < 0.5, -sizes, sizes)


@dataclass
class PairPass(Pass):
    """Directions of samples, sent backwards: `parts` has a number for every pair, `whole` sums of
    more than a number by lots, of which the first are the pairs that are certain."""

    apart: bool = field(kw_only=True)  # whether `whole` is wanted
    parts: dict[tuple[Kind, str], list[tuple[Tensor, Tensor]]] = field(default_factory=dict)
    whole: dict[tuple[Kind, str], dict[int, Tensor]] = field(default_factory=dict)
    _whole: dict[tuple[Kind, str], Tensor] = field(default_factory=dict)  # of the chunk at hand
    _table: Tensor = field(init=False)  # (directions, samples) of pairs, or −1
    _lot: int = 0

    def send(self, chunk: Chunk, columns: Tensor, at: int = 0) -> None:
        """Directions of the table from `at` on, and what comes of them into `pending`; into `whole`
        what comes of the first ones."""
        if at == 0:
            self._whole = {}
        names, size = frozenset(self.requests), chunk.batch.size
        live = live_uses(chunk.uses, chunk.plan, names)
        price = direction_price(frozenset[Kind]().union(*self.requests.values()))
        self.risk.work.add(size, FORWARD * (at == 0) + len(columns) * price)
        group = self.together(chunk)
        for start in range(0, len(columns), group):
            part = columns[start : start + group]
            arrived = backward(chunk.outputs, live, chunk.plan, part)
            with torch.no_grad():
                for name, term in self.terms(chunk, live, arrived, names):
                    self._add(name, term, at + start, len(part), slice(size), at == 0)
            written = self.written_out(chunk.plan, CURVATURE)
            for rows, name, term in self.generic_terms(chunk, part, written):
                self._add(name, term, at + start, len(part), rows, at == 0)

    def _add(self, name: str, term: Term, start: int, count: int, rows: slice, first: bool) -> None:
        wanted, weight = self.requests[name], self.weights.get(name)
        self._place("trace", name, start, rows, term.squares(count))
        if "diagonal" in wanted and self.apart and first:
            self._more("diagonal", name, term.diagonal(None))
        forms = wanted & FORMS.keys()
        for d in range(count if forms else 0):
            apart: dict[Kind, Tensor] = {}
            for kind, value in reduce(term.direction(d), forms, weight, None, apart):
                if kind in WHOLE and self.apart and first:
                    self._more(kind, name, value)
                self._place(kind, name, start + d, rows, apart[kind].unsqueeze(0))

    def _place(self, kind: Kind, name: str, start: int, rows: slice, values: Tensor) -> None:
        """Numbers of some directions of some of the chunk's samples."""
        if (kind, name) not in self.pending:
            self.pending[kind, name] = values.new_zeros(self._table.shape)
        self.pending[kind, name][start : start + len(values), rows] = values

    def _more(self, kind: Kind, name: str, value: Tensor) -> None:
        known = self._whole.get((kind, name))
        self._whole[kind, name] = value.double() if known is None else known.add_(value)

    def commit(self, key: tuple[Kind, str], value: Tensor) -> None:
        real = self._table >= 0
        self.parts.setdefault(key, []).append((self._table[real], value[real.to(value.device)]))
        if (whole := self._whole.pop(key, None)) is not None:
            self._put(key, whole)
        # The diagonal comes with the trace.
        other: tuple[Kind, str] = "diagonal", key[1]
        if key[0] == "trace" and other in self._whole:
            self._put(other, self._whole.pop(other))

    def _put(self, key: tuple[Kind, str], value: Tensor) -> None:
        lots = self.whole.setdefault(key, {})
        lots[self._lot] = lots[self._lot].add_(value) if self._lot in lots else value

    def part(self, key: tuple[Kind, str], count: int) -> Tensor:
        """What came of so many pairs, not divided by the loss's normaliser; 0 where nothing did."""
        numbers = torch.zeros(count, dtype=torch.float64)
        for places, values in self.parts.get(key, []):
            numbers[places] = values.cpu().double()
        return numbers

    @property
    def keys(self) -> list[tuple[Kind, str]]:
        """What has a number for every pair."""
        wanted = {(kind, n) for n, kinds in self.requests.items() for kind in kinds - {"magnitude"}}
        return sorted({(_ADDED.get(kind, kind), name) for kind, name in wanted})


@final
@dataclass
class Survey(PairPass):
    """The directions of all samples, and the outputs that they are of. Sent backwards are the
    largest direction of every sample and a mix of all others: pairs 2 i and 2 i + 1."""

    must_be_linear: bool = field(kw_only=True)
    seed: int = field(kw_only=True)
    factors: list[Factor] = field(default_factory=list)
    found: list[Tensor] = field(default_factory=list)  # sizes of their directions
    outputs: list[Tensor] = field(default_factory=list)
    unsuited: str = ""
    _latest: tuple[Factor, Tensor, Tensor] | None = None

    def copes(self, plan: Plan) -> bool:
        return not self.must_be_linear or all(map(plan.allows, self.requests))

    def run(self, batches: Iterable[Batch], first: Plan | None = None) -> Refutation | None:
        self._offset = self.risk.offset  # noise goes by the place in all data
        return super().run(batches, first)

    def measure(self, chunk: Chunk) -> Refutation | None:
        count = direction_count(self.loss, chunk.outputs, chunk.batch.targets)
        if count > self.settings.max_directions:
            return Refutation(directions=count)
        sides = ranked(self.loss, chunk.outputs, chunk.batch)
        if sides is None:
            self.unsuited = _APART
            return None
        sizes = sides.sizes()
        self._latest = sides, sizes.cpu(), chunk.outputs.detach()
        ids = 2 * torch.arange(self.samples, self.samples + chunk.batch.size)
        self._table = torch.stack([ids, ids + 1])
        noise = mixing(
            range(chunk.place, chunk.place + chunk.batch.size), 1 + sides.count, self.seed
        )
        columns = sides.chosen(sizes.argmax(1)[None]), sides.mix(noise.to(sizes))[None]
        if self.apart:  # where what comes of the mixes must not be added
            self.send(chunk, columns[0])
            self.send(chunk, columns[1], at=1)
        else:
            self.send(chunk, torch.cat(columns))
        return None

    def _count(self, size: int, normaliser: float, counted: int, even: bool) -> None:
        super()._count(size, normaliser, counted, even)
        if self._latest is None:
            self.unsuited = self.unsuited or "some samples have no curvature"
            return
        factor, sizes, outputs = self._latest
        self.factors.append(factor)
        self.found.append(sizes)
        self.outputs.append(outputs)
        self._latest = None
        if outputs.shape[1:] != self.outputs[0].shape[1:]:
            self.unsuited = "outputs have unlike shapes"

    def side(self) -> Factor:
        """That of all samples here."""
        if len(self.factors) > 1:
            self.factors = [self.factors[0].joined(self.factors[1:])]
        return self.factors[0]

    def sizes(self, gains: Tensor) -> Tensor:
        """Those of the directions of all ranks' samples, by what their entries gain."""
        told = self.reduction.each(lambda: [f.sizes(gains).cpu() for f in self.factors])
        return torch.cat([each for parts in told for each in parts])


@final
class Population:
    """All pairs, by their sizes: what a threshold τ costs, and how noisy it is."""

    def __init__(self, sizes: Tensor) -> None:
        self.sizes, self.whole = sizes, float(sizes.sum())
        top = self.whole + float(sizes.max())
        # From far below the largest, where all that matters is sent, to where none is drawn.
        steps = torch.linspace(-12, 0, _OFFERS, dtype=torch.float64)
        self.offers = 10**steps * top
        # The sums up to every offer, by how many offers a size has reached: no sort of all pairs.
        place = (sizes / top).log10_().add_(12).mul_((_OFFERS - 1) / 12).add_(1)
        place = place.clamp_(min=0).long().flatten()
        flat = sizes.flatten()
        self.first, self.second = (
            torch.bincount(place, each, minlength=_OFFERS + 1)[:_OFFERS].cumsum(0)
            for each in (flat, flat.square())
        )

    def threshold(self, noise: float, tolerance: float) -> float:
        """The largest τ that keeps a tolerance, with some pairs to draw; 0 if there is none.

        Where ratios vary by `noise`, the variance is noise² Σ s (τ − s), over s < τ.
        """
        small = noise**2 * (self.offers * self.first - self.second) <= tolerance**2
        good = small & (self.first >= _LEAST * self.offers)
        return float(self.offers[good][-1]) if bool(good.any()) else 0.0

    def halves(self, threshold: float) -> tuple[float, float]:
        """The sizes of all pairs below and above a threshold."""
        below = float((self.sizes * (self.sizes < threshold)).sum())
        return below, self.whole - below


@final
@dataclass(frozen=True, slots=True)
class Pairs:
    """Those that are sent backwards, by samples."""

    samples: Tensor
    directions: Tensor
    weights: Tensor
    chances: Tensor  # 1 for those that are sent in any case
    groups: Tensor  # that they are in, of so many
    folds: int
    unit: float  # weight times size of the drawn ones

    @property
    def drawn(self) -> Tensor:
        return self.chances < 1

    def among(self, samples: range) -> Pairs:
        """Those of some samples, which are counted from the first of them."""
        found = self.where((self.samples >= samples.start) & (self.samples < samples.stop))
        return replace(found, samples=found.samples - samples.start)

    def where(self, here: Tensor) -> Pairs:
        """Some of them."""
        return replace(
            self,
            samples=self.samples[here],
            directions=self.directions[here],
            weights=self.weights[here],
            chances=self.chances[here],
            groups=self.groups[here],
        )


@final
class Sent:
    """What came of pairs so far, at weight 1: what is known of one is not sent for again.

    A pair that is drawn for one threshold is drawn for every lower one: the same number decides.
    """

    def __init__(self, directions: int) -> None:
        self.directions = directions
        self.ids = torch.empty(0, dtype=torch.long)  # in order
        self.parts: dict[tuple[Kind, str], Tensor] = {}

    def _ids(self, pairs: Pairs) -> Tensor:
        return pairs.samples * self.directions + pairs.directions

    def unknown(self, pairs: Pairs) -> Tensor:
        return ~torch.isin(self._ids(pairs), self.ids)

    def add(self, pairs: Pairs, parts: Mapping[tuple[Kind, str], Tensor]) -> None:
        """What pairs gave that were sent at their weights."""
        new = self.unknown(pairs)
        self.ids, order = torch.cat([self.ids, self._ids(pairs)[new]]).sort()
        for key, y in parts.items():
            known = self.parts.get(key, y[:0])
            self.parts[key] = torch.cat([known, (y / pairs.weights)[new]])[order]

    def of(self, pairs: Pairs) -> dict[tuple[Kind, str], Tensor]:
        """What these give at their weights; all of them were sent."""
        place = torch.searchsorted(self.ids, self._ids(pairs))
        return {key: y[place] * pairs.weights for key, y in self.parts.items()}


def choose(sizes: Tensor, threshold: float, folds: int, *key: int) -> Pairs:
    """The pairs for a threshold; which are drawn does not depend on any other sample."""
    found, rest = list[tuple[Tensor, Tensor, Tensor, Tensor]](), 0.0
    for start in range(0, len(sizes), _BLOCK):
        part = sizes[start : start + _BLOCK]
        chances = (part / threshold).clamp(max=1)
        numbers = uniforms(range(start, start + len(part)), part.shape[1], *key)
        samples, directions = (numbers < chances).nonzero(as_tuple=True)
        rest += float(part[chances < 1].sum())
        chances, numbers = chances[samples, directions], numbers[samples, directions]
        found.append((samples + start, directions, chances, numbers))
    samples, directions, chances, numbers = map(torch.cat, zip(*found, strict=True))
    drawn = chances < 1
    unit = rest / max(1, int(drawn.sum()))
    weights = torch.where(drawn, unit / (chances * threshold), 1.0)
    # Where it fell among those by which it would be drawn. Pairs of a sample, which may all be
    # large or small, are drawn one by one, and are in groups of their own.
    groups = (numbers / chances * folds).long().clamp_(max=folds - 1)
    return Pairs(samples, directions, weights, chances, groups, folds, unit)


def pilot(
    sizes: Tensor, entries: Tensor, least: float, threshold: float, folds: int, *key: int
) -> Pairs:
    """Some pairs from below a threshold and fewer from above, in group 0, and in group 1 some for
    every entry of the outputs, of whatever sizes that are not less than `least`; all sent with
    length 1.

    The first are drawn by the numbers that `choose` draws by, and the others by their far ends:
    what these tell, by which all pairs are weighed, has next to nothing to do with those drawn.
    """
    below = sizes < threshold
    low, high = (sizes * below).sum(), (sizes * ~below).sum()
    chances = torch.where(below, _PILOT[0] * sizes / low, _PILOT[1] * sizes / high)
    numbers = uniforms(range(len(sizes)), sizes.shape[1], *key)
    by_size, there = numbers < chances, sizes > least
    few = uniforms(range(len(sizes)), 1, *key, 1) < _FEW / len(sizes)
    by_entry = _of_each(entries[:, :, 0], there, few, 1 - numbers)
    by_entry |= _of_each(entries[:, :, 1], there, few, (2 * numbers - 1).abs())
    samples, directions = (by_size | by_entry).nonzero(as_tuple=True)
    size = sizes[samples, directions]
    group = by_entry[samples, directions].long()
    return Pairs(samples, directions, 1 / size, size / threshold, group, folds, 1.0)


def _of_each(entries: Tensor, there: Tensor, few: Tensor, numbers: Tensor) -> Tensor:
    """Some pairs of every entry of the outputs, those with the least numbers but for chance: of few
    samples, whose forward passes they share, or of all where these have not enough of an entry."""
    flat = entries.flatten()
    counts = torch.bincount(flat, (there & few).flatten().double())
    scarce = counts < 2 * _OF_EACH
    if bool(scarce.any()):
        there = there & (few | scarce[entries.long()])
        counts = torch.bincount(flat, there.flatten().double()).clamp_(min=1)
    else:
        there = there & few
    # Of all pairs so many are ranked that hardly ever one that is to be chosen is not.
    likely = (numbers < (_OF_EACH * _SPARE / counts)[entries.long()]) & there
    places = likely.flatten().nonzero()[:, 0]
    entry = entries.flatten()[places].long()
    order = (entry + numbers.flatten()[places]).argsort()
    counts = torch.bincount(entry, minlength=1)
    first = torch.arange(len(places)) - (counts.cumsum(0) - counts)[entry[order]] < _OF_EACH
    chosen = torch.zeros(there.numel(), dtype=torch.bool)
    chosen[places[order[first]]] = True
    return chosen.reshape(there.shape)


@final
class Packing:
    """Gathers samples that have as many directions to send, from all batches.

    A row is a sample with some of its pairs; one with many pairs is several rows. With `apart`,
    rows of drawn pairs are kept from those of certain ones, and from other groups.
    """

    def __init__(self, pairs: Pairs, apart: bool) -> None:
        lots = (pairs.drawn * (1 + pairs.groups)) if apart else torch.zeros_like(pairs.samples)
        kinds = pairs.folds + 1
        rows, row, every = torch.unique(
            pairs.samples * kinds + lots, return_inverse=True, return_counts=True
        )
        self.members = row.argsort(stable=True) if apart else torch.arange(len(row))
        piece, self.width, place = _pieces(every, 1 + int(lots.max()) if len(lots) else 1)
        self.samples, self.lots = rows[piece] // kinds, rows[piece] % kinds
        self.starts = (every.cumsum(0) - every)[piece] + place
        self.counts = torch.minimum(every[piece] - place, self.width)
        self.packs: list[tuple[int, Tensor]] = []  # lot, and (directions, rows) of pairs, or −1

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
    """For every set of widths, what it costs to send 0 … _WIDEST directions of a sample in rows of
    these widths; the width of the row to begin with; and how many widths there are."""
    widths = [1 << k for k in range(_WIDEST.bit_length())]
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
    """Rows for samples with so many directions: whose they are, their widths, and which of the
    sample's directions is their first.

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
    if not found:  # of several ranks, one may have no pairs to send
        return of, of, place
    of, width, place = (torch.cat(each) for each in zip(*found, strict=True))
    order = of.argsort(stable=True)
    return of[order], width[order], place[order]


@final
@dataclass
class PackedPass(PairPass):
    """Chosen pairs of gathered samples."""

    survey: Survey = field(kw_only=True)
    pairs: Pairs = field(kw_only=True)
    packing: Packing = field(kw_only=True)
    outputs: Tensor = field(init=False)
    squares: dict[int, tuple[Tensor, Tensor]] | None = None  # of directions, if they are wanted

    def __post_init__(self) -> None:
        super().__post_init__()
        outputs = self.survey.outputs
        self.outputs = torch.cat(outputs) if outputs else torch.empty(0)

    def shares(self) -> Tensor:
        """What every entry of the outputs has of a direction's squares, (pairs, entries)."""
        count, width = len(self.pairs.samples), self.outputs.shape[1:].numel()
        own = torch.zeros(count, width, dtype=torch.float64)
        for places, squares in (self.squares or {}).values():
            own[places] = squares
        told = self.reduction.each(lambda: own)
        # A rank without samples does not know how many entries there are.
        every = torch.cat([part for part in told if len(part)] or told)
        return every / every.sum(1, keepdim=True).clamp(min=torch.finfo(every.dtype).tiny)

    def copes(self, plan: Plan) -> bool:
        return self.survey.copes(plan)

    def measure(self, chunk: Chunk) -> Refutation | None:
        self._lot, table = self.packing.packs[chunk.index]
        self._table = table[:, chunk.first : chunk.first + chunk.batch.size]
        self.send(chunk, self._columns(chunk))
        return None

    def _columns(self, chunk: Chunk) -> Tensor:
        """The chosen directions, (D, n, …), each times the root of its weight.

        They are those of the outputs of the survey: a sample's outputs may round otherwise in other
        company, and rank otherwise.
        """
        pairs, at, none = self.pairs, self._table.clamp(min=0), self._table < 0
        rows = pairs.samples[self._table[0]].to(self.outputs.device)
        insist_on_order(beside_largest(self.outputs[rows]), beside_largest(chunk.outputs))
        which = pairs.directions[at].masked_fill(none, -1).to(rows.device)
        columns = self.survey.side().chosen(which, rows)
        root = pairs.weights[at].sqrt().to(columns)
        columns = columns * root.reshape(*root.shape, *[1] * (columns.ndim - 2))
        if self.squares is not None:
            squares = columns.detach().cpu().double().square().flatten(2)
            self.squares[len(self.squares)] = self._table[~none], squares[~none]
        return columns


def gathered(done: PairPass, count: int) -> dict[tuple[Kind, str], Tensor]:
    """What came of all pairs, in the order of samples, of which there are so many here."""
    keys = done.keys
    told = done.reduction.each(lambda: [done.part(key, count) for key in keys])
    return dict(zip(keys, (torch.cat(each) for each in zip(*told, strict=True)), strict=True))


@final
class Leading:
    """What the largest direction of every sample gives, and what it and a mix of all others tell of
    these."""

    def __init__(self, survey: Survey, sizes: Tensor) -> None:
        both = gathered(survey, 2 * survey.own)
        self.parts = {key: y[::2] for key, y in both.items()}
        whole = {key: lots[0] for key, lots in survey.whole.items()}
        self.whole = survey.reduction.totals(whole, survey.risk.device)
        size, self.direction = sizes.max(1)
        self.sizes = self._others(sizes)
        # ‖Jᵀu‖²/|u|² of every sample, of every block and of all of them.
        self.ratios = {key: (y / size).nan_to_num(0, 0, 0) for key, y in self.sums(self.parts)}
        self.means = {key: float(y.sum() / size.sum()) for key, y in self.sums(self.parts)}
        mixes = dict(self.sums({key: y[1::2] for key, y in both.items()}))
        self.mixes = self._relative(mixes.items())
        # A mix has on average what all other directions of its sample give, and no more noise than
        # a square of a Gaussian number: 2 E² of a mean E, of which the leading direction tells.
        rest = self.sizes.sum(1)
        self.mixed = {
            k: (float(y.sum()), sqrt(2 * float(y @ (self.ratios[k] * rest))))
            for k, y in mixes.items()
        }

    def _relative(self, numbers: Iterable[tuple[tuple[Kind, str], Tensor]]) -> Tensor:
        """Of every sample, by what a size gives on average, in the block where that is largest."""
        most = torch.zeros_like(self.sizes[:, 0])
        for key, each in numbers:
            if self.means[key] > 0:
                most = torch.maximum(most, each / self.means[key])
        return most

    @staticmethod
    def sums(parts: Mapping[tuple[Kind, str], Tensor]) -> Iterator[tuple[tuple[Kind, str], Tensor]]:
        """The numbers of every block, and under the name "" those of all of them."""
        yield from parts.items()
        for kind in sorted({kind for kind, _ in parts}):
            yield (kind, ""), torch.stack([y for (k, _), y in parts.items() if k == kind]).sum(0)

    def _others(self, sizes: Tensor) -> Tensor:
        return sizes.scatter(1, self.direction[:, None], 0.0)

    def importance(self, sizes: Tensor) -> Tensor:
        """These sizes, but for the largest directions, each times the ratio of its sample, relative
        to that of all samples, in the block where that is largest: a sample with next to nothing in
        its outputs may have much in a block. Where the mix of the others gave far more than that,
        any of them may have given it."""
        ratios = self._relative(self.ratios.items()).clamp_(min=_LEAST_RATIO)
        expected = self._others(sizes) * ratios[:, None]
        surprising = self.mixes > SURPRISE * expected.sum(1)
        anything = torch.where(self.sizes > 0, self.mixes[:, None], 0.0)
        return torch.where(surprising[:, None], torch.maximum(expected, anything), expected)

    def variances(self, importance: Tensor, threshold: float) -> dict[tuple[Kind, str], float]:
        """Those of the estimates for pairs below a threshold, if all directions of a sample had its
        ratio. This has the pairs in it that are not drawn too."""
        below = importance < threshold
        size, important = self.sizes * below, importance * below
        odds = (threshold / important - 1).nan_to_num(0, 0, 0)
        squares = (odds * size.square()).sum(1)
        mixed, others = (odds * size * important).sum(1), (odds * important.square()).sum()
        whole = float(important.sum()) or 1.0
        found = {}
        for key, ratio in self.ratios.items():
            mean = float((ratio * size.sum(1)).sum()) / whole
            variance = ratio.square() @ squares - 2 * mean * (ratio @ mixed) + mean**2 * others
            found[key] = max(0.0, float(variance))
        return found


@final
class Drawn:
    """The estimates that a pass over chosen pairs gives."""

    def __init__(
        self,
        done: PackedPass,
        pairs: Pairs,
        parts: Mapping[tuple[Kind, str], Tensor],
        leading: Leading,
        scale: float,
    ) -> None:
        self.done, self.pairs, self.scale = done, pairs, scale
        self.drawn = pairs.drawn
        self.count = int(self.drawn.sum())
        self.spared = 1 - self.pairs.chances[self.drawn]
        self.parts = {key: each / scale for key, each in Leading.sums(parts)}
        self.leading = {k: float(y.sum()) / scale for k, y in Leading.sums(leading.parts)}
        self.least = dict.fromkeys(self.parts, 0.0)  # variances
        self._variances: dict[tuple[Kind, str], tuple[float, float]] = {}
        self.whole, self.mixed = leading.whole, leading.mixed
        lots = {(*key, lot): x for key, whole in done.whole.items() for lot, x in whole.items()}
        self.lots = done.reduction.totals(lots, done.risk.device)

    def bound(self, variances: Mapping[tuple[Kind, str], float], tolerance: float) -> None:
        """Let no error be less than these variances say, or than a small part of the tolerance."""
        for key, variance in variances.items():
            finest = _FINEST * tolerance * self._total(key)
            self.least[key] = max(variance / self.scale**2, finest**2)

    def error(self, key: tuple[Kind, str]) -> tuple[float, float]:
        """The standard error of a block's sum over pairs, and its degrees of freedom."""
        total, degrees = self._variance(key)
        return sqrt(max(total, self.least[key])), degrees

    def _variance(self, key: tuple[Kind, str]) -> tuple[float, float]:
        if key in self._variances:
            return self._variances[key]
        y = self.parts[key][self.drawn]
        terms = self.spared * (y - y.mean()).square() * (self.count / (self.count - 1))
        total = float(terms.sum())
        degrees = 2 / float((terms / total).square().sum()) if total > 0 else inf
        self._variances[key] = max(0.0, total), degrees
        return self._variances[key]

    def _total(self, key: tuple[Kind, str]) -> float:
        return float(self.parts[key].sum()) + self.leading[key]

    def within(self, tolerance: float) -> bool:
        return all(self.error(key)[0] <= tolerance * self._total(key) for key in self.parts)

    def noise(self) -> float:
        """By how much of their block's value a ratio varies, in the block where that is most."""
        most = 0.0
        for key, y in self.parts.items():
            if (total := self._total(key)) > 0 and self.count > 1:
                more = max(1.0, self.least[key] / (self._variance(key)[0] or inf))
                ratios = y[self.drawn] / self.pairs.unit
                most = max(most, float(ratios.std()) * sqrt(more) / total)
        return most

    def hides(self) -> bool:
        """Whether all mixes together gave far more than is estimated of what they are made of."""
        return any(
            total / self.scale - float(self.parts[key].sum())
            > _FAR * (noise / self.scale + self.error(key)[0])
            for key, (total, noise) in self.mixed.items()
        )

    def _draws(self, whole: Tensor, lots: Tensor, more: float) -> Tensor:
        """Independent estimates, one a group of the drawn pairs, by the groups' sums.

        They scatter about their mean, the value, as the estimate does about the truth; `more` of
        blocks that have errors larger than what was drawn tells.
        """
        folds = self.pairs.folds
        sizes = torch.bincount(self.pairs.groups[self.drawn], minlength=folds) / self.count
        share = sizes.to(lots).reshape(-1, *[1] * (lots.ndim - 1))
        shrink = sqrt(float(self.spared.mean()) * self.count / (self.count - 1))
        spread: Tensor = lots - share * lots.sum(0)
        return whole + folds * shrink * more * spread

    def _grouped(self, kind: Kind, name: str) -> tuple[Tensor, Tensor]:
        """A block's value, and the sums of its groups."""
        if kind not in WHOLE:
            y = self.parts[kind, name]
            lots = torch.zeros(self.pairs.folds, dtype=torch.float64)
            lots.index_add_(0, self.pairs.groups[self.drawn], y[self.drawn])
            return y.sum() + self.leading[kind, name], lots
        zeros, places = self.done.zeros(kind, name).cpu(), range(1 + self.pairs.folds)
        found = [self.lots.get((kind, name, lot), zeros).cpu() for lot in places]
        lots = torch.stack(found) / self.scale
        first = self.whole.get((kind, name), zeros).cpu() / self.scale
        return first + lots.sum(0), lots[1:]

    def quantity(self, kind: Kind) -> Quantity:
        result = Quantity({}, sizes=(1,) * self.pairs.folds)
        names = [name for name, wanted in self.done.requests.items() if kind in wanted]
        if kind == "magnitude":  # of what nothing is negative in
            result.values = {name: self.done.zeros(kind, name).cpu() for name in names}
            return result
        added = _ADDED.get(kind, kind)
        for name in names:
            value, lots = self._grouped(kind, name)
            stderr, degrees = self.error((added, name))
            more = stderr / (sqrt(self._variance((added, name))[0]) or inf)
            draws = self._draws(value, lots, max(1.0, more))
            result.values[name], result.draws[name] = value, draws
            result.errors[name] = mean_error(draws, result.sizes)[1]
            if kind not in WHOLE:
                result.errors[name] = torch.tensor(stderr, dtype=torch.float64)
                result.freedom[name] = degrees
        result.total_stderr, result.total_degrees = self.error((added, ""))
        return result


@final
class Pilot:
    """What a pass over few pairs tells: which entries of the outputs have large ratios, and by how
    much the ratios vary.

    The ratio of a direction is taken for the mean of what its entries gain, by their shares of its
    squares. Gains that explain the ratios of the pilot are found by steps that keep them positive
    (those of Richardson and Lucy): an entry that gains much makes the ratios of all directions
    large that it is in, but those without it tell that the others do not.
    """

    def __init__(self, drawn: Drawn, leading: Leading) -> None:
        self.drawn, every = drawn, drawn.done.shares()
        ratios = torch.zeros(len(every), dtype=torch.float64)
        for key, y in drawn.parts.items():
            if (mean := leading.means[key] / drawn.scale) > 0:
                ratios = torch.maximum(ratios, y / mean)
        self.gains = torch.ones(every.shape[1], dtype=torch.float64)
        told = (drawn.pairs.groups == 1) & (every.sum(1) > 0)
        shares, ratios = every[told], ratios[told]
        least = shares.new_full((), torch.finfo(shares.dtype).tiny)
        back = (shares / shares.sum(0).clamp(min=least)).mT.contiguous()
        for _ in range(_STEPS):
            self.gains *= back @ (ratios / torch.addmv(least, shares, self.gains))
        self.gains.clamp_(min=1.0)
        self.gained = every @ self.gains

    def noise(self, low: float, high: float) -> float:
        """As that of what was drawn; `low` and `high` are the importance of all pairs below and
        above the threshold."""
        below = self.drawn.drawn & (self.drawn.pairs.groups == 0)
        above = ~self.drawn.drawn & (self.drawn.pairs.groups == 0)
        gains, most = self.gained[below], 0.0
        for key, y in self.drawn.parts.items():
            total = self.drawn.leading[key]
            for weight, at in ((low, below), (high, above)):
                total += weight * float(y[at].mean()) if bool(at.any()) else 0.0
            if total > 0 and int(below.sum()) > 1:
                mean = y[below].sum() / gains.sum()
                variance = (gains * (y[below] / gains - mean).square()).sum() / gains.sum()
                most = max(most, sqrt(float(variance)) / total)
        return most


@final
@dataclass(slots=True)
class AdaptiveRank:
    """The search for a threshold that keeps a tolerance, and the passes that it takes."""

    risk: Risk
    loss: Loss
    settings: Settings
    weights: Mapping[str, Weight]
    requests: Requests
    plan: Plan
    seed: int
    hessian: bool
    folds: int  # groups of the drawn pairs, whose sums tell errors
    spent: float = field(default=0.0, init=False)  # of the price of a sweep
    sent: int = field(default=0, init=False)  # pairs, of so many
    pairs: int = field(default=0, init=False)
    samples: int = field(default=0, init=False)
    rules: dict[str, set[str]] = field(default_factory=dict, init=False)

    @property
    def kinds(self) -> frozenset[Kind]:
        return frozenset[Kind]().union(*self.requests.values())

    def run(self, stream: Iterable[Batch]) -> Drawn | Refutation | str:
        """Estimates within the tolerance; or why a sweep is no dearer."""
        parts: tuple[Any, ...] = self.risk, self.loss, self.requests, self.settings, self.weights
        apart = bool(self.kinds & WHOLE)
        survey = Survey(*parts, must_be_linear=self.hessian, seed=self.seed, apart=apart)
        if refutation := survey.run(stream, self.plan):
            return refutation
        told = self.risk.reduction.each(
            lambda: (
                survey.unsuited,
                [
                    (sizes, f.entries().int().cpu())
                    for sizes, f in zip(survey.found, survey.factors, strict=True)
                ],
            )
        )
        if reasons := [unsuited for unsuited, _ in told if unsuited]:
            return reasons[0]
        self.samples, every = survey.samples, [each for _, parts in told for each in parts]
        if len({each.shape[1] for each, _ in every}) != 1:
            return "samples have unlike numbers of directions"
        sizes, entries = (torch.cat(each) for each in zip(*every, strict=True))
        self.pairs = sizes.numel()
        if sizes.numel() < 8 * sum(_PILOT):
            return f"there are only {sizes.numel()} pairs of a sample and a direction"
        if float(sizes.sum()) == 0:
            return "the outputs have no curvature"
        return self._search(survey, sizes, entries)

    def _search(self, survey: Survey, sizes: Tensor, entries: Tensor) -> Drawn | Refutation | str:
        leading, scale = Leading(survey, sizes), divisor(self.loss, survey.normaliser)
        self.sent, self.rules = len(sizes), {n: set(r) for n, r in survey.rules.items()}
        importance, noise = leading.importance(sizes), _GUESS / float(sizes.sum())
        sent = Sent(sizes.shape[1])
        # What is less has no length in the numbers' type.
        like = next(iter(self.risk.parameters.values()))
        least = torch.finfo(like.dtype).tiny ** 1.5
        for attempt in range(1 + _ROUNDS):
            if not isfinite(float(importance.sum())):
                return "some directions are beyond the range of numbers"
            population = Population(importance)
            aim = _AIM * 0.8 ** max(0, attempt - 1)  # further below, once it was missed
            threshold = population.threshold(noise, aim * self.settings.tolerance)
            if threshold == 0 or not self._worth(importance, threshold, attempt):
                return "so many directions matter that to choose among them saves too little"
            key = threshold, self.folds, self.seed
            pairs = choose(importance, *key) if attempt else pilot(importance, entries, least, *key)
            done = self._pass(survey, pairs, sent, attempt > 0)
            if isinstance(done, Refutation):
                return done
            estimate = Drawn(done, pairs, sent.of(pairs), leading, scale)
            if attempt == 0:
                told = Pilot(estimate, leading)
                noise = told.noise(*population.halves(threshold))
                importance = leading.importance(survey.sizes(told.gains))
                continue
            estimate.bound(leading.variances(importance, threshold), self.settings.tolerance)
            if estimate.within(self.settings.tolerance):
                return _HIDDEN if estimate.hides() else estimate
            noise = estimate.noise()
        return "the tolerance was missed again and again"

    def _worth(self, sizes: Tensor, threshold: float, attempt: int) -> bool:
        """Whether a pass is worth its price, which is then spent; that of a pilot is small."""
        chances = (sizes / threshold).clamp(max=1)
        touched = float(1 - (1 - chances).prod(1).mean())
        each = direction_price(self.kinds)
        price = FORWARD * touched + each * float(chances.sum(1).mean())
        spent = self.spent + price / (each * sizes.shape[1])
        self.spent = spent if attempt else 0.0
        return spent <= _WORTH

    def _pass(
        self, survey: Survey, pairs: Pairs, sent: Sent, final: bool
    ) -> PackedPass | Refutation:
        """One pass over chosen pairs, but those that are known; a pilot makes numbers alone."""
        apart = final and bool(self.kinds & WHOLE)
        pairs = pairs if apart else pairs.where(sent.unknown(pairs))
        self.sent += len(pairs.samples)
        first = self.risk.offset
        own = pairs.among(range(first, first + survey.own))
        packing = Packing(own, apart)
        parts: tuple[Any, ...] = self.risk, self.loss, self.requests, self.settings, self.weights
        done = PackedPass(*parts, survey=survey, pairs=own, packing=packing, apart=apart)
        done.squares = None if final else {}
        # Gathered samples are elsewhere in their batch than those that were looked at.
        plan = replace(self.plan, places=())
        if refutation := done.run(packing.batches(self.risk), plan):
            return refutation
        sent.add(pairs, gathered(done, len(own.samples)))
        for name, rules in done.rules.items():
            self.rules.setdefault(name, set()).update(rules)
        return done
