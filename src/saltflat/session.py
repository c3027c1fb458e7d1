"""Lend a model for measurement and give it back exactly as it was.

The measurement needs evaluation mode, gradients on, no autocast, one floating dtype and operations
that can be differentiated twice. All of that is set here and undone here, also when an exception
passes through.

Forward passes may write too: into buffers, counters, caches, even into parameters. That is undone
as well, for everything that hangs on a module: its tensors, its plain attributes, and the lists,
dicts, sets and deques among them, two levels deep. Objects of other classes are left alone. What
one pass leaves behind must not change what the next one computes, or else a result would depend on
the number of passes: see `Loan.check_steady`.
"""

from __future__ import annotations

import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from math import sqrt
from operator import is_
from traceback import walk_tb
from types import FunctionType, GeneratorType, MethodType
from typing import Any, final
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.jit._fuser import optimized_execution
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves

from saltflat.errors import DistributedError, InvalidType, ModelError, listed
from saltflat.memory import out_of_memory
from saltflat.prints import in_words
from saltflat.sharded import (
    greatest,
    greatest_entries,
    held,
    is_sharded,
    lent,
    parallel_tensors,
    plain,
    refuse_precision,
    settled,
    shard_like,
    unsharded,
    whole_of,
)
from saltflat.vectors import add, dense_parts, total_norm, wraps

Redo = Callable[[], Any]  # puts back what forward passes had left behind

# What a session itself sets among a module's attributes.
_LENT = frozenset({"training", "_backward_hooks", "_backward_pre_hooks"})
_NOTHING: list[Any] = []
_REGISTRIES = frozenset({"_parameters", "_buffers", "_modules"})
_CONTAINERS = frozenset({list, dict, set, deque, OrderedDict, defaultdict, Counter})


@final
class _Attributes:
    """A module's own attributes, and the contents of the containers among them."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self.module = name, module
        self.before = dict(vars(module))
        self.containers: list[tuple[str, Any, list[Any]]] = []
        self.tensors: list[tuple[str, Tensor]] = []  # not those in the module's registries
        for key, value in self.before.items():
            if isinstance(value, Tensor):
                self.tensors.append((key, value))
            elif type(value) in _CONTAINERS:
                self.containers.append((key, value, _items(value) if value else _NOTHING))
                if value and key not in _REGISTRIES:
                    self._look_into(key, value)
            elif type(value) is tuple:
                self._look_into(key, value)

    def _look_into(self, key: str, held: Any) -> None:
        for item in held.values() if isinstance(held, dict) else held:
            if isinstance(item, Tensor):
                self.tensors.append((key, item))
            elif type(item) in _CONTAINERS:
                self.containers.append((key, item, _items(item)))

    def restore(self) -> dict[str, Redo]:
        """Put back what changed, one by one: the module is never without its attributes."""
        redo = self._restore_attributes()
        for key, container, before in self.containers:
            if container or before:
                now = _items(container)
                if len(now) != len(before) or not all(map(is_, now, before)):
                    left = _first_change(now, before) if key in _REGISTRIES else key
                    redo[_join(self.name, left)] = partial(_fill, container, now)
                    _fill(container, before)
        return redo

    def _restore_attributes(self) -> dict[str, Redo]:
        now, before = vars(self.module), self.before
        if list(now) == list(before) and all(map(is_, now.values(), before.values())):
            return {}
        left = {k: v for k, v in now.items() if k not in before or before[k] is not v}
        gone = before.keys() - now.keys()
        for key in left.keys() - before.keys():
            del now[key]
        now.update({key: before[key] for key in (left.keys() & before.keys()) | gone})
        return {
            _join(self.name, key): partial(now.__setitem__, key, value)
            for key, value in left.items()
            if key not in _LENT
        }


def _items(held: Any) -> list[Any]:
    return [*held.keys(), *held.values()] if isinstance(held, dict) else list(held)


def _pairs(items: list[Any]) -> Iterator[tuple[Any, Any]]:
    half = len(items) // 2
    return zip(items[:half], items[half:], strict=True)


def _first_change(now: list[Any], before: list[Any]) -> str:
    """The first key of a dict, given by its items, whose value is another one or was not there."""
    known = dict(_pairs(before))
    changed = [str(n) for n, value in _pairs(now) if n not in known or known[n] is not value]
    return changed[0] if changed else str(before[0])


def _fill(held: Any, items: list[Any]) -> None:
    held.clear()
    if isinstance(held, dict):
        held.update(_pairs(items))
    elif isinstance(held, set):
        held.update(items)
    else:
        held.extend(items)


@final
class _ScriptAttributes:
    """The attributes that a ScriptModule keeps in C++, where each access makes new containers."""

    def __init__(self, name: str, module: torch.jit.ScriptModule) -> None:
        self.name, self.script = name, module._c
        self.before = {n: self.script.getattr(n) for n in module._concrete_type.get_attributes()}
        self.tensors = [(n, t) for n, t in self.before.items() if isinstance(t, Tensor)]

    def restore(self) -> dict[str, Redo]:
        left: dict[str, Redo] = {}
        for name, before in self.before.items():
            now = self.script.getattr(name)
            if not _alike(now, before):
                self.script.setattr(name, before)
                if name not in _LENT:
                    left[_join(self.name, name)] = partial(self.script.setattr, name, now)
        return left


@final
class _Place:
    """A tensor apart from its values: where they are, and what autograd keeps with it."""

    def __init__(self, name: str, tensor: Tensor, converted: bool) -> None:
        self.name, self.tensor, self.converted = name, tensor, converted
        self.data, self.requires_grad = tensor.data, tensor.requires_grad
        self.grad = tensor.grad if tensor.is_leaf else None
        self.hooks = tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None)

    def restore(self) -> dict[str, Redo]:
        tensor, now = self.tensor, self.tensor.data
        elsewhere = self.converted or _moved(now, self.data)
        if elsewhere:
            tensor.data = self.data
        if tensor.requires_grad != self.requires_grad:
            tensor.requires_grad_(self.requires_grad)
        if tensor.is_leaf and tensor.grad is not self.grad:
            tensor.grad = self.grad
        hooks, later = self.hooks
        if tensor._backward_hooks is not hooks:
            tensor._backward_hooks = hooks
        if getattr(tensor, "_post_accumulate_grad_hooks", None) is not later:
            tensor._post_accumulate_grad_hooks = later  # type: ignore[assignment]
        same = not elsewhere or _same_values(now, self.data.to(now.dtype))
        return {} if same else {self.name: partial(setattr, tensor, "data", now)}


@final
class TensorValues:
    """The values of tensors, where they are: small ones of a kind are compared at once."""

    def __init__(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        found: dict[Any, list[tuple[str, Tensor]]] = {}
        for name, data in ((name, part) for name, t in tensors for part in dense_parts(t)):
            small = data.numel() <= _SMALL and not data.is_quantized
            key = (data.dtype, data.device) if small else id(data)
            found.setdefault(key, []).append((name, data))
        self.kinds = [(each, _joined([t for _, t in each])) for each in found.values()]

    def restore(self) -> dict[str, Redo]:
        left: dict[str, Redo] = {}
        for each, values in self.kinds:
            if len(each) > 1 and _identical(_joined([t for _, t in each]), values):
                continue
            parts = values.split([t.numel() for _, t in each]) if len(each) > 1 else [values]
            for (name, data), part in zip(each, parts, strict=True):
                before = part.reshape(data.shape)
                if not _identical(data, before):
                    left[name] = partial(data.copy_, data.clone())
                    data.copy_(before)
        return left


_SMALL = 1 << 16
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _joined(tensors: list[Tensor]) -> Tensor:
    """A copy of them all."""
    if len(tensors) == 1:
        return tensors[0].clone()
    return torch.cat([t.reshape(-1) for t in tensors])


def _identical(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal bit by bit: a NaN equals itself, −0 is not 0."""
    if a.is_quantized or a.element_size() not in _INTEGERS:
        return torch.equal(a, b)
    if all(t.is_contiguous() and t.nbytes % 8 == t.data_ptr() % 8 == 0 for t in (a, b)):
        words = (t.reshape(-1).view(torch.int64) for t in (a, b))
        return torch.equal(*words)  # in half the time
    kind = _INTEGERS[a.element_size()]
    return torch.equal(a.view(kind), b.view(kind))


def _moved(now: Tensor, before: Tensor) -> bool:
    """Whether a tensor has got other memory, or another view of it."""
    if wraps(now):
        return False
    if now.is_nested or not now.layout == before.layout == torch.strided:
        return True
    places = ((t.data_ptr(), t.dtype, t.shape, t.stride()) for t in (now, before))
    return next(places) != next(places)


def _same_values(a: Tensor, b: Tensor) -> bool:
    parts = list(zip(dense_parts(a), dense_parts(b), strict=True))
    return a.shape == b.shape and all(p.shape == q.shape and _identical(p, q) for p, q in parts)


def _alike(a: Any, b: Any) -> bool:
    """Whether two values are the same numbers, or hold the very same objects."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_alike, a, b))
    if isinstance(a, dict):
        return _alike(list(a.items()), list(b.items()))
    return isinstance(a, int | float | str) and a == b


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


@final
class _Snapshot:
    """Everything of some modules that a measurement could disturb."""

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Module]],
        dtype: torch.dtype | None,
        values: TensorValues | None = None,
    ) -> None:
        self.parameters = _tensors(named, "_parameters")
        self.buffers = _tensors(named, "_buffers")
        self.records: list[Any] = []
        plain: dict[int, tuple[str, Tensor]] = {}
        for prefix, module in named:
            attributes: list[Any] = [_Attributes(prefix, module)]
            if isinstance(module, torch.jit.ScriptModule):
                attributes.append(_ScriptAttributes(prefix, module))
            self.records += attributes
            for key, tensor in (pair for each in attributes for pair in each.tensors):
                plain[id(tensor)] = _join(prefix, key), tensor
        registered = self.parameters | self.buffers
        everything = plain | registered
        converted = {i for i, (_, t) in registered.items() if _to_convert(t, dtype)}
        self.records += [_Place(n, t, i in converted) for i, (n, t) in everything.items()]
        # What is converted is worked on in other memory: there is nothing to copy.
        worked_on = (pair for i, pair in everything.items() if i not in converted)
        self.values = TensorValues(worked_on) if values is None else values
        self.records.append(self.values)
        counted = [t for _, t in everything.values() if not t.is_inference()]
        counted += held(filter(is_sharded, counted))  # a graph may have saved what `to_local` gave
        self.versions = [_unsafe_preserve_version_counter(tensor) for tensor in counted]

    def restore(self) -> dict[str, Redo]:
        """Put everything back, also what comes after a step that fails; tells what had changed."""
        left: dict[str, Redo] = {}
        failure: BaseException | None = None
        for record in self.records:
            try:
                left.update(record.restore())
            except BaseException as error:
                failure = failure or error
        # The values are as they were, so what autograd has saved of them is valid.
        for version in self.versions:
            version.__exit__(None, None, None)
        if failure is not None:
            raise failure
        return left


def _to_convert(tensor: Tensor, dtype: torch.dtype | None) -> bool:
    return dtype is not None and tensor.is_floating_point() and tensor.dtype != dtype


def _tensors(
    named: Sequence[tuple[str, nn.Module]], registry: str
) -> dict[int, tuple[str, Tensor]]:
    """The distinct tensors in a registry of the modules, by identity."""
    found: dict[int, tuple[str, Tensor]] = {}
    for prefix, module in named:
        for name, tensor in getattr(module, registry).items():
            if tensor is not None:
                found.setdefault(id(tensor), (_join(prefix, name), tensor))
    return found


@final
class Loan:
    """What is known of a session once it is over: `left` is what forward passes had changed."""

    def __init__(self) -> None:
        self.left: dict[str, Redo] = {}

    def check_steady(
        self,
        lend_again: Callable[[], AbstractContextManager[Loan]],
        answers: Callable[[int | None], list[Tensor]],
    ) -> None:
        """Refuse a model that computes something else after the session's passes than before.

        Counters and caches do no harm, nor do projections that change nothing the second time
        (weights clipped in place, `max_norm` of an embedding): what is measured is the model with
        its projected weights. But where an average moves on with every pass, a result would belong
        to no state of the model in particular. `answers` runs the model, on some samples or all.
        """
        if not self.left:
            return
        some: int | None = _SOME
        with lend_again():
            try:
                first = answers(some)
            except Exception:  # a model may need its whole batch
                some = None
                first = answers(some)
        try:
            with lend_again():
                for redo in self.left.values():
                    redo()
                later = answers(some)
            steady, cause = all(map(_close, later, first)), None
        except Exception as error:  # in whatever way the passes before it stop this one
            if out_of_memory(error):
                raise
            steady, cause = False, error
        if not steady:
            raise ModelError(
                "Every forward pass changes what the next one computes: it writes into "
                f"{listed(self.left)}, and the outputs follow. A result would depend on the number "
                "of passes. The model is as it was found; measure a version of it whose forward "
                "pass writes nothing in evaluation mode (`if self.training:` around the update)."
            ) from cause


_SOME = 2  # samples that show whether outputs move


def _close(a: Tensor, b: Tensor, digits: float = 100) -> bool:
    """Equal but for rounding, which need not be the same on every run on a GPU."""
    if a.shape != b.shape or not a.numel():
        return a.shape == b.shape
    if not b.is_floating_point():
        return torch.equal(a, b)
    tolerance = digits * torch.finfo(b.dtype).eps * float(b.abs().max())
    return float((a - b).abs().max()) <= tolerance


def arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How a model is called on inputs: a tensor, a tuple of arguments or a dict of them."""
    if isinstance(example, Mapping):
        return (), dict(example)
    return (tuple(example), {}) if isinstance(example, tuple | list) else ((example,), {})


def modules_in(call: Any, depth: int = 3) -> list[nn.Module]:
    """The modules that a callable holds: itself, or what a partial, method or closure refers to.

    Also those among the attributes of a callable object. Globals are not searched.
    """
    if isinstance(call, nn.Module):
        return [call]
    if depth == 0 or not callable(call) or isinstance(call, type):
        return []
    if isinstance(call, partial):
        held: Iterable[Any] = (call.func, *call.args, *call.keywords.values())
    elif isinstance(call, MethodType):
        held = (call.__self__, call.__func__)
    elif isinstance(call, FunctionType):
        held = [*_closure(call), *(call.__defaults__ or ())]
    else:
        held = getattr(call, "__dict__", {}).values()
    return [m for each in held for m in modules_in(each, depth - 1)]


def _closure(function: FunctionType) -> list[Any]:
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not yet assigned
            continue
    return found


class RandomState:
    """The state of the global random generators, and of those that a data loader owns."""

    def __init__(self, data: Any, device: torch.device) -> None:
        self.device = device
        self.torch = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self.python = random.getstate()
        self.numpy = np.random.get_state()
        self.own = [(g, g.get_state()) for g in _generators(data)]

    def restore(self) -> None:
        torch.set_rng_state(self.torch)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        for generator, state in self.own:
            generator.set_state(state)


def _generators(data: Any) -> list[torch.Generator]:
    """The generators of a DataLoader and of its samplers."""
    owners = [data, getattr(data, "sampler", None), getattr(data, "batch_sampler", None)]
    owners.append(getattr(owners[-1], "sampler", None))
    each = (getattr(owner, "generator", None) for owner in owners)
    return list({id(g): g for g in each if isinstance(g, torch.Generator)}.values())


def reduced_precision(device: torch.device) -> bool:
    """Whether TensorFloat-32 is on, and used."""
    backends = torch.backends
    return device.type == "cuda" and (backends.cudnn.allow_tf32 or backends.cuda.matmul.allow_tf32)


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Switch TensorFloat-32 off: three digits are too few to compare two computations by."""
    if device.type != "cuda":
        yield
        return
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before, matmul.allow_tf32 = matmul.allow_tf32, False
    # By their own context, which works also where someone has locked the flags.
    flags = cudnn.flags(
        cudnn.enabled,
        cudnn.benchmark,
        cudnn.benchmark_limit,
        cudnn.deterministic,
        allow_tf32=False,
    )
    try:
        with flags:
            yield
    finally:
        matmul.allow_tf32 = before


def end_checkpoints(error: BaseException | None) -> None:
    """Take off the hooks of every torch.utils.checkpoint that an error has left.

    Until torch 2.12 they stay for as long as the error does, and then whatever hooks lie on top by
    that time are taken off in their place.
    """
    seen = set[int]()
    while error is not None and id(error) not in seen:  # contexts may go round in a circle
        seen.add(id(error))
        frames = [frame for frame, _ in walk_tb(error.__traceback__)]
        for frame in reversed(frames):  # the innermost has come last
            inside = frame.f_globals.get("__name__") == "torch.utils.checkpoint"
            begun = frame.f_locals.get("gen") if inside else None
            if isinstance(begun, GeneratorType):
                begun.close()
        error = error.__context__


def values_of(model: nn.Module) -> TensorValues:
    """A copy of what the tensors of a model hold, for several loans in a row."""
    return _Snapshot(list(model.named_modules()), None).values


@contextmanager
def lend(
    model: nn.Module,
    measured: set[int],
    dtype: torch.dtype | None,
    beside: Sequence[nn.Module] = (),
    values: TensorValues | None = None,
) -> Iterator[Loan]:
    """Put the model into the state in which it is measured; undo it on the way out.

    `measured` are the ids of the parameters to differentiate by; `dtype`, when given, is the
    floating dtype in which everything is computed. Modules `beside` the model (those of a loss)
    are lent in the same way, but for their parameters' `requires_grad`, which stays as it is.
    `values` are what tensors are put back to, if a copy was made before: for loans in a row.
    """
    with settled(model):
        own = dict(model.named_modules())
        others = [("loss." + n if n else "loss", m) for b in beside for n, m in b.named_modules()]
        known = {id(m) for m in own.values()}
        named = [*own.items(), *{id(m): (n, m) for n, m in others if id(m) not in known}.values()]
        snapshot = _Snapshot(named, dtype, values)
        loan = Loan()
        try:
            with ExitStack() as stack:
                stack.enter_context(torch.inference_mode(False))
                stack.enter_context(torch.enable_grad())
                stack.enter_context(lent(model))
                for device in {"cpu"} | {p.device.type for _, p in snapshot.parameters.values()}:
                    if torch.is_autocast_enabled(device):
                        stack.enter_context(torch.autocast(device, enabled=False))
                # Fused attention has no second derivative.
                stack.enter_context(sdpa_kernel(SDPBackend.MATH))
                if "torch._dynamo" in sys.modules:
                    stack.enter_context(torch.compiler.set_stance("force_eager"))
                modules = [m for _, m in named]
                # cuDNN's recurrent kernels differentiate neither twice nor in evaluation mode.
                if any(isinstance(m, nn.RNNBase) for m in modules):
                    stack.enter_context(torch.backends.cudnn.flags(enabled=False))
                stack.enter_context(optimized_execution(False))
                _forget_compiled_scripts(modules)
                _prepare(modules, snapshot, dtype)
                for p in model.parameters():
                    wanted = id(p) in measured and p.is_floating_point()
                    if p.requires_grad != wanted:
                        p.requires_grad_(wanted)
                yield loan
        finally:
            loan.left = snapshot.restore()


def _forget_compiled_scripts(modules: Sequence[nn.Module]) -> None:
    """Let TorchScript run operation by operation while it is switched to do so.

    Once its executor has fused operations into a graph of its own, that graph is used whatever the
    switch says, and second derivatives through it can be wrong, in silence (a gate after a
    BatchNorm is enough). Compiled again when next used, scripts run as before.
    """
    everywhere: Any = torch.jit._state._python_cu
    compiled = list(everywhere.get_functions())
    for module in modules:
        if isinstance(module, torch.jit.ScriptModule):
            compiled += [module._c._get_method(n) for n in module._c._method_names()]
    for each in compiled:
        each._debug_flush_compilation_cache()


def _prepare(modules: Sequence[nn.Module], snapshot: _Snapshot, dtype: torch.dtype | None) -> None:
    for module in modules:
        module.training = False
        # Hooks on the backward pass could return something that is not the derivative.
        for hooks in ("_backward_hooks", "_backward_pre_hooks"):
            if module.__dict__.get(hooks):
                module.__dict__[hooks] = type(module.__dict__[hooks])()
    for _, parameter in snapshot.parameters.values():
        if parameter.is_leaf:
            parameter.grad = None  # nothing that runs in a session adds to what is there
        if parameter._backward_hooks is not None:
            parameter._backward_hooks = None
    for _, tensor in (*snapshot.parameters.values(), *snapshot.buffers.values()):
        if _to_convert(tensor, dtype):
            tensor.data = tensor.data.to(dtype)


@contextmanager
def gathered(
    model: nn.Module, example: Any = None, *, until_backward: bool = False
) -> Iterator[None]:
    """Within, a model that processes share has its whole weights in each of them.

    It is then measured as one that is not sharded: all measures are there, and each process may run
    passes of its own. It takes the memory of the whole model in every process. All processes must
    enter and leave together. Shards, their gradients and torch's hooks are the same ones
    afterwards; what was written into whole weights is forgotten.

    Of a model that is tensor parallel (`parallelize_module`, also under `fully_shard`) the code may
    count on what one process has, as where heads are divided by the number of processes; with whole
    weights it computes something else. So it is run on an `example` in both forms, with its weights
    and with others near them, and refused where these differ by more than rounding.

    Parameters
    ----------
    model : the model; one that is not sharded stays as it is.
    example : of a tensor-parallel model, inputs, the same in all processes: a tensor for
        `model(x)`, a tuple for `model(*x)`, a dict for `model(**x)`; data as they come, since
        blank ones (padding alone) hide differences.
    until_backward : of `fully_shard` alone: keep the weights afterwards, until the next backward
        pass is through with them.

    Examples
    --------
    >>> import torch, saltflat as sf
    >>> model, x, y = torch.nn.Linear(3, 2), torch.randn(8, 3), torch.arange(8) % 2
    >>> with sf.gathered(model):
    ...     report = sf.measure(model, (x, y), measures=["hessian_trace"])
    """
    if not isinstance(model, nn.Module):
        raise InvalidType(f"The model must be a torch.nn.Module. Got {type(model).__name__}.")
    if not parallel_tensors(model):
        with unsharded(model, until_backward=until_backward):
            yield
        return
    if until_backward:
        raise ModelError("A tensor-parallel model is not kept gathered until the backward pass.")
    if example is None:
        raise ModelError(
            "The model is tensor parallel. Pass saltflat.gathered an example, inputs of the model "
            "that are the same in all processes: on these it is compared with the model that has "
            "whole weights, which its code need not be made for."
        )
    args, kwargs = arguments(example)
    likeness = Likeness(model, example, partial(model, *args, **kwargs))
    with plain(model):
        likeness.check()
        yield


@final
class Likeness:
    """Whether a tensor-parallel model computes what the plain one does that it stands for.

    It is made while the model is as it is, and asked to `check` while it is plain. `run` gives the
    outputs on the `example`, which is the same in all processes.
    """

    def __init__(self, model: nn.Module, example: Any, run: Callable[[], Any]) -> None:
        if torch.__version__ < SHARDED_SINCE:  # compared as versions are
            raise ModelError(
                f"The model is tensor parallel, which takes torch {SHARDED_SINCE} or newer: with "
                f"2.8 results differed from those of one process. Got torch {torch.__version__}. "
                "Measure a copy built without parallelize_module, and load full_tensor() of each "
                "parameter."
            )
        self.model, self.run, self.shared = model, run, parallel_tensors(model)
        refuse_precision(model)
        if half := {p.dtype for p in model.parameters() if p.dtype in _HALF}:
            raise ModelError(
                f"The model is tensor parallel, with parameters in {listed(map(str, half))}: too "
                "few digits to tell whether it computes the same with whole weights. Convert it to "
                "float32 before parallelize_module is applied."
            )
        sign = crc32(in_words(example).encode())
        most, least = greatest(self.shared, sign, -sign)
        if most != -least:
            raise DistributedError(
                "The processes that share the model do not run it on the same samples. Give all "
                "of them the same, or pass distributed=True where these are every rank's own."
            )
        self.expected = self._answers()

    def check(self, advice: str = "") -> None:
        """Refuse, in all processes, a model that with whole weights computes something else."""
        cause: Exception | None = None
        problem = ""
        try:
            found = self._answers()
        except DistributedError:
            raise
        except Exception as error:
            cause, problem = error, f"cannot be run ({type(error).__name__}: {error})"
        else:
            shapes, wanted = ([tuple(t.shape) for t in each] for each in (found, self.expected))
            if shapes != wanted:
                problem = f"gives outputs of shapes {listed(map(str, shapes))} and not "
                problem += listed(map(str, wanted))
            elif not all(map(partial(_close, digits=_DIGITS), found, self.expected)):
                problem = "gives other outputs"
        (failed,) = greatest(self.shared, int(bool(problem)))
        if cause is not None and out_of_memory(cause):
            raise cause
        if failed:
            raise ModelError(
                "The model is tensor parallel, and its code is not made for whole weights: with "
                f"them it {problem or 'fails in another process'}, as where a module divides its "
                f"heads by the number of processes, or returns the part of one. {advice}Measure a "
                "copy that is built without parallelize_module, and load full_tensor() of each "
                "parameter."
            ) from cause
        self._check_copies(found)

    def _check_copies(self, found: Sequence[Tensor]) -> None:
        """Refuse processes that have not the same model, where no other compares with their part:
        weights and buffers of a last layer, of which each holds a copy."""
        sign = crc32(str([(t.shape, t.dtype) for t in found]).encode())
        most, least = greatest(self.shared, sign, -sign)
        same = most == -least
        if same:  # and so there are as many, of the same shapes
            numbers = [t for t in found if t.is_floating_point()]
            tops = [greatest_entries(self.shared, t) for t in numbers]
            same = all(map(partial(_close, digits=_DIGITS), numbers, tops))
        (differ,) = greatest(self.shared, int(not same))
        if differ:
            raise ModelError(
                "The processes that share the model do not have the same one: their outputs on the "
                "same samples differ. Weights or buffers of which each holds a copy are not equal; "
                "send those of one process to all (torch.distributed.broadcast)."
            )

    def _answers(self) -> list[Tensor]:
        """The outputs with the weights of the model, and with others near them.

        A weight that is zero, or nearly so, hides what its layer computes before it.
        """
        model = self.model
        measured = {id(p) for p in model.parameters() if p.requires_grad}
        start, found = RandomState(None, next(model.parameters()).device), list[Tensor]()
        with lend(model, measured, None), torch.no_grad():
            for change in (_same, _move):
                change(model)
                try:
                    outputs = self.run()
                finally:
                    start.restore()
                tensors = (leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor))
                found += [whole_of(t).clone() for t in tensors]
        return found


SHARDED_SINCE = "2.11"  # of torch: of models that processes share
_HALF = (torch.float16, torch.bfloat16)
_DIGITS = 1000  # times the rounding of one number: sums of other parts, through many layers


def _same(model: nn.Module) -> None:
    """The weights as they are."""


def _move(model: nn.Module) -> None:
    """Add noise to all weights, the same in whatever form they are."""
    for k, p in enumerate(model.parameters()):
        if p.is_floating_point() and p.numel():
            generator = torch.Generator().manual_seed(k)
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            usual = sqrt(len(p) / p.numel()) if p.ndim > 1 else 1.0
            noise *= 0.1 * max(usual, float(total_norm([p])) / sqrt(p.numel()))
            add([p], [shard_like(noise.to(p.device, p.dtype), p)])
