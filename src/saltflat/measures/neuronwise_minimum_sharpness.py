"""Neuron-wise minimum sharpness: the least trace of the Hessian over all rescalings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from saltflat.measurement import EVERY_RESCALING, Measurement, Symmetry
from saltflat.measures.base import Context, Measure, Need
from saltflat.measures.minimum_sharpness import least_fields, minimised


@final
@dataclass(frozen=True)
class NeuronwiseMinimumSharpness(Measure):
    """min Tr H over every positive rescaling that keeps the function, unit by unit.

    Σ diag[o,i] exp(−2(e_o − e_i)) over the scales e of all units: a convex problem, matrix
    balancing. It carries minimum sharpness (Ibayashi et al. 2021) from layers to units. Of
    estimated curvature the value is an upper bound with an error: see
    `saltflat.measures.cross_fit`.
    """

    name: ClassVar[str] = "neuronwise_minimum_sharpness"
    title: ClassVar[str] = "min over all rescalings of Tr H"
    paper: ClassVar[str] = "saltflat, after Ibayashi et al. 2021"
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
