"""Traces of a Llama-like model with a billion parameters in bfloat16, on one GPU.

    python -m bench.llama [--layers 22 --width 2048 --wide 5632 --samples 8 --length 512]

The weights are drawn, not trained. Heads of 64, eight of them to each pair of keys and values;
rotated places, RMSNorm, SwiGLU, a vocabulary of 32,000 and a head of its own.
"""

from __future__ import annotations

import argparse
import re
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import saltflat as sf
from bench.language import loss_of, seconds

VOCABULARY, HEAD, SHARE = 32_000, 64, 8


class Block(nn.Module):
    def __init__(self, width: int, wide: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.query, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(width, width // SHARE, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, wide, bias=False) for _ in range(2))
        self.down = nn.Linear(wide, width, bias=False)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        y = self.norm1(x)
        q, k, v = (
            part(y).unflatten(-1, (-1, HEAD)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        k, v = (part.repeat_interleave(SHARE, dim=1) for part in (rotated(k, turn), v))
        seen = F.scaled_dot_product_attention(rotated(q, turn), k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        out: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return out


def rotated(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    one, other = x.chunk(2, -1)
    return x * turn[0] + torch.cat([-other, one], -1) * turn[1]


class Llama(nn.Module):
    def __init__(self, layers: int, width: int, wide: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, wide) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        rate = 10_000 ** -(torch.arange(0, HEAD, 2, device=x.device) / HEAD)
        angle = torch.outer(torch.arange(tokens.shape[1], device=x.device), rate).repeat(1, 2)
        turn = angle.cos().to(x), angle.sin().to(x)
        for block in self.blocks:
            x = block(x, turn)
        out: Tensor = self.head(self.norm(x))
        return out


def main() -> None:
    parser = argparse.ArgumentParser()
    sizes = {"layers": 22, "width": 2048, "wide": 5632, "samples": 8, "length": 512}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.manual_seed(0)
    model = Llama(options.layers, options.width, options.wide).to(device, torch.bfloat16).eval()
    weights = list(model.parameters())
    print(f"{sum(p.numel() for p in weights) / 1e9:.2f}e9 parameters in bfloat16")
    tokens = torch.randint(VOCABULARY, (options.samples, options.length + 1), device=device)
    x, y = tokens[:, :-1], tokens[:, 1:]

    def gradient() -> object:
        return torch.autograd.grad(loss_of(model, x, y), weights)

    gradient()
    narrow, _ = seconds(gradient, 3)
    model.float()
    gradient()
    one, _ = seconds(gradient, 3)
    model.bfloat16()
    print(f"one gradient: {narrow * 1e3:.0f} ms in bfloat16, {one * 1e3:.0f} ms in TensorFloat-32")
    loss = nn.CrossEntropyLoss()
    calls: dict[str, Callable[[], sf.Trace]] = {
        "Tr G": lambda: sf.trace(model, (x, y), loss, output=lambda z: z.mT, curvature="ggn"),
        "Tr H": lambda: sf.trace(model, (x, y), loss, output=lambda z: z.mT),
    }
    print("| | seconds | gradients | total | peak memory, GiB | draws |\n|---|---|---|---|---|---|")
    found = {}
    for label, call in calls.items():
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        took, trace = seconds(call)
        peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
        draws = next(re.search(r"(\d+) draws", note) for note in trace.notes if "draws" in note)
        total = f"{trace.total:.4g} ± {trace.stderr:.2g}"
        count = draws[1] if draws else ""
        print(f"| {label} | {took:.1f} | {took / one:.0f} | {total} | {peak:.1f} | {count} |")
        found[label] = trace
    print("\n| blocks | Σ Tr G | Σ Tr H | worst ± of Tr H | by |\n|---|---|---|---|---|")
    kinds: dict[str, list[str]] = {}
    for name in found["Tr H"]:
        kinds.setdefault(re.sub(r"blocks\.\d+\.", "", name), []).append(name)
    for kind, names in kinds.items():
        details, parts = (
            [found["Tr H"].details[name] for name in names],
            [found["Tr G"][name] for name in names],
        )
        worst = max(d.stderr / max(abs(d.value), g) for d, g in zip(details, parts, strict=True))
        sums = sum(parts), sum(d.value for d in details)
        by = ", ".join(sorted({d.rule for d in details}))
        print(f"| {kind} | {sums[0]:.4g} | {sums[1]:.4g} | {worst:.1%} | {by} |")


if __name__ == "__main__":
    main()
