"""The results that the pages are made of: they follow from their runs by the code that is here."""

from __future__ import annotations

from math import isclose
from pathlib import Path
from typing import Any

import pytest

from saltflat.papers import EXPERIMENTS, Reproduction, Size
from saltflat.report import store

RESULTS = Path(__file__).parent.parent / "docs" / "results"
_LONG = {"predictors/pool"}  # its bootstrap
FILES = {str(path.relative_to(RESULTS).with_suffix("")): path for path in RESULTS.rglob("*.json")}
NAMES = [
    pytest.param(name, marks=[pytest.mark.slow] if name in _LONG else []) for name in sorted(FILES)
]


def test_every_result_is_of_an_experiment() -> None:
    assert set(FILES) <= set(EXPERIMENTS)


def alike(one: Any, other: Any) -> bool:
    """Sums round as the machine does."""
    numbers = isinstance(one, float) and isinstance(other, float)
    return isclose(one, other, rel_tol=1e-9) if numbers else bool(one == other)


@pytest.mark.parametrize("name", NAMES)
def test_a_table_is_what_its_runs_say(name: str) -> None:
    result, experiment = Reproduction.load(FILES[name]), EXPERIMENTS[name]
    assert result.name == name
    again = store.plain(tuple(experiment.rows(result.runs)))
    for row, other in zip(store.plain(result.rows), again, strict=True):
        assert row.keys() == other.keys()
        assert all(alike(row[key], other[key]) for key in row), (row, other)
    assert result.changed == tuple(experiment.changed)
    command = f"saltflat reproduce {name} --size {result.size} --device {result.device}"
    assert result.command == command


@pytest.mark.parametrize("name", NAMES)
def test_all_runs_of_a_size_are_there_and_no_others(name: str) -> None:
    result = Reproduction.load(FILES[name])
    sizes: dict[str, Size] = {"small": "small", "full": "full"}
    wanted = [dict(each) for each in EXPERIMENTS[name].runs(sizes[result.size])]
    assert [dict(run.settings) for run in result.runs] == wanted


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_its_figure_can_be_drawn(name: str, tmp_path: Path) -> None:
    figure = EXPERIMENTS[name].draw(Reproduction.load(FILES[name]).runs)
    figure.savefig(tmp_path / "figure.png")
