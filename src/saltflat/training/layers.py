"""The layers that a flatness penalty can speak of: how to name them, and their geometry.

A Linear or a convolution is z_t = W x_t + b at every position t, x_t being the features there or
the patch under the kernel. A convolution with g groups is g such maps side by side. So everything
here is arranged as (samples, groups, positions, features).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils.parametrize import is_parametrized

from saltflat.errors import InvalidType, InvalidValue, ModelError, nearest

Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d
Layer = nn.Linear | Conv


def choose(model: nn.Module, layer: str | Iterable[str] | None) -> dict[str, Layer]:
    """The layers by name; None is the last Linear, the weights that leave the penultimate
    representation (the paper's section 4)."""
    known: dict[str, Layer] = {n: m for n, m in model.named_modules() if isinstance(m, Layer)}
    if layer is None:
        # Attention holds its output projection as a Linear that it never calls.
        called = [n for n, m in known.items() if type(m) is not NonDynamicallyQuantizableLinear]
        linear = [n for n in called if isinstance(known[n], nn.Linear)]
        if not linear:
            raise ModelError(
                "FAM found no Linear layer in the model. Name a layer: layer='features.0'."
            )
        return {linear[-1]: known[linear[-1]]}
    names = [layer] if isinstance(layer, str) else _listed(layer)
    for name in names:
        if name not in known:
            hint = nearest(name, known)
            raise InvalidValue(
                "The 'layer' argument of FAM must name a Linear or Conv layer of the model. "
                f"Got {name!r}; {hint[0].lower()}{hint[1:]}"
            )
    return {name: known[name] for name in names}


def _listed(layer: Iterable[str]) -> list[str]:
    names = list(layer) if isinstance(layer, Iterable) else [layer]
    if not names:
        raise InvalidValue("The 'layer' argument of FAM is an empty list. Name a layer.")
    for name in names:
        if not isinstance(name, str):
            raise InvalidType(
                "The 'layer' argument of FAM must be a name or a list of names. "
                f"Got {type(name).__name__}."
            )
    return names


def weight_of(layer: Layer) -> Tensor:
    """The weight as the last forward pass used it.

    Reading a parametrized weight computes it anew, and in training mode spectral normalisation
    would take another step of its power iteration; in evaluation mode it does not.
    """
    if not is_parametrized(layer, "weight"):
        return layer.weight
    parametrizations = layer.parametrizations
    assert isinstance(parametrizations, nn.Module)
    modules = [m for m in parametrizations.modules() if m.training]
    for module in modules:
        module.training = False
    try:
        return layer.weight
    finally:
        for module in modules:
            module.training = True


def apply(layer: Layer, x: Tensor) -> Tensor:
    """W x + b, as the layer's type promises it."""
    weight = weight_of(layer)
    if isinstance(layer, nn.Linear):
        return F.linear(x, weight, layer.bias)
    convolved: Tensor = layer._conv_forward(x, weight, layer.bias)
    return convolved


@final
@dataclass(frozen=True, slots=True)
class Site:
    """One layer in one forward pass.

    `input` and `weight` may be rescaled (see `normalized`); `shape` is that of the output. The
    samples lie along `dim` of input and output; that dimension may hold several rows of each.
    """

    layer: Layer
    input: Tensor
    weight: Tensor
    shape: torch.Size
    samples: int
    dim: int = 0

    @property
    def groups(self) -> int:
        return 1 if isinstance(self.layer, nn.Linear) else self.layer.groups

    def normalized(self) -> Site:
        """Features over their standard deviation, columns of W times it; z stays the same.

        A feature that does not vary over the batch is left as it is.
        """
        linear = isinstance(self.layer, nn.Linear)
        feature = self.input.ndim - 1 if linear else 1
        others = [d for d in range(self.input.ndim) if d != feature]
        variance = self.input.var(others, correction=0)
        varies = variance > torch.finfo(variance.dtype).eps * self.input.square().mean(others)
        std = variance.where(varies, 1.0).sqrt()
        if linear:
            return self._with(self.input / std, self.weight * std)
        spatial = [1] * (self.input.ndim - 2)
        columns = std.reshape(self.groups, 1, -1).expand(-1, len(self.weight) // self.groups, -1)
        columns = columns.reshape(*self.weight.shape[:2], *spatial)
        return self._with(self.input / std.reshape(-1, *spatial), self.weight * columns)

    def _with(self, inputs: Tensor, weight: Tensor) -> Site:
        return Site(self.layer, inputs, weight, self.shape, self.samples, self.dim)

    def matrix(self) -> Tensor:
        """W as (g, out/g, q), q the inputs of one unit (channels of its group × kernel)."""
        return self.weight.reshape(self.groups, len(self.weight) // self.groups, -1)

    def inputs(self) -> Tensor:
        """What the layer saw, (n, g, T, q)."""
        if isinstance(self.layer, nn.Linear):
            x = self.input.movedim(self.dim, 0)
            return x.reshape(self.samples, 1, -1, x.shape[-1])
        return self._by_sample(_patches(self.layer, self.input, self.groups))

    def norms(self) -> Tensor:
        """‖x_t‖² at every position, shaped as the output without its features; one group."""
        if isinstance(self.layer, nn.Linear):
            return self.input.square().sum(-1)
        summed = self.input.square().sum(1, keepdim=True)
        return _patches(self.layer, summed, 1).sum(-1).reshape(len(summed), *self.shape[2:])

    def split(self, values: Tensor) -> Tensor:
        """(D, *output) as (D, n, g, T, out/g)."""
        count = len(values)
        if isinstance(self.layer, nn.Linear):
            moved = values.movedim(1 + self.dim, 1)
            return moved.reshape(count, self.samples, 1, -1, self.shape[-1])
        grouped = values.reshape(count * self.shape[0], self.groups, -1, prod(self.shape[2:])).mT
        return self._by_sample(grouped, count)

    def place(self, values: Tensor) -> Tensor:
        """The inverse of `split`."""
        if isinstance(self.layer, nn.Linear):
            shape = list(self.shape)
            shape.insert(0, shape.pop(self.dim))
            return values.reshape(len(values), *shape).movedim(1, 1 + self.dim)
        rows = torch.unflatten(values, 3, (-1, prod(self.shape[2:]))).movedim(3, 2)
        return rows.mT.reshape(len(values), *self.shape)

    def _by_sample(self, x: Tensor, count: int | None = None) -> Tensor:
        """(rows, g, T, q) as (n, g, rows/n · T, q), behind a dimension of `count` if given."""
        lead = (count or 1, self.samples)
        x = x.reshape(*lead, -1, *x.shape[1:]).movedim(2, 3).flatten(3, 4)
        return x[0] if count is None else x


def _patches(layer: Conv, x: Tensor, groups: int) -> Tensor:
    """What the kernel saw at each position, (rows, g, T, channels/g · kernel)."""
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    x = F.pad(x, layer._reversed_padding_repeated_twice, mode=mode)
    dims = len(layer.kernel_size)
    for d in range(dims):
        reach = layer.dilation[d] * (layer.kernel_size[d] - 1) + 1
        x = x.unfold(2 + d, reach, layer.stride[d])[..., :: layer.dilation[d]]
    x = x.unflatten(1, (groups, -1)).movedim(2, 2 + dims)  # rows, g, *positions, c/g, *kernel
    return x.flatten(2, 1 + dims).flatten(3)


def rows_of(layer: Layer, shape: Sequence[int], samples: int) -> list[int]:
    """The dimensions of a layer's output along which the samples may lie."""
    if isinstance(layer, nn.Linear):
        dims = [0, 1] if len(shape) > 2 else [0] if len(shape) == 2 else []
    else:
        dims = [0] if len(shape) == 2 + len(layer.kernel_size) else []
    fits = {0: shape[0] % samples == 0, 1: len(shape) > 1 and shape[1] == samples}
    return [d for d in dims if fits[d]]
