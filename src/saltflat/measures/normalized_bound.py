"""Normalized sharpness of an estimated diagonal of the Hessian: a bound from above.

For any x and y, with P = Σ_ij h_ij e^{x_i+y_j} and Q = Σ_ij w²_ij e^{−(x_i+y_j)}, the best common
shift of x makes P + Q as small as 2 sqrt(P Q). That is at least the minimum of eq. 17, does not
depend on the scale of what chose x and y, and P is linear in h. So x and y are chosen with some of
the draws of h and P Q evaluated with the others, and then the root is bounded likewise, as
`saltflat.measures.cross_fit` says. Entries of h below zero count as they are: to cut them off would
leave what noise is positive.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from saltflat.convex import balance, components
from saltflat.curvature.curvature import Layer
from saltflat.curvature.estimators import Quantity, mean_error
from saltflat.measures.cross_fit import CrossFit, Line, evaluated, partial_means, root_bound


def normalized_bound(layers: Sequence[Layer], diagonal: Quantity) -> CrossFit:
    """Σ of eq. 17 over all weights at λ = ½, by parameter."""

    def choose(rest: Sequence[int]) -> Line:
        values, errors = partial_means(diagonal, rest)
        names = [layer.parameter for layer in layers]
        return Line(
            {n: _slopes(x, values[n], errors.get(n)) for n, x in zip(names, layers, strict=True)}
        )

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
    grouped, weight = layer.matrix.grouped, layer.weight.to("cpu", torch.float64)
    sums, squares = grouped(h).sum(-1), grouped(weight.square()).sum(-1)
    if error is None:
        chosen = sums.clamp(min=0)
    else:
        chosen = torch.hypot(sums, grouped(error.square()).sum(-1).sqrt())
    powers, rest = [], 0.0
    for each, square in zip(chosen, squares, strict=True):
        found = balance(each, square)
        power = torch.exp(found.x[:, None] + found.y)
        stays = _attained(each, square)
        powers.append(power.where(stays & (each > 0), 0.0))
        rest += float((square / power).where(stays & (square > 0), 0.0).sum())
    spread = rest * torch.stack(powers).unsqueeze(-1).expand(grouped(h).shape)
    return layer.matrix.ungrouped(spread, h.shape)


def _attained(h: Tensor, squares: Tensor) -> Tensor:
    """Which entries do not vanish on the way to the infimum."""
    if min(h.min(), squares.min()) > 0:
        return torch.ones_like(h, dtype=torch.bool)
    rows, columns = components(squares > 0, h > 0)
    return rows[:, None] == columns
