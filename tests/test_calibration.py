"""Errors hold: error/stderr over many seeds, as normal scores by Student's t, has size one.

Most tests estimate from products with a made-up Hessian H = Σ_i g_i g_iᵀ of a two-layer ReLU
network, one g_i a sample, so that a seed takes milliseconds and the truth is a formula.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import networks as net
import numpy as np
import papers
import pytest
import torch
from cases import BY_NAME, Case, normal
from dense import Dense
from scipy.special import ndtri_exp
from scipy.stats import chi2, t
from torch import Tensor, nn

import saltflat as sf
from saltflat.curvature.contractions import Form, Weight
from saltflat.curvature.curvature import Layer
from saltflat.curvature.estimators import (
    Hutchinson,
    Quantity,
    combined_degrees,
    degrees_of_freedom,
    estimate_form,
    group_sizes,
    mean_error,
)
from saltflat.curvature.sweep import Kind
from saltflat.geometry import Matrix
from saltflat.measures import (
    AdaptiveSharpness,
    HessianTrace,
    KappaTrace,
    MatrixNormalizedSharpness,
    MinimumSharpness,
    NeuronwiseMinimumSharpness,
    NormalizedSharpness,
    RelativeFlatness,
    Rho,
    SamSharpness,
)
from saltflat.measures.base import Context, Measure
from saltflat.measures.cross_fit import FOLDS, Line, cross_fit

LEAST, USUAL = 4, Hutchinson().probes


def scores(z: np.ndarray, degrees: np.ndarray) -> np.ndarray:
    """Normal scores of what has Student's t distribution; logarithms keep the tails finite."""
    return -np.sign(z) * ndtri_exp(t.logsf(np.abs(z), degrees))


def holds(
    errors: Iterable[float], stderr: Iterable[float], degrees: Iterable[float], top: float = 1.25
) -> None:
    """The root mean square of the scores is between 0.8 and `top`, with room for few seeds."""
    e, s, d = (np.array(list(each)) for each in (errors, stderr, degrees))
    assert (s > 0).all(), "no estimate is certain"
    size = float(np.sqrt(np.mean(scores(e / s, d) ** 2)))
    low, high = (1.0, 1.0)
    if len(e) < 200:
        low, high = (math.sqrt(chi2.ppf(q, len(e)) / len(e)) for q in (1e-3, 1 - 1e-3))
    assert 0.8 * low < size < top * high, size


# Made-up Hessians


WIDTHS = (5, 12, 6)  # 60 and 72 entries: more than the usual probes


@cache
def model() -> nn.Sequential:
    torch.manual_seed(0)
    first, second = (nn.Linear(*each, bias=False) for each in pairwise(WIDTHS))
    return nn.Sequential(first, nn.ReLU(), second).double()


def gradients(sizes: Iterable[float], spread: float = 1.0) -> Tensor:
    """One g_i a sample, of these sizes; entries of very different sizes for a large spread."""
    g = torch.Generator().manual_seed(1)
    count = sum(p.numel() for p in model().parameters())
    sizes = torch.tensor(list(sizes), dtype=torch.float64)
    rows = torch.randn(len(sizes), count, generator=g, dtype=torch.float64)
    each = (spread * torch.randn(count, generator=g, dtype=torch.float64)).exp()
    return rows * sizes[:, None].sqrt() * each


def pair() -> Tensor:
    """Two entries that are coupled, beside a small diagonal: draws of signs take two values."""
    matrix = 0.01 * torch.eye(132, dtype=torch.float64)
    matrix[:2, :2] = torch.tensor([[1.0, 0.9], [0.9, 1.0]])
    matrix[60:62, 60:62] = torch.tensor([[1.0, 0.9], [0.9, 1.0]])
    return matrix


@cache
def hessian(name: str) -> Tensor:
    if name == "a coupled pair":
        return pair()
    rows = {
        "many samples": lambda: gradients([1.0] * 60),
        "two samples carry 95 %": lambda: gradients([28.5, 28.5] + [3 / 58] * 58),
        "one direction": lambda: gradients([1.0]),
        "entries of all sizes": lambda: gradients([1.0] * 60, spread=2.0),
    }[name]()
    return rows.T @ rows / 60


HESSIANS = [
    "many samples",
    "two samples carry 95 %",
    "one direction",
    "entries of all sizes",
    "a coupled pair",
]
#: a single direction makes the most skewed draws there are, χ² of one degree of freedom
TOP = {"one direction": 1.35}
TABLE = pytest.mark.parametrize(
    ("name", "probes", "seeds"),
    [
        *((name, LEAST, 40) for name in HESSIANS),
        *(
            pytest.param(name, probes, 400 if probes == LEAST else 200, marks=pytest.mark.slow)
            for name in HESSIANS
            for probes in (LEAST, USUAL)
        ),
    ],
)
NAMES = ("0.weight", "2.weight")


def blocks(matrix: Tensor) -> dict[str, Tensor]:
    return {"0.weight": matrix[:60, :60], "2.weight": matrix[60:, 60:]}


def shapes() -> dict[str, tuple[torch.Size, torch.device]]:
    return {n: (p.shape, torch.device("cpu")) for n, p in model().named_parameters()}


def product(matrix: Tensor) -> Callable[[Mapping[str, Tensor]], dict[str, Tensor]]:
    """Products with it; what is asked of one block alone is zero elsewhere."""

    def times(v: Mapping[str, Tensor]) -> dict[str, Tensor]:
        image = matrix @ torch.cat([v[name].reshape(-1) for name in NAMES])
        parts = image.split([60, 72])
        return {n: p.reshape(v[n].shape) for n, p in zip(NAMES, parts, strict=True)}

    return times


@cache
def layers() -> list[Layer]:
    return [
        Layer(n.removesuffix(".weight"), n, Matrix(), p.detach(), "linear", i)
        for i, (n, p) in enumerate(model().named_parameters())
    ]


@cache
def group() -> Any:
    return sf.symmetries(model(), torch.ones(2, WIDTHS[0], dtype=torch.float64))


@cache
def context(name: str, probes: int, seed: int) -> Context:
    """All that the measures need, estimated as in a report: in 20 groups at most."""
    estimator, times = Hutchinson(probes, seed), product(hessian(name))
    kept = min(probes, 20)
    found = estimator.estimate(times, shapes(), ["trace", "diagonal"], kept)
    quantities: dict[Kind, Quantity] = {
        "trace": found["trace"],
        "diagonal": found["diagonal"],
    }
    weights = {x.parameter: Weight(x.weight, x.matrix) for x in layers()}
    forms: dict[Kind, Form] = {"columns": "columns", "rows": "rows", "flatness": "flatness"}
    for kind, form in forms.items():
        quantities[kind] = estimate_form(times, weights, form, estimator, kept, in_full=False)
    return Context(None, layers(), quantities, _group=group())


# Traces and diagonals


@TABLE
def test_estimators(name: str, probes: int, seeds: int) -> None:
    truth, times = blocks(hessian(name)), product(hessian(name))
    found = [Hutchinson(probes, s).estimate(times, shapes(), ["trace", "diagonal"]) for s in
             range(seeds)]  # fmt: skip
    traces = [each["trace"] for each in found]
    degrees = [each.degrees for each in traces]
    total = float(hessian(name).trace())
    top = TOP.get(name, 1.25)
    holds((e.total - total for e in traces), (e.total_stderr for e in traces), degrees, top)
    for block, matrix in truth.items():
        errors = [float(e.values[block] - matrix.trace()) for e in traces]
        holds(errors, (float(e.errors[block]) for e in traces), degrees, top)
    for entry in (0, 7):
        values = [e["diagonal"].values["0.weight"].view(-1)[entry] for e in found]
        errors = [float(v - truth["0.weight"][entry, entry]) for v in values]
        stderr = [float(e["diagonal"].errors["0.weight"].view(-1)[entry]) for e in found]
        holds(errors, stderr, degrees, top)


def test_draws_that_agree_agree_for_a_reason() -> None:
    """Four probes of signs give the same number, 0.4 or −0.4 off, once in eight times."""
    matrix = torch.tensor([[1.0, 0.2], [0.2, 1.0]], dtype=torch.float64)
    where = {"w": (torch.Size([1, 5]), torch.device("cpu"))}
    whole = torch.block_diag(matrix, torch.eye(3, dtype=torch.float64))

    def times(v: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"w": v["w"] @ whole}

    for seed in range(60):
        found = Hutchinson(4, seed).estimate(times, where, ["trace"])["trace"]
        assert found.total_stderr > 1e-3 * abs(found.total - 5.0)
        assert not found.exact(["w"])
        whole_identity = Hutchinson(4, seed).estimate(lambda v: {"w": 3 * v["w"]}, where, ["trace"])
        assert whole_identity["trace"].total == pytest.approx(15.0, rel=1e-14)
        assert whole_identity["trace"].total_stderr < 1e-13


# Measures


def closed_forms(name: str) -> dict[str, float]:
    """Every measure of the two-layer network by its formula."""
    h, (first, second) = hessian(name), blocks(hessian(name)).values()
    w = [x.weight for x in layers()]
    diagonal = [first.diagonal().reshape(w[0].shape), second.diagonal().reshape(w[1].shape)]
    forms = [b.reshape(*v.shape, *v.shape) for b, v in zip((first, second), w, strict=True)]
    trace = [float(d.sum()) for d in diagonal]
    units = (diagonal[0].sum(1) * diagonal[1].sum(0)).sqrt()
    pairs = list(zip(forms, w, strict=True))
    return {
        "hessian_trace": float(h.trace()),
        "kappa_trace": sum(float(v.square().sum()) * s for v, s in zip(w, trace, strict=True)),
        "columns": sum(float(torch.einsum("oipi,oi,pi->", f, v, v)) for f, v in pairs),
        "rows": sum(float(torch.einsum("oioj,oi,oj->", f, v, v)) for f, v in pairs),
        "relative_flatness": papers.relative_flatness(
            papers.Layer(w[1].reshape(-1), papers.plain(*w[1].shape), second)
        ),
        "simplified": float(w[1].square().sum()) * trace[1],
        "minimum_sharpness": 2 * math.sqrt(trace[0] * trace[1]),
        "neuronwise_minimum_sharpness": 2 * float(units.sum()),
        "normalized_sharpness": sum(
            papers.least(d.numpy(), v.square().numpy()) for d, v in zip(diagonal, w, strict=True)
        ),
        "matrix_normalized_sharpness": sum(
            float(v.norm()) * math.sqrt(s) for v, s in zip(w, trace, strict=True)
        ),
    }


LINEAR: dict[str, Measure] = {
    "hessian_trace": HessianTrace(),
    "kappa_trace": KappaTrace(),
    "columns": Rho(),
    "rows": Rho(side="rows"),
    "relative_flatness": RelativeFlatness(),
    "simplified": RelativeFlatness(simplified=True),
}
MINIMA: dict[str, Measure] = {
    "minimum_sharpness": MinimumSharpness(),
    "neuronwise_minimum_sharpness": NeuronwiseMinimumSharpness(),
    "normalized_sharpness": NormalizedSharpness(),
    "matrix_normalized_sharpness": MatrixNormalizedSharpness(),
}


@TABLE
def test_measures_linear_in_curvature(name: str, probes: int, seeds: int) -> None:
    want = closed_forms(name)
    for key, measure in LINEAR.items():
        found = [measure.compute(context(name, probes, seed)) for seed in range(seeds)]
        assert not any(m.exact or m.bound for m in found)
        errors = (m.value - want[key] for m in found)
        stderr, degrees = ([getattr(m, f) for m in found] for f in ("stderr", "degrees"))
        holds(errors, stderr, degrees, TOP.get(name, 1.25))


@TABLE
def test_minima_over_estimated_curvature(name: str, probes: int, seeds: int) -> None:
    """Bounds from above whose errors hold: against their mean, which is at least the minimum."""
    want = closed_forms(name)
    for key, measure in MINIMA.items():
        found = [measure.compute(context(name, probes, seed)) for seed in range(seeds)]
        assert {(m.exact, m.bound) for m in found} == {(False, "upper")}
        values = np.array([m.value for m in found])
        stderr, degrees = ([getattr(m, f) for m in found] for f in ("stderr", "degrees"))
        holds(values - values.mean(), stderr, degrees, TOP.get(name, 1.25))
        error = values.std() / math.sqrt(seeds)
        assert values.mean() > want[key] - 4 * error, (key, values.mean(), want[key], error)
        if probes == USUAL:
            assert values.mean() < 1.25 * want[key] + 4 * error, (key, values.mean(), want[key])


@pytest.mark.parametrize("name", HESSIANS)
def test_units_do_no_worse_than_layers(name: str) -> None:
    """The neuron-wise minimum is over a larger group, and chosen with the same draws."""
    for seed in range(5):
        each = context(name, LEAST, seed)
        layers, units = MinimumSharpness().compute(each), NeuronwiseMinimumSharpness().compute(each)
        assert units.value < layers.value + 2 * math.hypot(units.stderr, layers.stderr)


@pytest.mark.parametrize("known", NAMES)
def test_known_and_estimated_curvature_together(known: str) -> None:
    """What is known stays known, and the bound is of the rest."""
    name = "many samples"
    each, want = context(name, 20, 0), closed_forms(name)
    drawn = each.quantities["diagonal"]
    values = dict(drawn.values)
    values[known] = blocks(hessian(name))[known].diagonal().reshape(values[known].shape)
    draws = {n: d for n, d in drawn.draws.items() if n != known}
    diagonal = Quantity(values, draws, drawn.sizes)
    sums = {n: v.sum() for n, v in values.items()}, {n: d.sum((1, 2)) for n, d in draws.items()}
    quantities: dict[Kind, Quantity] = {"trace": Quantity(*sums, drawn.sizes), "diagonal": diagonal}
    mixed = Context(None, layers(), quantities, _group=group())
    for key, measure in MINIMA.items():
        found = measure.compute(mixed)
        assert (found.exact, found.bound) == (False, "upper")
        assert found.value == pytest.approx(want[key], abs=4.5 * found.stderr)
        assert found.stderr > 0
    layer = next(x for x in layers() if x.parameter == known)
    root = math.sqrt(float(layer.weight.square().sum()) * float(values[known].sum()))
    by_layer = MatrixNormalizedSharpness().compute(mixed).by_layer
    assert by_layer[layer.name] == pytest.approx(root, rel=1e-12)
    least = papers.least(values[known].numpy(), layer.weight.square().numpy())
    by_layer = NormalizedSharpness().compute(mixed).by_layer
    assert by_layer[layer.name] == pytest.approx(least, rel=1e-8)


def test_a_fold_does_not_choose_for_itself() -> None:
    """The line of a fold is the same whatever the fold's own draws are; below zero stays below."""
    g = torch.Generator().manual_seed(0)
    draws = torch.randn(10, 3, generator=g, dtype=torch.float64)
    seen: list[list[int]] = []

    def choose(rest: Any) -> Line:
        seen.append(list(rest))
        return Line({"a": torch.full((3,), float(len(seen)))}, {"a": 0.5})

    found = cross_fit(Quantity({"a": draws.mean(0)}, {"a": draws}), choose)
    for fold, rest in enumerate(seen):
        assert sorted({*rest, *range(fold, 10, FOLDS)}) == list(range(10))
        assert not {*rest} & {*range(fold, 10, FOLDS)}
    each = torch.stack([(1 + k % FOLDS) * draws[k].sum() + 0.5 for k in range(10)])
    assert found.value == pytest.approx(float(each.mean()), rel=1e-12)
    assert found.stderr == pytest.approx(float(each.std() / 10**0.5), rel=1e-12)
    assert found.by_parameter == pytest.approx({"a": found.value})
    below = cross_fit(Quantity({"a": -draws[0]}, {"a": -draws.abs()}), choose)
    assert below.value < 0


# Degrees of freedom, and means of unequal groups


def test_degrees_of_freedom() -> None:
    """2σ⁴/Var(s²) for an excess kurtosis of 1, the variance of s² taken from simulation."""
    g = np.random.default_rng(0)
    draws = 8
    mixture = np.where(g.random((200_000, draws)) < 0.5, 1.0, math.sqrt(2 + math.sqrt(3)))
    x = g.normal(size=mixture.shape) * mixture  # excess kurtosis 3 Var(m²)/E[m²]² = 1
    squares = x.var(1, ddof=1)
    degrees = 2 * squares.mean() ** 2 / squares.var()
    assert degrees_of_freedom(draws) == pytest.approx(degrees, rel=0.05)
    assert degrees_of_freedom(100, 20) < degrees_of_freedom(100) < 99


def test_degrees_of_independent_parts() -> None:
    assert combined_degrees([(2.0, 7.0)]) == pytest.approx(7.0)
    assert combined_degrees([(2.0, 7.0), (0.0, math.inf)]) == pytest.approx(7.0)
    assert combined_degrees([(1.0, 5.0), (1.0, 5.0)]) == pytest.approx(10.0)
    assert combined_degrees([(0.0, math.inf)]) == math.inf
    assert combined_degrees([(3.0, 4.0), (4.0, 9.0)]) == pytest.approx(625 / (81 / 4 + 256 / 9))


def test_groups_of_unequal_size() -> None:
    """25 draws in 20 groups: five hold two draws, and count twice."""
    assert group_sizes(25, 20) == (2,) * 5 + (1,) * 15
    g = torch.Generator().manual_seed(0)
    draws = torch.randn(4000, 25, generator=g, dtype=torch.float64)
    sizes = group_sizes(25, 20)
    means = torch.stack([draws[:, k::20].mean(1) for k in range(20)])
    mean, error = mean_error(means, sizes)
    torch.testing.assert_close(mean, draws.mean(1))
    assert float(error.square().mean()) == pytest.approx(1 / 25, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("probes", [5, 25, 33])
def test_numbers_of_probes_that_do_not_divide(probes: int) -> None:
    name = HESSIANS[1]
    want = closed_forms(name)
    for key in ("columns", "relative_flatness"):
        found = [LINEAR[key].compute(context(name, probes, seed)) for seed in range(200)]
        errors = (m.value - want[key] for m in found)
        holds(errors, (m.stderr for m in found), (m.degrees for m in found))


# From the model on


@dataclass(frozen=True)
class Net:
    """A model that is estimated, its data, and how."""

    case: Case
    options: Mapping[str, Any]
    two: bool = False  # the other samples are so small that two carry nearly all

    def data(self) -> tuple[Tensor, Tensor]:
        x, y = self.case.data()
        if self.two:
            x = x.clone()
            x[2:] *= 0.03
        return x, y


def two_layers(width: int, between: nn.Module) -> Callable[[], nn.Module]:
    return lambda: net.seq(
        nn.Linear(5, width, bias=False), between, nn.Linear(width, 3, bias=False)
    )


TANH = Case("tanh", two_layers(24, nn.Tanh()), normal(5), n=12)
RELU = Case("relu", two_layers(6, nn.ReLU()), normal(5), n=6)
NETS = {
    "tanh": Net(TANH, {}),
    "tanh, two samples": Net(TANH, {}, two=True),
    "transformer": Net(BY_NAME["transformer"], {}),
    "sketch": Net(RELU, {"max_directions": 1}),
    "sketch, two samples": Net(RELU, {"max_directions": 1}, two=True),
}


@pytest.mark.filterwarnings("ignore:The outputs have")
@pytest.mark.parametrize(
    ("name", "probes", "seeds"),
    [
        *((name, LEAST, 40) for name in NETS),
        *(
            pytest.param(name, probes, 200, marks=pytest.mark.slow)
            for name in NETS
            for probes in (LEAST, USUAL)
        ),
    ],
)
def test_traces_of_models(name: str, probes: int, seeds: int) -> None:
    each = NETS[name]
    x, y = each.data()
    dense = Dense(each.case.model(), x, y)
    truth = float(dense.hessian.trace())
    if each.two:
        rest = Dense(each.case.model(), x[2:], y[2:]).hessian.trace() * len(x[2:]) / len(x)
        assert abs(float(rest)) < 0.05 * abs(truth)
    found = [
        sf.trace(each.case.model(), (x, y), estimator=Hutchinson(probes, seed), **each.options)
        for seed in range(seeds)
    ]
    assert not any(r.exact for r in found)
    stderr, degrees = [r.stderr for r in found], [r.degrees for r in found]
    holds((r.total - truth for r in found), stderr, degrees)


@pytest.mark.parametrize(
    "draws", [LEAST, pytest.param(SamSharpness().draws, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("measure", [SamSharpness, AdaptiveSharpness])
def test_average_growth(measure: Any, draws: int) -> None:
    """Of a quadratic loss the average is ½ ρ²/size Σ s² diag H, s = 1 or |w|."""
    torch.manual_seed(0)
    linear = nn.Linear(5, 2, bias=False).double()
    x, y = torch.randn(8, 5).double(), torch.randn(8, 2).double()
    diagonal = x.square().mean(0).expand(2, 5)  # the mean over 2 outputs halves the 2 of a square
    scale = linear.weight.detach().square() if measure is AdaptiveSharpness else torch.ones(2, 5)
    want = 0.5 * 0.1**2 / 10 * float((diagonal * scale).sum())
    configured = measure(rho=0.1, average=True, draws=draws)
    found = [
        sf.measure(linear, (x, y), "mse", measures=[configured], seed=seed)[configured.name]
        for seed in range(100)
    ]
    stderr, degrees = [m.stderr for m in found], [m.degrees for m in found]
    holds((m.value - want for m in found), stderr, degrees)


# What results say of themselves


def test_results_carry_degrees_of_freedom() -> None:
    case = BY_NAME["mlp Tanh"]
    few = Hutchinson(probes=8)
    for function in (sf.trace, sf.diagonal):
        found = function(case.model(), case.data(), estimator=few)
        assert found.degrees == degrees_of_freedom(8)
        assert found.details["0.weight"].degrees == found.degrees
        assert found.details["2.weight"].degrees == math.inf
        assert function(case.model(), case.data(), curvature="ggn").degrees == math.inf
    names = ["hessian_trace", "rho"]
    report = sf.measure(case.model(), case.data(), measures=names, estimator=few)
    assert [report[n].degrees for n in names] == [degrees_of_freedom(8)] * 2
    exact = sf.measure(case.model(), case.data(), measures=names, curvature="ggn")
    assert [exact[n].degrees for n in names] == [math.inf] * 2


def test_sketches_and_probes_in_one_report() -> None:
    """Of one network the last layer is sketched and the first is probed: both errors count."""
    case = BY_NAME["mlp Tanh"]
    options: dict[str, Any] = {"estimator": Hutchinson(probes=24), "max_directions": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole, first, last = (
            sf.trace(case.model(), case.data(), parameters=names, **options)
            for names in ("all", ["0.weight", "0.bias"], ["2.weight", "2.bias"])
        )
        report = sf.measure(case.model(), case.data(), measures=["hessian_trace"], **options)
    assert min(first.stderr, last.stderr) > 0
    assert whole.stderr == pytest.approx(math.hypot(first.stderr, last.stderr), rel=1e-9)
    parts = [(first.stderr, first.degrees), (last.stderr, last.degrees)]
    assert whole.degrees == pytest.approx(combined_degrees(parts), rel=1e-9)
    found = report["hessian_trace"]
    assert abs(found.value - float(case.dense().hessian.trace())) < 5 * found.stderr
