"""Relative flatness of a layer as a differentiable number.

κ(W) = Σ_{s,s'} ⟨w_s, w_s'⟩ Tr H_{s,s'} (FAM, section 1; H the loss's Hessian in W). Because
z_t = W x_t, with H_z the Hessian of the loss in the layer's outputs z and S = W Wᵀ,

    κ = Σ_i Σ_{t,t'} ⟨x_t, x_t'⟩ ⟨S, H_z[t, t']⟩,

and the simplified κ̂ = ‖W‖² Tr H (section 3.2) is the same with S = ‖W‖² I. H_z has two parts,
H_z = Jᵀ B J + Σ_k g_k ∇²_z o_k: what the loss bends (B and g its Hessian and gradient in the
outputs o, J = ∂o/∂z) and what the network above the layer bends, which is zero for ReLU networks.
A group of a convolution is a layer of its own; κ is their sum.

**Geometry.** A Linear or a convolution is z_t = W x_t + b at every position t, x_t being the
features there or the patch under the kernel. A convolution with g groups is g such maps side by
side. So everything here is arranged as (samples, groups, positions, features).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.nn.utils.parametrize import is_parametrized

from saltflat.curvature import output_products, output_units
from saltflat.geometry import windows
from saltflat.losses import CrossEntropy, ElementwiseLoss, Loss

Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d
LayerModule = nn.Linear | Conv
_CHUNK = 64  # directions that travel together


def weight_of(layer: LayerModule) -> Tensor:
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


def apply(layer: LayerModule, x: Tensor) -> Tensor:
    """W x + b, as the layer's type promises it."""
    weight = weight_of(layer)
    if isinstance(layer, nn.Linear):
        return F.linear(x, weight, layer.bias)
    convolved: Tensor = layer._conv_forward(x, weight, layer.bias)
    return convolved


@final
@dataclass(frozen=True, slots=True)
class LayerPass:
    """One layer in one forward pass.

    `input` and `weight` may be rescaled (see `normalized`); `shape` is that of the output. The
    samples lie along `dim` of input and output; that dimension may hold several rows of each.
    """

    layer: LayerModule
    input: Tensor
    weight: Tensor
    shape: torch.Size
    samples: int
    dim: int = 0

    @property
    def groups(self) -> int:
        return 1 if isinstance(self.layer, nn.Linear) else self.layer.groups

    def normalized(self) -> LayerPass:
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
            return replace(self, input=self.input / std, weight=self.weight * std)
        spatial = [1] * (self.input.ndim - 2)
        columns = std.reshape(self.groups, 1, -1).expand(-1, len(self.weight) // self.groups, -1)
        columns = columns.reshape(*self.weight.shape[:2], *spatial)
        inputs = self.input / std.reshape(-1, *spatial)
        return replace(self, input=inputs, weight=self.weight * columns)

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
    x = windows(x, layer.kernel_size, layer.stride, layer.dilation)
    x = x.unflatten(1, (groups, -1)).movedim(2, 2 + dims)  # rows, g, *positions, c/g, *kernel
    return x.flatten(2, 1 + dims).flatten(3)


def rows_of(layer: LayerModule, shape: Sequence[int], samples: int) -> list[int]:
    """The dimensions of a layer's output along which the samples may lie."""
    if isinstance(layer, nn.Linear):
        dims = [0, 1] if len(shape) > 2 else [0] if len(shape) == 2 else []
    else:
        dims = [0] if len(shape) == 2 + len(layer.kernel_size) else []
    fits = {0: shape[0] % samples == 0, 1: len(shape) > 1 and shape[1] == samples}
    return [d for d in dims if fits[d]]


@final
@dataclass(frozen=True, slots=True)
class Form:
    """The quadratic form on a layer's outputs that H_z is contracted with.

    inputs : what the layer saw, (n, g, T, q).
    metric : S, (g, o, o).
    columns : a factor of S, S = columns columnsᵀ, (g, o, c).
    """

    inputs: Tensor
    metric: Tensor
    columns: Tensor

    @classmethod
    def of(cls, site: LayerPass, simplified: bool) -> Form:
        w = site.matrix()
        if simplified:
            unit = torch.eye(w.shape[1], dtype=w.dtype, device=w.device).expand(len(w), -1, -1)
            square = w.square().sum()
            return cls(site.inputs(), square * unit, square.sqrt() * unit)
        return cls(site.inputs(), w @ w.mT, w)

    def contract(self, left: Tensor, right: Tensor) -> Tensor:
        """Σ ⟨left, (X Xᵀ) right S⟩ over directions, samples and groups, each (D, n, g, T, o)."""
        positions, width = self.inputs.shape[2:]
        # einsum rather than @, which would copy S for every direction and sample.
        if positions <= width:
            image = torch.einsum("dngto,gop->dngtp", right, self.metric)
            gram = self.inputs @ self.inputs.mT
            return (left * (image * gram if positions == 1 else gram @ image)).sum()
        image = torch.einsum("gop,dngpq->dngoq", self.metric, right.mT @ self.inputs)
        return ((left.mT @ self.inputs) * image).sum()

    def directions(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs (u, ũ) with Σ ⟨ũ, H u⟩ = ⟨H, (X Xᵀ) ⊗ S⟩, stacked to (D, n, g, T, o).

        Unit vectors, or columns of X and of the factor of S: whichever are fewer.
        """
        n, groups, positions, width = self.inputs.shape
        if positions <= width:
            eye = torch.eye(positions, dtype=self.inputs.dtype, device=self.inputs.device)
            rows, mates = eye.expand(n, groups, -1, -1), self.inputs @ self.inputs.mT
        else:
            rows = mates = self.inputs
        if self.columns.shape[2] >= self.metric.shape[1]:
            units = torch.eye(self.metric.shape[1], dtype=rows.dtype, device=rows.device)
            outs, partners = units.expand(groups, -1, -1), self.metric
        else:
            outs = partners = self.columns

        def block(a: Tensor, b: Tensor, group: int) -> Tensor:
            one = torch.einsum("nta,ob->abnto", a[:, group], b[group]).flatten(0, 1).unsqueeze(2)
            return torch.nn.functional.pad(one, (0, 0, 0, 0, group, groups - 1 - group))

        for group in range(groups):
            u, v = block(rows, outs, group), block(mates, partners, group)
            yield from zip(u.split(_CHUNK), v.split(_CHUNK), strict=True)

    def probes(self, count: int, generator: torch.Generator, apart: bool) -> Tensor:
        """Random u, (count, n, g, T, o), with E[u uᵀ] = (X Xᵀ) ⊗ S within a sample and a group.

        `apart`: signs of their own for every sample, which is right where samples do not interact
        and varies less.
        """
        n, groups, _, width = self.inputs.shape
        lead = (count, n if apart else 1, groups)

        def signs(size: int) -> Tensor:
            bits = torch.randint(
                0, 2, (*lead, size), generator=generator, device=self.inputs.device
            )
            return (bits * 2 - 1).to(self.inputs)

        over_inputs = self.inputs @ signs(width).unsqueeze(-1)
        mixed = torch.einsum("goc,dngc->dngo", self.columns, signs(self.columns.shape[2]))
        return over_inputs * mixed.unsqueeze(-2)


def pull(
    outputs: Tensor, edges: list[GradientEdge] | list[Tensor], vectors: Tensor
) -> list[Tensor | None]:
    """vᵀ ∂outputs/∂edge for a stack of v, differentiable again.

    All of them at once where every operation can be batched, else one by one.
    """
    options: Any = {"create_graph": True, "allow_unused": True}
    try:
        return list(torch.autograd.grad(outputs, edges, vectors, is_grads_batched=True, **options))
    except RuntimeError:
        each = [torch.autograd.grad(outputs, edges, v, **options) for v in vectors]
    return [None if one[0] is None else torch.stack(one) for one in zip(*each, strict=True)]


def closed_form(
    loss: CrossEntropy, outputs: Tensor, targets: Tensor, site: LayerPass, simplified: bool
) -> Tensor:
    """κ (before the loss's division) of the output layer under cross-entropy, one group.

    mean ‖x‖² (Σ_s p_s S_ss − pᵀ S p), written as ½ Σ_{s,s'} p_s p_s' ‖w_s − w_s'‖² so that
    nothing cancels for confident samples.
    """
    p = loss.class_last(outputs, targets)[0].softmax(-1)
    w = site.matrix()[0]
    if len(w) <= max(1024, w.shape[1]):
        eye = torch.eye(len(w), dtype=w.dtype, device=w.device)
        metric = w.square().sum() * eye if simplified else w @ w.T
        square = metric.diagonal()
        distance = square[:, None] + square - 2 * metric  # exactly 0 on the diagonal
        spread = ((p @ distance) * p).sum(-1) / 2
    elif simplified:
        spread = w.square().sum() * (p * (1 - p)).sum(-1)
    else:  # the matrix of distances would be larger than anything else
        centred = w - w.mean(0)
        spread = p @ centred.square().sum(1) - (p @ centred).square().sum(-1)
    scale = loss.scale(outputs.detach(), targets).to(spread.dtype)
    return (site.norms() * scale * spread).sum()


def weigh(loss: Loss, outputs: Tensor, targets: Any, deltas: Tensor) -> tuple[Tensor, Tensor]:
    """(E, F) with Σ ⟨E, 𝓜 F⟩ = Σ_{k,l} B_kl ⟨δ_k, 𝓜 δ_l⟩ for every symmetric 𝓜 within a sample.

    δ, (M, n, g, T, o), is what the unit vectors of the M outputs became at the layer. For
    cross-entropy E = p (δ − δ̄), F = δ − δ̄ with δ̄ = Σ_k p_k δ_k.
    """
    if isinstance(loss, CrossEntropy):
        dim = loss.dim(outputs, targets)
        by_class = deltas.unflatten(0, outputs.shape[1:]).movedim(dim - 1, 0)
        by_class = by_class.reshape(len(by_class), -1, *deltas.shape[1:])
        p = outputs.softmax(dim).movedim(dim, 0).reshape(len(by_class), len(outputs), -1)
        p = p.mT[..., None, None, None]  # (K, positions, n, 1, 1, 1)
        scale = loss.scale(outputs.detach(), targets).to(p.dtype).reshape(len(outputs), -1)
        centred = by_class - (p * by_class).sum(0)
        weighted = p * scale.T[..., None, None, None] * centred
        return weighted.flatten(0, 1), centred.flatten(0, 1)
    if isinstance(loss, ElementwiseLoss):
        diagonal = loss.curvature(outputs, targets).to(outputs.dtype)
        return diagonal.flatten(1).T[..., None, None, None] * deltas, deltas
    hessian = output_products(
        lambda o: loss.total(o, targets), outputs, output_units(outputs), create_graph=True
    ).flatten(2)  # (M, n, M)
    return torch.einsum("knl,lngto->kngto", hessian, deltas), deltas


def joint(call: Callable[[Tensor], Tensor], outputs: Tensor, deltas: Tensor, form: Form) -> Tensor:
    """Jᵀ B J contracted, for a loss that couples the samples: B is over all outputs of all."""
    size = outputs.numel()
    eye = torch.eye(size, dtype=outputs.dtype, device=outputs.device)
    units = eye.reshape(size, *outputs.shape)
    hessian = output_products(call, outputs, units, create_graph=True).flatten(1)
    gradients = (deltas.mT @ form.inputs).movedim(0, 1).flatten(0, 1)  # (n·M, g, o, q)
    mixed = torch.einsum("ab,bgoq->agoq", hessian, gradients)
    return (mixed * torch.einsum("gop,agpq->agoq", form.metric, gradients)).sum()
