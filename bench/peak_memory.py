"""The memory that a run takes at its peak, above what was taken before it.

On a CPU: the kernel's high-water mark of resident memory (VmHWM), after freed heap pages are
returned and the mark is reset. Other work of the process counts, so use one of its own, in which
the libraries are loaded and warm. Linux only. On CUDA: the allocator's peak.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

import torch

Run = Callable[[], object]
_SMALL = 64.0  # MiB


def peak(run: Run, device: str) -> float:
    """MiB. Small ones, blurred by pages, are the least of three."""
    peaks: list[float] = []
    while not peaks or (len(peaks) < 3 and peaks[0] <= _SMALL):
        gc.collect()
        peaks.append(_cuda(run) if device == "cuda" else _resident(run))
    return min(peaks)


def _cuda(run: Run) -> float:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def _resident(run: Run) -> float:
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # 5: reset the high-water mark
    before = _status("VmRSS")
    run()
    return _status("VmHWM") - before


def _status(field: str) -> float:
    """A field of /proc/self/status in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return float(line.split()[1]) / 1024
    raise LookupError(field)
