"""The twin of a model with the least trace, told by numbers before and after."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from rich.text import Text
from torch import nn

import saltflat as sf
from saltflat.result import Trace
from saltflat.risk import Risk
from saltflat.symmetries import answers, change
from saltflat.work import reporting

_SAMPLES = 32  # on which the outputs are compared


@final
@dataclass(frozen=True)
class Balanced:
    """A model of the same function, the traces before and after, and how far outputs moved."""

    model: nn.Module
    rescalings: int
    before: Trace
    after: Trace
    moved: float

    def content(self) -> dict[str, Any]:
        return {
            "rescalings": self.rescalings,
            "hessian_trace": {
                name: {"value": each.total, "exact": each.exact, "stderr": each.stderr}
                for name, each in (("before", self.before), ("after", self.after))
            },
            "outputs_moved": self.moved,
        }

    def save(self, path: Path) -> None:
        """Write the weights to a .safetensors file; ones that are shared are written once each."""
        from safetensors.torch import save_file

        state = self.model.state_dict()
        save_file({name: value.contiguous().clone() for name, value in state.items()}, str(path))

    def __rich__(self) -> Text:
        return Text(str(self))

    def __str__(self) -> str:
        return (
            f"{self.rescalings} rescalings keep the function.\n"
            f"Trace of the Hessian: {_shown(self.before)} before, {_shown(self.after)} after.\n"
            f"The outputs moved by {self.moved:.1e} of their size, in float64."
        )


def _shown(trace: Trace) -> str:
    return f"{trace.total:.6g} ({'exact' if trace.exact else f'± {trace.stderr:.2g}'})"


def balanced(model: nn.Module, data: Any, arguments: Mapping[str, Any]) -> Balanced:
    """The twin, with `arguments` as for `sf.diagonal`."""
    output, unpack = arguments["output"], arguments["unpack"]
    risk = Risk(
        model, data, arguments["loss"], dtype=arguments["dtype"], unpack=unpack, output=output
    )
    with risk.session():
        inputs = next(risk.batches()).part(0, _SAMPLES).inputs
    with reporting(arguments.get("progress")) as work:
        work.at("searching rescalings", 0, 1)
        group = sf.symmetries(model, inputs, output=output, parameters=arguments["parameters"])
    twin = group.balance(model, data, **arguments)
    moved = change(answers(model, inputs, output), answers(twin, inputs, output))
    before, after = (sf.trace(each, data, **arguments) for each in (model, twin))
    return Balanced(twin, len(group), before, after, moved)
