"""Propagated curvature and activation probes: their expectation is the dense Hessian's.

Noise enters both linearly, so the expectation is the sum over the units of noise, one after the
other: no statistics are needed, and the agreement is to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from dense import Dense
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import saltflat as sf
from saltflat.curvature.activation import ProbedChunk
from saltflat.curvature.contractions import combine
from saltflat.curvature.estimators import Signs
from saltflat.curvature.propagated import Operation, curved_graph, operations, sources
from saltflat.curvature.rules import Recorder, Rows, Use
from saltflat.curvature.sweep import send


class Between(nn.Module):
    """A function between two Linear layers."""

    def __init__(self, function: Callable[[Tensor], Tensor], width: int = 3) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Linear(4, width), nn.Linear(width, 3), function

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.function(self.first(x)))
        return out


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        n, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(n, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).reshape(n, t, d))
        out: Tensor = x + self.narrow(F.gelu(self.widen(self.norm2(x))))
        return out


class Language(nn.Module):
    """A causal transformer; `tied`: the head is the embedding."""

    def __init__(self, *, tied: bool, shared: bool = False, layers: int = 2) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(4, 4), nn.Parameter(torch.randn(2, 4))
        block = Block(4, 2)
        more = [block if shared else Block(4, 2) for _ in range(layers - 1)]
        self.blocks = nn.ModuleList([block, *more])
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 4, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


class Gated(nn.Module):
    """SiLU, squeeze and excite, BatchNorm, a depthwise convolution, GroupNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.squeeze, self.excite = nn.Conv2d(4, 2, 1), nn.Conv2d(2, 4, 1)
        self.depthwise, self.groups = nn.Conv2d(4, 4, 3, groups=4), nn.GroupNorm(2, 4)
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.norm(self.conv(x)))
        gate = self.excite(F.silu(self.squeeze(x.mean((2, 3), keepdim=True))))
        x = F.gelu(self.groups(self.depthwise(x * gate.sigmoid())))
        out: Tensor = self.last(x.mean((2, 3)))
        return out


class Recurrent(nn.Module):
    def __init__(self, cell: Callable[..., nn.RNNBase]) -> None:
        super().__init__()
        self.cell, self.last = cell(2, 3, batch_first=True), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.cell(x)
        out: Tensor = self.last(states[:, -1].tanh() * states[:, 0])
        return out


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "mish": F.mish,
    "gelu": F.gelu,
    "gelu tanh": lambda t: F.gelu(t, approximate="tanh"),
    "elu": F.elu,
    "softplus": F.softplus,
    "hardswish": F.hardswish,
    "logsigmoid": F.logsigmoid,
    "exp": torch.exp,
    "log": lambda t: (t * t + 1).log(),
    "sqrt": lambda t: (t**2 + 1).sqrt(),
    "reciprocal": lambda t: 1 / (t * t + 2),
    "in place": lambda t: (t * 2).tanh_(),
    "own gate": lambda t: t * torch.sigmoid(t),
    "quotient": lambda t: t / (1 + t.exp()),
    "quotient by one": lambda t: t / (1 + t.exp().sum(-1, keepdim=True)),
    "gate of all": lambda t: t * torch.sigmoid(t.mean(-1, keepdim=True)),
    "outer product": lambda t: (t[:, :, None] * t[:, None].tanh()).sum(1),
    "matrix product": lambda t: torch.bmm(t[:, :, None], t[:, None].sigmoid()).sum(1) + t,
    "long matrix product": lambda t: torch.bmm(t[:, None], t[:, :, None].sin()).sum(1) + t,
    "einsum": lambda t: torch.einsum("ni,nj->nij", t, t.sin()).sum(1),
    "softmax": lambda t: F.softmax(t, -1),
    "log softmax": lambda t: F.log_softmax(t, -1),
    "logsumexp": lambda t: t + t.logsumexp(-1, keepdim=True),
    "layer norm": lambda t: F.layer_norm(t, (3,)),
    "layer norm with weight": lambda t: F.layer_norm(t, (3,), torch.tensor([1.0, -2.0, 0.5])),
    "layer norm of a constant": lambda t: F.layer_norm(t[:, :1] * torch.ones(1, 3), (3,)) + t * t,
    "rms norm": lambda t: F.rms_norm(t, (3,)),
    "group norm": lambda t: F.group_norm(t[..., None] * torch.tensor([1.0, 2.0]), 1).sum(-1),
    "instance norm": lambda t: F.instance_norm(t[..., None] * torch.arange(3.0)).square().sum(-1),
    "product of entries": lambda t: t + t.prod(-1, keepdim=True) * t,
    "unit length": lambda t: t / t.norm(dim=-1, keepdim=True),
    "power": lambda t: (t * t + 1) ** torch.sigmoid(t),
    "power of itself": lambda t: (lambda u: u**u)(t * t + 1),
    "addcmul of one": lambda t: torch.addcmul(t, t, t),
    "addcmul": lambda t: torch.addcmul(t, t, t.sigmoid()),
    "addcdiv": lambda t: torch.addcdiv(t, t, t.exp() + 1),
    "lerp": lambda t: torch.lerp(t, t.tanh(), t.sigmoid()),
    "cumulative product": lambda t: t.cumprod(-1).sin(),
    "attention mask": lambda t: F.softmax(
        t.masked_fill(torch.tensor([0, 1, 0]) > 0, -torch.inf), -1
    ),
    "prelu with relu": lambda t: F.relu(t) * F.leaky_relu(t),
}


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(3)
    yield
    torch.set_default_dtype(before)


class Passed:
    """A network after a forward pass, with all that the two estimators are made of."""

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor) -> None:
        self.parameters = dict(model.eval().named_parameters())
        self.size = len(x)
        with sdpa_kernel(SDPBackend.MATH), Recorder(self.parameters) as recorder:
            self.outputs: Tensor = model(x)
        self.uses: list[Use] = recorder.uses
        at = self.outputs.detach().requires_grad_()
        loss = F.cross_entropy(at.flatten(0, -2), y.flatten(), reduction="sum")
        (self.slope,) = torch.autograd.grad(loss, at)
        self.graph = curved_graph(self.outputs, self.parameters, self.uses, frozenset)
        self.rows = Rows(self.size)

    def rest(self) -> dict[str, Tensor]:
        """The dense Hessians of ⟨slope, outputs⟩, block by block."""
        blocks = {}
        for name, p in self.parameters.items():
            (g,) = torch.autograd.grad(self.outputs, p, self.slope, create_graph=True)
            rows = [
                torch.autograd.grad(each, p, retain_graph=True, allow_unused=True)[0]
                if each.requires_grad
                else None
                for each in g.flatten()
            ]
            zero = torch.zeros(p.numel())
            blocks[name] = torch.stack([zero if r is None else r.flatten() for r in rows])
        return blocks

    def propagated(self, built: list[Operation]) -> dict[str, Tensor]:
        """The expectation of the diagonals."""
        shapes = [shape for operation in built for shape in operation.signs]
        count = sum(shape.numel() for shape in shapes)
        sums = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        sign = torch.ones(2, self.size)
        sign[1] = -1
        for unit in torch.eye(count):
            parts = zip(unit.split([shape.numel() for shape in shapes]), shapes, strict=True)
            dealt = iter([part.reshape(shape) for part, shape in parts])
            places = sources(built, lambda _, dealt=dealt: next(dealt))  # type: ignore[misc]
            rows = [self.rows] * len(self.uses)
            kept = send(places.edges, places.cotangents, self.uses, rows)
            terms: dict[str, list] = {}
            for use, each in zip(self.uses, kept, strict=True):
                for name, term in use.terms(each, self.rows) if each is not None else ():
                    terms.setdefault(name, []).append(term)
            for name, each in terms.items():
                sums[name] += combine(each).diagonal(sign)
                alone = combine(each).traces(sign).sum()
                assert torch.allclose(alone, combine(each).diagonal(sign).sum(), atol=1e-12)
        return sums

    def probed(self, written: bool) -> tuple[dict[str, Tensor], set[str]]:
        """The expectation of the traces, or of the diagonals, and what probes do not serve."""
        own = frozenset(self.parameters) - self.graph.unserved
        places = [(use, self.rows) for use in self.uses]
        all_of = own if written else frozenset[str]()
        probes = ProbedChunk(self.outputs, self.slope, places, own, all_of)
        sign = torch.tensor([[1.0], [-1.0]]).expand(2, self.size)
        sums = {}
        for name, (_, shift) in probes.shifts.items():
            sums[name] = torch.zeros_like(self.parameters[name]) if written else torch.tensor(0.0)
            for unit in torch.eye(shift.signs.numel()):
                order = iter(probes.shifts)

                def one(shape: torch.Size, unit: Tensor = unit, name: str = name) -> Tensor:
                    here = next(order) == name  # noqa: B023
                    return unit.reshape(shape) if here else torch.zeros(shape)

                probe = dict(probes.draw(one, {name: 3.0}))[name]
                if written:
                    sums[name] += probe.term().diagonal(sign)
                    alone = probe.term().traces(sign).sum()
                    assert torch.allclose(alone, probe.traces().sum(), atol=1e-12)
                else:
                    sums[name] += probe.traces().sum()
        return sums, set(self.parameters) - set(probes.shifts)


def agree(passed: Passed, *, unprobed: frozenset[str] = frozenset()) -> None:
    truth = passed.rest()
    largest = max(float(block.abs().max()) for block in truth.values())
    assert largest > 1e-6, "negative control: there is something to find"
    diagonals = passed.propagated(operations(passed.graph, passed.outputs, passed.slope))
    traces, missing = passed.probed(written=False)
    others, _ = passed.probed(written=True)
    assert missing == unprobed | passed.graph.unserved
    for name, block in truth.items():
        if name in passed.graph.unserved:
            continue
        given = [diagonals[name]] + ([others[name]] if name in others else [])
        for diagonal in given:
            error = (diagonal.flatten() - block.diagonal()).abs().max()
            assert float(error) <= 1e-10 * largest, (name, diagonal.flatten(), block.diagonal())
        if name in traces:
            assert abs(float(traces[name] - block.trace())) <= 1e-10 * largest, name


@pytest.mark.parametrize("name", FUNCTIONS)
def test_operations(name: str) -> None:
    agree(Passed(Between(FUNCTIONS[name]), torch.randn(3, 4), torch.tensor([0, 2, 1])))


@pytest.mark.parametrize("skipped", ["NativeLayerNorm", "SafeSoftmax", "Bmm", "Gelu"])
def test_no_operation_can_be_left_out(skipped: str) -> None:
    torch.manual_seed(0)
    model = Language(tied=False, layers=1)
    passed = Passed(model, torch.randint(4, (2, 2)), torch.randint(4, (2, 2)))
    assert any(node.name == skipped for node in passed.graph.nodes)
    nodes = tuple(node for node in passed.graph.nodes if node.name != skipped)
    passed.graph = type(passed.graph)(nodes, passed.graph.unserved)
    with pytest.raises(AssertionError):
        agree(passed)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_language_model(tied: bool, shared: bool) -> None:
    model = Language(tied=tied, shared=shared)
    passed = Passed(model, torch.randint(4, (2, 2)), torch.randint(4, (2, 2)))
    feeding = {"embed.weight"} if tied else set()
    twice = {name for name in passed.parameters if name.startswith("blocks.0.") and shared}
    # A bias that is used twice enters by sums: it feeds itself by no product.
    feeding |= {name for name in twice if name.endswith("weight")}
    assert passed.graph.unserved == feeding
    agree(passed, unprobed=frozenset(twice))


def test_convolutions_with_gates() -> None:
    agree(Passed(Gated(), torch.randn(2, 1, 4, 4), torch.tensor([0, 2])))


class Windows(nn.Module):
    """Convolutions with groups, strides, dilation and padding, and one with a computed kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.spread = nn.ConvTranspose2d(2, 4, 3, 2, 1, output_padding=1, groups=2)
        self.gather = nn.Conv2d(4, 6, 2, 2, dilation=2, groups=2)
        self.kernel, self.last = nn.Linear(2, 6), nn.Linear(1, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.gather(self.spread(x).tanh()).tanh()
        kernels = self.kernel(x.mean((2, 3))).sigmoid()
        out = F.conv2d(y.flatten(0, 1)[None], kernels.reshape(len(x), 6, 1, 1), groups=len(x))
        last: Tensor = self.last(out[0].mean((1, 2))[:, None])
        return last


def test_windows_of_all_kinds() -> None:
    unprobed = frozenset({"spread.weight", "spread.bias"})
    agree(Passed(Windows(), torch.randn(2, 2, 3, 3), torch.tensor([0, 2])), unprobed=unprobed)


class _Convolutions(TorchDispatchMode):
    """Counts convolutions and their gradients."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += "convolution" in str(func)
        return func(*args, **(kwargs or {}))


def test_groups_cost_no_convolutions() -> None:
    """A probe takes as many through a depthwise convolution as through one of few groups."""
    counts = []
    for groups in (2, 16):
        model = (
            nn.Sequential(
                nn.Conv2d(1, 16, 1), nn.SiLU(), nn.Conv2d(16, 16, 3, groups=groups), nn.SiLU()
            )
            .append(nn.Flatten(1))
            .append(nn.Linear(64, 3))
        )
        passed = Passed(model, torch.randn(2, 1, 4, 4), torch.tensor([0, 2]))
        places = [(use, passed.rows) for use in passed.uses]
        chunk = ProbedChunk(passed.outputs, passed.slope, places, frozenset(passed.parameters))
        with _Convolutions() as counter:
            dict(chunk.draw(torch.ones, {}))
        counts.append(counter.count)
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("cell", [nn.RNN, nn.GRU, nn.LSTM])
def test_recurrent_weights_feed_themselves(cell: Callable[..., nn.RNNBase]) -> None:
    passed = Passed(Recurrent(cell), torch.randn(2, 3, 2), torch.tensor([0, 2]))
    assert passed.graph.unserved == {n for n in passed.parameters if n.startswith("cell.")}


@pytest.mark.parametrize(
    "function",
    [
        lambda f: f * f,
        lambda f: f * f.conj(),
        torch.exp,
        lambda f: torch.complex(f.abs(), f.angle()),
        lambda f: f[:, None] @ f[..., None],
        lambda f: torch.complex(f.real.tanh(), f.imag),  # curved in real numbers only
    ],
)
def test_complex_numbers_are_not_served(function: Callable[[Tensor], Tensor]) -> None:
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.LazyLinear(3)

        def forward(self, x: Tensor) -> Tensor:
            found = function(torch.fft.rfft(self.first(x)))
            out: Tensor = self.last(torch.view_as_real(found).flatten(1))
            return out

    torch.manual_seed(0)
    model, x, y = Spectral(), torch.randn(3, 4), torch.tensor([0, 1, 2])
    passed = Passed(model, x, y)
    real = "Tanh" in {node.name for node in passed.graph.nodes}
    assert passed.graph.unserved == (set() if real else {"first.weight", "first.bias"})
    truth = Dense(model, x, y)
    trace = float(truth.hessian.trace())
    result = sf.trace(model, (x, y), estimator=sf.PropagatedCurvature(8))
    assert abs(result.total - trace) <= 5 * result.stderr + 1e-9 * abs(trace)
    assert result.details["first.weight"].rule == ("propagated" if real else "probes")


def test_siamese_weights_do_not_feed_themselves() -> None:
    class Siamese(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.side, self.last = nn.Linear(2, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            one, other = (self.side(part).tanh() for part in x.chunk(2, 1))
            out: Tensor = self.last(one * other)
            return out

    passed = Passed(Siamese(), torch.randn(3, 4), torch.tensor([0, 1, 2]))
    assert not passed.graph.unserved
    agree(passed, unprobed=frozenset({"side.weight", "side.bias"}))


def test_signs_belong_to_samples() -> None:
    like = torch.zeros(1)
    whole = Signs(like, 8, 0, 1, 2)
    part = Signs(like, 3, 5, 1, 2)
    for shape in ((4,), (3, 50), (70,)):
        all_of_them = whole(torch.Size((8, *shape)))
        assert torch.equal(all_of_them[5:], part(torch.Size((3, *shape))))
        assert set(all_of_them.unique().tolist()) == {-1.0, 1.0}
    assert not torch.equal(whole(torch.Size((8, 64))), Signs(like, 8, 0, 1, 3)(torch.Size((8, 64))))


def test_signs_are_independent() -> None:
    signs = Signs(torch.zeros(1), 64, 0, 7)(torch.Size((64, 4096)))
    assert abs(float(signs.mean())) < 5 / (64 * 4096) ** 0.5
    for matrix, length in ((signs @ signs.T, 4096), (signs.T[:64] @ signs[:, :64], 64)):
        matrix.fill_diagonal_(0)
        assert float(matrix.abs().max()) < 5.5 * length**0.5
    following = (signs[:, 1:] * signs[:, :-1]).mean()
    assert abs(float(following)) < 5 / (64 * 4095) ** 0.5


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (Gated, lambda: torch.randn(6, 1, 4, 4)),
        (lambda: Pooled(Language(tied=False, layers=1)), lambda: torch.randint(4, (6, 2))),
    ],
    ids=["convolutions", "attention"],
)
def test_errors_of_diagonals_hold(model: Callable[[], nn.Module], x: Callable[[], Tensor]) -> None:
    """Scores of all entries over some seeds, of the blocks that probes of activations serve."""
    network, data = model().eval(), (x(), torch.tensor([0, 2, 1, 1, 0, 2]))
    oracle = Dense(network, *data)
    truth, scores = oracle.blocks(oracle.hessian), dict[str, list[Tensor]]()
    for seed in range(8):
        found = sf.diagonal(network, data, estimator=sf.ActivationProbes(16, seed))
        for name, detail in found.details.items():
            if detail.rule == "activation probes":
                error = detail.value.flatten() - truth[name].diagonal()
                felt = torch.as_tensor(detail.stderr).flatten() > 0
                score = error[felt] / torch.as_tensor(detail.stderr).flatten()[felt]
                scores.setdefault(name, []).append(score)
                assert not error[~felt].abs().gt(1e-9).any()
    assert len(scores) > 8
    pooled = torch.cat([torch.cat(each) for each in scores.values()])
    assert 0.8 < float(pooled.square().mean().sqrt()) < 1.3
    assert abs(float(pooled.mean())) < 0.2


class Pooled(nn.Module):
    """The sum of another's outputs over positions."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x).sum(1)
        return out


class Attending(nn.Module):
    """Torch's own attention: time first inside, and one call to a function mode."""

    def __init__(self, batch_first: bool, weights: bool, crossed: bool) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(2, 1, batch_first=batch_first)
        self.fc, self.batch_first, self.weights = nn.Linear(2, 3), batch_first, weights
        if crossed:
            self.other = nn.MultiheadAttention(2, 1, kdim=3, vdim=3, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        if not self.batch_first:
            x = x.transpose(0, 1)
        seen, _ = self.attend(x, x, x, need_weights=self.weights)
        if hasattr(self, "other"):
            wide = torch.cat([x, x[..., :1].exp()], -1)
            seen, _ = self.other(seen, wide, wide, need_weights=self.weights)
        return self.fc(seen.sum(1 if self.batch_first else 0))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("crossed", [True, False])
def test_torchs_own_attention(batch_first: bool, weights: bool, crossed: bool) -> None:
    """Its parts are seen, and the numbers are those of the dense matrix."""
    torch.manual_seed(0)
    model = Attending(batch_first, weights, crossed).double().eval()
    x, y = torch.randn(5, 3, 2).double(), torch.arange(5) % 3
    oracle = Dense(model, x, y)
    ggn = sf.trace(model, (x, y), curvature="ggn")
    cut = {"other.in_proj_bias"}  # in three, one for each of its calls
    assert {ggn.details[name].rule for name in set(ggn) - cut} == {"linear"}
    blocks = oracle.blocks(oracle.ggn)
    largest = max(float(block.abs().max()) for block in blocks.values())
    for name in ggn:
        assert abs(ggn[name] - float(blocks[name].trace())) <= 1e-10 * largest, name
    hessian = sf.trace(model, (x, y), estimator=sf.ActivationProbes(16))
    truth = oracle.blocks(oracle.hessian)
    for name in hessian:
        detail = hessian.details[name]
        assert detail.rule in ("activation probes", "linear") or name in cut
        assert abs(detail.value - float(truth[name].trace())) <= 5 * float(detail.stderr) + 1e-9
