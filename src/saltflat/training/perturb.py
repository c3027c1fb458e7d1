"""What a perturbed pass must leave alone: running statistics, and the order of random numbers.

An optimizer is given parameters, not a model. The modules are met while they run, through torch's
global module hooks, which are there only as long as they are needed. `torch.compile(model)` runs
the hooks outside of the compiled code; a model compiled in place, `model.compile()`, runs eagerly
while hooks are there.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from saltflat.session import RandomState
from saltflat.vectors import copies

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


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


Handle = RemovableHandle | Hush


def listen(
    before: Callable[[nn.Module, Any], None],
    after: Callable[[nn.Module, Any, Any], None] | None = None,
) -> list[Handle]:
    """Call `before` and `after` around the forward pass of every module, also a failing one."""
    handles: list[Handle] = [
        Hush(),
        register_module_forward_pre_hook(torch.compiler.disable(before)),
    ]
    if after is not None:
        handles.append(
            register_module_forward_hook(torch.compiler.disable(after), always_call=True)
        )
    return handles


@final
class FrozenStatistics:
    """Between `open` and `close`, forward passes leave BatchNorm's running statistics alone.

    For the time of a forward pass the statistics are exchanged for copies. The tensors themselves
    are never written to, as autograd may have saved them. Modules that hold no parameter of the
    optimizer are none of its business.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._handles: list[Handle] = []
        self._outermost: nn.Module | None = None
        self._depth = 0
        self._lent: list[tuple[nn.Module, str, Tensor]] = []

    def open(self) -> None:
        if not self._handles:
            self._handles = listen(self._before, self._after)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
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
    return any(id(p) in own for p in module.parameters())


def random_states(optimizer: Optimizer) -> list[RandomState]:
    """The global random generators now, those of the parameters' devices included."""
    devices = {p.device for group in optimizer.param_groups for p in group["params"]}
    return [RandomState((), device) for device in devices]


@final
class Replay:
    """Lets a later pass draw the random numbers that the first pass drew: the same dropout masks.

    The first pass begins where `mark` is called or, after `arm`, with the first forward pass, with
    gradients on, of a module that holds a parameter of the optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._start: list[RandomState] = []
        self._now: list[RandomState] = []
        self._handles: list[Handle] = []

    def arm(self) -> None:
        self._start = []
        if not self._handles:
            self._handles = listen(self._before)

    def mark(self) -> None:
        self._disarm()
        self._start = self._states()

    def pause(self) -> None:
        """The first pass, or one with random numbers of its own, is over."""
        self._disarm()
        self._now = self._states()

    def rewind(self) -> None:
        for state in self._start:
            state.restore()

    def resume(self) -> None:
        """Go on where `pause` was called."""
        for state in self._now:
            state.restore()
        self._now = []

    def _states(self) -> list[RandomState]:
        optimizer = self._optimizer()
        assert optimizer is not None, "called by the optimizer itself"
        return random_states(optimizer)

    def _disarm(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _before(self, module: nn.Module, _: Any) -> None:
        optimizer = self._optimizer()
        if optimizer is None:
            self._disarm()
            return
        if torch.is_grad_enabled() and trains(optimizer, module):
            self.mark()
