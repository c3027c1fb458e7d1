"""ρ: the curvature along each unit's own weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, final

from saltflat.errors import InvalidValue
from saltflat.measurement import EVERY_RESCALING, Measurement, Symmetry
from saltflat.measures.base import Context, Measure, Need


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
    paper: ClassVar[str] = "Petzka et al. 2019"
    equation: ClassVar[str] = "appendix B and Table 1, ρ"
    needs: ClassVar[frozenset[Need]] = frozenset({"columns"})
    invariant_to: ClassVar[frozenset[Symmetry]] = EVERY_RESCALING

    def __post_init__(self) -> None:
        if self.side not in ("columns", "rows"):
            raise InvalidValue(f"The side of Rho must be 'columns' or 'rows'. Got {self.side!r}.")

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
        )
