"""Parameters that several processes hold together: DTensors, and the modules of `fully_shard`.

A process holds its shard of a DTensor. FSDP2 (`torch.distributed.fsdp.fully_shard`) gathers the
parameters of one module at a time, for as long as it computes, and then the module's attributes
are plain whole tensors; between passes they are the DTensors again. Every process must run the
same passes, since a module is gathered by all of them together.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from saltflat.errors import ModelError


def is_sharded(tensor: object) -> TypeGuard[Any]:
    """Whether it is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")  # without it there are none
    return module is not None and isinstance(tensor, module.DTensor)


def refuse_sharded(parameters: Iterable[Tensor], who: str, advice: str) -> None:
    """The error for what needs whole parameters."""
    if any(map(is_sharded, parameters)):
        raise ModelError(
            f"{who}, and those of this model are sharded (DTensors, as fully_shard makes them). "
            f"{advice}"
        )


@torch.no_grad()
def held(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The part of every tensor that this process holds: itself, or the shard of a DTensor."""
    return [t.to_local() if is_sharded(t) else t for t in tensors]


def layouts(tensors: Sequence[Tensor]) -> dict[Any, list[Tensor]]:
    """The tensors by their mesh and placements, which are None for plain ones."""
    found: dict[Any, list[Tensor]] = {}
    for t in tensors:
        found.setdefault((t.device_mesh, t.placements) if is_sharded(t) else None, []).append(t)
    return found


@torch.no_grad()
def summed(number: Tensor, layout: Any) -> Tensor:
    """The sum of what the processes have of a number, for shards of one of the `layouts`."""
    if layout is None:
        return number
    from torch.distributed.tensor import DTensor, Partial, Replicate

    mesh, placements = layout
    parts = [Partial() if placement.is_shard() else Replicate() for placement in placements]
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


def own_parameters(module: nn.Module) -> Iterator[Tensor]:
    """The parameters of a module, also those that FSDP2 has exchanged for gathered ones."""
    yield from module.parameters()
    for group in _groups(module):
        yield from (each.sharded_param for each in group.fsdp_params)


def _groups(model: nn.Module) -> list[Any]:
    """What FSDP2 gathers at a time. There is no public way to ask for it."""
    modules = gathering_modules(model)
    return [g for m in modules for g in m._get_fsdp_state()._fsdp_param_groups]


@contextmanager
def gathered(model: nn.Module, *, until_backward: bool) -> Iterator[None]:
    """Within, all modules of a sharded model have their whole weights, whatever passes are run.

    So second derivatives find the weights that they need, which FSDP2 would have freed. With
    `until_backward` they stay there afterwards, until the next backward pass is through with them.
    """
    modules = gathering_modules(model)
    before = [(group, group.reshard_after_backward) for group in _groups(model)]
    for group, _ in before:
        group.reshard_after_backward = False
    try:
        for module in modules:
            module.unshard()
        yield
    finally:
        for group, reshards in before:
            group.reshard_after_backward = reshards
        if not until_backward:
            for module in modules:
                module.reshard()
