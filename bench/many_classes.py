"""A thousand classes: traces to a tolerance by random mixes of directions, against all of them.

    python -m bench.many_classes [--networks 25 --seeds 4 --samples 512]

Networks are trained for some epochs on clusters, one a class. The table says how often 95 %
intervals (Student's, with the stated degrees of freedom) hold the exact trace, the root mean square
of errors relative to it, how many of the traces were drawn and not exact, and what a trace costs
against the exact one: in gradients at fixed prices, and in time, both inside this run.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator
from statistics import fmean, median
from time import process_time

import torch
from scipy.stats import t as student
from torch import Tensor, nn

import saltflat as sf

CLASSES, INPUTS, WIDTH = 1000, 24, 48
EPOCHS = 0, 1, 3, 10, 30
Data = tuple[Tensor, Tensor]


def clusters(size: int, generator: torch.Generator, centres: Tensor) -> Data:
    y = torch.randint(CLASSES, (size,), generator=generator)
    return centres[y] + 0.5 * torch.randn(size, INPUTS, generator=generator), y


def networks(count: int, samples: int) -> Iterator[tuple[int, nn.Module, Data]]:
    """(epochs, network, data that it is measured on)"""
    for seed in range(count):
        torch.manual_seed(seed)
        generator = torch.Generator().manual_seed(seed)
        centres = torch.randn(CLASSES, INPUTS, generator=generator)
        x, y = clusters(10_000, generator, centres)
        layers = nn.Linear(INPUTS, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES)
        model, epochs = nn.Sequential(*layers), EPOCHS[seed % len(EPOCHS)]
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        for _ in range(epochs):
            for part in torch.randperm(len(x), generator=generator).split(500):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x[part]), y[part]).backward()
                optimizer.step()
        yield epochs, model, (x[:samples], y[:samples])


def measured(
    model: nn.Module, data: Data, tolerance: float | None, seed: int
) -> tuple[sf.Measurement, float, float]:
    """The trace, gradients, seconds."""
    start = process_time()
    options = {"measures": ["hessian_trace"], "standing": False, "progress": False}
    report = sf.measure(model, data, tolerance=tolerance, seed=seed, **options)  # type: ignore[arg-type]
    seconds = process_time() - start
    return report["hessian_trace"], sum(report.provenance.gradients.values()), seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--networks", type=int, default=25)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    warnings.simplefilter("ignore")
    rows: dict[tuple[float, str], list[tuple[bool, float, float, float]]] = {}
    exact_runs: dict[tuple[float, str], int] = {}
    for epochs, model, data in networks(arguments.networks, arguments.samples):
        truth, price, whole = measured(model, data, None, 0)
        for tolerance in (0.01, 0.001):
            for seed in range(arguments.seeds):
                found, gradients, seconds = measured(model, data, tolerance, seed)
                for key in ((tolerance, f"{epochs}"), (tolerance, "all")):
                    exact_runs[key] = exact_runs.get(key, 0) + found.exact
                    error = abs(found.value - truth.value)
                    holds = found.exact or error <= found.stderr * student.ppf(0.975, found.degrees)
                    line = holds, error / truth.value, gradients / price, seconds / whole
                    rows.setdefault(key, []).append(line)
    print("| tolerance | epochs | runs | held | rms error | drawn | gradients | time |")
    print("|--:|--:|--:|--:|--:|--:|--:|--:|")
    for (tolerance, epochs_), lines in sorted(rows.items(), key=lambda item: -item[0][0]):
        holds, errors, gradients_, times = zip(*lines, strict=True)
        rms = fmean(e**2 for e in errors) ** 0.5
        drawn = len(lines) - exact_runs[tolerance, epochs_]
        print(
            f"| {100 * tolerance:g} % | {epochs_} | {len(lines)} | {sum(holds)} | "
            f"{100 * rms:.2g} % | {drawn} | 1/{1 / median(gradients_):.1f} | "
            f"1/{1 / median(times):.1f} |"
        )
    print(f"\nExact: {price:.0f} gradients on {arguments.samples} samples.")


if __name__ == "__main__":
    main()
