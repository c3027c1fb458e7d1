"""δ-sharpness: the largest growth of the loss in a small ball, relative to 1 + loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from saltflat.measurement import Measurement, Symmetry
from saltflat.measures.ascent import Ball
from saltflat.measures.base import Context, Measure, Need, NotApplicable
from saltflat.measures.perturb import Neighbourhood, check_search


@final
@dataclass(frozen=True)
class DeltaSharpness(Measure):
    """max over ‖v‖₂ ≤ δ of (L(θ+v) − L(θ)) / (1 + L(θ)), v over the weight matrices.

    Keskar et al. 2017, as in Yi et al. 2019, eq. 1, for a loss that is not negative. The maximum is
    searched for by projected gradient ascent: `steps` gradients from each of 1 + `restarts` starts.
    """

    name: ClassVar[str] = "delta_sharpness"
    title: ClassVar[str] = "max_{‖v‖≤δ} (L(θ+v) − L(θ)) / (1 + L(θ))"
    paper: ClassVar[str] = "Keskar et al. 2017"
    equation: ClassVar[str] = "(1) of Yi et al. 2019"
    needs: ClassVar[frozenset[Need]] = frozenset({"passes"})
    invariant_to: ClassVar[frozenset[Symmetry]] = frozenset()

    delta: float = 1e-3
    steps: int = 10
    restarts: int = 1

    def __post_init__(self) -> None:
        check_search(self.delta, "delta", self.steps, self.restarts)

    def compute(self, context: Context) -> Measurement:
        found = Neighbourhood(context, Ball(self.delta)).worst(self.steps, self.restarts)
        if found.loss < 0:
            raise NotApplicable(
                "delta_sharpness divides by 1 + loss and needs a loss that is not negative. Got "
                f"{found.loss:.3g}; use sam_sharpness."
            )
        return self.measurement(
            value=found.value / (1 + found.loss),
            exact=False,
            bound="lower",
            details=found.details,
            notes=found.notes,
        )
