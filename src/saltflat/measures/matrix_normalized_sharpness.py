"""Matrix-normalized sharpness: flatness on the scale of each weight matrix."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import ClassVar, final

from saltflat.measurement import Measurement, Symmetry
from saltflat.measures.base import Context, Measure, Need, NotApplicable


@final
@dataclass(frozen=True)
class MatrixNormalizedSharpness(Measure):
    """Σ_d sqrt(‖W_d‖²_F · Tr H_d) (Tsuzuku et al. 2020, eq. 13).

    A trace below zero (an indefinite loss, or the noise of an estimate) counts as zero.
    """

    name: ClassVar[str] = "matrix_normalized_sharpness"
    title: ClassVar[str] = "Σ_d sqrt(‖W_d‖² Tr H_d)"
    paper: ClassVar[str] = "Tsuzuku et al. 2020"
    equation: ClassVar[str] = "(13)"
    needs: ClassVar[frozenset[Need]] = frozenset({"trace"})
    invariant_to: ClassVar[frozenset[Symmetry]] = frozenset({"layer"})

    def compute(self, context: Context) -> Measurement:
        trace = context.quantity("trace")
        by_layer, slopes, clipped = {}, {}, []
        for layer in context.layers:
            curvature, norm = float(trace.values[layer.parameter]), layer.norm_squared
            if curvature < 0:
                clipped.append(f"{layer.name} ({curvature:.3g})")
            root = sqrt(norm * max(curvature, 0.0))
            by_layer[layer.name] = root
            # d sqrt(n t) / dt, for the standard error; near 0, where it would be infinite or 0,
            # the slope one standard error away
            spread = trace.stderr({layer.parameter: 1.0})
            near = curvature > -3 * spread
            slopes[layer.parameter] = sqrt(norm / max(curvature, spread)) / 2 if near else 0.0
        if len(clipped) == len(by_layer):
            raise NotApplicable("The trace of every weight matrix is negative.")
        notes = (f"negative traces counted as zero: {', '.join(clipped)}",) if clipped else ()
        return self.measurement(
            value=sum(by_layer.values()),
            exact=trace.exact(slopes),
            stderr=trace.stderr(slopes),
            by_layer=by_layer,
            notes=notes,
        )
