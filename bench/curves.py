"""What an exact trace and an estimated one cost as one size grows: `python -m bench.curves`.

One size is varied at a time. Times are of the processor, in one thread, so that others on the
machine count less; the least of several stands for each, beside that of one gradient over the same
data, taken in turns. The exponent is the slope of log seconds over log size between the two largest
sizes, where overheads count least; what theory expects stands beside it. Processes are timed by the
clock instead, from the first that begins to the last that ends: their number is to shorten it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, final

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

import saltflat as sf

RESULTS = Path(__file__).parent / "results" / "curves-cpu.json"


@final
@dataclass(frozen=True)
class Curve:
    """One size that grows, of which network, and the exponent that theory expects of it."""

    size: str
    what: str
    values: Sequence[int]
    expected: str
    make: Callable[[int], Problem]


@final
@dataclass(frozen=True)
class Problem:
    model: nn.Module
    data: Any  # as saltflat takes them
    batch: tuple[Tensor, Tensor]  # the same samples at once, for a gradient
    estimator: Any = None


@final
@dataclass(frozen=True)
class Point:
    value: int
    seconds: float
    gradient: float  # seconds of one


def mlp(n: int, classes: int = 10, width: int = 128, depth: int = 2, step: int = 0) -> Problem:
    """`depth` hidden layers with ReLU on random data, read in batches of `step` if it is not 0."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs in [width] * depth:
        layers += [nn.Linear(inputs, width), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(width, classes))
    x, y = torch.randn(n, width), torch.randint(classes, (n,))
    data: Any = (x, y) if not step else list(zip(x.split(step), y.split(step), strict=True))
    return Problem(model, data, (x, y))


class Reader(nn.Module):
    """Two encoder layers over sequences of tokens, and a linear head on their mean."""

    def __init__(self, width: int = 64, words: int = 100, classes: int = 10) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.embedding = nn.Embedding(words, width)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.encoder(self.embedding(tokens)).mean(1))
        return out


def reader(n: int, length: int, estimator: Any) -> Problem:
    torch.manual_seed(0)
    x, y = torch.randint(100, (n, length)), torch.randint(10, (n,))
    return Problem(Reader(), (x, y), (x, y), estimator)


def probes(count: int) -> sf.ActivationProbes:
    return sf.ActivationProbes(count, seed=0)


CURVES = (
    Curve(
        "n",
        "samples; exact trace, 128-128-128-10",
        (4000, 8000, 16000, 32000, 64000),
        "1",
        lambda n: mlp(n),
    ),
    Curve(
        "K",
        "classes; exact trace, 128-128-128-K, 2000 samples",
        (10, 20, 40, 80, 160),
        "1: K − 1 directions; 2 in the last layer",
        lambda k: mlp(2000, classes=k),
    ),
    Curve(
        "width",
        "units a layer; exact trace, 2 hidden layers, 2000 samples",
        (64, 128, 256, 512, 1024),
        "2: the entries of a weight",
        lambda width: mlp(2000, width=width),
    ),
    Curve(
        "depth",
        "hidden layers of 128; exact trace, 2000 samples",
        (2, 4, 8, 16, 32),
        "1",
        lambda depth: mlp(2000, depth=depth),
    ),
    Curve(
        "batch",
        "samples a batch, of 16,000; exact trace, 128-128-128-10",
        (125, 500, 2000, 8000),
        "0: overhead falls",
        lambda step: mlp(16000, step=step),
    ),
    Curve(
        "T",
        "tokens a sequence; 4 draws, two encoder layers, 16 sequences",
        (16, 32, 64, 128, 256),
        "1, then 2: attention",
        lambda length: reader(16, length, probes(4)),
    ),
    Curve(
        "draws",
        "of activation probes; two encoder layers, 16 sequences of 32",
        (4, 8, 16, 32, 64),
        "1",
        lambda count: reader(16, 32, probes(count)),
    ),
)


def whole_trace(problem: Problem) -> None:
    choice = {} if problem.estimator is None else {"estimator": problem.estimator}
    sf.trace(problem.model, problem.data, progress=False, **choice)


def gradient(problem: Problem) -> None:
    x, y = problem.batch
    torch.autograd.grad(F.cross_entropy(problem.model(x), y), list(problem.model.parameters()))


def seconds(run: Callable[[Problem], None], problem: Problem) -> float:
    start = time.process_time()
    run(problem)
    return time.process_time() - start


def measured(curve: Curve, repeats: int) -> Iterator[Point]:
    for value in curve.values:
        problem = curve.make(value)
        whole_trace(problem)
        pairs = [
            (seconds(whole_trace, problem), seconds(gradient, problem)) for _ in range(repeats)
        ]
        yield Point(value, min(a for a, _ in pairs), min(b for _, b in pairs))


SHARED = Curve(
    "processes",
    "each with its part of 64,000 samples; exact trace, 128-128-128-10, by the clock",
    [count for count in (1, 2, 4, 8) if count <= (os.cpu_count() or 1)],
    "−1",
    lambda n: mlp(n),
)


def shared(curve: Curve, repeats: int) -> Iterator[Point]:
    for count in curve.values:
        with TemporaryDirectory() as folder:
            mp.spawn(_rank, (count, repeats, folder), nprocs=count)  # type: ignore[no-untyped-call, attr-defined]
            seconds, gradient = json.loads((Path(folder) / "seconds").read_text())
        yield Point(count, seconds, gradient)


def _rank(rank: int, count: int, repeats: int, folder: str) -> None:
    """One process, with its part of the samples; the first writes the least times of all."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=count)
    whole = SHARED.make(64_000)
    x, y = (each.tensor_split(count)[rank] for each in whole.batch)
    part = Problem(whole.model, (x, y), (x, y))
    runs: tuple[Callable[[Problem], None], ...] = (whole_trace_together, gradient)
    for run in runs:
        run(part)
    times: list[list[float]] = [[], []]
    for _ in range(repeats):
        for run, found in zip(runs, times, strict=True):
            dist.barrier()
            start = time.perf_counter()
            run(part)
            dist.barrier()
            found.append(time.perf_counter() - start)
    if rank == 0:
        (Path(folder) / "seconds").write_text(json.dumps([min(found) for found in times]))
    dist.destroy_process_group()


def whole_trace_together(part: Problem) -> None:
    sf.trace(part.model, part.data, progress=False, distributed=True)


def exponent(points: Sequence[Mapping[str, float]], what: str = "seconds") -> float:
    """Of the two largest sizes."""
    small, large = points[-2:]
    return math.log(large[what] / small[what]) / math.log(large["value"] / small["value"])


def table(found: Mapping[str, Any]) -> str:
    lines = [f"{found['machine']}. `python -m bench.curves`.", ""]
    lines += [
        "| size | of what | exponent | expected | of a gradient |",
        "|---|---|---:|---|---:|",
    ]
    for name, curve in found["curves"].items():
        slopes = [f"{exponent(curve['points'], w):.2f}" for w in ("seconds", "gradient")]
        lines.append(
            f"| {name} | {curve['what']} | {slopes[0]} | {curve['expected']} | {slopes[1]} |"
        )
    for name, curve in found["curves"].items():
        lines += ["", f"| {name} | seconds | of a gradient | gradients |", "|---:|---:|---:|---:|"]
        lines += [
            f"| {p['value']} | {p['seconds']:.3g} | {p['gradient']:.3g} | "
            f"{p['seconds'] / p['gradient']:.3g} |"
            for p in curve["points"]
        ]
    return "\n".join([*lines, ""])


def draw(found: Mapping[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    curves = found["curves"]
    rows = math.ceil(len(curves) / 4)
    figure = Figure(figsize=(11, 2.6 * rows), layout="constrained")
    grid = figure.subplots(rows, 4, squeeze=False).flat
    for axes, (name, curve) in zip(grid, curves.items(), strict=False):
        values = [p["value"] for p in curve["points"]]
        for what, colour in (("seconds", "C0"), ("gradient", "C7")):
            axes.loglog(values, [p[what] for p in curve["points"]], "o-", color=colour, ms=4)
        axes.set_title(f"{name}: {exponent(curve['points']):.2f}", fontsize=10)
        axes.set_xticks(values, [f"{v:,}" for v in values], fontsize=7)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    for axes in list(grid)[len(curves) :]:
        axes.set_axis_off()
    figure.supylabel("seconds: blue the trace, grey one gradient", fontsize=9)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sizes", nargs="*", default=[curve.size for curve in (*CURVES, SHARED)])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"curves": {}}
    known["machine"] = f"One CPU thread a process, float32, torch {torch.__version__}"
    for curve in (*CURVES, SHARED):
        if curve.size in arguments.sizes:
            times = shared if curve is SHARED else measured
            points = [vars(point) for point in times(curve, arguments.repeats)]
            row = {"what": curve.what, "expected": curve.expected, "points": points}
            known["curves"][curve.size] = row
            print(curve.size, f"{exponent(points):.2f}", points, flush=True)
            RESULTS.write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n")
            RESULTS.with_suffix(".md").write_text(table(known))
            draw(known, RESULTS.with_suffix(".png"))


if __name__ == "__main__":
    main()
