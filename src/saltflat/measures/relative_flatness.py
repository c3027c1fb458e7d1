"""Relative flatness, and the measures before it: κ, κ_τ and ρ (Petzka et al. 2019, 2021)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self, final

from torch import Tensor

from saltflat.checks import check_choice
from saltflat.curvature import Kind, Layer, Quantity
from saltflat.errors import InvalidValue, NotApplicable, nearest
from saltflat.measurement import EVERY_RESCALING, Measurement, Symmetry
from saltflat.measures.base import COMPARED, EIGENVALUES, Context, Cost, Measure, Need


@final
@dataclass(frozen=True)
class Kappa(Measure):
    """κ^l = ‖W_l‖² λ_max(H_l) (Petzka et al. 2019, Definition 1 and Table 1).

    Views: `by_layer` holds κ^l, `max` κ^max and `value` κ^Σ = Σ_l κ^l. Eigenvalues are found by
    Lanczos iteration, within `tol` λ: that bounds residual norms ‖Hv − λv‖ and by how much a larger
    eigenvalue was missed, but for a chance of 1e-4 a layer, and `gap` adds up what it came to. The
    errors of those that were found are at most 1e-4 `tol`² λ, but for rounding: by default 1e-10.
    Layers that are proved piecewise linear share one sweep over the data, if the gradients of all
    samples fit in memory.

    The paper's neurons are columns of W (its appendix B) and it gives them ρ alone; with
    `neurons=True`, `by_neuron` holds ‖w(j)‖² λ_max(H_jj), the same formula for the column of input
    unit j. That is one Lanczos iteration a column, so it is slow for all but small networks.
    """

    tol: float = 1e-3
    neurons: bool = False

    name: ClassVar[str] = "kappa"
    title: ClassVar[str] = "Σ_l ‖W_l‖² λ_max(H_l)"
    explanation: ClassVar[str] = (
        "The largest curvature of every layer, times the squared length of its weights, summed "
        "over layers."
    )
    paper: ClassVar[str] = "Petzka et al. 2019"
    references: ClassVar[tuple[str, ...]] = ("petzka2019reparameterization",)
    equation: ClassVar[str] = "Definition 1 and Table 1, κ"
    cost: ClassVar[Cost] = "eigenvalues"
    needs: ClassVar[frozenset[Need]] = frozenset({"passes"})
    invariant_to: ClassVar[frozenset[Symmetry]] = frozenset({"layer"})

    def price(self) -> float:
        return EIGENVALUES

    def for_comparison(self) -> Self:
        return replace(self, tol=min(self.tol, COMPARED))

    def compute(self, context: Context) -> Measurement:
        assert context.engine is not None
        by_layer, by_neuron, gap = {}, {}, 0.0
        names = [layer.parameter for layer in context.layers]
        eigenpairs = context.engine.block_eigenvalues(names, self.tol)
        for layer in context.layers:
            norm = layer.norm_squared
            pair = eigenpairs[layer.parameter]
            by_layer[layer.name] = norm * pair.value
            gap += norm * pair.gap
            if self.neurons:
                largest = context.engine.column_eigenvalues(layer, self.tol)
                by_neuron[layer.name] = _column_norms(layer) * largest
        value = sum(by_layer.values())
        return self.measurement(
            value=value,
            exact=True,
            gap=gap,
            by_layer=by_layer,
            by_neuron=by_neuron,
            max_over="layers",
            neurons="input units" if self.neurons else "",
        )


@final
@dataclass(frozen=True)
class KappaTrace(Measure):
    """κ_τ^l = ‖W_l‖² Tr H_l (Petzka et al. 2019, Table 1).

    Views: `by_layer` holds κ_τ^l, `max` κ_τ^max and `value` κ_τ^Σ. The paper's neurons are columns
    of W (its appendix B) and it gives them ρ alone; `by_neuron` holds ‖w(j)‖² Tr H_jj, the same
    formula for the column of input unit j. These do not add up to κ_τ^l, and need the diagonal of
    the Hessian; `neurons=False` leaves them out and needs its trace alone.
    """

    neurons: bool = True

    name: ClassVar[str] = "kappa_trace"
    title: ClassVar[str] = "Σ_l ‖W_l‖² Tr H_l"
    explanation: ClassVar[str] = (
        "The Hessian trace of every layer, times the squared length of its weights, summed "
        "over layers."
    )
    paper: ClassVar[str] = "Petzka et al. 2019"
    references: ClassVar[tuple[str, ...]] = ("petzka2019reparameterization",)
    equation: ClassVar[str] = "Table 1, κ_τ"
    needs: ClassVar[frozenset[Need]] = frozenset({"trace", "diagonal"})
    invariant_to: ClassVar[frozenset[Symmetry]] = frozenset({"layer"})

    def required(self) -> frozenset[Need]:
        return self.needs if self.neurons else frozenset({"trace"})

    def compute(self, context: Context) -> Measurement:
        trace = context.quantity("trace")
        norms = {layer.parameter: layer.norm_squared for layer in context.layers}
        by_layer = {
            layer.name: norms[layer.parameter] * float(trace.values[layer.parameter])
            for layer in context.layers
        }
        return self.measurement(
            value=sum(by_layer.values()),
            **trace.certainty(norms),
            by_layer=by_layer,
            by_neuron=self._columns(context) if self.neurons else {},
            max_over="layers",
            neurons="input units" if self.neurons else "",
        )

    def _columns(self, context: Context) -> dict[str, Tensor]:
        diagonal = context.quantity("diagonal").values
        return {
            layer.name: _column_norms(layer) * layer.matrix.columns(diagonal[layer.parameter])
            for layer in context.layers
        }


@final
@dataclass(frozen=True)
class Rho(Measure):
    """ρ^l(j) = w(j)ᵀ H_jj w(j) (Petzka et al. 2019, appendix B and Table 1).

    w(j) are the outgoing weights of input unit j, a column of W; with `side="rows"` the incoming
    weights of an output unit, which is invariant too and another number. Views: `by_neuron` holds
    ρ^l(j), `by_layer_max` ρ^l = max_j, `by_layer` ρ_σ^l = Σ_j, `max` ρ^max and `value` ρ^Σ.
    """

    side: Literal["columns", "rows"] = "columns"

    name: ClassVar[str] = "rho"
    title: ClassVar[str] = "Σ_j w(j)ᵀ H_jj w(j)"
    explanation: ClassVar[str] = (
        "How much the loss bends when the weights of single units grow or shrink as they are, "
        "summed over units."
    )
    paper: ClassVar[str] = "Petzka et al. 2019"
    references: ClassVar[tuple[str, ...]] = ("petzka2019reparameterization",)
    equation: ClassVar[str] = "appendix B and Table 1, ρ"
    needs: ClassVar[frozenset[Need]] = frozenset({"columns"})
    invariant_to: ClassVar[frozenset[Symmetry]] = EVERY_RESCALING

    def __post_init__(self) -> None:
        check_choice("The side of Rho", self.side, ("columns", "rows"))

    def required(self) -> frozenset[Need]:
        return frozenset({self.side})

    def compute(self, context: Context) -> Measurement:
        forms = context.quantity(self.side)
        parameters = [layer.parameter for layer in context.layers]
        by_neuron = {layer.name: forms.values[layer.parameter] for layer in context.layers}
        by_layer = {name: float(values.sum()) for name, values in by_neuron.items()}
        return self.measurement(
            value=sum(by_layer.values()),
            **forms.certainty(dict.fromkeys(parameters, 1.0)),
            by_layer=by_layer,
            by_neuron=by_neuron,
            neurons="input units" if self.side == "columns" else "output units",
        )


@final
@dataclass(frozen=True)
class RelativeFlatness(Measure):
    """κ(W) = Σ_{s,s'} ⟨w_s, w_s'⟩ Tr H_{s,s'} (Petzka et al. 2021, Definition 3).

    The value belongs to `layer`, by default the last Linear, whose input is the penultimate
    representation, and nothing else is differentiated; `by_layer=True` has every other layer in
    `by_layer`. `simplified=True` gives ‖W‖² Tr H instead.
    `normalize_features=True` divides each feature by its standard deviation over the data and
    multiplies the weights by it, which makes the measure invariant to rescaling input units.
    """

    layer: str | None = None
    normalize_features: bool = False
    simplified: bool = False
    by_layer: bool = False

    name: ClassVar[str] = "relative_flatness"
    title: ClassVar[str] = "Σ ⟨w_s, w_s'⟩ Tr H_ss'"
    explanation: ClassVar[str] = (
        "The curvature of one layer, weighted by how alike its neurons' weights are; it bounds "
        "robustness in the layer's features."
    )
    paper: ClassVar[str] = "Petzka et al. 2021; Adilova et al. 2023"
    references: ClassVar[tuple[str, ...]] = ("petzka2021relative", "adilova2023fam")
    equation: ClassVar[str] = "Definition 3 (2021)"
    needs: ClassVar[frozenset[Need]] = frozenset({"flatness"})
    invariant_to: ClassVar[frozenset[Symmetry]] = frozenset({"layer", "batchnorm"})

    def __post_init__(self) -> None:
        if self.simplified and self.normalize_features:
            raise InvalidValue("RelativeFlatness is either simplified or normalises features.")

    @property
    def _kind(self) -> Kind:
        if self.simplified:
            return "trace"
        return "normalized_flatness" if self.normalize_features else "flatness"

    def required(self) -> frozenset[Need]:
        return frozenset({self._kind})

    @property
    def one_layer(self) -> bool:
        return not self.by_layer

    def chosen(self, layers: Sequence[Layer]) -> Layer | None:
        """The layer that was named, or the last Linear."""
        named = self.layer is not None
        some = [x for x in layers if (x.name == self.layer if named else x.rule == "linear")]
        return max(some, key=lambda layer: layer.position, default=None)

    def compute(self, context: Context) -> Measurement:
        self._layer(context.layers)
        flatness = context.quantity(self._kind)
        layers = [x for x in context.layers if x.parameter in flatness.values]
        layer = self._layer(layers)
        layers = layers if self.by_layer else [layer]
        factor = {x.parameter: x.norm_squared if self.simplified else 1.0 for x in layers}
        by_layer = {
            x.name: factor[x.parameter] * float(flatness.values[x.parameter]) for x in layers
        }
        return self.measurement(
            value=by_layer[layer.name],
            **flatness.certainty({layer.parameter: factor[layer.parameter]}),
            by_layer=by_layer,
            invariant_to=self.invariant_to | ({"neuron"} if self.normalize_features else set()),
            details={"layer": layer.name},
            notes=(f"of layer {layer.name!r}", *self._estimates(layers, flatness, layer)),
        )

    def _estimates(self, layers: Sequence[Layer], flatness: Quantity, layer: Layer) -> list[str]:
        """A note on the other layers, whose values may be estimates where this one is exact."""
        names = [x.name for x in layers if x != layer and x.parameter in flatness.draws]
        return [f"by_layer holds estimates for {', '.join(names)}"] if names else []

    def _layer(self, layers: Sequence[Layer]) -> Layer:
        layer = self.chosen(layers)
        if layer is None and self.layer is not None:
            raise InvalidValue(
                "The 'layer' of RelativeFlatness must name a layer with a weight matrix. "
                f"Got {self.layer!r}. {nearest(self.layer, [x.name for x in layers])}"
            )
        if layer is None:
            raise NotApplicable(
                "The model has no Linear layer. Name another with RelativeFlatness(layer=…)."
            )
        return layer


def _column_norms(layer: Layer) -> Tensor:
    """‖w(j)‖² of every input unit's column, in float64; on the CPU, where quantities are."""
    return layer.matrix.columns(layer.weight.double().square()).cpu()
