"""What the ranks of a process group do in the tests of `distributed=True`, and how they start.

Every job is a function of the batches that a rank has, and of whether it is one of several; the
same job on all batches, in one process, is what it is compared with.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from datetime import timedelta
from math import isclose, isnan
from pathlib import Path
from typing import Any, final
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler, TensorDataset

import saltflat as sf
from saltflat.distributed import Ranks, reduction
from saltflat.risk import Risk

Batches = list[tuple[Tensor, Tensor]]

# The sizes of every rank's batches.
SHARDS = {2: [[5, 2], [3, 1, 4]], 4: [[4, 1], [], [3], [2, 1, 5]]}
LIMIT = 240  # seconds that a world may take


def relu() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double()


def tanh() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh()).double()


def normalised() -> nn.Module:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)).double()
    statistics: Any = model[1]
    statistics.running_var.uniform_(0.5, 2)
    statistics.running_mean.normal_()
    return model


class Late(nn.Module):
    """Curved on samples whose first entry is large, which only some ranks have."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.one, self.two = nn.Linear(4, 5).double(), nn.Linear(5, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        hidden, large = self.one(x), x[:, :1] > 50
        bent = hidden.tanh().where(large, hidden.relu()) if bool(large.any()) else hidden.relu()
        return self.two(bent)


class Company(nn.Module):
    """Outputs depend on the other samples of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x - x.mean(0))


def batches(sizes: list[int]) -> Batches:
    g = torch.Generator().manual_seed(3)
    return [
        (torch.randn(n, 4, generator=g, dtype=torch.float64), torch.randint(3, (n,), generator=g))
        for n in sizes
    ]


def all_batches(world: int) -> Batches:
    return batches([size for sizes in SHARDS[world] for size in sizes])


def own_batches(world: int, rank: int) -> Batches:
    counts = [len(sizes) for sizes in SHARDS[world]]
    first = sum(counts[:rank])
    return all_batches(world)[first : first + counts[rank]]


def differences(one: Any, other: Any, where: str = "") -> list[str]:
    """Where two results are not the same to 1e-10."""
    if is_dataclass(one) and is_dataclass(other):
        return differences(asdict(one), asdict(other), where)
    if isinstance(one, Mapping) and isinstance(other, Mapping) and one.keys() == other.keys():
        pairs = [(one[key], other[key], f"{where}/{key}") for key in one]
    elif (
        isinstance(one, Sequence)
        and isinstance(other, Sequence)
        and not isinstance(one, str)
        and len(one) == len(other)
    ):
        pairs = [(a, b, f"{where}/{k}") for k, (a, b) in enumerate(zip(one, other, strict=True))]
    else:
        same = one == other
        if isinstance(one, float) and isinstance(other, float):
            same = isclose(one, other, rel_tol=1e-10, abs_tol=1e-13) or (
                isnan(one) and isnan(other)
            )
        return [] if same else [f"{where}: {one} and {other}"]
    return [line for pair in pairs for line in differences(*pair)]


def report(result: sf.Report) -> dict[str, Any]:
    """What must be the same, whoever measured it."""
    source = result.provenance
    return {
        "measures": {
            n: (
                m.value,
                m.stderr,
                m.degrees,
                m.sampling,
                m.gap,
                m.exact,
                m.by_layer,
                m.by_parameter,
            )
            for n, m in result.items()
        },
        "skipped": dict(result.skipped),
        "standing": result.standing,
        "source": (source.samples, source.batches, source.batch_size, source.data_hash),
        "cost": (source.values_hash, source.certified_samples, source.gradients),
    }


def straight(data: Batches, several: bool) -> Any:
    """All measures, exactly; batch statistics need two samples."""
    large = [(x, y) for x, y in data if len(x) > 1]
    return report(sf.measure(normalised(), large, measures="all", distributed=several))


def curved(data: Batches, several: bool) -> Any:
    """All measures, of estimates."""
    return report(sf.measure(tanh(), data, measures="all", distributed=several))


def some(data: Batches, several: bool) -> Any:
    measures = ["hessian_trace", "kappa", "normalized_sharpness", "rho", "sam_sharpness"]
    return report(sf.measure(tanh(), data, measures=measures, distributed=several))


def late(data: Batches, several: bool) -> Any:
    """The last batch alone shows that the model is curved."""
    changed = [(x.clone(), y) for x, y in data]
    if changed and len(changed[-1][0]) > 3:
        changed[-1][0][0, 0] = 100.0
    result = sf.measure(Late(), changed, measures=["hessian_trace", "rho"], distributed=several)
    return report(result)


def weighted(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss of the user's own that is a mean over samples."""
    return (outputs.logsumexp(1) - outputs[range(len(targets)), targets]).mean()


def own_loss(data: Batches, several: bool) -> Any:
    measures = ["hessian_trace", "sam_sharpness", "kappa"]
    return report(sf.measure(relu(), data, weighted, measures=measures, distributed=several))


def curvature(data: Batches, several: bool) -> Any:
    """The functions that are not measures, by all estimators."""
    common: dict[str, Any] = {"distributed": several}
    found: dict[str, Any] = {}
    for name, estimator in {
        "propagated": sf.PropagatedCurvature(8),
        "probes": sf.ActivationProbes(8),
        "products": sf.Hutchinson(8),
    }.items():
        trace = sf.trace(tanh(), data, estimator=estimator, **common)
        found[name] = dict(trace), trace.stderr, trace.degrees
    crowd = sf.trace(relu(), data, max_directions=1, **common)
    found["crowd"] = dict(crowd), crowd.stderr, crowd.degrees
    found["ggn"] = dict(sf.trace(tanh(), data, curvature="ggn", **common))
    found["diagonal"] = {n: d.tolist() for n, d in sf.diagonal(relu(), data, **common).items()}
    found["eigenvalues"] = sf.eigenvalues(tanh(), data, k=2, **common).values
    found["density"] = [
        n.tolist() for n in sf.density(relu(), data, probes=2, steps=4, **common).nodes
    ]
    operator = sf.hessian(tanh(), data, **common)
    found["product"] = (operator @ torch.arange(operator.shape[0], dtype=torch.float64)).tolist()
    return found


def confident(data: Batches, several: bool) -> Any:
    """Directions are chosen, of many samples: the ranks have as many in proportion as batches."""
    g = torch.Generator().manual_seed(5)
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 6)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(8.0)
    x = torch.randn(1500, 4, generator=g, dtype=torch.float64)
    y = model(x).argmax(1).detach()
    rank, cut = (dist.get_rank(), 400) if several else (0, 1500)
    rows = slice(0, cut) if rank == 0 else slice(cut, 1500)
    options: dict[str, Any] = {"tolerance": 0.1, "distributed": several}
    report = sf.measure(
        model, (x[rows], y[rows]), measures=["hessian_trace", "rho"], standing=False, **options
    )
    chosen = [note for note in report.notes if note.startswith("tolerance")]
    return {n: (m.value, m.stderr, m.degrees, m.exact) for n, m in report.items()}, chosen


def dominated(data: Batches, several: bool) -> Any:
    """Of many classes mixes are drawn, but not of two samples, which most of the ranks have not."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(4, 2), nn.ReLU(), nn.Linear(2, 230)).double()
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    with torch.no_grad():
        model[0].weight[:, 3] = 0.0
    x[:, 3] = 0.0
    x[40, 3], x[45, 3] = 80.0, 60.0
    here = list(zip(x.split(5), (torch.arange(60) % 230).split(5), strict=True))
    if several:
        shares = {2: (0, 3, 12), 4: (0, 3, 3, 8, 12)}[dist.get_world_size()]
        here = here[shares[dist.get_rank()] : shares[dist.get_rank() + 1]]
    names = ["hessian_trace", "rho"]
    options: dict[str, Any] = {"tolerance": 0.1, "standing": False, "distributed": several}
    report = sf.measure(model, here, measures=names, **options)
    drawn = [note for note in report.notes if "random mixes" in note]
    return {n: (m.value, m.stderr, m.degrees, m.exact) for n, m in report.items()}, drawn


def parts(data: Batches, several: bool) -> Any:
    """Random parts of the samples of all ranks, of which some have few and one of four has none."""
    g = torch.Generator().manual_seed(7)
    x = torch.randn(3000, 4, generator=g, dtype=torch.float64)
    y = torch.randint(3, (3000,), generator=g)
    rank, cuts = 0, [0, 3000]
    if several:
        rank = dist.get_rank()
        cuts = {2: [0, 700, 3000], 4: [0, 700, 700, 2500, 3000]}[dist.get_world_size()]
    rows = slice(cuts[rank], cuts[rank + 1])
    options: dict[str, Any] = {"samples": "auto", "seed": 3, "distributed": several}
    loader = DataLoader(TensorDataset(x[rows], y[rows]), batch_size=300)
    trace = sf.trace(relu(), loader, tolerance=0.02, **options)
    names = ["hessian_trace", "minimum_sharpness"]
    found = sf.measure(relu(), (x[rows], y[rows]), tolerance=0.1, measures=names, **options)
    assert trace.certificate is not None
    assert 256 < trace.certificate.samples < 3000
    used = [note for note in (*trace.notes, *found.notes) if "drawn at random" in note]
    assert len(used) == 2
    values = {n: (m.value, m.stderr, m.interval) for n, m in found.items()}
    what = found.provenance.samples, found.provenance.data_hash, found.standing
    return dict(trace), trace.stderr, trace.interval, values, what, used


def audited(data: Batches, several: bool) -> Any:
    options = {"measures": ["hessian_trace", "rho"], "elements": 1, "spread": 10.0}
    audit = sf.audit(relu(), data, **options, distributed=several)
    return {
        name: (row.value, row.verdict, {kind: drift.verdict for kind, drift in row.drifts.items()})
        for name, row in audit.items()
    }


def monitored(data: Batches, several: bool) -> Any:
    """The model as DistributedDataParallel has it; the first samples alone."""
    model = relu()
    wrapped = DistributedDataParallel(model) if several else model
    monitor = sf.Monitor(wrapped, data, samples=6, budget=None, distributed=several)
    first = monitor.epoch()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    last = monitor.measure()
    # What it would take is measured before it is forbidden.
    slow = sf.Monitor(wrapped, data, budget=sf.Budget(seconds=1e-9), distributed=several)
    skipped = slow.epoch()
    assert first is not None
    assert skipped is not None
    assert skipped.skipped is not None
    reasons.append(skipped.skipped)
    return [(r.epoch, r.values, r.failed) for r in (first, skipped, last)], repr(monitor)[:60]


reasons: list[str] = []  # by the clock of rank 0


def pictured(data: Batches, several: bool) -> Any:
    options = {"dimensions": 1, "points": 3, "accuracy": True, "distributed": several}
    picture = sf.landscape(relu(), data, **options)
    return picture.losses, picture.accuracies, picture.samples, picture.data_hash


def buffers(data: Batches, several: bool) -> Any:
    """Every rank has running statistics of its own: those of rank 0 count, and all stay."""
    model = normalised()
    statistics: Any = model[1]
    if several:
        statistics.running_mean += dist.get_rank()
    before = statistics.running_mean.clone()
    found = dict(sf.trace(model, data, distributed=several))
    assert torch.equal(statistics.running_mean, before)
    return found


SAME: dict[str, Callable[[Batches, bool], Any]] = {
    "straight": straight,
    "curved": curved,
    "some": some,
    "late": late,
    "own loss": own_loss,
    "curvature": curvature,
    "confident": confident,
    "dominated": dominated,
    "parts": parts,
    "audit": audited,
    "monitor": monitored,
    "landscape": pictured,
    "buffers": buffers,
}
# The larger world has fewer: what it is for is an empty shard, and more than two parts.
JOBS = {
    2: [name for name in SAME if name != "some"],
    4: ["some", "late", "own loss", "dominated", "parts", "monitor"],
}


def nan(data: Batches) -> Any:
    if dist.get_rank() == 1:
        data = [(x * float("nan"), y) for x, y in data]
    return sf.measure(relu(), data, distributed=True)


def wrong_shape(data: Batches) -> Any:
    return sf.measure(relu(), [(x[:, :3], y) for x, y in data], distributed=True)


def wrong_on_one(data: Batches) -> Any:
    return wrong_shape(data) if dist.get_rank() == 1 else sf.measure(relu(), data, distributed=True)


class Unsent(Exception):
    """An error that cannot be sent to other processes."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one + two)


def unsent(data: Batches) -> Any:
    def unpack(item: Any) -> Any:
        if dist.get_rank() == 1:
            raise Unsent("no ", "luck")
        return item

    return sf.trace(relu(), data, unpack=unpack, distributed=True)


def between(data: Batches) -> Any:
    """One rank stops between two steps, for reasons of its own."""
    if dist.get_rank() == 0:
        with mock.patch("saltflat.measure.standing_of", side_effect=KeyboardInterrupt):
            return sf.measure(relu(), data, distributed=True)
    return sf.measure(relu(), data, distributed=True)


def coupled(data: Batches) -> Any:
    return sf.measure(Company(), data, distributed=True)


def joint(data: Batches) -> Any:
    return sf.measure(relu(), data, lambda o, y: weighted(o, y).sqrt(), distributed=True)


def apart(outputs: Tensor, targets: Tensor) -> Tensor:
    """A mean weighted by what is the same for all samples of one rank, and another for others."""
    weight = targets.double() + 1
    return (outputs.square().sum(1) * weight).sum() / weight.sum()


def joint_over_ranks(data: Batches) -> Any:
    mine = [(x, torch.full_like(y, dist.get_rank())) for x, y in data]
    return sf.measure(relu(), mine, apart, distributed=True)


def other_model(data: Batches) -> Any:
    model = relu()
    with torch.no_grad():
        next(model.parameters()).add_(0.1 * dist.get_rank())
    return sf.measure(model, data, distributed=True)


def other_order(data: Batches) -> Any:
    """The same numbers elsewhere: norms do not tell."""
    model = relu()
    if dist.get_rank() == 1:
        with torch.no_grad():
            model[0].weight.copy_(model[0].weight.flip(0))
    return sf.trace(model, data, distributed=True)


def other_sign(data: Batches) -> Any:
    model = relu()
    if dist.get_rank() == 1:
        with torch.no_grad():
            model[2].weight.neg_()
    return sf.trace(model, data, distributed=True)


def other_module(data: Batches) -> Any:
    model = relu()
    model[1] = nn.LeakyReLU(0.1 * (1 + dist.get_rank()))
    return sf.trace(model, data, distributed=True)


def other_frozen(data: Batches) -> Any:
    model = relu()
    model[0].weight.requires_grad_(dist.get_rank() == 0)
    return sf.trace(model, data, distributed=True)


def other_seed(data: Batches) -> Any:
    return sf.measure(
        tanh(), data, measures=["hessian_trace"], seed=dist.get_rank(), distributed=True
    )


def other_measures(data: Batches) -> Any:
    names = ["hessian_trace"] if dist.get_rank() else ["rho"]
    return sf.measure(relu(), data, measures=names, distributed=True)


def other_loss(data: Batches) -> Any:
    loss = nn.CrossEntropyLoss(reduction="sum" if dist.get_rank() else "mean")
    return sf.trace(relu(), data, loss, distributed=True)


def other_curvature(data: Batches) -> Any:
    matrix: Any = "ggn" if dist.get_rank() else "hessian"
    return sf.trace(relu(), data, curvature=matrix, distributed=True)


def other_picture(data: Batches) -> Any:
    return sf.landscape(
        relu(), data, dimensions=1, points=3, seed=dist.get_rank(), distributed=True
    )


def other_call(data: Batches) -> Any:
    if dist.get_rank() == 1:
        return sf.max_eigenvalue(relu(), data, distributed=True)
    return sf.trace(relu(), data, distributed=True)


def other_vector(data: Batches) -> Any:
    operator = sf.hessian(relu(), data, distributed=True)
    return operator @ torch.full((operator.shape[0],), float(dist.get_rank()))


def other_place(data: Batches) -> Any:
    """The same entries of a vector, elsewhere: sums do not tell."""
    operator = sf.hessian(relu(), data, distributed=True)
    vector = torch.arange(operator.shape[0], dtype=torch.float64)
    if dist.get_rank() == 1:
        vector[:20] = vector[:20].flip(0)
    return operator @ vector


def seven() -> TensorDataset:
    return TensorDataset(torch.randn(7, 4).double(), torch.arange(7) % 3)


class Around(Sampler[int]):
    """A sampler of somebody's that has another one inside."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __iter__(self) -> Any:
        return iter(self.inner)


def padded_inside(data: Batches) -> Any:
    dataset = seven()
    batched = BatchSampler(Around(DistributedSampler(dataset)), 2, False)
    return sf.trace(relu(), DataLoader(dataset, batch_sampler=batched), distributed=True)


def padded_parts(data: Batches) -> Any:
    """A random part has no sampler of its own, and may not even have the repeated sample."""
    dataset = TensorDataset(torch.randn(1001, 4).double(), torch.arange(1001) % 3)
    loader = DataLoader(dataset, 100, sampler=DistributedSampler(dataset, shuffle=False))
    options: dict[str, Any] = {"samples": "auto", "tolerance": 0.5, "distributed": True}
    return sf.trace(relu(), loader, **options)


def padded_batches(data: Batches) -> Any:
    from accelerate.data_loader import prepare_data_loader

    loader = prepare_data_loader(
        DataLoader(seven(), 2),
        num_processes=2,
        process_index=dist.get_rank(),
        device=torch.device("cpu"),
    )
    return sf.trace(relu(), loader, distributed=True)


def shuffled_otherwise(data: Batches) -> Any:
    dataset = TensorDataset(torch.randn(8, 4).double(), torch.arange(8) % 3)
    sampler: Any = DistributedSampler(dataset)
    sampler.set_epoch(dist.get_rank())
    return sf.trace(relu(), DataLoader(dataset, 2, sampler=sampler), distributed=True)


def of_another_world(data: Batches) -> Any:
    dataset = TensorDataset(torch.randn(8, 4).double(), torch.arange(8) % 3)
    sampler: Any = DistributedSampler(dataset, num_replicas=4, rank=dist.get_rank())
    return sf.trace(relu(), DataLoader(dataset, 2, sampler=sampler), distributed=True)


class Heavy:
    """A sum that there is no memory for when it is to be sent."""

    shape = torch.Size([2])

    def detach(self) -> Tensor:
        raise torch.OutOfMemoryError("out of memory")


def heavy(data: Batches) -> Any:
    with reduction(True, "a test") as together:
        part: Any = Heavy() if dist.get_rank() == 1 else torch.ones(2)
        return together.totals({"a": part}, torch.device("cpu"))


def padded(data: Batches) -> Any:
    dataset = TensorDataset(torch.randn(7, 4).double(), torch.arange(7) % 3)
    sampler: Any = DistributedSampler(dataset)
    return sf.measure(relu(), DataLoader(dataset, 2, sampler=sampler), distributed=True)


def functions(data: Batches) -> Any:
    return sf.audit(relu(), data, functions={"own": lambda m, d: 1.0}, distributed=True)


def nothing(data: Batches) -> Any:
    return sf.trace(relu(), [], distributed=True)


REFUSED: dict[str, Callable[[Batches], Any]] = {
    each.__name__: each
    for each in (
        nan,
        wrong_shape,
        wrong_on_one,
        unsent,
        between,
        coupled,
        joint,
        joint_over_ranks,
        other_model,
        other_order,
        other_sign,
        other_module,
        other_frozen,
        other_seed,
        other_measures,
        other_loss,
        other_curvature,
        other_picture,
        other_call,
        other_vector,
        other_place,
        padded,
        padded_inside,
        padded_parts,
        padded_batches,
        shuffled_otherwise,
        of_another_world,
        heavy,
        functions,
        nothing,
    )
}


def sharded(data: Batches) -> Any:
    """A dataset that every rank reads its part of."""
    g = torch.Generator().manual_seed(4)
    dataset = TensorDataset(torch.randn(7, 4, generator=g).double(), torch.arange(7) % 3)
    loader = DataLoader(dataset, 2, sampler=sf.ShardSampler(dataset))
    told = sf.measure(relu(), loader, measures=["hessian_trace"], distributed=True)
    return told["hessian_trace"].value, told.provenance.samples, told.provenance.ranks, told.notes


def nobody(data: Batches) -> Any:
    """A pair of tensors with no rows is no samples, on one rank."""
    ((x, y),) = batches([4])
    rows = slice(0, 0) if dist.get_rank() == 0 else slice(0, 4)
    return dict(sf.trace(relu(), (x[rows], y[rows]), distributed=True))


def same_samples(data: Batches) -> Any:
    return sf.measure(relu(), batches([4]), measures=["hessian_trace"], distributed=True).notes


def alone(data: Batches) -> Any:
    """One rank measures for itself, while the others do something else."""
    if dist.get_rank() != 0:
        return None
    dataset = TensorDataset(torch.randn(8, 4).double(), torch.arange(8) % 3)
    loader = DataLoader(dataset, 2, sampler=DistributedSampler(dataset))
    told = sf.measure(relu(), loader, measures=["hessian_trace"])
    return told.provenance.samples, told.provenance.ranks, told.notes


def prepared(**options: Any) -> Any:
    """A loader of accelerate's, on one rank while the other does something else."""
    from accelerate.data_loader import prepare_data_loader

    given = {name: options.pop(name) for name in ("dispatch_batches",) if name in options}
    world: dict[str, Any] = {"num_processes": 2, "process_index": 0, "rng_types": ["generator"]}
    loader = prepare_data_loader(
        DataLoader(seven(), 2, **options),
        torch.device("cpu"),
        **world,
        **given,
        put_on_device=True,
    )
    return dict(sf.trace(relu(), loader)) if dist.get_rank() == 0 else None


def sent(data: Batches) -> Any:
    return prepared(dispatch_batches=True)


def shuffled_together(data: Batches) -> Any:
    return prepared(shuffle=True)


def with_workers(data: Batches) -> Any:
    return prepared(shuffle=True, num_workers=1)


def without_places(data: Batches) -> Any:
    """Noise that does not depend on a sample's place in all data."""
    with mock.patch.object(Risk, "offset", 0):
        return dict(sf.trace(tanh(), data, estimator=sf.PropagatedCurvature(8), distributed=True))


def without_sums(data: Batches) -> Any:
    with mock.patch.object(Ranks, "totals", lambda self, sums, device: dict(sums)):
        return dict(sf.trace(relu(), data, distributed=True))


def beside_nccl(data: Batches) -> Any:
    """Beside a group that takes no tensors on the CPU, errors and sums go through another."""
    with mock.patch("saltflat.distributed.dist.get_backend_config", return_value="cuda:nccl"):
        return [dict(sf.trace(relu(), data, distributed=True)) for _ in range(2)]


def clock(data: Batches) -> Any:
    """Why the monitor skipped a measurement, just now."""
    return reasons[-1]


class Interrupted(Exception):
    """What the handler of a rank's SIGINT raises."""


@final
class Waiting:
    """Batches that one rank reads late, while the others wait; rank 0 is told to stop then."""

    def __init__(self, data: Batches) -> None:
        self.data, self.late = data, dist.get_rank() == 1

    def __iter__(self) -> Any:
        if self.late:
            time.sleep(2)
        self.late = False
        return iter(self.data)


def stopped_waiting(call: Callable[[Waiting], Any], data: Batches) -> Any:
    """What a call ends with, when, and whether the handler is the user's own again."""

    def handler(number: int, frame: Any) -> None:
        raise Interrupted(signal.Signals(number).name)

    before, start = signal.signal(signal.SIGINT, handler), time.perf_counter()
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    try:
        if dist.get_rank() == 0:
            timer.start()
        try:
            said = str(call(Waiting(data)))
        except Exception as error:
            said = f"{type(error).__name__}: {error} {getattr(error, '__notes__', '')}"
        same = signal.getsignal(signal.SIGINT) is handler
        return said, time.perf_counter() - start, same
    finally:
        timer.cancel()
        signal.signal(signal.SIGINT, before)


def waiting(data: Batches) -> Any:
    return stopped_waiting(lambda late: sf.trace(relu(), late, distributed=True), data)


OTHERS: dict[str, Callable[[Batches], Any]] = {
    each.__name__: each
    for each in (
        waiting,
        sharded,
        nobody,
        same_samples,
        alone,
        sent,
        shuffled_together,
        with_workers,
        without_places,
        without_sums,
        beside_nccl,
        clock,
    )
}


def dies(data: Batches) -> Any:
    """The last rank ends in the middle of a pass."""

    def unpack(item: Any) -> Any:
        if dist.get_rank() == dist.get_world_size() - 1:
            os._exit(17)
        return item

    return sf.measure(relu(), data, unpack=unpack, distributed=True)


def meet(rank: int, world: int, folder: str) -> None:
    """Begin a rank of a world."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = torch.distributed.FileStore(f"{folder}/store", world)  # type: ignore[attr-defined]
    limit = timedelta(seconds=LIMIT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)


@final
class Attempts:
    """The results of a rank, or its errors, and how long they took; they go to a file."""

    def __init__(self, path: str) -> None:
        self.path, self.results = path, dict[Any, Any]()

    def __call__(self, name: str, job: Callable[[], Any]) -> None:
        start = time.perf_counter()
        try:
            self.results[name] = job()
        except BaseException as error:
            notes = " ".join(getattr(error, "__notes__", ()))
            self.results[name] = type(error).__name__, f"{error} {notes}"
        self.results["seconds", name] = time.perf_counter() - start
        torch.save(self.results, self.path)


def work(rank: int, world: int, folder: str) -> None:
    """All jobs of a rank."""
    meet(rank, world, folder)
    data, attempt = own_batches(world, rank), Attempts(f"{folder}/{rank}.pt")
    for name in JOBS[world]:
        attempt(name, lambda name=name: SAME[name](data, True))  # type: ignore[misc]
    if world == 2:
        for name, job in {**REFUSED, **OTHERS}.items():
            attempt(name, lambda job=job: job(data))  # type: ignore[misc]
    attempt("dies", lambda: dies(data))
    sys.stdout.flush()
    os._exit(0)  # a group with a dead rank cannot be taken down


# What measuring imports when it is first needed.
_NEEDED = ["scipy.optimize", "scipy.sparse.linalg", "scipy.stats", "torch._dynamo", "torch.export"]


def started(
    world: int, folder: Path, work: Callable[[int, int, str], None] = work
) -> list[dict[Any, Any]]:
    """The results of every rank; those that run too long are ended."""
    # One process imports everything, which takes most of the time, and starts the others.
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["ranks", *_NEEDED])
    processes = [context.Process(target=work, args=(k, world, str(folder))) for k in range(world)]
    for process in processes:
        process.start()
    end = time.monotonic() + LIMIT
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    late = [k for k, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
        process.join()
    paths = [folder / f"{k}.pt" for k in range(world)]
    results = [torch.load(p, weights_only=False) if p.exists() else {} for p in paths]
    assert not late, f"ranks {late} of {world} did not end; done: {[list(r) for r in results]}"
    return results
