"""Minima of estimated curvature: chosen with some of the draws, evaluated with the others.

Several measures are the least of functions that are linear in the curvature, min_c ℓ_c(H): over
rescalings (minimum sharpness), over variances (normalized sharpness), or by
sqrt(n t) = min_a (n a t + 1/a)/2. At an estimate of H the least is too small on average, since the
choice c follows the noise, and what is estimated below zero must be cut off, which makes it too
large; neither shows in a standard error. So the draws are dealt into folds. For each fold c is
chosen with the draws of the others, in any way, and ℓ_c is evaluated with the fold's own, nothing
cut off. Given c this is unbiased for ℓ_c(H), which is at least the minimum: the mean over all draws
estimates an upper bound, and their spread is its error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import hypot, sqrt
from typing import Any, final

import torch
from torch import Tensor

from saltflat.curvature import Quantity, mean_error

# Draw k is in fold k mod 4, for every quantity: measures of one report choose alike.
FOLDS = 4

NOTE = (
    "an upper bound on average, with its error: the minimum is placed by three quarters of the "
    "draws and evaluated with the rest"
)


@final
@dataclass(frozen=True, slots=True)
class Line:
    """A function that is linear in curvature: Σ slopes · curvature + constants, by parameter."""

    slopes: Mapping[str, Tensor | float]
    constants: Mapping[str, float] = field(default_factory=dict)


# The line to evaluate, chosen with these draws alone.
Choose = Callable[[Sequence[int]], Line]


@final
@dataclass(frozen=True, slots=True)
class CrossFit:
    """The mean over all draws of the line that was chosen without them."""

    value: float
    stderr: float
    degrees: float
    by_parameter: Mapping[str, float]

    def certainty(self) -> dict[str, Any]:
        """Fields of a measurement."""
        return {"exact": False, "stderr": self.stderr, "degrees": self.degrees}


def evaluated(quantity: Quantity, choose: Choose) -> dict[str, Tensor]:
    """Draw by draw, and by parameter, the line that was chosen without the draw's fold."""
    count = len(quantity.counts)
    parts: dict[str, Tensor] = {}
    for fold in range(FOLDS):
        own = [k for k in range(count) if k % FOLDS == fold]
        line = choose([k for k in range(count) if k % FOLDS != fold])
        sums = quantity.sums(line.slopes)
        for name, slope in line.slopes.items():
            part = parts.setdefault(name, torch.zeros(count, dtype=torch.float64))
            known = float((quantity.values[name] * slope).sum())
            part[own] = sums[name][own] if name in sums else known
            part[own] += line.constants.get(name, 0.0)
    return parts


def cross_fit(quantity: Quantity, choose: Choose) -> CrossFit:
    """The mean and the error of what is evaluated."""
    parts, counts = evaluated(quantity, choose), quantity.counts
    value, stderr = mean_error(torch.stack(list(parts.values())).sum(0), counts)
    by_parameter = {name: float(mean_error(part, counts)[0]) for name, part in parts.items()}
    return CrossFit(float(value), float(stderr), quantity.degrees, by_parameter)


def root_bound(numbers: Quantity, factors: Mapping[str, float]) -> CrossFit:
    """Σ sqrt(n t) over numbers t, n being their factors, as the least of (n a t + 1/a)/2.

    An estimate t with the standard error s counts as sqrt(t² + s²) in the choice of a; one that is
    known is not bounded, and counts as zero if it is below.
    """

    def choose(rest: Sequence[int]) -> Line:
        values, errors = partial_means(numbers, rest)
        slopes, constants = dict[str, Tensor | float](), dict[str, float]()
        for name, factor in factors.items():
            value = float(values[name])
            if name not in errors:
                slopes[name], constants[name] = 0.0, sqrt(factor * max(value, 0.0))
                continue
            root = sqrt(factor * hypot(value, float(errors[name])))
            slopes[name], constants[name] = factor / (2 * root) if root > 0 else 0.0, root / 2
        return Line(slopes, constants)

    return cross_fit(numbers, choose)


def partial_means(
    quantity: Quantity, rest: Sequence[int]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The values by these draws alone, and the standard errors of what is drawn."""
    counts = [quantity.counts[k] for k in rest]
    values, errors = dict(quantity.values), dict[str, Tensor]()
    for name, draws in quantity.draws.items():
        values[name], errors[name] = mean_error(draws[rest], counts)
    return values, errors
