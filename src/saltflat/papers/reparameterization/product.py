"""Convolutions as matrix products, for many networks at once on a GPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saltflat.errors import ModelError


class Product(nn.Module):
    """What a convolution computes, with its own weight and bias, by one matrix product.

    For a batch of networks the product is a batched one, and a convolution one in as many groups as
    there are networks. The windows are stacked from slices, whose derivative can be batched too,
    which that of `Tensor.unfold` cannot.
    """

    def __init__(self, layer: nn.Conv2d) -> None:
        super().__init__()
        plain = (layer.stride, layer.padding, layer.dilation, layer.groups)
        if plain != ((1, 1), (0, 0), (1, 1), 1):
            raise ModelError(f"Only plain convolutions are made products. Got {layer}.")
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x: Tensor) -> Tensor:
        height, width = self.weight.shape[2:]
        x = x.permute(0, 2, 3, 1)
        windows = _stacked(_stacked(x, 1, height), 2, width)  # (n, h, w, columns, rows, channels)
        matrix = self.weight.permute(0, 3, 2, 1).flatten(1)
        return F.linear(windows.flatten(3), matrix, self.bias).permute(0, 3, 1, 2)


def _stacked(x: Tensor, axis: int, size: int) -> Tensor:
    """All slices of a length, one after the other along the fourth axis."""
    length = x.shape[axis] - size + 1
    return torch.stack([x.narrow(axis, i, length) for i in range(size)], 3)


def with_products(model: nn.Module) -> nn.Sequential:
    """A chain of the same layers and parameters, its convolutions as products."""
    layers = model.children()
    return nn.Sequential(*(Product(m) if isinstance(m, nn.Conv2d) else m for m in layers))
