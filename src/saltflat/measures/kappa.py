"""κ: the squared norm of each weight matrix times the largest eigenvalue of its Hessian."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from saltflat.measurement import Measurement, Symmetry
from saltflat.measures.base import Context, Measure, Need, norm_squared


@final
@dataclass(frozen=True)
class Kappa(Measure):
    """κ^l = ‖W_l‖² λ_max(H_l) (Petzka et al. 2019, Definition 1 and Table 1).

    The value is κ^Σ = Σ_l κ^l. Eigenvalues are found by Lanczos iteration to a relative `tol`;
    the residual norms bound their errors, which `gap` adds up.
    """

    tol: float = 1e-6

    name: ClassVar[str] = "kappa"
    title: ClassVar[str] = "Σ_l ‖W_l‖² λ_max(H_l)"
    paper: ClassVar[str] = "Petzka et al. 2019"
    equation: ClassVar[str] = "Definition 1 and Table 1, κ"
    needs: ClassVar[frozenset[Need]] = frozenset({"passes"})
    invariant_to: ClassVar[frozenset[Symmetry]] = frozenset({"layer"})

    def compute(self, context: Context) -> Measurement:
        assert context.engine is not None
        by_layer, gap = {}, 0.0
        for layer in context.layers:
            norm = norm_squared(layer)
            value, residual = context.engine.eigenvalue([layer.parameter], self.tol)
            by_layer[layer.name] = norm * value
            gap += norm * residual
        value = sum(by_layer.values())
        return self.measurement(value=value, exact=True, gap=gap, by_layer=by_layer)
