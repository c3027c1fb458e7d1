"""A hash of what a user's function computes: two functions of one name are told apart by it."""

from __future__ import annotations

import dis
import hashlib
from collections.abc import Iterator, Mapping
from functools import partial
from inspect import getattr_static
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn

# How far values inside of values are followed, functions that call one another too, and entries of
# a list or a tensor: what lies beyond does not count.
_DEEP, _LONG = 8, 1_000


def code_hash(call: Any) -> str:
    """Of instructions, constants, and the values that these find outside.

    Such values are the defaults, what a closure holds, globals by their names, and the attributes
    and buffers of a callable object. Functions among them count by their own code if they are of
    the same module, and by their names if of another; so do modules with parameters, which may be
    the model. Where a function stands does not matter. Another version of Python has other
    instructions.
    """
    digest = hashlib.blake2b(digest_size=8)
    for word in _words(call, _home(call), _DEEP):
        digest.update(word + b"\0")
    return digest.hexdigest()


def _home(call: Any) -> str:
    """The module that a function was written in; none of torch's."""
    while isinstance(call, partial | MethodType):
        call = call.func if isinstance(call, partial) else call.__func__
    name = str(getattr(call, "__module__", ""))
    return "" if name.split(".")[0] == "torch" else name


def _words(value: Any, home: str, deep: int) -> Iterator[bytes]:
    """What is to be known of a value, in an order that is the same in every process."""
    if isinstance(value, bool | int | float | complex | str | bytes | None):
        yield f"{type(value).__name__} {value!r}".encode()
    elif isinstance(value, np.ndarray | np.generic | Tensor):
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        if np.prod(value.shape) <= _LONG:
            value = value if not isinstance(value, Tensor) else value.detach().to_dense()
            yield repr(value.tolist()).encode()
    elif isinstance(value, frozenset | set):
        yield repr(sorted(map(repr, value))).encode()
    else:
        yield str(getattr(value, "__name__", type(value).__name__)).encode()
        for part in _parts(value, home) if deep else ():
            yield from _words(part, home, deep - 1)


def _parts(value: Any, home: str) -> Iterator[Any]:
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
        yield from (value.__func__, value.__self__)
    elif isinstance(value, partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, Mapping):
        yield from (part for item in list(value.items())[:_LONG] for part in item)
    elif isinstance(value, tuple | list):
        yield from value[:_LONG]
    elif callable(value) and not isinstance(value, type | ModuleType):
        yield from _of_object(value)


def _globals(code: CodeType) -> Iterator[str]:
    """The names that instructions look up in the module, those of functions inside too."""
    yield from (i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL")
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _globals(inner)


def _of_object(value: Any) -> Iterator[Any]:
    """The code and the attributes of a callable object, without what is kept for itself."""
    if isinstance(value, nn.Module) and any(True for _ in value.parameters()):
        return
    name = "forward" if isinstance(value, nn.Module) else "__call__"
    yield getattr_static(type(value), name, None)
    attributes = getattr(value, "__dict__", {})
    if isinstance(value, nn.Module):
        attributes = attributes | value._buffers | value._modules
    yield {k: v for k, v in sorted(attributes.items()) if k[:1] != "_" and k != "training"}
