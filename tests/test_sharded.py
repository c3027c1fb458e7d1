"""Sharded and replicated models: two processes must give what one gives.

One world of two processes makes all runs, once; each test compares what came out with one process.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dense import Dense
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import saltflat as sf
from saltflat.errors import DistributedError, ModelError, SaltflatError
from saltflat.risk import Risk
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


# All of them layer by layer, and some in other ways; tests of machines have the rest for DDP.
RUNS = [
    *((name, "layers") for name in TRAININGS),
    *((name, how) for name in ("sam", "entropy", "fam, curved") for how in ("one", "ddp")),
]


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


def penalty_of(model: nn.Module) -> float:
    """What FAM gives of one forward pass."""
    x, y = samples(dense())
    fam = sf.FAM(model, layer="2", strength=0.1)
    model(x)
    return float(fam(y).detach())


def refused(call: Callable[[], Any], error: type[Exception] = ModelError) -> str:
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


def found_of_training(rank: int) -> dict[str, Any]:
    mine = slice(4 * rank, 4 * rank + 4)
    found: dict[str, Any] = {}
    for name, how in RUNS:
        found[name, how] = train(TRAININGS[name], SPREAD[how], mine)
    for name, training in REPEATED.items():
        for how in ("layers", "one"):
            found[name, how] = train(training, SPREAD[how])
    found["sam", "part"] = train(TRAININGS["sam"], partly)
    model = by_layer(dense())
    found["norm"] = total_norm(list(model.parameters()))
    found["no filters"] = refused(lambda: sf.BNSharpnessSGD(sgd(model), model))
    seen = as_one(dense())
    with torch.no_grad():
        seen(samples(seen)[0])  # after which FSDP2 leaves it gathered
    found["no penalty, seen"] = refused(lambda: sf.SharpnessPenalty(seen, samples(dense())))
    found["fam, seen"] = penalty_of(seen)
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


# Measurements.


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attend = nn.LayerNorm(4), nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm(x)
        answer: Tensor = x + self.attend(n, n, n, need_weights=False)[0]
        return answer


class Attending(nn.Module):
    """What a transformer has; FSDP2 gathers its block at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(11, 4), Mixing()
        self.hidden, self.out = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.mix(self.embed(x))
        answer: Tensor = self.out(F.gelu(self.hidden(h))).mean(1)
        return answer


def attending() -> Attending:
    torch.manual_seed(7)
    return Attending().double()


def straight() -> nn.Module:
    torch.manual_seed(8)
    return nn.Sequential(
        nn.Linear(5, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 3)
    ).double()


MODELS = {
    "straight": straight,
    "curved": dense,
    "convolutional": convolutional,
    "attending": attending,
}
DRAWN = sf.PropagatedCurvature(4, seed=1)
FORMS = ["relative_flatness", "kappa_trace", "rho", "fisher_rao_norm", "normalized_sharpness"]
Found = dict[str, Tensor]


def traces(model: nn.Module, data: Any) -> Found:
    return {
        k: torch.tensor(v, dtype=torch.float64)
        for k, v in sf.trace(model, data, estimator=DRAWN).items()
    }


def gauss_newton(model: nn.Module, data: Any) -> Found:
    return dict(sf.diagonal(model, data, curvature="ggn").items())


def crowded(model: nn.Module, data: Any) -> Found:
    found = sf.trace(model, data, max_directions=2, estimator=DRAWN)
    return {
        k: torch.tensor([v, found.details[k].stderr], dtype=torch.float64) for k, v in found.items()
    }


def forms(model: nn.Module, data: Any) -> Found:
    report = sf.measure(model, data, measures=FORMS, curvature="ggn")
    return {name: torch.tensor(report[name].value, dtype=torch.float64) for name in FORMS}


QUANTITIES = {"trace": traces, "ggn": gauss_newton, "crowded": crowded, "forms": forms}


def tokens() -> Tensor:
    return torch.randint(0, 11, (8, 3), generator=torch.Generator().manual_seed(9))


def data_of(model: nn.Module) -> tuple[Tensor, Tensor]:
    return (tokens(), torch.arange(8) % 3) if isinstance(model, Attending) else samples(model)


def quantities(
    spread: Callable[[nn.Module], nn.Module], names: Iterable[str] = tuple(MODELS)
) -> dict[Any, Found]:
    found = {}
    for name in names:
        model = MODELS[name]()
        data = data_of(model)
        called = spread(model)
        for kind, ask in QUANTITIES.items():
            found[name, kind] = ask(called, [data, (data[0][:3], data[1][:3])])
    return found


EVERYTHING = ["hessian_max_eigenvalue", "neuronwise_minimum_sharpness", "sam_sharpness"]


def everything(model: nn.Module) -> dict[str, Any]:
    """What takes the whole model."""
    with sf.gathered(model):
        report = sf.measure(model, samples(model), measures=EVERYTHING)
    assert report.standing is not None
    values = {name: report[name].value for name in EVERYTHING}
    return {**values, "loss": report.standing.loss, "hash": report.provenance.model_hash}


def of_shards(model: nn.Module, part: slice, distributed: bool) -> float:
    """The trace of samples that are on several ranks, not as many on each."""
    x, y = samples(model)
    names = ["hessian_trace"]
    with sf.gathered(model):
        report = sf.measure(model, (x[part], y[part]), measures=names, distributed=distributed)
    return report["hessian_trace"].value


def measured_in_between(spread: Callable[[nn.Module], nn.Module], measured: bool) -> Tensor:
    """A training with measurements in it, one amid the accumulation of gradients."""
    model = dense()
    x, y = samples(model)
    called: Any = spread(model)
    optimizer = sf.SAM(sgd(called), rho=0.3)
    for _ in range(2):
        by_closure(optimizer, called, x, y, None)
        if measured:
            sf.trace(called, (x, y), estimator=DRAWN)
    optimizer = sgd(called)
    optimizer.zero_grad()
    for part in (slice(0, 4), slice(4, 8)):
        if spread is not alone:
            called.set_requires_gradient_sync(part.start == 4)
        F.cross_entropy(called(x[part]), y[part]).backward()
        if measured:
            sf.trace(called, (x, y), estimator=DRAWN)
    optimizer.step()
    return whole(model)


def as_found(model: nn.Module) -> list[Any]:
    """What a measurement must leave alone."""
    places = [(id(p), p.requires_grad, id(p.grad)) for p in model.parameters()]
    modes = [(m.training, len(m._forward_hooks)) for m in model.modules()]
    tensors = (*model.parameters(), *(p.grad for p in model.parameters()))
    values = [t.to_local().tolist() for t in tensors if isinstance(t, DTensor)]
    return [places, modes, values, torch.get_rng_state().tolist()]


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = nn.Linear(5, 3).double(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 4:
            raise ValueError("the fourth pass fails")
        answer: Tensor = self.inner(x)
        return answer


class Detached(nn.Module):
    """A backward pass that is not the derivative."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = nn.Linear(5, 4).double(), nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        answer: Tensor = self.b(h * (h.detach() + 1))
        return answer


def graphs_hold_no_weights(model: nn.Module) -> bool:
    """After a forward pass, with its graph alive, nothing whole is left."""
    x, y = samples(model)
    risk = Risk(model, (x, y))
    with risk.session():
        outputs = risk.forward(next(risk.batches()))
        kept = [leaf.untyped_storage().size() for leaf in risk.leaves.values()]
        sharded = all(isinstance(p, DTensor) for p in model.parameters())
        (slope,) = torch.autograd.grad(outputs.sum(), [risk.leaves["0.weight"]])
    return outputs.requires_grad and sharded and not any(kept) and bool(slope.any())


def told_on_one(rank: int) -> dict[str, float]:
    """A trace that one process shows, and that is expected to last: gradients would be timed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("saltflat.curvature.curvature.LONG", 0.0)
        told = (lambda *_: None) if rank == 0 else False
        return dict(sf.trace(by_layer(dense()), samples(dense()), progress=told))


def refusals(rank: int) -> dict[str, str]:
    def half(model: nn.Module, dtype: torch.dtype) -> nn.Module:
        fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
        return model

    def parallel(model: nn.Module) -> nn.Module:
        mesh = init_device_mesh("cpu", (2,))
        return parallelize_module(model, mesh, {"2": ColwiseParallel()})

    model, data = by_layer(dense()), samples(dense())
    mine = data[0][4 * rank : 4 * rank + 4], data[1][:4]
    detached, failing = by_layer(Detached()), as_one(Failing())
    checked, split = by_layer(normalised()), attending()
    fully_shard(split.mix.attend)  # it then takes three inputs, and its weight in parts
    fully_shard(split)
    found = {
        "eigenvalues": lambda: sf.max_eigenvalue(model, data),
        "symmetries": lambda: sf.symmetries(model, data[0]),
        "landscape": lambda: sf.measure(model, data, measures=["sam_sharpness"]),
        "filters": lambda: sf.measure(by_layer(straight()), data, measures=["bn_sharpness"]),
        "audit": lambda: sf.audit(model, data, measures=["hessian_trace"]),
        "dtype": lambda: sf.trace(model, data, dtype=torch.float32),
        "precision": lambda: sf.trace(half(dense(), torch.float32), data),
        "answers": lambda: sf.trace(answering(by_layer(dense())), data),
        "answers, gathered": lambda: gathered_trace(answering(by_layer(dense())), data),
        "tensor parallel": lambda: sf.trace(parallel(dense_even()), data),
        "other samples": lambda: sf.trace(model, mine),
        "other order": lambda: sf.trace(model, [t.flip(0) if rank else t for t in data]),
        "more samples": lambda: sf.trace(model, [data] * (1 + rank)),
        "other seed": lambda: sf.trace(model, data, seed=rank),
        "other measures": lambda: sf.measure(model, data, measures=FORMS[rank : rank + 1]),
        "other loss": lambda: sf.trace(model, data, nn.CrossEntropyLoss(label_smoothing=rank / 9)),
        "flattened": lambda: sf.trace(flattened(), data),
        "flattened, sam": lambda: sf.SAM(sgd(flattened())),
        "flattened, entropy": lambda: sf.EntropySGD(flattened().parameters(), lr=0.1),
        "flattened, fam": lambda: sf.FAM(flattened(), layer="_fsdp_wrapped_module.2", strength=1.0),
        "checkpoint": lambda: sf.trace(checked, data),
        "derivative": lambda: sf.trace(detached, data),
        "failure": lambda: sf.trace(failing, data),
        "no rule": lambda: sf.trace(split, (tokens(), data[1]), curvature="ggn"),
        "unknown": lambda: of_another_torch(model, data),
    }
    said = {name: refused(call, SaltflatError) for name, call in found.items()}
    said["unread"] = refused(
        lambda: sf.trace(model, Unread(data, rank)), OSError if rank else DistributedError
    )
    said["afterwards"] = str(sf.trace(by_layer(straight()), data).exact)
    said["sharded again"] = str(all(isinstance(p, DTensor) for p in failing.parameters()))
    failing.calls = 4  # a measurement gives back what it found
    said["measured again"] = str(as_if_plain(failing.inner, failing, data))
    return said


def of_another_torch(model: nn.Module, data: Any) -> sf.Trace:
    """FSDP2 keeps what it knows in attributes that nobody has heard of."""
    with pytest.MonkeyPatch.context() as patch:
        policy = MixedPrecisionPolicy()
        patch.setattr(FSDPModule, "_get_fsdp_state", lambda _: SimpleNamespace(_mp_policy=policy))
        return sf.trace(model, data)


def as_if_plain(layer: Any, model: nn.Module, data: Any) -> bool:
    """Whether a model that is one layer has the trace of that layer, not sharded."""
    plain = nn.Linear(layer.in_features, layer.out_features).double()
    plain.load_state_dict({n: t.full_tensor() for n, t in layer.state_dict().items()})
    return abs(sf.trace(model, data).total - sf.trace(plain, data).total) < ATOL


def answering(model: Any) -> nn.Module:
    """The last layer's outputs are rounded, and nothing else."""
    model[4]._get_fsdp_state()._mp_policy = MixedPrecisionPolicy(output_dtype=torch.float32)
    answer: nn.Module = model
    return answer


def gathered_trace(model: nn.Module, data: Any) -> sf.Trace:
    with sf.gathered(model):
        return sf.trace(model, data)


class Unread:
    """Data that one process cannot read to their end."""

    def __init__(self, batch: Any, rank: int) -> None:
        self.batch, self.rank = batch, rank

    def __iter__(self) -> Any:
        yield self.batch
        if self.rank:
            raise OSError("has raised an error")
        yield self.batch


def flattened() -> Any:
    """As FSDP1 has it, with names and shapes of the parameters as they were."""
    return FullyShardedDataParallel(dense(), device_id=torch.device("cpu"), use_orig_params=True)


def watched(rank: int, folder: str) -> Any:
    """Monitors of a model that processes share, which have one log and stop together."""
    model, data = by_layer(straight()), samples(straight())
    options: dict[str, Any] = {"measures": ["hessian_trace"], "path": f"{folder}/log.jsonl"}
    monitor = sf.Monitor(model, data, budget=None, **options)
    monitor.epoch()
    monitor.epoch()
    distributed.barrier()
    with open(f"{folder}/log.jsonl") as log:
        lines = len(log.readlines())
    distributed.barrier()
    patient = sf.Budget(seconds=1e-9 if rank else 1e9)
    record = sf.Monitor(model, data, measures=["hessian_trace"], budget=patient).epoch()
    assert record is not None
    return lines, record.skipped, dict(record.values)


def gathered_twice(model: nn.Module) -> list[Any]:
    """A model is whole until the outermost block is left."""
    with sf.gathered(model):
        with sf.gathered(model):
            trace = sf.trace(model, samples(model)).total
        largest = sf.max_eigenvalue(model, samples(model)).value
    return [trace, largest, sum(isinstance(p, DTensor) for p in model.parameters())]


def dense_even() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 4)).double()


def found_of_measuring(rank: int, folder: str) -> dict[Any, Any]:
    found: dict[Any, Any] = {("measured", "layers"): quantities(by_layer)}
    found["measured", "one"] = quantities(as_one, ["curved"])
    model = by_layer(dense())
    F.cross_entropy(model(samples(model)[0]), samples(model)[1]).backward()
    before = as_found(model)
    sf.trace(model, samples(model))
    found["as found"] = before == as_found(model)
    found["no weights"] = graphs_hold_no_weights(model)
    found["everything"] = everything(by_layer(straight()))
    mine = slice(0, 5) if rank == 0 else slice(5, 8)
    found["of shards"] = of_shards(by_layer(convolutional()), mine, distributed=True)
    found["in between"] = measured_in_between(by_layer, measured=True)
    found["told on one"] = told_on_one(rank)
    found["refusals"] = refusals(rank)
    found["watched"] = watched(rank, folder)
    found["twice"] = gathered_twice(by_layer(straight()))
    return found


# The world.


def one_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=2,
        timeout=timedelta(minutes=5),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = found_of_training(rank)
        found["normalised"] = measured_normalised(sync=True)
        found |= found_of_measuring(rank, folder)
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


@pytest.mark.parametrize(("name", "how"), RUNS)
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
        assert "FAM" in found["no penalty, seen"]


def test_fam_of_a_model_that_was_left_gathered(ranks: list[dict[Any, Any]]) -> None:
    assert all(found["fam, seen"] == pytest.approx(penalty_of(dense())) for found in ranks)


def test_synchronised_batchnorm_is_batchnorm(ranks: list[dict[Any, Any]]) -> None:
    expected = measured_normalised(sync=False)
    for found in (measured_normalised(sync=True), *(found["normalised"] for found in ranks)):
        assert found["kinds"] == expected["kinds"]
        assert expected["kinds"]["batchnorm"] == 4
        assert found["modes"] == expected["modes"]
        assert torch.equal(found["state"], expected["state"])
        for name, (value, exact) in expected["values"].items():
            assert found["values"][name] == (pytest.approx(value, rel=1e-10), exact), name


@pytest.fixture(scope="module")
def expected() -> dict[Any, Found]:
    return quantities(alone)


@pytest.mark.parametrize("kind", QUANTITIES)
@pytest.mark.parametrize(
    ("name", "how"), [*((name, "layers") for name in MODELS), ("curved", "one")]
)
def test_sharded_models_are_measured_as_whole_ones(
    name: str, kind: str, how: str, expected: dict[Any, Found], ranks: list[dict[Any, Any]]
) -> None:
    one = expected[name, kind]
    for found in ranks:
        got = found["measured", how][name, kind]
        assert got.keys() == one.keys()
        for key, value in one.items():
            assert float((got[key] - value).abs().max()) <= ATOL * max(
                1.0, float(value.abs().max())
            )


def test_against_the_dense_oracle(ranks: list[dict[Any, Any]]) -> None:
    model = straight().eval()
    x, y = samples(model)
    x, y = torch.cat([x, x[:3]]), torch.cat([y, y[:3]])
    oracle = Dense(model, x, y)
    for found in ranks:
        got = found["measured", "layers"]["straight", "trace"]
        for name, block in oracle.blocks(oracle.hessian).items():
            assert float(got[name]) == pytest.approx(float(block.trace()), rel=1e-9)
            assert float(block.trace()) > 0


def test_weights_are_gathered_layer_by_layer(ranks: list[dict[Any, Any]]) -> None:
    assert all(found["no weights"] for found in ranks)


def test_sharded_models_are_given_back_as_found(ranks: list[dict[Any, Any]]) -> None:
    assert all(found["as found"] for found in ranks)
    expected = measured_in_between(alone, measured=False)
    assert all(close(found["in between"], expected) for found in ranks)


def test_one_process_may_show_the_work(ranks: list[dict[Any, Any]]) -> None:
    one = pytest.approx(dict(sf.trace(dense(), samples(dense()))), rel=1e-10)
    assert all(found["told on one"] == one for found in ranks)


def test_all_measures_of_a_gathered_model(ranks: list[dict[Any, Any]]) -> None:
    one = everything(straight())
    for found in ranks:
        assert found["everything"].keys() == one.keys()
        assert found["everything"]["hash"] == one["hash"]
        for name in (*EVERYTHING, "loss"):
            assert found["everything"][name] == pytest.approx(one[name], rel=1e-8)


def test_uneven_shards_of_the_data_of_a_gathered_model(ranks: list[dict[Any, Any]]) -> None:
    one = of_shards(convolutional(), slice(None), distributed=False)
    half = of_shards(convolutional(), slice(0, 5), distributed=False)
    for found in ranks:
        assert found["of shards"] == pytest.approx(one, rel=1e-10)
        assert found["of shards"] != pytest.approx(half, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("eigenvalues", "gathered(model)"),
        ("symmetries", "gathered(model)"),
        ("landscape", "gathered(model)"),
        ("filters", "gathered(model)"),
        ("audit", "cannot be copied"),
        ("dtype", "before fully_shard"),
        ("precision", "MixedPrecisionPolicy"),
        ("answers", "module '4' compute or answer in torch.float32, by its MixedPrecisionPolicy"),
        ("answers, gathered", "module '4' compute or answer in torch.float32"),
        ("tensor parallel", "full_tensor()"),
        ("other samples", "give every rank the same data"),
        ("other order", "the same samples, in the same order"),
        ("more samples", "the same samples, in the same order"),
        ("other seed", "were not asked for the same"),
        ("other measures", "were not asked for the same"),
        ("other loss", "were not asked for the same"),
        ("unread", "has raised an error"),
        ("afterwards", "True"),
        ("flattened", "fully_shard (FSDP2) instead"),
        ("flattened, sam", "fully_shard (FSDP2) instead"),
        ("flattened, entropy", "fully_shard (FSDP2) instead"),
        ("flattened, fam", "fully_shard (FSDP2) instead"),
        ("checkpoint", "Switch checkpointing off"),
        ("derivative", "is not the derivative"),
        ("failure", "the fourth pass fails"),
        ("no rule", "No fast rule serves mix.attend.in_proj_weight"),
        ("sharded again", "True"),
        ("measured again", "True"),
        ("unknown", "does not tell which parameters fully_shard gathers"),
    ],
)
def test_what_sharded_models_do_not_serve_is_refused(
    name: str, words: str, ranks: list[dict[Any, Any]]
) -> None:
    said = [found["refusals"][name] for found in ranks]
    assert all(words in each for each in said), said


def test_monitors_of_a_sharded_model_have_one_log_and_stop_together(
    ranks: list[dict[Any, Any]],
) -> None:
    for found in ranks:
        lines, skipped, values = found["watched"]
        assert lines == 2
        assert skipped is not None
        assert not values
    assert "another process that shares the model" in ranks[0]["watched"][1]


def test_a_gathered_model_is_gathered_again(ranks: list[dict[Any, Any]]) -> None:
    one = gathered_twice(straight())
    for found in ranks:
        *values, sharded = found["twice"]
        assert values == pytest.approx(one[:2], rel=1e-8)
        assert sharded == len(list(straight().parameters()))
