"""What ranks do in the tests of tensor-parallel models.

Every job is a function of whether there are several ranks: then the model is spread over them. The
same job in one process, with the whole model, is what it is compared with.
"""

from __future__ import annotations

import gc
import os
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import Attempts, meet
from test_sharded import FORMS, Checkpointed, dense, refused, samples, straight
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import saltflat as sf
from saltflat.errors import SaltflatError
from saltflat.risk import Risk
from saltflat.vectors import total_norm

Data = tuple[Tensor, Tensor]


class Attention(nn.Module):
    """Heads of two entries, as many as the weights that it is given have."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
        self.o = nn.Linear(8, 8)

    def heads(self, h: Tensor) -> Tensor:
        return h.view(*h.shape[:2], -1, 2).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.heads(layer(x)) for layer in (self.q, self.k, self.v))
        mixed = (q @ k.transpose(2, 3)).softmax(-1) @ v
        answer: Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return answer


class Counting(Attention):
    """So many heads as a process has; with other weights they are larger."""

    count = 4

    def heads(self, h: Tensor) -> Tensor:
        return h.view(*h.shape[:2], self.count, -1).transpose(1, 2)


class Transformer(nn.Module):
    def __init__(self, attention: type[Attention] = Attention) -> None:
        super().__init__()
        self.embed, self.norm, self.attend = nn.Embedding(11, 8), nn.LayerNorm(8), attention()
        self.last, self.out = nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        h = h + self.attend(self.norm(h))
        answer: Tensor = self.out(self.last(h)).mean(1)
        return answer


def transformer(attention: type[Attention] = Attention) -> Transformer:
    torch.manual_seed(7)
    return Transformer(attention).double()


TRANSFORMER = {
    "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "attend": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
    "attend.[qkv]": ColwiseParallel(),
    "attend.o": RowwiseParallel(output_layouts=Shard(1)),
    "last": SequenceParallel(),
    "out": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}


FAILING = {
    "0.one": ColwiseParallel(output_layouts=Replicate()),
    "0.two": RowwiseParallel(input_layouts=Replicate()),
}


class Tied(nn.Module):
    """One weight, in two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.hidden = nn.Embedding(6, 4), nn.Linear(4, 4)
        self.out = nn.Linear(4, 6, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.out(self.hidden(self.embed(x).mean(1)).tanh())
        return answer


def tied() -> Tied:
    torch.manual_seed(9)
    return Tied().double()


class Scaled(nn.Module):
    """With a buffer, and a way of its own into the layouts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 7))
        self.register_buffer("scale", torch.linspace(1.0, 2.0, 7))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight * self.scale).relu()


def scaled() -> nn.Sequential:
    torch.manual_seed(10)
    return nn.Sequential(nn.Linear(5, 7), Scaled(), nn.Linear(7, 3)).double()


def spread(model: Any, mesh: DeviceMesh | None = None) -> Any:
    """Tensor parallel, over all ranks or those of a mesh."""
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    if isinstance(model, Transformer):
        if isinstance(model.attend, Counting):
            model.attend.count //= mesh.size()
        return parallelize_module(model, mesh, TRANSFORMER)
    if isinstance(model, Tied):
        plan = {
            "embed": RowwiseParallel(input_layouts=Replicate()),
            "out": ColwiseParallel(output_layouts=Replicate()),
        }
        parallelize_module(model, mesh, plan)
        model.out.weight = model.embed.weight
        return model
    if isinstance(model[0], Failing):
        return parallelize_module(model, mesh, FAILING)
    if isinstance(model[1], Scaled):
        distribute_module(
            model[1],
            mesh,
            None,
            lambda _, x, mesh: DTensor.from_local(x[0], mesh, [Replicate()]),
            lambda _, y, mesh: y.to_local(),
        )
    weighty = [name for name, m in model.named_children() if isinstance(m, nn.Linear)]
    first, second = ColwiseParallel(output_layouts=Replicate()), RowwiseParallel
    plan = {weighty[0]: first, weighty[1]: second(input_layouts=Replicate())}
    return parallelize_module(model, mesh, plan)


def both_ways(model: Any) -> Any:
    """Copies of a tensor-parallel model, each in parts."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    spread(model, mesh["tp"])
    for layer in model.children():  # those that share a weight must be gathered together
        if any(True for _ in layer.parameters()) and not isinstance(model, Tied):
            fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


def data_of(model: nn.Module) -> Data:
    g = torch.Generator().manual_seed(3)
    if isinstance(model, Transformer | Tied):
        return torch.randint(0, 6, (6, 4), generator=g), torch.arange(6) % 3
    return samples(dense())


MODELS: dict[str, Callable[[], Any]] = {
    each.__name__: each for each in (straight, dense, transformer, tied, scaled)
}
DRAWN = sf.PropagatedCurvature(4, seed=1)
MEASURES = ["hessian_trace", "minimum_sharpness", "relative_flatness", "sam_sharpness"]


def quantities(model: Any, data: Data, **options: Any) -> dict[str, Any]:
    trace = sf.trace(model, data, estimator=DRAWN, **options)
    ggn = sf.diagonal(model, data, curvature="ggn", **options)
    return {
        "trace": (dict(trace), trace.stderr, trace.exact),
        "ggn": {name: value.flatten().tolist() for name, value in ggn.items()},
    }


def whole(
    several: bool, how: Callable[[Any], Any] = spread, names: Iterable[str] = tuple(MODELS)
) -> Any:
    """All measures of models that are gathered; frozen parameters stay so."""
    found = {}
    for name in names:
        model, data = MODELS[name](), data_of(MODELS[name]())
        next(model.parameters()).requires_grad_(False)
        called = how(model) if several else model
        with sf.gathered(called, data[0]):
            report = sf.measure(called, data, measures=MEASURES, standing=False)
            found[name] = (
                quantities(called, data),
                {n: report[n].value for n in report},
                dict(report.skipped),
                report.provenance.model_hash,
                [(n, type(p).__name__, p.requires_grad) for n, p in called.named_parameters()],
                [type(b).__name__ for b in called.buffers()],
            )
    return found


def rows_of(rank: int, world: int) -> slice:
    """Samples of a rank's own, not as many on each, and none on one of four."""
    ends = {2: (0, 2, 6), 4: (0, 1, 1, 4, 6)}[world]
    return slice(ends[rank], ends[rank + 1])


def by_layer(
    several: bool,
    how: Callable[[Any], Any] = spread,
    names: Iterable[str] = ("transformer", "scaled"),
) -> Any:
    """Without gathering the model: of the same samples, and of every rank's own."""
    found = {}
    for name in names:
        model, (x, y) = MODELS[name](), tuple(t[:6] for t in data_of(MODELS[name]()))
        next(model.parameters()).requires_grad_(False)
        model = how(model) if several else model
        batches = [(x, y), (x[:3], y[:3])]
        report = sf.measure(model, batches, measures=["hessian_trace", *FORMS], standing=False)
        values = {n: (m.value, m.stderr, m.by_layer) for n, m in report.items()}
        source = values, dict(report.skipped), report.provenance.model_hash
        rows = rows_of(dist.get_rank(), dist.get_world_size()) if several else slice(None)
        options: dict[str, Any] = {"estimator": DRAWN, "parameters": "all"}
        own = sf.trace(model, (x[rows], y[rows]), distributed=several, **options)
        found[name] = quantities(model, batches), source, (dict(own), own.stderr)
    return found


def monitored(several: bool) -> Any:
    model, data = transformer(), data_of(transformer())
    model = spread(model) if several else model
    monitor = sf.Monitor(model, data, measures=["hessian_trace"], budget=None)
    records = [monitor.epoch(), monitor.epoch()]
    return [record and (record.epoch, record.values, record.failed) for record in records]


def spectra(several: bool) -> Any:
    """Products with the Hessian, rescalings, and copies."""
    model, data = straight(), data_of(straight())
    with sf.gathered(spread(model) if several else model, data[0]):
        audit = sf.audit(model, data, measures=["minimum_sharpness"])
        return (
            sf.max_eigenvalue(model, data).value,
            len(sf.symmetries(model, data[0])),
            {kind: cell.verdict for kind, cell in audit["minimum_sharpness"].items()},
        )


def own_samples(several: bool) -> Any:
    """Samples of every rank's own, not as many on each."""
    model, (x, y) = transformer(), data_of(transformer())
    rows = rows_of(dist.get_rank(), 2) if several else slice(0, 6)
    with sf.gathered(spread(model) if several else model, x):
        return quantities(model, (x[rows], y[rows]), distributed=several)


def with_hooks(several: bool) -> Any:
    """Hooks of the user's own see whole weights, before torch's and after them."""
    model, data = dense(), data_of(dense())
    seen: list[tuple[int, ...]] = []

    def double(module: Any, inputs: Any, outputs: Any) -> Any:
        seen.append(tuple(module.weight.shape))
        return 2 * outputs

    model[2].register_forward_hook(lambda *_: None)
    if several:
        spread(model)
    model[2].register_forward_hook(double)
    layers = quantities(model, data), set(seen[-3:])
    with sf.gathered(model, data[0]):
        return layers, quantities(model, data), set(seen[-3:])


def in_inference_mode(several: bool) -> Any:
    model, data = dense(), data_of(dense())
    model = spread(model) if several else model
    with torch.inference_mode():
        layers = quantities(model, data)
        with sf.gathered(model, data[0]):
            return layers, quantities(model, data)


class Giving(nn.Module):
    """Another module gives it a weight to compute with: all of it, and a part."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(5, 7), Given()

    def forward(self, x: Tensor) -> Tensor:
        whole, part = self.scale()
        answer: Tensor = self.layer(x) * whole * part
        return answer


class Given(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 7), requires_grad=False)

    def forward(self) -> tuple[Tensor, Tensor]:
        return self.weight, self.weight[1:2]


def given(several: bool) -> Any:
    """Weights that modules return are there after these have run."""
    torch.manual_seed(12)
    model, data = nn.Sequential(Giving(), nn.ReLU(), nn.Linear(7, 3)).double(), data_of(dense())
    if several:
        into_layouts(model[0])
    return quantities(model, data)


SAME: dict[str, Callable[[bool], Any]] = {
    each.__name__: each
    for each in (
        by_layer,
        monitored,
        whole,
        spectra,
        own_samples,
        with_hooks,
        in_inference_mode,
        given,
    )
}


# Of several ranks alone.


def state(model: Any) -> list[Any]:
    """What must be as it was: identities, values and hooks in their order."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    held = [(n, t, t.grad) for n, t in tensors]
    return [
        [(n, id(t), t._version, t.requires_grad, id(grad)) for n, t, grad in held],
        [[values(t), values(grad)] for _, t, grad in held],
        [[*m._forward_pre_hooks.items(), *m._forward_hooks.items()] for m in model.modules()],
        [m.training for m in model.modules()],
        torch.get_rng_state().tolist(),
    ]


def values(tensor: Any) -> Any:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local if local is None else local.tolist()


def prepare(model: Any) -> None:
    """Hooks after torch's own; and FSDP2 is asked for shards, which it else finds when it runs."""
    for module in model.modules():
        module.register_forward_pre_hook(lambda *_: None)
        module.register_forward_hook(lambda *_: None)
        getattr(module, "reshard", int)()


def left_as_found(_: bool, how: Callable[[Any], Any] = spread) -> Any:
    """Also by errors within, and by a model that is refused."""
    found = []
    for make in (scaled, tied, lambda: transformer(Counting)):
        model, (x, y) = how(make()), data_of(make())
        F.cross_entropy(model(x), y).backward()
        prepare(model)
        before, known = state(model), {id(p) for p in model.parameters()}
        try:
            with sf.gathered(model, x):
                sf.trace(model, (x, y), curvature="ggn")
                plain = not any(isinstance(p, DTensor) for p in model.parameters())
                with torch.no_grad():
                    for p in model.parameters():
                        if id(p) not in known:
                            p.add_(1.0)  # forgotten
                raise KeyError("within")
        except (KeyError, SaltflatError) as error:
            found.append((type(error).__name__, plain, before == state(model)))
        plain = False
    return found


class Failing(nn.Module):
    """Fails on the last rank, within a layer that is tensor parallel."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(5, 4).double(), nn.Linear(4, 3).double()
        self.two.register_forward_pre_hook(fail)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.two(self.one(x).relu())
        return answer


def fail(*_: Any) -> None:
    """After the passes in which all ranks compare it with the plain model."""
    runs.append(1)
    if len(runs) == 7 and dist.get_rank() == dist.get_world_size() - 1:
        raise ValueError("no such pass")


runs: list[int] = []


def layers_as_found(_: bool, how: Callable[[Any], Any] = spread) -> Any:
    """By measurements layer by layer, by errors of one rank, and by what is refused."""
    found: list[Any] = []
    models = (scaled, lambda: transformer(Counting), failing)
    both = (False, True) if how is spread else (True,)
    for make, own in ((make, own) for make in models for own in both):
        runs.clear()
        model, (x, y) = how(make()), data_of(make())
        F.cross_entropy(model(x), y).backward()
        prepare(model)
        before = state(model)
        if make is failing and not own:
            continue  # the others would wait until the process ends
        try:
            sf.trace(model, [(x, y)] * 3, curvature="ggn", distributed=own)
            said = "served"
        except SaltflatError as error:
            said = f"{type(error).__name__}: {error} {getattr(error, '__notes__', '')}"
        found.append((said, before == state(model)))
    return found


def failing() -> nn.Module:
    return nn.Sequential(Failing(), nn.Tanh(), nn.Linear(3, 3)).double()


def held_by_graphs(_: bool) -> Any:
    """What is kept of every weight amid a pass, after one that failed, and after one that did not,
    with its graph alive; and a slope."""
    model, data = spread(dense()), data_of(dense())
    risk, amid = Risk(model, data), list[set[str]]()
    model[2].register_forward_hook(lambda *_: amid.append(kept(risk)))
    with risk.session():
        batch = next(risk.batches())
        within = model[2].register_forward_pre_hook(lambda *_: [][0])
        refused(lambda: risk.forward(batch))
        after = [kept(risk)]
        within.remove()
        outputs = risk.forward(batch)
        after.append(kept(risk))
        (slope,) = torch.autograd.grad(outputs.sum(), [risk.leaves["2.weight"]])
    plain = dense()
    (expected,) = torch.autograd.grad(plain(data[0]).sum(), [plain[2].weight])
    return amid[-1], after, float((slope - expected).abs().max()), float(slope.abs().max())


def kept(risk: Risk) -> set[str]:
    return {name for name, leaf in risk.leaves.items() if leaf.untyped_storage().size()}


def let_go(_: bool) -> bool:
    """Nothing of a measurement holds the model afterwards."""
    model, data = spread(dense()), data_of(dense())
    sf.trace(model, data, curvature="ggn")
    alive = weakref.ref(model[0])
    del model
    gc.collect()
    return alive() is None


def amid_a_pass(_: bool) -> Any:
    """A graph that was there before has what it has saved, also of a shard as a plain tensor."""
    model, data = spread(dense()), data_of(dense())
    shard = model[2].weight.to_local()
    loss = shard.pow(2).sum() + F.cross_entropy(model(data[0]), data[1])
    with sf.gathered(model, data[0]):
        pass
    sf.trace(model, data, curvature="ggn")
    loss.backward()
    return values(model[2].weight.grad)


def by_itself(_: bool) -> Any:
    """One rank measures, and the other does not."""
    model, data = spread(dense()), data_of(dense())
    with sf.gathered(model, data[0]):
        return dict(sf.trace(model, data, curvature="ggn")) if dist.get_rank() == 0 else None


def checkpointed() -> nn.Module:
    return Checkpointed(spread(dense()))


class Borrowing(nn.Module):
    """Computes with the weights of another module, which does not run."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.inner = nn.Linear(5, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.inner.weight, self.inner.bias)


def into_layouts(module: nn.Module) -> nn.Module:
    """With copies of its weights; inputs and outputs are plain."""
    return distribute_module(
        module,
        init_device_mesh("cpu", (dist.get_world_size(),)),
        None,
        lambda _, x, mesh: DTensor.from_local(x[0], mesh, [Replicate()]),
        lambda _, y, mesh: y.to_local(),
    )


class Reading(nn.Module):
    """Computes with a number that it has of another module's weight."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.others = [other]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.others[0].weight.detach().pow(2).sum().item()


def reading(several: bool = True) -> nn.Module:
    model = spread(dense()) if several else dense()
    return nn.Sequential(model, Reading(model[2]))


def unlike(rank: int) -> Any:
    """The last layer, of which every process has a copy, is not the same in all of them."""
    model = spread(dense())
    with torch.no_grad():
        model[4].weight[0].mul_(1 + rank)
    return model


class Factor(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.register_buffer("factor", torch.tensor(factor))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def blank(tokens: Tensor) -> Tensor:
    """Samples that begin with some on which heads of any width give the same."""
    return torch.cat([torch.zeros_like(tokens[:2]), tokens[2:]])


class Zero(Counting):
    """What the heads give is multiplied by zeros, as often before the first step."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.o.weight)


class Local(Attention):
    """Made for half of the entries alone."""

    def heads(self, h: Tensor) -> Tensor:
        return h.view(*h.shape[:2], 2, 2).transpose(1, 2)


def part(model: Any) -> Any:
    """Every process returns its part of the outputs."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(model, mesh, {"2": ColwiseParallel()})


def even() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 4)).double()


def norms_apart(rank: int) -> Any:
    """Copies of a weight that are not the same in all processes."""
    model = transformer()
    with torch.no_grad():
        model.norm.weight.add_(rank)
    return spread(model)


def refusals(_: bool) -> dict[str, str]:
    rank, (tokens, _) = dist.get_rank(), data_of(transformer())
    x, y = data_of(dense())

    def entered(model: Any, *example: Any, **options: Any) -> Any:
        with sf.gathered(model, *example, **options):
            return True

    def late(model: Any) -> Any:
        """One process alone cannot run it, after two passes as it is."""
        passes = [None] * (2 if rank else 100)
        model[1].register_forward_pre_hook(lambda *_: passes.pop())
        return model

    calls = {
        "heads": lambda: entered(spread(transformer(Counting)), tokens),
        "heads, hidden": lambda: entered(spread(transformer(Zero)), tokens),
        "local": lambda: entered(spread(transformer(Local)), tokens),
        "part": lambda: entered(part(even()), x),
        "copies": lambda: entered(norms_apart(rank), tokens),
        "one fails": lambda: entered(late(spread(dense())), x),
        "no example": lambda: entered(spread(dense())),
        "other example": lambda: entered(spread(dense()), x + rank),
        "half": lambda: entered(spread(dense().bfloat16()), x.bfloat16()),
        "until": lambda: entered(spread(dense()), x, until_backward=True),
        "heads, layers": lambda: sf.trace(spread(transformer(Counting)), (tokens, y[:6])),
        "heads, ranks": lambda: sf.trace(
            spread(transformer(Zero)), (tokens[rank:], y[rank:6]), distributed=True
        ),
        "part, layers": lambda: sf.trace(part(even()), (x, y)),
        "heads, blank": lambda: sf.trace(spread(transformer(Counting)), (blank(tokens), y[:6])),
        "unlike": lambda: entered(unlike(rank), x),
        "unlike, layers": lambda: sf.trace(unlike(rank), (x, y)),
        "buffers": lambda: sf.trace(
            nn.Sequential(spread(dense()), Factor(1.0 + rank)).double(), (x, y)
        ),
        "buffers, fully_shard": lambda: sf.trace(
            fully_shard(nn.Sequential(dense(), Factor(1.0 + rank)).double()), (x, y)
        ),
        "read": lambda: sf.trace(reading(), (x, y), curvature="ggn"),
        "borrowed": lambda: sf.trace(into_layouts(Borrowing()), (x, y)),
        "other samples": lambda: sf.trace(spread(dense()), (x + rank, y)),
        "tied": lambda: sf.trace(spread(tied()), (tokens, y[:6])),
        "eigenvalues": lambda: sf.max_eigenvalue(spread(dense()), (x, y)),
        "audit": lambda: sf.audit(spread(dense()), (x, y), measures=["hessian_trace"]),
        "dtype": lambda: sf.trace(spread(dense()), (x, y), dtype=torch.float32),
        "inputs": lambda: sf.trace(spread(dense()), (x.long(), y)),
        "checkpoint": lambda: sf.trace(checkpointed(), (x, y)),
    }
    said = {name: refused(call, SaltflatError) for name, call in calls.items()}
    said["borrowed, gathered"] = str(entered(into_layouts(Borrowing()), x))
    said["afterwards"] = str(entered(spread(transformer()), tokens))
    return said


OTHERS: dict[str, Callable[[bool], Any]] = {
    each.__name__: each
    for each in (
        left_as_found,
        layers_as_found,
        held_by_graphs,
        amid_a_pass,
        let_go,
        by_itself,
        refusals,
    )
}


# Of four ranks: over pairs, and in two copies of these.


def two_ways(several: bool) -> Any:
    return whole(several, both_ways, ["transformer", "tied"])


def two_ways_by_layer(several: bool) -> Any:
    return by_layer(several, both_ways, ["dense"])


def two_ways_layers_as_found(_: bool) -> Any:
    return layers_as_found(_, both_ways)


def two_ways_as_found(_: bool) -> Any:
    return left_as_found(_, both_ways)


def norm(several: bool) -> Any:
    """Of all parts, and also by the optimizer that goes by it."""
    model, (x, y) = dense(), data_of(dense())
    called = both_ways(model) if several else model
    before = float(total_norm(list(called.parameters())))
    optimizer = sf.SAM(torch.optim.SGD(called.parameters(), lr=0.3), rho=0.3)
    for _ in range(2):

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(called(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
    for module in called.modules():
        getattr(module, "reshard", int)()
    return before, [whole_values(p) for p in called.parameters()]


def whole_values(tensor: Any) -> Any:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).flatten().tolist()


OF_FOUR: dict[str, Callable[[bool], Any]] = {
    each.__name__: each for each in (two_ways, two_ways_by_layer, norm)
}


def work(rank: int, world: int, folder: str) -> None:
    """All jobs of a rank."""
    meet(rank, world, folder)
    attempt = Attempts(f"{folder}/{rank}.pt")
    found = two_ways_as_found, two_ways_layers_as_found
    four = OF_FOUR | {each.__name__: each for each in found}
    for name, job in (SAME | OTHERS if world == 2 else four).items():
        attempt(name, lambda job=job: job(True))  # type: ignore[misc]
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)
