"""What calls cost, in gradients, by the clock and as reports count it: `python -m bench.prices`.

A gradient is one forward and one backward pass over the same data in float32, timed before and
after every call. Times are of the processor, summed over threads, so that others on the machine
count less; the least of several stands for each. What a call costs by the clock has in it what no
pass is: finding the rescalings, balancing, and the certificate.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path

import torch
import torch.nn.functional as F

import saltflat as sf
from bench.cases import CASES, Problem, prepare
from bench.device import THREADS
from saltflat.measures import MEASURES

NETWORKS = ("vgg11/64", "resnet18/64")
AUDITED = "lenet5/1000"
SAMPLES = 200
DEFAULT = "by default"
CALLS = (DEFAULT, *(name for name, kind in MEASURES.items() if kind.cost != "sweep"))
MEASURE, AUDIT = 60, 1000  # gradients, at most
_RESULTS = Path(__file__).parent / "results"


def gradient(problem: Problem) -> float:
    """Seconds of the processor."""
    start = time.process_time()
    loss = F.cross_entropy(problem.model(problem.x), problem.y)
    torch.autograd.grad(loss, list(problem.model.parameters()))
    return time.process_time() - start


def clocked(
    problem: Problem, call: Callable[[], sf.Report | sf.Audit], repeats: int
) -> tuple[float, float, sf.Report | sf.Audit]:
    """The least seconds of the call and of a gradient, and what the call returned."""
    seconds, ones = [], [gradient(problem) for _ in range(3)]
    for _ in range(repeats):
        start = time.process_time()
        found = call()
        seconds.append(time.process_time() - start)
        ones += [gradient(problem) for _ in range(3)]
    return min(seconds), min(ones), found


def line(cells: tuple[str, str], took: tuple[float, float], counted: str, most: int | None) -> str:
    seconds, one = took
    must = "" if most is None else f"≤ {most} {'✓' if seconds <= most * one else '✗'}"
    cost = f"{seconds:.4g} | {one:.3g} | {seconds / one:.3g}"
    return f"| {cells[0]} | {cells[1]} | {cost} | {counted} | {must} |"


def of_measures(name: str, repeats: int, wanted: Sequence[str]) -> Iterator[str]:
    problem = prepare(CASES[name])
    data = problem.x, problem.y
    few = problem.head(2)
    sf.measure(few.model, (few.x, few.y), progress=False)  # to warm up
    for row in wanted:
        names = None if row == DEFAULT else [row]
        if row == "bn_sharpness" and "bn" not in name and "resnet" not in name:
            continue

        def call(names: list[str] | None = names) -> sf.Report:
            return sf.measure(problem.model, data, measures=names, progress=False)

        seconds, one, report = clocked(problem, call, repeats)
        assert isinstance(report, sf.Report)
        counted = f"{sum(report.provenance.gradients.values()):.3g}"
        if names is not None:
            counted += f", {MEASURES[row]().price():.0f} on the label"
        most = MEASURE if row in (DEFAULT, "kappa") else None
        yield line((name, row), (seconds, one), counted, most)


def of_audit(repeats: int) -> str:
    problem = prepare(CASES[AUDITED]).head(SAMPLES)
    data = problem.x, problem.y
    sf.measure(problem.model, data, progress=False)  # to warm up
    call = lambda: sf.audit(problem.model, data, progress=False)  # noqa: E731
    seconds, one, found = clocked(problem, call, repeats)
    assert isinstance(found, sf.Audit)
    models = 1 + sum(found.elements.values())
    cells = f"lenet5/{SAMPLES}", f"audit by default, {models} models in float64"
    return line(cells, (seconds, one), "", AUDIT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="*", choices=list(CASES), default=NETWORKS)
    parser.add_argument("--calls", nargs="*", choices=CALLS, default=CALLS)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--threads", type=int, default=THREADS)
    parser.add_argument("--out", type=Path, default=_RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    table = [
        f"# Prices: {options.threads} CPU threads, float32, torch {torch.__version__}\n",
        "`python -m bench.prices` makes this table. Processor time, the least of several; counted",
        "is what reports say, from the passes that were made.\n",
        "| network | call | s | one gradient, s | gradients | counted | must reach |",
        "|---|---|---:|---:|---:|---|---|",
    ]
    options.out.mkdir(parents=True, exist_ok=True)
    of_networks = (of_measures(n, options.repeats, options.calls) for n in options.networks)
    for row in chain([of_audit(options.repeats)], *of_networks):
        print(row, flush=True)
        table.append(row)
        (options.out / "prices-cpu.md").write_text("\n".join(table) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
