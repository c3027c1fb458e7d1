"""The group of positive rescalings that keep a network's function."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, final, get_args

import numpy as np
import torch
from rich.table import Table
from scipy.sparse import csr_matrix
from torch import Tensor, nn

from saltflat.errors import InvalidValue
from saltflat.printing import plain_text
from saltflat.symmetries import members
from saltflat.symmetries.assemble import uniform
from saltflat.symmetries.rescale import Element, Exponents

Kind = Literal["layer", "neuron", "batchnorm", "attention"]


@dataclass(frozen=True, slots=True)
class Generator:
    """One way to rescale: unit `unit` of `label` by a factor, and whatever must follow."""

    label: str
    unit: int | None
    kind: Kind

    @property
    def name(self) -> str:
        return self.label if self.unit is None else f"{self.label}[{self.unit}]"


@final
@dataclass(frozen=True, repr=False)
class Group:
    """All positive rescalings of the parameters that leave the function as it is.

    `len(group)` is the dimension. Every element is exp(C u) for a vector u with one log-factor a
    generator; `exponents()` gives C. A group compares and prints by its generators.

    Attributes
    ----------
    generators : one for each dimension, named after the unit that they rescale.
    dead : parameters that the function does not depend on; their scale is not counted.
    approximate : rescalings that keep the function but for a normalisation's eps, by name. They
        are not in the group and never drawn.
    pinned_by : operations that let no scale through, and how often they did.
    notes : anything else that was noticed.
    """

    generators: tuple[Generator, ...]
    dead: tuple[str, ...]
    approximate: tuple[str, ...]
    pinned_by: Mapping[str, int]
    _exponents: Exponents
    _scales: csr_matrix
    _places: Any
    _labels: Sequence[str]
    notes: tuple[str, ...] = field(default=())

    def __len__(self) -> int:
        return len(self.generators)

    def __iter__(self) -> Iterator[Generator]:
        return iter(self.generators)

    def exponents(self) -> Exponents:
        """What the group does, as data: the class of every entry and the matrix C."""
        return self._exponents

    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters that some element moves."""
        return self._moved

    @cached_property
    def _moved(self) -> tuple[str, ...]:
        moving = np.diff(self._exponents.matrix.indptr) > 0
        classes = self._exponents.classes
        return tuple(n for n, c in classes.items() if bool(moving[c.numpy()].any()))

    def only(self, kind: Kind) -> Group:
        """The layer-wise subgroup, or the subgroup of the generators of another kind.

        "layer" is one factor for all units of an activation: the α-scaling of Minimum Sharpness
        (Ibayashi et al., 2021, section 2) carried over to any graph.
        """
        if kind not in get_args(Kind):
            raise InvalidValue(f"kind must be one of {', '.join(get_args(Kind))}. Got {kind!r}.")
        if kind == "layer":
            return self._combined(uniform(self._scales, self._places))
        chosen = np.flatnonzero([g.kind == kind for g in self.generators])
        return self._replaced(
            tuple(self.generators[i] for i in chosen),
            self._exponents.matrix[:, chosen],
            self._scales[:, chosen],
        )

    def _combined(self, combination: csr_matrix) -> Group:
        scales = (self._scales @ combination).tocsc()
        scales.sort_indices()
        places = [self._places[scales.indices[start]] for start in scales.indptr[:-1]]
        generators = tuple(Generator(self._labels[p], None, "layer") for p in places)
        return self._replaced(generators, self._exponents.matrix @ combination, scales)

    def _replaced(
        self, generators: tuple[Generator, ...], matrix: csr_matrix, scales: csr_matrix
    ) -> Group:
        return Group(
            generators,
            self.dead,
            self.approximate,
            self.pinned_by,
            self._exponents.with_matrix(matrix),
            scales.tocsr(),
            self._places,
            self._labels,
            self.notes,
        )

    # Elements.

    def element(self, logs: Tensor | Sequence[float]) -> Element:
        """The element with the given log-factors, one for each generator."""
        u = torch.as_tensor(logs, dtype=torch.float64).detach().cpu()
        if u.shape != (len(self),) or not bool(torch.isfinite(u).all()):
            raise InvalidValue(
                f"The log-factors must be {len(self)} finite numbers, one for each generator. "
                f"Got a tensor of shape {tuple(u.shape)}."
            )
        return self._exponents.element(u)

    def random(self, seed: int = 0, spread: float = 10.0) -> Element:
        """An element whose factors are drawn log-uniformly from [1/spread, spread]."""
        if not (math.isfinite(spread) and spread >= 1):
            raise InvalidValue(f"spread must be a finite number ≥ 1. Got {spread}.")
        generator = torch.Generator().manual_seed(seed)
        draws = torch.rand(len(self), generator=generator, dtype=torch.float64)
        return self.element((2 * draws - 1) * math.log(spread))

    def uniform(self, seed: int = 0, low: float = 5.0, high: float = 25.0) -> Element:
        """Factors drawn uniformly from [low, high], as in Petzka et al. (2019), section 3."""
        return members.uniform(self, seed, low, high)

    def alpha_scaling(self, alphas: Mapping[str, float]) -> Element:
        """W_d → α_d W_d with Π α_d = 1 and b_d → (Π_{i≤d} α_i) b_d (Ibayashi et al., 2021)."""
        return members.alpha_scaling(self, alphas)

    def row_column(self, layer: str, unit: int, alpha: float) -> Element:
        """Row `unit` of a layer by 1/α, the next layer's column by α (Tsuzuku et al., eq. 15)."""
        return members.row_column(self, layer, unit, alpha)

    def filters(self, factors: Mapping[str, float | Tensor]) -> Element:
        """T_a: filters that feed BatchNorm by a_i > 0 (BN-Sharpness, definition 2.2)."""
        return members.filters(self, factors)

    def balance(self, model: nn.Module, data: Any, *args: Any, **options: Any) -> nn.Module:
        """A copy of the model with the same function and the least trace of the Hessian.

        Over this group: all rescalings, or those of whole layers for `group.only("layer")`.
        Arguments as in `saltflat.diagonal`. Where the least trace is only approached, as with
        filters that feed BatchNorm, what can be driven to zero is left where it is.
        """
        from saltflat.symmetries.balance import balanced

        return balanced(self, model, data, *args, **options)

    # Printing.

    def __rich__(self) -> Table:
        table = Table(title=f"{len(self)} rescalings keep the function", title_justify="left")
        for column, justify in (("scales of", "left"), ("kind", "left"), ("number", "right")):
            table.add_column(column, justify=justify, no_wrap=True)  # type: ignore[arg-type]
        rows: dict[tuple[str, str], int] = {}
        for g in self.generators:
            rows[g.label, g.kind] = rows.get((g.label, g.kind), 0) + 1
        for (label, kind), count in rows.items():
            table.add_row(label, kind, str(count))
        captions = [*self.notes]
        if self.dead:
            captions.append(f"no effect on the function: {', '.join(self.dead)}")
        if self.approximate:
            captions.append(
                f"{len(self.approximate)} more keep it but for a normalisation's eps: "
                + _few(self.approximate)
            )
        if self.pinned_by:
            captions.append(f"let no scale through: {_few(list(self.pinned_by))}")
        table.caption = "\n".join(captions) or None
        table.caption_justify = "left"
        return table

    def __str__(self) -> str:
        return plain_text(self)

    __repr__ = __str__


def _few(names: Sequence[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")
