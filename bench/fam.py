"""What FAM adds to a training step of ResNet-18: `python -m bench.fam`.

Every row is a whole step (forward, penalty, backward, SGD), timed in turns with the plain one. The
paper's way writes out the full Hessian of the layer by autograd, differentiable, and takes the
double sum; it works on the features that the network gave, so it is the best case of that way.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.device import THREADS, describe, machine
from bench.timing import Timed, Times, clocked, in_turns
from saltflat.curvature.estimators import Hutchinson
from saltflat.training.fam import FAM
from saltflat.zoo import resnet18

_MOST = 1.05  # of a plain step, with the penalty on the output layer
_RESULTS = Path(__file__).parent / "results"
_UNITS = 64  # of the layer that the paper puts before the last one (section 4.1.3)

Penalty = Callable[[Tensor], Tensor]


def network(hidden: bool) -> nn.Sequential:
    """ResNet-18 with its layers named; `hidden` puts a layer of 64 units before the last."""
    *body, last = resnet18()
    assert isinstance(last, nn.Linear)
    layers: OrderedDict[str, nn.Module] = OrderedDict(body=nn.Sequential(*body))
    if hidden:
        layers |= {"hidden": nn.Linear(last.in_features, _UNITS), "relu": nn.ReLU()}
        last = nn.Linear(_UNITS, last.out_features)
    layers["fc"] = last
    return nn.Sequential(layers)


class FullHessian:
    """κ of the last layer the paper's way: the Hessian of all its weights, then the double sum."""

    def __init__(self, model: nn.Module, strength: float) -> None:
        layer = model.fc
        assert isinstance(layer, nn.Linear)
        self.layer, self.strength = layer, strength
        self.features = torch.empty(0)
        layer.register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self.features = inputs[0]

    def __call__(self, y: Tensor) -> Tensor:
        def loss(w: Tensor) -> Tensor:
            return F.cross_entropy(F.linear(self.features, w, self.layer.bias), y)

        w = self.layer.weight
        hessian = torch.autograd.functional.hessian(loss, w, create_graph=True, vectorize=True)
        assert isinstance(hessian, Tensor)
        traces = hessian.diagonal(dim1=1, dim2=3).sum(-1)
        return self.strength * ((w @ w.T) * traces).sum()


# name: (with the hidden layer, how the penalty is made)
CONTENDERS: dict[str, tuple[bool, Callable[[nn.Sequential], Penalty] | None]] = {
    "plain": (False, None),
    "FAM on fc (512 → 10)": (False, lambda m: FAM(m, "fc", 0.1)),
    "FAM on fc, simplified": (False, lambda m: FAM(m, "fc", 0.1, simplified=True)),
    "the paper's way on fc": (False, lambda m: FullHessian(m, 0.1)),
    "plain, hidden layer": (True, None),
    "FAM on hidden (512 → 64)": (True, lambda m: FAM(m, "hidden", 0.1)),
    "FAM on hidden, 8 probes": (True, lambda m: FAM(m, "hidden", 0.1, estimator=Hutchinson(8))),
    "FAM on fc (64 → 10)": (True, lambda m: FAM(m, "fc", 0.1)),
    "the paper's way on fc (64 → 10)": (True, lambda m: FullHessian(m, 0.1)),
}


def _step(name: str, samples: int, device: str) -> Callable[[], None]:
    hidden, make = CONTENDERS[name]
    torch.manual_seed(0)
    model = network(hidden).to(device).train()
    x = torch.randn(samples, 3, 32, 32, device=device)
    y = torch.arange(samples, device=device) % 10
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    penalty = None if make is None else make(model)

    def step() -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        (loss if penalty is None else loss + penalty(y)).backward()
        optimizer.step()

    return step


def _agree(device: str) -> float:
    """The relative difference between FAM and the paper's way on one batch."""
    torch.manual_seed(0)
    model = network(hidden=True).double().to(device)
    x = torch.randn(8, 3, 32, 32, dtype=torch.float64, device=device)
    y = torch.arange(8, device=device) % 10
    full, fam = FullHessian(model, 1.0), FAM(model, "fc", 1.0)
    model(x)
    theirs, ours = full(y).item(), fam(y).item()
    return abs(ours - theirs) / abs(theirs)


def table(times: dict[str, Times], title: str, difference: float) -> str:
    lines = [f"# FAM on a training step of ResNet-18: {title}", ""]
    lines += [
        "| step | ms, best (median) | of plain: best | median of rounds |",
        "|---|---|---|---|",
    ]
    for name, t in times.items():
        plain = times["plain, hidden layer" if CONTENDERS[name][0] else "plain"]
        paired = median(a / b for a, b in zip(t.seconds, plain.seconds, strict=False))
        seconds = f"{1e3 * t.best:.1f} ({1e3 * t.median:.1f})"
        lines.append(f"| {name} | {seconds} | {t.best / plain.best:.3f} | {paired:.3f} |")
    cost = times["FAM on fc (512 → 10)"].best / times["plain"].best
    verdict = "met" if cost <= _MOST else "NOT met"
    lines += ["", f"At most {_MOST:g} of a plain step with the penalty on fc: {verdict}."]
    lines += [f"FAM and the paper's way differ by {difference:.1e} in float64.", ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7, help="rounds of timing")
    parser.add_argument("--threads", type=int, default=THREADS)
    parser.add_argument("--out", type=Path, default=_RESULTS, help="folder for the Markdown")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    timed = {}
    for name in CONTENDERS:
        run = _step(name, options.batch, options.device)
        run()
        timed[name] = Timed(run, clocked(run, options.device)[0])
    times = in_turns(timed, options.repeats, options.device)
    where = describe(options.device, False, options.threads)
    text = table(times, f"batch {options.batch}, {where}", _agree(options.device))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"fam-{machine(options.device)}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
