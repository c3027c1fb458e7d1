"""What it means for an answer to agree with a dense matrix."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from saltflat import Diagonal, Trace

#: of the block's largest entry, by the dtype that was computed in
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
#: of the largest entry of all blocks: what rounding leaves where the truth is zero
FLOOR = {torch.float64: 1e-14, torch.float32: 1e-6}


def float64(value: float | Tensor) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64, device="cpu").reshape(-1)


def agrees(
    result: Trace | Diagonal,
    blocks: Mapping[str, Tensor],
    dtype: torch.dtype = torch.float64,
    *,
    sigmas: float = 4.0,
) -> None:
    """Exact entries to rounding, estimated ones within `sigmas` of their own standard error.

    `result` is what trace (floats) or diagonal (tensors) returned, `blocks` what the oracle says.
    """
    assert list(result) == list(blocks), "names, or their order"
    largest = max(float(b.abs().max()) for b in blocks.values())
    for name, block in blocks.items():
        got, detail = result[name], result.details[name]
        want = block.trace() if isinstance(got, float) else block.diagonal()
        assert isinstance(got, float) or got.dtype == torch.float64, name
        got = float64(got)
        error = (got - want.reshape(-1)).abs()
        rounding = TOLERANCE[dtype] * float(block.abs().max()) + FLOOR[dtype] * largest
        if detail.exact:
            assert detail.stderr == 0.0, name
            assert float(error.max()) <= rounding, (name, float(error.max()), rounding)
            continue
        noise = float64(detail.stderr)
        assert noise.shape == error.shape, name
        # an entry is one of many, and each gets the room that many allow
        room = sigmas if len(error) == 1 else sigmas + math.log10(len(error))
        excess = error - room * noise - max(rounding, FLOOR[dtype] * largest)
        assert bool((excess <= 0).all()), (name, error, noise)
        assert detail.reason, name


def uncertain(result: Trace | Diagonal, name: str, block: Tensor) -> None:
    """An estimate admits to be one, by a standard error above zero."""
    detail = result.details[name]
    assert not detail.exact
    off_diagonal = float((block - block.diagonal().diag()).abs().max())
    # Random signs estimate a diagonal matrix without any error; and where the signs belong to
    # operations, what is diagonal there (a bias before a tanh).
    if off_diagonal > 1e-12 and detail.rule == "probes":
        assert float(float64(detail.stderr).max()) > 0, name
