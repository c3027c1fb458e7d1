"""What a measure is, and what it is given to compute with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor

from saltflat.curvature.matrix import Matrix
from saltflat.errors import SaltflatError
from saltflat.measurement import Measurement, Symmetry
from saltflat.risk import Risk

Need = Literal["trace", "diagonal", "columns", "rows", "flatness", "fisher", "passes"]


class NotApplicable(SaltflatError, ValueError):
    """The measure is not defined for this model; the message says why and what to do."""


@final
@dataclass(frozen=True, slots=True)
class Layer:
    """A weight matrix of the model: a Linear, a convolution, an embedding, or the like."""

    name: str  # the module's, "fc1" for the parameter "fc1.weight"
    parameter: str
    matrix: Matrix
    weight: Tensor  # detached, in the dtype of the computation
    kind: str  # the rule that serves it: "linear", "conv", …


@final
@dataclass(frozen=True, slots=True)
class Quantity:
    """One curvature quantity of every parameter or layer, by parameter name.

    What was estimated has `draws`: independent estimates stacked along the first dimension, whose
    mean is the value.
    """

    values: Mapping[str, Tensor]  # float64
    draws: Mapping[str, Tensor] = field(default_factory=dict)

    def exact(self, names: Iterable[str]) -> bool:
        return not any(name in self.draws for name in names)

    def stderr(self, weights: Mapping[str, Tensor | float]) -> float:
        """The standard error of Σ weights · values; draws of different parameters are not
        independent, so they are added up draw by draw."""
        sums = [
            (self.draws[name] * weight).flatten(1).sum(1)
            if self.draws[name].ndim > 1
            else self.draws[name] * weight
            for name, weight in weights.items()
            if name in self.draws
        ]
        if not sums:
            return 0.0
        totals = torch.stack(sums).sum(0)
        return float(totals.std() / len(totals) ** 0.5)


@final
@dataclass(slots=True)
class Context:
    """One model under measurement; the model is lent, so it may be run and perturbed.

    `quantities` holds what the measures said they need, each computed once.
    """

    risk: Risk
    layers: Sequence[Layer]
    quantities: Mapping[Need, Quantity]
    seed: int = 0


class Measure(ABC):
    """A measure and its settings. Subclasses are final, frozen dataclasses."""

    name: ClassVar[str]
    title: ClassVar[str]  # the formula in a few words
    paper: ClassVar[str]
    equation: ClassVar[str]
    needs: ClassVar[frozenset[Need]]
    invariant_to: ClassVar[frozenset[Symmetry]]

    @abstractmethod
    def compute(self, context: Context) -> Measurement:
        """The measure of the model in `context`; raises `NotApplicable` where it has none."""

    def settings(self) -> dict[str, Any]:
        """The settings by name, for the report."""
        return {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]

    def required(self) -> frozenset[Need]:
        """What these settings need; by default `needs`."""
        return self.needs


def norm_squared(layer: Layer) -> float:
    """‖W‖²_F, summed in float64."""
    return float(torch.linalg.vector_norm(layer.weight.double()).square())
