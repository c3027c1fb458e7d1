"""Fully connected ReLU networks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn


def mlp(sizes: Sequence[int], bias: bool = True) -> nn.Sequential:
    """Linear layers of the given sizes with a ReLU between any two: `mlp([784, 20, 20, 10])`.

    Inputs of any shape are flattened first. `bias=False` is the setting of Theorem 1 of Minimum
    Sharpness (Ibayashi et al., 2021).
    """
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs, bias=bias), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
