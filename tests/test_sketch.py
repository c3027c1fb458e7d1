"""Draws with noise of every sample's own: which way serves which block, errors, budgets."""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import networks as net
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from agree import agrees
from cases import BY_NAME, Case, normal
from dense import Dense
from test_calibration import holds
from test_propagated import Gated
from torch import Tensor, nn

import saltflat as sf
from saltflat.curvature.sketch import bounded, checkpoint


def deep(outputs: int) -> nn.Module:
    """Two curved layers: before the last of them one sign an entry leaves no noise."""
    layers = nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 7), nn.GELU(), nn.Linear(7, outputs)
    return net.seq(*layers)


CURVED = Case("curved", lambda: deep(3), normal(6))
OWN = [sf.PropagatedCurvature(8), sf.ActivationProbes(8)]

pytestmark = pytest.mark.filterwarnings("ignore:The outputs have")


@pytest.mark.parametrize("estimator", [*OWN, None], ids=repr)
def test_agrees_with_the_dense_hessian(estimator: Any) -> None:
    oracle = CURVED.dense()
    result = sf.trace(CURVED.model(), CURVED.data(), estimator=estimator)
    agrees(result, oracle.blocks(oracle.hessian))
    assert result.details["4.weight"].exact
    assert result.details["0.weight"].rule in ("propagated", "activation probes")
    assert 0 < result.details["0.weight"].stderr < math.inf


def test_the_way_that_was_asked_for() -> None:
    rules = [
        sf.trace(CURVED.model(), CURVED.data(), estimator=each).details["0.weight"].rule
        for each in (*OWN, sf.Hutchinson(8))
    ]
    assert rules == ["propagated", "activation probes", "probes"]


@pytest.mark.parametrize("estimator", OWN, ids=repr)
@pytest.mark.parametrize("size", [1, 2, 5])
def test_batches_do_not_matter(estimator: Any, size: int) -> None:
    """The signs belong to the samples of a batch, so only what joins batches differs."""
    x, y = CURVED.data()
    whole = sf.trace(CURVED.model(), (x, y), estimator=estimator, memory_budget=1 << 30)
    parts = sf.trace(CURVED.model(), (x, y), estimator=estimator, memory_budget=1)
    assert parts.total == pytest.approx(whole.total, rel=1e-12)
    split = list(zip(x.split(size), y.split(size), strict=True))
    other = sf.trace(CURVED.model(), split, estimator=estimator)
    assert abs(other.total - whole.total) < 5 * math.hypot(other.stderr, whole.stderr)


def test_the_seed_decides() -> None:
    for key in ("estimator", "seed"):
        totals = []
        for seed in (0, 0, 1):
            options: dict[str, Any] = {"seed": seed}
            if key == "estimator":
                options = {"estimator": sf.PropagatedCurvature(8, seed)}
            totals.append(sf.trace(CURVED.model(), CURVED.data(), **options).total)
        assert totals[0] == totals[1] != totals[2]


@pytest.mark.parametrize("name", ["mlp", "conv net", "residual"])
def test_piecewise_linear_networks_have_no_rest(name: str) -> None:
    """Where nothing is curved the draws add nothing to the Gauss–Newton part, which is exact."""
    case = BY_NAME.get(name, BY_NAME["mlp"])
    exact = sf.trace(case.model(), case.data(), case.loss)
    for estimator in OWN:
        drawn = sf.trace(case.model(), case.data(), case.loss, certify="none", estimator=estimator)
        for block, value in exact.items():
            assert drawn[block] == pytest.approx(value, rel=1e-9, abs=1e-12)
            assert drawn.details[block].exact or drawn.details[block].stderr < 1e-12


def test_weights_that_feed_themselves_are_probed() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.again, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x).tanh()
            for _ in range(2):
                x = self.again(x).tanh()
            out: Tensor = self.last(x)
            return out

    torch.manual_seed(0)
    model = Recurrent().double()
    x, y = normal(6)(8, torch.Generator().manual_seed(0)).double(), torch.arange(8) % 3
    oracle = Dense(model, x, y)
    result = sf.trace(model, (x, y))
    agrees(result, oracle.blocks(oracle.hessian))
    rules = {name: detail.rule for name, detail in result.details.items()}
    assert rules["again.weight"] == "probes"
    assert rules["first.weight"] in ("propagated", "activation probes")
    report = sf.measure(model, (x, y), measures=["hessian_trace", "rho", "kappa_trace"])
    truth = float(oracle.hessian.trace())
    assert abs(report["hessian_trace"].value - truth) < 5 * report["hessian_trace"].stderr


class Cube(torch.autograd.Function):
    """x³/3; torch gives zero for what is differentiated through it twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3 / 3

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        grad: Tensor = g * x**2
        return grad


@sf.piecewise_linear
class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * g


class Through(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.function = deep(3), function

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body[3:](self.function(self.body[:3](x)))
        return out


@pytest.mark.parametrize("measured", [sf.trace, sf.diagonal])
@pytest.mark.parametrize("estimator", [*OWN, None], ids=repr)
def test_what_cannot_be_differentiated_twice_is_refused(measured: Any, estimator: Any) -> None:
    with pytest.raises(sf.NoSecondDerivative, match="Cube"):
        measured(Through(Cube.apply).double(), CURVED.data(), estimator=estimator)


@pytest.mark.parametrize("estimator", [*OWN, None], ids=repr)
def test_what_is_declared_linear_need_not_be_differentiated_twice(estimator: Any) -> None:
    torch.manual_seed(0)
    plain, declared = Through(lambda x: 2 * x).double(), Through(Twice.apply).double()
    declared.load_state_dict(plain.state_dict())
    x, y = CURVED.data()
    oracle = Dense(plain, x, y)
    result = sf.trace(declared, (x, y), estimator=estimator)
    agrees(result, oracle.blocks(oracle.hessian))
    assert result.details["body.0.weight"].rule == "propagated"  # probes differentiate it


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
def test_blocks_without_a_rest_are_not_left_out(activation: Any) -> None:
    """Nothing is drawn at them, of all but traces either."""
    torch.manual_seed(0)
    model = net.mlp(activation).double()
    x, y = BY_NAME["mlp"].data()
    oracle = Dense(model, x, y)
    blocks = oracle.blocks(oracle.hessian)
    for estimator in (*OWN, None):
        found = sf.diagonal(model, (x, y), certify="none", estimator=estimator)
        assert list(found) == list(blocks)
        for name in ("2.weight", "2.bias"):
            assert torch.allclose(found[name].flatten(), blocks[name].diagonal(), rtol=1e-9)


def test_curvature_that_is_next_to_nothing() -> None:
    """The squares of variances of 1e-170 are 0."""
    model = deep(3).double()
    with torch.no_grad():
        model[4].bias.copy_(torch.tensor([0.0, 200.0, 0.0]))
    x, _ = CURVED.data()
    for estimator in (*OWN, None):
        result = sf.trace(model, (x, torch.ones(len(x), dtype=torch.long)), estimator=estimator)
        assert 0 < result.stderr < 1e-80


@pytest.mark.parametrize("classes_first", [False, True])
def test_confident_samples_keep_their_digits(classes_first: bool) -> None:
    """Where p is 1 in float32, p − 1 at the label is not 0 but minus the sum of the others."""
    torch.manual_seed(0)
    model = deep(3)
    with torch.no_grad():
        model[4].bias.copy_(torch.tensor([0.0, 18.0, 0.0]))
    x, y = torch.randn(8, 6), torch.ones(8, dtype=torch.long)
    loss: Any = "cross_entropy"
    if classes_first:
        model.append(nn.Unflatten(1, (3, 1)))
        loss, y = nn.CrossEntropyLoss(), y[:, None]
    estimators = sf.PropagatedCurvature(64), sf.ActivationProbes(64)
    narrow = [sf.trace(model, (x, y), loss, estimator=each) for each in estimators]
    norm = sf.measure(model, (x, y), loss, measures=["fisher_rao_norm"])["fisher_rao_norm"]
    model, x = model.double(), x.double()
    truth = float(Dense(model, x, y, nn.CrossEntropyLoss()).hessian.trace())
    for result in narrow:
        assert abs(result.total - truth) < 5 * result.stderr < 0.2 * truth
    wide = sf.measure(model, (x, y), loss, measures=["fisher_rao_norm"])["fisher_rao_norm"]
    assert norm.value == pytest.approx(wide.value, rel=1e-4)


@pytest.mark.parametrize("kind", [sf.PropagatedCurvature, sf.ActivationProbes])
def test_the_size_of_a_loss_does_not_matter(kind: Any) -> None:
    """A user's loss with many outputs is drawn by products with signs, which have a size."""
    torch.manual_seed(0)
    model, x = deep(20).double(), CURVED.data()[0]
    y = torch.arange(len(x))

    def waves(o: Tensor, y: Tensor) -> Tensor:
        """Its Hessian has both signs."""
        return F.cross_entropy(o, y) + (3 * o).sin().sum(1).mean()

    losses = waves, lambda o, y: 1e-6 * waves(o, y)
    usual, small = (sf.trace(model, (x, y), loss, estimator=kind(64)) for loss in losses)
    assert small.total == pytest.approx(1e-6 * usual.total, rel=1e-6)
    assert small.stderr == pytest.approx(1e-6 * usual.stderr, rel=1e-6)
    truth = float(Dense(model, x, y, waves).hessian.trace())
    assert abs(usual.total - truth) < 5 * usual.stderr < abs(truth)


@pytest.mark.parametrize("tolerance", [0.5, 0.2])
def test_tolerance(tolerance: float) -> None:
    result = sf.trace(CURVED.model(), CURVED.data(), tolerance=tolerance)
    ggn = sf.trace(CURVED.model(), CURVED.data(), curvature="ggn")
    for name, detail in result.details.items():
        target = tolerance * max(abs(detail.value), ggn[name], ggn.total / 5)
        assert detail.exact or detail.stderr <= target, name


def test_a_smaller_tolerance_takes_more_draws() -> None:
    errors = [
        float(sf.trace(CURVED.model(), CURVED.data(), tolerance=t).details["0.weight"].stderr)
        for t in (1.0, 0.01)
    ]
    assert errors[1] < 0.8 * errors[0]


def test_the_budget_ends_the_draws() -> None:
    """What misses the tolerance has the error that it has."""
    result = sf.trace(CURVED.model(), CURVED.data(), tolerance=1e-9)
    detail = result.details["0.weight"]
    assert detail.stderr > 1e-9 * abs(detail.value)
    assert any("draws" in note for note in result.notes)


def test_a_tolerance_that_was_not_reached_is_told_before_all_else() -> None:
    """By how much, and the draws that it would take; these do, by the exact Gauss–Newton traces."""
    torch.manual_seed(0)
    layers = nn.Linear(8, 30), nn.Tanh(), nn.Linear(30, 30), nn.GELU(), nn.Linear(30, 3)
    model, x, y = nn.Sequential(*layers).double(), torch.randn(12, 8).double(), torch.arange(12) % 3
    tolerance = 0.03
    with pytest.warns(UserWarning, match="NOT reached") as caught:
        result = sf.trace(model, (x, y), tolerance=tolerance)
    told = result.notes[0]
    assert str(caught[0].message) == told
    share = 100 * result.stderr / abs(result.total)
    assert f"The tolerance of 3 % was NOT reached: standard errors are {share:.2g} % of" in told
    ggn = sf.trace(model, (x, y), curvature="ggn")

    def excess(trace: sf.Trace) -> dict[str, float]:
        return {
            n: float(d.stderr) / (tolerance * max(abs(d.value), ggn[n], ggn.total / 5))
            for n, d in trace.details.items()
            if not d.exact
        }

    first = excess(result)
    worst = max(first, key=lambda name: first[name])
    count = sum(ratio > 1 for ratio in first.values())
    assert f"leave {count} of {len(first)} estimated blocks" in told
    assert f"{first[worst]:.2g} times what is allowed ({worst})" in told
    draws = int(re.search(r"estimator=saltflat.PropagatedCurvature\(draws=(\d+)\)", told)[1])
    with warnings.catch_warnings(record=True) as others:
        warnings.simplefilter("always")
        better = sf.trace(model, (x, y), estimator=sf.PropagatedCurvature(draws))
    assert not any("NOT reached" in str(w.message) for w in others)  # nobody asked for a tolerance
    assert max(excess(better).values()) < 1.3
    for call in (sf.trace, sf.diagonal):
        tight, hopeless, loose = (
            " ".join(call(model, (x, y), tolerance=t).notes) for t in (tolerance, 1e-9, 2.0)
        )
        assert tight.startswith("The tolerance of 3 % was NOT reached")
        assert "More than 100,000 draws would do. curvature='ggn'" in hopeless
        assert "NOT reached" not in loose


def test_the_operations_that_are_curved_are_listed_in_one_sentence() -> None:
    layers = nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 40), nn.GELU(), nn.Linear(40, 3)
    model = nn.Sequential(*layers)
    with pytest.warns(UserWarning, match="estimated") as caught:
        sf.trace(model, (torch.randn(8, 40), torch.arange(8) % 3))
    told = next(str(w.message) for w in caught if "estimated by" in str(w.message))
    assert told.count("not shown piecewise linear in it: ") == 1
    assert told.endswith("in it: gelu, tanh.")


def test_the_probes_that_a_tolerance_takes_are_told() -> None:
    """It does not choose the number of Hutchinson's: what is advised reaches it."""
    torch.manual_seed(0)
    model, tolerance = net.Recurrent(nn.LSTM).double(), 0.05
    data = torch.randn(20, 3, 2).double(), torch.arange(20) % 3
    with pytest.warns(UserWarning, match="as many at every tolerance"):
        first = sf.trace(model, data, tolerance=tolerance)
    assert {d.rule for d in first.details.values() if not d.exact} == {"probes"}
    count = int(re.search(r"About ([\d,]+) should", first.notes[0])[1].replace(",", ""))
    assert count == pytest.approx(32 * (first.stderr / abs(first.total) / tolerance) ** 2, rel=0.06)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        better = sf.trace(model, data, estimator=sf.Hutchinson(probes=count))
    assert better.stderr < 1.3 * tolerance * abs(better.total)


def test_a_report_tells_that_the_tolerance_was_not_reached(tmp_path: Path) -> None:
    """In the terminal before what else is told, on the page, in the file, and as a warning."""
    with pytest.warns(UserWarning, match="NOT reached"):
        report = sf.measure(CURVED.model(), CURVED.data(), measures=["hessian_trace", "rho"])
    told = report.notes[0]
    assert told.startswith("The tolerance of 5 % was NOT reached: standard errors are ")
    assert f"{100 * report['rho'].stderr / report['rho'].value:.2g} % of rho" in told
    captions = " ".join(str(report).split())
    assert told in captions
    assert captions.index(told) < captions.index("with rho side=columns")
    assert told.partition("'")[0] in report.save(tmp_path / "r.html").read_text()
    assert json.loads(report.save(tmp_path / "r.json").read_text())["notes"][0] == told
    loose = sf.measure(CURVED.model(), CURVED.data(), measures=["rho"], tolerance=1.0)
    assert "NOT reached" not in " ".join(loose.notes)


def test_bad_settings_are_refused() -> None:
    for tolerance in (0.0, -1.0, math.nan):
        with pytest.raises(sf.InvalidValue, match="tolerance"):
            sf.trace(CURVED.model(), CURVED.data(), tolerance=tolerance)
    for kind in (sf.PropagatedCurvature, sf.ActivationProbes):
        with pytest.raises(sf.InvalidValue, match="draws must be an integer"):
            kind(draws=1)
        with pytest.raises(sf.InvalidValue, match="seed must be an integer"):
            kind(seed=0.5)
    with pytest.raises(sf.InvalidType, match="PropagatedCurvature"):
        sf.trace(CURVED.model(), CURVED.data(), estimator="propagated")


def test_a_bound_on_an_error_is_above_it() -> None:
    assert bounded(0.0, math.inf, 1) == 0.0
    for degrees in (1.0, 5.0, 500.0):
        values = [bounded(1.0, degrees, place) for place in range(4)]
        assert 1 < values[0] < values[1] < values[2]
    # The spread of normal draws is below its bound in all but 5 % of the cases.
    draws = np.random.default_rng(0).standard_normal((4000, 6)).std(1, ddof=1)
    below = np.mean([bounded(s, 5.0, 1) < 1.0 for s in draws])
    assert 0.03 < below < 0.07


def test_checkpoints_are_fixed_beforehand() -> None:
    """Whatever the draws need, an early stop is at one of them, with that one's own level."""
    places = [checkpoint(draws, 8) for draws in (0, 1, 8, 12, 18, 27)]
    assert places == [1, 1, 1, 2, 3, 4]
    assert [checkpoint(draws, 8) for draws in (9, 13, 20)] == [2, 3, 4]
    torch.manual_seed(0)
    layers = nn.Linear(8, 30), nn.Tanh(), nn.Linear(30, 30), nn.GELU(), nn.Linear(30, 3)
    model, x, y = nn.Sequential(*layers).double(), torch.randn(12, 8).double(), torch.arange(12) % 3
    counts = []
    for tolerance in (0.9, 0.35, 0.25):
        notes = " ".join(sf.trace(model, (x, y), tolerance=tolerance).notes)
        counts.append(int(re.search(r"with (\d+) draws", notes)[1]))
    assert counts == [8, 12, 18]


def test_measures_of_a_curved_network() -> None:
    """Every measure from the same draws; linear ones within their errors."""
    oracle = CURVED.dense()
    names = ["hessian_trace", "kappa_trace", "rho", "relative_flatness", "minimum_sharpness"]
    report = sf.measure(CURVED.model(), CURVED.data(), measures=names)
    assert set(report) == set(names)
    trace = report["hessian_trace"]
    assert not trace.exact
    assert abs(trace.value - float(oracle.hessian.trace())) < 5 * trace.stderr
    probed = sf.measure(CURVED.model(), CURVED.data(), measures=names, estimator=sf.Hutchinson(400))
    for name in ("kappa_trace", "rho"):
        one, other = report[name], probed[name]
        assert abs(one.value - other.value) < 5 * math.hypot(one.stderr, other.stderr), name


def test_float32_and_float64_draw_the_same() -> None:
    wide = sf.trace(CURVED.model(), CURVED.data(), estimator=OWN[0])
    narrow = sf.trace(CURVED.model(torch.float32), CURVED.data(torch.float32), estimator=OWN[0])
    assert narrow.total == pytest.approx(wide.total, rel=1e-3)


def test_many_classes_are_drawn_with_the_rest() -> None:
    case = replace(CURVED, build=lambda: deep(30))
    x, y = case.data()
    oracle = Dense(case.model(), x, y)
    result = sf.trace(case.model(), (x, y), max_directions=10)
    agrees(result, oracle.blocks(oracle.hessian))
    assert result.details["4.weight"].rule == "sketch"
    assert "max_directions=29" in result.details["4.weight"].reason


@pytest.mark.parametrize(
    ("kind", "draws", "seeds"),
    [
        (sf.PropagatedCurvature, 4, 40),
        (sf.ActivationProbes, 4, 40),
        *(
            pytest.param(kind, draws, 200, marks=pytest.mark.slow)
            for kind in (sf.PropagatedCurvature, sf.ActivationProbes)
            for draws in (4, 16)
        ),
    ],
)
@pytest.mark.parametrize("samples", [1, 3, 12])
def test_errors_hold(kind: Any, draws: int, seeds: int, samples: int) -> None:
    torch.manual_seed(2)
    layers = nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 6), nn.GELU(), nn.Linear(6, 3)
    model = nn.Sequential(*layers).double()
    x, y = torch.randn(samples, 8).double(), torch.arange(samples) % 3
    x[:2] *= 4  # two samples carry most of it
    oracle = Dense(model, x, y)
    truth = {name: float(b.trace()) for name, b in oracle.blocks(oracle.hessian).items()}
    found = [sf.trace(model, (x, y), estimator=kind(draws, seed)) for seed in range(seeds)]
    for name in ("0.weight", "0.bias"):
        details = [each.details[name] for each in found]
        errors = [detail.value - truth[name] for detail in details]
        holds(errors, [float(d.stderr) for d in details], [d.degrees for d in details])
    total = float(oracle.hessian.trace())
    holds([r.total - total for r in found], [r.stderr for r in found], [r.degrees for r in found])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "gated"])
def test_errors_hold_after_a_stop_at_the_tolerance(name: str) -> None:
    torch.manual_seed(3)
    if name == "gated":
        model: nn.Module = Gated().double().eval()
        x, y = torch.randn(6, 1, 4, 4).double(), torch.arange(6) % 3
    else:
        layers = nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 6), nn.GELU(), nn.Linear(6, 3)
        model = nn.Sequential(*layers).double()
        x, y = torch.randn(12, 8).double(), torch.arange(12) % 3
        x[:2] *= 4
    truth = float(Dense(model, x, y).hessian.trace())
    found = [sf.trace(model, (x, y), seed=seed, tolerance=0.2) for seed in range(200)]
    holds([r.total - truth for r in found], [r.stderr for r in found], [r.degrees for r in found])
