"""Sharded and replicated models: two processes must give what one gives.

One world of two processes makes all runs, once; each test compares what came out with one process.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import saltflat as sf
from saltflat.errors import ModelError
from saltflat.vectors import total_norm

ATOL = 1e-10


def dense() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3)
    ).double()


def convolutional() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Conv2d(3, 4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)
    ).double()


def with_state() -> nn.Sequential:
    """With running statistics and random numbers, which perturbed passes must leave alone."""
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.4), nn.Linear(6, 3)
    ).double()


def samples(model: nn.Module) -> tuple[Tensor, Tensor]:
    shape = (8, 1, 6, 6) if isinstance(model[0], nn.Conv2d) else (8, 5)
    generator = torch.Generator().manual_seed(3)
    return torch.randn(shape, generator=generator, dtype=torch.float64), torch.arange(8) % 3


# How a model is spread over processes.


def by_layer(model: nn.Module) -> nn.Module:
    for layer in model.children():
        if any(True for _ in layer.parameters()):
            fully_shard(layer)
    fully_shard(model)
    return model


def as_one(model: nn.Module) -> nn.Module:
    """One group, which FSDP2 keeps gathered from the forward pass to the backward pass."""
    fully_shard(model)
    return model


def partly(model: nn.Module) -> nn.Module:
    """The first layer is left to every process."""
    ignored = set(model[0].parameters())
    fully_shard(model, ignored_params=ignored)
    return model


SPREAD: dict[str, Callable[[nn.Module], nn.Module]] = {
    "layers": by_layer,
    "one": as_one,
    "ddp": DistributedDataParallel,
}


def alone(model: nn.Module) -> nn.Module:
    return model


def whole(model: nn.Module) -> Tensor:
    """All parameters and buffers, gathered."""
    tensors = [
        t.full_tensor() if isinstance(t, DTensor) else t for t in model.state_dict().values()
    ]
    return torch.cat([t.detach().double().flatten() for t in tensors])


# The trainings.


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)


def by_closure(optimizer: Any, model: nn.Module, x: Tensor, y: Tensor, fam: Any) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if fam is not None:
            loss = loss + fam(y)
        loss.backward()
        return loss

    optimizer.step(closure)


def pass_by_pass(optimizer: Any, model: nn.Module, x: Tensor, y: Tensor, fam: Any) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    while optimizer.perturb():
        F.cross_entropy(model(x), y).backward()
    optimizer.step()


def two_passes(optimizer: Any, model: nn.Module, x: Tensor, y: Tensor, fam: Any) -> None:
    """After an evaluation, which may leave weights gathered, and twice through the model."""
    with torch.no_grad():
        model(x)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y) + 0.1 * model(x.flip(0)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)


def micro_batches(optimizer: Any, model: nn.Module, x: Tensor, y: Tensor, fam: Any) -> None:
    def closure(part: slice) -> Callable[[], Tensor]:
        def run() -> Tensor:
            loss = F.cross_entropy(model(x[part]), y[part])
            loss.backward()
            return loss

        return run

    optimizer.step([closure(slice(0, 2)), closure(slice(2, 4))])


def fam(layer: str, **options: Any) -> Callable[[nn.Module], sf.FAM]:
    return lambda model: sf.FAM(model, layer=layer, **{"strength": 0.1, **options})


# name -> (model, optimizer, penalty, one step)
Training = tuple[Callable[[], nn.Module], Callable[[nn.Module], Any], Any, Callable[..., None]]
TRAININGS: dict[str, Training] = {
    "sam": (dense, lambda m: sf.SAM(sgd(m), rho=0.3), None, by_closure),
    "sam, passes": (dense, lambda m: sf.SAM(sgd(m), rho=0.3), None, pass_by_pass),
    "asam": (convolutional, lambda m: sf.SAM(sgd(m), 1.0, adaptive=True), None, by_closure),
    "entropy": (
        dense,
        lambda m: sf.EntropySGD(
            m.parameters(), lr=0.1, steps=3, momentum=0.9, inner_momentum=0.5, weight_decay=0.1
        ),
        None,
        by_closure,
    ),
    "fam, outputs": (dense, sgd, fam("4"), by_closure),
    "fam, curved": (dense, sgd, fam("2"), by_closure),
    "fam, first": (dense, sgd, fam("0", normalize_features=False), by_closure),
    "fam, convolution": (convolutional, sgd, fam("2", simplified=True), by_closure),
    "fam and sam": (dense, lambda m: sf.SAM(sgd(m), rho=0.3), fam("2"), by_closure),
}
# On the same samples in every process, whose mean is then that of one.
REPEATED: dict[str, Training] = {
    "state": (with_state, lambda m: sf.SAM(sgd(m), rho=0.3), None, by_closure),
    "twice": (with_state, lambda m: sf.SAM(sgd(m), rho=0.3), None, two_passes),
    "micro-batches": (dense, lambda m: sf.SAM(sgd(m), rho=0.3), None, micro_batches),
    "fam, share": (dense, sgd, fam("2", strength=None, share=0.3), by_closure),
}


def train(
    training: Training, spread: Callable[[nn.Module], nn.Module], part: slice = slice(None)
) -> Tensor:
    """All that three steps make of the model."""
    make, optimize, penalty, step = training
    model = make()
    x, y = (t[part] for t in samples(model))
    called = spread(model)
    optimizer = optimize(called)
    added = None if penalty is None else penalty(called)
    torch.manual_seed(5)
    for _ in range(3):
        step(optimizer, called, x, y, added)
    return whole(model)


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises(ModelError) as caught:
        call()
    return str(caught.value)


def found_of_training(rank: int) -> dict[str, Any]:
    mine = slice(4 * rank, 4 * rank + 4)
    found: dict[str, Any] = {}
    for how, spread in SPREAD.items():
        for name, training in TRAININGS.items():
            found[name, how] = train(training, spread, mine)
        if how != "ddp":
            for name, training in REPEATED.items():
                found[name, how] = train(training, spread)
    found["sam", "part"] = train(TRAININGS["sam"], partly)
    model = by_layer(dense())
    found["norm"] = total_norm(list(model.parameters()))
    found["no filters"] = refused(lambda: sf.BNSharpnessSGD(sgd(model), model))
    found["no penalty"] = refused(lambda: sf.SharpnessPenalty(model, samples(dense())))
    return found


# Batch normalisation over processes.


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return answer


def normalised() -> nn.Module:
    torch.manual_seed(6)
    model = nn.Sequential(
        nn.Linear(5, 4, bias=False), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3)
    ).double()
    model(samples(model)[0])  # statistics of its own
    return Checkpointed(model)


def measured_normalised(sync: bool) -> dict[str, Any]:
    model = normalised()
    if sync:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    names = ["hessian_trace", "neuronwise_minimum_sharpness", "relative_flatness", "bn_sharpness"]
    data = samples(model.inner)
    report = sf.measure(model, data, measures=names)
    group = sf.symmetries(model, data[0])
    return {
        "values": {name: (report[name].value, report[name].exact) for name in names},
        "kinds": {kind: len(group.only(kind)) for kind in ("layer", "neuron", "batchnorm")},
        "state": whole(model),
        "modes": [m.training for m in model.modules()],
    }


# The world.


def one_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=40),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = found_of_training(rank)
        found["normalised"] = measured_normalised(sync=True)
    torch.save(found, os.path.join(folder, f"{rank}.pt"))
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    """What each of two processes found."""
    folder = tmp_path_factory.mktemp("ranks")
    spawn(one_rank, (str(folder),), nprocs=2)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in (0, 1)]


def close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and float((a - b).abs().max()) <= ATOL


@pytest.mark.parametrize("how", SPREAD)
@pytest.mark.parametrize("name", TRAININGS)
def test_training_on_shards_is_training_on_all(
    name: str, how: str, ranks: list[dict[Any, Any]]
) -> None:
    expected = train(TRAININGS[name], alone)
    half = train(TRAININGS[name], alone, slice(0, 4))
    for found in ranks:
        assert close(found[name, how], expected)
        assert not torch.allclose(found[name, how], half, rtol=1e-4)


@pytest.mark.parametrize("how", ["layers", "one"])
@pytest.mark.parametrize("name", REPEATED)
def test_training_on_the_same_samples(name: str, how: str, ranks: list[dict[Any, Any]]) -> None:
    expected = train(REPEATED[name], alone)
    assert all(close(found[name, how], expected) for found in ranks)


def test_parameters_that_only_some_processes_share(ranks: list[dict[Any, Any]]) -> None:
    expected = train(TRAININGS["sam"], alone)
    assert all(close(found["sam", "part"], expected) for found in ranks)


def test_norm_is_that_of_whole_parameters(ranks: list[dict[Any, Any]]) -> None:
    parameters = torch.cat([p.flatten() for p in dense().parameters()])
    for found in ranks:
        assert found["norm"] == pytest.approx(float(parameters.detach().norm()), rel=1e-14)


def test_what_needs_whole_parameters_is_refused(ranks: list[dict[Any, Any]]) -> None:
    for found in ranks:
        assert "DistributedDataParallel" in found["no filters"]
        assert "FAM" in found["no penalty"]


def test_synchronised_batchnorm_is_batchnorm(ranks: list[dict[Any, Any]]) -> None:
    expected = measured_normalised(sync=False)
    for found in (measured_normalised(sync=True), *(found["normalised"] for found in ranks)):
        assert found["kinds"] == expected["kinds"]
        assert expected["kinds"]["batchnorm"] == 4
        assert found["modes"] == expected["modes"]
        assert torch.equal(found["state"], expected["state"])
        for name, (value, exact) in expected["values"].items():
            assert found["values"][name] == (pytest.approx(value, rel=1e-10), exact), name
