"""What both experiments share: networks trained by SGD, and how well they generalise."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import inf, isfinite, nan
from typing import Any

import numpy as np
import torch
from torch import nn

from saltflat.datasets import Data
from saltflat.papers.columns import column, largest, mean_row
from saltflat.papers.experiment import Row
from saltflat.papers.random_labels import Order, scores
from saltflat.papers.reparameterization.product import with_products
from saltflat.sweep import Run, Settings, train_together


def alike(settings: Settings) -> Hashable:
    """Networks that differ in how they start alone can be trained together."""
    return tuple(value for name, value in settings.items() if name not in ("start", "seed"))


def train(models: Sequence[nn.Module], settings: Sequence[Settings], data: Data) -> None:
    """By SGD at a constant rate: on a GPU all at once, on the CPU one after the other."""
    if data.train_x.is_cuda:
        _train([with_products(model) for model in models], settings, data)
        return
    for model, each in zip(models, settings, strict=True):
        _train([model], [each], data)


def _train(models: Sequence[nn.Module], settings: Sequence[Settings], data: Data) -> None:
    first: Any = settings[0]
    x, y = data.train_x, data.train_y
    order = Order([int(s["seed"]) for s in settings], len(x), first["batch"], x.device)  # type: ignore[arg-type]
    steps = first["epochs"] * order.epoch_steps
    rate = torch.tensor(first["lr"], device=x.device)
    labels = y.expand(len(models), -1)
    train_together(
        models, x, labels, order, steps, lr=lambda step: rate, momentum=first["momentum"]
    )


def generalisation(model: nn.Module, data: Data) -> dict[str, Any]:
    """Losses and accuracies, the gap being that of the losses."""
    result = scores(model, data)
    return {**result, "gap": result["test_loss"] - result["train_loss"]}


def finite(outcome: dict[str, Any]) -> bool:
    return isfinite(outcome["train_loss"]) and isfinite(outcome["test_loss"])


def largest_change(runs: Sequence[Run], before: str, after: str) -> float:
    """Of |after / before − 1| over the networks that were measured before, but for 0 that stays 0.

    NaN where one could not be measured after.
    """
    pairs = [(float(run[before]), float(run[after])) for run in runs]
    found = [abs(b / a - 1) if a else inf for a, b in pairs if isfinite(a) and (a or b)]
    return largest(found or [nan])


def reached(runs: Sequence[Run]) -> list[Row]:
    """The loss that training came down to, for each batch size."""
    return [
        _mean(f"training loss, batch size {batch}", [r for r in runs if r["batch"] == batch])
        for batch in sorted({int(run["batch"]) for run in runs})
    ]


def _mean(what: str, runs: Sequence[Run]) -> Row:
    losses = np.array(column(runs, "train_loss"))
    some = losses[np.isfinite(losses)]
    lost = f"{len(some)} of {len(runs)} networks, the others diverged"
    note = lost if len(some) < len(runs) else ""
    return mean_row(what, some.tolist(), note=note)
