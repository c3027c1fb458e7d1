"""Out of memory: the chunk is halved and the answer is the same."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import weakref

import pytest
import torch
from agree import agrees
from cases import BY_NAME
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import saltflat as sf
from saltflat.curvature import plan, sweep
from saltflat.curvature.contractions import Outer
from saltflat.curvature.derivative import _Question
from saltflat.curvature.rules import ConvUse

FULL = [
    lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
    lambda: RuntimeError(
        "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: "
        "you tried to allocate 32000000000000 bytes. Error code 12 (Cannot allocate memory)"
    ),
]


class Refusals:
    """Counts beside the model: what is in the model comes back as it was."""

    count = 0


class Small(nn.Module):
    """A machine on which no more than `room` samples fit at a time."""

    def __init__(self, body: nn.Module, room: int, error) -> None:
        super().__init__()
        self.body, self.room, self.error = body, room, error
        self.refused = Refusals()

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.room:
            self.refused.count += 1
            raise self.error()
        return self.body(x)


@pytest.mark.parametrize("error", FULL, ids=["cuda", "cpu"])
@pytest.mark.parametrize("room", [1, 2])
@pytest.mark.parametrize("name", ["mlp", "residual", "raw parameters", "mlp Tanh", "segmentation"])
def test_chunks_are_halved(name: str, room: int, error) -> None:
    case = BY_NAME[name]
    oracle = case.dense()
    for curvature in ("hessian", "ggn"):
        blocks = oracle.blocks(getattr(oracle, curvature))
        model = Small(case.model(), room, error)
        for measure in (sf.trace, sf.diagonal):
            few = sf.Hutchinson(probes=30)
            result = measure(model, case.data(), case.loss, curvature=curvature, estimator=few)
            agrees(result, {f"body.{n}": b for n, b in blocks.items()})
        assert model.refused.count > 0, "negative control: it did run out"


class Greedy(torch.autograd.Function):
    """Runs out in the backward pass, when too many rows arrive at once."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        if grad.numel() > 24:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return grad


class Backward(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Greedy.apply(x)


def test_out_of_memory_in_the_backward_pass() -> None:
    case = BY_NAME["mlp"]
    inner = case.model()
    model = nn.Sequential(inner[0], Backward(), inner[1], inner[2])
    result, want = sf.trace(model, case.data(n=12)), sf.trace(inner, case.data(n=12))
    assert result.exact
    assert list(result.values()) == pytest.approx(list(want.values()), rel=1e-10)


def test_what_does_not_fit_at_all_is_said_so() -> None:
    model = Small(BY_NAME["mlp"].model(), 0, FULL[0])
    with pytest.raises((torch.OutOfMemoryError, sf.SaltflatError)):
        sf.trace(model, BY_NAME["mlp"].data())


def test_other_runtime_errors_are_not_swallowed() -> None:
    model = Small(BY_NAME["mlp"].model(), 0, lambda: RuntimeError("mat1 and mat2 do not fit"))
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        sf.trace(model, BY_NAME["mlp"].data())
    assert model.refused.count <= 3  # some samples, these once more, all of them


def test_the_loader_is_left_alone() -> None:
    """Its settings stay, its own generator too, and it is not read more than a few times."""
    reads = []

    class Counted(TensorDataset):
        def __getitem__(self, index):
            reads.append(index)
            return super().__getitem__(index)

    case = BY_NAME["mlp"]
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(Counted(*case.data(n=9)), batch_size=4, shuffle=True, generator=generator)
    before, settings = torch.get_rng_state(), dict(vars(loader))
    sf.trace(Small(case.model(), 3, FULL[0]), loader)
    assert torch.equal(torch.get_rng_state(), before)
    assert vars(loader) == settings
    assert len(reads) <= 4 * 9


def test_memory_does_not_grow_with_n() -> None:
    """The largest batch that the model ever sees is set by the budget, not by the data."""
    seen = []

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.fc = nn.Conv2d(1, 4, 3), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            seen.append(len(x))
            return self.fc(self.conv(x).relu().mean((2, 3)))

    largest = []
    for n in (64, 512):
        seen.clear()
        torch.manual_seed(0)
        data = (torch.randn(n, 1, 16, 16), torch.randint(3, (n,)))
        sf.trace(Watched(), data, memory_budget=1 << 20)
        largest.append(max(seen))
    assert largest[1] <= max(largest[0], 64)
    assert largest[1] < 512


def deep(layers: int, channels: int = 16) -> nn.Sequential:
    torch.manual_seed(0)
    body = [nn.Conv2d(3, channels, 3, padding=1), nn.ReLU()]
    for _ in range(layers):
        body += [nn.Conv2d(channels, channels, 3, padding=1, bias=False)]
        body += [nn.BatchNorm2d(channels), nn.ReLU()]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


def images(n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 3, 32, 32, generator=generator)
    return x, torch.randint(10, (n,), generator=generator)


def test_the_look_lets_go_of_its_graph(monkeypatch) -> None:
    """Before the derivative is checked, and of a layer's patches before the next layer's."""
    graphs, counts = [], []
    patches: list[weakref.ref[Tensor]] = []

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = deep(2, channels=4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.body[:2](x)
            if h.requires_grad:
                graphs.append(weakref.ref(h))
            return self.body[2:](h)

    def terms(use, deltas, rows):
        counts.append(sum(ref() is not None for ref in patches))
        for name, term in whole(use, deltas, rows):
            if isinstance(term, Outer):
                patches.append(weakref.ref(term.right))
            yield name, term
            del term

    def check(*args, **kwargs) -> None:
        assert graphs, "negative control: there was a graph"
        graphs.append(sum(ref() is not None for ref in graphs))

    whole = ConvUse.terms
    monkeypatch.setattr(ConvUse, "terms", terms)
    monkeypatch.setattr(plan, "check_derivative", check)
    sf.trace(Watched(), images(24))
    assert next(count for count in graphs if isinstance(count, int)) == 0
    looked = counts[:3]
    assert max(looked) <= 1  # of the layer before


def test_a_deep_network_is_settled_by_rows(monkeypatch) -> None:
    """Rounding and steps move some of its ReLUs; float64 copies of everything are not needed."""
    sizes = []

    def gradients(question, names):
        sizes.append(question.batch.size)
        return whole(question, names)

    def disagreeing(question, names):
        raise AssertionError("all entries were moved")

    whole = _Question.gradients
    monkeypatch.setattr(_Question, "gradients", gradients)
    monkeypatch.setattr(_Question, "disagreeing", disagreeing)
    model, data = deep(12).eval(), images(8)
    sf.trace(model, data)
    sf.trace(model, data, parameters=["0.weight", "36.weight"])
    assert set(sizes) <= {2}


def test_groups_of_directions_are_even(monkeypatch) -> None:
    """9 directions where 8 fit: 5 and 4, as the largest group is what takes memory."""
    groups = []

    def sent(outputs, uses, plan, columns):
        groups.append(len(columns))
        return backward(outputs, uses, plan, columns)

    backward = sweep.backward
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 10)).double()
    data = torch.randn(4, 3).double(), torch.tensor([0, 3, 9, 3])
    want = sf.trace(model, data)
    monkeypatch.setattr(sweep, "backward", sent)
    monkeypatch.setattr(sweep.Pass, "together", lambda self, chunk: 8)
    assert dict(sf.trace(model, data)) == pytest.approx(dict(want), rel=1e-12)
    assert groups == [5, 4]


@pytest.mark.parametrize(
    ("weights", "budget"), [(0, 64), (1 << 20, 64), (45 << 20, 371), (1 << 40, 1024)]
)
def test_a_chunk_grows_with_the_root_of_the_weights(weights: int, budget: int) -> None:
    cpu = torch.device("cpu")
    assert plan.Settings().budget(cpu, weights) >> 20 == budget
    assert plan.Settings(memory_budget=7).budget(cpu, weights) == 7


_FAULTS = """
import resource, torch, saltflat as sf
from saltflat import zoo
torch.set_num_threads(1)
model, x, y = zoo.ibayashi_cnn(), torch.randn(100, 1, 28, 28), torch.arange(100) % 10
for _ in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    sf.trace(model, (x, y))
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or "LD_PRELOAD" in os.environ, reason="of glibc's allocator"
)
def test_blocks_are_kept_for_the_next_use() -> None:
    """Pages are not given back and taken again, unless the user has set the threshold."""

    def faults(**settings: str) -> int:
        done = subprocess.run(
            [sys.executable, "-c", _FAULTS],
            env=os.environ | settings,
            capture_output=True,
            check=True,
        )
        return int(done.stdout)

    given_back = faults(MALLOC_MMAP_THRESHOLD_=str(1 << 17))
    assert given_back > 5000
    assert faults() < given_back / 10
