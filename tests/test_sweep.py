"""Sweeps lose nothing: kills, failures, damage and other sweeps at the same time."""

from __future__ import annotations

import doctest
import importlib
import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sweeps
import torch

import saltflat as sf
from saltflat import zoo
from saltflat.reproduction import Reproduction
from saltflat.sweep import Folder, Run, grid, sweep, train_together
from saltflat.sweep import progress as shown
from saltflat.sweep.jobs import _used, code_of
from saltflat.sweep.processes import _serve
from saltflat.sweep.progress import Tally

HERE = Path(__file__).parent


def swept(path: Path, settings: Any, work: Any, **options: Any) -> list[Run]:
    return sweep(settings, work, Folder(path), progress=False, **options)


def shell(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    paths = os.pathsep.join([str(HERE.parent / "src"), str(HERE)])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *arguments], env=environment, **{**pipes, **options})


def outcomes(runs: list[Run]) -> list[tuple[Any, Any]]:
    return [(dict(run.settings), dict(run.outcome)) for run in runs]


def test_what_is_kept_is_not_run_again(tmp_path: Path) -> None:
    calls: list[Any] = []

    def work(settings, device):
        calls.append(list(settings))
        return sweeps.square(settings, device)

    first = swept(tmp_path, grid(x=[1, 2]), work)
    again = swept(tmp_path, grid(x=[2, 3, 1]), work)
    assert calls == [[{"x": 1}], [{"x": 2}], [{"x": 3}]]
    assert [run["x"] for run in again] == [2, 3, 1]  # in the order asked for
    assert [run["y"] for run in again] == [4, 9, 1]
    fresh, found = first[0], again[2]  # a tensor and a NaN are the same from a file
    assert fresh["curve"] == found["curve"] == [0, 1, 2]
    assert math.isnan(fresh["gap"])
    assert math.isnan(found["gap"])
    assert (fresh.seconds, fresh.machine, fresh.threads) == (found.seconds, found.machine, 1)


def test_runs_of_other_code_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A constant beside the work is no setting: what it was when a run was made would be lost."""
    file = tmp_path / "changing.py"
    text = "RATE = {}\ndef work(settings, device):\n return [{{'y': RATE}} for _ in settings]\n"
    monkeypatch.syspath_prepend(tmp_path)
    file.write_text(text.format(1))
    work = importlib.import_module("changing").work
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = swept(tmp_path / "runs", grid(x=[1, 2]), work)
        swept(tmp_path / "runs", grid(x=[1, 2]), work)
    file.write_text(text.format(2))
    with pytest.warns(UserWarning, match="2 of the runs found"):
        again = swept(tmp_path / "runs", grid(x=[1, 2, 3]), work)
    assert [run.code == first[0].code for run in again] == [True, True, False]
    result = Reproduction("made-up/x", "small", tuple(again), (), (), "")
    assert "of 2 states of its code" in result.circumstances


def test_a_run_has_the_code_that_made_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process goes on with what it has loaded, also where its file is edited meanwhile."""
    file = tmp_path / "edited.py"
    text = "def work(settings, device):\n open(__file__, 'a').write('#')\n return [{}]\n"
    monkeypatch.syspath_prepend(tmp_path)
    file.write_text(text)
    work = importlib.import_module("edited").work
    loaded = code_of(work)
    runs = swept(tmp_path / "runs", grid(x=[1, 2, 3]), work)
    assert [run.code for run in runs] == [loaded] * 3
    with pytest.warns(UserWarning, match="3 of the runs found"):
        swept(tmp_path / "runs", grid(x=[1, 2, 3]), work)


def test_a_helper_of_its_package_is_its_code_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it uses, by way of another module too, and not what lies beside it."""
    texts = {
        "house/__init__.py": "",
        "house/room/__init__.py": "",
        "house/room/work.py": "from house.room.near import helper\n"
        "import math\ndef work(settings, device):\n return [{} for _ in settings]\n",
        "house/room/near.py": "from house.room import far\ndef helper(): return far.x\n",
        "house/room/far.py": "x = 1\n",
        "house/room/beside.py": "x = 1\n",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    work = importlib.import_module("house.room.work").work
    importlib.import_module("house.room.beside")
    first = code_of(work)
    assert len(first) == 12
    for name, counts in [("beside", False), ("far", True), ("near", True), ("work", True)]:
        before = code_of(work)
        with (tmp_path / f"house/room/{name}.py").open("a") as file:
            file.write("# more\n")
        assert (code_of(work) != before) == counts
    assert code_of(print) == ""


def test_its_code_is_of_its_whole_package_and_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network that another room of the package makes, and a helper beside a script."""
    texts = {
        "barn/__init__.py": "from barn.other import unused\n",
        "barn/nets.py": "class Net: pass\n",
        "barn/other.py": "def unused(): pass\n",
        "barn/work.py": "import barn\nfrom barn.nets import Net\ndef work(s, d): return []\n",
        "shed.py": "import near_shed\ndef work(s, d): return []\n",
        "near_shed.py": "",
    }
    (tmp_path / "barn").mkdir()
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    ours = {name: importlib.import_module(name).work for name in ("barn.work", "shed")}
    for name, file, counts in [
        ("barn.work", "barn/nets.py", True),
        ("barn.work", "barn/other.py", False),
        ("shed", "near_shed.py", True),
    ]:
        before = code_of(ours[name])
        with (tmp_path / file).open("a") as opened:
            opened.write("# more\n")
        assert (code_of(ours[name]) != before) == counts
    assert Path(zoo.__file__) in _used("saltflat.papers.minimum_sharpness.label_noise", {}).values()


def test_what_work_was_given_is_its_code_too(tmp_path: Path) -> None:
    """It is no setting: a run that was made with another number would be taken for its own."""

    def made(rate: float, extra: object = None) -> Callable[..., Any]:
        def work(settings: Any, device: Any, *, more: int = 1) -> list[dict[str, Any]]:
            return [{"y": rate, "of": str(extra)} for _ in settings]

        return work

    def given(settings: Any, device: Any, **options: Any) -> list[dict[str, Any]]:
        return [{"y": options["rate"]} for _ in settings]

    pairs = [
        (made(0.1), made(0.2)),
        (partial(given, rate=0.1), partial(given, rate=0.2)),
        (partial(given, rate={"a": [1]}), partial(given, rate={"a": [2]})),
        (partial(made(1), more=1), partial(made(1), more=2)),
        (partial(made(1), more=1), partial(made(2), more=1)),
    ]
    for index, (work, other) in enumerate(pairs):
        folder = tmp_path / str(index)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            swept(folder, grid(x=[1]), work)
            swept(folder, grid(x=[1]), work)
        with pytest.warns(UserWarning, match="1 of the runs found"):
            swept(folder, grid(x=[1]), other)
    assert code_of(made(0.1, object())) == code_of(made(0.1, object()))  # not of where it lies
    for one, other in ((np.float32(0.1), np.float32(0.2)), (Path("a"), Path("b"))):
        assert code_of(partial(given, rate=one)) != code_of(partial(given, rate=other))


@pytest.mark.parametrize("workers", [1, 2])
def test_runs_are_kept_by_what_was_asked_for(workers: int, tmp_path: Path) -> None:
    """Work that changes its settings; two of these four would be lost, or be kept as others."""
    settings = grid(x=[1, 2], seed=[0, 1])
    runs = swept(tmp_path, settings, sweeps.meddling, workers=workers)
    assert [run.settings for run in runs] == settings == grid(x=[1, 2], seed=[0, 1])
    assert [run["y"] for run in runs] == [1, 1, 2, 2]


def test_each_run_tells_of_its_own_circumstances() -> None:
    runs = [
        Run({"x": 1}, {}, created="2026-01-02T00:00:00", versions={"torch": "2.4"}),
        Run({"x": 2}, {}, created="2026-01-01T00:00:00", versions={"torch": "2.5"}),
        Run({"x": 3}, {}, created="2026-01-01T00:00:00", versions={"torch": "2.4"}),
    ]
    more = {"versions": {"torch": "2.6"}, "created": "2026-03-01"}
    result = Reproduction("made-up/x", "small", tuple(runs), (), (), "", **more)
    assert "finished 2026-01-02T00:00:00 (torch 2.4; torch 2.5)" in result.circumstances
    old = Reproduction("made-up/x", "small", (Run({"x": 1}, {}),), (), (), "", **more)
    assert "finished 2026-03-01 (torch 2.6)" in old.circumstances


def test_settings_that_go_together_are_one_call(tmp_path: Path) -> None:
    calls: list[Any] = []

    def work(settings, device):
        calls.append([each["x"] for each in settings])
        return sweeps.quick(settings, device)

    swept(tmp_path, grid(x=range(7)), work, together=lambda s: s["x"] % 2, most=3)
    assert calls == [[0, 2, 4], [6], [1, 3, 5]]


KILLER = """
import os, random, sys, time
from pathlib import Path
import torch
from saltflat.sweep import Folder, grid, sweep
from saltflat.report import store
import sweeps

torch.set_num_threads(1)
settings, folder = grid(x=range(200)), Folder(Path(sys.argv[1]))
draw, kept = random.Random(0), []

def child(fault=None):
    pid = os.fork()
    if pid == 0:
        if fault:
            setattr(os, fault, lambda *_: os.kill(os.getpid(), 9))  # while it writes
        sweep(settings, sweeps.quick, folder, progress=False)
        os._exit(0)
    return pid

def count():
    return len(list(folder.path.glob("*.json")))

for trial in range(8):
    fault = (None, None, "replace", "fsync")[trial % 4]
    before, more = count(), draw.randrange(1, 8)
    pid = child(fault)
    while not fault and count() < before + more:
        time.sleep(0.0005)
    time.sleep(draw.uniform(0, 0.005))
    if not fault:
        os.kill(pid, 9)
    os.waitpid(pid, 0)
    whole = [run for each in settings if (run := folder.find(each))]  # or it raises
    kept.append(len(whole))
    assert count() == len(whole)
pids = [child(), child()]  # two at once
assert all(os.waitpid(pid, 0)[1] == 0 for pid in pids)
print(kept, len(list(folder.path.glob(".*"))))
"""


def test_kills_lose_nothing_that_was_done(tmp_path: Path) -> None:
    """At random moments and in the middle of writing; then two sweeps finish it at once."""
    process = shell("-c", KILLER, str(tmp_path / "disturbed"))
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    kept, leftovers = eval(out.replace("]", "],"))
    assert kept == sorted(kept)
    assert 0 < kept[0] < 200
    assert leftovers >= 4  # the kills in the middle of writing left some, which nothing reads

    def never(settings, device):
        raise AssertionError("all of them are done")

    found = swept(tmp_path / "disturbed", grid(x=range(200)), never)
    assert outcomes(found) == outcomes(swept(tmp_path / "calm", grid(x=range(200)), sweeps.quick))


def test_processes_do_killed_jobs_again_and_tell_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MARKS", str(tmp_path))
    monkeypatch.setattr("saltflat.sweep.processes.TRIES", 2)  # each costs seconds
    good = [{"x": x, "how": "works"} for x in range(4)] + [{"x": 4, "how": "dies once"}]
    bad = [{"x": x, "how": how} for x, how in enumerate(["raises", "stubborn", "dies"])]
    folder = tmp_path / "runs"
    with pytest.raises(sf.SaltflatError, match="3 of 8 jobs failed") as caught:
        swept(folder, bad + good, sweeps.troubled, workers=2)
    message = str(caught.value)
    assert "{'x': 0, 'how': 'raises'}: ValueError: no such luck" in message
    assert "{'x': 1, 'how': 'stubborn'}: Stubborn: not to be pickled" in message
    assert "{'x': 2, 'how': 'dies'}: its process died 2 times, by SIGKILL" in message
    assert "in troubled" in "".join(caught.value.__notes__)
    assert (tmp_path / "died-4").exists()
    found = swept(folder, good, sweeps.troubled)
    assert outcomes(found) == outcomes(swept(tmp_path / "here", good, sweeps.troubled))
    assert [run.threads for run in found] == [1] * 5


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=str)
def test_no_process_outlives_a_sweep(
    how: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C goes to all processes of a terminal, a kill to the sweep alone."""
    monkeypatch.setenv("MARKS", str(tmp_path))
    folder = tmp_path / "runs"
    process = shell("-m", "sweeps", "asleep", str(folder), start_new_session=True)
    _until(lambda: len(list(tmp_path.glob("pid-*"))) == 2 and any(folder.glob("*.json")))
    children = [int(file.name.removeprefix("pid-")) for file in tmp_path.glob("pid-*")]
    start = time.monotonic()
    if how == signal.SIGINT:
        os.killpg(process.pid, how)
    else:
        process.send_signal(how)
    _, err = process.communicate(timeout=30)
    _until(lambda: not any(map(_alive, children)))
    assert time.monotonic() - start < 20
    assert process.returncode == -how
    assert err.count("KeyboardInterrupt") == (how == signal.SIGINT), err
    assert len(list(folder.glob("*.json"))) == 1


@pytest.mark.parametrize("first", [True, False])
def test_ctrl_c_while_a_process_is_started_is_heard(
    first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it is there and can be ended: what it waits for would never come."""
    start = SpawnProcess.start

    def interrupted(self: Any) -> None:
        if first:
            signal.raise_signal(signal.SIGINT)
        start(self)
        if not first:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(SpawnProcess, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        swept(tmp_path, grid(x=[1, 2, 3]), sweeps.square, workers=2)
    assert not multiprocessing.active_children()
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_process_that_nobody_waits_for_ends_in_silence(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """As after Ctrl-C, which comes while it starts."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, sweeps.square, torch.device("cpu"), 1))
    process.start()
    theirs.close()
    ours.close()
    process.join(60)
    assert process.exitcode == 0
    assert not capfd.readouterr().err


def _alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def _until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.slow
def test_a_script_without_a_guard_is_told(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from pathlib import Path\nimport sweeps\nfrom saltflat.sweep import Folder, grid, sweep\n"
        "sweep(grid(x=range(50)), sweeps.quick, Folder(Path('runs')), workers=2)\n"
    )
    process = shell(str(script), cwd=tmp_path)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "could not begin, and ended with exit code 1" in err


def test_damage_is_told(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    settings = grid(x=[1, 2])
    swept(tmp_path, settings, sweeps.quick)
    first, second = map(folder.file, settings)
    text = first.read_text()
    for damage in (text[:40], "", "[]", text.replace("outcome", "outcone"), second.read_text()):
        first.write_text(damage)
        with pytest.raises(sf.InvalidValue, match=rf"{first.name} is damaged; delete it to run"):
            swept(tmp_path, settings, sweeps.quick)
    first.unlink()
    assert [run["y"] for run in swept(tmp_path, settings, sweeps.quick)] == [1, 4]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ([{"x": [1, 2]}], "Got x=\\[1, 2\\], of type list"),
        ([{"x": np.float64(1.0)}], "of type float64; convert it first"),
        ([{"x": torch.tensor(1.0)}], "of type Tensor"),
        ([{"x": float("nan")}], "must be finite. Got x=nan"),
        ([{3: 1}], "mapping of names"),
        ([("x", 1)], "mapping of names"),
        ([{"x": 1, "y": 2}, {"y": 2, "x": 1}], "Got twice: {'y': 2, 'x': 1}"),
        ([{"x": 1}] * 2, "Got twice"),
    ],
)
def test_settings_must_be_plain_and_differ(settings: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(sf.SaltflatError, match=words):
        swept(tmp_path / "runs", settings, sweeps.quick)
    assert not (tmp_path / "runs").exists()


def test_close_settings_are_different_runs(tmp_path: Path) -> None:
    alike = [{"x": 1}, {"x": 1.0}, {"x": True}, {"x": "1"}, {"x": None}]
    runs = swept(tmp_path, alike, lambda settings, device: [{"kind": repr(settings[0]["x"])}])
    assert [run["kind"] for run in runs] == ["1", "1.0", "True", "'1'", "None"]


def test_wrong_use_is_told(tmp_path: Path) -> None:
    settings = grid(x=[1, 2])
    with pytest.raises(sf.InvalidValue, match=r"'here' or 'ray'. Got 'mars'"):
        swept(tmp_path, settings, sweeps.quick, on="mars")
    with pytest.raises(sf.InvalidValue, match=r"1 or more. Got 0 and 1"):
        swept(tmp_path, settings, sweeps.quick, workers=0)
    with pytest.raises(sf.InvalidValue, match="top of a module"):
        swept(tmp_path, settings, lambda settings, device: [{}], workers=2)
    with pytest.raises(sf.SaltflatError, match=r"one outcome a run, 1. Got 2"):
        swept(tmp_path, settings, lambda settings, device: [{}, {}])
    with pytest.raises(sf.SaltflatError, match=r"must be a mapping. Got int"):
        swept(tmp_path, settings, lambda settings, device: [3])


def test_a_log_has_a_line_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]
    monkeypatch.setattr(shown, "perf_counter", lambda: clock[0])
    with Tally("figure", total=40, found=10) as tally:
        for _ in range(20):
            clock[0] += 12
            tally.advance(1)
        tally.advance(failed=10)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "saltflat: figure: 10 of 40 runs were done before"
    assert lines[1] == "saltflat: figure: 13 of 40 runs, 5.0 a minute, about 5 min left"
    assert len(lines) == 1 + 6 + 1  # one every 36 s
    assert lines[-1] == "saltflat: figure: 30 of 40 runs, 10 failed, 7.5 a minute"


def test_a_terminal_has_a_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with Tally("figure", total=2, found=0) as tally:
        tally.advance(1)
        assert "1 of 2 runs, " in str(tally)
    assert "\x1b[" in capsys.readouterr().err


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_a_terminal_shows_the_time_left_however_narrow(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(columns))
    clock = [0.0]
    monkeypatch.setattr(shown, "perf_counter", lambda: clock[0])
    with Tally("relative-flatness/table-1-fashion-mnist", total=20, found=3) as tally:
        clock[0] += 130
        tally.advance(1)
    last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err)
    assert "about 35 min left" in last
    assert ("4 of 20 runs, 0.5 a minute, about 35 min left" in last) == (columns == 200)


@pytest.mark.parametrize("function", [sweep, train_together])
def test_examples(
    function: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    parsed = doctest.DocTestParser().get_doctest(function.__doc__, {}, "example", None, None)
    assert parsed.examples
    assert not doctest.DocTestRunner().run(parsed).failed
