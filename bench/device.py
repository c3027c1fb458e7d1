"""The machine's settings, the same in every process of a benchmark."""

from __future__ import annotations

import torch

THREADS = 2


def configure(device: str, tf32: bool, threads: int = THREADS) -> None:
    """CPU threads; on CUDA, full float32 unless `tf32`, for products and convolutions alike."""
    torch.set_num_threads(threads)
    if device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = tf32
        torch.backends.cudnn.allow_tf32 = tf32


def machine(device: str) -> str:
    """What names of results call it: cpu, or the GPU's model, e.g. h200."""
    return torch.cuda.get_device_name().split()[-1].lower() if device == "cuda" else device


def describe(device: str, tf32: bool, threads: int = THREADS) -> str:
    """One line for the head of a table."""
    cpu = f"{threads} CPU thread{'s' * (threads > 1)}"
    where = torch.cuda.get_device_name() if device == "cuda" else cpu
    return f"{where}, {'tf32' if tf32 else 'float32'}, torch {torch.__version__}"
