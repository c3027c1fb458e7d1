"""A hash of what a user's function computes: two functions of one name are told apart by it."""

from __future__ import annotations

import dis
import hashlib
from collections.abc import Iterator, Mapping
from enum import Enum
from functools import partial
from inspect import getattr_static
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# How far values inside of values are followed, functions that call one another too, and entries of
# a list and of a tensor: what lies beyond does not count.
_DEEP, _LONG, _LARGE = 8, 1_000, 10_000_000
_PLAIN = bool | int | float | complex | str | bytes | None | range | slice | Enum
_TYPES = torch.dtype | torch.device
_NONE = object()


def code_hash(call: Any) -> str:
    """Of instructions, constants, and the values that these find outside.

    Such values are the defaults, what a closure holds, globals by their names, and of objects and
    classes the attributes that the instructions ask for and do not set themselves, methods and
    buffers too. Functions among them count by their own code if they are of the same module, and by
    their names if of another; so do modules with parameters, which may be the model. Where a
    function stands does not matter. Another version of Python has other instructions.
    """
    digest = hashlib.blake2b(digest_size=8)
    for word in _words(call, _home(call), _DEEP, frozenset(), {}):
        digest.update(word + b"\0")
    return digest.hexdigest()


def _home(call: Any) -> str:
    """The module that a function was written in; none of torch's."""
    while isinstance(call, partial | MethodType):
        call = call.func if isinstance(call, partial) else call.__func__
    name = str(getattr(call, "__module__", ""))
    return "" if name.split(".")[0] == "torch" else name


def _words(
    value: Any, home: str, deep: int, names: frozenset[str], seen: dict[Any, Any]
) -> Iterator[bytes]:
    """What is to be known of a value, in an order that is the same in every process.

    `names` are the attributes that the instructions which found it ask for. What was `seen` is not
    told again; it is held, so that nothing else gets its identity.
    """
    if isinstance(value, _PLAIN | _TYPES):
        yield f"{type(value).__name__} {value!r}".encode()
    elif isinstance(value, np.ndarray | np.generic | Tensor):
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        if np.prod(value.shape) <= _LARGE:
            yield from _entries(value)
    elif isinstance(value, frozenset | set):
        yield repr(sorted(map(repr, value))).encode()
    else:
        yield str(getattr(value, "__name__", type(value).__name__)).encode()
        names |= frozenset(_names(value))
        key = id(value), deep, names
        if deep and key not in seen:
            seen[key] = value
            for part in _parts(value, home, names):
                yield from _words(part, home, deep - 1, names, seen)


def _entries(value: Any) -> Iterator[bytes]:
    if isinstance(value, Tensor):
        value = value.detach().to_dense().cpu().resolve_conj().resolve_neg().contiguous()
        value = value.reshape(-1).view(torch.uint8).numpy()
    yield repr(value.tolist()).encode() if value.dtype == object else value.tobytes()


def _parts(value: Any, home: str, names: frozenset[str]) -> Iterator[Any]:
    """What a value that is no number, word or tensor is made of."""
    if isinstance(value, CodeType):
        yield from (value.co_code, value.co_consts, value.co_names, value.co_varnames)
    elif isinstance(value, FunctionType):
        if value.__module__ == home:
            yield from (value.__code__, value.__defaults__, value.__kwdefaults__)
            filled = (cell for cell in value.__closure__ or () if cell != CellType())
            yield from (cell.cell_contents for cell in filled)
            yield {name: value.__globals__.get(name) for name in _globals(value.__code__)}
        else:
            yield value.__module__
    elif isinstance(value, MethodType):
        yield from (value.__func__, _attributes(value.__self__, names))
    elif isinstance(value, partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, Mapping):
        yield from (part for item in list(value.items())[:_LONG] for part in item)
    elif isinstance(value, tuple | list):
        yield from value[:_LONG]
    elif not isinstance(value, ModuleType):
        yield _attributes(value, names)


def _globals(code: CodeType) -> Iterator[str]:
    """The names that instructions look up in the module, those of functions inside too."""
    yield from (i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL")
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _globals(inner)


def _names(value: Any) -> Iterator[str]:
    """The attributes that a function asks for, or the functions that were found in an object."""
    functions = value.values() if isinstance(value, dict) else [getattr(value, "__func__", value)]
    for function in functions:
        if isinstance(function, FunctionType):
            yield from _asked(function.__code__)


def _asked(code: CodeType, done: str = "LOAD") -> Iterator[str]:
    """The attributes that instructions load, or store, those of functions inside too."""
    kinds = (f"{done}_ATTR", f"{done}_METHOD")
    yield from (i.argval for i in dis.get_instructions(code) if i.opname in kinds)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _asked(inner, done)


def _attributes(value: Any, names: frozenset[str]) -> dict[str, Any]:
    """What instructions that ask for these names find in an object or a class, and what its methods
    among them ask it for; without what they set, which are counters and what is kept for later."""
    if isinstance(value, nn.Module) and any(True for _ in value.parameters()):
        return {}
    waiting, found, kept = set(names), dict[str, Any](), set[str]()
    if callable(value) and not isinstance(value, type):
        waiting.add("forward" if isinstance(value, nn.Module) else "__call__")
    while waiting:
        name = waiting.pop()
        part = _attribute(value, name)
        if name in found or part is _NONE:
            continue
        found[name] = part
        if isinstance(part, FunctionType):
            waiting.update(_asked(part.__code__))
            kept.update(_asked(part.__code__, "STORE"))
    return {name: part for name, part in sorted(found.items()) if name not in kept}


def _attribute(value: Any, name: str) -> Any:
    """As it is kept; of methods and properties the function."""
    own = {} if isinstance(value, type) else dict(getattr(value, "__dict__", {}))
    if isinstance(value, nn.Module):
        own |= value._buffers | value._modules
    kind = value if isinstance(value, type) else type(value)
    part = own[name] if name in own else getattr_static(kind, name, _NONE)
    if isinstance(part, staticmethod | classmethod):
        return part.__func__
    return part.fget if isinstance(part, property) else part
