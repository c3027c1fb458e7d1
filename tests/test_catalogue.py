"""Measures know themselves: nothing depends on a measure's name or type outside its class."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, final

import pytest
import torch
from torch import Tensor, nn

import saltflat as sf
from saltflat.measurement import Measurement
from saltflat.measures import MEASURES, Context, Measure, NotApplicable


class OwnMeasure(Measure):
    """The sum of squares of all measured parameters."""

    title: ClassVar[str] = "‖θ‖²"
    paper: ClassVar[str] = ""
    equation: ClassVar[str] = ""
    needs: ClassVar[frozenset[Any]] = frozenset()
    invariant_to: ClassVar[frozenset[Any]] = frozenset()

    def compute(self, context: Context) -> Measurement:
        value = sum(float(p.detach().square().sum()) for p in context.risk.parameters.values())
        return self.measurement(value=value, exact=True)


def own(label: str, *, needs_layers: bool) -> Measure:
    """A user's measure with this name."""

    @final
    @dataclass(frozen=True)
    class Own(OwnMeasure):
        name: ClassVar[str] = label

    Own.needs_layers = needs_layers
    return Own()


class Scale(nn.Module):
    """No weight matrix at all."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


DATA = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).double(), torch.arange(5) % 3
NAMES = ["bias_trace", "hessian_of_mine", "x"]


@pytest.mark.parametrize("name", NAMES)
def test_a_measure_says_whether_it_needs_a_weight_matrix(name: str) -> None:
    report = sf.measure(Scale(), DATA, measures=[own(name, needs_layers=False)])
    assert report[name].value == pytest.approx(5.25)
    with pytest.raises(NotApplicable, match="no weight matrix"):
        sf.measure(Scale(), DATA, measures=[own(name, needs_layers=True)])


@pytest.mark.parametrize("name", NAMES)
def test_a_measure_without_a_weight_matrix_is_audited(name: str) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3)).double()
    found = sf.audit(model, DATA, measures=[own(name, needs_layers=False)], elements=1)
    assert name in found
    with pytest.raises(sf.ModelError, match="no weight matrix"):
        sf.audit(Scale(), DATA, measures=[own(name, needs_layers=True)], elements=1)


def test_what_is_searched_for_is_a_lower_bound() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3)).double()
    report = sf.measure(model, DATA, measures="all")
    assert {name for name, kind in MEASURES.items() if kind.searched} == {
        name for name, m in report.items() if m.lower_bound
    }


def test_a_measure_says_whose_its_neurons_are() -> None:
    @final
    @dataclass(frozen=True)
    class Named(OwnMeasure):
        name: ClassVar[str] = "named"

        def compute(self, context: Context) -> Measurement:
            values = {"0": torch.ones(2, dtype=torch.float64)}
            return self.measurement(value=2.0, exact=True, by_neuron=values, neurons="heads")

    model = nn.Sequential(nn.Linear(3, 3)).double()
    table = sf.measure(model, DATA, measures=[Named(), "kappa_trace"]).neurons("0")
    assert (table.rows, *table.columns) == ("neuron", "named, heads", "kappa_trace, input units")


# Names that are a choice of somebody else's, by room: what a monitor or a penalty takes by default
# or lets choose, an option of SAM that is called as a measure is, a key of what `saltflat balance`
# writes, and a demo's own calls.
ELSEWHERE = {
    "cli": {"hessian_trace"},
    "training": {
        "rho",
        "hessian_trace",
        "minimum_sharpness",
        "neuronwise_minimum_sharpness",
        "normalized_sharpness",
    },
    "demo": set(MEASURES),
    "papers": set(MEASURES),  # whose experiments measure what the papers do
    "moved.py": set(MEASURES),  # modules of that name that were
}
SOURCE = Path(sf.__file__).parent


def constants(tree: ast.Module) -> Iterator[str]:
    """All strings of a module that are not docstrings."""
    docs = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.value


def named(path: Path) -> set[str]:
    """The measures that a module names, or families of them by a prefix as in "hessian_"."""
    strings = set(constants(ast.parse(path.read_text(encoding="utf-8"))))
    prefixes = {name[: i + 1] for name in MEASURES for i, c in enumerate(name) if c == "_"}
    return strings & (set(MEASURES) | prefixes)


def test_measures_are_named_in_the_catalogue_alone() -> None:
    rooms = [p for p in SOURCE.rglob("*.py") if p.name != "__init__.py"]
    paths = {p.relative_to(SOURCE): p for p in rooms}
    assert any(named(p) for path, p in paths.items() if path.parts[0] == "measures")
    found = {
        str(path): names
        for path, p in paths.items()
        if path.parts[0] != "measures" and (names := named(p) - ELSEWHERE.get(path.parts[0], set()))
    }
    assert not found
