"""`python -m bench.symmetries`: how long `saltflat.symmetries` takes, and how much memory.

Every call has a process of its own, and the fastest of several is told. Memory is the peak of the
process over what it held before the call, with the model in it; the exporter of PyTorch is warm, a
small network was traced before. `minimum_sharpness` of the largest MLP is there because most of its
time was the group's.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
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
    return torch.randint(50257, (1, 64))


def _dimension(model: nn.Module, example: Tensor) -> str:
    return str(len(sf.symmetries(model, example)))


def _least(model: nn.Module, example: Tensor) -> str:
    sf.measure(model, (example, torch.arange(len(example)) % 10), measures=["minimum_sharpness"])
    return ""


def _mlp() -> nn.Module:
    return zoo.mlp([784, 4096, 4096, 2048, 10])


Work = tuple[Callable[[], nn.Module], Callable[[], Tensor], Callable[[nn.Module, Tensor], str]]
WORK: dict[str, Work] = {
    "GPT-2 small, tied head": (GPT, _tokens, _dimension),
    "GPT-2 small, own head": (lambda: GPT(tied=False), _tokens, _dimension),
    "MLP 784-4096-4096-2048-10": (_mlp, lambda: torch.randn(8, 784), _dimension),
    "the same, `minimum_sharpness`": (_mlp, lambda: torch.randn(8, 784), _least),
    "ResNet-18": (zoo.resnet18, lambda: torch.randn(2, 3, 32, 32), _dimension),
}


def peak() -> float:
    """The largest resident size so far, in bytes; `ru_maxrss` would count the parent's, too."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024


def resident() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return float(pages * resource.getpagesize())


@dataclass(frozen=True)
class Cost:
    """What one call took: seconds, seconds of the processor, bytes; and the model."""

    parameters: int
    size: int
    dimension: str
    seconds: float
    spent: float
    extra: float


def cost(name: str, threads: int) -> Cost:
    """One call, measured in this process."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    sf.symmetries(zoo.mlp([3, 4, 2]), torch.randn(2, 3))
    make, draw, call = WORK[name]
    model, example = make().eval(), draw()
    gc.collect()
    before, start, spent = resident(), time.perf_counter(), time.process_time()
    dimension = call(model, example)
    seconds, spent = time.perf_counter() - start, time.process_time() - spent
    parameters = list(model.parameters())
    count = sum(p.numel() for p in parameters)
    size = sum(p.numel() * p.element_size() for p in parameters)
    return Cost(count, size, dimension, seconds, spent, peak() - before)


def row(name: str, threads: int, repeats: int) -> str:
    """One line of the table: the least of every number, each call in a process of its own."""
    command = [sys.executable, "-m", "bench.symmetries", "--one", name, "--threads", str(threads)]
    costs = []
    for _ in range(repeats):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return f"| {name} | | | failed: {done.stderr.strip().splitlines()[-1:]} | | | |"
        costs.append(Cost(**json.loads(done.stdout.strip().splitlines()[-1])))
    first = costs[0]
    seconds, spent = min(c.seconds for c in costs), min(c.spent for c in costs)
    extra = min(c.extra for c in costs)
    return (
        f"| {name} | {first.parameters / 1e6:.1f} M | {first.dimension} | {seconds:.1f} s "
        f"| {spent:.1f} s | {extra / 2**20:.0f} MiB | {extra / first.size:.1f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", nargs="+", choices=list(WORK), default=list(WORK))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one", choices=list(WORK), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(asdict(cost(options.one, options.threads))))
        return
    print("| network | parameters | dimension | time | CPU time | memory | memory / model |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for name in options.calls:
        print(row(name, options.threads, options.repeats), flush=True)


if __name__ == "__main__":
    main()
