"""The Fisher–Rao norm, parameter by parameter or as a whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, final

import torch

from saltflat.checks import check_choice
from saltflat.errors import NotApplicable
from saltflat.landscape import shifted
from saltflat.losses import Loss, divisor
from saltflat.measurement import EVERY_RESCALING, Measurement, Symmetry
from saltflat.measures.base import Context, Measure, Need
from saltflat.risk import Risk


@final
@dataclass(frozen=True)
class FisherRaoNorm(Measure):
    """Σ_i θ_i² E[(∂ℓ/∂θ_i)²] over weight matrices (Tsuzuku et al. 2020, eq. 25).

    `form="liang"` gives the norm of Liang et al. (2019), E⟨θ, ∂ℓ/∂θ⟩², by its closed form
    D² E⟨∂ℓ/∂o, o⟩² for networks that are homogeneous of degree D in their weights; whether one is,
    and of what degree, is found out by doubling the weights.
    """

    form: Literal["parameterwise", "liang"] = "parameterwise"

    name: ClassVar[str] = "fisher_rao_norm"
    title: ClassVar[str] = "Σ_i θ_i² E[(∂ℓ/∂θ_i)²]"
    explanation: ClassVar[str] = (
        "The mean squared slope of the loss along each weight, biases left out, times the "
        "weight's squared size."
    )
    paper: ClassVar[str] = "Liang et al. 2019; Tsuzuku et al. 2020"
    references: ClassVar[tuple[str, ...]] = ("liang2019fisher", "tsuzuku2020normalized")
    equation: ClassVar[str] = "(25)"
    needs: ClassVar[frozenset[Need]] = frozenset({"fisher"})
    invariant_to: ClassVar[frozenset[Symmetry]] = EVERY_RESCALING

    def __post_init__(self) -> None:
        check_choice("The form of FisherRaoNorm", self.form, ("parameterwise", "liang"))

    def required(self) -> frozenset[Need]:
        return frozenset({"passes"}) if self.form == "liang" else self.needs

    def compute(self, context: Context) -> Measurement:
        if self.form == "liang":
            return self._liang(context)
        fisher = context.quantity("fisher")
        by_layer = {x.name: float(fisher.values[x.parameter]) for x in context.layers}
        every = {layer.parameter: 1.0 for layer in context.layers}
        return self.measurement(
            value=sum(by_layer.values()),
            exact=True,
            **fisher.sampled(every),
            by_layer=by_layer,
        )

    def _liang(self, context: Context) -> Measurement:
        risk, loss = context.risk, context.loss
        if not isinstance(loss, Loss):
            raise NotApplicable("The loss is not a mean or a sum over samples.")
        degree = _degree(context)
        parts = risk.reduction.each(lambda: _squares(risk, loss))
        total, samples, normaliser = map(sum, zip(*parts, strict=True))
        # The risk is the mean of ℓ = s n / N over the n samples that count, or the sum of ℓ = s.
        scale = samples / divisor(loss, normaliser) if loss.mean else 1.0
        value = degree**2 * total * scale**2 / samples
        return self.measurement(value=value, exact=True, details={"degree": degree})


def _squares(risk: Risk, loss: Loss) -> tuple[float, int, float]:
    """Σ ⟨∂ℓ/∂o, o⟩² over the samples here, how many of them count, and the loss's normaliser."""
    total, samples, normaliser = 0.0, 0, 0.0
    for batch in risk.batches():
        with torch.no_grad():
            outputs = risk.forward(batch)
        at = outputs.detach().requires_grad_()
        (slope,) = torch.autograd.grad(loss.total(at, batch.targets), at)
        inner = (slope * outputs).double().reshape(batch.size, -1).sum(1)
        total += float(inner.square().sum())
        samples += loss.counted(outputs, batch.targets)
        normaliser += loss.normaliser(outputs, batch.targets)
    return total, samples, normaliser


def _degree(context: Context) -> int:
    """D with f(2θ) = 2^D f(θ), θ the weight matrices."""
    risk = context.risk
    few = risk.some(8)
    with torch.no_grad():
        before = risk.forward(few)
        weights = {layer.parameter: layer.weight for layer in context.layers}
        with shifted(risk.parameters, weights):
            after = risk.forward(few)
    sizes = before.abs().double().sum(), after.abs().double().sum()
    degree = round(float((sizes[1] / sizes[0]).log2())) if all(s > 0 for s in sizes) else 0
    off = (after - before * 2.0**degree).abs().max()
    if degree < 1 or off > 1e-4 * after.abs().max():
        raise NotApplicable(
            "The network is not homogeneous in its weights (it has biases, normalisation or a "
            "curved activation), so Liang's closed form does not hold."
        )
    return degree
