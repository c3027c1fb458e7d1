"""How much the loss grows within a ball around the weights: at worst, and on average."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any, final

import torch
from torch import Tensor

from saltflat.curvature.estimators import LEAST_DRAWS, degrees_of_freedom
from saltflat.errors import InvalidValue
from saltflat.measures.ascent import Ball, Point, ascend, gaussian
from saltflat.measures.base import Context
from saltflat.measures.landscape import Landscape


@final
@dataclass(frozen=True)
class Growth:
    """What was found: a searched supremum (`stderr` 0) or a mean with its standard error."""

    value: float
    stderr: float
    loss: float  # where nothing is perturbed
    searched: bool
    details: Mapping[str, Any]
    notes: tuple[str, ...]
    degrees: float = inf  # of the standard error

    def fields(self) -> dict[str, Any]:
        """For a measurement: a supremum that was searched for is a lower bound, a mean is not."""
        return {
            "value": self.value,
            "exact": False,
            "stderr": self.stderr,
            "degrees": self.degrees,
            "bound": "lower" if self.searched else None,
            "details": self.details,
            "notes": self.notes,
        }


@final
class Neighbourhood:
    """L(θ + s∘u) for u in a ball; s = 1, or |w| entry by entry where `adaptive`.

    Only weight matrices move: biases and normalisation parameters do not.
    """

    def __init__(self, context: Context, ball: Ball, *, adaptive: bool = False) -> None:
        names = [layer.parameter for layer in context.layers]
        self.landscape = Landscape(context.risk, names)
        self.ball = ball
        self.scale: Point | None = None
        if adaptive:
            weights = self.landscape.parameters
            self.scale = {n: w.detach().double().abs() for n, w in weights.items()}
        self.generator = torch.Generator().manual_seed(context.seed)

    def worst(self, steps: int, restarts: int) -> Growth:
        """max over the ball of L(θ+s∘u) − L(θ), searched from the one-step point and `restarts`
        random ones; u = 0 is in the ball, so it is never negative."""
        loss, slope = self._climb({})

        def starts() -> Any:
            yield self.ball.farthest(slope)
            for _ in range(restarts):
                yield self.ball.farthest(gaussian(slope, self.generator))

        found = ascend(self._climb, self.ball, starts(), steps)
        value = max(0.0, found.value - loss)
        details = {
            "loss": loss,
            "one_step": found.first - loss,
            "evaluations": self.landscape.evaluations,
        }
        return Growth(value, 0.0, loss, True, details, self._rounding(value, loss))

    def average(self, draws: int) -> Growth:
        """The mean of L(θ+s∘u) − L(θ) over u normal with E‖u‖² = radius², or uniform in the cube
        for p = ∞. Each draw is a pair ±u: what is odd in u has mean zero and drops out."""
        loss = self.landscape.value()
        like = self.landscape.parameters
        size = sum(p.numel() for p in like.values())
        found = []
        for _ in range(draws):
            u = self._draw(like, size)
            pair = [self.landscape.value(self._shift(u, sign)) for sign in (1.0, -1.0)]
            found.append(sum(pair) / 2 - loss)
        values = torch.tensor(found, dtype=torch.float64)
        value, stderr = float(values.mean()), float(values.std() / draws**0.5)
        details = {"loss": loss, "evaluations": self.landscape.evaluations}
        notes = self._rounding(abs(value), loss)
        return Growth(value, stderr, loss, False, details, notes, degrees_of_freedom(draws))

    def _draw(self, like: Mapping[str, Tensor], size: int) -> Point:
        if self.ball.p == inf:
            unit = {
                name: torch.rand(p.shape, generator=self.generator, dtype=torch.float64) * 2 - 1
                for name, p in like.items()
            }
            return {name: self.ball.radius * u.to(like[name].device) for name, u in unit.items()}
        scale = self.ball.radius / size**0.5
        return {name: scale * z for name, z in gaussian(like, self.generator).items()}

    def _shift(self, u: Point, sign: float = 1.0) -> Point:
        if self.scale is None:
            return {name: sign * x for name, x in u.items()}
        return {name: sign * x * self.scale[name] for name, x in u.items()}

    def _climb(self, u: Point) -> tuple[float, Point]:
        value, gradient = self.landscape.gradient(self._shift(u))
        if self.scale is None:
            return value, gradient
        return value, {name: g * self.scale[name] for name, g in gradient.items()}

    def _rounding(self, growth: float, loss: float) -> tuple[str, ...]:
        return near_rounding(growth, loss, next(iter(self.landscape.parameters.values())).dtype)


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
    if not (isfinite(radius) and radius > 0):
        raise InvalidValue(f"{name} must be a positive number. Got {radius!r}.")
    if steps < 1:
        raise InvalidValue(f"steps must be at least 1. Got {steps!r}.")
    if restarts < 0:
        raise InvalidValue(f"restarts must not be negative. Got {restarts!r}.")
    check_draws(draws)


def check_draws(draws: int) -> None:
    """Refuse fewer draws than a standard error needs."""
    if draws < LEAST_DRAWS:
        raise InvalidValue(
            f"draws must be at least {LEAST_DRAWS}, for a standard error that holds. Got {draws!r}."
        )
