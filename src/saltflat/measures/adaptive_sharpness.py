"""Adaptive sharpness: the growth of the loss when every weight moves in proportion to itself."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import ClassVar, final

from saltflat.errors import InvalidValue
from saltflat.measurement import EVERY_RESCALING, Measurement, Symmetry
from saltflat.measures.ascent import Ball
from saltflat.measures.base import Context, Measure, Need
from saltflat.measures.perturb import Neighbourhood, check_search


@final
@dataclass(frozen=True)
class AdaptiveSharpness(Measure):
    """max over ‖u‖_p ≤ ρ of L(θ + |w|∘u) − L(θ), w the weight matrices, p = 2 or ∞.

    Kwon et al. 2021, definition 1 with the element-wise normalisation |w|. A rescaling of weights
    rescales |w|∘u with them, so the value does not depend on any. Searched for as `SamSharpness`;
    with `average`, the mean over u normal with E‖u‖² = ρ² (p = 2) or uniform in [−ρ, ρ] (p = ∞).
    """

    name: ClassVar[str] = "adaptive_sharpness"
    title: ClassVar[str] = "max_{‖u‖≤ρ} L(θ + |w|∘u) − L(θ)"
    paper: ClassVar[str] = "Kwon et al. 2021"
    equation: ClassVar[str] = "definition 1"
    needs: ClassVar[frozenset[Need]] = frozenset({"passes"})
    invariant_to: ClassVar[frozenset[Symmetry]] = EVERY_RESCALING

    rho: float = 0.5
    p: float = 2.0
    steps: int = 10
    restarts: int = 1
    average: bool = False
    draws: int = 32

    def __post_init__(self) -> None:
        check_search(self.rho, "rho", self.steps, self.restarts, self.draws)
        if self.p not in (2.0, inf):
            raise InvalidValue(f"p must be 2 or math.inf. Got {self.p!r}.")

    def compute(self, context: Context) -> Measurement:
        around = Neighbourhood(context, Ball(self.rho, self.p), adaptive=True)
        if self.average:
            return self.measurement(**around.average(self.draws).fields())
        return self.measurement(**around.worst(self.steps, self.restarts).fields())
