"""Log-scale variables: every entry of every tensor carries the id of one.

A rescaling multiplies an entry with id `i` by exp(s_i). Ids are kept in int64 tensors of the same
shape as the tensor they describe, so that a view operation on the tensor is the same operation on
its ids. A parameter of two dimensions or more is a `Weight` and has no ids until they are needed:
most are defined by one variable a row and one a column. An operation of the network turns into
equations between the s_i:

- `equate` says that two variables are one (an addition), at once, by union-find;
- `combine` makes a variable that is a linear combination of two others (a product);
- `relate` writes an equation down for the linear solver (a sum of products).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

#: the entry is zero (or infinite) whatever the parameters are: any scale is right for it
ANY = 0
#: the scale is 1
PINNED = 1
#: ids from here on are linear combinations of others
DERIVED = 1 << 40


class NotUnderstood(Exception):
    """A rule meets what it does not know; the operation pins all of its operands instead."""


def cancels(table: Tensor, weights: Tensor) -> Tensor:
    """Equations that say 0 = 0: equal ids whose factors add up to nothing."""
    total = torch.zeros(table.shape[1], dtype=torch.float64)
    for i in range(len(table)):
        mine = ((table == table[i]) * weights).sum(0).abs()
        total += torch.where(table[i] == PINNED, 0.0, mine)
    return total == 0


def squash(ids: Tensor) -> Tensor:
    """The ids with every repeated dimension (stride 0) cut to size 1."""
    for d in range(ids.ndim):
        if ids.shape[d] > 1 and ids.stride(d) == 0:
            ids = ids.narrow(d, 0, 1)
    return ids


def has_any(ids: Tensor) -> bool:
    """Whether an entry is zero whatever the parameters are."""
    return bool((squash(ids) == ANY).any())


def shrink(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """Two tensors broadcast to one shape with what both repeat cut to size 1, and the way back."""
    shape = torch.broadcast_shapes(a.shape, b.shape)
    a, b = a.expand(shape), b.expand(shape)
    for d, size in enumerate(shape):
        if size > 1 and a.stride(d) == 0 and b.stride(d) == 0:
            a, b = a.narrow(d, 0, 1), b.narrow(d, 0, 1)
    return a, b, lambda out: out.expand(shape)


def repeat(ids: Tensor) -> Tensor:
    """The same ids with stride 0 along every dimension in which they do not differ."""
    shape = ids.shape
    ids = squash(ids)
    for d in range(ids.ndim):
        first = ids.narrow(d, 0, 1) if ids.shape[d] > 1 else None
        if first is not None and bool((ids == first).all()):
            ids = first
    return ids.expand(shape)


def unique_rows(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Indices of the distinct rows, and for every row the position of its own among them."""
    if len(ids) == 1 or ids.stride(0) == 0:
        return torch.zeros(1, dtype=torch.int64), torch.zeros(len(ids), dtype=torch.int64)
    generator = torch.Generator().manual_seed(0)
    weights = torch.randint(2**62, (ids.shape[1],), generator=generator)
    _, inverse = torch.unique((ids * weights).sum(1), return_inverse=True)
    first = _first_of_each(inverse)
    if not torch.equal(ids[first][inverse], ids):  # two different rows with one hash
        _, inverse = torch.unique(ids, dim=0, return_inverse=True)
        first = _first_of_each(inverse)
    return first, inverse


def _first_of_each(inverse: Tensor) -> Tensor:
    count = int(inverse.max()) + 1
    first = torch.full((count,), len(inverse))
    return first.scatter_reduce(0, inverse, torch.arange(len(inverse)), "amin")


def unique_pairs(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The distinct pairs, and for every pair the position of its own among them."""
    first, i = torch.unique(a, return_inverse=True)
    second, j = torch.unique(b, return_inverse=True)
    key, inverse = torch.unique(i * len(second) + j, return_inverse=True)
    return first[key // len(second)], second[key % len(second)], inverse


@dataclass(frozen=True, slots=True)
class Site:
    """A block of variables that was made at one place: entry `i` is unit `i` of `label`."""

    start: int
    stop: int
    label: str


@final
class Scales:
    """The variables of one network, and what is known about them."""

    def __init__(self) -> None:
        self._parent = torch.arange(2)  # with room to grow
        self._fresh = torch.zeros(2, dtype=torch.bool)
        self.count = 2
        self.sites: list[Site] = []
        self._terms = torch.empty(0, 2, dtype=torch.int64)  # with room to grow, like all here
        self._factors = torch.empty(0, 2, dtype=torch.float64)
        self._derived = 0
        self.relations: list[tuple[Tensor, Tensor]] = []
        self.soft: list[tuple[str, Tensor]] = []
        self.bilinear: list[Tensor] = []
        self.idle: list[Tensor] = []  # multiplied by a constant zero

    # Making variables.

    def fresh(self, count: int, label: str) -> Tensor:
        """New variables that nothing is known about."""
        start, self.count = self.count, self.count + count
        if self.count > len(self._parent):
            more = max(count, len(self._parent))
            self._parent = torch.cat([self._parent, torch.arange(more) + len(self._parent)])
            self._fresh = torch.cat([self._fresh, torch.ones(more, dtype=torch.bool)])
        ids = torch.arange(start, self.count)
        self.sites.append(Site(start, start + count, label))
        return ids

    def combine(self, a: Tensor, b: Tensor, fa: float = 1.0, fb: float = 1.0) -> Tensor:
        """Ids of `fa · s_a + fb · s_b`, entry by entry; a product with zero is zero."""
        a, b, grow = shrink(a, b)
        a, b = self.find(a), self.find(b)
        first, second, inverse = unique_pairs(a.flatten(), b.flatten())
        return grow(self._derive(first, second, fa, fb)[inverse].reshape(a.shape))

    def outer(self, a: Tensor, b: Tensor, fb: float = 1.0) -> Tensor:
        """Ids of `s_a[i] + fb · s_b[j]`, a matrix; the same as `combine`, without a large sort."""
        a, rows = torch.unique(self.find(a), return_inverse=True)
        b, columns = torch.unique(self.find(b), return_inverse=True)
        table = self._derive(a.repeat_interleave(len(b)), b.repeat(len(a)), 1.0, fb)
        return table.reshape(len(a), len(b))[rows][:, columns]

    def power(self, a: Tensor, exponent: float) -> Tensor:
        """Ids of `exponent · s_a`; to the power of zero everything is one, zeros too."""
        if exponent == 0:
            self.touch(self.find(a))
            return a.new_full((), PINNED).expand(a.shape)
        return self.combine(a, a.new_full((), PINNED), exponent, 0.0)

    def _derive(self, a: Tensor, b: Tensor, fa: float, fb: float) -> Tensor:
        """Ids of combinations of canonical ids, each pair once; trivial ones are recognised."""
        zero = (a == ANY) | (b == ANY)
        self.touch(a[~zero])
        self.touch(b[~zero])
        self.idle.append(torch.cat([a[zero], b[zero]]))
        a, ca = self._flat(a, fa)
        b, cb = self._flat(b, fb)
        same = a == b
        ca, cb = torch.where(same, ca + cb, ca), torch.where(same, 0.0, cb)
        ca, cb = torch.where(a == PINNED, 0.0, ca), torch.where(b == PINNED, 0.0, cb)
        b = torch.where(cb == 0, PINNED, b)
        a = torch.where(ca == 0, PINNED, a)
        out = torch.full_like(a, PINNED)
        out = torch.where((ca == 1) & (cb == 0), a, out)
        out = torch.where((cb == 1) & (ca == 0), b, out)
        new = ~zero & ~((cb == 0) & ((ca == 0) | (ca == 1))) & ~((ca == 0) & (cb == 1))
        count = int(new.sum())
        if count:
            out[new] = DERIVED + self._derived + torch.arange(count)
            rows = slice(self._derived, self._derived + count)
            self._derived += count
            if self._derived > len(self._terms):
                more = max(count, len(self._terms))
                self._terms = torch.cat([self._terms, self._terms.new_ones(more, 2)])
                self._factors = torch.cat([self._factors, self._factors.new_zeros(more, 2)])
            self._terms[rows] = torch.stack([a[new], b[new]], 1)
            self._factors[rows] = torch.stack([ca[new], cb[new]], 1)
        return torch.where(zero, ANY, out)

    def _flat(self, ids: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        """A multiple of one variable is written as such: x · x^(−1) is then seen to be 1."""
        first, second, c, _ = self.parts(ids)
        alone = second == PINNED
        return torch.where(alone, first, ids), torch.where(alone, factor * c, factor)

    # What is known.

    def find(self, ids: Tensor) -> Tensor:
        """The canonical id of each entry."""
        shape, ids = ids.shape, squash(ids)
        while True:
            base = ids < DERIVED
            up = torch.where(base, self._parent[torch.where(base, ids, 0)], ids)
            if torch.equal(up, ids):
                return ids.expand(shape)
            ids = up

    def is_fresh(self, ids: Tensor) -> Tensor:
        """Entries about which nothing has been said (of canonical ids)."""
        small = squash(ids)
        base = small < DERIVED
        return (base & self._fresh[torch.where(base, small, 0)]).expand(ids.shape)

    def touch(self, ids: Tensor) -> None:
        """The variables are in use: they will not be defined any more."""
        ids = squash(ids)
        self._fresh[ids[ids < DERIVED]] = False

    def parts(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Each id as `first · c + second · d`; a variable of its own is itself · 1."""
        terms, factors = self.definitions()
        base = ids < DERIVED
        row = torch.where(base, 0, ids - DERIVED)
        if len(terms) == 0:
            terms, factors = terms.new_ones(1, 2), factors.new_zeros(1, 2)
        first = torch.where(base, ids, self.find(terms[row, 0]))
        second = torch.where(base, PINNED, self.find(terms[row, 1]))
        return (
            first,
            second,
            torch.where(base, 1.0, factors[row, 0]),
            torch.where(base, 0.0, factors[row, 1]),
        )

    def definitions(self) -> tuple[Tensor, Tensor]:
        """All derived variables in order: pairs of ids and pairs of factors."""
        return self._terms[: self._derived], self._factors[: self._derived]

    # Saying things.

    def equate(self, a: Tensor, b: Tensor) -> None:
        """Corresponding entries have the same scale."""
        a, b, _ = shrink(a, b)
        pairs = torch.stack([a.flatten(), b.flatten()])
        while True:
            pairs = self.find(pairs)
            pairs = pairs[:, (pairs[0] != pairs[1]) & (pairs != ANY).all(0)]
            if pairs.shape[1] == 0:
                return
            low, high = pairs.sort(0).values
            pairs = torch.stack(unique_pairs(low, high)[:2])
            if not (self._adopt(pairs) or self._unite(pairs)):
                break
        self.touch(pairs.flatten())
        signs = torch.tensor([1.0, -1.0], dtype=torch.float64)
        self.relations.append((pairs.T, signs.expand(pairs.shape[1], 2)))

    def define(self, ids: Tensor, value: Tensor) -> None:
        """`equate` for ids most of which are fresh, without looking at each pair first.

        A value must not be fresh itself, unless it is no smaller than its id: nothing could then be
        defined by way of itself. What is known already (the weight may have been defined by the
        other side of this very product) keeps what was said of it, and the value comes on top.
        """
        new = self.is_fresh(ids)
        fresh, defined = (ids, value) if bool(new.all()) else (ids[new], value[new])
        self._parent[fresh] = defined
        self._fresh[fresh] = False
        got = self.find(ids)
        value = self.find(value)
        again = got != value  # known before, or the same id twice with two values
        if again.any():
            self.equate(got[again], value[again])

    def _adopt(self, pairs: Tensor) -> bool:
        """Define the variables nothing is known about by those that something is known about."""
        fresh = self.is_fresh(pairs)
        lonely = fresh[0] != fresh[1]
        if not lonely.any():
            return False
        pairs, fresh = pairs[:, lonely], fresh[:, lonely]
        new, old = torch.where(fresh[0], pairs, pairs.flip(0))
        self._parent[new] = old
        self._fresh[new] = False
        return True

    def _unite(self, pairs: Tensor) -> bool:
        """Merge variables that are not combinations of others; the pinned one wins."""
        from scipy.sparse import coo_matrix
        from scipy.sparse.csgraph import connected_components

        base = (pairs < DERIVED).all(0)
        if not base.any():
            return False
        nodes, ends = torch.unique(pairs[:, base], return_inverse=True)
        a, b = ends.numpy()
        graph = coo_matrix(([True] * len(a), (a, b)), shape=(len(nodes), len(nodes)))
        _, labels = connected_components(graph, directed=False)
        component = torch.from_numpy(labels).long()
        lowest = torch.full((len(nodes),), DERIVED).scatter_reduce(0, component, nodes, "amin")
        self._parent[nodes] = lowest[component]
        self._fresh[nodes] = False
        return True

    def pin(self, ids: Tensor) -> None:
        """The entries do not change."""
        self.equate(ids, ids.new_full((), PINNED))

    def relate(self, rows: Sequence[Tensor], factors: Sequence[float | Tensor]) -> None:
        """`Σ_j factor_j · s_{rows_j} = 0` for corresponding entries of all `rows`."""
        shape = torch.broadcast_shapes(*[r.shape for r in rows])
        table = self.find(torch.stack([r.expand(shape) for r in rows]).flatten(1))
        numbers = [torch.as_tensor(f, dtype=torch.float64) for f in factors]
        weights = torch.stack([f.expand(shape) for f in numbers]).flatten(1)
        present = (table != ANY).all(0)
        self.touch(table[:, present].flatten())
        self.idle.append(torch.unique(table[:, ~present]))
        real = present & ~cancels(table, weights)
        if real.any():
            ids, weights = table[:, real].T, weights[:, real].T
            first, _ = unique_rows(torch.cat([ids, weights.view(torch.int64)], 1))
            self.relations.append((ids[first], weights[first]))

    def tie(self, ids: Tensor, dims: Sequence[int]) -> Tensor:
        """One scale along `dims`; returns it, with those dimensions of size 1."""
        if not dims or ids.ndim == 0:
            return ids
        shape = [1 if d in {e % ids.ndim for e in dims} else n for d, n in enumerate(ids.shape)]
        if ids.numel() == 0:  # what is made of nothing is zero
            return ids.new_full(shape, ANY)
        small = self.find(squash(ids))
        # ANY is the smallest id, so that the largest is that of an entry with a scale, if any has.
        one = small.amax(list(dims), keepdim=True)
        if bool(self.is_fresh(small).all()):
            self.define(small, one.expand_as(small))
        else:
            self.equate(small, one)
        return self.find(one).expand(shape)

    def soften(self, ids: Tensor, label: str) -> None:
        """The entries do not change, but only because of an eps; kept apart for `approximate`."""
        ids = torch.unique(self.find(squash(ids)))
        self.touch(ids)
        ids = ids[ids > PINNED]
        if len(ids):
            self.soft.append((label, ids))

    def settle(self) -> None:
        """What nothing but zeros was multiplied with has no effect, and stays where it is."""
        for ids in self.idle:
            ids = self.find(ids)
            self.pin(ids[self.is_fresh(ids)])

    def label(self, ids: Tensor) -> str:
        """Where the first of the variables was made."""
        first = int(ids.flatten()[0]) if ids.numel() else -1
        for site in self.sites:
            if site.start <= first < site.stop:
                return site.label
        return "activation"


#: ids that broadcast to a shape, each with a factor: an entry's scale is the sum over them
Terms = tuple[tuple[Tensor, float], ...]


@final
class Weight:
    """A parameter of two dimensions or more, whose entries get ids only where they are needed.

    Its first use says what it is: in a product, one variable a row less one a column, `terms` that
    broadcast to its shape. A use that is not foreseen asks for `entries` and finds an id for each.
    """

    def __init__(self, scales: Scales, shape: tuple[int, ...], label: str) -> None:
        self.scales, self.shape, self.label = scales, shape, label
        self.terms: Terms | None = None
        self._entries: Tensor | None = None

    @property
    def is_new(self) -> bool:
        """Nothing has used it yet."""
        return self.terms is None and self._entries is None

    @property
    def is_read(self) -> bool:
        """Some operation has used an entry."""
        scales, ids = self.scales, self._entries
        if self.terms is not None or ids is None:
            return self.terms is not None
        return not bool(scales.is_fresh(scales.find(ids)).all())

    def define(self, terms: Terms) -> None:
        for ids, _ in terms:
            self.scales.touch(self.scales.find(ids))
        self.terms = terms

    def entries(self) -> Tensor:
        """An id for every entry."""
        if self._entries is None:
            if self.terms is None:
                count = torch.Size(self.shape).numel()
                self._entries = self.scales.fresh(count, self.label).reshape(self.shape)
            else:
                self._entries = self._sum(self.terms).expand(self.shape)
        return self._entries

    def pin(self) -> None:
        if self.is_new:
            self.define(((torch.full([1] * len(self.shape), PINNED), 1.0),))
        else:
            self.scales.pin(self.entries())

    def own(self) -> Tensor | None:
        """The ids of entries that are not written as terms."""
        return self._entries if self.terms is None else None

    def final(self) -> Terms:
        """Two terms where rows and columns both differ, and else ids."""
        if self.is_new:
            self.pin()
        if self.terms is None:
            return ((self.entries(), 1.0),)
        small = tuple((squash(repeat(self.scales.find(i))), f) for i, f in self.terms)
        if min(i.numel() for i, _ in small) > 1 and len(small) > 1:
            return small
        return ((self._sum(small), 1.0),)

    def _sum(self, terms: Terms) -> Tensor:
        (a, fa), (b, fb) = terms if len(terms) > 1 else (*terms, (torch.tensor(PINNED), 0.0))
        return a if fa == 1 and fb == 0 else self.scales.combine(a, b, fa, fb)


@final
@dataclass(frozen=True)
class View:
    """A weight with its dimensions in another order."""

    weight: Weight
    dims: tuple[int, ...]

    @property
    def ids(self) -> Tensor:
        return self.weight.entries().permute(self.dims)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.weight.shape[d] for d in self.dims)

    def permuted(self, dims: Sequence[int]) -> View:
        return View(self.weight, tuple(self.dims[d] for d in dims))

    def define(self, *terms: tuple[Tensor, float]) -> None:
        """Terms in the order of the view's dimensions."""
        back = [self.dims.index(d) for d in range(len(self.dims))]
        self.weight.define(tuple((ids.permute(back), factor) for ids, factor in terms))

    def split(self) -> tuple[Tensor, Tensor, float] | None:
        """Variables of the rows and of the columns of a matrix that is written as such."""
        terms = self.weight.terms
        if terms is None or len(terms) != 2 or len(self.dims) != 2:
            return None
        (p, _), (q, factor) = terms
        n, k = self.shape
        if p.permute(self.dims).shape != (n, 1) or q.permute(self.dims).shape != (1, k):
            return None  # defined by a product with the other side
        return p.flatten(), q.flatten(), factor
