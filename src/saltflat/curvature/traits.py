"""What can change a model's behaviour without changing its parameters' names.

A certificate is kept for a model as long as these traits stay as they are: the modules and their
types, hooks, and plain attributes such as an activation's name, wherever they are nested.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from types import MethodType
from typing import Any, final

from torch import Tensor, nn

_PLAIN = (str, int, float, bool, complex, bytes, type(None), type)
_DEPTH = 3
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
# What every module has; of it only the hooks can change the function.
_COMMON = frozenset(vars(nn.Module()))


def traits(model: nn.Module) -> Hashable:
    """A key that is equal while the model computes the same function of its parameters."""
    seen: dict[int, Hashable] = {}
    found: list[Hashable] = []
    for module in model.modules():
        attributes = vars(module)
        found.append(str(type(module)))
        for name in sorted(attributes.keys() - _COMMON):
            found.append((name, _trait(attributes[name], seen, 0)))
        for name in _HOOKS:
            if attributes[name]:
                found.append((name, _trait(attributes[name], seen, 0)))
    return tuple(found)


@final
class _Same:
    """Equal to another only while both stand for one object that is still alive."""

    __slots__ = ("key", "method", "reference")

    def __init__(self, value: Any) -> None:
        self.method = isinstance(value, MethodType)
        self.key = id(value.__func__) if self.method else id(value)
        try:
            self.reference: Any = weakref.WeakMethod(value) if self.method else weakref.ref(value)
        except TypeError:
            self.reference = lambda: value

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Same):
            return False
        mine, theirs = self.reference(), other.reference()
        if mine is None:
            return False
        # Each access makes a new bound method; two are equal if they bind the same object.
        return mine is theirs or (self.method and other.method and bool(mine == theirs))


def _trait(value: Any, seen: dict[int, Hashable], depth: int) -> Hashable:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Tensor | nn.Module):
        return str(type(value))  # their values are the function's arguments, or seen elsewhere
    if id(value) in seen:
        return seen[id(value)]
    seen[id(value)] = str(type(value))  # for cycles
    if callable(value) or depth == _DEPTH:
        found: Hashable = _Same(value)
    elif isinstance(value, dict):
        found = tuple((str(k), _trait(v, seen, depth + 1)) for k, v in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        found = tuple(_trait(v, seen, depth + 1) for v in value)
    elif hasattr(value, "__dict__"):
        found = (type(value), _trait(vars(value), seen, depth))
    else:
        found = _Same(value)
    seen[id(value)] = found
    return found
