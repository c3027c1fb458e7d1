"""Lists of tensors taken as one vector."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


@torch.no_grad()
def put(parameters: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Set the parameters to the values."""
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The Euclidean norm of all entries together, in float32 or wider, on the first device."""
    wide = [t.float() if t.dtype in (torch.float16, torch.bfloat16) else t for t in tensors]
    norm: Tensor = torch.linalg.vector_norm(together(torch._foreach_norm(wide)))
    return norm


def together(scalars: Sequence[Tensor]) -> Tensor:
    """The scalars as one vector, on the device of the first and in the widest of their dtypes."""
    dtype = torch.float64 if any(x.dtype == torch.float64 for x in scalars) else torch.float32
    return torch.stack([x.to(scalars[0].device, dtype) for x in scalars])
