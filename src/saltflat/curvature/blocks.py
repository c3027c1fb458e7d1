"""`trace`, `diagonal` and `max_eigenvalue`: the engine's front door.

For every parameter the best honest answer is found: exact where the model is certified piecewise
linear in it (or where the Gauss–Newton matrix is asked for), a sketch with a standard error where
the outputs have too many directions, and probes with a standard error for the rest.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from saltflat.curvature import spectrum
from saltflat.curvature.certify import GENERIC, UNUSED, Plan, plan_for
from saltflat.curvature.exact import (
    Certify,
    Draw,
    NotCertified,
    Pass,
    Quantity,
    Settings,
    TooManyDirections,
)
from saltflat.curvature.factors import NotAdditive, classify, direction_count
from saltflat.curvature.memory import halving
from saltflat.curvature.products import Curvature, Products
from saltflat.curvature.stochastic import Draws, Estimate, Estimator, Hutchinson, XTrace
from saltflat.errors import DataError, InvalidType, InvalidValue
from saltflat.losses import CustomLoss, JointLoss, Loss, LossLike, scalar
from saltflat.result import Certificate, Detail, Diagonal, Eigenvalue, Trace
from saltflat.risk import Batch, Output, Risk, Unpack, join


def trace(
    model: nn.Module,
    data: Any,
    loss: LossLike = "cross_entropy",
    curvature: Curvature = "hessian",
    *,
    parameters: str | Iterable[str] = "trainable",
    estimator: Estimator | None = None,
    certify: Certify = "sample",
    max_directions: int = 1000,
    memory_budget: int | None = None,
    dtype: torch.dtype | None = None,
    unpack: Unpack | None = None,
    output: Output | None = None,
) -> Trace:
    """The trace of every parameter's block of the Hessian (or of the Gauss–Newton matrix).

    Parameters
    ----------
    model : any `torch.nn.Module`; it is measured in evaluation mode and left as it was found.
    data : a DataLoader, a pair (inputs, targets), or any re-iterable of such pairs.
    loss : a name ("cross_entropy", "mse", "bce", "normalized_cross_entropy"), a module, or any
        twice differentiable callable of outputs and targets.
    curvature : "hessian" or "ggn".
    parameters : "trainable", "all" (frozen ones too) or a list of names.
    estimator : `Hutchinson` (default) or `XTrace`, for what cannot be had exactly.
    certify : "sample" probes a few samples of each shape, "all" probes every sample, "none" takes
        nothing for piecewise linear, so that every block of the Hessian is estimated.
    max_directions : outputs with more directions a sample than this are sketched.
    memory_budget : bytes that a chunk of samples may take.
    dtype : compute in this dtype; half precision models are computed in float32 by default.
    unpack, output : callables that split an item of the data, and choose the outputs.
    """
    risk = Risk(model, data, loss, parameters=parameters, dtype=dtype, unpack=unpack, output=output)
    settings = _settings(max_directions, memory_budget, certify)
    found = _Blocks(risk, "trace", curvature, _estimator(estimator, "trace"), settings).find()
    details = {
        name: Detail(float(e.value), e.exact, float(e.stderr), e.rule, e.reason)
        for name, e in found.entries.items()
    }
    return Trace(
        details, found.total, found.stderr, curvature, found.certificate, risk.frozen, found.notes
    )


def diagonal(
    model: nn.Module,
    data: Any,
    loss: LossLike = "cross_entropy",
    curvature: Curvature = "hessian",
    *,
    parameters: str | Iterable[str] = "trainable",
    estimator: Estimator | None = None,
    certify: Certify = "sample",
    max_directions: int = 1000,
    memory_budget: int | None = None,
    dtype: torch.dtype | None = None,
    unpack: Unpack | None = None,
    output: Output | None = None,
) -> Diagonal:
    """The diagonal of the Hessian (or of the Gauss–Newton matrix), a tensor for every parameter.

    Arguments as in `trace`.
    """
    risk = Risk(model, data, loss, parameters=parameters, dtype=dtype, unpack=unpack, output=output)
    settings = _settings(max_directions, memory_budget, certify)
    estimator = _estimator(estimator, "diagonal")
    found = _Blocks(risk, "diagonal", curvature, estimator, settings).find()
    details = {
        name: Detail(e.value, e.exact, 0.0 if e.exact else e.stderr, e.rule, e.reason)
        for name, e in found.entries.items()
    }
    return Diagonal(
        details, found.total, found.stderr, curvature, found.certificate, risk.frozen, found.notes
    )


def max_eigenvalue(
    model: nn.Module,
    data: Any,
    loss: LossLike = "cross_entropy",
    curvature: Curvature = "hessian",
    *,
    parameters: str | Iterable[str] = "trainable",
    tol: float = 1e-6,
    seed: int = 0,
    memory_budget: int | None = None,
    dtype: torch.dtype | None = None,
    unpack: Unpack | None = None,
    output: Output | None = None,
) -> Eigenvalue:
    """The largest eigenvalue of the whole Hessian, or of the blocks in `parameters` together.

    For one block pass its name: `parameters=["fc.weight"]`. Found by SciPy's `eigsh`; the residual
    norm ‖Hv − λv‖ bounds the distance to an eigenvalue.
    """
    risk = Risk(model, data, loss, parameters=parameters, dtype=dtype, unpack=unpack, output=output)
    settings = _settings(1000, memory_budget, "sample")
    blocks = _Blocks(risk, "trace", curvature, Hutchinson(), settings)
    with risk.session():
        while True:
            product = blocks.products(list(risk.parameters))
            try:
                found = spectrum.largest(product, risk.parameters, tol, seed)
            except NotAdditive:
                blocks.give_up_on_samples()
                continue
            return Eigenvalue(*found, curvature)


def _settings(max_directions: int, memory_budget: int | None, certify: str) -> Settings:
    if certify not in ("sample", "all", "none"):
        raise InvalidValue(f"certify must be 'sample', 'all' or 'none'. Got {certify!r}.")
    if not isinstance(max_directions, int) or max_directions < 1:
        raise InvalidValue(f"max_directions must be a positive integer. Got {max_directions!r}.")
    if memory_budget is not None and memory_budget < 1:
        raise InvalidValue(f"memory_budget must be a positive number. Got {memory_budget!r}.")
    return Settings(max_directions, memory_budget, cast(Certify, certify))


def _estimator(estimator: Estimator | None, quantity: Quantity) -> Estimator:
    if estimator is None:
        return Hutchinson()
    if not isinstance(estimator, Hutchinson | XTrace):
        raise InvalidType(
            f"estimator must be Hutchinson(…) or XTrace(…). Got {type(estimator).__name__}."
        )
    if isinstance(estimator, XTrace) and quantity == "diagonal":
        raise InvalidValue("XTrace estimates traces only. Use Hutchinson for a diagonal.")
    return estimator


_OUTSIDE = 6  # frames from `_say` to the caller of `trace` or `diagonal`


@dataclass(slots=True)
class _Entry:
    value: Tensor
    exact: bool
    stderr: Tensor
    rule: str
    reason: str


@dataclass(slots=True)
class _Found:
    entries: dict[str, _Entry] = field(default_factory=dict)
    total: float = 0.0
    stderr: float = 0.0
    certificate: Certificate | None = None
    notes: tuple[str, ...] = ()


class _Blocks:
    """One call of `trace` or `diagonal`: which blocks go which way, and their results together."""

    def __init__(
        self,
        risk: Risk,
        quantity: Quantity,
        curvature: Curvature,
        estimator: Estimator,
        settings: Settings,
    ) -> None:
        if curvature not in ("hessian", "ggn"):
            raise InvalidValue(f"curvature must be 'hessian' or 'ggn'. Got {curvature!r}.")
        self.risk, self.quantity, self.curvature = risk, quantity, curvature
        self.estimator, self.settings = estimator, settings
        self.notes: list[str] = []
        self.reasons: dict[str, str] = {}

    def find(self) -> _Found:
        with self.risk.session():
            batches = self.risk.batches()
            first = next(batches)
            plan = self._start(first)
            stream: Iterable[Batch] = chain([first], batches)
            while True:
                try:
                    return self._find(plan, stream, first)
                except NotCertified as other:
                    plan = _weaker(plan, other.plan)
                except NotAdditive:
                    self.give_up_on_samples()
                stream = self.risk.batches()

    def products(self, names: Sequence[str]) -> Products:
        """The matrix itself, for estimators and eigenvalues; call it inside a session."""
        first = next(self.risk.batches())
        plan = self._start(first)
        return self._products(names, plan)

    def _products(self, names: Sequence[str], plan: Plan) -> Products:
        # A double backward keeps about four times what a forward pass does.
        each = plan.width * 16 * (plan.inputs + plan.activations + plan.outputs.numel())
        chunk = max(1, self.settings.budget(self.risk.device) // each)
        return Products(self.risk, names, self.curvature, chunk=chunk, coupled=plan.coupled)

    def _start(self, first: Batch) -> Plan:
        """Probe the model on the first batch, and the loss where it is a user's own."""
        # One sample alone does not show whether samples depend on each other.
        plan = plan_for(self.risk, first if first.size > 1 else self._gather(first, 4))
        if self.settings.certify == "none":
            plan = replace(
                plan,
                samples=0,
                certified=dict.fromkeys(plan.certified, False),
                reasons=dict.fromkeys(plan.reasons, "no certificate was asked for"),
            )
        if isinstance(self.risk.loss, Loss | JointLoss):
            return plan
        few, outputs = halving(lambda wanted: self._few(first, wanted), 8)
        with torch.no_grad():
            value = scalar(self.risk.loss, outputs, few.targets)
        if not torch.isfinite(value):
            raise DataError(f"The loss is not finite on {few.where}.")
        kind = classify(self.risk.loss, outputs, few)
        self.risk.loss = JointLoss(self.risk.loss) if kind is None else kind
        return plan

    def _few(self, first: Batch, wanted: int) -> tuple[Batch, Tensor]:
        """Some samples and their outputs."""
        few = self._gather(first, wanted)
        with torch.no_grad():
            return few, self.risk.forward(few)

    def _gather(self, first: Batch, wanted: int) -> Batch:
        """Some samples, from several batches where one has too few."""
        gathered = [first.part(0, wanted)]
        if first.size < wanted:
            shapes = [t.shape[1:] for t in tree_leaves(first.inputs) if isinstance(t, Tensor)]
            for batch in islice(self.risk.batches(), 1, wanted):
                leaves = [t for t in tree_leaves(batch.inputs) if isinstance(t, Tensor)]
                if [t.shape[1:] for t in leaves] == shapes:
                    gathered.append(batch.part(0, wanted))
        return join(gathered).part(0, wanted)

    def give_up_on_samples(self) -> None:
        """Take the loss for one that only all samples together have."""
        loss = self.risk.loss
        assert isinstance(loss, CustomLoss)
        self.risk.loss = JointLoss(loss.call)

    def _find(self, plan: Plan, stream: Iterable[Batch], first: Batch) -> _Found:
        names = list(self.risk.parameters)
        reason = self._joint_reason(plan)
        if reason:
            exact: list[str] = []
            self.reasons = dict.fromkeys(names, reason)
        else:
            exact = [n for n in names if self.curvature == "ggn" or plan.certified[n]]
            self.reasons = dict(plan.reasons)
        found = _Found()
        samples = plan.samples
        if exact:
            samples = self._exact(found, exact, plan, stream, first)
        rest = [n for n in names if n not in exact]
        if rest:
            self._probe(found, rest, plan)
        found.entries = {name: found.entries[name] for name in names}
        found.certificate = Certificate(samples, dict(plan.certified), dict(plan.reasons))
        if self._reduced_precision():
            self.notes.append("TensorFloat-32 is on: about three digits of every value are right")
        found.notes = tuple(self.notes)
        return found

    def _reduced_precision(self) -> bool:
        like = next(iter(self.risk.parameters.values()))
        return (
            like.device.type == "cuda"
            and like.dtype == torch.float32
            and (torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32)
        )

    def _joint_reason(self, plan: Plan) -> str:
        if plan.coupled:
            return "outputs of a sample depend on the other samples of its batch"
        if isinstance(self.risk.loss, JointLoss):
            return f"the loss {self.risk.loss.name} is not a mean or a sum over samples"
        return ""

    def _exact(
        self, found: _Found, names: list[str], plan: Plan, stream: Iterable[Batch], first: Batch
    ) -> int:
        linear = self.curvature == "hessian"
        assert isinstance(self.risk.loss, Loss)
        like = torch.empty(first.size, *plan.outputs, device="meta")
        count = direction_count(self.risk.loss, like, first.targets)
        sweep = Pass(self.risk, names, self.quantity, self.settings, must_be_linear=linear)
        try:
            if count > self.settings.max_directions:
                raise TooManyDirections(count)
            values = sweep.run(stream)
        except TooManyDirections as many:
            self._sketch(found, names, plan, many.count)
            return plan.samples
        self._check_finite(values)
        for name, value in values.items():
            value = value.cpu()
            rule = ", ".join(sorted(sweep.rules[name] - {UNUSED})) or UNUSED
            reason = self.reasons[name] if linear else "Gauss–Newton block, exact for any model"
            if GENERIC in rule:
                reason += "; no fast rule fits, so its per-sample gradients are written out"
            found.entries[name] = _Entry(value, True, torch.zeros_like(value), rule, reason)
        found.total += sum(float(v.sum()) for v in values.values())
        return sweep.certified

    def _sketch(self, found: _Found, names: list[str], plan: Plan, count: int) -> None:
        draws = Draws()
        for k in range(self.estimator.probes):
            draw = Draw(self.estimator.seed * 1_000_003 + k)
            linear = self.curvature == "hessian"
            sweep = Pass(
                self.risk, names, self.quantity, self.settings, must_be_linear=linear, draw=draw
            )
            draws.add(sweep.run(self.risk.batches()))
        note = (
            f"The outputs have {count} directions a sample, more than max_directions="
            f"{self.settings.max_directions}: sketched with {self.estimator.probes} draws. "
            f"Exactness costs {count} backward passes: pass max_directions={count}."
        )
        self._say(note)
        rules = {name: plan.rules[name] for name in names}
        self._estimated(found, draws.estimate(), rules, dict.fromkeys(names, note))

    def _probe(self, found: _Found, names: list[str], plan: Plan) -> None:
        products = self._products(names, plan)
        shapes = {n: (self.risk.parameters[n].shape, self.risk.device) for n in names}
        run = self.estimator.trace if self.quantity == "trace" else self.estimator.diagonal
        estimate = run(products, shapes)
        why = sorted({self.reasons[n] for n in names})
        kind = "Hessian" if self.curvature == "hessian" else "Gauss–Newton"
        self._say(
            f"{kind} blocks of {len(names)} parameters are estimated by "
            f"{type(self.estimator).__name__} with {self.estimator.probes} probes: "
            + "; ".join(why)
            + (". Exact Gauss–Newton values: curvature='ggn'." if self._ggn_helps(plan) else ".")
        )
        self._estimated(found, estimate, dict.fromkeys(names, "probes"), self.reasons)

    def _ggn_helps(self, plan: Plan) -> bool:
        return self.curvature == "hessian" and not self._joint_reason(plan)

    def _estimated(
        self, found: _Found, estimate: Estimate, rules: dict[str, str], reasons: dict[str, str]
    ) -> None:
        self._check_finite(estimate.values)
        for name, rule in rules.items():
            value, stderr = estimate.values[name].cpu(), estimate.stderr[name].cpu()
            written = name in estimate.exact
            reason = reasons[name] + (
                "; products with few vectors give all of it" if written else ""
            )
            found.entries[name] = _Entry(value, written, stderr, rule, reason)
        found.total += estimate.total
        found.stderr = (found.stderr**2 + estimate.total_stderr**2) ** 0.5

    def _say(self, note: str) -> None:
        self.notes.append(note)
        warnings.warn(note, stacklevel=_OUTSIDE)

    def _check_finite(self, values: dict[str, Tensor]) -> None:
        for name, value in values.items():
            if not torch.isfinite(value).all():
                raise DataError(
                    f"The curvature of {name!r} is NaN or infinite: activations overflow or the "
                    "inputs are not finite. Measure in a wider dtype (dtype=torch.float64)."
                )


def _weaker(a: Plan, b: Plan) -> Plan:
    """What both plans allow."""
    certified = {n: a.certified[n] and b.certified[n] for n in a.certified}
    reasons = {n: a.reasons[n] if not a.certified[n] else b.reasons[n] for n in a.reasons}
    return replace(a, coupled=a.coupled or b.coupled, certified=certified, reasons=reasons)
