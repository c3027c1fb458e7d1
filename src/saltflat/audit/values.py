"""The measures and the user's functions on one model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn

from saltflat.audit.verdict import Reading
from saltflat.curvature.products import Curvature
from saltflat.curvature.quantities import Kind as Quantity
from saltflat.curvature.settings import Settings
from saltflat.curvature.stochastic import Hutchinson
from saltflat.errors import InvalidType
from saltflat.losses import LossLike
from saltflat.measure import attempt, kinds_of, shared_quantities
from saltflat.measurement import Measurement
from saltflat.measures import Context, Measure
from saltflat.measures.engine import CurvatureEngine
from saltflat.risk import Output, Risk, Unpack
from saltflat.session import RandomState
from saltflat.symmetries.evaluate import widened
from saltflat.symmetries.group import Group
from saltflat.symmetries.rescale import duplicate

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
    curvature: Curvature
    estimator: Hutchinson
    settings: Settings
    unpack: Unpack | None
    output: Output | None
    seed: int
    warnings: list[str] = field(default_factory=list)

    def read(self, model: nn.Module) -> dict[str, Reading | str]:
        """Every measure's value on a float64 model, or the reason why it has none."""
        found: dict[str, Reading | str] = self._measured(model) if self.measures else {}
        for name, function in self.functions.items():
            found[name] = self._called(name, function, model)
        return found

    def _measured(self, model: nn.Module) -> dict[str, Reading | str]:
        risk = Risk(
            model,
            self.data,
            self.loss,
            dtype=torch.float64,
            unpack=self.unpack,
            output=self.output,
        )
        engine = CurvatureEngine(risk, self.curvature, self.estimator, self.settings, self.seed)
        found: dict[str, Reading | str] = {}
        with risk.session(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kinds = frozenset[Quantity]().union(*(kinds_of(m) for m in self.measures))
            quantities, _ = shared_quantities(engine, kinds, lenient=True)
            # A rescaled model has the same rescalings, so they need not be found again.
            context = Context(risk, engine.layers(), quantities, self.seed, engine, self.group)
            for measure in self.measures:
                reading = attempt(measure, context)
                found[measure.name] = reading if isinstance(reading, str) else Reading.of(reading)
        self.warnings += [w for w in engine.warnings if w not in self.warnings]
        return found

    def _called(self, name: str, function: Function, model: nn.Module) -> Reading:
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
            return Reading.of(answer)
        answer = answer.detach() if isinstance(answer, Tensor) else answer
        many = isinstance(answer, Tensor) and answer.numel() != 1
        if many or not hasattr(answer, "__float__"):
            raise InvalidType(
                f"The function {name!r} must return a number. Got {type(answer).__name__}."
            )
        return Reading(float(answer), "function")


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
