"""Which entries of a matrix pair keep a minimum from being attained: a matter of zeros alone.

Σ_ij h_ij e^{x_i+y_j} + w²_ij e^{−(x_i+y_j)} has no minimum iff some (x, y) has x_i + y_j ≥ 0 where
w² > 0, x_i + y_j ≤ 0 where h > 0, and not 0 at all of these. Let rows and columns be nodes, with an
edge i → j for each w²_ij > 0 and an edge j → i for each h_ij > 0; then x_i ≥ −y_j along the first
and −y_j ≥ x_i along the second. All are equal within a strongly connected component, and between
components all can be strict at once. So the entries that join different components vanish from the
infimum, and no others.
"""

from __future__ import annotations

import numpy as np
import torch
from scipy import sparse
from scipy.sparse.csgraph import connected_components
from torch import Tensor


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
        found = down[fresh].any(0) & ~columns
        columns = columns | found
        fresh = up[:, found].any(1) & ~rows
        rows = rows | fresh
    return rows, columns


def _sparse(down: Tensor, up: Tensor) -> Tensor:
    rows, columns = down.shape
    i, j = np.nonzero(down.cpu().numpy())
    k, m = np.nonzero(up.cpu().numpy())
    edges = np.r_[i, m + rows], np.r_[j + rows, k]
    graph = sparse.coo_array((np.ones(len(edges[0])), edges), (rows + columns, rows + columns))
    return torch.from_numpy(connected_components(graph, connection="strong")[1].astype(np.int64))
