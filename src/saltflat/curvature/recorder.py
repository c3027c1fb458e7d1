"""Watch a forward pass and note every operation that uses a measured parameter.

A torch function mode sees each call before it is carried out, by whatever module or function it
is made. Nothing is attached to the model, and a weight that is used functionally is seen too.
What is noted is the autograd edge of the output, taken before anything can change that output in
place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from saltflat.curvature.rules import (
    ConvTransposeUse,
    ConvUse,
    ElementwiseUse,
    EmbeddingUse,
    LinearUse,
    NormUse,
    Use,
    Window,
)

Arguments = dict[str, Any]
Names = Mapping[int, str]  # id of a parameter -> its name
Builder = Callable[[Names, Arguments, Tensor], Use | None]


@final
class Recorder(TorchFunctionMode):
    """Context manager around a forward pass; afterwards `uses` holds what was seen, in order."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.names = {id(p): name for name, p in parameters.items()}
        self.uses: list[Use] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        known = _OPERATIONS.get(func)
        if known is None:
            return _REPLACED.get(func, func)(*args, **kwargs)
        signature, build = known
        bound = dict(zip(signature, args, strict=False)) | kwargs
        bound = _adjust(func, bound)
        output = func(*args, **kwargs) if func not in _ADJUSTED else func(**bound)
        if isinstance(output, Tensor) and output.requires_grad and output.ndim > 1:
            use = build(self.names, bound, output)
            if use is not None:
                self.uses.append(use)
        return output


@final
class Safe(TorchFunctionMode):
    """Carries out a forward pass with the adjustments that `Recorder` makes, recording nothing."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _ADJUSTED:
            return _REPLACED.get(func, func)(*args, **kwargs)
        signature, _ = _OPERATIONS[func]
        return func(**_adjust(func, dict(zip(signature, args, strict=False)) | kwargs))


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """v g / ‖v‖ with the norm over all dimensions but `dim`; over all of them for dim = −1."""
    others = [d for d in range(v.ndim) if d != dim]
    norm: Tensor = torch.linalg.vector_norm(v, dim=others, keepdim=True)
    return v * (g / norm)


def _hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    """min(max(x + 3, 0), 6) / 6."""
    if inplace:
        return input.add_(3).clamp_(0, 6).div_(6)
    return (input + 3).clamp(0, 6) / 6


_REPLACED: dict[Any, Callable[..., Any]] = {
    # Its second derivative is wrong in torch (2.13): not even symmetric.
    torch._weight_norm: _weight_norm,
    # Torch has no second derivative of it.
    F.hardsigmoid: _hardsigmoid,
    torch._C._nn.hardsigmoid: _hardsigmoid,
    torch._C._nn.hardsigmoid_: lambda input: _hardsigmoid(input, inplace=True),
}

_ADJUSTED = {F.embedding, F.group_norm}


def _adjust(func: Any, bound: Arguments) -> Arguments:
    """The same function, in a form that can be differentiated rightly and twice."""
    if func is F.embedding:
        # Both options change what autograd calls the gradient, not the function.
        return bound | {"sparse": False, "scale_grad_by_freq": False}
    if func is F.group_norm:
        # Its second derivative crashes torch (2.13) on channels-last inputs.
        return bound | {"input": bound["input"].contiguous()}
    return bound


def _roles(names: Names, arguments: Arguments, **roles: str) -> dict[str, str]:
    """role -> parameter name, for the arguments that are measured parameters."""
    found = {role: names.get(id(arguments.get(key))) for role, key in roles.items()}
    return {role: name for role, name in found.items() if name is not None}


def _linear(names: Names, a: Arguments, z: Tensor) -> Use | None:
    roles = _roles(names, a, weight="weight", bias="bias")
    if not roles or a["weight"].ndim != 2:
        return None
    return LinearUse(roles, a["input"].detach(), get_gradient_edge(z), z.shape)


def _matmul(names: Names, a: Arguments, z: Tensor) -> Use | None:
    roles = _roles(names, a, weight="other")
    if not roles or a["other"].ndim != 2 or a["input"].ndim < 2:
        return None
    return LinearUse(roles, a["input"].detach(), get_gradient_edge(z), z.shape, transposed=True)


def _addmm(names: Names, a: Arguments, z: Tensor) -> Use | None:
    roles = _roles(names, a, weight="mat2", bias="input")
    plain = a.get("beta", 1) == 1 and a.get("alpha", 1) == 1
    if not roles or not plain or a["input"].ndim != 1:
        return None
    return LinearUse(roles, a["mat1"].detach(), get_gradient_edge(z), z.shape, transposed=True)


def _tuple(value: Any, dims: int) -> tuple[int, ...]:
    values = tuple(value) if isinstance(value, tuple | list) else (value,)
    return values * dims if len(values) == 1 else values


def _window(a: Arguments, dims: int) -> Window:
    kernel = tuple(a["weight"].shape[2:])
    dilation = _tuple(a.get("dilation", 1), dims)
    padding = a.get("padding", 0)
    if padding == "same":
        whole = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        before = tuple(w // 2 for w in whole)
        after = tuple(w - w // 2 for w in whole)
    else:
        before = after = _tuple(0 if padding == "valid" else padding, dims)
    stride = _tuple(a.get("stride", 1), dims)
    return Window(kernel, stride, before, after, dilation, a.get("groups", 1))


def _conv(names: Names, a: Arguments, z: Tensor) -> Use | None:
    dims = a["weight"].ndim - 2
    roles = _roles(names, a, weight="weight", bias="bias")
    if not roles or a["input"].ndim != dims + 2:
        return None
    return ConvUse(roles, a["input"].detach(), get_gradient_edge(z), z.shape, _window(a, dims))


def _conv_transpose(names: Names, a: Arguments, z: Tensor) -> Use | None:
    dims = a["weight"].ndim - 2
    roles = _roles(names, a, weight="weight", bias="bias")
    if not roles or a["input"].ndim != dims + 2:
        return None
    window = _window(a, dims)
    return ConvTransposeUse(roles, a["input"].detach(), get_gradient_edge(z), z.shape, window)


def _embedding(names: Names, a: Arguments, z: Tensor) -> Use | None:
    roles = _roles(names, a, weight="weight")
    if not roles:
        return None
    rows = len(a["weight"])
    padding = a.get("padding_idx")
    return EmbeddingUse(roles, a["input"], get_gradient_edge(z), z.shape, rows, padding)


def _norm(names: Names, a: Arguments, z: Tensor, trailing: bool, call: Any) -> Use | None:
    """Channels are the trailing dimensions (layer norm) or dimension 1 (all others)."""
    roles = _roles(names, a, weight="weight", bias="bias")
    if not roles:
        return None
    align, shapes = {}, {}
    for role in roles:
        shape = a[role].shape
        ones = (1,) * (z.ndim - len(shape))
        align[role] = (*ones, *shape) if trailing else (1, *shape, *(1,) * (z.ndim - 2))
        shapes[role] = shape
    bare = {key: value for key, value in a.items() if key not in ("weight", "bias")}
    x = a["input"].detach()

    def normalize() -> Tensor:
        normalized: Tensor = call(**bare | {"input": x})
        return normalized

    return NormUse(roles, x, get_gradient_edge(z), z.shape, align, shapes, normalize)


def _batch_norm(names: Names, a: Arguments, z: Tensor) -> Use | None:
    return None if a.get("training") else _norm(names, a, z, False, F.batch_norm)


def _instance_norm(names: Names, a: Arguments, z: Tensor) -> Use | None:
    return _norm(names, a, z, False, F.instance_norm)


def _group_norm(names: Names, a: Arguments, z: Tensor) -> Use | None:
    return _norm(names, a, z, False, F.group_norm)


def _layer_norm(names: Names, a: Arguments, z: Tensor) -> Use | None:
    return _norm(names, a, z, True, F.layer_norm)


def _rms_norm(names: Names, a: Arguments, z: Tensor) -> Use | None:
    return _norm(names, a, z, True, F.rms_norm)


def _spread(role: str) -> Builder:
    """x ∘ w or x + b, whichever operand is the parameter."""

    def build(names: Names, a: Arguments, z: Tensor) -> Use | None:
        if a.get("alpha", 1) != 1:
            return None
        one, other = a["input"], a["other"]
        if id(one) in names and id(other) not in names:
            one, other = other, one
        name = names.get(id(other))
        if name is None or id(one) in names or other.ndim > z.ndim:
            return None
        align = (1,) * (z.ndim - other.ndim) + tuple(other.shape)
        x = one.detach() if isinstance(one, Tensor) else torch.as_tensor(one, device=z.device)
        return ElementwiseUse(
            {role: name}, x, get_gradient_edge(z), z.shape, {role: align}, {role: other.shape}
        )

    return build


def _prelu(names: Names, a: Arguments, z: Tensor) -> Use | None:
    roles = _roles(names, a, weight="weight")
    if not roles:
        return None
    shape = a["weight"].shape
    align = {"weight": (1, *shape, *(1,) * (z.ndim - 2))}
    below = a["input"].detach().clamp(max=0)
    return ElementwiseUse(roles, below, get_gradient_edge(z), z.shape, align, {"weight": shape})


_CONV = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSE = (*_CONV[:5], "output_padding", "groups", "dilation")
_LOOKUP = (
    "input",
    "weight",
    "padding_idx",
    "max_norm",
    "norm_type",
    "scale_grad_by_freq",
    "sparse",
)
_STATISTICS = ("input", "running_mean", "running_var", "weight", "bias")
_PAIR = ("input", "other")

# What a call is known by -> (names of its positional arguments, what notes it).
_RULES: list[tuple[tuple[Any, ...], tuple[str, ...], Builder]] = [
    ((F.linear,), ("input", "weight", "bias"), _linear),
    ((torch.addmm,), ("input", "mat1", "mat2"), _addmm),
    ((torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__), _PAIR, _matmul),
    ((torch.conv1d, torch.conv2d, torch.conv3d), _CONV, _conv),
    (
        (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d),
        _TRANSPOSE,
        _conv_transpose,
    ),
    ((F.embedding,), _LOOKUP, _embedding),
    ((F.batch_norm,), (*_STATISTICS, "training", "momentum", "eps"), _batch_norm),
    ((F.instance_norm,), (*_STATISTICS, "use_input_stats", "momentum", "eps"), _instance_norm),
    ((F.layer_norm,), ("input", "normalized_shape", "weight", "bias", "eps"), _layer_norm),
    ((F.rms_norm,), ("input", "normalized_shape", "weight", "eps"), _rms_norm),
    ((F.group_norm,), ("input", "num_groups", "weight", "bias", "eps"), _group_norm),
    ((F.prelu,), ("input", "weight"), _prelu),
    ((torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__), _PAIR, _spread("weight")),
    ((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__), _PAIR, _spread("bias")),
]
_OPERATIONS: dict[Any, tuple[tuple[str, ...], Builder]] = {
    function: (signature, build) for functions, signature, build in _RULES for function in functions
}
