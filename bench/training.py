"""What one training step costs with each optimizer and penalty: `python -m bench.training`.

Time and peak memory of a whole step (forward, backward, update), times as ratios to plain SGD in
the same run. Memory is what model, data and three steps take at their peak, on a CPU in a process
of its own for each, where a few MiB are blur. LeNet-5 here has BatchNorm after its convolutions, as
in the BN-Sharpness paper; the transformer has none, so that BN-Sharpness has no row there. Entropy-
SGD is timed over one of its Langevin steps, of which 20 make an update of the weights by default.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import saltflat as sf
from bench.device import configure, describe, machine
from bench.fam import FullHessian
from bench.peak_memory import peak
from bench.timing import Timed, Times, clocked, in_turns
from saltflat.zoo import resnet18

_RESULTS = Path(__file__).parent / "results"
Step = Callable[[], object]


class _Encoder(nn.Module):
    """Two pre-norm encoder layers of width 64 over 32 tokens, and a classifier of their mean."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            64, 4, 128, dropout=0.0, batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.fc = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(self.body(x).mean(1))
        return out


def _lenet() -> nn.Module:
    convolutions = [nn.Conv2d(1, 6, 5, padding=2), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2)]
    convolutions += [nn.Conv2d(6, 16, 5), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)]
    model = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(400, 120), nn.ReLU())
    model.append(nn.Linear(120, 84)).append(nn.ReLU())
    model.add_module("fc", nn.Linear(84, 10))
    return model


def _resnet() -> nn.Module:
    *body, last = resnet18()
    model = nn.Sequential(*body)
    model.add_module("fc", last)
    return model


@dataclass(frozen=True)
class Network:
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    cpu_batch: int
    gpu_batch: int
    batchnorm: bool = True


NETWORKS = {
    "lenet5": Network(_lenet, (1, 28, 28), 128, 512),
    "resnet18": Network(_resnet, (3, 32, 32), 64, 512),
    "transformer": Network(_Encoder, (32, 64), 64, 512, batchnorm=False),
}


def _plain(model: nn.Module, x: Tensor, y: Tensor, penalty: Callable[[Tensor], Tensor]) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        (F.cross_entropy(model(x), y) + penalty(y)).backward()
        optimizer.step()

    return step


def _closed(model: nn.Module, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer) -> Step:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return lambda: optimizer.step(closure)  # type: ignore[arg-type]


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def steps(name: str, device: str, batch: int | None = None) -> dict[str, Callable[[], Step]]:
    """How to make every contender, each with a model of its own."""
    network = NETWORKS[name]
    batch = batch or (network.cpu_batch if device == "cpu" else network.gpu_batch)

    def ready() -> tuple[nn.Module, Tensor, Tensor]:
        torch.manual_seed(0)
        x = torch.randn(batch, *network.shape, device=device)
        return network.make().to(device).train(), x, torch.arange(batch, device=device) % 10

    def penal(make: Callable[[nn.Module], Callable[[Tensor], Tensor]]) -> Callable[[], Step]:
        def build() -> Step:
            model, x, y = ready()
            return _plain(model, x, y, make(model))

        return build

    def wrapped(make: Callable[[nn.Module], torch.optim.Optimizer]) -> Callable[[], Step]:
        def build() -> Step:
            model, x, y = ready()
            return _closed(model, x, y, make(model))

        return build

    methods = {
        "SGD": penal(lambda m: lambda y: torch.zeros((), device=device)),
        "SAM": wrapped(lambda m: sf.SAM(_sgd(m), rho=0.05)),
        "ASAM": wrapped(lambda m: sf.SAM(_sgd(m), rho=0.5, adaptive=True)),
        "FAM, neuron-wise, on fc": penal(lambda m: sf.FAM(m, "fc", 0.1)),
        "FAM, simplified, on fc": penal(lambda m: sf.FAM(m, "fc", 0.1, simplified=True)),
        "FAM the paper's way, on fc": penal(lambda m: FullHessian(m, 0.1)),
        "Entropy-SGD, one Langevin step": _entropy(ready),
    }
    if network.batchnorm:
        for ascent in (0, 5):
            methods[f"BN-Sharpness, K₁ = {ascent}"] = wrapped(
                lambda m, ascent=ascent: sf.BNSharpnessSGD(_sgd(m), m, ascent_steps=ascent)  # type: ignore[misc]
            )
    return methods


def _entropy(ready: Callable[[], tuple[nn.Module, Tensor, Tensor]]) -> Callable[[], Step]:
    def build() -> Step:
        model, x, y = ready()
        optimizer = sf.EntropySGD(model.parameters(), lr=1e-3)

        def step() -> None:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

        return step

    return build


def _three(build: Callable[[], Step]) -> None:
    """Enough for all state to be there and the largest step to be made."""
    step = build()
    for _ in range(3):
        step()


def memory_of(name: str, row: str, device: str) -> float:
    """MiB at the peak; in a process that is good for nothing else, on a CPU."""
    _three(steps(name, device, batch=2)[row])  # loads the libraries
    return peak(lambda: _three(steps(name, device)[row]), device)


def _elsewhere(name: str, row: str) -> float:
    command = [sys.executable, "-m", "bench.training", "--networks", name, "--memory-of", row]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def measure(name: str, device: str, repeats: int) -> tuple[dict[str, Times], dict[str, float]]:
    timed, memory = {}, {}
    for row, build in steps(name, device).items():
        memory[row] = memory_of(name, row, device) if device == "cuda" else _elsewhere(name, row)
        run = build()
        run()
        run()
        timed[row] = Timed(run, clocked(run, device)[0])
    return in_turns(timed, repeats, device), memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, default=_RESULTS)
    parser.add_argument("--memory-of", help="print the peak memory of this step only, in MiB")
    options = parser.parse_args()
    configure(options.device, False)
    if options.memory_of:
        print(memory_of(options.networks[0], options.memory_of, options.device))
        return
    lines = [
        f"# One training step: {describe(options.device, False)}\n",
        f"`python -m bench.training --device {options.device}` makes this table.\n",
        "| network | step | ms, best | of SGD: best | of SGD: median | peak MiB |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for name in options.networks:
        times, memory = measure(name, options.device, options.repeats)
        one = times["SGD"]
        for row, each in times.items():
            ratio = f"{each.best / one.best:.3g} | {each.median / one.median:.3g}"
            mib = f"{memory[row]:.0f}"
            lines.append(f"| {name} | {row} | {each.best * 1e3:.4g} | {ratio} | {mib} |")
            print(lines[-1], flush=True)
        options.out.mkdir(parents=True, exist_ok=True)
        path = options.out / f"training-{machine(options.device)}.md"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
