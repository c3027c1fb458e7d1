"""`saltflat … --distributed` under torchrun says what the same command says in one process."""

from __future__ import annotations

import json
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import launched
import numpy as np
import pytest
import ranks
import torch
import typer
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.utils.data import DataLoader
from typer.testing import CliRunner

import saltflat as sf
from saltflat.cli import app
from saltflat.cli.running import World
from saltflat.shards import shard_of
from saltflat.subsample import _cuts

pytestmark = pytest.mark.filterwarnings("ignore")

Results = list[dict[Any, Any]]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Results]:
    """The results of all commands, and where they are: data, and a store for every command."""
    folder = tmp_path_factory.mktemp("launched")
    names = [*launched.SAME, *launched.REFUSED, "traced", "killed"]
    stores = {n: TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for n in names}
    ports = {name: str(store.port) for name, store in stores.items()}
    (folder / "ports.json").write_text(json.dumps(ports))
    x, y = launched.dataset().tensors
    np.savez(folder / "data.npz", x=x.numpy(), y=y.numpy())
    (folder / "gone").mkdir()
    return folder, ranks.started(2, folder, launched.work)


def content(result: Any) -> Any:
    """What must not depend on how many processes have measured."""
    if isinstance(result, sf.Comparison):
        return {name: content(report) for name, report in result.items()}
    if isinstance(result, sf.Landscape):
        return result.losses, result.samples, result.data_hash
    if isinstance(result, sf.Audit):
        return {n: (row.value, row.verdict, list(row.drifts)) for n, row in result.items()}
    found = ranks.report(result)
    # Tensors that lie in one batch are cut.
    samples, _, _, data = found.pop("source")
    return {**found, "samples": samples, "data": data, "cost": None}


@pytest.mark.parametrize("name", launched.SAME)
def test_processes_say_what_one_says(
    world: tuple[Path, Results], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, (first, second) = world
    assert first[name][0] == 0, first[name]
    assert second[name] == (0, "", "")  # rank 0 alone speaks …
    path = folder / f"{name.replace(' ', '-')}-0.json"
    assert not path.with_name(path.name.replace("-0.", "-1.")).exists()  # … and writes
    monkeypatch.chdir(folder)
    alone = tmp_path / "alone.json"
    done = CliRunner().invoke(app, [*launched.SAME[name], "--save", str(alone)])
    assert done.exit_code == 0, done.output
    assert first[name][1][:30] == done.stdout[:30]
    assert not ranks.differences(content(sf.load(alone)), content(sf.load(path)), name)


@pytest.mark.parametrize("name", launched.REFUSED)
def test_an_error_ends_all_and_is_told_once(world: tuple[Path, Results], name: str) -> None:
    _, code, words = launched.REFUSED[name]
    _, (first, second) = world
    codes, outputs, errors = zip(first[name], second[name], strict=True)
    assert codes == (code, code), errors
    told = "".join(errors)
    assert re.search(words, told.replace("\n", " ")), told
    assert "Traceback" not in told
    assert told.count("saltflat: ") == 1, told
    assert outputs[1] == ""


def test_a_traceback_is_that_of_the_rank_that_raised(world: tuple[Path, Results]) -> None:
    _, (first, second) = world
    told = first["traced"][2] + second["traced"][2]
    assert "in broken_on_one" in told
    assert told.count('FileNotFoundError("no such disk")') == 1


def test_a_process_that_is_killed_ends_the_others(world: tuple[Path, Results]) -> None:
    _, (first, second) = world
    assert "killed" not in second
    code, _, told = first["killed"]
    assert code == 1
    assert told.startswith("saltflat: A rank is gone")
    assert first["seconds", "killed"] < 60


def refusal(*arguments: str) -> str:
    """What a command says that is refused for wrong usage, on one line."""
    done = CliRunner().invoke(app, [*arguments], env={"COLUMNS": "400"})
    assert done.exit_code == 2, done.output
    return re.sub(r"[\s│]+", " ", done.stderr)


MEASURE = ["measure", "zoo:mlp:4-3", "--data", f"{launched.ME}batches"]


def test_without_torchrun() -> None:
    told = refusal(*MEASURE, "--distributed")
    assert "torchrun --nproc-per-node 2 -m saltflat" in told
    assert "RANK and WORLD_SIZE and MASTER_ADDR and MASTER_PORT are not in the environment" in told
    assert "has no use for it" in refusal("balance", *MEASURE[1:], "--distributed")


def test_torchrun_without_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both processes would measure everything, and write the same file."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    told = refusal(*MEASURE, "--save", "run.json")
    assert "one of 2 processes" in told
    assert "Add --distributed" in told
    assert "one of 2 processes" in refusal("bench", *MEASURE[1:])


def test_one_process_of_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with data that cannot be divided."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    agent = {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in {**place, **agent}.items():
        monkeypatch.setenv(name, value)
    command = ["measure", f"{launched.ME}tanh", "--data", f"{launched.ME}stream", "-m", "rho"]
    for path, more in {"one.json": ["--distributed"], "alone.json": []}.items():
        done = CliRunner().invoke(app, [*command, *more, "--save", str(tmp_path / path)])
        assert done.exit_code == 0, done.output
        assert not torch.distributed.is_initialized()
    one, alone = (sf.Report.load(tmp_path / name) for name in ("one.json", "alone.json"))
    assert one.measurements == alone.measurements


def test_a_process_that_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    agent = {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in {**place, **agent}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("saltflat.cli.running._MEETING", timedelta(seconds=1))
    done = CliRunner().invoke(app, [*MEASURE, "--distributed"])
    assert done.exit_code == 1
    assert "The 2 processes did not meet at 127.0.0.1" in done.stderr
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("device", "local", "count", "own"),
    [
        ("cpu", "1", 0, "cpu"),
        ("cuda", "1", 2, "cuda:1"),
        ("cuda", None, 2, "cuda:1"),  # of rank 3, of two machines
        ("cuda:0", "1", 2, None),
        ("cuda", "1", 1, None),
    ],
)
def test_every_process_takes_a_gpu_of_its_own(
    device: str, local: str | None, count: int, own: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is looked up, for there is none here."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    place = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    if local is not None:
        monkeypatch.setenv("LOCAL_RANK", local)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    if own is None:
        with pytest.raises(typer.BadParameter, match="a GPU of its own"):
            World(device)
    else:
        assert World(device).device == own


def test_a_sampler_of_ours_is_known_for_one_that_leaves_samples_out() -> None:
    sampler = sf.ShardSampler(launched.dataset(), rank=0, world=2)
    loader = DataLoader(launched.dataset(), batch_size=4, sampler=sampler)
    report = sf.measure(launched.relu(), loader, measures=["rho"])
    assert any("samples of rank 0 of 2 alone" in note for note in report.notes)
    with pytest.raises(sf.DataError, match="this is rank 1 of 2"):
        shard_of(loader, 1, 2)


@pytest.mark.parametrize(
    ("sizes", "most", "ranks", "cuts"),
    [
        ([4, 4, 4, 4, 4, 3], None, 2, [0, 12, 23]),  # between batches
        ([4, 4, 4], None, 2, [0, 4, 12]),
        ([23], None, 3, [0, 7, 15, 23]),  # within one
        ([4, 4, 4], 6, 2, [0, 4, 6]),
        ([4, 4, 4], 3, 2, [0, 1, 3]),
        ([4, 4, 4], 99, 1, [0, 12]),
        ([2], None, 4, [0, 0, 1, 1, 2]),
        ([], None, 2, [0, 0, 0]),
    ],
)
def test_where_data_are_cut(
    sizes: list[int], most: int | None, ranks: int, cuts: list[int]
) -> None:
    assert _cuts(sizes, most, ranks) == cuts
