"""Prints: few bytes by which tensors, models and options of several processes are told apart."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from saltflat.errors import uninterrupted
from saltflat.sharded import is_sharded
from saltflat.vectors import dense_parts

_PIECE = 1 << 20  # words of eight bytes
_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, as a signed integer


@torch.no_grad()
def checksum(tensor: Tensor) -> int:
    """The same for tensors that are equal bit by bit, and hardly ever for others.

    Computed where the tensor is. Integers wrap around, so that there is no rounding; every word is
    folded before it is weighted, because a weight keeps nothing of what it moves out at the top,
    which is where signs are.
    """
    content = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if missing := -len(content) % 8:
        content = torch.nn.functional.pad(content, (0, missing))
    elif content.storage_offset() % 8:
        content = content.clone()
    words = content.view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for piece in words.split(_PIECE):
        folded = (piece ^ (piece >> 32)) * _weights(words.device)[: len(piece)]
        total = total * _FACTOR + (folded ^ (folded >> 29)).sum()
    return int(total)


@cache
def _weights(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(-(2**62), 2**62, (_PIECE,), generator=generator) * 2 + 1
    return words.to(device)


def in_words(value: Any) -> str:
    """An option as text: by its value where it has one, by its name where it is code."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)} {checksum(value):x}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}: {in_words(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple | Set):
        parts = map(in_words, value)
        return "[" + ", ".join(sorted(parts) if isinstance(value, Set) else parts) + "]"
    if is_dataclass(value) and not isinstance(value, type):
        known = ((f.name, getattr(value, f.name)) for f in fields(value) if f.repr)
        return f"{type(value).__name__}({', '.join(f'{n}={in_words(v)}' for n, v in known)})"
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return repr(value)
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def of_modules(model: nn.Module) -> dict[str, str]:
    """The class of every module, with the settings of those that are torch's own."""
    found = {}
    for name, module in model.named_modules():
        kind = type(module)
        own = kind.__module__.startswith("torch.nn.")
        found[name] = f"{kind.__name__}({module.extra_repr() if own else ''})"
    return found


def of_parameters(model: nn.Module) -> dict[str, str]:
    """Type, shape and values of every parameter.

    Of a sharded one, how it is sharded; and the values where processes hold copies of a shard. All
    that share such a model make the call.
    """
    parameters = dict(model.named_parameters())
    prints = {
        n: str(p.placements) if is_sharded(p) else f"{_sum(p):x}" for n, p in parameters.items()
    }
    prints |= {n: f"{prints[n]} {value:x}" for n, value in _of_copies(parameters).items()}
    return {n: f"{p.dtype} {tuple(p.shape)} {prints[n]}" for n, p in parameters.items()}


@uninterrupted()
def _of_copies(parameters: Mapping[str, Any]) -> dict[str, int]:
    """The values of parameters that are sharded in several copies: the same for all processes that
    hold the shards of one copy, and for all copies that are equal."""
    kinds: dict[Any, list[str]] = {}
    for name, p in parameters.items():
        if is_sharded(p) and any(placement.is_replicate() for placement in p.placements):
            kinds.setdefault((p.device_mesh, tuple(p.placements)), []).append(name)
    found: dict[str, int] = {}
    for (mesh, placements), names in kinds.items():
        sums = [tuple(checksum(parameters[name].to_local()) for name in names)]
        for dim, placement in enumerate(placements):
            if not placement.is_replicate():
                group = mesh.get_group(dim)
                parts: list[Any] = [None] * dist.get_world_size(group)
                dist.all_gather_object(parts, sums, group=group)
                sums = [each for part in parts for each in part]
        found |= dict(zip(names, map(hash, zip(*sums, strict=True)), strict=True))
    return found


def of_buffers(model: nn.Module) -> dict[str, int]:
    """The values of every buffer."""
    return {name: _sum(b) for name, b in model.named_buffers()}


def _sum(tensor: Tensor) -> int:
    parts = (part.int_repr() if part.is_quantized else part for part in dense_parts(tensor))
    return hash(tuple(map(checksum, parts)))
