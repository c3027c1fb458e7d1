"""Proofs read off the autograd graph of the very pass that is measured.

*Piecewise linearity.* The second derivative of the outputs in a parameter is a sum over the nodes
of the graph, of the node's own second derivatives in pairs of its operands, each between the
Jacobians of those two operands. So the outputs are piecewise linear in a parameter if at no node
the parameter reaches both operands of a pair in which that node is curved. For every operation
that is known, this module holds its curved pairs: none for sums, views, ReLU and maxima, (0, 1) for
a product, (0, 0) and (0, 1) for a layer norm, which is curved in its input and linear in its
weight. Any other operation counts as curved in everything.

*Rows.* A fast rule gives row block i of an operation's output to sample i. That is right if no
later operation moves or mixes rows, which is proved from the outputs down, operation by operation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from math import inf, prod
from operator import or_
from typing import Any, TypeVar, final

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from saltflat.errors import InvalidType
from saltflat.sharded import is_gathering_node

Visit = tuple[Any, str, Sequence[tuple[Any, int]]]  # a node, its name, its children
Pairs = tuple[tuple[int, int], ...]  # operands between which a node has second derivatives

# Torch's own nodes; a user's functions carry no number.
_NAME = re.compile(r"(\w+)Backward\d+(?:_copy)?")

# fmt: off
_VIEWS = {
    "Alias", "AsStrided", "AsStridedScatter", "BlockDiag", "Cat", "ChannelShuffle", "Clone",
    "Conj", "ConjPhysical", "Copysign", "DiagEmbed", "Diagonal", "DiagonalScatter", "Expand",
    "Flip", "Gather", "Index", "IndexSelect", "LiftFresh", "MaskedSelect", "NarrowCopy",
    "NativeChannelShuffle", "Permute", "PixelShuffle", "PixelUnshuffle", "Repeat",
    "ReshapeAlias", "Roll", "Rot90", "Select", "SelectScatter", "Slice", "SliceScatter",
    "Split", "SplitWithSizes", "Squeeze", "Stack", "T", "Take", "ToCopy", "ToDense", "ToSparse",
    "Transpose", "Tril", "Triu", "Unbind", "Unfold", "UnsafeIndex", "UnsafeMaskedIndex",
    "UnsafeSplit", "UnsafeSplitWithSizes", "UnsafeView", "Unsqueeze", "Values", "View",
    "ViewAsComplex", "ViewAsReal", "Where",
}
_WRITES = {  # into a copy, or in place
    "Copy", "Fill", "IndexAdd", "IndexCopy", "IndexFill", "IndexPut",
    "MaskedFill", "MaskedScatter", "Put", "Scatter", "ScatterAdd", "UnsafeIndexPut",
    "UnsafeMaskedIndexPutAccumulate", "Zero",
}
_SUMS = {
    "AdaptiveAvgPool2D", "AdaptiveAvgPool3D", "Add", "AffineGridGenerator", "AvgPool2D",
    "AvgPool3D", "Col2Im", "Complex", "ConstantPadNd", "Cumsum", "Deg2Rad", "Embedding",
    "FftC2C", "FftC2R", "FftR2C", "Im2Col", "MaxUnpool2D", "MaxUnpool3D", "Mean",
    "MkldnnAdaptiveAvgPool2D", "Nansum", "NativeDropout", "Neg", "NllLoss", "NllLoss2D",
    "Rad2Deg", "ReflectionPad1D", "ReflectionPad2D", "ReflectionPad3D",
    "ReplicationPad1D", "ReplicationPad2D", "ReplicationPad3D", "Rsub", "Sub", "Sum", "Trace",
    "UpsampleBicubic2D", "UpsampleBicubic2DAa", "UpsampleBilinear2D", "UpsampleBilinear2DAa",
    "UpsampleLinear1D", "UpsampleNearest1D", "UpsampleNearest2D", "UpsampleNearest3D",
    "UpsampleNearestExact1D", "UpsampleNearestExact2D", "UpsampleNearestExact3D",
    "UpsampleTrilinear3D",
}
_KINKS = {
    "AdaptiveMaxPool2D", "AdaptiveMaxPool3D", "Amax", "Amin", "Aminmax", "Ceil", "Clamp",
    "ClampMax", "ClampMin", "Cummax", "Cummin", "Floor", "Fmax", "Fmin", "Fmod", "Frac",
    "FractionalMaxPool2D", "FractionalMaxPool3D", "Hardshrink", "Hardsigmoid", "Hardtanh",
    "Kthvalue", "LeakyRelu", "Max", "MaxPool2D", "MaxPool2DWithIndices",
    "MaxPool3DWithIndices", "Maximum", "Median", "Min", "Minimum", "MkldnnMaxPool2D",
    "MkldnnMaxPool3D", "Mode", "MpsMaxPool2D", "NanToNum", "Nanmedian", "Relu", "Remainder",
    "Round", "Softshrink", "Sort", "Threshold", "Topk", "Trunc",
}
# fmt: on
_LINEAR = frozenset(_VIEWS | _WRITES | _SUMS | _KINKS)

_BOTH: Pairs = ((0, 1),)
_LATER: Pairs = ((1, 2),)
# fmt: off
_CONVOLUTIONS = {
    "ConvDepthwise3D", "ConvTbc", "Convolution", "ConvolutionOverrideable", "CudnnConvolution",
    "CudnnConvolutionTranspose", "MiopenConvolution", "MiopenConvolutionTranspose",
    "MiopenDepthwiseConvolution", "MkldnnConvolution", "MpsConvolution", "MpsConvolutionTranspose",
    "SlowConv2D", "SlowConv3D", "SlowConvDilated2D", "SlowConvDilated3D", "SlowConvTranspose2D",
    "SlowConvTranspose3D", "ThnnConv2D", "ConvDepthwise2D",
}
# fmt: on
_PRODUCTS: dict[str, Pairs] = {
    **dict.fromkeys(_CONVOLUTIONS, _BOTH),
    **dict.fromkeys(("Mul", "Mm", "Bmm", "Mv", "Dot", "Vdot", "LinalgCross", "Linear"), _BOTH),
    **dict.fromkeys(("MkldnnLinear", "PreluKernel", "EmbeddingBag", "SparseMm"), _BOTH),
    **dict.fromkeys(("Addmm", "Addmv", "Baddbmm", "Addbmm", "Addr", "Addcmul"), _LATER),
    **dict.fromkeys(("SparseAddmm", "SparseSampledAddmm"), _LATER),
    "Trilinear": ((0, 1), (0, 2), (1, 2)),
    # Curved in what is normalised, linear in weight and bias.
    **dict.fromkeys(("NativeLayerNorm", "NativeGroupNorm", "FusedRmsNorm"), ((0, 0), (0, 1))),
    # Curved in the places that are looked at, linear in what is found there.
    **dict.fromkeys(("GridSampler2D", "GridSampler3D", "CudnnGridSampler"), ((0, 1), (1, 1))),
    "Addcdiv": ((1, 2), (2, 2)),
    "LinalgSolveEx": ((0, 0), (0, 1)),
    "LinalgSolveTriangular": ((0, 0), (0, 1)),
    **dict.fromkeys(("Ldexp", "Polar", "TriangularSolve", "Xlogy"), ((0, 1), (1, 1))),
}
_BATCH_NORMS = frozenset(
    {
        "BatchNormWithUpdate",
        "CudnnBatchNorm",
        "MiopenBatchNorm",
        "NativeBatchNorm",
        "NativeBatchNormLegit",
    }
)


def _by_setting(attribute: str, linear: tuple[Any, ...]) -> Callable[[Any, int], Pairs | None]:
    """Linear if the node was made with one of these settings."""

    def pairs(node: Any, operands: int) -> Pairs | None:
        value = getattr(node, attribute, None)
        return () if isinstance(value, bool | int | float | str) and value in linear else None

    return pairs


def _real(node: Any, operands: int) -> Pairs | None:
    """Linear in pieces for real numbers; the size and the phase of complex ones are smooth."""
    child, output = node.next_functions[0]
    return None if child is None or child._input_metadata[output].dtype.is_complex else ()


def _norm(node: Any, operands: int) -> Pairs | None:
    """Sums and maxima of sizes."""
    return _real(node, operands) if node._saved_ord in (1.0, inf, -inf) else None


def _division(node: Any, operands: int) -> Pairs | None:
    if getattr(node, "_saved_rounding_mode", None) is not None:
        return ()
    return ((0, 1), (1, 1)) if operands == 2 else ()


def _interpolation(node: Any, operands: int) -> Pairs | None:
    """a + w (b − a)."""
    return ((0, 2), (1, 2)) if operands == 3 else ()


def _batch_norm(node: Any, operands: int) -> Pairs | None:
    """γ (x − mean) / √(var + eps) + β of running statistics; otherwise curved in its input."""
    training = getattr(node, "_saved_training", True) or getattr(node, "_saved_update", False)
    return ((0, 0), (0, 1)) if training else _BOTH


_CONDITIONAL: dict[str, Callable[[Any, int], Pairs | None]] = {
    **dict.fromkeys(_BATCH_NORMS, _batch_norm),
    **dict.fromkeys(("Abs", "Sgn", "Sign"), _real),
    "LinalgVectorNorm": _norm,
    "Div": _division,
    "Lerp": _interpolation,
    "Pow": _by_setting("_saved_exponent", (0, 1)),
    "RreluWithNoise": _by_setting("_saved_training", (False,)),
    **dict.fromkeys(
        ("IndexReduce", "ScatterReduce", "SegmentReduce"),
        _by_setting("_saved_reduce", ("sum", "mean", "amax", "amin", "max", "min")),
    ),
}

_declared: dict[str, str] = {}  # name of a node -> what the user calls it

Declared = TypeVar("Declared")


def piecewise_linear(function: Declared) -> Declared:
    """Declare that a function of one's own is piecewise linear, jointly in all of its inputs.

    `function` is a subclass of `torch.autograd.Function` or an operator made with
    `torch.library.custom_op`, neither of which can be looked into; a declaration serves as a
    decorator too. Results that rely on it are exact *given that* it is true, and say so.

    Examples
    --------
    >>> import torch, saltflat as sf
    >>> @sf.piecewise_linear
    ... class Twice(torch.autograd.Function):
    ...     @staticmethod
    ...     def forward(ctx, x):
    ...         return 2 * x
    ...
    ...     @staticmethod
    ...     def backward(ctx, slope):
    ...         return 2 * slope
    """
    if isinstance(function, type) and issubclass(function, torch.autograd.Function):
        _declared[f"{function.__name__}Backward"] = function.__name__
        return function
    overload = getattr(function, "_opoverload", function)
    if isinstance(overload, torch._ops.OpOverload):
        space, name = overload._schema.name.split("::")
        _declared[f"GeneratedBackwardFor_{space}_{name}_{overload._overloadname}Backward"] = name
        return function
    raise InvalidType(
        "piecewise_linear declares a subclass of torch.autograd.Function or an operator made with "
        f"torch.library.custom_op. Got {function!r}."
    )


@final
@dataclass(frozen=True, slots=True)
class Proof:
    """What the graph of one pass shows."""

    reached: frozenset[str]  # the parameters that autograd reaches
    curved: Mapping[str, str]  # of these, those that may be curved -> through which operation
    given: Mapping[str, str]  # of the others, those that rely on a declaration -> of what
    opaque: frozenset[str]  # operations of the graph that no list holds
    trail: tuple[str, ...]  # the operations in the order of the walk, but for mere layout
    narrow: torch.dtype  # the least precise type that the graph goes through
    edges: Mapping[str, int]  # parameter -> how many operations take it
    log_probabilities: bool  # the outputs are a log-softmax over the classes
    _sample_dim: Mapping[Any, int | None]  # every node -> the dimension of its samples, if it has
    _takers: Mapping[Any, int]  # node -> how many operations take its results

    def keeps_rows(self, node: Any) -> bool:
        """Whether row block i of a node's output reaches the output of sample i alone."""
        return self._sample_dim.get(node) == 0

    def goes_one_way(self, node: Any) -> bool:
        """Whether one operation takes a node's result, and no other."""
        return self._takers.get(node) == 1

    def holds(self, node: Any) -> bool:
        """Whether the outputs come by this node."""
        return node in self._sample_dim


def prove(
    outputs: Tensor,
    parameters: Mapping[str, Tensor],
    writes: Callable[[], frozenset[str]],
    class_dimension: int | None = None,
) -> Proof:
    """Walk the graph of `outputs`, one row a sample.

    A log-softmax over `class_dimension` that the outputs end in is taken for a part of the loss,
    and the walk is that of the graph below it. The factors of a cross-entropy's Hessian sum to 0
    over the classes, so that they pass through it unchanged.

    Writes into a part of a tensor hide what was written (`h[:, 0].sin_()` leaves no sine in the
    graph), so `writes` is asked for the operations in place of the whole pass when there is one.
    """
    bits = {id(p): 1 << k for k, p in enumerate(parameters.values())}
    reach: dict[Any, int] = {None: 0}  # node -> the parameters that reach it, a bit each
    curved: dict[str, int] = {}
    given: dict[str, int] = {}
    trail: list[str] = []
    takers: dict[Any, int] = {}
    order = list(leaves_first(outputs.grad_fn))
    head = None if class_dimension is None else log_softmax_head(outputs, class_dimension)
    for node, name, children in order:
        if not children:
            reach[node] = bits.get(id(getattr(node, "variable", None)), 0)
            trail.append(str(reach[node].bit_length()))
            continue
        if name not in _LAYOUT:
            trail.append(name)
        below = [reach[child] for child, _ in children]
        reach[node] = every = reduce(or_, below)
        for child, _ in children:
            takers[child] = takers.get(child, 0) + 1
        if not every or name in _LINEAR or node is head:
            continue
        if _is_declared(node, name):
            given[_declared[name]] = given.get(_declared[name], 0) | every
            continue
        reached = _curved_bits(curved_pairs(node, name, len(below), writes), below, every)
        if reached:
            curved[name] = curved.get(name, 0) | reached
    return Proof(
        frozenset(_members(reach[outputs.grad_fn], parameters)),
        _blamed(curved, parameters),
        _blamed(given, parameters),
        frozenset(curved) - {*_PRODUCTS, *_CONDITIONAL, _PART},
        tuple(trail),
        narrowest(outputs, order),
        {n: takers[v] for v, _, c in order if not c for n in _members(reach[v], parameters)},
        head is not None,
        _sample_dims(order, len(outputs) if outputs.ndim else 1),
        takers,
    )


def _is_declared(node: Any, name: str) -> bool:
    """Whether it is a user's function that was declared piecewise linear."""
    return name in _declared and isinstance(node, BackwardCFunction)


def narrowest(outputs: Tensor, order: Sequence[Visit] | None = None) -> torch.dtype:
    """The type of fewest digits that values are cast to on their way; `order` is their graph."""
    order = list(leaves_first(outputs.grad_fn)) if order is None else order
    casts = (node._input_metadata[0].dtype for node, name, _ in order if name == "ToCopy")
    floats: Iterator[torch.dtype] = (d for d in (outputs.dtype, *casts) if d.is_floating_point)
    return max(floats, key=lambda dtype: torch.finfo(dtype).eps)


def _curved_bits(pairs: Pairs | None, below: Sequence[int], every: int) -> int:
    """The parameters that reach both sides of a curved pair; all of them if pairs is None."""
    if pairs is None:
        return every
    bits = 0
    for one, other in pairs:
        if one < len(below) and other < len(below):
            bits |= below[one] & below[other]
    return bits


def curved_pairs(
    node: Any, name: str, operands: int, writes: Callable[[], frozenset[str]]
) -> Pairs | None:
    """The pairs of operands in which an operation is curved; None for all of them."""
    if _is_declared(node, name):
        return ()
    if name == _PART:
        together: set[tuple[int, int]] = set()
        for each in writes():
            pairs = curved_pairs(node, each, operands, writes) if each != _PART else None
            if pairs is None:
                return None
            together.update(pairs)
        return tuple(together)
    if name in _LINEAR:
        return ()
    if name in _PRODUCTS:
        return _PRODUCTS[name]
    return _CONDITIONAL[name](node, operands) if name in _CONDITIONAL else None


_PART = "CopySlices"
_OWN = {"torch::autograd::CopyBackwards": "Copy", "torch::autograd::CopySlices": _PART}


def _named(node: Any) -> str:
    """What a node does, in torch's words: "Relu" for ReluBackward0."""
    return "Alias" if is_gathering_node(node) else _short(node.name())


@cache
def _short(full: str) -> str:
    match = _NAME.fullmatch(full)
    return match[1] if match is not None else _OWN.get(full, full)


def is_own(name: str) -> bool:
    """Whether an operation is a function of the user's, and not torch's."""
    return name.endswith("Backward") or "::" in name


def operation(name: str) -> str:
    """An operation of a proof, in words."""
    if name == _PART:
        return "writes in place whose operations are not known"
    if is_own(name):
        return (
            f"{name.removesuffix('Backward')}, which cannot be looked into; if it is piecewise "
            "linear, declare it with saltflat.piecewise_linear"
        )
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def _members(bits: int, names: Mapping[str, Any]) -> Iterator[str]:
    return (name for k, name in enumerate(names) if bits >> k & 1)


def _blamed(operations: Mapping[str, int], names: Mapping[str, Any]) -> dict[str, str]:
    """parameter -> the first operation that is to blame."""
    blamed: dict[str, str] = {}
    for operation, bits in operations.items():
        for name in _members(bits, names):
            blamed.setdefault(name, operation)
    return blamed


def leaves_first(root: Any) -> Iterator[Visit]:
    """All nodes below a root, children before parents."""
    seen: set[Any] = set()
    stack: list[tuple[Any, Any]] = [(root, None)]
    while stack:
        node, children = stack.pop()
        if children is not None:
            yield node, _named(node), children
        elif node is not None and node not in seen:
            seen.add(node)
            children = node.next_functions
            stack.append((node, children))
            stack.extend((child, None) for child, _ in children if child not in seen)


def log_softmax_head(outputs: Tensor, dim: int) -> Any:
    """The node of the log-softmax along `dim` that outputs are, up to their layout; or None."""
    node, shape = outputs.grad_fn, tuple(outputs.shape)
    while node is not None:
        name = _named(node)
        if name == "LogSoftmax":
            return node if _dims(node, _ALONG[name], len(shape)) == {dim} else None
        if name not in _RELAID or len(node.next_functions) > 1:
            return None
        child, output = node.next_functions[0]
        below = () if child is None else tuple(child._input_metadata[output].shape)
        found = _dim_below(node, name, dim, shape, below)
        if found is None:
            return None
        node, dim, shape = child, found, below
    return None


def _dim_below(
    node: Any, name: str, dim: int, shape: Sequence[int], below: Sequence[int]
) -> int | None:
    """Where a dimension of a result is in the operand that was laid out anew, if it is one."""
    if name == "Permute":
        return signed(node._saved_dims[dim]) % len(shape)
    if name == "Transpose":
        one, other = (next(iter(_dims(node, (a,), len(shape)))) for a in _ALONG[name])
        return {one: other, other: one}.get(dim, dim)
    # The same entries in the same order: the same size, with as many entries after it.
    after = prod(shape[dim + 1 :])
    fits = (k for k, size in enumerate(below) if size == shape[dim])
    return next((k for k in fits if prod(below[k + 1 :]) == after), None)


# Rows.

# fmt: off
_POINTWISE = (_KINKS - {
    "AdaptiveMaxPool2D", "AdaptiveMaxPool3D", "Amax", "Amin", "Aminmax", "Cummax", "Cummin",
    "FractionalMaxPool2D", "FractionalMaxPool3D", "Kthvalue", "Max", "MaxPool2D",
    "MaxPool2DWithIndices", "MaxPool3DWithIndices", "Median", "Min", "MkldnnMaxPool2D",
    "MkldnnMaxPool3D", "Mode", "MpsMaxPool2D", "Nanmedian", "Sort", "Topk",
}) | {
    "Abs", "Add", "Addcdiv", "Addcmul", "Alias", "Celu", "Clone", "Conj", "Copy", "Cos", "Div",
    "Elu", "Erf", "Exp", "Gelu", "Hardswish", "Lerp", "Log", "LogSigmoid", "MaskedFill", "Mish",
    "Mul",
    "NativeDropout", "Neg", "Pow", "Reciprocal", "Rsqrt", "Rsub", "Sigmoid", "Silu", "Sin",
    "Softplus", "Sqrt", "Sub", "Tanh", "ToCopy", "Where",
}
_OF_IMAGES = {
    "AdaptiveAvgPool2D", "AdaptiveAvgPool3D", "AdaptiveMaxPool2D", "AdaptiveMaxPool3D",
    "AvgPool2D", "AvgPool3D", "MaxPool2D", "MaxPool2DWithIndices", "MaxPool3DWithIndices",
    "ReflectionPad1D", "ReflectionPad2D", "ReflectionPad3D", "ReplicationPad1D",
    "ReplicationPad2D", "ReplicationPad3D", "UpsampleBicubic2D", "UpsampleBilinear2D",
    "UpsampleLinear1D", "UpsampleNearest1D", "UpsampleNearest2D", "UpsampleNearest3D",
    "UpsampleTrilinear3D",
}
# Which operands keep their rows, the first dimension.
_ROW_OPERANDS: dict[str, tuple[int, ...]] = {
    # The first dimension of conv_tbc is time, along which it goes.
    **dict.fromkeys((_CONVOLUTIONS - {"ConvTbc"}) | _BATCH_NORMS | _OF_IMAGES, (0,)),
    **dict.fromkeys(("Mm", "Linear", "PreluKernel", "NativeGroupNorm", "PixelShuffle"), (0,)),
    "Addmm": (1,), "Bmm": (0, 1), "Baddbmm": (0, 1, 2), "NativeLayerNorm": (0,),
}
_VIEW = {"View", "UnsafeView", "ReshapeAlias"}
_LAYOUT = _VIEW | {"AsStrided", "Clone"}  # what another memory format adds
_RELAID = _VIEW | {"Alias", "Clone", "Permute", "Squeeze", "ToCopy", "Transpose", "Unsqueeze"}
# Where a node says which dimensions it works along.
_ALONG = {
    **dict.fromkeys((
        "Amax", "Amin", "Cat", "Cumsum", "LogSoftmax", "Max", "Mean", "Min", "Select", "Slice",
        "SafeSoftmax", "Softmax", "Split", "SplitWithSizes", "Squeeze", "Stack", "Sum", "Unbind",
        "Unsqueeze",
    ), ("_saved_dim",)),
    **dict.fromkeys(("Flip", "Roll"), ("_saved_dims",)),
    "Transpose": ("_saved_dim0", "_saved_dim1"),
}
# fmt: on


def _sample_dims(order: Sequence[Visit], samples: int) -> dict[Any, int | None]:
    """For every node the dimension of its result whose entries reach one sample's output each.

    From the outputs down: an operand keeps its samples apart if all that it goes into do, along
    the same dimension, and take from it nothing but their own. Dimension 0 may hold a block of
    rows for each sample, any other one entry. None where samples mix, or may do so.
    """
    dims: dict[Any, int | None] = {order[-1][0]: 0} if order else {}
    # What a leaf is, a parameter most often, is not asked.
    dims |= {node: None for node, _, children in order[:-1] if not children}
    sizes: dict[Any, Sequence[int]] = {}
    for node, name, children in reversed(order):
        dim = dims[node]
        for position, (child, output) in enumerate(children):
            if child is None or dims.get(child, 0) is None:
                continue
            if dim is not None and samples > 1:
                shapes = _shape(child, output, sizes), _shape(node, 0, sizes)
                here = _operand_dim(node, name, position, *shapes, samples, dim)
            else:
                here = dim
            dims[child] = here if dims.get(child, here) == here else None
    return dims


def _operand_dim(
    node: Any,
    name: str,
    position: int,
    shape: Sequence[int],
    into: Sequence[int],
    samples: int,
    dim: int,
) -> int | None:
    """Where an operand has its samples, if the result has them along `dim`."""
    if name == "Slice" and shape == into:  # of all, which torch 2.6 has a node for
        return dim
    if dim == 0 and _local(node, name, position, shape, into, samples):
        return 0
    if dim >= len(into) or into[dim] != samples:
        return None
    if name in _VIEW:
        before = prod(into[:dim])
        places = (d for d in range(len(shape)) if prod(shape[:d]) == before)
        return next((d for d in places if shape[d] == samples), None)
    there = _moved_from(node, name, len(into), dim)
    if there is None and len(shape) == len(into):
        along = _ALONG.get(name)
        beside = along is not None and dim not in _dims(node, along, len(into))
        there = dim if beside or name in _POINTWISE or name == "Expand" else None
    fits = there is not None and there < len(shape) and shape[there] == samples
    return there if fits else None


def _moved_from(node: Any, name: str, ndim: int, dim: int) -> int | None:
    """Where in its operand an operation that moves whole dimensions takes one from."""
    if name == "Permute" and node._saved_dims:
        return signed(node._saved_dims[dim]) % ndim
    if name == "Transpose":
        one, other = (signed(d) % ndim for d in (node._saved_dim0, node._saved_dim1))
        return {one: other, other: one}.get(dim, dim)
    if name in ("Select", "Unbind"):
        return dim + (signed(node._saved_dim) % (ndim + 1) <= dim)
    return None


def signed(dim: int) -> int:
    """Negative dimensions come as unsigned numbers."""
    return dim - (1 << 64) if dim >> 63 else dim


def _shape(node: Any, output: int, known: dict[Any, Sequence[int]]) -> Sequence[int]:
    if output:
        return tuple(node._input_metadata[output].shape)
    if node not in known:
        known[node] = tuple(node._input_metadata[0].shape)
    return known[node]


def _local(
    node: Any, name: str, position: int, shape: Sequence[int], into: Sequence[int], samples: int
) -> bool:
    """Whether row block i of a result depends on an operand's row block i alone."""
    if not shape or not into or shape[0] % samples or into[0] % samples or not shape[0]:
        return False
    if name in _VIEW:
        return True  # both are the same entries in the same order, cut into as many blocks
    if shape[0] != into[0]:
        return False
    if name in _POINTWISE:
        return len(shape) == len(into)
    if name in _ROW_OPERANDS:
        apart = len(shape) == len(into) and position in _ROW_OPERANDS[name]
        return apart and _by_row(node, name, into)
    if name == "Expand":
        return len(shape) == len(into)
    if name == "ConstantPadNd":
        return len(node._saved_pad) < 2 * len(into)
    if name == "AsStrided":
        return shape == into and _restrided(node, into)
    if name == "Permute":
        return bool(node._saved_dims) and signed(node._saved_dims[0]) % len(into) == 0
    if name in _ALONG:
        return 0 not in _dims(node, _ALONG[name], max(len(shape), len(into)))
    return False


def _restrided(node: Any, shape: Sequence[int]) -> bool:
    """Pooling to one position lays its mean, a tensor of its own, out channels last."""
    child = node.next_functions[0][0]
    fresh = child is not None and _named(child) == "Mean" and not node._saved_storage_offset
    return fresh and node._saved_stride[0] == prod(shape[1:]) and max(shape[2:], default=1) == 1


def _by_row(node: Any, name: str, shape: Sequence[int]) -> bool:
    """Whether a normalisation's statistics are those of rows, or constants."""
    if name in _BATCH_NORMS:
        return _batch_norm(node, 3) == _BOTH
    return name != "NativeLayerNorm" or len(node._saved_normalized_shape) < len(shape)


def _dims(node: Any, attributes: Sequence[str], ndim: int) -> set[int]:
    """The dimensions that a node works along; all of them where it does not say."""
    dims: set[int] = set()
    for attribute in attributes:
        value = getattr(node, attribute, None)
        if value is None or value == ():
            return set(range(ndim))
        for dim in value if isinstance(value, tuple) else (value,):
            dims.add(signed(dim) % ndim)
    return dims


_CONTINUOUS = {d for d in vars(torch).values() if isinstance(d, torch.dtype)} - {
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
}  # fmt: skip


@final
class InPlace(TorchDispatchMode):
    """Notes the operations that write in place, by the names that nodes have."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[str] = set()

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if op._schema.is_mutable and any(_continuous(t) for t in _written(op, args, kwargs)):
            plain = op._schema.name.split("::")[-1].strip("_")
            self.seen.add("".join(part[:1].upper() + part[1:] for part in plain.split("_")))
        return op(*args, **kwargs)


def _written(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """What an operation writes to: its own arguments, or lists of tensors among them."""
    places = [
        args[k] if k < len(args) else kwargs.get(argument.name)
        for k, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return tree_leaves(places)


def _continuous(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in _CONTINUOUS
