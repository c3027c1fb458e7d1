"""Words that tables and pages share: what a measure is, costs, and is invariant to."""

from __future__ import annotations

from collections.abc import Collection
from contextvars import ContextVar
from typing import get_args

from saltflat.measurement import EVERY_RESCALING, Measurement, Symmetry
from saltflat.measures import MEASURES

# What is to be written for a measure that was left out: in Python, or where the command asks.
ASK = ContextVar("ASK", default='measures="all"')
# Why a report that Ctrl-C cut short lacks a measure.
INTERRUPTED = "interrupted"


def absent(reason: str) -> str:
    """What a measure is that was skipped for this reason."""
    return "not computed" if reason == INTERRUPTED else "does not apply"


def invariance(kinds: Collection[str], *, short: bool = False) -> str:
    """`every rescaling` (`all`, if that must be short), `layer, neuron`, or `nothing`."""
    if set(kinds) == EVERY_RESCALING:
        return "all" if short else "every rescaling"
    return ", ".join(kind for kind in get_args(Symmetry) if kind in kinds) or "nothing"


def explanation(name: str) -> str:
    """What a measure is, in one sentence; nothing for one that is not in the catalogue."""
    return MEASURES[name].explanation if name in MEASURES else ""


def gradients(count: float | None) -> str:
    """A number of gradients; nothing for what is made of what is shared."""
    return "" if not count else f"{count:.1f}" if count < 10 else f"{count:.0f}"


def settings(m: Measurement) -> str:
    """δ=0.001, steps=10: what a measure was computed with."""
    shown = {k: v for k, v in m.settings.items() if v is not None and v is not False}
    return ", ".join(f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in shown.items())
