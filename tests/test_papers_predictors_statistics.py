"""Rank statistics of a pool: against SciPy, by brute force, and where they are known."""

from __future__ import annotations

from functools import partial
from itertools import product

import numpy as np
import pytest
from scipy import stats

from saltflat.papers.predictors import statistics as st

ONCE = np.ones((1, 60), np.float32)


def numbers(seed: int, ties: bool = False) -> np.ndarray:
    drawn = np.random.default_rng(seed).normal(size=60)
    return drawn.round(1) if ties else drawn


@pytest.mark.parametrize("ties", [False, True])
def test_rank_correlations_are_those_of_scipy(ties: bool) -> None:
    a, b = numbers(0, ties), numbers(1, ties) + numbers(0, ties)
    assert st.tau(st.signs(a), st.signs(b), ONCE)[0] == pytest.approx(stats.kendalltau(a, b)[0])
    assert st.spearman(st.signs(a), st.signs(b), ONCE)[0] == pytest.approx(stats.spearmanr(a, b)[0])


def test_a_draw_is_the_statistic_of_the_repeated_networks() -> None:
    a, b, c = numbers(0, ties=True), numbers(0) + numbers(1), numbers(0) + numbers(2)
    weights = st.draws(list(range(60)), 5, seed=3)
    for index, counts in enumerate(weights.astype(int)):
        x, y, z = (np.repeat(v, counts) for v in (a, b, c))
        one = weights[index : index + 1]
        signs = st.signs(a), st.signs(b), st.signs(c)
        assert st.tau(signs[0], signs[1], one)[0] == pytest.approx(stats.kendalltau(x, y)[0])
        assert st.spearman(signs[0], signs[1], one)[0] == pytest.approx(stats.spearmanr(x, y)[0])
        assert st.partial_spearman(*signs, one)[0] == pytest.approx(residual_ranks(x, y, z))


def residual_ranks(a: np.ndarray, b: np.ndarray, given: np.ndarray) -> float:
    """Partial correlation as it is defined: of what a linear fit leaves."""
    ranks = [stats.rankdata(v) for v in (a, b, given)]
    line = np.stack([np.ones_like(ranks[2]), ranks[2]], 1)
    left = [r - line @ np.linalg.lstsq(line, r, rcond=None)[0] for r in ranks[:2]]
    return float(np.corrcoef(*left)[0, 1])


def test_partial_correlations() -> None:
    a, b, c = numbers(0) + numbers(2), numbers(1) + numbers(2), numbers(2)
    signs = st.signs(a), st.signs(b), st.signs(c)
    assert st.partial_spearman(*signs, ONCE)[0] == pytest.approx(residual_ranks(a, b, c))
    ab, ac, bc = (stats.kendalltau(*pair)[0] for pair in ((a, b), (a, c), (b, c)))
    expected = (ab - ac * bc) / np.sqrt((1 - ac**2) * (1 - bc**2))
    assert st.partial_tau(*signs, ONCE)[0] == pytest.approx(expected)
    assert st.tau(signs[0], signs[1], ONCE)[0] > 2 * abs(expected)  # the third made most of it


def test_bootstrap_draws_whole_cells() -> None:
    weights = st.draws(["a", "a", "b", "c", "c", "c"], 50)
    assert (weights[:, 0] == weights[:, 1]).all()
    assert (weights[:, 3] == weights[:, 5]).all()
    assert (weights[:, [0, 2, 3]].sum(1) == 3).all()


GRID = [
    {"width": w, "lr": r, "noise": n, "seed": s}
    for w, r, n, s in product((1, 2), (0.1, 0.2, 0.4), (0.0, 0.1, 0.2), range(3))
]
AXES = ("width", "lr", "noise")


def pairs() -> dict[str, st.Pairs]:
    return {axis: st.axis_pairs(GRID, axis) for axis in AXES}


def once() -> st.Weights:
    return np.ones((1, len(GRID)), np.float32)


def known(axes: tuple[str, ...] = AXES) -> list[list[object]]:
    return [[each[axis] for each in GRID] for axis in axes]


def brute_psi(a: np.ndarray, gap: np.ndarray, axis: str) -> float:
    """The mean over cells of the mean of sign products along the axis."""
    cells: dict[tuple, list[int]] = {}
    for index, each in enumerate(GRID):
        cells.setdefault(tuple(v for k, v in each.items() if k != axis), []).append(index)
    means = []
    for cell in cells.values():
        signs = [
            np.sign(a[i] - a[j]) * np.sign(gap[i] - gap[j]) for i in cell for j in cell if i != j
        ]
        means.append(np.mean(signs))
    return float(np.mean(means))


def test_psi_is_the_mean_over_cells() -> None:
    generator = np.random.default_rng(0)
    gap = generator.normal(size=len(GRID))
    a = gap + generator.normal(size=len(GRID))
    values = {}
    for axis, own in pairs().items():
        values[axis] = st.granulated(st.signs(a), st.signs(gap), own, once())[0]
        assert values[axis] == pytest.approx(brute_psi(a, gap, axis), abs=1e-6)
    mean = st.mean_granulated(st.signs(a), st.signs(gap), list(pairs().values()), once())[0]
    assert mean == pytest.approx(np.mean(list(values.values())))


def test_cells_count_alike_where_networks_are_missing() -> None:
    """Of a cell with three networks and one with two, both are half of Ψ."""
    some = [{"lr": r, "noise": n} for r, n in ((1, 0), (2, 0), (3, 0), (1, 1), (2, 1))]
    own = st.axis_pairs(some, "lr")
    gap = np.array([1.0, 2.0, 3.0, 1.0, 2.0])
    a = np.array([1.0, 2.0, 3.0, 2.0, 1.0])
    value = st.granulated(st.signs(a), st.signs(gap), own, np.ones((1, 5), np.float32))
    assert value[0] == pytest.approx(0.0, abs=1e-6)


def brute_information(a: np.ndarray, gap: np.ndarray, given: tuple[str, ...]) -> float:
    """I(V_a, V_g | U) / H(V_g | U) by counting ordered pairs."""
    counts: dict[tuple, dict[tuple, int]] = {}
    for i, j in product(range(len(GRID)), repeat=2):
        if gap[i] == gap[j]:
            continue
        u = tuple((GRID[i][axis], GRID[j][axis]) for axis in given)
        v = np.sign(a[i] - a[j]), np.sign(gap[i] - gap[j])
        table = counts.setdefault(u, {})
        table[v] = table.get(v, 0) + 1
    every = sum(sum(table.values()) for table in counts.values())
    shared = uncertain = 0.0
    for table in counts.values():
        total = sum(table.values())
        p = {v: count / total for v, count in table.items()}
        of_a = {x: sum(q for v, q in p.items() if v[0] == x) for x, _ in p}
        of_gap = {y: sum(q for v, q in p.items() if v[1] == y) for _, y in p}
        share = sum(q * np.log2(q / of_a[x] / of_gap[y]) for (x, y), q in p.items())
        shared += total / every * share
        uncertain -= total / every * sum(q * np.log2(q) for q in of_gap.values())
    return shared / uncertain


def test_information_is_the_least_over_sets_of_two() -> None:
    generator = np.random.default_rng(1)
    noise = np.array([each["noise"] for each in GRID])
    gap = (10 * noise + generator.normal(size=len(GRID))).round(1)  # some ties
    a = (10 * noise + generator.normal(size=len(GRID))).round(1)
    sets = [(), *((x,) for x in AXES), ("width", "lr"), ("width", "noise"), ("lr", "noise")]
    values = [brute_information(a, gap, each) for each in sets]
    found = st.information(st.signs(a), st.signs(gap), known(), once())[0]
    assert found == pytest.approx(min(values), abs=1e-6)
    assert min(values) < values[0] / 2  # conditioning matters here


def test_a_measure_that_is_the_gap_has_all_ones() -> None:
    gap = np.random.default_rng(0).normal(size=len(GRID))
    signs, other = st.signs(gap), st.signs(np.random.default_rng(1).normal(size=len(GRID)))
    assert st.tau(signs, signs, once())[0] == pytest.approx(1)
    assert st.spearman(signs, signs, once())[0] == pytest.approx(1)
    assert st.partial_tau(signs, signs, other, once())[0] == pytest.approx(1)
    assert st.partial_spearman(signs, signs, other, once())[0] == pytest.approx(1)
    assert st.mean_granulated(signs, signs, list(pairs().values()), once())[0] == pytest.approx(1)
    assert st.information(signs, signs, known(), once())[0] == pytest.approx(1)


def test_intervals_of_an_independent_measure_hold_zero() -> None:
    """19 of 20 do, on average. A correlated one is the negative control."""
    generator = np.random.default_rng(4)
    hits = {"tau": 0, "psi": 0, "partial": 0}
    for trial in range(20):
        gap, a, c = generator.normal(size=(3, len(GRID)))
        signs = st.signs(a), st.signs(gap), st.signs(c)
        weights = st.draws(range(len(GRID)), 200, trial)
        own = list(pairs().values())
        hits["tau"] += st.estimate(partial(st.tau, *signs[:2]), weights).sign == 0
        hits["psi"] += st.estimate(partial(st.mean_granulated, *signs[:2], own), weights).sign == 0
        hits["partial"] += st.estimate(partial(st.partial_tau, *signs), weights).sign == 0
    assert all(16 <= count <= 20 for count in hits.values()), hits
    one, other = st.signs(gap), st.signs(gap + 0.5 * a)
    found = st.estimate(partial(st.tau, one, other), st.draws(range(len(GRID)), 200))
    assert found.sign == 1
    assert found.low < found.value < found.high
    assert found.error > 0


def test_what_predicts_through_the_noise_alone_has_no_conditional_correlation() -> None:
    generator = np.random.default_rng(5)
    noise = np.array([each["noise"] for each in GRID])
    gap, a = (100 * noise + generator.normal(size=len(GRID)) for _ in range(2))
    signs, equal = (st.signs(a), st.signs(gap)), (noise[:, None] == noise).astype(np.float32)
    assert st.tau(*signs, once())[0] > 0.6
    assert abs(st.tau(*signs, once(), pairs=equal)[0]) < 0.25
    assert abs(st.partial_spearman(*signs, st.signs(noise), once())[0]) < 0.3
    psi = {axis: st.granulated(*signs, own, once())[0] for axis, own in pairs().items()}
    assert psi["noise"] == 1
    assert max(abs(psi["width"]), abs(psi["lr"])) < 0.35
    assert st.information(*signs, known(), once())[0] < 0.1


def test_what_never_differs_says_nothing() -> None:
    gap, same = np.arange(60.0), np.zeros(60)
    assert np.isnan(st.tau(st.signs(same), st.signs(gap), ONCE)[0])
    found = st.estimate(lambda w: st.tau(st.signs(same), st.signs(gap), w), ONCE)
    assert np.isnan(found.value)
    assert found.sign == 0
    assert np.isnan(st.partial_tau(st.signs(gap), st.signs(gap), st.signs(gap), ONCE)[0])
