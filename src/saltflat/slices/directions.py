"""Directions through a model's parameters, each as long as the weights that it moves.

A step of one along any of them goes as far as these weights are from the origin, so that lines in
different directions can be drawn over one axis.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any, Literal, final

import torch
from torch import Tensor

from saltflat.curvature import Curvature, Layer
from saltflat.errors import InvalidType, InvalidValue, ModelError, nearest
from saltflat.landscape import Filters, Point, at_least_tiny, gaussian

Kind = Literal["random", "filter", "balanced", "eigenvectors"]

# Residual norms of eigenvectors, as a part of their eigenvalues.
_TOLERANCE = 1e-3


@final
@dataclass(frozen=True)
class Directions:
    """One vector for a line, two for a plane; what a vector does not name does not move."""

    vectors: tuple[Point, ...]
    eigenvalues: tuple[float, ...] = ()

    def shift(self, coordinates: Sequence[float]) -> Point:
        """Σ_k c_k d_k."""
        names = dict.fromkeys(name for vector in self.vectors for name in vector)
        pairs = list(zip(coordinates, self.vectors, strict=True))
        return {n: torch.stack([c * d[n] for c, d in pairs if n in d]).sum(0) for n in names}

    @property
    def lengths(self) -> tuple[float, ...]:
        return tuple(sqrt(_inner(vector, vector)) for vector in self.vectors)

    @property
    def cosine(self) -> float | None:
        """Of the angle between the two directions of a plane."""
        if len(self.vectors) == 1:
            return None
        one, two = self.vectors
        return _inner(one, two) / (self.lengths[0] * self.lengths[1])

    @property
    def moving(self) -> int:
        """How many numbers move at all."""
        zero = self.shift([0.0] * len(self.vectors))
        return sum(
            int(torch.stack([d[n] != 0 for d in self.vectors if n in d]).any(0).sum()) for n in zero
        )


def random_directions(parameters: Mapping[str, Tensor], count: int, seed: int) -> Directions:
    """Independent normal entries for all parameters, at the length of all of them together."""
    length = sqrt(_inner(parameters, parameters))
    if length == 0:
        raise ModelError("All parameters are zero, so that no direction is as long as they are.")
    generator = torch.Generator().manual_seed(seed)
    draws = [gaussian(parameters, generator) for _ in range(count)]
    return Directions(tuple(_scaled(d, length / sqrt(_inner(d, d))) for d in draws))


def filter_directions(layers: Sequence[Layer], count: int, seed: int) -> Directions:
    """Normal entries, every filter of them at the length of that filter of the weights.

    d_i ← d_i ‖w_i‖ / ‖d_i‖ (Li et al. 2018, section 4): a filter is all that enters one unit, the
    row of a matrix or the kernel of a channel. Biases and normalisation parameters do not move.
    """
    if not layers:
        raise ModelError(
            "The model has no weight matrix among its measured parameters, so that there are no "
            "filters. Use directions='random'."
        )
    weights = {layer.parameter: layer.weight.detach().double() for layer in layers}
    filters = {layer.parameter: Filters(weights[layer.parameter], layer.matrix) for layer in layers}
    if _inner(weights, weights) == 0:
        raise ModelError("All weights are zero, so that no direction is as long as they are.")
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        draw = gaussian(weights, generator)
        found.append(
            {
                name: d * f.norms(f.weight) / at_least_tiny(f.norms(d))
                for (name, d), f in zip(draw.items(), filters.values(), strict=True)
            }
        )
    return Directions(tuple(found))


def eigenvector_directions(engine: Curvature, count: int) -> Directions:
    """Eigenvectors of the largest eigenvalues of the Hessian, at the length of all parameters.

    Of the two signs the one that makes the largest entry positive.
    """
    parameters = engine.risk.parameters
    size = sum(p.numel() for p in parameters.values())
    if count > size:
        raise InvalidValue(f"A plane needs two parameters. Got {size}; use dimensions=1.")
    length = sqrt(_inner(parameters, parameters))
    if length == 0:
        raise ModelError("All parameters are zero, so that no direction is as long as they are.")
    pairs = engine.eigenpairs(list(parameters), count, _TOLERANCE)
    vectors = tuple(_scaled(pair.vector, length * _sign(pair.vector)) for pair in pairs)
    return Directions(vectors, tuple(pair.value for pair in pairs))


def given_directions(
    parameters: Mapping[str, Tensor], given: Sequence[Mapping[str, Tensor]]
) -> Directions:
    """The user's own, as they are."""
    vectors = []
    for number, mapping in enumerate(given):
        vector = {}
        for name, values in mapping.items():
            if name not in parameters:
                raise InvalidValue(
                    f"Direction {number} moves {name!r}, which is not a measured parameter. "
                    f"{nearest(name, parameters)}"
                )
            like = parameters[name]
            if values.shape != like.shape or not bool(values.isfinite().all()):
                raise InvalidValue(
                    f"Direction {number} must have finite values of shape {tuple(like.shape)} for "
                    f"{name!r}. Got a tensor of shape {tuple(values.shape)}."
                )
            vector[name] = values.detach().to(like.device, torch.float64)
        if not vector or _inner(vector, vector) == 0:
            raise InvalidValue(f"Direction {number} is zero: it moves nothing.")
        vectors.append(vector)
    return Directions(tuple(vectors))


def check_given(given: Any, dimensions: int) -> tuple[Mapping[str, Tensor], ...]:
    """A mapping from names to tensors for every dimension."""
    listed = [given] if isinstance(given, Mapping) else given
    good = isinstance(listed, list | tuple) and all(
        isinstance(each, Mapping) and all(isinstance(t, Tensor) for t in each.values())
        for each in listed
    )
    if not good:
        raise InvalidType(
            "directions must be 'random', 'filter', 'balanced', 'eigenvectors', or mappings from "
            f"parameter names to tensors, one for each dimension. Got {type(given).__name__}."
        )
    if len(listed) != dimensions:
        raise InvalidValue(f"dimensions={dimensions} needs as many directions. Got {len(listed)}.")
    return tuple(listed)


def digest(given: Sequence[Mapping[str, Tensor]]) -> str:
    """A name for directions of the user's own, by which a file is known to be of the same."""
    found = hashlib.blake2b(digest_size=8)
    for vector in given:
        for name, values in sorted(vector.items()):
            found.update(name.encode() + values.detach().double().cpu().contiguous().numpy().data)
    return found.hexdigest()


def _inner(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    pairs = [(a[name].detach().double(), b[name].detach().double()) for name in a if name in b]
    return sum(float((x * y).sum()) for x, y in pairs)


def _scaled(vector: Mapping[str, Tensor], factor: float) -> Point:
    return {name: x.double() * factor for name, x in vector.items()}


def _sign(vector: Mapping[str, Tensor]) -> float:
    extremes = [x.flatten()[x.abs().argmax()] for x in vector.values()]
    return 1.0 if float(max(extremes, key=lambda x: abs(float(x)))) > 0 else -1.0
