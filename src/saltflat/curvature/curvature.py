"""The curvature of a risk: which of its blocks go which way, and their results together.

For every parameter the best honest answer is found: exact where the model is proved piecewise
linear in it (or where the Gauss–Newton matrix is asked for), and draws with a standard error for
the rest: with noise of every sample's own where samples can be taken one by one (see `sketch`),
and by products with random vectors for what that does not serve.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from math import ceil, isfinite, nan
from time import perf_counter
from typing import TypeVar, final

import torch
from torch import Tensor

from saltflat.curvature.adaptive import GROUPS, LEAST_DIRECTIONS, WHOLE, AdaptiveRank
from saltflat.curvature.contractions import Weight
from saltflat.curvature.derivative import check_bend, check_second_derivative, check_slope
from saltflat.curvature.estimators import (
    Estimator,
    Hutchinson,
    OwnNoise,
    Quantity,
    estimate_form,
    mixed,
)
from saltflat.curvature.loss_hessian import classify, direction_count, repeats
from saltflat.curvature.plan import (
    GENERIC,
    UNUSED,
    Plan,
    Refutation,
    Settings,
    Signature,
    leaf_shapes,
    plan_for,
    signature,
    weight_matrices,
)
from saltflat.curvature.products import MatrixName, Products
from saltflat.curvature.proof import operation
from saltflat.curvature.rules import LinearUse, Recorder, Safe
from saltflat.curvature.sketch import FEW_DIRECTIONS, Estimation, Settled, Tally, Ways
from saltflat.curvature.spectrum import (
    Coordinates,
    Eigenpair,
    Gradients,
    Images,
    Product,
    Quadrature,
    basis_bytes,
    eigenpairs,
    largest_together,
    quadratures,
)
from saltflat.curvature.sweep import (
    CURVATURE,
    EVERY_PARAMETER,
    FISHER,
    FORMS,
    ExactPass,
    Kind,
    Requests,
    Store,
    direction_price,
    feature_scale,
    fetched,
)
from saltflat.errors import DataError, InvalidValue, LossError, listed
from saltflat.geometry import Matrix
from saltflat.losses import (
    BinaryCrossEntropy,
    CrossEntropy,
    CustomLoss,
    JointLoss,
    Loss,
    MeanSquaredError,
    NegativeLogLikelihood,
    describe,
    leaves,
    own_parameters,
    refuse_parameters,
    scalar,
)
from saltflat.memory import halving
from saltflat.result import Certificate
from saltflat.risk import Batch, Risk, alike, join
from saltflat.session import reduced_precision
from saltflat.sharded import whole_of
from saltflat.work import FORWARD, LONG

Result = TypeVar("Result")

# Groups of draws that are kept of an estimate, to tell the error of what is made of it.
_GROUPS = 20
# The same where the number of draws is ours to choose, as many or a multiple of it; half as many
# where a group of all parameters has more entries than _LARGE.
_OWN_GROUPS = 16
_LARGE = 2**23
_OWN_PROBES = 32

# A gradient is timed on so many samples, and then on more.
_TIMED, _MANY_TIMED = 16, 256

# Residual norms that rounding must have left: over the tolerance, and of the eigenvalue.
_AMISS, _HIDDEN = 10, 0.01
# Draws that nobody is advised to make.
_MANY_DRAWS = 100_000
# Gradients: what costs less is swept for, also where a tolerance is given.
_DEAR = 70.0
# Of a trace: of larger errors the noise of single entries biases what is made of them (a root, a
# least value over rescalings) by more than its own error.
_UNBIASED = 0.01
# Classes whose directions are not drawn then. Of networks that had learnt 1,000 the rest has
# a thousandth of the variance.
_LIKELIEST = 8

# Directions to be sent backwards for every block that is then spared its products.
_WORTH = 8
# Times the memory that gradients may take: more sweeps to keep them all are not worth it.
_PORTIONS = 8

_TRACE: frozenset[Kind] = frozenset({"trace"})

Parameters = Mapping[Kind, frozenset[str]]  # that a kind is wanted of
Choice = Callable[[Sequence["Layer"]], Parameters]
# What is wanted, the batches and the first of them, to what is left to sweep for.
_Way = Callable[[Requests, Iterable[Batch], Batch], Requests | Refutation]

_MANY = "no random mixes, since so many samples would each have much of a block's error"
_LIKELIHOOD = (
    "the model ends in a log-softmax: with it the negative log-likelihood is the cross-entropy of "
    "what goes in, and is measured as that"
)


@dataclass(slots=True)
class Findings:
    """All that was asked for. `warnings` are what the user is to be told, `notes` includes them;
    `shortfall` is by how much draws ended above the tolerance, and what it would take; `probes`
    how many there were if all estimates are Hutchinson's, whose number no tolerance chooses."""

    quantities: dict[Kind, Quantity] = field(default_factory=dict)
    samples: int = 0  # that were swept over, not sketched
    certificate: Certificate | None = None
    matrices: Mapping[str, Matrix] = field(default_factory=dict)
    rules: Mapping[str, str] = field(default_factory=dict)
    calls: Signature = ()
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    shortfall: str = ""
    probes: int = 0

    def say(self, note: str) -> None:
        self.warnings.append(note)
        self.notes.append(note)


@final
@dataclass(frozen=True)
class Layer:
    """A weight matrix of the model: a Linear, a convolution, an embedding, or the like."""

    name: str  # the module's, "fc1" for the parameter "fc1.weight"
    parameter: str
    matrix: Matrix
    values: Tensor  # of the weight, detached, in the dtype of the computation; maybe sharded
    rule: str  # of its last call: "linear", "conv", …; "per-sample" if no rule knows it
    position: int = -1  # of its last call in a forward pass, −1 if no rule saw one

    @property
    def weight(self) -> Tensor:
        """The whole weight."""
        return whole_of(self.values)

    @cached_property
    def norm_squared(self) -> float:
        """‖W‖²_F, summed in float64."""
        return float(torch.linalg.vector_norm(self.weight, dtype=torch.float64)) ** 2


@final
class Curvature:
    """The curvature of a risk, inside a session of it: what is asked for is computed once.

    Attributes
    ----------
    matrix : whose it is: the Hessian, or the Gauss–Newton matrix ("ggn").
    warnings : what the user is to be told.
    foresee : is called once, with the first batch and the plan, before any work is done.
    """

    def __init__(
        self,
        risk: Risk,
        matrix: MatrixName = "hessian",
        estimator: Estimator | None = None,
        settings: Settings | None = None,
        seed: int = 0,
    ) -> None:
        if matrix not in ("hessian", "ggn"):
            raise InvalidValue(f"curvature must be 'hessian' or 'ggn'. Got {matrix!r}.")
        self.risk, self.matrix, self.seed = risk, matrix, seed
        self.estimator, self.settings = estimator, settings or Settings()
        self.warnings: list[str] = []
        self.foresee: Callable[[Batch, Plan], None] | None = None
        self._looked = 0.0  # seconds
        self._still = frozenset[str]()  # parameters with which the looked-at outputs do not move
        self._outputs = 0  # of a sample
        self._judged = False  # whether second derivatives were compared with slopes
        # What a user's own turned out to be, once it was looked at.
        self.loss: Loss | JointLoss | None = (
            risk.loss if isinstance(risk.loss, Loss | JointLoss) else None
        )
        self._first: Findings | None = None  # of the first sweep
        self._eigenpairs: dict[tuple[tuple[str, ...], int, float], tuple[Eigenpair, ...]] = {}

    def look(self, first: Batch | None = None, *, keep: bool = False) -> Plan:
        """Probe the model on the first batch, and the loss where it is a user's own.

        With `keep`, the plan holds the pass of a batch of few samples, for a sweep to measure.
        """
        risk, certify = self.risk, self.settings.certify
        first = first or risk.first()
        # One sample alone does not show whether samples depend on each other.
        several = first if first.size > 1 else _gather(risk, first, 4)
        start = perf_counter()
        keep = keep and self.loss is risk.loss and not reduced_precision(risk.device)
        plan = plan_for(risk, several, certify, own=True, keep=keep)
        if plan.own and self.matrix == "hessian" and not self._judged:
            check_second_derivative(risk, plan.seen)
            self._judged = True
        self._looked = perf_counter() - start
        unused = {n for n, rule in plan.rules.items() if rule == UNUSED}
        self._still, self._outputs = plan.dormant | unused, plan.outputs.numel()
        if certify == "none":
            plan = replace(plan, curved=dict.fromkeys(plan.rules, ""))
        if self.loss is None:
            # A part of a batch whose samples depend on each other may make no sense.
            wanted = first.size if plan.coupled else 8
            few, outputs = halving(lambda most: _few(risk, first, most), wanted)
            self.loss = _classified(risk, outputs, few)
        self._read_likelihood(plan)
        if (foresee := self.foresee) is not None:
            self.foresee = None
            foresee(first, plan)
        return plan

    def _read_likelihood(self, plan: Plan) -> None:
        """Take a log-softmax at the end of the model for a part of the loss, if there is one."""
        given = self.risk.loss
        if isinstance(given, NegativeLogLikelihood):
            self.loss = given.cross_entropy if plan.log_probabilities else given
            if plan.log_probabilities and _LIKELIHOOD not in self.risk.notes:
                self.risk.notes.append(_LIKELIHOOD)

    def _weaken(self, plan: Plan, refutation: Refutation) -> Plan:
        """The plan, or the loss, after a chunk showed that it is not what it seemed."""
        if (other := refutation.plan) is not None:
            curved = {**other.curved, **plan.curved}
            probed = {n for n in plan.probed & curved.keys() if other.allows(n)}
            weaker = replace(
                plan,
                coupled=plan.coupled or other.coupled,
                curved=curved,
                probed=frozenset(probed),
                log_probabilities=plan.log_probabilities and other.log_probabilities,
            )
            self._read_likelihood(weaker)
            return weaker
        assert isinstance(self.loss, CustomLoss)
        self.loss = JointLoss(self.loss.call, self.loss.measured, self.loss.missing)
        return plan

    def underflowing(self, sizes: Mapping[str, float]) -> list[str]:
        """The blocks whose squares are too small for their type: by entry among its least normal
        numbers, or 0 though the outputs move with the parameter.

        Of a user's loss all blocks may be 0, as of a single class: it may have no curvature.
        """
        bent = isinstance(self.loss, MeanSquaredError | BinaryCrossEntropy)
        single = self._outputs == 1 and not bent
        if (single or isinstance(self.loss, CustomLoss | JointLoss)) and not any(sizes.values()):
            return []
        likes, least = self.risk.parameters, 8 * torch.finfo(torch.float32).tiny
        return [
            n
            for n, v in sizes.items()
            if likes[n].dtype != torch.float64
            and v < least * likes[n].numel()
            and (v > 0 or n not in self._still)
        ]

    def underflow(self, names: Sequence[str]) -> str:
        """What is to be told of such blocks."""
        return (
            f"The curvature of {listed(names)} is 0 or next to it in "
            f"{self.risk.parameters[names[0]].dtype}, whose squares have few digits or none below "
            "1e-37. dtype=torch.float64 tells."
        )

    def find(
        self,
        kinds: frozenset[Kind],
        groups: int = 0,
        only: Choice | None = None,
        each_block: bool = False,
    ) -> Findings:
        """Several kinds of quantities from one sweep, of estimates this many groups of draws.

        `only` tells the parameters that a kind is wanted of, where these are not all. What is not a
        sum over blocks needs `each_block` within the tolerance, however small it is.
        """
        first, stream = self.risk.begun()
        plan = self.look(first, keep=True)
        chosen = only(self.layers(plan)) if only else {}
        while isinstance(
            findings := _Search(self, kinds, groups, plan, chosen, each_block).run(stream, first),
            Refutation,
        ):
            plan, stream = self._weaken(plan, findings), self.risk.batches()
        plan.passed.clear()
        self.warnings += [w for w in findings.warnings if w not in self.warnings]
        self._first = self._first or findings
        return findings

    def price(self, kinds: frozenset[Kind], batch: Batch, plan: Plan) -> float:
        """About what a search for these kinds costs, in gradients, as a look at the model tells."""
        limit = self.settings.gradients if kinds else 0.0
        if plan.coupled or not isinstance(self.loss, Loss):
            return limit
        like = torch.empty(batch.size, *plan.outputs, device="meta")
        count = direction_count(self.loss, like, batch.targets)
        crowded = count > self.settings.max_directions
        swept = limit if crowded or not kinds else FORWARD + count * direction_price(kinds)
        return swept + limit * (self.matrix == "hessian" and bool(plan.curved) and not crowded)

    def announce(self, gradients: float, first: Batch, plan: Plan) -> None:
        """Say how long so many gradients will take, if that is long and the data tell their size.

        What a look at a few samples took is more than gradients of these take. Where that would
        make it long, gradients are timed. Processes that share a model must make the same passes,
        and neither all of them tell nor do their clocks agree: there, nothing is said.
        """
        samples = self.risk.samples(first)
        if samples is None or self.risk.work.silent or self.risk.sharded:
            return
        each = self._looked / plan.samples
        most = plan.chunk(self.settings.budget(self.risk.device), 16)
        few, many = (first.size if plan.coupled else min(n, most) for n in (_TIMED, _MANY_TIMED))
        repeats = 1 if self.risk.device.type == "cuda" else 2
        if gradients * samples * each > LONG:
            times = (halving(lambda size: self._gradient(first, size), few) for _ in range(repeats))
            each = min(times)
        if gradients * samples * each > LONG and min(many, first.size) > few:
            # Of a small model a few samples take as long as many.
            each = min(each, halving(lambda size: self._gradient(first, size), many))
        self.risk.work.announce(gradients, samples, samples * each)

    def _gradient(self, first: Batch, most: int) -> float:
        """The seconds that a forward and a backward pass take, a sample."""
        few, start = first.part(0, most), perf_counter()
        with Safe():
            outputs = self.risk.forward(few)
        if outputs.requires_grad:
            of = list(self.risk.leaves.values())
            slopes = torch.autograd.grad(outputs.sum(), of, allow_unused=True)
            sum(float(slope.sum()) for slope in slopes if slope is not None)  # wait for a GPU
        return (perf_counter() - start) / few.size

    @property
    def first(self) -> Findings:
        """What the first sweep found; a look at the model, if nothing was asked for yet."""
        return self._first or self.find(frozenset())

    def quantities(
        self, kinds: frozenset[Kind], only: Choice | None = None, each_block: bool = True
    ) -> dict[Kind, Quantity]:
        """The same, for measures: with draws, from which the error of what is made of them comes.

        Kinds that the model does not have are left out.
        """
        given = self.estimator
        count = given.probes if isinstance(given, Hutchinson) else given and given.draws
        entries = sum(p.numel() for p in self.risk.parameters.values())
        own = _OWN_GROUPS // 2 if entries > _LARGE else _OWN_GROUPS
        groups = min(count, _GROUPS) if count else own
        quantities = self.find(kinds, groups, only, each_block).quantities
        return {kind: quantities[kind] for kind in kinds if kind in quantities}

    def eigenpairs(self, names: Sequence[str], k: int, tol: float) -> tuple[Eigenpair, ...]:
        """(λ, residual norm, unit eigenvector) of the blocks `names` together, largest first."""
        key = (*names,), k, tol
        if key not in self._eigenpairs:
            space = Coordinates({name: self.risk.parameters[name] for name in names})
            self._eigenpairs[key] = self._by_products(
                names, lambda product: eigenpairs(product, space, k, tol, self.seed)
            )
        self._tell_of_underflow(names, self._eigenpairs[key][0])
        self._tell_of_rounding(names, self._eigenpairs[key][0], tol)
        return self._eigenpairs[key]

    def _tell_of_underflow(self, names: Sequence[str], largest: Eigenpair) -> None:
        """Warn if the largest eigenvalue of some blocks together is too small for their type."""
        told = self.underflowing(dict.fromkeys(names, abs(largest.value)))
        if len(told) == len(names) and (warning := self.underflow(told)) not in self.warnings:
            self.warnings.append(warning)

    def _tell_of_rounding(self, names: Sequence[str], largest: Eigenpair, tol: float) -> None:
        """Warn if products are too inexact for a residual that the iteration took for small.

        Torch's cross-entropy takes p − 1 from p, of a sample of which the network is very sure.
        """
        value, residual, *_ = largest
        if not residual > max(_AMISS * tol, _HIDDEN) * abs(value):
            return
        dtype = self.risk.parameters[names[0]].dtype
        wider = " dtype=torch.float64 tells." if dtype != torch.float64 else ""
        warning = (
            f"The largest eigenvalue of {listed(names)}, {value:.2g}, is hidden by rounding in "
            f"{dtype}: its residual norm is {residual:.2g}, and its error may be larger. It is "
            "next to 0 beside others, or the network is surer of all samples than that type can "
            f"tell.{wider}"
        )
        if warning not in self.warnings:
            self.warnings.append(warning)

    def block_eigenvalues(self, names: Sequence[str], tol: float) -> dict[str, Eigenpair]:
        """The largest eigenpair of every block.

        Blocks that are Gauss–Newton ones share sweeps. Where the gradients of all samples fit in
        memory, one sweep keeps them, and products take no pass over the network; a few sweeps
        where they fit in portions. Otherwise all blocks' iterations advance together, a sweep a
        step. The other blocks go one by one.
        """
        unknown = [name for name in names if ((name,), 1, tol) not in self._eigenpairs]
        if len(unknown) > 1:
            self._by_sweeps(unknown, tol)
        return {name: self.largest_eigenvalue([name], tol) for name in names}

    def _by_sweeps(self, names: Sequence[str], tol: float) -> None:
        """The eigenpairs of the blocks for which sweeps are worth it."""
        first = self.risk.first()
        plan, hessian = self.look(first), self.matrix == "hessian"
        proved = [n for n in names if not hessian or n not in plan.curved]
        rest = [name for name in proved if plan.rules[name] != GENERIC]
        if plan.coupled or not isinstance(self.loss, Loss):
            return
        like = torch.empty(first.size, *plan.outputs, device="meta")
        count = direction_count(self.loss, like, first.targets)
        if count > self.settings.max_directions:
            return
        # As much as for the largest of models: this is no chunk, to stay near a processor's cache.
        budgets = self.risk.reduction.each(
            lambda: self.settings.budget(self.risk.device, weights=1 << 40)
        )
        budget = min(budgets)
        while rest and count <= _WORTH * len(rest):
            store = Gradients(budget)
            sweep = self._swept(rest, store)
            if sweep is None:
                return
            store.agree(self.risk.reduction)
            for name in [n for n in rest if n not in store.unserved | store.dropped]:
                space = Coordinates(self._only([name]))
                product = self._paid(store.product(name, sweep.divisor), sweep.own, plan)
                self._eigenpairs[(name,), 1, tol] = eigenpairs(product, space, 1, tol, self.seed)
            kept, rest = len(rest) - len(store.dropped), [n for n in rest if n in store.dropped]
            if not kept or sum(store.sizes[n] for n in rest) > _PORTIONS * budget:
                break
        share = max(1, ceil(count / _WORTH))
        for portion in _portions(self._only(rest), budget):
            if len(portion) >= share:
                self._together(portion, tol)

    def _together(self, names: Sequence[str], tol: float) -> None:
        """The eigenpairs of some blocks, with one sweep for a step of all their iterations."""

        def products(vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            images = Images(vectors)
            sweep = self._swept(list(vectors), images)
            if sweep is None:
                raise _Refuted
            return self.risk.reduction.totals(images.products(sweep.divisor), self.risk.device)

        with suppress(_Refuted):
            found = largest_together(products, self._only(names), tol, self.seed)
            self._eigenpairs |= {((name,), 1, tol): pairs for name, pairs in found.items()}

    def _paid(self, product: Product, samples: int, plan: Plan) -> Product:
        """The same, counted. From stored gradients, a product with the block of every layer takes
        about what two forward passes do."""
        price = 2 * FORWARD / max(1, len(plan.matrices))

        def apply(vector: Mapping[str, Tensor]) -> dict[str, Tensor]:
            self.risk.work.add(samples, price)
            return self.risk.reduction.totals(product(vector), self.risk.device)

        return apply

    def _swept(self, names: Sequence[str], store: Store) -> ExactPass | None:
        """One sweep for what a store makes of it, or None if a chunk shows that the blocks are not
        Gauss–Newton ones."""
        assert isinstance(self.loss, Loss)
        parts = self.risk, self.loss, dict.fromkeys(names, _TRACE), self.settings
        linear = self.matrix == "hessian"
        sweep = ExactPass(*parts, weights={}, must_be_linear=linear, store=store)
        return None if sweep.run(self.risk.batches()) else sweep

    def _only(self, names: Iterable[str]) -> dict[str, Tensor]:
        return {name: self.risk.parameters[name] for name in names}

    def quadratures(self, names: Sequence[str], probes: int, steps: int) -> list[Quadrature]:
        """Nodes and weights of the spectrum that random vectors see, of the blocks together."""
        space = Coordinates({name: self.risk.parameters[name] for name in names})
        return self._by_products(
            names, lambda product: quadratures(product, space, probes, steps, self.seed)
        )

    def images(self, vectors: Iterable[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
        """The products of vectors with the whole matrix, in float64."""
        given = list(vectors)
        return self._by_products(
            list(self.risk.parameters), lambda product: [product(v) for v in given]
        )

    def largest_eigenvalue(self, names: Sequence[str], tol: float) -> Eigenpair:
        """The first of them."""
        return self.eigenpairs(names, 1, tol)[0]

    def column_eigenvalues(self, layer: Layer, tol: float) -> Tensor:
        """The largest eigenvalue of the block of each input unit's column; 0 for columns of 0."""
        name, matrix = layer.parameter, layer.matrix
        groups, outputs, inputs, kernel = matrix.grouped(layer.weight).shape
        space = Coordinates({name: layer.weight.new_empty(outputs, kernel)})

        def of_columns(product: Products) -> Tensor:
            values = torch.zeros(groups * inputs, dtype=torch.float64)
            for j in matrix.columns(layer.weight.abs()).nonzero().flatten().tolist():

                def column(v: Mapping[str, Tensor], j: int = j) -> dict[str, Tensor]:
                    whole = v[name].new_zeros(groups, outputs, inputs, kernel)
                    whole[j // inputs, :, j % inputs] = v[name]
                    image = product({name: matrix.ungrouped(whole, layer.weight.shape)})[name]
                    return {name: matrix.grouped(image)[j // inputs, :, j % inputs]}

                values[j] = eigenpairs(column, space, 1, tol, self.seed)[0][0]
            return values

        return self._by_products([name], of_columns)

    def _by_products(self, names: Sequence[str], task: Callable[[Products], Result]) -> Result:
        """What a task makes of products with blocks, by the plan that holds for them."""
        plan = self.look()
        while isinstance(result := self.products(names, plan).serve(task), Refutation):
            plan = self._weaken(plan, result)
        return result

    def products(self, names: Sequence[str], plan: Plan) -> Products:
        """v ↦ C v for some of the blocks."""
        # A double backward keeps about four times what a forward pass does.
        chunk = plan.chunk(self.settings.budget(self.risk.device), 16)
        assert self.loss is not None, "a plan comes with a look at the loss"
        return Products(self.risk, self.loss, names, self.matrix, plan, chunk)

    def layers(self, plan: Plan | None = None) -> list[Layer]:
        """The weight matrices, in `named_parameters` order: those of a plan, or those found."""
        if plan is not None:
            return self._layers(plan.matrices, plan.signature, plan.rules)
        first = self.first
        return self._layers(first.matrices, first.calls, first.rules)

    def outline(self) -> list[Layer]:
        """The layers that one forward pass of a few samples shows; nothing is differentiated.

        None where they might not be those of `layers`: that takes a look at gradients.
        """
        few = self.risk.some(2)
        with Recorder(self.risk.leaves) as recorder:
            self.risk.forward(few)
        uses = recorder.uses
        if any(isinstance(use, LinearUse) and use.transposed for use in uses):
            return []  # a product of parameters, perhaps
        rules = dict.fromkeys(self.risk.parameters, UNUSED)
        return self._layers(weight_matrices(self.risk, rules, uses), signature(uses), rules)

    def _layers(
        self, matrices: Mapping[str, Matrix], calls: Signature, rules: Mapping[str, str]
    ) -> list[Layer]:
        last, kinds = dict[str, int](), dict(rules)
        for position, (rule, names) in enumerate(calls):
            # What a layer is does not depend on the rule that serves it: one that is dead on the
            # probed samples is served by another.
            last |= dict.fromkeys(names, position)
            kinds |= dict.fromkeys(names, rule)
        return [
            Layer(
                name.removesuffix(".weight") or name,
                name,
                matrix,
                self.risk.parameters[name].detach(),
                kinds[name],
                last.get(name, -1),
            )
            for name, matrix in matrices.items()
        ]


@final
class _Search:
    """One search for quantities of `kinds` by a plan, block by block; into `findings`."""

    def __init__(
        self,
        curvature: Curvature,
        kinds: frozenset[Kind],
        groups: int,
        plan: Plan,
        only: Parameters,
        each_block: bool,
    ) -> None:
        self.only, self.each_block = only, each_block
        self.whole, self.kinds, self.groups, self.plan = curvature, kinds, groups, plan
        self.risk, self.hessian = curvature.risk, curvature.matrix == "hessian"
        self.settings, given = curvature.settings, curvature.estimator
        self.fixed = given if isinstance(given, OwnNoise) else None
        self.shared_noise = isinstance(given, Hutchinson)
        self.crowd = 0  # directions a sample, if there are too many
        self.uneven = False  # whether many samples dominate others
        self.estimator = _of_products(given, curvature.seed)
        self.findings = Findings(matrices=plan.matrices, rules=plan.rules, calls=plan.signature)
        self.joint = self._joint()
        if self.joint:
            self.risk.insist_on_one_rank(self.joint)
        linearity = {name: self._linearity(name) for name in self.risk.parameters}
        self.reasons = dict.fromkeys(linearity, self.joint) if self.joint else linearity
        self.linearity = linearity
        self.weights = self._weights()

    def run(self, stream: Iterable[Batch], first: Batch) -> Findings | Refutation:
        names, plan, findings = list(self.risk.parameters), self.plan, self.findings
        exact = [n for n in names if not self.joint and (not self.hessian or plan.allows(n))]
        wanted = {n: self._wanted(n) for n in names}
        fisher = frozenset[Kind]() if self.joint else FISHER
        swept = {n: wanted[n] & (fisher | CURVATURE if n in exact else fisher) for n in names}
        requests: Requests = {n: kinds for n, kinds in swept.items() if kinds}
        rest = {n: wanted[n] & CURVATURE for n in names if n not in exact and wanted[n] & CURVATURE}
        for way in self._ways(requests, rest, first):
            left = way(requests, stream, first)
            if isinstance(left, Refutation):
                return left
            requests, stream = left, self.risk.batches()
            if not any(kinds & CURVATURE for kinds in requests.values()):
                break
        refutation = self._sweep(requests, stream, first) if requests else None
        if refutation and refutation.directions:
            refutation = self._crowded(requests, rest, refutation.directions)
        elif rest and not refutation:
            refutation = self._estimated(rest)
        if refutation:
            return refutation
        for quantity in findings.quantities.values():
            values = quantity.values
            quantity.values = {name: values[name] for name in names if name in values}
        findings.certificate = Certificate(
            findings.samples, {n: n not in plan.curved for n in names}, self.linearity
        )
        self._note_precision()
        self._note_underflow()
        return findings

    def _wanted(self, name: str) -> frozenset[Kind]:
        """The kinds that are wanted of a parameter."""
        kinds = self.kinds if name in self.weights else self.kinds & EVERY_PARAMETER
        return frozenset(kind for kind in kinds if name in self.only.get(kind, (name,)))

    def _joint(self) -> str:
        """Why samples cannot be taken one by one, if they cannot."""
        if self.plan.coupled:
            return "outputs of a sample depend on the other samples of its batch"
        if isinstance(self.whole.loss, JointLoss):
            return f"the loss {self.whole.loss.name} is not a mean or a sum over samples"
        return ""

    def _linearity(self, name: str) -> str:
        """What is known of the outputs as functions of a parameter."""
        plan = self.plan
        if self.settings.certify == "none":
            return "no certificate was asked for"
        if name in plan.probed:
            return (
                f"seems piecewise linear on {plan.samples} probed samples; nothing proves it "
                f"({operation(plan.curved[name])})"
            )
        if name in plan.curved:
            return f"outputs are not shown piecewise linear in it: {operation(plan.curved[name])}"
        if plan.rules[name] == UNUSED and name not in plan.dormant:
            return "no effect on outputs"
        given = f", given that {plan.given[name]} is" if name in plan.given else ""
        return f"proved piecewise linear on every sample{given}"

    def _weights(self) -> dict[str, Weight]:
        if not self.kinds - EVERY_PARAMETER:
            return {}
        matrices, scales = self.plan.matrices, dict[str, Tensor]()
        if "normalized_flatness" in self.kinds:
            chunk = self.plan.chunk(self.settings.budget(self.risk.device), 4)
            scales = feature_scale(self.risk, matrices, chunk)
        values = {name: self.risk.parameters[name].detach() for name in matrices}
        like = next(iter(self.risk.parameters.values()))
        scales = {name: scale.to(like.device, like.dtype) for name, scale in scales.items()}
        return {n: Weight(values[n], matrix, scales.get(n)) for n, matrix in matrices.items()}

    def _note_precision(self) -> None:
        like = next(iter(self.risk.parameters.values()))
        notes = self.findings.notes
        if reduced_precision(like.device) and like.dtype == torch.float32:
            notes.append("TensorFloat-32 is on: about three digits of every value are right")
        if torch.finfo(self.plan.narrow).eps > torch.finfo(like.dtype).eps:
            notes.append(
                f"the model casts to {str(self.plan.narrow).removeprefix('torch.')} on its way: "
                "values have no more digits than that"
            )

    def _tell_excess(self, done: Estimation, draws: int, ways: Ways) -> None:
        """By how much draws ended above the tolerance, and what it would take, if they did."""
        if not (excess := done.excess):
            return
        worst = max(excess, key=lambda name: excess[name])
        more = float(f"{draws * excess[worst] ** 2:.1e}")
        price = float(f"{more * ways.cost(not done.known):.1e}")
        probes = len(ways.probed) > len(ways.propagated)
        by = "ActivationProbes" if probes else "PropagatedCurvature"
        advice = f"About {more:,.0f} draws, {price:,.0f} gradients, should do for these: "
        advice += f"estimator=saltflat.{by}(draws={more:.0f})."
        other = (
            " curvature='ggn' measures the Gauss–Newton matrix instead, whose draws scatter less."
        )
        self.findings.shortfall = (
            f"{draws} draws, as at most {self.settings.gradients:.0f} gradients pay for, leave "
            f"{len(excess)} of {len(done.requests)} estimated blocks with standard errors of up to "
            f"{excess[worst]:.2g} times what is allowed ({worst}). "
            + (advice if more <= _MANY_DRAWS else f"More than {_MANY_DRAWS:,} draws would do.")
            + (other if self.hessian else "")
        )

    def _note_underflow(self) -> None:
        """Tell of blocks of which some quantity is too small for its type. The squares of weights
        that are zero are that in truth."""
        lost = set[str]()
        for kind, quantity in self.findings.quantities.items():
            if kind == "magnitude":
                continue
            sizes = {n: float(v.abs().sum()) for n, v in quantity.values.items()}
            told = self.whole.underflowing(sizes)
            squares = kind in EVERY_PARAMETER
            lost |= {n for n in told if sizes[n] or squares or self._weighs(n)}
        if lost:
            self.findings.say(self.whole.underflow([n for n in self.risk.parameters if n in lost]))

    def _weighs(self, name: str) -> bool:
        return bool(whole_of(self.weights[name].values).any())

    def _pass(self, requests: Requests, must_be_linear: bool) -> ExactPass:
        loss = self.whole.loss
        assert isinstance(loss, Loss)
        parts = self.risk, loss, requests, self.settings, self.weights
        return ExactPass(*parts, must_be_linear=must_be_linear)

    def _directions(self, first: Batch) -> int:
        """How many a sample has, by the first batch."""
        assert isinstance(self.whole.loss, Loss)
        like = torch.empty(first.size, *self.plan.outputs, device="meta")
        return direction_count(self.whole.loss, like, first.targets)

    def _sweep(
        self, requests: Requests, stream: Iterable[Batch], first: Batch
    ) -> Refutation | None:
        """Every direction of every sample, unless there are too many."""
        count = self._directions(first)
        if count > self.settings.max_directions and any(k & CURVATURE for k in requests.values()):
            return Refutation(directions=count)
        sweep = self._pass(requests, must_be_linear=self.hessian)
        if refutation := sweep.run(stream, self.plan):
            return refutation
        rules = {n: ", ".join(sorted(r - {UNUSED})) or UNUSED for n, r in sweep.rules.items()}
        reasons = {name: self._why(name, rule) for name, rule in rules.items()}
        for kind, values in _by_kind(fetched(sweep.values())).items():
            spread = sweep.spread(kind)
            self._add(kind, Quantity(values, rules=rules, reasons=reasons, spread=spread))
        self._doubt(sweep.samples)
        self.findings.samples = sweep.samples
        return None

    def _ways(self, requests: Requests, rest: Requests, first: Batch) -> list[_Way]:
        """The ways to spare directions within a tolerance that was given, as far as a look at the
        model tells: each is tried for what those before it leave."""
        kinds = frozenset[Kind]().union(*requests.values()) & CURVATURE
        if not self.settings.adaptive or not kinds:
            return []
        swept = {name for name, each in requests.items() if each & CURVATURE}
        if rest or (self.hessian and swept & self.plan.curved.keys()):
            # Their draws would have to be told apart.
            given = f"tolerance={self.settings.tolerance:g}"
            note = (
                f"{given} is for the blocks that are estimated; the others are swept all the same"
            )
            self.findings.notes.append(note)
            return []
        count = self._directions(first)
        if count > self.settings.max_directions:  # all blocks are drawn
            return []
        if self.kinds & WHOLE and not self.groups:
            self._not_chosen("single entries would have errors that do not hold")
            return []
        if count < LEAST_DIRECTIONS:
            self._not_chosen("samples have too few directions to choose among")
            return []
        dear = count * direction_price(kinds) > _DEAR and self.whole.estimator is None
        return [self._mixed, self._chosen] if dear else [self._chosen]

    def _not_chosen(self, why: str) -> None:
        given = f"tolerance={self.settings.tolerance:g}"
        self.findings.notes.append(f"{given} was not used, all directions were swept: {why}")

    def _chosen(
        self, requests: Requests, stream: Iterable[Batch], first: Batch
    ) -> Requests | Refutation:
        """The directions that matter, within the tolerance; returns what is left to sweep for."""
        if self.uneven and self.kinds & WHOLE:
            self._not_chosen("what is made of single entries would be biased by their noise")
            return requests
        loss, settings, asked = self.whole.loss, self.settings, f"{self.settings.tolerance:g}"
        assert isinstance(loss, Loss)
        if self.kinds & WHOLE and settings.tolerance > _UNBIASED:
            settings = replace(settings, tolerance=_UNBIASED)
            asked += f", of which single entries take {_UNBIASED:g}"
        wanted = {n: kinds & CURVATURE for n, kinds in requests.items() if kinds & CURVATURE}
        seed = self.whole.seed if self.whole.estimator is None else self.whole.estimator.seed
        parts = self.risk, loss, settings, self.weights, wanted, self.plan, seed, self.hessian
        search = AdaptiveRank(*parts, self.groups or GROUPS, self.each_block)
        done = search.run(stream)
        if isinstance(done, Refutation):
            return done
        if isinstance(done, str):
            self._not_chosen(done)
            return requests
        note = (
            f"tolerance={asked}: {search.sent} mixes for {search.pairs} pairs of a sample and a "
            f"direction were sent backwards, more than one of {done.often} samples, and "
            f"{done.count} of these, drawn at random, tell the error"
        )
        self.findings.notes.append(note)
        rules = {n: ", ".join(sorted(r - {UNUSED})) or UNUSED for n, r in search.rules.items()}
        rules = {n: rules.get(n, UNUSED) for n in wanted}
        for kind in self.kinds & CURVATURE:
            quantity = done.quantity(kind)
            if quantity.values:
                quantity.rules = rules
                quantity.reasons = {n: f"{self._why(n, rules[n])}; {note}" for n in rules}
                self._add(kind, quantity)
        self.findings.samples = search.samples
        return {n: kinds & FISHER for n, kinds in requests.items() if kinds & FISHER}

    def _why(self, name: str, rule: str) -> str:
        reason = self.reasons[name] if self.hessian else "Gauss–Newton block, exact for any model"
        if GENERIC in rule:
            reason += "; no fast rule fits, so its per-sample gradients are written out"
        return reason

    def _doubt(self, samples: int) -> None:
        """What was only probed is not exact, and nobody knows its error."""
        for kind, quantity in self.findings.quantities.items():
            if not self.hessian or kind not in CURVATURE:
                continue
            for name in self.plan.probed & quantity.values.keys():
                known = f"probed on {self.plan.samples} of {samples} samples"
                quantity.reasons[name] = f"{known}: {self.reasons[name]}"
                quantity.errors[name] = torch.full_like(quantity.values[name], nan)
                quantity.total_stderr = nan
                quantity.draws.pop(name, None)
                quantity.unknown.add(name)

    def _mixed(self, requests: Requests, _: Iterable[Batch], first: Batch) -> Requests | Refutation:
        """Random mixes of directions, if they reach the tolerance for less than all directions do;
        returns what is left to sweep for."""
        wanted = {n: kinds & CURVATURE for n, kinds in requests.items() if kinds & CURVATURE}
        count = self._directions(first)
        likeliest = self._likeliest(wanted, count)
        if isinstance(likeliest, Refutation):
            return likeliest
        asked = f"tolerance={self.settings.tolerance:g}"
        if likeliest is None:
            self.findings.notes.append(f"{asked}: {_MANY}")
            self.uneven = True
            return requests
        known, settled, swept = likeliest
        top = _LIKELIEST if known else 0
        price = count * direction_price(frozenset[Kind]().union(*wanted.values()))
        search = self._estimation(wanted, frozenset(), known, swept)
        search.top, search.settled, search.strict = top, settled, True
        search.settings = replace(self.settings, gradients=price)
        done = search.run()
        if isinstance(done, Refutation):
            return done
        if done is None:
            note = f"{asked}: random mixes would cost more than all {count} directions"
            self.findings.notes.append(note)
            return requests
        tally = done[0]
        some = f"those of the {top} likeliest classes and " if top else ""
        note = (
            f"{asked}: of {count} directions a sample, {some}{tally.count} random mixes were sent"
        )
        if settled is not None:
            note += f", and all of {len(settled.places)} samples that much of the error would be of"
        self.findings.notes.append(note)
        self._add_draws(tally, dict.fromkeys(wanted, "sketch"), dict.fromkeys(wanted, note))
        self._doubt(tally.samples)
        return {n: kinds & FISHER for n, kinds in requests.items() if kinds & FISHER}

    def _likeliest(
        self, requests: Requests, count: int
    ) -> tuple[dict[tuple[Kind, str], Tensor], Settled | None, float] | Refutation | None:
        """What the directions of the likeliest classes give, where the outputs are one choice, and
        all of a few samples that would carry the noise of the others; and how many directions a
        sample that took. None where these samples are many."""
        if not isinstance(self.whole.loss, CrossEntropy) or len(self.plan.outputs) > 1:
            return {}, None, 0
        requests = {name: kinds | _TRACE for name, kinds in requests.items()}
        sweep = self._pass(requests, must_be_linear=self.hessian)
        seed = self.whole.seed if self.whole.estimator is None else self.whole.estimator.seed
        sweep.ranks, sweep.seed = range(_LIKELIEST), mixed(seed, 3)
        if refutation := sweep.run(self.risk.batches()):
            return refutation
        told = self.risk.reduction.each(lambda: (sweep.left, sweep.looks))
        every = ([part for parts in each for part in parts] for each in zip(*told, strict=True))
        settled = Settled.of(*map(torch.cat, every))
        if not len(settled.places):
            return fetched(sweep.values()), None, _LIKELIEST
        if settled.are_many(sweep.samples):
            return None
        rest = self._pass(requests, must_be_linear=self.hessian)
        rest.ranks = range(_LIKELIEST, count)
        # Gathered samples are elsewhere in their batch than those that were looked at.
        start, plan = self.risk.offset, replace(self.plan, places=())
        if refutation := rest.run(settled.batches(self.risk, start), plan):
            return refutation
        own = settled.among(range(start, start + sweep.own))
        self.risk.reduction.each(lambda: settled.insist(own, rest.looks))
        for key, value in rest.sums.items():
            sweep.sums[key] = sweep.sums[key] + value if key in sweep.sums else value
        share = len(settled.places) / sweep.samples
        return fetched(sweep.values()), settled, _LIKELIEST + share * (count - _LIKELIEST)

    def _crowded(self, requests: Requests, rest: Requests, count: int) -> Refutation | None:
        """Outputs with too many directions: all blocks are drawn."""
        curved = {n: kinds & CURVATURE for n, kinds in requests.items() if kinds & CURVATURE}
        fisher = {n: kinds & FISHER for n, kinds in requests.items() if kinds & FISHER}
        self.crowd = count
        refutation: Refutation | None = None
        if self.hessian and not self.shared_noise:
            refutation = self._estimated({**curved, **rest})
        else:
            estimation = self._estimation(curved, frozenset())
            done = estimation.run()
            if isinstance(done, Refutation):
                return done
            assert done is not None
            tally, ways = done
            self._tell_excess(estimation, tally.count, ways)
            note = self._crowd_note(tally.count)
            self.findings.say(note)
            self._add_draws(tally, self.plan.rules, dict.fromkeys(curved, note))
            self._doubt(tally.samples)
            refutation = self._estimated(rest) if rest else None
        if fisher and not refutation:
            refutation = self._sweep(fisher, self.risk.batches(), self.risk.first())
            self.findings.samples = 0
        return refutation

    def _crowd_note(self, draws: int) -> str:
        return (
            f"The outputs have {self.crowd} directions a sample, more than max_directions="
            f"{self.settings.max_directions}: sketched with {draws} draws. Exactness costs "
            f"{self.crowd} backward passes: pass max_directions={self.crowd}."
        )

    def _estimated(self, requests: Requests) -> Refutation | None:
        """Blocks that are not to be had by sweeps: in the way that suits them."""
        entries = sum(self.risk.parameters[name].numel() for name in requests)
        own_noise = self.hessian and not self.joint and not self.shared_noise
        few = entries <= self.estimator.probes and not self.risk.sharded
        if not own_noise or few:  # few products with whole parameters give all of these
            return self._from_products(list(requests))
        unserved = {name for name in requests if self.plan.rules[name] == GENERIC}
        while own := {n: kinds for n, kinds in requests.items() if n not in unserved}:
            refutation = self._draw({n: kinds | _TRACE for n, kinds in own.items()})
            if refutation is None:
                break
            if not refutation.unserved:
                return refutation
            unserved |= refutation.unserved
        rest = [name for name in requests if name in unserved]
        return self._from_products(rest) if rest else None

    def _draw(self, requests: Requests) -> Refutation | None:
        """Blocks of the Hessian by noise of every sample's own."""
        known: dict[tuple[Kind, str], Tensor] = {}
        count = self._directions(self.risk.first())
        if count <= min(FEW_DIRECTIONS, self.settings.max_directions):
            sweep = self._pass(requests, must_be_linear=False)
            refutation = sweep.run(self.risk.batches())
            if refutation and not refutation.directions:
                return refutation
            known = {} if refutation else fetched(sweep.values())
        curved = frozenset(name for name in requests if name in self.plan.curved)
        estimation = self._estimation(requests, curved, known, count if known else 0)
        done = estimation.run()
        if isinstance(done, Refutation):
            return done
        assert done is not None
        tally, ways = done
        self._tell_excess(estimation, tally.count, ways)
        rules = {name: ways.rule(name) for name in requests}
        reasons = {name: self.reasons[name] + ways.reason(name) for name in requests}
        if self.crowd:
            note = self._crowd_note(tally.count)
            self.findings.say(note)
            reasons |= dict.fromkeys(requests.keys() - curved, note)
        self._add_draws(tally, rules, reasons)
        if curved:
            why = _once(self.reasons[name] for name in curved)
            by = " and ".join(sorted({_SAID.get(rules[name], rules[name]) for name in curved}))
            part = f"their Gauss–Newton part is {'exact' if known else 'drawn too'}"
            self.findings.say(
                f"Hessian {_blocks(len(curved))} estimated by {by} with "
                f"{tally.count} draws, {part}: {why}."
            )
        return None

    def _estimation(
        self,
        requests: Requests,
        curved: frozenset[str],
        known: Mapping[tuple[Kind, str], Tensor] | None = None,
        swept: float = 0,
    ) -> Estimation:
        loss, traces = self.whole.loss, self.findings.quantities.get("trace")
        assert isinstance(loss, Loss)
        fixed = self.fixed
        if self.shared_noise:
            fixed = OwnNoise(self.estimator.probes, self.estimator.seed)
        return Estimation(
            self.risk,
            loss,
            self.settings,
            self.weights,
            requests,
            self.plan,
            self.whole.seed if self.whole.estimator is None else self.whole.estimator.seed,
            self.hessian,
            curved,
            self.groups,
            known or {},
            swept,
            traces.total if traces else 0.0,
            fixed,
        )

    def _add_draws(
        self, tally: Tally, rules: Mapping[str, str], reasons: Mapping[str, str]
    ) -> None:
        for kind in self.kinds & {"trace", *tally.others}:
            quantity = tally.quantity(kind, self.groups)
            quantity.rules, quantity.reasons = dict(rules), dict(reasons)
            self._add(kind, quantity)

    def _from_products(self, names: list[str]) -> Refutation | None:
        """By products with the matrix: written out where these are few, else estimated."""
        entries = sum(self.risk.parameters[n].numel() for n in names)
        plain = [n for n in names if self._wanted(n) & EVERY_PARAMETER]
        shapes = {n: (self.risk.parameters[n].shape, self.risk.device) for n in plain}
        estimates: dict[Kind, Quantity] = {}
        if plain:
            kinds = self.kinds & EVERY_PARAMETER
            both = self.whole.products(plain, self.plan).serve(
                lambda product: self.estimator.estimate(product, shapes, kinds, self.groups)
            )
            if isinstance(both, Refutation):
                return both
            estimates |= {kind: both[kind] for kind in kinds}
        for kind in [k for k in FORMS if k in self.kinds]:
            weights = {n: w for n, w in self.weights.items() if n in names}
            weights = {n: w for n, w in weights.items() if kind in self._wanted(n)}
            if not weights:
                continue
            in_full = entries <= self.estimator.probes  # as for traces and diagonals
            form = self._form(kind, weights, in_full)
            if isinstance(form, Refutation):
                return form
            estimates[kind] = form
        for kind, quantity in estimates.items():
            self._add_products(kind, quantity)
        self._note_products(names)
        return None

    def _form(self, kind: Kind, weights: dict[str, Weight], in_full: bool) -> Quantity | Refutation:
        if kind != "normalized_flatness":
            weights = {n: replace(w, scale=None) for n, w in weights.items()}
        return self.whole.products(list(weights), self.plan).serve(
            lambda product: estimate_form(
                product, weights, FORMS[kind], self.estimator, self.groups, in_full
            )
        )

    def _add_products(self, kind: Kind, quantity: Quantity) -> None:
        for name in quantity.values:
            written = name not in quantity.errors
            quantity.rules[name] = "products" if written else "probes"
            few = "; products with few vectors give all of it" if written else ""
            quantity.reasons[name] = self.reasons[name] + few
        self._add(kind, quantity)

    def _note_products(self, names: list[str]) -> None:
        why = _once(self.reasons[n] for n in names)
        if all(quantity.exact(names) for quantity in self.findings.quantities.values()):
            self.findings.notes.append(
                f"{len(names)} {'blocks are' if len(names) > 1 else 'block is'} written out by "
                f"products with the Hessian: {why}."
            )
            return
        matrix = "Hessian" if self.hessian else "Gauss–Newton"
        exact = self.hessian and not self.joint
        rules = {r for q in self.findings.quantities.values() for r in q.rules.values()}
        self.findings.probes = 0 if rules & _STEERED else self.estimator.probes
        self.findings.say(
            f"{matrix} {_blocks(len(names))} estimated by "
            f"{type(self.estimator).__name__} with {self.estimator.probes} probes: {why}."
            + (" Exact Gauss–Newton values: curvature='ggn'." if exact else "")
        )

    def _add(self, kind: Kind, quantity: Quantity) -> None:
        """A quantity of some parameters; on the CPU and in float64 from here on."""
        sums = torch.stack([value.sum() for value in quantity.values.values()]).tolist()
        for name, total in zip(quantity.values, sums, strict=True):
            if not isfinite(total):
                raise DataError(
                    f"The curvature of {name!r} is NaN or infinite: activations overflow or the "
                    "inputs are not finite. Measure in a wider dtype (dtype=torch.float64)."
                )
        for part in (quantity.values, quantity.errors, quantity.draws):
            part.update({name: value.cpu().double() for name, value in part.items()})
        self.findings.quantities.setdefault(kind, Quantity({})).add(quantity)


# Rules in a sentence, where their names are none of its words.
_SAID = {"propagated": "propagated curvature", "sketch": "a sketch"}
_STEERED = {"propagated", "activation probes", "sketch"}  # draws go on until the tolerance


def _once(reasons: Iterable[str]) -> str:
    """Every reason once, and what several begin with up to a colon, too."""
    parts = dict[str, list[str]]()
    for reason in sorted(set(reasons)):
        said, _, of = reason.partition(": ")
        parts.setdefault(said, []).append(of)
    return "; ".join(f"{said}: {', '.join(of)}" if any(of) else said for said, of in parts.items())


class _Refuted(Exception):
    """A sweep found that blocks are not what they seemed; for `_together`."""


def _portions(parameters: Mapping[str, Tensor], budget: int) -> Iterator[list[str]]:
    """Names of parameters whose iterations fit in memory together, or of one that does not."""
    portion, size = list[str](), 0
    for name, p in parameters.items():
        own = basis_bytes(p.numel())
        if portion and size + own > budget:
            yield portion
            portion, size = [], 0
        portion.append(name)
        size += own
    if portion:
        yield portion


def _of_products(given: Estimator | None, seed: int) -> Hutchinson:
    """The estimator for blocks that noise of every sample's own does not serve."""
    if isinstance(given, Hutchinson):
        return given
    return Hutchinson(_OWN_PROBES, seed) if given is None else Hutchinson(given.draws, given.seed)


def _by_kind(values: Mapping[tuple[Kind, str], Tensor]) -> dict[Kind, dict[str, Tensor]]:
    kinds: dict[Kind, dict[str, Tensor]] = {}
    for (kind, name), value in values.items():
        kinds.setdefault(kind, {})[name] = value
    return kinds


def _blocks(count: int) -> str:
    return f"blocks of {count} parameters are" if count > 1 else "block of 1 parameter is"


def _classified(risk: Risk, outputs: Tensor, few: Batch) -> CustomLoss | JointLoss:
    """A user's loss as a mean or a sum over samples, or as one that only all have together."""
    assert not isinstance(risk.loss, Loss | JointLoss)
    _look_at_loss(risk, risk.loss, outputs, few)
    loss = classify(risk.loss, outputs, few, risk.parameters)
    if not loss.missing:
        check_bend(loss.call, loss.name, outputs.detach(), few)
    return loss


def _look_at_loss(risk: Risk, call: Callable[..., Tensor], outputs: Tensor, few: Batch) -> None:
    """Refuse a user's loss that is not a function of outputs and targets alone."""
    name = describe(call)
    at = outputs.detach().requires_grad_()
    with torch.enable_grad():
        value = scalar(call, at, few.targets)
    if not torch.isfinite(value):
        raise DataError(f"The loss is not finite on {few.where}.")
    refuse_parameters(name, value, risk.parameters)
    repeats(name, value, scalar(call, at, few.targets), few.where)
    if all(leaf is not at for leaf in leaves(value)):
        raise LossError(
            f"The loss {name} does not depend on the outputs by operations that autograd follows, "
            f"on {few.where}: it has no derivative to measure. Look for argmax, item() or numpy."
        )
    check_slope(call, name, outputs.detach(), few)
    if own := own_parameters(call, value, at):
        risk.notes.append(
            f"the loss {name} has parameters of its own, held fixed and not measured: {listed(own)}"
        )


def _few(risk: Risk, first: Batch, wanted: int) -> tuple[Batch, Tensor]:
    """Some samples and their outputs."""
    few = _gather(risk, first, wanted)
    with torch.no_grad():
        return few, risk.forward(few)


def _gather(risk: Risk, first: Batch, wanted: int) -> Batch:
    """Some samples, from several batches where one has too few."""
    gathered = [first.part(0, wanted)]
    if first.size < wanted:
        for batch in islice(risk.opening(wanted), 1, None):
            if leaf_shapes(batch) == leaf_shapes(first) and alike([first, batch]):
                gathered.append(batch.part(0, wanted))
    return join(gathered).part(0, wanted)
