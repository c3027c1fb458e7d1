"""The experiments of "A reparameterization-invariant flatness measure" (Petzka et al., 2019)."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import inf, isnan, nan

import numpy as np
import pytest
import torch
from torch import nn

from saltflat.datasets import Data
from saltflat.errors import ModelError
from saltflat.papers import EXPERIMENTS, correlations, reproduce
from saltflat.papers.reparameterization import figure_1, figure_3, minima
from saltflat.papers.reparameterization.product import with_products
from saltflat.sweep import Run, train_together
from saltflat.zoo import lenet5

CPU = torch.device("cpu")
FIRST, THIRD = (EXPERIMENTS[f"reparameterization/figure-{n}"] for n in (1, 3))


def made_up(shape: tuple[int, ...], count: int = 24) -> Data:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(2 * count, *shape, generator=generator) * 2 - 1
    y = torch.randint(10, (2 * count,), generator=generator)
    return Data(x[:count], y[:count], x[count:], y[count:])


@pytest.fixture
def tiny(monkeypatch):
    """Both experiments on a few random images, of which they are asked for by name."""
    data = {"cifar10": made_up((3, 32, 32)), "mnist": made_up((1, 28, 28))}
    for module in (figure_1, figure_3):
        monkeypatch.setattr(module, "images", lambda name, train, test, device: data[name])
    return data


def few(experiment, **changed):
    """Two networks that are trained together, for a moment."""
    some = [s for s in experiment.runs("small") if s["seed"] < 2][:2]
    return [{**s, "measured": 8, "epochs": 1, "batch": 4, **changed} for s in some]


def test_what_is_run():
    full = FIRST.runs("full")
    assert Counter(s["batch"] for s in full) == {4: 36, 32: 36, 64: 36, 512: 36}
    assert len({s["start"] for s in full}) == 4
    assert len({s["seed"] for s in full}) == 9
    assert FIRST.together is not None
    assert len({FIRST.together(s) for s in full}) == 4
    assert FIRST.most == 36
    assert Counter(s["batch"] for s in THIRD.runs("full")) == dict.fromkeys(figure_3._RATES, 10)
    for experiment in (FIRST, THIRD):
        assert len({s["seed"] for s in experiment.runs("small")}) == 3


def test_learning_rates_keep_their_ratio_to_the_batch_size_in_figure_3():
    for rates in (figure_3._RATES, figure_3._SMALL):
        ratios = [rate / batch for batch, rate in rates.items()]
        np.testing.assert_allclose(ratios, ratios[0])


def test_products_compute_convolutions():
    torch.manual_seed(0)
    model, x = lenet5(channels=3).double(), torch.randn(2, 3, 32, 32, dtype=torch.float64)
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    found = torch.autograd.grad(with_products(model)(x).square().sum(), list(model.parameters()))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_other_convolutions_are_refused():
    with pytest.raises(ModelError, match="plain"):
        with_products(nn.Sequential(nn.Conv2d(1, 1, 3, padding=1)))


def test_an_ensemble_of_products_trains_the_convolutions():
    data = made_up((3, 32, 32))
    x, y = data.train_x.double(), data.train_y
    torch.manual_seed(0)
    models = [lenet5(channels=3).double() for _ in range(2)]
    alone = lenet5(channels=3).double()
    alone.load_state_dict(models[1].state_dict())
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9)
    batches = torch.arange(24).view(3, 1, 8).expand(3, 2, 8)
    for batch in batches[:, 1]:
        optimizer.zero_grad()
        nn.functional.cross_entropy(alone(x[batch]), y[batch]).backward()
        optimizer.step()
    members = [with_products(model) for model in models]
    labels = y.expand(2, -1)
    train_together(members, x, labels, batches.__getitem__, 3, lr=lambda t: 0.05, momentum=0.9)
    for one, other in zip(models[1].parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_figure_1_measures_what_the_paper_defines(tiny):
    outcomes = FIRST.work(few(FIRST), CPU)
    outcome = outcomes[0]
    for name in ("kappa", "kappa_trace"):
        assert outcome[f"{name}_moved"] == pytest.approx(outcome[name], rel=1e-6)
    # The control: without the norm both move by the square of one factor from [5, 25].
    for name in ("trace", "eigenvalue"):
        assert 25 <= outcome[f"{name}_moved"] / outcome[name] <= 625
    assert outcome["gap"] == outcome["test_loss"] - outcome["train_loss"]
    assert outcomes[0]["kappa"] != outcomes[1]["kappa"]


def test_the_fifth_layer_against_its_hessian_written_out():
    torch.manual_seed(0)
    model = lenet5(channels=3).double()
    x, y = torch.randn(6, 3, 32, 32, dtype=torch.float64), torch.arange(6)
    features, last = model[:-1](x).detach(), model[-1]

    def loss(weight):
        return nn.functional.cross_entropy(features @ weight.T + last.bias, y)

    weight = last.weight.detach()
    hessian = torch.autograd.functional.hessian(loss, weight).reshape(840, 840)
    found, norm = figure_1._measured(model, x, y), float(weight.square().sum())
    assert found["kappa_trace"] == pytest.approx(norm * float(hessian.trace()))
    assert found["kappa"] == pytest.approx(norm * float(torch.linalg.eigvalsh(hessian)[-1]))


def test_factors_do_not_depend_on_what_is_trained_beside(tiny):
    both, alone = FIRST.work(few(FIRST), CPU)[1], FIRST.work(few(FIRST)[1:], CPU)[0]
    assert both["trace_moved"] == pytest.approx(alone["trace_moved"], rel=1e-5)


@pytest.mark.parametrize("experiment", [FIRST, THIRD])
def test_a_network_that_diverges_is_kept(tiny, experiment):
    outcome = experiment.work(few(experiment, lr=1e30)[:1], CPU)[0]
    assert outcome["collapsed"]
    assert np.isnan(outcome["kappa_trace_4" if experiment is THIRD else "kappa"])


def test_neurons_rescaled_move_kappa_but_not_rho(tiny):
    outcome = THIRD.work(few(THIRD), CPU)[0]
    for name in ("rho_max", "rho_sum", "rho_sum_2", "rho_max_4"):
        assert outcome[f"{name}_moved"] == pytest.approx(outcome[name], rel=1e-6)
    assert outcome["kappa_trace_sum_moved"] != pytest.approx(outcome["kappa_trace_sum"], rel=0.01)
    layers = [outcome[f"kappa_trace_{layer}"] for layer in (1, 2, 3, 4)]
    assert outcome["kappa_trace_sum"] > sum(layers)  # the fifth layer is part of the network
    assert outcome["kappa_trace_max"] >= max(layers)


REACHED = {"train_loss": 0.01, "train_accuracy": 1.0, "collapsed": 0.0}


def invented(experiment, shuffled: bool = False) -> list[Run]:
    """Networks whose gap is the logarithm of every measure."""
    settings = experiment.runs("full")
    names = experiment_names(experiment)
    values = np.geomspace(1, 100, len(settings))
    gaps = np.log(values)
    if shuffled:
        gaps = np.random.default_rng(0).permutation(gaps)
    return [
        Run(each, dict.fromkeys(names, value) | {"gap": gap, **REACHED})
        for each, value, gap in zip(settings, values, gaps, strict=True)
    ]


def experiment_names(experiment) -> list[str]:
    names = [*figure_1._SYMBOLS, "kappa_trace_fourth"] if experiment is FIRST else figure_3._ALL
    return [*names, *(f"{name}_moved" for name in names)]


@pytest.mark.parametrize("experiment", [FIRST, THIRD])
def test_rows_and_picture_of_known_numbers(experiment, tmp_path, monkeypatch):
    monkeypatch.setattr(correlations, "_DRAWS", 20)
    table = {row.what: row for row in experiment.rows(invented(experiment))}
    ranks = [row for what, row in table.items() if what.startswith("Spearman")]
    assert ranks
    assert all(row.ours == pytest.approx(1) for row in ranks)
    control = [r for r in experiment.rows(invented(experiment, True)) if r.what.startswith("Spear")]
    assert all(abs(row.ours) < 0.3 for row in control)
    assert all(row.ours == 0 for what, row in table.items() if what.startswith("largest"))
    experiment.draw(invented(experiment)).savefig(tmp_path / "figure.png")


def test_training_error_is_read_in_two_ways(monkeypatch):
    """A loss above 0.07, with which few images are wrong, and many wrong images."""
    monkeypatch.setattr(correlations, "_DRAWS", 20)
    runs = invented(THIRD)
    far = {"train_loss": 0.2, "train_accuracy": 0.95}, {"train_loss": 0.2, "train_accuracy": 0.9}
    for k, change in enumerate(far):
        runs[k] = replace(runs[k], outcome={**runs[k].outcome, **change})
    table = {row.what: row for row in THIRD.rows(runs)}
    assert table["training loss above 0.07, left out"].ours == 2
    assert table["wrong training images above 0.07, left out"].ours == 1
    assert "38 networks" in table["Pearson, κ_τ of layer 1 and gap"].note
    by_images = table["Pearson, κ_τ of layer 1 and gap, at most 0.07 of the training images wrong"]
    assert "39 networks" in by_images.note
    assert by_images.published == 0.7


def test_a_change_that_cannot_be_measured_is_told():
    def change(*pairs):
        runs = [Run({}, {"a": before, "b": after}) for before, after in pairs]
        return minima.largest_change(runs, "a", "b")

    assert change((2.0, 3.0), (4.0, 4.0), (0.0, 0.0), (nan, nan)) == 0.5
    assert change((2.0, inf), (2.0, 3.0)) == inf
    assert change((0.0, 1e-9), (2.0, 3.0)) == inf
    for pairs in ([(2.0, 3.0), (2.0, nan)], [(2.0, nan), (2.0, 3.0)], [(0.0, 0.0)], []):
        assert isnan(change(*pairs))


def test_networks_that_have_collapsed_are_drawn():
    """Their measures are 0, for which a logarithmic axis has no place."""
    runs = invented(FIRST)
    names = dict.fromkeys(experiment_names(FIRST), 0.0)
    for k in (3, 140):
        runs[k] = replace(runs[k], outcome={**runs[k].outcome, **names, "collapsed": 1.0})
    figure = FIRST.draw(runs)
    for axes, others in zip(figure.axes, (142, 142, 284, 284), strict=True):
        points = np.concatenate([p.get_offsets() for p in axes.collections])
        (low, high), inside = axes.get_xlim(), points[:, 0]
        assert len(points) == others + 2
        assert ((inside > low) & (inside < high)).all()
        shown = [tick for tick in axes.get_xticks() if low < tick < high]
        assert len(shown) >= 2  # numbers, by which the axis is read


def test_the_published_number_and_the_filter(monkeypatch):
    monkeypatch.setattr(correlations, "_DRAWS", 20)
    table = {row.what: row for row in FIRST.rows(invented(FIRST))}
    assert table["Pearson, κ_τ⁵ = ‖w₅‖² Tr H₅ and gap"].published == 0.91
    runs = invented(THIRD)
    runs[0] = replace(runs[0], outcome={**runs[0].outcome, "train_loss": 0.08})
    runs[1] = replace(runs[1], outcome={**runs[1].outcome, "train_loss": float("nan")})
    table = {row.what: row for row in THIRD.rows(runs)}
    assert table["training loss above 0.07, left out"].ours == 2
    assert "38 networks" in table["Spearman, ρ^Σ and gap"].note


@pytest.mark.parametrize(
    ("losses", "note"),
    [
        ([nan, nan, nan], "0 of 3 networks, the others diverged"),
        ([0.5, nan, nan], "1 of 3 networks, the others diverged"),
        ([0.5, 0.5, nan], "2 of 3 networks, the others diverged"),
        ([0.5, 0.5, 0.5], ""),
    ],
)
def test_training_losses_tell_of_networks_that_diverged(losses, note):
    (row,) = minima.reached([Run({"batch": 4}, {"train_loss": loss}) for loss in losses])
    assert row.note == note
    assert row.ours == 0.5 or isnan(losses[0])


def test_what_is_done_is_not_done_again(tiny, tmp_path):
    calls = []

    def work(settings, device):
        calls.append(len(settings))
        return THIRD.work(settings, device)

    two = replace(THIRD, runs=lambda size: few(THIRD), work=work)
    once = reproduce(two, folder=tmp_path, progress=False)
    again = reproduce(two, folder=tmp_path, progress=False)
    assert calls == [1, 1]  # on a CPU, where a kill then loses one
    assert len(once.runs) == len(again.runs) == 2


@pytest.mark.slow
@pytest.mark.parametrize("experiment", [FIRST, THIRD])
def test_the_small_size(experiment, tmp_path):
    result = reproduce(experiment, "small", folder=tmp_path, progress=False)
    moved = {row.what: row.ours for row in result.rows if row.what.startswith("largest")}
    invariant = ("κ_τ⁵", "κ⁵") if experiment is FIRST else ("ρ^max", "ρ^Σ")
    for what, change in moved.items():
        assert (change < 1e-6) == any(f"change of {symbol}" in what for symbol in invariant), what
