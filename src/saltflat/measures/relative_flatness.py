"""Relative flatness of a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from saltflat.curvature.curvature import Layer
from saltflat.curvature.estimators import Quantity
from saltflat.curvature.sweep import Kind
from saltflat.errors import InvalidValue, nearest
from saltflat.measurement import Measurement, Symmetry
from saltflat.measures.base import Context, Measure, Need, NotApplicable


@final
@dataclass(frozen=True)
class RelativeFlatness(Measure):
    """κ(W) = Σ_{s,s'} ⟨w_s, w_s'⟩ Tr H_{s,s'} (Petzka et al. 2021, Definition 3).

    The value belongs to `layer`, by default the last Linear, whose input is the penultimate
    representation; `by_layer` has every other. `simplified=True` gives ‖W‖² Tr H instead.
    `normalize_features=True` divides each feature by its standard deviation over the data and
    multiplies the weights by it, which makes the measure invariant to rescaling input units.
    """

    layer: str | None = None
    normalize_features: bool = False
    simplified: bool = False

    name: ClassVar[str] = "relative_flatness"
    title: ClassVar[str] = "Σ ⟨w_s, w_s'⟩ Tr H_ss'"
    paper: ClassVar[str] = "Petzka et al. 2021; Adilova et al. 2023"
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

    def compute(self, context: Context) -> Measurement:
        chosen = self._chosen(context)
        found = context.quantity(self._kind)
        factor = {x.parameter: x.norm_squared if self.simplified else 1.0 for x in context.layers}
        by_layer = {
            layer.name: factor[layer.parameter] * float(found.values[layer.parameter])
            for layer in context.layers
        }
        return self.measurement(
            value=by_layer[chosen.name],
            **found.certainty({chosen.parameter: factor[chosen.parameter]}),
            by_layer=by_layer,
            invariant_to=self.invariant_to | ({"neuron"} if self.normalize_features else set()),
            details={"layer": chosen.name},
            notes=(f"of layer {chosen.name!r}", *self._estimates(context, found, chosen)),
        )

    def _estimates(self, context: Context, found: Quantity, chosen: Layer) -> list[str]:
        """A note on the other layers, whose values may be estimates where this one is exact."""
        names = [x.name for x in context.layers if x != chosen and x.parameter in found.draws]
        return [f"by_layer holds estimates for {', '.join(names)}"] if names else []

    def _chosen(self, context: Context) -> Layer:
        layers = {layer.name: layer for layer in context.layers}
        if self.layer is not None:
            if self.layer not in layers:
                raise InvalidValue(
                    "The 'layer' of RelativeFlatness must name a layer with a weight matrix. "
                    f"Got {self.layer!r}. {nearest(self.layer, layers)}"
                )
            return layers[self.layer]
        linear = [layer for layer in context.layers if layer.kind == "linear"]
        if not linear:
            raise NotApplicable(
                "The model has no Linear layer. Name another with RelativeFlatness(layer=…)."
            )
        return max(linear, key=lambda layer: layer.position)
