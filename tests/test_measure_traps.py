"""Ways in which a measure could be wrong in silence."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import saltflat as sf
from saltflat.measures import NormalizedSharpness, PaperRecipe


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
    report = sf.measure(model, data())
    for name, m in report.items():
        assert m.value == m.value, name
    assert report["relative_flatness"].value == 0.0
    assert report["normalized_sharpness"].value == 0.0


def test_one_measure_that_fails_does_not_take_the_others_along() -> None:
    x, y = data()
    report = sf.measure(net(nn.BatchNorm1d(5)), [(x[:8], y[:8]), (x[8:], y[8:])])
    assert "BatchNorm sees one value a channel in batch 1" in report.skipped["bn_sharpness"]
    assert report["hessian_trace"].exact


def test_ignored_samples_do_not_count() -> None:
    x, y = data()
    padded = torch.cat([x, x]), torch.cat([y, torch.full_like(y, -100)])
    plain, more = sf.measure(net(), (x, y)), sf.measure(net(), padded)
    for name in plain:
        assert more[name].value == pytest.approx(plain[name].value, rel=1e-6), name


def test_views_that_are_estimates_are_named() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 3)).double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = sf.measure(model, data(), measures=["relative_flatness"])["relative_flatness"]
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
