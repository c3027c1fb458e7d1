"""The pool of networks that measures are to predict the gap of."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import saltflat as sf
from saltflat.datasets import Data, fashion_mnist
from saltflat.papers import EXPERIMENTS, reproduce
from saltflat.papers.predictors import controls, ensemble, findings, pool
from saltflat.papers.predictors.ensemble import Recipe, network, train_until
from saltflat.sweep import Folder, Run, Settings, sweep


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


IMAGES = torch.randn(24, 5, 4, generator=generator(), dtype=torch.float64)
LABELS = torch.randint(3, (3, 24), generator=generator(1))
BATCH = 8
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def members() -> list[nn.Sequential]:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return [network(20, 6, 2, 3).double() for _ in range(3)]


def recipe(**changes) -> Recipe:
    zeros = torch.zeros(3, dtype=torch.float64)
    plain = Recipe(
        lr=torch.tensor([0.1, 0.05, 0.02], dtype=torch.float64),
        weight_decay=torch.tensor([0.0, 0.01, 0.1], dtype=torch.float64),
        rho=zeros,
        strength=zeros,
        augmented=torch.zeros(3, dtype=torch.bool),
        seeds=[5, 6, 7],
    )
    return replace(plain, **changes)


def trained(chosen: Recipe, epochs: int = 2, device: str = "cpu") -> list[nn.Sequential]:
    models = [model.to(device) for model in members()]
    images, labels = IMAGES.to(device), LABELS.to(device)
    train_until(models, images, labels, chosen, batch=BATCH, target=0.0, epochs=epochs)
    return [model.cpu() for model in models]


def alone(chosen: Recipe, member: int, rho: float = 0.0, strength: float = 0.0) -> nn.Sequential:
    """The same by torch.optim.SGD, sf.SAM and sf.FAM, one network at a time."""
    model, order = members()[member], generator(chosen.seeds[member])
    base = torch.optim.SGD(
        model.parameters(),
        lr=float(chosen.lr[member]),
        momentum=0.9,
        weight_decay=float(chosen.weight_decay[member]),
    )
    optimizer = sf.SAM(base, rho=rho)
    fam = sf.FAM(model, layer="head", strength=strength)
    for _ in range(2):
        rows = torch.randperm(24, generator=order)
        torch.randint(2, (24,), generator=order)  # the flips that are not used
        for batch in rows.split(BATCH):
            x, y = IMAGES[batch], LABELS[member][batch]

            def closure(x=x, y=y) -> torch.Tensor:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y) + fam(y)
                loss.backward()
                return loss

            optimizer.step(closure)
    fam.remove()
    return model


def distance(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize(("rho", "strength"), [(0.0, 0.0), (0.1, 0.0), (0.0, 0.2)])
def test_members_are_trained_as_they_would_be_alone(
    rho: float, strength: float, device: str
) -> None:
    """By torch's SGD, our SAM and our FAM, which have tests of their own."""
    given = {
        name: torch.full((3,), value, dtype=torch.float64)
        for name, value in (("rho", rho), ("strength", strength))
    }
    chosen = recipe(**given)
    together = trained(chosen, device=device)
    plain = trained(recipe())
    for member, model in enumerate(together):
        assert distance(model, alone(chosen, member, rho, strength)) < 1e-10
        if rho or strength:
            assert distance(model, plain[member]) > 1e-5  # it is not SGD


def test_a_member_is_left_alone_once_it_has_the_loss() -> None:
    chosen = recipe(weight_decay=torch.zeros(3, dtype=torch.float64))
    models = members()
    reached = train_until(models, IMAGES, LABELS, chosen, batch=BATCH, target=1.0, epochs=60)
    assert reached[0] is not None
    for index, (model, epochs) in enumerate(zip(models, reached, strict=True)):
        loss = float(F.cross_entropy(model(IMAGES), LABELS[index]).detach())
        assert (loss <= 1.0) == (epochs is not None)
        if epochs is not None:
            before = trained(chosen, epochs=epochs)[index]
            assert distance(model, before) < 1e-12
            earlier = trained(chosen, epochs=epochs - 1)[index]
            assert float(F.cross_entropy(earlier(IMAGES), LABELS[index]).detach()) > 1.0


def test_a_member_that_diverges_never_reaches_it_and_leaves_the_others_alone() -> None:
    chosen = recipe(lr=torch.tensor([1e200, 0.05, 0.02], dtype=torch.float64))
    models = members()
    reached = train_until(models, IMAGES, LABELS, chosen, batch=BATCH, target=1e-9, epochs=3)
    assert reached == [None] * 3
    plain = members()
    train_until(plain, IMAGES, LABELS, recipe(), batch=BATCH, target=1e-9, epochs=3)
    assert distance(models[1], plain[1]) < 1e-12


def test_images_are_flipped_where_asked() -> None:
    chosen = recipe(augmented=torch.tensor([True, False, True]))
    state = ensemble._Ensemble(members(), IMAGES, LABELS, chosen, BATCH)
    flipped = torch.zeros(3)
    for order, flips in state.draw_epoch():
        state.order.copy_(order)
        state.flips.copy_(flips)
        for member, images in enumerate(state._inputs()):
            for image, row in zip(images, order[member], strict=True):
                if not torch.equal(image, IMAGES[row]):
                    assert torch.equal(image, IMAGES[row].flip(1))
                    flipped[member] += 1
    assert flipped[1] == 0
    assert ((flipped[[0, 2]] > 4) & (flipped[[0, 2]] < 20)).all()


def test_path_norm_is_the_sum_over_paths() -> None:
    model = members()[0]
    first, second, head = (m for m in model.modules() if isinstance(m, nn.Linear))
    a, b, c = (m.weight.detach().square() for m in (first, second, head))
    u, v, w = (m.bias.detach().square() for m in (first, second, head))
    total = (c @ b @ a).sum() + (c @ b @ u).sum() + (c @ v).sum() + w.sum()
    assert controls.path_norm(model, IMAGES[:1]) == pytest.approx(float(total.sqrt()))


def test_margins() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [5.0, -1.0, 4.5], [0.0, 1.0, 0.0]])
    found = controls.margins(logits, torch.tensor([1, 2, 0]))
    assert found.tolist() == [1.0, -0.5, -1.0]


def test_controls() -> None:
    model = members()[0]
    found = controls.controls(model, IMAGES, LABELS[0])
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    assert found["weight_norm"] == pytest.approx(float(vector.norm()))
    assert found["parameter_count"] == len(vector)
    rows = controls.margins(model(IMAGES), LABELS[0]).detach().numpy()
    assert found["margin"] == pytest.approx(np.quantile(rows, 0.1))
    assert found["normalized_margin"] == pytest.approx(found["margin"] / found["path_norm"])
    assert {*found, "training_loss", "epochs"} == set(controls.CONTROLS)


def test_the_grid_is_what_is_said() -> None:
    full, small = pool.runs("full"), pool.runs("small")
    assert len(full) == 576
    assert len(small) == 24
    assert len({str(each) for each in full}) == 576
    assert {tuple(each)[:8] for each in full} == {findings.AXES}
    assert len({pool.together(each) for each in full}) == 24
    assert len({pool._seed(each) for each in full}) == 576
    assert EXPERIMENTS["predictors/pool"] is pool.POOL


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Data of two separate clouds of 6×6 pixels, and a criterion that is soon met."""
    x = torch.randn(80, 1, 6, 6, generator=generator(3))
    y = torch.arange(80) % 2
    x += 2.0 * (2 * y - 1)[:, None, None, None] * torch.linspace(-1, 1, 6)
    data = Data(x[:40], y[:40], x[40:], y[40:])
    monkeypatch.setattr(pool, "_data", lambda samples: data)
    monkeypatch.setattr(pool, "EPOCHS", 40)


SETTINGS: dict[str, Any] = {
    "width": 16,
    "depth": 2,
    "batch": 8,
    "lr": 0.1,
    "weight_decay": 0.0,
    "optimizer": "sgd",
    "augmentation": False,
    "noise": 0.0,
    "samples": 40,
    "seed": 0,
}


@pytest.mark.usefixtures("tiny")
def test_networks_are_trained_and_measured(tmp_path) -> None:
    asked = [SETTINGS, SETTINGS | {"optimizer": "fam"}, SETTINGS | {"lr": 0.0}]
    options = {"together": pool.together, "most": 24, "progress": False}
    before = torch.get_rng_state()
    done = sweep(asked, pool.work, Folder(tmp_path), **options)
    assert torch.equal(torch.get_rng_state(), before)
    for run in done[:2]:
        assert run["epochs"] >= 1
        assert run["train_loss"] <= pool.TARGET
        assert run["gap"] == run["train_accuracy"] - run["test_accuracy"]
        assert set(run["predictors"]) == {*pool.NAMES, *controls.CONTROLS}
        assert all(np.isfinite(value) for value in run["predictors"].values()), run["skipped"]
    assert done[2]["epochs"] is None
    assert done[2]["predictors"] == {}
    again = sweep(asked, None, Folder(tmp_path), **options)  # nothing is left to do
    assert [run.outcome for run in again] == [run.outcome for run in done]
    alone = pool.work([SETTINGS], torch.device("cpu"))[0]
    assert alone["gap"] == done[0]["gap"]
    assert alone["train_loss"] == pytest.approx(done[0]["train_loss"], rel=1e-4)


def made_up_settings() -> list[Settings]:
    return [s for s in pool.runs("full") if s["depth"] == 2 and s["batch"] == 32]


def made_up(shuffled: bool = False) -> list[Run]:
    """A pool in which one predictor is the gap, one goes with it through the weight norm alone."""
    draw = np.random.default_rng(0)
    runs = []
    for each in made_up_settings():
        norm, rest = draw.normal(size=2)
        gap = 0.1 * (each["noise"] * 20 + norm + rest + 5)
        values = {
            "the_gap": gap,
            "through_the_norm": 10 + norm + 0.3 * draw.normal(),
            "nothing": 10 + draw.normal(),
            "weight_norm": 10 + norm,
            "sometimes": gap if draw.random() < 0.5 else float("nan"),
        }
        outcome = {"gap": gap, "loss_gap": gap, "epochs": 3, "train_loss": 0.1}
        runs.append(Run(each, outcome | {"predictors": values}))
    if shuffled:
        order = draw.permutation(len(runs))
        gaps = [runs[index]["gap"] for index in order]
        runs = [Run(r.settings, {**r.outcome, "gap": g}) for r, g in zip(runs, gaps, strict=True)]
    lost: dict[str, Any] = {
        "gap": 0.0,
        "loss_gap": 0.0,
        "epochs": None,
        "train_loss": "nan",
        "predictors": {},
    }
    return [*runs, Run(pool.runs("full")[1], lost)]


@pytest.fixture(autouse=True)
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "DRAWS", 100)
    monkeypatch.setattr(findings, "INFORMATION_DRAWS", 5)


def test_the_table_says_who_predicts_what() -> None:
    table = {row.what: row for row in findings.rows(made_up())}
    assert table["networks of 145 that reached the training loss"].ours == 144
    assert table["networks whose training loss is not finite"].ours == 1
    assert table["τ with the gap: the_gap"].ours == pytest.approx(1)
    assert table["τ with the gap: sometimes"].note.endswith(" networks")
    always = table["predictors: larger with the gap by τ, mean Ψ and given the weight norm"]
    assert always.note == "the_gap, sometimes"
    assert "through_the_norm" in table["predictors: larger where the gap is larger (τ)"].note
    assert table["predictors: not shown to go with the gap (τ)"].note == "nothing"
    assert "partial τ with the gap given the weight norm: weight_norm" not in table
    assert "noise +1.00" in table["mean Ψ over the hyperparameters: the_gap"].note


def test_the_table_finds_nothing_in_shuffled_gaps() -> None:
    table = {row.what: row for row in findings.rows(made_up(shuffled=True))}
    always = table["predictors: larger with the gap by τ, mean Ψ and given the weight norm"]
    assert always.note == "none"
    assert abs(table["τ with the gap: the_gap"].ours) < 0.2


def test_the_picture() -> None:
    figure = findings.draw(made_up())
    labels = [text.get_text() for text in figure.subfigs[0].axes[0].get_yticklabels()]
    assert labels == ["weight_norm", "sometimes", "nothing", "through_the_norm", "the_gap"]
    assert "144 of 145" in figure.subfigs[0].get_suptitle()


def test_nothing_reached_is_told_and_drawn() -> None:
    lost = [replace(run, outcome={**run.outcome, "epochs": None}) for run in made_up()]
    assert findings.rows(deepcopy(lost))[0].ours == 0
    findings.draw(lost)


@pytest.mark.slow
def test_the_small_pool(tmp_path) -> None:
    try:
        fashion_mnist(download=False)
    except sf.MissingData as reason:
        pytest.skip(str(reason))
    result = reproduce(pool.POOL, "small", folder=tmp_path, progress=False)
    table = {row.what: row for row in result.rows}
    assert table["networks of 24 that reached the training loss"].ours >= 20
    assert table["τ with the gap: rho"].ours > 0.3  # half of them have label noise
    assert (tmp_path / "predictors" / "pool" / "small" / "figure.png").exists()
