"""BN-Sharpness: the loss along the sharpest direction, each filter measured by its own norm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, final

import numpy as np
import torch
from torch import Tensor

from saltflat.checks import check_choice, check_integer, check_number
from saltflat.curvature import Layer
from saltflat.errors import NotApplicable
from saltflat.landscape import (
    BatchSurface,
    Feeds,
    Filters,
    Point,
    Region,
    Spheres,
    ascend,
    check_search,
    gaussian,
    near_rounding,
)
from saltflat.measurement import Measurement, Symmetry
from saltflat.measures.base import Context, Cost, Measure, Need
from saltflat.risk import Risk
from saltflat.sharded import ADVICE, refuse_sharded


@final
@dataclass(frozen=True)
class BNSharpness(Measure):
    """sup_v δ^{−1/p} (∫_{−δ}^{δ} |(L(θ+tv) − L(θ))/δ|^p dt)^{1/p} (Yi et al. 2019, eq. 5).

    v has ‖v_i‖ = ‖θ_i‖ for every unit or filter i that feeds BatchNorm, and is one joint unit
    vector over the other weight matrices. L is the mean over the data's batches of the loss with
    batch statistics, so the value depends on the batch size. It is invariant to the scale of those
    filters, exactly so as BatchNorm's eps goes to 0.

    strategy="ascent": Riemannian gradient ascent from the gradient's direction and from `restarts`
    random ones, `steps` evaluations each; the integral by `nodes` Gauss–Legendre nodes on either
    side of 0. A lower bound of the supremum.
    strategy="small_delta": the limit for δ → 0, (2/(p+1))^{1/p} (Σ_i ‖θ_i‖‖g_i‖ + ‖g_rest‖) with
    g = ∇L(θ), for the price of one gradient.
    """

    name: ClassVar[str] = "bn_sharpness"
    title: ClassVar[str] = "sup_v δ^{−1/p} (∫ |(L(θ+tv) − L(θ))/δ|^p dt)^{1/p}"
    explanation: ClassVar[str] = (
        "The fastest change of the loss over a short step, with every filter that feeds "
        "BatchNorm measured by its own length."
    )
    paper: ClassVar[str] = "Yi et al. 2019"
    references: ClassVar[tuple[str, ...]] = ("yi2019bn",)
    equation: ClassVar[str] = "(5)"
    needs: ClassVar[frozenset[Need]] = frozenset({"passes"})
    invariant_to: ClassVar[frozenset[Symmetry]] = frozenset({"batchnorm"})
    cost: ClassVar[Cost] = "perturbations"
    searched: ClassVar[bool] = True
    batch_statistics: ClassVar[bool] = True

    p: float = 2.0
    delta: float = 1e-3
    strategy: Literal["ascent", "small_delta"] = "ascent"
    steps: int = 4
    restarts: int = 1
    nodes: int = 2

    def __post_init__(self) -> None:
        check_search(self.delta, "delta", self.steps, self.restarts)
        check_number("p", self.p, least=1)
        check_integer("nodes", self.nodes)
        check_choice("strategy", self.strategy, ("ascent", "small_delta"))

    def price(self) -> float:
        """A gradient at every node, on both sides, for every step of the search."""
        steps = self.steps * (1 + self.restarts) if self.strategy == "ascent" else 0
        return 1.0 + 2 * self.nodes * steps

    def compute(self, context: Context) -> Measurement:
        fed = feeding(context.risk, context.layers)
        names = [layer.name for layer in context.layers if fed[layer.parameter].any()]
        if not names:
            raise NotApplicable(
                "bn_sharpness needs a weight matrix whose outputs go straight to BatchNorm; the "
                "model has none. Use sam_sharpness or adaptive_sharpness."
            )
        directions = Directions(context.layers, fed)
        surface = BatchSurface(context.risk, list(fed))
        loss, gradient = surface.gradient()
        limit = (2 / (self.p + 1)) ** (1 / self.p) * directions.slope(gradient)
        value, notes = limit, [f"batch statistics: depends on the batch size {surface.batch_size}"]
        if self.strategy == "ascent":
            value = self._search(surface, loss, directions, gradient, context.seed)
            dtype = next(iter(surface.parameters.values())).dtype
            notes += near_rounding(value * self.delta, loss, dtype)
        else:
            notes.append("the limit for δ → 0")
        if zeros := directions.zeros():
            notes.append(f"filters that are zero, so have no direction and stay: {zeros}")
        return self.measurement(
            value=value,
            exact=self.strategy == "small_delta",
            bound="lower" if self.strategy == "ascent" else None,
            details=self._details(surface, loss, limit, names),
            notes=tuple(notes),
        )

    def _details(
        self, surface: BatchSurface, loss: float, limit: float, names: list[str]
    ) -> dict[str, Any]:
        return {
            "batch_size": surface.batch_size,
            "batches": surface.batches,
            "loss": loss,
            "small_delta": limit,
            "feeds_batchnorm": names,
            "evaluations": surface.evaluations,
        }

    def _search(
        self,
        surface: BatchSurface,
        loss: float,
        directions: Directions,
        gradient: Point,
        seed: int,
    ) -> float:
        generator = torch.Generator().manual_seed(seed)
        rule = _two_sided(self.nodes)

        def along(v: Point) -> tuple[float, Point]:
            """∫_{−1}^{1} |ΔL(sδv)/δ|^p ds, and its gradient in v."""
            total = 0.0
            slope = {name: torch.zeros_like(x) for name, x in v.items()}
            for s, weight in rule:
                shift = {name: s * self.delta * x for name, x in v.items()}
                there, g = surface.gradient(shift)
                rise = (there - loss) / self.delta
                total += weight * abs(rise) ** self.p
                share = weight * self.p * abs(rise) ** (self.p - 1) * s * np.sign(rise)
                for name, x in slope.items():
                    x += share * g[name]
            return total, slope

        def starts() -> Iterator[Point]:
            yield directions.farthest(gradient)
            for _ in range(self.restarts):
                yield directions.farthest(gaussian(gradient, generator))

        summit = ascend(along, directions, starts(), self.steps)
        return float(summit.value ** (1 / self.p))


def _two_sided(nodes: int) -> list[tuple[float, float]]:
    """Gauss–Legendre nodes and weights on [−1, 0] and [0, 1]: |·|^p has a kink at 0."""
    x, w = np.polynomial.legendre.leggauss(nodes)
    half = [(float(a + 1) / 2, float(b) / 2) for a, b in zip(x, w, strict=True)]
    return [(-s, weight) for s, weight in half] + half


def feeding(risk: Risk, layers: Sequence[Layer]) -> dict[str, Tensor]:
    """Which units of every layer feed BatchNorm, as a forward pass of a few samples shows it."""
    refuse_sharded(risk.model.parameters(), "Filters are looked for in whole parameters", ADVICE)
    few = risk.some(2)
    parameters = risk.parameters
    feeds = Feeds({x.parameter: Filters(parameters[x.parameter], x.matrix) for x in layers})
    with feeds:  # gradients on: without them some modules take a path that cannot be watched
        outputs = risk.forward(few)
    feeds.use(outputs)
    return feeds.units()


@final
class Directions(Region):
    """The directions v on the spheres of all units in `fed`, by parameter name."""

    def __init__(self, layers: Sequence[Layer], fed: Mapping[str, Tensor]) -> None:
        self.filters = {
            layer.parameter: Filters(layer.weight.double(), layer.matrix, fed[layer.parameter])
            for layer in layers
        }
        own = [f.weight for f in self.filters.values()]
        self.spheres = Spheres(own, list(self.filters.values()))

    def farthest(self, direction: Mapping[str, Tensor]) -> Point:
        """Each part of `direction` brought to the length of its sphere.

        Where a part vanishes, all of its sphere is as far: the direction of θ is taken there.
        """
        vector = [direction[name] for name in self.filters]
        parts = zip(vector, self.spheres.parameters, self.spheres.lengths(vector), strict=True)
        units = self.spheres.units([torch.where(n == 0, own, t) for t, own, n in parts])
        lengthened = [r * u for r, u in zip(self.spheres.radii, units, strict=True)]
        return dict(zip(self.filters, lengthened, strict=True))

    def nearest(self, point: Point) -> Point:
        return self.farthest(point)

    def slope(self, gradient: Mapping[str, Tensor]) -> float:
        """The largest ⟨g, v⟩."""
        vector = [gradient[name] for name in self.filters]
        return float(self.spheres.slope(vector, self.spheres.units(vector)))

    def zeros(self) -> int:
        """How many units that feed BatchNorm are zero, and so have no direction."""
        return sum(f.zeros() for f in self.filters.values())
