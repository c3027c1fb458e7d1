"""The papers' formulas over dense Hessians, written out as they are printed.

Everything is a loop or a matrix product over the oracle's blocks; nothing is imported from the
library under test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt

import numpy as np
import torch
from dense import Dense, gradient
from scipy.optimize import minimize
from torch import Tensor, nn
from units import Units, matrices


@dataclass
class Layer:
    """One weight matrix: its entries, the units they join, and the Hessian over them."""

    w: Tensor
    units: Units
    hessian: Tensor

    @property
    def norm(self) -> float:
        """‖W‖²_F."""
        return float(self.w @ self.w)

    @property
    def trace(self) -> float:
        return float(self.hessian.trace())


def layers(
    oracle: Dense, matrix: str = "hessian", others: dict[str, Units] | None = None
) -> dict[str, Layer]:
    """The weight matrices among the measured parameters, by layer name.

    `others` are the units of matrices that no module of a known type owns.
    """
    blocks = oracle.blocks(getattr(oracle, matrix))
    known = matrices(oracle.model) | (others or {})
    found = {}
    for name, p in oracle.parameters.items():
        if name in known:
            w = p.detach().reshape(-1)
            found[name.removesuffix(".weight")] = Layer(w, known[name], blocks[name])
    return found


def plain(*shape: int) -> Units:
    """Outputs along the first dimension, inputs along the second, kernel along the rest."""
    axes = torch.meshgrid(*[torch.arange(s) for s in shape], indexing="ij")
    place = torch.zeros(shape, dtype=torch.long)
    for axis, size in zip(axes[2:], shape[2:], strict=True):
        place = place * size + axis
    return Units(axes[0].reshape(-1), axes[1].reshape(-1), place.reshape(-1))


def transposed(u: Units) -> Units:
    """The same entries, the other way round."""
    return Units(u.into, u.out, u.place)


# Petzka et al. 2019, Table 1


def kappa(layer: Layer) -> float:
    return layer.norm * float(torch.linalg.eigvalsh(layer.hessian)[-1])


def kappa_trace(layer: Layer) -> float:
    return layer.norm * layer.trace


def neurons(layer: Layer, side: str = "columns") -> list[Layer]:
    """The weights w(j) of every input unit ("columns") or output unit ("rows"), each on its own."""
    unit = layer.units.into if side == "columns" else layer.units.out
    parts = [(unit == j).nonzero().squeeze(1) for j in range(int(unit.max()) + 1)]
    return [Layer(layer.w[m], layer.units, layer.hessian[m][:, m]) for m in parts]


def rho(layer: Layer, side: str) -> Tensor:
    """w(j)ᵀ H(w(j)) w(j)"""
    return torch.stack([each.w @ each.hessian @ each.w for each in neurons(layer, side)])


# Petzka et al. 2021, Definition 3


def relative_flatness(layer: Layer, scale: Tensor | None = None) -> float:
    """Σ_{s,s'} ⟨w_s, w_s'⟩ Tr H_{s,s'}; `scale` is what every input unit is divided by."""
    u, w, h = layer.units, layer.w, layer.hessian
    if scale is not None:
        each = scale[u.into]
        inverse = torch.where(each > 0, 1 / each, 0.0)
        w, h = w * each, h * inverse[:, None] * inverse[None]
    entries: dict[int, dict[tuple[int, int], int]] = {}  # output -> input -> which entry
    for e, (o, i, k) in enumerate(
        zip(*(v.tolist() for v in (u.out, u.into, u.place)), strict=True)
    ):
        entries.setdefault(o, {})[i, k] = e
    total = 0.0
    for first in entries.values():
        for second in entries.values():
            shared = [(first[j], second[j]) for j in first if j in second]  # none across groups
            inner = sum(float(w[a] * w[b]) for a, b in shared)
            trace = sum(float(h[a, b]) for a, b in shared)
            total += inner * trace
    return total


# Tsuzuku et al. 2020


def matrix_normalized(layer: Layer) -> float:
    """(13)"""
    return sqrt(layer.norm * max(layer.trace, 0.0))


def by_channels(layer: Layer, values: Tensor) -> np.ndarray:
    """Entries summed over kernel positions, as (output, input)."""
    u = layer.units
    sums = torch.zeros(int(u.out.max()) + 1, int(u.into.max()) + 1, dtype=torch.float64)
    sums.index_put_((u.out, u.into), values, accumulate=True)
    return sums.numpy()


def clipped(layer: Layer) -> tuple[float, float]:
    """Σ |h| of what is negative, and of everything."""
    h = by_channels(layer, layer.hessian.diagonal())
    return float(np.abs(h.clip(max=0)).sum()), float(np.abs(h).sum())


def normalized(layer: Layer, lam: float = 0.5) -> float:
    """(17)"""
    h = by_channels(layer, layer.hessian.diagonal()).clip(min=0)
    return least(h, by_channels(layer, layer.w**2), lam)


def least(h: np.ndarray, squares: np.ndarray, lam: float = 0.5) -> float:
    """min_{x,y} Σ h e^{x+y} + squares e^{−x−y} / (2λ), by L-BFGS.

    A row or column without any h, or without any weight, goes to 0 with its own x or y, so it is
    left out; this is repeated, since it can leave others without.
    """
    h, beta = h.copy(), squares / (2 * lam)
    while True:
        alive = (h.sum(1) > 0) & (beta.sum(1) > 0), (h.sum(0) > 0) & (beta.sum(0) > 0)
        if alive[0].all() and alive[1].all():
            break
        h, beta = h[alive[0]][:, alive[1]], beta[alive[0]][:, alive[1]]
    if not h.size:
        return 0.0
    rows = len(h)

    def objective(v: np.ndarray) -> tuple[float, np.ndarray]:
        s = v[:rows, None] + v[None, rows:]
        up, down = h * np.exp(s), beta * np.exp(-s)
        slope = up - down
        return float((up + down).sum()), np.concatenate([slope.sum(1), slope.sum(0)])

    found = minimize(
        objective,
        np.zeros(sum(h.shape)),
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": 20_000, "maxfun": 50_000, "ftol": 0.0, "gtol": 1e-11, "maxcor": 50},
    )
    return float(found.fun)


# The Fisher-Rao norm


def per_sample(
    model: nn.Module, x: Tensor, y: Tensor, loss: Callable[..., Tensor], names: list[str]
) -> Tensor:
    """The gradients of every sample's own loss, one a row, over `names` together."""
    parameters = dict(model.eval().named_parameters())
    chosen = [parameters[name] for name in names]
    rows = [
        gradient(loss(model(x[i : i + 1]), y[i : i + 1]), chosen).detach() for i in range(len(x))
    ]
    return torch.stack(rows)


def fisher_rao(gradients: Tensor, theta: Tensor) -> float:
    """Σ_i θ_i² E[(∂ℓ/∂θ_i)²], (25) of Tsuzuku et al. 2020"""
    return float(theta.square() @ gradients.square().mean(0))


def fisher_rao_of_liang(gradients: Tensor, theta: Tensor) -> float:
    """E⟨θ, ∂ℓ/∂θ⟩²"""
    return float((gradients @ theta).square().mean())
