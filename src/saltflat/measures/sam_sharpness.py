"""SAM sharpness: the growth of the loss within a ball around the weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from saltflat.measurement import Measurement, Symmetry
from saltflat.measures.ascent import Ball
from saltflat.measures.base import Context, Measure, Need
from saltflat.measures.perturb import Neighbourhood, check_search


@final
@dataclass(frozen=True)
class SamSharpness(Measure):
    """max over ‖v‖₂ ≤ ρ of L(θ+v) − L(θ), v over the weight matrices (Foret et al. 2021, eq. 1).

    The maximum is searched for by projected gradient ascent: `steps` gradients from SAM's own point
    ρ g/‖g‖ and from each of `restarts` random ones. With `average`, the mean over v normal with
    E‖v‖² = ρ² instead, from `draws` pairs ±v.
    """

    name: ClassVar[str] = "sam_sharpness"
    title: ClassVar[str] = "max_{‖v‖≤ρ} L(θ+v) − L(θ)"
    paper: ClassVar[str] = "Foret et al. 2021"
    equation: ClassVar[str] = "section 2"
    needs: ClassVar[frozenset[Need]] = frozenset({"passes"})
    invariant_to: ClassVar[frozenset[Symmetry]] = frozenset()

    rho: float = 0.05
    steps: int = 10
    restarts: int = 1
    average: bool = False
    draws: int = 32

    def __post_init__(self) -> None:
        check_search(self.rho, "rho", self.steps, self.restarts, self.draws)

    def compute(self, context: Context) -> Measurement:
        around = Neighbourhood(context, Ball(self.rho))
        if self.average:
            return self.measurement(**around.average(self.draws).fields())
        return self.measurement(**around.worst(self.steps, self.restarts).fields())
