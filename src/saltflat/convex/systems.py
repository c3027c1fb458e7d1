"""The linear systems (Cᵀ W C) y = r of Newton's method, for a handful of unknowns or thousands."""

from __future__ import annotations

from itertools import combinations
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.sparse.linalg import LinearOperator, cg

Floats = NDArray[np.float64]

_FEW = 300  # unknowns: up to here a dense eigendecomposition is cheaper than conjugate gradients
_SHORT = 8  # entries in a row of C: up to here the pairs of them are worth having
_EPS = float(np.finfo(np.float64).eps)


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
            kept = values > 8 * len(scale) * _EPS * values.max(initial=0)
            self._factors = values[kept], vectors[:, kept]

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
class Exponents:
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
            chosen = np.flatnonzero(lengths == length)
            for first, second in combinations(range(length), 2):
                i, j = rows.indptr[chosen] + first, rows.indptr[chosen] + second
                groups.append(chosen)
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
