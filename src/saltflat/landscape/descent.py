"""How much lower the loss is nearby: whether the model is at a minimum of it at all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, isfinite, sqrt
from typing import final

import torch
from torch import Tensor

from saltflat.errors import DataError
from saltflat.landscape.surfaces import RiskSurface
from saltflat.vectors import total_norm

# What the entry that changes most changes by in the first step, relative to itself.
_FIRST = 0.5
# Losses along the line that are looked at; a step that would change by less than this is the last.
_STEPS, _SETTLED = 3, 0.25
# How far a step may go beyond the one before it, and below.
_FARTHER, _NEARER = 4.0, 0.01

# A share of the loss that is nothing, and of the entries by which one goes beside the model then.
_NOTHING, _BESIDE = 1e-6, 0.1


@final
@dataclass(frozen=True, slots=True)
class Descent:
    """The loss, the norm of its gradient, and how much lower it was seen nearby."""

    loss: float
    gradient_norm: float
    decrease: float


def descend(landscape: RiskSurface) -> Descent:
    """Look for a lower loss along −θ² ∘ ∇L, entry by entry, at up to three places.

    To first order a step t lowers the loss by t Σ θ_i² (∂L/∂θ_i)²; the next place is where a
    parabola through what was seen has its minimum. Rescalings that keep the function, by which
    θ_i → s_i θ_i and ∂_i L → ∂_i L / s_i, carry this line over into itself, so that they leave what
    is found as it is; that of −∇L they would not. Entries that are 0 stay; but in weights that are
    all 0, and everywhere if that leaves nothing to follow, they are given the mean square of all
    parameters instead. Costs one gradient, and a forward pass for each place.

    Where this finds next to nothing the gradient vanishes, as it does at saddles too. Then such a
    line is followed from beside the model as well, at the same price: from where every entry is
    changed by a tenth of its size, or of what it is given.
    """
    loss, line = landscape.gradient(dtype=None)
    norm = float(total_norm(list(line.values())))
    if not isfinite(norm):
        raise DataError(f"The gradient's norm is {norm}, though the loss is {loss:.4g}.")
    decrease = _followed(landscape, loss, line, {})
    if decrease <= _NOTHING * abs(loss):
        beside = _beside(landscape.parameters)
        start, line = landscape.gradient(beside, dtype=None)
        decrease = max(decrease, loss - start + _followed(landscape, start, line, beside))
    return Descent(loss, norm, decrease)


def _followed(
    landscape: RiskSurface, loss: float, line: dict[str, Tensor], start: Mapping[str, Tensor]
) -> float:
    """By how much the loss is lower along the line of a gradient, from a place where both are
    known; 0 if it is not."""
    slope = _relative(landscape.parameters, line)
    step, decrease = 0.0, -inf
    following = _FIRST if slope > 0 else 0.0
    for _ in range(_STEPS):
        if following == 0 or abs(following - step) <= _SETTLED * step:
            break
        for entry in line.values():
            entry *= following / step if step else -following
        step = following
        place = {name: v + start[name] for name, v in line.items()} if start else line
        change = landscape.value(place, overflow=True) - loss
        decrease = max(decrease, -change) if isfinite(change) else decrease
        following = _minimum(slope, change, step)
    if step > 0 and decrease == -inf:
        raise DataError("The loss overflows at every place downhill that was tried.")
    return max(decrease, 0.0)


@torch.no_grad()
def _beside(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A change of every entry, in a pattern of no meaning."""
    typical, changes = _typical(parameters), dict[str, Tensor]()
    for k, (name, p) in enumerate(parameters.items()):
        places = torch.arange(p.numel(), dtype=torch.float32, device=p.device).reshape(p.shape)
        size = _scale(p, 0.0 if bool(p.any()) else typical)
        changes[name] = size.mul_(_BESIDE * torch.cos(2.4 * places + k).to(p.dtype))
    return changes


def _minimum(slope: float, change: float, step: float) -> float:
    """Where the parabola with this slope downhill, and this change at `step`, is lowest."""
    if not isfinite(change):
        return step * _NEARER
    bend = 2 * (change + slope * step) / step**2
    best = slope / bend if bend > 0 else step * _FARTHER
    return min(max(best, step * _NEARER), step * _FARTHER)


@torch.no_grad()
def _relative(parameters: Mapping[str, Tensor], gradient: dict[str, Tensor]) -> float:
    """Turn a gradient into θ² ∘ ∇L / M, M the largest |θ ∂L/∂θ|. Returns Σ θ² (∇L)² / M."""
    typical = _typical(parameters)
    floors = {n: 0.0 if p.ndim < 2 or bool(p.any()) else typical for n, p in parameters.items()}
    slope, largest = _sizes(parameters, gradient, floors)
    if slope == 0:
        floors = dict.fromkeys(parameters, typical)
        slope, largest = _sizes(parameters, gradient, floors)
    if slope == 0:
        return 0.0
    for name, p in parameters.items():
        scale = _scale(p, floors[name])
        gradient[name].mul_(scale).div_(largest).mul_(scale)  # squares of large entries overflow
    return slope / largest


def _typical(parameters: Mapping[str, Tensor]) -> float:
    """The root mean square of all parameters; 1 if they are all 0."""
    entries = sum(p.numel() for p in parameters.values())
    return float(total_norm([p.detach() for p in parameters.values()])) / sqrt(entries) or 1.0


def _sizes(
    parameters: Mapping[str, Tensor], gradient: Mapping[str, Tensor], floors: Mapping[str, float]
) -> tuple[float, float]:
    """Σ θ² (∇L)² and the largest |θ ∂L/∂θ|."""
    slope = largest = 0.0
    for name, p in parameters.items():
        relative = _scale(p, floors[name]).mul_(gradient[name])
        slope += float(torch.linalg.vector_norm(relative, dtype=torch.float64)) ** 2
        if relative.numel():
            largest = max(largest, float(torch.linalg.vector_norm(relative, torch.inf)))
    return slope, largest


def _scale(p: Tensor, floor: float) -> Tensor:
    """A copy of |θ|, with the floor in the place of zeros."""
    sizes = p.abs()
    return sizes if floor == 0 else sizes.masked_fill_(sizes == 0, floor)
