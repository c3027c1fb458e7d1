"""The directions of BN-Sharpness: one sphere for every filter that feeds BatchNorm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from saltflat.curvature.curvature import Layer
from saltflat.measures.ascent import Point, Region

Units = dict[str, Tensor]  # one number a unit, by parameter name


@final
class Spheres(Region):
    """φ(θ): ‖v_i‖ = ‖θ_i‖ for every unit i in `fed`, one joint unit sphere for all other entries.

    Yi et al. 2019, definition 3.1. `fed` marks the units of every layer, by parameter name.
    """

    def __init__(self, layers: Sequence[Layer], fed: Mapping[str, Tensor]) -> None:
        self.layers = {layer.parameter: layer for layer in layers}
        self.own = {name: layer.weight.double() for name, layer in self.layers.items()}
        self.fed = {name: fed[name].to(self.own[name].device) for name in self.layers}
        self.radii = self._lengths(self.own)

    def farthest(self, direction: Mapping[str, Tensor]) -> Point:
        """Each part of `direction` brought to the length of its sphere.

        Where a part vanishes, all of its sphere is as far: the direction of θ is taken there.
        """
        lengths = self._lengths(direction)
        rest, own_rest = self._rest(lengths), self._rest(self.radii)
        result = {}
        for name, layer in self.layers.items():
            fed, radius = self.fed[name], self.radii[name]
            length = torch.where(fed, lengths[name], rest)
            gone = length == 0
            length = torch.where(gone, torch.where(fed, radius, own_rest), length)
            target = torch.where(fed, radius, 1.0)
            scale = torch.where(length > 0, target / length.where(length > 0, 1.0), 0.0)
            source = direction[name] + self.own[name] * per_unit(layer, gone.double())
            result[name] = source * per_unit(layer, scale)
        return result

    def nearest(self, point: Point) -> Point:
        return self.farthest(point)

    def slope(self, gradient: Mapping[str, Tensor]) -> float:
        """The largest ⟨g, v⟩: Σ_i ‖θ_i‖‖g_i‖ + ‖g_rest‖."""
        lengths = self._lengths(gradient)
        products = [(self.radii[n] * lengths[n])[self.fed[n]].sum() for n in self.layers]
        return float(torch.stack(products).sum()) + self._rest(lengths)

    def zeros(self) -> int:
        """How many units that feed BatchNorm are zero, and so have no direction."""
        return sum(int((self.radii[name] == 0)[self.fed[name]].sum()) for name in self.layers)

    def _lengths(self, vector: Mapping[str, Tensor]) -> Units:
        return {
            name: layer.matrix.rows(vector[name].square()).sqrt()
            for name, layer in self.layers.items()
        }

    def _rest(self, lengths: Units) -> float:
        squares = [lengths[name][~self.fed[name]].square().sum() for name in self.layers]
        return float(torch.stack(squares).sum().sqrt())


def per_unit(layer: Layer, values: Tensor) -> Tensor:
    """One number an output unit, laid out so that it multiplies the layer's weight."""
    kernel = [1] * (layer.weight.ndim - 2)
    if layer.matrix.out == 0:
        return values.view(-1, 1, *kernel)
    inputs = layer.weight.shape[0] // layer.matrix.groups
    grouped = values.view(layer.matrix.groups, 1, -1)
    return grouped.expand(-1, inputs, -1).reshape(layer.weight.shape[0], -1, *kernel)
