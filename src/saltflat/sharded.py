"""Parameters that several processes hold together: DTensors, and the modules of `fully_shard`.

A process holds its shard of a DTensor. FSDP2 (`torch.distributed.fsdp.fully_shard`) gathers the
parameters of one module at a time, for as long as it computes, and then the module's attributes
are plain whole tensors; between passes they are the DTensors again. A module is gathered by all
processes together: they run the same passes, or tell each other what they need (see `Served`).

Tensor parallelism (`torch.distributed.tensor.parallel`) gathers nothing: modules compute with their
parts. Such a model is taken for the plain one that it stands for, module by module or as a whole
(`layered`, `plain`), if that computes the same.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, Protocol, TypeGuard, final
from weakref import WeakKeyDictionary, WeakSet
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._pytree import tree_any, tree_map_only

from saltflat.errors import DistributedError, ModelError, listed, uninterrupted


def is_sharded(tensor: object) -> TypeGuard[Any]:
    """Whether it is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")  # without it there are none
    return module is not None and isinstance(tensor, module.DTensor)


def refuse_sharded(parameters: Iterable[Tensor | None], who: str, advice: str) -> None:
    """The error for what needs whole parameters."""
    if any(map(is_sharded, parameters)):
        raise ModelError(
            f"{who}, and those of this model are sharded (DTensors, as fully_shard makes them). "
            f"{advice}"
        )


def refuse_flattened(parameters: Iterable[Tensor]) -> None:
    """The error for FSDP1, whose parameters are parts of one flat tensor, and no leaves of graphs.

    Without it derivatives by them would be zeros, and norms those of one process.
    """
    if any(getattr(p, "_fsdp_flattened", False) for p in parameters):
        raise ModelError(
            "The model is in FullyShardedDataParallel (FSDP1), which keeps parameters as parts of "
            "flat tensors, one part in each process. Shard it by torch.distributed.fsdp."
            "fully_shard (FSDP2) instead; to measure, a model without FSDP1 will do too that has "
            "loaded its full state dict."
        )


def refuse_precision(model: nn.Module) -> None:
    """The error for modules that FSDP2 lets compute, or answer, in another dtype."""
    shared = set(gathering_modules(model))
    for name, module in model.named_modules():
        if module not in shared:
            continue
        policy = module._get_fsdp_state()._mp_policy
        own = {p.dtype for p in own_parameters(module) if p.is_floating_point()}
        other = {policy.param_dtype, policy.output_dtype} - {None}
        if any(own - {dtype} for dtype in other):
            raise ModelError(
                f"fully_shard has module {name!r} compute or answer in {listed(map(str, other))}, "
                f"by its MixedPrecisionPolicy, with parameters in {listed(map(str, own))}: what "
                "comes of that has few digits. Measure the model without the policy."
            )


def held(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The part of every tensor that this process holds: itself, or the shard of a DTensor."""
    return [_local(t) if is_sharded(t) else t for t in tensors]


@torch.no_grad()
def _local(tensor: Any) -> Tensor:
    shard: Tensor = tensor.to_local()
    return shard


def layouts(tensors: Sequence[Tensor]) -> dict[Any, list[Tensor]]:
    """The tensors by their mesh and placements, which are None for plain ones."""
    found: dict[Any, list[Tensor]] = {}
    for t in tensors:
        if is_sharded(t) and any(placement.is_partial() for placement in t.placements):
            raise ModelError(
                f"A DTensor of shape {tuple(t.shape)} is a sum that processes have not made yet "
                f"(placements {t.placements}), so that nobody knows its norm. Redistribute it."
            )
        found.setdefault((t.device_mesh, t.placements) if is_sharded(t) else None, []).append(t)
    return found


@torch.no_grad()
def summed(number: Tensor, layout: Any) -> Tensor:
    """The sum of what the processes have of a number, for shards of one of the `layouts`."""
    if layout is None:
        return number
    from torch.distributed.tensor import DTensor, Partial, Replicate

    mesh, placements = layout
    parts = [Replicate() if placement.is_replicate() else Partial() for placement in placements]
    whole: Tensor = DTensor.from_local(number, mesh, parts, run_check=False).full_tensor()
    return whole


@torch.no_grad()
def shard_like(whole: Tensor, like: Tensor) -> Tensor:
    """A tensor that every process has, sharded as another one is."""
    if not is_sharded(like):
        return whole
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = like.device_mesh, like.placements
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)


def gathering_modules(model: nn.Module) -> list[Any]:
    """The modules to which `fully_shard` was applied."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return [] if fsdp is None else [m for m in model.modules() if isinstance(m, fsdp.FSDPModule)]


def is_gathering_node(node: Any) -> bool:
    """Whether a node of a graph is FSDP2's own, which hands on what it is given."""
    if "RegisterPostBackward" not in node.name():
        return False
    owner = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
    function = getattr(sys.modules.get(owner), "RegisterPostBackwardFunction", None)
    return function is not None and isinstance(node, function._backward_cls)


def own_parameters(module: nn.Module) -> Iterator[Tensor]:
    """The parameters of a module, also those that FSDP2 has exchanged for gathered ones."""
    yield from module.parameters()
    for group in _groups(module):
        yield from (each.sharded_param for each in group.fsdp_params)


def _groups(model: nn.Module) -> list[Any]:
    """What FSDP2 gathers at a time."""
    return [g for m in gathering_modules(model) for g in _groups_of(m._get_fsdp_state())]


def _groups_of(state: Any) -> list[Any]:
    """What FSDP2 gathers at a time for one `fully_shard`. There is no public way to ask for it."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    if hasattr(state, "_fsdp_param_group"):  # until torch 2.11, which had one or none
        return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    raise ModelError(
        f"torch {torch.__version__} does not tell which parameters fully_shard gathers together "
        "in a way that saltflat knows. Measure a copy of the model that is not sharded, or use "
        "torch 2.13, with which saltflat was tested."
    )


def _forget_pass(root: Any) -> None:
    """Have FSDP2 start anew after a pass that was cut short, with sharded parameters."""
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
        return
    state = root._get_fsdp_state()  # until torch 2.12 there is no method for it
    if state._device.type != "cpu":
        torch.accelerator.synchronize(state._device)
    for each in state._state_ctx.all_states:
        each._training_state = type(each._training_state).IDLE
        each._modules_to_run_forward.clear()
        for group in _groups_of(each):
            group.finalize_backward()
            group._training_state = type(group._training_state).IDLE
            group._to_sharded()
    state._comm_ctx.all_gather_state = None
    state._comm_ctx.post_forward_order.clear()
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False


Take = Callable[[int, Tensor], None]

_WHOLE: WeakSet[nn.Module] = WeakSet()  # modules that stay gathered, as plain ones are
_RELIEVED: WeakSet[nn.Module] = WeakSet()  # modules whose weights others have put in their place


def _at_work(model: nn.Module) -> list[Any]:
    """The modules whose weights FSDP2 gathers and frees."""
    return [module for module in gathering_modules(model) if module not in _RELIEVED]


@contextmanager
def unsharded(model: nn.Module, *, until_backward: bool = False) -> Iterator[None]:
    """Within, all modules that `fully_shard` (FSDP2) shards have what it gathers; afterwards too,
    `until_backward`, until the next backward pass is through with it."""
    modules = [module for module in _at_work(model) if module not in _WHOLE]
    groups = [g for m in modules for g in _groups_of(m._get_fsdp_state())]
    kept = ("reshard_after_backward", "post_forward_mesh_info")
    before = [(group, name, getattr(group, name)) for group in groups for name in kept]
    try:
        for group in groups:
            group.reshard_after_backward = False
            group.post_forward_mesh_info = None  # nor after a forward pass
        for module in modules:
            module.unshard()
            _WHOLE.add(module)
        yield
    finally:
        for module in modules:
            _WHOLE.discard(module)
        for group, name, value in before:
            setattr(group, name, value)
        if not until_backward:
            _reshard(modules)


def _reshard(modules: Iterable[Any]) -> None:
    for module in modules:
        module.reshard()


@contextmanager
def lent(model: nn.Module) -> Iterator[None]:
    """Within, FSDP2 gathers in forward passes alone, and leaves gradients where they are.

    Modules are sharded before and afterwards.
    """
    modules = _at_work(model)
    groups = [g for module in modules for g in _groups_of(module._get_fsdp_state())]
    if not modules or modules[0] in _WHOLE:
        yield
        return
    kept = ("reduce_grads", "unshard_in_backward")
    before = [(group, name, getattr(group, name)) for group in groups for name in kept]
    try:
        for group, name, _ in before:
            setattr(group, name, False)
        yield
    except BaseException:
        for module in modules:
            if module._get_fsdp_state()._is_root:
                _forget_pass(module)
        raise
    finally:
        for group, name, value in before:
            setattr(group, name, value)
        _reshard(modules)


def parameters_of(model: nn.Module) -> dict[str, Any]:
    """The parameters by name: those that processes share as DTensors, also where FSDP2 has just
    gathered them, unless they are to be whole."""
    known = dict[int, Any]()
    for module in _at_work(model):
        if module in _WHOLE:
            module.unshard()  # a state dict that was asked for has sharded it
            continue
        for each in (each for group in _groups(module) for each in group.fsdp_params):
            known |= {id(getattr(each, name, None)): each.sharded_param for name in _STAND_INS}
    return {name: known.get(id(p), p) for name, p in model.named_parameters()}


# What FSDP2 has in the place of a sharded parameter: all of it, or a larger part.
_STAND_INS = "_unsharded_param", "_sharded_post_forward_param"


@contextmanager
def settled(model: nn.Module) -> Iterator[None]:
    """Within, modules are sharded, but for those that are to be whole; afterwards as before.

    FSDP2 leaves some gathered after a forward pass, and users gather others. What these hold is put
    back, so that processes need not gather it together.
    """
    with ExitStack() as stack:
        for module in _at_work(model):
            if module in _WHOLE:
                module.unshard()
                continue
            for group in _groups_of(module._get_fsdp_state()):
                if group.is_unsharded:
                    values = [each._unsharded_param.detach().clone() for each in group.fsdp_params]
                    stack.callback(_gather_again, group, values)
                elif group.is_sharded_post_forward:
                    stack.callback(
                        _restore, group, [dict(vars(each)) for each in group.fsdp_params]
                    )
            module.reshard()
        yield


@torch.no_grad()
def _gather_again(group: Any, values: list[Tensor]) -> None:
    for each, whole in zip(group.fsdp_params, values, strict=True):
        each.alloc_all_gather_outputs()
        with _unsafe_preserve_version_counter(each._unsharded_param):
            each._unsharded_param.copy_(whole)
    group._to_unsharded()


def _restore(group: Any, attributes: list[dict[str, Any]]) -> None:
    """Put back the parts that a group holds after a forward pass, where these are larger."""
    for each, before in zip(group.fsdp_params, attributes, strict=True):
        vars(each).update(before)
        each._setattr_on_modules(each._sharded_post_forward_param)
    group._sharded_state = group.fsdp_params[0].sharded_state


def parallel_tensors(model: nn.Module) -> list[Any]:
    """The DTensors of a model that is tensor parallel; none of one that FSDP2 alone has sharded."""
    of_plain = {
        id(each.sharded_param)
        for module in _at_work(model)
        for group in _groups_of(module._get_fsdp_state())
        for each in group.fsdp_params
        if not each.is_dtensor
    }
    shared = [t for t in (*parameters_of(model).values(), *model.buffers()) if is_sharded(t)]
    return shared if any(id(t) not in of_plain for t in shared) else []


@contextmanager
def plain(model: nn.Module) -> Iterator[None]:
    """Within, a model that processes share is the plain one that it stands for.

    It has whole parameters and buffers in the place of DTensors, and none of the hooks by which
    torch gathers them or moves inputs and outputs from one layout to another. All processes enter
    together. Whether it then computes the same is for others to ask.
    """
    with settled(model), ExitStack() as stack:
        registries = [r for m in model.modules() for r in (m._parameters, m._buffers)]
        stack.enter_context(_exchanged(registries))
        stack.enter_context(_relieved(model))
        yield


@contextmanager
def layered(model: nn.Module) -> Iterator[None]:
    """Within, a model that processes share is the plain one that it stands for while it runs.

    As `plain`, but every module has whole parameters only within its own forward pass, in a
    `Gathering`.
    """
    with settled(model), ExitStack() as stack:
        stack.enter_context(_exchanged([m._buffers for m in model.modules()]))
        stack.enter_context(_relieved(model))
        leaves: dict[int, _Leaf] = {}
        for module in model.modules():
            own = {n: p for n, p in module._parameters.items() if is_sharded(p)}
            if own:
                found = {n: leaves.setdefault(id(p), _Leaf(p)) for n, p in own.items()}
                _UNITS[module] = _Unit(module, found)
                stack.callback(_UNITS.pop, module)
                # After hooks of the user's, which see what the module has run with.
                stack.callback(module.register_forward_hook(_leave).remove)
        yield


@contextmanager
def _exchanged(registries: Iterable[dict[str, Any]]) -> Iterator[None]:
    """Within, registries of modules have plain copies in the place of DTensors."""
    places = [(r, name, t) for r in registries for name, t in r.items() if is_sharded(t)]
    whole = {id(t): t for _, _, t in places}
    whole = {key: _plain_copy(t) for key, t in whole.items()}
    try:
        for registry, name, tensor in places:
            registry[name] = whole[id(tensor)]
        yield
    finally:
        for registry, name, tensor in places:
            registry[name] = tensor


@torch.inference_mode(False)  # also where it is on: graphs save what they are given
def _plain_copy(sharded: Any) -> Tensor:
    whole = _gathered_whole(sharded).clone()  # one that is replicated is no copy yet
    if isinstance(sharded, nn.Parameter):
        return nn.Parameter(whole, requires_grad=sharded.requires_grad)
    return whole


@contextmanager
def _without_layouts(hooks: dict[int, Any]) -> Iterator[None]:
    """Within, a module's hooks are those alone that are not torch's own for shared models."""
    before = list(hooks.items())
    taken = {key for key, hook in before if _moves_layouts(hook)}
    try:
        for key in taken:
            del hooks[key]
        yield
    finally:
        if taken:
            now = dict(hooks)
            hooks.clear()  # others may have come or gone in between
            hooks.update((key, hook) for key, hook in before if key in taken or key in now)
            hooks.update(now)


def _moves_layouts(hook: Any) -> bool:
    owner = getattr(getattr(hook, "func", hook), "__module__", None) or ""
    return owner.startswith(("torch.distributed.tensor", "torch.distributed.fsdp"))


@contextmanager
def _relieved(model: nn.Module) -> Iterator[None]:
    """Within, torch neither gathers weights of the model nor moves what goes through it."""
    modules = _at_work(model)
    with ExitStack() as stack:
        for module in model.modules():
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                stack.enter_context(_without_layouts(hooks))
        stack.callback(_RELIEVED.difference_update, modules)
        _RELIEVED.update(modules)
        yield


class _Absent(Tensor):
    """In the place of a parameter whose module is not running: all but its values is known.

    A DTensor would be computed with, if converted, and its derivative be missing in silence.
    """

    _is_param = True

    @staticmethod
    def __new__(cls, sharded: Any) -> Any:
        return Tensor._make_wrapper_subclass(
            cls,
            sharded.shape,
            dtype=sharded.dtype,
            device=sharded.device,
            requires_grad=sharded.requires_grad,
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> NoReturn:
        raise ModelError(f"{func} takes a weight of a module that is not running")


@final
class _Leaf:
    """A whole parameter, as autograd knows it; without values unless a module is running."""

    @torch.inference_mode(False)
    def __init__(self, sharded: Any) -> None:
        self.sharded, self.users, self.absent = sharded, 0, _Absent(sharded)
        self.whole = nn.Parameter(
            torch.empty(sharded.shape, dtype=sharded.dtype, device=sharded.device),
            requires_grad=sharded.requires_grad,
        )
        self.free()

    def free(self) -> None:
        self.users = 0
        self.whole.untyped_storage().resize_(0)

    @torch.no_grad()
    def fill(self, values: Tensor) -> None:
        self.whole.untyped_storage().resize_(self.whole.nbytes)
        with _unsafe_preserve_version_counter(self.whole):
            self.whole.copy_(values)


@final
class _Unit:
    """A module that has whole parameters while it runs; some may be those of other modules too."""

    def __init__(self, module: nn.Module, leaves: dict[str, _Leaf]) -> None:
        self.module, self.leaves = module, leaves
        self.depth = 0  # it may run within itself

    @property
    def parameters(self) -> list[Any]:
        return [leaf.sharded for leaf in self.leaves.values()]

    def enter(self, fetch: Callable[[Take], object]) -> None:
        """Before the module runs; `fetch` hands over the values of its parameters, by number."""
        leaves = list(self.leaves.values())
        if self.depth == 0:
            if not all(leaf.users for leaf in leaves):
                fetch(lambda k, whole: leaves[k].fill(whole))
            for name, leaf in self.leaves.items():
                leaf.users += 1
                leaf.whole.requires_grad_(leaf.sharded.requires_grad)
                self.module._parameters[name] = leaf.whole
        self.depth += 1

    def leave(self, outputs: Any) -> Any:
        """After it has run; what it returns of its weights is copied, as their values go."""
        self.depth = max(0, self.depth - 1)
        if self.depth:
            return None
        storages = {leaf.whole.untyped_storage()._cdata for leaf in self.leaves.values()}

        def is_weight(each: Any) -> bool:
            strided = isinstance(each, Tensor) and each.layout == torch.strided
            return strided and each.untyped_storage()._cdata in storages

        changed = None
        if tree_any(is_weight, outputs):
            changed = tree_map_only(Tensor, lambda t: t.clone() if is_weight(t) else t, outputs)
        self.part()
        return changed

    def begin(self) -> None:
        """Before a pass: there is nothing to compute with until the module runs."""
        for name, leaf in self.leaves.items():
            self.module._parameters[name] = leaf.absent

    def reset(self) -> None:
        """After a pass, also one that was cut short: the module has its DTensors again."""
        self.depth = 0
        self.part()
        for name, leaf in self.leaves.items():
            leaf.free()
            if self.module._parameters[name] is leaf.absent:
                self.module._parameters[name] = leaf.sharded

    def part(self) -> None:
        for name, leaf in self.leaves.items():
            if self.module._parameters[name] is leaf.whole:
                self.module._parameters[name] = leaf.absent
                leaf.users -= 1
                if leaf.users == 0:
                    leaf.free()


_UNITS: WeakKeyDictionary[nn.Module, _Unit] = WeakKeyDictionary()


def _leave(module: nn.Module, _: Any, outputs: Any) -> Any:
    return _UNITS[module].leave(outputs)


@final
@dataclass(frozen=True, slots=True)
class _Part:
    """A view of a whole parameter that a graph needs, in place of its values."""

    parameter: Any
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


_LEFT, _ASKED, _BUFFERS = "an error", "the call", "buffers"
_RAISED = "A process that shares the model has raised an error: look at the output of the others"
_OTHER_SAMPLES = (
    "The processes that share the model do not run it on the same samples, in the same order. Pass "
    "distributed=True if these are every rank's own, or give every rank the same data, without a "
    "DistributedSampler; and make the same call on all of them"
)
_OTHER_OPTIONS = (
    "The processes that share the model were not asked for the same. All must make the same call, "
    "with the same options: measures, loss, parameters, seed and the rest"
)
_OTHER_BUFFERS = (
    "The processes that share the model have not the same buffers, as running statistics of their "
    "own batches. Pass distributed=True, which takes those of rank 0, or send these to all "
    "(torch.distributed.broadcast)"
)
_PROBLEMS = {_ASKED: _OTHER_OPTIONS, _BUFFERS: _OTHER_BUFFERS}
_NUMBERS = 6  # that processes exchange at a time


class Gathering(ABC):
    """Passes of a model that processes share, layer by layer.

    Autograd knows the whole weights that FSDP2, or a unit, had gathered for the forward pass, and
    frees: they are the leaves of its graphs. What graphs save of them is gathered anew when it is
    asked for.
    """

    @uninterrupted()
    def __init__(self, model: nn.Module) -> None:
        self.modules = _at_work(model)
        self.units = [_UNITS[module] for module in model.modules() if module in _UNITS]
        self.leaves: dict[int, Tensor] = {}  # id of a DTensor -> the leaf of graphs
        self._storages: dict[int, Any] = {}  # where a leaf's values are -> the DTensor
        for module in self.modules:
            module.unshard()
            for group in _groups_of(module._get_fsdp_state()):
                for each in group.fsdp_params:
                    self._know(each.sharded_param, each.unsharded_param)
            module.reshard()
        for leaf in (leaf for unit in self.units for leaf in unit.leaves.values()):
            self._know(leaf.sharded, leaf.whole)
        for name, p in model.named_parameters():
            if is_sharded(p) and id(p) not in self.leaves:
                raise ModelError(
                    f"Parameter {name!r} is a DTensor that fully_shard did not make of a plain "
                    f"tensor, as those of tensor parallelism are. {ADVICE}"
                )

    def _know(self, sharded: Any, leaf: Tensor) -> None:
        plain = not is_sharded(leaf) and leaf.is_contiguous() and leaf.storage_offset() == 0
        if plain:
            self.leaves[id(sharded)] = leaf
            self._storages[leaf.untyped_storage()._cdata] = sharded

    @abstractmethod
    def passing(self, sign: Callable[[], int]) -> AbstractContextManager[None]:
        """What a forward pass runs in; `sign` tells on which samples."""

    @abstractmethod
    def least(self, number: int) -> int:
        """The smallest of what the processes have, where they must go by the same."""

    @abstractmethod
    def meet(self) -> None:
        """Go on together, where processes do not all do the same."""

    @abstractmethod
    def end(self, samples: int) -> None:
        """All data were read, so many samples."""

    @abstractmethod
    def leave(self) -> None:
        """This process raises an error between passes."""

    @contextmanager
    def saving(self, watch: Callable[[nn.Module, Any], None]) -> Iterator[None]:
        """Within, graphs save no weights; `watch` is told of every module before it runs."""
        seen = register_module_forward_pre_hook(watch)
        try:
            for unit in self.units:
                unit.begin()
            with saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            seen.remove()
            _reshard(self.modules)
            for unit in self.units:
                unit.reset()

    def insist(self, module: nn.Module, _: Any) -> None:
        """Refuse what would save weights that are freed: their place is our hooks' to keep."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if torch.is_grad_enabled() and (hooks is None or hooks[0] != self._pack):
            raise ModelError(
                "The model keeps tensors for its backward pass in a way of its own, as "
                "torch.utils.checkpoint does, which does not go together with sharded weights "
                f"here: seen in {type(module).__name__}. Switch checkpointing off. {ADVICE}"
            )

    def _pack(self, saved: Tensor) -> Any:
        strided = saved.layout == torch.strided
        sharded = self._storages.get(saved.untyped_storage()._cdata) if strided else None
        if sharded is None:
            return saved.detach(), saved._version
        return _Part(sharded, saved.size(), saved.stride(), int(saved.storage_offset()))

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, _Part):
            whole = whole_of(packed.parameter)
            return whole.as_strided(packed.size, packed.stride, packed.offset)
        saved: Tensor = packed[0]
        if saved._version != packed[1]:  # which autograd does not look at where there are hooks
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                "inplace operation"
            )
        return saved


@final
class Together(Gathering):
    """All processes make the same passes, on the same samples; FSDP2 gathers."""

    def __init__(self, model: nn.Module, asked: int, buffers: int = 0) -> None:
        super().__init__(model)
        self._passes = 0
        self._closed = False  # whether processes go their own ways
        self._meshes = list({t.device_mesh: t for t in self._storages.values()}.values())
        self._agree(_ASKED, asked)
        self._agree(_BUFFERS, buffers)

    @contextmanager
    def passing(self, sign: Callable[[], int]) -> Iterator[None]:
        self._passes += 1
        self._agree("a pass", self._passes, sign(), int(torch.is_grad_enabled()))
        with self.saving(self._bring):
            yield

    def _bring(self, module: nn.Module, inputs: Any) -> None:
        """Before a module runs: its weights, if FSDP2 does not gather them."""
        self.insist(module, inputs)
        if unit := _UNITS.get(module):
            unit.enter(partial(_fetch, unit.parameters))

    def meet(self) -> None:
        """Which they do."""

    def end(self, samples: int) -> None:
        self._agree("the end of the data", samples)

    def least(self, number: int) -> int:
        return -self._exchanged("a number", -number)[0]

    def leave(self) -> None:
        """The others, who wait, are to stop too."""
        with suppress(DistributedError):  # of another one that was first
            self._exchanged(_LEFT)

    def _agree(self, what: str, *numbers: int) -> None:
        found = self._exchanged(what, *numbers, *(-n for n in numbers))
        if found[: len(numbers)] != [-n for n in found[len(numbers) :]]:
            self._part(_PROBLEMS.get(what, _OTHER_SAMPLES))

    def _exchanged(self, what: str, *numbers: int) -> list[int]:
        """The largest that a process has of each; as many go each time, whatever they are for."""
        if self._closed:
            return list(numbers)
        kind = crc32(what.encode())
        signs = int(what == _LEFT), kind, -kind
        empty = [0] * (_NUMBERS - len(numbers))
        self._closed = True  # unless all answer
        left, most, least, *found = greatest(self._meshes, *signs, *numbers, *empty)
        if left:
            self._part(_RAISED)
        if most != -least:
            self._part(_OTHER_SAMPLES)
        self._closed = False
        return found[: len(numbers)]

    def _part(self, problem: str) -> NoReturn:
        """From here on processes go their own ways."""
        self._closed = True
        raise DistributedError(f"{problem}.")


# What a process may say in the place of a number: that it waits for others to start together, that
# it needs nothing more, and that it has failed.
_MEETS, _RESTS, _FAILS = -1, -2, -3

_ROOM = 3  # times a weight, while it is gathered: as it arrives, put in order, and changed


class Stopped(BaseException):
    """Another process has failed, so that this one cannot go on: nobody's to catch on the way."""


class Ranks(Protocol):
    """The processes of `distributed`, as far as they are known here."""

    service: Served | None

    def told(self, number: int) -> list[int]: ...

    def call(self, collective: Callable[[], Tensor]) -> Tensor: ...


@final
class Served(Gathering):
    """Every process makes passes of its own, on its own samples; weights are gathered on request.

    With other samples processes need other weights at other times, and not as often, and a weight
    is gathered by all of them together. So nobody gathers alone. Before a process needs a weight,
    it tells the others its number; all of them then gather whatever somebody has asked for, and
    let go of what they did not ask for themselves. A process that needs nothing more, since its
    samples have come to their end or it has failed, goes on answering until all others are there
    too. So nothing needs to be agreed upon beforehand: how many passes a process makes, and of
    what, is its own affair.
    """

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        super().__init__(model)
        self._ranks = ranks
        states = (module._get_fsdp_state() for module in self.modules)
        self._states = list({id(state): state for state in states}.values())
        # What is gathered at a time, the same on all ranks: groups of FSDP2, units, each parameter.
        self._bundles: list[list[Any]] = []
        self._groups: dict[int, int] = {}  # id of a group, or of a unit -> its number
        self._places: dict[int, int] = {}  # where a shard's values are -> the parameter's number
        self._changes: dict[int, Callable[[Tensor], object]] = {}
        groups = [group for state in self._states for group in _groups_of(state)]
        for group in groups:
            self._groups[id(group)] = len(self._bundles)
            self._bundles.append([each.sharded_param for each in group.fsdp_params])
        for unit in self.units:
            self._groups[id(unit)] = len(self._bundles)
            self._bundles.append(unit.parameters)
        for sharded in {id(p): p for bundle in self._bundles for p in bundle}.values():
            self._places[_place(sharded)] = len(self._bundles)
            self._bundles.append([sharded])

    @contextmanager
    def open(self) -> Iterator[Served]:
        """Within, weights are gathered on request; all ranks enter and leave."""
        ahead = [(state, state._states_to_forward_prefetch) for state in self._states]
        self._ranks.service = self
        try:
            with _serving(self):
                for state in self._states:
                    state._states_to_forward_prefetch = []  # which would gather unasked
                over = False  # whether nobody waits for this rank any more
                try:
                    yield self
                    with uninterrupted():
                        self.rest()
                        over = True
                except BaseException:
                    with suppress(DistributedError):  # what was raised says more
                        if not over:
                            self.rest(failed=True)
                    raise
        finally:
            self._ranks.service = None
            for state, states in ahead:
                state._states_to_forward_prefetch = states

    @contextmanager
    def passing(self, sign: Callable[[], int]) -> Iterator[None]:
        with self.saving(self._bring):
            yield

    def least(self, number: int) -> int:
        return number

    def end(self, samples: int) -> None:
        """Which is nobody else's affair."""

    def leave(self) -> None:
        """The others are told where all meet."""

    def whole(self, sharded: Any) -> Tensor:
        number = self._places[_place(sharded)]
        (found,) = self._asked(number)
        return self._changed(sharded, found)

    def move(self, sharded: Any, change: Callable[[Tensor], object] | None) -> None:
        place = _place(sharded)
        if change is None:
            self._changes.pop(place, None)
        else:
            self._changes[place] = change

    def meet(self) -> None:
        """Wait until all others wait too, or need nothing more: ranks that go on together ask for
        the same at the same time."""
        while any(state >= 0 for state in self._told(_MEETS)):
            pass

    @uninterrupted()
    def rest(self, failed: bool = False) -> None:
        """Gather for the others until none of them needs anything."""
        state = _FAILS if failed else _RESTS
        while any(each > _RESTS for each in self._told(state)):
            pass

    def _bring(self, module: nn.Module, inputs: Any) -> None:
        """Before a module runs: its weights, in the place of what FSDP2 would gather itself."""
        self.insist(module, inputs)
        if unit := _UNITS.get(module):
            unit.enter(partial(self._fetched, unit))
        if module not in self.modules:
            return
        for group in _groups_of(module._get_fsdp_state()):  # type: ignore[operator]
            if not group.is_unsharded:
                self._fill(group)

    def _fetched(self, unit: _Unit, take: Take) -> None:
        parameters = unit.parameters
        self._asked(
            self._groups[id(unit)],
            lambda k, whole: take(k, self._changed(parameters[k], whole)),
        )

    @torch.no_grad()
    def _fill(self, group: Any) -> None:
        params = group.fsdp_params
        for each in params:
            each.alloc_all_gather_outputs()

        def take(k: int, whole: Tensor) -> None:
            values = self._changed(params[k].sharded_param, whole)
            with _unsafe_preserve_version_counter(params[k]._unsharded_param):
                params[k]._unsharded_param.copy_(values)

        try:
            self._asked(self._groups[id(group)], take)
        except BaseException:
            for each in params:
                each.free_unsharded_param()
            raise
        group._to_unsharded()

    def _changed(self, sharded: Any, whole: Tensor) -> Tensor:
        change = self._changes.get(_place(sharded))
        if change is not None:
            whole = whole.clone()
            change(whole)
        return whole

    def _asked(self, number: int, take: Take | None = None) -> list[Tensor]:
        """What is gathered under a number, unless it is taken one by one."""
        found: list[Tensor] = []
        self._told(number, take or (lambda _, whole: found.append(whole)))
        return found

    @uninterrupted()
    def _told(self, state: int, take: Take | None = None) -> list[int]:
        """What all ranks say; and whatever one of them asks for is gathered."""
        with torch._C._DisableFuncTorch():  # also amid backward passes of many directions at once
            if state > _RESTS:
                self._check_room()
            states = self._ranks.told(state)
            if _FAILS in states:  # which all see, so that nobody gathers any more
                if state > _RESTS:
                    raise Stopped
                return states
            for number in sorted({each for each in states if each >= 0}):
                for k, sharded in enumerate(self._bundles[number]):
                    whole = self._ranks.call(partial(_gathered_whole, sharded))
                    if number == state and take is not None:
                        take(k, whole)
                    del whole
        return states

    def _check_room(self) -> None:
        """Whether there is memory for a weight that others ask for: to run out of it between two
        collectives would leave them waiting."""
        like = self._bundles[0][0]
        if like.device.type == "cuda":
            largest = max(each.numel() for bundle in self._bundles for each in bundle)
            torch.empty(_ROOM * largest, dtype=like.dtype, device=like.device)


def _place(sharded: Any) -> int:
    (shard,) = held([sharded])
    return int(shard.untyped_storage()._cdata)


def shared_parameter(model: nn.Module) -> Any:
    """A parameter that processes share, with as many as any is, or None."""
    shared = filter(is_sharded, parameters_of(model).values())
    return max(shared, key=lambda p: p.device_mesh.size(), default=None)


def is_first(sharded: Any) -> bool:
    """Whether this process is the first of those that share a DTensor, or shares none."""
    return sharded is None or not any(sharded.device_mesh.get_coordinate())


def largest(sharded: Any, *numbers: int) -> list[int]:
    """The largest that a process has of each number, among those that share a DTensor."""
    found: list[int] = _largest(sharded, torch.tensor(numbers, device=sharded.device)).tolist()
    return found


def _largest(sharded: Any, own: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor, Partial

    mesh = sharded.device_mesh
    parts = [Partial("max")] * mesh.ndim
    try:
        whole: Tensor = DTensor.from_local(own, mesh, parts, run_check=False).full_tensor()
    except RuntimeError as error:
        raise DistributedError(
            "A process that shares the model is gone, has raised an error, or does not make this "
            f"call ({str(error).partition('. This')[0]}). Look at the output of the others."
        ) from error
    return whole


@torch.no_grad()
def greatest_entries(shared: Iterable[Any], own: Tensor) -> Tensor:
    """As `greatest`, of each entry of a tensor, which has the same shape in all of them."""
    for tensor in {t.device_mesh: t for t in shared}.values():
        own = _largest(tensor, own)
    return own


def greatest(shared: Iterable[Any], *numbers: int) -> list[int]:
    """The largest that a process has of each number, among those that share some of the DTensors,
    whose meshes may be rows and columns of one."""
    found = list(numbers)
    for tensor in {t.device_mesh: t for t in shared}.values():
        found = largest(tensor, *found)
    return found


def state_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """What its state dict holds, whole, in the same order.

    Of a sharded model copies, one by one: FSDP2 shards modules when it is asked for a state dict,
    and cannot free what numpy has looked at.
    """
    if not gathering_modules(model) and shared_parameter(model) is None:
        yield from model.state_dict(keep_vars=True).items()
        return
    for prefix, module in model.named_modules(remove_duplicate=False):
        buffers = module._buffers.items()
        kept = [(n, b) for n, b in buffers if n not in module._non_persistent_buffers_set]
        for name, tensor in (*module._parameters.items(), *kept):
            if tensor is not None:
                yield f"{prefix}.{name}".lstrip("."), whole_of(tensor).clone()


_SERVICES: list[Served] = []  # that are open, the innermost last


@contextmanager
def _serving(service: Served) -> Iterator[None]:
    """Within, all that is gathered goes by a service."""
    _SERVICES.append(service)
    try:
        yield
    finally:
        _SERVICES.remove(service)


def on_request(tensor: Tensor) -> bool:
    """Whether it is a DTensor whose values every process gets when it asks for them."""
    return bool(_SERVICES) and is_sharded(tensor)


def move(sharded: Tensor, change: Callable[[Tensor], object] | None) -> None:
    """Change what this process gets `on_request`, in place, from here on; None: no more."""
    _SERVICES[-1].move(sharded, change)


@torch.no_grad()
def whole_of(tensor: Tensor) -> Tensor:
    """Its values; those of a DTensor are gathered, by all processes together."""
    if not is_sharded(tensor):
        return tensor.detach()
    return _SERVICES[-1].whole(tensor) if _SERVICES else _gathered_whole(tensor)


@torch.no_grad()
def _fetch(parameters: Iterable[Any], take: Take) -> None:
    for k, sharded in enumerate(parameters):
        take(k, _gathered_whole(sharded))


@torch.no_grad()
def _gathered_whole(sharded: Any) -> Tensor:
    """The values of a DTensor, by a collective of all that share it."""
    whole: Tensor = sharded.detach().full_tensor().contiguous()
    return whole


ADVICE = (
    "Measure it within `with saltflat.gathered(model):`, or gathered(model, example_inputs) if it "
    "is tensor parallel, which takes the memory of the whole model in every process; or measure a "
    "copy that is not sharded."
)
