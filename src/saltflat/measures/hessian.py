"""The trace and the largest eigenvalue of the whole Hessian."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self, final

from saltflat.measurement import Measurement, Symmetry
from saltflat.measures.base import COMPARED, LARGEST, Context, Cost, Measure, Need


@final
@dataclass(frozen=True)
class HessianTrace(Measure):
    """Tr H over all measured parameters, the sum of the blocks in `by_parameter`."""

    name: ClassVar[str] = "hessian_trace"
    title: ClassVar[str] = "Tr H"
    explanation: ClassVar[str] = (
        "The sum of the curvatures along all parameters: how much the loss bends on average."
    )
    paper: ClassVar[str] = "Tsuzuku et al. 2020"
    references: ClassVar[tuple[str, ...]] = ("tsuzuku2020normalized",)
    equation: ClassVar[str] = "(5)"
    needs: ClassVar[frozenset[Need]] = frozenset({"trace"})
    invariant_to: ClassVar[frozenset[Symmetry]] = frozenset()
    adds_up: ClassVar[bool] = True
    needs_layers: ClassVar[bool] = False

    def compute(self, context: Context) -> Measurement:
        trace = context.quantity("trace")
        blocks = {name: float(value) for name, value in trace.values.items()}
        return self.measurement(
            value=sum(blocks.values()),
            **trace.certainty(dict.fromkeys(blocks, 1.0)),
            by_parameter=blocks,
        )


@final
@dataclass(frozen=True)
class HessianMaxEigenvalue(Measure):
    """λ_max(H) over all measured parameters, algebraically largest, by Lanczos iteration.

    Within `tol` λ, which bounds the residual norm ‖Hv − λv‖ and by how much a larger eigenvalue was
    missed, but for a chance of 1e-4; `gap` holds what it came to. The error of the one that was
    found is at most 1e-4 `tol`² λ, but for rounding: by default 1e-10.

    `by_parameter=True` adds the largest eigenvalue of every parameter's own block.
    """

    tol: float = 1e-3
    by_parameter: bool = False

    name: ClassVar[str] = "hessian_max_eigenvalue"
    title: ClassVar[str] = "λ_max(H)"
    explanation: ClassVar[str] = (
        "How much the loss bends along the direction in which it bends most."
    )
    paper: ClassVar[str] = "Keskar et al. 2017; Yao et al. 2018"
    references: ClassVar[tuple[str, ...]] = ("keskar2017large", "yao2018hessian")
    equation: ClassVar[str] = ""
    cost: ClassVar[Cost] = "eigenvalues"
    needs: ClassVar[frozenset[Need]] = frozenset({"passes"})
    invariant_to: ClassVar[frozenset[Symmetry]] = frozenset()
    needs_layers: ClassVar[bool] = False

    def price(self) -> float:
        return LARGEST

    def for_comparison(self) -> Self:
        return replace(self, tol=min(self.tol, COMPARED))

    def compute(self, context: Context) -> Measurement:
        assert context.engine is not None
        names = list(context.risk.parameters)
        largest = context.engine.largest_eigenvalue(names, self.tol)
        wanted = names if self.by_parameter else []
        pairs = context.engine.block_eigenvalues(wanted, self.tol)
        blocks = {name: pair.value for name, pair in pairs.items()}
        return self.measurement(
            value=largest.value, exact=True, gap=largest.gap, by_parameter=blocks
        )
