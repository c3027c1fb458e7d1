"""Null spaces of sparse integer systems, with a sparse basis."""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

Array = np.ndarray[Any, Any]
Exact = int | Fraction  # nearly all are ±1, and integers take a tenth of the time


def null_space(equations: csr_matrix, late: Array | None = None) -> csr_matrix:
    """A sparse basis, as columns, of the x with `equations @ x = 0`.

    Equations of one term (x_i = 0) and of two opposite terms (x_i = x_j) are solved first, by
    connected components, then those with a variable that no other has; few are left for
    elimination. A variable that is True in `late` is solved for only if nothing else can be: it
    stays free where it may.
    """
    from scipy.sparse import identity

    count = equations.shape[1]
    basis = identity(count, format="csr")
    late = np.zeros(count, bool) if late is None else late
    while True:
        equations = _clean(equations)
        lengths = np.diff(equations.indptr)
        merge = _components(equations, lengths)
        if merge is None:
            merge = _alone(equations, late)
        if merge is None:
            break
        basis, equations = basis @ merge, equations @ merge
        late = np.asarray(abs(merge.T) @ late.astype(float)).ravel() > 0
    if equations.shape[0]:
        basis = basis @ _eliminate(equations, late)[0]
    basis.eliminate_zeros()
    return basis.tocsr()


def _clean(matrix: csr_matrix) -> csr_matrix:
    matrix = matrix.tocsr()
    matrix.sum_duplicates()
    matrix.eliminate_zeros()
    return matrix[np.diff(matrix.indptr) > 0]


def _components(equations: csr_matrix, lengths: Array) -> csr_matrix | None:
    """The map from merged variables to all, or None if there is nothing simple to solve."""
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components

    count, start = equations.shape[1], equations.indptr[:-1]
    single = equations.indices[start[lengths == 1]]
    two = start[lengths == 2]
    opposite = two[equations.data[two] == -equations.data[two + 1]]
    if len(single) == 0 and len(opposite) == 0:
        return None
    # One more node stands for zero.
    a = np.concatenate([single, equations.indices[opposite]])
    b = np.concatenate([np.full(len(single), count), equations.indices[opposite + 1]])
    graph = coo_matrix((np.ones(len(a), bool), (a, b)), shape=(count + 1, count + 1))
    _, label = connected_components(graph, directed=False)
    free = np.flatnonzero(label[:-1] != label[-1])
    # Components are numbered in the order of their first variable.
    names, first = np.unique(label[free], return_index=True)
    rank = np.empty(len(names), int)
    rank[np.argsort(first)] = np.arange(len(names))
    columns = rank[np.searchsorted(names, label[free])]
    return coo_matrix((np.ones(len(free)), (free, columns)), shape=(count, len(names))).tocsr()


def _alone(equations: csr_matrix, late: Array) -> csr_matrix | None:
    """The map from the others to all variables, where some occur in one equation each."""
    from scipy.sparse import coo_matrix

    counts = np.bincount(equations.indices, minlength=equations.shape[1])
    row = np.repeat(np.arange(equations.shape[0]), np.diff(equations.indptr))
    column, data = equations.indices, equations.data
    alone = (counts[column] == 1) & (np.abs(data) == 1) & ~late[column]
    if not alone.any():
        return None
    pivot, sign = np.full(equations.shape[0], -1), np.zeros(equations.shape[0])
    pivot[row[alone]], sign[row[alone]] = column[alone], data[alone]  # the last of several
    others = (pivot[row] >= 0) & (column != pivot[row])
    free = np.setdiff1d(np.arange(equations.shape[1]), pivot)
    # x_pivot = −sign · Σ of the others.
    rows = np.concatenate([free, pivot[row[others]]])
    columns = np.searchsorted(free, np.concatenate([free, column[others]]))
    values = np.concatenate([np.ones(len(free)), -sign[row[others]] * data[others]])
    return coo_matrix((values, (rows, columns)), shape=(equations.shape[1], len(free))).tocsr()


def _eliminate(equations: csr_matrix, late: Array) -> tuple[csr_matrix, list[int]]:
    """Exact elimination, shortest equation first, on the variable that disturbs the fewest.

    Returns a basis of the null space, and the variables that were solved for.
    """
    rows: dict[int, dict[int, Exact]] = {}
    holders: dict[int, set[int]] = defaultdict(set)
    for i in range(equations.shape[0]):
        span = slice(equations.indptr[i], equations.indptr[i + 1])
        rows[i] = {
            int(c): _exact(float(v))
            for c, v in zip(equations.indices[span], equations.data[span], strict=True)
        }
        for c in rows[i]:
            holders[c].add(i)
    solved: list[tuple[int, dict[int, Exact]]] = []
    queue: dict[int, set[int]] = defaultdict(set)  # rows by length
    for i, row in rows.items():
        queue[len(row)].add(i)
    while (shortest := _shortest(queue)) is not None:
        row = rows.pop(shortest)
        for c in row:
            holders[c].discard(shortest)
        if not row:
            continue
        pivot = min(row, key=lambda c: (bool(late[c]), len(holders[c]), abs(row[c]) != 1, -c))
        factor = row.pop(pivot)
        value = {c: _ratio(-v, factor) for c, v in row.items()}
        solved.append((pivot, value))
        for j in holders.pop(pivot, set()):
            queue[len(rows[j])].discard(j)
            _substitute(rows[j], pivot, value, holders, j)
            queue[len(rows[j])].add(j)
    return _back_substitute(solved, equations.shape[1]), [pivot for pivot, _ in solved]


def _exact(value: float) -> Exact:
    return int(value) if value.is_integer() else Fraction(value)


def _ratio(a: Exact, b: Exact) -> Exact:
    return a * b if b in (1, -1) else Fraction(a) / b


def _shortest(queue: dict[int, set[int]]) -> int | None:
    for length in sorted(queue):
        if queue[length]:
            return queue[length].pop()
    return None


def _substitute(
    row: dict[int, Exact],
    pivot: int,
    value: dict[int, Exact],
    holders: dict[int, set[int]],
    name: int,
) -> None:
    factor = row.pop(pivot)
    for c, v in value.items():
        total = row.get(c, 0) + factor * v
        if total:
            row[c] = total
            holders[c].add(name)
        else:
            row.pop(c, None)
            holders[c].discard(name)


def _back_substitute(solved: list[tuple[int, dict[int, Exact]]], count: int) -> csr_matrix:
    from scipy.sparse import coo_matrix, csr_matrix

    known: dict[int, dict[int, Exact]] = {}
    for pivot, value in reversed(solved):
        full: dict[int, Exact] = defaultdict(int)
        for c, v in value.items():
            for d, w in known.get(c, {c: 1}).items():
                full[d] += v * w
        known[pivot] = {c: v for c, v in full.items() if v}
    free = {c: k for k, c in enumerate(c for c in range(count) if c not in known)}
    entries = [(c, k, 1.0) for c, k in free.items()]
    entries += [(p, free[c], float(v)) for p, row in known.items() for c, v in row.items()]
    if not entries:
        return csr_matrix((count, 0))
    row, column, data = zip(*entries, strict=True)
    return coo_matrix((data, (row, column)), shape=(count, len(free))).tocsr()


def independent(columns: csr_matrix) -> Array:
    """Indices of a largest set of linearly independent columns.

    A row with one entry shows that its column is independent of the others; taking such columns
    away leaves few, which are eliminated.
    """
    from scipy.sparse import diags

    matrix = columns.tocsr()
    matrix.eliminate_zeros()
    left = np.ones(matrix.shape[1], bool)
    while True:
        counts = np.asarray(abs(matrix).sign().sum(1)).ravel()
        single = matrix[counts == 1]
        pivots = np.unique(single.nonzero()[1])
        if len(pivots) == 0:
            break
        left[pivots] = False
        matrix = matrix @ diags(left.astype(float), format="csr")
        matrix.eliminate_zeros()
    basis = ~left
    rest = np.flatnonzero(left & (np.asarray(abs(matrix).sum(0)).ravel() > 0))
    if len(rest):
        # The variables that are solved for are columns that do not depend on one another.
        part = _clean(matrix[:, rest])
        basis[rest[_eliminate(part, np.zeros(len(rest), bool))[1]]] = True
    return np.flatnonzero(basis)
