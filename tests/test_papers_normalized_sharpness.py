"""The experiments of Normalized Flat Minima, on made-up data; small sizes where MNIST is found."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
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
from saltflat.papers.normalized_sharpness.adam import outputs
from saltflat.papers.normalized_sharpness.networks import Recipe
from saltflat.papers.random_labels import images, started, with_noise
from saltflat.sweep import Run, stacked
from saltflat.zoo import lenet5, mlp

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
    assert full == {"mlp-mnist": 55, "lenet-mnist": 30, "lenet-cifar10": 30, "wrn-cifar10": 30}
    assert {run["noise"] for run in networks.runs("small")} == {k / 10 for k in range(11)}
    jobs = Counter(networks.together(run) for run in networks.runs("full"))
    # A seed at once, but for WRN-16-4, whose BatchNorm is one network's own.
    assert sorted(jobs.values()) == [1] * 30 + [6] * 10 + [11] * 5
    assert max(jobs.values()) <= FIGURES[0].most
    first = dict(networks.runs("small")[0])
    assert networks.together(first) != networks.together(first | {"batch": 10})  # of one order


def naive(recipe: Recipe, make=micro) -> nn.Module:
    """One network by torch's own Adam."""
    data = with_noise(images("mnist", 40, 40, CPU), recipe.noise, recipe.seed, how="uniform")
    model = started(make, recipe.seed, CPU)
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


def apart(models, x: torch.Tensor, y: torch.Tensor):
    """Outputs, and gradients of the mean cross-entropy, of one model after the other."""
    found = []
    for model, inputs, labels in zip(models, x, y, strict=True):
        result = model(inputs)
        loss = F.cross_entropy(result, labels)
        slopes = torch.autograd.grad(loss, list(model.parameters()))
        found.append((result.detach(), torch.cat([each.flatten() for each in slopes])))
    return [torch.stack(each) for each in zip(*found, strict=True)]


@pytest.mark.parametrize(
    ("make", "shape"),
    [(lenet5, (1, 28, 28)), (partial(lenet5, 3), (3, 32, 32)), (micro, (1, 28, 28))],
    ids=["lenet-mnist", "lenet-cifar10", "nested"],
)
def test_networks_as_products_are_those_networks(make, shape: tuple[int, ...]) -> None:
    g = torch.Generator().manual_seed(0)
    models = [started(make, seed, CPU).double() for seed in range(3)]
    x = torch.randn(3, 4, *shape, generator=g, dtype=torch.float64)
    y = torch.randint(10, (3, 4), generator=g)
    parameters = {name: p.requires_grad_() for name, p in stacked(models).items()}
    logits = outputs(models[0], parameters, x)
    loss = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum") / 4
    slopes = torch.autograd.grad(loss, list(parameters.values()))
    expected, gradients = apart(models, x, y)
    torch.testing.assert_close(logits.detach(), expected, rtol=1e-12, atol=1e-13)
    ours = torch.cat([each.flatten(1) for each in slopes], 1)
    torch.testing.assert_close(ours, gradients, rtol=1e-11, atol=1e-13)


def test_members_keep_to_their_own_weights() -> None:
    """What the comparison above would miss if all members were alike."""
    models = [started(lenet5, seed, CPU).double() for seed in range(2)]
    x = torch.randn(1, 4, 1, 28, 28, dtype=torch.float64).expand(2, -1, -1, -1, -1)
    first, second = outputs(models[0], stacked(models), x)
    assert not torch.allclose(first, second, rtol=1e-2)


@pytest.mark.parametrize("options", [{"stride": 2}, {"dilation": 2}, {"padding_mode": "circular"}])
def test_other_convolutions_are_refused(options) -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3, **options))
    with pytest.raises(AssertionError):
        outputs(model, stacked([model]), torch.zeros(1, 1, 1, 8, 8))


def test_lenets_are_trained_by_adam() -> None:
    recipes = [
        Recipe("lenet-mnist", samples=40, epochs=2, measured=10, batch=10, seed=1, noise=noise)
        for noise in (0.0, 0.5)
    ]
    found = networks.work([vars(each) for each in recipes], CPU)
    for recipe, outcome in zip(recipes, found, strict=True):
        model = naive(recipe, lenet5)
        data = with_noise(images("mnist", 40, 40, CPU), recipe.noise, 1, how="uniform")
        loss = F.cross_entropy(model(data.train_x), data.train_y).item()
        assert outcome["train_loss"] == pytest.approx(loss, rel=1e-4)


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
        assert counts == [54, 1, 30, 0, 30, 0, 30, 0]
        drawn.canvas.draw()
    shuffled = np.random.default_rng(0).permutation(145)
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
