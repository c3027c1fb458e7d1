"""Every number with an error or an interval on the page "What we found" is one of the results."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from saltflat.papers import Reproduction
from saltflat.sweep import Run

DOCS = Path(__file__).parent.parent / "docs"
TEXT = " ".join((DOCS / "found.md").read_text().replace("−", "-").split())
RESULTS = {
    path.relative_to(DOCS / "results").with_suffix("").as_posix(): Reproduction.load(path)
    for path in (DOCS / "results").rglob("*.json")
}
ROWS = [row for result in RESULTS.values() for row in result.rows]
NUMBER = r"([+-]?\d+(?:\.\d+)?)"
INTERVALS = re.findall(rf"{NUMBER} \[{NUMBER}, {NUMBER}\]", TEXT)
ERRORS = re.findall(rf"{NUMBER} ± {NUMBER}", TEXT)
HALF = 0.0005  # of the last digit of intervals in notes


def rounds_to(text: str, value: float, slack: float = 1e-9) -> bool:
    """Whether the digits that are printed are those of the value, or of it in percent."""
    digits = len(text.partition(".")[2])
    return any(abs(float(text) - unit * value) <= 0.5 * 10**-digits + slack for unit in (1, 100))


def interval(note: str) -> tuple[float, ...]:
    found = re.search(rf"\[{NUMBER}, {NUMBER}\]", note)
    return tuple(map(float, found.groups())) if found else ()


@pytest.mark.parametrize("printed", INTERVALS, ids="_".join)
def test_an_interval_is_that_of_a_row(printed: tuple[str, ...]) -> None:
    rows = [(row.ours, *interval(row.note)) for row in ROWS if interval(row.note)]
    assert any(all(map(rounds_to, printed, row, (HALF,) * 3)) for row in rows)


@pytest.mark.parametrize("printed", ERRORS, ids="_".join)
def test_an_error_is_that_of_a_row(printed: tuple[str, ...]) -> None:
    rows = [(row.ours, row.error) for row in ROWS if row.error is not None]
    assert any(all(map(rounds_to, printed, row)) for row in rows)


def test_the_page_has_them() -> None:
    assert (len(INTERVALS), len(ERRORS)) > (90, 30)


COLUMNS = (
    "τ with the gap",
    "τ with the gap among networks with equal label noise",
    "partial τ with the gap given the weight norm",
    "mean Ψ over the hyperparameters",
)
LINES = re.findall(r"^\| [`*]([a-z_ ]+)[`*] \| (.*) \|$", (DOCS / "found.md").read_text(), re.M)


@pytest.mark.parametrize(("name", "cells"), LINES, ids=[name for name, _ in LINES])
def test_the_pool_s_table_has_each_predictor_in_its_line(name: str, cells: str) -> None:
    predictor = "epochs" if name == "epochs of training" else name.replace(" ", "_")
    rows = {row.what: row for row in RESULTS["predictors/pool"].rows}
    for title, cell in zip(COLUMNS, cells.replace("−", "-").split(" | "), strict=True):
        row = rows.get(f"{title}: {predictor}")
        if row is None:
            assert cell == "–"
            continue
        value, low, high = re.findall(NUMBER, cell)
        assert rounds_to(value, row.ours)
        assert all(map(rounds_to, (low, high), interval(row.note), (HALF,) * 2))


def of(name: str, **wanted: object) -> list[Run]:
    runs = RESULTS[name].runs
    return [run for run in runs if all(run.settings[k] == v for k, v in wanted.items())]


def numbers(runs: Sequence[Run], name: str) -> np.ndarray:
    return np.array([float(run[name]) for run in runs])


def test_what_is_said_of_single_networks() -> None:
    wide = of("normalized-sharpness/figure-3", network="wrn-cifar10")
    fitted = [run for run in wide if run["noise"] < 0.8]
    names = ("normalized_sharpness", "hessian_trace")
    found = [stats.pearsonr(numbers(fitted, n), numbers(fitted, "gap")).statistic for n in names]
    others = numbers([run for run in wide if run["noise"] >= 0.8], "train_accuracy")
    assert f"among the {len(fitted)} others Pearson's correlation is {found[0]:.2f} and" in TEXT
    assert f"and {found[1]:.2f}. Over" in TEXT
    assert f"fitted {100 * others.min():.0f} to {100 * others.max():.0f} % of their" in TEXT
    digits = of("normalized-sharpness/figure-3", network="lenet-mnist")
    assert f"negative for {(numbers(digits, 'gap') < 0).sum()} of {len(digits)}" in TEXT
    noisy = [run for run in of("minimum-sharpness/figure-2") if run["noise"] >= 0.9]
    edge = sorted(noisy, key=lambda run: -run["minimum_sharpness"])
    first, rest = numbers(edge[:3], "minimum_sharpness"), numbers(edge[3:], "minimum_sharpness")
    assert f"{first.min():.0f} to {first.max():.0f} where the others have" in TEXT
    assert f"others have {rest.min():.0f} to {rest.max():.0f}," in TEXT
    accuracies = numbers(edge[:3], "train_accuracy")
    assert f"accuracy {accuracies.min():.2f} to {accuracies.max():.2f}, the others" in TEXT


def test_the_gaps_of_the_pool() -> None:
    ranges = {}
    for noise in (0.0, 0.1, 0.2):
        gaps = 100 * numbers(of("predictors/pool", noise=noise), "gap")
        ranges[noise] = f"{gaps.min():.0f} to {gaps.max():.0f}"
    first, second, third = ranges.values()
    said = f"gaps are {first} points without noise, {second} with 10 % and {third} with 20 %"
    assert said in TEXT
