"""Normalized sharpness: flatness on the scale of each weight matrix, or of its rows and columns.

Normalized sharpness as its paper computes it (Tsuzuku et al. 2020): draws and descent.

For comparison with the exact diagonal and the exact minimisation, which are both better.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from saltflat.checks import check_number
from saltflat.convex import balance, components
from saltflat.curvature import Layer, Quantity, degrees_of_freedom, mean_error
from saltflat.errors import InvalidValue, NotApplicable
from saltflat.landscape import Point, check_draws, gaussian
from saltflat.measurement import EVERY_RESCALING, Measurement, Symmetry
from saltflat.measures.base import Context, Measure, Need
from saltflat.measures.cross_fit import NOTE, CrossFit, Line, evaluated, partial_means, root_bound
from saltflat.work import FORWARD


@final
@dataclass(frozen=True)
class NormalizedSharpness(Measure):
    """Σ_d min_{σ,σ'} Σ_ij h_ij (σ_i σ'_j)² + W_ij² / (2λ (σ_i σ'_j)²).

    Tsuzuku et al. 2020, eq. 17. h is the exact diagonal of the Hessian of the report's loss; the
    paper takes the normalized cross-entropy of its eqs. 20–22 (`loss="normalized_cross_entropy"`).
    The minimum is found exactly by alternating minimisation with a duality gap. Convolutions share
    σ over kernel positions. Where h summed over the kernel is negative it counts as zero;
    `details["clipped"]` is the share of |h| that this concerns. So does what is zero up to rounding
    (`noise_floor`).

    Of an estimated h (a network that is not piecewise linear, too many directions) the value is an
    upper bound with an error, in which negative entries count as they are
    (`normalized_bound`).

    `sampling` is not known: to first order it is that of Σ h (σσ')² at the minimum, but σ and σ'
    are known when the samples' own h are gone.
    """

    lam: float = 0.5
    strategy: PaperRecipe | DirectObjective | None = None

    name: ClassVar[str] = "normalized_sharpness"
    title: ClassVar[str] = "Σ_d min_σσ' Σ h (σσ')² + W²/(2λ(σσ')²)"
    explanation: ClassVar[str] = (
        "What noise in the weights costs at best, when every row and column of a matrix may have "
        "noise of its own size."
    )
    paper: ClassVar[str] = "Tsuzuku et al. 2020"
    references: ClassVar[tuple[str, ...]] = ("tsuzuku2020normalized",)
    equation: ClassVar[str] = "(17)"
    needs: ClassVar[frozenset[Need]] = frozenset({"diagonal", "magnitude"})
    invariant_to: ClassVar[frozenset[Symmetry]] = EVERY_RESCALING

    def __post_init__(self) -> None:
        if not self.lam > 0:
            raise InvalidValue(f"lam of NormalizedSharpness must be positive. Got {self.lam}.")

    def required(self) -> frozenset[Need]:
        return self.needs if self.strategy is None else frozenset({"passes"})

    def price(self) -> float:
        return 0.0 if self.strategy is None else self.strategy.price()

    def compute(self, context: Context) -> Measurement:
        if self.strategy is None:
            return self._exactly(context)
        # A descent of so many steps depends on the scale.
        fields = self.strategy.fields(context, self.lam) | {"invariant_to": frozenset()}
        return self.measurement(exact=False, **fields)

    def _exactly(self, context: Context) -> Measurement:
        diagonal = context.quantity("diagonal")
        magnitudes = context.quantities.get("magnitude", Quantity({})).values
        factor = sqrt(0.5 / self.lam)
        if not diagonal.exact(layer.parameter for layer in context.layers):
            return self._bounded(context, diagonal, factor)
        balanced = {
            x.name: balance_layer(x, diagonal.values[x.parameter], magnitudes.get(x.parameter))
            for x in context.layers
        }
        by_layer = {name: factor * each.value for name, each in balanced.items()}
        unattained = [name for name, each in balanced.items() if not each.attained]
        size = sum(each.size for each in balanced.values())
        clipped = sum(each.negative for each in balanced.values()) / size if size > 0 else 0.0
        notes = []
        if clipped > 0:
            notes.append(f"{clipped:.2%} of |h| is negative and counts as zero")
        if unattained:
            notes.append(f"the minimum is a limit, not attained, in {', '.join(unattained)}")
        return self.measurement(
            value=sum(by_layer.values()),
            exact=True,
            gap=factor * sum(each.gap for each in balanced.values()),
            by_layer=by_layer,
            details={"clipped": clipped},
            notes=tuple(notes),
        )

    def _bounded(self, context: Context, diagonal: Quantity, factor: float) -> Measurement:
        fitted = normalized_bound(context.layers, diagonal)
        by_layer = {x.name: factor * fitted.by_parameter[x.parameter] for x in context.layers}
        return self.measurement(
            value=factor * fitted.value,
            exact=False,
            stderr=factor * fitted.stderr,
            degrees=fitted.degrees,
            bound="upper",
            by_layer=by_layer,
            notes=(NOTE, "negative entries of h count as they are, not as zero"),
        )


@final
@dataclass(frozen=True)
class MatrixNormalizedSharpness(Measure):
    """Σ_d sqrt(‖W_d‖²_F · Tr H_d) (Tsuzuku et al. 2020, eq. 13).

    A trace below zero (an indefinite loss) counts as zero. Of estimated traces the value is an
    upper bound with an error (`saltflat.measures.cross_fit`).
    """

    name: ClassVar[str] = "matrix_normalized_sharpness"
    title: ClassVar[str] = "Σ_d sqrt(‖W_d‖² Tr H_d)"
    explanation: ClassVar[str] = (
        "What noise in the weights costs at best, when every layer may have noise of its own size."
    )
    paper: ClassVar[str] = "Tsuzuku et al. 2020"
    references: ClassVar[tuple[str, ...]] = ("tsuzuku2020normalized",)
    equation: ClassVar[str] = "(13)"
    needs: ClassVar[frozenset[Need]] = frozenset({"trace"})
    invariant_to: ClassVar[frozenset[Symmetry]] = frozenset({"layer"})

    def compute(self, context: Context) -> Measurement:
        trace = context.quantity("trace")
        names = {layer.name: layer.parameter for layer in context.layers}
        known = {n: float(trace.values[p]) for n, p in names.items() if p not in trace.draws}
        negative = {name: value for name, value in known.items() if value < 0}
        if len(negative) == len(names):
            raise NotApplicable("The trace of every weight matrix is negative.")
        listed = ", ".join(f"{name} ({value:.3g})" for name, value in negative.items())
        notes = (f"negative traces counted as zero: {listed}",) if negative else ()
        if len(known) == len(names):
            by_layer = {
                x.name: sqrt(x.norm_squared * max(known[x.name], 0.0)) for x in context.layers
            }
            return self.measurement(
                value=sum(by_layer.values()),
                exact=True,
                **trace.sampled(_root_slopes(context.layers, known)),
                by_layer=by_layer,
                notes=notes,
            )
        fitted = root_bound(trace, {x.parameter: x.norm_squared for x in context.layers})
        return self.measurement(
            value=fitted.value,
            **fitted.certainty(),
            bound="upper",
            by_layer={name: fitted.by_parameter[p] for name, p in names.items()},
            notes=(NOTE, *notes),
        )


def _root_slopes(layers: Sequence[Layer], traces: Mapping[str, float]) -> dict[str, float]:
    """The derivatives of Σ sqrt(‖W‖² Tr H) in the traces; 0 for what counts as zero."""
    positive = [layer for layer in layers if traces[layer.name] > 0]
    return {x.parameter: sqrt(x.norm_squared / traces[x.name]) / 2 for x in positive}


@final
@dataclass(frozen=True, slots=True)
class BalancedLayer:
    """The minimum for one layer, and where it is: log(σσ')² of every group, output and input."""

    value: float
    gap: float
    attained: bool
    negative: float  # Σ |h| over what is negative, over kernel positions summed up …
    size: float  # … and over everything
    layer: Layer
    place: tuple[tuple[Tensor, Tensor], ...]
    sums: Tensor  # h and W², summed over kernel positions
    squares: Tensor

    @property
    def slopes(self) -> Tensor:
        """The derivatives in h, of the weight's shape."""
        return self._spread(self.sums > 0, 1.0)

    @property
    def shrink(self) -> Tensor:
        """The derivatives in W², of the weight's shape."""
        return self._spread(self.squares > 0, -1.0)

    def _spread(self, where: Tensor, sign: float) -> Tensor:
        values = torch.stack([torch.exp(sign * (x[:, None] + y)) for x, y in self.place])
        return over_kernel(self.layer, torch.where(where, values, 0.0))


# In ε of the sum of the terms' sizes. Rounding leaves a few of them, in passes and sums of any
# order; where h is 0, the square root under which it enters makes sqrt(ε) of that. Above 1024 ε the
# same few ε move the root by less than 1e-9: by 4 ε / (2 · 1024 ε) of sqrt(1024 ε).
_NOISE = 1024.0


def noise_floor(magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    """What a sum of terms of both signs, computed in `dtype`, is not to be told from 0 below.

    `magnitude` is the sum of their sizes. (A sum of terms of one sign has no floor: its rounding is
    relative to itself.)
    """
    return _NOISE * torch.finfo(dtype).eps * magnitude


def balance_layer(layer: Layer, h: Tensor, magnitude: Tensor | None = None) -> BalancedLayer:
    """eq. 17 for one weight at λ = ½, group by group.

    `magnitude` is of h's shape, or a 0 where h has terms of one sign only: see `noise_floor`.
    """
    sums, squares = by_channel(layer, h.cpu()), _squares(layer)
    if magnitude is not None and magnitude.ndim:
        terms = by_channel(layer, magnitude.cpu())
        sums = sums.where(sums.abs() > noise_floor(terms, layer.weight.dtype), 0.0)
    clipped = sums.clamp(min=0)
    groups = [balance(*each) for each in zip(clipped, squares, strict=True)]
    negative = float((clipped - sums).sum())
    return BalancedLayer(
        value=sum(group.value for group in groups),
        gap=sum(group.gap for group in groups),
        attained=all(group.attained for group in groups),
        negative=negative,
        size=float(clipped.sum()) + negative,
        layer=layer,
        place=tuple((group.x, group.y) for group in groups),
        sums=sums,
        squares=squares,
    )


def normalized_bound(layers: Sequence[Layer], diagonal: Quantity) -> CrossFit:
    """Σ of eq. 17 over all weights at λ = ½, by parameter, of an estimated diagonal: from above.

    For any x and y, with P = Σ_ij h_ij e^{x_i+y_j} and Q = Σ_ij w²_ij e^{−(x_i+y_j)}, the best
    common shift of x makes P + Q as small as 2 sqrt(P Q). That is at least the minimum of eq. 17,
    does not depend on the scale of what chose x and y, and P is linear in h. So x and y are chosen
    with some of the draws of h and P Q evaluated with the others, and then the root is bounded
    likewise, as `saltflat.measures.cross_fit` says. Entries of h below zero count as they are: to
    cut them off would leave what noise is positive.
    """

    def choose(rest: Sequence[int]) -> Line:
        values, errors = partial_means(diagonal, rest)
        names = {layer.parameter: layer for layer in layers}
        return Line({n: _slopes(x, values[n], errors.get(n)) for n, x in names.items()})

    products = evaluated(diagonal, choose)
    numbers = Quantity(
        {name: mean_error(each, diagonal.counts)[0] for name, each in products.items()},
        {name: each for name, each in products.items() if name in diagonal.draws},
        diagonal.sizes,
    )
    return root_bound(numbers, dict.fromkeys(products, 4.0))


def _slopes(layer: Layer, h: Tensor, error: Tensor | None) -> Tensor:
    """Q e^{x+y}, the derivatives of P Q in h, at the minimum for this h.

    An estimate h with the standard error s counts as sqrt(h² + s²), so that no variance grows
    without bound where h happens to be small; a known one below zero counts as zero.
    """
    sums = by_channel(layer, h)
    if error is None:
        sizes = sums.clamp(min=0)
    else:
        sizes = torch.hypot(sums, by_channel(layer, error.square()).sqrt())
    powers, rest = [], 0.0
    for each, square in zip(sizes, _squares(layer), strict=True):
        balanced = balance(each, square)
        power = torch.exp(balanced.x[:, None] + balanced.y)
        stays = _attained(each, square)
        powers.append(power.where(stays & (each > 0), 0.0))
        rest += float((square / power).where(stays & (square > 0), 0.0).sum())
    return rest * over_kernel(layer, torch.stack(powers))


def _squares(layer: Layer) -> Tensor:
    return by_channel(layer, layer.weight.to("cpu", torch.float64).square())


def _attained(h: Tensor, squares: Tensor) -> Tensor:
    """Which entries do not vanish on the way to the infimum."""
    if min(h.min(), squares.min()) > 0:
        return torch.ones_like(h, dtype=torch.bool)
    rows, columns = components(squares > 0, h > 0)
    return rows[:, None] == columns


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

    def price(self) -> float:
        return 2.0 * self.draws

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

    def price(self) -> float:
        return 2 * self.steps + (1 + 2 * self.draws) * FORWARD

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
