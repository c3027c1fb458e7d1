"""The group of positive rescalings that keep a network's function."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, final, get_args

import numpy as np
import torch
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn

from saltflat.checks import check_seed
from saltflat.errors import InvalidValue, nearest
from saltflat.measurement import Symmetry
from saltflat.printed import Printed
from saltflat.symmetries.assemble import first_rows, uniform
from saltflat.symmetries.balance import balanced
from saltflat.symmetries.element import Element, Exponents

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

Kind = Symmetry
KINDS: tuple[Kind, ...] = get_args(Symmetry)


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
class Group(Printed):
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

    Examples
    --------
    >>> import torch, saltflat as sf
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU(), torch.nn.Linear(2, 2))
    >>> group = sf.symmetries(model, torch.randn(8, 3))
    >>> [generator.name for generator in group]
    ['0[0]', '0[1]']
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
        e = self._exponents
        return tuple(name for name in e.names if name in e.factors.moving)

    def only(self, kind: Kind) -> Group:
        """The layer-wise subgroup, or the subgroup of the generators of another kind.

        "layer" is one factor for all units of an activation: the α-scaling of Minimum Sharpness
        (Ibayashi et al., 2021, section 2) carried over to any graph.
        """
        if kind not in KINDS:
            raise InvalidValue(f"kind must be one of {', '.join(KINDS)}. Got {kind!r}.")
        if kind == "layer":
            combination = uniform(self._scales, self._places)
            scales = self._scales @ combination
            labels = [self._labels[place] for place in self._places[first_rows(scales)]]
            generators = tuple(Generator(label, None, "layer") for label in labels)
            exponents = self._exponents.mapped(lambda matrix: matrix @ combination)
            return self._replaced(generators, exponents, scales)
        columns = np.flatnonzero([g.kind == kind for g in self.generators])
        return self._replaced(
            tuple(self.generators[i] for i in columns),
            self._exponents.mapped(lambda matrix: matrix[:, columns]),
            self._scales[:, columns],
        )

    def _replaced(
        self, generators: tuple[Generator, ...], exponents: Exponents, scales: csr_matrix
    ) -> Group:
        return replace(self, generators=generators, _exponents=exponents, _scales=scales.tocsr())

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
        return self.element((2 * self._draws(seed) - 1) * math.log(spread))

    def uniform(self, seed: int = 0, low: float = 5.0, high: float = 25.0) -> Element:
        """Factors drawn uniformly from [low, high], as in Petzka et al. (2019), section 3."""
        if not 0 < low <= high < math.inf:
            raise InvalidValue(f"The factors must have 0 < low ≤ high. Got {low} and {high}.")
        return self.element((low + (high - low) * self._draws(seed)).log())

    def _draws(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(check_seed(seed))
        return torch.rand(len(self), generator=generator, dtype=torch.float64)

    def alpha_scaling(self, alphas: Mapping[str, float]) -> Element:
        """The layer-wise element that multiplies the weight `name` by `alphas[name]`.

        Minimum Sharpness (Ibayashi et al., 2021, section 2): W_d → α_d W_d with Π α_d = 1; the
        biases follow, b_d → (Π_{i≤d} α_i) b_d. Weights that are not named stay as they are.
        """
        from scipy.sparse.linalg import lsqr

        layers = self.only("layer")
        e = layers.exponents()
        weights = [n for n in layers.parameters() if e.classes[n].ndim > 1]
        for name, alpha in alphas.items():
            if name not in e.classes:
                raise InvalidValue(f"The group has no weight {name!r}. {nearest(name, weights)}")
            if not 0 < alpha < math.inf:
                raise InvalidValue(f"Factors must be positive. Got {alpha} for {name!r}.")
        rows, target = [], []
        for name in {*weights, *alphas}:
            seen = e.kinds(name)
            rows.append(seen)
            target.append(np.full(len(seen), math.log(alphas.get(name, 1.0))))
        matrix = e.matrix[np.concatenate(rows)] if rows else e.matrix[:0]
        wanted = np.concatenate(target) if rows else np.empty(0)
        u = lsqr(matrix, wanted, atol=1e-15, btol=1e-15)[0] if matrix.shape[1] else np.empty(0)
        off = float(np.abs(matrix @ u - wanted).max(initial=0.0))
        if off > 1e-9:
            raise InvalidValue(
                "No rescaling of whole layers multiplies the weights by these factors and keeps "
                f"the function: the nearest is off by a factor of {math.exp(off):.3g}. In a chain "
                "of layers the product of all factors must be 1."
            )
        return layers.element(torch.from_numpy(u))

    def row_column(self, layer: str, unit: int, alpha: float) -> Element:
        """The incoming weights of one unit by 1/α and the outgoing ones by α.

        Normalized Flat Minima (Tsuzuku et al., 2020, section 5.1, equation 15).
        """
        if not 0 < alpha < math.inf:
            raise InvalidValue(f"The factor must be positive. Got {alpha}.")
        names = [g.name for g in self.generators]
        if f"{layer}[{unit}]" not in names:
            raise InvalidValue(
                f"No generator is named {layer}[{unit}]. {nearest(f'{layer}[{unit}]', names)}"
            )
        u = torch.zeros(len(self), dtype=torch.float64)
        u[names.index(f"{layer}[{unit}]")] = -math.log(alpha)
        return self.element(u)

    def filters(self, factors: Mapping[str, float | Tensor]) -> Element:
        """T_a: filter i of the layer `name` that feeds BatchNorm is multiplied by a_i > 0.

        BN-Sharpness (definition 2.2). Everything but the filters, their biases and BatchNorm's
        statistics stays as it is.
        """
        u = torch.zeros(len(self), dtype=torch.float64)
        labels = {g.label for g in self.generators if g.kind == "batchnorm"}
        for label, value in factors.items():
            if label not in labels:
                raise InvalidValue(
                    f"No layer {label!r} has filters that feed BatchNorm. {nearest(label, labels)}"
                )
            values = torch.as_tensor(value, dtype=torch.float64)
            if not bool((values > 0).all()):
                raise InvalidValue(f"Factors must be positive. Got {value} for {label!r}.")
            for i, g in enumerate(self.generators):
                if g.label == label and g.kind == "batchnorm":
                    assert g.unit is not None
                    u[i] = float((values if values.ndim == 0 else values[g.unit]).log())
        return self.element(u)

    def balance(self, model: nn.Module, data: Any, *args: Any, **options: Any) -> nn.Module:
        """A copy of the model with the same function and the least trace of the Hessian.

        Over this group: all rescalings, or those of whole layers for `group.only("layer")`.
        Arguments as in `saltflat.diagonal`. Where the least trace is only approached, as with
        filters that feed BatchNorm, what can be driven to zero is left where it is.
        """
        return balanced(self, model, data, *args, **options)

    # Printing.

    def table(self, width: int) -> Table:
        table = Table(title=f"{len(self)} rescalings keep the function", title_justify="left")
        table.add_column("scales of", overflow="fold")
        table.add_column("kind", no_wrap=True)
        table.add_column("number", justify="right", no_wrap=True)
        rows: dict[tuple[str, str], int] = {}
        for g in self.generators:
            rows[g.label, g.kind] = rows.get((g.label, g.kind), 0) + 1
        for (label, kind), count in rows.items():
            table.add_row(escape(label), kind, str(count))
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
        table.caption = escape("\n".join(captions)) or None
        table.caption_justify = "left"
        return table


def _few(names: Sequence[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")
