"""Normalized sharpness of one matrix: the least of Σ_ij h_ij e^{x_i+y_j} + w²_ij e^{−(x_i+y_j)}.

Equation 17 of Normalized Flat Minima for one matrix, at λ = ½: h is the diagonal of the Hessian, w
the weights, eˣ and eʸ the variances of rows and columns (equations 18 and 19; there the latter
lacks a square).

**Sweeps.** For fixed y the best x is x_i = ½ log(Σ_j w²_ij e^{−y_j} / Σ_j h_ij e^{y_j}), and the
same with rows and columns exchanged. Sums of positive terms lose no accuracy, whatever the sizes,
so sweeps come first and last; where they creep, Newton steps go between them.

**The gap.** Let P = h e^{x+y}, Q = w² e^{−x−y} and R = P + Q. The Newton step (α, β) makes the row
and the column sums of p = P (1+z) and q = Q (1−z) equal, z_ij = α_i + β_j. For |z| ≤ ½ these are
feasible for the dual: by eᵗ ≥ c (1 + t − log c), term by term, and ψ(z) = (1+z) log(1+z) − z ≤ z²,

    f − inf f ≤ Σ P ψ(z) + Q ψ(−z) ≤ Σ R z² ≤ 2 (Σ_i R_i α_i² + Σ_j R_j β_j²),

R_i and R_j being row and column sums. In floating point the sums of p and q differ by what a
further step (α', β') would repair; let ζ = max |α'| + max |β'|. With s_ij the change of x_i + y_j
on the way to a minimum, this adds at most ζ Σ R |s| ≤ 2 ζ Σ (p + q) |s| to the gap. At a minimum no
term exceeds f, so s is bounded on one side, p s ≤ p log(f/P) and −q s ≤ q log(f/Q), and equal sums
make the other side weigh as much; each side adds up to 1.5 f log(2n) at most, for n entries.
Together this is 6 ζ f log(2n) / (1 − 2ζ).

**Zeros.** Which entries keep a minimum from being attained is a matter of zeros alone. There is
none iff some (x, y) has x_i + y_j ≥ 0 where w² > 0, x_i + y_j ≤ 0 where h > 0, and not 0 at all of
these. Let rows and columns be nodes, with an edge i → j for each w²_ij > 0 and an edge j → i for
each h_ij > 0; then x_i ≥ −y_j along the first and −y_j ≥ x_i along the second. All are equal within
a strongly connected component, and between components all can be strict at once. So the entries
that join different components vanish from the infimum, and no others.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log, log1p

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from saltflat.convex.geometric import EPS, Floats
from saltflat.errors import InvalidType, InvalidValue

_SETTLED = 1e-7  # change of y in a sweep from which the gap, its square, is like rounding
_RANGE = 1e100  # entries beyond this, or below its inverse, are brought closer in logarithms


@dataclass(frozen=True, slots=True, eq=False)
class Balanced:
    """The infimum over x and y, between value − gap and value.

    If it is not attained, `value` and (x, y) belong to the sum without the `vanishing` terms that
    can be driven to 0 together. `sweeps` counts updates of all of x and y.
    """

    value: float
    x: Tensor
    y: Tensor
    gap: float
    attained: bool
    vanishing: int
    sweeps: int


@dataclass(slots=True)
class _Sum:
    """The terms h e^{x+y} and w² e^{−x−y} by their factors a = eˣ and b = eʸ.

    In NumPy, whose operations on short vectors take a fraction of the time of torch's.
    """

    h: Floats
    w: Floats
    a: Floats
    b: Floats
    # A number for each column, columns of different numbers sharing no row; None where no entry
    # is 0, so that there is one block and every row and column has terms.
    blocks: NDArray[np.int64] | None

    def rows(self) -> tuple[Floats, Floats]:
        """Sums over columns of the first and of the second terms."""
        return self.a * (self.h @ self.b), (self.w @ (1 / self.b)) / self.a

    def columns(self) -> tuple[Floats, Floats]:
        return self.b * (self.a @ self.h), ((1 / self.a) @ self.w) / self.b

    def across(self, v: Floats) -> Floats:
        """R v."""
        product: Floats = self.a * (self.h @ (self.b * v)) + (self.w @ (v / self.b)) / self.a
        return product

    def down(self, v: Floats) -> Floats:
        """Rᵀ v."""
        product: Floats = self.b * ((self.a * v) @ self.h) + ((v / self.a) @ self.w) / self.b
        return product

    def without_flat(self, residual: Floats, columns: Floats) -> Floats:
        """The residual without its part along (x + c, y − c), where the sum does not change."""
        if self.blocks is None:
            return residual - columns * float(residual.sum() / columns.sum())
        parts: Floats = np.bincount(self.blocks, residual).astype(float)
        sizes: Floats = np.bincount(self.blocks, columns).astype(float)
        flat: Floats = columns * (parts * _inverse(sizes))[self.blocks]
        return residual - flat

    def sweep(self) -> float:
        """Balance the columns, then the rows; the largest change of y."""
        change = self.factors(*self.columns())
        self.b = self.b * change
        self.a = self.a * self.factors(*self.rows())
        return float(np.abs(np.log(change)).max())

    def factors(self, first: Floats, second: Floats) -> Floats:
        """sqrt(second / first), which makes them equal; 1 for a row or column without terms."""
        ratios: Floats = np.sqrt(second) / np.sqrt(first)
        if self.blocks is None:
            return ratios
        return np.where((ratios > 0) & (ratios < np.inf), ratios, 1.0)


def balance(h: Tensor, squares: Tensor) -> Balanced:
    """Minimise Σ h e^{x_i+y_j} + squares e^{−(x_i+y_j)} over x (rows) and y (columns).

    Both are matrices of one shape without negative entries; they are computed with in float64 on
    the CPU.
    """
    h, w = _matrix(h, "h"), _matrix(squares, "squares")
    if h.shape != w.shape:
        raise InvalidValue(
            f"h and squares must have one shape. Got {tuple(h.shape)} and {tuple(w.shape)}."
        )
    x, y = h.new_zeros(h.shape[0]), h.new_zeros(h.shape[1])
    blocks, vanishing = None, 0
    ranges = _checked_range(h, "h"), _checked_range(w, "squares")
    if h.numel() and min(ranges)[0] == 0:
        h, w, labels, vanishing = _without_vanishing(h, w)
        blocks = labels.numpy()
        ranges = _range_of_sums(h), _range_of_sums(w)
    if h.numel() == 0 or ranges[0][1] == 0:  # what is left of h is balanced by what is left of w
        return Balanced(0.0, x, y, 0.0, not vanishing, vanishing, 0)
    if min(ranges)[0] < 1 / _RANGE or max(high for _, high in ranges) > _RANGE:
        h, w, x, y = _in_range(h, w)
    ones = np.ones(h.shape[0]), np.ones(h.shape[1])
    sums = _Sum(h.numpy(), w.numpy(), *ones, blocks)
    with np.errstate(divide="ignore", invalid="ignore"):  # rows and columns without terms
        value, gap, sweeps = _minimise(sums)
    x, y = x + torch.from_numpy(np.log(sums.a)), y + torch.from_numpy(np.log(sums.b))
    return Balanced(value, x, y, gap, not vanishing, vanishing, sweeps)


def _matrix(matrix: Tensor, name: str) -> Tensor:
    if not isinstance(matrix, Tensor):
        raise InvalidType(f"{name} must be a tensor. Got {type(matrix).__name__}.")
    if matrix.ndim != 2:
        raise InvalidValue(
            f"{name} must be a matrix (out, in); sum over kernel positions first. "
            f"Got shape {tuple(matrix.shape)}."
        )
    return matrix.detach().to("cpu", torch.float64)


def _checked_range(matrix: Tensor, name: str) -> tuple[float, float]:
    low, high = _range(matrix)
    if not low >= 0 or not high < float("inf"):
        raise InvalidValue(
            f"{name} must be finite and not negative. Got entries from {low:g} to {high:g}; "
            "clip negative curvature at 0 and report how much was clipped."
        )
    return low, high


def _without_vanishing(h: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """h and w without the terms that can be driven to 0, the blocks, and how many terms went."""
    rows, columns = components(w > 0, h > 0)
    if not (rows.any() or columns.any()):
        return h, w, columns, 0
    gone = 0
    h, w = h.clone(), w.clone()
    for matrix in (h, w):
        # Label 0 is usually nearly everything, and within it nothing changes.
        for part, same in (
            ((rows > 0,), rows[rows > 0, None] == columns),
            ((slice(None), columns > 0), rows[:, None] == columns[columns > 0]),
        ):
            gone += int(torch.count_nonzero(matrix[part] * ~same))
            matrix[part] *= same
    return h, w, columns, gone


def _range(matrix: Tensor) -> tuple[float, float]:
    """The least and the largest entry; NaN if there is one."""
    if matrix.numel() == 0:
        return 0.0, 0.0
    low, high = torch.aminmax(matrix)
    return float(low), float(high)


def _range_of_sums(matrix: Tensor) -> tuple[float, float]:
    """The same of the row and column sums that are not 0."""
    sums = torch.cat([matrix.sum(0), matrix.sum(1)])
    return _range(sums[sums > 0])


def _in_range(h: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Matrices whose entries cannot overflow in the sweeps, and the x and y that this takes."""
    log_h, log_w = h.log(), w.log()
    x, y = h.new_zeros(h.shape[0]), h.new_zeros(h.shape[1])
    for _ in range(3):
        for dim, v in ((1, x), (0, y)):
            s = x[:, None] + y
            half = (torch.logsumexp(log_w - s, dim) - torch.logsumexp(log_h + s, dim)) / 2
            v += half.nan_to_num(nan=0.0)
    s = x[:, None] + y
    return (log_h + s).exp(), (log_w - s).exp(), x, y


def _minimise(sums: _Sum) -> tuple[float, float, int]:
    """Sweep, then take Newton steps as needed; value, gap and number of sweeps."""
    rounding = EPS * (sum(sums.h.shape) / 2 + 8)
    sums.a = sums.factors(*sums.rows())
    change, sweeps = sums.sweep(), 1
    for sweeps in range(2, 40):
        before, change = change, sums.sweep()
        if change <= _SETTLED or (sweeps > 4 and change > 0.5 * before):
            break
    for _ in range(100):
        value, alpha, beta, gap = _newton(sums)
        if gap <= (1e-13 + rounding) * value:
            break
        size = _size(alpha, beta)
        # The step that is safe for functions whose third derivative is at most size × the second.
        step = log1p(size) / size
        sums.a, sums.b = sums.a * np.exp(step * alpha), sums.b * np.exp(step * beta)
        sums.sweep()
        sweeps += 1
    return value, min(value, gap + rounding * value), sweeps


def _newton(sums: _Sum) -> tuple[float, Floats, Floats, float]:
    """The value, the Newton step and the gap that it certifies, infinite if the step is long."""
    (p, q), (s, t) = sums.rows(), sums.columns()
    rows, columns = p + q, s + t
    value = float(rows.sum())
    up, left = q - p, t - s
    alpha, beta = _solve(sums, rows, columns, up, left)
    first = up - rows * alpha - sums.across(beta)
    second = left - columns * beta - sums.down(alpha)
    da, db = _solve(sums, rows, columns, first, second)
    alpha, beta = alpha + da, beta + db
    error = _size(da, db)
    size = _size(alpha, beta)
    if size > 0.5 or error > 0.25:
        return value, alpha, beta, float("inf")
    gap = 2 * float(rows @ alpha**2 + columns @ beta**2)
    return value, alpha, beta, gap + 6 * value * error * log(2 * sums.h.size) / (1 - 2 * error)


def _solve(
    sums: _Sum, rows: Floats, columns: Floats, first: Floats, second: Floats
) -> tuple[Floats, Floats]:
    """α and β with R_i α_i + (R β)_i = first and R_j β_j + (Rᵀ α)_j = second.

    α is eliminated; β comes from conjugate gradients, preconditioned by the column sums. The last
    two lines are one sweep of the linear system: they set right the columns that are too light to
    count in the norm that conjugate gradients look at.
    """
    over_rows, over_columns = _inverse(rows), _inverse(columns)
    residual = sums.without_flat(second - sums.down(over_rows * first), columns)
    beta = np.zeros_like(columns)
    direction = over_columns * residual
    first_energy = energy = float(residual @ direction)
    least = max(1e-12 * first_energy, (EPS / 8) ** 2 * float(columns.sum()))
    for _ in range(500):
        if energy <= least:
            break
        image = columns * direction - sums.down(over_rows * sums.across(direction))
        curvature = float(direction @ image)
        if curvature <= 0:
            break
        beta = beta + energy / curvature * direction
        residual = residual - energy / curvature * image
        energy, before = float(residual @ (over_columns * residual)), energy
        direction = over_columns * residual + energy / before * direction
    alpha = over_rows * (first - sums.across(beta))
    beta = over_columns * (second - sums.down(alpha))
    return over_rows * (first - sums.across(beta)), beta


def _inverse(sums: Floats) -> Floats:
    return np.where(sums > 0, 1 / sums, 0.0)


def _size(alpha: Floats, beta: Floats) -> float:
    """The largest that α_i + β_j can be."""
    return float(np.abs(alpha).max() + np.abs(beta).max())


def components(down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Labels of rows and columns, equal iff in one strongly connected component.

    `down[i, j]` is an edge from row i to column j, `up[i, j]` one from column j to row i. The
    component of the best connected row is found by searches on the dense patterns, because it
    usually holds nearly everything; the others are left to SciPy.
    """
    pivot = int(torch.minimum(down.sum(1), up.sum(1)).argmax())
    ahead, behind = _reach(down, up, pivot), _reach(up, down, pivot)
    rows, columns = ahead[0] & behind[0], ahead[1] & behind[1]
    row_labels = torch.zeros(len(rows), dtype=torch.int64, device=down.device)
    column_labels = torch.zeros(len(columns), dtype=torch.int64, device=down.device)
    rest, others = ~rows, ~columns
    labels = _sparse(down[rest][:, others], up[rest][:, others]).to(down.device) + 1
    row_labels[rest] = labels[: int(rest.sum())]
    column_labels[others] = labels[int(rest.sum()) :]
    return row_labels, column_labels


def _reach(down: Tensor, up: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """The rows and columns that paths from row `start` lead to."""
    rows = torch.zeros(down.shape[0], dtype=torch.bool, device=down.device)
    columns = torch.zeros(down.shape[1], dtype=torch.bool, device=down.device)
    rows[start] = True
    fresh = rows
    while bool(fresh.any()):
        front = down[fresh].any(0) & ~columns
        columns = columns | front
        fresh = up[:, front].any(1) & ~rows
        rows = rows | fresh
    return rows, columns


def _sparse(down: Tensor, up: Tensor) -> Tensor:
    from scipy import sparse
    from scipy.sparse.csgraph import connected_components

    rows, columns = down.shape
    i, j = np.nonzero(down.cpu().numpy())
    k, m = np.nonzero(up.cpu().numpy())
    edges = np.r_[i, m + rows], np.r_[j + rows, k]
    graph = sparse.coo_array((np.ones(len(edges[0])), edges), (rows + columns, rows + columns))
    return torch.from_numpy(connected_components(graph, connection="strong")[1].astype(np.int64))
