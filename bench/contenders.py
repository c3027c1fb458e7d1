"""The table of what runs against what."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

import saltflat
from bench import peers
from bench.cases import Problem
from bench.peers import Run, Values

_REFERENCE_BATCH = 8  # samples at a time, since memory counts here and time does not


@dataclass(frozen=True)
class Contender:
    """A way to get a curvature.

    `gives` says what the values are: "gradient", "trace", "diagonal", or "draws" (of traces).
    `build(problem, size)` prepares a run; `size` is the batch size where `batched`, else the number
    of probes.
    """

    title: str
    gives: str
    build: Callable[[Problem, int], Run]
    batched: bool = False


def _floats(values: Mapping[str, float]) -> Values:
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}


def _trace(problem: Problem, _: int) -> Run:
    data = (problem.x, problem.y)
    return lambda: _floats(saltflat.trace(problem.model, data))


def _diagonal(problem: Problem, _: int) -> Run:
    data = (problem.x, problem.y)
    return lambda: dict(saltflat.diagonal(problem.model, data))


CONTENDERS = {
    "gradient": Contender("one gradient", "gradient", lambda p, _: peers.gradient(p)),
    "trace": Contender("saltflat trace", "trace", _trace),
    "diagonal": Contender("saltflat diagonal", "diagonal", _diagonal),
    "backpack": Contender("BackPACK DiagGGNExact", "diagonal", peers.backpack_diagonal, True),
    "per-sample": Contender("K+1 per-sample passes", "trace", peers.per_sample_trace, True),
    "hutchinson": Contender("100 Hutchinson probes", "draws", peers.hutchinson_draws),
}


def reference(problem: Problem) -> Values:
    """The diagonal by BackPACK in float64, the measure of all errors.

    These networks are piecewise linear, so that their Gauss–Newton diagonal is the Hessian's.
    """
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # of what BackPACK makes itself, for average pooling
    try:
        return peers.backpack_diagonal(problem.double(), _REFERENCE_BATCH)()
    finally:
        torch.set_default_dtype(default)
