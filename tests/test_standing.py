"""Where a model stands: its loss, its accuracy, and whether it is at a minimum."""

from __future__ import annotations

import json
import sys
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import BY_NAME
from torch import Tensor, nn
from untouched import assert_untouched, dressed, fingerprint

import saltflat as sf
from saltflat.landscape import RiskSurface, descend
from saltflat.losses import resolve
from saltflat.risk import Risk

CASE = BY_NAME["mlp"]


def standing(model: nn.Module, data: Any, loss: Any = "cross_entropy", **options: Any) -> Any:
    report = sf.measure(model, data, loss, measures=["hessian_trace"], **options)
    assert report.standing is not None, report.notes
    return report.standing


def classes(n: int = 40, width: int = 5, count: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, width, generator=generator, dtype=torch.float64)
    return x, torch.randint(count, (n,), generator=generator)


def network(width: int = 5, count: int = 3, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(width, 6), nn.ReLU(), nn.Linear(6, count)).double()


def fitted(model: nn.Module, data: Any, loss: Any = F.cross_entropy, steps: int = 60) -> nn.Module:
    x, y = data
    optimizer = torch.optim.LBFGS(
        model.parameters(), max_iter=steps * 10, tolerance_grad=1e-10, tolerance_change=1e-14
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(model(x), y)
        value.backward()
        return value

    optimizer.step(closure)
    return model


SEQUENCES = torch.randn(4, 7, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
LABELS = torch.arange(28).reshape(4, 7) % 3
SOME = LABELS.clone()
SOME[:, 5:] = -100
SOFT = torch.rand(40, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
LOSSES: dict[str, tuple[Any, Tensor]] = {
    "classes": (nn.CrossEntropyLoss(), classes()[1]),
    "weights": (nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 3.0]).double()), classes()[1]),
    "smoothed": (nn.CrossEntropyLoss(label_smoothing=0.2), classes()[1]),
    "both": (
        nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1, 3]).double(), label_smoothing=0.2),
        classes()[1],
    ),
    "sum": (nn.CrossEntropyLoss(reduction="sum"), classes()[1]),
    "soft": (nn.CrossEntropyLoss(), SOFT / SOFT.sum(1, keepdim=True)),
    "ignored": (nn.CrossEntropyLoss(ignore_index=0), classes()[1]),
    "mse": (nn.MSELoss(), SOFT),
    "bce": (nn.BCEWithLogitsLoss(), SOFT.round()),
}


@pytest.mark.parametrize("name", LOSSES)
def test_loss_gradient_and_chance(name: str) -> None:
    """Against torch; the chance level against a search over constant outputs."""
    loss, y = LOSSES[name]
    x, model = classes()[0], network()
    found = standing(model, [(x[:25], y[:25]), (x[25:], y[25:])], loss)
    value = loss(model(x), y)
    gradient = torch.autograd.grad(value, list(model.parameters()))
    assert found.loss == pytest.approx(value.item(), rel=1e-12)
    norm = torch.cat([g.flatten() for g in gradient]).norm()
    assert found.gradient_norm == pytest.approx(float(norm), rel=1e-12)
    constant = nn.Linear(1, 3, bias=False).double()
    fitted(constant, (torch.ones(len(y), 1).double(), y), loss)
    best = loss(constant(torch.ones(len(y), 1).double()), y).item()
    assert found.chance == pytest.approx(best, rel=1e-7)


@pytest.mark.parametrize("cuts", [[40], [1, 39], [13, 13, 14]])
def test_chance_of_targets_far_from_zero(cuts: list[int]) -> None:
    """Σ y² − (Σ y)²/n would leave no digit of it; the oracle's are integers, which are exact."""
    x, _ = classes()
    steps = torch.arange(40) % 4
    y = (10**9 + steps).double()[:, None]
    assert y.square().sum() - y.sum().square() / 40 != pytest.approx(50, rel=0.1)
    data = list(zip(x.split(cuts), y.split(cuts), strict=True))
    found = standing(nn.Linear(5, 1).double(), data, "mse")
    exact = Fraction(int((steps**2).sum()), 40) - Fraction(int(steps.sum()), 40) ** 2
    assert found.chance == pytest.approx(float(exact), rel=1e-7)  # the mean has 16 digits


@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_of_every_sample(name: str) -> None:
    loss, y = LOSSES[name]
    outputs = network()(classes()[0])
    ours = resolve(loss)
    each = ours.each(outputs, y)
    assert each.sum().item() == pytest.approx(ours.total(outputs, y).item(), rel=1e-12)
    one = [ours.total(outputs[k : k + 1], y[k : k + 1]) for k in range(len(y))]
    torch.testing.assert_close(each, torch.stack(one), rtol=1e-12, atol=1e-14)
    found = standing(network(), (classes()[0], y), loss).sampling
    if name in ("weights", "both", "sum", "ignored"):
        assert found is None
    else:
        share = ours.normaliser(outputs, y) / len(y)
        assert found == pytest.approx(each.std().item() / share / len(y) ** 0.5, rel=1e-9)


def test_samples_that_count_unlike_have_no_sampling_error() -> None:
    loss = resolve(nn.CrossEntropyLoss())
    assert loss.evenly(SEQUENCES.mT, LABELS)
    assert not loss.evenly(SEQUENCES.mT, SOME)
    likelihood = resolve(nn.NLLLoss())
    assert likelihood.evenly(SEQUENCES.mT, LABELS)
    assert not likelihood.evenly(SEQUENCES.mT, SOME)
    # Batches of sequences of other lengths, each of which is even.
    model = nn.Linear(3, 3).double()
    both = [(SEQUENCES, LABELS), (SEQUENCES[:, :4], LABELS[:, :4])]
    assert standing(model, both).sampling is None
    assert standing(model, both[:1]).sampling is not None


def test_samples_that_depend_on_one_another_have_no_sampling_error() -> None:
    layers = network()
    layers.insert(1, nn.BatchNorm1d(6, track_running_stats=False).double())
    assert standing(layers, classes()).sampling is None
    assert standing(network(), classes()).sampling is not None


def test_accuracy() -> None:
    x, y = classes()
    model = network()
    right = float((model(x).argmax(1) == y).double().mean())
    assert standing(model, (x, y)).accuracy == pytest.approx(right)
    assert standing(model, (x, y), "normalized_cross_entropy").accuracy == pytest.approx(right)
    tail = nn.Sequential(model, nn.LogSoftmax(1))
    assert standing(tail, (x, y), nn.NLLLoss()).accuracy == pytest.approx(right)
    assert standing(model, (x, SOFT), "mse").accuracy is None
    assert standing(model, (x, LOSSES["soft"][1])).accuracy is None
    assert standing(model, (x, y), lambda o, t: F.cross_entropy(o, t)).accuracy is None
    positions = nn.Linear(3, 3).double()
    named = positions(SEQUENCES).argmax(2)
    kept = SOME != -100
    right = float((named == SOME)[kept].double().mean())
    assert standing(positions, (SEQUENCES, SOME)).accuracy == pytest.approx(right)


def test_a_minimum_is_one_and_its_surroundings_are_not() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 4, generator=generator, dtype=torch.float64)
    y = torch.randn(50, 1, generator=generator, dtype=torch.float64)
    model = nn.Linear(4, 1).double()
    both = torch.cat([x, torch.ones(50, 1).double()], 1)
    best = torch.linalg.lstsq(both, y).solution
    with torch.no_grad():
        model.weight.copy_(best[:4].mT)
        model.bias.copy_(best[4])
    found = standing(model, (x, y), "mse")
    assert found.minimum
    assert found.decrease < 1e-12
    assert found.word == "stationary"
    assert found.verdict.startswith("a stationary point, perhaps a minimum: the gradient vanishes")
    assert not found.above_chance
    with torch.no_grad():
        model.weight += 0.5
    away = standing(model, (x, y), "mse")
    assert not away.minimum
    assert away.verdict.startswith("not a minimum: a step downhill lowers the loss by ")
    # It was seen, so there is that much to gain at least.
    assert 0 < away.decrease <= away.loss - found.loss + 1e-12


def test_an_untrained_network_is_no_minimum_and_at_chance() -> None:
    """Its loss is nearly that of constants, so that little of it is lost by a step."""
    x, y = classes(200)
    shy = network()
    with torch.no_grad():
        shy[2].weight *= 0.1
        shy[2].bias.zero_()
    found = standing(shy, (x, y))
    assert found.above_chance
    assert "at or above chance level" in found.verdict
    trained = standing(fitted(network(), (x, y), steps=200), (x, y))
    assert trained.minimum
    assert not trained.above_chance
    diverged = network()
    with torch.no_grad():
        diverged[2].weight *= 100
    assert standing(diverged, (x, y)).above_chance
    assert not standing(diverged, (x, y)).minimum


def test_one_class_leaves_nothing_to_chance() -> None:
    x, _ = classes()
    found = standing(network(), (x, torch.zeros(len(x), dtype=torch.int64)))
    assert found.chance == 0
    assert not found.above_chance


def test_fitted_data_are_near_a_minimum_though_cross_entropy_has_none() -> None:
    x = torch.eye(6).double()
    model = nn.Linear(6, 6).double()
    with torch.no_grad():
        model.weight.copy_(12 * torch.eye(6) - 1)
        model.bias.fill_(0.1)
    found = standing(model, (x, torch.arange(6)))
    assert found.share > 0.1
    assert found.minimum
    share = 100 * found.decrease / found.chance
    assert found.verdict.startswith(
        f"nearly a minimum: a step downhill lowers the loss by {100 * found.share:.2g} %, which is "
        f"{share:.2g} % of the chance level"
    )


@pytest.mark.parametrize("name", ["mlp", "residual"])
def test_a_rescaled_twin_stands_alike(name: str) -> None:
    case = BY_NAME[name]
    model = case.model()
    data = case.data()
    twin = sf.symmetries(model, data[0]).random(seed=1, spread=30.0)(model)
    one, two = (standing(m, data, case.loss) for m in (model, twin))
    assert one.decrease == pytest.approx(two.decrease, rel=1e-6)
    assert one.gradient_norm != pytest.approx(two.gradient_norm, rel=0.1)
    assert one.same_function(two, 1e-10)
    torch.manual_seed(0)
    with torch.no_grad():
        next(iter(twin.parameters())).mul_(1.001)
    assert not one.same_function(standing(twin, data, case.loss), 1e-10)


def test_parameters_that_are_zero_do_not_hide_a_slope() -> None:
    """The first product of an adapter is 0, and the other has no gradient then."""

    class Adapter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.randn(2, 5).double())
            self.b = nn.Parameter(torch.zeros(3, 2).double())

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.a.mT @ self.b.mT

    x, _ = classes()
    assert standing(Adapter(), (x, x[:, :3].argmax(1))).decrease > 0.01


def test_weights_that_are_all_zero_do_not_hide_a_slope() -> None:
    """Only the bias, which is nearly where it should be, was followed."""
    x, _ = classes()
    y = x.sum(1).gt(0).long()
    model = network(count=2)
    with torch.no_grad():
        model[2].weight.zero_()
        model[2].bias.copy_(torch.bincount(y).double().log() + 1e-3)
    found = standing(model, (x, y))
    assert found.word == "no"
    assert found.decrease > 0.1 * found.loss


def test_a_saddle_at_zero_is_no_minimum() -> None:
    """Of (ab − 1)² the gradient vanishes at a = b = 0, and the curvature is −2 along a = b."""

    class Chain(nn.Module):
        def __init__(self, at: float) -> None:
            super().__init__()
            self.a, self.b = (nn.Parameter(torch.full((1, 1), at).double()) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.a @ self.b

    ones = torch.ones(8, 1).double()
    saddle = standing(Chain(0.0), (ones, ones), "mse")
    assert saddle.gradient_norm == 0
    assert saddle.word == "no"
    assert saddle.decrease > 0.1
    fit = standing(Chain(1.0), (ones, ones), "mse")
    assert (fit.word, fit.gradient_norm) == ("yes", 0)  # nothing is below 0


@pytest.mark.parametrize("depth", [2, 3])
def test_zero_weights_at_chance_are_not_shown_to_be_a_minimum(depth: int) -> None:
    """Symmetry holds all weights of a deep network at 0, where it does no better than constants."""
    x, y = classes()
    widths = [5, *[6] * (depth - 1), 3]
    layers = [nn.Sequential(nn.ReLU(), nn.Linear(a, b)) for a, b in pairwise(widths)]
    model = nn.Sequential(*layers).double()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
        model[-1][1].bias.copy_(torch.bincount(y).double().log())
    found = standing(model, (x, y))
    assert found.gradient_norm < 1e-12
    assert not found.minimum
    assert found.word == "not shown"
    assert found.verdict.startswith("not shown to be a minimum: ")
    assert found.verdict.endswith(f"at or above chance level, {found.chance:.4g}")
    # Where it does better than that and the gradient vanishes, it may be one.
    trained = standing(fitted(network(), (x, y), steps=200), (x, y))
    assert trained.minimum


def test_logits_whose_squares_overflow_are_followed() -> None:
    x, y = classes()
    model = nn.Linear(5, 3)
    with torch.no_grad():
        model.weight *= 1e25
    assert standing(model, (x.float(), y)).word == "no"


def test_without_a_number_it_is_not_called_a_minimum(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient that is NaN, and losses that overflow wherever one goes."""
    risk = Risk(network(), classes(), "cross_entropy")
    with risk.session():
        surface = RiskSurface(risk, list(risk.parameters))
        loss, gradient = surface.gradient(dtype=None)
        monkeypatch.setattr(surface, "value", lambda v, overflow: float("nan"))
        with pytest.raises(sf.DataError, match="overflows at every place"):
            descend(surface)
        gradient["0.bias"][0] = float("nan")
        monkeypatch.setattr(surface, "gradient", lambda dtype: (loss, gradient))
        with pytest.raises(sf.DataError, match="gradient's norm is nan"):
            descend(surface)


def test_probabilities_are_noticed() -> None:
    x, y = classes()
    tail = nn.Sequential(network(), nn.Softmax(1))
    report = sf.measure(tail, (x, y), measures=["fisher_rao_norm"])
    assert any("probabilities already" in note for note in report.notes)
    logs = sf.measure(tail, (x, y), measures=["fisher_rao_norm"], output=lambda p: p.log())
    assert not any("probabilities" in note for note in logs.notes)
    sigmoid = nn.Sequential(network(), nn.Sigmoid())
    plain = sf.measure(sigmoid, (x, y), measures=["fisher_rao_norm"])
    assert not any("probabilities" in note for note in plain.notes)


def test_it_is_cheap_and_leaves_the_model_alone() -> None:
    model = dressed(CASE.model())
    before = fingerprint(model)
    report = sf.measure(model, CASE.data(), measures=["hessian_trace"])
    assert_untouched(model, before)
    assert 1 < report.provenance.gradients["standing"] <= 3
    own = sf.measure(model, CASE.data(), F.cross_entropy, measures=["hessian_trace"])
    assert own.provenance.gradients["standing"] <= 3

    def joint(o: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(o, y).square()

    with pytest.warns(UserWarning, match="estimated"):
        squared = sf.measure(
            model, CASE.data(), joint, measures=["hessian_trace"], estimator=sf.Hutchinson(4)
        )
    assert squared.standing is not None
    loss = F.cross_entropy(model.eval()(CASE.data()[0]), CASE.data()[1])
    assert squared.standing.loss == pytest.approx(loss.item() ** 2)
    assert squared.standing.chance is squared.standing.sampling is None


def test_it_can_be_left_out() -> None:
    steps: list[str] = []
    report = sf.measure(
        CASE.model(),
        CASE.data(),
        measures=["rho"],
        standing=False,
        progress=lambda step, *_: steps.append(step),
    )
    assert report.standing is None
    assert "standing" not in report.provenance.gradients
    assert steps == ["curvature", "rho", "done"]
    assert "minimum" not in str(report)


def test_the_measured_parameters_alone() -> None:
    model, (x, y) = network(), classes()
    found = standing(model, (x, y), parameters=["2.bias"])
    (gradient,) = torch.autograd.grad(F.cross_entropy(model(x), y), [model[2].bias])
    assert found.gradient_norm == pytest.approx(float(gradient.norm()))


def test_losses_that_overflow_nearby() -> None:
    """The first step may be far too long; what is not finite is no decrease."""

    def steep(o: Tensor, y: Tensor) -> Tensor:
        return ((o - y).double() ** 2).mul(300).exp().mean()

    model = nn.Linear(1, 1, bias=False).double()
    with torch.no_grad():
        model.weight.fill_(1.0)
    x = torch.linspace(0.9, 1, 8).reshape(8, 1).double()
    found = standing(model, (x, x + 0.01), steep)
    assert 0 <= found.decrease <= found.loss


def test_it_is_saved_and_older_reports_have_none(tmp_path: Path) -> None:
    report = sf.measure(CASE.model(), CASE.data(), measures=["hessian_trace"])
    path = report.save(tmp_path / "run.json")
    assert sf.Report.load(path).standing == report.standing
    content = json.loads(path.read_text())
    del content["standing"]
    path.write_text(json.dumps(content))
    old = sf.Report.load(path)
    assert old.standing is None
    assert "minimum:" not in str(old)


def test_a_standing_that_cannot_be_had_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("out of luck\nand more")

    monkeypatch.setattr(sys.modules["saltflat.measure"], "standing_of", fail)
    report = sf.measure(CASE.model(), CASE.data(), measures=["hessian_trace"])
    assert report.standing is None
    assert "whether this is a minimum is not known: out of luck" in report.notes
