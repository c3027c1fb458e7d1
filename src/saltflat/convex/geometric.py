"""The least value of Σ_g A_g exp(−2 C_g·u): what rescalings can do to a trace.

Parameters fall into groups g with curvature mass A_g; a rescaling with log-factors u multiplies the
mass of group g by exp(−2 C_g·u). The least trace that rescalings reach is a geometric program,
convex in u. With the layers as unknowns it is the bias extension of Minimum Sharpness (appendix C
there); with the hidden units as unknowns it is balancing a matrix.

**What vanishes.** For A > 0 there is no minimum iff some u has C u ≥ 0 and C u ≠ 0. The groups with
C_g·u > 0 for such a u add nothing to the infimum. The largest set of them depends on C alone: it is
the complement of the rows that a combination λ ≥ 0 with Cᵀ λ = 0 can use.

Rows of the form c (e_a − e_b), c e_a or −c e_a, which rescalings of layers and neurons give, say
u_a ≥ u_b: an order. On a cycle of it all are equal, and across its strongly connected components
all can be strict at once, so for such rows the answer is a matter of graphs. Other rows need a
linear program, on what is left when every component is made one unknown.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import sparse
from scipy.optimize import linprog
from scipy.sparse.csgraph import connected_components

from saltflat.convex.newton import ExponentMatrix, Floats, certify, descend
from saltflat.errors import InvalidValue, SaltflatError

Flags = NDArray[np.bool_]
_MANY = 20_000  # rows: from here Newton's certificate is tried ahead of the linear program


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
    remaining = ExponentMatrix(rows[~gone])
    solved = (
        descend(logs[~gone], remaining)
        if remaining.unknowns
        else certify(logs, remaining, np.zeros(0), 0)
    )
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


def vanishing(rows: Any) -> tuple[Floats, Flags]:
    """A direction u with C u ≥ 0, and the rows with C_g·u > 0: as many as there can be."""
    edges, general = _order(rows)
    labels = _components(edges, rows.shape[1])
    if not general.any():
        direction = _levels(edges, labels)
        return direction, rows @ direction > 0.5 * _largest(rows)
    merge = _contraction(labels)
    contracted = sparse.csr_array(rows @ merge)
    steps = _program(_normalised(contracted))
    return merge @ steps, contracted @ steps > 0.5 * _largest(contracted)


def _largest(rows: Any) -> Floats:
    """The largest entry of each row in absolute value; 1 for rows of zeros."""
    sizes = np.zeros(rows.shape[0])
    np.maximum.at(sizes, np.repeat(np.arange(len(sizes)), np.diff(rows.indptr)), np.abs(rows.data))
    return np.where(sizes > 0, sizes, 1.0)


def _order(rows: Any) -> tuple[NDArray[np.int64], Flags]:
    """Edges (a, b) for rows that say u_a ≥ u_b, and which rows say something else.

    The unknown numbered last, after those of C, is the constant 0.
    """
    zero = rows.shape[1]
    count = np.diff(rows.indptr)
    first = rows.indptr[:-1]
    one, two = count == 1, count == 2
    i, x = rows.indices, rows.data
    at = first[one]
    single = np.where(
        x[at] > 0, np.stack([i[at], np.full(len(at), zero)]), [np.full(len(at), zero), i[at]]
    )
    at = first[two]
    opposite = x[at] == -x[at + 1]
    general = count > 2
    general[np.flatnonzero(two)[~opposite]] = True
    at = at[opposite]
    pair = np.where(x[at] > 0, np.stack([i[at], i[at + 1]]), np.stack([i[at + 1], i[at]]))
    return np.concatenate([single, pair], axis=1).astype(np.int64), general


def _components(edges: NDArray[np.int64], unknowns: int) -> NDArray[np.int32]:
    graph = sparse.coo_array((np.ones(edges.shape[1]), tuple(edges)), (unknowns + 1, unknowns + 1))
    labels: NDArray[np.int32] = connected_components(graph, connection="strong")[1]
    return labels


def _levels(edges: NDArray[np.int64], labels: NDArray[np.int32]) -> Floats:
    """Whole numbers, equal within components and rising along edges across them; 0 for zero."""
    between = np.unique(labels[edges[:, labels[edges[0]] != labels[edges[1]]]], axis=1)
    level = np.zeros(labels.max() + 1)
    for _ in range(len(level)):
        before = level.copy()
        np.maximum.at(level, between[0], level[between[1]] + 1)
        if np.array_equal(level, before):
            break
    height: Floats = level[labels[:-1]] - level[labels[-1]]
    return height


def _contraction(labels: NDArray[np.int32]) -> Any:
    """Unknowns → components, without the component of the constant 0."""
    shape = (len(labels), labels.max() + 1)
    members = sparse.coo_array((np.ones(len(labels)), (np.arange(len(labels)), labels)), shape)
    others = np.arange(shape[1]) != labels[-1]
    return members.tocsr()[:-1][:, others]


def _normalised(rows: Any) -> Any:
    """The different rows that are not zero, scaled to a largest entry of 1."""
    rows = sparse.csr_array(sparse.diags_array(1 / _largest(rows)) @ rows)
    rows.data[np.abs(rows.data) < 1e-12] = 0
    rows.eliminate_zeros()
    rows = rows[np.diff(rows.indptr) > 0]
    return rows[first_of_each(rows)[0]]


def first_of_each(rows: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of identical rows the first, and for each row the number of its like among these.

    Rows are told apart by two random projections: different rows agree in both with a probability
    of about 1e-30.
    """
    rows.sort_indices()
    signature = rows @ np.random.default_rng(0).standard_normal((rows.shape[1], 2))
    _, first, like = np.unique(
        signature.view(np.complex128), return_index=True, return_inverse=True
    )
    return first, like.ravel()


def _program(rows: Any) -> Floats:
    """max Σ s over u and 0 ≤ s ≤ 1 with C u ≥ s: every s is 0 or 1, as u can be scaled up."""
    groups, unknowns = rows.shape
    if groups == 0:
        return np.zeros(unknowns)
    if groups > _MANY and descend(np.zeros(groups), ExponentMatrix(rows), most=60).attained:
        return np.zeros(unknowns)
    result = linprog(
        np.r_[np.zeros(unknowns), -np.ones(groups)],
        A_ub=sparse.hstack([-rows, sparse.eye_array(groups)], format="csr"),
        b_ub=np.zeros(groups),
        bounds=[(None, None)] * unknowns + [(0, 1)] * groups,
        method="highs",
    )
    if result.x is None:
        raise SaltflatError(f"The linear program for unattained minima failed: {result.message}.")
    return np.asarray(result.x[:unknowns])
