"""Other ways to normalized sharpness than the exact one, to compare with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from saltflat.curvature.estimators import degrees_of_freedom
from saltflat.measures.base import Context
from saltflat.measures.normalized_recipe import (
    by_channel,
    direct_objective,
    paper_descent,
    stochastic_diagonal,
)

# Value, standard error, its degrees of freedom, values by layer, and what to say of them.
Outcome = tuple[float, float, float, dict[str, float], str]


@final
@dataclass(frozen=True, slots=True)
class PaperRecipe:
    """Tsuzuku et al. 2020, algorithm 1: `draws` finite differences of the gradient (eq. 61) for
    the diagonal, then `steps` of gradient descent on the logarithms of the variances.

    The standard error is that of the diagonal, carried to the value; how far the descent is from
    the minimum is not known, and negative estimates of the diagonal count as zero.
    """

    draws: int = 100
    radius: float = 1e-3
    steps: int = 1000
    lr: float = 1e-3

    def value(self, context: Context, lam: float) -> Outcome:
        diagonal = stochastic_diagonal(context, self.draws, self.radius, context.seed)
        by_layer: dict[str, float] = {}
        slopes: dict[str, Tensor | float] = {}
        for layer in context.layers:
            h = by_channel(layer, diagonal.values[layer.parameter])
            squares = by_channel(layer, layer.weight.to(h.device, torch.float64).square())
            value, x, y = paper_descent(h, squares, self.steps, self.lr, lam)
            by_layer[layer.name] = value
            grouped = layer.matrix.grouped(diagonal.values[layer.parameter])
            variance = (x.unsqueeze(-1) + y.unsqueeze(-2)).exp().where(h > 0, 0.0)
            spread = variance.unsqueeze(-1).expand(grouped.shape)
            slopes[layer.parameter] = layer.matrix.ungrouped(spread, layer.weight.shape)
        note = f"the paper's recipe, after {self.steps} steps of descent: not a minimum"
        stderr = diagonal.stderr(slopes)
        return sum(by_layer.values()), stderr, diagonal.degrees, by_layer, note


@final
@dataclass(frozen=True, slots=True)
class DirectObjective:
    """Tsuzuku et al. 2020, eq. 62: the loss under noise instead of its second order.

    `steps` of Adam over the variances, then the objective from `draws` fresh draws.
    """

    steps: int = 200
    draws: int = 64
    lr: float = 0.1

    def value(self, context: Context, lam: float) -> Outcome:
        value, stderr = direct_objective(
            context, self.steps, self.draws, self.lr, lam, context.seed
        )
        note = "eq. 62: not convex, so a point of it and not the minimum"
        return value, stderr, degrees_of_freedom(self.draws), {}, note
