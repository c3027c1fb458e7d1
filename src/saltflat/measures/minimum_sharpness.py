"""Minimum sharpness: the least trace of the Hessian over rescalings, of layers or of units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch

from saltflat.curvature import Quantity, mean_error
from saltflat.errors import NegativeCurvature, NotApplicable, listed
from saltflat.measurement import EVERY_RESCALING, Measurement, Symmetry
from saltflat.measures.base import Context, Measure, Need
from saltflat.measures.cross_fit import NOTE, Line, cross_fit
from saltflat.symmetries import (
    Group,
    Least,
    class_masses,
    least_trace,
    noisy_scaling,
    uniform_parameters,
)


@final
@dataclass(frozen=True)
class MinimumSharpness(Measure):
    """min_α Tr H over all α-scalings (Ibayashi et al. 2021, eq. 1 and Theorem 1).

    The α-scalings are the rescalings of whole layers that keep the function, found for any graph.
    Without biases in a chain of D layers the value is D (Π_d Tr H_d)^{1/D}; in general it is the
    minimum of a geometric program. `details["alpha"]` holds the factor of every weight at the
    minimum, `details["logs"]` the element of the group.

    A layer whose curvature can be driven to zero (one that feeds BatchNorm, or a dead one) adds
    nothing; it is named, and `details["on_sphere"]` is the value with such layers measured on
    their unit sphere instead, Σ_o ‖w_o‖² Tr H_{w_o} over their output units.

    Of estimated curvature the value is an upper bound with an error: see
    `saltflat.measures.cross_fit`.
    """

    name: ClassVar[str] = "minimum_sharpness"
    title: ClassVar[str] = "min_α Tr H"
    explanation: ClassVar[str] = (
        "The least Hessian trace that any rescaling of whole layers reaches without changing "
        "the function."
    )
    paper: ClassVar[str] = "Ibayashi et al. 2021"
    references: ClassVar[tuple[str, ...]] = ("ibayashi2021minimum",)
    equation: ClassVar[str] = "(1), Theorem 1"
    needs: ClassVar[frozenset[Need]] = frozenset({"trace"})
    invariant_to: ClassVar[frozenset[Symmetry]] = frozenset({"layer"})

    def compute(self, context: Context) -> Measurement:
        group = context.group.only("layer")
        trace = context.quantity("trace")
        single = uniform_parameters(group, trace.values)
        # Scales that differ within a parameter (a concatenation): entries are needed.
        source = trace if len(single) == len(trace.values) else context.quantity("diagonal")
        least = minimised(group, source)
        fields = least_fields(group, source, least)
        details: dict[str, Any] = {
            "alpha": alphas(least, context.layers),
            "logs": least.element.logs,
        }
        if least.vanishing:
            details["on_sphere"] = fields["value"] + _on_sphere(context, least)
        return self.measurement(**fields, details=details)


@final
@dataclass(frozen=True)
class NeuronwiseMinimumSharpness(Measure):
    """min Tr H over every positive rescaling that keeps the function, unit by unit.

    Σ diag[o,i] exp(−2(e_o − e_i)) over the scales e of all units: a convex problem, matrix
    balancing. It carries minimum sharpness (Ibayashi et al. 2021) from layers to units. Of
    estimated curvature the value is an upper bound with an error: see
    `saltflat.measures.cross_fit`.

    `sampling` is not known: it is that of Σ diag ∘ exp(−2(e_o − e_i)) at the minimum, which does
    not move to first order, but the scales are known when the samples' own diagonals are gone. It
    is had for a second sweep, as `hessian_trace` of `symmetries(model, x).balance(model, data)`,
    whose trace is this value.
    """

    name: ClassVar[str] = "neuronwise_minimum_sharpness"
    title: ClassVar[str] = "min over all rescalings of Tr H"
    explanation: ClassVar[str] = (
        "The least Hessian trace that any rescaling, of single units too, reaches without "
        "changing the function."
    )
    paper: ClassVar[str] = "saltflat, after Ibayashi et al. 2021"
    references: ClassVar[tuple[str, ...]] = ("saltflat", "ibayashi2021minimum")
    equation: ClassVar[str] = ""
    needs: ClassVar[frozenset[Need]] = frozenset({"diagonal"})
    invariant_to: ClassVar[frozenset[Symmetry]] = EVERY_RESCALING

    def compute(self, context: Context) -> Measurement:
        diagonal = context.quantity("diagonal")
        least = minimised(context.group, diagonal)
        return self.measurement(
            **least_fields(context.group, diagonal, least),
            details={"logs": least.element.logs, "dimension": len(context.group)},
        )


def minimised(group: Group, source: Quantity) -> Least:
    """The least trace, refused where curvature is negative beyond its error."""
    noise = None
    if source.draws:
        masses = torch.from_numpy(class_masses(group, source.values, source.draws))
        noise = mean_error(masses, source.counts)[1].numpy()
    try:
        return least_trace(group, source.values, noise, source.degrees)
    except NegativeCurvature as error:
        raise NotApplicable(str(error)) from error


def least_fields(group: Group, source: Quantity, least: Least) -> dict[str, Any]:
    """Value, certainty and notes of a least trace, as fields of a measurement.

    Where estimates decide the rescaling, the value is a bound from above: each fold of the draws
    is rescaled by what the others say.
    """
    if not source.draws:
        return {
            "value": least.value,
            "exact": True,
            **source.sampled(_shares(source, least)),
            "gap": least.gap,
            "by_parameter": least.by_parameter,
            "notes": notes(least),
        }
    masses = torch.from_numpy(class_masses(group, source.values, source.draws))

    def choose(rest: Sequence[int]) -> Line:
        mean, errors = mean_error(masses[rest], [source.counts[k] for k in rest])
        return Line(noisy_scaling(group, source.values, mean.numpy(), errors.numpy()).slopes)

    fitted = cross_fit(source, choose)
    bounds = any(name in source.draws for name in group.parameters())
    return {
        "value": fitted.value,
        **fitted.certainty(),
        "bound": "upper" if bounds else None,
        "by_parameter": {name: fitted.by_parameter[name] for name in source.values},
        "notes": (*((NOTE,) if bounds else ()), *notes(least)),
    }


def _shares(source: Quantity, least: Least) -> dict[str, float]:
    """The derivatives of the least trace in the traces, which are the factors at the minimum: the
    minimum does not move to first order."""
    totals = {name: float(value.sum()) for name, value in source.values.items()}
    return {n: least.by_parameter[n] / total for n, total in totals.items() if total}


def alphas(least: Least, layers: Any) -> dict[str, float]:
    """The factor of every weight matrix, the geometric mean over its entries."""
    factors = least.element.factors()
    return {
        layer.parameter: float(factors[layer.parameter].log().mean().exp())
        if layer.parameter in factors
        else 1.0
        for layer in layers
    }


def notes(least: Least) -> tuple[str, ...]:
    lines = []
    if least.negative:
        lines.append(
            f"estimated below zero, within its error: the curvature of {listed(least.negative)}"
        )
    if least.vanishing:
        lines.append(
            f"not attained: rescaling drives the curvature of {listed(least.vanishing)} to zero "
            "without changing the function"
        )
    return tuple(lines)


def _on_sphere(context: Context, least: Least) -> float:
    """Σ_o ‖w_o‖² Tr H_{w_o} over the output units of the weights that vanish."""
    total, values = 0.0, context.quantity("diagonal").values
    for layer in context.layers:
        if layer.parameter in least.vanishing:
            norms = layer.matrix.rows(layer.weight.to("cpu", torch.float64).square())
            total += float((norms * layer.matrix.rows(values[layer.parameter])).sum())
    return total
