"""Checks of settings."""

from __future__ import annotations

from math import isfinite
from typing import Any

from saltflat.errors import InvalidValue


def check_number(name: str, value: Any, *, least: float = 0.0, above: bool = False) -> float:
    """A finite number that is at least `least`, or `above` it."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    if not good or value < least or (above and value == least):
        bound = f"above {least:g}" if above else f"at least {least:g}"
        raise InvalidValue(f"{name} must be a finite number {bound}. Got {value!r}.")
    return float(value)
