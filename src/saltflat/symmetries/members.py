"""The rescalings of the papers, as elements of a group."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy.sparse.linalg import lsqr
from torch import Tensor

from saltflat.errors import InvalidValue, nearest
from saltflat.symmetries.rescale import Element

if TYPE_CHECKING:
    from saltflat.symmetries.group import Group


def uniform(group: Group, seed: int, low: float, high: float) -> Element:
    """Each generator's factor is uniform in [low, high]; 5 and 25 in Petzka et al. (2019)."""
    if not 0 < low <= high < math.inf:
        raise InvalidValue(f"The factors must have 0 < low ≤ high. Got {low} and {high}.")
    generator = torch.Generator().manual_seed(seed)
    draws = torch.rand(len(group), generator=generator, dtype=torch.float64)
    return group.element((low + (high - low) * draws).log())


def alpha_scaling(group: Group, alphas: Mapping[str, float]) -> Element:
    """The layer-wise element that multiplies the weight `name` by `alphas[name]`.

    Minimum Sharpness (Ibayashi et al., 2021, section 2): W_d → α_d W_d with Π α_d = 1; the biases
    follow, b_d → (Π_{i≤d} α_i) b_d. Weights that are not named stay as they are.
    """
    layers = group.only("layer")
    e = layers.exponents()
    weights = [n for n in layers.parameters() if e.classes[n].ndim > 1]
    for name, alpha in alphas.items():
        if name not in e.classes:
            raise InvalidValue(f"The group has no weight {name!r}. {nearest(name, weights)}")
        if not 0 < alpha < math.inf:
            raise InvalidValue(f"Factors must be positive. Got {alpha} for {name!r}.")
    rows, target = [], []
    for name in {*weights, *alphas}:
        seen = e.classes[name].unique().numpy()
        rows.append(seen)
        target.append(np.full(len(seen), math.log(alphas.get(name, 1.0))))
    matrix = e.matrix[np.concatenate(rows)] if rows else e.matrix[:0]
    wanted = np.concatenate(target) if rows else np.empty(0)
    u = lsqr(matrix, wanted, atol=1e-15, btol=1e-15)[0] if matrix.shape[1] else np.empty(0)
    off = float(np.abs(matrix @ u - wanted).max(initial=0.0))
    if off > 1e-9:
        raise InvalidValue(
            "No rescaling of whole layers multiplies the weights by these factors and keeps the "
            f"function: the nearest is off by a factor of {math.exp(off):.3g}. In a chain of "
            "layers the product of all factors must be 1."
        )
    return layers.element(torch.from_numpy(u))


def row_column(group: Group, layer: str, unit: int, alpha: float) -> Element:
    """The incoming weights of one unit by 1/α and the outgoing ones by α.

    Normalized Flat Minima (Tsuzuku et al., 2020, section 5.1).
    """
    if not 0 < alpha < math.inf:
        raise InvalidValue(f"The factor must be positive. Got {alpha}.")
    names = [g.name for g in group.generators]
    if f"{layer}[{unit}]" not in names:
        raise InvalidValue(
            f"No generator is named {layer}[{unit}]. {nearest(f'{layer}[{unit}]', names)}"
        )
    u = torch.zeros(len(group), dtype=torch.float64)
    u[names.index(f"{layer}[{unit}]")] = -math.log(alpha)
    return group.element(u)


def filters(group: Group, factors: Mapping[str, float | Tensor]) -> Element:
    """T_a: filter i of the layer `name` that feeds BatchNorm is multiplied by a_i > 0.

    BN-Sharpness (definition 2.2). Everything but the filters, their biases and BatchNorm's
    statistics stays as it is.
    """
    u = torch.zeros(len(group), dtype=torch.float64)
    labels = {g.label for g in group.generators if g.kind == "batchnorm"}
    for label, value in factors.items():
        if label not in labels:
            raise InvalidValue(
                f"No layer {label!r} has filters that feed BatchNorm. {nearest(label, labels)}"
            )
        values = torch.as_tensor(value, dtype=torch.float64)
        if not bool((values > 0).all()):
            raise InvalidValue(f"Factors must be positive. Got {value} for {label!r}.")
        for i, g in enumerate(group.generators):
            if g.label == label and g.kind == "batchnorm":
                assert g.unit is not None
                u[i] = float((values if values.ndim == 0 else values[g.unit]).log())
    return group.element(u)
