"""Searching for the largest value of a function over a ball or a product of spheres."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

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
        if self.p == math.inf:
            return {name: self.radius * d.sign() for name, d in direction.items()}
        length = norm(direction)
        scale = self.radius / length if length > 0 else 0.0
        return {name: d * scale for name, d in direction.items()}

    def nearest(self, point: Point) -> Point:
        if self.p == math.inf:
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
    return math.sqrt(sum(float(x.double().square().sum()) for x in vector.values()))


def gaussian(like: Mapping[str, Tensor], generator: torch.Generator) -> Point:
    """Independent standard normal entries, drawn on the CPU so that devices agree."""
    return {
        name: torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.device)
        for name, x in like.items()
    }
