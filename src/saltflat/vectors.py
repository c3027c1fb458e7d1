"""Lists of tensors taken as one vector."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from saltflat.sharded import held, layouts, summed

Vector = list[Tensor] | tuple[Tensor, ...]


@torch.no_grad()
def put(parameters: Vector, values: Vector) -> None:
    """Set the parameters to the values."""
    torch._foreach_copy_(held(parameters), held(values))


@torch.no_grad()
def add(parameters: Vector, values: Vector) -> None:
    """Add the values to the parameters."""
    torch._foreach_add_(held(parameters), held(values))


@torch.no_grad()
def copies(tensors: Vector) -> list[Tensor]:
    """A copy of every tensor, in few kernels."""
    result = [torch.empty_like(t) for t in tensors]
    for dtype in {t.dtype for t in tensors}:  # torch is fast for one dtype at a time
        pairs = [(r, t) for r, t in zip(result, tensors, strict=True) if t.dtype == dtype]
        torch._foreach_copy_(held(r for r, _ in pairs), held(t for _, t in pairs))
    return result


def scale(tensors: Vector, factor: Tensor) -> None:
    """Multiply all of them, wherever they are, by a number that is a tensor."""
    for device in {t.device for t in tensors}:
        here = held(t for t in tensors if t.device == device)
        torch._foreach_mul_(here, factor.to(device))


def bounds(tensor: Tensor) -> tuple[float, float]:
    """The least and the largest entry, both NaN if one is; in one answer from a GPU."""
    least, most = tensor.detach().aminmax()
    if least.is_cpu:
        return least.item(), most.item()
    ends: list[float] = torch.stack([least, most]).tolist()
    return ends[0], ends[1]


def total_norm(tensors: Vector) -> Tensor:
    """The Euclidean norm of all entries together, in float32 or wider, on the first device.

    Of tensors that processes share it is the norm of the whole ones.
    """
    norms = []
    for layout, group in layouts(tensors).items():
        norm = _norm(held(group))
        if layout is not None:  # in float64 the square neither overflows nor vanishes
            norm = summed(norm.double().square(), layout).sqrt().to(norm.dtype)
        norms.append(norm)
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(together(norms))


def _norm(tensors: Vector) -> Tensor:
    wide = [t.float() if t.dtype in (torch.float16, torch.bfloat16) else t for t in tensors]
    norm: Tensor = torch.linalg.vector_norm(together(torch._foreach_norm(wide)))
    return norm


def together(scalars: Sequence[Tensor]) -> Tensor:
    """The scalars as one vector, on the device of the first and in the widest of their dtypes."""
    dtype = torch.float64 if any(x.dtype == torch.float64 for x in scalars) else torch.float32
    return torch.stack([x.to(scalars[0].device, dtype) for x in scalars])


def dense_parts(tensor: Tensor) -> list[Tensor]:
    """The dense tensors that hold its values; none where there are no values to be written."""
    if tensor.is_meta or tensor.is_nested:
        return []
    if wraps(tensor):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        held = (getattr(tensor, name) for name in names)  # of a DTensor, the mesh too
        return [part for each in held if isinstance(each, Tensor) for part in dense_parts(each)]
    data = tensor.data  # unlike `detach`, with a version counter of its own
    if data.layout == torch.strided:
        return [data]
    if data.layout == torch.sparse_coo:
        return [data._indices(), data._values()]
    if data.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [data.crow_indices(), data.col_indices(), data.values()]
    if data.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [data.ccol_indices(), data.row_indices(), data.values()]
    return []


def wraps(tensor: Tensor) -> bool:
    """Whether it is of a class whose tensors consist of others (DTensor, quantised weights)."""
    return type(tensor) not in _PLAIN and bool(is_traceable_wrapper_subclass(tensor))


_PLAIN = (Tensor, nn.Parameter)
