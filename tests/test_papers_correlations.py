"""Correlations against SciPy's, and their intervals against what they promise."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
from scipy import stats

from saltflat.papers.correlations import correlation

PEERS = {"Spearman": stats.spearmanr, "Kendall": stats.kendalltau, "Pearson": stats.pearsonr}


@pytest.mark.parametrize("kind", PEERS)
def test_the_value_is_scipy_s(kind: str) -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(6, size=40) + 0.0  # with ties
    y = x + 2 * rng.normal(size=40)
    assert correlation(x, y, kind).value == pytest.approx(PEERS[kind](x, y).statistic)


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """Of few networks too: plain percentiles hold it in 361 of these 400."""
    rng, held = np.random.default_rng(1), 0
    for trial in range(400):
        x = rng.normal(size=12)
        found = correlation(x, 0.9 * x + 0.19**0.5 * rng.normal(size=12), "Pearson", seed=trial)
        held += found.low <= 0.9 <= found.high
    assert 370 <= held <= 390


def test_what_is_not_finite_is_left_out() -> None:
    found = correlation([1, 2, 3, 4, math.nan, 6], [2, 3, 4, 5, 1, math.inf])
    assert found.value == pytest.approx(1)
    assert found.count == 4
    assert found.row("x").note == "no interval, 4 networks, 2 without finite numbers left out"


def test_of_few_networks_there_is_no_interval() -> None:
    """Of three networks in order every draw has a correlation of 1, which would be no error."""
    few, enough = (correlation(range(count), range(count)) for count in (9, 10))
    assert few.value == enough.value == 1
    assert math.isnan(few.error)
    assert few.row("x").error is None
    assert enough.row("x").note == "95 % interval [1.000, 1.000], 10 networks"


@pytest.mark.parametrize("x", [[1.0, 2.0], [3.0, 3.0, 3.0, 3.0]])
def test_nothing_can_be_said_of_two_or_of_a_constant(x: list[float]) -> None:
    assert math.isnan(correlation(x, list(range(len(x)))).value)


@pytest.mark.parametrize("kind", PEERS)
def test_a_constant_that_is_rounded_has_no_correlation(kind: str) -> None:
    """The mean of twelve times 0.1 is not 0.1."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = correlation([0.1] * 12, list(range(12)), kind)
    assert math.isnan(found.value)
    assert found.row("x").note == "no interval, 12 networks"


@pytest.mark.parametrize("factor", [1e-170, 1e170])
def test_units_do_not_matter(factor: float) -> None:
    """The squares of such numbers are 0, or infinite."""
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(2, 12))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = correlation(factor * x, y, "Pearson")
    plain = correlation(x, y, "Pearson")
    assert [found.value, found.low, found.high] == pytest.approx(
        [plain.value, plain.low, plain.high]
    )


def test_draws_in_which_a_column_is_constant_are_left_out() -> None:
    """One network of twelve differs: every draw without it would count as no correlation."""
    x, y = np.array([0.1] * 11 + [5.0]), np.random.default_rng(0).normal(size=12)
    drawn = np.random.default_rng(0).integers(12, size=(2000, 12))
    known = [stats.pearsonr(x[d], y[d]).statistic for d in drawn if 11 in d and (d != 11).any()]
    found = correlation(x, y, "Pearson")
    tail = stats.norm.cdf((12 / 11) ** 0.5 * stats.t.ppf(0.025, 11))
    assert tail < 0.02
    assert [found.low, found.high] == pytest.approx(list(np.quantile(known, [tail, 1 - tail])))
    assert found.error == pytest.approx(np.std(known))
