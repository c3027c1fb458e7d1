"""Adaptive rank on trained networks: what a tolerance costs, and whether its errors hold.

    python -m bench.adaptive [--networks 50 --tolerance 1e-3 --threads 1 --mnist]

Networks are trained until at least 99 % of the training samples are right, each from a seed of its
own: multilayer perceptrons and convolutional networks, on scikit-learn's digits (10 classes) and on
Gaussian clusters (100 classes). Of each, the exact trace and the one within the tolerance are taken
in the same run: the mixes of a sample's directions that were sent backwards, as a share of all
pairs of a sample and a direction, the prices in gradients as `Report.provenance` counts them, and
the fastest of some runs each, which take turns: five, or two of the larger networks. z is error
over standard error, of the sum and of every block whose error is more than rounding. With `--mnist`
two larger networks come to them, on 10,000 images, which are looked for as `saltflat.datasets`
does.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from time import process_time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import saltflat as sf
from bench.curved import digits
from saltflat.curvature.sweep import direction_price
from saltflat.datasets import mnist
from saltflat.work import FORWARD

Data = tuple[Tensor, Tensor]


def clusters(classes: int, samples: int, seed: int) -> Data:
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, 64, generator=generator)
    y = torch.randint(classes, (samples,), generator=generator)
    return centres[y] + 0.6 * torch.randn(samples, 64, generator=generator), y


def mlp(inputs: int, width: int, classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, classes),
    )


def cnn(side: int, classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, side, side)),
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * side * side, classes),
    )


def train(model: nn.Module, data: Data, accuracy: float = 0.99) -> float:
    """To the accuracy on the training samples."""
    x, y = data
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(200):
        for rows in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
        with torch.no_grad():
            reached = float((model(x).argmax(1) == y).float().mean())
        if reached >= accuracy:
            return reached
    raise AssertionError(f"only {reached:.3f} of the samples are right")


@dataclass
class Row:
    """One network, or several alike."""

    name: str
    accuracy: list[float] = field(default_factory=list)
    pairs: list[float] = field(default_factory=list)  # mixes that were sent, as a share
    work: list[float] = field(default_factory=list)  # gradients, as a share of the exact pass's
    time: list[float] = field(default_factory=list)  # the same
    errors: list[float] = field(default_factory=list)  # standard error over value
    totals: list[float] = field(default_factory=list)  # z
    blocks: list[float] = field(default_factory=list)

    def add(
        self, model: nn.Module, data: Data, tolerance: float, seed: int, repeats: int = 5
    ) -> None:
        self.accuracy.append(train(model, data))
        (exact, found), (alone, shorter) = _timed(
            lambda: sf.trace(model, data, progress=False),
            lambda: sf.trace(model, data, tolerance=tolerance, seed=seed, progress=False),
            repeats=repeats,
        )
        self.time.append(shorter / alone)
        directions = exact_price(len(model(data[0][:1])[0]) - 1)
        self.work.append(_gradients(model, data, tolerance) / directions)
        sent, every = re.findall(r"(\d+) mixes for (\d+) pairs", " ".join(found.notes))[0]
        self.pairs.append(int(sent) / int(every))
        self.errors.append(found.stderr / found.total)
        self.totals.append((found.total - exact.total) / found.stderr)
        for name, detail in found.details.items():
            if float(detail.stderr) > 1e-6 * detail.value:
                self.blocks.append((detail.value - exact[name]) / float(detail.stderr))

    def cells(self) -> Iterable[str]:
        yield self.name
        yield str(len(self.totals))
        yield f"{min(self.accuracy):.1%}"
        for shares in (self.pairs, self.work, self.time):
            yield f"{fmean(shares):.3f} ({max(shares):.3f})"
        yield f"{fmean(self.errors):.1e}"
        yield _held(self.totals)
        yield _held(self.blocks)


def _held(z: list[float]) -> str:
    within = sum(abs(each) <= 2 for each in z)
    return f"{within} of {len(z)}, {fmean(each**2 for each in z) ** 0.5:.2f}"


def _timed(*calls: Callable[[], sf.Trace], repeats: int) -> tuple[list[sf.Trace], list[float]]:
    """What some calls return, and the least processor time that each took; they take turns."""
    seconds: list[list[float]] = [[] for _ in calls]
    results: list[sf.Trace] = []
    for _ in range(repeats):
        results = []
        for call, taken in zip(calls, seconds, strict=True):
            start = process_time()
            results.append(call())
            taken.append(process_time() - start)
    return results, [min(taken) for taken in seconds]


def exact_price(directions: int) -> float:
    """Of a sweep, in gradients."""
    return FORWARD + directions * direction_price(frozenset({"trace"}))


def _gradients(model: nn.Module, data: Data, tolerance: float) -> float:
    names = ["hessian_trace"]
    report = sf.measure(model, data, measures=names, tolerance=tolerance, standing=False)
    return report.provenance.gradients["curvature"]


NETWORKS = (
    "MLP 64-256-256-10, n = 1797",
    "CNN 16-32, K = 10, n = 1797",
    "MLP 64-256-256-100, n = 2000",
    "CNN 16-32, K = 100, n = 1000",
)
# Of ten networks, four and four perceptrons, one and one convolutional network.
ORDER = 0, 2, 0, 2, 0, 2, 0, 2, 1, 3


def small(networks: int, tolerance: float) -> list[Row]:
    rows = [Row(name) for name in NETWORKS]
    for seed in range(networks):
        torch.manual_seed(seed)
        kind = ORDER[seed % 10]
        classes = 10 if kind < 2 else 100
        x, y = digits() if kind < 2 else clusters(classes, 2000 if kind == 2 else 1000, seed)
        model = cnn(8, classes) if kind % 2 else mlp(64, 256, classes)
        rows[kind].add(model, (x.flatten(1), y), tolerance, seed)
    return [row for row in rows if row.totals]


def large(tolerance: float) -> list[Row]:
    found = mnist().first(10_000, 1)
    data = found.train_x.flatten(1), found.train_y
    rows = [Row("MLP 784-512-512-10, n = 10,000"), Row("CNN 16-32, 28 × 28, n = 10,000")]
    for row, make in zip(rows, (partial(mlp, 784, 512), partial(cnn, 28)), strict=True):
        torch.manual_seed(0)
        row.add(make(10), data, tolerance, 0, repeats=2)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", type=int, default=50)
    parser.add_argument("--tolerance", type=float, default=1e-3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--mnist", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = small(options.networks, options.tolerance) if options.networks else []
    if options.mnist:
        rows += large(options.tolerance)
    print(f"tolerance={options.tolerance:g}, {options.threads} CPU thread, {torch.__version__}.")
    print("Shares of the exact pass: mean (largest). Held: |z| ≤ 2, and the rms of z.\n")
    print("| network | networks | accuracy | mixes | gradients | time | s.e. | sums | blocks |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        print("| " + " | ".join(row.cells()) + " |")
    print(f"\nAll sums: {_held([each for row in rows for each in row.totals])}.")


if __name__ == "__main__":
    main()
