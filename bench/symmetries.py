"""`python -m bench.symmetries`: how long `saltflat.symmetries` takes, and how much memory.

Every network has a process of its own. Memory is the peak of the process over what it held before
the call, with the model in it; the exporter of PyTorch is warm, a small network was traced before.
"""

from __future__ import annotations

import argparse
import gc
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import saltflat as sf
from saltflat import zoo


class Block(nn.Module):
    """GPT-2's: attention and a GELU network, each behind a LayerNorm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        parts = self.qkv(self.ln1(x)).split(d, 2)
        q, k, v = (p.view(b, t, self.heads, d // self.heads).transpose(1, 2) for p in parts)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(b, t, d))
        out: Tensor = x + self.down(F.gelu(self.up(self.ln2(x)), approximate="tanh"))
        return out


class GPT(nn.Module):
    """GPT-2 in plain PyTorch; the small one by default."""

    def __init__(
        self,
        *,
        layers: int = 12,
        width: int = 768,
        heads: int = 12,
        vocabulary: int = 50257,
        length: int = 1024,
        tied: bool = True,
    ) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.ln(x))
        return logits


def _tokens() -> Tensor:
    return torch.randint(50257, (1, 32))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "GPT-2 small, tied head": (GPT, _tokens),
    "GPT-2 small, own head": (lambda: GPT(tied=False), _tokens),
    "MLP 784-4096-4096-2048-10": (
        lambda: zoo.mlp([784, 4096, 4096, 2048, 10]),
        lambda: torch.randn(2, 784),
    ),
    "ResNet-18": (zoo.resnet18, lambda: torch.randn(2, 3, 32, 32)),
}


def peak() -> float:
    """The largest resident size so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def resident() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return float(pages * resource.getpagesize())


def row(name: str, threads: int) -> str:
    """One line of the table, measured in this process."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    sf.symmetries(zoo.mlp([3, 4, 2]), torch.randn(2, 3))
    make, draw = NETWORKS[name]
    model, example = make().eval(), draw()
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    gc.collect()
    before, start, spent = resident(), time.perf_counter(), time.process_time()
    group = sf.symmetries(model, example)
    seconds, spent = time.perf_counter() - start, time.process_time() - spent
    extra = peak() - before
    count = sum(p.numel() for p in model.parameters()) / 1e6
    return (
        f"| {name} | {count:.1f} M | {len(group)} | {seconds:.1f} s | {spent:.1f} s "
        f"| {extra / 2**20:.0f} MiB | {extra / size:.1f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--one", choices=list(NETWORKS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(row(options.one, options.threads))
        return
    print("| network | parameters | dimension | time | CPU time | memory | memory / model |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for name in options.networks:
        command = [sys.executable, "-m", "bench.symmetries", "--one", name]
        command += ["--threads", str(options.threads)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        failed = f"| {name} | | | failed: {done.stderr.strip().splitlines()[-1:]} | | | |"
        print(failed if done.returncode else done.stdout.strip(), flush=True)


if __name__ == "__main__":
    main()
