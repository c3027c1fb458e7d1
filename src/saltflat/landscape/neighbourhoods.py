"""Neighbourhoods of the weights: how much a loss grows there, at worst and on average."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import inf, sqrt
from typing import Any, final

import torch
from torch import Tensor

from saltflat.checks import check_integer, check_number
from saltflat.curvature import LEAST_DRAWS, degrees_of_freedom
from saltflat.errors import InvalidValue
from saltflat.landscape.surfaces import RiskSurface

Point = dict[str, Tensor]  # float64, by parameter name
Function = Callable[[Point], tuple[float, Mapping[str, Tensor]]]  # value and gradient


class Region(ABC):
    """A set of perturbations to search."""

    @abstractmethod
    def farthest(self, direction: Mapping[str, Tensor]) -> Point:
        """The point with the largest inner product with `direction`."""

    @abstractmethod
    def nearest(self, point: Point) -> Point:
        """The point brought back into the region, or retracted to it."""


@final
@dataclass(frozen=True)
class Ball(Region):
    """‖u‖_p ≤ radius over all parameters together, p = 2 or ∞."""

    radius: float
    p: float = 2.0

    def farthest(self, direction: Mapping[str, Tensor]) -> Point:
        if self.p == inf:
            return {name: self.radius * d.sign() for name, d in direction.items()}
        length = norm(direction)
        scale = self.radius / length if length > 0 else 0.0
        return {name: d * scale for name, d in direction.items()}

    def nearest(self, point: Point) -> Point:
        if self.p == inf:
            return {name: x.clamp(-self.radius, self.radius) for name, x in point.items()}
        length = norm(point)
        if length <= self.radius:
            return point
        return {name: x * (self.radius / length) for name, x in point.items()}


@final
@dataclass(frozen=True)
class Summit:
    """The highest point that a search has seen; `first` is the height of its first start."""

    value: float
    point: Point
    first: float


def ascend(function: Function, region: Region, starts: Iterable[Point], steps: int) -> Summit:
    """Projected gradient ascent with a step that grows and shrinks, from every start.

    u ← nearest(u + η farthest(∇f)), kept only if f grows: η doubles then, else it is quartered.
    Large η is the step of the power method, which is the right one where f is convex. `steps`
    counts evaluations of f and its gradient for each start. The result is the best of all points
    evaluated, hence a lower bound of the supremum.
    """
    best: Summit | None = None
    for start in starts:
        point = start
        value, gradient = function(point)
        first = value if best is None else best.first
        rate = 8.0
        for _ in range(steps - 1):
            ahead = region.farthest(gradient)
            trial = region.nearest({name: x + rate * ahead[name] for name, x in point.items()})
            height, slope = function(trial)
            if height > value:
                point, value, gradient = trial, height, slope
                rate = min(2 * rate, 1e3)
            else:
                rate /= 4
        if best is None or value > best.value:
            best = Summit(value, point, first)
    assert best is not None, "a search needs a start"
    return best


def norm(vector: Mapping[str, Tensor]) -> float:
    """The Euclidean length of all entries together."""
    return sqrt(sum(float(x.double().square().sum()) for x in vector.values()))


def gaussian(like: Mapping[str, Tensor], generator: torch.Generator) -> Point:
    """Independent standard normal entries, drawn on the CPU so that devices agree."""
    return {
        name: torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.device)
        for name, x in like.items()
    }


@final
class Neighbourhood:
    """L(θ + s∘u) for u in a ball; s = 1, or |w| entry by entry where `adaptive`.

    Only the parameters of the landscape move. What is found is given as fields of a measurement.
    """

    def __init__(
        self, landscape: RiskSurface, ball: Ball, *, seed: int, adaptive: bool = False
    ) -> None:
        self.landscape = landscape
        self.ball = ball
        self.scale: Point | None = None
        if adaptive:
            weights = self.landscape.parameters
            self.scale = {n: w.detach().double().abs() for n, w in weights.items()}
        self.generator = torch.Generator().manual_seed(seed)

    def worst(self, steps: int, restarts: int) -> dict[str, Any]:
        """max over the ball of L(θ+s∘u) − L(θ), searched from the one-step point and `restarts`
        random ones; u = 0 is in the ball, so it is never negative."""
        loss, slope = self._climb({})

        def starts() -> Iterator[Point]:
            yield self.ball.farthest(slope)
            for _ in range(restarts):
                yield self.ball.farthest(gaussian(slope, self.generator))

        summit = ascend(self._climb, self.ball, starts(), steps)
        value = max(0.0, summit.value - loss)
        return {"bound": "lower"} | self._fields(value, loss, one_step=summit.first - loss)

    def average(self, draws: int) -> dict[str, Any]:
        """The mean of L(θ+s∘u) − L(θ) over u normal with E‖u‖² = radius², or uniform in the cube
        for p = ∞."""
        like = self.landscape.parameters
        size = sum(p.numel() for p in like.values())
        loss, value, stderr = self.landscape.mean_growth(
            lambda: self._shift(self._draw(like, size)), draws
        )
        error = {"stderr": stderr, "degrees": degrees_of_freedom(draws)}
        return error | self._fields(value, loss)

    def _draw(self, like: Mapping[str, Tensor], size: int) -> Point:
        if self.ball.p == inf:
            unit = partial(torch.rand, generator=self.generator, dtype=torch.float64)
            radius = self.ball.radius
            return {n: radius * (unit(p.shape) * 2 - 1).to(p.device) for n, p in like.items()}
        scale = self.ball.radius / size**0.5
        return {name: scale * z for name, z in gaussian(like, self.generator).items()}

    def _shift(self, u: Point) -> Point:
        if self.scale is None:
            return u
        return {name: x * self.scale[name] for name, x in u.items()}

    def _climb(self, u: Point) -> tuple[float, Point]:
        value, gradient = self.landscape.gradient(self._shift(u))
        return value, self._shift(gradient)  # the chain rule: s again

    def _fields(self, growth: float, loss: float, **details: float) -> dict[str, Any]:
        dtype = next(iter(self.landscape.parameters.values())).dtype
        return {
            "value": growth,
            "exact": False,
            "details": {"loss": loss, **details, "evaluations": self.landscape.evaluations},
            "notes": near_rounding(abs(growth), loss, dtype),
        }


def near_rounding(growth: float, loss: float, dtype: torch.dtype) -> tuple[str, ...]:
    """A note if the loss changes by little more than what it is rounded to."""
    if growth == 0 or growth >= 100 * torch.finfo(dtype).eps * max(1.0, abs(loss)):
        return ()
    advice = "" if dtype == torch.float64 else ": measure with dtype=torch.float64"
    return (f"the loss changes by {growth:.1e}, which is near the rounding of {dtype}{advice}",)


def check_search(
    radius: float, name: str, steps: int, restarts: int, draws: int = LEAST_DRAWS
) -> None:
    """Refuse settings that make no sense."""
    check_number(name, radius, above=True)
    check_integer("steps", steps)
    check_integer("restarts", restarts, least=0)
    check_draws(draws)


def check_draws(draws: int) -> None:
    """Refuse fewer draws than a standard error needs."""
    if draws < LEAST_DRAWS:
        raise InvalidValue(
            f"draws must be at least {LEAST_DRAWS}, for a standard error that holds. Got {draws!r}."
        )
