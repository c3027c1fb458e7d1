"""Times that are compared: by turns, beside their unit, with their spread."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import pytest
import torch

from saltflat.papers import timed
from saltflat.papers.timed import Times, by_turns, median_row

CPU = torch.device("cpu")


class Clock:
    """A machine of which we say how long its calls take."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.speed, self.made = 0.0, 1.0, list[str]()
        monkeypatch.setattr(timed, "process_time", lambda: self.now)

    def call(self, name: str, seconds: float, drift: float = 1.0) -> Callable[[], None]:
        def made() -> None:
            self.made.append(name)
            self.now += seconds * self.speed
            self.speed *= drift

        return made


def test_a_drift_of_the_machine_cancels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine slows down by a factor of more than 50 over the rounds."""
    clock = Clock(monkeypatch)
    calls = {name: clock.call(name, k, drift=1.1) for name, k in (("one", 0.06), ("two", 0.1))}
    found = by_turns(calls, clock.call("unit", 0.02), CPU, seconds=inf)
    assert clock.speed > 50
    assert found["one"].units == pytest.approx([3.0] * 20)
    assert found["two"].units == pytest.approx([5.0] * 20)
    assert max(found["one"].call) > 20 * min(found["one"].call)


def test_calls_take_turns_after_two_that_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    calls = {name: clock.call(name, 0.1) for name in "ab"}
    by_turns(calls, clock.call("u", 0.1), CPU, rounds=2)
    assert "".join(clock.made) == "aabbuu" + "uaub" * 2


def test_short_calls_fill_a_turn_and_slow_ones_have_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    calls = {"slow": clock.call("slow", 2.0), "quick": clock.call("quick", 0.004)}
    found = by_turns(calls, clock.call("unit", 0.02), CPU, rounds=10, seconds=5.0)
    assert found["slow"].call == pytest.approx((2.0,) * 3)
    assert found["quick"].call == pytest.approx((0.004,) * 10)
    assert clock.made.count("slow") == 1 + 3
    assert clock.made.count("quick") == 2 + 3 * 10


def test_a_real_call_takes_as_many_units_as_it_is() -> None:
    x = torch.randn(200, 200)
    found = by_turns({"five": lambda: [x @ x for _ in range(5)]}, lambda: x @ x, CPU, rounds=30)
    assert timed.quartiles(found["five"].units)[1] == pytest.approx(5, rel=0.3)


def test_rows_show_the_spread() -> None:
    row = median_row("a", Times((2.0, 4.0, 30.0), (1.0, 1.0, 1.0)).units, "gradients")
    assert row.ours == 4.0
    assert row.error is None
    assert row.note == "gradients, quartiles 3 to 17 of 3 rounds"
    assert median_row("a", [2.0]).note == "one round"
