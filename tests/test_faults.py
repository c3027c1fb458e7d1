"""Faults in the middle of a call: the model, the files and the process are as they were."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from untouched import assert_untouched, dressed, fingerprint

import saltflat as sf

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
Y = torch.arange(12) % 2


class Broken(Exception):
    """What a test throws in."""


class Fragile(nn.Module):
    """Raises at its `left`-th forward pass from now on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))
        self.fault: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        global LEFT
        LEFT -= 1
        if LEFT == 0 and self.fault is not None:
            raise self.fault
        return self.net(x)


LEFT = 0


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


CALLS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "trace": sf.trace,
    "diagonal": sf.diagonal,
    "measure": lambda m, d: sf.measure(m, d, measures=["hessian_trace", "fisher_rao_norm"]),
    "compare": lambda m, d: sf.compare({"a": m}, d, measures=["hessian_trace"]),
    "eigenvalues": lambda m, d: sf.eigenvalues(m, d, k=1),
    "density": sf.density,
    "monitor": lambda m, d: sf.Monitor(m, d, measures=["hessian_trace"], budget=None).measure(),
}
FAULTS = [Broken("thrown in"), RuntimeError("out of memory, it says"), KeyboardInterrupt()]


def attempt(call: Callable[[], Any], fault: BaseException) -> BaseException | None:
    """What the call failed with: this fault, or an error of ours in its place."""
    try:
        call()
    except (type(fault), sf.SaltflatError) as error:
        return error
    return None


def check(name: str, at: int, fault: BaseException, where: str) -> bool:
    global LEFT
    model = dressed(Fragile())
    before, threads = fingerprint(model), torch.get_num_threads()
    inner = next(m for m in model.modules() if isinstance(m, Fragile))
    LEFT, inner.fault = at, fault if where == "forward" else None
    data = Data(fault if where == "data" else None, at)
    error = attempt(lambda: CALLS[name](model, data), fault)
    inner.fault = None
    assert_untouched(model, before)
    assert torch.is_grad_enabled()
    assert torch.get_num_threads() == threads
    # A RuntimeError may be torch's word for a model that takes no smaller batch.
    assert error is None or error is fault or isinstance(fault, RuntimeError)
    return error is not None


@pytest.mark.parametrize("where", ["forward", "data"])
@pytest.mark.parametrize("name", CALLS)
def test_a_fault_leaves_the_model(name: str, where: str) -> None:
    for at, fault in zip((1, 2, 4), FAULTS, strict=True):
        failed = check(name, at, fault, where)
        assert failed or at > 1  # the control: the first pass and the first batch are always met


@pytest.mark.slow
@pytest.mark.parametrize("where", ["forward", "data"])
@pytest.mark.parametrize("name", CALLS)
def test_a_fault_at_every_place_leaves_the_model(name: str, where: str) -> None:
    at = 1
    while check(name, at, FAULTS[0], where) and at < 200:
        at += 1
    assert at > 1


# files


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files take half of what is written to them, and then there is no space left."""
    real = Path.open

    def opened(self: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        file = real(self, mode, *arguments, **options)
        if mode in ("a", "x", "w"):
            write = file.write

            def half(text: str) -> int:
                write(text[: len(text) // 2])
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
