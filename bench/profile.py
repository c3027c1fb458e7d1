"""Where the time of a trace and a diagonal goes on a CPU: `python -m bench.profile mlp/1000`.

The whole is taken without the profiler, which slows every operation down by some microseconds; the
phases are those of one profiled run. What is left when they are taken from the whole is Python: the
session, the recording, the bookkeeping of certificate and sweep.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import mean

from bench.cases import CASES, Problem, prepare
from bench.contenders import CONTENDERS
from bench.device import configure, describe
from bench.phases import Marked, split
from bench.timing import clocked

_RESULTS = Path(__file__).parent / "results"
_METHODS = ("gradient", "trace", "diagonal")
_SHORT = 0.2  # seconds: a run that is shorter is warmed up and repeated more often


def _line(problem: Problem, name: str) -> tuple[str, str]:
    """One row of the summary, and the profiler's table."""
    contender = CONTENDERS[name]
    run = contender.build(problem, len(problem.x))
    short = clocked(run, "cpu")[0] < _SHORT
    for _ in range(5 if short else 0):
        run()
    whole = []
    for _ in range(20 if short else 2):
        whole.append(1e3 * clocked(run, "cpu")[0])
    marked = contender.build(
        Problem(Marked(problem.model).eval(), problem.x, problem.y), len(problem.x)
    )
    marked()
    phases, table = split(marked, "cpu")
    parts = "".join(f" {ms:.3g} |" for ms in phases.values())
    return f"| {contender.title} | {min(whole):.3g} | {mean(whole):.3g} |{parts}", table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=list(CASES))
    parser.add_argument("--methods", nargs="+", choices=_METHODS, default=_METHODS)
    parser.add_argument("--out", type=Path, default=_RESULTS)
    options = parser.parse_args()
    configure("cpu", False)
    problem = prepare(CASES[options.case], "cpu")
    profiles = {name: _line(problem, name) for name in options.methods}
    command = f"python -m bench.profile {options.case} --methods {' '.join(options.methods)}"
    lines = [
        f"# {options.case}: {describe('cpu', False)}",
        "",
        f"`{command}` makes this",
        "file. Milliseconds; of one profiled run, the operations' own times: in forward passes, in",
        "backward passes, elsewhere.",
        "",
        "| | whole, best | whole, mean | forward | backward | elsewhere |",
        "|---|---:|---:|---:|---:|---:|",
        *(line for line, _ in profiles.values()),
        "",
        *(f"## {CONTENDERS[n].title}\n\n```\n{table}\n```" for n, (_, table) in profiles.items()),
    ]
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"profile-cpu-{options.case.replace('/', '-')}.md"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines[: 9 + len(profiles)]))


if __name__ == "__main__":
    main()
