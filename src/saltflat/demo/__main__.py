"""Runs the demonstration, part by part: python -m saltflat.demo [--all] [FILE.html]"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from rich.console import Console

import saltflat as sf
from saltflat.demo import exact_trace, flat_training, network, random_labels, rescaling, samples

_WIDTH = 100  # what the tables need
_WIDER = 126  # with those of --all


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m saltflat.demo")
    parser.add_argument("page", nargs="?", type=Path, default=Path("demo.html"), help="to write")
    parser.add_argument("--all", action="store_true", help="random labels too: a minute more")
    options = parser.parse_args()
    torch.set_num_threads(1)  # networks this small only lose by sharing their work
    console = Console(highlight=False)
    width = _WIDER if options.all else _WIDTH
    console = Console(highlight=False, width=max(console.width, width))
    train_x, train_y, *_ = samples()
    model = network([64, 64, 32, 10], seed=0)
    console.rule("1. The exact trace of the Hessian", align="left")
    exact_trace.run(console, model)
    console.rule("2. The same function with other weights", align="left")
    audit = rescaling.run(console, model, (train_x, train_y))
    console.rule("3. Training toward flat minima", align="left")
    flat_training.run(console)
    if options.all:
        console.rule("4. Every measure of 15 networks against their gap", align="left")
        random_labels.run(console)
    data = train_x, train_y
    report = sf.measure(model, data, measures="all", progress=False)
    page = report.save(
        options.page,
        audit=audit,
        density=sf.density(model, data, progress=False),
        diagonal=sf.diagonal(model, data, progress=False),
        landscape=[
            sf.landscape(model, data, directions=kind, progress=False)
            for kind in ("filter", "balanced")
        ],
    )
    console.print(f"All about the first network is in {page}: open it in a browser.")


if __name__ == "__main__":
    main()
