"""Newton's method for sums of exponentials, with a certificate of how far the infimum can be.

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
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.sparse.linalg import LinearOperator, cg

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
        terms = self._product * weights[self._group]
        data = np.bincount(self._place, terms, len(self._indices))
        return sparse.csr_array((data, self._indices, self._indptr), self._shape)
