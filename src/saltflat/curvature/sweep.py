"""One sweep over the data: Σ_i J_iᵀ B_i J_i, as traces, diagonals or forms of its blocks.

Every direction of every sample's output Hessian is sent backwards once, as activation gradients
only; what arrives at a parameter's operation is squared there in factored form. Chunks of samples
and of directions bound the memory; their sums do not depend on where the cuts fall.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Literal, Protocol, final, get_args

import torch
from torch import Tensor

from saltflat.curvature.contractions import Explicit, Form, Term, Weight, combine
from saltflat.curvature.estimators import Signs, reduce_entries
from saltflat.curvature.loss_hessian import Additivity, SoftmaxSketch, direction_count, factor
from saltflat.curvature.per_sample import PerSample
from saltflat.curvature.plan import (
    GENERIC,
    UNUSED,
    Company,
    Passed,
    Plan,
    Refutation,
    Settings,
    all_recorded,
    as_probed,
    asleep,
    channels_last,
    coupled,
    examine,
    fast_rules,
    leaf_shapes,
    plan_again,
    plan_for,
    proof_of,
    taken_for_cross_entropy,
)
from saltflat.curvature.proof import Proof
from saltflat.curvature.rules import Recorder, Rows, Use
from saltflat.curvature.spread import Spread
from saltflat.distributed import LOCAL, Reduction
from saltflat.errors import ChangedData
from saltflat.geometry import Matrix
from saltflat.losses import CrossEntropy, CustomLoss, ElementwiseLoss, Loss, divisor
from saltflat.memory import out_of_memory
from saltflat.risk import Batch, Risk, alike
from saltflat.session import full_precision
from saltflat.sharded import whole_of
from saltflat.work import FORWARD

Kind = Literal[
    "trace",
    "diagonal",
    "magnitude",
    "columns",
    "rows",
    "flatness",
    "normalized_flatness",
    "fisher",
]
ANY: frozenset[Kind] = frozenset(get_args(Kind))

# Quadratic in the loss's gradient, Σ_i θ_i² (∂ℓ/∂θ_i)² …
FISHER: frozenset[Kind] = frozenset({"fisher"})
# … and in the directions of its Hessian.
CURVATURE = ANY - FISHER
# What every parameter has; the others belong to weight matrices.
EVERY_PARAMETER: frozenset[Kind] = frozenset({"trace", "diagonal"})

# What has a number for every sample that is worth keeping: of the normalized flatness, the scale of
# the features is the samples' together.
APART: frozenset[Kind] = frozenset({"trace", "columns", "rows", "flatness", "fisher"})

FORMS: dict[Kind, Form] = {
    "columns": "columns",
    "rows": "rows",
    "flatness": "flatness",
    "normalized_flatness": "flatness",
}


def reduce(
    term: Term,
    kinds: frozenset[Kind],
    weight: Weight | None,
    sign: Tensor | None,
    apart: dict[Kind, Tensor] | None = None,
) -> Iterator[tuple[Kind, Tensor]]:
    """The wanted quantities of one term; each is a sum over directions and samples.

    A trace is among them beside a diagonal alone: by itself it is begun and settled later.
    `apart` is given the samples' parts of it, of `APART`.

    The magnitude is Σ |s| G² beside the diagonal's Σ s G²: what the diagonal's rounding is relative
    to. Where no term is negative it is the diagonal itself, and left out; its sum then stays 0.
    (Of a sum in which some chunks have negative terms and some have not, at most half of what can
    cancel is left out.)
    """
    apart = {} if apart is None else apart
    if weight is not None and kinds - EVERY_PARAMETER - {"magnitude"}:
        weight = replace(weight, values=whole_of(weight.values))
    if {"diagonal", "trace"} <= kinds:
        diagonal, apart["trace"] = term.diagonal_and_traces(sign)
        yield "diagonal", diagonal
        yield "trace", diagonal.sum(dtype=torch.float64)
    elif "diagonal" in kinds:
        yield "diagonal", term.diagonal(sign)
    if "magnitude" in kinds and sign is not None:
        yield "magnitude", term.diagonal(None)
    for kind, form in FORMS.items():
        if kind in kinds:
            assert weight is not None
            plain = kind != "normalized_flatness"
            matrix = Weight(weight.values, weight.matrix) if plain else weight
            value, apart[kind] = term.form(form, matrix, sign)
            yield kind, value
    if "fisher" in kinds:
        assert weight is not None
        apart["fisher"] = term.weighted_squares(weight.values.square())
        yield "fisher", apart["fisher"].sum()


# What a direction costs that is sent backwards, in gradients: the pass itself, then the squares of
# single entries, and each form.
_DIRECTION, _ENTRIES, _FORM = 0.35, 0.4, 0.6


def direction_price(kinds: frozenset[Kind]) -> float:
    """What a direction costs with all that is made of it, in gradients."""
    entries = kinds & {"diagonal", "magnitude", "fisher"}
    return _DIRECTION + _ENTRIES * bool(entries) + _FORM * len(kinds & FORMS.keys())


# Below this many entries a direction, on a CPU, the overhead of separate backward passes is
# larger than what batching them costs.
_SMALL = 300_000

# Entries a sample from which on convolutions, and not their launches, take a GPU's time.
_LARGE = 1 << 17

# Blocks whose parts by sample are kept together: their covariances are the square of that.
_MOST_NAMES = 2048

_LOOKS = 8  # numbers by which a sample is known again
_FAINTEST = -30.0  # of a class's score beside the largest: it has next to no probability
_MIXES = 2  # of the directions that a pass leaves out
SURPRISE = 6.0  # times what was expected of a mix: its directions may hold anything

# Of the outputs, that a chunk holds at a time: probabilities, factors, a direction.
_COPIES = 8


def live_uses(uses: Sequence[Use], plan: Plan, names: frozenset[str]) -> list[Use]:
    """The uses of wanted parameters that a fast rule serves."""
    return [use for use in uses if names & set(use.names.values()) & set(plan.dims)]


def sample_dim(use: Use, plan: Plan) -> int:
    return next(plan.dims[name] for name in use.names.values() if name in plan.dims)


def backward(outputs: Tensor, uses: Sequence[Use], plan: Plan, columns: Tensor) -> list[Any]:
    """Send directions backwards; for every use, what is to be kept of each, or None if unreached.

    Small networks take all directions at once through vmap; large ones go direction by direction,
    which is as fast there and needs less memory.
    """
    if not uses:
        return []
    edges = [use.edge for use in uses]
    rows = [Rows(columns.shape[1], sample_dim(use, plan)) for use in uses]
    entries = plan.activations * columns.shape[1]
    if len(columns) > 1 and entries <= _SMALL:
        try:
            return _all_at_once(outputs, uses, rows, edges, columns)
        except RuntimeError as error:
            if out_of_memory(error):
                raise
    return send([outputs], ([column] for column in columns), uses, rows)


def send(
    sources: Sequence[Any],
    directions: Iterable[Sequence[Tensor]],
    uses: Sequence[Use],
    rows: Sequence[Rows],
) -> list[Any]:
    """The same, one direction after the other, from several places of the graph at once."""
    edges = [use.edge for use in uses]
    arrived: list[Any] = [[] for _ in uses]
    for cotangents in directions:
        deltas = torch.autograd.grad(
            sources, edges, cotangents, retain_graph=True, allow_unused=True
        )
        for k, (use, delta) in enumerate(zip(uses, deltas, strict=True)):
            if delta is None or arrived[k] is None:
                arrived[k] = None
            else:
                with torch.no_grad():
                    arrived[k].append(use.keep(delta, rows[k]))
    return arrived


def _all_at_once(
    outputs: Tensor, uses: Sequence[Use], rows: Sequence[Rows], edges: Any, columns: Tensor
) -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a drop in performance
        deltas = torch.autograd.grad(
            outputs, edges, columns, retain_graph=True, allow_unused=True, is_grads_batched=True
        )
    with torch.no_grad():
        return [
            None if delta is None else use.keep_all(delta, row)
            for use, row, delta in zip(uses, rows, deltas, strict=True)
        ]


def feature_scale(risk: Risk, matrices: Mapping[str, Matrix], chunk: int) -> dict[str, Tensor]:
    """The standard deviation of every input unit over samples and positions.

    A unit that never changes has the size of its value instead, and one that is always 0 has 0.
    Embeddings, whose inputs are rows examined up, and layers that no rule knows have no scale.
    """
    moments: dict[str, Tensor] = {}  # (3, inputs): count, Σ x, Σ x²

    def gather() -> None:
        for part in risk.chunks(chunk):
            recorder = Recorder(risk.leaves)
            risk.forward(part, recorder)
            for use in recorder.uses:
                name = use.names.get("weight")
                features = use.features() if name in matrices else None
                if name is not None and features is not None:
                    added = _moments(features.double())
                    moments[name] = moments[name] + added if name in moments else added

    risk.reduction.each(gather)
    return {n: _scale(m) for n, m in risk.reduction.totals(moments, risk.device).items()}


def _moments(x: Tensor) -> Tensor:
    return torch.stack([torch.full_like(x[0], len(x)), x.sum(0), x.square().sum(0)])


def _scale(moments: Tensor) -> Tensor:
    count, first, second = moments
    mean = first / count
    variance = second / count - mean.square()
    varies = variance > 1e-12 * second / count
    return torch.where(varies, variance.clamp(min=0).sqrt(), mean.abs())


Requests = Mapping[str, frozenset[Kind]]  # parameter -> what is wanted of it
Directions = tuple[frozenset[Kind], Tensor, Tensor | None]  # what for, columns, their signs


@final
@dataclass(frozen=True, slots=True)
class Chunk:
    """Some samples that went through the model, with what was recorded on the way."""

    batch: Batch
    outputs: Tensor
    uses: Sequence[Use]
    plan: Plan
    index: int  # of the batch
    first: int  # sample of it
    place: int  # of that sample in all data

    def rows(self, use: Use) -> Rows:
        return Rows(self.batch.size, sample_dim(use, self.plan))


@final
@dataclass(frozen=True, slots=True)
class Part:
    """What a pass has counted on one rank."""

    samples: int
    normaliser: float
    counted: int
    even: bool
    rules: Mapping[str, set[str]]
    spreads: Mapping[Kind, Spread] = field(default_factory=dict)


def slope(loss: Loss, chunk: Chunk) -> Tensor:
    """The gradient of the (unnormalised) loss in the outputs.

    A cross-entropy's adds up to 0 over the classes. That of a confident sample at its own class,
    p − 1, has lost its digits to the 1; those of the others have not.
    """
    targets = chunk.batch.targets
    at = chunk.outputs.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(loss.total(at, targets), at)
    if isinstance(loss, CrossEntropy):
        dim = loss.dim(at, targets)
        likeliest = at.detach().argmax(dim, keepdim=True)
        others = gradient.scatter(dim, likeliest, 0.0)
        gradient = others.scatter_(dim, likeliest, -others.sum(dim, keepdim=True))
    return gradient


@dataclass
class Pass(ABC):
    """One pass over the data, chunk by chunk, for what is requested of each parameter."""

    risk: Risk
    loss: Loss
    requests: Requests
    settings: Settings
    weights: Mapping[str, Weight]
    alone: bool = False  # whether every rank makes it on the same samples, and reduces nothing
    samples: int = 0  # that were gone through; in the end, those of all ranks …
    own: int = 0  # … and those here
    counted: int = 0  # samples that the loss does not ignore
    normaliser: float = 0.0
    rules: dict[str, set[str]] = field(default_factory=dict)
    sums: dict[tuple[Kind, str], Tensor] = field(default_factory=dict)
    pending: dict[tuple[Kind, str], Tensor] = field(default_factory=dict)  # until a chunk is done
    even: bool = True  # whether all samples count alike
    _offset: int = 0  # samples of the ranks before
    _generic: PerSample | None = None
    _size: int | None = None  # samples a chunk, once memory has run out
    _additivity: Additivity | None = None
    _company: Company = field(init=False)

    def __post_init__(self) -> None:
        self._company = Company(self.risk)
        if isinstance(self.loss, CustomLoss):
            self._additivity = Additivity(self.loss)

    @abstractmethod
    def measure(self, chunk: Chunk) -> Refutation | None:
        """Put what is wanted of a chunk into `pending`."""

    @abstractmethod
    def copes(self, plan: Plan) -> bool:
        """Whether the pass is right for what a chunk turned out to be."""

    def commit(self, key: tuple[Kind, str], value: Tensor) -> None:
        """Add what a chunk gave to `sums`."""
        known = self.sums.get(key)
        self.sums[key] = value.double() if known is None else known.add_(value)

    def zeros(self, kind: Kind, name: str) -> Tensor:
        """What was added up where nothing arrived."""
        like = self.risk.parameters[name]
        zeros = torch.zeros(like.shape, dtype=torch.float64, device=like.device)
        if kind in ("columns", "rows"):
            return reduce_entries(zeros, self.weights[name].matrix, FORMS[kind])
        return zeros if kind == "diagonal" else zeros.sum()

    def run(self, batches: Iterable[Batch], first: Plan | None = None) -> Refutation | None:
        """Go through all samples; `first` plans the first batch, if that was looked at before.

        It was not where the data are read again: they may come in another order.
        """
        opens = self.alone or self.risk.opens
        found = self.reduction.each(lambda: self._over(batches, first, opens))
        self.own = self.samples
        if refutations := [refutation for refutation in found if refutation is not None]:
            return refutations[0]
        together = self.reduction, self.risk.device
        if self._additivity is not None and not self._additivity.holds_together(*together):
            return Refutation(joint=True)
        if self.reduction.ranks > 1:
            self._join(self.reduction.each(self._part))
            self.sums = self.reduction.totals(self.sums, self.risk.device)
        return None

    @property
    def reduction(self) -> Reduction:
        return LOCAL if self.alone else self.risk.reduction

    def _over(self, batches: Iterable[Batch], first: Plan | None, opens: bool) -> Refutation | None:
        """Go through the samples here; `opens` if they begin with the first of all."""
        for index, batch in enumerate(batches):
            begins = opens and index == 0
            plan = first if begins and batch.size > 1 else None
            if plan is None:
                plan = plan_for(self.risk, batch, self.settings.certify, own=begins)
            if refutation := self._batch(batch, index, plan, begins):
                return refutation.told
        return None

    def _part(self) -> Part:
        return Part(self.samples, self.normaliser, self.counted, self.even, self.rules)

    def _join(self, parts: Sequence[Part]) -> None:
        """Put the ranks' counts in the place of one's own."""
        whole = self.normaliser = sum(part.normaliser for part in parts)
        self.samples = sum(part.samples for part in parts)
        self.counted = sum(part.counted for part in parts)
        shares = [(part.normaliser, part.samples * whole / self.samples) for part in parts]
        alike = all(abs(own - share) <= 1e-9 * own for own, share in shares)
        self.even = alike and all(part.even for part in parts)
        for part in parts:
            for name, rules in part.rules.items():
                self.rules.setdefault(name, set()).update(rules)

    def _batch(self, batch: Batch, index: int, plan: Plan, begins: bool) -> Refutation | None:
        start, examined = 0, -1  # `examined`: the chunk that was looked at as a whole
        while start < batch.size:
            self.risk.meet()
            size = min(self._size or self.chunk_size(plan, batch), batch.size - start)
            chunk = batch.part(start, start + size)
            self.pending = {}
            try:
                done = self._samples(chunk, index, start, plan, begins and start == 0)
            except (RuntimeError, MemoryError) as error:
                if plan.channels_last and not out_of_memory(error):
                    plan = replace(plan, channels_last=False)  # it may not bear that layout
                    continue
                if not out_of_memory(error) or size == 1:
                    raise
                self._size = size // 2
                if self.risk.device.type == "cuda":
                    torch.cuda.empty_cache()
                continue
            if isinstance(done, Refutation):
                return done
            moving = (v for (_, name), v in self.pending.items() if name in plan.dormant)
            if examined != start and any(bool(value.any()) for value in moving):
                # Now there is something to see.
                plan, examined = plan_again(self.risk, chunk, self.settings.certify), start
                continue
            self._count(size, *done)
            for key in list(self.pending):
                self.commit(key, self.pending.pop(key))
            start += size
        return None

    def _count(self, size: int, normaliser: float, counted: int, even: bool) -> None:
        self.samples += size
        self.normaliser += normaliser
        self.counted += counted
        share = size * self.normaliser / self.samples
        self.even = self.even and even and abs(normaliser - share) <= 1e-9 * normaliser

    def chunk_size(self, plan: Plan, batch: Batch) -> int:
        """How many samples fit: graph, outputs, deltas of directions, patches, output Hessians.

        The batch is cut evenly. On a GPU chunks of large convolutional networks stay below 512
        samples, above which cuDNN picks slower kernels in float32 (ResNet-18 on an H200: 5.5
        gradients at 1000, 4.9 at 500), or 1024 in TensorFloat-32 (5.7 at 1000, 6.0 at 500).
        """
        outputs = plan.outputs.numel()
        entries = 2 * (plan.inputs + plan.activations) + _COPIES * outputs
        entries += min(outputs, 16) * plan.delta_entries
        each = plan.width * (entries + plan.patches)
        if not isinstance(self.loss, CrossEntropy | ElementwiseLoss):
            each += 32 * min(outputs, self.settings.max_directions) ** 2
        most = max(1, self.budget() // max(1, each))
        large = plan.activations >= _LARGE and "conv" in plan.rules.values()
        if self.risk.device.type == "cuda" and large:
            most = min(most, 1024 if torch.backends.cudnn.allow_tf32 else 512)
        return -(-batch.size // -(-batch.size // most))

    def budget(self) -> int:
        weights = sum(p.numel() * p.element_size() for p in self.risk.parameters.values())
        return self.risk.agreed(self.settings.budget(self.risk.device, weights))

    def _samples(
        self, chunk: Batch, index: int, first: int, plan: Plan, begins: bool
    ) -> tuple[float, int, bool] | Refutation:
        """Put the chunk's sums into `pending`; return its part of the normaliser, how many samples
        count, and whether alike. `begins` of the first samples of all."""
        if plan.channels_last:
            chunk = channels_last(chunk)
        known = bool(plan.passed) and plan.seen is chunk
        passed = plan.passed.pop() if known else self._passed(chunk)
        outputs, uses, proof = passed.outputs, passed.uses, passed.proof
        look, plan = plan, self._plan(plan, chunk, outputs, uses, proof)
        plan = self._waking(plan, chunk, passed)
        if refutation := self._refutation(plan, chunk, outputs, proof):
            return refutation
        place = self._offset + self.samples
        measured = Chunk(chunk, outputs, uses, plan, index, first, place)
        if outputs.requires_grad and (refutation := self.measure(measured)):
            return refutation
        # Asked last: small passes, for which a GPU that has work does not stand still.
        alone = known or not begins or as_probed(self.risk, look, chunk, outputs)
        if not (alone and self._company.is_indifferent(chunk, outputs, plan.rounding)):
            return Refutation(replace(plan, coupled=True))
        for name in self.requests:
            self.rules.setdefault(name, set()).add(plan.rules[name])
        return self.loss.census(outputs, chunk.targets)

    def _passed(self, chunk: Batch) -> Passed:
        recorder = Recorder(self.risk.leaves)
        outputs = self.risk.forward(chunk, recorder)
        self.risk.check(outputs, chunk)
        proof = proof_of(self.risk, chunk, outputs, self.loss)
        return Passed(outputs, recorder.uses, proof)

    def wants(self, kinds: frozenset[Kind]) -> list[str]:
        return [name for name, wanted in self.requests.items() if wanted & kinds]

    def _refutation(
        self, plan: Plan, chunk: Batch, outputs: Tensor, proof: Proof
    ) -> Refutation | None:
        """What this chunk is not, if that is more than the pass can do with."""
        curved = {**proof.curved, **plan.curved}
        known = replace(plan, curved=curved, log_probabilities=proof.log_probabilities)
        mistaken = taken_for_cross_entropy(self.loss, self.risk) and not proof.log_probabilities
        if plan.coupled or mistaken or not self.copes(known):
            return Refutation(known)
        if self._additivity is not None and not self._additivity.holds(outputs, chunk):
            return Refutation(joint=True)
        return None

    def _plan(
        self, plan: Plan, chunk: Batch, outputs: Tensor, uses: Sequence[Use], proof: Proof
    ) -> Plan:
        """The plan that holds for this chunk: made anew where the given one does not.

        The rules are compared with autograd again where this chunk could tell otherwise: where its
        graph is not the one in which they were compared, where an operation may move rows from
        sample to sample, or where one takes a parameter and was not recorded.
        """
        if not plan.serves(uses, chunk.size) or proof.reached - plan.reached:
            return examine(self.risk, chunk, self.settings.certify)
        live = live_uses(uses, plan, frozenset(self.requests))
        alone = chunk.size == 1  # no rows to move
        in_place = alone or all(
            sample_dim(u, plan) == 0 and proof.keeps_rows(u.edge.node) for u in live
        )
        written = any(plan.rules[name] == GENERIC for name in self.requests)
        same = proof.trail == plan.trail and self._all_recorded(plan, live, proof)
        if in_place and same and (alone or not written):
            return plan
        with full_precision(self.risk.device):
            fast = fast_rules(outputs, uses, self.risk.leaves, proof, seed=20_210_619)
        shown = fast.dims.keys() | (fast.dormant - plan.dormant)
        lost = plan.dims.keys() - shown
        if not alone:
            lost |= {n for n, dim in plan.dims.items() if fast.dims.get(n, dim) != dim}
        if (lost or written) and coupled(self.risk, chunk, outputs):
            return replace(plan, coupled=True)
        return replace(
            plan,
            dims={n: dim for n, dim in plan.dims.items() if n not in lost},
            rules={n: GENERIC if n in lost else rule for n, rule in plan.rules.items()},
        )

    def _waking(self, plan: Plan, chunk: Batch, passed: Passed) -> Plan:
        """The plan where this chunk shows of a model that processes share what samples before it
        have left alone: anew."""
        names = {n for n in plan.dormant & self.requests.keys() if n not in plan.dims}
        if not self.risk.sharded or not names or not passed.outputs.requires_grad:
            return plan
        parts = passed.outputs, passed.uses, self.risk.leaves, passed.proof
        if names <= asleep(names, *parts):
            return replace(plan, rules={**plan.rules, **dict.fromkeys(names, UNUSED)})
        return examine(self.risk, chunk, self.settings.certify)

    def _all_recorded(self, plan: Plan, live: Sequence[Use], proof: Proof) -> bool:
        """Whether the recorded operations are all that take the parameters of fast rules."""
        fast = self.requests.keys() & plan.dims.keys() & proof.edges.keys()
        return fast <= all_recorded(live, proof)

    def terms(
        self, chunk: Chunk, live: Sequence[Use], arrived: list[Any], names: frozenset[str]
    ) -> Iterator[tuple[str, Term]]:
        """(name, gradients) of what arrived at the uses of some parameters, each name once."""
        terms: dict[str, list[Term]] = {}
        reached = [use for use, each in zip(live, arrived, strict=True) if each is not None]
        calls = Counter(name for use in reached for name in use.names.values())
        for k, use in enumerate(live):
            # What was kept is let go of as soon as it is squared.
            each, arrived[k] = arrived[k], None
            if each is None:
                continue
            for name, term in use.terms(each, chunk.rows(use)):
                if name in names and name in chunk.plan.dims:
                    terms.setdefault(name, []).append(term)
                    if len(terms[name]) == calls[name]:
                        yield name, combine(terms.pop(name))
            del each
        for name, parts in terms.items():
            yield name, combine(parts)

    def together(self, chunk: Chunk) -> int:
        """How many directions fit the budget at a time."""
        outputs, share = chunk.outputs, self.budget() // 2
        width = outputs.element_size() * len(outputs)
        entries = chunk.plan.delta_entries + outputs[0].numel()
        names = self.written_out(chunk.plan, CURVATURE)
        written = sum(self.risk.parameters[name].numel() for name in names)
        return max(1, share // max(1, width * entries, outputs.element_size() * written))

    def written_out(self, plan: Plan, kinds: frozenset[Kind]) -> list[str]:
        """The parameters that go the per-sample way."""
        return [name for name in self.wants(kinds) if plan.rules[name] == GENERIC]

    def generic_terms(
        self, chunk: Chunk, columns: Tensor, names: list[str]
    ) -> Iterator[tuple[slice, str, Term]]:
        """(samples, name, gradients) of parameters that no rule serves."""
        if not names:
            return
        if self._generic is None or set(self._generic.parameters) != set(names):
            self._generic = PerSample(self.risk, names)
        for rows, gradients in self._generic.gradients(chunk.batch, columns):
            for name, gradient in gradients.items():
                yield rows, name, Explicit(gradient)


class Store(Protocol):
    """Keeps gradients; what began in one place twice is to be kept from the second time on."""

    def begin(self, index: int, first: int) -> None: ...

    def add(self, name: str, term: Term, sign: Tensor | None) -> None: ...


@final
@dataclass
class ExactPass(Pass):
    """Every direction of every sample; for the Hessian, what was asked for must be linear."""

    must_be_linear: bool = field(kw_only=True)
    ranks: range = range(0)  # if any, the directions of these classes alone, by their likelihood
    store: Store | None = None  # keeps the gradients of every chunk, besides what is made of them
    spreads: dict[Kind, Spread] = field(default_factory=dict)
    seed: int | None = None  # of random mixes of the directions that are left out
    # With `ranks`: about what all less likely classes would give, (samples, blocks), and signatures
    # of the samples' outputs, by which they are known again.
    left: list[Tensor] = field(default_factory=list)
    looks: list[Tensor] = field(default_factory=list)
    _latest: tuple[Tensor, Tensor, dict[str, Tensor]] | None = None
    _apart: dict[Kind, dict[str, Tensor]] = field(default_factory=dict)  # of the chunk at hand

    def run(self, batches: Iterable[Batch], first: Plan | None = None) -> Refutation | None:
        if self.seed is not None:
            self._offset = self.risk.offset  # noise goes by the place in all data
        return super().run(batches, first)

    def copes(self, plan: Plan) -> bool:
        return not self.must_be_linear or all(map(plan.allows, self.wants(CURVATURE)))

    @property
    def divisor(self) -> float:
        """What sums over all samples are to be divided by."""
        return divisor(self.loss, self.normaliser)

    def values(self) -> dict[tuple[Kind, str], Tensor]:
        """Σ over all samples, divided by the loss's normaliser."""
        scale = self.divisor
        # The mean over samples of (∇ℓ)², where the risk is the mean of ℓ.
        fisher = scale**2 / max(1, self.counted) if self.loss.mean else float(max(1, self.counted))
        wanted = [(kind, name) for name, kinds in self.requests.items() for kind in kinds]
        totals = {key: self.sums[key] if key in self.sums else self.zeros(*key) for key in wanted}
        for (kind, _), total in totals.items():
            total.div_(fisher if kind == "fisher" else scale)
        return totals

    def measure(self, chunk: Chunk) -> Refutation | None:
        work, size = self.risk.work, chunk.batch.size
        work.add(size, FORWARD)
        self._apart = {}
        if self.store is not None:
            self.store.begin(chunk.index, chunk.first)
        if self.wants(CURVATURE):
            count = direction_count(self.loss, chunk.outputs, chunk.batch.targets)
            if not self.ranks and count > self.settings.max_directions:
                return Refutation(directions=count)
        for kinds, columns, sign in self._directions(chunk):
            names = frozenset(self.wants(kinds))
            live = live_uses(chunk.uses, chunk.plan, names)
            arrived = backward(chunk.outputs, live, chunk.plan, columns)
            made = frozenset[Kind]().union(*self.requests.values()) & kinds
            work.add(size, len(columns) * direction_price(made))
            with torch.no_grad():
                terms = self.terms(chunk, live, arrived, names)
                steps = (self._begun(*term, sign, kinds, slice(size), size) for term in terms)
                _taken(steps, behind=int(chunk.outputs.is_cuda))
            written = self.written_out(chunk.plan, kinds)
            for rows, name, term in self.generic_terms(chunk, columns, written):
                part = None if sign is None else sign[:, rows]
                self._begun(name, term, part, kinds, rows, size)()
        return None

    def _count(self, size: int, normaliser: float, counted: int, even: bool) -> None:
        super()._count(size, normaliser, counted, even)
        if self.ranks:
            self._look(size)
        if not (self.even and self.loss.mean):
            self.spreads.clear()
            return
        for kind in APART:
            names = self.wants(frozenset({kind}))
            if 0 < len(names) <= _MOST_NAMES:
                spread = self.spreads.setdefault(kind, Spread(tuple(names)))
                spread.add(size, self._apart.get(kind, {}))
        self._apart = {}

    def _look(self, size: int) -> None:
        """Note what a chunk of so many samples leaves out."""
        share, looks, mixes = self._latest or (torch.zeros(size), torch.zeros(size, _LOOKS), {})
        traces, none = self._apart.get("trace", {}), torch.zeros(size)
        blocks = []
        for name in self.requests:
            told = traces.get(name, none).to(share) * share
            # By chance a mix may well give twice what it does on average, of some sample or other.
            mixed = mixes.get(name, none).to(share) / 2
            blocks.append(torch.where(2 * mixed > SURPRISE * told, mixed, told))
        self.left.append(torch.stack(blocks, 1).float().cpu())
        self.looks.append(looks)
        self._latest = None

    def _mixes(self, chunk: Chunk, sides: SoftmaxSketch) -> dict[str, Tensor]:
        """What random mixes of the directions that are left out give of every sample, on average;
        they are for telling what matters and are not counted."""
        found = dict[str, Tensor]()
        if self.seed is None:
            return found
        outputs, size, names = chunk.outputs.detach(), chunk.batch.size, self.wants(CURVATURE)
        signs = Signs(outputs, size, chunk.place, self.seed)
        live = live_uses(chunk.uses, chunk.plan, frozenset(names))
        written = self.written_out(chunk.plan, CURVATURE)
        for _ in range(_MIXES):
            columns, _ = sides.sketch(signs(outputs.shape))
            arrived = backward(chunk.outputs, live, chunk.plan, columns)
            with torch.no_grad():
                for name, term in self.terms(chunk, live, arrived, frozenset(names)):
                    traces = term.traces(None) / _MIXES
                    found[name] = found[name] + traces if name in found else traces
            for rows, name, term in self.generic_terms(chunk, columns, written):
                mean = found.setdefault(name, torch.zeros(size).to(outputs))
                mean[rows] += term.traces(None) / _MIXES
        self.risk.work.add(size, _MIXES * _DIRECTION)
        return found

    def _part(self) -> Part:
        spreads = {kind: spread.scaled(1.0) for kind, spread in self.spreads.items()}
        return replace(super()._part(), spreads=spreads)

    def _join(self, parts: Sequence[Part]) -> None:
        super()._join(parts)
        self.spreads = {}
        for kind, spread in chain.from_iterable(part.spreads.items() for part in parts):
            if not (self.even and self.loss.mean):
                return
            self.spreads.setdefault(kind, Spread(spread.blocks)).join(spread)

    def spread(self, kind: Kind) -> Spread | None:
        """How the samples' parts of a quantity vary, on its scale; None if they do not count alike
        or are not known."""
        found = self.spreads.get(kind)
        share = self.samples / self.divisor
        return None if found is None else found.scaled(share**2 if kind == "fisher" else share)

    def _directions(self, chunk: Chunk) -> Iterator[Directions]:
        """The loss's gradient and its Hessian's columns, in even groups that fit the budget."""
        if self.wants(FISHER):
            yield FISHER, slope(self.loss, chunk).unsqueeze(0), None
        if not self.wants(CURVATURE):
            return
        ranked, top = bool(self.ranks), self.ranks.stop
        sides = factor(self.loss, chunk.outputs, chunk.batch, sketched=ranked, top=top)
        if isinstance(sides, SoftmaxSketch):
            self._latest = sides.left(), looks(chunk.outputs), self._mixes(chunk, sides)
        count = sides.count - self.ranks.start
        groups = max(1, -(-count // self.together(chunk)))
        group = max(1, -(-count // groups))
        for start in range(self.ranks.start, sides.count, group):
            yield CURVATURE, *sides.columns(start, min(sides.count, start + group))

    def _begun(
        self,
        name: str,
        term: Term,
        sign: Tensor | None,
        kinds: frozenset[Kind],
        rows: slice,
        size: int,
    ) -> Callable[[], None]:
        """Begin with what comes of some rows of a chunk of so many samples; what is returned adds
        it to the rest."""
        wanted, weight = self.requests[name] & kinds, self.weights.get(name)
        if self.store is not None:
            self.store.add(name, term, sign)
        apart: dict[Kind, Tensor] = {}
        alone = "trace" in wanted and "diagonal" not in wanted
        traces = term.begun_traces(sign) if alone else None
        found = dict(reduce(term, wanted, weight, sign, apart))

        def add() -> None:
            if traces is not None:
                apart["trace"] = traces.settled()
                found["trace"] = apart["trace"].sum()
            self._add(name, found, apart, rows, size)

        return add

    def _add(
        self,
        name: str,
        found: Mapping[Kind, Tensor],
        apart: Mapping[Kind, Tensor],
        rows: slice,
        size: int,
    ) -> None:
        for kind, value in found.items():
            key = kind, name
            waiting = self.pending.get(key)
            self.pending[key] = value if waiting is None else waiting.double().add_(value)
        for kind in APART & apart.keys():
            parts = self._apart.setdefault(kind, {})
            if len(apart[kind]) == size:
                parts[name] = parts[name] + apart[kind] if name in parts else apart[kind]
                continue
            if name not in parts:
                parts[name] = apart[kind].new_zeros(size)
            parts[name][rows] += apart[kind]


def _taken(steps: Iterable[Callable[[], None]], behind: int) -> None:
    """Take every step, or so many behind: a GPU is at work on those to come while one waits for
    what the GPU has done before."""
    waiting: deque[Callable[[], None]] = deque()
    for step in steps:
        waiting.append(step)
        if len(waiting) > behind:
            waiting.popleft()()
    while waiting:
        waiting.popleft()()


def looks(outputs: Tensor) -> Tensor:
    """A few numbers by which samples are known again, from their outputs."""
    flat = beside_largest(outputs)
    generator = torch.Generator().manual_seed(20_261_119)
    signs = torch.randn(flat.shape[1], _LOOKS, generator=generator, dtype=flat.dtype).sign_()
    return (flat @ signs.to(flat.device)).cpu()


def beside_largest(outputs: Tensor) -> Tensor:
    """The scores of classes beside the largest, by which a softmax goes, of every sample.

    Classes that are masked have scores beside which those of all others are rounding: samples could
    not be told apart.
    """
    flat = outputs.detach().flatten(1)
    flat = flat.float() if flat.device.type == "mps" else flat.double()  # there is no float64
    return (flat - flat.amax(1, keepdim=True)).clamp_(min=_FAINTEST)


def insist_on_order(before: Tensor, now: Tensor) -> None:
    """Refuse outputs that are not those of the survey, but for rounding: of other samples."""
    if not bool((before - now).abs().max() <= 1e-2 * before.abs().max()):
        raise ChangedData(
            "The samples come in another order on another pass over the data, and with a tolerance "
            "some of them are looked up by their place. Pass list(data), or leave tolerance out."
        )


def joinable(one: Batch, other: Batch) -> bool:
    return leaf_shapes(one) == leaf_shapes(other) and alike([one, other])


def fetched(values: Mapping[tuple[Kind, str], Tensor]) -> dict[tuple[Kind, str], Tensor]:
    """The values on the CPU, in one transfer: waiting for a GPU once for each is what costs."""
    if all(value.is_cpu for value in values.values()):
        return dict(values)
    flat = torch.cat([value.reshape(-1) for value in values.values()])
    pinned = flat.is_cuda  # memory that a GPU writes to at once, not by way of another
    flat = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=pinned).copy_(flat)
    parts = flat.split([value.numel() for value in values.values()])
    # Each with memory of its own, so that one that is kept or saved does not keep the others.
    return {
        key: part.reshape(value.shape).clone()
        for (key, value), part in zip(values.items(), parts, strict=True)
    }
