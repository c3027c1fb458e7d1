"""Monitor: measure during training, on a fixed probe set, within a budget of time, with a log."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Self, final

from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.utils._pytree import tree_map_only

from saltflat.checks import check_integer, check_number, check_options
from saltflat.distributed import reduction
from saltflat.errors import (
    DistributedError,
    InvalidType,
    InvalidValue,
    MissingDependency,
    SaltflatError,
)
from saltflat.losses import LossLike
from saltflat.measure import measure, measure_objects
from saltflat.measurement import Measurement
from saltflat.measures import Measure
from saltflat.report import Report
from saltflat.risk import Output, Risk, Unpack, unwrap
from saltflat.sharded import is_first, largest, shared_parameter
from saltflat.training.history import Record, appended, continued, drawn, frame, saved

if TYPE_CHECKING:
    import pandas

CHEAP = ("hessian_trace", "minimum_sharpness")  # both from one trace
BUDGET = 0.1  # the share by default
# A first measurement of so many seconds is made whatever the share. To foresee it, measurements on
# this part of the samples, and on two, are timed.
_SHORT = 2.0
_PART = 16


@final
@dataclass(frozen=True, slots=True)
class Budget:
    """How long measuring may take: a share of the time since the monitor was made, and seconds.

    Examples
    --------
    >>> import saltflat as sf
    >>> sf.Budget(seconds=60).exceeded(spent=61, elapsed=1000)
    'measuring has taken 61 s; the budget is 60 s'
    """

    share: float = math.inf
    seconds: float = math.inf

    def __post_init__(self) -> None:
        if self.share != math.inf and check_number("The share of a Budget", self.share) > 1:
            raise InvalidValue(
                f"The share of a Budget is at most 1. Got {self.share:g}; for a number of seconds "
                f"pass Budget(seconds={self.share:g})."
            )
        if self.seconds != math.inf:
            check_number("The seconds of a Budget", self.seconds)

    def exceeded(self, spent: float, elapsed: float, ahead: float = 0.0) -> str | None:
        """Why a measurement of `ahead` seconds may not be made now, or None."""
        more = f" and would take about {ahead:.3g} s more" if ahead else ""
        if spent + ahead > self.seconds:
            return f"measuring has taken {spent:.3g} s{more}; the budget is {self.seconds:g} s"
        if spent + ahead > self.share * (elapsed + ahead):
            return (
                f"measuring has taken {spent:.3g} s of {elapsed:.3g} s{more}; the budget is "
                f"{100 * self.share:g} %"
            )
        return None


@final
class Monitor:
    """Measures a model as it is trained, and keeps a log.

        monitor = Monitor(model, probe, path="sharpness.jsonl")
        for epoch in range(epochs):
            for x, y in loader:
                …
                optimizer.step()
                monitor.step()
            monitor.epoch()

    Parameters
    ----------
    model, data, loss : as in `saltflat.measure`. The data are read once, here, and kept: every
        measurement is on the same samples.
    measures : names or configured measures, or "all"; by default two that one trace gives.
    every, steps : measure every so many epochs, every so many steps, or both; by default after
        every epoch. A loop without epochs calls `step` only, one without steps `epoch` only.
    budget : the share of the time since the monitor was made that measuring may take, or
        `Budget(share, seconds)`; None for no limit. A measurement that would exceed it, as the one
        before took, is skipped until training has caught up; the log says so, the first time a
        warning too, and `skipped` counts. What the first one will take is foreseen from two on a
        sixteenth and an eighth of the samples; if it is below two seconds, no share forbids it.
    path : a file of JSON lines, one a record, each written whole at once. A file that is there is
        continued, which a warning says: its records are the beginning of `history`, and counting
        goes on from the last. One that holds other measures is an error.
    tensorboard : a folder, or a SummaryWriter. The horizontal axis is the step, or the epoch where
        no step was counted.
    samples : how many of the data to keep at most; all by default.
    options : further arguments of `saltflat.measure`, but for `on_error`. With `distributed=True`
        every rank has a monitor, with samples of its own, and makes the same calls of it; `samples`
        counts those of all ranks, budgets go by the clock of rank 0, and it alone writes files.

    The model is left as found: weights, gradients, mode and random generators. Call it where the
    weights are those of training, that is not between `perturb()` and `step()` of an optimizer.

    A measure that is not defined for the weights at hand is in `failed` of its record. If nothing
    can be measured any more, because training has diverged for instance, the record says that too;
    only at the first measurement it is an error.

    Examples
    --------
    >>> import torch, saltflat as sf
    >>> model, x, y = torch.nn.Linear(2, 1, bias=False), torch.eye(2), torch.zeros(2, 1)
    >>> monitor = sf.Monitor(model, (x, y), "mse", measures=["hessian_trace"], budget=None)
    >>> record = monitor.epoch()
    >>> record.epoch, round(record.values["hessian_trace"], 4)
    (1, 2.0)
    >>> monitor
    Monitor(hessian_trace on 2 samples, every epoch; 1 record, 0 skipped; epoch 1: hessian_trace 2)
    """

    def __init__(
        self,
        model: nn.Module,
        data: Any,
        loss: LossLike = "cross_entropy",
        *,
        measures: Iterable[str | Measure] = CHEAP,
        every: int | None = None,
        steps: int | None = None,
        budget: float | Budget | None = BUDGET,
        path: str | os.PathLike[str] | None = None,
        tensorboard: Any = None,
        samples: int | None = None,
        unpack: Unpack | None = None,
        output: Output | None = None,
        **options: Any,
    ) -> None:
        self.every = _positive("every", 1 if every is None and steps is None else every)
        self.steps = _positive("steps", steps)
        self.budget = _budget(budget)
        self._measures = measure_objects(measures)
        check_options("Monitor", options, _options())
        self._model, self._distributed = model, options.get("distributed", False)
        own = {"loss": loss, "output": output, "measures": self._measures}
        self._options = {**options, **own, "on_error": "skip"}
        self.path = None if path is None else Path(path)
        asked = {"every": self.every, "steps": self.steps, "samples": samples}
        with reduction(self._distributed, "Monitor", **asked) as together:
            self._risk_options = {
                "loss": loss,
                "parameters": options.get("parameters", "trainable"),
                "output": output,
            }
            risk = Risk(model, data, **self._risk_options, unpack=unpack, reduction=together)
            self._data, self._samples = _probe(risk, _positive("samples", samples))
            self.history: list[Record] = together.each(self._continued)[0]
            self._shared = shared_parameter(unwrap(model))
            self._writes = together.rank == 0 and is_first(self._shared)
        self._step = self.history[-1].step if self.history else 0
        self._epoch = self.history[-1].epoch if self.history else 0
        self._own_writer = self._writes and isinstance(tensorboard, str | os.PathLike)
        self._writer: Any = _writer(tensorboard) if self._writes else None
        self._start, self._spent, self._measured = perf_counter(), 0.0, False
        self._announced = False  # that a measurement was skipped
        taken = [record.seconds for record in self.history if record.values]
        self._ahead = taken[-1] if taken else None  # seconds that the next one will take

    def step(self, number: int | None = None) -> Record | None:
        """A step of training is done, the `number`-th; returns the record if one was due."""
        self._step = self._step + 1 if number is None else number
        return self._due() if self.steps and self._step % self.steps == 0 else None

    def epoch(self, number: int | None = None, *, step: int | None = None) -> Record | None:
        """An epoch is done, the `number`-th, `step` steps in all; returns the record, if due."""
        self._epoch = self._epoch + 1 if number is None else number
        self._step = self._step if step is None else step
        return self._due() if self.every and self._epoch % self.every == 0 else None

    def measure(self) -> Record:
        """Measure now, whatever the budget; before training, for instance."""
        start = perf_counter()
        values: dict[str, Measurement] = {}
        try:
            report = self._report(self._data)
        except SaltflatError as error:
            if not self._measured or isinstance(error, DistributedError):
                raise
            failed = {each.name: str(error) for each in self._measures}
        else:
            self._measured = True
            values, failed = dict(report), dict(report.skipped)
        self._ahead = seconds = perf_counter() - start
        self._spent += seconds
        return self._keep(values, seconds, failed)

    @property
    def skipped(self) -> int:
        """How many measurements the budget did not allow."""
        return sum(record.skipped is not None for record in self.history)

    def to_pandas(self) -> pandas.DataFrame:
        """One row a record: step, epoch, the measures with standard errors, seconds, why not."""
        return frame(self.history, self._names)

    def plot(self, path: str | os.PathLike[str]) -> Path:
        """Draw the measures over steps, or over epochs where no step was counted, as a picture."""
        return drawn(Path(path), self.history, self._names)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the history to a .jsonl file, as the log has it, or to a .csv file."""
        return saved(Path(path), self.history, self._names)

    def __repr__(self) -> str:
        when = [
            f"every {'' if n == 1 else f'{n} '}{word}{'s' * (n != 1)}"
            for n, word in ((self.every, "epoch"), (self.steps, "step"))
            if n
        ]
        count = len(self.history) - self.skipped
        text = f"{', '.join(self._names)} on {self._samples} samples, {' and '.join(when)}; "
        text += f"{count} record{'s' * (count != 1)}, {self.skipped} skipped"
        last = next((record for record in reversed(self.history) if record.values), None)
        return f"Monitor({text}{'' if last is None else f'; {last}'})"

    def close(self) -> None:
        """Close the TensorBoard file, if the monitor opened it."""
        if self._own_writer:
            self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _names(self) -> list[str]:
        return [each.name for each in self._measures]

    def _report(self, data: Any) -> Report:
        with _unheard():
            return measure(self._model, data, standing=False, **self._options)

    def _due(self) -> Record:
        reason = self._forbidden()
        if reason is None:
            return self.measure()
        if not self._announced:
            self._announced = True
            warnings.warn(
                f"The monitor skips a measurement: {reason}. Others that it skips are counted in "
                "monitor.skipped; budget=None measures every time.",
                stacklevel=3,
            )
        return self._keep({}, 0.0, {}, reason)

    def _continued(self) -> list[Record]:
        """The records that the file has already."""
        return [] if self.path is None else continued(self.path, self._names)

    def _forbidden(self) -> str | None:
        """Why the budget does not allow a measurement now, or None; of several ranks, by the clock
        of the first."""
        if self.budget == Budget():
            return None
        if self._ahead is None:
            self._ahead = self._foreseen()
        short = not self._measured and self._ahead < _SHORT
        budget = Budget(seconds=self.budget.seconds) if short else self.budget
        reason = budget.exceeded(self._spent, perf_counter() - self._start, self._ahead)
        if self._shared is not None and largest(self._shared, int(reason is not None))[0]:
            return reason or "it would exceed the budget of another process that shares the model"
        with reduction(self._distributed, "Monitor") as together:
            return together.each(lambda: reason)[0]

    def _foreseen(self) -> float:
        """About how long the first measurement will take: a line through two small ones."""
        count = max(1, self._samples // _PART)
        if 2 * count >= self._samples:
            return 0.0
        first, second = self._timed(count), self._timed(2 * count)
        return second + max(0.0, second - first) * (self._samples - 2 * count) / count

    def _timed(self, count: int) -> float:
        """The seconds that a measurement on so many samples takes."""
        start = perf_counter()
        with reduction(self._distributed, "Monitor") as together:
            risk = Risk(self._model, self._data, **self._risk_options, reduction=together)
            part, _ = _probe(risk, count)
        self._report(part)
        seconds = perf_counter() - start
        self._spent += seconds
        return seconds

    def _keep(
        self,
        measurements: Mapping[str, Measurement],
        seconds: float,
        failed: Mapping[str, str],
        skipped: str | None = None,
    ) -> Record:
        record = Record(
            step=self._step,
            epoch=self._epoch,
            values={name: each.value for name, each in measurements.items()},
            stderr={name: each.stderr for name, each in measurements.items()},
            seconds=seconds,
            elapsed=perf_counter() - self._start,
            failed=failed,
            skipped=skipped,
        )
        if self.path is not None and self._writes:
            appended(self.path, record)
        self.history.append(record)
        if self._writer is not None:
            for name, value in record.values.items():
                self._writer.add_scalar(f"saltflat/{name}", value, self._step or self._epoch)
            self._writer.flush()
        return record


class MonitorCallback:
    """What the callbacks of all frameworks share: a `Monitor` that is made when training starts."""

    def __init__(
        self,
        data: Any,
        measures: Iterable[str | Measure] = CHEAP,
        *,
        every_n_epochs: int | None = None,
        every_n_steps: int | None = None,
        **options: Any,
    ) -> None:
        own = {"every_n_epochs": "every", "every_n_steps": "steps"}
        known = [*own, *(name for name in _options() if name not in own.values())]
        check_options(type(self).__name__, options, known)
        when = {"every": every_n_epochs, "steps": every_n_steps}
        self._data = data
        self.measures = measure_objects(measures)
        self._options = {**options, **when, "measures": self.measures}
        self.monitor: Monitor | None = None

    @property
    def may_miss_epochs(self) -> bool:
        """Whether there may be an epoch without a measurement."""
        every, steps = self._options["every"], self._options["steps"]
        each = every == 1 or (every is None and steps is None)
        return not each or _budget(self._options.get("budget", BUDGET)) != Budget()

    @property
    def history(self) -> list[Record]:
        """The records of the monitor."""
        return [] if self.monitor is None else self.monitor.history

    def _start(self, model: nn.Module) -> None:
        self.monitor = Monitor(model, self._data, **self._options)

    def _stop(self) -> None:
        if self.monitor is not None:
            self.monitor.close()


def _options() -> list[str]:
    """The names of a Monitor's arguments behind its data, those of `measure` among them."""
    names = [*signature(Monitor).parameters, *signature(measure).parameters]
    decided = ("model", "data", "options", "on_error")
    return [name for name in dict.fromkeys(names) if name not in decided]


@contextmanager
def _unheard() -> Iterator[None]:
    """Keep the passes of a measurement from whoever listens to all forward passes.

    An optimizer that perturbs waits that way for the first pass of its next step, to draw the same
    random numbers in the others.
    """
    listeners = hooks._global_forward_pre_hooks, hooks._global_forward_hooks
    before = [dict(each) for each in listeners]
    for each in listeners:
        each.update(dict.fromkeys(each, _nothing))
    try:
        yield
    finally:
        for each, content in zip(listeners, before, strict=True):
            # Without those of an optimizer that was collected meanwhile.
            each.update({key: hook for key, hook in content.items() if key in each})


def _nothing(*_: Any) -> None:
    """Instead of a hook that is not to hear of a pass."""


def _probe(risk: Risk, samples: int | None) -> tuple[list[tuple[Any, Any]], int]:
    """The first samples of the data, as pairs of inputs and targets, and how many they are.

    They are kept, so that nothing is to be feared from a loader that augments them. Of several
    ranks each keeps those that it has, and the number is that of all.
    """
    risk.watched.on = False
    pairs: list[tuple[Any, Any]] = []

    def read(most: float) -> int:
        count = 0
        for batch in risk.batches() if most > 0 else ():
            part = batch if count + batch.size <= most else batch.part(0, int(most) - count)
            # Of one's own: whoever gave them may write to them.
            pairs.append(tree_map_only(Tensor, Tensor.clone, (part.inputs, part.targets)))
            count += part.size
            if count >= most:
                break
        return count

    with risk.session():
        most = math.inf if samples is None else samples - risk.offset
        return pairs, sum(risk.reduction.each(lambda: read(most)))


def _positive(name: str, value: int | None) -> int | None:
    return None if value is None else check_integer(name, value)


def _budget(budget: float | Budget | None) -> Budget:
    if budget is None:
        return Budget(math.inf)
    return budget if isinstance(budget, Budget) else Budget(budget)


def _writer(tensorboard: Any) -> Any:
    """What writes for TensorBoard: the user's own, or one for a folder."""
    if isinstance(tensorboard, str | os.PathLike):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingDependency(
                "Writing for TensorBoard needs the tensorboard package, which is not installed. "
                "Install it with: pip install tensorboard"
            ) from error
        return SummaryWriter(str(tensorboard))
    if tensorboard is not None and not hasattr(tensorboard, "add_scalar"):
        raise InvalidType(
            f"tensorboard must be a folder or a SummaryWriter. Got {type(tensorboard).__name__}."
        )
    return tensorboard
