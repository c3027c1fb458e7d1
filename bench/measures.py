"""What all measures together cost, in exact diagonals: `python -m bench.measures`.

Every row is one call of `saltflat.measure`, timed in turns with `saltflat.diagonal` on the same
network and data. The measures that are made of traces and diagonals must cost no more than 1.3
diagonals together; the others need more than a diagonal, and their rows say how much.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch

import saltflat
from bench.cases import CASES, Problem, prepare
from bench.device import configure, describe
from bench.timing import Timed, clocked, in_turns
from saltflat.measures import Measure, RelativeFlatness

MOST = 1.3
NETWORKS = ("mlp/1000", "cnn/1000", "lenet5/1000", "vgg11/64", "resnet18/64")

PLAIN: tuple[str | Measure, ...] = (
    "hessian_trace",
    "kappa_trace",
    "matrix_normalized_sharpness",
    "normalized_sharpness",
    RelativeFlatness(simplified=True),
)
ROWS: dict[str, tuple[str | Measure, ...]] = {
    "made of traces and diagonals": PLAIN,
    "… and minimum sharpness": (*PLAIN, "minimum_sharpness"),
    "… and neuron-wise minimum sharpness": (
        *PLAIN,
        "minimum_sharpness",
        "neuronwise_minimum_sharpness",
    ),
    "… instead, ρ": (*PLAIN, "rho"),
    "… instead, relative flatness of every layer": (*PLAIN[:-1], RelativeFlatness()),
    "… instead, the Fisher–Rao norm": (*PLAIN, "fisher_rao_norm"),
}
_RESULTS = Path(__file__).parent / "results"


def runs(problem: Problem) -> dict[str, Callable[[], object]]:
    data = (problem.x, problem.y)
    calls: dict[str, Callable[[], object]] = {
        "diagonal": lambda: saltflat.diagonal(problem.model, data)
    }
    for name, measures in ROWS.items():
        calls[name] = lambda measures=measures: saltflat.measure(  # type: ignore[misc]
            problem.model, data, measures=measures, progress=False
        )
    return calls


def lines(name: str, repeats: int, seconds: float) -> list[str]:
    """The rows of one network; rounds over all of them are repeated while there is time."""
    problem = prepare(CASES[name])
    few = runs(problem.head(2))
    timed = {}
    for row, run in runs(problem).items():
        few[row]()  # to warm up
        timed[row] = Timed(run, clocked(run, "cpu")[0])
    rounds = int(seconds / sum(each.first for each in timed.values()))
    times = in_turns(timed, min(repeats, rounds), "cpu")
    one = times["diagonal"].best
    rows = []
    for row, each in times.items():
        must = f"≤ {MOST} {'✓' if each.best <= MOST * one else '✗'}"
        shown = must if row == next(iter(ROWS)) else ""
        rows.append(f"| {name} | {row} | {each.best * 1e3:.4g} | {each.best / one:.3g} | {shown} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="+", choices=list(CASES), default=NETWORKS)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=90, help="for the repeats of a network")
    parser.add_argument("--out", type=Path, default=_RESULTS)
    options = parser.parse_args()
    configure("cpu", False)
    table = [
        f"# The cost of measures: {describe('cpu', False)}\n",
        "Certificates are included everywhere. `python -m bench.measures` makes this table.\n",
        "| network | measures | ms, best | diagonals | must reach |",
        "|---|---|---:|---:|---|",
    ]
    for name in options.networks:
        for line in lines(name, options.repeats, options.seconds):
            print(line, flush=True)
            table.append(line)
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "measures-cpu.md").write_text("\n".join(table) + "\n", encoding="utf-8")


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
