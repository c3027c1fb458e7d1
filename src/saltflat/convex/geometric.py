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

Newton's method for sums of exponentials, with a certificate of how far the infimum can be.

The sum is f(u) = Σ_g exp(t_g), t = a − 2 C u. All is done on the shares w_g = exp(t_g) / f, so that
no size of exp(a_g) overflows. Newton's step moves u by y/2 and t by z = −C y, where

    (Cᵀ W C) y = Cᵀ w,      λ² = Σ w z²   (the squared Newton decrement).

**The certificate.** For any v let s = −2 C (v − u) and ‖s‖² = Σ w s². Then

    f(v) / f(u) = 1 + Σ w s + Σ w (eˢ − 1 − s) ≥ 1 − λ ‖s‖ + ‖s‖² / 3     where all |s_g| ≤ 1,

because λ is the largest value of (Cᵀ w)·d over Σ w (C d)² = 1, and eˢ − 1 − s ≥ s² / 3 there. Two
things follow. The right-hand side is at least 1 − ¾ λ². And if 3 λ < √w_g for every g, then f(v)
exceeds f(u) wherever the largest |s_g| is 1, since ‖s‖ ≥ √w_g |s_g|; f being convex, it does so
everywhere further out. So the minimum is attained, and it is at least f(u) (1 − ¾ λ²).

Groups with a share below some τ can be left out of the argument at the price of their shares: the
infimum is not below that of the others. This serves groups whose shares are lost in rounding.

**Rounding.** The system is solved with a residual, so λ is bounded by the sum of Σ w (C y)² under
the root over successive corrections y, the last one counted twice. The rounding errors of t and of
the sum are added to the gap.

**The linear systems** (Cᵀ W C) y = r are for a handful of unknowns or thousands.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any, final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from saltflat.errors import InvalidValue, SaltflatError

if TYPE_CHECKING:
    from scipy.sparse.linalg import LinearOperator

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
    value − gap and value. `gap` bounds the error of the optimisation and of rounding; how, the
    module says. If the infimum is attained, it is so at `point` (to within the gap); else
    `degenerate` says which groups vanish along which direction, and the infimum is approached from
    `point` along it.
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
    from scipy import sparse

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
    from scipy import sparse

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
    from scipy import sparse
    from scipy.sparse.csgraph import connected_components

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
    from scipy import sparse

    shape = (len(labels), labels.max() + 1)
    members = sparse.coo_array((np.ones(len(labels)), (np.arange(len(labels)), labels)), shape)
    others = np.arange(shape[1]) != labels[-1]
    return members.tocsr()[:-1][:, others]


def _normalised(rows: Any) -> Any:
    """The different rows that are not zero, scaled to a largest entry of 1."""
    from scipy import sparse

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
    from scipy import sparse
    from scipy.optimize import linprog

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


EPS = float(np.finfo(np.float64).eps)
_CALM = 1e-2  # largest |z| from which one more Newton step squares the error
_DECREMENT = 1e-14  # λ² whose square, after the step at hand, is below all rounding errors
_CUTS = (0.0, 1e-26, 1e-24, 1e-22, 1e-20, 1e-18, 1e-16)  # shares that the certificate may leave out
Floats = NDArray[np.float64]
_FEW = 300  # unknowns: up to here a dense eigendecomposition is cheaper than conjugate gradients
_SHORT = 8  # entries in a row of C: up to here the pairs of them are worth having


@dataclass(frozen=True, slots=True)
class NewtonResult:
    """Where Newton's method stopped.

    `log_value` is log f(u); `gap` bounds 1 − inf f / f(u); `attained` says that the certificate
    proves that there is a minimum.
    """

    u: Floats
    log_value: float
    gap: float
    attained: bool
    steps: int


def _start(logs: Floats, c: ExponentMatrix) -> Floats:
    """The u for which t is as even as can be (least squares in logarithms), or 0 if it is better.

    Rescaling the groups, a → a + 2 C s, moves this start by s: what the group of rescalings can
    change is gone before the first step.
    """
    groups = len(logs)
    even = np.full(groups, 1 / groups)
    system = c.system(even)
    u = system.solve(c.columns @ (even * (logs - logs.mean())), 1e-2) / 2
    return u if _log_sum(logs - 2 * (c.rows @ u)) <= _log_sum(logs) else np.zeros(c.unknowns)


def _log_sum(t: Floats) -> float:
    top = t.max()
    return float(top + np.log(np.exp(t - top).sum()))


def _length(w: Floats, z: Floats) -> float:
    """How far to go: 1 near the minimum, else the minimum of log Σ w exp(s z) over s, roughly."""
    top = float(np.abs(z).max())
    if top <= 0.5:
        return 1.0
    low, high, s = 0.0, 200 / top, min(1.0, 100 / top)
    first = float(w @ z)
    for _ in range(30):
        q = w * np.exp(s * z - (s * z).max())
        slope = float(q @ z / q.sum())
        if abs(slope) <= 0.1 * abs(first):
            break
        low, high = (s, high) if slope < 0 else (low, s)
        spread = float(q @ (z - slope) ** 2 / q.sum())
        s = s - slope / spread if spread > 0 else high
        if not low < s < high:
            s = (low + high) / 2
    return s


def descend(logs: Floats, c: ExponentMatrix, most: int = 200) -> NewtonResult:
    """Minimise Σ exp(logs − 2 C u) over u by Newton's method with a search along each step."""
    u = _start(logs, c)
    decrement, steps, settled = 1.0, 0, False
    while steps < most and not settled:
        steps += 1
        t = logs - 2 * (c.rows @ u)
        w = np.exp(t - _log_sum(t))
        y = c.system(w).solve(c.columns @ w, min(0.1, 0.1 * np.sqrt(decrement)))
        z = -(c.rows @ y)
        decrement = float(w @ z**2)
        u = u + _length(w, z) * y / 2
        settled = decrement <= _DECREMENT and float(np.abs(z).max()) <= _CALM
    return certify(logs, c, u, steps)


def certify(logs: Floats, c: ExponentMatrix, u: Floats, steps: int) -> NewtonResult:
    """The value at u and a bound on how far below it the infimum can be (see the module)."""
    t = logs - 2 * (c.rows @ u)
    log_value = _log_sum(t)
    w = np.exp(t - log_value)
    noise = EPS * (float(w @ (np.abs(logs) + 2 * (c.sizes @ np.abs(u)))) + 8 + np.log2(len(w)))
    for least in _CUTS:
        heavy = w > least
        rest = np.where(heavy, w, 0.0)
        decrement = _decrement(rest, c)
        if 9 * decrement**2 < w[heavy].min(initial=1.0):
            gap = float(w[~heavy].sum()) + 0.75 * decrement**2 + noise
            return NewtonResult(u, log_value, min(gap, 1.0), bool(heavy.all()), steps)
    return NewtonResult(u, log_value, 1.0, False, steps)


def _decrement(w: Floats, c: ExponentMatrix) -> float:
    """A bound on λ that allows for the residual of the linear system."""
    system, residual = c.system(w), c.columns @ w
    size, last = 0.0, 0.0
    for _ in range(3):
        z = c.rows @ system.solve(residual, 1e-2)
        last = float(np.sqrt(w @ z**2))
        size += last
        residual = residual - c.columns @ (w * z)
    return size + last


@final
class System:
    """Solves (Cᵀ W C) y = r; flat directions (C y = 0) get no part of the answer.

    The matrix comes scaled to a unit diagonal, S Cᵀ W C S, with the diagonal of S as `scale`.
    """

    def __init__(self, gram: Floats | LinearOperator, scale: Floats) -> None:
        self._gram, self._scale = gram, scale
        self._factors: tuple[Floats, Floats] | None = None
        if isinstance(gram, np.ndarray):
            values, vectors = np.linalg.eigh(gram)
            regular = values > 8 * len(scale) * EPS * values.max(initial=0)
            self._factors = values[regular], vectors[:, regular]

    def solve(self, right: Floats, accuracy: float) -> Floats:
        """y; `accuracy` is the relative residual asked of conjugate gradients."""
        from scipy.sparse.linalg import cg

        right = self._scale * right
        if self._factors is not None:
            values, vectors = self._factors
            answer = vectors @ ((vectors.T @ right) / values)
        else:
            answer, _ = cg(self._gram, right, rtol=accuracy, maxiter=2000)
        return self._scale * np.asarray(answer)


@final
class ExponentMatrix:
    """The matrix C, dense for few unknowns and sparse for many, and the systems with Cᵀ W C."""

    def __init__(self, rows: Any) -> None:
        self.unknowns: int = rows.shape[1]
        few = self.unknowns <= _FEW
        self.rows = rows.toarray() if few and rows.shape[0] * self.unknowns <= 2e7 else rows
        self.columns = rows.T.tocsr()
        self.sizes = abs(rows)
        self._squares = self.columns.power(2)
        short = np.diff(rows.indptr).max(initial=0) <= _SHORT
        self._pairs = _Pairs(rows) if short and not few else None

    def system(self, weights: Floats) -> System:
        from scipy.sparse.linalg import LinearOperator

        diagonal = self._squares @ weights
        scale = np.where(diagonal > 0, 1 / np.sqrt(np.where(diagonal > 0, diagonal, 1)), 0)
        if self.unknowns <= _FEW:
            return System(scale[:, None] * self._gram(weights) * scale, scale)
        off = None if self._pairs is None else self._pairs.matrix(weights)

        def product(y: Floats) -> Floats:
            y = scale * y
            if off is None:
                return np.asarray(scale * (self.columns @ (weights * (self.rows @ y))))
            return np.asarray(scale * (diagonal * y + off @ y + off.T @ y))

        shape = (self.unknowns, self.unknowns)
        return System(LinearOperator(shape, product, dtype=np.float64), scale)

    def _gram(self, weights: Floats) -> Floats:
        from scipy import sparse

        if isinstance(self.rows, np.ndarray):
            return np.asarray(self.rows.T @ (self.rows * weights[:, None]))
        return np.asarray((self.columns @ (sparse.diags_array(weights) @ self.rows)).toarray())


@final
class _Pairs:
    """The upper triangle of Cᵀ W C: its pattern once, its entries for any W in one pass.

    Forming the product anew for every W would cost many times what the solution does.
    """

    def __init__(self, rows: Any) -> None:
        rows.sort_indices()
        lengths = np.diff(rows.indptr)
        groups, places, products = [], [], []
        for length in range(2, lengths.max(initial=0) + 1):
            members = np.flatnonzero(lengths == length)
            for first, second in combinations(range(length), 2):
                i, j = rows.indptr[members] + first, rows.indptr[members] + second
                groups.append(members)
                places.append(rows.indices[i].astype(np.int64) * rows.shape[1] + rows.indices[j])
                products.append(rows.data[i] * rows.data[j])
        empty = np.zeros(0, dtype=np.int64)
        keys, self._place = np.unique(np.concatenate([empty, *places]), return_inverse=True)
        self._group = np.concatenate([empty, *groups])
        self._product = np.concatenate([np.zeros(0), *products])
        self._indices = keys % rows.shape[1]
        starts = np.arange(rows.shape[1] + 1) * rows.shape[1]
        self._indptr = np.searchsorted(keys, starts)
        self._shape = (rows.shape[1], rows.shape[1])

    def matrix(self, weights: Floats) -> Any:
        from scipy import sparse

        terms = self._product * weights[self._group]
        data = np.bincount(self._place, terms, len(self._indices))
        return sparse.csr_array((data, self._indices, self._indptr), self._shape)
