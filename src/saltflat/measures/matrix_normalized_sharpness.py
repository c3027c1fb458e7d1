"""Matrix-normalized sharpness: flatness on the scale of each weight matrix."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import ClassVar, final

from saltflat.measurement import Measurement, Symmetry
from saltflat.measures.base import Context, Measure, Need, NotApplicable
from saltflat.measures.cross_fit import NOTE, root_bound


@final
@dataclass(frozen=True)
class MatrixNormalizedSharpness(Measure):
    """Σ_d sqrt(‖W_d‖²_F · Tr H_d) (Tsuzuku et al. 2020, eq. 13).

    A trace below zero (an indefinite loss) counts as zero. Of estimated traces the value is an
    upper bound with an error (`saltflat.measures.cross_fit`).
    """

    name: ClassVar[str] = "matrix_normalized_sharpness"
    title: ClassVar[str] = "Σ_d sqrt(‖W_d‖² Tr H_d)"
    paper: ClassVar[str] = "Tsuzuku et al. 2020"
    equation: ClassVar[str] = "(13)"
    needs: ClassVar[frozenset[Need]] = frozenset({"trace"})
    invariant_to: ClassVar[frozenset[Symmetry]] = frozenset({"layer"})

    def compute(self, context: Context) -> Measurement:
        trace = context.quantity("trace")
        names = {layer.name: layer.parameter for layer in context.layers}
        known = {n: float(trace.values[p]) for n, p in names.items() if p not in trace.draws}
        negative = {name: value for name, value in known.items() if value < 0}
        if len(negative) == len(names):
            raise NotApplicable("The trace of every weight matrix is negative.")
        listed = ", ".join(f"{name} ({value:.3g})" for name, value in negative.items())
        notes = (f"negative traces counted as zero: {listed}",) if negative else ()
        if len(known) == len(names):
            by_layer = {
                x.name: sqrt(x.norm_squared * max(known[x.name], 0.0)) for x in context.layers
            }
            value = sum(by_layer.values())
            return self.measurement(value=value, exact=True, by_layer=by_layer, notes=notes)
        fitted = root_bound(trace, {x.parameter: x.norm_squared for x in context.layers})
        return self.measurement(
            value=fitted.value,
            **fitted.certainty(),
            bound="upper",
            by_layer={name: fitted.by_parameter[p] for name, p in names.items()},
            notes=(NOTE, *notes),
        )
