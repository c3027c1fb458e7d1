"""What a call on a small network costs beside BackPACK, and what it is made of.

`python -m bench.fixed_cost [--rounds 100]`, on one thread. All runs are taken by turns, in CPU time
of the process, each of them twice: first after a run of the other library, which has filled the
processor's caches with its own, and then again.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

from bench.cases import CASES, prepare
from bench.contenders import CONTENDERS
from bench.peers import Run
from saltflat.curvature import plan, sweep
from saltflat.curvature.curvature import Curvature
from saltflat.risk import Risk

_RESULTS = Path(__file__).parent / "results" / "fixed-cost-cpu.md"
_SIZES = (10, 100, 1000)
_WARM_UP = 5
_PEER = "backpack"
_KINDS = ("trace", "diagonal")

_REST, _OUTSIDE = "the rest of look and sweep", "risk, session, result"
# What is timed apart, without what others of these take inside of it.
_PARTS: list[tuple[str, Any, str]] = [
    ("forward passes", Risk, "forward"),
    ("proofs from the graph", plan, "prove"),
    ("rules against autograd", plan, "fast_rules"),
    ("gradients against slopes", plan, "check_derivative"),
    ("the loss's Hessian", sweep, "factor"),
    ("directions backwards", sweep, "backward"),
    ("squares and sums", sweep.ExactPass, "_add"),
    (_REST, Curvature, "find"),
]


class Clock:
    """Seconds of every part, without those of the parts inside of it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._open: list[str] = []
        self._since = 0.0

    def _turn(self) -> None:
        now = time.process_time()
        if self._open:
            part = self._open[-1]
            self.seconds[part] = self.seconds.get(part, 0.0) + now - self._since
        self._since = now

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._turn()
        self._open.append(name)
        try:
            yield
        finally:
            self._turn()
            self._open.pop()

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return call(*args, **kwargs)

        return run


def _by_turns(runs: Mapping[str, Run], rounds: int) -> dict[str, tuple[list[float], list[float]]]:
    """The seconds of every run, after another one and again."""
    seconds: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in runs}
    others = {name: _PEER if name != _PEER else _KINDS[0] for name in runs}
    for done in range(_WARM_UP + rounds):
        for name, run in runs.items():
            runs[others[name]]()
            for each in seconds[name]:
                start = time.process_time()
                run()
                if done >= _WARM_UP:
                    each.append(time.process_time() - start)
        gc.collect()
    return seconds


def _parts(run: Run, rounds: int) -> dict[str, float]:
    """The median milliseconds of every part of a call."""
    found: dict[str, list[float]] = {name: [] for name in [*(n for n, _, _ in _PARTS), _OUTSIDE]}
    for done in range(_WARM_UP + rounds):
        clock = Clock()
        with ExitStack() as stack:
            for name, owner, attribute in _PARTS:
                timed = clock.timed(name, getattr(owner, attribute))
                stack.enter_context(patch.object(owner, attribute, timed))
            with clock.part(_OUTSIDE):
                run()
        if done >= _WARM_UP:
            for name, each in found.items():
                each.append(1e3 * clock.seconds.get(name, 0.0))
    return {name: median(each) for name, each in found.items()}


def _lines(rounds: int) -> Iterator[str]:
    yield "| n | | ms, after another | BackPACK ÷ this | ms, again | BackPACK ÷ this |"
    yield "|---:|---|---:|---:|---:|---:|"
    columns = []
    for n in _SIZES:
        problem = prepare(CASES[f"mlp/{n}"])
        runs = {name: CONTENDERS[name].build(problem, n) for name in (_PEER, *_KINDS)}
        seconds = _by_turns(runs, rounds)
        peer = [median(each) for each in seconds[_PEER]]
        for name, own in seconds.items():
            cells = (
                f"{1e3 * median(each):.3g} | {by / median(each):.2f}"
                for each, by in zip(own, peer, strict=True)
            )
            yield f"| {n} | {CONTENDERS[name].title} | {' | '.join(cells)} |"
        columns += [_parts(runs[kind], rounds) for kind in _KINDS]
    heads = [f"{kind}, n = {n}" for n in _SIZES for kind in _KINDS]
    yield from ("", "Of a call that comes again, in milliseconds:", "")
    yield f"| | {' | '.join(heads)} |"
    yield "|---|" + "---:|" * len(heads)
    for name in columns[0]:
        yield f"| {name} | {' | '.join(f'{column[name]:.2f}' for column in columns)} |"
    sums = (f"{sum(column.values()):.2f}" for column in columns)
    yield f"| all | {' | '.join(sums)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--out", type=Path, default=_RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    gc.disable()
    lines = [
        f"# A call on the 784-20-20-10 network: 1 CPU thread, torch {torch.__version__}",
        "",
        f"`python -m bench.fixed_cost --rounds {options.rounds}` makes this file. CPU time of the",
        "process, medians, all by turns: every run after one of the other library, which has",
        "filled the processor's caches with its own, and then again. saltflat keeps nothing from",
        "one call to the next; up to 16 samples are looked at and measured in one pass.",
        "",
        *_lines(options.rounds),
    ]
    options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
