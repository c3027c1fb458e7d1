"""κ: the squared norm of each weight matrix times the largest eigenvalue of its Hessian."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from saltflat.measurement import Measurement, Symmetry
from saltflat.measures.base import Context, Measure, Need, column_norms


@final
@dataclass(frozen=True)
class Kappa(Measure):
    """κ^l = ‖W_l‖² λ_max(H_l) (Petzka et al. 2019, Definition 1 and Table 1).

    Views: `by_layer` holds κ^l, `max` κ^max and `value` κ^Σ = Σ_l κ^l. Eigenvalues are found by
    Lanczos iteration to a relative `tol`; the residual norms bound their errors, which `gap` adds
    up. The paper's neurons are columns of W (its appendix B) and it gives them ρ alone; with
    `neurons=True`, `by_neuron` holds ‖w(j)‖² λ_max(H_jj), the same formula for the column of input
    unit j. That is one Lanczos iteration a column, so it is slow for all but small networks.
    """

    tol: float = 1e-6
    neurons: bool = False

    name: ClassVar[str] = "kappa"
    title: ClassVar[str] = "Σ_l ‖W_l‖² λ_max(H_l)"
    paper: ClassVar[str] = "Petzka et al. 2019"
    equation: ClassVar[str] = "Definition 1 and Table 1, κ"
    needs: ClassVar[frozenset[Need]] = frozenset({"passes"})
    invariant_to: ClassVar[frozenset[Symmetry]] = frozenset({"layer"})

    def compute(self, context: Context) -> Measurement:
        assert context.engine is not None
        by_layer, by_neuron, gap = {}, {}, 0.0
        for layer in context.layers:
            norm = layer.norm_squared
            value, residual, _ = context.engine.largest_eigenvalue([layer.parameter], self.tol)
            by_layer[layer.name] = norm * value
            gap += norm * residual
            if self.neurons:
                largest = context.engine.column_eigenvalues(layer, self.tol)
                by_neuron[layer.name] = column_norms(layer) * largest
        value = sum(by_layer.values())
        return self.measurement(
            value=value,
            exact=True,
            gap=gap,
            by_layer=by_layer,
            by_neuron=by_neuron,
            max_over="layers",
        )
