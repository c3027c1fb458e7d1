"""`make bench`: exact trace and diagonal against one gradient and against the alternatives."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from bench.cases import CASES, NETWORKS, Case
from bench.contest import Entry, Settings, measure
from bench.device import THREADS, configure, describe, machine
from bench.table import save, terminal

_RESULTS = Path(__file__).parent / "results"
_WIDTH = 200  # of the table where the output is no terminal


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small networks, n ≤ 100, two rounds")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=None)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--tf32", action="store_true", help="on CUDA, allow tf32")
    parser.add_argument("--threads", type=int, default=THREADS, help="of the CPU")
    parser.add_argument("--repeats", type=int, default=7, help="rounds of timing")
    parser.add_argument("--full", action="store_true", help="run slow peers in full, not scaled")
    parser.add_argument("--no-peers", action="store_true", help="saltflat and the gradient alone")
    parser.add_argument("--no-memory", action="store_true", help="skip the peak memory")
    parser.add_argument("--out", type=Path, default=None, help="folder for the Markdown and JSON")
    return parser.parse_args()


def _chosen(options: argparse.Namespace) -> list[Case]:
    """The cases asked for; `--quick` leaves the large ones out unless they were named."""
    networks = options.networks or (("mlp", "cnn") if options.quick else NETWORKS)
    cases = [case for case in CASES.values() if case.network in networks]
    short = [case for case in cases if case.n <= 100]
    return short if options.quick and short else cases


def main() -> None:
    options = _options()
    configure(options.device, options.tf32, options.threads)
    settings = Settings(
        repeats=2 if options.quick else options.repeats,
        device=options.device,
        tf32=options.tf32,
        memory=not options.no_memory,
        full=options.full,
        peers=not options.no_peers,
    )
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    title = f"Exact curvature: {describe(options.device, options.tf32, options.threads)}"
    suffix = "" if options.device == "cpu" else "-tf32" if options.tf32 else "-fp32"
    stem = (options.out or _RESULTS) / f"curvature-{machine(options.device)}{suffix}"
    results: dict[str, dict[str, Entry]] = {}
    for case in _chosen(options):
        console.print(f"measuring {case.name} …", style="dim")
        results[case.name] = measure(case, settings)
        save(results, title, stem)  # after every case, so that a long run can be cut short
    console.print(terminal(results, title))
    console.print(f"written to {stem}.md and .json", style="dim")


if __name__ == "__main__":
    main()
