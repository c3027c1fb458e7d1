"""The experiments of the FAM paper: what is run, on little data, and what is made of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from saltflat.datasets import Data
from saltflat.papers import EXPERIMENTS, reproduce
from saltflat.papers.relative_flatness import table_1
from saltflat.papers.relative_flatness.seeds import differences, mean_and_error
from saltflat.sweep import Run, Settings

CPU = torch.device("cpu")


def test_means_and_paired_differences() -> None:
    mean, error = mean_and_error([1.0, 2.0, 3.0])
    assert [mean, error] == pytest.approx([2.0, 1 / math.sqrt(3)])
    assert mean_and_error([4.0]) == (4.0, None)
    assert all(math.isnan(x) for x in mean_and_error([1.0, math.nan]))
    some = [Run({"seed": s}, {"a": 10.0 + s}) for s in (2, 0, 1)]
    others = [Run({"seed": s}, {"a": 2.0 * s}) for s in (0, 1)]
    assert differences(some, others, "a") == [10.0, 9.0]


# Table 1


def tiny() -> Data:
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(60) % 10
    x = torch.rand(60, 1, 28, 28, generator=generator) + y[:, None, None, None] / 10
    return Data(x[:40], y[:40], x[40:], y[40:])


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Table 1 on little data, in place of Fashion-MNIST."""
    task = table_1.TASKS["fashion_mnist"]
    fields = {name: getattr(task, name) for name in task.__dataclass_fields__}
    monkeypatch.setitem(table_1.TASKS, "fashion_mnist", table_1.Task(**{**fields, "load": tiny}))
    table_1._load.cache_clear()
    yield
    table_1._load.cache_clear()


def micro(method: str, **changes: float) -> Settings:
    return {
        "data": "fashion_mnist",
        "network": "LeNet-5",
        **{"train": 40, "test": 20, "epochs": 2, "lr": 0.02, "batch": 16},
        "method": method,
        "seed": 0,
        **table_1.METHODS[method],
        **changes,
    }


@pytest.mark.parametrize("name", ["table-1", "table-1-fashion-mnist"])
def test_table_1_goes_seed_by_seed(name: str) -> None:
    experiment = EXPERIMENTS[f"relative-flatness/{name}"]
    full, small = experiment.runs("full"), experiment.runs("small")
    assert [run["seed"] for run in full] == [seed for seed in range(5) for _ in range(4)]
    assert {run["method"] for run in full[:4]} == set(table_1.METHODS)
    assert {run["network"] for run in full} == {"ResNet-18"}
    assert {run["seed"] for run in small} == {0, 1, 2}


def test_table_1_trains_each_method_in_its_own_way(loaded) -> None:
    state = torch.get_rng_state()
    outcomes = {m: table_1.work([micro(m)], CPU)[0] for m in table_1.METHODS}
    assert torch.equal(state, torch.get_rng_state())
    assert len({outcome["train_loss"] for outcome in outcomes.values()}) == len(table_1.METHODS)
    again = table_1.work([micro("SAM, ρ 0.05")], CPU)[0]
    assert again["losses"] == outcomes["SAM, ρ 0.05"]["losses"]
    strong = micro("FAM, strength 0.001", strength=1.0, epochs=6)
    plain = micro("SGD", epochs=6)
    flatness = [table_1.work([each], CPU)[0]["relative_flatness"] for each in (strong, plain)]
    assert flatness[0] < 0.7 * flatness[1]


def test_table_1_keeps_networks_that_diverged(loaded) -> None:
    (outcome,) = table_1.work([micro("SGD", lr=1e30)], CPU)
    assert math.isnan(outcome["train_loss"])
    assert math.isnan(outcome["relative_flatness"])


def made_up(better: float) -> list[Run]:
    """Accuracies with a large effect of the seed, and the gain of every method over SGD."""
    return [
        Run(
            {**settings},
            {
                "accuracy": 80.0
                + 3 * settings["seed"]
                + better * place
                + 0.01 * (place + seed) ** 2,
                "relative_flatness": 10.0 / (1 + place),
            },
        )
        for seed in range(5)
        for place, method in enumerate(table_1.METHODS)
        for settings in [micro(method, seed=seed)]
    ]


def test_table_1_compares_seed_by_seed() -> None:
    rows = {row.what: row for row in table_1.rows(made_up(0.5))}
    accuracy = rows["Fashion-MNIST, SGD: test accuracy, %"]
    assert accuracy.published == 94.57
    assert accuracy.error == pytest.approx(math.sqrt(9 * 2.5 / 5), rel=0.02)
    assert "LeNet-5" in accuracy.note
    assert "WideResNet28-10" in accuracy.note
    gain = rows["Fashion-MNIST, SAM, ρ 0.05: more than SGD's accuracy, points"]
    assert gain.ours == pytest.approx(0.55)
    assert gain.error < 0.05  # the seeds' own effect is gone
    assert gain.published == pytest.approx(0.42)
    assert rows["Fashion-MNIST, SGD: relative flatness of the last layer"].ours == 10.0


def test_table_1_of_a_part_of_the_runs() -> None:
    some = [run for run in made_up(0.5) if run["method"] != "SGD"][:2]
    assert len(table_1.rows(some)) == 4
    assert len(table_1.draw(some).axes) == 2


def test_table_1_draws_every_run() -> None:
    left, right = table_1.draw(made_up(0.5)).axes
    points = [x for line in left.lines if line.get_marker() == "o" for x in line.get_xdata()]
    assert len(points) == 20
    assert right.get_yscale() == "log"


def test_table_1_goes_on_where_it_stopped(loaded, tmp_path: Path, monkeypatch) -> None:
    experiment = EXPERIMENTS["relative-flatness/table-1-fashion-mnist"]
    done: list[str] = []

    def work(settings, device):
        done.extend(each["method"] for each in settings)
        return [{"accuracy": 90.0, "relative_flatness": 1.0} for _ in settings]

    short = replace(experiment, work=work, runs=lambda _: [micro(m) for m in table_1.METHODS])
    for _ in range(2):
        result = reproduce(short, folder=tmp_path, progress=False)
    assert done == list(table_1.METHODS)
    assert len(result.rows) == 11
