"""Which measures predict the generalisation gap: one pool of networks, all measures, controls.

Written down before the pool was run:

**Data.** Fashion-MNIST: 2000 training images, drawn once and the same for all networks, and all
10000 test images, which keep their labels. Pixels are standardised.

**Grid**, all 576 combinations, one network each: 2 or 4 hidden layers of 128 or 384 ReLU units;
batches of 32 or 128; SGD with momentum 0.9 and a constant learning rate of 0.015 or 0.03; weight
decay 0 or 2e-4; plain, or as SAM (ρ = 0.05), or with FAM's penalty on the last layer (strength
0.005); images as they are, or flipped sideways with probability ½ each time; 0, 10 or 20 % of the
training labels exchanged among one another. Every network has its own initial weights, order of
samples and noise, by a seed made of its settings.

**Criterion.** After every epoch the mean cross-entropy on the network's own training set is
evaluated: its labels with their noise, images not flipped. Where it is at most 0.1 for the first
time the network is kept as it is. One that has not got there after 300 epochs, or whose loss is not
finite, never reached it: it is counted and shown, by hyperparameter, and is not measured. The
values above, the target and the number of epochs were chosen by the training losses of a few
networks in corners of the grid. (The learning rates were lowered last, because two networks of a
trial of the small size missed the target; the test accuracies of four of its networks had been
printed by then.)

**Gap.** Training accuracy (own labels) less test accuracy; beside it the test loss less the
training loss.

**Measures.** All of `saltflat.measures` but `bn_sharpness`, for there is no BatchNorm, on the first
1000 training samples with the network's own labels, in float64. **Controls** are those of
`controls.CONTROLS`, on all training samples.

**Statistics**, each with an interval over 500 bootstrap draws of networks: Kendall's τ_b with the
gap; the same over pairs with equal label noise; Ψ of every hyperparameter and their mean; τ and
Spearman's ρ, both partial given the weight norm; K, the least conditional mutual information given
at most two hyperparameters (100 draws). A measure is said to predict what an interval without 0
shows; of some 20 measures one interval in twenty misses by chance.
"""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import Any
from zlib import crc32

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import saltflat as sf
from saltflat.datasets import Data, fashion_mnist, noisy
from saltflat.measures import MEASURES
from saltflat.papers.experiment import Experiment, Size
from saltflat.papers.predictors.controls import controls
from saltflat.papers.predictors.ensemble import Recipe, network, train_until
from saltflat.papers.predictors.findings import draw, rows
from saltflat.sweep import Outcome, Settings, grid

TARGET = 0.1  # training loss
EPOCHS = 300
RHO = 0.05  # of SAM
STRENGTH = 0.005  # of FAM
MEASURED = 1000  # samples
NAMES = tuple(name for name in MEASURES if name != "bn_sharpness")
_TEST = 10_000


def runs(size: Size) -> Sequence[Settings]:
    """576 networks; 24 of them, on 1000 images and with fewer hyperparameters, for the small."""
    if size == "small":
        return grid(
            width=[64, 128],
            depth=[2],
            batch=[32],
            lr=[0.03],
            weight_decay=[2e-4],
            optimizer=["sgd", "sam", "fam"],
            augmentation=[False, True],
            noise=[0.0, 0.2],
            samples=[1000],
            seed=[0],
        )
    return grid(
        width=[128, 384],
        depth=[2, 4],
        batch=[32, 128],
        lr=[0.015, 0.03],
        weight_decay=[0.0, 2e-4],
        optimizer=["sgd", "sam", "fam"],
        augmentation=[False, True],
        noise=[0.0, 0.1, 0.2],
        samples=[2000],
        seed=[0],
    )


def together(settings: Settings) -> Hashable:
    """Networks of one shape, batch size and optimizer are trained at once."""
    return tuple(settings[name] for name in ("width", "depth", "batch", "optimizer", "samples"))


def work(settings: Sequence[Settings], device: torch.device) -> Sequence[Outcome]:
    """Train networks of one shape together, and measure those that reached the training loss."""
    shared: dict[str, Any] = dict(settings[0])
    data = _data(shared["samples"]).to(device)
    labels = torch.stack(
        [noisy(data.train_y, float(each["noise"] or 0), seed=_seed(each)) for each in settings]
    )
    models = [_initial(each, data.train_x[0].numel()).to(device) for each in settings]
    reached = train_until(
        models,
        data.train_x.flatten(0, 1),
        labels,
        _recipe(settings),
        batch=shared["batch"],
        target=TARGET,
        epochs=EPOCHS,
    )
    return [
        _outcome(model, data, own, epochs)
        for model, own, epochs in zip(models, labels, reached, strict=True)
    ]


@lru_cache
def _data(samples: int) -> Data:
    return fashion_mnist().standardised().first(samples, _TEST)


def _seed(settings: Settings) -> int:
    return crc32(json.dumps(dict(settings), sort_keys=True).encode())


def _initial(settings: Settings, inputs: int) -> nn.Sequential:
    shape: dict[str, Any] = dict(settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_seed(settings))
        return network(inputs, shape["width"], shape["depth"])


def _recipe(settings: Sequence[Settings]) -> Recipe:
    def numbers(name: str) -> Tensor:
        return torch.tensor([float(each[name] or 0) for each in settings])

    def where(optimizer: str, value: float) -> Tensor:
        return torch.tensor([value * (each["optimizer"] == optimizer) for each in settings])

    return Recipe(
        lr=numbers("lr"),
        weight_decay=numbers("weight_decay"),
        rho=where("sam", RHO),
        strength=where("fam", STRENGTH),
        augmented=numbers("augmentation") > 0,
        seeds=[_seed(each) for each in settings],
    )


def _outcome(model: nn.Module, data: Data, labels: Tensor, epochs: int | None) -> Outcome:
    """What is known of one network; measures only of one that reached the training loss."""
    train_loss, train_accuracy = _risk(model, data.train_x, labels)
    test_loss, test_accuracy = _risk(model, data.test_x, data.test_y)
    outcome: dict[str, Any] = {
        "epochs": epochs,
        "train_loss": train_loss,
        "train_accuracy": train_accuracy,
        "test_loss": test_loss,
        "test_accuracy": test_accuracy,
        "gap": train_accuracy - test_accuracy,
        "loss_gap": test_loss - train_loss,
    }
    if epochs is None:
        return outcome | {"predictors": {}, "errors": {}, "skipped": {}}
    report = sf.measure(
        model,
        (data.train_x[:MEASURED], labels[:MEASURED]),
        measures=NAMES,
        dtype=torch.float64,
        on_error="skip",
        standing=False,
        progress=False,
    )
    simple = controls(model, data.train_x, labels)
    simple |= {"training_loss": train_loss, "epochs": float(epochs)}
    values = {name: report[name].value if name in report else math.nan for name in NAMES}
    errors = {name: report[name].stderr for name in NAMES if name in report}
    skipped = dict(report.skipped)
    return outcome | {"predictors": values | simple, "errors": errors, "skipped": skipped}


@torch.no_grad()
def _risk(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
    """Mean loss and accuracy."""
    outputs = model(x)
    return float(F.cross_entropy(outputs, y)), float((outputs.argmax(1) == y).double().mean())


POOL = Experiment(
    name="predictors/pool",
    title="Which measures predict the generalisation gap, and what a weight norm does as well",
    paper="jiang2020fantastic",
    changed=(
        "The networks are MLPs on 2000 images of Fashion-MNIST, where the paper has convolutional "
        "networks on CIFAR-10 and SVHN.",
        "The grid has 576 combinations of eight hyperparameters, among them SAM, FAM and label "
        "noise; the paper has more than 10,000 networks and no label noise.",
        "Networks are stopped at a training loss of 0.1, where the paper stops at 0.01.",
        "Measures are taken on 1000 training samples.",
        "The margin enters as it is, where the paper has its inverse square.",
    ),
    runs=runs,
    work=work,
    rows=rows,
    draw=draw,
    together=together,
    most=24,
)
