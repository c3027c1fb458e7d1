"""A large GPU: what an exact trace and diagonal of ResNet-18 cost there, and where that goes.

`python -m bench.h200 FOLDER` writes curvature-h200-fp32.md and -tf32.md, the same as JSON and the
tables of the profiler to the folder; `--precisions tf32` does one of the two.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

import saltflat
from bench.cases import CASES, CLASSES, NETWORKS, Problem, prepare
from bench.contenders import CONTENDERS, reference
from bench.contest import error_of
from bench.device import configure, describe, machine
from bench.peers import Values
from bench.phases import Marked, split
from bench.timing import Timed, Times, clocked, in_turns

_OURS = ("trace", "diagonal")
_PRECISIONS = ("fp32", "tf32")
# Gradients, without and with tf32.
_MOST = {("trace", False): 4.5, ("trace", True): 4.5, ("diagonal", True): 7.0}


def _name(tf32: bool) -> str:
    return _PRECISIONS[tf32]


@dataclass(frozen=True)
class Precision:
    """All that was measured in float32 or in tf32. Times in seconds, phases in milliseconds."""

    tf32: bool
    title: str
    times: dict[str, Times]
    errors: dict[str, float | None]
    phases: dict[str, dict[str, float]]
    many: dict[str, float]

    @property
    def name(self) -> str:
        return _name(self.tf32)

    def gradients(self, name: str) -> float:
        return self.times[name].best / self.times["gradient"].best


def _measure(problem: Problem, exact: Values, tf32: bool, options: argparse.Namespace) -> Precision:
    device = options.device
    configure(device, tf32)
    timed, errors = {}, {}
    for name in ("gradient", *_OURS):
        contender = CONTENDERS[name]
        run = contender.build(problem, len(problem.x))
        errors[name] = error_of(contender.gives, run(), exact)
        timed[name] = Timed(run, clocked(run, device)[0])
    times = in_turns(timed, options.repeats, device)
    phases = {name: _phases(problem, name, tf32, options) for name in ("trace", "diagonal")}
    return Precision(tf32, describe(device, tf32), times, errors, phases, {})


def _phases(
    problem: Problem, name: str, tf32: bool, options: argparse.Namespace
) -> dict[str, float]:
    """The phases of one run; the profiler's table goes to a file."""
    marked = Problem(Marked(problem.model).eval(), problem.x, problem.y)
    run = CONTENDERS[name].build(marked, len(problem.x))
    run()
    times, table = split(run, options.device)
    (options.folder / f"profile-{machine(options.device)}-{name}-{_name(tf32)}.txt").write_text(
        table + "\n"
    )
    return times


def _many(problem: Problem, options: argparse.Namespace) -> dict[str, float]:
    """Seconds for many images in batches, on the device already."""
    generator = torch.Generator(options.device).manual_seed(3)
    shape, device = problem.x.shape, options.device
    data = [
        (
            torch.randn(shape, generator=generator, device=device),
            torch.randint(CLASSES, shape[:1], generator=generator, device=device),
        )
        for _ in range(options.images // len(problem.x))
    ]
    return {
        "trace": clocked(lambda: saltflat.trace(problem.model, data), device)[0],
        "diagonal": clocked(lambda: saltflat.diagonal(problem.model, data), device)[0],
    }


def _markdown(r: Precision, options: argparse.Namespace) -> str:
    lines = [f"# {options.network}, n = {options.n}: {r.title}", ""]
    lines += [f"`python -m bench.h200 FOLDER --precisions {r.name}` makes this file.", ""]
    lines += ["| | ms, best | ms, median | gradients | rel. error | must reach |"]
    lines += ["|---|---|---|---|---|---|"]
    for name, times in r.times.items():
        error, most = r.errors[name], _MOST.get((name, r.tf32))
        bar = "" if most is None else f"≤ {most:g} {'✓' if r.gradients(name) <= most else '✗'}"
        lines.append(
            f"| {CONTENDERS[name].title} | {1e3 * times.best:.4g} | {1e3 * times.median:.4g} "
            f"| {r.gradients(name):.3g} | {'' if error is None else f'{error:.1e}'} | {bar} |"
        )
    lines.append("")
    for name, phases in r.phases.items():
        unit = 1e3 * r.times["gradient"].best
        parts = [f"{phase} {ms:.4g} ms ({ms / unit:.2g})" for phase, ms in phases.items()]
        lines.append(f"- {name}, in ms and gradients: {', '.join(parts)}.")
    for name, seconds in r.many.items():
        batches = f"{options.images:,} images in batches of {options.n}"
        lines.append(f"- {name} of {batches}: {seconds:.3g} s.")
    return "\n".join(lines) + "\n"


def _save(result: Precision, options: argparse.Namespace) -> None:
    stem = options.folder / f"curvature-{machine(options.device)}-{result.name}"
    stem.with_suffix(".md").write_text(_markdown(result, options), encoding="utf-8")
    stem.with_suffix(".json").write_text(json.dumps(asdict(result), indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where to write")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--network", choices=NETWORKS, default="resnet18")
    parser.add_argument("--n", type=int, default=1000, help="samples, and the size of a batch")
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--precisions", nargs="+", choices=_PRECISIONS, default=_PRECISIONS)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    case = next(case for case in CASES.values() if case.network == options.network)
    problem = prepare(replace(case, n=options.n), options.device)
    exact = reference(problem)
    for precision in options.precisions:
        result = _measure(problem, exact, precision == "tf32", options)
        _save(result, options)  # what follows takes longest
        result = replace(result, many=_many(problem, options))
        _save(result, options)
        print(_markdown(result, options), flush=True)


if __name__ == "__main__":
    main()
