"""How long the main calls take on a user's own model, in gradients over the same data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any, final

import torch
from rich.table import Table
from torch import nn

import saltflat as sf
from saltflat.printed import USUAL, plain_text
from saltflat.risk import Risk


@final
@dataclass(frozen=True)
class Timings:
    """Seconds by what was timed, the fastest of `repeats`; the gradient comes first."""

    seconds: Mapping[str, float]
    exact: bool
    repeats: int

    def content(self) -> dict[str, Any]:
        one = self.seconds[GRADIENT]
        ratios = {name: each / one for name, each in self.seconds.items()}
        return {"seconds": dict(self.seconds), "gradients": ratios, "exact": self.exact}

    def __rich__(self) -> Table:
        table = Table(caption_justify="left")
        for column in ("", "seconds", "gradients"):
            table.add_column(column, justify="right" if column else "left", no_wrap=True)
        for name, each in self.seconds.items():
            table.add_row(name, f"{each:.3g}", f"{each / self.seconds[GRADIENT]:.1f}")
        table.caption = (
            f"The fastest of {self.repeats}. The trace is {'exact' if self.exact else 'estimated'}."
        )
        return table

    def __str__(self) -> str:
        return plain_text(self, USUAL)


GRADIENT = "one gradient"


def bench(model: nn.Module, data: Any, arguments: Mapping[str, Any], repeats: int) -> Timings:
    """Time one gradient and the main calls, on all the data; `arguments` as for `sf.trace`."""
    quiet = {**arguments, "progress": False}
    plain = {name: value for name, value in quiet.items() if name != "tolerance"}
    calls: dict[str, Callable[[], Any]] = {
        GRADIENT: lambda: _gradient(model, data, arguments),
        "trace": lambda: sf.trace(model, data, **quiet),
        "diagonal": lambda: sf.diagonal(model, data, **quiet),
        "largest eigenvalue": lambda: sf.max_eigenvalue(model, data, **plain),
        "measure": lambda: sf.measure(model, data, **quiet),
    }
    exact = bool(calls["trace"]().exact)  # the first call also warms up
    seconds = {name: min(_timed(call) for _ in range(repeats)) for name, call in calls.items()}
    return Timings(seconds, exact, repeats)


def _timed(call: Callable[[], Any]) -> float:
    start = perf_counter()
    call()
    return perf_counter() - start


def _gradient(model: nn.Module, data: Any, arguments: Mapping[str, Any]) -> None:
    names = ("loss", "parameters", "dtype", "unpack", "output")
    risk = Risk(model, data, **{name: arguments[name] for name in names})
    parameters = list(risk.parameters.values())
    with risk.session():
        for batch in risk.batches():
            outputs = risk.forward(batch)
            slopes = torch.autograd.grad(outputs.sum(), parameters, allow_unused=True)
            sum(float(slope.sum()) for slope in slopes if slope is not None)  # wait for a GPU
