"""Table 1: test accuracy of plain SGD, SAM and FAM, of networks that are trained from scratch.

The paper trains ResNet-18 on CIFAR-10 for 250 epochs, in batches of 64, with momentum 0.9, weight
decay 5e-4, a learning rate that falls from 0.03 along a cosine, random crops and mirror images; FAM
has λ = 0.1. On Fashion-MNIST it trains WideResNet28-10 for 200 epochs. Here both are ResNet-18 and
the trainings are short, so that five seeds of every method fit into half an hour of one GPU: what
can be compared are the differences between the methods, which are taken seed by seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Generator, Tensor, nn
from torch.optim import SGD, Optimizer

import saltflat as sf
from saltflat import zoo
from saltflat.datasets import Data, cifar10, compose, crop, cutout, fashion_mnist, flip
from saltflat.papers.columns import column, differences, draw_seeds, mean_row
from saltflat.papers.experiment import Experiment, Row, Size
from saltflat.papers.trained import accuracy, fit, mean_loss, one_cycle
from saltflat.sweep import Outcome, Run, Settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# What a method adds to SGD; the paper has λ = 0.1 for FAM.
METHODS: dict[str, Settings] = {
    "SGD": {},
    "SAM, ρ 0.05": {"rho": 0.05},
    "FAM, share 0.05": {"share": 0.05},
    "FAM, strength 0.001": {"strength": 1e-3},
}
# By the number of channels of the images.
NETWORKS: dict[str, Callable[[int], nn.Sequential]] = {
    "ResNet-18": zoo.resnet18,
    "LeNet-5": zoo.lenet5,
}
_SEEN = 10_000  # training images that the training loss is taken on, without augmentation
_MEASURED = 5000  # and the relative flatness


@final
@dataclass(frozen=True)
class Task:
    """A row of the table: the data, what the paper had, and how long is trained here."""

    title: str
    load: Callable[[], Data]
    augment: Callable[[Tensor, Generator], Tensor]
    published: Mapping[str, float]  # by the first word of a method
    there: str  # the network and its training there
    full: Settings
    small: Settings


TASKS = {
    "cifar10": Task(
        "CIFAR-10",
        cifar10,
        compose(crop(4), flip()),
        {"SGD": 95.53, "SAM": 95.61, "FAM": 95.62},
        "ResNet-18, 250 epochs",
        {"network": "ResNet-18", "train": 50_000, "test": 10_000, "epochs": 15, "lr": 0.2},
        {"network": "LeNet-5", "train": 2000, "test": 2000, "epochs": 12, "lr": 0.05},
    ),
    "fashion_mnist": Task(
        "Fashion-MNIST",
        fashion_mnist,
        cutout(14),
        {"SGD": 94.57, "SAM": 94.99, "FAM": 94.60},
        "WideResNet28-10, 200 epochs",
        {"network": "ResNet-18", "train": 60_000, "test": 10_000, "epochs": 10, "lr": 0.2},
        {"network": "LeNet-5", "train": 2000, "test": 2000, "epochs": 12, "lr": 0.05},
    ),
}


def runs(data: str, size: Size) -> list[Settings]:
    """Seed by seed, so that what is cut short holds whole seeds."""
    task = TASKS[data]
    common: Settings = (
        {**task.full, "batch": 256} if size == "full" else {**task.small, "batch": 64}
    )
    return [
        {"data": data, **common, "method": method, "seed": seed, **METHODS[method]}
        for seed in range(5)
        for method in METHODS
    ]


def work(settings: Sequence[Settings], device: torch.device) -> list[Outcome]:
    return [_trained(each, device) for each in settings]


def _trained(settings: Mapping[str, Any], device: torch.device) -> Outcome:
    """One network, trained and looked at."""
    data = _load(settings["data"], settings["train"], settings["test"], device)
    with torch.random.fork_rng([]):
        torch.manual_seed(settings["seed"])
        model = NETWORKS[settings["network"]](data.train_x.shape[1]).to(device)
    *_, (last, _) = model.named_children()
    strength, share = settings.get("strength"), settings.get("share")
    regularized = strength is not None or share is not None
    fam = sf.FAM(model, last, strength, share=share) if regularized else None
    with fam or nullcontext():
        history = fit(
            model,
            data,
            epochs=settings["epochs"],
            batch=settings["batch"],
            optimizer=partial(_optimizer, lr=settings["lr"], rho=settings.get("rho", 0.0)),
            schedule=one_cycle(),
            augment=TASKS[settings["data"]].augment,
            penalty=fam,
            seed=settings["seed"],
            fast=True,
        )
    train, test = (data.train_x[:_SEEN], data.train_y[:_SEEN]), (data.test_x, data.test_y)
    train_loss = mean_loss(model, *train)
    return {
        "accuracy": accuracy(model, *test),
        "test_loss": mean_loss(model, *test),
        "train_accuracy": accuracy(model, *train),
        "train_loss": train_loss,
        "relative_flatness": _flatness(model, *train) if math.isfinite(train_loss) else math.nan,
        "losses": list(history.losses),
        "seconds_of_training": history.seconds,
    }


def _optimizer(model: nn.Module, lr: float, rho: float) -> Optimizer:
    base = SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=5e-4)
    return sf.SAM(base, rho=rho) if rho else base


def _flatness(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Of the last layer, exact, in float32."""
    some = x[:_MEASURED], y[:_MEASURED]
    report = sf.measure(
        model.eval(), some, measures=["relative_flatness"], standing=False, progress=False
    )
    return report["relative_flatness"].value


@lru_cache(maxsize=1)
def _load(name: str, train: int, test: int, device: torch.device) -> Data:
    return TASKS[name].load().first(train, test).standardised().to(device)


def rows(runs: Sequence[Run]) -> list[Row]:
    """Accuracies, their differences to SGD seed by seed, and the flatness that came with them."""
    task = TASKS[runs[0]["data"]]
    by_method = _by_method(runs)
    table = []
    for method, some in by_method.items():
        what = f"{task.title}, {method}: test accuracy, %"
        note = f"here {_here(some)}; there {task.there}"
        table.append(mean_row(what, column(some, "accuracy"), _published(task, method), note))
    for method, some in by_method.items():
        if method != "SGD" and "SGD" in by_method:
            what = f"{task.title}, {method}: more than SGD's accuracy, points"
            gain = round(_published(task, method) - task.published["SGD"], 2)
            found = differences(some, by_method["SGD"], "accuracy")
            table.append(mean_row(what, found, gain, "differences of the same seed"))
    for method, some in by_method.items():
        what = f"{task.title}, {method}: relative flatness of the last layer"
        table.append(mean_row(what, column(some, "relative_flatness"), None, _here(some)))
    return table


def _here(runs: Sequence[Run]) -> str:
    first = runs[0]
    images = f"{first['train']:,} images"
    return f"{first['network']}, {images}, {first['epochs']} epochs, {len(runs)} seeds"


def _published(task: Task, method: str) -> float:
    return task.published[method[:3]]


def _by_method(runs: Sequence[Run]) -> dict[str, list[Run]]:
    found = {method: [run for run in runs if run["method"] == method] for method in METHODS}
    return {method: some for method, some in found.items() if some}


def draw(runs: Sequence[Run]) -> Figure:
    """Every seed as a point, means with their standard errors, and the paper's accuracies."""
    from matplotlib.figure import Figure

    task, by_method = TASKS[runs[0]["data"]], _by_method(runs)
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    panels = figure.subplots(1, 2)
    for axes, name in zip(panels, ("accuracy", "relative_flatness"), strict=True):
        for place, some in enumerate(by_method.values()):
            draw_seeds(axes, place, column(some, name), f"C{place}")
        labels = [method.replace(", ", "\n") for method in by_method]
        axes.set_xticks(range(len(by_method)), labels, fontsize=8)
        axes.set_xlim(-0.6, len(by_method) - 0.4)
    for place, method in enumerate(by_method):
        label = "published" if place == 0 else None
        panels[0].plot(place, _published(task, method), "D", mfc="none", c="black", label=label)
    panels[0].set_ylabel("test accuracy, %")
    panels[0].legend(loc="best", fontsize=8)
    panels[1].set_ylim(bottom=0)
    panels[1].set_ylabel("relative flatness of the last layer")
    figure.suptitle(f"{task.title}: {_here(next(iter(by_method.values())))} (lines: mean ± s.e.)")
    return figure


_CHANGED = (
    "OneCycle of {epochs} epochs in batches of 256, learning rate 0.2, in bfloat16 autocast; the "
    "paper trains {there} in batches of 64.",
    "SAM has the learning rate of the others; the paper gives it 0.01 on CIFAR-10.",
    "FAM is run with a share and with a strength of 0.001 instead of λ = 0.1: the public code of "
    "the paper leaves the derivative of the Hessian out and indexes the wrong axes of it, so that "
    "its λ means something else.",
    'The paper applies FAM to the "penultimate layer". This is taken for the weights behind the '
    "penultimate representation, those of the last linear layer.",
    "The small size trains LeNet-5 on 2,000 images, in float32: OneCycle of 12 epochs in batches "
    "of 64, learning rate 0.05.",
)
_CIFAR = ("The paper's learning rate falls from 0.03 along a cosine.",)
_FASHION = (
    "The paper's learning rate falls from 0.01 in three steps, by 0.2 each.",
    "ResNet-18 in place of WideResNet28-10 with one more layer of 64 units.",
    "Images keep their 28 × 28 pixels and their one channel, and are standardised where the paper "
    "normalises by 0.5; the square that is cut out has 14 pixels where the paper's has 16 of 32.",
)


def _experiment(
    name: str, data: str, changed: Sequence[str], minutes: Mapping[Size, float]
) -> Experiment:
    task = TASKS[data]
    return Experiment(
        name=f"relative-flatness/{name}",
        title=f"Table 1: {task.title} with SGD, SAM and FAM",
        paper="adilova2023fam",
        changed=[
            *(each.format(epochs=task.full["epochs"], there=task.there) for each in _CHANGED),
            *changed,
        ],
        runs=partial(runs, data),
        work=work,
        rows=rows,
        draw=draw,
        minutes=minutes,
    )


TABLE_1 = _experiment("table-1", "cifar10", _CIFAR, {"small": 4, "full": 20})
TABLE_1_FASHION_MNIST = _experiment(
    "table-1-fashion-mnist", "fashion_mnist", _FASHION, {"small": 3, "full": 14}
)
