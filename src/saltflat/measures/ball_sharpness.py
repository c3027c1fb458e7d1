"""Sharpness in a ball around the weights: the largest growth of the loss there, searched for."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import ClassVar, final

from saltflat.errors import InvalidValue, NotApplicable
from saltflat.landscape import Ball, Neighbourhood, check_search
from saltflat.measurement import EVERY_RESCALING, Measurement, Symmetry
from saltflat.measures.base import Context, Cost, Measure, Need
from saltflat.work import FORWARD


@final
@dataclass(frozen=True)
class DeltaSharpness(Measure):
    """max over ‖v‖₂ ≤ δ of (L(θ+v) − L(θ)) / (1 + L(θ)), v over the weight matrices.

    Keskar et al. 2017, as in Yi et al. 2019, eq. 1, for a loss that is not negative. The maximum is
    searched for by projected gradient ascent: `steps` gradients from each of 1 + `restarts` starts.
    """

    name: ClassVar[str] = "delta_sharpness"
    title: ClassVar[str] = "max_{‖v‖≤δ} (L(θ+v) − L(θ)) / (1 + L(θ))"
    explanation: ClassVar[str] = (
        "The largest growth of the loss within a small ball around the weights, relative to "
        "one plus the loss."
    )
    paper: ClassVar[str] = "Keskar et al. 2017"
    references: ClassVar[tuple[str, ...]] = ("keskar2017large", "yi2019bn")
    equation: ClassVar[str] = "(1) of Yi et al. 2019"
    needs: ClassVar[frozenset[Need]] = frozenset({"passes"})
    invariant_to: ClassVar[frozenset[Symmetry]] = frozenset()
    cost: ClassVar[Cost] = "perturbations"
    searched: ClassVar[bool] = True

    delta: float = 1e-3
    steps: int = 10
    restarts: int = 1

    def __post_init__(self) -> None:
        check_search(self.delta, "delta", self.steps, self.restarts)

    def price(self) -> float:
        return ascent_price(self.steps, self.restarts)

    def compute(self, context: Context) -> Measurement:
        growth = _around(context, Ball(self.delta)).worst(self.steps, self.restarts)
        loss = growth["details"]["loss"]
        if loss < 0:
            raise NotApplicable(
                "delta_sharpness divides by 1 + loss and needs a loss that is not negative. Got "
                f"{loss:.3g}; use sam_sharpness."
            )
        return self.measurement(**growth | {"value": growth["value"] / (1 + loss)})


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
    explanation: ClassVar[str] = (
        "The largest growth of the loss within a ball of fixed radius around the weights, "
        "which SAM trains against."
    )
    paper: ClassVar[str] = "Foret et al. 2021"
    references: ClassVar[tuple[str, ...]] = ("foret2021sharpness",)
    equation: ClassVar[str] = "section 2"
    needs: ClassVar[frozenset[Need]] = frozenset({"passes"})
    invariant_to: ClassVar[frozenset[Symmetry]] = frozenset()
    cost: ClassVar[Cost] = "perturbations"
    searched: ClassVar[bool] = True

    rho: float = 0.05
    steps: int = 10
    restarts: int = 1
    average: bool = False
    draws: int = 32

    def __post_init__(self) -> None:
        check_search(self.rho, "rho", self.steps, self.restarts, self.draws)

    def price(self) -> float:
        return _price(self)

    def compute(self, context: Context) -> Measurement:
        return _growth(self, _around(context, Ball(self.rho)))


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
    explanation: ClassVar[str] = (
        "The largest growth of the loss when every weight moves by at most a share of its own size."
    )
    paper: ClassVar[str] = "Kwon et al. 2021"
    references: ClassVar[tuple[str, ...]] = ("kwon2021asam",)
    equation: ClassVar[str] = "definition 1"
    needs: ClassVar[frozenset[Need]] = frozenset({"passes"})
    invariant_to: ClassVar[frozenset[Symmetry]] = EVERY_RESCALING
    cost: ClassVar[Cost] = "perturbations"
    searched: ClassVar[bool] = True

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

    def price(self) -> float:
        return _price(self)

    def compute(self, context: Context) -> Measurement:
        return _growth(self, _around(context, Ball(self.rho, self.p), adaptive=True))


def _around(context: Context, ball: Ball, *, adaptive: bool = False) -> Neighbourhood:
    """Only weight matrices move: biases and normalisation parameters do not."""
    return Neighbourhood(context.landscape(), ball, seed=context.seed, adaptive=adaptive)


def ascent_price(steps: int, restarts: int) -> float:
    """One gradient where the weights are, then `steps` of them from every start."""
    return 1.0 + steps * (1 + restarts)


def _price(measure: SamSharpness | AdaptiveSharpness) -> float:
    """A pair of forward passes for every draw of an average."""
    if measure.average:
        return (1 + 2 * measure.draws) * FORWARD
    return ascent_price(measure.steps, measure.restarts)


def _growth(measure: SamSharpness | AdaptiveSharpness, around: Neighbourhood) -> Measurement:
    """On average or at worst, as the measure's settings say."""
    if measure.average:
        return measure.measurement(**around.average(measure.draws))
    return measure.measurement(**around.worst(measure.steps, measure.restarts))
