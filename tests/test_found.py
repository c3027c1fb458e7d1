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


def test_how_well_the_mlps_have_fitted_their_labels() -> None:
    mlps = of("normalized-sharpness/figure-3", network="mlp-mnist")
    half, most = ([run for run in mlps if run["noise"] == noise] for noise in (0.5, 0.9))
    first, second = (100 * numbers(some, "train_accuracy") for some in (half, most))
    assert f"half of them random {first.min():.0f} to {first.max():.0f} % of" in TEXT
    assert f"90 % random {second.min():.0f} to {second.max():.0f} %, where the gap" in TEXT
    assert numbers(most, "gap").max() < 0


def test_which_networks_count_in_figure_3_of_reparameterization() -> None:
    runs = of("reparameterization/figure-3")
    batches = sorted({run["batch"] for run in runs})
    counted = [run["batch"] for run in runs if run["train_loss"] <= 0.07]
    assert [counted.count(batch) for batch in batches] == [9, 7, 1, 0]
    assert "17 remain (9, 7, 1 and none of ten with batches of 1000, 2000, 4000 and 8000)" in TEXT
    assert (numbers(runs, "kappa_trace_max") == numbers(runs, "kappa_trace_1")).all()


def value(name: str, what: str) -> float:
    (row,) = (row for row in RESULTS[name].rows if row.what == what)
    return row.ours


def test_correlations_without_an_interval() -> None:
    layers = [
        value("reparameterization/figure-3", f"Pearson, ρ of layer {layer} and gap")
        for layer in (2, 3, 4)
    ]
    assert "layers 2 to 4 ({:.2f}, {:.2f} and {:.2f}) no".format(*layers) in TEXT


def test_the_times_of_hessians_and_traces() -> None:
    name = "relative-flatness/figure-4"
    ways = ("autograd, row by row", "autograd, vectorized", "functorch")
    times = [value(name, f"32×32 weights, {way}") for way in ways]
    said = "takes {:.0f} gradients row by row, {:.0f} vectorized and {:.0f} by functorch"
    assert f"The Hessian of 32×32 weights {said.format(*times)}" in TEXT
    assert all(6500 < value(name, f"96×96 weights, {way}") < 7500 for way in ways)
    kappa = value(name, "96×96 weights, κ without the Hessian (ours)")
    assert f"by each of the three, and κ without it {kappa:.1f}." in TEXT
    ratio = value(name, "row by row / vectorized, largest ratio")
    assert f"here it is a factor of {ratio:.1f} at most" in TEXT
    name, sizes = "relative-flatness/figure-5", (8, 16, 32, 64, 96)
    exact, hessian = (
        [value(name, f"{size}×{size} weights, {way}") for size in sizes]
        for way in ("exact without the Hessian (ours)", "functorch's Hessian")
    )
    assert f"An exact trace takes {min(exact):.0f} to {max(exact):.0f} gradients up to 96" in TEXT
    largest = f"{round(max(hessian), -2):,.0f}"
    assert f"where functorch takes {min(hessian):.0f} to {largest}, and" in TEXT
    last = [
        value(name, f"2048×2048 weights, {way}")
        for way in ("exact without the Hessian (ours)", "Hutchinson's estimate")
    ]
    assert f"and {last[0]:.1f} at 2048×2048 weights" in TEXT
    assert f"100 probes of Hutchinson's take {last[1]:.0f} and" in TEXT


def test_the_errors_of_approximations_of_the_diagonal() -> None:
    rows = RESULTS["minimum-sharpness/figure-3"].rows
    for version in ("arXiv", "ICML"):
        off = [row.ours for row in rows if row.what.endswith(f"error, {version} version")]
        assert len(off) == 6
        assert f"{min(off):.0f} to {max(off):.0f} times" in TEXT
    exact = [row.ours for row in rows if row.what.endswith("exact diagonal, in gradients")]
    assert f"the exact diagonal takes {min(exact):.1f} to {max(exact):.0f} gradients" in TEXT


def test_a_fine_tuned_encoder_gains_with_every_seed() -> None:
    name = "relative-flatness/table-3"
    methods = ("baseline", "FAM, share 0.05")
    baseline, fam = (
        {run["seed"]: run["accuracy"] for run in of(name, method=method)} for method in methods
    )
    assert all(fam[seed] > baseline[seed] for seed in range(5))


def test_single_networks_of_the_small_sizes_and_of_lenet() -> None:
    shapes = numbers(of("relative-flatness/table-2", strength=0.0), "dsc_1")
    assert sum(round(each, 2) <= 0.42 for each in shapes) == 2
    random = numbers(of("minimum-sharpness/figure-4", noise=1.0), "train_accuracy")
    assert f"has fitted {100 * random.min():.0f} % of them" in TEXT
    collapsed = [run["noise"] for run in of("minimum-sharpness/figure-2") if run["collapsed"]]
    assert collapsed == [0.0] * 3
    differing = [
        value(f"bn-sharpness/table-{table}", f"training loss, {name}-{decay}")
        - value(f"bn-sharpness/table-{table}", f"training loss, SGD-{decay}")
        for table in (1, 2)
        for name in ("SGDS-0", "SGDS-5")
        for decay in ("5e-4", "0")
    ]
    assert min(differing) > 0


def test_how_many_times_faster_than_the_loop() -> None:
    rows = RESULTS["minimum-sharpness/figure-1"].rows
    some = [row for row in rows if row.what.endswith("times faster than the loop")]
    low, high = min(row.ours for row in some), max(row.ours for row in some)
    assert f"takes 1/{float(f'{low:.3g}'):.0f} to 1/{float(f'{high:.2g}'):.0f} of the" in TEXT
    there = [row.published for row in some if row.published is not None]
    assert f"(1/{min(there):.0f} to 1/{max(there):.0f} published" in TEXT


def test_how_accuracies_scatter_from_seed_to_seed() -> None:
    name = "relative-flatness/table-1"
    methods = dict.fromkeys(run["method"] for run in of(name))
    scatter = [numbers(of(name, method=each), "accuracy").std(ddof=1) for each in methods]
    assert f"scatter by {min(scatter):.2f} to {max(scatter):.2f} points" in TEXT
