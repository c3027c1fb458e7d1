"""How often the intervals of samples="auto" hold the value on all samples, and what they cost.

    python -m bench.subsamples [--runs 200 --mnist FOLDER --populations]

Traces of single samples come from one exact sweep over each network's training data; the runs then
draw their parts of these by the same classes as `sf.trace` does, each with a seed of its own.
"Naive" looks at every 32 samples and stops when 1.96 standard errors are small enough. Last come
whole calls of `sf.measure`, of several measures. With `--populations` the traces are 20,000 random
numbers: what skewed and rare samples do to the rule.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from math import sqrt
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

import saltflat as sf
from saltflat.curvature import Curvature
from saltflat.datasets import digits, mnist
from saltflat.risk import Risk
from saltflat.subsample import Part, Population, Rule, grown

TOLERANCES = 0.25, 0.1, 0.05
NAMES = "hessian_trace", "minimum_sharpness", "rho", "fisher_rao_norm"


def network(inputs: int, widths: Sequence[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in widths:
        layers += [nn.Linear(inputs, width), nn.ReLU()]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, 10))


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int) -> None:
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    for _ in range(epochs):
        for part in torch.randperm(len(x)).split(128):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[part]), y[part]).backward()
            optimizer.step()


def cases(folder: str | None) -> Iterator[tuple[str, nn.Module, tuple[Tensor, Tensor]]]:
    small, large = digits(), mnist(folder)
    x, y = large.train_x.flatten(1), large.train_y
    for name, samples, targets, widths, epochs in (
        ("digits, 60 epochs", small.train_x, small.train_y, [32], 60),
        ("MNIST, 0 epochs", x, y, [20, 20], 0),
        ("MNIST, 1 epoch", x, y, [20, 20], 1),
        ("MNIST, 5 epochs", x, y, [20, 20], 5),
        ("10,000 of MNIST, 40 epochs", x[:10_000], y[:10_000], [64, 64], 40),
    ):
        torch.manual_seed(0)
        model = network(samples.shape[1], widths)
        train(model, samples, targets, epochs)
        yield name, model, (samples, targets)


def single(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    """The trace of every sample."""
    risk = Risk(model, data)
    with risk.session():
        spread = Curvature(risk).find(frozenset({"trace"})).quantities["trace"].spread
    assert spread is not None
    return torch.cat(spread._rows).sum(1)


def part(values: Tensor) -> Part:
    centred = values - values.mean()
    skewness = float(centred.pow(3).mean() / centred.square().mean() ** 1.5)
    return Part(float(values.mean()), float(values.std()) / sqrt(len(values)), skewness)


def drawn(values: Tensor, tolerance: float, seed: int) -> tuple[bool, float]:
    """Whether the interval holds the mean, and the samples that all looks took, of all."""
    rule, spent = Rule(len(values), tolerance), 0

    def look(data: Any) -> tuple[Part, list[Part]]:
        nonlocal spent
        spent += len(data[0][0])
        found = part(data[0][0])
        return found, [found]

    found = grown(Population((values, values), None, seed), rule, look)
    if found is None:
        return True, (spent + len(values)) / len(values)
    low, high = rule.interval(*found)
    return low <= float(values.mean()) <= high, spent / len(values)


def naive(values: Tensor, tolerance: float, seed: int) -> tuple[bool, float]:
    generator = torch.Generator().manual_seed(seed)
    values = values[torch.randperm(len(values), generator=generator)]
    sizes = torch.arange(32, len(values), 32)
    means = values.cumsum(0)[sizes - 1] / sizes
    squares = values.square().cumsum(0)[sizes - 1] / sizes
    errors = ((squares - means.square()) / (sizes - 1)).clamp(min=0).sqrt()
    stops = (1.96 * errors <= 2 * tolerance * means).nonzero()
    k = int(stops[0]) if len(stops) else len(sizes) - 1
    holds = bool((means[k] - values.mean()).abs() <= 1.96 * errors[k])
    return holds, int(sizes[k]) / len(values)


def row(name: str, size: int, skewness: float, tolerance: float, *runs: Any) -> None:
    cells = [f"{name} | {size:,} | {skewness:.1f} | {100 * tolerance:g} %"]
    for each in runs:
        holds, shares = zip(*each, strict=True)
        used = float(f"{100 * fmean(shares):.2g}")
        cells.append(f"{sum(holds)} of {len(holds)} | {used:g} %")
    print(f"| {' | '.join(cells)} |", flush=True)


def whole(name: str, model: nn.Module, data: tuple[Tensor, Tensor], runs: int) -> None:
    """Calls of `sf.measure`."""
    truth = sf.measure(model, data, measures=NAMES, standing=False, progress=False)
    found: dict[str, list[tuple[bool, float]]] = {n: [] for n in NAMES}
    skewness: dict[str, float] = {n: truth[n].skewness or 0.0 for n in NAMES}
    for seed in range(runs):
        options: Any = {"measures": NAMES, "samples": "auto", "tolerance": 0.25, "seed": seed}
        report = sf.measure(model, data, standing=False, progress=False, **options)
        for n, m in report.items():
            low, high = m.interval or (m.value, m.value)
            holds = m.interval is None or low <= truth[n].value <= high
            found[n].append((holds, report.provenance.samples / len(data[0])))
    for n in NAMES:
        row(f"`{n}`, {name}", len(data[0]), skewness[n], 0.25, found[n])


def populations() -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    normal = torch.randn(20_000, generator=generator, dtype=torch.float64)
    for sigma in (1, 2, 3):
        yield f"lognormal, σ = {sigma}", (sigma * normal).exp()
    near = 0.9 + 0.2 * torch.rand(20_000, generator=generator, dtype=torch.float64)
    for rare, share in ((200, 0.9), (20, 0.5)):
        others = torch.arange(20_000) >= rare
        size = share / (1 - share) * (20_000 - rare) / rare
        yield (
            f"{rare / 20_000:.1%} of the samples hold {share:.0%}, the others agree to ±10 %",
            near * torch.where(others, 1.0, size),
        )


def table(name: str, values: Tensor, runs: int) -> None:
    for tolerance in TOLERANCES:
        found = [[rule(values, tolerance, seed) for seed in range(runs)] for rule in (drawn, naive)]
        row(name, len(values), part(values).skewness, tolerance, *found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--mnist")
    parser.add_argument("--populations", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("| network | samples | skewness | tolerance | held | samples used | naive: held | used |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    if arguments.populations:
        for name, values in populations():
            table(name, values, arguments.runs)
        return
    for name, model, data in cases(arguments.mnist):
        table(name, single(model, data), arguments.runs)
        last = name, model, data
    print("\n| measure | samples | skewness | tolerance | held | samples used |")
    print("|---|--:|--:|--:|--:|--:|")
    whole(*last, arguments.runs)


if __name__ == "__main__":
    main()
