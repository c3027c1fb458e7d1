"""Lightning: a callback that measures, and what perturbing optimizers need in a LightningModule.

Optimizers that need gradients at perturbed weights (SAM, BNSharpnessSGD) in a LightningModule
-----------------------------------------------------------------------------------------------
Return them from `configure_optimizers`. As they stand, without `SharpnessModuleMixin`:

- Automatic optimization works: Lightning calls `optimizer.step(closure)`. So does clipping by norm
  with SAM, `bf16-mixed`, and true half or double precision.
- `training_step` runs once for each pass, and what it logs is logged each time: `on_step` shows the
  loss at the perturbed weights, `on_epoch` the mean over all passes.
- `accumulate_grad_batches` is refused by the optimizer, as the perturbed pass would see the last
  micro-batch only, and so is `16-mixed`, for which Lightning gives it no closure.

With the mixin all of these are right, and what cannot be is an error before the first step: sharded
strategies (the norm of a gradient would be that of a shard), clipping that changes the direction of
perturbation (by value; for BNSharpnessSGD also by norm), and clipping with `16-mixed`.

Manual optimization: `optimizer = self.optimizers()`, then `optimizer.step(closure)`, where the
closure clears the gradients, calls `self.manual_backward(loss)` and returns the loss. NOT
`optimizer.step()`, an error: Lightning makes of it a closure that does nothing. Pass by pass it is
`optimizer.optimizer.perturb()` and `optimizer.optimizer.step()`, which Lightning does not count in
`global_step`; with `16-mixed`, `optimizer.optimizer.perturb(scaler)` and then `optimizer.step()`.

FAM needs nothing: make it where the layers are made and add it to the loss in `training_step`.

    self.fam = FAM(self.net, layer="fc", share=0.05)
    …
    return criterion(self.net(x), y) + self.fam(y)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from inspect import signature
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from saltflat.errors import InvalidValue, MissingDependency, nearest
from saltflat.measures import Measure
from saltflat.session import RandomState
from saltflat.training import (
    CHEAP,
    BNSharpnessSGD,
    MonitorCallback,
    PerturbedOptimizer,
    Record,
    random_states,
)

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import EarlyStopping
except ImportError as error:
    raise MissingDependency(
        "saltflat.integrations.lightning needs Lightning, which is not installed. "
        "Install it with: pip install saltflat[lightning]"
    ) from error

_SKIPPED = "saltflat/skipped"
_SHARDED = ("FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy")


@final
class SharpnessCallback(MonitorCallback, Callback):
    """Measures during training, and logs to the trainer's loggers as `saltflat/<measure>`.

    Parameters
    ----------
    data, measures, options : as in `saltflat.training.monitor.Monitor`; `loss`, `budget`, `path`
        and `samples` among them.
    every_n_epochs, every_n_steps : when to measure; by default after every epoch. Steps are those
        of the optimizer (`trainer.global_step`).
    module : what to measure: the name of a submodule, or a callable of the LightningModule. By
        default the LightningModule itself, whose `forward` must then return the outputs.

    Values are also in `trainer.callback_metrics`, for checkpoints and early stopping, and only in
    the epoch in which they were measured: after one without a measurement (skipped for the budget,
    failed, not due) there is None, with which ModelCheckpoint saves nothing and
    `EarlyStopping("saltflat/hessian_trace", strict=False)` waits. `strict=True` would end training
    there; together with a budget, or with measurements not every epoch, it is an error at the
    start. Put this callback before EarlyStopping. A measurement that the budget did not allow is
    logged as `saltflat/skipped`. On several ranks the first one measures while the others wait at
    the end of the epoch, when they get the values.

    Where the trainer's settings would make SAM or BNSharpnessSGD wrong, training does not start.
    """

    def __init__(
        self,
        data: Any,
        measures: Iterable[str | Measure] = CHEAP,
        *,
        module: str | Callable[[LightningModule], nn.Module] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(data, measures, **options)
        self._module = module

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _check_optimizers(trainer, pl_module)
        self._check_listeners(trainer)
        if trainer.is_global_zero:
            self._start(self._measured(pl_module))
        self._step = trainer.global_step

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for key in (*self._keys, _SKIPPED):
            _publish(trainer, key, None)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *arguments: Any
    ) -> None:
        if self.monitor is not None and trainer.global_step > self._step:
            self._step = trainer.global_step
            self._log(trainer, self.monitor.step(self._step))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.monitor is not None:
            record = self.monitor.epoch(trainer.current_epoch + 1, step=trainer.global_step)
            self._log(trainer, record)
        known = {key: trainer.callback_metrics.get(key) for key in (*self._keys, _SKIPPED)}
        for key, value in trainer.strategy.broadcast(known).items():
            _publish(trainer, key, value)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for key in (*self._keys, _SKIPPED):
            if trainer.callback_metrics.get(key) is None:
                trainer.callback_metrics.pop(key, None)

    def _measured(self, pl_module: LightningModule) -> nn.Module:
        if self._module is None:
            return pl_module
        if isinstance(self._module, str):
            return pl_module.get_submodule(self._module)
        return self._module(pl_module)

    @property
    def _keys(self) -> list[str]:
        """The names under which measures are logged."""
        return [f"saltflat/{each.name}" for each in self.measures]

    def _check_listeners(self, trainer: Trainer) -> None:
        """Refuse callbacks that would decide by values which are not there, or not yet."""
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        for place, callback in enumerate(callbacks):
            key, name = getattr(callback, "monitor", None), type(callback).__name__
            if not isinstance(key, str) or not key.startswith("saltflat/"):
                continue
            if key not in self._keys:
                raise InvalidValue(f"{name} monitors {key!r}. {nearest(key, self._keys)}")
            if not isinstance(callback, EarlyStopping):
                continue
            if place < callbacks.index(self):
                raise InvalidValue(
                    f"{name} comes before {type(self).__name__} and would see the values of the "
                    "epoch before. Put it behind: callbacks=[SharpnessCallback(…), "
                    f"{name}({key!r}, …)]."
                )
            if callback.strict and self.may_miss_epochs:
                raise InvalidValue(
                    f"{name} with strict=True ends training where {key!r} is not measured, for its "
                    f"budget or as it is not due. {name}({key!r}, strict=False) waits for the next "
                    "value; SharpnessCallback(…, budget=None) after every epoch skips none."
                )

    def _log(self, trainer: Trainer, record: Record | None) -> None:
        if record is None:
            return
        values = record.metrics()
        for logger in trainer.loggers:  # not every step is one at which `self.log` writes
            logger.log_metrics(values, step=trainer.global_step)
        for key in (*self._keys, _SKIPPED):
            _publish(trainer, key, values.get(key))


def _publish(trainer: Trainer, key: str, value: float | Tensor | None) -> None:
    """For other callbacks: a key that is not there is an error to some of them, None is not."""
    metrics: dict[str, Any] = trainer.callback_metrics
    metrics[key] = None if value is None else torch.as_tensor(value)


class SharpnessModuleMixin:
    """For a LightningModule with automatic optimization whose optimizer perturbs the weights.

        class Net(SharpnessModuleMixin, LightningModule): …

    Gradient accumulation: the perturbed passes go over all micro-batches of the step, which are
    kept until then. `16-mixed`: they are made before the GradScaler steps. Logging: in perturbed
    passes `self.log` does nothing; whatever else `training_step` counts should look at
    `self.perturbed`. All passes of a step draw the same random numbers.
    """

    perturbed = False  # whether training_step runs at perturbed weights
    _micro_batches: tuple[tuple[list[RandomState], Any, int], ...] = ()  # of the step so far

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        trainer: Trainer = self.trainer  # type: ignore[attr-defined]
        perturbing = _perturbing(trainer.optimizers)
        if perturbing is not None and self.automatic_optimization:  # type: ignore[attr-defined]
            first = batch_idx % trainer.accumulate_grad_batches == 0
            this = random_states(perturbing), batch, batch_idx
            self._micro_batches = (*(() if first else self._micro_batches), this)
        result: int | None = super().on_train_batch_start(batch, batch_idx)  # type: ignore[misc]
        return result

    def log(self, *arguments: Any, **options: Any) -> None:
        if not self.perturbed:
            super().log(*arguments, **options)  # type: ignore[misc]

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        perturbing = _perturbing([optimizer.optimizer])
        if perturbing is not None:
            _check_optimizers(self.trainer, self)  # type: ignore[attr-defined]
            micro_batches, self._micro_batches = self._micro_batches, ()
            if not micro_batches or micro_batches[-1][2] != batch_idx:
                raise InvalidValue(
                    "SharpnessModuleMixin did not see this batch. A method on_train_batch_start of "
                    "your own must call super().on_train_batch_start(batch, batch_idx)."
                )
            passes = _Passes(self, perturbing, optimizer_closure, micro_batches)
            optimizer_closure = passes if passes.scaler is None else passes.all_of_them
            perturbing.closure_accumulates = True
        super().optimizer_step(  # type: ignore[misc]
            epoch, batch_idx, optimizer, optimizer_closure
        )


@final
@dataclass
class _Passes:
    """The closure of a step: first Lightning's own, then all micro-batches of the step again."""

    module: Any
    optimizer: PerturbedOptimizer
    closure: Any
    micro_batches: Any
    _first: bool = True

    @property
    def scaler(self) -> Any:
        return getattr(self.module.trainer.precision_plugin, "scaler", None)

    def __call__(self) -> Any:
        if self._first:
            self._first = False
            return self.closure()
        self.module.perturbed = True
        try:
            for states, batch, index in self.micro_batches:
                if self.optimizer.same_randomness:
                    for state in states:
                        state.restore()
                self._backward(batch, index)
        finally:
            self.module.perturbed = False
        return None

    def all_of_them(self) -> Any:
        """With a GradScaler Lightning calls the closure once, and then steps without it."""
        loss = self()
        while self.optimizer.perturb(self.scaler):
            self()
        return loss

    def _backward(self, batch: Any, index: int) -> None:
        trainer, step = self.module.trainer, self.module.training_step
        wanted = len(signature(step).parameters)
        output = trainer.strategy.training_step(*(batch, index)[:wanted])
        loss = output["loss"] if isinstance(output, dict) else output
        if loss is not None:  # Lightning's word for a batch that is left out
            trainer.strategy.backward(loss / trainer.accumulate_grad_batches, self.optimizer)


def _perturbing(optimizers: Iterable[Optimizer]) -> PerturbedOptimizer | None:
    return next((each for each in optimizers if isinstance(each, PerturbedOptimizer)), None)


def _check_optimizers(trainer: Any, pl_module: Any) -> None:
    """Refuse settings under which a perturbing optimizer would be wrong without a word."""
    optimizer = _perturbing(trainer.optimizers)
    if optimizer is None:
        return
    name, strategy = type(optimizer).__name__, type(trainer.strategy).__name__
    mixed_in = isinstance(pl_module, SharpnessModuleMixin)
    if strategy in _SHARDED:
        raise InvalidValue(
            f"{name} needs whole gradients on every rank. Got {strategy}; use DDPStrategy."
        )
    if not pl_module.automatic_optimization:
        return
    if trainer.accumulate_grad_batches != 1 and not mixed_in:
        raise InvalidValue(
            f"With accumulate_grad_batches={trainer.accumulate_grad_batches} the perturbed pass of "
            f"{name} would see the last micro-batch only. Derive the LightningModule from "
            "saltflat.integrations.SharpnessModuleMixin."
        )
    by_value = trainer.gradient_clip_algorithm == "value"
    if trainer.gradient_clip_val and (by_value or isinstance(optimizer, BNSharpnessSGD)):
        raise InvalidValue(
            f"Clipping gradients by {'value' if by_value else 'norm'} in every pass would change "
            f"the direction in which {name} perturbs. Clip in a manual "
            "loop between perturb() and step()" + (", or by norm." if by_value else ".")
        )
