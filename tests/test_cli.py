"""The command: what it prints where, its exit codes, and what it says to mistakes."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.torch_version import TorchVersion
from typer.testing import CliRunner, Result

import saltflat as sf
from saltflat.cli import app
from saltflat.cli.running import Code
from saltflat.curvature import Settings
from saltflat.work import Line, Work

SOURCE = Path(__file__).parent.parent / "src"

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, hidden=5):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, hidden), nn.Linear(hidden, 3)

    def forward(self, x):
        return self.fc2(self.fc1(x).relu())

class Bent(Net):
    def forward(self, x):
        return self.fc2(self.fc1(x).tanh()).tanh()

class Pair(Net):
    def forward(self, x):
        return {"answer": super().forward(x), "other": x}

def make(): return Net()
def loud():
    print("hello")
    return Net()
def wants(hidden): return Net(hidden)
def broken(): raise RuntimeError("no such thing")
def loader():
    x = torch.linspace(-1, 1, 48).reshape(12, 4)
    return [(x[:8], torch.arange(8) % 3), (x[8:], torch.arange(4) % 3)]
def empty(): return []
def squares(outputs, targets): return (outputs ** 2).mean()
three = 3
instance = Net()
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a network, weights for it, and data."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    name = f"net_{abs(hash(tmp_path))}"  # a module of its own for every test
    (tmp_path / f"{name}.py").write_text(NET)
    (tmp_path / "net.txt").write_text(name)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 4, generator=generator).double().numpy()
    np.savez(tmp_path / "data.npz", x=x, y=np.arange(12) % 3)
    return tmp_path


def net(place: Path, name: str) -> str:
    return f"{(place / 'net.txt').read_text()}.py:{name}"


def make(place: Path) -> nn.Module:
    scope: dict[str, Any] = {}
    exec(NET, scope)
    torch.manual_seed(7)
    return scope["make"]()


def run(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result


def test_what_the_result_says_is_not_said_beside_it(place: Path) -> None:
    """Estimates warn; the table has that among its notes, and JSON goes to a program."""
    options = "measure", net(place, "Bent"), "--data", "data.npz", "-m", "hessian_trace"
    found = run(*options)
    note = "was NOT reached"
    assert note in " ".join(found.stdout.split())
    assert note not in found.stderr
    assert note in run(*options, "--json").stderr
    assert note not in run(*options, "--json", "--quiet").stderr


def shell(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "saltflat", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=environment, **{**pipes, **options})


def test_measure_says_what_the_function_says(place: Path) -> None:
    model = make(place)
    torch.save(model.state_dict(), place / "w.pt")
    content = np.load("data.npz")
    data = torch.from_numpy(content["x"]).float(), torch.from_numpy(content["y"])
    names = ["rho", "hessian_trace"]
    truth = sf.measure(model, data, measures=names)
    options = ["--checkpoint", "w.pt", "--data", "data.npz", "--measures", ",".join(names)]
    pages = ["--save", "run.json", "--html", "run.html"]
    found = run("measure", net(place, "make"), *options, "--json", *pages)
    assert "rho" in (place / "run.html").read_text()
    assert sf.Report.load(place / "run.json").measurements == truth.measurements
    (place / "piped.json").write_text(found.stdout)
    assert sf.Report.load(place / "piped.json").measurements == truth.measurements
    table = run("measure", net(place, "make"), *options)
    assert "rho" in table.stdout
    assert "cost: " in table.stdout


@pytest.mark.parametrize("columns", ["80", "200"])
def test_tables_say_what_to_write_on_the_command_line(
    columns: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    said = run("measure", net(place, "make"), "--data", "data.npz").stdout
    assert "-m all" in said
    assert "measures=" not in said
    run("measure", net(place, "three"), "--data", "data.npz", code=3)
    x, y = torch.randn(6, 4), torch.arange(6) % 3
    assert 'measures="all"' in str(sf.measure(make(place), (x, y)))  # and in Python what is there


def test_options_reach_the_function(place: Path) -> None:
    options = ["--data", net(place, "loader"), "-m", "hessian_trace", "--json"]
    few = ["--samples", "9", "--dtype", "float64", "--seed", "3", "--curvature", "ggn"]
    content = json.loads(run("measure", net(place, "instance"), *options, *few).stdout)
    where = content["provenance"]
    assert (where["samples"], where["batches"], where["dtype"]) == (9, 2, "float64")
    assert (where["seed"], where["curvature"]) == (3, "ggn")
    run("measure", net(place, "Pair"), *options, code=1)
    run("measure", net(place, "Pair"), *options, "--output", "answer")
    wrong = run("measure", net(place, "Pair"), *options, "--output", "answr", code=1)
    assert "It holds 'answer', 'other'; nearest is 'answer'." in " ".join(wrong.output.split())
    own = json.loads(
        run("measure", net(place, "make"), *options, "--loss", net(place, "squares")).stdout
    )
    assert own["provenance"]["loss"] == "squares"


def test_what_is_relied_on_and_how_much_memory_is_taken(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = [net(place, "make"), "--data", "data.npz", "--json"]
    asked = ["-m", "hessian_trace"]
    trace = json.loads(run("measure", *options, *asked).stdout)["measurements"]["hessian_trace"]
    assert trace["exact"]
    none = run("measure", *options, *asked, "--certify", "none").stdout
    (note,) = [n for n in json.loads(none)["notes"] if "no certificate was asked for" in n]
    assert "blocks" in note
    torch.save(make(place).state_dict(), place / "weights.pt")
    each = json.loads(
        run("measure", *options, *asked, "--each", "weights.pt", "--certify", "none").stdout
    )
    (report,) = each["reports"].values()
    assert any("no certificate was asked for" in note for note in report["notes"])

    budgets = list[Any]()
    budget = Settings.budget

    def seen(self: Settings, *device: Any, **weights: Any) -> int:
        budgets.append(self.memory_budget)
        return budget(self, *device, **weights)

    monkeypatch.setattr(Settings, "budget", seen)
    commands = [
        ["measure", *options],
        ["audit", *options, "--elements", "1"],
        ["balance", *options],
    ]
    commands += [["compare", options[0], *options[1:]], ["bench", *options, "--repeats", "1"]]
    for command in commands:
        budgets.clear()
        run(*command, "--memory-budget", "1000")
        assert set(budgets) == {1000}, command


def test_as_many_samples_as_it_takes(place: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    many = {"x": torch.randn(2000, 4, generator=generator), "y": torch.arange(2000) % 3}
    torch.save(many, place / "many.pt")
    asked = ["--data", "many.pt", "-m", "hessian_trace", "--tolerance", "0.1", "--json"]
    content = json.loads(run("measure", net(place, "make"), *asked, "--samples", "auto").stdout)
    assert content["provenance"]["population"] == 2000
    assert content["provenance"]["samples"] < 2000
    content = json.loads(run("measure", net(place, "make"), *asked).stdout)
    assert (content["provenance"]["population"], content["provenance"]["samples"]) == (0, 2000)
    torch.save(make(place).state_dict(), place / "weights.pt")
    each = ["--each", "weights.pt", "--samples", "auto"]
    content = json.loads(run("measure", net(place, "make"), *asked, *each).stdout)
    (report,) = content["reports"].values()
    assert report["provenance"]["population"] == 2000


def test_what_is_drawn_at_random_follows_the_seed(place: Path) -> None:
    """Also where the module draws numbers when it is imported, which it is once."""
    options = [net(place, "make"), "--data", "data.npz", "-m", "rho", "--json"]
    runs = [run("measure", *options, "--seed", seed).stdout for seed in ("1", "1", "2")]
    one, again, other = (json.loads(text)["provenance"]["model_hash"] for text in runs)
    assert one == again != other


def test_compare_takes_checkpoints_models_and_reports(place: Path) -> None:
    for name in ("a", "b"):
        torch.save(make(place).state_dict(), f"{name}.pt")
    options = ["--data", "data.npz", "-m", "rho"]
    checkpoints = ["--checkpoint", "a.pt", "--checkpoint", "b.pt"]
    found = run("compare", net(place, "make"), *checkpoints, *options, "--json")
    content = json.loads(found.stdout)
    assert list(content["reports"]) == ["a", "b"]
    named = [f"x={net(place, 'make')}", f"y={net(place, 'Net')}"]
    table = run("compare", *named, *checkpoints, *options).stdout
    assert re.search(r"rho .* x |measure .* x .* y", table)
    for name in ("a", "b"):
        run(
            "measure",
            net(place, "make"),
            "--weights",
            f"{name}.pt",
            *options,
            "--save",
            f"{name}.json",
        )
    assert "rho" in run("compare", "a.json", "b.json").stdout
    run("compare", "a.json", "a.json", code=2)
    twice = json.loads(run("compare", "one=a.json", "two=a.json", "--json").stdout)
    assert list(twice["reports"]) == ["one", "two"]
    run("compare", *named, named[0], *options, code=2)
    run("compare", *named, *options, "--checkpoint", "a.pt", code=2)
    (place / "b.json").write_text("[" * 100_000)
    run("compare", "a.json", "b.json", code=3)
    run("compare", "a.json", "none.json", code=3)


def test_an_interrupted_comparison_keeps_what_is_done(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, calls = sf.measure, list[Any]()

    def second_time(*args: Any, **options: Any) -> sf.Report:
        calls.append(args)
        report = whole(*args, **options)
        if len(calls) == 2:
            raise sf.Interrupted(report)
        return report

    monkeypatch.setattr(sf, "measure", second_time)
    models = [f"{name}={net(place, 'make')}" for name in "abc"]
    options = ["--data", "data.npz", "-m", "rho", "--json", "--save", "all.json"]
    content = json.loads(run("compare", *models, *options, code=130).stdout)
    assert list(content["reports"]) == ["a", "b (partial)"]
    assert (place / "all.json").exists()


def test_audit_ends_with_its_verdict(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = [net(place, "make"), "--data", "data.npz", "-m", "hessian_trace", "--elements", "1"]
    found = run("audit", *options, "--json", "--save", "audit.json")
    audit = sf.Audit.load(place / "audit.json")
    assert json.loads(found.stdout)["audit"]["model"] == "Net"
    assert audit["hessian_trace"].verdict == "moved"
    # A measure that declares an invariance which it does not have.
    kind = type(sf.measure.__globals__["MEASURES"]["hessian_trace"]())
    monkeypatch.setattr(kind, "invariant_to", frozenset({"neuron", "layer"}))
    assert "DISAGREES" in run("audit", *options, code=4).stdout


def test_balance_writes_weights_of_the_same_function(place: Path) -> None:
    model = make(place)
    torch.save(model.state_dict(), "w.pt")
    options = [net(place, "make"), "--checkpoint", "w.pt", "--data", "data.npz"]
    content = json.loads(run("balance", *options, "--save", "w.safetensors", "--json").stdout)
    traces = content["hessian_trace"]
    assert traces["after"]["value"] < traces["before"]["value"]
    assert content["rescalings"] == 5
    x = torch.randn(6, 4)
    before = model(x)
    model.load_state_dict(load_file("w.safetensors"))
    torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-5)
    assert "5 rescalings" in run("balance", *options).stdout
    run("balance", *options, "--save", "w.pt", code=2)


def test_landscape_goes_on_where_it_stopped(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = [net(place, "make"), "--data", "data.npz", "--dimensions", "1", "--points", "5"]
    found = run("landscape", *options, "--json", "--save", "line.json", "--plot", "line.png")
    assert (
        json.loads(found.stdout)["landscape"]
        == json.loads((place / "line.json").read_text())["landscape"]
    )
    assert (place / "line.png").stat().st_size > 1000
    assert "nothing was kept" not in found.stderr
    assert "--html and --plot draw it" in run("landscape", *options).stderr
    whole = sf.Landscape.load(place / "line.json")
    assert "Loss along" in run("landscape", *options, "--save", "line.json").stdout
    run("landscape", *options, "--tolerance", "0.1", code=2)

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sf, "landscape", stop)
    run("landscape", *options, code=130)
    again = run("landscape", *options, "--save", "line.json", code=130)
    assert str(whole) in " ".join(again.stdout.split())


def test_bench_counts_in_gradients(place: Path) -> None:
    options = [net(place, "make"), "--data", "data.npz", "--repeats", "1"]
    content = json.loads(run("bench", *options, "--json").stdout)
    assert content["gradients"]["one gradient"] == 1
    assert content["exact"] is True
    assert "largest eigenvalue" in run("bench", *options).stdout


def test_data_says_where_sets_come_from(place: Path) -> None:
    assert "scikit-learn" in run("data").stdout
    assert json.loads(run("data", "--json").stdout)["digits:test"]["from"]
    assert "fetched" in json.loads(run("data", "--json").stdout)["mnist:test"]["from"]
    assert "float64 (12, 4)" in run("data", "data.npz").stdout
    assert "first batch: inputs: float32 (8, 4)" in run("data", net(place, "loader")).stdout
    assert "float32 (1437, 64)" in run("data", "digits").stdout


def test_doctor_tells_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(package: str) -> str:
        if package == "pandas":
            raise PackageNotFoundError
        return version(package)

    monkeypatch.setattr("saltflat.cli.doctor.version", found)
    assert "pip install pandas" in run("doctor").stdout
    missing = json.loads(run("doctor", "--json").stdout)["missing"]
    assert missing["pandas"] == "pip install pandas"
    assert set(missing) <= {"pandas", "ray"}  # which few have
    assert "several, through gloo" in run("doctor").stdout
    assert "tensor-parallel models" in run("doctor").stdout
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("torch.__version__", TorchVersion("2.8.0"))
    processes = json.loads(run("doctor", "--json").stdout)["processes"]
    assert processes["sharded"] == "fully_shard and tensor parallel need torch 2.11"
    assert processes["rank"] == "1 of 2, as torchrun says"
    monkeypatch.setattr("saltflat.cli.doctor._trace", lambda *_: 1e9)
    assert "On cpu the trace" in run("doctor", code=1).stdout


# (arguments, exit code, words); "NET" stands for the file with the network
MISTAKES: list[tuple[str, int, list[str]]] = [
    ("mesure NET:make", 2, ["mesure", "'measure'"]),
    ("measure NET:make --dat data.npz", 2, ["--data"]),
    ("measure NET:make", 2, ["--data"]),
    ("measure NET:make --data data.npz -m rhoo", 2, ["rhoo", "'rho'"]),
    ("measure NET:make --data data.npz --loss cross_entrpy", 2, ["'cross_entropy'"]),
    ("measure NET:make --data data.npz --device qpu", 2, ["qpu", "cpu"]),
    ("measure NET:make --data data.npz --samples 0", 2, ["--samples", "at least 1", "auto", "'0'"]),
    ("measure NET:make --data data.npz --samples atuo", 2, ["--samples", "auto", "'atuo'"]),
    ("audit NET:make --data data.npz --samples auto", 2, ["--samples", "takes a number"]),
    ("landscape NET:make --data data.npz --samples auto", 2, ["--samples", "takes a number"]),
    ("balance NET:make --data data.npz --samples auto", 2, ["--samples", "takes a number"]),
    ("bench NET:make --data data.npz --samples auto", 2, ["--samples", "takes a number"]),
    ("measure NET:make --data data.npz --certify prof", 2, ["--certify", "'proof'"]),
    (
        "measure NET:make --data data.npz --memory-budget 0",
        2,
        ["--memory-budget", "greater than or equal to 1"],
    ),
    ("audit NET:make --data data.npz --certify none", 2, ["--certify", "no use"]),
    ("balance NET:make --data data.npz --certify none", 2, ["--certify", "no use"]),
    ("bench NET:make --data data.npz --certify none", 2, ["--certify", "no use"]),
    ("landscape NET:make --data data.npz --certify none", 2, ["--certify", "no use"]),
    ("compare a.json b.json --memory-budget 5", 2, ["--memory-budget", "no use"]),
    ("measure NET:make --data data.npz --tolerance -1", 2, ["--tolerance", "above 0", "-1"]),
    ("measure NET:make --data data.npz --tolerance nan", 2, ["--tolerance", "finite", "nan"]),
    ("audit NET:make --data data.npz --spread 1", 2, ["--spread", "above 1"]),
    ("landscape NET:make --data data.npz --span 0", 2, ["--span", "above 0"]),
    ("measure NET:makes --data data.npz", 3, ["makes", "'make'"]),
    ("measure NET:wants --data data.npz", 3, ["hidden"]),
    ("measure NET:broken --data data.npz", 3, ["no such thing", "line"]),
    ("measure NET:three --data data.npz", 3, ["int"]),
    ("measure NET:loader --data data.npz", 3, ["list", "nn.Module"]),
    ("measure nosuch.module:f --data data.npz", 3, ["nosuch"]),
    ("measure nosuch.py:f --data data.npz", 3, ["nosuch.py"]),
    ("measure weights.safetensors --data data.npz", 3, ["--checkpoint"]),
    ("measure nonsense --data data.npz", 3, ["zoo:NAME"]),
    ("measure zoo:lenet6 --data data.npz", 3, ["'lenet5'"]),
    ("measure zoo:mlp:4-x --data data.npz", 3, ["zoo:mlp:64-32-10"]),
    ("measure zoo:lenet5:3 --data data.npz", 3, ["takes no settings"]),
    ("measure NET --data data.npz", 3, ["which name", ".py:NAME"]),
    ("measure NET:make --data numbers.npz", 1, ["int64", "another loss: mse"]),
    ("measure NET:make --data nothing.npz", 3, ["x/y", "It is empty."]),
    ("measure . --data data.npz", 3, ["config.json"]),
    ("measure NET:make --data digts", 3, ["'digits'"]),
    ("measure NET:make --data cifar-10", 3, ["'cifar10'"]),
    ("measure NET:make --data nosuch.npz", 3, ["nosuch.npz", "data.npz"]),
    ("measure NET:make --data NET:three", 1, ["int"]),
    ("measure NET:make --data NET:empty", 1, ["empty"]),
    ("measure NET:make --data empty.npz", 1, ["no samples"]),
    ("measure NET:make --data data.npz --checkpoint none.pt", 3, ["none.pt"]),
    ("measure NET:make --data data.npz --unpack NET:three", 3, ["--unpack"]),
    ("measure NET:make --data data.npz --save run.txt", 2, [".json", "run.txt"]),
    ("measure NET:make --data data.npz --html run.json", 2, [".html"]),
    ("measure NET:make --data data.npz --save no/where.json", 2, ["no folder"]),
    ("audit NET:make --data data.npz --dtype float32", 2, ["no use"]),
    ("compare a.json b.json --data data.npz", 2, ["--data"]),
    ("data empty.py:x", 3, ["empty.py"]),
]


@pytest.mark.parametrize(("line", "code", "words"), MISTAKES, ids=[m[0] for m in MISTAKES])
def test_mistakes_are_explained(line: str, code: int, words: list[str], place: Path) -> None:
    np.savez("nothing.npz")
    np.savez("numbers.npz", x=np.ones((12, 4)), y=np.linspace(0, 1, 12))
    np.savez("empty.npz", x=np.zeros((0, 4)), y=np.zeros(0, dtype=int))
    arguments = line.replace("NET", f"{(place / 'net.txt').read_text()}.py").split()
    said = " ".join(run(*arguments, code=code).output.replace("│", " ").split())
    for word in words:
        assert word in said


def test_weights_that_are_not_numbers(place: Path) -> None:
    model = make(place)
    with torch.no_grad():
        model.get_parameter("fc1.weight")[0, 0] = torch.nan
    torch.save(model.state_dict(), "nan.pt")
    options = ["--checkpoint", "nan.pt", "--data", "data.npz"]
    assert "'fc1.weight' holds NaN" in run("measure", net(place, "make"), *options, code=1).output


def test_errors_are_json_too(place: Path) -> None:
    result = run("measure", net(place, "makes"), "--data", "data.npz", "--json", code=3)
    error = json.loads(result.stdout)["error"]
    assert (error["kind"], error["exit"]) == ("LoadError", Code.NOT_LOADED)
    assert "makes" in error["message"]


def test_what_a_model_prints_is_kept_out_of_json(place: Path) -> None:
    options = [net(place, "loud"), "--data", "data.npz", "-m", "rho"]
    result = run("measure", *options, "--json")
    assert json.loads(result.stdout)["measurements"]
    assert "hello" in result.stderr
    assert "hello" in run("measure", *options).stdout


def test_a_traceback_is_shown_if_asked(place: Path) -> None:
    options = [net(place, "broken"), "--data", "data.npz", "--traceback"]
    result = CliRunner().invoke(app, ["measure", *options])
    assert result.exit_code == 3
    assert "Traceback" in result.stderr
    assert "Traceback" not in result.stdout


@pytest.mark.parametrize(
    "command",
    ["demo", "measure", "compare", "audit", "balance", "landscape", "bench", "data", "doctor"],
)
def test_help_has_an_example(command: str) -> None:
    said = run(command, "--help").stdout
    assert "Example" in said
    assert f"saltflat {command}" in said


def test_help_lists_exit_codes() -> None:
    said = " ".join(run("--help").stdout.split())
    for code in Code:
        assert f" {code.value} " in said


def test_completion_knows_names() -> None:
    words = {"COMP_WORDS": "saltflat measure zoo:lenet5 -m neur", "COMP_CWORD": "4"}
    environment = {**words, "_SALTFLAT_COMPLETE": "complete_bash"}
    result = CliRunner().invoke(app, [], prog_name="saltflat", env=environment)
    assert result.output.strip() == "neuronwise_minimum_sharpness"


def test_demo_runs_the_demonstration(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[Path, bool]] = []
    monkeypatch.setattr("saltflat.demo.__main__.run", lambda *given: ran.append(given))
    run("demo")
    run("demo", "--html", "x.html", "--all")
    assert ran == [(Path("demo.html"), False), (Path("x.html"), True)]
    run("demo", "--html", "x.txt", code=2)


def test_the_entry_point_is_the_command() -> None:
    project = tomllib.loads((SOURCE.parent / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"saltflat": "saltflat_command:main"}


# As some compiled modules do.
SWALLOWED = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
except KeyboardInterrupt:
    pass
def __getattr__(name): raise ImportError("half imported")
"""


@pytest.mark.parametrize("interrupted", [False, True])
def test_ctrl_c_while_torch_is_imported_is_no_traceback(tmp_path: Path, interrupted: bool) -> None:
    if interrupted:
        (tmp_path / "torch.py").write_text(SWALLOWED)
    code = "import sys, saltflat_command as s; sys.argv = ['saltflat', '--version']; s.main()"
    path = os.pathsep.join([str(tmp_path), str(SOURCE)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == (130 if interrupted else 0), found.stderr
    assert found.stdout == ("" if interrupted else f"saltflat {sf.__version__}\n")
    assert "Traceback" not in found.stderr


def test_as_a_module_with_pipes(place: Path) -> None:
    """JSON alone on stdout; notes go elsewhere, and not at all if quiet."""
    options = ["measure", "zoo:mlp:4-3", "--data", "data.npz", "-m", "hessian_trace", "--json"]
    process = shell(*options, cwd=place)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert json.loads(out)["measurements"]["hessian_trace"]["value"] > 0
    assert "random weights" in err


SLOW = """
import time
import traceback
from pathlib import Path
import torch
from torch import nn

class Slow(nn.Sequential):
    def forward(self, x):
        if any("{where}" in frame.filename for frame in traceback.extract_stack()):
            Path("reached").touch()
            time.sleep(0.1)
        return super().forward(x)

def make(): return Slow(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
"""


@pytest.mark.parametrize(("where", "partial"), [("ball_sharpness", True), ("slow", False)])
def test_an_interruption_leaves_a_partial_report(place: Path, where: str, partial: bool) -> None:
    (place / "slow.py").write_text(SLOW.format(where=where))
    names = "hessian_trace,rho,delta_sharpness,sam_sharpness"
    options = ["slow.py:make", "--data", "data.npz", "-m", names, "--save", "run.json"]
    process = shell("measure", *options, "--json", cwd=place)
    deadline = time.monotonic() + 100
    while not (place / "reached").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    if not partial:
        assert json.loads(out)["error"]["exit"] == 130
        assert not (place / "run.json").exists()
        return
    report = sf.Report.load(place / "run.json")
    assert json.loads(out)["notes"][0].startswith("PARTIAL: interrupted after ")
    assert report["hessian_trace"].exact
    assert "interrupted" in report.skipped["sam_sharpness"]
    assert "partial" in err


def test_progress_tells_its_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    line = Line(stream, eager=True)
    work = Work(line=line)
    work.total, work.step = 100.0, "rho"
    work.add(samples=10, price=2.0)
    line._move(10.0)
    assert stream.getvalue() == "\rsaltflat: rho, 20%, 10 s, 2 samples/s, about 40 s left"
    monkeypatch.setenv("COLUMNS", "30")
    line._move(10.0)
    assert len(stream.getvalue().rpartition("\r")[2].rstrip()) < 30


def test_the_line_says_that_rescalings_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    data = torch.randn(6, 4), torch.arange(6) % 3
    sf.measure(model, data, measures=["minimum_sharpness"], progress=True)
    steps = re.findall(r"saltflat: ([^:]*):", stream.getvalue())
    assert steps.index("minimum_sharpness") < steps.index("searching rescalings")
    for terminal in (False, True):  # how much is done says nothing of what is not counted
        monkeypatch.setattr(stream, "isatty", lambda terminal=terminal: terminal)
        line = Line(stream, eager=True)
        work = Work(line=line)
        work.total, work.done = 100.0, 99.0
        with work.within("searching rescalings"):
            line._move(3.0)
            said = "searching rescalings, 3 s" if terminal else " 3 s"
            assert stream.getvalue().rstrip(";").endswith(said)
        line._move(4.0)
        assert "99%" in stream.getvalue().rpartition("3 s")[2]


def test_a_notebook_is_not_told_of_every_step() -> None:
    """One that is run without a browser keeps every line."""
    stream = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})()
    with Line(stream, eager=True) as line:
        work = Work(line=line)
        for step in range(100):
            work.at(f"step {step}", step, 100)
    assert stream.getvalue() == ""


def test_measures_and_audits_keep_what_is_done(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In the library, without a process: the exception carries the partial result."""
    from saltflat.errors import Interrupted
    from saltflat.measures import Rho

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    data = torch.randn(6, 4), torch.arange(6) % 3
    with monkeypatch.context() as patch:
        patch.setattr(Rho, "compute", stop)
        with pytest.raises(Interrupted) as caught:
            sf.measure(model, data, measures=["hessian_trace", "rho", "kappa_trace"])
        report = caught.value.partial
        assert list(report) == ["hessian_trace"]
        assert set(report.skipped) == {"rho", "kappa_trace"}
        for width in ("80", "200"):
            patch.setenv("COLUMNS", width)
            said = str(report)
            assert "not computed" in said
            assert "does not apply" not in said
        page = report.save(tmp_path / "partial.html").read_text()
        assert "rho not computed: interrupted" in page
        assert "does not apply" not in page
        with pytest.raises(KeyboardInterrupt) as bare:
            sf.measure(model, data, measures=["rho"])
        assert not isinstance(bare.value, Interrupted)
    from saltflat.audit.ledger import Ledger

    whole, count = Ledger.add, 0

    def add(self: Ledger, trial: Any) -> None:
        nonlocal count
        count += 1
        if count > 3:
            raise KeyboardInterrupt
        whole(self, trial)

    monkeypatch.setattr(Ledger, "add", add)
    with pytest.raises(Interrupted) as caught:
        sf.audit(model, data, measures=["hessian_trace"], elements=1)
    assert caught.value.partial.notes[0].startswith("PARTIAL: interrupted after 3 of ")
    assert len(caught.value.partial["hessian_trace"]) == 1
