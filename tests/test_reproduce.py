"""`saltflat reproduce`: with an experiment that is made up here."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import get_args

import pytest
import sweeps
import torch
from matplotlib.figure import Figure
from typer.testing import CliRunner, Result

import saltflat as sf
from saltflat import papers
from saltflat.cli import app
from saltflat.papers import EXPERIMENTS, Reproduction, Row, Size, reproduce
from saltflat.sweep import Run


def run(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["reproduce", *arguments])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to write to, and two experiments alone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MARKS", str(tmp_path))
    for name in list(EXPERIMENTS):
        monkeypatch.delitem(EXPERIMENTS, name)
    other = dataclasses.replace(sweeps.SQUARES, name="made-up/others", minutes={})
    for each in (sweeps.SQUARES, other):
        monkeypatch.setitem(EXPERIMENTS, each.name, each)
    return tmp_path


def test_it_lists_the_experiments() -> None:
    text = run().stdout
    assert "made-up" in text
    assert "/squares" in text
    assert "Squares of numbers" in text
    content = json.loads(run("--json").stdout)
    assert content["made-up/squares"] == {
        "title": "Squares of numbers",
        "paper": "saltflat: scale-invariant sharpness for PyTorch",
        "minutes": {"small": 0.1},
    }
    assert list(content) == ["made-up/squares", "made-up/others"]


def test_unknown_names_are_wrong_usage() -> None:
    assert "made-up/squares" in run("made-up/square", code=2).output
    assert "'made-up'" in run("maid-up", code=2).output
    run("made-up/squares", "--size", "tiny", code=2)
    run("made-up/squares", "--on", "mars", code=2)
    run("made-up/squares", "--device", "abacus", code=2)
    run("made-up/squares", "--workers", "0", code=2)


def test_one_experiment_writes_everything(place: Path) -> None:
    text = run("made-up/squares", "--folder", "out").stdout
    assert "published" in text
    assert "3.5 ± 0.25" in text
    assert "Changed: Nothing was published." in text
    folder = place / "out" / "made-up" / "squares" / "small"
    assert len(list((folder / "runs").iterdir())) == 8
    assert (folder / "figure.png").read_bytes()[:4] == b"\x89PNG"
    table = (folder / "table.md").read_text()
    assert "| mean of \\| squares | 3.5 | 3.5 ± 0.25 | 0 | a [note] |" in table
    assert "| largest | – | 9 | – |  |" in table
    assert "- Numbers are squared twice." in table
    assert "`saltflat reproduce made-up/squares --size small --device cpu`" in table
    result = sf.load(folder / "results.json")
    assert isinstance(result, Reproduction)
    assert result.seeds == (0, 1)
    assert len(result.runs) == 8
    assert all(each.seconds > 0.001 and each.threads == 1 for each in result.runs)
    assert len(result.machines[0]) > 3
    assert result.versions["saltflat"] == sf.__version__
    assert {each.versions["saltflat"] for each in result.runs} == {sf.__version__}
    assert max(each.created for each in result.runs) == result.finished <= result.created
    assert result.rows == tuple(sweeps.rows(result.runs))
    assert str(result) in text


def test_json_is_what_is_saved_and_nothing_is_run_twice(place: Path) -> None:
    first = json.loads(run("made-up/squares", "--json").stdout)
    again = run("made-up/squares", "--json", "--quiet")
    assert json.loads(again.stdout)["runs"] == first["runs"]  # with their seconds
    assert again.stderr == ""
    assert first["kind"] == "reproduction"
    both = json.loads(run("made-up", "--json").stdout)
    assert both["made-up/squares"]["runs"] == first["runs"]
    assert list(both) == list(json.loads(run("all", "--json").stdout)) == list(EXPERIMENTS)


def test_runs_that_are_timed_are_alone(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function of a test cannot go to another process."""
    told: list[int] = []
    timed = dataclasses.replace(sweeps.SQUARES, work=lambda *args: sweeps.quick(*args))
    with pytest.raises(sf.InvalidValue, match="top of a module"):
        reproduce(timed, workers=2, progress=False)
    alone = dataclasses.replace(timed, alone=True)
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    assert len(reproduce(alone, workers=2, on="ray", progress=False).runs) == 8
    assert told == [1, torch.get_num_threads()]


def test_on_a_cpu_a_kill_loses_one_run(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of networks gain little there. On a GPU they come together."""
    told: list[int] = []
    monkeypatch.setattr(
        sys.modules["saltflat.papers.experiment"],
        "sweep",
        lambda *_, most, **__: told.append(most) or [],  # type: ignore[func-returns-value]
    )
    several = dataclasses.replace(
        sweeps.SQUARES, most=8, rows=lambda _: (), draw=lambda _: Figure()
    )
    for device in ("cpu", "cuda", torch.device("cuda", 0)):
        reproduce(several, device=device, progress=False)
    assert told == [1, 8, 8]


def test_the_experiments_that_compare_times_are_alone() -> None:
    times = {"minimum-sharpness/figure-1", "minimum-sharpness/figure-3"}
    times |= {"relative-flatness/figure-4", "relative-flatness/figure-5"}
    assert {each.name for each in papers._ALL if each.alone} == times


def test_sizes_are_kept_apart(place: Path) -> None:
    run("made-up/squares")
    assert "largest" in run("made-up/squares", "--size", "full").stdout
    sizes: tuple[Size, ...] = ("small", "full")
    kept = [len(list((place / "reproduced/made-up/squares" / s / "runs").iterdir())) for s in sizes]
    assert kept == [8, 16]


def test_a_failure_does_not_stop_the_others(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(settings, device):
        if settings[0]["x"] == 2:
            raise RuntimeError("two is too many")
        return sweeps.quick(settings, device)

    broken = dataclasses.replace(sweeps.SQUARES, work=work)
    monkeypatch.setitem(EXPERIMENTS, "made-up/squares", broken)
    result = run("all", code=1)
    assert "made-up/others" in result.stdout
    assert "two is too many" in result.stderr
    assert "{'x': 2, 'seed': 0}" in result.stderr
    folder = place / "reproduced/made-up/squares/small"
    assert len(list((folder / "runs").iterdir())) == 6
    assert not (folder / "results.json").exists()
    monkeypatch.setitem(EXPERIMENTS, "made-up/squares", sweeps.SQUARES)
    assert "8 runs" in run("made-up/squares").stdout


def test_a_picture_that_is_not_finished_replaces_none(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when another process reads it, or when this one is killed."""
    run("made-up/squares")
    picture = place / "reproduced/made-up/squares/small/figure.png"
    before, write = picture.read_bytes(), Figure.savefig

    def stopped(self, file, **how):
        write(self, file, **how)
        assert picture.read_bytes() == before
        raise KeyboardInterrupt

    monkeypatch.setattr(Figure, "savefig", stopped)
    squares = dataclasses.replace(sweeps.SQUARES, draw=lambda runs: sweeps.draw(runs[:3]))
    with pytest.raises(KeyboardInterrupt):
        reproduce(squares, progress=False)
    assert picture.read_bytes() == before


def test_interrupted_work_is_kept(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(settings, device):
        if settings[0]["x"] == 2:
            raise KeyboardInterrupt
        return sweeps.quick(settings, device)

    broken = dataclasses.replace(sweeps.SQUARES, work=work)
    monkeypatch.setitem(EXPERIMENTS, "made-up/squares", broken)
    result = run("made-up/squares", code=130)
    assert "the same command goes on" in result.stderr
    assert len(list((place / "reproduced/made-up/squares/small/runs").iterdir())) == 4


def test_a_picture_needs_matplotlib_before_anything_is_run(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(sf.MissingDependency, match="matplotlib"):
        reproduce(sweeps.SQUARES)
    assert not (place / "reproduced").exists()


def test_numbers_that_are_not_finite_are_saved(place: Path) -> None:
    runs = (Run({"seed": 3}, {"y": float("inf")}, 1.0, "abacus", 2), Run({}, {}, 2.0, "abacus"))
    rows = (Row("a", float("nan"), float("inf"), 1.0),)
    result = Reproduction("p/f", "small", runs, rows, (), "saltflat reproduce p/f")
    loaded = Reproduction.load(result.save("r.json"))
    assert loaded.runs == runs
    assert str(loaded) == str(result)
    alone = dataclasses.replace(result, rows=(Row("a", 1.0, 0.5),))
    assert "published" in str(result)
    assert "published" not in str(alone)  # no empty columns
    assert "1 ± 0.5" in str(alone)
    assert result.machines == ("abacus (1 thread)", "abacus (2 threads)")
    assert "What we changed: nothing." in result.markdown()
    damaged = json.loads(Path("r.json").read_text())
    del damaged["rows"]
    Path("r.json").write_text(json.dumps(damaged))
    with pytest.raises(sf.SaltflatError, match=r"r.json is damaged"):
        sf.load("r.json")


def test_help_says_what_a_name_is() -> None:
    assert "An experiment, a paper, or all." in run("--help").stdout


ALL = dict(EXPERIMENTS)  # before tests take them away


@pytest.mark.parametrize("name", [name for name, each in ALL.items() if each.runs_of])
@pytest.mark.parametrize("size", get_args(Size))
def test_runs_of_another_experiment_are_among_its_own(name: str, size: Size) -> None:
    theirs = [dict(each) for each in ALL[ALL[name].runs_of or ""].runs(size)]
    assert all(dict(each) in theirs for each in ALL[name].runs(size))
