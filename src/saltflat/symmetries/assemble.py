"""From what the operations said to a basis of all rescalings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, final

import numpy as np
import torch
from torch import Tensor

from saltflat.symmetries.element import Factors, Layout
from saltflat.symmetries.propagate import Propagation
from saltflat.symmetries.scales import DERIVED, PINNED, Terms
from saltflat.symmetries.solve import Array, independent, null_space

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix


@dataclass(frozen=True)
class Basis:
    """Every rescaling, `factors.matrix @ u` for the logarithms of what entries are multiplied by.

    `units` gives each column the place and the unit after which it is named, `scales` what the
    column does to the variables of the network, and `places` where those were made.
    """

    factors: Factors
    units: list[tuple[str, int]]
    scales: csr_matrix
    places: Array
    bilinear: Array
    approximate: list[tuple[str, int]]

    def restricted(self, rows: csr_matrix) -> Basis:
        """A basis of what is done to entries with these rows."""
        columns = independent(rows)
        return replace(
            self,
            factors=self.factors.mapped(lambda matrix: matrix[:, columns]),
            units=[self.units[c] for c in columns],
            scales=self.scales[:, columns],
        )


@final
class Assembly:
    """The variables of a propagation as a sparse linear system."""

    def __init__(self, propagation: Propagation) -> None:
        from scipy.sparse import csr_matrix, vstack

        self.propagation, self.scales = propagation, propagation.scales
        statistics = {**propagation.means, **propagation.deviations}
        own = {**propagation.parameters(), **{n: ((i, 1.0),) for n, i in statistics.items()}}
        terms, factors = self.scales.definitions()
        terms = self.scales.find(terms)
        relations = [(self.scales.find(ids), f) for ids, f in self.scales.relations]
        self.terms = {n: self._found(t) for n, t in own.items()}
        self.soft = [(label, self.scales.find(i)) for label, i in self.scales.soft]
        self.bilinear = [self.scales.find(i).flatten() for i in self.scales.bilinear]
        own_ids = [i for t in self.terms.values() for i, _ in t]
        self._number([terms, *[i for i, _ in relations], *own_ids])
        self._expand(terms, factors)
        self.equations = vstack(
            [csr_matrix((0, self.count)), *[self._combination(i, f) for i, f in relations]]
        )

    def _found(self, terms: Terms) -> Terms:
        return tuple((self.scales.find(ids), factor) for ids, factor in terms)

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
        from scipy.sparse import coo_matrix

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
        from scipy.sparse import coo_matrix

        nested = ids >= DERIVED
        row, _ = nested.nonzero(as_tuple=True)
        entries = factors[nested].numpy(), (row.numpy(), (ids[nested] - DERIVED).numpy())
        return coo_matrix(entries, shape=(len(ids), self.derived.shape[0])).tocsr()

    def rows(self, ids: Tensor) -> csr_matrix:
        return self._combination(ids[:, None], torch.ones(len(ids), 1, dtype=torch.float64))

    def solve(self) -> Basis:
        """All solutions, with the columns as they come: some may do nothing, or the same."""
        from scipy.sparse import vstack

        layouts, members, single = self._layouts()
        soft = [self.rows(i) for _, i in self.soft]
        solution = null_space(vstack([self.equations, *soft]).tocsr())
        return Basis(
            factors=Factors(layouts, (self.rows(members) @ solution).tocsr(), single),
            units=self._units(first_rows(solution)),
            scales=solution,
            places=self.places,
            bilinear=self._bilinear(),
            approximate=self._approximate(soft),
        )

    def _layouts(self) -> tuple[dict[str, Layout], Tensor, int]:
        """The variables that entries are made of, those that are an entry's own first."""
        base = torch.full((self.scales.count,), -1)
        derived = torch.full((max(1, self.derived.shape[0]),), -1)
        members, counts = [torch.empty(0, dtype=torch.int64)], [0]
        every = list(self.terms.values())
        for group in ([t for t in every if len(t) == 1], [t for t in every if len(t) > 1]):
            for rank, offset in ((base, 0), (derived, DERIVED)):
                seen = torch.zeros(len(rank), dtype=torch.bool)
                for ids in (ids for terms in group for ids, _ in terms):
                    seen[ids[(ids >= DERIVED) == (offset > 0)] - offset] = True
                new = (seen & (rank < 0)).nonzero().flatten()
                rank[new] = torch.arange(len(new)) + counts[-1]
                members.append(new + offset)
                counts.append(counts[-1] + len(new))
        ranked = {
            name: tuple((self._ranked(ids, base, derived), f) for ids, f in terms)
            for name, terms in self.terms.items()
        }
        shapes = self.propagation.shapes
        return {n: Layout(shapes[n], t) for n, t in ranked.items()}, torch.cat(members), counts[2]

    def _ranked(self, ids: Tensor, base: Tensor, derived: Tensor) -> Tensor:
        plain = ids < DERIVED
        rank = base[torch.where(plain, ids, 0)]
        if not plain.all():
            rank = torch.where(plain, rank, derived[torch.where(plain, 0, ids - DERIVED)])
        return rank

    @cached_property
    def places(self) -> Array:
        """The site at which each variable was made."""
        starts = np.array([s.start for s in self.scales.sites])
        places: Array = np.searchsorted(starts, self.variables.numpy(), side="right") - 1
        return places

    def _units(self, variables: list[int]) -> list[tuple[str, int]]:
        """The place and the unit of each."""
        sites = [self.scales.sites[place] for place in self.places[variables]]
        numbers = self.variables[variables].tolist()
        return [(site.label, i - site.start) for site, i in zip(sites, numbers, strict=True)]

    def _bilinear(self) -> Array:
        """Variables of the two sides of a product of activations, as in attention."""
        marked = np.zeros(self.count, bool)
        for ids in self.bilinear:
            marked[np.unique(self.rows(ids.unique()).nonzero()[1])] = True
        return marked

    def _approximate(self, soft: list[csr_matrix]) -> list[tuple[str, int]]:
        """Names of the directions that only an eps forbids."""
        from scipy.sparse import vstack

        if not soft:
            return []
        pinned = vstack(soft).tocsr()
        late = np.zeros(self.count, bool)
        late[np.unique(pinned.nonzero()[1])] = True
        solution = null_space(self.equations.tocsr(), late)
        columns = independent(pinned @ solution)
        return self._units(first_rows(solution[:, columns]))


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
