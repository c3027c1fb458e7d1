"""What a measure is, and what it is given to compute with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, Self, final

from saltflat.bibliography import bibtex
from saltflat.curvature import Curvature, Kind, Layer, Quantity
from saltflat.errors import NotApplicable, SaltflatError
from saltflat.landscape import RiskSurface
from saltflat.losses import JointLoss, Loss
from saltflat.measurement import Measurement, Symmetry
from saltflat.risk import Risk
from saltflat.symmetries import Group, symmetries

# The tolerance of eigenvalues that are to be told from moved ones.
COMPARED = 1e-6

# What a measure costs: its share of one sweep over the data, which serves every measure of that
# class; eigenvalues by Lanczos iteration; or passes at perturbed weights.
Cost = Literal["sweep", "eigenvalues", "perturbations"]

# What is computed unless something else is asked for. On a network that is proved piecewise linear,
# with ten outputs a sample, it takes at most 60 gradients together (`bench/prices.py` times it).
INCLUDED: frozenset[Cost] = frozenset({"sweep"})

# The price, in gradients, of the largest eigenvalue of every layer of such a network, and of that
# of all parameters together.
EIGENVALUES, LARGEST = 60.0, 100.0

# A kind of curvature, or "passes": further passes over the data with other parameters.
Need = Kind | Literal["passes"]


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
    engine: Curvature | None = None
    _group: Group | None = None
    failures: dict[Kind, Exception] = field(default_factory=dict)

    @property
    def loss(self) -> Loss | JointLoss | None:
        """The loss, a user's own as what it turned out to be."""
        if self.engine is None:
            return self.risk.loss if isinstance(self.risk.loss, Loss | JointLoss) else None
        if self.engine.loss is None:
            self.engine.look()
        return self.engine.loss

    @property
    def group(self) -> Group:
        """Every rescaling of the trainable parameters that keeps the model's function."""
        if self._group is None:
            inputs = self.risk.some(2).inputs
            with self.risk.work.within("searching rescalings"):
                self._group = symmetries(
                    self.risk.model, inputs, output=self.risk.output, parameters="trainable"
                )
        return self._group

    def landscape(self) -> RiskSurface:
        """The risk around the weight matrices: biases and normalisation parameters stay."""
        budget = None if self.engine is None else self.engine.settings.memory_budget
        names = [layer.parameter for layer in self.layers]
        return RiskSurface(self.risk, names, memory_budget=budget)

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
    explanation: ClassVar[str] = ""  # what it is, in one plain sentence
    paper: ClassVar[str]
    equation: ClassVar[str]
    references: ClassVar[tuple[str, ...]] = ()  # keys of the papers in `saltflat.bibliography`
    needs: ClassVar[frozenset[Need]]
    invariant_to: ClassVar[frozenset[Symmetry]]
    cost: ClassVar[Cost] = "sweep"
    needs_layers: ClassVar[bool] = True  # without a weight matrix there is nothing to measure
    searched: ClassVar[bool] = False  # a supremum, searched for by many passes over the data
    adds_up: ClassVar[bool] = False  # it is the sum of all blocks, of which small ones hardly count
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

    @property
    def one_layer(self) -> bool:
        """Whether it takes the curvature of one layer alone, its `chosen`."""
        return False

    def chosen(self, layers: Sequence[Layer]) -> Layer | None:
        """The layer that it is of, if it is of one, and if that is among these."""
        return None

    def price(self) -> float:
        """What these settings take beyond the sweep, in gradients: forward and backward passes over
        the same data. Fixed, not timed; on a network that is proved piecewise linear."""
        return 0.0

    @classmethod
    def cite(cls) -> str:
        """BibTeX of the papers that the measure is from."""
        return bibtex(*cls.references)

    def for_comparison(self) -> Self:
        """The same, as exact as it takes to see whether it moves with a rescaling."""
        return self

    def measurement(self, **fields: Any) -> Measurement:
        """A measurement of this measure with its name, settings and invariance filled in."""
        usual = {
            "invariant_to": self.invariant_to,
            "settings": self.settings(),
            "references": self.references,
        }
        return Measurement(name=self.name, **(usual | fields))
