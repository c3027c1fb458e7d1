"""Normalized sharpness as its paper computes it (Tsuzuku et al. 2020): draws and descent.

For comparison with the exact diagonal and the exact minimisation, which are both better.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from saltflat.checks import check_number
from saltflat.curvature import Layer, Quantity, degrees_of_freedom
from saltflat.errors import InvalidValue
from saltflat.landscape import Point, check_draws, gaussian
from saltflat.measures.base import Context


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

    def fields(self, context: Context, lam: float) -> dict[str, Any]:
        """For a measurement."""
        diagonal = stochastic_diagonal(context, self.draws, self.radius, context.seed)
        by_layer: dict[str, float] = {}
        slopes: dict[str, Tensor | float] = {}
        for layer in context.layers:
            h = by_channel(layer, diagonal.values[layer.parameter])
            squares = by_channel(layer, layer.weight.to(h.device, torch.float64).square())
            value, x, y = paper_descent(h, squares, self.steps, self.lr, lam)
            by_layer[layer.name] = value
            variance = (x.unsqueeze(-1) + y.unsqueeze(-2)).exp().where(h > 0, 0.0)
            slopes[layer.parameter] = over_kernel(layer, variance)
        return {
            "value": sum(by_layer.values()),
            "stderr": diagonal.stderr(slopes),
            "degrees": diagonal.degrees,
            "by_layer": by_layer,
            "notes": (f"the paper's recipe, after {self.steps} steps of descent: not a minimum",),
        }


@final
@dataclass(frozen=True, slots=True)
class DirectObjective:
    """Tsuzuku et al. 2020, eq. 62: the loss under noise instead of its second order.

    `steps` of Adam over the variances, then the objective from `draws` fresh draws.
    """

    steps: int = 200
    draws: int = 64
    lr: float = 0.1

    def fields(self, context: Context, lam: float) -> dict[str, Any]:
        """For a measurement."""
        options = self.steps, self.draws, self.lr, lam, context.seed
        value, stderr = direct_objective(context, *options)
        notes = ("eq. 62: not convex, so a point of it and not the minimum",)
        degrees = degrees_of_freedom(self.draws)
        return {"value": value, "stderr": stderr, "degrees": degrees, "notes": notes}


def stochastic_diagonal(
    context: Context, draws: int = 100, radius: float = 1e-3, seed: int = 0
) -> Quantity:
    """The diagonal of the Hessian by E[ε∘(∇L(θ+rε) − ∇L(θ−rε))/(2r)] (eq. 61), ε normal.

    As in the paper, r differs by weight matrix: `radius` times the root mean square of its
    entries. All matrices are moved at once; what they do to each other has mean zero.
    """
    check_draws(draws)
    check_number("radius", radius, above=True)
    landscape = context.landscape()
    steps = {
        name: radius * (_rms(p) or 1.0)  # a matrix of zeros sets no scale
        for name, p in landscape.parameters.items()
    }
    generator = torch.Generator().manual_seed(seed)
    products: dict[str, list[Tensor]] = {name: [] for name in steps}
    for _ in range(draws):
        noise = gaussian(landscape.parameters, generator)
        _, ahead = landscape.gradient({n: steps[n] * e for n, e in noise.items()})
        _, behind = landscape.gradient({n: -steps[n] * e for n, e in noise.items()})
        for name, e in noise.items():
            products[name].append(e * (ahead[name] - behind[name]) / (2 * steps[name]))
    stacked = {name: torch.stack(each) for name, each in products.items()}
    return Quantity({name: each.mean(0) for name, each in stacked.items()}, stacked)


def by_channel(layer: Layer, values: Tensor) -> Tensor:
    """Summed over kernel positions: (groups, outputs of a group, inputs of a group)."""
    return layer.matrix.grouped(values).sum(-1)


def over_kernel(layer: Layer, values: Tensor) -> Tensor:
    """The way back: numbers of channels at every kernel position, in the weight's shape."""
    kernel = layer.weight.numel() // values.numel()
    each = values.unsqueeze(-1).expand(*values.shape, kernel)
    return layer.matrix.ungrouped(each, layer.weight.shape)


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
    landscape = context.landscape()
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

        def shift() -> Point:
            return {n: e * sigma[n] for n, e in gaussian(sigma, generator).items()}

        _, growth, stderr = landscape.mean_growth(shift, draws)
        return float(noise.penalty(sigma)) + growth, stderr


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
        return {
            layer.parameter: over_kernel(layer, ((x + y) / 2).exp())
            for layer, x, y in zip(self.layers, self.x, self.y, strict=True)
        }

    def penalty(self, sigma: Point) -> Tensor:
        terms = [
            (layer.weight.double() / sigma[layer.parameter]).square().sum() for layer in self.layers
        ]
        return torch.stack(terms).sum() / (2 * self.lam)


def _rms(values: Tensor) -> float:
    return float(values.detach().double().square().mean().sqrt())
