"""What torch does in several goes over memory, in one kernel, for GPUs that Triton compiles for.

*Sums over positions.* Of what arrives at a normalisation, δ, the gradients of its weight and bias
need Σ_t δ_t x̂_t and Σ_t δ_t for every sample and channel. Torch takes a product that is written out
and two sums for that, which read and write δ five times; this kernel reads δ and x̂ once.

*Patches.* What a convolution's kernel sees at every position is a view with many strides, which
torch copies entry by entry; here a program copies a whole channel, once for every kernel element.

Where there is no Triton, no such GPU, or another type or layout, there is no kernel, and torch does
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from math import prod
from typing import Any, final

import torch
from torch import Tensor

from saltflat.memory import out_of_memory

_BLOCK = 1024  # entries of a channel that a program holds at a time
_POSITIONS, _CHANNELS = 16, 64  # the same where channels lie side by side


def patches(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    before: Sequence[int],
    dilation: Sequence[int],
    size: Sequence[int],
) -> Tensor | None:
    """What kernel elements see of (n, c, h, w), padded with zeros, at `size` positions, as
    (n, c, elements, positions); None without a kernel."""
    plain = x.is_cuda and x.dtype == torch.float32 and x.ndim == 4 and x.is_contiguous()
    # Blocks of positions are the grid's second dimension, of which CUDA takes 65,535.
    if not plain or not x.numel() or x[0].numel() >= 1 << 30 or prod(size) >= 65_535 * _BLOCK:
        return None
    kernels = _kernels(x.device)
    if kernels is None:
        return None
    return _patched(kernels, x, kernel, stride, before, dilation, size)


def _patched(kernels: Kernels, x: Tensor, *geometry: Sequence[int]) -> Tensor:
    kernel, stride, before, dilation, size = geometry
    n, channels, height, width = x.shape
    seen = x.new_empty(n, channels, prod(kernel), prod(size))
    block = min(_BLOCK, 1 << (prod(size) - 1).bit_length())
    rows = _BLOCK // block
    grid = -(-n * channels // rows), -(-prod(size) // block)
    numbers = n * channels, height, width, prod(size), size[1], prod(kernel), kernel[1]
    with torch.cuda.device(x.device):
        kernels.windows[grid](x, seen, *numbers, *stride, *before, *dilation, rows, block)
    return seen


def sums_over_positions(delta: Tensor, by: Tensor) -> tuple[Tensor, Tensor] | None:
    """(Σ_t δ_t x_t, Σ_t δ_t) of tensors (n, c, *positions), each (n, c); None without a kernel."""
    single = delta.dtype == by.dtype == torch.float32 and delta.is_cuda and by.is_cuda
    if not single or delta.ndim < 3 or delta.shape != by.shape or not delta.numel():
        return None
    kernels = _kernels(delta.device)
    return None if kernels is None else _summed(kernels, delta.flatten(2), by.flatten(2))


@final
@dataclass(frozen=True, slots=True)
class Kernels:
    """`_rows`, `_columns` and `_windows`, compiled."""

    rows: Any
    columns: Any
    windows: Any


def _summed(kernels: Kernels, d: Tensor, x: Tensor) -> tuple[Tensor, Tensor] | None:
    """The same of (n, c, T); None if they lie in memory otherwise."""
    n, channels, positions = d.shape
    sums = torch.empty(2, n, channels, device=d.device)
    with torch.cuda.device(d.device):
        if d.is_contiguous() and x.is_contiguous():
            block = min(_BLOCK, 1 << (positions - 1).bit_length())
            rows = _BLOCK // block
            programs = -(-n * channels // rows)
            kernels.rows[(programs,)](d, x, sums[0], sums[1], n * channels, positions, rows, block)
        elif d.mT.is_contiguous() and x.mT.is_contiguous():
            programs = -(-channels // _CHANNELS)
            shape = positions, channels, _POSITIONS, _CHANNELS
            kernels.columns[(n, programs)](d, x, sums[0], sums[1], *shape)
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
    kernels = Kernels(*map(triton.jit, (_rows, _columns, _windows)))
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
        sums, both = _summed(kernels, d, x), ((d * x).sum(2), d.sum(2))
        if sums is None or not all(map(partial(torch.allclose, atol=1e-4), sums, both)):
            return False
    seen = _patched(kernels, pair, (3, 2), (2, 1), (1, 0), (1, 2), (3, 5))
    padded = torch.nn.functional.pad(pair, (0, 0, 1, 1))
    options: dict[str, Any] = {"stride": (2, 1), "dilation": (1, 2)}
    expected = torch.nn.functional.unfold(padded, (3, 2), **options)
    return torch.equal(seen.flatten(1, 2), expected)


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


def _windows(
    x, seen, count, H, W, T, OW, E, KW, SH, SW, PH, PW, DH, DW, R: tl.constexpr, B: tl.constexpr
):
    """Of R channels (H, W), what each of E kernel elements sees at B of T positions."""
    plane = (tl.program_id(0).to(tl.int64) * R + tl.arange(0, R))[:, None]
    t = (tl.program_id(1) * B + tl.arange(0, B))[None, :]
    row, column = t // OW * SH - PH, t % OW * SW - PW
    within = (plane < count) & (t < T)
    for e in range(E):
        r, c = row + e // KW * DH, column + e % KW * DW
        inside = within & (r >= 0) & (r < H) & (c >= 0) & (c < W)
        value = tl.load(x + plane * (H * W) + (r * W + c), mask=inside, other=0.0)
        tl.store(seen + (plane * E + e) * T + t, value, mask=within)
