"""The experiments of "BN-invariant sharpness regularizes the training model" (Yi et al., 2019)."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import ceil
from typing import Any

import pytest
import torch
from torch import nn

import saltflat as sf
from saltflat.datasets import Data
from saltflat.papers import EXPERIMENTS, reproduce
from saltflat.papers.bn_sharpness import accuracies, algorithms
from saltflat.papers.trained import decays, fit
from saltflat.sweep import Run

CPU = torch.device("cpu")
FIGURE, HEADLINE, TABLE_2, TABLE_1 = ALL = [
    EXPERIMENTS[f"bn-sharpness/{name}"]
    for name in ("figure-1", "table-2-headline", "table-2", "table-1")
]


def made_up(shape: tuple[int, ...] = (3, 32, 32), count: int = 16) -> Data:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2 * count, *shape, generator=generator)
    y = torch.randint(10, (2 * count,), generator=generator)
    return Data(x[:count], y[:count], x[count:], y[count:])


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(algorithms, "images", lambda train, test, device: made_up())


def few(experiment, **changed):
    """One training of each algorithm, of one epoch."""
    some = [s for s in experiment.runs("full") if s["seed"] == 0 and s["decay"]]
    return [{**s, "network": "LeNet", "batch": 8, "epochs": 1, **changed} for s in some]


def test_what_is_run():
    assert Counter(s["algorithm"] for s in FIGURE.runs("full")) == {
        "SGD": 5,
        "SGDS-0": 5,
        "SGDS-5": 5,
    }
    for table, batch in ((TABLE_1, 128), (TABLE_2, 2048)):
        full = table.runs("full")
        assert Counter((s["algorithm"], s["decay"]) for s in full) == {
            (name, decay): 5
            for name in ("SGD", "SGDS-0", "SGDS-5", "E-SGD")
            for decay in (0.0, 5e-4)
        }
        assert {s["batch"] for s in full} == {batch}
        small = table.runs("small")
        assert [(s["algorithm"], s["decay"], s["seed"]) for s in small] == [
            (s["algorithm"], s["decay"], s["seed"]) for s in full
        ]
    headline = HEADLINE.runs("full")
    assert headline == TABLE_2.runs("full")[: len(headline)]  # they come first there too
    assert all(len({s["seed"] for s in each.runs("small")}) == 5 for each in ALL)


def test_learning_rates_of_the_paper():
    rates = {(s["algorithm"], s["batch"]): s["lr"] for t in ALL for s in t.runs("full")}
    assert rates["SGDS-0", 2048] == rates["SGDS-5", 128] == rates["SGD", 10_000] == 0.2
    assert rates["SGD", 2048] == rates["SGD", 128] == rates["E-SGD", 2048] == 0.1
    assert rates["E-SGD", 128] == 0.01


@pytest.mark.parametrize("size", ["small", "full"])
def test_entropy_sgd_ends_with_its_weights_at_the_center(size):
    for table in (TABLE_1, TABLE_2):
        for s in table.runs(size):
            steps = s["epochs"] * ceil(s["samples"] / s["batch"])
            assert steps % algorithms.LANGEVIN == 0 or s["algorithm"] != "E-SGD"


def test_optimizers_are_set_as_the_paper_says():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    by_name: dict[Any, Any] = {
        s["algorithm"]: algorithms.optimizer(model, s)
        for s in TABLE_2.runs("full")
        if s["seed"] == 0 and s["decay"]
    }
    assert by_name["SGDS-5"].ascent_steps == 5
    assert by_name["SGDS-0"].ascent_steps == 0
    # λ ends where 200 epochs of a factor 1.02 bring it.
    assert by_name["SGDS-0"].growth ** 48 == pytest.approx(1.02**200)
    assert by_name["SGDS-0"].delta == 5e-4
    assert by_name["SGDS-0"].clip == 0.1
    assert by_name["SGDS-0"].param_groups[0]["strength"] == 1e-4
    assert isinstance(by_name["E-SGD"], sf.EntropySGD)
    assert {o.param_groups[0]["weight_decay"] for o in by_name.values()} == {5e-4}
    assert all(o.param_groups[0]["momentum"] == 0.9 for n, o in by_name.items() if n != "E-SGD")


def test_all_algorithms_train(tiny):
    outcomes = TABLE_2.work(few(TABLE_2), CPU)
    assert len(outcomes) == 4
    losses = [outcome["loss"] for outcome in outcomes]
    assert len(set(losses)) == 4  # each is another algorithm
    for outcome in outcomes:
        assert outcome["accuracy"] == outcome["accuracies"][-1]
        assert len(outcome["accuracies"]) == len(outcome["losses"]) == 1
    assert FIGURE.work(few(FIGURE)[:1], CPU)[0] == FIGURE.work(few(FIGURE)[:1], CPU)[0]


def test_the_two_gradients_are_of_batches_of_their_own():
    seen = []

    class Watched(nn.Sequential):
        def forward(self, x):
            seen.append(x.clone())
            return super().forward(x)

    def trained(apart):
        seen.clear()
        torch.manual_seed(0)
        model = Watched(nn.Flatten(), nn.Linear(4, 10), nn.BatchNorm1d(10))
        settings = {**FIGURE.runs("full")[5], "epochs": 1}
        assert settings["algorithm"] == "SGDS-0"
        make = algorithms.optimizer
        data = made_up((4,))
        fit(model, data, epochs=1, batch=8, optimizer=lambda m: make(m, settings), apart=apart)
        return [[tuple(x.flatten().tolist()) for x in seen[i : i + 3]] for i in (0, 3)]

    assert all(len(set(passes)) == 3 for passes in trained(apart=True))
    assert all(len(set(passes)) == 1 for passes in trained(apart=False))


def test_entropy_sgd_goes_to_its_average_at_every_rate():
    made = []

    def make(model):
        made.append(sf.EntropySGD(model.parameters(), lr=0.1, steps=2))
        return made[0]

    model, half = nn.Linear(4, 10), decays(0.5, by=0.1)
    fit(model, made_up((4,)), epochs=2, batch=8, optimizer=make, schedule=half)
    assert made[0].at_center
    assert made[0].param_groups[0]["lr"] == pytest.approx(0.01)
    assert made[0].param_groups[0]["inner_lr"] == pytest.approx(0.01)


def invented(experiment, gain: float = 1.0) -> list[Run]:
    """SGD reaches 80 to 84 percent, every other algorithm `gain` points more with the same seed."""
    return [
        Run(
            s,
            {
                "accuracy": 80.0 + s["seed"] + gain * (s["algorithm"] != "SGD"),
                "accuracies": [10.0, 80.0],
                "losses": [2.0, 1.0],
                "loss": 0.5,
            },
        )
        for s in experiment.runs("full")
    ]


@pytest.mark.parametrize("experiment", ALL)
def test_rows_and_picture_of_known_numbers(experiment, tmp_path):
    table = {row.what: row for row in experiment.rows(invented(experiment))}
    assert table["test accuracy, SGD-5e-4 (%)"].ours == 82
    assert table["test accuracy, SGD-5e-4 (%)"].error == pytest.approx((2.5 / 5) ** 0.5)
    gain = table["SGDS-0-5e-4 above SGD (points)"]
    assert gain.ours == pytest.approx(1)
    assert gain.error == pytest.approx(0, abs=1e-9)  # seeds are paired
    first = experiment.runs("full")[0]
    assert f"{first['network']}, 50,000 images in batches of {first['batch']:,}" in gain.note
    none = {row.what: row for row in experiment.rows(invented(experiment, gain=0.0))}
    assert none["SGDS-0-5e-4 above SGD (points)"].ours == pytest.approx(0)
    figure = experiment.draw(invented(experiment))
    figure.savefig(tmp_path / "figure.png")
    first, second, *_ = drawn_errors(figure.axes[-1])
    assert first == pytest.approx((82, (2.5 / 5) ** 0.5))
    assert second == pytest.approx((83, (2.5 / 5) ** 0.5))
    names = [tick.get_text() for tick in figure.axes[-1].get_xticklabels()]
    assert len(names) == len({(s["algorithm"], s["decay"]) for s in experiment.runs("full")})
    assert names[0] == "SGD-5e-4"


def drawn_errors(axes):
    """The means of a picture with their errors, one an algorithm."""
    for bar in axes.containers:
        line, _, (spread,) = bar
        (low, high) = spread.get_segments()[0][:, 1]
        yield line.get_ydata()[0], (high - low) / 2


def test_published_numbers():
    def published(experiment):
        return {row.what: row.published for row in experiment.rows(invented(experiment))}

    assert published(FIGURE)["test accuracy, SGDS-0-5e-4 (%)"] == 71.84
    assert published(FIGURE)["SGDS-0-5e-4 above SGD (points)"] == pytest.approx(1.97)
    assert published(HEADLINE)["test accuracy, SGDS-0-5e-4 (%)"] == 90.51
    assert published(TABLE_2)["test accuracy, E-SGD-0 (%)"] == 87.13
    assert published(TABLE_1)["test accuracy, SGD-5e-4 (%)"] == 91.67


def test_a_table_that_is_not_complete():
    some = [run for run in invented(TABLE_2) if run["algorithm"] == "SGD" and run["decay"]]
    assert [row.what for row in TABLE_2.rows(some)] == [
        "test accuracy, SGD-5e-4 (%)",
        "training loss, SGD-5e-4",
    ]
    assert accuracies.label("SGDS-5", 0.0) == "SGDS-5-0"


def test_what_is_done_is_not_done_again(tiny, tmp_path):
    calls = []

    def work(settings, device):
        calls.append(len(settings))
        return HEADLINE.work(settings, device)

    two = replace(HEADLINE, runs=lambda size: few(HEADLINE), work=work)
    for _ in range(2):
        assert len(reproduce(two, folder=tmp_path, progress=False).runs) == 2
    assert calls == [1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("experiment", [FIGURE, TABLE_2, TABLE_1])
def test_the_small_size(experiment, tmp_path):
    result = reproduce(experiment, "small", folder=tmp_path, progress=False)
    rows = [row for row in result.rows if row.what.startswith("test accuracy")]
    assert len(rows) == len(experiment.runs("small")) // 5
    assert all(row.ours > 15 for row in rows)  # of ten classes, after minutes on few images
