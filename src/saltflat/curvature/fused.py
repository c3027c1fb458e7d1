"""Sums over positions in one kernel, for GPUs that Triton compiles for.

Of what arrives at a normalisation, δ, the gradients of its weight and bias need Σ_t δ_t x̂_t and
Σ_t δ_t for every sample and channel. Torch takes a product that is written out and two sums for
that, which read and write δ five times; this kernel reads δ and x̂ once. Where there is no Triton,
no such GPU, or another type or layout, there is no kernel, and the sums are torch's.
"""

from __future__ import annotations

from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from saltflat.memory import out_of_memory

_BLOCK = 1024  # entries of a channel that a program holds at a time
_POSITIONS, _CHANNELS = 16, 64  # the same where channels lie side by side


def sums_over_positions(delta: Tensor, by: Tensor) -> tuple[Tensor, Tensor] | None:
    """(Σ_t δ_t x_t, Σ_t δ_t) of tensors (n, c, *positions), each (n, c); None without a kernel."""
    single = delta.dtype == by.dtype == torch.float32 and delta.is_cuda and by.is_cuda
    if not single or delta.ndim < 3 or delta.shape != by.shape or not delta.numel():
        return None
    kernels = _kernels(delta.device)
    return None if kernels is None else _summed(kernels, delta.flatten(2), by.flatten(2))


Kernels = tuple[Any, Any]  # `_rows` and `_columns`, compiled


def _summed(kernels: Kernels, d: Tensor, x: Tensor) -> tuple[Tensor, Tensor] | None:
    """The same of (n, c, T); None if they lie in memory otherwise."""
    by_row, by_column = kernels
    n, channels, positions = d.shape
    sums = torch.empty(2, n, channels, device=d.device)
    with torch.cuda.device(d.device):
        if d.is_contiguous() and x.is_contiguous():
            block = min(_BLOCK, 1 << (positions - 1).bit_length())
            rows = _BLOCK // block
            programs = -(-n * channels // rows)
            by_row[(programs,)](d, x, sums[0], sums[1], n * channels, positions, rows, block)
        elif d.mT.is_contiguous() and x.mT.is_contiguous():
            programs = -(-channels // _CHANNELS)
            shape = positions, channels, _POSITIONS, _CHANNELS
            by_column[(n, programs)](d, x, sums[0], sums[1], *shape)
        else:
            return None
    return sums[0], sums[1]


@cache
def _kernels(device: torch.device) -> Kernels | None:
    """The kernels, if Triton is there, compiles for the GPU (it needs a C compiler for that), and
    they give what torch gives."""
    if find_spec("triton") is None:
        return None
    triton = import_module("triton")
    globals()["tl"] = triton.language  # where its compiler looks for it
    kernels = triton.jit(_rows), triton.jit(_columns)
    try:
        return kernels if _agree(kernels, device) else None
    except Exception as error:
        if out_of_memory(error):
            raise
        return None


def _agree(kernels: Kernels, device: torch.device) -> bool:
    generator = torch.Generator(device).manual_seed(0)
    pair = torch.randn(2, 3, 5, 7, generator=generator, device=device)
    for d, x in (pair, pair.mT.contiguous().mT):
        sums, expected = _summed(kernels, d, x), ((d * x).sum(2), d.sum(2))
        if sums is None or not all(map(partial(torch.allclose, atol=1e-4), sums, expected)):
            return False
    return True


tl: Any = None  # Triton's language, once a kernel is wanted


def _rows(d, x, weighted, plain, count, T, R: tl.constexpr, B: tl.constexpr):
    """Of (count, T), the sums Σ_t d x and Σ_t d of R rows."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    a = tl.zeros((R, B), tl.float32)
    b = tl.zeros((R, B), tl.float32)
    for start in range(0, T, B):
        t = start + tl.arange(0, B)
        at = row[:, None] * T + t[None, :]
        inside = (row < count)[:, None] & (t < T)[None, :]
        dv = tl.load(d + at, mask=inside, other=0.0)
        a += dv * tl.load(x + at, mask=inside, other=0.0)
        b += dv
    tl.store(weighted + row, tl.sum(a, 1), mask=row < count)
    tl.store(plain + row, tl.sum(b, 1), mask=row < count)


def _columns(d, x, weighted, plain, T, C, B: tl.constexpr, W: tl.constexpr):
    """Of (n, T, C), the same sums of W channels of one sample."""
    n = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * W + tl.arange(0, W)
    a = tl.zeros((B, W), tl.float32)
    b = tl.zeros((B, W), tl.float32)
    for start in range(0, T, B):
        t = start + tl.arange(0, B)
        at = (n * T + t[:, None]) * C + c[None, :]
        inside = (t < T)[:, None] & (c < C)[None, :]
        dv = tl.load(d + at, mask=inside, other=0.0)
        a += dv * tl.load(x + at, mask=inside, other=0.0)
        b += dv
    tl.store(weighted + n * C + c, tl.sum(a, 0), mask=c < C)
    tl.store(plain + n * C + c, tl.sum(b, 0), mask=c < C)
