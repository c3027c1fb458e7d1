"""The table of optimizers and penalties that the contract tests go through, and their training."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

import saltflat as sf
from saltflat.training.bn_sharpness import BNSharpnessSGD
from saltflat.training.entropy_sgd import EntropySGD
from saltflat.training.fam import FAM
from saltflat.training.perturbing import PerturbedOptimizer
from saltflat.training.sam import SAM
from saltflat.training.sharpness_penalty import SharpnessPenalty

gc.freeze()  # what is loaded by now is not garbage, and there is much of it to look through

RECIPE = {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}
Penalty = FAM | SharpnessPenalty
Make = Callable[..., torch.optim.Optimizer]


def network(dropout: float = 0.4, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(4, 6, bias=False),  # BatchNorm would leave a bias no gradient but rounding
        nn.BatchNorm1d(6),
        nn.LeakyReLU(0.7),
        nn.Dropout(dropout),
        nn.Linear(6, 3),
    ).to(dtype)


def without_batchnorm() -> nn.Sequential:
    """BatchNorm normalises each part of a batch for itself, so parts are not the whole."""
    model = network(dropout=0.0, dtype=torch.float64)
    model[1] = nn.Identity()
    return model


def batches(count: int, dtype: torch.dtype = torch.float32) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        yield torch.randn(8, 4, generator=generator).to(dtype), torch.arange(8) % 3


@dataclass
class Run:
    """A model in training: what steps, and what is added to the loss."""

    model: nn.Module
    optimizer: Any  # a torch Optimizer, which may perturb
    penalty: Penalty | None = None
    called: nn.Module | None = None  # the model in a wrapper

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy((self.called or self.model)(x).float(), y)
        if self.penalty is None:
            return loss
        return loss + self.penalty(y if isinstance(self.penalty, FAM) else loss)

    @property
    def perturbs(self) -> bool:
        return isinstance(self.optimizer, PerturbedOptimizer)

    def state_dict(self) -> dict[str, Any]:
        parts: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "penalty": self.penalty,
        }
        return {name: part.state_dict() for name, part in parts.items() if part is not None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, content in state.items():
            getattr(self, name).load_state_dict(content)

    def advance(
        self,
        data: Any,
        *,
        by_closure: bool = True,
        between: Callable[[], None] = lambda: None,
        parts: int = 1,
        cast: Callable[[], Any] = nullcontext,
    ) -> None:
        """Training steps; `between` runs before every step, `parts` is for accumulation."""
        for x, y in data:

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                self.optimizer.zero_grad()
                return backward(x, y)

            def backward(x: Tensor = x, y: Tensor = y) -> Tensor:
                with cast():
                    losses = [
                        self.loss(a, b) / parts
                        for a, b in zip(x.chunk(parts), y.chunk(parts), strict=True)
                    ]
                for loss in losses:
                    loss.backward()
                return sum(losses)  # type: ignore[return-value]

            if by_closure:
                self.optimizer.step(closure)
            else:
                closure()
                while self.perturbs and self.optimizer.perturb():
                    backward()
                between()
                self.optimizer.step()


def sgd(params: Any, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(params, **{**RECIPE, **options})


def adam(params: Any, **options: Any) -> torch.optim.Adam:
    return torch.optim.Adam(params, **{"lr": 0.01, **options})


# name -> (model, params, **base options) -> optimizer
OPTIMIZERS: dict[str, Make] = {
    "SAM": lambda m, p, **o: SAM(sgd(p, **o), rho=0.1),
    "SAM, Adam": lambda m, p, **o: SAM(adam(p, **o), rho=0.1),
    "ASAM": lambda m, p, **o: SAM(sgd(p, **o), rho=0.5, adaptive=True),
    "BNSharpnessSGD": lambda m, p, **o: BNSharpnessSGD(
        sgd(p, **o), m, 0.5, delta=0.01, filters=["0"]
    ),
    "BNSharpnessSGD, ascent": lambda m, p, **o: BNSharpnessSGD(
        sgd(p, **o), m, 0.5, delta=0.01, p=4, ascent_steps=1
    ),
    "EntropySGD": lambda m, p, **o: EntropySGD(
        p, **{**RECIPE, **o}, steps=2, noise=0.01, gamma=0.1
    ),
    "SAM with FAM": lambda m, p, **o: SAM(sgd(p, **o), rho=0.1),
}


def _sharpness(model: nn.Module, strength: float, measure: Any) -> SharpnessPenalty:
    p = next(model.parameters())
    x, y = next(batches(1, p.dtype))
    data = (x.to(p.device), y.to(p.device))
    return SharpnessPenalty(model, data, strength=strength, measure=measure, refresh=4)


# name -> (model, strength) -> penalty, and the strength
PENALTIES: dict[str, tuple[Callable[[nn.Module, float], Penalty], float]] = {
    "FAM": (lambda m, s: FAM(m, ["0", "4"], s), 0.3),
    "FAM, estimated": (lambda m, s: FAM(m, "0", s, estimator=sf.Hutchinson(4)), 0.3),
    "SAM with FAM": (lambda m, s: FAM(m, "4", s, simplified=True), 0.3),
    "SharpnessPenalty": (lambda m, s: _sharpness(m, s, "minimum_sharpness"), 0.03),
    "SharpnessPenalty, normalized": (lambda m, s: _sharpness(m, s, "normalized_sharpness"), 0.003),
}
CONTENDERS = [*OPTIMIZERS, *(name for name in PENALTIES if name not in OPTIMIZERS)]
# Every batch, or part of one, draws random signs of its own.
RANDOM = ["FAM, estimated", "SharpnessPenalty", "SharpnessPenalty, normalized"]


def plain(name: str) -> Callable[..., torch.optim.Optimizer]:
    """The base optimizer of a contender."""
    return adam if "Adam" in name else sgd


def start(name: str, model: nn.Module | None = None, params: Any = None, **options: Any) -> Run:
    model = network() if model is None else model
    params = list(model.parameters()) if params is None else params
    optimizer = OPTIMIZERS.get(name, lambda m, p, **o: sgd(p, **o))(model, params, **options)
    make, strength = PENALTIES.get(name, (lambda m, s: None, 0.0))
    return Run(model, optimizer, make(model, strength))


_NEUTRAL: dict[str, Make] = {
    "SAM": lambda m, p: SAM(sgd(p), rho=0.0),
    "ASAM": lambda m, p: SAM(sgd(p), rho=0.0, adaptive=True),
    "SAM, Adam": lambda m, p: SAM(adam(p), rho=0.0),
    "BNSharpnessSGD": lambda m, p: BNSharpnessSGD(sgd(p), m, 0.0),
    "BNSharpnessSGD, ascent": lambda m, p: BNSharpnessSGD(sgd(p), m, 0.0, ascent_steps=2),
    "EntropySGD": lambda m, p: EntropySGD(p, **RECIPE, steps=1, noise=0.0),
    "SAM with FAM": lambda m, p: SAM(sgd(p), rho=0.0),
}


def neutral(name: str, model: nn.Module) -> Run:
    """The contender with the settings that make it its base optimizer."""
    optimizer = _NEUTRAL.get(name, lambda m, p: sgd(p))(model, list(model.parameters()))
    make, _ = PENALTIES.get(name, (lambda m, s: None, 0.0))
    return Run(model, optimizer, make(model, 0.0))


def base(name: str, model: nn.Module) -> Run:
    return Run(model, plain(name)(model.parameters()))


every = pytest.mark.parametrize("name", CONTENDERS)
every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)
modes = pytest.mark.parametrize("by_closure", [True, False], ids=["closure", "halves"])
quiet = pytest.mark.filterwarnings("ignore:BatchNorm in training mode lies above a layer")


def same(a: nn.Module, b: nn.Module) -> bool:
    pairs = zip(a.state_dict().items(), b.state_dict().items(), strict=True)
    return all(torch.equal(s, t) for (_, s), (_, t) in pairs)


def close(a: nn.Module, b: nn.Module, rtol: float = 1e-5) -> bool:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return all(torch.allclose(s, t, rtol=rtol, atol=rtol) for s, t in pairs)


def assert_no_hooks() -> None:
    """No optimizer that is gone has left a hook behind."""
    if module_hooks._global_forward_pre_hooks:
        gc.collect()
        network()(next(batches(1))[0])  # the hook of an optimizer that is gone removes itself
    assert not module_hooks._global_forward_pre_hooks
    assert not module_hooks._global_forward_hooks
