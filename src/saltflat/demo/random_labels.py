"""Networks trained on partly random labels: which measure knows how badly they generalise?

After Tsuzuku et al. 2020, section 6, on a small scale: the more labels are random, the larger the
gap between training and test accuracy. Every measure is ranked against that gap.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from scipy.stats import kendalltau
from torch import Tensor

import saltflat as sf
from saltflat.demo import accuracy, network, samples, sgd, train

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
SEEDS = (0, 1, 2)
WIDTHS = [64, 128, 64, 10]
RESAMPLES = 2000


def randomised(y: Tensor, share: float, seed: int) -> Tensor:
    """The labels with a share of them replaced by random ones."""
    generator = torch.Generator().manual_seed(1000 + seed)
    replaced = torch.rand(len(y), generator=generator) < share
    return torch.where(replaced, torch.randint(10, y.shape, generator=generator), y)


def rank_correlation(
    values: Sequence[float], gaps: Sequence[float]
) -> tuple[float, tuple[float, float]]:
    """Kendall's τ and its 95 % interval, by resampling the networks."""
    v, g = np.asarray(values), np.asarray(gaps)
    generator = np.random.default_rng(0)
    draws: list[float] = []
    for _ in range(RESAMPLES):
        rows = generator.integers(len(v), size=len(v))
        draws.append(float(kendalltau(v[rows], g[rows]).statistic))
    low, high = np.nanquantile(np.array(draws), [0.025, 0.975])
    return float(kendalltau(v, g).statistic), (float(low), float(high))


def run(console: Console) -> None:
    train_x, train_y, test_x, test_y = samples()
    rows: list[tuple[float, float, sf.Report]] = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("training and measuring", total=len(SHARES) * len(SEEDS))
        for share in SHARES:
            for seed in SEEDS:
                labels = randomised(train_y, share, seed)
                model = network(WIDTHS, seed)
                step, done = sgd(model), lambda loss: loss < 0.01
                train(model, train_x, labels, step, epochs=300, seed=seed, stop=done)
                gap = accuracy(model, train_x, labels) - accuracy(model, test_x, test_y)
                data = train_x, labels
                report = sf.measure(model, data, measures="all", progress=False, seed=seed)
                rows.append((share, gap, report))
                progress.advance(task)
    console.print(table(rows))
    console.print(
        "Gap: training accuracy on the labels trained with, minus test accuracy on true ones. "
        "τ: Kendall's rank\ncorrelation over the 15 networks, with a 95 % interval by resampling "
        "them. One small experiment on one data\nset, as it came out: not enough to choose a "
        "measure by.\n"
    )


def table(rows: Sequence[tuple[float, float, sf.Report]]) -> Table:
    """Means over seeds for every share of random labels, and rank correlations over all."""
    view = Table(title="Means over three seeds; random labels:", title_justify="left")
    view.add_column("measure", no_wrap=True)
    for share in SHARES:
        view.add_column(f"{share:.0%}", justify="right", no_wrap=True)
    view.add_column("τ with gap", justify="right", no_wrap=True)
    view.add_column("invariant to", no_wrap=True)
    gaps = [gap for _, gap, _ in rows]
    view.add_row("generalization gap", *_means(rows, np.array(gaps)), "", "")
    view.add_section()
    last = rows[-1][2]
    for name, measurement in last.items():
        values = np.array([report[name].value for _, _, report in rows])
        tau, (low, high) = rank_correlation(list(values), gaps)
        interval = f"{tau:+.2f} [{low:+.2f}, {high:+.2f}]"
        view.add_row(name, *_means(rows, values), interval, _short(measurement))
    for name in last.skipped:
        view.add_row(name, *["–"] * len(SHARES), "", "not defined")
    return view


def _short(measurement: sf.Measurement) -> str:
    kinds = sf.report.invariance(measurement.invariant_to)
    return {"every rescaling": "all", "layer, batchnorm": "layers"}.get(
        kinds, kinds.replace("layer", "layers")
    )


def _means(
    rows: Sequence[tuple[float, float, sf.Report]], values: NDArray[np.float64]
) -> list[str]:
    shares = np.array([share for share, _, _ in rows])
    return [f"{values[shares == share].mean():.3g}" for share in SHARES]
