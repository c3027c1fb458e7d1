"""Curved networks on a CPU: how near the tolerance the blocks come, and for how many gradients.

    python -m bench.curved [--threads 2 --samples 64]

An EfficientNet-like network (SiLU, squeeze and excite, BatchNorm) and a small vision transformer,
trained for a few hundred steps on scikit-learn's digits. A gradient is one forward and backward
pass over the same samples.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections import Counter
from collections.abc import Callable

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import saltflat as sf


class Inverted(nn.Module):
    """Widen, filter each channel, gate the channels, narrow."""

    def __init__(self, inputs: int, outputs: int, times: int, stride: int) -> None:
        super().__init__()
        wide, few = inputs * times, max(1, inputs // 4)
        self.widen, self.norm1 = nn.Conv2d(inputs, wide, 1, bias=False), nn.BatchNorm2d(wide)
        self.each = nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False)
        self.norm2, self.norm3 = nn.BatchNorm2d(wide), nn.BatchNorm2d(outputs)
        self.squeeze, self.excite = nn.Conv2d(wide, few, 1), nn.Conv2d(few, wide, 1)
        self.narrow = nn.Conv2d(wide, outputs, 1, bias=False)
        self.skip = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.norm2(self.each(F.silu(self.norm1(self.widen(x))))))
        gate = self.excite(F.silu(self.squeeze(F.adaptive_avg_pool2d(y, 1)))).sigmoid()
        y = self.norm3(self.narrow(y * gate))
        out: Tensor = x + y if self.skip else y
        return out


class Efficient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        sizes = ((16, 16, 1, 1), (16, 24, 4, 2), (24, 24, 4, 1), (24, 40, 4, 2), (40, 40, 4, 1))
        self.blocks = nn.Sequential(*(Inverted(*each) for each in sizes))
        self.last, self.norm2 = nn.Conv2d(40, 128, 1, bias=False), nn.BatchNorm2d(128)
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.interpolate(x, size=(24, 24), mode="bilinear")
        x = self.blocks(F.silu(self.norm(self.stem(x))))
        out: Tensor = self.head(F.silu(self.norm2(self.last(x))).mean((2, 3)))
        return out


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.heads = nn.LayerNorm(width), nn.LayerNorm(width), heads
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(n, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v)
        x = x + self.project(seen.transpose(1, 2).reshape(n, t, d))
        out: Tensor = x + self.narrow(F.gelu(self.widen(self.norm2(x))))
        return out


class Vision(nn.Module):
    def __init__(self, width: int = 64, layers: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, 2)
        self.place = nn.Parameter(0.02 * torch.randn(16, width))
        self.blocks = nn.Sequential(*(Attention(width, 4) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).mT + self.place
        out: Tensor = self.head(self.norm(self.blocks(x)).mean(1))
        return out


def digits() -> tuple[Tensor, Tensor]:
    data = load_digits()
    x = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    return x, torch.tensor(data.target)


def train(model: nn.Module, x: Tensor, y: Tensor, steps: int) -> float:
    """To the accuracy on the last 297 digits."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        rows = torch.randint(1500, (64,), generator=generator)
        loss = F.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        return float((model(x[1500:]).argmax(1) == y[1500:]).float().mean())


def median_seconds(call: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return sorted(times)[repeats // 2]


def report(name: str, model: nn.Module, x: Tensor, y: Tensor) -> None:
    weights = list(model.parameters())
    gradient = median_seconds(
        lambda: torch.autograd.grad(F.cross_entropy(model(x), y), weights), 15
    )
    ggn = sf.trace(model, (x, y), curvature="ggn")
    traces: list[sf.Trace] = []
    took = median_seconds(lambda: traces.append(sf.trace(model, (x, y))), 3)
    trace, whole = traces[-1], ggn.total
    within = 0.0
    for block, d in trace.details.items():
        target = 0.05 * max(abs(d.value), ggn[block], whole / 5)
        within += ggn[block] * (d.exact or float(d.stderr) <= target)
    rules = ", ".join(
        f"{k} {r}" for r, k in Counter(d.rule for d in trace.details.values()).items()
    )
    total = f"{trace.total:.4g} ± {trace.stderr:.2g}"
    print(
        f"| {name} | {gradient * 1e3:.0f} | {took / gradient:.0f} | {within / whole:.1%} | "
        f"{total} | {whole:.4g} | {rules} |"
    )
    print(f"<!-- {trace.notes[-1]} -->")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--samples", type=int, default=64)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    x, y = digits()
    print(
        "| network | gradient, ms | trace, gradients | of Σ Tr G within tolerance | Tr H | "
        "Tr G | by |\n|---|---|---|---|---|---|---|"
    )
    for name, build, steps in (("EfficientNet-like", Efficient, 200), ("ViT", Vision, 500)):
        torch.manual_seed(0)
        model = build()
        accuracy = train(model, x, y, steps)
        torch.set_num_threads(options.threads)
        report(
            f"{name}, accuracy {accuracy:.1%}", model, x[: options.samples], y[: options.samples]
        )


if __name__ == "__main__":
    main()
