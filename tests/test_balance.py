"""Balancing one matrix: against other minimisers, closed forms, limits, and in all degeneracies."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog, minimize
from torch import Tensor

from saltflat.convex.balancing import _newton, _Sum, balance, components
from saltflat.errors import InvalidType, InvalidValue


def draw(seed: int, *shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def matrix(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def total(h: Tensor, w: Tensor, x: Tensor, y: Tensor) -> float:
    s = x[:, None] + y
    return float((h * s.exp() + w * (-s).exp()).sum())


def peer(h: Tensor, w: Tensor) -> float:
    """The minimum by SciPy's L-BFGS on the sum as written."""

    def function(v: np.ndarray) -> tuple[float, np.ndarray]:
        s = v[: len(h), None] + v[len(h) :]
        up, down = h.numpy() * np.exp(s), w.numpy() * np.exp(-s)
        return (up + down).sum(), np.r_[(up - down).sum(1), (up - down).sum(0)]

    options = {"maxiter": 20_000, "maxfun": 40_000, "ftol": 1e-16, "gtol": 1e-13}
    start = np.zeros(sum(h.shape))
    return float(minimize(function, start, jac=True, method="L-BFGS-B", options=options).fun)


@pytest.mark.parametrize("shape", [(1, 1), (1, 6), (5, 1), (4, 7), (30, 20)])
@pytest.mark.parametrize("seed", range(3))
def test_agrees_with_lbfgs(shape: tuple[int, int], seed: int) -> None:
    h, w = draw(seed, *shape) ** 3 + 1e-3, draw(seed + 100, *shape) ** 2 + 1e-3
    found = balance(h, w)
    assert found.attained
    assert found.value == pytest.approx(peer(h, w), rel=1e-9)
    assert found.value == pytest.approx(total(h, w, found.x, found.y), rel=1e-13)
    assert found.gap <= 1e-12 * found.value
    assert found.value < 0.999 * total(h, w, found.x * 0, found.y * 0)  # there was work to do


@pytest.mark.parametrize("seed", range(4))
def test_rescaling_rows_and_columns_changes_nothing(seed: int) -> None:
    h, w = draw(seed, 9, 12) ** 2, draw(seed + 50, 9, 12) ** 2
    h[2, 3] = w[4, 4] = 0
    r, c = (10 ** (60 * draw(seed + k, n) - 30) for k, n in ((200, 9), (300, 12)))
    factor = r[:, None] * c
    value = balance(h, w).value
    assert balance(h * factor, w / factor).value == pytest.approx(value, rel=1e-12)
    far = 1e150  # beyond what the sums can hold without logarithms
    assert balance(h * factor * far, w / factor / far).value == pytest.approx(value, rel=1e-12)
    assert abs(balance(h * factor, w).value / value - 1) > 1  # h alone: not the same problem


def test_closed_forms() -> None:
    one = balance(matrix([3.0]), matrix([12.0]))
    assert one.value == pytest.approx(12.0, rel=1e-14)
    assert float(one.x + one.y) == pytest.approx(np.log(2), rel=1e-14)
    for h, w in ((1e-280, 1e260), (1e300, 1e300), (1e-300, 1e-300)):
        extreme = balance(matrix([h]), matrix([w])).value
        assert extreme == pytest.approx(2 * 10 ** ((np.log10(h) + np.log10(w)) / 2), rel=1e-11)
    # Rank one: every entry can have x_i + y_j = ½ log(w²/h) at once.
    h, r, c = draw(1, 6, 5), draw(2, 6) * 100, draw(3, 5) / 100
    separable = balance(h, h * r[:, None] * c)
    assert separable.value == pytest.approx(
        2 * float((h * (r[:, None] * c).sqrt()).sum()), rel=1e-13
    )


def test_the_example_that_sweeps_alone_do_not_finish() -> None:
    h, w = matrix([0, 1], [1, 1]), matrix([1, 1], [1, 0])
    found = balance(h, w)
    assert found.value == pytest.approx(4, rel=1e-14)
    assert (found.attained, found.vanishing) == (False, 2)
    assert found.gap < 1e-13
    x = y = torch.zeros(2, dtype=torch.float64)
    for _ in range(100):  # the plain sweeps of the paper's problem: still above the infimum
        x = ((w @ (-y).exp()) / (h @ y.exp())).log() / 2
        y = (((-x).exp() @ w) / (x.exp() @ h)).log() / 2
    assert total(h, w, x, y) > 4.005
    values = [balance(h.clamp(min=e), w.clamp(min=e)) for e in (1e-4, 1e-8, 1e-12, 1e-16)]
    assert all(v.attained and v.gap < 1e-12 for v in values)
    assert [v.value - 4 for v in values] == pytest.approx([4e-2, 4e-4, 4e-6, 4e-8], rel=2e-2)


def test_what_is_zero() -> None:
    some, none = draw(5, 3, 4) + 0.1, torch.zeros(3, 4, dtype=torch.float64)
    for h, w in ((some, none), (none, some)):
        found = balance(h, w)
        assert (found.value, found.gap, found.attained, found.vanishing) == (0, 0, False, 12)
    assert balance(none, none).attained
    assert balance(none, none).value == 0
    assert balance(torch.zeros(0, 3), torch.zeros(0, 3)).value == 0
    h, w = some.clone(), some.clone().flip(1)
    h[1], w[:, 2] = 0, 0  # a dead unit, a pruned input
    found = balance(h, w)
    kept = balance(h[[0, 2]][:, [0, 1, 3]], w[[0, 2]][:, [0, 1, 3]])
    assert not found.attained
    assert found.value == pytest.approx(kept.value, rel=1e-13)
    assert torch.isfinite(found.x).all()
    assert torch.isfinite(found.y).all()


def vanishing_by_programs(h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Term by term: can it fall while no other rises? One linear program each."""
    rows, columns = h.shape
    terms = [
        (i, j, sign)
        for sign, m in ((-1, h), (1, w))
        for i, j in itertools.product(range(rows), range(columns))
        if m[i, j] > 0
    ]
    c = np.zeros((len(terms), rows + columns))
    for g, (i, j, sign) in enumerate(terms):
        c[g, i] = c[g, rows + j] = sign
    gone = torch.zeros_like(h, dtype=torch.bool), torch.zeros_like(h, dtype=torch.bool)
    for g, (i, j, sign) in enumerate(terms):
        answer = linprog(-c[g], A_ub=-c, b_ub=np.zeros(len(c)), bounds=(-50, 50))
        gone[0 if sign < 0 else 1][i, j] = answer.fun < -0.5
    return gone


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 5), st.floats(0.2, 1.0))
def test_random_patterns(seed: int, rows: int, columns: int, density: float) -> None:
    h, w = draw(seed, rows, columns) + 0.05, draw(seed + 1, rows, columns) + 0.05
    h, w = (m * (draw(seed + k, rows, columns) < density) for k, m in ((2, h), (3, w)))
    found = balance(h, w)
    no_h, no_w = vanishing_by_programs(h, w)
    assert found.vanishing == int(no_h.sum() + no_w.sum())
    assert found.attained == (found.vanishing == 0)
    assert found.value == pytest.approx(peer(h * ~no_h, w * ~no_w), rel=1e-8, abs=1e-12)
    assert found.gap <= 1e-11 * found.value
    # The limit: regularised sums come down to the value, and none is below it.
    for e in (1e-15, 1e-60):
        near = balance(h.clamp(min=e), w.clamp(min=e))
        assert near.attained
        assert near.value >= (found.value - found.gap) * (1 - 1e-14)
    assert near.value <= found.value + 1e-4


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 6), st.sampled_from([1, 4, 8]))
def test_the_gap_holds_with_entries_of_any_size(
    seed: int, rows: int, columns: int, size: int
) -> None:
    h, w = (10 ** (size * (2 * draw(seed + k, rows, columns) - 1)) for k in (0, 1))
    found = balance(h, w)
    assert found.value == pytest.approx(total(h, w, found.x, found.y), rel=1e-12)
    assert found.gap <= 1e-11 * found.value
    # A lower bound from another direction: no point near by, on any scale, is below value − gap.
    for k, spread in enumerate((1e-8, 1e-4, 1e-1, 3)):
        dx, dy = (spread * (2 * draw(seed + 7 + k, n) - 1) for n in (rows, columns))
        near = total(h, w, found.x + dx, found.y + dy)
        assert near >= (found.value - found.gap) * (1 - 1e-14)


@pytest.mark.parametrize("spread", [1e-5, 1e-3, 3e-2, 0.2])
def test_the_gap_away_from_the_minimum(spread: float) -> None:
    """Off the minimum the bound must cover the distance, and say something about it."""
    for seed in range(20):
        h, w = (10 ** (4 * draw(seed + k, 5, 4)) for k in (0, 1000))
        best = balance(h, w)
        a, b = (
            (v + spread * (2 * draw(seed + k, len(v)) - 1)).exp()
            for k, v in ((2000, best.x), (3000, best.y))
        )
        arrays = h.numpy(), w.numpy(), a.numpy(), b.numpy()
        value = total(h, w, a.log(), b.log())
        gap = _newton(_Sum(*arrays, None))[3]
        assert gap == pytest.approx(_newton(_Sum(*arrays, np.zeros(4, np.int64)))[3], rel=1e-6)
        assert value - best.value <= gap
        assert gap <= 20 * (value - best.value) or spread > 0.1


def test_components_of_large_patterns() -> None:
    """Two blocks and a chain of single nodes, shuffled: labels as SciPy alone would give them."""
    n = 40
    down, up = (torch.zeros(n, n, dtype=torch.bool) for _ in range(2))
    for m in (down, up):
        m[:20, :15] = m[20:32, 15:30] = True
    down[32:, 30:] = draw(0, 8, 10) > 0.3
    up[:20, 15:] = draw(1, 20, 25) > 0.5
    order, places = (torch.randperm(n, generator=torch.Generator().manual_seed(k)) for k in (2, 3))
    rows, columns = components(down[order][:, places], up[order][:, places])
    assert len(set(rows.tolist()) | set(columns.tolist())) == 2 + 8 + 10
    first, second = rows[order < 20], rows[(order >= 20) & (order < 32)]
    assert len(set(first.tolist())) == len(set(second.tolist())) == 1
    assert set(columns[places < 15].tolist()) == set(first.tolist())
    assert set(columns[(places >= 15) & (places < 30)].tolist()) == set(second.tolist())


def test_inputs_are_left_alone_and_narrow_types_are_widened() -> None:
    h, w = draw(1, 3, 3).float(), draw(2, 3, 3).float()
    h[0, 0] = 0
    kept = h.clone(), w.clone()
    found = balance(h.requires_grad_(), w)
    assert found.x.dtype == torch.float64
    assert not found.x.requires_grad
    assert torch.equal(h, kept[0])
    assert torch.equal(w, kept[1])


@pytest.mark.parametrize("bad", [-1e-30, float("nan"), float("inf")])
def test_bad_entries(bad: float) -> None:
    good, wrong = draw(1, 3, 3), draw(2, 3, 3)
    wrong[1, 1] = bad
    with pytest.raises(InvalidValue, match="h must be finite and not negative"):
        balance(wrong, good)
    with pytest.raises(InvalidValue, match="squares must be finite and not negative"):
        balance(good, wrong)


def test_bad_arguments() -> None:
    with pytest.raises(InvalidValue, match=r"one shape. Got \(2, 3\) and \(3, 2\)"):
        balance(draw(1, 2, 3), draw(1, 3, 2))
    with pytest.raises(InvalidValue, match="kernel positions"):
        balance(draw(1, 2, 3, 3), draw(1, 2, 3, 3))
    with pytest.raises(InvalidType, match="h must be a tensor"):
        balance([[1.0]], draw(1, 1, 1))
