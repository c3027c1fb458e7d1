"""Hugging Face transformers: a callback that measures, and a Trainer with SAM and FAM.

    trainer = SharpnessTrainer(
        model=model,
        args=TrainingArguments(…),
        train_dataset=data,
        perturb=lambda base: SAM(base, rho=0.05),
        fam=FAM(model, layer="classifier", share=0.05),
        callbacks=[SharpnessTrainerCallback(probe)],
    )
    trainer.train()

For a trainer class of your own: `class MyTrainer(SharpnessTrainerMixin, ThatTrainer): …`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from saltflat.errors import InvalidType, InvalidValue, MissingDependency
from saltflat.measures import Measure, RelativeFlatness
from saltflat.risk import compares_next, next_token, token_ids
from saltflat.training import FAM, MonitorCallback, PerturbedOptimizer, Record

try:
    # The submodules: the package itself makes up names whose own imports fail.
    import accelerate  # noqa: F401, the Trainer asks for it only when it is made
    from transformers.trainer import Trainer
    from transformers.trainer_callback import TrainerCallback
except ImportError as error:
    raise MissingDependency(
        "saltflat.integrations.transformers needs transformers and accelerate, which are not "
        "both installed. Install them with: pip install saltflat[transformers]"
    ) from error


@final
class SharpnessTrainerCallback(MonitorCallback, TrainerCallback):
    """Measures during training, and logs as `saltflat/<measure>`.

    Parameters
    ----------
    data, options : as in `saltflat.training.monitor.Monitor`; `loss`, `budget`, `path`, `samples`
        and `progress` among them. Batches are dicts with `labels`, as from a Trainer's loaders.
    measures : by default the relative flatness of the last Linear, which costs less than a gradient
        on the data for a classifier. The curvature of all layers of a transformer has to be drawn,
        at up to 100 gradients a measurement: `measures=["hessian_trace"]` asks for it.
    every_n_epochs, every_n_steps : when to measure; by default after every epoch. Steps are those
        of the optimizer (`state.global_step`).

    A callback does not know its trainer. `SharpnessTrainerMixin` introduces itself, another one is
    introduced by `callback.attach(trainer)`; values then go wherever `trainer.log` writes. Without
    that they are in `state.log_history` only. A measurement that the budget did not allow is logged
    as `saltflat/skipped`. On several ranks the first one measures.
    """

    _trainer: Any = None

    def __init__(
        self, data: Any, measures: Iterable[str | Measure] = (RelativeFlatness(),), **options: Any
    ) -> None:
        super().__init__(data, measures, **options)

    def attach(self, trainer: Any) -> None:
        """Log through this trainer."""
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self._start(kwargs["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.monitor is not None:
            self._log(state, control, self.monitor.step(state.global_step))

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.monitor is not None:
            record = self.monitor.epoch(round(state.epoch), step=state.global_step)
            self._log(state, control, record)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._stop()

    def _log(self, state: Any, control: Any, record: Record | None) -> None:
        if record is None:
            return
        values = record.metrics()
        if self._trainer is not None:
            due = control.should_log  # which a log in between would take for done
            self._trainer.log(values)
            control.should_log = due
        else:
            where = {"epoch": state.epoch, "step": state.global_step}
            state.log_history.append({**values, **where})


class SharpnessTrainerMixin:
    """What a Trainer needs for optimizers that perturb the weights, and for FAM.

    Parameters
    ----------
    perturb : makes such an optimizer of the one that the trainer would use, e.g.
        `lambda base: SAM(base, rho=0.05)`. One may also be handed over in `optimizers=`.
    fam : a penalty that is added to the loss in training. Its own loss is the mean over a batch of
        the cross-entropy unless it was given another (`FAM(…, loss=…)`, label smoothing). Labels
        that are the inputs of a causal model are those of the next token, as in its own loss.

    Gradient accumulation: the perturbed passes go over all micro-batches of the step, which are
    kept until then. With a penalty the loss is the mean over a micro-batch, and the gradient that
    of the mean over micro-batches: `num_items_in_batch` is not used, as a penalty has no such
    count. The gradient norm that is clipped and logged is that of the step. With `fp16`, a step
    that overflowed is left out but the learning rate moves on.

    DeepSpeed and FSDP are refused: the norm of a gradient would be that of a shard.
    """

    def __init__(
        self,
        *arguments: Any,
        perturb: Callable[[Optimizer], PerturbedOptimizer] | None = None,
        fam: FAM | None = None,
        **options: Any,
    ) -> None:
        if perturb is not None and not callable(perturb):
            raise InvalidType(
                "perturb must be a function from an optimizer to one around it, e.g. "
                f"lambda base: SAM(base, rho=0.05). Got {type(perturb).__name__}."
            )
        if fam is not None and not isinstance(fam, FAM):
            raise InvalidType(f"fam must be a saltflat FAM. Got {type(fam).__name__}.")
        self._perturb, self.fam = perturb, fam
        self._micro_batches: list[tuple[dict[str, Any], Any]] = []  # of the step so far
        self._next_token: bool | None = None  # what labels stand for; None until a batch tells
        super().__init__(*arguments, **options)
        mine: Any = self
        if fam is not None:
            if mine.compute_loss_func is not None and mine.args.gradient_accumulation_steps > 1:
                raise InvalidValue(
                    "With compute_loss_func and gradient accumulation FAM cannot know how the loss "
                    "is normalized. Override compute_loss instead, and add the penalty there."
                )
            mine.model_accepts_loss_kwargs = False  # the loss is a mean over the micro-batch
        for callback in mine.callback_handler.callbacks:
            if isinstance(callback, SharpnessTrainerCallback):
                callback.attach(self)

    def train(self, *arguments: Any, **options: Any) -> Any:
        self._micro_batches = []  # a run may have stopped within a step
        return super().train(*arguments, **options)  # type: ignore[misc]

    def create_optimizer(self, *arguments: Any, **options: Any) -> Any:
        mine: Any = self
        super().create_optimizer(*arguments, **options)  # type: ignore[misc]
        if self._perturb is not None and _perturbing(mine.optimizer) is None:
            mine.optimizer = self._perturb(mine.optimizer)
            if not isinstance(mine.optimizer, PerturbedOptimizer):
                raise InvalidType(
                    "perturb must return an optimizer that perturbs, like SAM. "
                    f"Got {type(mine.optimizer).__name__}."
                )
        return mine.optimizer

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, **options: Any
    ) -> Any:
        labels = inputs.get("labels")
        loss, outputs = super().compute_loss(  # type: ignore[misc]
            model, inputs, return_outputs=True, **options
        )
        if self.fam is not None and model.training and torch.is_grad_enabled():
            if labels is None:
                raise InvalidValue("FAM needs the labels of a batch, and this one has no 'labels'.")
            loss = loss + self.fam(self._targets(inputs, labels, outputs))
        return (loss, outputs) if return_outputs else loss

    def _targets(self, inputs: Any, labels: Any, outputs: Any) -> Any:
        """The labels, or those of the next token where that is what the model's own loss takes."""
        tokens, counts = token_ids(inputs), labels != -100
        if tokens is None or labels.shape != tokens.shape or not counts[:, 1:].any():
            return labels
        if self._next_token is None:
            own = bool((labels == tokens)[counts].all())
            told = own and isinstance(outputs, dict) and outputs.get("loss") is not None
            self._next_token = told and compares_next(outputs["loss"], outputs["logits"], labels)
        return next_token(labels) if self._next_token else labels

    def training_step(self, model: Any, inputs: Any, *arguments: Any, **options: Any) -> Tensor:
        mine: Any = self
        step = super().training_step  # type: ignore[misc]
        optimizer = _perturbing(mine.optimizer)
        if optimizer is None:
            loss: Tensor = step(model, inputs, *arguments, **options)
            return loss
        if mine.is_deepspeed_enabled or mine.is_fsdp_enabled:
            raise InvalidValue(
                f"{type(optimizer).__name__} needs whole gradients on every rank. Got "
                f"{'DeepSpeed' if mine.is_deepspeed_enabled else 'FSDP'}; use DDP."
            )
        self._micro_batches.append((dict(inputs), (arguments, options)))
        loss = step(model, inputs, *arguments, **options)
        if mine.accelerator.sync_gradients:
            micro_batches, self._micro_batches = self._micro_batches, []
            self._perturbed_passes(optimizer, model, step, micro_batches)
        return loss

    def _perturbed_passes(
        self, optimizer: PerturbedOptimizer, model: Any, step: Any, micro_batches: list[Any]
    ) -> None:
        accelerator = self.accelerator  # type: ignore[attr-defined]
        try:
            while optimizer.perturb(accelerator.scaler):
                for index, (inputs, (arguments, options)) in enumerate(micro_batches, start=1):
                    last = index == len(micro_batches)
                    with nullcontext() if last else accelerator.no_sync(model=model):
                        step(model, dict(inputs), *arguments, **options)
        except BaseException:
            optimizer.restore()
            raise


class SharpnessTrainer(SharpnessTrainerMixin, Trainer):  # type: ignore[misc]
    """The Trainer of transformers with `SharpnessTrainerMixin`."""


def _perturbing(optimizer: Any) -> PerturbedOptimizer | None:
    """The optimizer itself, out of what accelerate wraps around it."""
    inner = getattr(optimizer, "optimizer", optimizer)
    return inner if isinstance(inner, PerturbedOptimizer) else None
