"""SGD, SAM and FAM on digits with noisy labels: what they reach, as measured."""

from __future__ import annotations

from collections.abc import Callable
from statistics import mean, stdev

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn

import saltflat as sf
from saltflat.demo import Step, accuracy, network, samples, sgd, train
from saltflat.demo.random_labels import randomised

SEEDS = range(5)
NOISE = 0.25
EPOCHS = 40
WIDTHS = [64, 64, 32, 10]


def sam(model: nn.Module) -> Step:
    optimizer = sf.SAM(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), rho=0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        loss: Tensor = optimizer.step(closure)
        return loss

    return step


def fam(model: nn.Module) -> Step:
    last = [name for name, m in model.named_modules() if isinstance(m, nn.Linear)][-1]
    return sgd(model, sf.FAM(model, last, strength=1e-3))


METHODS: dict[str, Callable[[nn.Module], Step]] = {
    "SGD": sgd,
    "SAM, ρ = 0.1": sam,
    "FAM, strength 1e-3": fam,
}


def run(console: Console) -> None:
    train_x, train_y, test_x, test_y = samples()
    view = Table(title=f"{NOISE:.0%} of the training labels are random", title_justify="left")
    for column in ("trained with", "test accuracy", "train accuracy", "minimum sharpness"):
        view.add_column(column, justify="left" if column == "trained with" else "right")
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("training", total=len(METHODS) * len(SEEDS))
        for name, make in METHODS.items():
            rows = []
            for seed in SEEDS:
                labels = randomised(train_y, NOISE, seed)
                model = network(WIDTHS, seed)
                train(model, train_x, labels, make(model), epochs=EPOCHS, seed=seed)
                report = sf.measure(
                    model, (train_x, labels), measures=["minimum_sharpness"], progress=False
                )
                right = accuracy(model, test_x, test_y), accuracy(model, train_x, labels)
                rows.append((*right, report["minimum_sharpness"].value))
                progress.advance(task)
            tested, trained, sharp = zip(*rows, strict=True)
            view.add_row(name, _spread(tested, 100), _spread(trained, 100), _spread(sharp, 1))
    console.print(view)
    console.print(f"Means over {len(SEEDS)} seeds ± standard error, {EPOCHS} epochs each.\n")


def _spread(values: tuple[float, ...], factor: float) -> str:
    unit = " %" if factor == 100 else ""
    error = factor * stdev(values) / len(values) ** 0.5
    return f"{factor * mean(values):.4g} ± {error:.2g}{unit}"
