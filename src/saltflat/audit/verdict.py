"""When has a measure moved? By more than its own error."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, final

from saltflat.errors import InvalidValue
from saltflat.measurement import Measurement, Symmetry

Verdict = Literal["invariant", "undecided", "moved"]
ORDER: tuple[Verdict, ...] = ("invariant", "undecided", "moved")

# An error of more than this share of the value decides nothing.
_USELESS = 0.5
# A change of the function by r (BatchNorm's eps, with batch statistics) excuses one of 100 r.
_EXCUSED = 100.0


@final
@dataclass(frozen=True)
class Tolerances:
    """How much a measure may drift, relative to its value, and still be called invariant.

    `closed` for closed forms and users' functions; what has a stated optimality gap may drift by
    the gaps on top, an estimate by `errors` combined standard errors, and a supremum that was
    searched for by `searched`.
    """

    closed: float = 1e-8
    errors: float = 4.0
    searched: float = 0.01

    def __post_init__(self) -> None:
        for name in ("closed", "errors", "searched"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise InvalidValue(f"{name} of Tolerances must be a number ≥ 0. Got {value!r}.")


@final
@dataclass(frozen=True)
class Reading:
    """What a measure said of one model."""

    value: float
    certainty: str
    stderr: float = 0.0
    gap: float = 0.0
    searched: bool = False
    above: bool = False  # an upper bound, which may exceed its measure by more than its error
    declared: frozenset[Symmetry] | None = None

    @classmethod
    def of(cls, m: Measurement) -> Reading:
        return cls(
            m.value,
            m.certainty,
            m.stderr,
            m.gap,
            m.lower_bound,
            m.bound == "upper",
            m.invariant_to,
        )

    def resolved(self, errors: float) -> bool:
        """Whether the value is told from zero, so that its standard error can be believed."""
        return not self.above and (self.stderr == 0 or abs(self.value) > errors * self.stderr)


@final
@dataclass(frozen=True)
class Judgement:
    drift: float
    tolerance: float
    verdict: Verdict


def judge(
    before: Reading, after: Reading, tolerances: Tolerances, excuse: float = 0.0
) -> Judgement:
    """Compare two readings of one measure; `excuse` is how far the function itself moved."""
    change = abs(after.value - before.value)
    size = abs(before.value)
    allowed = before.gap + after.gap + tolerances.errors * math.hypot(before.stderr, after.stderr)
    tolerance = tolerances.closed + _EXCUSED * excuse + _relative(allowed, size)
    if before.searched or after.searched:
        tolerance += tolerances.searched
    drift = _relative(change, size)
    if math.isnan(drift):
        return Judgement(math.inf, tolerance, "moved")
    if drift <= tolerance:
        return Judgement(drift, tolerance, "invariant" if tolerance < _USELESS else "undecided")
    sure = before.resolved(tolerances.errors) and after.resolved(tolerances.errors)
    return Judgement(drift, tolerance, "moved" if sure else "undecided")


def _relative(change: float, size: float) -> float:
    if change == 0:
        return 0.0
    return change / size if size > 0 else math.inf
