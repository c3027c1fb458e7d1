"""κ_τ: the squared norm of each weight matrix times the trace of its Hessian."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from saltflat.measurement import Measurement, Symmetry
from saltflat.measures.base import Context, Measure, Need, norm_squared


@final
@dataclass(frozen=True)
class KappaTrace(Measure):
    """κ_τ^l = ‖W_l‖² Tr H_l (Petzka et al. 2019, Table 1); the value is κ_τ^Σ = Σ_l κ_τ^l."""

    name: ClassVar[str] = "kappa_trace"
    title: ClassVar[str] = "Σ_l ‖W_l‖² Tr H_l"
    paper: ClassVar[str] = "Petzka et al. 2019"
    equation: ClassVar[str] = "Table 1, κ_τ"
    needs: ClassVar[frozenset[Need]] = frozenset({"trace"})
    invariant_to: ClassVar[frozenset[Symmetry]] = frozenset({"layer"})

    def compute(self, context: Context) -> Measurement:
        trace = context.quantity("trace")
        norms = {layer.parameter: norm_squared(layer) for layer in context.layers}
        by_layer = {
            layer.name: norms[layer.parameter] * float(trace.values[layer.parameter])
            for layer in context.layers
        }
        return self.measurement(
            value=sum(by_layer.values()),
            exact=trace.exact(norms),
            stderr=trace.stderr(norms),
            by_layer=by_layer,
        )
