"""Runs the demonstration, part by part."""

from __future__ import annotations

import torch
from rich.console import Console

from saltflat.demo import exact_trace, flat_training, random_labels

_WIDTH = 126  # what the tables need


def main() -> None:
    torch.set_num_threads(1)  # networks this small only lose by sharing their work
    console = Console(highlight=False)
    console = Console(highlight=False, width=max(console.width, _WIDTH))
    console.rule("1. The exact trace of the Hessian", align="left")
    exact_trace.run(console)
    console.rule("2. Every measure of 15 networks against their generalization gap", align="left")
    random_labels.run(console)
    console.rule("3. Training toward flat minima", align="left")
    flat_training.run(console)


if __name__ == "__main__":
    main()
