"""Times of the convex solvers: `python -m bench.convex`.

A 4096×4096 matrix is balanced, dense and with a tenth of its entries pruned; and the hidden units
of a chain of layers as wide as ResNet-18's are rescaled for the least trace, one group a pair of
channels. The masses are of random sizes, and moved by random rescalings of up to e^±9 a unit.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse

from saltflat.convex import Balanced, Minimum, balance, minimise

WIDTHS = (3, *[64] * 5, *[128] * 4, *[256] * 4, *[512] * 6, 10)


def chain(seed: int) -> tuple[NDArray[np.float64], sparse.csr_array]:
    """Masses A[o, i] and the exponents e_o − e_i of all layers; inputs and outputs stay."""
    rng = np.random.default_rng(seed)
    first = np.cumsum([0, *WIDTHS[1:-1]])
    unknowns, outputs = int(first[-1]), len(WIDTHS) - 2
    shift = rng.uniform(-9, 9, unknowns)
    blocks, masses = [], []
    for layer, (fan_in, fan_out) in enumerate(pairwise(WIDTHS)):
        o, i = (part.ravel() for part in np.indices((fan_out, fan_in)))
        groups = np.arange(len(o))
        rows, columns, signs = [], [], []
        if layer < outputs:
            rows, columns, signs = [groups], [first[layer] + o], [np.ones(len(o))]
        if layer > 0:
            rows, columns = [*rows, groups], [*columns, first[layer - 1] + i]
            signs = [*signs, -np.ones(len(o))]
        entries = np.concatenate(signs), (np.concatenate(rows), np.concatenate(columns))
        block = sparse.csr_array(entries, (len(o), unknowns))
        blocks.append(block)
        size = 10 ** rng.uniform(-2, 2) * rng.chisquare(1, len(o)) * rng.chisquare(1, fan_out)[o]
        masses.append(size * np.exp(2 * (block @ shift)))
    return np.concatenate(masses), sparse.vstack(blocks, format="csr")


def show(name: str, run: Callable[[], Balanced | Minimum], repeats: int) -> None:
    """Print the best time of `repeats` runs, on the wall and on the processor, and the result."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter(), time.process_time()
        result = run()
        seconds.append((time.perf_counter() - start[0], time.process_time() - start[1]))
    wall, processor = (min(times) for times in zip(*seconds, strict=True))
    rounds = result.sweeps if isinstance(result, Balanced) else result.steps
    kind = "attained" if result.attained else "not attained"
    print(
        f"{name:32} {wall:6.2f} s, CPU {processor:5.2f} s   value {result.value:.6g}   {kind}   "
        f"relative gap {result.gap / result.value:.1e}   {rounds} rounds",
        flush=True,
    )


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    size = (4096, 4096)
    h = torch.rand(size, generator=generator, dtype=torch.float64) ** 4
    w = torch.randn(size, generator=generator, dtype=torch.float64) ** 2
    show("balance 4096×4096", lambda: balance(h, w), 3)
    pruned = h * (torch.rand(size, generator=generator) < 0.9)
    pruned[5] = 0  # a dead unit
    show("balance 4096×4096, pruned", lambda: balance(pruned, w), 3)
    masses, exponents = chain(0)
    groups, unknowns = exponents.shape
    show(f"{groups} groups, {unknowns} units", lambda: minimise(masses, exponents), 2)


if __name__ == "__main__":
    main()
