"""Curvature for measures: several quantities from one sweep, as `Quantity` values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from saltflat.curvature import spectrum
from saltflat.curvature.curvature import Blocks, Found, start
from saltflat.curvature.estimators import Hutchinson, group_sizes
from saltflat.curvature.products import Curvature
from saltflat.curvature.settings import Settings
from saltflat.curvature.sweep import EVERY_PARAMETER, Kind
from saltflat.measures.base import Layer, Quantity
from saltflat.risk import Risk

# Groups of draws that are kept of an estimate, to tell the error of what is made of it.
_GROUPS = 20


@final
class CurvatureEngine:
    """Computes quantities of one risk, inside its session."""

    def __init__(
        self, risk: Risk, curvature: Curvature, estimator: Hutchinson, settings: Settings, seed: int
    ) -> None:
        self.risk, self.curvature, self.seed = risk, curvature, seed
        self.estimator, self.settings = estimator, settings
        self.found: Found | None = None  # of the first sweep
        self.warnings: list[str] = []
        self._eigenvalues: dict[tuple[str, ...], tuple[float, float]] = {}

    def quantities(self, kinds: frozenset[Kind]) -> dict[Kind, Quantity]:
        found = self._blocks(kinds, min(self.estimator.probes, _GROUPS)).find()
        self.warnings += [w for w in found.warnings if w not in self.warnings]
        if self.found is None:
            self.found = found
        probes = self.estimator.probes
        return {kind: _quantity(found, kind, probes) for kind in kinds if kind in found.entries}

    def eigenvalue(self, names: Sequence[str], tol: float) -> tuple[float, float]:
        key = (*names, str(tol))
        if key not in self._eigenvalues:
            blocks = self._blocks(frozenset(), 0)
            value, residual, _ = blocks.largest_eigenvalue(names, tol, self.seed)
            self._eigenvalues[key] = value, residual
        return self._eigenvalues[key]

    def column_eigenvalues(self, layer: Layer, tol: float) -> Tensor:
        plan = start(self.risk, next(self.risk.batches()), self.settings)
        name, matrix = layer.parameter, layer.matrix
        product = self._blocks(frozenset(), 0).products([name], plan)
        count = len(matrix.columns(layer.weight))
        groups, outputs, inputs, kernel = matrix.grouped(layer.weight).shape
        found = torch.zeros(count, dtype=torch.float64)
        for j in matrix.columns(layer.weight.abs()).nonzero().flatten().tolist():

            def column(v: Mapping[str, Tensor], j: int = j) -> dict[str, Tensor]:
                whole = v[name].new_zeros(groups, outputs, inputs, kernel)
                whole[j // inputs, :, j % inputs] = v[name]
                image = product({name: matrix.ungrouped(whole, layer.weight.shape)})[name]
                return {name: matrix.grouped(image)[j // inputs, :, j % inputs]}

            like = {name: layer.weight.new_empty(outputs, kernel)}
            found[j] = spectrum.largest(column, like, tol, self.seed)[0]
        return found

    def _blocks(self, kinds: frozenset[Kind], groups: int) -> Blocks:
        return Blocks(
            self.risk, kinds, self.curvature, self.estimator, self.settings, groups=groups
        )

    def layers(self) -> list[Layer]:
        """The weight matrices, in `named_parameters` order."""
        if self.found is None:  # nothing was asked for yet: a look at the model is enough
            self.found = self._blocks(frozenset(), 0).find()
        last, kinds = dict[str, int](), dict(self.found.rules)
        for position, (rule, names) in enumerate(self.found.calls):
            # What a layer is does not depend on the rule that serves it: one that is dead on the
            # probed samples is served by another.
            last |= dict.fromkeys(names, position)
            kinds |= dict.fromkeys(names, rule)
        return [
            Layer(
                name.removesuffix(".weight") or name,
                name,
                matrix,
                self.risk.parameters[name].detach(),
                kinds[name],
                last.get(name, -1),
            )
            for name, matrix in self.found.matrices.items()
        ]


def _quantity(found: Found, kind: Kind, probes: int) -> Quantity:
    entries = found.entries[kind]
    # Small blocks may have been written out in full, and are exact though others are not.
    drawn = {n: e.draws for n, e in entries.items() if not e.exact and e.draws is not None}
    assert kind in EVERY_PARAMETER or all(n in found.matrices for n in entries)
    sizes = group_sizes(probes, len(next(iter(drawn.values())))) if drawn else ()
    probed = frozenset(n for n, e in entries.items() if bool(e.stderr.isnan().any()))
    return Quantity({n: e.value.double() for n, e in entries.items()}, drawn, sizes, probed)
