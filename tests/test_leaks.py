"""A call leaves nothing behind in the process, so that thousands of them do not grow it."""

from __future__ import annotations

import gc
import linecache
import logging
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import saltflat as sf

X = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
Y = torch.arange(8) % 2
CALLS = 3


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)).eval()


def grown(call: Callable[[], Any]) -> Counter[str]:
    """Objects that are left of some calls, by type, once those before have filled the caches."""

    def count() -> Counter[str]:
        gc.collect()
        return Counter(type(each).__name__ for each in gc.get_objects())

    trace = logging.getLogger("torch.__trace")  # whose records pytest would keep
    propagate, trace.propagate = trace.propagate, False
    try:
        for _ in range(2):
            call()
        before = count()
        for _ in range(CALLS):
            call()
        return count() - before
    finally:
        trace.propagate = propagate


def sam_step(model: nn.Module) -> None:
    optimizer = sf.SAM(torch.optim.SGD(model.parameters(), lr=0.0))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X), Y)
        loss.backward()
        return loss

    optimizer.step(closure)


def fam_step(model: nn.Module) -> None:
    with sf.FAM(model, "3") as fam:
        F.cross_entropy(model(X), Y)
        fam(Y).backward()


CALLED: dict[str, Callable[[nn.Module], Any]] = {
    "measure": lambda m: sf.measure(m, (X, Y), measures=["minimum_sharpness"], progress=False),
    "symmetries of a view": lambda m: sf.symmetries(m, X[:2]),
    "monitor": lambda m: sf.Monitor(m, (X, Y), measures=["hessian_trace"]).measure(),
    "SAM": sam_step,
    "FAM": fam_step,
}


@pytest.mark.parametrize("name", CALLED)
def test_nothing_is_left_of_a_call(name: str) -> None:
    model = network()
    left = grown(lambda: CALLED[name](model))
    assert left["Tensor"] == left["ShapeEnv"] == 0
    # Pytest keeps a few records of what torch logs; without it nothing is left at all.
    assert sum(left.values()) < 20 * CALLS, left.most_common(5)


def test_generated_code_is_forgotten() -> None:
    model = network()
    sf.symmetries(model, X)
    before = len(linecache.cache)
    sf.symmetries(model, X)
    assert len(linecache.cache) <= before


def test_what_is_left_is_seen() -> None:
    """The control: something that keeps a tensor and a list a call."""
    kept: list[Any] = []
    assert grown(lambda: kept.append([torch.ones(1)]))["Tensor"] == CALLS


def test_a_model_is_let_go_of(tmp_path: Path) -> None:
    model = network()
    gone = weakref.ref(model)
    sf.measure(model, (X, Y), progress=False)
    sf.Monitor(model, (X, Y), path=tmp_path / "log.jsonl").measure()
    del model
    gc.collect()
    assert gone() is None
