"""Curvature of a language model of GPT-2-small's size: errors and cost, in gradients.

    python -m bench.language [--layers 12 --width 768 --samples 64 --length 256 --steps 300 --tied]

The model is trained for some hundred steps on the source files of Python's own library, cut into
words. A gradient is one forward and backward pass over the same samples.
"""

from __future__ import annotations

import argparse
import re
import sysconfig
import time
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import saltflat as sf

VOCABULARY = 50_257


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.heads = nn.LayerNorm(width), nn.LayerNorm(width), heads
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(n, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).reshape(n, t, d))
        out: Tensor = x + self.narrow(F.gelu(self.widen(self.norm2(x)), approximate="tanh"))
        return out


class Language(nn.Module):
    def __init__(self, layers: int, width: int, length: int, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.place = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.ModuleList(Block(width, width // 64) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


def text(words: int) -> Tensor:
    """Words and signs of Python's library, as numbers by their frequency."""
    library = Path(sysconfig.get_paths()["stdlib"])
    found: list[str] = []
    for path in sorted(library.rglob("*.py")):
        found += re.findall(r"\w+|[^\w\s]|\n+", path.read_text(errors="ignore"))
        if len(found) > words:
            break
    order = {word: k for k, (word, _) in enumerate(Counter(found).most_common(VOCABULARY - 1))}
    return torch.tensor([order.get(word, VOCABULARY - 1) for word in found])


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def train(model: nn.Module, tokens: Tensor, length: int, steps: int) -> float:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(len(tokens) - length - 1, (16,), generator=generator)
        rows = torch.stack([tokens[s : s + length + 1] for s in starts.tolist()])
        value = loss_of(model, rows[:, :-1], rows[:, 1:])
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    return float(value)


def seconds(call: Callable[[], Any], repeats: int = 1) -> tuple[float, Any]:
    """The least time of some calls, and what the last one gave."""
    best = float("inf")
    for _ in range(repeats):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        result = call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best, result


def show(trace: sf.Trace, ggn: sf.Trace, tolerance: float) -> None:
    size = sum(abs(v) for v in trace.values())
    within = sum(
        abs(d.value) for d in trace.details.values() if d.stderr <= tolerance * abs(d.value)
    )
    print(f"blocks within {tolerance:.0%}: {within / size:.1%} of Σ|Tr H|")
    print("\n| blocks | Σ Tr H | Σ Tr G | worst ± | median ± | by |\n|---|---|---|---|---|---|")
    kinds: dict[str, list[str]] = {}
    for name in trace:
        kinds.setdefault(re.sub(r"blocks\.\d+\.", "", name), []).append(name)
    for kind, names in kinds.items():
        details = [trace.details[name] for name in names]
        shares = sorted(d.stderr / max(abs(d.value), 1e-30) for d in details)
        whole, part = sum(d.value for d in details), sum(ggn[name] for name in names)
        by = ", ".join(sorted({d.rule for d in details}))
        middle = shares[len(shares) // 2]
        print(f"| {kind} | {whole:.4g} | {part:.4g} | {shares[-1]:.1%} | {middle:.1%} | {by} |")


def main() -> None:
    parser = argparse.ArgumentParser()
    sizes = {"layers": 12, "width": 768, "samples": 64, "length": 256, "steps": 300}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--tied", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.manual_seed(0)
    model = Language(options.layers, options.width, options.length, options.tied).to(device)
    tokens = text(3_000_000).to(device)
    took, value = seconds(lambda: train(model, tokens, options.length, options.steps))
    print(f"trained {options.steps} steps in {took:.0f} s to a loss of {value:.3f}")
    model.eval()
    rows = tokens[-options.samples * options.length - 1 :]
    x = rows[:-1].reshape(options.samples, options.length)
    y = rows[1:].reshape(options.samples, options.length)
    parts = list(zip(x.split(8), y.split(8), strict=True))
    weights = list(model.parameters())

    def gradient() -> None:
        for a, b in parts:
            torch.autograd.grad(loss_of(model, a, b), weights)

    gradient()
    one, _ = seconds(gradient, 3)
    print(f"one gradient over {options.samples} × {options.length}: {one * 1e3:.0f} ms")
    data = (x, y)
    loss = nn.CrossEntropyLoss()

    def output(z: Tensor) -> Tensor:
        return z.mT  # classes second, as the loss wants them

    for few, many in ((8, 24),):
        times = [
            seconds(
                partial(
                    sf.trace,
                    model,
                    data,
                    loss,
                    output=output,
                    curvature="ggn",
                    estimator=sf.PropagatedCurvature(k),
                )
            )[0]
            for k in (few, few, many)
        ]
        print(f"Gauss–Newton, a draw: {(times[2] - times[1]) / (many - few) / one:.2f} gradients")
    took, ggn = seconds(lambda: sf.trace(model, data, loss, output=output, curvature="ggn"))
    print(f"Gauss–Newton: {took / one:.1f} gradients, total {ggn.total:.4g} ± {ggn.stderr:.2g}")
    print(ggn.notes[-1])
    took, trace = seconds(lambda: sf.trace(model, data, loss, output=output))
    print(f"Hessian: {took / one:.1f} gradients, total {trace.total:.4g} ± {trace.stderr:.2g}")
    for note in trace.notes:
        print(note)
    show(trace, ggn, 0.05)
    if device == "cuda":
        print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")


if __name__ == "__main__":
    main()
