"""Eigenvalues and spectral densities from products alone, by Lanczos iteration.

The iterations are generators: they yield a flat unit vector, are sent its image, and return what
they found. Whoever drives one decides how the products are made; many can advance together.

They are our own rather than ARPACK's, which looks for convergence only when its basis is full: a
coarse answer then costs what a fine one does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from math import inf, log, pi, sqrt
from typing import NamedTuple, TypeVar, final

import torch
from torch import Tensor

from saltflat.checks import check_number
from saltflat.curvature.contractions import Layout, Lookup, Outer, Term
from saltflat.distributed import Reduction
from saltflat.errors import SaltflatError

Product = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
Flat = Callable[[Tensor], Tensor]
Result = TypeVar("Result")
Iteration = Generator[Tensor, Tensor, Result]
Quadrature = tuple[Tensor, Tensor]  # nodes and weights

# Vectors of a basis: as many as fit into these bytes, but not fewer or more than so many.
_BASIS_BYTES = 1 << 28
_FEWEST, _MOST = 20, 100
# Restarts with a full basis before it is given up.
_RESTARTS = 1000
# Vectors in a row with which an answer is good, before it is believed.
_LOOKS = 2
# A remainder below this share of the matrix's norm is rounding.
_NOTHING = 1e-13
# Eigenvalues are found to the square of this part of their tolerance.
_SHARP = 1e-2
# The chance of a start that hides a larger eigenvalue from the tests below.
_UNLUCKY = 1e-4


class Eigenpair(NamedTuple):
    """λ, ‖Hv − λv‖, the unit eigenvector v, and how much larger than λ it might have been: beyond
    that, an eigenvalue was missed with a probability of 1e-4."""

    value: float
    residual: float
    vector: dict[str, Tensor]
    margin: float = 0.0

    @property
    def gap(self) -> float:
        """A bound on the distance to the eigenvalue that this is taken for."""
        return max(self.residual, self.margin)


@final
class Coordinates:
    """Mappings of tensors as flat vectors in float64, on the device of the first tensor."""

    def __init__(self, like: Mapping[str, Tensor]) -> None:
        self.like = dict(like)
        self.sizes = [p.numel() for p in like.values()]
        self.size = sum(self.sizes)
        self.device = next(iter(like.values())).device

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        parts = flat.split(self.sizes)
        return {
            name: part.reshape(p.shape).to(p.device)
            for part, (name, p) in zip(parts, self.like.items(), strict=True)
        }

    def join(self, vector: Mapping[str, Tensor]) -> Tensor:
        parts = (vector[name].reshape(-1).to(self.device, torch.float64) for name in self.like)
        return torch.cat(list(parts))

    def flat(self, product: Product) -> Flat:
        return lambda vector: self.join(product(self.split(vector)))


@final
@dataclass(frozen=True)
class _Pairs:
    """Eigenvalues from the largest on, with unit eigenvectors in rows."""

    values: Tensor
    vectors: Tensor
    ceiling: float = inf  # no other eigenvalue is larger, but by that chance


@final
class Directions:
    """Random unit vectors, the same ones for the same seed on every device."""

    def __init__(self, size: int, seed: int, device: torch.device) -> None:
        self.size, self.device = size, device
        self._generator = torch.Generator().manual_seed(seed)

    def draw(self, *beside: Tensor) -> Tensor:
        """One at right angles to the rows of some matrices."""
        vector = torch.randn(self.size, generator=self._generator, dtype=torch.float64)
        vector = vector.to(self.device)
        for _ in range(2):
            for rows in beside:
                vector -= rows.T @ (rows @ vector)
            vector /= vector.norm()
        return vector


@final
class _Krylov:
    """An orthonormal basis V (in rows) that grows by images, and the small matrix V H Vᵀ.

    Every new vector is orthogonalised against all others, twice: H Vᵀ = Vᵀ T + r eᵀ with e the
    last unit vector, so that ‖r‖ times an eigenvector's last entry is its residual norm.
    """

    def __init__(self, capacity: int, start: Tensor, beside: Tensor | None = None) -> None:
        self.rows = start.new_empty(capacity, len(start))
        self.beside = start.new_empty(0, len(start)) if beside is None else beside
        self.small = torch.zeros(capacity, capacity, dtype=torch.float64)
        self.next, self.count, self.norm = start, 0, 0.0
        self._left = start.new_empty(0, device="cpu")  # eigenvalues of what was compressed away
        self._heights = 0.0  # the sum of the logarithms of all remainders' norms

    def add(self, image: Tensor) -> None:
        """Enter the vector `next`, whose image this is; the remainder is the one after it."""
        self.rows[self.count] = self.next
        self.count += 1
        basis, rest = self.rows[: self.count], image.clone()
        heights = torch.zeros_like(rest[: self.count])
        for _ in range(2):
            rest -= self.beside.T @ (self.beside @ rest)
            part = basis @ rest
            rest -= basis.T @ part
            heights += part
        column = heights.cpu()
        self.small[self.count - 1, : self.count] = column
        self.small[: self.count, self.count - 1] = column
        self.norm = _norm(rest)
        self.next = rest / self.norm if self.norm else rest
        self._heights += -inf if self.closed else log(self.norm)

    @property
    def closed(self) -> bool:
        """Whether the basis spans its own images: nothing remains but rounding."""
        scale = float(self.small[: self.count, : self.count].abs().max())
        return self.norm <= _NOTHING * scale

    def growth(self, values: Tensor, at: float) -> float:
        """log p(`at`), where p(H) start is the vector `next`, and `values` are those of the basis.

        p has the values of the basis for zeros, also those compressed away, and 1/β_1⋯β_m in front,
        β the norms of remainders. As `next` is a unit vector, the start has at most the part 1/p(λ)
        of an eigenvector whose λ is above all zeros; and none, if nothing remains. (van Dorsselaer,
        Hochstenbach and van der Vorst 2000.)
        """
        if self._heights == -inf:
            return inf
        zeros = torch.cat([values, self._left])
        return float((at - zeros).log().sum()) - self._heights

    def ceiling(self, values: Tensor, needed: float, above: float) -> float:
        """Where the growth reaches what is needed; it does so at `above`."""
        low = float(values[0])
        for _ in range(20):
            middle = (low + above) / 2
            low, above = (low, middle) if self.growth(values, middle) >= needed else (middle, above)
        return above

    def ritz(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues of the small matrix, largest first, and eigenvectors in columns."""
        values, vectors = torch.linalg.eigh(self.small[: self.count, : self.count])
        return values.flip(0), vectors.flip(1)

    def lift(self, vectors: Tensor) -> Tensor:
        return vectors.T.to(self.rows) @ self.rows[: self.count]

    def compress(self, keep: int) -> None:
        """Go on with the best vectors alone (thick restart)."""
        values, vectors = self.ritz()
        self.rows[:keep] = self.lift(vectors[:, :keep])
        self.small.zero_()
        self.small[:keep, :keep] = values[:keep].diag()
        self._left = torch.cat([self._left, values[keep:]])
        self.count = keep


def _norm(vector: Tensor) -> float:
    """‖v‖ also where the squares of its entries are no numbers of float64: below 1e-308, as from
    the curvature of samples that a network is very sure of, they would be 0."""
    largest = float(vector.abs().max())
    return largest * float((vector / largest).norm()) if 0 < largest < inf else largest


def capacity(size: int, k: int) -> int:
    """How many vectors a basis for k eigenvectors holds."""
    fitting = min(max(_BASIS_BYTES // (8 * size), _FEWEST), _MOST)
    return min(size, max(fitting, 2 * k + 2))


def _largest(
    directions: Directions,
    k: int,
    tol: float,
    beside: Tensor | None = None,
    least: float = -inf,
) -> Iteration[_Pairs]:
    """The k largest at right angles to `beside`; or less exactly, if they are below `least`.

    Small residuals may belong to lower eigenvalues as long as the top one is hardly in the basis:
    they grow again when it comes in. So of a single one it is asked too that no other is larger. A
    random start has less than δ of an eigenvector with probability at most δ √(2 room/π).
    """
    start = directions.draw(*(() if beside is None else (beside,)))
    room = directions.size - (0 if beside is None else len(beside))
    basis = _Krylov(min(capacity(directions.size, k), room), start, beside)
    fewest, most, settled = 2 * k + 2, len(basis.rows), 0
    needed = log(sqrt(2 * room / pi) / _UNLUCKY)
    for _ in range(_RESTARTS):
        while basis.count < most:
            basis.add((yield basis.next))
            values, vectors = basis.ritz()
            bounds = basis.norm * vectors[-1].abs()
            above = max(float(values[0]) + _allowed(values, tol), least)
            searched = k > 1 or basis.growth(values, above) >= needed
            good = searched and (above <= least or _converged(values, bounds, k, tol))
            settled = settled + 1 if good and basis.count >= fewest else 0
            if basis.count == room or settled == _LOOKS:
                whole = basis.count == room
                ceiling = values[0] if whole else basis.ceiling(values, needed, above)
                return _Pairs(values[:k], basis.lift(vectors[:, :k]), float(ceiling))
            if basis.closed:
                # Copies of an eigenvalue are in other such spaces.
                basis.next = directions.draw(basis.rows[: basis.count], basis.beside)
        basis.compress(k + (most - k) // 2)
    raise SaltflatError(
        f"The {k} largest eigenvalues did not converge to tol={tol:g}. Pass a larger tol."
    )


def _allowed(values: Tensor, tol: float) -> float:
    """What a tolerance is for the largest of some values, but for rounding."""
    return max(tol * abs(float(values[0])), _NOTHING * float(values.abs().max()))


def _converged(values: Tensor, bounds: Tensor, k: int, tol: float) -> bool:
    """Whether residual norms are within the tolerance, and the errors of values within a finer one.

    An error is at most ‖r‖²/gap, with the gap to the other eigenvalues; those that are closer than
    the error that is allowed change it by no more than that.
    """
    rounding = _NOTHING * values.abs().max()
    sizes = values[:k].abs()
    if bool((bounds[:k] > (tol * sizes).clamp(min=rounding)).any()):
        return False
    finer = ((_SHARP * tol) ** 2 * sizes).clamp(min=rounding)
    apart = (values[:k, None] - values).abs()
    gaps = torch.where(apart > finer[:, None], apart, inf).amin(1)
    return bool((torch.minimum(bounds[:k], bounds[:k] * (bounds[:k] / gaps)) <= finer).all())


def iterate(directions: Directions, k: int, tol: float) -> Iteration[tuple[_Pairs, list[float]]]:
    """The k largest eigenpairs, copies of a multiple eigenvalue among them, and ‖Hv − λv‖.

    A Krylov space holds one vector of every eigenspace. So the rest of the space is searched for
    a larger eigenvalue than the least of those found, until there is none.
    """
    found = yield from _largest(directions, k, tol)
    while 1 < k < directions.size:
        least = float(found.values[-1])
        least += tol * abs(least)
        other = yield from _largest(directions, 1, tol, found.vectors, least)
        if float(other.values) <= least:
            found = _Pairs(found.values, found.vectors, other.ceiling)
            break
        values, order = torch.cat([found.values, other.values]).sort(descending=True)
        vectors = torch.cat([found.vectors, other.vectors])
        found = _Pairs(values[:k], vectors[order[:k].to(vectors.device)])
    residuals = []
    for value, vector in zip(found.values.tolist(), found.vectors, strict=True):
        image = yield vector
        residuals.append(_norm(image - value * vector))
    return found, residuals


def drive_together(
    iterations: Mapping[str, Iteration[Result]],
    apply: Callable[[dict[str, Tensor]], dict[str, Tensor]],
) -> dict[str, Result]:
    """Give several iterations the images that they ask for, those of a round all at once."""
    vectors = {name: next(each) for name, each in iterations.items()}
    results: dict[str, Result] = {}
    while vectors:
        images, vectors = apply(vectors), {}
        for name, image in images.items():
            try:
                vectors[name] = iterations[name].send(image)
            except StopIteration as end:
                results[name] = end.value
    return results


def drive(iteration: Iteration[Result], apply: Flat) -> Result:
    """Give one iteration the images that it asks for."""
    return drive_together({"": iteration}, lambda vectors: {"": apply(vectors[""])})[""]


def eigenpairs(
    product: Product, space: Coordinates, k: int, tol: float, seed: int
) -> tuple[Eigenpair, ...]:
    """The k largest eigenpairs of a symmetric matrix, largest first."""
    check_number("tol", tol)
    directions = Directions(space.size, seed, space.device)
    found, residuals = drive(iterate(directions, k, tol), space.flat(product))
    return _as_eigenpairs(space, found, residuals)


def _as_eigenpairs(
    space: Coordinates, found: _Pairs, residuals: list[float]
) -> tuple[Eigenpair, ...]:
    values = found.values.tolist()
    vectors = map(space.split, found.vectors)
    margins = [max(0.0, found.ceiling - value) for value in values]
    return tuple(map(Eigenpair, values, residuals, vectors, margins))


def largest_together(
    products: Product, like: Mapping[str, Tensor], tol: float, seed: int
) -> dict[str, tuple[Eigenpair, ...]]:
    """The largest eigenpair of every block of a matrix whose other blocks are zero.

    `products` is given vectors for some of the blocks. The iterations advance together, so that
    one call serves all that have not ended.
    """
    check_number("tol", tol)
    spaces = {name: Coordinates({name: p}) for name, p in like.items()}

    def apply(vectors: dict[str, Tensor]) -> dict[str, Tensor]:
        images = products({name: spaces[name].split(v)[name] for name, v in vectors.items()})
        return {name: spaces[name].join(images) for name in vectors}

    found = drive_together(
        {n: iterate(Directions(s.size, seed, s.device), 1, tol) for n, s in spaces.items()}, apply
    )
    return {name: _as_eigenpairs(spaces[name], *found[name]) for name in spaces}


def basis_bytes(size: int) -> int:
    """What the basis of an iteration takes, if it needs no more vectors than the fewest."""
    return 8 * size * min(size, _FEWEST)


def quadrature(start: Tensor, steps: int) -> Iteration[Quadrature]:
    """Nodes θ and weights w with Σ w f(θ) = startᵀ f(H) start, for polynomials f below 2·steps."""
    basis = _Krylov(min(steps, len(start)), start)
    while basis.count < len(basis.rows):
        basis.add((yield basis.next))
        if basis.closed:
            break
    values, vectors = basis.ritz()
    return values, vectors[0].square()


def quadratures(
    product: Product, space: Coordinates, probes: int, steps: int, seed: int
) -> list[Quadrature]:
    """Those of random unit vectors, whose mean over all vectors is Tr f(H) / size."""
    directions, apply = Directions(space.size, seed, space.device), space.flat(product)
    return [drive(quadrature(directions.draw(), steps), apply) for _ in range(probes)]


@final
@dataclass(frozen=True, slots=True)
class _Matrix:
    """Gradients G_r in rows, and signs: v ↦ Σ_r s_r G_r ⟨G_r, v⟩."""

    rows: Tensor  # (directions · samples, entries)
    sign: Tensor | None

    def __call__(self, v: Tensor) -> Tensor:
        inner = self.rows @ v.to(self.rows).reshape(-1)
        if self.sign is not None:
            inner = inner * self.sign.reshape(-1)
        return (self.rows.mT @ inner).reshape(v.shape)


@final
@dataclass(frozen=True, slots=True)
class _Factored:
    """The same of gradients Σ_t l_t r_tᵀ: `left` is (D, n, g, a, T), `right` (n, g, b, T)."""

    left: Tensor
    right: Tensor
    layout: Layout
    sign: Tensor | None

    def __call__(self, v: Tensor) -> Tensor:
        # Not by `@`, which would read the vector for every sample anew.
        vector = self.layout.factored(v.to(self.right))
        outputs = torch.einsum("gab,ngbt->ngat", vector, self.right)
        inner = torch.einsum("dngat,ngat->dn", self.left, outputs)
        if self.sign is not None:
            inner = inner * self.sign
        pulled = torch.einsum("dn,dngat->ngat", inner, self.left)
        return self.layout.assemble(torch.einsum("ngat,ngbt->gab", pulled, self.right))


def _written(term: Term, sign: Tensor | None) -> _Matrix:
    gradient = term.gradient().detach()
    return _Matrix(gradient.reshape(gradient.shape[:2].numel(), -1), sign)


def _factored(outer: Outer, sign: Tensor | None) -> _Factored:
    left = outer.left
    stacked = left if isinstance(left, Tensor) else torch.stack(list(left))
    return _Factored(stacked.detach(), outer.right.detach(), outer.layout, sign)


@final
class Gradients:
    """The gradients of all samples and directions, in the smaller form, up to so many bytes.

    With C = Σ G Gᵀ over them, a product with a block of C takes no pass over the network.
    `unserved` are parameters whose gradients are not kept: rows of a table, mostly zeros.
    `sizes` are the bytes of all others', also where they do not fit (`dropped`: the largest ones).
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._chunks: dict[tuple[int, int], list[tuple[str, _Matrix | _Factored]]] = {}
        self._added = Counter[str]()  # bytes of the chunk at hand
        self.sizes = Counter[str]()
        self.unserved: set[str] = set()
        self.dropped: set[str] = set()

    def begin(self, index: int, first: int) -> None:
        if (index, first) in self._chunks:
            self.sizes -= self._added
        self._place, self._added = (index, first), Counter()
        self._chunks[self._place] = []

    def add(self, name: str, term: Term, sign: Tensor | None) -> None:
        if isinstance(term, Lookup):
            self.unserved.add(name)
            return
        outer = term.outer()
        if outer is None:
            rows = _written(term, sign)
            self._reserve(name, rows.rows.numel() * rows.rows.element_size())
            matrix: _Matrix | _Factored = rows
        else:
            left, right = outer.left, outer.right
            count, (n, groups, a, positions), b = len(left), left[0].shape, right.shape[2]
            factored, written = positions * (count * a + b), count * a * b
            self._reserve(name, n * groups * min(factored, written) * right.element_size())
            if name in self.dropped:
                return
            matrix = _factored(outer, sign) if factored <= written else _written(term, sign)
        if name not in self.dropped:
            self._chunks[self._place].append((name, matrix))

    def _reserve(self, name: str, size: int) -> None:
        """Make room, by what takes the most."""
        self._added[name] += size
        self.sizes[name] += size
        kept = {n: each for n, each in self.sizes.items() if n not in self.dropped}
        while sum(kept.values()) > self._budget:
            largest = max(kept, key=lambda n: kept[n])
            self.dropped.add(largest)
            del kept[largest]
            for place, parts in self._chunks.items():
                self._chunks[place] = [(n, part) for n, part in parts if n != largest]

    def agree(self, reduction: Reduction) -> None:
        """What one rank does not keep, none does."""
        told = reduction.each(lambda: (self.sizes, self.unserved, self.dropped))
        for sizes, unserved, dropped in told:
            self.sizes |= sizes
            self.unserved |= unserved
            self.dropped |= dropped

    def product(self, name: str, scale: float) -> Product:
        """With one parameter's block of C / scale; of several ranks, with the part here."""
        parts = [part for each in self._chunks.values() for n, part in each if n == name]

        def apply(vector: Mapping[str, Tensor]) -> dict[str, Tensor]:
            total = torch.zeros_like(vector[name], dtype=torch.float64)
            for part in parts:
                total += part(vector[name])
            return {name: total / scale}

        return apply


@final
class Images:
    """Products of a vector for each of some blocks with these, as a sweep goes on: none is kept."""

    def __init__(self, vectors: Mapping[str, Tensor]) -> None:
        self._vectors = vectors
        self._place = -1, -1
        self._pending: dict[str, Tensor] = {}
        self._sums = {n: torch.zeros_like(v, dtype=torch.float64) for n, v in vectors.items()}

    def begin(self, index: int, first: int) -> None:
        if self._place != (index, first):
            self._commit()
        self._place, self._pending = (index, first), {}

    def add(self, name: str, term: Term, sign: Tensor | None) -> None:
        outer = term.outer()
        matrix = _written(term, sign) if outer is None else _factored(outer, sign)
        image = matrix(self._vectors[name]).double()
        self._pending[name] = self._pending.get(name, 0.0) + image

    def _commit(self) -> None:
        for name, image in self._pending.items():
            self._sums[name] += image

    def products(self, scale: float) -> dict[str, Tensor]:
        """Once the sweep is over; of several ranks, the part here."""
        self._commit()
        return {name: total / scale for name, total in self._sums.items()}
