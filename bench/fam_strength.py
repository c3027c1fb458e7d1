"""How strong FAM should be: `python -m bench.fam_strength [--mnist FOLDER] [--fashion FOLDER]`.

The same small networks trained with strengths and with shares, three seeds each: test accuracy and
the relative flatness that came out. The folders hold the four idx files of MNIST and Fashion-MNIST,
plain or gzipped, of which the first 3,000 images are trained on and the first 5,000 tested; the
digits come with scikit-learn.
"""

from __future__ import annotations

import argparse
import gzip
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import saltflat as sf
from saltflat.datasets import digits
from saltflat.zoo import lenet5, mlp

_RESULTS = Path(__file__).parent / "results"
_TRAIN, _TEST, _BATCH = 3000, 5000, 64
SEEDS = range(3)
SETTINGS = [
    *({"strength": value} for value in (0.0, 1e-4, 1e-3, 1e-2, 3e-2, 0.1)),
    *({"share": value} for value in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)),
]
Samples = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Task:
    data: Samples
    make: Callable[[], nn.Sequential]
    epochs: int


def idx(folder: Path, name: str) -> Tensor:
    """The bytes of an idx file, without its header."""
    plain = folder / name
    raw = (
        plain.read_bytes()
        if plain.exists()
        else gzip.decompress((folder / f"{name}.gz").read_bytes())
    )
    return torch.frombuffer(bytearray(raw[4 + 4 * raw[3] :]), dtype=torch.uint8)


def images(folder: Path) -> Samples:
    result: list[Tensor] = []
    for part, count in (("train", _TRAIN), ("t10k", _TEST)):
        pixels = idx(folder, f"{part}-images-idx3-ubyte").view(-1, 1, 28, 28)[:count]
        result += [pixels.float() / 255, idx(folder, f"{part}-labels-idx1-ubyte")[:count].long()]
    train_x, train_y, test_x, test_y = result
    return train_x, train_y, test_x, test_y


def trained(task: Task, seed: int, setting: dict[str, float]) -> tuple[float, float, float]:
    """Test accuracy, relative flatness of the last layer on the training data, and the share."""
    train_x, train_y, test_x, test_y = task.data
    torch.manual_seed(seed)
    model = task.make()
    how = setting.get("strength"), setting.get("share")
    fam = sf.FAM(model, str(len(model) - 1), how[0], share=how[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    shares: list[float] = []
    for _ in range(task.epochs):
        shares = []
        for chosen in torch.randperm(len(train_x)).split(_BATCH):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(train_x[chosen]), train_y[chosen])
            (loss + fam(train_y[chosen])).backward()
            optimizer.step()
            shares.append(fam.current_share)
    fam.remove()
    with torch.no_grad():
        right = (model(test_x).argmax(1) == test_y).float().mean()
    report = sf.measure(model, (train_x, train_y), measures=["relative_flatness"], progress=False)
    return 100 * float(right), report["relative_flatness"].value, mean(shares)


def table(name: str, task: Task) -> str:
    lines = [f"## {name}: {task.epochs} epochs, {len(task.data[0])} images\n"]
    lines += ["| setting | test accuracy, % | relative flatness | share in the last epoch |"]
    lines += ["|---|---|---|---|"]
    for setting in SETTINGS:
        rows = [trained(task, seed, setting) for seed in SEEDS]
        accuracy, flatness, share = zip(*rows, strict=True)
        error = stdev(accuracy) / len(accuracy) ** 0.5
        said = ", ".join(f"{k} {v:g}" for k, v in setting.items())
        lines.append(
            f"| {said} | {mean(accuracy):.2f} ± {error:.2f} | {mean(flatness):.3g} | "
            f"{mean(share):.2g} |"
        )
        print(lines[-1], flush=True)
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mnist", type=Path)
    parser.add_argument("--fashion", type=Path)
    options = parser.parse_args()
    tasks = {"digits, 64-64-32-10": Task(digits(), lambda: mlp([64, 64, 32, 10]), 30)}
    for name, folder in (("MNIST", options.mnist), ("Fashion-MNIST", options.fashion)):
        if folder is not None:
            tasks[f"{name}, LeNet-5"] = Task(images(folder), lenet5, 10)
    text = f"# FAM: strength and share\n\nMeans over {len(SEEDS)} seeds ± standard error.\n\n"
    text += "\n".join(table(name, task) for name, task in tasks.items())
    (_RESULTS / "fam-strength-cpu.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
