"""From what the operations said to a basis of all rescalings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import final

import numpy as np
import torch
from scipy.sparse import coo_matrix, csr_matrix, vstack
from torch import Tensor

from saltflat.symmetries.propagate import Propagation
from saltflat.symmetries.scales import DERIVED, PINNED
from saltflat.symmetries.solve import Array, independent, null_space


@dataclass(frozen=True)
class Basis:
    """Every rescaling is `exp(matrix @ u)`, a factor for each class of entries.

    `classes` gives each entry of a parameter (and of BatchNorm's statistics) its row of `matrix`,
    `units` gives each column the place and the unit after which it is named, `scales` what the
    column does to the variables of the network, and `places` where those were made.
    """

    classes: dict[str, Tensor]
    means: dict[str, Tensor]
    deviations: dict[str, Tensor]
    matrix: csr_matrix
    units: list[tuple[str, int]]
    scales: csr_matrix
    places: Array
    bilinear: Array
    approximate: list[tuple[str, int]]

    def restricted(self, alive: Array) -> Basis:
        """A basis of what is done to the classes that are True in `alive`."""
        columns = independent(self.matrix[alive])
        return replace(
            self,
            matrix=self.matrix[:, columns],
            units=[self.units[c] for c in columns],
            scales=self.scales[:, columns],
        )


@final
class Assembly:
    """The variables of a propagation as a sparse linear system."""

    def __init__(self, propagation: Propagation) -> None:
        self.propagation, self.scales = propagation, propagation.scales
        terms, factors = self.scales.definitions()
        terms = self.scales.find(terms)
        relations = [(self.scales.find(ids), f) for ids, f in self.scales.relations]
        own = {**propagation.parameters, **propagation.means, **propagation.deviations}
        self.ids = {n: self.scales.find(i) for n, i in own.items()}
        self.soft = [(label, self.scales.find(i)) for label, i in self.scales.soft]
        self.bilinear = [self.scales.find(i).flatten() for i in self.scales.bilinear]
        self._number([terms, *[i for i, _ in relations], *self.ids.values()])
        self._expand(terms, factors)
        self.equations = vstack(
            [csr_matrix((0, self.count)), *[self._combination(i, f) for i, f in relations]]
        )

    def _number(self, tensors: list[Tensor]) -> None:
        """Consecutive numbers for the variables that occur anywhere."""
        seen = torch.zeros(self.scales.count, dtype=torch.bool)
        for ids in [*tensors, *[i for _, i in self.soft], *self.bilinear]:
            seen[ids[ids < DERIVED]] = True
        seen[: PINNED + 1] = False
        self.variables = seen.nonzero().flatten()
        self.number = torch.full((self.scales.count,), -1)
        self.count = len(self.variables)
        self.number[self.variables] = torch.arange(self.count)

    def _expand(self, terms: Tensor, factors: Tensor) -> None:
        """Derived variables in terms of the others: D = T + S D, S strictly lower triangular."""
        direct = self._plain(terms, factors)
        self.derived = direct
        step, carried = self._nested(terms, factors), direct
        while carried.nnz:
            carried = step @ carried
            self.derived = self.derived + carried

    def _plain(self, ids: Tensor, factors: Tensor) -> csr_matrix:
        """Rows `Σ_j factors[r, j] · ids[r, j]` over the terms that are variables themselves."""
        plain = (ids > PINNED) & (ids < DERIVED)
        row, _ = plain.nonzero(as_tuple=True)
        column = self.number[ids[plain]]
        entries = factors[plain].numpy(), (row.numpy(), column.numpy())
        return coo_matrix(entries, shape=(len(ids), self.count)).tocsr()

    def _combination(self, ids: Tensor, factors: Tensor) -> csr_matrix:
        """Rows `Σ_j factors[r, j] · ids[r, j]`, combinations of variables included."""
        return self._plain(ids, factors) + self._nested(ids, factors) @ self.derived

    def _nested(self, ids: Tensor, factors: Tensor) -> csr_matrix:
        """Rows `Σ_j factors[r, j] · ids[r, j]` over the terms that are combinations."""
        nested = ids >= DERIVED
        row, _ = nested.nonzero(as_tuple=True)
        entries = factors[nested].numpy(), (row.numpy(), (ids[nested] - DERIVED).numpy())
        return coo_matrix(entries, shape=(len(ids), self.derived.shape[0])).tocsr()

    def rows(self, ids: Tensor) -> csr_matrix:
        return self._combination(ids[:, None], torch.ones(len(ids), 1, dtype=torch.float64))

    def solve(self) -> Basis:
        """All solutions, with the columns as they come: some may do nothing, or the same."""
        classes, members = self._classes()
        soft = [self.rows(i) for _, i in self.soft]
        solution = null_space(vstack([self.equations, *soft]).tocsr())
        propagation = self.propagation
        return Basis(
            classes={n: classes[n] for n in propagation.parameters},
            means={n: classes[n] for n in propagation.means},
            deviations={n: classes[n] for n in propagation.deviations},
            matrix=(self.rows(members) @ solution).tocsr(),
            units=[self._unit(v) for v in first_rows(solution)],
            scales=solution,
            places=self.places,
            bilinear=self._bilinear(),
            approximate=self._approximate(soft),
        )

    def _classes(self) -> tuple[dict[str, Tensor], Tensor]:
        """Entries with one canonical id form a class; returns the classes and their ids."""
        base = torch.zeros(self.scales.count, dtype=torch.bool)
        derived = torch.zeros(self.derived.shape[0], dtype=torch.bool)
        for ids in self.ids.values():
            base[ids[ids < DERIVED]] = True
            derived[ids[ids >= DERIVED] - DERIVED] = True
        members = torch.cat([base.nonzero().flatten(), derived.nonzero().flatten() + DERIVED])
        offset = int(base.sum())
        base_rank, derived_rank = base.cumsum(0) - 1, derived.cumsum(0) - 1 + offset
        if len(derived_rank) == 0:
            derived_rank = torch.zeros(1, dtype=torch.int64)
        classes = {
            name: torch.where(
                ids < DERIVED,
                base_rank[torch.where(ids < DERIVED, ids, 0)],
                derived_rank[torch.where(ids < DERIVED, 0, ids - DERIVED)],
            )
            for name, ids in self.ids.items()
        }
        return classes, members

    @cached_property
    def places(self) -> Array:
        """The site at which each variable was made."""
        starts = np.array([s.start for s in self.scales.sites])
        places: Array = np.searchsorted(starts, self.variables.numpy(), side="right") - 1
        return places

    def _unit(self, variable: int) -> tuple[str, int]:
        site = self.scales.sites[self.places[variable]]
        return site.label, int(self.variables[variable]) - site.start

    def _bilinear(self) -> Array:
        """Variables of the two sides of a product of activations, as in attention."""
        marked = np.zeros(self.count, bool)
        for ids in self.bilinear:
            marked[np.unique(self.rows(ids.unique()).nonzero()[1])] = True
        return marked

    def _approximate(self, soft: list[csr_matrix]) -> list[tuple[str, int]]:
        """Names of the directions that only an eps forbids."""
        if not soft:
            return []
        pinned = vstack(soft).tocsr()
        late = np.zeros(self.count, bool)
        late[np.unique(pinned.nonzero()[1])] = True
        solution = null_space(self.equations.tocsr(), late)
        columns = independent(pinned @ solution)
        return [self._unit(v) for v in first_rows(solution[:, columns])]


def first_rows(matrix: csr_matrix) -> list[int]:
    """The first non-zero row of each column."""
    columns = matrix.tocsc()
    columns.sort_indices()
    return [int(columns.indices[start]) for start in columns.indptr[:-1]]


def uniform(scales: csr_matrix, places: Array) -> csr_matrix:
    """The combinations of columns that treat all variables of one place alike.

    They are the layer-wise rescalings: one factor for all units of an activation.
    """
    order = np.argsort(places, kind="stable")
    same = places[order][1:] == places[order][:-1]
    first, second = order[:-1][same], order[1:][same]
    return null_space((scales[first] - scales[second]).tocsr())
