"""The variance of one draw of every block's trace: propagated curvature, activation probes.

    python -m bench.variance [--samples 64 --draws 8 --steps 300]

On a language model of GPT-2-small's size (see `bench.language`). Standard deviations are of one
draw over the samples together, as a share of the larger of |Tr H| and Tr G.
"""

from __future__ import annotations

import argparse
import re
import warnings
from math import sqrt

import torch
from torch import Tensor, nn

import saltflat as sf
from bench.language import Language, loss_of, seconds, text, train


def main() -> None:
    parser = argparse.ArgumentParser()
    sizes = {"layers": 12, "width": 768, "samples": 64, "length": 256, "steps": 300, "draws": 8}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.manual_seed(0)
    model = Language(options.layers, options.width, options.length, False).to(device)
    tokens = text(3_000_000).to(device)
    print(f"loss {train(model, tokens, options.length, options.steps):.3f}")
    model.eval()
    rows = tokens[-options.samples * options.length - 1 :]
    x = rows[:-1].reshape(options.samples, options.length)
    y = rows[1:].reshape(options.samples, options.length)
    weights = list(model.parameters())
    torch.autograd.grad(loss_of(model, x, y), weights)
    one, _ = seconds(lambda: torch.autograd.grad(loss_of(model, x, y), weights), 3)
    loss, data = nn.CrossEntropyLoss(), (x, y)

    def output(z: Tensor) -> Tensor:
        return z.mT

    ggn = sf.trace(model, data, loss, output=output, curvature="ggn")
    shares: dict[str, dict[str, list[float]]] = {}
    for estimator in (sf.PropagatedCurvature, sf.ActivationProbes):
        took = []
        for draws in (options.draws, 2 * options.draws):
            each = estimator(draws)

            def call(each: sf.PropagatedCurvature | sf.ActivationProbes = each) -> sf.Trace:
                return sf.trace(model, data, loss, output=output, estimator=each)

            t, trace = seconds(call)
            took.append(t / one)
        label = type(each).__name__
        per = (took[1] - took[0]) / options.draws
        print(f"{label}: {took[0]:.1f} gradients for {options.draws} draws, {per:.2f} a draw more")
        for name, d in trace.details.items():
            kind = re.sub(r"blocks\.\d+\.", "", name)
            size = max(abs(d.value), ggn[name])
            sd = float(d.stderr) * sqrt(2 * options.draws) / size
            shares.setdefault(kind, {}).setdefault(label, []).append(sd)
            shares[kind].setdefault("H/G", []).append(d.value / ggn[name])
    print("| blocks | propagated, median (most) | probes, median (most) | Tr H / Tr G |")
    print("|---|---|---|---|")
    for kind, by in shares.items():
        cells = []
        for label in ("PropagatedCurvature", "ActivationProbes"):
            values = sorted(by[label])
            cells.append(f"{values[len(values) // 2]:.1%} ({values[-1]:.0%})")
        ratios = sorted(by["H/G"])
        print(f"| {kind} | {' | '.join(cells)} | {ratios[0]:.2g} to {ratios[-1]:.2g} |")


if __name__ == "__main__":
    main()
