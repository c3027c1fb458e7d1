"""What a call on a small network costs beside BackPACK, also the first on a model.

`python -m bench.fixed_cost [--rounds 100]`, on one thread. All runs are taken by turns, in CPU time
of the process; a ratio above 1 means that saltflat is the faster.
"""

from __future__ import annotations

import argparse
import copy
import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from statistics import median

import torch

from bench.cases import CASES, Problem, prepare
from bench.contenders import CONTENDERS
from bench.peers import Run

_WARM_UP = 5
_PEER = "backpack"


def _makers(problem: Problem) -> dict[str, Callable[[], Run]]:
    """What makes the runs. "cold" has a model that no call has seen."""
    n = len(problem.x)
    peer = CONTENDERS[_PEER].build(problem, n)
    makers: dict[str, Callable[[], Run]] = {_PEER: lambda: peer}
    for kind in ("trace", "diagonal"):
        makers[f"{kind}, warm"] = partial(CONTENDERS[kind].build, problem, n)
        makers[f"{kind}, cold"] = partial(_cold, kind, problem)
    return makers


def _cold(kind: str, problem: Problem) -> Run:
    fresh = replace(problem, model=copy.deepcopy(problem.model))
    return CONTENDERS[kind].build(fresh, len(problem.x))


def _by_turns(makers: Mapping[str, Callable[[], Run]], rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in makers}
    for done in range(_WARM_UP + rounds):
        for name, make in makers.items():
            run = make()
            start = time.process_time()
            run()
            if done >= _WARM_UP:
                seconds[name].append(time.process_time() - start)
        gc.collect()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    gc.disable()
    for n in (10, 100, 1000):
        seconds = _by_turns(_makers(prepare(CASES[f"mlp/{n}"])), rounds)
        peer = seconds[_PEER]
        for name, own in seconds.items():
            print(
                f"n = {n:4}  {name:15} best {1e3 * min(own):6.2f} ms, "
                f"median {1e3 * median(own):6.2f} ms; {_PEER} over this: "
                f"{min(peer) / min(own):.2f} (best), {median(peer) / median(own):.2f} (median)"
            )


if __name__ == "__main__":
    main()
