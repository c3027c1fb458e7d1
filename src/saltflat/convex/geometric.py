"""The least value of Σ_g A_g exp(−2 C_g·u): what rescalings can do to a trace.

Parameters fall into groups g with curvature mass A_g; a rescaling with log-factors u multiplies the
mass of group g by exp(−2 C_g·u). The least trace that rescalings reach is a geometric program,
convex in u. With the layers as unknowns it is the bias extension of Minimum Sharpness (appendix C
there); with the hidden units as unknowns it is balancing a matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import sparse

from saltflat.convex.newton import certify, descend
from saltflat.convex.systems import Exponents, Floats
from saltflat.convex.vanishing import first_of_each, vanishing
from saltflat.errors import InvalidValue


@dataclass(frozen=True, slots=True, eq=False)
class Degenerate:
    """Why a minimum is not attained.

    Along `direction`, u → u + s·direction with s → ∞, the groups `groups` go to 0 and no other
    changes.
    """

    direction: Floats
    groups: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Minimum:
    """The infimum of Σ_g A_g exp(−2 C_g·u).

    `value` is the sum at `point` over the groups that cannot be driven to 0; the infimum is between
    value − gap and value. `gap` bounds the error of the optimisation and of rounding; how, is in
    `saltflat.convex.newton`. If the infimum is attained, it is so at `point` (to within the gap);
    else `degenerate` says which groups vanish along which direction, and the infimum is approached
    from `point` along it.
    """

    value: float
    point: Floats
    gap: float
    attained: bool
    degenerate: Degenerate | None
    steps: int


def minimise(masses: ArrayLike, exponents: Any) -> Minimum:
    """Minimise Σ_g A_g exp(−2 C_g·u) over u.

    `masses` are A_g ≥ 0 and `exponents` is C, groups × unknowns, an array or a SciPy sparse matrix.
    Groups with equal rows of C are merged first. Flat directions (C u = 0) are left alone.
    """
    a, c = _checked(masses, exponents)
    alive = np.flatnonzero(a > 0)
    first, like = first_of_each(c[alive])
    logs = _log_sums(np.log(a[alive]), like, len(first))
    rows = c[alive][first]
    direction, gone = vanishing(rows)
    degenerate = Degenerate(direction, alive[gone[like]]) if gone.any() else None
    if gone.all():
        return Minimum(0.0, np.zeros(c.shape[1]), 0.0, degenerate is None, degenerate, 0)
    kept = Exponents(rows[~gone])
    solved = descend(logs[~gone], kept) if kept.unknowns else certify(logs, kept, np.zeros(0), 0)
    value = float(np.exp(solved.log_value))
    return Minimum(
        value, solved.u, float(value * solved.gap), degenerate is None, degenerate, solved.steps
    )


def _log_sums(logs: Floats, like: NDArray[np.int64], count: int) -> Floats:
    """log Σ exp over the groups that are alike."""
    top = np.full(count, -np.inf)
    np.maximum.at(top, like, logs)
    return top + np.log(np.bincount(like, np.exp(logs - top[like]), count))


def _checked(masses: ArrayLike, exponents: Any) -> tuple[Floats, Any]:
    a = np.asarray(masses, dtype=np.float64)
    c = sparse.csr_array(exponents if sparse.issparse(exponents) else np.atleast_2d(exponents))
    c = c.astype(np.float64)
    c.sum_duplicates()
    c.eliminate_zeros()
    if a.ndim != 1 or a.shape[0] != c.shape[0]:
        raise InvalidValue(
            "The masses must be one number for each row of the exponents. Got masses of shape "
            f"{a.shape} and exponents of shape {c.shape}."
        )
    if not (np.isfinite(a).all() and np.isfinite(c.data).all()):
        raise InvalidValue(
            "Masses and exponents must be finite. Got "
            f"{np.count_nonzero(~np.isfinite(a))} masses and "
            f"{np.count_nonzero(~np.isfinite(c.data))} exponents that are not."
        )
    if (a < 0).any():
        worst = int(a.argmin())
        raise InvalidValue(
            "Masses must not be negative: the sum would not be convex, and its infimum could be "
            f"−∞. Got {a[worst]:g} for group {worst}; use the Gauss-Newton curvature, whose masses "
            "are never negative for a convex loss."
        )
    return a, c
