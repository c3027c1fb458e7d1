"""The trace of the Hessian."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from saltflat.measurement import Measurement, Symmetry
from saltflat.measures.base import Context, Measure, Need


@final
@dataclass(frozen=True)
class HessianTrace(Measure):
    """Tr H over all measured parameters, the sum of the blocks in `by_parameter`."""

    name: ClassVar[str] = "hessian_trace"
    title: ClassVar[str] = "Tr H"
    paper: ClassVar[str] = "Tsuzuku et al. 2020"
    equation: ClassVar[str] = "(5)"
    needs: ClassVar[frozenset[Need]] = frozenset({"trace"})
    invariant_to: ClassVar[frozenset[Symmetry]] = frozenset()

    def compute(self, context: Context) -> Measurement:
        trace = context.quantity("trace")
        blocks = {name: float(value) for name, value in trace.values.items()}
        return self.measurement(
            value=sum(blocks.values()),
            **trace.certainty(dict.fromkeys(blocks, 1.0)),
            by_parameter=blocks,
        )
