"""A rescaling, and how it is applied: a new model with the same function."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from torch import Tensor, nn

from saltflat.errors import ModelError
from saltflat.risk import unwrap
from saltflat.sharded import gathering_modules
from saltflat.symmetries.scales import squash
from saltflat.symmetries.solve import Array

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

#: entries that are rescaled at once
_PIECE = 1 << 20


@final
@dataclass(frozen=True)
class Layout:
    """Which rows of a matrix make the exponents of a tensor's entries.

    One term is a row for every entry. With two, an entry's exponent is `f · row + g · column`:
    indices that broadcast to the tensor's shape, none of the dimensions of one being the other's.
    """

    shape: tuple[int, ...]
    terms: tuple[tuple[Tensor, float], ...]

    def exponents(self, logs: Tensor) -> list[Tensor]:
        """Tensors that broadcast to the shape and add up to the exponents."""
        return [factor * logs[index] for index, factor in self.terms]


@final
@dataclass(frozen=True)
class Factors:
    """The layouts of all tensors, and the matrix; the first `single` rows are entries' own."""

    layouts: Mapping[str, Layout]
    matrix: csr_matrix
    single: int

    def mapped(self, change: Callable[[csr_matrix], csr_matrix]) -> Factors:
        return replace(self, matrix=change(self.matrix).tocsr())

    def rows(self, layout: Layout, pairs: Sequence[Array]) -> csr_matrix:
        """The exponents of entries that have these indices, one array of them a term."""
        parts = [f * self.matrix[i] for i, (_, f) in zip(pairs, layout.terms, strict=True)]
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]

    @cached_property
    def moving(self) -> frozenset[str]:
        """The tensors of which some entry is multiplied by anything at all."""
        return frozenset(name for name, layout in self.layouts.items() if self._moves(layout))

    @cached_property
    def _nonzero(self) -> Array:
        """The rows that hold anything."""
        nonzero: Array = np.asarray(abs(self.matrix).sum(1)).ravel() > 0
        return nonzero

    def _moves(self, layout: Layout) -> bool:
        seen = [index.numpy().reshape(-1) for index, _ in layout.terms]
        if len(seen) == 1:
            return bool(self._nonzero[seen[0]].any())
        # If p + q is zero for all p and q, it is so for the first of each with all of the other.
        first = [np.full(len(other), mine[0]) for mine, other in zip(seen, seen[::-1], strict=True)]
        star = self.rows(layout, [seen[0], first[1]]), self.rows(layout, [first[0], seen[1]])
        return any(bool(part.count_nonzero()) for part in star)

    @cached_property
    def _first(self) -> Array:
        """For every row the first one that is the same."""
        generator = np.random.default_rng(0)
        hashes = self.matrix @ generator.standard_normal(self.matrix.shape[1])
        _, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
        same: Array = first[inverse]
        # Rows with one hash that differ after all stay apart.
        apart = np.diff((self.matrix != self.matrix[same]).indptr) > 0
        return np.where(apart, np.arange(len(same)), same)

    def uniform(self, name: str) -> bool:
        """Whether all entries of a tensor have the same exponents."""
        indices = [index.numpy() for index, _ in self.layouts[name].terms]
        return all(len(np.unique(self._first[index])) <= 1 for index in indices)

    @cached_property
    def written_out(self) -> tuple[dict[str, Tensor], csr_matrix]:
        """The row of every entry, in a matrix that has one for each kind of entry."""
        from scipy.sparse import vstack

        classes, blocks, count = {}, [self.matrix[: self.single]], self.single
        for name, layout in self.layouts.items():
            if len(layout.terms) == 1:
                classes[name] = layout.terms[0][0].expand(layout.shape)
                continue
            (a, one), (b, two) = (self._kinds(index) for index, _ in layout.terms)
            pairs = np.repeat(a, len(b)), np.tile(b, len(a))
            blocks.append(self.rows(layout, pairs))
            places = one * len(b) + two if len(b) > 1 else one
            classes[name] = (count + places).expand(layout.shape)
            count += len(a) * len(b)
        matrix = vstack(blocks).tocsr()
        matrix.eliminate_zeros()
        return classes, matrix

    def _kinds(self, index: Tensor) -> tuple[Array, Tensor]:
        """The rows that differ, and the place among them of each; one place if they are one."""
        values, inverse = np.unique(self._first[index.numpy()], return_inverse=True)
        places = torch.from_numpy(inverse.reshape(index.shape))
        return values, places if len(values) > 1 else places[(slice(1),) * places.ndim]


@final
@dataclass(frozen=True, repr=False)
class Exponents:
    """What a group does to every entry of every parameter.

    With the class `c` of an entry (`classes[name]`, an integer tensor of the parameter's shape)
    and an element `u`,

        parameter'  = parameter · exp(matrix[c] · u)
        mean'       = mean · exp(matrix[c] · u)                     c from `means`
        var' + eps  = (var + eps) · exp(2 · matrix[c] · u)          c from `deviations`

    where mean and var are BatchNorm's running statistics. `floors` holds, for each class of a
    variance, the least exponent that keeps var' ≥ 0; `uncopied` says why the model cannot be
    copied, if it cannot.

    A large weight may have as many classes as entries: elements are applied without, by the rows
    and columns of `factors`, and `classes` and `matrix` are written out when somebody asks.
    """

    factors: Factors
    means: Mapping[str, Tensor]
    deviations: Mapping[str, Tensor]
    eps: Mapping[str, float]
    floors: Mapping[int, float] = field(default_factory=dict)
    uncopied: str = ""

    def mapped(self, change: Callable[[csr_matrix], csr_matrix]) -> Exponents:
        """With other columns."""
        return replace(self, factors=self.factors.mapped(change))

    @property
    def names(self) -> list[str]:
        """Those of the parameters."""
        statistics = {**self.means, **self.deviations}
        return [name for name in self.factors.layouts if name not in statistics]

    @property
    def classes(self) -> dict[str, Tensor]:
        """Of every parameter the class of each entry."""
        classes, _ = self.factors.written_out
        return {name: classes[name] for name in self.names}

    def kinds(self, name: str) -> Array:
        """The classes that occur in a parameter."""
        kinds: Array = squash(self.classes[name]).unique().numpy()
        return kinds

    @property
    def matrix(self) -> csr_matrix:
        """The exponents of every class."""
        return self.factors.written_out[1]

    def element(self, u: Tensor) -> Element:
        """The element, clipped where a running variance would become negative."""
        rows = np.array(sorted(self.floors), dtype=int)
        floor = np.array([self.floors[i] for i in rows.tolist()])
        values, clipped = u.numpy().copy(), np.zeros(len(u), bool)
        part = self.factors.matrix[rows]
        while len(rows):
            low = np.flatnonzero(part @ values < floor - 1e-12)
            if len(low) == 0:
                break
            for i in low:
                columns = part.indices[part.indptr[i] : part.indptr[i + 1]]
                exponent = float((part[i] @ values)[0])
                if exponent < floor[i]:
                    # u = 0 is allowed, so that a shorter step in the same direction is, too.
                    values[columns] *= floor[i] / exponent
                    clipped[columns] = True
        note = f"{int(clipped.sum())} factors clipped: a running variance would be negative."
        return Element(self, torch.from_numpy(values), (note,) if clipped.any() else ())


@final
@dataclass(frozen=True, repr=False)
class Element:
    """A rescaling: `logs` is one log-factor a generator; call it with a model to apply it."""

    exponents: Exponents
    logs: Tensor
    notes: tuple[str, ...] = ()

    def __call__(self, model: nn.Module) -> nn.Module:
        """A deep copy of the model, rescaled; the model itself stays as it is."""
        unwrap(model)  # which refuses what is no model
        if self.exponents.uncopied:
            raise ModelError(self.exponents.uncopied)
        moved = duplicate(model)
        self.rescale(moved)
        return moved

    def rescale(self, model: nn.Module) -> None:
        """Rescale the model in place."""
        inner = unwrap(model)
        self._check(inner)
        tensors = {**dict(inner.named_parameters()), **dict(inner.named_buffers())}
        with torch.no_grad():
            for name in self.exponents.factors.layouts:
                if self.moves(name):
                    tensors[name].copy_(self.applied(name, tensors[name]))

    def moves(self, name: str) -> bool:
        """Whether the group does anything to a tensor."""
        return name in self.exponents.factors.moving

    def applied(self, name: str, tensor: Tensor) -> Tensor:
        """What becomes of a tensor; computed in float64, in its own type."""
        parts = self._parts(name)
        if name in self.exponents.eps:
            # Rounding may leave less than nothing of a variance that was clipped.
            return self._variance(name, tensor, parts[0]).clamp(min=0).to(tensor.dtype)
        return _product(tensor, [part.to(tensor.device) for part in parts])

    def factors(self) -> dict[str, Tensor]:
        """The factor of every entry of parameters and means, and of √(var + eps)."""
        e = self.exponents
        result = {}
        for name, layout in e.factors.layouts.items():
            if self.moves(name) or name not in e.names:
                parts = self._parts(name)
                whole = parts[0] if len(parts) == 1 else parts[0] * parts[1]
                result[name] = whole.expand(layout.shape)
        return result

    @cached_property
    def _exponents(self) -> Tensor:
        return torch.from_numpy(self.exponents.factors.matrix @ self.logs.numpy())

    def _parts(self, name: str) -> list[Tensor]:
        """Factors that broadcast to a tensor."""
        layout = self.exponents.factors.layouts[name]
        return [part.exp() for part in layout.exponents(self._exponents)]

    def _variance(self, name: str, var: Tensor, factor: Tensor) -> Tensor:
        """var' with √(var' + eps) = factor · √(var + eps)."""
        eps = self.exponents.eps[name]
        return factor.to(var.device) ** 2 * (var.double() + eps) - eps

    def inverse(self) -> Element:
        """The element that undoes this one."""
        return replace(self, logs=-self.logs)

    def _check(self, model: nn.Module) -> None:
        e = self.exponents
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        for name, layout in e.factors.layouts.items():
            if name not in tensors or tensors[name].shape != layout.shape:
                raise ModelError(
                    f"The model is not the one that the group was found for: it has no {name!r} "
                    f"of shape {layout.shape}. Find the group of this model."
                )
        for name, eps in e.eps.items():
            if bool(
                (self._variance(name, tensors[name], self._parts(name)[0]) < -1e-12 * eps).any()
            ):
                raise ModelError(
                    f"The running variance {name!r} would become negative: the group was found "
                    "for other statistics. Find the group of this model."
                )

    def __repr__(self) -> str:
        size = self.logs.abs().max().exp().item() if len(self.logs) else 1.0
        notes = "".join(f"; {n}" for n in self.notes)
        return f"Element of {len(self.logs)} factors, at most {size:.3g}{notes}"


def _product(tensor: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """A tensor times factors that broadcast to it: in float64, a piece at a time."""
    if tensor.ndim == 0:
        return (tensor.double() * parts[0]).to(tensor.dtype)
    out = torch.empty_like(tensor)
    rows = max(1, _PIECE * len(tensor) // max(1, tensor.numel()))
    for start in range(0, len(tensor), rows):
        here = slice(start, start + rows)
        piece = tensor[here].double()
        for part in parts:
            piece = piece * (part if len(part) == 1 else part[here])
        out[here] = piece
    return out


def duplicate(model: nn.Module) -> nn.Module:
    """A deep copy, also where a module keeps a tensor that it computed (pruning does)."""
    if gathering_modules(model):
        raise ModelError(
            "Rescalings are applied to a copy of the model, and one that fully_shard was applied "
            "to cannot be copied. Build the model anew without it, and load the weights, "
            "full_tensor() of each parameter."
        )
    memo: dict[int, Any] = {}
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach().clone()
    with torch.no_grad():  # or else the parameters of a ScriptModule's copy have a history
        copied = copy.deepcopy(model, memo)
    if len(list(copied.parameters())) != len(list(model.parameters())):
        raise ModelError(
            "A ScriptModule shares parameters with the rest of the model, and a copy of it does "
            "not. Use the module that was scripted instead."
        )
    for before, p in zip(model.parameters(), copied.parameters(), strict=True):
        p.requires_grad_(before.requires_grad)
    return copied
