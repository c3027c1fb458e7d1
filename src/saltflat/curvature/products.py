"""Products of a vector with the Hessian or the Gauss–Newton matrix of the whole risk.

A loss that adds up over samples is differentiated twice, chunk by chunk. A loss that does not is
differentiated in the outputs of all samples together (they are small), and each chunk then
contributes Jᵀ(B J v) + ∇²⟨r, o⟩ v with r = ∂L/∂o: memory still grows only with n·K.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar, final

import torch
from torch import Tensor

from saltflat.curvature.loss_hessian import (
    Additivity,
    check_derivatives,
    insist_on_derivatives,
    lacks_derivative,
    output_product,
)
from saltflat.curvature.plan import Company, Plan, Refutation, taken_for_cross_entropy
from saltflat.curvature.proof import log_softmax_head
from saltflat.curvature.rules import Safe
from saltflat.errors import DataError, NoSecondDerivative
from saltflat.losses import CustomLoss, JointLoss, Loss, divisor
from saltflat.memory import halving
from saltflat.risk import Batch, Risk, join
from saltflat.sharded import ADVICE, refuse_sharded
from saltflat.work import PRODUCT

MatrixName = Literal["hessian", "ggn"]
Vector = Mapping[str, Tensor]
Result = TypeVar("Result")


class _Refuted(Exception):
    """Carries a refutation out of whatever asks for products, to `Products.serve`."""


@final
@dataclass
class Products:
    """v ↦ C v restricted to the blocks `names`, C the Hessian or the Gauss–Newton matrix."""

    risk: Risk
    loss: Loss | JointLoss
    names: Sequence[str]
    matrix: MatrixName
    plan: Plan
    chunk: int
    _calls: int = 0

    def __post_init__(self) -> None:
        refuse_sharded(
            self.risk.model.parameters(),
            "Products with the Hessian take second derivatives in whole parameters",
            ADVICE,
        )
        self.parameters = {name: self.risk.parameters[name] for name in self.names}
        # A user's loss is checked on the first pass over the data.
        self._unchecked = isinstance(self.loss, CustomLoss)
        self._company = Company(self.risk)

    def serve(self, task: Callable[[Products], Result]) -> Result | Refutation:
        """What a task makes of products, or what the first of these refuted."""
        try:
            return task(self)
        except _Refuted as refuted:
            refutation: Refutation = refuted.args[0]
            return refutation

    def __call__(self, vector: Vector) -> dict[str, Tensor]:
        """C v, in float64."""
        check_derivatives(self.loss)
        v = [vector[name].to(p) for name, p in self.parameters.items()]

        def attempt(size: int) -> list[Tensor]:
            self.chunk = size
            return self._product(v)

        try:
            # Samples that depend on each other cannot be cut.
            sums = attempt(self.chunk) if self.plan.coupled else halving(attempt, self.chunk)
        except RuntimeError as error:
            if lacks_derivative(error):
                raise NoSecondDerivative(
                    "The model has no second derivative, which products with the Hessian need "
                    f"({str(error).splitlines()[0]}). Use curvature='ggn' and a loss that is a "
                    "mean or a sum over samples."
                ) from error
            raise
        self._calls += 1
        return dict(zip(self.parameters, sums, strict=True))

    def _product(self, v: list[Tensor]) -> list[Tensor]:
        loss, risk = self.loss, self.risk
        if isinstance(loss, JointLoss):
            risk.insist_on_one_rank(f"the loss {loss.name} is not a mean or a sum over samples")
            return self._joint(loss, v)
        sums = dict(zip(self.parameters, self._zeros(), strict=True))
        additivity = None
        if self._unchecked and isinstance(loss, CustomLoss):
            additivity = Additivity(loss)
        parts = list(sums.values())
        normalisers = risk.reduction.each(lambda: self._add(loss, v, parts, additivity))
        if additivity is not None:
            if not additivity.holds_together(risk.reduction, risk.device):
                raise _Refuted(Refutation(joint=True))
            self._unchecked = False
        scale = divisor(loss, sum(normalisers))
        return [total / scale for total in risk.reduction.totals(sums, risk.device).values()]

    def _add(
        self, loss: Loss, v: list[Tensor], sums: list[Tensor], additivity: Additivity | None
    ) -> float:
        """Add what the samples here give to the sums; returns what they add to the normaliser."""
        normaliser = 0.0
        for batch in self._chunks():
            outputs = self._forward(batch)
            if additivity is not None and not additivity.holds(outputs, batch):
                raise _Refuted(Refutation(joint=True))
            normaliser += loss.normaliser(outputs, batch.targets)
            if self.matrix == "hessian":
                total = loss.total(outputs, batch.targets)
                if not torch.isfinite(total):
                    raise DataError(f"The loss {loss.name} is not finite on {batch.where}.")
                parts = self._twice(total, v)
            else:
                tangent = self._forward_product(outputs, v)
                image = output_product(loss.total, outputs, batch.targets, tangent)
                parts = self._grad(outputs, image)
            _accumulate(sums, parts)
            self.risk.work.add(batch.size, PRODUCT)
        return normaliser

    def _joint(self, loss: JointLoss, v: list[Tensor]) -> list[Tensor]:
        tangents, batches = [], []
        for batch in self._chunks():
            o = self._forward(batch)
            tangents.append(self._forward_product(o, v))
            batches.append(batch.answered(o.detach()))
        everything = join(batches)
        o = everything.inputs.clone().requires_grad_()
        value = loss.value(o, everything.targets)
        if not torch.isfinite(value):
            raise DataError(f"The loss {loss.name} is not finite on all data.")
        (slope,) = torch.autograd.grad(value, o)
        image = output_product(loss.value, o, everything.targets, torch.cat(tangents))
        sums, start = self._zeros(), 0
        for batch in self._chunks():
            rows = slice(start, start + batch.size)
            start += batch.size
            o = self._forward(batch)
            if not torch.allclose(o.detach(), everything.inputs[rows], rtol=1e-3, atol=1e-6):
                raise DataError(
                    f"The data differ between two passes ({batch.where}), so a loss over all "
                    "samples cannot be measured. Fix their order and any augmentation."
                )
            _accumulate(sums, self._grad(o, image[rows]))
            if self.matrix == "hessian":
                _accumulate(sums, self._twice((slope[rows] * o).sum(), v))
            self.risk.work.add(batch.size, PRODUCT)
        return sums

    def _chunks(self) -> Iterator[Batch]:
        return self.risk.chunks(None if self.plan.coupled else self.chunk)

    def _forward(self, batch: Batch) -> Tensor:
        with Safe():
            outputs = self.risk.forward(batch)
        self.risk.check(outputs, batch)
        if self._calls == 0:  # later products have the same graphs
            insist_on_derivatives(outputs, self.parameters.values())
            if taken_for_cross_entropy(self.loss, self.risk) and not log_softmax_head(outputs, 1):
                raise _Refuted(Refutation(replace(self.plan, log_probabilities=False)).told)
            beside = batch, outputs, self.plan.rounding
            if not self.plan.coupled and not self._company.is_indifferent(*beside):
                raise _Refuted(Refutation(replace(self.plan, coupled=True)).told)
        return outputs

    def _zeros(self) -> list[Tensor]:
        return [torch.zeros_like(p, dtype=torch.float64) for p in self.parameters.values()]

    def _grad(self, outputs: Tensor, cotangent: Tensor) -> Sequence[Tensor | None]:
        return torch.autograd.grad(
            outputs, list(self.parameters.values()), cotangent, allow_unused=True, retain_graph=True
        )

    def _twice(self, value: Tensor, v: list[Tensor]) -> Sequence[Tensor | None]:
        """∇²value · v by differentiating ⟨∇value, v⟩."""
        parameters = list(self.parameters.values())
        first = torch.autograd.grad(
            value, parameters, create_graph=True, allow_unused=True, retain_graph=True
        )
        gradients, vectors = _used(first, v)
        if not gradients:
            return [None] * len(parameters)
        return torch.autograd.grad(gradients, parameters, vectors, allow_unused=True)

    def _forward_product(self, outputs: Tensor, v: list[Tensor]) -> Tensor:
        """J v by differentiating Jᵀu, which is linear in u, in u."""
        u = torch.zeros_like(outputs, requires_grad=True)
        pulled = torch.autograd.grad(
            outputs, list(self.parameters.values()), u, create_graph=True, allow_unused=True
        )
        gradients, vectors = _used(pulled, v)
        if not gradients:
            return torch.zeros_like(outputs)
        (tangent,) = torch.autograd.grad(gradients, u, vectors, retain_graph=True)
        return tangent.detach()


def _used(
    gradients: Sequence[Tensor | None], v: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients that can be differentiated, with their vectors."""
    both = [(g, x) for g, x in zip(gradients, v, strict=True) if g is not None and g.requires_grad]
    return [g for g, _ in both], [x for _, x in both]


def _accumulate(sums: list[Tensor], parts: Sequence[Tensor | None]) -> None:
    for total, part in zip(sums, parts, strict=True):
        if part is not None:
            total += part.detach()
