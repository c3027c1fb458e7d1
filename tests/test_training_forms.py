"""The ways in which people write SAM elsewhere: they work, or the error shows the line to write."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import saltflat as sf
from saltflat.errors import InvalidType, InvalidValue

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(12) % 3


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def sam(model: nn.Module, rho: float = 0.5) -> sf.SAM:
    return sf.SAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=rho)


def after(step: Callable[[nn.Module, Any, Callable[[], Tensor]], None], rho: float = 0.5) -> Tensor:
    """All weights after three steps."""
    model = network()
    optimizer = sam(model, rho)
    for _ in range(3):
        optimizer.zero_grad()
        step(model, optimizer, lambda: F.cross_entropy(model(X), Y))
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def by_passes(model: nn.Module, optimizer: sf.SAM, loss: Callable[[], Tensor]) -> None:
    loss().backward()
    optimizer.perturb()
    loss().backward()
    optimizer.step()


def in_two_steps(model: nn.Module, optimizer: sf.SAM, loss: Callable[[], Tensor]) -> None:
    loss().backward()
    optimizer.first_step(zero_grad=True)
    loss().backward()
    optimizer.second_step(zero_grad=True)
    assert all(p.grad is None for p in model.parameters())


def test_first_and_second_step() -> None:
    assert torch.equal(after(in_two_steps), after(by_passes))
    assert not torch.allclose(after(in_two_steps), after(by_passes, rho=0.0))


def test_a_class_in_place_of_an_optimizer() -> None:
    line = r"SAM\(torch.optim.SGD\(model.parameters\(\), lr=0.1, momentum=0.9\), rho=0.05\)"
    params = network().parameters()
    make: Any = sf.SAM  # mypy would refuse as well
    with pytest.raises(InvalidType, match=line):
        make(params, torch.optim.SGD, rho=0.05, lr=0.1, momentum=0.9)
    with pytest.raises(InvalidType, match=line):
        make(params, base_optimizer=torch.optim.SGD, lr=0.1, momentum=0.9, rho=0.05)
    line = r"SAM\(torch.optim.AdamW\(model.parameters\(\), betas=\(0.9, 0.99\)\), adaptive=True\)"
    with pytest.raises(InvalidType, match=line):
        make(params, torch.optim.AdamW, betas=(0.9, 0.99), adaptive=True)


def test_help_shows_the_arguments() -> None:
    assert list(inspect.signature(sf.SAM).parameters)[:3] == ["base_optimizer", "rho", "adaptive"]


def accelerated(**options) -> tuple[nn.Module, Any, Any]:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, **options)
    model = network()
    return *accelerator.prepare(model, sam(model)), accelerator


@pytest.mark.parametrize("by_closure", [True, False])
def test_accelerate(by_closure: bool) -> None:
    model, optimizer, accelerator = accelerated()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X), Y)
        accelerator.backward(loss)
        return loss

    for _ in range(3):
        if by_closure:
            optimizer.step(closure)
        else:
            closure()
            optimizer.optimizer.perturb()
            accelerator.backward(F.cross_entropy(model(X), Y))
            optimizer.step()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert torch.equal(weights, after(by_passes))


def test_accelerate_with_one_gradient_or_inside_out() -> None:
    model, optimizer, accelerator = accelerated()
    accelerator.backward(F.cross_entropy(model(X), Y))
    with pytest.raises(InvalidValue, match=r"accelerate that is optimizer.optimizer.perturb\(\)"):
        optimizer.step()
    plain = accelerator.prepare(torch.optim.SGD(network().parameters(), lr=0.1))
    with pytest.raises(InvalidType, match=r"inside of AcceleratedOptimizer.*prepare\(model, SAM\("):
        sf.SAM(plain)


def test_accelerate_accumulates_over_micro_batches_that_are_kept() -> None:
    """The documented loop is plain SAM on all of them, which one micro-batch less is not."""
    model, optimizer, accelerator = accelerated(gradient_accumulation_steps=3)
    kept: list[tuple[Tensor, Tensor]] = []
    for x, y in 3 * [*zip(X.chunk(3), Y.chunk(3), strict=True)]:
        with accelerator.accumulate(model):
            kept.append((x, y))
            accelerator.backward(F.cross_entropy(model(x), y))
            if accelerator.sync_gradients:
                while optimizer.optimizer.perturb(accelerator.scaler):
                    for a, b in kept:
                        accelerator.backward(F.cross_entropy(model(a), b))
                kept.clear()
            optimizer.step()
            optimizer.zero_grad()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    torch.testing.assert_close(weights, after(by_passes), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["SAM", "a list", "EntropySGD"])
def test_closures_that_accelerate_would_drop_are_refused(kind: str) -> None:
    model, optimizer, accelerator = accelerated(gradient_accumulation_steps=3)
    if kind == "EntropySGD":
        optimizer = accelerator.prepare(sf.EntropySGD(model.parameters(), lr=0.1, steps=2))
    before = [p.detach().clone() for p in model.parameters()]
    calls = []

    def closure() -> None:
        calls.append(accelerator.sync_gradients)

    def micro_batch() -> None:
        with accelerator.accumulate(model):
            optimizer.step([closure] if kind == "a list" else closure)

    micro_batch()
    micro_batch()
    with pytest.raises(InvalidValue, match=r"for x, y in micro_batches: accelerator.backward\("):
        micro_batch()
    assert calls == []  # as would be two of three if it were not refused
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_accelerate_accumulates_elsewhere() -> None:
    """An optimizer that was not prepared does not care; nor does one whose closure does it all."""
    accelerated(gradient_accumulation_steps=3)
    plain = network()
    own = sam(plain)

    def closure() -> Tensor:
        own.zero_grad()
        loss = F.cross_entropy(plain(X), Y)
        loss.backward()
        return loss

    own.step(closure)
    model, optimizer, accelerator = accelerated()

    def every() -> None:
        optimizer.zero_grad()
        for x, y in zip(X.chunk(3), Y.chunk(3), strict=True):
            accelerator.backward(F.cross_entropy(model(x), y) / 3)

    optimizer.step(every)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_the_trainer_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from saltflat.integrations import SharpnessTrainer

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=20, intermediate_size=8, num_labels=3, **sizes)
    data = [{"input_ids": torch.arange(6), "labels": torch.tensor(i % 3)} for i in range(8)]
    options = {"report_to": [], "use_cpu": True, "max_steps": 2, "save_strategy": "no"}
    arguments = transformers.TrainingArguments(str(tmp_path), disable_tqdm=True, **options)

    def trainer(kind: type) -> Any:
        model = transformers.BertForSequenceClassification(config)
        return kind(model=model, args=arguments, train_dataset=data, optimizers=(sam(model), None))

    with pytest.raises(InvalidValue, match=r"saltflat.integrations.SharpnessTrainer"):
        trainer(transformers.Trainer).train()
    assert trainer(SharpnessTrainer).train().global_step == 2
