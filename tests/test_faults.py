"""Faults in the middle of a call: the model, the files and the process are as they were."""

from __future__ import annotations

import errno
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from untouched import assert_untouched, dressed, fingerprint, same

import saltflat as sf

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
Y = torch.arange(12) % 2


class Broken(Exception):
    """What a test throws in."""


class Trap:
    """Throws its fault when it is stepped on for the `left`-th time from now on."""

    fault: BaseException | None = None
    left = 0

    @classmethod
    def step(cls) -> None:
        cls.left -= 1
        if cls.left == 0 and cls.fault is not None:
            raise cls.fault

    @classmethod
    def set(cls, fault: BaseException | None, at: int) -> None:
        cls.fault, cls.left = fault, at


class Fragile(nn.Module):
    """Steps on the trap in every forward pass; copies of it step on the same one."""

    def __init__(self, bend: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        bend = bend or nn.Tanh()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), bend, nn.Linear(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        Trap.step()
        return self.net(x)


class Data:
    """Batches of four; the reading of one raises."""

    def __init__(self, fault: BaseException | None = None, at: int = 0) -> None:
        self.fault, self.left = fault, at

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, 12, 4):
            self.left -= 1
            if self.left == 0 and self.fault is not None:
                raise self.fault
            yield X[start : start + 4], Y[start : start + 4]


MEASURES = ["hessian_trace", "fisher_rao_norm"]
CALLS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "trace": sf.trace,
    "diagonal": sf.diagonal,
    "measure": lambda m, d: sf.measure(m, d, measures=MEASURES),
    "compare": lambda m, d: sf.compare({"a": m}, d, measures=["hessian_trace"]),
    "eigenvalues": lambda m, d: sf.eigenvalues(m, d, k=1),
    "density": sf.density,
    "monitor": lambda m, d: sf.Monitor(m, d, measures=["hessian_trace"], budget=None).measure(),
}
# Those that pass through a model often; their data are given as tensors.
MORE: dict[str, Callable[[nn.Module, Any], Any]] = {
    "products": lambda m, d: sf.hessian(m, d) @ torch.ones(34),
    "landscape": lambda m, d: sf.landscape(m, d, directions="eigenvectors", dimensions=1, points=3),
    "audit": lambda m, d: sf.audit(m, d, measures=["hessian_trace"], elements=1),
    "balance": lambda m, d: sf.symmetries(m, X).balance(m, d),
    "symmetries": lambda m, d: sf.symmetries(m, X),
    "all measures": lambda m, d: sf.measure(m, d, measures="all"),
}
FAULTS = [Broken("thrown in"), RuntimeError("out of memory, it says"), KeyboardInterrupt()]


def attempt(call: Callable[[], Any], fault: BaseException) -> BaseException | None:
    """What the call failed with: this fault, or an error of ours in its place."""
    try:
        call()
    except (type(fault), sf.SaltflatError) as error:
        return error
    finally:
        fault.__traceback__ = fault.__context__ = None  # it lives on, and with it what it saw
    return None


def check(name: str, at: int, fault: BaseException, where: str) -> bool:
    model = dressed(Fragile() if name in CALLS else Fragile(nn.ReLU()))
    before, threads = fingerprint(model), torch.get_num_threads()
    Trap.set(fault if where != "data" else None, at)
    data = Data(fault if where == "data" else None, at) if name in CALLS else (X, Y)
    error = attempt(lambda: (CALLS | MORE)[name](model, data), fault)
    met = Trap.left <= 0
    Trap.set(None, 0)
    assert_untouched(model, before)
    assert torch.is_grad_enabled()
    assert torch.get_num_threads() == threads
    # Never another statement in its place: what failed once has failed.
    assert error is None or error is fault or error.__cause__ is fault, (at, error)
    return error is not None if where == "data" else met


@pytest.mark.parametrize("where", ["forward", "data"])
@pytest.mark.parametrize("name", CALLS)
def test_a_fault_leaves_the_model(name: str, where: str) -> None:
    for at, fault in zip((1, 2, 4), FAULTS, strict=True):
        failed = check(name, at, fault, where)
        assert failed or at > 1  # the control: the first pass and the first batch are always met


@pytest.fixture
def fragile_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run of autograd's engine steps on the trap, and no forward pass does."""
    real: Any = vars(torch.autograd)["_engine_run_backward"]

    def run(*arguments: Any, **options: Any) -> Any:
        Trap.step()
        return real(*arguments, **options)

    monkeypatch.setattr(torch.autograd, "_engine_run_backward", run)
    monkeypatch.setattr(Fragile, "forward", lambda self, x: self.net(x))


@pytest.mark.parametrize("name", [*CALLS, *MORE])
def test_a_fault_in_a_backward_pass(name: str, fragile_backward: None) -> None:
    for at, fault in zip((1, 2, 5, 11, 23), [*FAULTS, FAULTS[0], FAULTS[0]], strict=True):
        if not check(name, at, fault, "backward"):
            break
    assert at > 1 or name == "symmetries"


EVERYWHERE = pytest.mark.parametrize("name", [*CALLS, *MORE])


@pytest.mark.slow
@EVERYWHERE
def test_a_fault_in_many_backward_passes(name: str, fragile_backward: None) -> None:
    at = 1
    while check(name, at, FAULTS[at % 3 == 0], "backward") and at < 200:
        at += 1 + at // 8
    assert at > 1 or name == "symmetries"


@pytest.mark.slow
@EVERYWHERE
def test_a_fault_in_many_forward_passes(name: str) -> None:
    at = 1
    while check(name, at, FAULTS[at % 3 == 0], "forward") and at < 200:
        at += 1 + at // 8
    assert at > 1


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_a_fault_in_every_batch(name: str) -> None:
    at = 1
    while check(name, at, FAULTS[0], "data") and at < 200:
        at += 1
    assert at > 1


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "sam": lambda m: sf.SAM(torch.optim.SGD(m.parameters(), lr=0.1), rho=0.05),
    "bn": lambda m: sf.BNSharpnessSGD(
        torch.optim.SGD(m.parameters(), lr=0.1), m, strength=0.1, delta=1e-3
    ),
    "entropy": lambda m: sf.EntropySGD(m.parameters(), lr=0.1, steps=3),
    "fam": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
}


def held(model: nn.Module) -> dict[str, Any]:
    """What a step that fails leaves alone: all but gradients, which closures make."""
    state = fingerprint(model)
    for name, t in [*model.named_parameters(), *model.named_buffers()]:
        del state[f"{name}.grad"]
        state[name] = t.requires_grad, t.detach().clone()
    return {
        k: v
        for k, v in state.items()
        if not k.startswith(("torch rng", "warnings", "attributes", "contents"))
    }


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda each: type(each).__name__)
def test_a_fault_in_a_step(name: str, fault: BaseException, fragile_backward: None) -> None:
    """At every backward pass of it; statistics that a whole forward pass made are kept."""
    for at in range(1, 30):
        model = Fragile(nn.ReLU()).eval()
        fam = sf.FAM(model, layer="net.3") if name == "fam" else None
        optimizer = OPTIMIZERS[name](model)

        def closure(model: nn.Module = model, fam: Any = fam, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(X), Y)
            loss = loss if fam is None else loss + fam(Y)
            loss.backward()
            return loss

        before = held(model)
        Trap.set(fault, at)
        error = attempt(partial(optimizer.step, closure), fault)
        Trap.set(None, 0)
        if error is None:
            break
        assert error is fault
        if name == "entropy":  # whose inner steps are steps: the round is completed by the next
            optimizer.step(closure)
            assert optimizer.at_center
            continue
        after = held(model)
        assert [k for k in before if not same(before[k], after[k])] == []
    assert at > 1


# memory


@pytest.mark.parametrize("kind", [MemoryError, torch.OutOfMemoryError])
@pytest.mark.parametrize("name", [*CALLS, *MORE])
def test_memory_that_runs_out_for_good(name: str, kind: type[Exception], monkeypatch) -> None:
    """The error is the one that was raised, or says what it said; the model is as it was."""
    few, many = (X, Y), (torch.cat([X, X]), torch.cat([Y, Y]))
    # On few samples a sweep has no pass of its own.
    for at, data in ((1, few), (2, few), (3, few), (4, few), (5, few), (5, many), (6, many)):
        model = dressed(Fragile(nn.ReLU()))
        before = fingerprint(model)
        passes: list[int] = []

        def forward(self: Fragile, x: Tensor, at: int = at, passes: list[int] = passes) -> Tensor:
            passes.append(1)
            if len(passes) >= at:
                raise kind("no room at all")
            return self.net(x)

        monkeypatch.setattr(Fragile, "forward", forward)
        with pytest.raises((kind, sf.SaltflatError), match="no room at all"):
            (CALLS | MORE)[name](model, data)
        assert_untouched(model, before)


def test_memory_that_runs_out_once_is_no_error(monkeypatch) -> None:
    """Half as many samples at a time fit, and the numbers stay."""
    model, widest = Fragile(), []
    truth = sf.trace(model, (X, Y)).total

    def forward(self: Fragile, x: Tensor) -> Tensor:
        widest.append(len(x))
        if len(x) > 5:
            raise MemoryError("no room for so many")
        return self.net(x)

    monkeypatch.setattr(Fragile, "forward", forward)
    assert sf.trace(model, (X, Y)).total == pytest.approx(truth, rel=1e-5)
    assert max(widest) > 5


# the user's own exceptions


class OnlyWhole(nn.Module):
    """Takes no part of a batch, and says so in words of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) != 12:
            raise Broken("all twelve, or none")
        return self.net(x)


def test_a_model_that_refuses_parts_is_measured_whole() -> None:
    """The control: a failure that comes again for the same samples is a property of the model."""
    whole = sf.trace(OnlyWhole(), (X, Y))
    assert whole.total == pytest.approx(sf.trace(OnlyWhole().net, (X, Y)).total, rel=1e-4)


@pytest.mark.parametrize("at", range(1, 9))
@pytest.mark.parametrize("fault", FAULTS[:2], ids=lambda each: type(each).__name__)
def test_what_a_model_raises_comes_through(at: int, fault: BaseException) -> None:
    """Once, at a pass that only looks: it is not taken for "samples depend on each other"."""
    Trap.set(fault, at)
    error = attempt(lambda: sf.measure(Fragile(), (X, Y), measures=MEASURES), fault)
    Trap.set(None, 0)
    assert error is fault or (error is not None and error.__cause__ is fault)


# files


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files take half of what is written to them, and then there is no space left."""
    real = Path.open

    def opened(self: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        file = real(self, mode, *arguments, **options)
        if mode[0] in "axw":
            write = file.write

            def half(content: str | bytes) -> int:
                write(content[: len(content) // 2])
                file.flush()
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            file.write = half
        return file

    monkeypatch.setattr(Path, "open", opened)


def monitor(path: Path | None = None) -> sf.Monitor:
    return sf.Monitor(nn.Linear(3, 2), (X, Y), measures=["hessian_trace"], budget=None, path=path)


def test_a_full_disk_leaves_the_log(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    path = tmp_path / "log.jsonl"
    watched = monitor(path)
    watched.epoch()
    before = path.read_bytes()
    new = monitor(tmp_path / "new.jsonl")
    request.getfixturevalue("full_disk")
    for each in (watched, new):
        with pytest.raises(OSError, match="No space left"):
            each.epoch()
    assert path.read_bytes() == before
    assert len(watched.history) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["log.jsonl"]


def test_a_full_disk_leaves_the_files(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    watched = monitor()
    watched.epoch()
    report = sf.measure(nn.Linear(3, 2), (X, Y), measures=["hessian_trace"])
    paths = [watched.save(tmp_path / "a.csv"), report.save(tmp_path / "a.json")]
    before = [path.read_bytes() for path in paths]
    request.getfixturevalue("full_disk")
    for result, path in zip((watched, report), paths, strict=True):
        with pytest.raises(OSError, match="No space left"):
            result.save(path)  # type: ignore[attr-defined]
    assert [path.read_bytes() for path in paths] == before
    assert len(list(tmp_path.iterdir())) == 2


@pytest.fixture(scope="module")
def results() -> list[Any]:
    """One of each kind that can be saved."""
    model = nn.Linear(3, 2)
    report = sf.measure(model, (X, Y), measures=["hessian_trace"])
    return [
        report,
        sf.Comparison({"a": report, "b": report}),
        sf.audit(model, (X, Y), measures=["hessian_trace"], elements=1),
        sf.landscape(model, (X, Y), points=3),
    ]


@pytest.mark.parametrize("suffix", [".json", ".html"])
def test_a_full_disk_leaves_every_result(
    suffix: str, results: list[Any], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    paths = [each.save(tmp_path / f"{i}{suffix}") for i, each in enumerate(results)]
    before = [path.read_bytes() for path in paths]
    request.getfixturevalue("full_disk")
    for each, path in zip(results, paths, strict=True):
        with pytest.raises(OSError, match="No space left"):
            each.save(path)
        with pytest.raises(OSError, match="No space left"):
            each.save(tmp_path / f"new{suffix}")
    assert [path.read_bytes() for path in paths] == before
    assert sorted(tmp_path.iterdir()) == sorted(paths)


@pytest.mark.parametrize("suffix", [".json", ".html"])
def test_a_folder_that_cannot_be_written(suffix: str, results: list[Any], monkeypatch) -> None:
    """As /proc refuses new files also to those who may write everywhere."""
    for each in results:
        with pytest.raises(OSError, match=r"/proc/"):
            each.save(Path("/proc") / f"result{suffix}")


WRITER = """
import sys
from saltflat.report.store import write
from pathlib import Path
for _ in range(20):
    write(Path(sys.argv[1]), sys.argv[2] * 200_000)
"""


@pytest.mark.slow
def test_two_processes_write_one_file(tmp_path: Path) -> None:
    """What is there is at every moment the whole of what one of them wrote."""
    path = tmp_path / "both.txt"
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(path), letter]) for letter in "ab"
    ]
    seen = set()
    while any(each.poll() is None for each in writers):
        if path.exists():
            seen.add(path.read_text())
    assert [each.wait() for each in writers] == [0, 0]
    assert seen | {path.read_text()} <= {"a" * 200_000, "b" * 200_000}
    assert list(tmp_path.iterdir()) == [path]


# the process

MEASURED = """
import torch, saltflat as sf
model = torch.nn.Linear(3, 2)
report = sf.measure(model, (torch.ones(4, 3), torch.arange(4) % 2), progress=True)
open({path!r}, "w").write(str(report))
"""


def test_without_a_terminal_and_without_a_home(tmp_path: Path) -> None:
    """Standard streams that are closed, and a home where nothing can be written."""
    path, home = tmp_path / "said", "/proc"
    hidden = {"HOME": home, "XDG_CACHE_HOME": home, "XDG_CONFIG_HOME": home}
    code = shlex.quote(MEASURED.format(path=str(path)))
    command = f"exec {shlex.quote(sys.executable)} -c {code} <&- >&- 2>&-"
    done = subprocess.run(["/bin/sh", "-c", command], env={**os.environ, **hidden}, check=False)
    assert done.returncode == 0
    assert "hessian_trace" in path.read_text()
