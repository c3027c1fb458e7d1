"""Rank correlations of a measure with a gap over a pool of networks, plain and conditional.

All of them are made of the signs of differences between two networks, sign(μ_i − μ_j) and
sign(g_i − g_j). So a bootstrap draw, in which network i is there w_i times, needs quadratic forms
in w alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Numbers = Sequence[float] | NDArray[np.floating]
# One row a draw, one column a network: how often it is counted.
Weights = Array
# One number a draw.
Drawn = NDArray[np.float64]
Statistic = Callable[[Weights], Drawn]


@final
@dataclass(frozen=True)
class Estimate:
    """A value with a bootstrap interval that holds 95 in 100 draws."""

    value: float
    low: float
    high: float

    @property
    def sign(self) -> int:
        """Of the whole interval; 0 where it holds 0 or is not known."""
        return int(self.low > 0) - int(self.high < 0)

    @property
    def error(self) -> float:
        """Half the interval's width over 1.96: a standard error, were it normal."""
        return (self.high - self.low) / (2 * 1.96)


def draws(cells: Sequence[Hashable], count: int, seed: int = 0) -> Weights:
    """Bootstrap weights: whole cells are drawn, with all the networks in them."""
    names = {cell: index for index, cell in enumerate(dict.fromkeys(cells))}
    where = np.array([names[cell] for cell in cells])
    generator = np.random.default_rng(seed)
    counts = generator.multinomial(len(names), np.full(len(names), 1 / len(names)), size=count)
    return counts[:, where].astype(np.float32)


def estimate(statistic: Statistic, weights: Weights) -> Estimate:
    """The statistic of the pool, and the interval over bootstrap draws."""
    value = float(statistic(np.ones((1, weights.shape[1]), np.float32))[0])
    drawn = statistic(weights)
    drawn = drawn[np.isfinite(drawn)]
    if not np.isfinite(value) or not len(drawn):
        return Estimate(value, np.nan, np.nan)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Estimate(value, float(low), float(high))


def signs(values: Numbers) -> Array:
    """sign(v_i − v_j) of all i and j."""
    v = np.asarray(values, np.float64)
    return np.sign(v[:, None] - v[None, :]).astype(np.float32)


def _sum(pairs: Array, weights: Weights) -> Drawn:
    """Σ_ij w_i w_j pairs_ij of every draw."""
    return np.asarray(((weights @ pairs) * weights.astype(np.float64)).sum(1))


def _ratio(above: Drawn, below: Drawn) -> Drawn:
    """NaN where nothing can be said: one of the two never differs."""
    return np.divide(above, below, out=np.full_like(above, np.nan), where=below > 1e-12)


def tau(a: Array, b: Array, weights: Weights, pairs: Array | None = None) -> Drawn:
    """Kendall's τ_b of the signs `a` and `b`; over some pairs alone if `pairs` is 1 there, else 0.

    Conditional τ is that over pairs which agree in what is conditioned on.
    """
    kept = np.float32(1.0) if pairs is None else pairs
    untied = _sum(a * a * kept, weights) * _sum(b * b * kept, weights)
    return _ratio(_sum(a * b * kept, weights), np.sqrt(untied))


def partial_tau(a: Array, b: Array, given: Array, weights: Weights) -> Drawn:
    """Kendall's partial τ: (τ_ab − τ_ac τ_bc) / √((1 − τ_ac²)(1 − τ_bc²)).

    It is not quite 0 where a and b are independent given c: a normal a that is c with a little
    noise has a small positive one. `partial_spearman` is nearer to 0 there.
    """
    return _partial(tau(a, b, weights), tau(a, given, weights), tau(b, given, weights))


def spearman(a: Array, b: Array, weights: Weights) -> Drawn:
    """Pearson's correlation of the ranks; a rank is half the sum of signs, up to a constant."""
    x, y = _centred(weights @ a.T, weights), _centred(weights @ b.T, weights)
    squares = [(weights * z * z).sum(1) for z in (x, y)]
    return _ratio((weights * x * y).sum(1), np.sqrt(squares[0] * squares[1]))


def _centred(ranks: Array, weights: Weights) -> Drawn:
    mean = np.average(ranks.astype(np.float64), axis=1, weights=weights)
    return np.asarray(ranks - mean[:, None], np.float64)


def partial_spearman(a: Array, b: Array, given: Array, weights: Weights) -> Drawn:
    """Correlation of what is left of both ranks after a linear fit on the ranks of the third."""
    r = spearman(a, b, weights), spearman(a, given, weights), spearman(b, given, weights)
    return _partial(*r)


def _partial(ab: Drawn, ac: Drawn, bc: Drawn) -> Drawn:
    left = (1 - ac * ac) * (1 - bc * bc)
    return _ratio(ab - ac * bc, np.sqrt(np.where(left > 1e-9, left, 0.0)))


@final
@dataclass(frozen=True)
class Pairs:
    """Some pairs of networks, each with a weight."""

    first: NDArray[np.intp]
    second: NDArray[np.intp]
    weight: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.first)


def axis_pairs(settings: Sequence[Mapping[str, Hashable]], axis: str) -> Pairs:
    """The pairs of networks that differ in one hyperparameter alone.

    A cell is what agrees in all the others. Its pairs weigh 1 together, so that cells count alike
    also where some of their networks are missing.
    """
    rest = _codes([tuple((k, v) for k, v in s.items() if k != axis) for s in settings])
    own = _codes([s[axis] for s in settings])
    alone = (rest[:, None] == rest[None, :]) & (own[:, None] != own[None, :])
    first, second = np.nonzero(np.triu(alone))
    return Pairs(first, second, 1 / np.bincount(rest[first], minlength=len(rest))[rest[first]])


def granulated(a: Array, b: Array, pairs: Pairs, weights: Weights) -> Drawn:
    """Ψ of one axis (Jiang et al. 2020): the mean over cells of τ along that axis.

    τ is here the mean of sign products, so that a measure which does not move along it has 0.
    """
    counts = weights[:, pairs.first] * weights[:, pairs.second] * pairs.weight
    agreement = (a * b)[pairs.first, pairs.second]
    return _ratio(np.asarray(counts @ agreement), np.asarray(counts.sum(1)))


def mean_granulated(a: Array, b: Array, axes: Sequence[Pairs], weights: Weights) -> Drawn:
    """The mean of Ψ over the axes that have pairs."""
    return np.asarray(np.mean([granulated(a, b, pairs, weights) for pairs in axes], axis=0))


def information(a: Array, b: Array, known: Sequence[Sequence[Hashable]], weights: Weights) -> Drawn:
    """K: the least of I(V_a, V_b | U_S) / H(V_b | U_S) over sets S of at most two hyperparameters.

    Jiang et al. 2020. V are the signs over ordered pairs of networks, U_S the values
    that both networks have in S; `known` has a list of values for each hyperparameter. Pairs with
    one gap are left out, and a tie of the measure is a third value of V_a, which tells nothing of
    the order. Of few networks it is biased upwards, as every plug-in estimate of information is.
    """
    singles = [_codes(values) for values in known]
    doubles = [_codes(list(zip(x, y, strict=True))) for x, y in combinations(singles, 2)]
    sets = [np.zeros(len(a), np.int64), *singles, *doubles]
    offsets = np.cumsum([0] + [codes.max() + 1 for codes in sets])
    levels = np.zeros((len(a), offsets[-1]), np.float32)
    for codes, offset in zip(sets, offsets[:-1], strict=True):
        levels[np.arange(len(a)), offset + codes] = 1.0
    upper = [((a == sign) & (b > 0)).astype(np.float32) for sign in (1, 0, -1)]
    return np.array([_least(upper, levels * w[:, None], offsets) for w in weights])


def _least(upper: Sequence[Array], levels: Array, offsets: NDArray[np.int64]) -> float:
    """K of one draw; `upper` are the pairs with g_i > g_j and μ_i >, =, < μ_j."""
    halves = [pairs @ levels if pairs.any() else np.zeros_like(levels) for pairs in upper]
    shares = []
    for start, end in pairwise(offsets):
        first = levels[:, start:end].T
        above = np.stack([first @ half[:, start:end] for half in halves])
        below = above[::-1].transpose(0, 2, 1)  # the same pairs, the other way round
        shares.append(_normalised(np.stack([above, below], 1).reshape(3, 2, -1)))
    return float(np.nanmin(shares)) if not np.isnan(shares).all() else np.nan


def _normalised(counts: Array) -> float:
    """I / H from counts of (V_a, V_b, U)."""
    p = counts.astype(np.float64) / max(counts.sum(), 1e-12)
    entropy = {axes: _entropy(p.sum(axes)) for axes in ((), (0,), (1,), (0, 1))}
    of_gap = entropy[(0,)] - entropy[(0, 1)]
    both = entropy[()] - entropy[(0, 1)]
    of_measure = entropy[(1,)] - entropy[(0, 1)]
    return (of_gap + of_measure - both) / of_gap if of_gap > 1e-12 else np.nan


def _entropy(p: Drawn) -> float:
    p = p[p > 0]
    return float(-(p * np.log2(p)).sum())


def _codes(values: Sequence[Hashable]) -> NDArray[np.int64]:
    names = {value: index for index, value in enumerate(dict.fromkeys(values))}
    return np.array([names[value] for value in values])
