"""The experiments of Normalized Flat Minima, on made-up data; small sizes where MNIST is found."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from dense import Dense
from torch import nn

import saltflat as sf
from saltflat.datasets import Data
from saltflat.errors import MissingData
from saltflat.papers import EXPERIMENTS, random_labels, reproduce
from saltflat.papers.normalized_sharpness import networks
from saltflat.papers.normalized_sharpness.networks import Recipe
from saltflat.papers.random_labels import images, started, with_noise
from saltflat.sweep import Run
from saltflat.zoo import mlp

CPU = torch.device("cpu")
MICRO = Recipe("mlp-mnist", samples=40, epochs=8, measured=30, batch=10)
FIGURES = [EXPERIMENTS[f"normalized-sharpness/figure-{k}"] for k in (3, 4)]


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


def normalised() -> nn.Sequential:
    return nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.BatchNorm1d(49), nn.Linear(49, 10))


@pytest.fixture(autouse=True)
def _made_up_data(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    if "slow" not in request.keywords:
        monkeypatch.setitem(random_labels._SOURCES, "mnist", made_up)
        monkeypatch.setitem(random_labels._SOURCES, "cifar10", made_up)
        monkeypatch.setitem(networks._NETWORKS, "mlp-mnist", micro)
        monkeypatch.setitem(networks._NETWORKS, "wrn-cifar10", normalised)
        monkeypatch.setattr(networks, "_TEST", 40)
    images.cache_clear()
    yield
    images.cache_clear()


def test_the_networks_that_are_run() -> None:
    full = Counter(run["network"] for run in networks.runs("full"))
    assert full == {"mlp-mnist": 33, "lenet-mnist": 11, "lenet-cifar10": 11, "wrn-cifar10": 6}
    assert {run["noise"] for run in networks.runs("small")} == {k / 10 for k in range(11)}
    jobs = Counter(networks.together(run) for run in networks.runs("full"))
    assert sorted(jobs.values()) == [1] * 28 + [33]  # the MLPs at once, the others one by one
    first = dict(networks.runs("small")[0])
    assert networks.together(first) != networks.together(first | {"batch": 10})  # of one order


def naive(recipe: Recipe) -> nn.Module:
    """One network by torch's own Adam."""
    data = with_noise(images("mnist", 40, 40, CPU), recipe.noise, recipe.seed, how="uniform")
    model = started(micro, recipe.seed, CPU)
    adam = torch.optim.Adam(model.parameters(), lr=0.001)
    generator = torch.Generator().manual_seed(recipe.seed)
    for _ in range(recipe.epochs):
        for rows in torch.randperm(40, generator=generator).split(recipe.batch):
            adam.zero_grad()
            F.cross_entropy(model(data.train_x[rows]), data.train_y[rows]).backward()
            adam.step()
    return model


def test_networks_are_trained_by_adam_and_measured_by_two_losses() -> None:
    recipe = replace(MICRO, seed=1, noise=0.5)
    found = networks.work([vars(replace(MICRO, seed=0)), vars(recipe)], CPU)[1]
    data = with_noise(images("mnist", 40, 40, CPU), 0.5, 1, how="uniform")
    model = naive(recipe)
    loss = F.cross_entropy(model(data.train_x), data.train_y).item()
    assert found["train_loss"] == pytest.approx(loss, rel=1e-4)
    x, y = data.train_x[:30].double(), data.train_y[:30]
    oracle = Dense(model.double(), x, y)
    trace = sum(float(block.trace()) for block in oracle.blocks(oracle.hessian).values())
    assert found["hessian_trace"] == pytest.approx(trace, rel=1e-3)
    options = {"measures": ["normalized_sharpness"], "standing": False}
    same = sf.measure(model, (x, y), "normalized_cross_entropy", **options)
    other = sf.measure(model, (x, y), "cross_entropy", **options)
    assert found["normalized_sharpness"] == pytest.approx(
        same["normalized_sharpness"].value, rel=1e-2
    )
    assert same["normalized_sharpness"].value != pytest.approx(
        other["normalized_sharpness"].value, rel=0.1
    )


def test_a_network_with_batch_norm_is_trained_by_itself() -> None:
    recipe = Recipe("wrn-cifar10", samples=40, epochs=15, measured=30, batch=10)
    (found,) = networks.work([vars(recipe)], CPU)
    assert found["train_accuracy"] > 0.5
    assert found["normalized_sharpness"] > 0


def invented(sharpness) -> list[Run]:
    runs = []
    for k, settings in enumerate(networks.runs("full")):
        outcome = {
            "gap": float(settings["noise"]) + 1e-3 * k,
            "normalized_sharpness": sharpness(k, settings),
            "hessian_trace": -sharpness(k, settings),
            "train_accuracy": 1.0,
            "collapsed": float(k == 2),
        }
        runs.append(Run(settings, outcome))
    return runs


def test_tables_tell_order_from_disorder() -> None:
    runs = invented(lambda k, s: math.nan if k == 2 else float(s["noise"]) + 1e-3 * k)
    for figure, sign, published in zip(FIGURES, (1, -1), (0.911, 0.708), strict=True):
        rows = {row.what: row for row in figure.rows(runs)}
        (of_wrn,) = [row for row in rows.values() if row.published is not None]
        assert "WRN-16-4" in of_wrn.what
        assert of_wrn.published == published
        assert of_wrn.ours == pytest.approx(sign)
        assert all(abs(row.ours) > 0.999 for what, row in rows.items() if "Spearman" in what)
        assert rows["collapsed networks"].ours == 1
        drawn = figure.draw(runs)
        counts = [len(p.get_offsets()) for axes in drawn.axes[:4] for p in axes.collections]
        assert counts == [32, 1, 11, 0, 11, 0, 6, 0]
        drawn.canvas.draw()
    shuffled = np.random.default_rng(0).permutation(61)
    first = FIGURES[0].rows(invented(lambda k, s: 1.0 + shuffled[k]))[1]
    assert abs(first.ours) < 2.5 * first.error


def test_both_figures_keep_the_same_runs(tmp_path: Path) -> None:
    def never(settings, device):
        raise AssertionError("ran again")

    few = replace(FIGURES[0], runs=lambda size: MICRO.settings(seeds=1, ratios=[0.0, 0.5, 1.0]))
    reproduce(few, folder=tmp_path, progress=False)
    other = replace(FIGURES[1], runs=few.runs, work=never)
    assert len(reproduce(other, folder=tmp_path, progress=False).runs) == 3


@pytest.mark.slow
@pytest.mark.parametrize("figure", FIGURES, ids=lambda each: each.name)
def test_the_small_size(figure, tmp_path: Path) -> None:
    try:
        images("mnist", 1, 1, CPU)
    except MissingData as reason:
        pytest.skip(str(reason))
    rows = {row.what: row for row in reproduce(figure, folder=tmp_path, progress=False).rows}
    (spearman,) = [row for what, row in rows.items() if "Spearman" in what]
    assert spearman.ours > 0.5
