"""Checks of numbers that a user sets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isfinite
from numbers import Integral, Real
from typing import Any

from saltflat.errors import InvalidType, InvalidValue, nearest


def check_number(name: str, value: Any, *, least: float = 0.0, above: bool = False) -> float:
    """A finite number that is at least `least`, or `above` it."""
    good = not isinstance(value, bool) and isinstance(value, Real) and isfinite(value)
    if not good or value < least or (above and value == least):
        bound = f"above {least:g}" if above else f"at least {least:g}"
        raise InvalidValue(f"{name} must be a finite number {bound}. Got {value!r}.")
    return float(value)


def check_integer(name: str, value: Any, *, least: int = 1) -> int:
    """An integer that is at least `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise InvalidValue(f"{name} must be an integer of at least {least}. Got {value!r}.")
    return int(value)


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """One of these words."""
    if value not in choices:
        listed = " or ".join(map(repr, choices))
        raise InvalidValue(f"{name} must be {listed}. Got {value!r}.")


def check_options(owner: str, options: Iterable[str], known: Iterable[str]) -> None:
    """No option that `owner` does not know, as Python has it of arguments that are spelt out."""
    names = list(known)
    for option in options:
        if option not in names:
            raise InvalidType(f"{owner} has no option {option!r}. {nearest(option, names)}")


def check_seed(seed: Any) -> int:
    """An integer, of either sign."""
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise InvalidType(f"seed must be an integer. Got {seed!r}.")
    return seed
