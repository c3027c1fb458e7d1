"""Errors hold: error/stderr over many seeds, as normal scores by Student's t, has size one.

Most tests estimate from products with a made-up Hessian H = Σ_i g_i g_iᵀ of a two-layer ReLU
network, one g_i a sample, so that a seed takes milliseconds and the truth is a formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import papers
import pytest
import torch
from scipy.special import ndtri_exp
from scipy.stats import chi2, t
from torch import Tensor, nn

import saltflat as sf
from saltflat.curvature.matrix import Matrix
from saltflat.curvature.probes import estimate_form
from saltflat.curvature.quadratic import Form, Weight
from saltflat.curvature.quantities import Kind
from saltflat.curvature.stochastic import (
    Estimate,
    Hutchinson,
    group_sizes,
)
from saltflat.measures import (
    HessianTrace,
    KappaTrace,
    MatrixNormalizedSharpness,
    MinimumSharpness,
    NeuronwiseMinimumSharpness,
    NormalizedSharpness,
    RelativeFlatness,
    Rho,
)
from saltflat.measures.base import Context, Layer, Measure, Quantity

LEAST, USUAL = 4, Hutchinson().probes


def scores(z: np.ndarray, degrees: np.ndarray) -> np.ndarray:
    """Normal scores of what has Student's t distribution; logarithms keep the tails finite."""
    return -np.sign(z) * ndtri_exp(t.logsf(np.abs(z), degrees))


def holds(errors: Iterable[float], stderr: Iterable[float], degrees: Iterable[float]) -> None:
    """The root mean square of the scores is between 0.8 and 1.25, with room for few seeds."""
    e, s, d = (np.array(list(each)) for each in (errors, stderr, degrees))
    assert (s > 0).all(), "no estimate is certain"
    size = float(np.sqrt(np.mean(scores(e / s, d) ** 2)))
    low, high = (1.0, 1.0)
    if len(e) < 200:
        low, high = (math.sqrt(chi2.ppf(q, len(e)) / len(e)) for q in (1e-3, 1 - 1e-3))
    assert 0.8 * low < size < 1.25 * high, size


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
TABLE = pytest.mark.parametrize(
    ("name", "probes", "seeds"),
    [
        *((name, LEAST, 40) for name in HESSIANS),
        (HESSIANS[1], USUAL, 40),
        *(
            pytest.param(name, probes, 200, marks=pytest.mark.slow)
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


def quantity(estimate: Estimate, probes: int) -> Quantity:
    sizes = group_sizes(probes, len(next(iter(estimate.draws.values()))))
    return Quantity(estimate.values, estimate.draws, sizes)


@cache
def context(name: str, probes: int, seed: int) -> Context:
    """All that the measures need, estimated as in a report: in 20 groups at most."""
    estimator, times = Hutchinson(probes, seed), product(hessian(name))
    kept = min(probes, 20)
    found = estimator.estimate(times, shapes(), ["trace", "diagonal"], kept)
    quantities: dict[Kind, Quantity] = {
        kind: quantity(found[kind], probes) for kind in ("trace", "diagonal")
    }
    weights = {x.parameter: Weight(x.weight, x.matrix) for x in layers()}
    forms: dict[Kind, Form] = {"columns": "columns", "rows": "rows", "flatness": "flatness"}
    for kind, form in forms.items():
        each = estimate_form(times, weights, form, estimator, kept, in_full=False)
        quantities[kind] = quantity(each, probes)
    return Context(None, layers(), quantities, _group=group())  # type: ignore[arg-type]


# Traces and diagonals


@TABLE
def test_estimators(name: str, probes: int, seeds: int) -> None:
    truth, times = blocks(hessian(name)), product(hessian(name))
    found = [Hutchinson(probes, s).estimate(times, shapes(), ["trace", "diagonal"]) for s in
             range(seeds)]  # fmt: skip
    traces = [each["trace"] for each in found]
    degrees = [each.degrees for each in traces]
    total = float(hessian(name).trace())
    holds((e.total - total for e in traces), (e.total_stderr for e in traces), degrees)
    for block, matrix in truth.items():
        errors = [float(e.values[block] - matrix.trace()) for e in traces]
        holds(errors, (float(e.stderr[block]) for e in traces), degrees)
    for entry in (0, 7):
        values = [e["diagonal"].values["0.weight"].view(-1)[entry] for e in found]
        errors = [float(v - truth["0.weight"][entry, entry]) for v in values]
        stderr = [float(e["diagonal"].stderr["0.weight"].view(-1)[entry]) for e in found]
        holds(errors, stderr, degrees)


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
        assert not found.exact
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
        "relative_flatness": float(torch.einsum("oipi,oj,pj->", forms[1], w[1], w[1])),
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
        holds(errors, (m.stderr for m in found), (m.degrees for m in found))


@TABLE
def test_minima_over_estimated_curvature(name: str, probes: int, seeds: int) -> None:
    """Bounds from above whose errors hold: against their mean, which is at least the minimum."""
    want = closed_forms(name)
    for key, measure in MINIMA.items():
        found = [measure.compute(context(name, probes, seed)) for seed in range(seeds)]
        assert {(m.exact, m.bound) for m in found} == {(False, "upper")}
        values = np.array([m.value for m in found])
        holds(values - values.mean(), (m.stderr for m in found), (m.degrees for m in found))
        error = values.std() / math.sqrt(seeds)
        assert values.mean() > want[key] - 4 * error, (key, values.mean(), want[key], error)
        if probes == USUAL:
            assert values.mean() < 1.25 * want[key] + 4 * error, (key, values.mean(), want[key])
