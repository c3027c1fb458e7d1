"""Normalized sharpness as its paper computes it (Tsuzuku et al. 2020): draws and descent.

For comparison with the exact diagonal and the exact minimisation, which are both better.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from saltflat.curvature.curvature import Layer
from saltflat.curvature.estimators import Quantity
from saltflat.errors import InvalidValue
from saltflat.measures.ascent import Point, gaussian
from saltflat.measures.base import Context
from saltflat.measures.landscape import Landscape
from saltflat.measures.perturb import check_draws


def stochastic_diagonal(
    context: Context, draws: int = 100, radius: float = 1e-3, seed: int = 0
) -> Quantity:
    """The diagonal of the Hessian by E[ε∘(∇L(θ+rε) − ∇L(θ−rε))/(2r)] (eq. 61), ε normal.

    As in the paper, r differs by weight matrix: `radius` times the root mean square of its
    entries. All matrices are moved at once; what they do to each other has mean zero.
    """
    check_draws(draws)
    if not radius > 0:
        raise InvalidValue(f"radius must be a positive number. Got {radius!r}.")
    landscape = _landscape(context)
    steps = {
        name: radius * (_rms(p) or 1.0)  # a matrix of zeros sets no scale
        for name, p in landscape.parameters.items()
    }
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, list[Tensor]] = {name: [] for name in steps}
    for _ in range(draws):
        noise = gaussian(landscape.parameters, generator)
        _, ahead = landscape.gradient({n: steps[n] * e for n, e in noise.items()})
        _, behind = landscape.gradient({n: -steps[n] * e for n, e in noise.items()})
        for name, e in noise.items():
            found[name].append(e * (ahead[name] - behind[name]) / (2 * steps[name]))
    stacked = {name: torch.stack(each) for name, each in found.items()}
    return Quantity({name: each.mean(0) for name, each in stacked.items()}, stacked)


def by_channel(layer: Layer, values: Tensor) -> Tensor:
    """Summed over kernel positions: (groups, outputs of a group, inputs of a group)."""
    return layer.matrix.grouped(values).sum(-1)


def paper_descent(
    h: Tensor, w2: Tensor, steps: int = 1000, lr: float = 1e-3, lam: float = 0.5
) -> tuple[float, Tensor, Tensor]:
    """Algorithm 1 for one weight matrix: gradient descent from x = y = 0 on

        S(x, y) = Σ_ij h_ij e^{x_i+y_j} + w²_ij / (2λ) e^{−(x_i+y_j)},

    with e^x = σ² and e^y = σ'² (eq. 17 to 19, as corrected), h clipped at 0. `h` and `w2` are
    (…, outputs, inputs), convolutions summed `by_channel`; leading dimensions are matrices of their
    own. Returns S at the last x and y, and these. Nothing says how far from the minimum it is.
    """
    h, beta = h.double().clamp(min=0), w2.double() / (2 * lam)
    x = torch.zeros_like(h[..., :, 0])
    y = torch.zeros_like(h[..., 0, :])
    for _ in range(steps):
        variance = (x.unsqueeze(-1) + y.unsqueeze(-2)).exp()
        slope = h * variance - beta / variance
        x, y = x - lr * slope.sum(-1), y - lr * slope.sum(-2)
    variance = (x.unsqueeze(-1) + y.unsqueeze(-2)).exp()
    value = float((h * variance + beta / variance).sum())
    if not value < float("inf"):
        raise InvalidValue(f"The descent diverged with lr={lr!r}. Use a smaller lr.")
    return value, x, y


def direct_objective(
    context: Context,
    steps: int = 200,
    draws: int = 64,
    lr: float = 0.1,
    lam: float = 0.5,
    seed: int = 0,
) -> tuple[float, float]:
    """min over σ, σ' of E[L(θ + σσ'∘ε)] − L(θ) + Σ_ij w²_ij / (2λ (σ_i σ'_j)²) (eq. 62).

    σ is by output unit and σ' by input unit of every weight matrix, ε normal. `steps` of Adam, each
    with one pair ±ε, then the objective at the last σ from `draws` fresh pairs: its value and the
    standard error of that. The problem is not convex: this is a point of it, an upper bound of
    the minimum up to the standard error.
    """
    check_draws(draws)
    landscape = _landscape(context)
    noise = _Noise(context.layers, lam)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(noise.logarithms, lr=lr)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * (1 - step / steps)
        optimizer.zero_grad()
        sigma = noise.sigma()
        draw = gaussian(sigma, generator)
        _, ahead = landscape.gradient({n: draw[n] * s.detach() for n, s in sigma.items()})
        _, behind = landscape.gradient({n: -draw[n] * s.detach() for n, s in sigma.items()})
        slopes = {n: draw[n] * (ahead[n] - behind[n]) / 2 for n in sigma}
        objective = noise.penalty(sigma) + sum((slopes[n] * s).sum() for n, s in sigma.items())
        objective.backward()
        optimizer.step()
    with torch.no_grad():
        sigma = noise.sigma()
        constant = float(noise.penalty(sigma)) - landscape.value()
        found = []
        for _ in range(draws):
            draw = gaussian(sigma, generator)
            ends = [
                landscape.value({n: k * draw[n] * s for n, s in sigma.items()}) for k in (1, -1)
            ]
            found.append(sum(ends) / 2 + constant)
    values = torch.tensor(found, dtype=torch.float64)
    return float(values.mean()), float(values.std() / draws**0.5)


@final
class _Noise:
    """σ_i σ'_j = e^{(x_i+y_j)/2} for every weight matrix; a matrix of zeros gets none."""

    def __init__(self, layers: Sequence[Layer], lam: float) -> None:
        self.lam = lam
        self.layers = [layer for layer in layers if layer.weight.any()]
        self.x, self.y = [], []
        for layer in self.layers:
            groups, out, inputs, _ = layer.matrix.grouped(layer.weight).shape
            start = 2 * math.log(_rms(layer.weight))
            like: dict[str, Any] = {"dtype": torch.float64, "device": layer.weight.device}
            self.x.append(torch.full((groups, out, 1), start, requires_grad=True, **like))
            self.y.append(torch.zeros((groups, 1, inputs), requires_grad=True, **like))

    @property
    def logarithms(self) -> list[Tensor]:
        return self.x + self.y

    def sigma(self) -> Point:
        """The standard deviation of every weight, in the weight's own layout."""
        result = {}
        for layer, x, y in zip(self.layers, self.x, self.y, strict=True):
            grouped = ((x + y) / 2).exp()
            laid = grouped.mT if layer.matrix.out == 1 else grouped
            kernel = [1] * (layer.weight.ndim - 2)
            result[layer.parameter] = (
                laid.flatten(0, 1).view(*layer.weight.shape[:2], *kernel).expand(layer.weight.shape)
            )
        return result

    def penalty(self, sigma: Point) -> Tensor:
        terms = [
            (layer.weight.double() / sigma[layer.parameter]).square().sum() for layer in self.layers
        ]
        return torch.stack(terms).sum() / (2 * self.lam)


def _landscape(context: Context) -> Landscape:
    return Landscape(context.risk, [layer.parameter for layer in context.layers])


def _rms(values: Tensor) -> float:
    return float(values.detach().double().square().mean().sqrt())
