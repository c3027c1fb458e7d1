"""The monitor: what it measures, what it writes, and what it leaves alone."""

from __future__ import annotations

import copy
import json
import math
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import saltflat as sf
from saltflat.measures import MEASURES
from saltflat.training import monitor as module
from saltflat.training.fam import FAM
from saltflat.training.history import Record
from saltflat.training.monitor import Budget, Monitor
from saltflat.training.sam import SAM

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(12) % 3


def network(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(dropout), nn.Linear(5, 3)
    )


def watch(**options: Any) -> Monitor:
    return Monitor(network(), (X, Y), measures=["hessian_trace"], **{"budget": None, **options})


class Clock:
    """A clock that a test sets; every look at it takes `tick` seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.tick = 0.0, 0.0
        monkeypatch.setattr(module, "perf_counter", self)

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


# what it measures, and when


def test_values_are_those_of_measure() -> None:
    model = network()
    names = ["hessian_trace", "minimum_sharpness"]
    monitor = Monitor(model, (X, Y), budget=None)
    with torch.no_grad():
        model[0].weight.mul_(2)
    record = monitor.epoch()
    report = sf.measure(model, (X, Y), measures=names)
    assert record is not None
    assert record.values == {name: report[name].value for name in names}
    assert record.stderr == {name: report[name].stderr for name in names}
    assert record.seconds > 0
    assert monitor.history == [record]


def test_all_measures_if_asked() -> None:
    record = Monitor(network(), (X, Y), measures="all", budget=None).measure()
    assert {*record.values, *record.failed} == set(MEASURES)


def test_options_reach_measure() -> None:
    model = network()
    targets = torch.randn(12, 3)
    estimator = sf.Hutchinson(4, seed=3)
    options = {"loss": nn.MSELoss(reduction="sum"), "max_directions": 1, "estimator": estimator}
    record = Monitor(model, (X, targets), measures=["hessian_trace"], **options).measure()
    expected = sf.measure(model, (X, targets), measures=["hessian_trace"], **options)
    assert record.values["hessian_trace"] == expected["hessian_trace"].value
    assert record.stderr["hessian_trace"] == expected["hessian_trace"].stderr


@pytest.mark.parametrize(
    ("schedule", "due"),
    [
        ({}, [(2, 1), (4, 2), (6, 3), (8, 4)]),
        ({"every": 2}, [(4, 2), (8, 4)]),
        ({"steps": 3}, [(3, 1), (6, 2)]),
        ({"every": 4, "steps": 3}, [(3, 1), (6, 2), (8, 4)]),
    ],
)
def test_schedule(schedule: dict[str, int], due: list[tuple[int, int]]) -> None:
    monitor = watch(**schedule)
    for _ in range(4):
        monitor.step()
        monitor.step()
        monitor.epoch()
    assert [(r.step, r.epoch) for r in monitor.history] == due


def test_numbers_may_be_given() -> None:
    monitor = watch(every=5, steps=10)
    assert monitor.step(9) is None
    assert monitor.step(10) == monitor.history[0]
    assert monitor.epoch(4) is None
    assert monitor.epoch(5, step=12) == monitor.history[1]
    assert (monitor.history[1].step, monitor.history[1].epoch) == (12, 5)


def test_the_probe_set_is_fixed() -> None:
    """Shuffled and augmented data are read once."""

    class Noisy(TensorDataset):
        def __getitem__(self, index: int) -> tuple[Tensor, ...]:
            x, y = super().__getitem__(index)
            return x + 0.1 * torch.randn(4), y

    model = network()
    loader = DataLoader(Noisy(X, Y), batch_size=5, shuffle=True)
    plain = []
    for _ in range(2):  # without the monitor
        torch.rand(1)
        found = sf.measure(model, list(loader), measures=["hessian_trace"])
        plain.append(found["hessian_trace"].value)
    assert plain[0] != plain[1]
    state = torch.get_rng_state()
    monitor = Monitor(model, loader, budget=None)
    assert torch.equal(state, torch.get_rng_state())
    first = monitor.measure()
    torch.rand(1)
    assert monitor.measure().values == first.values


def test_samples() -> None:
    model = network()
    data = [(X[:5], Y[:5]), (X[5:10], Y[5:10]), (X[10:], Y[10:])]
    record = Monitor(model, data, measures=["hessian_trace"], samples=7).measure()
    expected = sf.measure(model, (X[:7], Y[:7]), measures=["hessian_trace"])["hessian_trace"]
    assert record.values["hessian_trace"] == pytest.approx(expected.value, rel=1e-5)


def test_unpack() -> None:
    model = network()
    monitor = Monitor(model, [(X, Y, "note")], unpack=lambda item: item[:2], budget=None)
    assert monitor.measure().values == Monitor(model, (X, Y)).measure().values


# training goes on as if it were not there


def train(monitored: bool, by_closure: bool, tmp_path: Path) -> list[Tensor]:
    model = network(dropout=0.4)
    fam = FAM(model, "4", 0.1)
    optimizer = SAM(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), rho=0.1)
    options = {"budget": None, "path": tmp_path / "log.jsonl", "tensorboard": tmp_path}
    monitor = Monitor(model, (X, Y), steps=1, **options) if monitored else None
    torch.manual_seed(5)
    for _ in range(2):
        for x, y in DataLoader(TensorDataset(X, Y), batch_size=6, shuffle=True):

            def backward(x: Tensor = x, y: Tensor = y) -> Tensor:
                loss = F.cross_entropy(model(x), y) + fam(y)
                loss.backward()
                return loss

            def closure() -> Tensor:
                optimizer.zero_grad()
                return backward()

            if by_closure:
                optimizer.step(closure)
            else:
                closure()
                while optimizer.perturb():
                    backward()
                optimizer.step()
            gradients = [p.grad for p in model.parameters()]
            if monitor is not None:
                monitor.step()
            assert model.training
            assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    if monitor is not None:
        assert len(monitor.history) == 4
        monitor.close()
    return [*model.state_dict().values(), torch.get_rng_state()]


@pytest.mark.parametrize("by_closure", [True, False], ids=["closure", "halves"])
def test_training_is_not_touched(by_closure: bool, tmp_path: Path) -> None:
    alone, watched = train(False, by_closure, tmp_path), train(True, by_closure, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(alone, watched, strict=True))


def test_a_failing_measurement_leaves_the_model() -> None:
    model = network()
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(sf.DataError, match="out of range"):
        Monitor(model, (X, Y + 10), budget=None).measure()
    assert model.training
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


# the budget


class Costly:
    """Stands in for `measure`: takes `fixed` seconds and `each` a sample, and gives a report."""

    def __init__(self, clock: Clock, fixed: float, each: float) -> None:
        self.clock, self.fixed, self.each = clock, fixed, each
        self.report = sf.measure(network(), (X, Y), measures=["hessian_trace"])
        self.sizes: list[int] = []

    def __call__(self, model: nn.Module, data: Any, **_: Any) -> Any:
        self.sizes.append(sum(len(x) for x, _ in data))
        self.clock.now += self.fixed + self.each * self.sizes[-1]
        return self.report


def costly(monkeypatch: pytest.MonkeyPatch, fixed: float, each: float) -> Costly:
    instead = Costly(Clock(monkeypatch), fixed, each)
    monkeypatch.setattr(module, "measure", instead)
    return instead


def epochs(monitor: Monitor, count: int, clock: Clock, seconds: float = 0.0) -> None:
    for _ in range(count):
        clock.now += seconds
        monitor.epoch()


def test_budget_is_kept_and_skips_are_recorded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock = costly(monkeypatch, 10.0, 0.0).clock
    monitor = watch(budget=0.2, path=tmp_path / "log.jsonl")
    with pytest.warns(UserWarning, match="skips a measurement: .* the budget is 20 %") as heard:
        epochs(monitor, 100, clock, 5.0)
    assert len(heard) == 1
    assert heard[0].filename == __file__
    done = [r for r in monitor.history if r.skipped is None]
    skipped = [r for r in monitor.history if r.skipped is not None]
    assert len(done) + len(skipped) == 100
    assert monitor.skipped == len(skipped) > 0
    small = 20.0  # two small measurements before the first
    assert 0.2 * clock.now - 15 < sum(r.seconds for r in done) + small <= 0.2 * clock.now
    assert "would take about 10 s more; the budget is 20 %" in str(skipped[-1].skipped)
    assert not skipped[0].values
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [bool(line["skipped"]) for line in lines] == [bool(r.skipped) for r in monitor.history]


@pytest.mark.parametrize(("fixed", "each"), [(0.0, 1.0), (3.0, 0.5), (9.0, 0.0)])
def test_the_first_measurement_is_foreseen(
    monkeypatch: pytest.MonkeyPatch, fixed: float, each: float
) -> None:
    instead = costly(monkeypatch, fixed, each)
    whole = fixed + 12 * each
    small = 2 * fixed + 3 * each
    monitor = watch(budget=Budget(seconds=whole + small - 0.1))
    with pytest.warns(UserWarning, match=f"about {whole:.3g} s more"):
        record = monitor.epoch()
    assert record is not None
    assert record.skipped is not None
    assert instead.sizes == [1, 2]
    monitor.epoch()
    assert instead.sizes == [1, 2]  # it is foreseen once
    enough = watch(budget=Budget(seconds=whole + small + 0.1))
    assert enough.epoch().values
    assert instead.sizes == [1, 2, 1, 2, 12]


def test_a_short_first_measurement_is_made_whatever_the_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    costly(monkeypatch, 0.0, 0.1)
    monitor = watch(budget=0.01)
    assert monitor.epoch().values
    with pytest.warns(UserWarning, match="skips"):
        assert monitor.epoch().skipped
    costly(monkeypatch, 0.0, 1.0)
    with pytest.warns(UserWarning, match="skips"):
        assert watch(budget=0.01).epoch().skipped


def test_a_continued_log_tells_what_a_measurement_takes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    instead = costly(monkeypatch, 10.0, 0.0)
    watch(path=tmp_path / "log.jsonl").epoch()
    with pytest.warns(UserWarning, match="is continued"):
        again = watch(path=tmp_path / "log.jsonl", budget=Budget(seconds=9.0))
    with pytest.warns(UserWarning, match="about 10 s more"):
        again.epoch()
    assert instead.sizes == [12]


def test_budget_in_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = costly(monkeypatch, 2.0, 0.0).clock
    monitor = watch(budget=Budget(seconds=9.0))
    with pytest.warns(UserWarning, match="skips"):
        epochs(monitor, 4, clock)
    assert [r.skipped is None for r in monitor.history] == [True, True, False, False]
    assert "8 s and would take about 2 s more; the budget is 9 s" in str(
        monitor.history[-1].skipped
    )
    assert monitor.measure().skipped is None  # asked for


def test_no_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    clock.tick = 100.0
    monitor = watch(budget=None)
    for _ in range(3):
        assert monitor.epoch().skipped is None


# what it writes


def test_a_log_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "new" / "log.jsonl"
    first = watch(path=path)
    first.step()
    first.epoch()
    before = path.read_bytes()
    with pytest.warns(UserWarning, match="continued: it holds 1 records, up to step 1 and epoch 1"):
        second = watch(path=path)
    assert second.history == first.history
    second.step()
    second.epoch()
    assert path.read_bytes().startswith(before)
    with pytest.warns(UserWarning, match="2 records"):
        third = watch(path=path)
    assert [(r.step, r.epoch) for r in third.history] == [(1, 1), (2, 2)]


def test_the_log_of_another_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a new file is not worth a warning
        watch(path=path).epoch()
    before = path.read_bytes()
    with pytest.raises(sf.DataError, match=r"log of another run: it holds hessian_trace.*kappa"):
        Monitor(network(), (X, Y), measures=["kappa"], path=path)
    assert path.read_bytes() == before


def test_an_unfinished_line_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    watch(path=path).epoch()
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:30])
    with pytest.warns(UserWarning, match="not finished"), pytest.warns(match="is continued"):
        monitor = watch(path=path)
    assert len(monitor.history) == 1
    assert path.read_bytes() == whole


@pytest.mark.parametrize("line", ["{}", "no json", "[1]", '{"values": 1}', '{"step": 1}'])
def test_another_file_is_not_written_to(tmp_path: Path, line: str) -> None:
    path = tmp_path / "log.jsonl"
    watch(path=path).epoch()
    with path.open("a") as file:
        file.write(line + "\n")
    before = path.read_bytes()
    with pytest.raises(sf.DataError, match="Line 2 of"):
        watch(path=path)
    assert path.read_bytes() == before


KILLED = """
import sys, torch
from saltflat.training.monitor import Monitor
torch.set_num_threads(1)
model = torch.nn.Linear(4, 3)
monitor = Monitor(model, (torch.randn(5, 4), torch.zeros(5, dtype=torch.long)),
                  measures=["hessian_trace"], steps=1, budget=None, path=sys.argv[1])
while True:
    monitor.step()
"""


def test_a_killed_run_leaves_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(path)])
    try:
        deadline = time.monotonic() + 60
        while not (path.exists() and path.read_bytes().count(b"\n") > 5):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    content = path.read_text()
    assert content.endswith("\n")
    steps = [json.loads(line)["step"] for line in content.splitlines()]
    assert steps == list(range(1, len(steps) + 1))


def test_numbers_that_json_does_not_have() -> None:
    record = Record(1, 2, {"a": math.inf, "b": 1.5}, {"a": math.nan, "b": 0.0}, 0.1, 0.2)
    line = record.to_json()
    assert json.loads(line)["values"] == {"a": None, "b": 1.5}
    again = Record.from_json(line)
    assert math.isnan(again.values["a"])
    assert again.values["b"] == 1.5


@pytest.mark.parametrize("own", [True, False], ids=["folder", "writer"])
def test_tensorboard(tmp_path: Path, own: bool) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    writer = None if own else SummaryWriter(str(tmp_path))
    with watch(tensorboard=tmp_path if own else writer) as monitor:
        monitor.epoch()
        monitor.step(7)
        monitor.epoch()
    events = EventAccumulator(str(tmp_path)).Reload().Scalars("saltflat/hessian_trace")
    assert [event.step for event in events] == [1, 7]
    values = [r.values["hessian_trace"] for r in monitor.history]
    assert [event.value for event in events] == pytest.approx(values, rel=1e-6)
    if writer is not None:
        writer.add_scalar("still", 1.0)  # it is the user's, and open
        writer.close()


def test_without_tensorboard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(sf.MissingDependency, match="pip install tensorboard"):
        watch(tensorboard=tmp_path)
    watch().epoch()


# what cannot be measured


def test_a_measure_that_fails_does_not_stop_the_others() -> None:
    """Outputs far above their targets, where tanh is concave: a block of negative trace."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    with torch.no_grad():
        model[0].weight.mul_(0.1)
        model[0].bias.fill_(1.0)
        model[2].weight.fill_(1.0)
    x, y = X.double(), torch.full((12, 1), -50.0, dtype=torch.float64)
    options = {"loss": "mse", "budget": None}
    report = sf.measure(model, (x, y), "mse", measures=["hessian_trace"])
    assert min(report["hessian_trace"].by_parameter.values()) < 0
    record = Monitor(model, (x, y), **options).measure()
    assert record.values == {"hessian_trace": report["hessian_trace"].value}
    assert list(record.failed) == ["minimum_sharpness"]
    assert "negative" in record.failed["minimum_sharpness"]


def test_an_eigenvalue_that_is_not_found_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: Any) -> None:
        raise sf.SaltflatError("it did not converge")

    monkeypatch.setattr("saltflat.curvature.curvature.eigenpairs", fails)
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 3))
    data = X, torch.arange(len(X)) % 3
    record = Monitor(model, data, measures=["kappa", "hessian_trace"], budget=None).measure()
    assert list(record.values) == ["hessian_trace"]
    assert record.failed == {"kappa": "it did not converge"}


def test_divergence_is_recorded() -> None:
    model = network()
    monitor = Monitor(model, (X, Y), budget=None)
    with torch.no_grad():
        model[0].weight.fill_(math.nan)
    with pytest.raises(sf.ModelError, match="NaN"):  # at the start it is a mistake
        monitor.measure()
    with torch.no_grad():
        model[0].weight.normal_()
    monitor.epoch()
    with torch.no_grad():
        model[0].weight.fill_(math.nan)
    record = monitor.epoch()
    assert record is not None
    assert not record.values
    assert "NaN" in record.failed["hessian_trace"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every must be an integer"),
        ({"steps": 1.5}, "steps must be an integer"),
        ({"samples": True}, "samples must be an integer"),
        ({"budget": 30}, r"Budget\(seconds=30\)"),
        ({"budget": -0.1}, "share of a Budget must be"),
        ({"budget": "1"}, "share of a Budget must be"),
        ({"measures": ["sharpnes"]}, "Unknown measure"),
        ({"tensorboard": 3}, "a folder or a SummaryWriter"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(sf.SaltflatError, match=message):
        Monitor(network(), (X, Y), **options)


def test_wrong_seconds() -> None:
    with pytest.raises(sf.InvalidValue, match="seconds of a Budget"):
        Budget(seconds=-1.0)


def test_what_the_monitor_decides_is_no_option() -> None:
    with pytest.raises(sf.InvalidType, match="no option 'on_error'"):
        Monitor(network(), (X, Y), on_error=None)


def test_a_monitor_shows_its_progress() -> None:
    told: list[str] = []
    monitor = Monitor(network(), (X, Y), progress=lambda step, done, total: told.append(step))
    monitor.measure()
    assert "hessian_trace" in told


# the history


def test_history_as_a_table_a_picture_and_a_file(tmp_path: Path) -> None:
    monitor = Monitor(network(), (X, Y), steps=2, budget=None)
    with pytest.raises(sf.InvalidValue, match="nothing to draw"):
        monitor.plot(tmp_path / "empty.png")
    assert "0 records, 0 skipped)" in repr(monitor)
    for _ in range(6):
        monitor.step()
    monitor.budget = Budget(seconds=0.0)
    monitor.step()
    with pytest.warns(UserWarning, match="skips"):
        monitor.step()
    table = monitor.to_pandas()
    assert list(table["step"]) == [2, 4, 6, 8]
    assert list(table["hessian_trace"][:3]) == [
        r.values["hessian_trace"] for r in monitor.history[:3]
    ]
    assert math.isnan(table["hessian_trace"][3])
    assert list(table["skipped"].astype(bool)) == [False, False, False, True]
    assert {"minimum_sharpness_stderr", "seconds", "elapsed", "failed"} <= set(table.columns)
    last = monitor.history[2].values
    assert repr(monitor) == (
        "Monitor(hessian_trace, minimum_sharpness on 12 samples, every 2 steps; "
        "3 records, 1 skipped; "
        f"step 6, epoch 0: hessian_trace {last['hessian_trace']:.4g}, "
        f"minimum_sharpness {last['minimum_sharpness']:.4g})"
    )
    picture = monitor.plot(tmp_path / "new" / "history.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert monitor.save(tmp_path / "a.jsonl").read_text().splitlines() == [
        r.to_json() for r in monitor.history
    ]
    header, *lines = monitor.save(tmp_path / "a.csv").read_text().splitlines()
    assert header.split(",") == list(table.columns)
    assert len(lines) == 4
    with pytest.raises(sf.InvalidValue, match=r"\.jsonl or \.csv. Got 'a.txt'"):
        monitor.save(tmp_path / "a.txt")


def test_a_saved_history_can_be_continued(tmp_path: Path) -> None:
    monitor = watch()
    monitor.epoch()
    path = monitor.save(tmp_path / "saved.jsonl")
    with pytest.warns(UserWarning, match="is continued"):
        assert watch(path=path).history == monitor.history


def test_nobody_asks_whether_a_training_is_at_a_minimum(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_: Any) -> None:
        raise AssertionError("it costs two gradients, and the answer is thrown away")

    monkeypatch.setattr(sys.modules["saltflat.measure"], "standing_of", asked)
    model = nn.Linear(4, 3)
    data = torch.randn(6, 4), torch.arange(6) % 3
    assert sf.Monitor(model, data, measures=["hessian_trace"]).measure().values
    with pytest.raises(AssertionError, match="two gradients"):
        sf.measure(model, data, measures=["hessian_trace"])
