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
from typing import Any, final

import torch
from torch import Tensor

from saltflat.measures.base import Quantity, mean_error

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


# The line to evaluate, given the curvature by the other folds and its standard errors.
Choose = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], Line]


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


def cross_fit(quantity: Quantity, choose: Choose) -> CrossFit:
    """Evaluate for every fold of the draws the line that the others chose."""
    counts = quantity.counts
    parts: dict[str, Tensor] = {}
    for fold in range(FOLDS):
        own = [k for k in range(len(counts)) if k % FOLDS == fold]
        line = choose(*_others(quantity, own))
        sums = quantity.sums(line.slopes)
        for name, slope in line.slopes.items():
            part = parts.setdefault(name, torch.zeros(len(counts), dtype=torch.float64))
            known = float((quantity.values[name] * slope).sum())
            part[own] = sums[name][own] if name in sums else known
            part[own] += line.constants.get(name, 0.0)
    value, stderr = mean_error(torch.stack(list(parts.values())).sum(0), counts)
    by_parameter = {name: float(mean_error(part, counts)[0]) for name, part in parts.items()}
    return CrossFit(float(value), float(stderr), quantity.degrees, by_parameter)


def _others(quantity: Quantity, own: Sequence[int]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The values and standard errors by all draws but these."""
    rest = [k for k in range(len(quantity.counts)) if k not in own]
    counts = [quantity.counts[k] for k in rest]
    values, errors = dict(quantity.values), dict[str, Tensor]()
    for name, draws in quantity.draws.items():
        values[name], errors[name] = mean_error(draws[rest], counts)
    return values, errors
