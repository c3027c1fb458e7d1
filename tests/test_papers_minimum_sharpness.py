"""The experiments of Minimum Sharpness on made-up data; the small sizes where MNIST is found."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from dense import Dense
from torch import nn

from saltflat.datasets import Data
from saltflat.errors import MissingData
from saltflat.papers import EXPERIMENTS, random_labels, reproduce, timed
from saltflat.papers.minimum_sharpness import figure_1, figure_2, figure_3, label_noise
from saltflat.papers.minimum_sharpness.label_noise import Recipe
from saltflat.papers.minimum_sharpness.small_networks import case, looped_diagonal, loss_gradient
from saltflat.papers.random_labels import Order, images, scores, started, with_noise
from saltflat.sweep import Run, Settings
from saltflat.zoo import mlp

CPU = torch.device("cpu")
MICRO = Recipe("micro", samples=40, epochs=25, batch=10, lr=0.05)
NAMES = [f"minimum-sharpness/figure-{k}" for k in (1, 2, 3, 4)]


def made_up() -> Data:
    """Images of ten classes that can be learned: a bright row for each, and noise."""
    g = torch.Generator().manual_seed(0)
    y = torch.arange(100) % 10
    x = 0.3 * torch.rand(100, 1, 28, 28, generator=g)
    x[torch.arange(100), 0, 2 * y] += 0.7
    return Data(x[:60], y[:60], x[60:], y[60:])


def micro() -> nn.Sequential:
    """Small enough for a dense Hessian."""
    return nn.Sequential(nn.AvgPool2d(4), mlp([49, 8, 6, 10]))


@pytest.fixture(autouse=True)
def _made_up_data(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    if "slow" not in request.keywords:
        monkeypatch.setitem(random_labels._SOURCES, "mnist", made_up)
        monkeypatch.setitem(label_noise._NETWORKS, "micro", micro)
        monkeypatch.setattr(label_noise, "_TEST", 40)
        monkeypatch.setattr("saltflat.papers.minimum_sharpness.small_networks._ALL", 60)
    images.cache_clear()
    yield
    images.cache_clear()


@pytest.mark.parametrize(
    ("name", "size", "networks", "seeds", "jobs"),
    [
        (2, "full", 110, 10, 22),
        (2, "small", 33, 3, 22),
        (4, "full", 55, 5, 1),
        (4, "small", 33, 3, 1),
    ],
)
def test_every_ratio_with_every_seed(name, size, networks, seeds, jobs) -> None:
    experiment = EXPERIMENTS[f"minimum-sharpness/figure-{name}"]
    runs = experiment.runs(size)
    assert len(runs) == networks
    assert len({tuple(run.items()) for run in runs}) == networks
    assert {run["seed"] for run in runs} == set(range(seeds))
    assert {run["noise"] for run in runs} == {k / 10 for k in range(11)}
    assert experiment.most == jobs


def naive(recipe: Recipe) -> nn.Module:
    """One network by torch's own optimizer and scheduler, as the paper's appendix D says."""
    data = with_noise(images("mnist", recipe.samples, 40, CPU), recipe.noise, recipe.seed)
    model = started(label_noise._NETWORKS[recipe.network], recipe.seed, CPU)
    sgd = torch.optim.SGD(model.parameters(), lr=recipe.lr, momentum=0.9, weight_decay=1e-5)
    schedule = torch.optim.lr_scheduler.LambdaLR(sgd, lambda step: 1 / (1 + 1e-4 * step))
    generator = torch.Generator().manual_seed(recipe.seed)
    for _ in range(recipe.epochs):
        for rows in torch.randperm(recipe.samples, generator=generator).split(recipe.batch):
            sgd.zero_grad()
            F.cross_entropy(model(data.train_x[rows]), data.train_y[rows]).backward()
            sgd.step()
            schedule.step()
    return model


def test_networks_are_trained_and_measured_as_the_paper_says() -> None:
    recipe = replace(MICRO, seed=1, noise=0.5)
    others = [replace(MICRO, seed=seed) for seed in (0, 1)]
    found = label_noise.work([vars(each) for each in (others[0], recipe, others[1])], CPU)[1]
    data = with_noise(images("mnist", 40, 40, CPU), 0.5, 1)
    model = naive(recipe)
    outputs, labels = model(data.train_x), data.train_y
    assert found["train_loss"] == pytest.approx(F.cross_entropy(outputs, labels).item(), rel=1e-4)
    right = [float((model(x).argmax(1) == y).float().mean()) for x, y in (data[:2], data[2:])]
    assert found["gap"] == pytest.approx(right[0] - right[1], abs=1e-6)
    oracle = Dense(model.double(), data.train_x.double(), labels)
    trace = sum(float(block.trace()) for block in oracle.blocks(oracle.hessian).values())
    assert found["hessian_trace"] == pytest.approx(trace, rel=1e-3)
    assert 0 < found["minimum_sharpness"] <= found["hessian_trace"]
    assert found["normalized_sharpness"] > 0
    assert not found["collapsed"]


def test_a_network_that_diverges_is_a_result() -> None:
    (found,) = label_noise.work([vars(replace(MICRO, lr=1e8))], CPU)
    assert found["collapsed"]
    assert math.isnan(found["minimum_sharpness"])


def test_a_network_that_gives_one_label_has_collapsed() -> None:
    model = mlp([784, 8, 10])
    data = images("mnist", 40, 40, CPU)
    assert not scores(started(lambda: mlp([784, 30, 10]), 0, CPU), data)["collapsed"]
    nn.init.zeros_(model[3].weight)
    assert scores(model, data)["collapsed"]


def test_an_epoch_shows_every_sample_once_and_members_of_a_seed_the_same() -> None:
    order = Order([0, 1, 0], samples=12, batch=4, device=CPU)
    epochs = [torch.cat([order(3 * epoch + step) for step in range(3)], 1) for epoch in range(2)]
    for rows in epochs:
        assert rows.sort(1).values.tolist() == [list(range(12))] * 3
        assert rows[0].equal(rows[2])
        assert not rows[0].equal(rows[1])
    assert not epochs[0].equal(epochs[1])


def invented(sharpness, collapsed: frozenset[int] = frozenset()) -> list[Run]:
    """Runs whose gap is their noise; the sharpness is a function of the run's number."""
    runs = []
    for k in range(33):
        outcome = {
            "gap": 0.9 * (k % 11) / 10 + 1e-3 * k,
            "minimum_sharpness": sharpness(k),
            "normalized_sharpness": 2 * sharpness(k),
            "train_accuracy": 1.0,
            "collapsed": float(k in collapsed),
        }
        runs.append(Run({"noise": (k % 11) / 10, "seed": k // 11}, outcome))
    return runs


def table(runs: list[Run]) -> dict[str, float]:
    return {row.what: row.ours for row in label_noise.rows(runs)}


def test_the_table_tells_order_from_disorder() -> None:
    ordered = table(invented(lambda k: math.exp(k % 11 + 0.01 * k)))
    assert ordered["Spearman, minimum sharpness and gap"] == pytest.approx(1)
    assert ordered["Kendall, normalized sharpness and gap"] == pytest.approx(1)
    assert ordered["rises of the mean minimum sharpness"] == 10
    assert ordered["collapsed networks"] == 0
    shuffled = np.random.default_rng(0).permutation(33)
    disordered = label_noise.rows(invented(lambda k: 1.0 + shuffled[k]))[0]
    assert abs(disordered.ours) < 2.5 * disordered.error
    assert disordered.error > 0.1


def test_collapsed_networks_are_counted_drawn_and_told_apart() -> None:
    runs = invented(lambda k: math.nan if k == 3 else (100.0 if k == 5 else 1.0 + k % 11), {3, 5})
    found = table(runs)
    assert found["collapsed networks"] == 2
    assert found["Spearman, minimum sharpness and gap"] > 0.99
    assert found["Spearman, minimum sharpness and gap, collapsed networks too"] < 0.99
    figure = label_noise.draw(runs)
    drawn = [len(points.get_offsets()) for points in figure.axes[0].collections]
    assert drawn == [31, 2]
    figure.canvas.draw()


def test_a_network_that_could_not_be_measured_hides_no_rise() -> None:
    runs = invented(lambda k: math.nan if k == 3 else 1.0 + k % 11)
    rise = next(row for row in label_noise.rows(runs) if row.what.startswith("rises"))
    assert rise.ours == 10
    assert rise.note == "of 10 steps of the noise, 32 networks"


def test_it_goes_on_where_it_stopped(tmp_path: Path) -> None:
    experiment = replace(figure_2.FIGURE_2, runs=lambda size: MICRO.settings(seeds=1))
    first = reproduce(experiment, folder=tmp_path, progress=False)
    assert len(first.runs) == 11

    def never(settings, device):
        raise AssertionError("ran again")

    again = reproduce(replace(experiment, work=never), folder=tmp_path, progress=False)
    assert [row.what for row in again.rows] == [row.what for row in first.rows]
    assert (tmp_path / "minimum-sharpness" / "figure-2" / "small" / "figure.png").exists()


def case_of(network: str) -> Settings:
    often = {"entries": 4, "rounds": 2, "seconds": 0.5}
    return {"network": network, "n": 5, "seed": 0, **often}


@pytest.mark.parametrize(("network", "entries"), [("fcnn", 16_330), ("cnn", 13_750)])
def test_the_three_ways_agree_to_rounding(
    network: str, entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their times are told apart by a clock that goes on by 1 at a look, and 6 more in the loop."""
    now = iter(range(1000))

    def slow(*arguments):
        return list(islice(now, 6)) and looped_diagonal(*arguments)

    monkeypatch.setattr(timed, "process_time", lambda: float(next(now)))
    monkeypatch.setattr(figure_1, "looped_diagonal", slow)
    found = dict(figure_1.work([case_of(network)], CPU)[0])
    assert found["loop_error"] < 1e-11
    assert found["backpack_error"] < 1e-11
    assert found["saltflat_seconds"] == found["backpack_seconds"] == found["backpack_ratio"] == 1
    assert found["loop_seconds"] == found["loop_ratio"] == 7 * entries / 4


def test_the_loop_is_the_diagonal_of_the_hessian() -> None:
    torch.manual_seed(0)
    model, x, y = mlp([4, 5, 3]).double(), torch.randn(7, 4).double(), torch.arange(7) % 3
    exact = Dense(model, x, y).hessian.diagonal()
    entries = [30, 0, 7, 42]
    torch.testing.assert_close(looped_diagonal(model, x, y, entries), exact[entries])


def test_figure_1_compares_ratios_with_the_published_ones() -> None:
    times = {"loop_seconds": 6.0, "backpack_seconds": 3.0, "saltflat_seconds": 0.5}
    outcome = {
        **times,
        "loop_ratio": 12.0,
        "backpack_ratio": 6.0,
        "loop_error": 1e-15,
        "backpack_error": 2e-16,
    }
    runs = [Run(settings, outcome) for settings in figure_1._runs("small")]
    rows = {row.what: row for row in figure_1.rows(runs)}
    row = rows["FCNN, n = 10, times faster than the loop"]
    assert (row.ours, row.error) == (12, 0)
    assert row.published == pytest.approx(617, abs=1)
    assert rows["CNN, n = 1000, times faster than BackPACK"].ours == 6
    assert rows["largest relative difference from the loop's entries"].ours == 1e-15
    runs[-1] = Run(runs[-1].settings, {**outcome, "loop_error": math.nan})
    assert math.isnan(figure_1.rows(runs)[-2].ours)
    figure_1.draw(runs).canvas.draw()


def test_the_code_s_approximation_is_of_the_diagonal_over_the_weights() -> None:
    """Of one linear layer, which has no kinks."""
    torch.manual_seed(0)
    model, x, y = nn.Linear(4, 3).double(), torch.randn(7, 4).double(), torch.arange(7) % 3
    weights = torch.linspace(0.2, 0.4, 15).double() * (2 * torch.randint(2, (15,)) - 1)
    torch.nn.utils.vector_to_parameters(weights, model.parameters())
    exact = Dense(model, x, y).hessian.diagonal()

    def gradient(shift):
        torch.nn.utils.vector_to_parameters(weights + shift, model.parameters())
        return loss_gradient(model, x, y)

    setting = figure_3._Case("fcnn", 7, 0, draws=1000)
    _, relative, clipped = figure_3._WAYS["icml"]
    _, coded, _ = figure_3._WAYS["coded"]
    errors = [
        figure_3._errors(gradient, weights, target, directions, clipped, setting)[-1]
        for directions, target in [
            (relative, exact),
            (coded, exact / weights.abs()),
            (coded, exact),
        ]
    ]
    assert max(errors[:2]) < 0.3
    assert errors[2] > 1


def test_approximations_come_near_with_draws_and_the_code_s_does_not() -> None:
    setting: Settings = {"network": "fcnn", "n": 10, "seed": 0, "draws": 64}
    (found,) = figure_3.work([setting], CPU)
    for name in ("arxiv", "icml"):
        assert found[name][-1] < 0.5 * found[name][0]
    assert found["coded"][-1] > 3
    runs = [Run(setting, found), Run({**setting, "network": "cnn"}, found)]
    assert len(figure_3.rows(runs)) == 8
    figure_3.draw(runs).canvas.draw()


def test_errors_do_not_depend_on_the_portions_of_a_gradient(monkeypatch) -> None:
    setting: Settings = {"network": "cnn", "n": 10, "seed": 0, "draws": 2}
    (whole,) = figure_3.work([setting], CPU)
    monkeypatch.setattr(figure_3, "_PORTION", 4)  # the last one has two samples
    (portions,) = figure_3.work([setting], CPU)
    assert portions["arxiv"] == pytest.approx(whole["arxiv"], rel=1e-9)


def test_each_seed_has_its_own_network_and_images() -> None:
    model, x, _ = case("fcnn", 10, 0, CPU)
    other, z, _ = case("fcnn", 10, 1, CPU)
    assert not torch.equal(next(model.parameters()), next(other.parameters()))
    assert not torch.equal(x, z)
    assert x.min() < 0 <= x.max() <= 1


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_small_size(name: str, tmp_path: Path) -> None:
    try:
        images("mnist", 1, 1, CPU)
    except MissingData as reason:
        pytest.skip(str(reason))
    result = reproduce(EXPERIMENTS[name], folder=tmp_path, progress=False)
    found = {row.what: row for row in result.rows}
    if name.endswith("2"):
        assert found["Spearman, minimum sharpness and gap"].ours > 0.5
    if name.endswith("4"):
        assert found["collapsed networks"].ours < 10
    if name.endswith("1"):
        assert found["largest relative difference from the loop's entries"].ours < 1e-11
        assert found["FCNN, n = 1000, times faster than the loop"].ours > 10
