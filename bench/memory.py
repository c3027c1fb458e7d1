"""Peak memory of one contender, in a process of its own.

On a CPU: the kernel's high-water mark of resident memory (VmHWM) over one run, less what was
resident just before it. Libraries are loaded and warmed up on two samples first, freed heap pages
are returned and the mark is reset, so model, data and code are not counted. Small peaks, which
page granularity blurs, are the least of three runs. Linux only.
On CUDA: the allocator's peak, less what was allocated before.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import subprocess
import sys
from pathlib import Path

import torch

from bench.cases import CASES, prepare
from bench.contenders import CONTENDERS
from bench.device import configure
from bench.peers import Run

_SMALL = 64.0  # MiB


def peak_mib(
    case: str, contender: str, samples: int, size: int, device: str, tf32: bool
) -> float | None:
    """Measure in a fresh process; None where that cannot be done.

    The contender runs on the first `samples` of the case; `size` is its batch size or its probes.
    """
    arguments = [case, contender, str(samples), str(size), device]
    command = [sys.executable, "-m", "bench.memory", *arguments]
    done = subprocess.run(command + ["--tf32"] * tf32, capture_output=True, text=True, check=False)
    return float(done.stdout.split()[-1]) if done.returncode == 0 else None


def _status(field: str) -> float:
    """A field of /proc/self/status in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return float(line.split()[1]) / 1024
    raise LookupError(field)


def _measure(case: str, contender: str, samples: int, size: int, device: str) -> float:
    chosen = CONTENDERS[contender]
    problem = prepare(CASES[case], device).head(samples)
    chosen.build(problem.head(2), 2)()
    run = chosen.build(problem, size)
    peak = _peak_cuda if device == "cuda" else _peak_resident
    chosen.before()
    first = peak(run)
    if first > _SMALL:
        return first
    peaks = [first]
    for _ in range(2):
        chosen.before()
        peaks.append(peak(run))
    return min(peaks)


def _peak_cuda(run: Run) -> float:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def _peak_resident(run: Run) -> float:
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # 5: reset the high-water mark
    before = _status("VmRSS")
    run()
    return _status("VmHWM") - before


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("samples", type=int)
    parser.add_argument("size", type=int)
    parser.add_argument("device")
    parser.add_argument("--tf32", action="store_true")
    options = parser.parse_args()
    configure(options.device, options.tf32)
    asked = (options.case, options.contender, options.samples, options.size, options.device)
    print(_measure(*asked))
