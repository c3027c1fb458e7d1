"""The exceptions that saltflat raises.

Every one derives from `SaltflatError`. A bad value is a `ValueError` too and a bad type a
`TypeError` too, so that code which knows nothing of saltflat still catches what it expects.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class SaltflatError(Exception):
    """Anything that saltflat refuses to do."""


class InvalidValue(SaltflatError, ValueError):
    """An argument has the right type and a wrong value."""


class InvalidType(SaltflatError, TypeError):
    """An argument has the wrong type."""


class ModelError(InvalidValue):
    """The model cannot be measured: its parameters or its outputs are not what they must be."""


class DataError(InvalidValue):
    """The data are empty, not finite, or do not fit the model or the loss."""


class LossError(InvalidValue):
    """The loss cannot be used: unknown name, not a scalar, not finite."""


class MissingDependency(SaltflatError, ImportError):
    """An optional package is needed and is not installed."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The hint for a mistyped name: `Nearest is 'fc1.weight'.`, or the whole list."""
    names = list(known)
    close = get_close_matches(name, names, n=1)
    if close:
        return f"Nearest is {close[0]!r}."
    return "Known: " + ", ".join(map(repr, names[:20])) + ("." if len(names) <= 20 else ", ….")
