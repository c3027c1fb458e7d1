"""What every rescaling did to the outputs and to the measures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, final

from torch import nn

from saltflat.audit.elements import KINDS, Trial
from saltflat.audit.outputs import batch_drift, narrow
from saltflat.audit.result import Audited, Drift
from saltflat.audit.values import Panel
from saltflat.audit.verdict import ORDER, Judgement, Reading, Tolerances, judge
from saltflat.symmetries.verify import verify

# A model that rounds to float32 inside shows it in every measure.
_ROUNDED = 1e-4


@final
class Ledger:
    """The readings of all rescaled models, against those of the model itself."""

    def __init__(
        self,
        before: Mapping[str, Reading],
        panel: Panel,
        model: nn.Module,
        inputs: Any,
        tolerances: Tolerances,
    ) -> None:
        self.before, self.panel, self.model, self.inputs = before, panel, model, inputs
        self.output_drift = 0.0
        self.notes: list[str] = []
        self.tolerances = tolerances
        if narrow(model, inputs, panel.output):
            self.tolerances = Tolerances(
                max(tolerances.closed, _ROUNDED), tolerances.errors, tolerances.searched
            )
            self.notes.append("The model rounds to a narrower type inside: drifts mean less.")
        self.batch_measures = {m.name for m in panel.measures if m.batch_statistics}
        self.seen: dict[tuple[str, str], list[tuple[Trial, Judgement, str]]] = {}

    def add(self, trial: Trial) -> None:
        output = self.panel.output
        moved_by = verify(self.model, trial.element, self.inputs, output=output)
        self.output_drift = max(self.output_drift, moved_by)
        moved = trial.element(self.model)
        readings = self.panel.read(moved)
        excuse = 0.0
        if self.batch_measures & set(self.before):
            excuse = batch_drift(self.model, moved, self.inputs, output)
        for name, before in self.before.items():
            after = readings[name]
            if isinstance(after, str):
                judgement, reason = Judgement(math.inf, 0.0, "undecided"), after
            else:
                own = excuse if name in self.batch_measures else 0.0
                judgement, reason = judge(before, after, self.tolerances, own), ""
            self.seen.setdefault((name, trial.kind), []).append((trial, judgement, reason))
        if trial.element.notes:
            self._note(
                f"{trial.kind}: factors that would make a running variance < 0 were clipped."
            )
        if excuse > self.tolerances.closed:
            names = " and ".join(name for name in self.before if name in self.batch_measures)
            self._note(f"{trial.kind}: batch statistics feel BatchNorm's eps, so {names} may.")

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    def rows(self, kinds: Sequence[str]) -> dict[str, Audited]:
        return {
            name: Audited(
                name,
                reading.value,
                reading.certainty,
                None
                if reading.declared is None
                else tuple(kind for kind in KINDS if kind in reading.declared),
                {kind: self._drift(name, kind, reading) for kind in kinds},
            )
            for name, reading in self.before.items()
        }

    def _drift(self, name: str, kind: str, reading: Reading) -> Drift:
        seen = self.seen[name, kind]
        trial, worst, reason = max(seen, key=lambda s: (ORDER.index(s[1].verdict), s[1].drift))
        return Drift(
            worst.drift,
            worst.tolerance,
            worst.verdict,
            trial.name,
            None if reading.declared is None else kind in reading.declared,
            reason,
            {t.spread: j.drift for t, j, _ in seen if t.along},
        )
