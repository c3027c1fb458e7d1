"""Quadratic forms of a layer's Hessian, estimated by products with random vectors.

For v made of the weight and random noise, ⟨v, H v⟩ restricted to a block has as its mean

    columns    w(j)ᵀ H_jj w(j)          v = W times a number an input unit
    rows       w_oᵀ H_oo w_o            v = W times a number an output unit
    flatness   Σ ⟨w_s, w_s'⟩ Tr H_ss'   v = L S with L Lᵀ = W Wᵀ and S all noise

Blocks of all layers are probed by the same products: what one layer has to do with another
averages out, and the standard errors say how far.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product as product_of

import torch
from torch import Tensor

from saltflat.curvature.matrix import Matrix
from saltflat.curvature.quadratic import Form, Weight, divide
from saltflat.curvature.stochastic import Draws, Estimate, Hutchinson, Product, noise


def estimate_form(
    product: Product,
    weights: Mapping[str, Weight],
    form: Form,
    estimator: Hutchinson,
    groups: int,
    in_full: bool,
) -> Estimate:
    """One form of every weight; `in_full` where that costs no more products than probes."""
    if in_full:
        return _written_out(product, weights, form)
    generator = torch.Generator().manual_seed(estimator.seed)
    draws = Draws(groups)
    for _ in range(estimator.probes):
        v = {name: _probe(weight, form, generator) for name, weight in weights.items()}
        hv = product(v)
        draws.add({n: _reduce(v[n] * hv[n], w.matrix, form) for n, w in weights.items()})
    return draws.estimate()


def _written_out(product: Product, weights: Mapping[str, Weight], form: Form) -> Estimate:
    zeros = {n: torch.zeros_like(w.values, dtype=torch.float64) for n, w in weights.items()}
    found = {}
    for name, weight in weights.items():
        found[name] = _reduce(zeros[name], weight.matrix, form)
        for at, left, right in _units(weight, form):
            found[name][at] += (left * product(zeros | {name: right})[name]).sum()
    nothing = {name: torch.zeros_like(value) for name, value in found.items()}
    total = sum(float(value.sum()) for value in found.values())
    return Estimate(found, nothing, total, 0.0, exact=frozenset(weights))


def _units(weight: Weight, form: Form) -> Iterator[tuple[int | tuple[()], Tensor, Tensor]]:
    """(place in the result, u, v) such that the sums of ⟨u, H v⟩ are the form."""
    values, matrix = weight.values.double(), weight.matrix
    w = matrix.grouped(values)
    groups, outputs, inputs, kernel = w.shape
    if form != "flatness":
        side = (groups, 1, inputs, 1) if form == "columns" else (groups, outputs, 1, 1)
        count = torch.Size(side).numel()
        unit = torch.arange(count, device=w.device).reshape(side)
        for k in range(count):
            part = matrix.ungrouped(w.where(unit == k, 0.0), values.shape)
            yield k, part, part
        return
    scale = torch.ones(groups, inputs, dtype=w.dtype, device=w.device)
    if weight.scale is not None:
        scale = weight.scale.double().reshape(groups, inputs)
    scaled = (w * scale[:, None, :, None]).flatten(-2)
    square = scaled @ scaled.mT
    for g, o, i, k in product_of(*map(range, (groups, outputs, inputs, kernel))):
        if scale[g, i] > 0:
            left, right = torch.zeros_like(w), torch.zeros_like(w)
            left[g, :, i, k], right[g, o, i, k] = square[g, :, o] / scale[g, i], 1 / scale[g, i]
            yield (), matrix.ungrouped(left, values.shape), matrix.ungrouped(right, values.shape)


def _reduce(entries: Tensor, matrix: Matrix, form: Form) -> Tensor:
    if form == "flatness":
        return entries.sum()
    return matrix.columns(entries) if form == "columns" else matrix.rows(entries)


def _probe(weight: Weight, form: Form, generator: torch.Generator) -> Tensor:
    values, matrix = weight.values.double(), weight.matrix
    shape = matrix.grouped(values).shape  # groups, outputs, inputs, kernel
    if form == "flatness":
        return _mixed(weight, generator)
    side = (shape[0], 1, shape[2], 1) if form == "columns" else (shape[0], shape[1], 1, 1)
    each = noise(torch.Size(side), values.device, generator)
    return matrix.ungrouped(matrix.grouped(values) * each, values.shape)


def _mixed(weight: Weight, generator: torch.Generator) -> Tensor:
    """L S for W Wᵀ = L Lᵀ, group by group; features are divided by their scale."""
    values, matrix = weight.values.double(), weight.matrix
    w = matrix.grouped(values)
    shape = w.shape
    scale = None
    if weight.scale is not None:
        scale = weight.scale.double().reshape(shape[0], 1, shape[2], 1)
        w = w * scale
    upper = torch.linalg.qr(w.flatten(-2).mT, mode="r").R
    each = noise(torch.Size((shape[0], upper.shape[1], shape[2:].numel())), w.device, generator)
    mixed = (upper.mT @ each).reshape(shape)
    if scale is not None:
        mixed = divide(mixed, scale)
    return matrix.ungrouped(mixed, values.shape)
