"""One network trained and tested: what the experiments with larger networks share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from time import perf_counter
from typing import final

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.optim import Optimizer

import saltflat as sf
from saltflat.datasets import Batches, Data

Loss = Callable[[Tensor, Tensor], Tensor]
# Of the part of the training that is done, from 0 to 1: what the learning rate is multiplied by.
Schedule = Callable[[float], float]
Pair = tuple[Tensor, Tensor]  # inputs and targets of a batch
_STREAM = 1_000_003  # between the seeds of orders that have nothing to do with each other


def one_cycle(warm: float = 0.25) -> Schedule:
    """Linearly up for the part `warm` of the training, then down to zero along a cosine."""

    def factor(done: float) -> float:
        return done / warm if done < warm else cosine((done - warm) / (1 - warm))

    return factor


def cosine(done: float) -> float:
    """Down from 1 to 0 along half a cosine."""
    return (1 + math.cos(math.pi * done)) / 2


def decays(*at: float, by: float) -> Schedule:
    """Multiplied by `by` after each of the parts `at` of the training."""
    return lambda done: by ** sum(done >= part for part in at)


def warmed(schedule: Schedule, part: float) -> Schedule:
    """Multiplied by what rises linearly from a hundredth to 1 over the first `part`."""
    return lambda done: min(1.0, 0.01 + 0.99 * done / part) * schedule(done)


def last_linear(model: nn.Module) -> str:
    """The name of the last linear layer."""
    names: list[str] = [n for n, each in model.named_modules() if isinstance(each, nn.Linear)]
    return names[-1]


@final
@dataclass(frozen=True)
class History:
    """What is kept of a training."""

    losses: tuple[float, ...]  # an epoch: the mean over its batches as they came, no penalty
    seconds: float


def fit(
    model: nn.Module,
    data: Data,
    *,
    epochs: int,
    batch: int,
    optimizer: Callable[[nn.Module], Optimizer],
    schedule: Schedule | None = None,
    augment: Callable[[Tensor, Generator], Tensor] | None = None,
    penalty: Callable[[Tensor], Tensor] | None = None,
    loss: Loss = F.cross_entropy,
    seed: int = 0,
    fast: bool = False,
    apart: bool = False,
    after_epoch: Callable[[int], None] | None = None,
) -> History:
    """Train a model on the device that it and the data are on; it is left in training mode.

    The seed fixes the batches, what `augment` draws and what the model draws (dropout); the
    weights that it starts from are the caller's. `penalty` is called with a batch's targets after
    the forward pass, as `sf.FAM` is, and added to the loss. `schedule` sets the learning rate of
    every step. With `apart`, an `sf.BNSharpnessSGD` takes the gradients at its two shifted points
    on batches of their own. `after_epoch` is called with the number of epochs done; the model is
    given back to training mode after it.

    On a GPU `fast` takes bfloat16 autocast, and for images the layout channels-last, in which the
    model is left. Without it, and on the CPU, all is float32, without TF32. No step waits for the
    GPU.
    """
    x = data.train_x
    pace = _Pace(x, fast)
    pace.lay_out(model)
    batches, *others = (
        Batches(x, data.train_y, batch, seed=seed + stream * _STREAM, augment=augment)
        for stream in range(3 if apart else 1)
    )
    steps = _Steps(model, optimizer(model), loss, penalty, schedule, epochs * len(batches), pace)
    sums = torch.zeros(epochs, device=x.device)
    start = perf_counter()
    with torch.random.fork_rng([x.device] if x.is_cuda else []), pace.convolutions():
        torch.manual_seed(seed)
        for epoch in range(epochs):
            model.train()
            for pair, *further in zip(batches, *others, strict=True):
                sums[epoch] += steps.step(pair, *further) * len(pair[1])
            steps.end_epoch()
            if after_epoch is not None:
                after_epoch(epoch + 1)
    losses = tuple((sums / len(x)).tolist())  # waits for the GPU
    model.train()
    return History(losses, perf_counter() - start)


class _Pace:
    """How a model is called: in float32, or as fast as a GPU can."""

    def __init__(self, x: Tensor, fast: bool) -> None:
        self.fast, self.device = fast and x.is_cuda, x.device
        self.images = self.fast and x.dim() == 4

    def lay_out(self, model: nn.Module) -> None:
        if self.images:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def outputs(self, model: nn.Module, inputs: Tensor) -> Tensor:
        """In float32, of a pass that need not be. Autocast keeps its copies of the weights for as
        long as it is on: it must not outlast a step."""
        if self.images:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.fast):
            outputs: Tensor = model(inputs)
        return outputs.float() if self.fast else outputs

    def convolutions(self) -> AbstractContextManager[None]:
        return torch.backends.cudnn.flags(enabled=True, benchmark=self.fast, allow_tf32=self.fast)


class _Steps:
    """Steps of one optimizer on one model, its learning rate on a schedule."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss: Loss,
        penalty: Callable[[Tensor], Tensor] | None,
        schedule: Schedule | None,
        steps: int,
        pace: _Pace,
    ) -> None:
        self.model, self.optimizer, self.loss, self.penalty = model, optimizer, loss, penalty
        self.schedule, self.steps, self.done = schedule, steps, 0
        self.pace = pace
        self.rates = [group["lr"] for group in optimizer.param_groups]

    def step(self, batch: Pair, *others: Pair) -> Tensor:
        """One step on a batch; its loss before the step, on the device."""
        if self.schedule is not None:
            factor = self.schedule(self.done / self.steps)
            for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
                group["lr"] = rate * factor
                if isinstance(self.optimizer, sf.EntropySGD):  # goes to its average at every rate
                    group["inner_lr"] = group["lr"]
        self.done += 1
        closure, *further = (self._closure(*each) for each in (batch, *others))
        if isinstance(self.optimizer, sf.EntropySGD):  # every inner step has its own batch
            loss = closure()
            self.optimizer.step()
            return loss
        result: Tensor = self.optimizer.step(closure, *further)  # type: ignore[arg-type, assignment]
        return result

    def _closure(self, inputs: Tensor, targets: Tensor) -> Callable[[], Tensor]:
        def closure() -> Tensor:
            self.optimizer.zero_grad()
            loss = self.loss(self.pace.outputs(self.model, inputs), targets)
            (loss if self.penalty is None else loss + self.penalty(targets)).backward()
            return loss.detach()

        return closure

    def end_epoch(self) -> None:
        if isinstance(self.optimizer, sf.BNSharpnessSGD):
            self.optimizer.end_epoch()


@torch.no_grad()
def accuracy(
    model: nn.Module, x: Tensor, y: Tensor, batch: int = 1000, *, fast: bool = False
) -> float:
    """The part of the samples, in percent, whose largest output is that of their label."""
    right = torch.zeros((), device=x.device)
    for outputs, targets in _outputs(model, x, y, batch, fast):
        right += (outputs.argmax(1) == targets).sum()
    return 100 * float(right) / len(x)


@torch.no_grad()
def mean_loss(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    batch: int = 1000,
    *,
    loss: Loss = F.cross_entropy,
    fast: bool = False,
) -> float:
    """The mean of a loss that is a mean over samples, over all of them, in evaluation mode."""
    total = torch.zeros((), device=x.device)
    for outputs, targets in _outputs(model, x, y, batch, fast):
        total += loss(outputs, targets) * len(targets)
    return float(total) / len(x)


def _outputs(
    model: nn.Module, x: Tensor, y: Tensor, batch: int, fast: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """In evaluation mode; the model is given back in the mode that it had."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    pace = _Pace(x, fast)
    try:
        with pace.convolutions():
            for inputs, targets in Batches(x, y, batch, shuffle=False):
                yield pace.outputs(model, inputs), targets
    finally:
        for module, mode in modes.items():
            module.training = mode
