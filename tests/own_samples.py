"""What ranks do in the tests of sharded models with samples of every rank's own.

Every job is a function of the batches that a rank has, and of whether it is one of several: then
the model is sharded. The same job on all batches, with the whole model, is what it is compared
with.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from ranks import Attempts, meet, stopped_waiting
from test_sharded import (
    FORMS,
    Attending,
    Detached,
    as_found,
    as_one,
    attending,
    by_layer,
    convolutional,
    dense,
    partly,
    samples,
    straight,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import saltflat as sf
from saltflat.curvature.sweep import ExactPass
from saltflat.distributed import Ranks
from saltflat.risk import Risk

Batches = list[tuple[Tensor, Tensor]]
Spread = Callable[[nn.Module], nn.Module]

# The sizes of every rank's batches.
SHARDS = {2: [[4], [3, 1, 4]], 4: [[3], [], [1], [2, 6]]}


def batches_of(model: nn.Module, sizes: list[int]) -> Batches:
    g = torch.Generator().manual_seed(3)
    found: Batches = []
    for n in sizes:
        if isinstance(model, Attending):
            n += n % 2  # of one alone, also in a pilot, the table of a whole model has no rule
            x = torch.randint(0, 11, (n, 3), generator=g)
        elif isinstance(model, nn.Sequential) and isinstance(model[0], nn.Conv2d):
            x = torch.randn(n, 1, 6, 6, generator=g, dtype=torch.float64)
        else:
            x = torch.randn(n, 5, generator=g, dtype=torch.float64)
        found.append((x, torch.randint(3, (n,), generator=g)))
    return found


class Shard:
    """The batches of one rank, or of all, for whatever model."""

    def __init__(self, world: int, rank: int | None) -> None:
        self.sizes, self.rank = SHARDS[world], rank

    @property
    def several(self) -> bool:
        return self.rank is not None

    def __call__(self, model: nn.Module) -> Batches:
        everything = batches_of(model, [n for sizes in self.sizes for n in sizes])
        if self.rank is None:
            return everything
        first = sum(map(len, self.sizes[: self.rank]))
        return everything[first : first + len(self.sizes[self.rank])]

    def model(self, make: Callable[[], Any], spread: Spread = by_layer) -> Any:
        return spread(make()) if self.several else make()


def of_trace(found: sf.Trace) -> Any:
    return dict(found), found.stderr, found.degrees, found.exact


def of_report(report: sf.Report) -> Any:
    return {n: (m.value, m.stderr, m.degrees, m.exact, m.by_layer) for n, m in report.items()}


def exact(shard: Shard) -> Any:
    """Piecewise linear blocks, and blocks of a curved model that are not curved."""
    found = {}
    for make in (straight, convolutional, dense):
        model = shard.model(make)
        data = shard(make())
        found[make.__name__] = of_trace(sf.trace(model, data, distributed=shard.several))
        for matrix in ("hessian", "ggn"):
            if make is not dense or matrix == "ggn":
                diagonal = sf.diagonal(model, data, curvature=matrix, distributed=shard.several)
                found[make.__name__, matrix] = {n: d.tolist() for n, d in diagonal.items()}
    return found


def drawn(shard: Shard) -> Any:
    """Estimates: noise goes by the place of a sample, and checkpoints by all samples."""
    model, data, found = shard.model(attending), shard(attending()), {}
    for name, estimator in {
        "own": None,
        "propagated": sf.PropagatedCurvature(5, seed=1),
        "probes": sf.ActivationProbes(4, seed=2),
    }.items():
        options: dict[str, Any] = {"estimator": estimator, "distributed": shard.several}
        found[name] = of_trace(sf.trace(model, data, **options))
    found["crowd"] = of_trace(sf.trace(model, data, max_directions=2, distributed=shard.several))
    return found


def forms(shard: Shard) -> Any:
    names, found = ["hessian_trace", *FORMS], {}
    for make in (straight, attending):
        model = shard.model(make)
        report = sf.measure(
            model, shard(make()), measures=names, standing=False, distributed=shard.several
        )
        found[make.__name__] = of_report(report), report.provenance.samples
    return found


def losses(shard: Shard) -> Any:
    """Class weights and samples that do not count: the normaliser is that of all samples."""

    def own(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.logsumexp(1) - outputs[range(len(targets)), targets]).mean()

    weights = torch.tensor([0.5, 1.0, 3.0], dtype=torch.float64)
    data = shard(dense())
    ignored = [(x, torch.where(torch.arange(len(y)) % 3 == 0, 1, y)) for x, y in data]
    found = {}
    for name, loss in {
        "weights": nn.CrossEntropyLoss(weights),
        "ignored": nn.CrossEntropyLoss(weights, ignore_index=1),
        "sum": nn.CrossEntropyLoss(reduction="sum"),
        "own": own,
    }.items():
        for make in (straight, dense):
            trace = sf.trace(shard.model(make), ignored, loss, distributed=shard.several)
            found[name, make.__name__] = of_trace(trace)
    return found


class Late(nn.Module):
    """Curved on samples whose first entry is large, which only the last rank has.

    It counts its passes, so that it is run again in the end: do they change its outputs?
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.one, self.two = nn.Linear(5, 6).double(), nn.Linear(6, 3).double()
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        hidden, large = self.one(x), x[:, :1] > 50
        bent = hidden.tanh().where(large, hidden.relu()) if bool(large.any()) else hidden.relu()
        answer: Tensor = self.two(bent)
        return answer


def late(shard: Shard) -> Any:
    data = shard(dense())
    if shard.rank in (None, len(shard.sizes) - 1):
        data[-1][0][0, 0] = 100.0
    return of_trace(sf.trace(shard.model(Late), data, distributed=shard.several))


def longer(data: Batches, last: bool) -> Batches:
    """The last batch has longer sequences, which one rank alone looks at before it measures."""
    if data and last:
        x, y = data[-1]
        data[-1] = torch.cat([x, x[:, :2]], 1), y
    return data


def lengths(shard: Shard) -> Any:
    data = longer(shard(attending()), shard.rank in (None, len(shard.sizes) - 1))
    options: dict[str, Any] = {"estimator": sf.PropagatedCurvature(4), "distributed": shard.several}
    return of_trace(sf.trace(shard.model(attending), data, **options))


def otherwise(shard: Shard) -> Any:
    """Sharded in other ways, with other memory on every rank, and gathered ahead."""

    def ahead(model: nn.Module) -> nn.Module:
        by_layer(model)
        layers: Any = [m for m in model.children() if isinstance(m, nn.Linear)]
        layers[0].set_modules_to_forward_prefetch(layers[1:])
        return model

    def both_ways(model: nn.Module) -> nn.Module:
        world = dist.get_world_size()
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("copies", "parts"))
        for layer in (*model.children(), model):
            if any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=mesh)
        return model

    def kept(model: nn.Module) -> nn.Module:
        """Between passes layers are left whole, or in fewer parts."""
        for layer in (*model.children(), model):
            if any(True for _ in layer.parameters()):
                fully_shard(layer, reshard_after_forward=2 if dist.get_world_size() == 4 else False)
        return model

    found, memory = {}, 2000 if shard.rank == 0 else None
    for spread in (as_one, partly, ahead, both_ways, kept):
        model = shard.model(dense, spread)
        options: dict[str, Any] = {"memory_budget": memory, "distributed": shard.several}
        found[spread.__name__] = of_trace(sf.trace(model, shard(dense()), **options))
    return found


def chosen(shard: Shard) -> Any:
    """A tolerance for what could be had exactly: of many directions some are sent."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 6)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(8.0)
    g = torch.Generator().manual_seed(5)
    x = torch.randn(1500, 4, generator=g, dtype=torch.float64)
    y = model(x).argmax(1).detach()
    rows = {None: slice(None), 0: slice(0, 400), 1: slice(400, None)}[shard.rank]
    options: dict[str, Any] = {"tolerance": 0.1, "distributed": shard.several}
    trace = sf.trace(shard.model(lambda: model), (x[rows], y[rows]), **options)
    return of_trace(trace), [note for note in trace.notes if note.startswith("tolerance")]


class Dark(nn.Module):
    """Layers whose inputs are 0: of all samples, and of all but the last batch's."""

    def __init__(self, bend: bool) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.one, self.late = nn.Linear(3, 4).double(), nn.Linear(2, 4).double()
        self.never, self.out = nn.Linear(5, 4, bias=False).double(), nn.Linear(4, 3).double()
        self.bend = bend

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.late(x[:, 3:]) + self.never(x * 0.0)
        bent = hidden.tanh() if self.bend else hidden
        answer: Tensor = self.out(self.one(x[:, :3]).relu() + bent)
        return answer


def darkened(data: Batches, but: int) -> Batches:
    for x, _ in data[: len(data) - but]:
        x[:, 3:] = 0.0
    return data


def dark(shard: Shard) -> Any:
    data = darkened(shard(dense()), but=shard.rank in (None, len(shard.sizes) - 1))
    options: dict[str, Any] = {"distributed": shard.several}
    straight = sf.trace(shard.model(lambda: Dark(False)), data, **options)
    diagonal = sf.diagonal(shard.model(lambda: Dark(True)), data, curvature="ggn", **options)
    return of_trace(straight), {n: d.tolist() for n, d in diagonal.items()}


def dark_and_curved(shard: Shard) -> Any:
    """Which one process estimates by products."""
    data = darkened(shard(dense()), but=shard.rank == len(shard.sizes) - 1)
    trace = sf.trace(by_layer(Dark(True)), data, distributed=True)
    return {n: (trace[n], d.stderr) for n, d in trace.details.items()}


def monitored(shard: Shard) -> Any:
    model = shard.model(straight)
    options: dict[str, Any] = {"measures": ["hessian_trace"], "distributed": shard.several}
    monitor = sf.Monitor(model, shard(straight()), budget=None, **options)
    records = [monitor.epoch(), monitor.epoch()]
    return [record and (record.epoch, record.values, record.failed) for record in records]


SAME: dict[str, Callable[[Shard], Any]] = {
    each.__name__: each
    for each in (exact, drawn, forms, losses, late, lengths, otherwise, chosen, dark, monitored)
}
JOBS = {2: list(SAME), 4: ["exact", "losses", "late", "lengths", "otherwise", "dark"]}


# Of several ranks alone.


def default(shard: Shard) -> Any:
    """What is measured unless something is asked for, and why some of it is not."""
    report = sf.measure(by_layer(straight()), shard(straight()), distributed=True)
    source = report.provenance
    return of_report(report), dict(report.skipped), (source.samples, source.ranks)


def short_of_memory(shard: Shard) -> Any:
    """One rank takes half as many samples at a time, because memory runs out once."""
    measure, failed = ExactPass.measure, list[int]()

    def once(self: ExactPass, chunk: Any) -> Any:
        found = measure(self, chunk)
        if dist.get_rank() == 1 and not failed and chunk.batch.size > 1:
            failed.append(1)
            raise torch.OutOfMemoryError("out of memory")
        return found

    with mock.patch.object(ExactPass, "measure", once):
        return dict(sf.trace(by_layer(straight()), shard(straight()), distributed=True)), failed


def left_as_found(shard: Shard) -> Any:
    model = by_layer(dense())
    x, y = samples(model)
    nn.functional.cross_entropy(model(x), y).backward()
    before = as_found(model)
    sf.trace(model, shard(dense()), distributed=True)
    after = sf.trace(model, (x, y))  # by the same passes
    return before == as_found(model), dict(after)


def gathered(shard: Shard) -> Any:
    """As long as a model is whole, nothing is asked for."""
    model = by_layer(dense())
    with sf.gathered(model), mock.patch.object(Ranks, "told", side_effect=AssertionError):
        return dict(sf.trace(model, shard(dense()), curvature="ggn", distributed=True))


def without_places(shard: Shard) -> Any:
    with mock.patch.object(Risk, "offset", 0):
        model = by_layer(attending())
        options: dict[str, Any] = {"estimator": sf.PropagatedCurvature(5, seed=1)}
        return dict(sf.trace(model, shard(attending()), distributed=True, **options))


def moved_for_all(shard: Shard) -> Any:
    """Negative control: where one rank looks at derivatives, it moves the weights of all."""
    with mock.patch("saltflat.curvature.derivative.on_request", return_value=False):
        return lengths(shard)


def without_meeting(shard: Shard) -> Any:
    """Ranks that do not wait for each other gather more, and find the same."""
    told, counts = Ranks.told, list[int]()

    def counted(self: Ranks, number: int) -> list[int]:
        numbers = told(self, number)
        counts[-1] += len({each for each in numbers if each >= 0})
        return numbers

    def run() -> Any:
        counts.append(0)
        trace = sf.trace(by_layer(straight()), batches_of(straight(), [3] * 8), distributed=True)
        return of_trace(trace)

    with mock.patch.object(Ranks, "told", counted):
        one = run()
        with mock.patch.object(Risk, "meet", return_value=None):
            return (one, run()), counts


passes: list[int] = []  # of the model below, with their samples


class Counted(nn.Module):
    """Fails on one rank, in one of its passes."""

    def __init__(self, rank: int, when: int, error: BaseException) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(5, 4).double(), nn.Linear(4, 3).double()
        self.rank, self.when, self.error = rank, when, error
        passes.clear()

    def forward(self, x: Tensor) -> Tensor:
        passes.append(len(x))
        hidden = self.one(x).relu()
        if len(passes) == self.when and dist.get_rank() == self.rank:
            raise self.error
        answer: Tensor = self.two(hidden)
        return answer


def failing(shard: Shard, when: int = 40, error: BaseException | None = None) -> Any:
    """In the middle of a pass over many batches; the others do not finish theirs."""
    model = Counted(1, when, error or ValueError("no such pass"))
    by_layer(model)
    data = batches_of(dense(), [2] * 100)
    try:
        return dict(sf.trace(model, data, distributed=True))
    except BaseException as error:
        notes = " ".join(getattr(error, "__notes__", ()))
        sharded = all(isinstance(p, DTensor) for p in model.parameters())
        return type(error).__name__, f"{error} {notes}", len(passes), sharded


def failing_early(shard: Shard) -> Any:
    """While all look at the same samples."""
    return failing(shard, 2)


def interrupted(shard: Shard) -> Any:
    return failing(shard, error=KeyboardInterrupt("enough"))


def nan(shard: Shard) -> Any:
    data = [(x * (float("nan") if shard.rank else 1.0), y) for x, y in shard(dense())]
    return sf.trace(by_layer(dense()), data, distributed=True)


def no_data(shard: Shard) -> Any:
    """One rank fails before the model is looked at."""
    return sf.trace(by_layer(dense()), None if shard.rank else shard(dense()), distributed=True)


def unread(shard: Shard) -> Any:
    def unpack(item: Any) -> Any:
        if shard.rank:
            raise OSError("the disk is gone")
        return item

    return sf.trace(by_layer(dense()), shard(dense()), unpack=unpack, distributed=True)


def detached(shard: Shard) -> Any:
    return sf.trace(by_layer(Detached()), shard(dense()), distributed=True)


def eigenvalues(shard: Shard) -> Any:
    return sf.max_eigenvalue(by_layer(dense()), shard(dense()), distributed=True)


def no_rule(shard: Shard) -> Any:
    model = attending()
    fully_shard(model.mix.attend)
    fully_shard(model)
    return sf.trace(model, shard(attending()), curvature="ggn", distributed=True)


def coupled(shard: Shard) -> Any:
    class Company(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x - x.mean(0))

    return sf.trace(
        by_layer(nn.Sequential(Company(5, 3).double())), shard(dense()), distributed=True
    )


def other_seed(shard: Shard) -> Any:
    return sf.trace(by_layer(dense()), shard(dense()), seed=shard.rank or 0, distributed=True)


def other_weights(shard: Shard) -> Any:
    """Of a part that every process has for itself."""
    model: Any = dense()
    with torch.no_grad():
        model[0].weight.add_(shard.rank or 0)
    return sf.trace(partly(model), shard(dense()), distributed=True)


def other_copies(shard: Shard) -> Any:
    """Of a model that is sharded in two copies."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("copies", "parts"))
    model: Any = dense()
    with torch.no_grad():
        model[0].weight.add_(dist.get_rank() // (world // 2))
    fully_shard(model, mesh=mesh)
    return sf.trace(model, shard(dense()), distributed=True)


def probed(shard: Shard) -> Any:
    curved = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    return sf.trace(by_layer(curved), shard(dense()), certify="probe", distributed=True)


def afterwards(shard: Shard) -> Any:
    return dict(sf.trace(by_layer(straight()), shard(straight()), distributed=True))


def waiting(shard: Shard) -> Any:
    """While it gathers for the others."""
    model = by_layer(straight())
    call = lambda late: sf.trace(model, late, distributed=True)  # noqa: E731
    found = stopped_waiting(call, shard(straight()))
    return *found, all(isinstance(p, DTensor) for p in model.parameters())


def as_gathered(shard: Shard) -> Any:
    """Models of which something is whole, or in larger parts, are so again, also after errors."""

    def in_part(model: nn.Module) -> nn.Module:
        for layer in (*model.children(), model):
            if any(True for _ in layer.parameters()):
                fully_shard(layer, reshard_after_forward=2 if dist.get_world_size() == 4 else False)
        return model

    found = []
    for spread in (by_layer, as_one, in_part):
        model: Any = spread(dense())
        x, y = samples(model)
        with torch.no_grad():
            model(x)  # FSDP2 leaves parts of it gathered
            if spread is by_layer:
                model[0].unshard()
                model[0].weight.add_(1.0)  # which the shards do not know
        before = held_values(model)
        trace = sf.trace(model, shard(dense()), curvature="ggn", distributed=True)
        same = [before == held_values(model)]
        sf.trace(model, (x, y), curvature="ggn")  # by the same passes
        same.append(before == held_values(model))
        try:
            sf.trace(model, shard(dense()), nn.L1Loss(), distributed=True)
        except sf.SaltflatError:
            same.append(before == held_values(model))
        kinds = {type(p).__name__ for p in model.parameters()}
        again = nn.functional.cross_entropy(model(x), y)
        again.backward()
        found.append((same, kinds, dict(trace), float(again)))
    return found


def held_values(model: nn.Module) -> list[Any]:
    """What a process has of every parameter, in which form."""
    return [
        (
            id(p),
            type(p).__name__,
            p._version,
            (p.to_local() if isinstance(p, DTensor) else p).tolist(),
        )
        for p in model.parameters()
    ]


def small(shard: Shard) -> Any:
    """Blocks with so few entries that one process writes them out."""
    trace = sf.trace(by_layer(bent()), shard(dense()), distributed=True)
    report = sf.measure(by_layer(bent()), shard(dense()), standing=False, distributed=True)
    whole = report["hessian_trace"]
    return {n: (trace[n], d.stderr, d.rule) for n, d in trace.details.items()} | {
        "": (whole.value, whole.stderr, "propagated")
    }


def bent() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh()).double()


OTHERS: dict[str, Callable[[Shard], Any]] = {
    each.__name__: each
    for each in (
        waiting,
        as_gathered,
        small,
        dark_and_curved,
        default,
        short_of_memory,
        left_as_found,
        gathered,
        without_places,
        moved_for_all,
        without_meeting,
        failing,
        failing_early,
        interrupted,
        nan,
        no_data,
        unread,
        detached,
        eigenvalues,
        no_rule,
        coupled,
        other_seed,
        other_weights,
        other_copies,
        probed,
        afterwards,
    )
}


def of_a_part(shard: Shard) -> Any:
    """Sharded over two of four ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("others", "parts"))["parts"]
    model = dense()
    fully_shard(model, mesh=mesh)
    return sf.trace(model, shard(dense()), distributed=True)


OF_FOUR = of_a_part, other_copies, as_gathered, dark_and_curved


def killed(shard: Shard) -> Any:
    """The last rank is killed in the middle of a pass."""

    def unpack(item: Any) -> Any:
        if shard.rank == dist.get_world_size() - 1 and len(item[0]) > 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return item

    data = [*shard(dense()), *batches_of(dense(), [5])]
    return sf.trace(by_layer(dense()), data, unpack=unpack, distributed=True)


def killed_in_forward(shard: Shard) -> Any:
    data = [*shard(dense()), *batches_of(dense(), [2] * 20)]
    return dict(sf.trace(by_layer(Killed()), data, distributed=True))


class Killed(nn.Module):
    """The last rank is killed between two of its layers, while the others wait for weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(5, 4).double(), nn.Linear(4, 3).double()
        passes.clear()

    def forward(self, x: Tensor) -> Tensor:
        passes.append(len(x))
        hidden = self.one(x).relu()
        if len(passes) == 20 and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        answer: Tensor = self.two(hidden)
        return answer


def work(rank: int, world: int, folder: str) -> None:
    """All jobs of a rank."""
    meet(rank, world, folder)
    shard, attempt = Shard(world, rank), Attempts(f"{folder}/{rank}.pt")
    for name in JOBS[world]:
        attempt(name, lambda name=name: SAME[name](shard))  # type: ignore[misc]
    jobs: dict[str, Callable[[Shard], Any]] = (
        OTHERS if world == 2 else {each.__name__: each for each in OF_FOUR}
    )
    for name, job in jobs.items():
        attempt(name, lambda job=job: job(shard))  # type: ignore[misc]
    attempt("killed", lambda: (killed if world == 2 else killed_in_forward)(shard))
    sys.stdout.flush()
    os._exit(0)  # a group with a dead rank cannot be taken down
