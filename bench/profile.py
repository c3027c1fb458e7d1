"""Where the time of a cold trace and diagonal goes on a CPU: `python -m bench.profile mlp/1000`.

Times are means over a few runs. What is left when the operations' own times are taken from the
whole is Python: the session, the recording, the certificate's and the sweep's bookkeeping. The
whole is taken without the profiler, which slows every operation down by some microseconds.
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
_WARM, _RUNS = 5, 20


def _line(problem: Problem, name: str, runs: int) -> tuple[str, str]:
    """One row of the summary, and the profiler's table."""
    contender = CONTENDERS[name]
    run = contender.build(problem, len(problem.x))
    for _ in range(_WARM):
        run()
    whole = []
    for _ in range(runs):
        contender.before()
        whole.append(1e3 * clocked(run, "cpu")[0])
    marked = contender.build(
        Problem(Marked(problem.model).eval(), problem.x, problem.y), len(problem.x)
    )
    marked()
    contender.before()
    phases, table = split(marked, "cpu")
    parts = "".join(f" {ms:.3g} |" for ms in phases.values())
    return f"| {contender.title} | {min(whole):.3g} | {mean(whole):.3g} |{parts}", table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=list(CASES))
    parser.add_argument("--runs", type=int, default=_RUNS)
    parser.add_argument("--out", type=Path, default=_RESULTS)
    options = parser.parse_args()
    configure("cpu", False)
    problem = prepare(CASES[options.case], "cpu")
    names = ("gradient", "trace", "trace-warm", "diagonal", "diagonal-warm")
    found = {name: _line(problem, name, options.runs) for name in names}
    lines = [
        f"# {options.case}: {describe('cpu', False)}",
        "",
        f"`python -m bench.profile {options.case}` makes this file. Milliseconds; of one profiled",
        "run, the operations' own times: in forward passes, in backward passes, elsewhere.",
        "",
        "| | whole, best | whole, mean | forward | backward | elsewhere |",
        "|---|---:|---:|---:|---:|---:|",
        *(line for line, _ in found.values()),
        "",
        *(f"## {CONTENDERS[name].title}\n\n```\n{found[name][1]}\n```" for name in names[1:4:2]),
    ]
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"profile-cpu-{options.case.replace('/', '-')}.md"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines[:12]))


if __name__ == "__main__":
    main()
