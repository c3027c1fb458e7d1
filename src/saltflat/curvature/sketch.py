"""Draws of curvature with noise of their own for every sample, until their error is small.

H = G + R: the Gauss–Newton part, which comes from the loss's Hessian, and the rest, which comes
from the curvature of the network. G is swept over exactly where a sample has few directions, and
drawn by a random mix of them otherwise. R is drawn in one of two ways, block by block: as
propagated curvature (`propagated`) or by probes of the activations (`activation`). Neither is
better everywhere, so a pilot of a few draws on some samples compares their variances; its draws are
thrown away.

*Errors.* Each sample's draws have a spread, and the variance of the whole is the sum of the
samples' variances: how the samples differ from each other is no error. The degrees of freedom of
that sum (Welch–Satterthwaite) are few where few samples carry the variance.

*Stopping.* Draws go on to the next of the checkpoints fixed beforehand until every block's error is
within its tolerance, or the budget is spent. An error that is small by chance would stop them
early, so it is an upper bound on it that has to be: at the j-th checkpoint one of probability
1 − 0.1/2ʲ.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf, log, log1p, sqrt
from statistics import fmean
from typing import final

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from saltflat.curvature.activation import ProbedChunk
from saltflat.curvature.contractions import Term, Weight
from saltflat.curvature.estimators import (
    ActivationProbes,
    Draws,
    OwnNoise,
    Quantity,
    Signs,
    degrees_of_freedom,
    group_sizes,
    mixed,
)
from saltflat.curvature.loss_hessian import factor, insist_on_derivatives, lacks_derivative
from saltflat.curvature.plan import GENERIC, UNUSED, Plan, Refutation, Settings, in_place_writes
from saltflat.curvature.propagated import Operation, Sources, curved_graph, operations, sources
from saltflat.curvature.spread import Spread
from saltflat.curvature.sweep import (
    Chunk,
    Kind,
    Pass,
    Requests,
    insist_on_order,
    joinable,
    live_uses,
    looks,
    reduce,
    send,
    slope,
)
from saltflat.distributed import Reduction
from saltflat.losses import Loss, divisor
from saltflat.risk import Batch, Risk, join

NOTHING: frozenset[str] = frozenset()
# Traces are kept sample by sample, and the noise of draws is no rounding; all else is summed.
_TRACES: frozenset[Kind] = frozenset({"trace", "magnitude"})


@final
@dataclass(frozen=True, slots=True)
class Sketch:
    """What is drawn: the loss's part, and the rest of some blocks in one way or the other."""

    seed: int
    draws: range
    loss: bool
    hessian: bool = False
    propagated: frozenset[str] = NOTHING
    probed: frozenset[str] = NOTHING
    scales: Mapping[str, float] = field(default_factory=dict)  # of the probes' noise, by block
    price: float = 0.0  # of a draw, in gradients
    top: int = 0  # of the loss's part, the likeliest classes that are not drawn
    settled: Settled | None = None  # samples that have nothing to draw


@final
@dataclass(frozen=True, slots=True)
class Settled:
    """Samples that would carry so much of a block's variance that all of their directions are sent.

    How a sample's few draws scatter tells little of their error where these are a few squares of
    random numbers: when they are small, so is what they scatter by. The error of a sum over samples
    is known well for there being many, of which none matters much. Which samples would is told by
    what the directions of their likeliest classes gave, or by mixes of the others where these gave
    far more than that. These are thrown away, so that nothing is biased by the choice.
    """

    places: Tensor  # in all data, in order
    looks: Tensor  # of their outputs

    @staticmethod
    def of(left: Tensor, looks: Tensor) -> Settled:
        """Those to be settled, if so much, (samples, blocks), is left of all of them to be drawn.

        Of every block and of the sum of all, the largest one by one, until none has too much of
        the squares of those that are left; and again, as those of one block are gone from all.
        """
        left = torch.cat([left, left.sum(1, keepdim=True)], 1).double()
        settled = torch.zeros(len(left), dtype=torch.bool)
        while True:
            squares, order = left.square().sort(0, descending=True)
            tails = squares.flip(0).cumsum(0).flip(0)
            chosen = order[(squares > _SETTLED * tails).cumprod(0).bool()]
            if not len(chosen):
                return Settled(settled.nonzero().flatten(), looks[settled])
            settled[chosen] = True
            left[chosen] = 0.0

    def are_many(self, samples: int) -> bool:
        """Whether they are too many of all samples for draws of the others to be worth it.

        To leave some of them out would be worse than to settle none: one that is left dominates
        what is drawn all the more.
        """
        return len(self.places) > _MOST_SETTLED * samples

    def batches(self, risk: Risk, start: int) -> Iterator[Batch]:
        """Those here, gathered; `start` is the place of the first sample here."""
        parts = list[Batch]()
        for batch in risk.batches():
            rows = self.places[self.among(range(start, start + batch.size))] - start
            start += batch.size
            if not len(rows):
                continue
            part = batch.take(rows.tolist())
            if parts and (not joinable(parts[0], part) or sum(b.size for b in parts) >= _ROWS):
                yield join(parts)
                parts = []
            parts.append(part)
        if parts:
            yield join(parts)

    def among(self, samples: range) -> Tensor:
        """Which of them are among some samples."""
        return (self.places >= samples.start) & (self.places < samples.stop)

    def rows(self, chunk: Chunk) -> Tensor:
        """Where they are in a chunk."""
        here = self.among(range(chunk.place, chunk.place + chunk.batch.size))
        rows = (self.places[here] - chunk.place).to(chunk.outputs.device)
        self.insist(here, [looks(chunk.outputs[rows])])
        return rows

    def insist(self, here: Tensor, seen: Sequence[Tensor]) -> None:
        """Refuse samples that are not those that were chosen."""
        if bool(here.any()):
            insist_on_order(self.looks[here], torch.cat([*seen]))


@final
@dataclass
class SketchPass(Pass):
    """Draws of every chunk. `traces` holds (draws, samples) for every block, `sums` the rest."""

    sketch: Sketch = field(kw_only=True)
    traces: dict[str, dict[int, Tensor]] = field(default_factory=dict)  # by block, first sample
    shiftless: set[str] = field(default_factory=set)  # probed blocks that probes cannot serve

    def run(self, batches: Iterable[Batch], first: Plan | None = None) -> Refutation | None:
        # The noise of a sample depends on its place in all data, not on its rank or batch.
        self._offset = 0 if self.alone else self.risk.offset
        return super().run(batches, first)

    def copes(self, plan: Plan) -> bool:
        """Blocks whose rest is not drawn must have none, if the Hessian is asked for."""
        drawn = self.sketch.propagated | self.sketch.probed
        linear = self.requests.keys() - drawn
        return not self.sketch.hessian or all(map(plan.allows, linear))

    def chunk_size(self, plan: Plan, batch: Batch) -> int:
        """How many samples fit: the graph, the operations' factors, a draw's noise and outputs.

        All of that is gone through once a draw, so that no chunk stays near a processor's cache.
        """
        entries = 10 * (plan.inputs + plan.activations) + 6 * plan.outputs.numel()
        sizes = (self.risk.parameters[n].numel() for n in self._written() if n in plan.matrices)
        entries += 4 * max(sizes, default=0)
        budget = self.risk.agreed(self.settings.budget(self.risk.device, weights=1 << 40))
        most = max(1, budget // max(1, plan.width * entries))
        return -(-batch.size // -(-batch.size // most))

    def commit(self, key: tuple[Kind, str], value: Tensor) -> None:
        if key[0] == "trace":
            self.traces.setdefault(key[1], {})[self.samples - value.shape[1]] = value.cpu()
        else:
            super().commit(key, value)

    def trace(self, name: str) -> Tensor:
        """(draws, samples here), not divided by the loss's normaliser; 0 where nothing arrived."""
        whole = torch.zeros(len(self.sketch.draws), self.own, dtype=torch.float64)
        for start, part in self.traces.get(name, {}).items():
            whole[:, start : start + part.shape[1]] = part
        return whole

    def drawn(self, kind: Kind, name: str) -> Tensor:
        """Sums over samples, (draws, …), not divided either."""
        if (kind, name) in self.sums:
            return self.sums[kind, name]
        return torch.stack([self.zeros(kind, name)] * len(self.sketch.draws))

    def measure(self, chunk: Chunk) -> Refutation | None:
        sketch, plan = self.sketch, chunk.plan
        # What is unused here sends nothing to any operation.
        unused = frozenset(name for name, rule in plan.rules.items() if rule == UNUSED)
        propagated, probed = sketch.propagated - unused, sketch.probed - unused
        curved = propagated | probed
        lost = frozenset(name for name in curved if plan.rules[name] == GENERIC)
        live = live_uses(chunk.uses, plan, frozenset(self.requests))
        leaves = self.risk.leaves
        parameters = {n: leaves[n] for n in curved - lost}
        writes = in_place_writes(self.risk, chunk.batch)
        lost |= curved_graph(chunk.outputs, parameters, live, writes).unserved
        if lost:
            return Refutation(unserved=lost)
        built: list[Operation] = []
        probes: ProbedChunk | None = None
        if curved:
            gradient = slope(self.loss, chunk)
            own = {n: leaves[n] for n in propagated}
            graph = curved_graph(chunk.outputs, own, live, writes)
            built = operations(graph, chunk.outputs, gradient)
            if probed:
                insist_on_derivatives(chunk.outputs, (leaves[n] for n in probed))
                places = [(use, chunk.rows(use)) for use in live]
                probes = ProbedChunk(chunk.outputs, gradient, places, probed, self._written())
                used = {name for use in live for name in use.names.values()}
                self.shiftless |= (probed & used) - probes.shifts.keys()
                if self.shiftless:
                    return Refutation(unserved=frozenset(self.shiftless))
        self._draws(chunk, built, probes)
        return None

    def _draws(self, chunk: Chunk, built: list[Operation], probes: ProbedChunk | None) -> None:
        sketch = self.sketch
        sides = None
        if sketch.loss:
            sides = factor(self.loss, chunk.outputs, chunk.batch, sketched=True, top=sketch.top)
        settled = None if sketch.settled is None else sketch.settled.rows(chunk)
        everything = frozenset(self.requests)
        for k, draw in enumerate(sketch.draws):
            size, outputs = chunk.batch.size, chunk.outputs.detach()
            signs = Signs(outputs, size, chunk.place, sketch.seed, 0, draw)
            loss: tuple[Tensor, Tensor | None] | None = None
            if sides is not None:
                loss = sides.sketch(signs(outputs.shape))
                if settled is not None:
                    loss[0][:, settled] = 0.0
            if built:
                self._send(chunk, k, sources(built, signs), loss, everything - sketch.probed)
            if loss is not None:
                self._send(chunk, k, Sources(2), loss, sketch.probed if built else everything)
            if probes is not None:
                self._probe(probes, k, signs, size)
            self.risk.work.add(size, sketch.price)

    def _probe(self, probes: ProbedChunk, k: int, signs: Signs, samples: int) -> None:
        written, everyone = self._written(), slice(None)
        with torch.no_grad():
            for name, probe in probes.draw(signs, self.sketch.scales):
                if name in written:
                    sign = _plus_minus(probe.image, samples)
                    self._reduce(name, k, probe.term(), sign, everyone, samples)
                else:
                    self._add("trace", name, k, probe.traces(), everyone, samples)

    def _written(self) -> frozenset[str]:
        """The probed blocks of which more than the trace is asked for."""
        return frozenset(n for n in self.sketch.probed if self.requests[n] - _TRACES)

    def _send(
        self,
        chunk: Chunk,
        k: int,
        places: Sources,
        loss: tuple[Tensor, Tensor | None] | None,
        names: frozenset[str],
    ) -> None:
        """Send one draw down, and square what arrives at some blocks."""
        if not names:
            return
        n, outputs = chunk.batch.size, chunk.outputs
        sign = _plus_minus(outputs, n)
        if loss is not None:
            columns, signs = loss
            second = columns[1] if signs is not None else torch.zeros_like(columns[0])
            places.add(get_gradient_edge(outputs), (columns[0], second))
            if signs is None and len(places.edges) == 1:
                places.cotangents.pop()
        sign = sign[: len(places.cotangents)]
        live = live_uses(chunk.uses, chunk.plan, names)
        kept = send(places.edges, places.cotangents, live, [chunk.rows(use) for use in live])
        with torch.no_grad():
            for name, term in self.terms(chunk, live, kept, names):
                self._reduce(name, k, term, sign, slice(None), n)
        written = [name for name in names if chunk.plan.rules[name] == GENERIC]
        if loss is not None and written:
            for rows, name, term in self.generic_terms(chunk, loss[0], written):
                part = None if loss[1] is None else loss[1][:, rows]
                self._reduce(name, k, term, part, rows, n)

    def _reduce(
        self, name: str, k: int, term: Term, sign: Tensor | None, rows: slice, samples: int
    ) -> None:
        wanted, weight = self.requests[name] - _TRACES, self.weights.get(name)
        traces = term.direction(0).traces(None)
        if sign is not None and len(sign) > 1:
            traces = traces - term.direction(1).traces(None)
        self._add("trace", name, k, traces, rows, samples)
        for kind, value in reduce(term, wanted, weight, sign):
            self._add(kind, name, k, value)

    def _add(
        self,
        kind: Kind,
        name: str,
        k: int,
        value: Tensor,
        rows: slice | None = None,
        samples: int = 0,
    ) -> None:
        """Into draw k of what is pending: at some samples, or as a sum over all of them."""
        shape = value.shape if rows is None else (samples,)
        if (kind, name) not in self.pending:
            empty = torch.zeros(
                len(self.sketch.draws), *shape, dtype=torch.float64, device=value.device
            )
            self.pending[kind, name] = empty
        draw = self.pending[kind, name][k]
        (draw if rows is None else draw[rows]).add_(value)


def _plus_minus(like: Tensor, samples: int) -> Tensor:
    """The signs of two directions, (2, samples)."""
    return like.new_tensor([[1.0], [-1.0]]).expand(2, samples)


@final
class Tally:
    """The draws of some blocks: of traces each sample's moments, of all else each draw's sum."""

    def __init__(self, names: Iterable[str], known: Mapping[tuple[Kind, str], Tensor]) -> None:
        self.names, self.known = list(names), known  # `known`: the part that is not drawn
        self.count = self.samples = 0
        self.scale = 1.0
        self.mean: dict[str, Tensor] = {}  # of the samples here
        self.spread: dict[str, Tensor] = {}
        # Of all samples: the sums of means, of spreads, and of the squares of the spreads' shares.
        self.whole: dict[str, tuple[float, float, float]] = {}
        self.sums: dict[str, list[Tensor]] = {}  # of traces, draw by draw
        self.alike = False  # whether samples are all here, and count alike
        self.others: dict[Kind, Draws] = {}

    def add(self, done: SketchPass, groups: int) -> None:
        """The draws of one more pass over all samples."""
        self.scale = divisor(done.loss, done.normaliser)
        self.alike = done.even and done.loss.mean and done.reduction.ranks == 1
        traces = {name: done.trace(name) for name in self.names}
        traces[_ALL] = torch.stack(list(traces.values())).sum(0)
        fresh = len(done.sketch.draws)
        both = self.count + fresh
        for name, values in traces.items():
            mean = values.mean(0)
            spread = (values - mean).square().sum(0)
            if self.count:
                change = mean - self.mean[name]
                spread += self.spread[name] + change.square() * self.count * fresh / both
                mean = self.mean[name] + change * fresh / both
            self.mean[name], self.spread[name] = mean, spread
        self._add_up(traces, done.reduction)
        for kind in frozenset[Kind]().union(*done.requests.values()) - _TRACES:
            draws = self.others.setdefault(kind, Draws(groups))
            names = [name for name in self.names if kind in done.requests[name]]
            sums = {name: done.drawn(kind, name).cpu() / self.scale for name in names}
            for k in range(fresh):
                draws.add({n: sums[n][k] + self.known.get((kind, n), 0.0) for n in names})
        self.count, self.samples = both, done.samples

    def _add_up(self, traces: Mapping[str, Tensor], reduction: Reduction) -> None:
        """Over the samples of all ranks."""
        cpu = torch.device("cpu")
        both = {n: torch.stack([self.mean[n].sum(), self.spread[n].sum()]) for n in traces}
        sums = reduction.totals(
            {n: torch.cat([both[n], values.sum(1)]) for n, values in traces.items()}, cpu
        )
        shares = {n: self.spread[n] / (total[1] or 1.0) for n, total in sums.items()}
        squares = reduction.totals({n: each.square().sum() for n, each in shares.items()}, cpu)
        for name, total in sums.items():
            self.whole[name] = float(total[0]), float(total[1]), float(squares[name])
            self.sums.setdefault(name, []).append(total[2:])

    def error(self, name: str) -> tuple[float, float]:
        """The standard error of a block's trace, and its degrees of freedom."""
        _, spread, squares = self.whole[name]
        if spread == 0:
            return 0.0, inf
        variance = spread / (self.count - 1)
        return sqrt(variance / self.count) / self.scale, degrees_of_freedom(self.count) / squares

    def value(self, name: str) -> float:
        drawn = self.whole[name][0] / self.scale
        return drawn + float(self.known.get(("trace", name), 0.0))

    def quantity(self, kind: Kind, groups: int) -> Quantity:
        if kind != "trace":
            return self.others[kind].quantity()
        errors = {name: self.error(name) for name in self.names}
        stderr, degrees = self.error(_ALL)
        draws = {}
        if groups:
            for name in self.names:
                sums = torch.cat(self.sums[name])
                each = torch.stack([sums[k::groups].mean() for k in range(groups)]) / self.scale
                draws[name] = each + float(self.known.get(("trace", name), 0.0))
        return Quantity(
            {n: torch.tensor(self.value(n), dtype=torch.float64) for n in self.names},
            draws,
            group_sizes(self.count, groups) if groups else (),
            errors={n: torch.tensor(e, dtype=torch.float64) for n, (e, _) in errors.items()},
            freedom={n: d for n, (_, d) in errors.items()},
            total_stderr=stderr,
            total_degrees=degrees,
            spread=self._samples(),
        )

    def _samples(self) -> Spread | None:
        """How the samples' parts vary, draws and all; None where they do not count alike, or where
        a part of them is not drawn."""
        if not self.alike or self.known:
            return None
        spread = Spread(tuple(self.names))
        spread.add(self.samples, {name: self.mean[name] for name in self.names})
        return spread.scaled(self.samples / self.scale)


_ALL = ""  # stands for the sum over all blocks; no parameter is called so


_FIRST_DRAWS, _GROWTH = 8, 1.5


def checkpoint(draws: float, first: int) -> int:
    """The number of the checkpoint, first · 1.5^k, that so many draws reach."""
    return 1 + max(0, ceil(log(draws / first, _GROWTH) - 1e-9)) if draws > 0 else 1


def bounded(stderr: float, degrees: float, place: int) -> float:
    """An upper bound on a standard error that was estimated, to stop at a checkpoint by."""
    from scipy.stats import chi2

    if stderr == 0:
        return 0.0
    return stderr * sqrt(degrees / float(chi2.ppf(0.1 / 2**place, degrees)))


# What things cost, in gradients over the same data: a look at the model with its checks and pilots,
# a direction of an exact sweep, a pass without draws, then each draw; of a probe more where the
# changes of weights are written out. Measured on language models.
_LOOK, _DIRECTION, _SETUP, _LOSS = 14.0, 0.4, 3.0, 1.2
_PROPAGATED, _PROBED, _WRITTEN = 4.0, 2.0, 4.0

# A sample with more directions than this has its loss's Hessian drawn, not swept over.
FEW_DIRECTIONS = 16

_PILOT_SAMPLES, _PILOT_DRAWS = 8, 2
_MOST_DRAWS = 4096
# A sample with more of a block's variance is not drawn; where these are a larger part of all
# samples, none is; and how many of them go together.
_SETTLED, _MOST_SETTLED, _ROWS = 0.1, 0.1, 1024
# Samples times draws: so few signs may agree by chance.
_LEAST_SIGNS = 64


@final
@dataclass(slots=True)
class Ways:
    """Which blocks' rest is drawn how, and what decided it."""

    propagated: frozenset[str]
    probed: frozenset[str] = NOTHING
    scales: Mapping[str, float] = field(default_factory=dict)
    ratios: Mapping[str, float] = field(default_factory=dict)  # variance of probes / propagated
    written: bool = False  # more than traces is asked for

    def cost(self, loss: bool) -> float:
        """Of one draw, in gradients."""
        probe = _PROBED + _WRITTEN * self.written
        cost = _PROPAGATED * bool(self.propagated) + probe * bool(self.probed)
        return cost + _LOSS * (loss and (bool(self.probed) or not self.propagated))

    def rule(self, name: str) -> str:
        """What draws a block's curvature."""
        if name in self.probed:
            return "activation probes"
        return "propagated" if name in self.propagated else "sketch"

    def reason(self, name: str) -> str:
        """Why that and not the other."""
        ratio = self.ratios.get(name)
        if ratio is None:
            return ""
        return f"; in a pilot, activation probes had {ratio:.2g} times the variance of propagated"


@final
@dataclass(slots=True)
class Estimation:
    """The draws of some blocks, from the first pilot to the last checkpoint.

    `known` is their Gauss–Newton part where `swept` directions gave it, or what belongs to the
    `top` likeliest classes and to `settled` samples; `elsewhere` is the trace of the blocks that
    others compute. `groups` of the draws are kept.
    """

    risk: Risk
    loss: Loss
    settings: Settings
    weights: Mapping[str, Weight]
    requests: Requests
    plan: Plan
    seed: int
    hessian: bool  # not the Gauss–Newton matrix
    curved: frozenset[str]  # blocks whose rest is drawn; that of the others must vanish
    groups: int
    known: Mapping[tuple[Kind, str], Tensor] = field(default_factory=dict)
    swept: float = 0
    elsewhere: float = 0.0
    fixed: OwnNoise | None = None  # the number of draws, and the way
    top: int = 0
    settled: Settled | None = None
    strict: bool = False  # within the tolerance, the sum of all blocks too, or not at all
    spent: float = field(default=_LOOK, init=False)  # gradients
    piloted: float = field(default=1.0, init=False)  # the share of the samples in pilots
    excess: dict[str, float] = field(default_factory=dict, init=False)  # errors over the tolerance

    def run(self) -> tuple[Tally, Ways] | Refutation | None:
        """Draw until all errors are within the tolerance, or the budget is spent.

        None if `strict` draws will not get there.
        """
        ways, gauss_newton = Ways(self.curved), dict[str, float]()
        if self.fixed is None or isinstance(self.fixed, ActivationProbes):
            few = self._few()
            rough = self._gauss_newton(few)
            if isinstance(rough, Refutation):
                return rough
            chosen = self._ways(few, rough)
            if isinstance(chosen, Refutation):
                return chosen
            ways, gauss_newton = chosen, rough
        self.spent += self.swept * _DIRECTION
        tally = Tally(self.requests, self.known)
        while (target := self._next(tally, ways, gauss_newton)) > tally.count:
            draws = range(tally.count, target)
            parts = ways.propagated, ways.probed, ways.scales, ways.cost(self._draws_loss)
            sketch = Sketch(self.seed, draws, self._draws_loss, self.hessian, *parts)
            sketch = replace(sketch, top=self.top, settled=self.settled)
            done, refutation = self._pass(sketch)
            if refutation is not None:
                return refutation
            self.spent += _SETUP + len(draws) * sketch.price
            self.risk.work.add(done.own, _SETUP)
            tally.add(done, self.groups)
            if self.fixed is None and self._enough(tally, gauss_newton, tally.count):
                return tally, ways
        if self.fixed is None:
            self.excess = self._excess(tally, gauss_newton)
        return None if self.strict else (tally, ways)

    def _excess(self, tally: Tally, gauss_newton: Mapping[str, float]) -> dict[str, float]:
        """Standard errors as multiples of what the tolerance allows, where they are more."""
        whole = sum(gauss_newton.values()) + self.elsewhere
        ratios = {
            name: tally.error(name)[0] / self._target(tally.value(name), gauss_newton[name], whole)
            for name in tally.names
        }
        return {name: ratio for name, ratio in ratios.items() if ratio > 1}

    def _next(self, tally: Tally, ways: Ways, gauss_newton: Mapping[str, float]) -> int:
        """How many draws there are to be at the next checkpoint; no more, if none are paid for.

        Checkpoints are fixed beforehand; those at which the draws will hardly do are passed over.
        """
        count, first, step = tally.count, self._first, self.groups or 1
        if count == 0:
            return self.fixed.draws if self.fixed is not None else first
        if tally.samples * count < _LEAST_SIGNS:
            return 2 * count
        if self.fixed is not None:
            return count
        left = self.settings.gradients - self.spent - _SETUP
        most = min(count + int(left / ways.cost(self._draws_loss)), _MOST_DRAWS)
        most -= most % step
        if self.strict and not self._enough(tally, gauss_newton, most):
            return count
        target, place = count, checkpoint(count, first)
        while target < most and (target == count or not self._enough(tally, gauss_newton, target)):
            target = min(max(target, ceil(first * _GROWTH**place / step) * step), most)
            place += 1
        return target if 4 * (target - count) >= count else count

    @property
    def _first(self) -> int:
        """How many draws there are at the first checkpoint."""
        return max(_FIRST_DRAWS, self.groups)

    @property
    def _written(self) -> bool:
        """Whether more than traces is asked for."""
        return any(self.requests[name] - _TRACES for name in self.curved)

    @property
    def _draws_loss(self) -> bool:
        """Whether the Gauss–Newton part is drawn too."""
        return not self.known or self.top > 0

    def _pass(
        self, sketch: Sketch, few: Iterable[Batch] | None = None
    ) -> tuple[SketchPass, Refutation | None]:
        """A pass over all samples, or over a few whose draws are thrown away."""
        parts = self.risk, self.loss, self.requests, self.settings, self.weights
        done = SketchPass(*parts, alone=few is not None, sketch=sketch)
        if few is None:
            return done, done.run(self.risk.batches())
        # Elsewhere in their batch than those that were looked at.
        return done, done.run(few, replace(self.plan, places=()))

    def _target(self, value: float, gauss_newton: float, whole: float) -> float:
        """The standard error that a block's trace may have."""
        tolerance = self.settings.tolerance
        return tolerance * max(abs(value), gauss_newton, whole / 5)

    def _enough(self, tally: Tally, gauss_newton: Mapping[str, float], draws: int) -> bool:
        """Whether with so many draws all errors, bounded, are within the tolerance.

        For more than there are: if the draws to come scatter as those before.
        """
        whole = sum(gauss_newton.values()) + self.elsewhere
        place, more = checkpoint(draws, self._first), draws / tally.count
        for name in tally.names:
            stderr, degrees = tally.error(name)
            target = self._target(tally.value(name), gauss_newton[name], whole)
            if bounded(stderr / sqrt(more), degrees * more, place) > target:
                return False
        if not self.strict:
            return True
        (stderr, degrees), total = tally.error(_ALL), sum(map(tally.value, tally.names))
        most = self.settings.tolerance * abs(total)
        return bounded(stderr / sqrt(more), degrees * more, place) <= most

    def _few(self) -> list[Batch]:
        """Some samples for a pilot."""
        few: list[Batch] = []
        wanted, whole = _PILOT_SAMPLES, None
        for batch in self.risk.opening(wanted):
            whole = whole or self.risk.whole(batch)
            few.append(batch.part(0, wanted))
            wanted -= few[-1].size
            if wanted <= 0:
                break
        piloted = sum(batch.size for batch in few)
        self.piloted = piloted / max(whole or 0, piloted)
        return few

    def _gauss_newton(self, few: list[Batch]) -> dict[str, float] | Refutation:
        """The Gauss–Newton part of every block's trace, roughly."""
        known = {name: float(self.known.get(("trace", name), 0.0)) for name in self.requests}
        if not self._draws_loss:
            return known
        sketch = Sketch(mixed(self.seed, 1), range(_PILOT_DRAWS), loss=True)
        sketch = replace(sketch, top=self.top, settled=self.settled)
        done, refutation = self._pass(sketch, few)
        if refutation is not None:
            return refutation
        scale = divisor(self.loss, done.normaliser)
        return {n: known[n] + float(done.trace(n).sum(1).mean()) / scale for n in self.requests}

    def _ways(self, few: list[Batch], gauss_newton: Mapping[str, float]) -> Ways | Refutation:
        """How the rest of the blocks is drawn: as was asked, or as a pilot decides."""
        names = self.curved
        propagated = Ways(names)
        if not names:
            return propagated
        draws, seed = range(_PILOT_DRAWS), mixed(self.seed, 2)
        one, refutation = self._pass(Sketch(seed, draws, False, False, names), few)
        if refutation is not None:
            return refutation
        scales = self._scales(gauss_newton)
        other = self._probed(few, Sketch(seed, draws, False, False, NOTHING, names, scales))
        if other is None or isinstance(other, Refutation):
            return propagated if other is None else other
        probed = other.sketch.probed
        if self.fixed is not None:
            return Ways(names - probed, probed, scales, written=self._written)
        return self._cheapest(one, other, gauss_newton)

    def _scales(self, gauss_newton: Mapping[str, float]) -> dict[str, float]:
        """How loud the probes' noise is in every block: √g / target, for Tr G = g.

        Probes of a block of size g at scale c, beside others of sizes g', have a variance of about
        g/c² Σ c'² g'; with these scales that is the same multiple of target² everywhere. Blocks
        that may have an error of many times their size are the quietest.
        """
        whole = sum(gauss_newton.values()) + self.elsewhere
        sizes = {n: abs(g) for n, g in gauss_newton.items()}  # a loss may curve down
        least = max(1e-6 * max(sizes.values(), default=0.0), 1e-30)
        scales = {
            n: sqrt(max(size, least)) / self._target(max(size, least), size, whole)
            for n, size in sizes.items()
        }
        loudest = max(scales.values(), default=1.0)
        return {n: scale / loudest for n, scale in scales.items()}

    def _probed(self, few: list[Batch], sketch: Sketch) -> SketchPass | Refutation | None:
        """A pilot of the probes, of all blocks that they can serve; None if these are none."""
        while sketch.probed:
            try:
                done, refutation = self._pass(sketch, few)
            except RuntimeError as error:
                if not lacks_derivative(error):
                    raise
                return None  # an operation has no second derivative
            if refutation is None:
                return done
            if not done.shiftless:
                return refutation
            sketch = replace(sketch, probed=sketch.probed - refutation.unserved)
        return None

    def _cheapest(
        self, one: SketchPass, other: SketchPass, gauss_newton: Mapping[str, float]
    ) -> Ways:
        """The ways that reach the tolerance with the fewest gradients, by two pilots."""
        names, probed, scales = self.curved, other.sketch.probed, other.sketch.scales
        ratios = {n: _ratio(one, other, n) for n in probed}
        better = frozenset(n for n in probed if ratios[n] < 1)
        whole = sum(gauss_newton.values()) + self.elsewhere

        def price(ways: Ways) -> float:
            total = 0.0
            for n, size in gauss_newton.items():
                if n not in names:
                    continue
                # Not by the pilots' own traces, which may be all noise.
                target, spread = self._target(size, size, whole), _variance(one, n)
                if n in ways.probed:
                    spread = spread * ratios[n] if spread > 0 else _variance(other, n)
                draws = self.piloted * (sqrt(spread) / target) ** 2 if target > 0 else 0.0
                # What is out of reach anyway counts less, but does count.
                share = draws * ways.cost(self._draws_loss) / self.settings.gradients
                total += abs(size) * log1p(share)
            return total

        offers = [
            Ways(names, NOTHING, scales, ratios),
            Ways(names - probed, probed, scales, ratios, self._written),
            Ways(names - better, better, scales, ratios, self._written),
        ]
        return min(offers, key=price)


def _ratio(one: SketchPass, other: SketchPass, name: str) -> float:
    """The variance of what was asked of a block in one pilot, for that in the other."""
    asked = one.requests[name] - _TRACES
    pairs = [(_variance(one, name), _variance(other, name))]
    if asked:
        pairs = [(_scatter(one, kind, name), _scatter(other, kind, name)) for kind in asked]
    return fmean(b / a if a > 0 else inf for a, b in pairs)


def _scatter(done: SketchPass, kind: Kind, name: str) -> float:
    """The variance of one draw of a quantity, summed over its entries."""
    drawn = done.sums.get((kind, name))
    if drawn is None:
        return 0.0
    return float(drawn.var(0).sum()) / divisor(done.loss, done.normaliser) ** 2


def _variance(done: SketchPass, name: str) -> float:
    """Of one draw of a block's trace."""
    scale = divisor(done.loss, done.normaliser)
    return float(done.trace(name).var(0).sum()) / scale**2
