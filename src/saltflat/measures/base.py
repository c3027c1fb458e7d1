"""What a measure is, and what it is given to compute with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from math import inf, nan
from typing import Any, ClassVar, Literal, Protocol, final

import torch
from torch import Tensor

from saltflat.curvature.matrix import Matrix
from saltflat.curvature.quantities import Kind
from saltflat.curvature.settings import Settings
from saltflat.curvature.stochastic import degrees_of_freedom
from saltflat.errors import SaltflatError
from saltflat.landscape import Landscape
from saltflat.measurement import Measurement, Symmetry
from saltflat.risk import Risk
from saltflat.symmetries.find import symmetries
from saltflat.symmetries.group import Group

# A kind of curvature, or "passes": further passes over the data with other parameters.
Need = Kind | Literal["passes"]


class NotApplicable(SaltflatError, ValueError):
    """The measure is not defined for this model; the message says why and what to do."""


@final
@dataclass(frozen=True)
class Layer:
    """A weight matrix of the model: a Linear, a convolution, an embedding, or the like."""

    name: str  # the module's, "fc1" for the parameter "fc1.weight"
    parameter: str
    matrix: Matrix
    weight: Tensor  # detached, in the dtype of the computation
    kind: str  # of its last call: "linear", "conv", …; "per-sample" if no rule knows it
    position: int = -1  # of its last call in a forward pass, −1 if no rule saw one

    @cached_property
    def norm_squared(self) -> float:
        """‖W‖²_F, summed in float64."""
        return float(torch.linalg.vector_norm(self.weight, dtype=torch.float64)) ** 2


@final
@dataclass(frozen=True, slots=True)
class Quantity:
    """One curvature quantity of every parameter or layer, by parameter name.

    What was estimated has `draws`: independent estimates stacked along the first dimension, as
    many for every parameter, whose mean is the value. Each may be the mean of several draws, of
    `sizes` in turn; without sizes it is one. What was `probed` is neither proved nor estimated: its
    error is not known.
    """

    values: Mapping[str, Tensor]  # float64
    draws: Mapping[str, Tensor] = field(default_factory=dict)
    sizes: tuple[int, ...] = ()
    probed: frozenset[str] = frozenset()

    def exact(self, names: Iterable[str]) -> bool:
        return not any(name in self.draws or name in self.probed for name in names)

    @property
    def counts(self) -> tuple[int, ...]:
        """How many draws each of the stacked estimates is the mean of."""
        return self.sizes or (1,) * (len(next(iter(self.draws.values()))) if self.draws else 0)

    @property
    def degrees(self) -> float:
        """The degrees of freedom of a standard error from the spread of the draws."""
        return degrees_of_freedom(sum(self.counts), len(self.counts)) if self.draws else inf

    def errors(self) -> dict[str, Tensor]:
        """The standard errors of the entries that are estimates."""
        return {name: mean_error(d, self.counts)[1] for name, d in self.draws.items()}

    def sums(self, weights: Mapping[str, Tensor | float]) -> dict[str, Tensor]:
        """Σ weights · draws of every parameter that was estimated, draw by draw."""
        return {
            name: (self.draws[name] * weight).reshape(len(self.counts), -1).sum(1)
            for name, weight in weights.items()
            if name in self.draws
        }

    def stderr(self, weights: Mapping[str, Tensor | float]) -> float:
        """The standard error of Σ weights · values; draws of different parameters are not
        independent, so they are added up draw by draw."""
        if not self.probed.isdisjoint(weights):
            return nan
        sums = self.sums(weights)
        if not sums:
            return 0.0
        return float(mean_error(torch.stack(list(sums.values())).sum(0), self.counts)[1])

    def certainty(self, weights: Mapping[str, Tensor | float]) -> dict[str, Any]:
        """How exact Σ weights · values is, as fields of a measurement."""
        exact = self.exact(weights)
        return {
            "exact": exact,
            "stderr": self.stderr(weights),
            "degrees": inf if exact else self.degrees,
        }


def mean_error(draws: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The mean of stacked estimates and its standard error; each is a mean of so many draws.

    A mean of k draws has a k-th of one draw's variance, so its square counts k times.
    """
    draws = draws.double()
    each = torch.tensor(counts, dtype=draws.dtype, device=draws.device)
    each = each.reshape(-1, *[1] * (draws.ndim - 1))
    mean = (draws * each).sum(0) / sum(counts)
    variance = (each * (draws - mean).square()).sum(0) / (len(counts) - 1)
    return mean, (variance / sum(counts)).sqrt()


class Engine(Protocol):
    """What computes curvature on demand."""

    @property
    def curvature(self) -> str:
        """Whose it is: the Hessian, or the Gauss–Newton matrix ("ggn")."""

    @property
    def settings(self) -> Settings:
        """In what portions it is computed."""

    def quantities(self, kinds: frozenset[Kind]) -> dict[Kind, Quantity]:
        """Several kinds from one sweep over the data."""

    def eigenvalue(self, names: Sequence[str], tol: float) -> tuple[float, float]:
        """The largest eigenvalue of some blocks together, and its residual norm."""

    def column_eigenvalues(self, layer: Layer, tol: float) -> Tensor:
        """The largest eigenvalue of the block of each input unit's column; 0 for columns of 0."""


@final
@dataclass(slots=True)
class Context:
    """One model under measurement; the model is lent, so it may be run and perturbed.

    `quantities` holds what the measures said they need, each computed once; `quantity` computes
    another when it turns out to be needed. `failures` says why one could not be computed, so that
    it is tried once only.
    """

    risk: Risk
    layers: Sequence[Layer]
    quantities: dict[Kind, Quantity]
    seed: int = 0
    engine: Engine | None = None
    _group: Group | None = None
    failures: dict[Kind, Exception] = field(default_factory=dict)

    @property
    def group(self) -> Group:
        """Every rescaling of the trainable parameters that keeps the model's function."""
        if self._group is None:
            inputs = next(self.risk.batches()).part(0, 2).inputs
            self._group = symmetries(
                self.risk.model, inputs, output=self.risk.output, parameters="trainable"
            )
        return self._group

    def landscape(self) -> Landscape:
        """The risk around the weight matrices: biases and normalisation parameters stay."""
        budget = None if self.engine is None else self.engine.settings.memory_budget
        names = [layer.parameter for layer in self.layers]
        return Landscape(self.risk, names, memory_budget=budget)

    def quantity(self, kind: Kind) -> Quantity:
        if kind in self.failures:
            raise self.failures[kind]
        if kind not in self.quantities:
            assert self.engine is not None
            try:
                self.quantities.update(self.engine.quantities(frozenset({kind})))
            except (SaltflatError, RuntimeError) as error:
                self.failures[kind] = error
                raise
        if kind not in self.quantities:
            raise NotApplicable(
                "It needs the gradients of single samples, which this model or loss does not have: "
                "samples depend on each other."
            )
        return self.quantities[kind]


class Measure(ABC):
    """A measure and its settings. Subclasses are final, frozen dataclasses."""

    name: ClassVar[str]
    title: ClassVar[str]  # the formula in a few words
    paper: ClassVar[str]
    equation: ClassVar[str]
    needs: ClassVar[frozenset[Need]]
    invariant_to: ClassVar[frozenset[Symmetry]]
    needs_layers: ClassVar[bool] = True  # without a weight matrix there is nothing to measure
    searched: ClassVar[bool] = False  # a supremum, searched for by many passes over the data
    batch_statistics: ClassVar[bool] = False  # BatchNorm takes them, and its eps is felt

    @abstractmethod
    def compute(self, context: Context) -> Measurement:
        """The measure of the model in `context`; raises `NotApplicable` where it has none."""

    def settings(self) -> dict[str, Any]:
        """The settings by name, for the report."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        plain = (bool, int, float, str, type(None))
        return {name: v if isinstance(v, plain) else repr(v) for name, v in values.items()}

    def required(self) -> frozenset[Need]:
        """What these settings need; by default `needs`."""
        return self.needs

    def measurement(self, **fields: Any) -> Measurement:
        """A measurement of this measure with its name, settings and invariance filled in."""
        usual = {"invariant_to": self.invariant_to, "settings": self.settings()}
        return Measurement(name=self.name, **(usual | fields))
