"""Ways in which a measure could be wrong in silence."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from dense import Dense
from torch import Tensor, nn

import saltflat as sf
from saltflat.errors import NegativeCurvature
from saltflat.measures import NormalizedSharpness, PaperRecipe, RelativeFlatness
from saltflat.symmetries import least_trace


def data(n: int = 9) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, 4, generator=g, dtype=torch.float64)
    return x, torch.randint(3, (n,), generator=g)


def net(*extra: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), *extra, nn.ReLU(), nn.Linear(5, 3)).double().eval()


class Sum(nn.Module):
    """A shortcut beside a hidden layer that sleeps on negative inputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.h, self.c = nn.Linear(4, 3), nn.Linear(4, 5), nn.Linear(5, 3)
        self.double()
        self.h.weight.data.abs_()
        self.h.bias.data.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.c(torch.relu(self.h(x)))


def test_the_last_linear_may_sleep_on_the_first_batch() -> None:
    x, y = data()
    x[:4], x[4:] = -x[:4].abs(), x[4:].abs()
    for batches in ([(x[:4], y[:4]), (x[4:], y[4:])], (x, y)):
        found = sf.measure(Sum(), batches, measures=["relative_flatness"])["relative_flatness"]
        assert found.details["layer"] == "c"
    assert found.value > 0
    dead = Sum()
    dead.h.bias.data.fill_(-100)
    found = sf.measure(dead, (x, y), measures=["relative_flatness"])["relative_flatness"]
    assert (found.details["layer"], found.value) == ("c", 0.0)


def test_a_network_of_zeros_has_limits_and_no_nan() -> None:
    model = net()
    for p in model.parameters():
        p.data.zero_()
    report = sf.measure(model, data(), measures="all")
    for name, m in report.items():
        assert m.value == m.value, name
    assert report["relative_flatness"].value == 0.0
    assert report["normalized_sharpness"].value == 0.0


def test_one_measure_that_fails_does_not_take_the_others_along() -> None:
    x, y = data()
    batches = [(x[:8], y[:8]), (x[8:], y[8:])]
    report = sf.measure(net(nn.BatchNorm1d(5)), batches, measures="all")
    assert "BatchNorm sees one value a channel in batch 1" in report.skipped["bn_sharpness"]
    assert report["hessian_trace"].exact


def test_ignored_samples_do_not_count() -> None:
    x, y = data()
    padded = torch.cat([x, x]), torch.cat([y, torch.full_like(y, -100)])
    plain, more = (sf.measure(net(), each, measures="all") for each in ((x, y), padded))
    for name in plain:
        assert more[name].value == pytest.approx(plain[name].value, rel=1e-6), name


def test_views_that_are_estimates_are_named() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 3)).double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        few = sf.Hutchinson(probes=10)  # fewer than entries, so that there is an estimate
        measures = [RelativeFlatness(by_layer=True)]
        report = sf.measure(model, data(), measures=measures, estimator=few)
    found = report["relative_flatness"]
    assert found.exact
    assert "by_layer holds estimates for 0" in found.notes


def test_no_advice_that_does_not_help() -> None:
    """A loss that does not change at all is not rounded, and float64 is wide already."""
    model = net()
    model[2].weight.data *= 1e4
    x, _ = data()
    report = sf.measure(model, (x, model(x).argmax(1)), measures=["sam_sharpness"])
    assert "dtype=torch.float64" not in str(report)


def test_a_strategy_survives_a_file_and_promises_no_invariance(tmp_path: Path) -> None:
    recipe = NormalizedSharpness(strategy=PaperRecipe(draws=4, steps=5))
    report = sf.measure(net(), data(), measures=[recipe])
    loaded = sf.Report.load(report.save(tmp_path / "report.json"))
    assert loaded["normalized_sharpness"] == report["normalized_sharpness"]
    assert not report.compare(loaded).problems
    assert report["normalized_sharpness"].invariant_to == frozenset()


def test_what_samples_share_is_part_of_the_data() -> None:
    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = net()

        def forward(self, x: Tensor, shift: Tensor) -> Tensor:
            return self.body(x + shift)

    x, y = data()
    hashes = set()
    for shift in (0.0, 1.0):
        inputs = (x, torch.full((4,), shift, dtype=torch.float64))
        report = sf.measure(Shift(), (inputs, y), measures=["hessian_trace"])
        hashes.add(report.provenance.data_hash)
    assert len(hashes) == 2


def test_balance_says_what_it_cannot_do() -> None:
    model = net(nn.BatchNorm1d(5))
    group = sf.symmetries(model, data()[0])
    with pytest.warns(UserWarning, match="only approached"):
        group.balance(model, data())


def test_small_smooth_blocks_are_written_out() -> None:
    """51 entries need 51 products; 100 probes would cost more and be less."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    x, y = data()
    truth = Dense(model, x, y)
    want = {n: b.diagonal() for n, b in truth.blocks(truth.hessian).items()}
    found = sf.diagonal(model, (x, y))
    assert found.exact
    assert found.details["0.weight"].rule == "products"
    for name, values in want.items():
        torch.testing.assert_close(found[name].flatten(), values, rtol=1e-10, atol=1e-12)
    few = sf.diagonal(model, (x, y), estimator=sf.Hutchinson(probes=20))
    assert not few.exact


def test_every_measure_of_a_small_smooth_network() -> None:
    """All that is wanted of it at once; what was written out is exact and says so."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = sf.measure(model, data(), measures="all")
    assert all(m.exact or m.lower_bound for m in report.values())
    assert "written out" in str(report)


def test_noise_below_zero_is_not_negative_curvature() -> None:
    """Estimates within their error of zero are allowed, by name; clearly negative ones are not."""
    group = sf.symmetries(net(), data()[0])
    curvature = {n: torch.ones_like(p) for n, p in net().named_parameters()}
    curvature["0.weight"].zero_()
    curvature["0.bias"] = torch.tensor([-0.1, 1, 1, 1, 1], dtype=torch.float64)
    with pytest.raises(NegativeCurvature, match=r"0\.bias"):
        least_trace(group, curvature)
    noise = {"0.bias": torch.full((5,), 0.05, dtype=torch.float64)}
    assert "0.bias" in least_trace(group, curvature, noise).negative
    with pytest.raises(NegativeCurvature):
        least_trace(group, curvature, {"0.bias": noise["0.bias"] / 10})


def test_a_gauss_newton_report_says_so() -> None:
    measures = ["hessian_trace"]
    assert "Gauss–Newton" in str(sf.measure(net(), data(), measures=measures, curvature="ggn"))
    assert "Gauss–Newton" not in str(sf.measure(net(), data(), measures=measures))


def test_errors_of_one_estimate_agree() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 20), nn.GELU(), nn.Linear(20, 3)).double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = sf.measure(model, data(), measures=["hessian_trace"])["hessian_trace"]
        trace = sf.trace(model, data())
    assert whole.value == pytest.approx(trace.total, rel=1e-12)
    assert whole.stderr == pytest.approx(trace.stderr, rel=1e-9)


def test_wide_comparisons_stay_readable() -> None:
    models = {f"model_number_{i}": net() for i in range(8)}
    text = str(sf.compare(models, data(), measures=["neuronwise_minimum_sharpness", "rho"]))
    for name in (*models, "neuronwise_minimum_sharpness", "every rescaling"):
        assert name in text


def test_clear_errors() -> None:
    with pytest.raises(sf.InvalidType, match=r"is a class.*CrossEntropyLoss\(\)"):
        sf.measure(net(), data(), nn.CrossEntropyLoss)
    with pytest.raises(sf.InvalidType, match="cannot be run on the inputs"):
        sf.symmetries(net(), 3)
    broken = net()
    broken[0].weight.data[0, 0] = torch.nan
    with pytest.raises(sf.ModelError, match=r"0\.weight.*NaN"):
        sf.symmetries(broken, data()[0])
