"""float32 on inputs that make positions cancel: no worse than gradients of single samples.

The yardstick is what anybody would write in the same precision: every sample's gradient by
autograd or as the sum over its positions, then squared. The truth is the same in float64.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from time import perf_counter

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import saltflat as sf
from saltflat.curvature import sweep
from saltflat.curvature.contractions import (
    Begun,
    Deltas,
    Layout,
    Lookup,
    Outer,
    RankOne,
    Term,
    Weight,
    written_out,
)
from saltflat.geometry import Matrix
from saltflat.measures import RelativeFlatness

EPS = torch.finfo(torch.float32).eps


def within(got: Tensor, naive: Tensor, truth: Tensor) -> bool:
    """Whether the error of a sum over terms is at most ten times that of the naive way.

    `naive` and `truth` are the terms, summed over the first dimension. Their errors are taken as
    independent, so that luck is no part of the yardstick, and as one rounding at least.
    """
    room = torch.linalg.vector_norm(naive.double() - truth, dim=0)
    room = room.max().clamp(min=EPS * float(truth.abs().sum(0).max()))
    return bool((got.double() - truth.sum(0)).abs().max() <= 10 * room)


# Whole models


class Tokens(nn.Module):
    """A Linear at every token, centred over tokens: its deltas add up to nearly 0."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.o = nn.Linear(32, 32), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.o(torch.relu(h - h.mean(1, keepdim=True)).mean(1))


class Pixels(nn.Module):
    """The same with a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.o = nn.Conv2d(16, 32, 3), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.o(torch.relu(h - h.mean((2, 3), keepdim=True)).mean((2, 3)))


def per_sample(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """The terms of the diagonal of Tokens' or Pixels' first block, and those of ‖Wᵀ G‖².

    For every sample and direction √λ u of softmax's Hessian the squared gradients of ⟨u, o⟩, the
    squares in float64, so that their sums are means over the samples.
    """
    weight = model.a.weight
    diagonal, flatness = [], []
    for sample in x.split(1):
        (out,) = model(sample)
        p = out.detach().double().softmax(0)
        values, vectors = torch.linalg.eigh(p.diag() - p[:, None] * p)
        for value, vector in zip(values, vectors.T, strict=True):
            (g,) = torch.autograd.grad((out * vector.to(out)).sum(), weight, retain_graph=True)
            pulled = weight.detach().flatten(1).T @ g.flatten(1)
            diagonal.append(value * g.double().square() / len(x))
            flatness.append(value * pulled.double().square() / len(x))
    return torch.stack(diagonal), torch.stack(flatness)


@pytest.mark.parametrize("model", [Tokens, Pixels])
@pytest.mark.parametrize(
    ("offset", "contrast"), [(0, 1.0), (3, 1.0), (10, 1.0), (100, 1.0), (1000, 1.0), (1000, 0.1)]
)
def test_models(model: type[nn.Module], offset: float, contrast: float) -> None:
    torch.manual_seed(1)
    narrow = model()
    shape = (24, 4, 32) if model is Tokens else (24, 16, 4, 4)
    x, y = offset + contrast * torch.randn(shape), torch.randint(0, 3, (24,))
    naive, naive_flatness = per_sample(narrow, x)
    truth, true_flatness = per_sample(copy.deepcopy(narrow).double(), x.double())

    diagonal = sf.diagonal(narrow, (x, y))
    trace = sf.trace(narrow, (x, y))
    assert trace.details["a.weight"].exact
    assert (diagonal["a.weight"] >= 0).all()
    assert within(diagonal["a.weight"], naive, truth)
    assert within(torch.tensor(trace["a.weight"]), naive.flatten(), truth.flatten())
    report = sf.measure(narrow, (x, y), measures=[RelativeFlatness(layer="a")])
    flatness = torch.tensor(report["relative_flatness"].value)
    assert within(flatness, naive_flatness.flatten(), true_flatness.flatten())


def test_offset_of_one_channel() -> None:
    """A light channel of a large offset, beside heavy ones without: its own column is right."""
    torch.manual_seed(1)
    narrow = Tokens()
    x = torch.randn(24, 4, 32)
    x[..., 5] = 1e-3 * (1000 + 0.1 * x[..., 5])
    y = torch.randint(0, 3, (24,))
    naive, _ = per_sample(narrow, x)
    truth, _ = per_sample(copy.deepcopy(narrow).double(), x.double())
    found = sf.diagonal(narrow, (x, y))["a.weight"]
    for j in range(32):
        assert within(found[:, j], naive[:, :, j], truth[:, :, j]), j
    columns = truth.sum((0, 1))
    assert columns[5] < 1e-6 * columns.max(), "this column is to be light"


# The contractions themselves


def terms_of(left: Tensor, right: Tensor, w: Tensor, sign: Tensor | None) -> dict[str, Tensor]:
    """The terms of every quantity from written-out gradients, squares in float64."""
    g = left @ right.mT  # (D, n, g, a, b)
    squares, pulled = g.double().square(), (w.mT @ g).double().square()
    if sign is not None:
        squares, pulled = (v * sign[:, :, None, None, None] for v in (squares, pulled))
    return {
        "diagonal": squares.flatten(0, 1),
        "trace": squares.flatten(),
        "flatness": pulled.flatten(),
    }


def ours(left: Tensor, right: Tensor, w: Tensor, sign: Tensor | None) -> dict[str, Tensor]:
    groups = right.shape[1]
    layout = Layout() if groups == 1 else Layout((1,), groups)
    term = Outer(list(left), right, layout)
    weight = Weight(layout.assemble(w), Matrix(groups=groups))
    s = None if sign is None else sign.to(right)
    return {
        "diagonal": layout.factored(term.diagonal(s)),
        "trace": term.trace(s),
        "flatness": term.form("flatness", weight, s)[0],
    }


def expanded(left: Tensor, right: Tensor) -> dict[str, Tensor]:
    """The squares expanded, without a second look."""
    pairs = torch.einsum("dngat,dngau->ngtu", left, left)
    inner = right.mT @ right
    both = torch.einsum("dngat,dngau,ngbt,ngbu->gab", left, left, right, right)
    return {"trace": (pairs * inner).sum(), "diagonal": both}


def cancelling(
    seed: int, size: tuple[int, ...], offset: float, spread: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Deltas that add up to 0 over positions, inputs with an offset, a weight; in float32.

    `spread` is how different the scales of units are.
    """
    directions, n, groups, a, b, positions = size
    generator = torch.Generator().manual_seed(seed)
    left = torch.randn(directions, n, groups, a, positions, generator=generator)
    right = torch.randn(n, groups, b, positions, generator=generator) + offset
    scales = spread ** torch.randn(groups, a + b, 1, generator=generator)
    w = torch.randn(groups, a, b, generator=generator)
    left = (left - left.mean(-1, keepdim=True)) * scales[:, :a]
    return left, right * scales[:, a:], w


SIZES = [
    (4, 24, 1, 32, 32, 4),  # pairs, Gram matrices
    (9, 8, 1, 32, 64, 12),
    (2, 24, 1, 32, 32, 4),  # gradients for the diagonal alone
    (3, 6, 2, 6, 5, 3),  # groups
    (2, 6, 1, 4, 5, 12),  # more positions than rows: gradients
]


@pytest.mark.parametrize("offset", [0.0, 2.0, 3.0, 5.0, 30.0, 1e3, 1e5])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("signed", [False, True])
def test_contractions(size: tuple[int, ...], offset: float, signed: bool) -> None:
    left, right, w = cancelling(0, size, offset)
    sign = None
    if signed:
        generator = torch.Generator().manual_seed(1)
        sign = torch.randint(0, 2, size[:2], generator=generator) * 2 - 1
    naive = terms_of(left, right, w, sign)
    truth = terms_of(left.double(), right.double(), w.double(), sign)
    for name, got in ours(left, right, w, sign).items():
        assert within(got, naive[name], truth[name]), name
        assert signed or bool((got >= 0).all()), name


@pytest.mark.parametrize("size", [(96, 2, 1, 8, 72, 64), (96, 4, 1, 16, 144, 16)], ids=str)
def test_a_diagonal_takes_about_as_long_as_a_trace(size: tuple[int, ...]) -> None:
    """Many directions and many positions, as where every pixel has an output: not all pairs."""
    left, right, _ = cancelling(0, size, 0.0)
    term = Outer(list(left), right, Layout())

    def seconds(call: Callable[[None], Tensor]) -> float:
        start = perf_counter()
        call(None)
        return perf_counter() - start

    trace, diagonal = (min(seconds(c) for _ in range(5)) for c in (term.trace, term.diagonal))
    assert diagonal < 5 * trace


@pytest.mark.parametrize("offset", [30.0, 1e3])
def test_expanding_alone_fails(offset: float) -> None:
    """The control: without the second look the same yardstick is missed."""
    left, right, w = cancelling(0, SIZES[0], offset)
    naive = terms_of(left, right, w, None)
    truth = terms_of(left.double(), right.double(), w.double(), None)
    for name, got in expanded(left, right).items():
        assert not within(got, naive[name], truth[name]), name


@given(
    seed=st.integers(0, 1000),
    size=st.tuples(*[st.integers(1, most) for most in (5, 6, 3, 8, 9, 7)]),
    digits=st.floats(-1, 6),
    spread=st.sampled_from([1.0, 10.0, 100.0]),
)
@settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
def test_any_offset(seed: int, size: tuple[int, ...], digits: float, spread: float) -> None:
    left, right, w = cancelling(seed, size, 10**digits, spread)
    naive = terms_of(left, right, w, None)
    truth = terms_of(left.double(), right.double(), w.double(), None)
    for name, got in ours(left, right, w, None).items():
        assert bool((got >= 0).all()), name
        assert within(got, naive[name], truth[name]), name
        if name == "diagonal":  # row by row and column by column, as units may have any scale
            for dim in (2, 3):
                each = (v.movedim(dim, 0) for v in (got[None], naive[name], truth[name]))
                assert all(within(v[0], *terms) for v, *terms in zip(*each, strict=True))


# W Wᵀ


def nearly_singular(a: int, b: int) -> tuple[Tensor, Tensor]:
    """A weight whose rows are nearly one vector, and vectors that add up to 0 over them."""
    generator = torch.Generator().manual_seed(3)
    w = 1000 * torch.randn(1, b, generator=generator) + torch.randn(a, b, generator=generator)
    deltas = torch.randn(4, 50, a, generator=generator)
    return w, deltas - deltas.mean(2, keepdim=True)


@pytest.mark.parametrize(("a", "b"), [(5, 40), (40, 5)])
def test_flatness_of_one_row(a: int, b: int) -> None:
    w, deltas = nearly_singular(a, b)
    inputs = torch.randn(50, b, generator=torch.Generator().manual_seed(4))
    term = RankOne(Deltas(deltas), inputs, Layout())
    got = term.form("flatness", Weight(w, Matrix()), None)[0]

    def terms(delta: Tensor, x: Tensor, w: Tensor) -> Tensor:
        return ((delta @ w).double().square() * x.double().square().sum(1, keepdim=True)).flatten()

    naive, truth = terms(deltas, inputs, w), terms(deltas.double(), inputs.double(), w.double())
    assert got > 0
    assert within(got, naive, truth)
    squared = ((deltas @ (w @ w.mT)) * deltas).sum(2) * inputs.square().sum(1)
    assert not within(squared.sum(), naive, truth), "the control"


def test_flatness_of_an_embedding() -> None:
    w, deltas = nearly_singular(5, 40)
    index = torch.randint(0, 40, (50, 1), generator=torch.Generator().manual_seed(4))
    table = w.mT.contiguous()
    term = Lookup(index, [d.unsqueeze(1) for d in deltas], 40)
    got = term.form("flatness", Weight(table, Matrix(out=1)), None)[0]
    truth = (deltas.double() @ w.double()).square().flatten()
    naive = (deltas @ w).double().square().flatten()
    assert got > 0
    assert within(got, naive, truth)


def test_flatness_written_out() -> None:
    """Transposed convolutions, whose rows are no units, go by the written-out gradients."""
    w, deltas = nearly_singular(5, 40)
    inputs = torch.randn(50, 1, 40, generator=torch.Generator().manual_seed(4))
    gradient = deltas.unsqueeze(-1) * inputs
    got = written_out(gradient, Weight(w, Matrix()), None, "flatness")[0]
    naive = (w.mT @ gradient).double().square().flatten()
    truth = (w.mT.double() @ gradient.double()).square().flatten()
    assert got > 0
    assert within(got, naive, truth)


@pytest.mark.parametrize("behind", [1, 3])
def test_what_is_settled_later_as_on_a_gpu(behind: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next terms are begun before lost squares are asked for; the sums are the same."""
    torch.manual_seed(1)
    model = Tokens()
    data = 1000 + torch.randn(24, 4, 32), torch.randint(0, 3, (24,))
    at_once, taken, settled = sf.trace(model, data), sweep._taken, Begun.settled
    order = []

    def begun(term: Term, sign: Tensor | None) -> Begun:
        order.append("begun")
        return known[Outer if isinstance(term, Outer) else Term](term, sign)

    def asked(self: Begun) -> Tensor:
        order.append("settled")
        return settled(self)

    known = {kind: kind.begun_traces for kind in (Outer, Term)}
    for kind in known:
        monkeypatch.setattr(kind, "begun_traces", begun)
    monkeypatch.setattr(Begun, "settled", asked)
    monkeypatch.setattr(sweep, "_taken", lambda steps, **_: taken(steps, behind))
    assert dict(sf.trace(model, data)) == dict(at_once)
    assert order[: behind + 2] == ["begun"] * (behind + 1) + ["settled"]
    assert order.count("settled") == order.count("begun") == 4

    monkeypatch.setattr(Begun, "settled", lambda self: self.totals)
    assert sf.trace(model, data)["a.weight"] != at_once["a.weight"], "something must be lost here"


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_directions_that_go_together_as_on_a_gpu(
    groups: int, signed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("saltflat.curvature.contractions._on_gpu", lambda x: True)
    torch.manual_seed(groups)
    left = [torch.randn(5, groups, 2, 40, dtype=torch.float64) for _ in range(3)]
    right = torch.randn(5, groups, 3, 40, dtype=torch.float64)
    sign = torch.randn(3, 5).sign() if signed else None
    term = Outer(left, right, Layout(groups=groups))
    gradients = torch.einsum("dngat,ngbt->dngab", torch.stack(left), right)
    parts = gradients.square() * (1.0 if sign is None else sign[:, :, None, None, None])
    each = parts.sum((0, 2, 3, 4))
    torch.testing.assert_close(term.traces(sign), each)
    diagonal, traces = term.diagonal_and_traces(sign)
    torch.testing.assert_close(traces, each)
    torch.testing.assert_close(diagonal, term.layout.assemble(parts.sum((0, 1))))
    torch.testing.assert_close(term.diagonal(sign), diagonal)
    weights = torch.rand(groups * 2, 3, dtype=torch.float64)
    weighed = gradients.square() * term.layout.factored(weights)
    torch.testing.assert_close(term.weighted_squares(weights), weighed.sum((0, 2, 3, 4)))


@pytest.mark.parametrize("ask", [sf.trace, sf.diagonal])
@pytest.mark.parametrize("size", [1e-19, 1e-21, 1e-24])
def test_squares_that_underflow_are_told(
    size: float, ask: Callable[..., Mapping[str, object]]
) -> None:
    """In float32 digits are lost, and then all of them; the last layer has its own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))
    with torch.no_grad():
        model[2].weight.mul_(size)
    x, y = torch.randn(8, 5), torch.arange(8) % 3
    with pytest.warns(UserWarning, match=r"of 0\.weight, 0\.bias is 0 .*dtype=torch\.float64"):
        ask(model, (x, y))
    wide = sf.trace(model, (x, y), dtype=torch.float64)
    assert wide["0.weight"] > 1e-3 * size**2
    assert not wide.notes


@pytest.mark.parametrize("size", [1e-21, 1e-24])
@pytest.mark.parametrize(
    "name", ["kappa", "kappa_trace", "rho", "relative_flatness", "fisher_rao_norm"]
)
def test_squares_that_underflow_are_told_of_every_measure(name: str, size: float) -> None:
    """Also where no trace is asked for, and where it is the weight that is small."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))
    data = torch.randn(8, 5), torch.arange(8) % 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sf.measure(model, data, measures=[name])
    with torch.no_grad():
        model[2].weight.mul_(size)
    with pytest.warns(UserWarning, match=r"of .*weight.* is 0 .*dtype=torch\.float64"):
        found = sf.measure(model, data, measures=[name])[name].value
    wide = sf.measure(model, data, measures=[name], dtype=torch.float64)
    assert found != pytest.approx(wide[name].value, rel=1e-3, abs=0)
    with torch.no_grad():
        model[2].weight.zero_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sf.measure(model, data, measures=["relative_flatness"])["relative_flatness"].exact


def test_eigenvalues_that_underflow_are_told() -> None:
    model, data = nn.Linear(5, 3), (1e-21 * torch.randn(8, 5), torch.arange(8) % 3)
    with pytest.warns(UserWarning, match=r"of weight is 0 .*dtype=torch\.float64"):
        sf.eigenvalues(model, data, k=1, block="weight")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sf.eigenvalues(model, data, k=1)
        sf.eigenvalues(model, data, k=1, block="weight", dtype=torch.float64)


def test_a_single_output_that_is_saturated_is_told() -> None:
    """The slope of a sigmoid is e⁻²⁰⁰ there; of one class alone it is 0."""
    torch.manual_seed(0)
    model, x = nn.Linear(5, 1), torch.rand(8, 5)
    with torch.no_grad():
        model.bias.fill_(200.0)
    y = (torch.arange(8) % 2).float()[:, None]
    with pytest.warns(UserWarning, match=r"of weight, bias is 0 .*dtype=torch\.float64"):
        assert sf.trace(model, (x, y), "bce").total == 0
    assert 0 < sf.trace(model, (x, y), "bce", dtype=torch.float64).total < 1e-85


def test_what_is_zero_in_truth_is_not_told() -> None:
    """A dead branch, and the only class there is."""
    torch.manual_seed(0)
    x = torch.rand(8, 5)
    dead = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))
    with torch.no_grad():
        dead[0].weight[:] = -1.0
        dead[0].bias[:] = 0.0
    found = sf.trace(dead, (x, torch.arange(8) % 3))
    assert found["0.weight"] == 0
    assert not found.notes
    assert not sf.trace(nn.Linear(5, 1), (x, torch.zeros(8, dtype=torch.int64))).notes
