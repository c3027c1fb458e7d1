"""κ_τ: the squared norm of each weight matrix times the trace of its Hessian."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from saltflat.measurement import Measurement, Symmetry
from saltflat.measures.base import Context, Measure, Need, column_norms


@final
@dataclass(frozen=True)
class KappaTrace(Measure):
    """κ_τ^l = ‖W_l‖² Tr H_l (Petzka et al. 2019, Table 1).

    Views: `by_layer` holds κ_τ^l, `max` κ_τ^max and `value` κ_τ^Σ. The paper's neurons are columns
    of W (its appendix B) and it gives them ρ alone; `by_neuron` holds ‖w(j)‖² Tr H_jj, the same
    formula for the column of input unit j. These do not add up to κ_τ^l, and need the diagonal of
    the Hessian; `neurons=False` leaves them out and needs its trace alone.
    """

    neurons: bool = True

    name: ClassVar[str] = "kappa_trace"
    title: ClassVar[str] = "Σ_l ‖W_l‖² Tr H_l"
    paper: ClassVar[str] = "Petzka et al. 2019"
    equation: ClassVar[str] = "Table 1, κ_τ"
    needs: ClassVar[frozenset[Need]] = frozenset({"trace", "diagonal"})
    invariant_to: ClassVar[frozenset[Symmetry]] = frozenset({"layer"})

    def required(self) -> frozenset[Need]:
        return self.needs if self.neurons else frozenset({"trace"})

    def compute(self, context: Context) -> Measurement:
        trace = context.quantity("trace")
        norms = {layer.parameter: layer.norm_squared for layer in context.layers}
        by_layer = {
            layer.name: norms[layer.parameter] * float(trace.values[layer.parameter])
            for layer in context.layers
        }
        return self.measurement(
            value=sum(by_layer.values()),
            **trace.certainty(norms),
            by_layer=by_layer,
            by_neuron=self._columns(context) if self.neurons else {},
            max_over="layers",
        )

    def _columns(self, context: Context) -> dict[str, Tensor]:
        diagonal = context.quantity("diagonal").values
        return {
            layer.name: column_norms(layer) * layer.matrix.columns(diagonal[layer.parameter])
            for layer in context.layers
        }
