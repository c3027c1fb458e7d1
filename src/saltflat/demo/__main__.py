"""Runs the demonstration, part by part: python -m saltflat.demo [--all] [FILE.html]"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor, nn

import saltflat as sf
from saltflat.demo import exact_trace, flat_training, network, random_labels, rescaling, samples

_WIDTH = 84  # what the tables need
_WIDER = 126  # with those of the random labels


def run(page: Path, everything: bool = False) -> None:
    """All parts; with `everything` also the one on random labels, which takes a minute more."""
    torch.set_num_threads(1)  # networks this small only lose by sharing their work
    console = Console(highlight=False)
    console = Console(highlight=False, width=max(console.width, _WIDER if everything else _WIDTH))
    train_x, train_y, *_ = samples()
    data, model = (train_x, train_y), network([64, 64, 32, 10], seed=0)
    console.rule("1. The exact trace of the Hessian", align="left")
    exact_trace.run(console, model)
    console.rule("2. Every measure that one sweep gives", align="left")
    console.print(sf.measure(model, data, progress=False))
    console.print()
    console.rule("3. The same function with other weights", align="left")
    audit = rescaling.run(console, model, data)
    console.rule("4. Training toward flat minima", align="left")
    flat_training.run(console)
    if everything:
        console.rule("5. Measures of 15 networks against their generalization gap", align="left")
        random_labels.run(console)
    _write(page, model, data, audit)
    console.print(f"All about the first network is in {page}: open it in a browser.")


def _write(page: Path, model: nn.Module, data: tuple[Tensor, Tensor], audit: sf.Audit) -> None:
    planes = [
        sf.landscape(model, data, directions=kind, progress=False)
        for kind in ("filter", "balanced")
    ]
    sf.measure(model, data, measures="all", progress=False).save(
        page,
        audit=audit,
        density=sf.density(model, data, progress=False),
        diagonal=sf.diagonal(model, data, progress=False),
        landscape=planes,
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m saltflat.demo")
    parser.add_argument("page", nargs="?", type=Path, default=Path("demo.html"), help="to write")
    parser.add_argument("--all", action="store_true", help="random labels too: a minute more")
    options = parser.parse_args()
    run(options.page, options.all)


if __name__ == "__main__":
    main()
