"""The plan for a model, found by a look at it on a few samples: which rule serves which parameter.

*Samples.* Outputs of a sample must not depend on the other samples of its batch, nor on chance.

*Rules.* A fast rule is right for a parameter if, for random cotangents and random weights a_i of
the samples, Σ_i a_i G_i equals autograd's own gradient. The weights catch a rule that gives rows to
the wrong samples, or takes some other dimension for them; the comparison catches every use that
the recorder did not see. Where nothing comes back from the outputs, because a branch ends in zeros,
the cotangents start at the parameter's own operations, and the graph must prove the rest.

*Derivatives.* What autograd gives must be the derivative of the outputs (see `derivative`).

*Piecewise linearity* is proved, from the graph (see `proof`), here and again on every chunk that
is measured. Only a user who asks for it has the rest probed: for a random v in a block and a random
cotangent r, never the loss's own gradient (where that vanishes every network would pass), the
derivative of ⟨∂⟨r, o⟩/∂w, v⟩ in w must vanish. That speaks for the probed samples alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import isqrt, prod
from typing import Any, Literal, final

import torch
from torch import Tensor

from saltflat.curvature.derivative import check_derivative, check_unreached
from saltflat.curvature.loss_hessian import lacks_derivative
from saltflat.curvature.proof import InPlace, Proof, is_own, prove
from saltflat.curvature.rules import EmbeddingUse, LinearUse, Recorder, Rows, Safe, Use
from saltflat.errors import ModelError, SaltflatError
from saltflat.geometry import Matrix
from saltflat.losses import Loss, NegativeLogLikelihood
from saltflat.memory import fails_again, halving, ordinary, out_of_memory
from saltflat.risk import Batch, Risk, alike, join, leaves_of, mapped
from saltflat.session import full_precision, reduced_precision
from saltflat.sharded import ADVICE, refuse_sharded
from saltflat.vectors import bounds

Certify = Literal["proof", "probe", "none"]

# On a CPU: a chunk's bytes, and what their square is of the bytes of the weights.
_LEAST, _MOST, _SCALE = 1 << 26, 1 << 30, 3 << 30


@dataclass(frozen=True, slots=True)
class Settings:
    """How the pass is carried out: what is sketched, what is probed, and in what portions."""

    max_directions: int = 1000
    memory_budget: int | None = None
    certify: Certify = "proof"
    tolerance: float = 0.05  # of estimates: standard error over value
    gradients: float = 100.0  # that estimates may cost
    adaptive: bool = False  # the tolerance is for what could be had exactly too

    def on_parts(self) -> Settings:
        """For looks at parts of the data, where draws may add but a share of the error."""
        return replace(self, adaptive=False, tolerance=self.tolerance / 2)

    @property
    def asked(self) -> dict[str, object]:
        """What must be the same in all processes: all but the memory that each has."""
        others = (field.name for field in fields(self) if field.name != "memory_budget")
        return {name: getattr(self, name) for name in others}

    def budget(self, device: torch.device, weights: int = 0) -> int:
        """Bytes that one chunk may take, of a model with `weights` bytes of parameters.

        A chunk reads every weight once for every direction, so large weights want large chunks;
        for small ones a chunk that stays near the processor's cache is as fast. By the square root,
        networks for CIFAR get about the fewest samples with which backward passes are as fast as
        with all: 8 for a ResNet-18 (43 MiB), 4 for a WideResNet-16-4 (11 MiB).
        """
        if self.memory_budget is not None:
            return self.memory_budget
        if device.type == "cuda":
            # What torch has set aside and not given out is free too. (In one question: torch's own
            # functions for each take a third of a millisecond.)
            stats = torch.cuda.memory_stats_as_nested_dict(device)
            kept, given = (stats.get(f"{k}_bytes", {}) for k in ("reserved", "allocated"))
            idle = sum(sign * s["all"]["current"] for sign, s in ((1, kept), (-1, given)) if s)
            return int((torch.cuda.mem_get_info(device)[0] + idle) // 2)
        return min(_MOST, max(_LEAST, isqrt(weights * _SCALE)))


GENERIC = "per-sample"
UNUSED = "unused"

Signature = tuple[tuple[str, tuple[str, ...]], ...]


@final
@dataclass(frozen=True, slots=True)
class Passed:
    """A forward pass: the outputs, what was recorded on the way, and what the graph proves."""

    outputs: Tensor
    uses: Sequence[Use]
    proof: Proof


@dataclass(frozen=True, slots=True)
class Plan:
    """What a look at the model showed; for batches whose forward pass makes the same calls."""

    samples: int
    coupled: bool  # outputs of one sample depend on others
    rules: Mapping[str, str]  # parameter -> rule, GENERIC or UNUSED
    dims: Mapping[str, int]  # parameter of a fast rule -> dimension of its samples
    matrices: Mapping[str, Matrix]  # the weight matrices among the parameters
    curved: Mapping[str, str]  # parameter -> the operation through which it may be curved
    own: bool  # whether they may be curved through a function of the user's
    given: Mapping[str, str]  # parameter -> what was declared piecewise linear, and is relied on
    probed: frozenset[str]  # of the curved ones, those that seem linear on the probed samples
    reached: frozenset[str]  # the parameters that autograd reaches
    dormant: frozenset[str]  # parameters without a gradient on these samples
    signature: Signature
    trail: tuple[str, ...]  # the operations of the graph in which the rules were checked
    narrow: torch.dtype  # the least precise type on the way from parameters to outputs
    log_probabilities: bool  # outputs end in a log-softmax over the classes
    channels_last: bool
    seen: Batch  # the samples that were looked at
    sample_outputs: Tensor  # of these, in full precision
    rounding: float  # what the precision of the passes does to these, of the largest
    places: tuple[int, ...]  # where in their batch they are
    width: int  # bytes of an output entry
    outputs: torch.Size  # a sample's
    activations: int  # output entries of the recorded operations, a sample
    delta_entries: int  # of these, what is held of every direction until it is contracted
    inputs: int  # input entries of the recorded operations, a sample
    patches: int  # entries of the largest patch matrix, a sample
    passed: list[Passed]  # that of `seen`, until a sweep measures it; empty if it was not kept

    def allows(self, name: str) -> bool:
        """Whether the Gauss–Newton form may serve a parameter's block of the Hessian."""
        return name not in self.curved or name in self.probed

    @property
    def unknown(self) -> frozenset[str]:
        """The dormant parameters whose rules other samples may show."""
        return self.dormant - self.dims.keys()

    def was_made_of(self, batch: Batch) -> bool:
        """Whether a batch has the samples that were looked at, where they were."""
        return self.places == tuple(batch.places(self.samples)) and self.seen.equals(
            batch.spread(self.samples)
        )

    def chunk(self, budget: int, times: int) -> int:
        """How many samples fit a budget, if each takes `times` the entries of a forward pass."""
        each = self.width * times * (self.inputs + self.activations + self.outputs.numel())
        return max(1, budget // max(1, each))

    def serves(self, uses: Sequence[Use], samples: int) -> bool:
        """Whether a forward pass made the calls that this plan was made for."""
        return signature(uses) == self.signature and all(
            fits(use, Rows(samples, self.dims[name]))
            for use in uses
            for name in use.names.values()
            if name in self.dims
        )


@final
@dataclass(frozen=True, slots=True)
class Refutation:
    """What a chunk showed that the first samples had not."""

    plan: Plan | None = None  # the model is what this plan says
    joint: bool = False  # the loss is neither a mean nor a sum over samples
    directions: int = 0  # a sample has so many, more than are sent one by one
    unserved: frozenset[str] = frozenset()  # blocks that draws of their own do not serve

    @property
    def told(self) -> Refutation:
        """The same without samples and outputs, as other ranks are told."""
        if self.plan is None:
            return self
        nothing = torch.empty(0)
        bare = Batch(nothing, nothing, 0, self.plan.seen.where)
        plan = replace(self.plan, seen=bare, sample_outputs=nothing, passed=[])
        return replace(self, plan=plan)


def fits(use: Use, rows: Rows) -> bool:
    """Whether a use's input and output can have the samples where `rows` says."""
    both = rows.fits(use.shape) and rows.fits((*use.input.shape, 1))
    return both and rows.dim in use.dims


def signature(uses: Sequence[Use]) -> Signature:
    return tuple((use.rule, tuple(use.names.values())) for use in uses)


def channels_last(batch: Batch) -> Batch:
    """The batch with images laid out channels last, which convolutions like best."""

    def lay(leaf: Any) -> Any:
        image = isinstance(leaf, Tensor) and leaf.ndim == 4 and leaf.is_floating_point()
        return leaf.contiguous(memory_format=torch.channels_last) if image else leaf

    return replace(batch, inputs=mapped(lay, batch.inputs))


def patch_entries(use: Use) -> int:
    """Entries of the patch matrix that a use of a parameter needs."""
    window = getattr(use, "window", None)
    if window is None:
        return use.input.numel()
    seen, positions = (
        (use.input.shape, use.shape) if use.rule == "conv" else (use.shape, use.input.shape)
    )
    return prod((*seen[:2], *window.kernel, *positions[2:]))


def plan_for(
    risk: Risk, batch: Batch, certify: Certify, *, own: bool = False, keep: bool = False
) -> Plan:
    """The plan for batches like this one, found on some of its samples.

    It is kept for the call: what holds from batch to batch is looked at on every chunk. With `own`
    it is made of this very batch, some samples of which then have known outputs. A batch of few
    samples is looked at as a whole; with `keep` its pass is there to be measured.
    """
    plan: Plan | None = risk.plans.get(_key(batch, certify))
    if plan is not None and (not own or plan.was_made_of(batch)):
        return plan
    whole = batch.size <= 2 * _LOOK
    size = batch.size if whole else _LOOK
    try:
        plan = _examine_some(risk, batch, size, certify, keep=keep and whole)
    except Exception as error:
        if size == batch.size or _final(error):
            raise
        if not (ordinary(error) or _refuses(risk, batch.spread(size))):
            raise
        # A part of the batch may make no sense to the model: a few nodes of a graph.
        plan = examine(risk, batch, certify)
    while plan.unknown and size < min(batch.size, _ENOUGH):
        size *= 4
        plan = _examine_some(risk, batch, min(size, batch.size), certify)
    if not plan.unknown:
        risk.plans[_key(batch, certify)] = plan
    return plan


def plan_again(risk: Risk, batch: Batch, certify: Certify) -> Plan:
    """The plan found on all samples of a batch, now that dormant parameters move."""
    plan = risk.plans[_key(batch, certify)] = examine(risk, batch, certify)
    return plan


def _key(batch: Batch, certify: Certify) -> Hashable:
    return batch.size > 1, leaf_shapes(batch), certify


def _examine_some(
    risk: Risk, batch: Batch, size: int, certify: Certify, *, keep: bool = False
) -> Plan:
    """Look at the model on some samples from all over a batch, fewer where memory runs out."""
    plan = halving(lambda most: examine(risk, batch.spread(most), certify, keep=keep), size)
    return replace(plan, places=tuple(batch.places(plan.samples)))


# Samples to look at, up to twice as many if these are all: what only others pass through is not
# compared with differences.
_LOOK = 8
_FEW = 2  # of these, for what takes the most memory
_ENOUGH = 32  # samples to look through for one that moves every parameter


def _final(error: Exception) -> bool:
    """Whether trying again with all samples is no use."""
    ours = isinstance(error, SaltflatError) and not isinstance(error, RuntimeError)
    return ours or out_of_memory(error)


def leaf_shapes(batch: Batch) -> Hashable:
    return tuple(
        (tuple(t.shape[1:]), t.dtype, t.device) if isinstance(t, Tensor) else type(t)
        for t in leaves_of(batch.inputs)
    )


def examine(risk: Risk, batch: Batch, certify: Certify, *, keep: bool = False) -> Plan:
    """Look at the model on all samples of a (small) batch."""
    plan = _examine_in_full(risk, batch, certify, keep)
    return replace(plan, rounding=_rounding(risk, batch, plan.sample_outputs))


def _examine_in_full(risk: Risk, batch: Batch, certify: Certify, keep: bool) -> Plan:
    with full_precision(risk.device):
        plan, slopes, cuts = _examine_graph(risk, batch, certify, keep)
        # Unless it is kept the graph is gone: what follows has the memory that it took.
        if slopes is not None:
            together = None if plan.coupled else _FEW
            check_derivative(risk, batch, *slopes, together=together, cuts=cuts)
        bears = _bears_channels_last(risk, batch, plan.sample_outputs)
        return replace(plan, channels_last=bears)


def _rounding(risk: Risk, batch: Batch, outputs: Tensor) -> float:
    """How far TensorFloat-32, if it is on, takes the outputs from these, of the largest."""
    if not reduced_precision(risk.device):
        return 0.0
    with torch.no_grad():
        difference, whole = _largest([risk.forward(batch, Safe()) - outputs, outputs])
    return difference / max(whole, 1e-30)


def _examine_graph(
    risk: Risk, batch: Batch, certify: Certify, keep: bool
) -> tuple[Plan, tuple[Tensor, dict[str, Tensor], dict[str, float]] | None, bool]:
    """What one forward pass and its graph show, but for the layout that the model bears; a
    cotangent with the gradients that autograd gives for it and their largest entries; and whether
    something in it was hidden from autograd."""
    recorder = Recorder(risk.leaves)
    outputs = risk.forward(batch, recorder)
    risk.check(outputs, batch)
    uses = recorder.uses
    is_coupled = _coupled_not_random(risk, batch, outputs)
    proof = proof_of(risk, batch, outputs)
    check_unreached(risk, batch, outputs, proof.reached, cuts=recorder.cuts)
    rules, dims = dict.fromkeys(risk.parameters, UNUSED), dict[str, int]()
    dormant, probed, slopes = frozenset[str](), frozenset[str](), None
    if outputs.requires_grad:
        fast = fast_rules(outputs, uses, risk.leaves, proof, seed=20_210_618)
        rules, dims, dormant = fast.rules, fast.dims, fast.dormant
        if risk.sharded:  # where nobody has whole gradients of samples, of which these have none
            unserved = [n for n in dormant if rules[n] == GENERIC]
            rules |= dict.fromkeys(asleep(unserved, outputs, uses, risk.leaves, proof), UNUSED)
        slopes = fast.cotangent, _without_padded(fast.gradients, uses), fast.largest
        if certify == "probe" and proof.curved:
            what = "Probes take second derivatives in whole parameters"
            refuse_sharded(risk.parameters.values(), what, ADVICE)
            probed = _seemingly_linear(risk, outputs, proof.curved)
    plan = Plan(
        coupled=is_coupled,
        rules=rules,
        dims=dims,
        matrices=weight_matrices(risk, rules, uses),
        curved=proof.curved,
        own=any(map(is_own, proof.opaque)),
        given=proof.given,
        probed=probed,
        reached=proof.reached,
        dormant=dormant,
        signature=signature(uses),
        trail=proof.trail,
        narrow=proof.narrow,
        log_probabilities=proof.log_probabilities,
        channels_last=False,
        passed=[Passed(outputs, uses, proof)] if keep else [],
        **_sizes(batch, outputs, uses),
    )
    return plan, slopes, recorder.cuts


def _without_padded(gradients: Mapping[str, Tensor], uses: Sequence[Use]) -> dict[str, Tensor]:
    """The gradients but for those of tables with a padding row, which autograd leaves at 0."""
    padded = {
        use.names["weight"]
        for use in uses
        if isinstance(use, EmbeddingUse) and use.padding is not None
    }
    return {n: g for n, g in gradients.items() if n not in padded}


def in_place_writes(risk: Risk, batch: Batch) -> Callable[[], frozenset[str]]:
    """Asks for the operations in place of a forward pass of the batch."""

    def writes() -> frozenset[str]:
        with InPlace() as log, Safe():
            risk.forward(batch)
        return frozenset(log.seen)

    return writes


def proof_of(risk: Risk, batch: Batch, outputs: Tensor, loss: object = None) -> Proof:
    """What the graph of these outputs of a batch proves, up to what is a part of the loss.

    By default the risk's, of which a log-softmax before a likelihood would be a part.
    """
    if loss is None:
        own = risk.loss
        loss = own.cross_entropy if isinstance(own, NegativeLogLikelihood) else own
    dim = loss.class_dimension(outputs, batch.targets) if isinstance(loss, Loss) else None
    proof = prove(outputs, risk.leaves, in_place_writes(risk, batch), dim)
    if "CheckpointFunctionBackward" in proof.opaque:
        raise ModelError(
            "The model uses reentrant checkpointing, inside of which autograd cannot look. Pass "
            "use_reentrant=False to torch.utils.checkpoint."
        )
    return proof


def taken_for_cross_entropy(loss: object, risk: Risk) -> bool:
    """Whether the risk's loss is taken for more than it is: a likelihood with the log-softmax."""
    return isinstance(risk.loss, NegativeLogLikelihood) and loss is not risk.loss


@dataclass(frozen=True, slots=True)
class FastRules:
    """Which rule serves which parameter, by comparison with autograd's own gradients."""

    rules: dict[str, str]
    dims: dict[str, int]
    dormant: frozenset[str]
    cotangent: Tensor
    gradients: dict[str, Tensor]
    largest: dict[str, float]  # entries of these


def fast_rules(
    outputs: Tensor, uses: Sequence[Use], parameters: Mapping[str, Tensor], proof: Proof, seed: int
) -> FastRules:
    """Compare on the graph of these outputs, one row a sample.

    Where the graph proves whose rows are whose, the weights of the samples can be left out, and one
    backward pass gives both sides.
    """
    generator = torch.Generator(outputs.device).manual_seed(seed)
    size = len(outputs)
    edges, wanted = [use.edge for use in uses], list(parameters.values())
    cotangent = _normal(outputs, generator)
    if all(proof.keeps_rows(edge.node) for edge in edges):
        weights = None
        both = _pulled(outputs, [*edges, *wanted], cotangent)
        deltas, truth = both[: len(edges)], both[len(edges) :]
    else:
        weights = _normal(outputs.new_empty(size), generator)
        deltas = _pulled(outputs, edges, cotangent)
        cotangent = cotangent * weights.reshape(-1, *[1] * (outputs.ndim - 1))
        truth = _pulled(outputs, wanted, cotangent)
    given = {n: g for n, g in zip(parameters, truth, strict=True) if g is not None}
    rules = {name: GENERIC if name in given else UNUSED for name in parameters}
    dims: dict[str, int] = {}
    sizes = dict(zip(given, _largest(list(given.values())), strict=True))
    open_ = {name for name, size in sizes.items() if size > 0}
    dormant = frozenset(sizes) - open_
    for dim in (0, 1):
        if not open_:
            break
        truths = {name: given[name] for name in open_}
        offers = _offers(uses, deltas, Rows(size, dim), weights, truths)
        for name, rule in _agreeing(offers, truths, sizes, proof.narrow).items():
            rules[name], dims[name] = rule, dim
            open_.discard(name)
    # Also where what comes back is but rounding, as at the bias of an attention's keys.
    left = dormant | open_
    for name, rule in _rules_asleep(outputs, uses, parameters, proof, left, generator).items():
        rules[name], dims[name] = rule, 0
    return FastRules(rules, dims, dormant, cotangent, given, sizes)


def _rules_asleep(
    outputs: Tensor,
    uses: Sequence[Use],
    parameters: Mapping[str, Tensor],
    proof: Proof,
    dormant: frozenset[str],
    generator: torch.Generator,
) -> dict[str, str]:
    """The rules of parameters that the outputs send nothing to, because a branch ends in zeros.

    Both sides are compared for cotangents that start at the operations of these parameters. What
    that cannot show must be proved: that no other operation takes a parameter, and that what
    arrives at the rows of an operation's output comes from the samples that they belong to.
    """
    rows = Rows(len(outputs))
    uses = [u for u in uses if dormant & set(u.names.values()) and proof.holds(u.edge.node)]
    apart = {n for u in uses if not proof.keeps_rows(u.edge.node) for n in u.names.values()}
    names = sorted(dormant & all_recorded(uses, proof) - apart)
    if not names:
        return {}
    edges, cotangents = [use.edge for use in uses], [_cotangent(use, generator) for use in uses]
    both = _pulled(edges, [*edges, *[parameters[n] for n in names]], cotangents)
    truth = {n: g for n, g in zip(names, both[len(edges) :], strict=True) if g is not None}
    offers = _offers(uses, both[: len(edges)], rows, None, truth)
    sizes = dict(zip(truth, _largest(list(truth.values())), strict=True))
    return _agreeing(offers, truth, sizes, proof.narrow)


def asleep(
    names: Iterable[str],
    outputs: Tensor,
    uses: Sequence[Use],
    parameters: Mapping[str, Tensor],
    proof: Proof,
) -> frozenset[str]:
    """The parameters, of these, whose derivatives vanish here, of every sample and order.

    A layer whose inputs are 0 sends them nothing: neither what arrives from the outputs nor, in one
    that other operations bend, anything that began at its own output.
    """
    generator = torch.Generator(outputs.device).manual_seed(20_210_620)
    wanted = sorted(names)
    recorded = all_recorded(uses, proof)
    own = [
        u for u in uses if proof.holds(u.edge.node) and not recorded.isdisjoint(u.names.values())
    ]

    def moved(sources: Any, cotangents: Any) -> set[str]:
        slopes = _pulled(sources, [parameters[n] for n in wanted], cotangents)
        found = zip(wanted, slopes, strict=True)
        return {n for n, slope in found if slope is not None and bool(slope.any())}

    awake = moved(outputs, _normal(outputs, generator))
    bent = set(wanted) & proof.curved.keys()
    if bent & recorded - awake:
        awake |= moved([use.edge for use in own], [_cotangent(use, generator) for use in own])
    return frozenset(wanted) - awake - (bent - recorded)


def _cotangent(use: Use, generator: torch.Generator) -> Tensor:
    """A random one for the output of a use."""
    kind = use.edge.node._input_metadata[use.edge.output_nr]
    options: dict[str, Any] = {"device": kind.device, "dtype": kind.dtype}
    return torch.randn(use.shape, generator=generator, **options)


def all_recorded(uses: Iterable[Use], proof: Proof) -> frozenset[str]:
    """The parameters that the recorded operations take, and no other one.

    Rows that were looked up once must go into the recorded sum alone.
    """
    reached = [use for use in uses if proof.holds(use.edge.node) and _goes_one_way(use, proof)]
    calls = Counter(name for use in reached for name in use.names.values())
    return frozenset(name for name, count in calls.items() if count == proof.edges.get(name))


def _goes_one_way(use: Use, proof: Proof) -> bool:
    lookup = use.lookup if isinstance(use, EmbeddingUse) else None
    return lookup is None or proof.goes_one_way(lookup)


def _pulled(outputs: Any, sources: Sequence[Any], cotangent: Any) -> Sequence[Tensor | None]:
    """The gradients of ⟨cotangent, outputs⟩, tensors or edges; the graph is kept."""
    if not sources:
        return ()
    try:
        return torch.autograd.grad(
            outputs, sources, cotangent, retain_graph=True, allow_unused=True
        )
    except RuntimeError as error:
        plain = type(error) is RuntimeError and bool(str(error))
        if out_of_memory(error) or lacks_derivative(error) or not plain:
            raise
        raise ModelError(
            f"The model cannot be differentiated: torch says {str(error).splitlines()[0]!r}. "
            "Replace that operation, or leave its parameters out with parameters=[…]."
        ) from error


Offers = dict[str, tuple[str, Tensor]]  # parameter -> rule, Σ_i a_i G_i over all of its uses


@torch.no_grad()
def _offers(
    uses: Sequence[Use],
    deltas: Sequence[Tensor | None],
    rows: Rows,
    weights: Tensor | None,
    truth: Mapping[str, Tensor],
) -> Offers:
    """What the uses make of the deltas, with samples along `rows` that have these weights, where
    that has the shape of the truth.

    One use at a time: the terms of a convolution hold all of its patches.
    """
    offers: Offers = {}
    refused = set[str]()
    for use, delta in zip(uses, deltas, strict=True):
        if delta is None or not truth.keys() & set(use.names.values()):
            continue
        if not fits(use, rows):
            refused |= set(use.names.values())
            continue
        kept = use.keep_all(delta.detach().unsqueeze(0), rows)
        for name, term in use.terms(kept, rows):
            value = term.weighted(weights) if name in truth else None
            if value is None or value.shape != truth[name].shape:
                refused.add(name)
                continue
            rule, known = offers.get(name, (use.rule, None))
            offers[name] = rule, value if known is None else known + value
    return {n: offer for n, offer in offers.items() if n not in refused}


@torch.no_grad()
def _agreeing(
    offers: Offers, truth: Mapping[str, Tensor], sizes: Mapping[str, float], narrow: torch.dtype
) -> dict[str, str]:
    """The rules that give what autograd gives, whose largest entries are `sizes`, and not nothing;
    what they give is let go of."""
    rules = {name: rule for name, (rule, _) in offers.items()}
    errors = _largest([offers.pop(name)[1] - truth[name] for name in rules])
    room = 1e-9 if narrow == torch.float64 else 1e-3
    return {
        name: rule
        for (name, rule), error in zip(rules.items(), errors, strict=True)
        if sizes[name] > 0 and error <= room * sizes[name]
    }


def coupled(risk: Risk, batch: Batch, outputs: Tensor) -> bool:
    """Whether the first sample alone, or the others without it, have other outputs.

    In full precision: `outputs`, which may not be, are computed again where they are not.
    """
    if batch.size == 1:
        return False
    parts = batch.part(0, 1), batch.part(1, batch.size)
    reduced = reduced_precision(risk.device)
    with full_precision(risk.device), torch.no_grad():
        outputs = risk.forward(batch, Safe()) if reduced else outputs
        return not all(
            _gives(risk, part, expected)
            for part, expected in zip(parts, (outputs[:1], outputs[1:]), strict=True)
        )


def _gives(risk: Risk, batch: Batch, expected: Tensor) -> bool:
    """Whether the model gives these outputs for a part of the batch, maybe laid out anew."""
    outputs = _outputs(risk, batch)
    return outputs is not None and close(outputs, expected)


def _outputs(risk: Risk, batch: Batch) -> Tensor | None:
    """What the model gives for samples that were put together, or None.

    It may refuse: one that makes views of contiguous images, or that needs many samples.
    """
    try:
        return risk.forward(batch, Safe()).detach()
    except Exception as error:
        if out_of_memory(error) or not _refuses(risk, batch):
            raise
        return None


def _refuses(risk: Risk, batch: Batch) -> bool:
    """Whether the model, which failed on these samples, does so again."""
    with torch.no_grad():
        return fails_again(lambda: risk.forward(batch, Safe()))


def as_probed(risk: Risk, plan: Plan, chunk: Batch, outputs: Tensor) -> bool:
    """Whether the samples that were looked at have the outputs that they had without the rest of
    their chunk, as their rows of its outputs tell.

    TensorFloat-32 rounds to three digits, so that they tell no more than about `plan.rounding`.
    What that leaves open is asked in full precision: of these samples among some others of the
    chunk if it is not more than rounding, and of the whole chunk if it is.
    """
    if _kept(plan, outputs, 0.0) or not reduced_precision(risk.device):
        return _kept(plan, outputs, 0.0)
    few = chunk.size > _BESIDE and _kept(plan, outputs, plan.rounding)
    with full_precision(risk.device), torch.no_grad():
        if not few:
            return _kept(plan, risk.forward(chunk, Safe()), 0.0)
        # Between others: what goes on to later samples alone, or to earlier ones, reaches them too.
        some, half, known = chunk.spread(_BESIDE), _BESIDE // 2, plan.sample_outputs
        parts = some.part(0, half), plan.seen, some.part(half, _BESIDE)
        beside = _outputs(risk, join(parts)) if alike(parts) else None
        return beside is not None and close(beside[half : half + len(known)], known)


_BESIDE = 56  # samples, with which a pass takes hardly longer than without


def _kept(plan: Plan, outputs: Tensor, rounding: float) -> bool:
    here = [k for k in plan.places if k < len(outputs)]
    known = plan.sample_outputs[: len(here)]
    if known.shape[1:] != outputs.shape[1:]:
        return True
    return close(outputs.detach()[here], known, rounding)


@final
class Company:
    """Asks of every chunk of a sweep whether its samples have the same outputs in other company.

    The first samples of the data are put between the first and last ones of the chunk. (In one
    chunk alone what samples do to each other shows in the graph.)
    """

    def __init__(self, risk: Risk) -> None:
        self.risk = risk
        # The first samples, and their outputs in full precision once they are needed.
        self._known: dict[Hashable, tuple[Batch, Tensor | None]] = {}

    def is_indifferent(self, chunk: Batch, outputs: Tensor, rounding: float = 0.0) -> bool:
        """`rounding` is that of the plan for the chunk.

        Where outputs are rounded to TensorFloat-32, the first samples tell what that leaves open:
        they are compared in full precision.
        """
        key, outputs = leaf_shapes(chunk), outputs.detach()
        reduced = reduced_precision(self.risk.device)
        if key not in self._known:
            if self.risk.opens or leaf_shapes(self.risk.first()) != key:
                self._known[key] = chunk.part(0, 2), None if reduced else outputs[:2].clone()
                return True
            # The first samples of the data are those of another rank.
            self._known[key] = self.risk.first().part(0, 2), None
        guest, known = self._known[key]
        ends = chunk.part(0, 2), chunk.part(max(0, chunk.size - 2), chunk.size)
        if not alike([guest, *ends]):
            return True  # nothing to put together
        try:
            with full_precision(self.risk.device), torch.no_grad():
                known = self.risk.forward(guest, Safe()) if known is None else known
                self._known[key] = guest, known
                if known.shape[1:] != outputs.shape[1:]:
                    return True
                parts = ends[0], guest, ends[1]
                return self._same(parts, known, outputs, rounding if reduced else None)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            return True  # there is no room for company

    def _same(
        self, parts: Sequence[Batch], known: Tensor, outputs: Tensor, rounding: float | None
    ) -> bool:
        """Whether the parts, the second of which is the guest, have these outputs together: the
        guest what is `known`, the others those of their chunk, `rounding` of which may be off."""
        together = _outputs(self.risk, join(parts))
        if together is None:
            return False
        start, size = parts[0].size, parts[1].size
        expected = torch.cat([outputs[:2], known, outputs[-2:]])
        if rounding is None:
            return close(together, expected)
        if close(together, expected, rounding):
            return close(together[start : start + size], known)
        ends = [self.risk.forward(part, Safe()) for part in (parts[0], parts[2])]
        return close(together, torch.cat([ends[0], known, ends[1]]))


# How many times the rounding that was seen on some samples others may have, and what is too much
# for either to be told from anything.
_ROUNDED, _DROWNED = 3.0, 0.03


def close(a: Tensor, b: Tensor, rounding: float = 0.0) -> bool:
    """Whether these are the same outputs, but for the rounding of passes in few digits."""
    if a.shape != b.shape:
        return False
    tolerance = 1e-10 if a.dtype == torch.float64 else 1e-3
    tolerance = max(tolerance, min(_ROUNDED * rounding, _DROWNED))
    difference, whole = _largest([a - b, b])
    return difference <= tolerance * max(whole, 1e-30)


def _sizes(batch: Batch, outputs: Tensor, uses: Sequence[Use]) -> dict[str, Any]:
    """What is known of the samples, and of the memory that one takes."""
    n = batch.size
    return {
        "samples": n,
        "seen": batch,
        "places": tuple(range(n)),
        "sample_outputs": outputs.detach(),
        "rounding": 0.0,
        "width": outputs.element_size(),
        "outputs": outputs.shape[1:],
        "activations": sum(use.shape.numel() for use in uses) // n,
        "delta_entries": sum(use.shape.numel() for use in uses if use.keeps) // n,
        "inputs": sum(use.input.numel() for use in uses) // n,
        "patches": max((patch_entries(use) for use in uses), default=0) // n,
    }


def weight_matrices(risk: Risk, rules: Mapping[str, str], uses: Sequence[Use]) -> dict[str, Matrix]:
    """What acts as a matrix; of an unknown operation, whatever has two dimensions or more."""
    matrices = {}
    for use in uses:
        matrix, name = use.matrix(), use.names.get("weight")
        if matrix is None or name is None:
            continue
        if rules[name] == GENERIC and isinstance(use, LinearUse) and use.transposed:
            continue  # its input may be made of parameters alone, as in b @ a
        # An embedding that is tied to a Linear counts as the Linear.
        if name not in matrices or matrix.out == 0:
            matrices[name] = matrix
    for name, rule in rules.items():
        shape = risk.parameters[name].shape
        if rule == GENERIC and len(shape) > 1 and shape.numel() > max(shape):
            matrices.setdefault(name, Matrix())
    return {name: matrices[name] for name in rules if name in matrices}


def _bears_channels_last(risk: Risk, batch: Batch, outputs: Tensor) -> bool:
    """Whether there are images on a CPU, whose convolutions are faster channels last.

    (cuDNN's are not: 4.8 gradients against 5.2 for a ResNet-18 on an H200.)
    """
    laid = channels_last(batch)
    pairs = zip(leaves_of(laid.inputs), leaves_of(batch.inputs), strict=True)
    changed = any(a is not b and a.is_cpu for a, b in pairs)
    return changed and _gives(risk, laid, outputs)


def _coupled_not_random(risk: Risk, batch: Batch, outputs: Tensor) -> bool:
    """Whether samples of a batch depend on each other; an error if they depend on chance."""
    apart = not coupled(risk, batch, outputs)
    compared = outputs.numel() if apart and batch.size > 1 else 0
    with torch.no_grad():
        while compared < _ENTRIES:  # few entries may agree by chance
            again = risk.forward(batch, Safe())
            if not close(again, outputs):
                raise ModelError(
                    "The model is random in evaluation mode: equal inputs give different "
                    "outputs, so it has no Hessian to measure. Look for dropout called with "
                    "training=True or noise that is not switched off by eval()."
                )
            compared += outputs.numel()
    return not apart


def _seemingly_linear(risk: Risk, outputs: Tensor, names: Iterable[str]) -> frozenset[str]:
    """The parameters in which the outputs seem linear here."""
    generator = torch.Generator(outputs.device).manual_seed(20_190_121)
    cotangent = _normal(outputs, generator)
    return frozenset(
        name for name in names if _straight(outputs, risk.leaves[name], cotangent, generator)
    )


def _straight(
    outputs: Tensor, parameter: Tensor, cotangent: Tensor, generator: torch.Generator
) -> bool:
    """Whether a random second derivative of the outputs in one parameter vanishes."""
    try:
        (gradient,) = torch.autograd.grad(outputs, parameter, cotangent, create_graph=True)
        if not gradient.requires_grad:
            return True
        size = _norms([parameter]) / parameter.numel() ** 0.5
        direction = _normal(gradient, generator) * _scale(outputs, gradient, size)
        (change,) = torch.autograd.grad(
            gradient, parameter, direction, retain_graph=True, materialize_grads=True
        )
    except RuntimeError:  # it has no second derivative
        return False
    bend, whole = _largest([change, gradient])
    return bend <= 16 * float(torch.finfo(gradient.dtype).eps) * whole


_ENTRIES = 16  # of the outputs, to compare


def _normal(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=generator, device=like.device, dtype=like.dtype)


def _scale(outputs: Tensor, gradient: Tensor, size: Tensor) -> Tensor:
    """The size of a direction, so large that a change of the gradient along it would show.

    At least that of the parameter, and of what changes the outputs by about themselves; at least
    1, since both can vanish (a network that is zero at its start).
    """
    norm = _norms([gradient])
    ratio = _norms([outputs]) / norm.clamp(min=torch.finfo(norm.dtype).tiny)
    return torch.maximum(size, ratio.clamp(max=1e30)).clamp(min=1.0)


def _norms(tensors: Iterable[Tensor], order: float = 2.0) -> Tensor:
    """Norms of all of them, in a few launches on a GPU."""
    norms = list(torch._foreach_norm([x.detach() for x in tensors], order))
    if len({norm.dtype for norm in norms}) > 1:
        norms = [norm.double() for norm in norms]
    return torch.stack(norms)


def _largest(tensors: Sequence[Tensor]) -> list[float]:
    """The largest entries, all fetched at once: waiting for a GPU is what costs here."""
    some = [x for x in tensors if x.numel()]
    if all(x.is_cpu for x in some):  # where norms take ten times as long
        sizes = iter([max(-least, most) for least, most in map(bounds, some)])
    else:
        sizes = iter(_norms(some, float("inf")).tolist())
    return [next(sizes) if x.numel() else 0.0 for x in tensors]
