"""The table of optimizers that the contract tests go through, and how they are trained."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from saltflat.training.bn_sharpness import BNSharpnessSGD
from saltflat.training.entropy_sgd import EntropySGD
from saltflat.training.sam import SAM
from saltflat.training.wrapper import PerturbedOptimizer

RECIPE = {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}
Make = Callable[..., torch.optim.Optimizer]


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
}
NEUTRAL: dict[str, tuple[Make, Callable[..., torch.optim.Optimizer]]] = {
    "SAM": (lambda m, p: SAM(sgd(p), rho=0.0), sgd),
    "ASAM": (lambda m, p: SAM(sgd(p), rho=0.0, adaptive=True), sgd),
    "SAM, Adam": (lambda m, p: SAM(adam(p), rho=0.0), adam),
    "BNSharpnessSGD": (lambda m, p: BNSharpnessSGD(sgd(p), m, 0.0), sgd),
    "BNSharpnessSGD, ascent": (lambda m, p: BNSharpnessSGD(sgd(p), m, 0.0, ascent_steps=2), sgd),
    "EntropySGD": (lambda m, p: EntropySGD(p, **RECIPE, steps=1, noise=0.0), sgd),
    "EntropySGD, plain": (
        lambda m, p: EntropySGD(p, lr=0.1, steps=1, noise=0.0),
        lambda p: torch.optim.SGD(p, lr=0.1),
    ),
}
every = pytest.mark.parametrize("name", OPTIMIZERS)
modes = pytest.mark.parametrize("by_closure", [True, False], ids=["closure", "halves"])


def network(dropout: float = 0.4, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(4, 6, bias=False),  # BatchNorm would leave a bias no gradient but rounding
        nn.BatchNorm1d(6),
        nn.Tanh(),
        nn.Dropout(dropout),
        nn.Linear(6, 3),
    ).to(dtype)


def batches(count: int, dtype: torch.dtype = torch.float32) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        yield torch.randn(8, 4, generator=generator).to(dtype), torch.arange(8) % 3


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).float(), y)


def advance(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Any,
    *,
    by_closure: bool = True,
    between: Callable[[], None] = lambda: None,
    parts: int = 1,
    cast: Callable[[], Any] = nullcontext,
) -> None:
    """Training steps; `between` runs before every step, `parts` is for gradient accumulation."""
    for x, y in data:

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            return backward(x, y)

        def backward(x: Tensor = x, y: Tensor = y) -> Tensor:
            with cast():
                losses = [
                    loss_of(model, a, b) / parts
                    for a, b in zip(x.chunk(parts), y.chunk(parts), strict=True)
                ]
            for loss in losses:
                loss.backward()
            return sum(losses)  # type: ignore[return-value]

        if by_closure:
            optimizer.step(closure)
        else:
            closure()
            while isinstance(optimizer, PerturbedOptimizer) and optimizer.perturb():
                backward()
            between()
            optimizer.step()


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
