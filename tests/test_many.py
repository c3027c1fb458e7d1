"""Many checkpoints, one table: what each is alone, whatever becomes of the others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import many
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from typer.testing import CliRunner, Result

import saltflat as sf
from saltflat.checkpoints import by_name
from saltflat.cli import app

MEASURES = ["hessian_trace", "rho", "normalized_sharpness"]
ALL = ["epoch-0", "epoch-1", "epoch-2"]


def measured(checkpoints: Any, data: Any = None, **options: Any) -> sf.Comparison:
    options = {"model": many.make, "measures": MEASURES, "progress": False, **options}
    return sf.measure_many(checkpoints, many.data() if data is None else data, **options)


def alone(which: int, **options: Any) -> sf.Report:
    return sf.measure(many.make(which), many.data(), measures=MEASURES, **options)


def assert_same(found: sf.Report, expected: sf.Report) -> None:
    assert dict(found) == dict(expected)
    assert found.standing == expected.standing
    assert found.provenance.model_hash == expected.provenance.model_hash


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    return many.saved(tmp_path, 3)


@pytest.mark.filterwarnings("ignore:The outputs have 2 directions")
def test_each_is_what_measure_says(files: list[Path]) -> None:
    """Values, errors and standing, of estimates too; the second is not the first."""
    state = torch.get_rng_state()
    with pytest.warns(UserWarning, match=r"epoch-2: 4 names of weights were made to fit"):
        found = measured(files, seed=3, max_directions=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert [*found] == ALL
    assert not found.failed
    for which, name in enumerate(ALL):
        assert_same(found[name], alone(which, seed=3, max_directions=1))
    assert not found["epoch-0"]["hessian_trace"].exact  # so that the seed is seen
    assert found["epoch-0"]["hessian_trace"] != alone(0, seed=4, max_directions=1)["hessian_trace"]
    assert found["epoch-0"]["rho"] != found["epoch-1"]["rho"]
    assert "made to fit" in found["epoch-2"].notes[-1]
    assert not found.problems


def test_state_dicts_by_name_and_a_network_to_copy(files: list[Path]) -> None:
    model = many.make(5)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    sources = {"b": many.make(1).state_dict(), "a": files[0]}
    x, y = many.data()
    loader = DataLoader(TensorDataset(x, y), batch_size=12)
    for data in (loader, many.data):
        found = measured(sources, data, model=model)
        assert [*found] == ["b", "a"]
        assert dict(found["b"]) == dict(alone(1))
        assert dict(found["a"]) == dict(alone(0))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_failures_and_kills_in_processes(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MARKS", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    given = [many.misfit(tmp_path), Path("epoch-0.pt"), many.not_numbers(tmp_path), files[1]]
    found = measured(given, many.data, model=many.killed_once, workers=2)
    assert (tmp_path / "made-once").exists()
    assert [*found] == ALL[:2]
    assert_same(found["epoch-0"], alone(0))
    assert_same(found["epoch-1"], alone(1))
    assert [*found.failed] == ["misfit", "nan"]
    assert "(6, 4), not (5, 4)" in found.failed["misfit"]
    assert "'0.weight' holds NaN" in found.failed["nan"]
    assert measured(given).failed == found.failed


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The hashes of the models that are measured from now on."""
    calls: list[str] = []

    def measure(*args: Any, **options: Any) -> sf.Report:
        report = sf.measure(*args, **options)
        calls.append(report.provenance.model_hash)
        return report

    monkeypatch.setattr("saltflat.many.measure", measure)
    return calls


def test_a_folder_goes_on_and_takes_nothing_else_for_it(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, folder = counted(monkeypatch), tmp_path / "results"
    gone = tmp_path / "later.pt"
    first = measured([files[0], gone], folder=folder)
    assert len(calls) == 1
    assert [*first.failed] == ["later"]
    torch.save(many.make(7).state_dict(), gone)
    again = measured([gone, files[0]], folder=folder)
    assert len(calls) == 2
    assert [*again] == ["later", "epoch-0"]
    assert again["epoch-0"] == first["epoch-0"]

    files[0].write_bytes(gone.read_bytes())
    assert dict(measured([gone, files[0]], folder=folder)["epoch-0"]) == dict(alone(7))
    assert len(calls) == 3
    x, y = many.data()
    others: list[dict[str, Any]] = [
        {"data": (x + 1, y)},
        {"seed": 1},
        {"measures": ["rho"]},
        {"loss": lambda outputs, targets: outputs.square().mean()},
        {"model": lambda: nn.Sequential(*many.make()[:1], nn.Sigmoid(), many.make()[2])},
    ]
    for count, other in enumerate(others, start=4):
        for _ in range(2):
            measured({"epoch-0": files[0]}, folder=folder, **other)
            assert len(calls) == count
    state = {"epoch-0": many.make(8).state_dict()}
    for _ in range(2):
        measured(state, folder=folder)
        assert len(calls) == 4 + len(others)


def test_ctrl_c_keeps_what_is_done(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def measure(*args: Any, **options: Any) -> sf.Report:
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return sf.measure(*args, **options)

    monkeypatch.setattr("saltflat.many.measure", measure)
    with pytest.raises(sf.Interrupted) as stop:
        measured(files)
    assert [*stop.value.partial] == ["epoch-0"]
    assert [*stop.value.partial.failed] == ["epoch-1", "epoch-2"]
    assert "interrupted" in stop.value.partial.failed["epoch-1"]


def test_failures_are_shown_and_kept(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = measured([*files[:2], many.misfit(tmp_path)], measures=["rho"])
    for width in (50, 130):
        monkeypatch.setenv("COLUMNS", str(width))
        assert "misfit FAILED: LoadError" in str(found)
        assert "misfit FAILED" in repr(found)
    assert "misfit FAILED" in found._repr_html_()
    assert "misfit FAILED" in found.save(tmp_path / "many.html").read_text()
    path = found.save(tmp_path / "many.json")
    assert sf.load(path) == found
    content = json.loads(path.read_text())
    del content["failed"]  # as earlier versions wrote it
    path.write_text(json.dumps(content))
    old = sf.Comparison.load(path)
    assert (old.failed, old.reports) == ({}, found.reports)
    assert "FAILED" not in str(old)
    pytest.importorskip("pandas")
    assert found.to_pandas().attrs["failed"] == found.failed


def test_many_models_of_few_measures_have_a_row_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    one = alone(0)
    lines = str(sf.Comparison({f"run {k}": one for k in range(9)})).splitlines()
    for k in range(9):
        (line,) = [line for line in lines if line.startswith(f"run {k}  ")]
        for measure in MEASURES:
            assert f" {one[measure].value:.5g}" in line
    assert any(line.startswith("verdict") for line in lines)
    assert any(line.startswith("hessian_trace is invariant to") for line in lines)
    assert max(map(len, lines)) <= 80
    monkeypatch.setenv("COLUMNS", "40")  # where they do not fit
    assert len(str(sf.Comparison({f"run {k}": one for k in range(9)})).splitlines()) > 30


def test_what_does_not_fit_is_left_and_told(tmp_path: Path) -> None:
    state = many.make(1).state_dict()
    del state["2.bias"]
    with pytest.raises(sf.SaltflatError, match="missing"):
        measured({"a": state})
    with pytest.warns(UserWarning, match=r"a: weights not in the file.*2.bias"):
        found, again = (measured({"a": state}, strict=False) for _ in range(2))
    assert dict(found["a"]) == dict(again["a"])  # what is left follows the seed


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["runs/best.pt"], ["best"]),
        (["runs/b.pt", "runs/a.safetensors"], ["b", "a"]),
        (["runs/a/best.pt", "runs/b/best.pt"], ["a", "b"]),
        (["runs/a/1.pt", "runs/b/2.pt"], ["a/1", "b/2"]),
        (["a.pt", "a.ckpt"], ["a.pt", "a.ckpt"]),
        (["runs/a.pt", "runs/old/a.pt"], ["a", "old/a"]),
        (["runs/lr=0.1/a.pt", "runs/lr=0.5/a.pt"], ["lr=0.1", "lr=0.5"]),
    ],
)
def test_names_are_the_parts_that_differ(paths: list[str], names: list[str]) -> None:
    assert by_name(map(Path, paths)) == dict(zip(names, map(Path, paths), strict=True))


MISTAKES: list[tuple[Any, Mapping[str, Any], str]] = [
    ([], {}, "checkpoints is empty"),
    ("a.pt", {}, r"must be a list of files.*Got 'a.pt'"),
    ([{}], {}, "must be a path"),
    ({1: "a.pt"}, {}, "must be words. Got 1"),
    (["a.pt", "./a.pt"], {}, "Got twice"),
    (["a.pt"], {"mesures": ["rho"]}, "has no option 'mesures'. Nearest is 'measures'"),
    (["a.pt"], {"measures": ["rhu"]}, "Unknown measure 'rhu'"),
    (["a.pt"], {"model": "net.py"}, "callable that makes the network.*Got str"),
    (["a.pt"], {"progress": print}, "True, False or None. Got builtin"),
    (["a.pt"], {"on": "mars"}, "'here' or 'ray'. Got 'mars'"),
    (["a.pt"], {"workers": 0}, "1 or more"),
    (["a.pt", "b.pt"], {}, r"None of the 2 checkpoints(.|\n)*There is no file"),
    (["a.pt"], {"model": lambda: 3}, "must make an nn.Module. It made int"),
    (["a.pt"], {"model": lambda: 3, "workers": 2}, "model cannot be sent.*top of a module"),
    (["a.pt"], {"data": [lambda: 3], "workers": 2}, "data cannot be sent.*what makes"),
]


@pytest.mark.parametrize(("checkpoints", "options", "words"), MISTAKES)
def test_mistakes_are_explained(checkpoints: Any, options: Any, words: str) -> None:
    with pytest.raises(sf.SaltflatError, match=words):
        measured(checkpoints, **options)


# the command


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    runs = many.saved(tmp_path / "runs", 2)
    runs[0].rename(runs[0].with_stem("epoch-10"))
    torch.save(dict(zip("xy", many.data(), strict=True)), "data.pt")
    return tmp_path


def run(*arguments: str, code: int = 0) -> Result:
    options = ["measure", "many:make", "--data", "data.pt", "-m", "rho", "--quiet"]
    result = CliRunner().invoke(app, [*options, *arguments])
    assert result.exit_code == code, result.output
    return result


def test_the_command_says_what_the_function_says(place: Path) -> None:
    found = run("--each", "runs/epoch-*", "--json", "--save", "many.json", "--html", "many.html")
    content = json.loads(found.stdout)
    assert [*content["reports"]] == ["epoch-1", "epoch-10"]  # and not as words are sorted
    loaded = sf.load(place / "many.json")
    assert isinstance(loaded, sf.Comparison)
    assert loaded["epoch-10"]["rho"].value == alone(0)["rho"].value
    assert "epoch-10" in (place / "many.html").read_text()


def test_the_command_shows_failures_in_its_exit_code(place: Path) -> None:
    many.misfit(place)
    options = ["--each", "misfit.pt", "--each", "runs/*", "--folder", "results"]
    for workers in ("2", "1"):
        found = run(*options, "--workers", workers, code=1)
        assert "misfit FAILED" in found.stdout
        assert "epoch-10" in found.stdout
    assert len([*(place / "results").glob("*.json")]) == 2
    run("--each", "misfit.pt", code=1)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--each nothing/*.pt", "No file matches 'nothing/*.pt'"),
        ("--each runs/* --checkpoint data.pt", "Not beside --each"),
        ("--workers 2", "It goes with --each"),
        ("--on ray", "It goes with --each"),
        ("--folder results", "It goes with --each"),
    ],
)
@pytest.mark.usefixtures("place")
def test_mistakes_in_the_command(line: str, words: str) -> None:
    assert words in " ".join(run(*line.split(), code=2).output.replace("│", " ").split())
