"""Does a rescaling keep the function? On an example, in float64 where that can be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from saltflat.errors import SaltflatError
from saltflat.risk import logits, unwrap
from saltflat.symmetries.evaluate import Evaluation, Output, change, evaluation
from saltflat.symmetries.group import Group
from saltflat.symmetries.rescale import Element, duplicate

#: models with more parameters than this are verified in their own precision
WIDEST = 10_000_000
#: allowed change of the outputs, by the narrowest type that is computed in
TOLERANCES = {
    torch.float64: 1e-9,
    torch.float32: 1e-3,
    torch.float16: 5e-2,
    torch.bfloat16: 5e-2,
}
#: what an honest network makes of rounding may be this much more than of one relative rounding
_AMPLIFIED = 100.0
#: but never as much as this
_MOST = 0.1


def answers(model: nn.Module, example: Any, output: Output | None = None) -> list[Tensor]:
    """What the model answers, computed in float64."""
    with evaluation(unwrap(model), example, output or logits, wide=True) as lent:
        return [t.detach() for t in lent.answers()]


def verify(
    model: nn.Module,
    element: Element,
    example: Any,
    *,
    output: Output | None = None,
    tolerance: float = 1e-9,
) -> float:
    """The largest change of the outputs in float64, relative to their largest entry.

    Raises SaltflatError if it is larger than `tolerance`: the element is no symmetry.
    """
    wide = duplicate(unwrap(model)).double()
    drift = change(answers(wide, example, output), answers(element(wide), example, output))
    if not drift <= tolerance:
        raise SaltflatError(
            "The rescaling does not keep the function: the outputs moved by "
            f"{drift:.3g} of their size (allowed: {tolerance:.3g}). If the element came from "
            "saltflat.symmetries, this is an error in saltflat; please report the model."
        )
    return drift


def confirm(
    group: Group, model: nn.Module, example: Any, output: Output, *, steady: bool
) -> tuple[str, ...]:
    """Apply random elements of a group that was just found, and compare the outputs.

    One at the model's own parameters and one, if some of these are zero, beside them: what is zero
    hides from a rescaling, as the bias or the second factor of a low-rank update do at the start of
    training. Not so where values decide what is computed (`steady` is False): other parameters
    could take another branch.

    Raises SaltflatError where the outputs move: a rule is wrong. Returns notes on what could not be
    compared.
    """
    if len(group) == 0:
        return ()
    parameters = list(model.parameters())
    few = sum(p.numel() for p in parameters) <= WIDEST
    wide = few and all(p.device.type != "mps" for p in parameters)  # which has no float64
    try:
        with evaluation(model, example, output, wide=wide) as lent, torch.no_grad():
            return _Confirmation(group, lent, steady).notes()
    except SaltflatError:
        raise
    except Exception:
        if not wide:
            raise
    # Some models cannot run in float64: they look at bits, or own an operator for one type.
    with evaluation(model, example, output, wide=False) as lent, torch.no_grad():
        return _Confirmation(group, lent, steady).notes()


@final
@dataclass(frozen=True)
class _Confirmation:
    """Elements of a group applied to a lent model."""

    group: Group
    lent: Evaluation
    steady: bool

    def notes(self) -> tuple[str, ...]:
        start = self.lent.start
        note = self._compare(start, self.lent.answers(start), self._logs(0))
        beside = _beside(start, set(self.group.parameters())) if self.steady else {}
        if note or not beside:
            return (note,) if note else ()
        point = {**start, **beside}
        try:
            before = self.lent.answers(point)
        except Exception:
            return ()  # beside its own parameters the model need not be defined
        self._compare(point, before, self._logs(1))
        return ()

    def _compare(self, point: Mapping[str, Tensor], before: list[Tensor], logs: Tensor) -> str:
        """Refuse an element that moves the outputs; a note if that cannot be seen."""
        drift = self._drift(point, before, logs)
        if math.isnan(drift):
            return "not verified: the outputs on the example are not finite"
        if drift <= self._tolerance:
            return ""
        if not change(before, self.lent.answers(point)) <= self._tolerance:
            return "not verified: the outputs on the example differ from run to run"
        if drift <= min(_AMPLIFIED * self._rounding(point, before), _MOST):
            return ""
        raise SaltflatError(self._complaint(point, before, drift, logs))

    def _logs(self, seed: int) -> Tensor:
        """Random powers of two: where exponents are whole, multiplying by them does not round."""
        generator = torch.Generator().manual_seed(seed)
        widest = 1 if self.lent.rounded & {torch.float16, torch.bfloat16} else 2
        powers = torch.randint(-widest, widest + 1, (len(self.group),), generator=generator)
        return powers.double() * math.log(2)

    def _drift(self, point: Mapping[str, Tensor], before: list[Tensor], logs: Tensor) -> float:
        moved = dict(self.group.element(logs).moved(point))
        try:
            return change(before, self.lent.answers({**point, **moved}))
        except Exception:
            return math.inf  # it runs at the point itself

    @property
    def _tolerance(self) -> float:
        return max(TOLERANCES[dtype] for dtype in (torch.float64, *self.lent.rounded))

    def _rounding(self, point: Mapping[str, Tensor], before: list[Tensor]) -> float:
        """How far the outputs move if the parameters do by one rounding each."""
        generator = torch.Generator().manual_seed(0)
        moved = {}
        for name in self.group.parameters():
            value = point[name]
            signs = torch.randint(2, value.shape, generator=generator).to(value.device) * 2 - 1
            moved[name] = value * (1 + torch.finfo(value.dtype).eps * signs)
        found = change(before, self.lent.answers({**point, **moved}))
        return found if math.isfinite(found) else 0.0

    def _complaint(
        self, point: Mapping[str, Tensor], before: list[Tensor], drift: float, logs: Tensor
    ) -> str:
        name = self._culprit(point, before, logs)
        return (
            "Rescalings that saltflat found do not keep the model's function: the outputs on the "
            f"example moved by {drift:.3g} of their size (allowed: {self._tolerance:.3g}), that of "
            f"{name} for one. This is a defect of saltflat, not of the model. Please report it "
            f"with the layers around {name.split('[')[0]}; operations that let no scale through: "
            f"{', '.join(self.group.pinned_by) or 'none'}."
        )

    def _culprit(self, point: Mapping[str, Tensor], before: list[Tensor], logs: Tensor) -> str:
        """A generator that moves the outputs, by halves."""
        chosen = torch.arange(len(logs))
        while len(chosen) > 1:
            half = chosen[: len(chosen) // 2]
            part = torch.zeros_like(logs)
            part[half] = logs[half]
            wrong = not self._drift(point, before, part) <= self._tolerance
            chosen = half if wrong else chosen[len(half) :]
        return self.group.generators[int(chosen[0])].name


def _beside(start: Mapping[str, Tensor], names: set[str]) -> dict[str, Tensor]:
    """The parameters that hold zeros, with small numbers instead of these."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for name in sorted(names):
        value = start[name]
        zero = value == 0
        if bool(zero.any()):
            size = 0.1 * (float(value.double().square().mean().sqrt()) or 1.0)
            noise = torch.randn(value.shape, generator=generator, dtype=torch.float64)
            found[name] = torch.where(zero, (size * noise).to(value), value)
    return found
