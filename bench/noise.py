"""The noise of estimates of a Hessian's trace at equal cost, over networks and numbers of samples.

    python -m bench.noise [--samples 8 32 --draws 16 --threads 1]

Each block has an error that it may have (see `sf.trace`: tolerance). The table says what it costs,
in gradients by fixed prices and without looks or pilots, until blocks that hold a share of Σ Tr G
have it, from the variance of some draws. "Alone" are probes of one block at a time, at the price of
a pass for each.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Mapping
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import saltflat as sf
from bench.curved import Efficient, Vision, digits, train
from saltflat.curvature import sketch
from saltflat.work import PRODUCT

SHARES = 0.5, 0.9, 1.0
Data = tuple[Tensor, Tensor]


def gradients(
    draws: int, price: float, ggn: sf.Trace, details: Mapping[str, sf.Detail[float]]
) -> dict[str, float]:
    """Those until a block has the error that it may have, block by block."""
    needed = {}
    for name, detail in details.items():
        target = 0.05 * max(abs(detail.value), ggn[name], ggn.total / 5)
        needed[name] = price * draws * (float(detail.stderr) / target) ** 2
    return needed


def shares(needed: Mapping[str, float], ggn: sf.Trace) -> list[float]:
    """The gradients until blocks that hold so much of Σ Tr G are within their tolerance."""
    order, held, found = sorted(needed, key=lambda name: needed[name]), 0.0, list[float]()
    for name in order:
        held += ggn[name]
        while len(found) < len(SHARES) and held >= SHARES[len(found)] * ggn.total * (1 - 1e-9):
            found.append(needed[name])
    return found


def rows(model: nn.Module, data: Data, draws: int) -> dict[str, list[float]]:
    ggn = sf.trace(model, data, curvature="ggn")
    propagated, probes = sf.PropagatedCurvature(draws), sf.ActivationProbes(draws)

    def of(estimator: Any, price: float) -> dict[str, float]:
        found = sf.trace(model, data, estimator=estimator)
        return gradients(draws, price, ggn, found.details)

    def scaled(scale: Callable[[float], float]) -> dict[str, float]:
        def scales(_: object, traces: Mapping[str, float]) -> dict[str, float]:
            return {name: scale(max(trace, 1e-6 * ggn.total)) for name, trace in traces.items()}

        with patch.object(sketch.Estimation, "_scales", scales):
            return of(probes, sketch._PROBED)

    largest = sorted(ggn, key=lambda name: -ggn[name])[:5]
    alone = dict[str, float]()
    for name in largest:
        found = sf.trace(model, data, parameters=[name], estimator=probes)
        alone |= gradients(draws, sketch._PROBED * len(ggn), ggn, found.details)
    return {
        "Hutchinson": shares(of(sf.Hutchinson(draws), PRODUCT), ggn),
        "propagated": shares(of(propagated, sketch._PROPAGATED), ggn),
        "probes, equal noise": shares(scaled(lambda trace: 1.0), ggn),
        "probes, 1/√Tr G": shares(scaled(lambda trace: trace**-0.5), ggn),
        "probes, √Tr G / target": shares(of(probes, sketch._PROBED), ggn),
        "probes, alone: the five largest": [max(alone.values())],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--draws", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    x, y = digits()
    heads = " | ".join(f"{share:.0%} of Σ Tr G" for share in SHARES)
    print(f"| network | n | noise | {heads} |\n|---|--:|---|{'--:|' * len(SHARES)}")
    for name, build, steps in (("ViT", Vision, 500), ("EfficientNet-like", Efficient, 200)):
        torch.manual_seed(0)
        model = build()
        train(model, x, y, steps)
        for n in options.samples:
            for noise, cells in rows(model, (x[:n], y[:n]), options.draws).items():
                cells_or_not = [f"{cell:,.0f}" for cell in cells] + [""] * len(SHARES)
                print(f"| {name} | {n} | {noise} | {' | '.join(cells_or_not[: len(SHARES)])} |")


if __name__ == "__main__":
    main()
