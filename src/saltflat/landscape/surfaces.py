"""The loss around the model's parameters: its value and gradient at θ + v."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor

from saltflat.curvature import Company, Curvature, Safe, Settings
from saltflat.errors import DataError
from saltflat.landscape.batchnorm import BatchStatistics, batch_mode
from saltflat.losses import CustomLoss, JointLoss, Loss, divisor, scalar
from saltflat.memory import halving, out_of_memory
from saltflat.risk import Batch, Risk, join
from saltflat.session import full_precision
from saltflat.work import FORWARD

Vector = Mapping[str, Tensor]
Gradient = dict[str, Tensor]


@contextmanager
def shifted(parameters: Vector, v: Vector) -> Iterator[None]:
    """The parameters that v names are at θ + v, and back where they were afterwards."""
    before = {name: parameters[name].data for name in v}
    try:
        for name, data in before.items():
            parameters[name].data = (data.double() + v[name].to(data.device)).to(data.dtype)
        yield
    finally:
        for name, data in before.items():
            parameters[name].data = data


class Surface(ABC):
    """A loss as a function of the shift v of some parameters; what v does not name stays.

    Only inside a session of the risk. TensorFloat-32 is off, because a weight with ten binary
    digits does not feel a small shift; sums over samples and batches are in float64.
    """

    def __init__(self, risk: Risk, names: Sequence[str]) -> None:
        self.risk = risk
        self.parameters = {name: risk.parameters[name] for name in dict.fromkeys(names)}
        self.evaluations = 0
        self._checked = False  # data and targets are looked at once

    def value(self, v: Vector | None = None, *, overflow: bool = False) -> float:
        """L(θ + v), which may be infinite or NaN where it may `overflow`, and is an error else."""
        with self.at(v or {}), torch.no_grad():
            value = self._evaluate(None)
            return value if overflow else self._finite(value)

    def gradient(
        self, v: Vector | None = None, dtype: torch.dtype | None = torch.float64
    ) -> tuple[float, Gradient]:
        """L(θ + v) and its gradient in the parameters, in `dtype`, or in their own for None."""
        with self.at(v or {}):
            sums = {n: torch.zeros_like(p, dtype=dtype) for n, p in self.parameters.items()}
            value = self._finite(self._evaluate(sums))
        return value, {name: total.detach() for name, total in sums.items()}

    @abstractmethod
    def _evaluate(self, sums: Gradient | None) -> float:
        """The loss where the parameters are; its gradient is put into `sums`, if there are any."""

    def mean_growth(self, draw: Callable[[], Vector], draws: int) -> tuple[float, float, float]:
        """L(θ), the mean of L(θ + v) − L(θ) over so many draws of v, and its standard error.

        Each draw is a pair ±v: what is odd in v has mean zero and drops out.
        """
        loss, growths = self.value(), []
        for _ in range(draws):
            v = draw()
            pair = self.value(v) + self.value({name: -x for name, x in v.items()})
            growths.append(pair / 2 - loss)
        values = torch.tensor(growths, dtype=torch.float64)
        return loss, float(values.mean()), float(values.std() / draws**0.5)

    @contextmanager
    def at(self, v: Vector) -> Iterator[None]:
        """The model is at θ + v, and computes with all the digits that it has."""
        self.evaluations += 1
        with shifted(self.parameters, v), full_precision(self.risk.device):
            yield

    def _forward(self, batch: Batch) -> Tensor:
        with Safe():
            outputs = self.risk.forward(batch)
        self.risk.work.add(batch.size, FORWARD)
        if not self._checked:
            self.risk.check(outputs, batch)
        return outputs

    def _finite(self, value: float) -> float:
        if not math.isfinite(value):
            raise DataError(
                f"The loss is {value} at shifted parameters: it overflows. Use a smaller radius, "
                "or a wider dtype (dtype=torch.float64)."
            )
        self._checked = True
        return value

    def _add(
        self, sums: Gradient, samples: int, of: Tensor, cotangent: Tensor | None = None
    ) -> None:
        """Add the gradient of what came of so many samples."""
        if not of.requires_grad:
            return
        parts = torch.autograd.grad(
            of, list(self.parameters.values()), cotangent, allow_unused=True
        )
        self.risk.work.add(samples, 1 - FORWARD)
        for total, part in zip(sums.values(), parts, strict=True):
            if part is not None:
                total += part

    def _reduce(self, sums: Gradient | None) -> None:
        """Put the sums over all ranks in the place of those here."""
        if sums and self.risk.reduction.ranks > 1:
            for name, total in self.risk.reduction.totals(sums, self.risk.device).items():
                sums[name].copy_(total)


class _InCompany(Exception):
    """The outputs of a sample depend on the other samples of its batch."""


@final
class RiskSurface(Surface):
    """The risk itself: evaluation mode, the global normaliser, whatever the batches are."""

    def __init__(
        self, risk: Risk, names: Sequence[str], *, memory_budget: int | None = None
    ) -> None:
        super().__init__(risk, names)
        curvature = Curvature(risk, settings=Settings(memory_budget=memory_budget))
        plan = curvature.look()
        self.loss = curvature.loss
        self.coupled = plan.coupled
        self._company = Company(risk)
        # A gradient keeps about twice what a forward pass does.
        self.chunk = plan.chunk(curvature.settings.budget(risk.device), 8)

    def accuracy(self, v: Vector | None = None) -> float | None:
        """The share of positions whose largest output is at the target, at θ + v; None if targets
        are no classes. A further forward pass."""
        with self.at(v or {}):
            found = self.risk.reduction.each(self._right)
        if None in found:
            return None
        hits, count = map(sum, zip(*found, strict=True))
        return hits / count

    def _right(self) -> tuple[int, int] | None:
        """How many classes are named rightly here, and of how many."""
        hits = count = 0
        for batch, outputs in self.answers():
            loss = self.loss
            right = loss.right(outputs, batch.targets) if isinstance(loss, Loss) else None
            if right is None:
                return None
            hits, count = hits + right[0], count + right[1]
        return hits, count

    def _evaluate(self, sums: Gradient | None) -> float:
        def attempt(size: int) -> float:
            self.chunk = size
            for total in (sums or {}).values():
                total.zero_()
            return self._over_chunks(sums)

        if not self.coupled:
            try:
                return halving(attempt, self.chunk)
            except _InCompany:
                self.coupled = True
        return attempt(self.chunk)

    def _forward(self, batch: Batch) -> Tensor:
        outputs = super()._forward(batch)
        if not (self._checked or self.coupled or self._company.is_indifferent(batch, outputs)):
            raise _InCompany
        return outputs

    def _over_chunks(self, sums: Gradient | None) -> float:
        loss, risk = self.loss, self.risk
        assert loss is not None, "it was looked at"
        if self.coupled:
            risk.insist_on_one_rank("outputs of a sample depend on the other samples of its batch")
        if isinstance(loss, JointLoss):
            risk.insist_on_one_rank(f"the loss {loss.name} is not a mean or a sum over samples")
        found = risk.reduction.each(lambda: self._sum(loss, sums))
        value, normaliser = map(sum, zip(*found, strict=True))
        self._reduce(sums)
        scale = divisor(loss, normaliser) if isinstance(loss, Loss) else 1.0
        for entry in (sums or {}).values():
            entry /= scale
        return value / scale

    def _sum(self, loss: Loss | JointLoss, sums: Gradient | None) -> tuple[float, float]:
        """The loss summed over the samples here, and its normaliser."""
        if isinstance(loss, CustomLoss | JointLoss):
            return self._together(loss, sums)
        value = normaliser = 0.0
        for batch in self._chunks():
            outputs = self._forward(batch)
            total = loss.total(outputs.double(), batch.targets)
            normaliser += loss.normaliser(outputs, batch.targets)
            value += total.item()
            if sums is not None:
                self._add(sums, batch.size, total)
        return value, normaliser

    def _together(self, loss: CustomLoss | JointLoss, sums: Gradient | None) -> tuple[float, float]:
        """A user's loss is what it returns on all outputs at once; it need not add up.

        Its gradient in the outputs is then sent backwards, chunk by chunk.
        """
        seen = []
        with torch.no_grad():
            for batch in self._chunks():
                outputs = self._forward(batch)
                seen.append(batch.answered(outputs))
        if not seen:
            return 0.0, 0.0  # of several ranks, one without samples
        everything = join(seen)
        weight = everything.size if isinstance(loss, CustomLoss) and loss.mean else 1
        o = everything.inputs.requires_grad_(sums is not None)
        value = scalar(loss.call, o, everything.targets) * weight
        if sums is not None:
            (slope,) = torch.autograd.grad(value, o)
            first = 0
            for batch in self._chunks():
                outputs = self._forward(batch)
                self._add(sums, batch.size, outputs, slope[first : first + batch.size])
                first += batch.size
        return value.item(), float(everything.size)

    def _chunks(self) -> Iterator[Batch]:
        return self.risk.chunks(None if self.coupled else self.chunk)

    def answers(self) -> Iterator[tuple[Batch, Tensor]]:
        """The samples, some at a time, with the outputs where the model is (`at`)."""
        for batch in self._chunks():
            with torch.no_grad():
                yield batch, self._forward(batch)


@final
class BatchSurface(Surface):
    """The mean over the data's batches of the loss of one batch, BatchNorm with the statistics of
    the batch and everything else in evaluation mode (Yi et al. 2019, eq. 2).

    It depends on how the data are batched. Running statistics are neither used nor changed.
    """

    batch_size = 0  # of the largest batch
    batches = 0

    def _evaluate(self, sums: Gradient | None) -> float:
        found = self.risk.reduction.each(lambda: self._over_batches(sums))
        value = sum(part for part, _, _ in found)
        self.batches = sum(count for _, count, _ in found)
        self.batch_size = max(size for _, _, size in found)
        self._reduce(sums)
        for entry in (sums or {}).values():
            entry /= self.batches
        return value / self.batches

    def _over_batches(self, sums: Gradient | None) -> tuple[float, int, int]:
        """The sum of the losses of the batches here, their number, and the size of the largest."""
        value, count, largest = 0.0, 0, 0
        for batch in self.risk.batches():
            count, largest = count + 1, max(largest, batch.size)
            try:
                with batch_mode(self.risk.model):
                    with BatchStatistics(batch.where):
                        outputs = self._forward(batch)
                    one = _batch_loss(self.risk.loss, outputs, batch.targets)
                    if sums is not None:
                        self._add(sums, batch.size, one)
                value += one.item()
            except (RuntimeError, MemoryError) as error:
                if out_of_memory(error):
                    raise DataError(
                        f"There is no memory for the {batch.size} samples of {batch.where} at "
                        "once, which batch statistics need. Use a DataLoader of smaller batches."
                    ) from error
                raise
        return value, count, largest


def _batch_loss(
    loss: Loss | JointLoss | Callable[..., Tensor], outputs: Tensor, targets: Any
) -> Tensor:
    if isinstance(loss, CustomLoss | JointLoss):
        return scalar(loss.call, outputs, targets)
    if not isinstance(loss, Loss):
        return scalar(loss, outputs, targets)
    total = loss.total(outputs.double(), targets)
    return total / divisor(loss, loss.normaliser(outputs, targets))
