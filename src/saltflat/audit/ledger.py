"""What every rescaling did to the outputs, to the measures and to the user's functions."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from saltflat.audit.elements import Family, Trial
from saltflat.audit.result import (
    ORDER,
    Audit,
    Audited,
    Drift,
    Judgement,
    Tolerances,
    judge,
)
from saltflat.curvature import Curvature, Estimator, MatrixName, Settings
from saltflat.distributed import Reduction
from saltflat.errors import InvalidType, listed
from saltflat.landscape import BatchStatistics, batch_mode
from saltflat.losses import LossLike
from saltflat.measure import announce, attempt, prepared
from saltflat.measurement import Measurement
from saltflat.measures import Measure
from saltflat.risk import Output, Risk, Unpack, answer_of
from saltflat.session import RandomState, lend
from saltflat.shards import one_shard
from saltflat.symmetries import KINDS, Group, answers, change, duplicate, run, verify, widened
from saltflat.work import PRODUCT, Work

# A model that rounds to float32 inside shows it in every measure.
_ROUNDED = 1e-4

# A user's own measure: of a model and the data, both in float64.
Function = Callable[[nn.Module, Any], Any]


@final
@dataclass(kw_only=True)
class Panel:
    """What is audited, and how it is computed; `warnings` is filled by the first model."""

    data: Any
    loss: LossLike
    measures: Sequence[Measure]
    functions: Mapping[str, Function]
    group: Group
    curvature: MatrixName
    estimator: Estimator | None
    settings: Settings
    unpack: Unpack | None
    output: Output | None
    reduction: Reduction
    seed: int
    work: Work
    warnings: list[str] = field(default_factory=list)
    undeclared: set[str] = field(default_factory=set)  # functions that return a mere number

    def read(self, model: nn.Module, announced: int = 0) -> dict[str, Measurement | str]:
        """Every measure's value on a float64 model, or the reason why it has none.

        `announced` is how many such models there will be, for whoever waits.
        """
        readings: dict[str, Measurement | str] = {}
        if self.measures:
            readings = self._measured(model, announced)
        for name, function in self.functions.items():
            readings[name] = self._called(name, function, model)
        return readings

    def _measured(self, model: nn.Module, announced: int) -> dict[str, Measurement | str]:
        risk = Risk(
            model,
            self.data,
            self.loss,
            dtype=torch.float64,
            unpack=self.unpack,
            output=self.output,
            reduction=self.reduction,
        )
        # A rescaled model does the same operations as the first one did; its entries may be of so
        # many sizes that differences tell nothing.
        risk.work, risk.differentiable = self.work, not announced
        engine = Curvature(risk, self.curvature, self.estimator, self.settings, self.seed)
        readings: dict[str, Measurement | str] = {}
        with risk.session(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if announced:
                engine.foresee = partial(announce, engine, self.measures, announced)
            # A rescaled model has the same rescalings, so they need not be found again.
            context, _ = prepared(engine, self.measures, on_error="skip", group=self.group)
            for measure in self.measures:
                readings[measure.name] = attempt(measure, context)
        self.warnings += [w for w in engine.warnings if w not in self.warnings]
        return readings

    def _called(self, name: str, function: Function, model: nn.Module) -> Measurement:
        lent = duplicate(model).eval()
        lent.zero_grad(set_to_none=True)
        device = next(lent.parameters()).device
        state = RandomState(self.data, device)
        try:
            with torch.inference_mode(False), torch.enable_grad():
                answer = function(lent, wide(self.data))
        except Exception as error:
            error.add_note(f"This came from the function {name!r} under audit.")
            raise
        finally:
            # Every model meets the same samples in the same order, and the same random numbers.
            state.restore()
        if isinstance(answer, Measurement):
            return answer
        answer = answer.detach() if isinstance(answer, Tensor) else answer
        many = isinstance(answer, Tensor) and answer.numel() != 1
        if many or not hasattr(answer, "__float__"):
            raise InvalidType(
                f"The function {name!r} must return a number. Got {type(answer).__name__}."
            )
        self.undeclared.add(name)
        return Measurement(name=name, value=float(answer), exact=True)


@final
class WideData:
    """Data with every batch in float64, made as it is read."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        for item in self.data:
            yield widened(dict(item) if isinstance(item, Mapping) else item)

    def __len__(self) -> int:
        return len(self.data)


def wide(data: Any) -> Any:
    """The data in float64: tuples, lists and dicts of tensors as such, a loader as an iterable."""
    if isinstance(data, Mapping):
        return widened(dict(data))
    return widened(data) if isinstance(data, tuple | list) else WideData(data)


def narrow(model: nn.Module, example: Any, output: Output | None) -> bool:
    """Whether a float64 model rounds to a narrower type on the way."""
    return change(answers(model, example, output), _plain(model, example, output)) > 1e-12


def batch_drift(before: nn.Module, after: nn.Module, example: Any, output: Output | None) -> float:
    """The relative change of the outputs with batch statistics: BatchNorm's eps is not rescaled."""
    return change(*(_plain(m, example, output, batch=True) for m in (before, after)))


def _plain(
    model: nn.Module, example: Any, output: Output | None, *, batch: bool = False
) -> list[Tensor]:
    state = RandomState(None, next(model.parameters()).device)
    try:
        with lend(model, set(), torch.float64), torch.no_grad(), ExitStack() as statistics:
            if batch:
                statistics.enter_context(batch_mode(model))
                statistics.enter_context(BatchStatistics("the example"))
            raw = answer_of(output)(run(model, widened(example)))
    finally:
        state.restore()
    return [t.detach().double() for t in tree_leaves(raw) if isinstance(t, Tensor)]


@final
class Ledger:
    """The readings of all rescaled models, against those of the model itself."""

    def __init__(
        self,
        before: Mapping[str, Measurement],
        panel: Panel,
        model: nn.Module,
        inputs: Any,
        tolerances: Tolerances,
    ) -> None:
        self.before, self.panel, self.model, self.inputs = before, panel, model, inputs
        self.output_drift = 0.0
        self.trials: Counter[str] = Counter()
        self.notes: list[str] = []
        self.tolerances = tolerances
        if panel.reduction.ranks > 1:
            self.notes.append(f"Over the samples of {panel.reduction.ranks} ranks.")
        elif note := one_shard(panel.data):
            self.notes.append(f"{note[0].upper()}{note[1:]}.")
        if narrow(model, inputs, panel.output):
            self.tolerances = Tolerances(
                max(tolerances.closed, _ROUNDED), tolerances.errors, tolerances.searched
            )
            self.notes.append("The model rounds to a narrower type inside: drifts mean less.")
        self.batch_measures = {m.name for m in panel.measures if m.batch_statistics}
        self.seen: dict[tuple[str, str], list[tuple[Trial, Judgement, str]]] = {}

    def add(self, trial: Trial) -> None:
        output = self.panel.output
        self.trials[trial.kind] += 1
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

    def audit(
        self,
        model: str,
        kinds: Sequence[Family],
        spread: float,
        skipped: Mapping[str, str],
        left_out: Mapping[str, float],
    ) -> Audit:
        """What the rescalings of these kinds came to, as the user gets it."""
        rows = self._rows(tuple(f.kind for f in kinds))
        return Audit(
            rows,
            skipped,
            {f.kind: len(f) for f in kinds},
            spread,
            {f.kind: self.trials[f.kind] for f in kinds},
            self.output_drift,
            self.tolerances,
            model,
            (*self._hidden(rows), *self.panel.group.notes, *self.notes),
            left_out,
        )

    def _hidden(self, rows: Mapping[str, Audited]) -> list[str]:
        """Which verdicts the errors of estimates hide, what would tell, and its price."""
        hidden = [
            name
            for name, row in rows.items()
            if self.before[name].stderr > 0
            and any(d.verdict == "undecided" and not d.reason for d in row.values())
        ]
        if not hidden:
            return []
        told = f"Hidden by the errors of estimates: {listed(hidden)}."
        most = self.panel.settings.max_directions
        if self.panel.curvature == "ggn":
            return [f"{told} A sweep over all directions has none: max_directions= above {most}."]
        entries = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        price = float(f"{(1 + self.trials.total()) * entries * PRODUCT:.1e}")
        return [
            f"{told} What decides: the Hessian's blocks written out, for about {price:,.0f} "
            f"gradients: estimator=saltflat.Hutchinson(probes={entries}). Of another matrix, the "
            "Gauss–Newton matrix, curvature='ggn' audits the same measures, exactly for outputs of "
            f"at most {most} directions a sample. Of more draws errors fall with the square root."
        ]

    def _rows(self, kinds: Sequence[str]) -> dict[str, Audited]:
        rows = {}
        for name, m in self.before.items():
            declared = None
            if name not in self.panel.undeclared:
                declared = tuple(kind for kind in KINDS if kind in m.invariant_to)
            certainty = "function" if declared is None else m.certainty
            drifts = {kind: self._drift(name, kind, declared) for kind in kinds}
            rows[name] = Audited(name, m.value, certainty, declared, drifts)
        return rows

    def _drift(self, name: str, kind: str, declared: Sequence[str] | None) -> Drift:
        seen = self.seen[name, kind]
        trial, worst, reason = max(seen, key=lambda s: (ORDER.index(s[1].verdict), s[1].drift))
        return Drift(
            worst.drift,
            worst.tolerance,
            worst.verdict,
            trial.name,
            None if declared is None else kind in declared,
            reason,
            {t.spread: j.drift for t, j, _ in seen if t.along},
        )
