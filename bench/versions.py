"""Two versions of saltflat side by side: `python -m bench.versions ../older` compares prices.

Each version runs in a process of its own and they take turns, so that whatever else the machine
does hits both alike. A first call is that of a model that was never measured; later ones, some in a
row, measure the same model again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from bench.cases import CASES
from bench.device import THREADS, configure, describe

_HERE = Path(__file__).parent.parent
_RESULTS = Path(__file__).parent / "results"
_NAMES = ("mlp/1000", "lenet5/1000", "vgg11/64", "resnet18/64")
_REST = 0.3  # seconds, until the other version's threads have stopped waiting for work
_SECONDS = 60.0  # a case, for both versions together
HEADER = ("network", "call", "before, ms", "after, ms", "after − before, ms", "after ÷ before")


def serve() -> None:
    """Time the calls that are asked for, one a line: the name of a case, or how many more."""
    import saltflat as sf
    from bench.cases import prepare

    configure("cpu", tf32=False)
    problem = prepare(CASES["mlp/10"])
    sf.trace(problem.model, (problem.x, problem.y))  # torch's own start
    for line in sys.stdin:
        if more := line.strip().isdigit():
            time.sleep(_REST)
        else:
            problem = prepare(CASES[line.strip()])
        seconds = []
        for _ in range(int(line) if more else 1):
            start = time.perf_counter()
            sf.trace(problem.model, (problem.x, problem.y))
            seconds.append(time.perf_counter() - start)
        print(json.dumps(median(seconds)), flush=True)


@contextmanager
def version(source: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that runs the saltflat of a working tree."""
    environment = {**os.environ, "PYTHONPATH": f"{source / 'src'}{os.pathsep}{_HERE}"}
    command = [sys.executable, "-W", "ignore", "-m", "bench.versions", "--serve"]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def ask(process: subprocess.Popen[str], what: str) -> float:
    """The seconds of one call."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(what + "\n")
    process.stdin.flush()
    if not (answer := process.stdout.readline()):
        raise SystemExit(f"A version failed on {what}.")
    return float(json.loads(answer))


def compare(pair: list[subprocess.Popen[str]], name: str, rounds: int) -> list[tuple[str, ...]]:
    """Rows of first and later calls of a case, each the median over rounds."""
    first: list[list[float]] = [[], []]
    later: list[list[float]] = [[], []]
    end = time.perf_counter() + _SECONDS
    for turn in range(rounds):
        order = (0, 1) if turn % 2 == 0 else (1, 0)
        for k in order:
            first[k].append(ask(pair[k], name))
        count = max(1, min(30, int(0.3 / max(first[0][-1], first[1][-1]))))
        for k in order:
            later[k].append(ask(pair[k], str(count)))
        if time.perf_counter() > end:
            break
    return [_row(name, "first", first), _row(name, "later", later)]


def _row(name: str, call: str, seconds: list[list[float]]) -> tuple[str, ...]:
    before, after = (1e3 * median(each) for each in seconds)
    shown = [f"{value:.3g}" for value in (before, after, after - before, after / before)]
    return (name, call, *shown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path, nargs="?", help="working tree of another version")
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=_NAMES)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=_RESULTS)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
        return
    if options.before is None:
        parser.error("which version to compare with?")
    title = f"sf.trace, two versions in turns: {describe('cpu', tf32=False)}"
    table = Table(*HEADER, title=title)
    rows: list[tuple[str, ...]] = []
    with version(options.before.resolve()) as before, version(_HERE) as after:
        for name in options.cases:
            rows += compare([before, after], name, options.rounds)
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    lines = [f"# {title}", "", *("| " + " | ".join(row) + " |" for row in (HEADER, *rows))]
    lines.insert(3, "|" + "---|" * len(HEADER))
    lines += ["", f"Medians; {THREADS} threads a process, one process at work at a time."]
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "versions-cpu.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
