"""Sums of exponentials: against exact arithmetic, other minimisers, closed forms and limits."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse
from scipy.optimize import linprog, minimize

from saltflat.convex import geometric as geometric_module
from saltflat.convex.geometric import ExponentMatrix, certify, minimise, vanishing
from saltflat.errors import InvalidValue, SaltflatError


def total(a: np.ndarray, c: np.ndarray, u: np.ndarray) -> float:
    return float((a * np.exp(-2 * (c @ u))).sum())


def problem(seed: int, groups: int, unknowns: int, size: float) -> tuple[np.ndarray, np.ndarray]:
    """Masses 10^±size, and exponents that are whole numbers for odd seeds."""
    rng = np.random.default_rng(seed)
    whole = rng.integers(-1, 2, (groups, unknowns)).astype(float)
    c = whole if seed % 2 else rng.standard_normal((groups, unknowns))
    return 10 ** rng.uniform(-size, size, groups), c


def exactly(a: np.ndarray, c: np.ndarray, start: np.ndarray) -> mpmath.mpf:
    """The minimum by Newton's method in 60 digits, from a start near it."""
    mpmath.mp.dps = 60
    rows, u = mpmath.matrix(c.tolist()), mpmath.matrix(start.tolist())
    for _ in range(8):
        w = [mpmath.mpf(x) * mpmath.exp(-2 * t) for x, t in zip(a.tolist(), rows * u, strict=True)]
        g = rows.T * mpmath.matrix(w)
        hessian = 2 * rows.T * mpmath.diag(w) * rows
        ridge = mpmath.mpf(10) ** -45 * max(hessian[i, i] for i in range(len(u))) or 1
        u = u + mpmath.lu_solve(hessian + ridge * mpmath.eye(len(u)), g)
    return mpmath.fsum(
        mpmath.mpf(x) * mpmath.exp(-2 * t) for x, t in zip(a.tolist(), rows * u, strict=True)
    )


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(2, 18), st.sampled_from([1, 4, 8]))
def test_the_infimum_is_within_the_gap(seed: int, unknowns: int, more: int, size: int) -> None:
    a, c = problem(seed, unknowns + more, unknowns, size)
    found = minimise(a, c)
    kept = np.ones(len(a), dtype=bool)
    if found.degenerate is not None:
        kept[found.degenerate.groups] = False
    if not kept.any():
        assert found.value == 0
        return
    infimum = exactly(a[kept], c[kept], found.point)
    assert found.value - found.gap <= infimum <= found.value + found.gap
    assert found.gap <= 1e-11 * found.value
    assert found.steps < 100


@pytest.mark.parametrize("spread", [1e-6, 1e-4, 1e-2])
def test_the_gap_away_from_the_minimum(spread: float) -> None:
    """Off the minimum the bound must cover the distance, and say something about it."""
    for seed in range(0, 40, 2):
        a, c = problem(seed, 30, 4, 0.5)
        best = minimise(a, c)
        u = best.point + spread * np.random.default_rng(seed).uniform(-1, 1, 4)
        point = certify(np.log(a), ExponentMatrix(sparse.csr_array(c)), u, 0)
        value = np.exp(point.log_value)
        assert value - best.value <= point.gap * value
        assert point.gap * value <= 10 * (value - best.value) + 1e-13 * value or spread > 1e-3


def test_far_from_the_minimum_nothing_is_claimed() -> None:
    a, c = problem(2, 30, 4, 8)
    point = certify(np.log(a), ExponentMatrix(sparse.csr_array(c)), np.zeros(4), 0)
    assert point.gap == 1.0
    assert not point.attained


def test_closed_forms() -> None:
    assert minimise([3.0, 12.0], [[1], [-1]]).value == pytest.approx(12, rel=1e-14)
    # Layers without biases, the last factor the inverse of the others: D (Π A)^{1/D}.
    a = np.array([0.1646, 0.1941, 0.6134, 20.0])
    chain = np.vstack([np.eye(3), -np.ones((1, 3))])
    found = minimise(a, chain)
    assert found.value == pytest.approx(4 * a.prod() ** 0.25, rel=1e-14)
    assert found.value == pytest.approx(total(a, chain, found.point), rel=1e-14)
    assert found.attained
    for unknowns in (0, 4):
        constant = minimise([2.0, 3.0], np.zeros((2, unknowns)))
        assert constant.value == pytest.approx(5, rel=1e-15)
        assert constant.attained
    assert minimise([], np.zeros((0, 2))).value == 0
    nothing = minimise([0.0, 0.0], [[1.0], [-1.0]])
    assert (nothing.value, nothing.attained, nothing.gap) == (0, True, 0)


def test_extreme_masses_do_not_overflow() -> None:
    c = np.array([[1, 0], [-1, 1], [0, -1]])
    for a in ([1e300, 1e-300, 1e200], [1e-300, 1e-300, 1e-290], [1e300, 1e300, 1e300]):
        exact = 3 * mpmath.cbrt(mpmath.fprod(mpmath.mpf(x) for x in a))
        found = minimise(a, c)
        assert abs(found.value - exact) <= found.gap
        assert found.gap <= 1e-11 * found.value


@pytest.mark.parametrize("seed", range(6))
def test_agrees_with_another_minimiser_and_ignores_rescalings(seed: int) -> None:
    a, c = problem(2 * seed, 40, 6, 1)
    found = minimise(a, c)

    def function(u: np.ndarray) -> tuple[float, np.ndarray]:
        w = a * np.exp(-2 * (c @ u))
        return np.log(w.sum()), -2 * (c.T @ w) / w.sum()

    peer = minimize(function, np.zeros(6), jac=True, method="BFGS", options={"gtol": 1e-10})
    assert found.value == pytest.approx(np.exp(peer.fun), rel=1e-9)
    shift = np.random.default_rng(seed).uniform(-20, 20, 6)
    moved = a * np.exp(2 * (c @ shift))
    assert minimise(moved, c).value == pytest.approx(found.value, rel=1e-12)
    assert moved.sum() > 10 * a.sum()  # the sum itself does move


def test_alike_groups_sparse_input_and_flat_directions() -> None:
    a, c = problem(4, 20, 3, 2)
    value = minimise(a, c).value
    twice = minimise(np.r_[a / 4, a * 3 / 4], np.vstack([c, c]))
    assert twice.value == pytest.approx(value, rel=1e-13)
    assert minimise(a, sparse.coo_matrix(c)).value == value
    flat = minimise(a, np.hstack([c, -c, np.zeros((20, 1))]))
    assert flat.attained
    assert flat.value == pytest.approx(value, rel=1e-13)
    assert np.abs(flat.point).max() < 50


def layers(seed: int, widths: list[int], share: float) -> tuple[np.ndarray, sparse.csr_array]:
    """A chain of layers, one unknown a hidden unit: A[o, i] exp(−2 (e_o − e_i))."""
    rng = np.random.default_rng(seed)
    first = np.cumsum([0, *widths[1:-1]])
    rows, masses = [], []
    for k, (i, o) in enumerate(pairwise(widths)):
        for unit in range(o):
            for source in range(i):
                row = {}
                if k > 0:
                    row[first[k - 1] + source] = -1.0
                if k < len(widths) - 2:
                    row[first[k] + unit] = 1.0
                rows.append(row)
                masses.append(rng.chisquare(1) * (rng.uniform() < share) * 10 ** rng.uniform(-3, 3))
    triples = [(g, j, x) for g, row in enumerate(rows) for j, x in row.items()]
    g, j, x = zip(*triples, strict=True)
    return np.array(masses), sparse.csr_array((x, (g, j)), (len(rows), int(first[-1])))


def test_many_unknowns() -> None:
    a, c = layers(0, [5, 120, 130, 110, 4], 0.9)
    found = minimise(a, c)
    assert found.attained
    assert found.gap <= 1e-11 * found.value

    def function(u: np.ndarray) -> tuple[float, np.ndarray]:
        w = a * np.exp(-2 * (c @ u))
        return np.log(w.sum()), -2 * (c.T @ w) / w.sum()

    options = {"maxiter": 5000, "maxfun": 10_000, "ftol": 1e-16, "gtol": 1e-11}
    start = np.zeros(c.shape[1])
    peer = minimize(function, start, jac=True, method="L-BFGS-B", options=options)
    assert found.value == pytest.approx(np.exp(peer.fun), rel=1e-9)
    assert found.value < 0.9 * a.sum()


@pytest.mark.parametrize("length", [1, 2, 4, 8, 9, 30])
def test_systems_with_many_unknowns(length: int) -> None:
    """Sparse rows of any length against dense linear algebra; groups may share their pairs."""
    rng = np.random.default_rng(length)
    c = np.zeros((900, 310))
    for row in c:
        row[rng.choice(310, length, replace=False)] = rng.choice([-2.0, -1.0, 1.0], length)
    c = np.vstack([c, c[:50] * 3, np.eye(310)])
    w = 10 ** rng.uniform(-2, 2, len(c))
    y = rng.standard_normal(310)
    right = c.T @ (w * (c @ y))
    found = ExponentMatrix(sparse.csr_array(c)).system(w).solve(right, 1e-13)
    assert np.allclose(found, y, rtol=1e-8, atol=1e-8)


def test_dead_units_vanish() -> None:
    """A unit without outgoing mass lets its incoming mass vanish, and so on backwards."""
    a, c = layers(1, [3, 6, 6, 2], 1.0)
    into_two = np.asarray(c[:, [6 + 2]].toarray() > 0).ravel()
    a[np.asarray(c[:, [6 + 2]].toarray() < 0).ravel()] = 0
    found = minimise(a, c)
    assert not found.attained
    assert found.degenerate is not None
    assert set(found.degenerate.groups) == set(np.flatnonzero(into_two & (a > 0)))
    assert found.value == pytest.approx(minimise(a * ~into_two, c).value, rel=1e-13)
    along = c @ found.degenerate.direction
    assert (along[a > 0] >= 0).all()
    ends = [total(a, c, found.point + s * found.degenerate.direction) for s in (0, 5, 30)]
    assert ends[0] > ends[1] > ends[2] == pytest.approx(found.value, rel=1e-12)


def test_all_vanish() -> None:
    found = minimise([1.0, 2.0], [[1.0, 0.0], [-1.0, 3.0]])
    assert (found.value, found.gap, found.attained) == (0, 0, False)
    assert found.degenerate is not None
    assert list(found.degenerate.groups) == [0, 1]


def one_by_one(c: np.ndarray) -> np.ndarray:
    """Row by row: can it grow while no other falls? One linear program each."""
    zero = np.zeros(len(c))
    return np.array(
        [linprog(-row, A_ub=-c, b_ub=zero, bounds=(-1000, 1000)).fun < -0.5 for row in c]
    )


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 12), st.booleans())
def test_which_groups_vanish(seed: int, unknowns: int, groups: int, order: bool) -> None:
    rng = np.random.default_rng(seed)
    if order:  # rows e_a − e_b, e_a, −e_b: the graph alone decides
        c = np.zeros((groups, unknowns + 1))
        for row in c:
            row[rng.integers(unknowns + 1)] += 1.5
            row[rng.integers(unknowns + 1)] -= 1.5
        c = c[:, :-1]
    else:
        c = rng.choice([-1, 0, 0, 1, 2], (groups, unknowns)).astype(float)
    rows = sparse.csr_array(c)
    direction, gone = vanishing(rows)
    assert (c @ direction >= -1e-6).all()
    assert np.array_equal(gone, one_by_one(c))
    assert np.array_equal(c @ direction > 1e-6, gone)


def test_many_general_rows_need_no_linear_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geometric_module, "_MANY", 10)
    c = np.random.default_rng(0).standard_normal((60, 5))
    with monkeypatch.context() as no_program:
        no_program.setattr("scipy.optimize.linprog", None)
        assert not vanishing(sparse.csr_array(c))[1].any()
    half = np.abs(c)  # nothing holds these back: the certificate fails, the program answers
    assert vanishing(sparse.csr_array(half))[1].all()


def test_a_linear_program_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = SimpleNamespace(x=None, message="time limit")
    monkeypatch.setattr("scipy.optimize.linprog", lambda *a, **k: failed)
    with pytest.raises(SaltflatError, match="time limit"):
        minimise([1.0, 1.0], [[1.0, 2.0], [2.0, 1.0]])


def test_bad_arguments() -> None:
    with pytest.raises(InvalidValue, match="Got -2 for group 1"):
        minimise([1.0, -2.0], [[1.0], [-1.0]])
    with pytest.raises(InvalidValue, match="1 masses and 0 exponents"):
        minimise([1.0, float("nan")], [[1.0], [-1.0]])
    with pytest.raises(InvalidValue, match="0 masses and 1 exponents"):
        minimise([1.0, 2.0], [[float("inf")], [-1.0]])
    with pytest.raises(
        InvalidValue, match=r"masses of shape \(3,\) and exponents of shape \(2, 1\)"
    ):
        minimise([1.0, 2.0, 3.0], [[1.0], [-1.0]])
