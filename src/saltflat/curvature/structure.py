"""Piecewise linearity read off the autograd graph: a proof where every operation is a known one.

The graph of the outputs is walked once, from the leaves up. A node is *linear* in all of its
inputs together (sums, views, ReLU, max pooling: linear in pieces), or a *product* of two of them
(a matrix product, a convolution, a BatchNorm in evaluation mode), which is linear in every
parameter that reaches one factor only. Parameters that reach both factors, or a node of any other
kind, are left to the probes of `certify`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Any

from torch import Tensor

_NAME = re.compile(r"(\w+)Backward\d+")  # torch's own nodes; a user's functions carry no number

# fmt: off
_VIEWS = {
    "Alias", "AsStrided", "Cat", "Clone", "Expand", "Flip", "Gather", "Index", "IndexSelect",
    "Permute", "PixelShuffle", "Repeat", "ReshapeAlias", "Roll", "Select", "Slice", "Split",
    "SplitWithSizes", "Squeeze", "Stack", "T", "ToCopy", "Transpose", "Unbind", "Unfold",
    "UnsafeSplit", "UnsafeView", "Unsqueeze", "View", "Where",
}
_SUMS = {
    "AdaptiveAvgPool2D", "AdaptiveAvgPool3D", "Add", "AvgPool2D", "AvgPool3D", "ConstantPadNd",
    "Embedding", "Mean", "Neg", "ReflectionPad1D", "ReflectionPad2D", "ReflectionPad3D",
    "ReplicationPad1D", "ReplicationPad2D", "ReplicationPad3D", "Rsub", "Sub", "Sum",
    "UpsampleBilinear2D", "UpsampleNearest1D", "UpsampleNearest2D", "UpsampleNearest3D",
}
_KINKS = {  # not Abs: that of a complex number is smooth
    "AdaptiveMaxPool2D", "AdaptiveMaxPool3D", "Amax", "Amin", "Clamp", "ClampMax", "ClampMin",
    "Hardtanh", "LeakyRelu", "Max", "MaxPool2DWithIndices", "MaxPool3DWithIndices", "Maximum",
    "Min", "Minimum", "Relu", "Threshold",
}
# fmt: on
_LINEAR = _VIEWS | _SUMS | _KINKS

# Which two of a node's inputs it multiplies; it is linear in what else it has.
_PRODUCTS = {
    "Mul": (0, 1),
    "Mm": (0, 1),
    "Bmm": (0, 1),
    "Mv": (0, 1),
    "Dot": (0, 1),
    "Addmm": (1, 2),
    "Addmv": (1, 2),
    "Baddbmm": (1, 2),
    "Convolution": (0, 1),
    "PreluKernel": (0, 1),
    "NativeBatchNorm": (0, 1),
    "CudnnBatchNorm": (0, 1),
}
_BATCH_NORMS = frozenset({"NativeBatchNorm", "CudnnBatchNorm"})


def unproven(outputs: Tensor, parameters: Mapping[str, Tensor]) -> frozenset[str]:
    """Names of the parameters in which the graph does not show the outputs piecewise linear."""
    bits = {id(p): 1 << k for k, p in enumerate(parameters.values())}
    reach: dict[Any, int] = {}  # node -> the parameters that reach it, a bit each
    doubtful = 0
    for node in _leaves_first(outputs.grad_fn):
        below = [0 if child is None else reach[child] for child, _ in node.next_functions]
        every = reduce(or_, below, bits.get(id(getattr(node, "variable", None)), 0))
        doubtful |= _doubts(node, below, every)
        reach[node] = every
    return frozenset(name for k, name in enumerate(parameters) if doubtful >> k & 1)


def _doubts(node: Any, below: Sequence[int], every: int) -> int:
    """Of the parameters that reach a node, those in which it may not be linear."""
    name = _name(node)
    if name in _LINEAR or not below:
        return 0
    if name not in _PRODUCTS and name != "Div":
        return every
    if len(below) == 1:  # the other operand is a number
        return 0
    if name == "Div":
        return below[1]
    one, other = _PRODUCTS[name]
    return below[one] & below[other]


def _name(node: Any) -> str | None:
    """What a node does, or None where that is not known."""
    match = _NAME.fullmatch(node.name())
    if match is None or (match[1] in _BATCH_NORMS and getattr(node, "_saved_training", True)):
        return None
    return match[1]


def _leaves_first(root: Any) -> Iterator[Any]:
    seen, stack = set(), [(root, False)]
    while stack:
        node, ready = stack.pop()
        if ready:
            yield node
        elif node is not None and node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((child, False) for child, _ in node.next_functions)
