"""Optimizers that need gradients at perturbed weights before another optimizer takes the step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer

from saltflat.errors import InvalidValue
from saltflat.training.perturb import FrozenStatistics, Replay
from saltflat.training.sharing import SharingOptimizer

Closure = Callable[[], Any]
Walk = Generator[str, None, None]


class PerturbedOptimizer(SharingOptimizer, ABC):
    """A torch optimizer around a base optimizer, whose parameter groups and state it shares.

    With a closure, which clears the gradients, computes the loss, calls `backward()` and returns
    the loss: `optimizer.step(closure)`. Or pass by pass, for GradScaler, gradient accumulation and
    clipping:

        loss(model).backward()
        while optimizer.perturb():       # moves the weights and clears the gradients
            loss(model).backward()
        optimizer.step()                 # the weights are back, the base optimizer steps

    Perturbed passes neither touch BatchNorm's running statistics (`freeze_batchnorm`) nor draw
    other random numbers than the first pass (`same_randomness`); after the step the generators
    stand where one pass would have left them.

    Hooks: step hooks run on this optimizer around the whole step, and on the base around its own.
    State-dict hooks are shared and get the base optimizer.
    """

    # GradScaler then calls `step` also after an overflow, so that the weights are put back.
    _step_supports_amp_scaling = True
    # Whether the closure adds to gradients from before, and makes up for it in perturbed passes.
    closure_accumulates = False
    # Whether the gradients of the first passes may come multiplied by a GradScaler's scale.
    _scale_free = True

    _walk: Walk | None
    _ready: bool  # all passes are made, the gradients are those of the step

    def __init__(
        self,
        base: Optimizer,
        defaults: dict[str, Any],
        *,
        freeze_batchnorm: bool,
        same_randomness: bool,
    ) -> None:
        self.freeze_batchnorm = freeze_batchnorm
        self.same_randomness = same_randomness
        super().__init__(base, defaults)

    @abstractmethod
    def _passes(self) -> Walk:
        """Starts with gradients at the weights as they are. Moves the weights before every yield,
        finds the gradients there after it, and ends with the weights back and the gradients of the
        step in place; closed early, it puts the weights back."""

    @abstractmethod
    def _neutral(self) -> bool:
        """Whether the settings make this the base optimizer, so that one pass is enough."""

    def perturb(self, scaler: GradScaler | None = None) -> bool:
        """Move the weights to the next point where a gradient is needed; False if there is none.

        The gradients are taken and cleared. When it returns False the weights are back, and the
        gradients are those of the step: they can be clipped. `scaler` is the GradScaler that the
        loss was multiplied by; its `unscale_` comes after the last pass, not before.
        """
        unscaled = self._unscaled(scaler)
        if unscaled and not self._scale_free:
            self._refuse_unscaled()
        scale = 1.0 if scaler is None else float(scaler.get_scale())
        self._scaler_seen = scaler is not None
        if scale != 1.0 and not self._scale_free:
            self._multiply(1.0 / scale)
        more = self._advance() is not None
        if unscaled and more:
            self._refuse_unscaled()
        if scale != 1.0 and not self._scale_free and not more:
            self._multiply(scale)
        return more

    def _unscaled(self, scaler: GradScaler | None) -> bool:
        """Whether `scaler.unscale_` was called, which it may be once before `scaler.update`."""
        states = getattr(scaler, "_per_optimizer_states", {})  # another device's may have none
        return id(self) in states and states[id(self)]["stage"] is not OptState.READY

    def _refuse_unscaled(self) -> None:
        self.restore()
        raise InvalidValue(
            "scaler.unscale_(optimizer) came before the last pass, or scaler.update() is missing "
            "after the step before. Call unscale_ after `while optimizer.perturb(scaler): …`, then "
            "scaler.step(optimizer) and scaler.update()."
        )

    def restore(self) -> None:
        """Put the weights back and forget the passes of this step, after an error for instance."""
        self._ready = False
        if self._walk is not None:
            self._walk.close()
            self._walk = None
        self._await_first_pass()

    def step(self, closure: Any = None) -> Any:
        """One step, with all its passes if `closure` is given; returns the unperturbed loss."""
        if closure is None:
            self._finish()
            return None
        loss = self._run(closure)
        self._base_step()
        return loss

    def _run(self, closure: Closure, own: Mapping[str, Closure] | None = None) -> Any:
        """All passes of a step; `own` holds closures of their own for some of them."""
        if self._walk is not None or self._ready:
            raise InvalidValue(
                "step(closure) was called between perturb() and step(). Finish with step(), or go "
                "back with restore()."
            )
        self._replay.mark()
        try:
            with self._must_clear(), torch.enable_grad():
                loss = closure()
            while not self._neutral() and (stage := self._advance()) is not None:
                with torch.enable_grad():
                    self._evaluate((own or {}).get(stage), closure)
                if all(p.grad is None for g in self.param_groups for p in g["params"]):
                    raise InvalidValue(
                        "The closure left no gradients at the perturbed weights. It must compute "
                        "the loss and call backward() each time it is called."
                    )
        except BaseException:
            self.restore()
            raise
        return loss

    @contextmanager
    def _must_clear(self) -> Iterator[None]:
        """Refuse a closure that adds to gradients from before: perturbed passes lack those."""
        old = [(p, p.grad) for g in self.param_groups for p in g["params"] if p.grad is not None]
        if not old or self._neutral() or self.closure_accumulates:
            yield
            return
        p, gradient = old[0]
        p.grad = mark = torch.full_like(gradient, torch.nan)
        try:
            yield
        except BaseException:
            if p.grad is mark:
                p.grad = gradient
            raise
        if p.grad is mark and bool(mark.isnan().all()):
            p.grad = gradient
            raise InvalidValue(
                "The closure does not clear the gradients, so the perturbed passes would lack "
                "those from before. Begin it with zero_grad(); to accumulate gradients, go over "
                "all micro-batches in it. (In Lightning derive the module from "
                "saltflat.integrations.SharpnessModuleMixin; in manual optimization call "
                "optimizer.step(closure), not step().)"
            )

    def _evaluate(self, own: Closure | None, closure: Closure) -> None:
        if own is None:
            closure()
            return
        if self.same_randomness:  # other data: the random numbers go on instead
            self._replay.resume()
        own()
        if self.same_randomness:
            self._replay.pause()

    def _finish(self) -> None:
        """The step of the base optimizer after passes that the user made."""
        try:
            self._finish_passes()
        except BaseException:
            # GradScaler takes these back only from a step that went well.
            for left in ("grad_scale", "found_inf"):
                self.__dict__.pop(left, None)
            raise

    def _finish_passes(self) -> None:
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if self._walk is None and not self._ready:
            if not self._neutral():
                raise InvalidValue(
                    f"{type(self).__name__}.step() has only one gradient. Pass a closure, or call "
                    "perturb() and backward() again before step()."
                )
            self._ready = True
        elif (
            found_inf is not None
            and not self._scaler_seen
            # Without a scale the gradients were unscaled before, nobody knows in which pass.
            and (grad_scale is None or not self._scale_free)
        ):
            self.restore()
            raise InvalidValue(
                f"{type(self).__name__} needs to know the scale of the gradients, and when they "
                "were unscaled. With a GradScaler call perturb(scaler)."
            )
        if grad_scale is not None:
            self._multiply(float(1.0 / grad_scale.double()))
        if not self._ready and self._advance() is not None:
            self.restore()
            raise InvalidValue(
                f"{type(self).__name__}.step() came too early: a gradient is missing. Use "
                "`while optimizer.perturb(): loss(model).backward()`."
            )
        self._base_step(skip=found_inf is not None and bool(found_inf))

    def _base_step(self, skip: bool = False) -> None:
        self._ready = False
        if not skip:
            self.base.step()
        self._await_first_pass()

    def _await_first_pass(self) -> None:
        if self.same_randomness:
            self._replay.arm()

    @torch.no_grad()
    def _advance(self) -> str | None:
        if self._ready:
            raise InvalidValue(
                "The passes of this step are over. Call step() before perturb(); between the "
                "micro-batches of gather(), zero_grad()."
            )
        if self._walk is None:
            self._walk = self._guarded()
        elif all(p.grad is None for g in self.param_groups for p in g["params"]):
            self.restore()
            raise InvalidValue(
                "There are no gradients at the perturbed weights. After perturb() compute the loss "
                "and call backward() again."
            )
        try:
            stage = next(self._walk, None)
        except BaseException:
            self.restore()
            raise
        torch.clear_autocast_cache()  # it holds the weights from before they moved
        if stage is None:
            self._walk, self._ready = None, True
        return stage

    def _guarded(self) -> Walk:
        passes, frozen = self._passes(), FrozenStatistics(self)
        if self.same_randomness:
            self._replay.pause()
        if self.freeze_batchnorm:
            frozen.open()
        try:
            for stage in passes:
                super().zero_grad()
                if self.same_randomness:
                    self._replay.rewind()
                yield stage
        finally:
            passes.close()
            frozen.close()
            if self.same_randomness:
                self._replay.resume()

    def _with_gradients(self) -> list[tuple[Tensor, Tensor, dict[str, Any]]]:
        """The parameters that have a gradient, each with it and with its group."""
        found = [
            (p, p.grad, group)
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        if not found:
            raise InvalidValue("perturb() found no gradients. Call backward() first.")
        if any(gradient.layout != torch.strided for _, gradient, _ in found):
            raise InvalidValue("Sparse gradients cannot be perturbed. Use sparse=False.")
        return found

    @torch.no_grad()
    def _multiply(self, factor: float) -> None:
        every = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        if every:
            torch._foreach_mul_(every, factor)

    def _adopt(self, base: Optimizer) -> None:
        super()._adopt(base)
        self._walk = None
        self._ready = False
        self._scaler_seen = False
        self._replay = Replay(self)
        self._await_first_pass()

    def __getstate__(self) -> dict[str, Any]:
        if self._walk is not None:
            raise InvalidValue(
                f"{type(self).__name__} cannot be copied between perturb() and step(): the "
                "weights are perturbed. Call step() or restore() first."
            )
        own = {name: self.__dict__[name] for name in ("freeze_batchnorm", "same_randomness")}
        return {**super().__getstate__(), **own}
