"""Models whose forward pass leaves something behind, or that keep their state in unusual ways."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, weight_norm


class Explosion(RuntimeError):
    pass


class Fuse:
    """Passes `steps` calls, then explodes."""

    def __init__(self, steps: int, kind: type[BaseException] = Explosion) -> None:
        self.left, self.kind = steps, kind

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.left -= 1
        if self.left < 0:
            raise self.kind

    def __deepcopy__(self, memo: Any) -> Fuse:
        return self  # one fuse for all copies of a model


class Fused(nn.Module):
    """A model that may fail after its forward pass has done its work."""

    def __init__(self, model: nn.Module, burn: Callable[[], None]) -> None:
        super().__init__()
        self.model, self.burn = model, burn

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.model(x)
        self.burn()
        return out


class NormLoss(nn.Module):
    """A loss whose BatchNorm would move its statistics if it were in training mode."""

    def __init__(self, burn: Callable[[], None]) -> None:
        super().__init__()
        self.norm, self.burn = nn.BatchNorm1d(3, affine=False), burn
        self.seen: list[Any] = []

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.seen.append(len(outputs))
        self.burn()
        return F.cross_entropy(self.norm(outputs), targets)


class Net(nn.Module):
    """4 → 5 → 3, the base of most others."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 5), nn.Linear(5, 3)

    def hidden(self, x: Tensor) -> Tensor:
        return self.fc1(x).relu()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.hidden(x))
        return out


class Average(Net):
    """A slow copy of the first layer that every pass moves (MoCo, BYOL)."""

    def __init__(self, momentum: float) -> None:
        super().__init__()
        self.momentum, self.slow = momentum, nn.Linear(4, 5).requires_grad_(False)

    def hidden(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            pairs = zip(self.slow.parameters(), self.fc1.parameters(), strict=True)
            for slow, fast in pairs:
                slow.mul_(self.momentum).add_(fast, alpha=1 - self.momentum)
        return (self.fc1(x) + self.slow(x)).relu()


class AverageBuffer(Net):
    """The same in a buffer that is bound anew."""

    def __init__(self, momentum: float) -> None:
        super().__init__()
        self.momentum = momentum
        self.centre: Tensor
        self.register_buffer("centre", torch.zeros(5))

    def hidden(self, x: Tensor) -> Tensor:
        h = self.fc1(x)
        fresh = 1 - self.momentum
        self.centre = self.momentum * self.centre + fresh * h.detach().mean(0)
        return (h - self.centre).relu()


class Annealed(Net):
    """A temperature that a Python counter lowers a little with every pass."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.passes, self.rate = 0, rate

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return super().forward(x) * (1 + self.rate * self.passes)


class Clipped(Net):
    """Weights are clipped where they are, in every pass, behind autograd's back."""

    def forward(self, x: Tensor) -> Tensor:
        self.fc1.weight.data.clamp_(-0.2, 0.2)
        return super().forward(x)


class Renormed(nn.Module):
    """`max_norm` as an option of the function: rewrites the rows that are looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.fc = nn.Parameter(3 * torch.randn(7, 4)), nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.fc(F.embedding(tokens, self.table, max_norm=1.0).sum(1))
        return out


class Rebound(Net):
    """Gives a parameter other memory in every pass."""

    def forward(self, x: Tensor) -> Tensor:
        self.fc1.weight.data = self.fc1.weight.data.clamp(-0.2, 0.2)
        return super().forward(x)


class Diary(Net):
    """Counters, caches and containers of all kinds that forward writes into."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.cache, self.last = 0, None, "never"
        self.tensor, self.view = torch.zeros(1), torch.arange(6.0).reshape(2, 3).T
        self.history: list[Any] = [1]
        self.table: dict[Any, Any] = {"n": 0, "inner": [], "tensor": torch.zeros(2)}
        self.seen, self.recent = {0}, deque([1, 2], maxlen=2)
        self.sums: Any = defaultdict(int)
        self.pair = ([0], torch.zeros(()))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("unknown", torch.full((2,), torch.nan))

    def forward(self, x: Tensor) -> Tensor:
        self.count, self.cache, self.last, self.new = self.count + 1, x, "now", x
        self.tensor += 1
        self.view[1, 1] = -1.0
        self.history.append(x)
        self.table["n"] += 1
        self.table["inner"].append(x)
        self.table["tensor"].data.add_(1)
        self.seen.add(len(self.seen))
        self.recent.append(self.count)
        self.sums["passes"] += 1
        self.pair[0].append(x)
        self.pair[1].add_(1)
        self.calls += 1
        self.register_forward_hook(lambda *_: None)
        return super().forward(x)


class Sparse(Net):
    """A sparse buffer, as the adjacency of a graph, with a value that changes."""

    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        self.register_buffer("mix", torch.eye(4).to_sparse(layout=layout))
        self.register_buffer("log", torch.eye(2).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        self.log._values().add_(1)
        return super().forward((self.mix @ x.T).T)


class ScriptedPart(nn.Module):
    """With modes, statistics, a random layer, a counter and a plain tensor."""

    def __init__(self, smooth: bool = False) -> None:
        super().__init__()
        self.fc, self.norm, self.drop = nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Dropout(0.5)
        self.count, self.total, self.smooth = 0, torch.zeros(1), smooth

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.total += 1
        h = self.norm(self.fc(x))
        return self.drop(torch.tanh(h) if self.smooth else torch.relu(h))


def scripted(make: Callable[[nn.Module], nn.Module], smooth: bool = False) -> nn.Sequential:
    """An ordinary model around a part that `make` makes from an ordinary module."""
    part = ScriptedPart(smooth).double()
    part(torch.randn(30, 5, dtype=torch.float64))
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), make(part), nn.Linear(5, 3))


def traced(part: nn.Module) -> nn.Module:
    made: nn.Module = torch.jit.trace(part.eval(), torch.randn(2, 5, dtype=torch.float64))
    return made


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 3))
    model[2].weight = model[0].weight
    return model


def half_frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 3))
    model[0].weight.requires_grad_(False)
    model[1].bias.requires_grad_(False)
    return model


def pruned() -> nn.Module:
    model = Net()
    prune.l1_unstructured(model.fc1, "weight", amount=0.5)
    return model


def old_weight_norm() -> nn.Module:
    model = Net()
    weight_norm(model.fc1)
    return model


def parametrized() -> nn.Module:
    model = Net()
    parametrizations.spectral_norm(model.fc1)
    parametrizations.orthogonal(model.fc2)
    return model


def renormed_layer() -> nn.Module:
    return nn.Sequential(nn.Embedding(7, 4, max_norm=0.1), nn.Flatten(), nn.Linear(8, 3))


_MODELS: dict[str, Callable[[], nn.Module]] = {
    "script": lambda: scripted(torch.jit.script),
    "trace of a part": lambda: scripted(traced),
    "fast average": lambda: Average(0.9),
    "slow average": lambda: Average(0.9999),
    "slow average in a buffer": lambda: AverageBuffer(0.9999),
    "clipped": Clipped,
    "rebound": Rebound,
    "max_norm": Renormed,
    "max_norm of a layer": renormed_layer,
    "diary": Diary,
    "sparse": lambda: Sparse(torch.sparse_coo),
    "half frozen": half_frozen,
    "tied": tied,
    "pruned": pruned,
    "old weight norm": old_weight_norm,
    "parametrized": parametrized,
}


def _double(make: Callable[[], nn.Module]) -> nn.Module:
    return make().double()


MODELS: dict[str, Callable[[], nn.Module]] = {
    name: partial(_double, make) for name, make in _MODELS.items()
}


def data_for(name: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(3, (6,), generator=generator)
    if name.startswith("max_norm"):
        return torch.randint(7, (6, 2), generator=generator), targets
    return torch.randn(6, 4, generator=generator, dtype=torch.float64), targets
