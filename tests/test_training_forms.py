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


def accelerated() -> tuple[nn.Module, Any, Any]:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
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
