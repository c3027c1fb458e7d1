"""Optimizers that need gradients at perturbed weights before another optimizer takes the step.

A perturbed pass must leave alone running statistics and the order of random numbers. An optimizer
is given parameters, not a model. The modules are met while they run, through torch's
global module hooks, which are there only as long as they are needed. `torch.compile(model)` runs
the hooks outside of the compiled code; a model compiled in place, `model.compile()`, runs eagerly
while hooks are there.
"""

from __future__ import annotations

import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from inspect import currentframe
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler, OptState
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import LBFGS, Optimizer
from torch.utils.hooks import RemovableHandle

from saltflat.errors import InvalidType, InvalidValue
from saltflat.session import RandomState
from saltflat.sharded import held, own_parameters, refuse_flattened
from saltflat.vectors import copies

Closure = Callable[[], Any]
Walk = Generator[str, None, None]
_SHARED_HOOKS = tuple(
    f"_optimizer_{verb}_{when}_hooks"
    for verb in ("state_dict", "load_state_dict")
    for when in ("pre", "post")
)
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class SharingOptimizer(Optimizer, ABC):
    """Groups, state and state-dict hooks are those of `base`; `defaults` are settings on top."""

    base: Optimizer
    _lasting: tuple[str, ...] = ()  # attributes that a copy has too

    def __init__(self, base: Optimizer, defaults: dict[str, Any]) -> None:
        check_base(base, type(self).__name__)
        refuse_flattened(p for group in base.param_groups for p in group["params"])
        super().__init__([dict(group) for group in base.param_groups], defaults)
        self._adopt(base)
        for group in self.param_groups:
            for name, value in defaults.items():
                group.setdefault(name, value)
        self.defaults = {**base.defaults, **defaults}

    def _setting(self, group: Mapping[str, Any], name: str) -> Any:
        # Groups that the base optimizer added or loaded do not hold it.
        return group.get(name, self.defaults[name])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        base = self.__dict__.get("base")
        if base is None:  # during construction; the base has its groups already
            super().add_param_group(param_group)
            return
        base.add_param_group(param_group)
        for name, value in self.defaults.items():
            param_group.setdefault(name, value)

    def state_dict(self) -> dict[str, Any]:
        return self.base.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.base.load_state_dict(state_dict)

    def _keep_settings(self, base: Optimizer) -> None:
        """Groups that were loaded from a plain optimizer's state keep the settings of this one."""
        for old, new in zip(self.param_groups, base.param_groups, strict=True):
            for name in self.defaults.keys() - base.defaults.keys():
                if name in old:
                    new.setdefault(name, old[name])

    def _adopt(self, base: Optimizer) -> None:
        self.base = base
        for name in _SHARED_HOOKS:
            setattr(self, name, getattr(base, name))
        itself = weakref.ref(self)

        def link(base: Optimizer) -> None:
            if (optimizer := itself()) is not None:
                optimizer._keep_settings(base)
                optimizer.param_groups, optimizer.state = base.param_groups, base.state

        base.register_load_state_dict_post_hook(link)
        self.param_groups, self.state = base.param_groups, base.state

    def __getstate__(self) -> dict[str, Any]:
        own = {name: self.__dict__[name] for name in self._lasting}
        return {"base": self.base, "defaults": self.defaults, **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({k: v for k, v in state.items() if k != "base"})
        self._adopt(state["base"])


def check_base(base: Any, name: str) -> None:
    """Refuse what cannot be the base of the optimizer `name`."""
    if not isinstance(base, Optimizer):
        raise InvalidType(
            f"{name} wraps an optimizer that is there already: "
            f"{name}(torch.optim.SGD(model.parameters(), lr=0.1), …). Got {type(base).__name__} in "
            "its place."
        )
    if isinstance(getattr(base, "optimizer", None), Optimizer):
        raise InvalidType(
            f"{name} goes inside of {type(base).__name__}, not around it: "
            f"accelerator.prepare(model, {name}(torch.optim.SGD(model.parameters(), lr=0.1), …))."
        )
    if isinstance(base, SharingOptimizer | LBFGS):
        raise InvalidType(
            f"{type(base).__name__} evaluates the loss itself and cannot be the base of another "
            "optimizer. Use one whose step() needs no closure."
        )


def refuse_wrapped_closure() -> None:
    """Refuse a closure that comes through what would make the step a wrong one.

    An enabled GradScaler unscales gradients before the step, not those that a closure leaves in it.
    Under accumulation, accelerate calls `step` at the last micro-batch only, so that the closures
    of those before are dropped. Nobody tells us; both are known by their frames above ours.
    """
    frame = currentframe()
    while frame is not None:
        module, owner = frame.f_globals.get("__name__"), frame.f_locals.get("self")
        if module == "torch.amp.grad_scaler" and owner is not None and owner.is_enabled():
            raise InvalidValue(
                "A GradScaler does not unscale the gradients of a closure. Call backward() and "
                "scaler.step(optimizer) without one; of optimizers with perturb(), pass by pass: "
                "`while optimizer.perturb(scaler): scaler.scale(loss(model(x), y)).backward()`."
            )
        if module == "accelerate.optimizer" and owner is not None:
            _refuse_accumulated(owner.gradient_state.num_steps)
        frame = frame.f_back


def _refuse_accumulated(count: int) -> None:
    if count == 1:
        return
    raise InvalidValue(
        f"accelerate accumulates over gradient_accumulation_steps={count} and drops the closures "
        "of all micro-batches but the last. Leave gradient_accumulation_steps out and go over the "
        "micro-batches in the closure: `for x, y in micro_batches: accelerator.backward("
        f"loss(model(x), y) / {count})`."
    )


@final
class Hush:
    """As long as there are hooks of ours, no warning that torch.compile's wrapper runs them too.

    That is what is wanted here. The warning is given where a user calls a model, so only a filter
    reaches it; it goes with the last of the hooks.
    """

    _open = 0

    def __init__(self) -> None:
        message = "Using `torch.compile.module.` when there are global"
        warnings.filterwarnings("ignore", message=message)  # there once, however often it is made
        self._filter = warnings.filters[0]
        Hush._open += 1

    def remove(self) -> None:
        Hush._open -= 1
        if Hush._open == 0 and self._filter in warnings.filters:
            warnings.filters.remove(self._filter)  # type: ignore[attr-defined]


@final
class Listener:
    """Hears of the forward pass of every module, also of a failing one, while it is open."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle | Hush] = []

    def open(
        self,
        before: Callable[[nn.Module, Any], None],
        after: Callable[[nn.Module, Any, Any], None] | None = None,
    ) -> None:
        if self._handles:
            return
        before = torch.compiler.disable(before)
        self._handles = [Hush(), register_module_forward_pre_hook(before)]
        if after is not None:
            after = torch.compiler.disable(after)
            self._handles.append(register_module_forward_hook(after, always_call=True))

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


@final
class FrozenStatistics:
    """Between `open` and `close`, forward passes leave BatchNorm's running statistics alone.

    For the time of a forward pass the statistics are exchanged for copies. The tensors themselves
    are never written to, as autograd may have saved them. Modules that hold no parameter of the
    optimizer are none of its business.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._listener = Listener()
        self._outermost: nn.Module | None = None
        self._depth = 0
        self._lent: list[tuple[nn.Module, str, Tensor]] = []

    def open(self) -> None:
        self._listener.open(self._before, self._after)

    def close(self) -> None:
        self._listener.close()
        self._give_back()

    def _before(self, module: nn.Module, _: Any) -> None:
        optimizer = self._optimizer()
        if self._outermost is None and optimizer is not None and trains(optimizer, module):
            self._outermost = module
            self._lend(module)
        if module is self._outermost:
            self._depth += 1

    def _after(self, module: nn.Module, _: Any, output: Any) -> None:
        if module is self._outermost:
            self._depth -= 1
            if self._depth == 0:
                self._give_back()

    def _lend(self, outermost: nn.Module) -> None:
        for module in outermost.modules():
            if module.training and module._buffers.get("running_mean") is not None:
                for name in STATISTICS:
                    buffer = module._buffers.get(name)
                    if buffer is not None:
                        self._lent.append((module, name, buffer))
        if self._lent:
            instead = copies([buffer for _, _, buffer in self._lent])
            for (module, name, _), copy in zip(self._lent, instead, strict=True):
                module._buffers[name] = copy

    def _give_back(self) -> None:
        for module, name, buffer in self._lent:
            module._buffers[name] = buffer
        self._lent, self._outermost, self._depth = [], None, 0


def trains(optimizer: Optimizer, module: nn.Module) -> bool:
    """Whether the module holds a parameter of the optimizer."""
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return any(id(p) in own for p in own_parameters(module))


def random_states(optimizer: Optimizer) -> list[RandomState]:
    """The global random generators now, those of the parameters' devices included."""
    devices = {p.device for group in optimizer.param_groups for p in group["params"]}
    return [RandomState((), device) for device in devices]


@final
class Replay:
    """Lets a later pass draw the random numbers that the first pass drew: the same dropout masks.

    The first pass begins where `mark` is called or, after `arm`, with the first forward pass, with
    gradients on, of a module that holds a parameter of the optimizer. Without `same_randomness` of
    the optimizer nothing is remembered, and so nothing goes back.
    """

    def __init__(self, optimizer: PerturbedOptimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._start: list[RandomState] = []
        self._now: list[RandomState] = []
        self._listener = Listener()

    def arm(self) -> None:
        self._start = []
        if self._owner().same_randomness:
            self._listener.open(self._before)

    def mark(self) -> None:
        self._listener.close()
        self._start = self._states()

    def pause(self) -> None:
        """The first pass, or one with random numbers of its own, is over."""
        self._listener.close()
        self._now = self._states()

    def rewind(self) -> None:
        for state in self._start:
            state.restore()

    def resume(self) -> None:
        """Go on where `pause` was called."""
        for state in self._now:
            state.restore()
        self._now = []

    def _owner(self) -> PerturbedOptimizer:
        optimizer = self._optimizer()
        assert optimizer is not None, "called by the optimizer itself"
        return optimizer

    def _states(self) -> list[RandomState]:
        optimizer = self._owner()
        return random_states(optimizer) if optimizer.same_randomness else []

    def _before(self, module: nn.Module, _: Any) -> None:
        optimizer = self._optimizer()
        if optimizer is None:
            self._listener.close()
            return
        if torch.is_grad_enabled() and trains(optimizer, module):
            self.mark()


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
    _lasting: tuple[str, ...] = ("freeze_batchnorm", "same_randomness")

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
        self._replay.arm()

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
        self._forget_scale()
        refuse_wrapped_closure()
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
        self._replay.resume()  # other data: the random numbers go on instead
        own()
        self._replay.pause()

    def _finish(self) -> None:
        """The step of the base optimizer after passes that the user made."""
        try:
            self._finish_passes()
        except BaseException:
            self._forget_scale()
            raise

    def _forget_scale(self) -> None:
        """What GradScaler gives to a step, and takes back only from one that went well."""
        for left in ("grad_scale", "found_inf"):
            self.__dict__.pop(left, None)

    def _finish_passes(self) -> None:
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if self._walk is None and not self._ready:
            if not self._neutral():
                raise InvalidValue(
                    f"{type(self).__name__}.step() has only one gradient. Pass a closure, or call "
                    "perturb() and backward() again before step(): `while optimizer.perturb(): "
                    "loss(model).backward()`. With accelerate that is optimizer.optimizer.perturb()"
                    "; in place of transformers' Trainer take saltflat.integrations."
                    "SharpnessTrainer, with the same arguments."
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
        self._replay.pause()
        if self.freeze_batchnorm:
            frozen.open()
        try:
            for stage in passes:
                super().zero_grad()
                self._replay.rewind()
                yield stage
        finally:
            passes.close()
            frozen.close()
            self._replay.resume()

    def _with_gradients(self) -> list[tuple[Tensor, Tensor, dict[str, Any]]]:
        """The parameters that have a gradient, each with it and with its group."""
        entries = [
            (p, p.grad, group)
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        if not entries:
            raise InvalidValue("perturb() found no gradients. Call backward() first.")
        if any(gradient.layout != torch.strided for _, gradient, _ in entries):
            raise InvalidValue("Sparse gradients cannot be perturbed. Use sparse=False.")
        return entries

    @torch.no_grad()
    def _multiply(self, factor: float) -> None:
        every = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        if every:
            torch._foreach_mul_(held(every), factor)

    def _adopt(self, base: Optimizer) -> None:
        super()._adopt(base)
        self._walk = None
        self._ready = False
        self._scaler_seen = False
        self._replay = Replay(self)
        self._replay.arm()

    def __getstate__(self) -> dict[str, Any]:
        if self._walk is not None:
            raise InvalidValue(
                f"{type(self).__name__} cannot be copied between perturb() and step(): the "
                "weights are perturbed. Call step() or restore() first."
            )
        return super().__getstate__()
