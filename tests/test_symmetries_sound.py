"""Groups that keep the function: every operand counts, no constraint is lost, all is verified."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from scaling_networks import Case, answer, brute_force, ready
from torch import Tensor, nn

import saltflat as sf
from saltflat import ModelError, SaltflatError
from saltflat.symmetries import Group, propagate, symmetries, verify

aten = torch.ops.aten
VERIFY = import_module("saltflat.symmetries.evaluate")
d = torch.float64


def kept(model: nn.Module, x: Any, spread: float = 4.0) -> Group:
    """The group, after its elements were seen to keep the outputs by the model's own words."""
    group = symmetries(model, x)
    with torch.no_grad():
        before = answer(model, x)
        for seed in range(3):
            after = answer(group.random(seed, spread)(model), x)
            assert float((after - before).abs().max()) <= 1e-9 * float(before.abs().max())
    return group


def named(value: Any) -> str:
    return value if isinstance(value, str) else ""


# Operations of two operands.


@torch.library.custom_op("saltflat_tests::gated", mutates_args=())
def gated(a: Tensor, b: Tensor) -> Tensor:
    return a * b.sigmoid()


@gated.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return torch.empty_like(a)


gated.register_autograd(lambda ctx, g: (g, g), setup_context=lambda ctx, inputs, output: None)


def places(a: Tensor) -> Tensor:
    return torch.arange(len(a)).roll(1)[:, None].expand(-1, 4)


def sampled(a: Tensor, b: Tensor) -> Tensor:
    image, grid = a.reshape(-1, 1, 2, 2), b.reshape(-1, 1, 2, 2).tanh()
    return F.grid_sample(image, grid, align_corners=True).flatten(1).repeat(1, 2)


def solved(a: Tensor, b: Tensor) -> Tensor:
    system = torch.diag_embed(a.abs() + 1) + 0.1 * a[:, :, None]
    return torch.linalg.solve(system, b)


def rotated(a: Tensor, b: Tensor) -> Tensor:
    return torch.ormqr(a[:4], torch.ones(4, dtype=a.dtype), b[:4]).repeat(2, 1)


TWO: list[tuple[str, Callable[[Tensor, Tensor], Tensor], int]] = [
    ("hypot", torch.hypot, 0),
    ("grid_sample", sampled, 0),
    ("complex", lambda a, b: torch.complex(a, b).abs(), 0),
    ("polar", lambda a, b: torch.polar(a.abs(), b).real, 0),
    ("solve", solved, 0),
    ("addmv", lambda a, b: torch.addmv(a[:, 0], b, a[1])[:, None] + b, 0),
    ("ormqr", rotated, 0),
    ("atan2", torch.atan2, 0),
    ("custom", lambda a, b: gated(a, b), 0),
    ("scatter_add", lambda a, b: a.scatter_add(0, places(a), b), 4),
    ("scatter", lambda a, b: a.scatter(0, places(a), b), 4),
    ("scatter_amax", lambda a, b: a.scatter_reduce(0, places(a), b, "amax"), 4),
    ("scatter_prod", lambda a, b: a.scatter_reduce(0, places(a), b, "prod"), 0),
    ("masked_scatter", lambda a, b: a.masked_scatter(a > 0, b), 0),
    ("lerp", lambda a, b: torch.lerp(a, b, 0.3), 4),
    ("copysign", torch.copysign, 0),
    ("cross", lambda a, b: torch.linalg.cross(a[:, :3], b[:, :3]).repeat(1, 2)[:, :4], 4),
]


class Two(nn.Module):
    """What two Linear layers make, put together by an operation."""

    def __init__(self, together: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 4), nn.Linear(6, 4), nn.Linear(4, 3)
        self.together = together

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.together(self.a(x), self.b(x)))


@pytest.mark.parametrize(("name", "together", "dimension"), TWO, ids=named)
def test_every_operand_counts(
    name: str, together: Callable[[Tensor, Tensor], Tensor], dimension: int
) -> None:
    torch.manual_seed(0)
    group = kept(Two(together).double(), torch.randn(8, 6, dtype=d))
    assert len(group) == dimension


class Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.a2, self.bl = nn.Linear(6, 4), nn.Linear(6, 4), nn.Bilinear(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.bl(F.leaky_relu(self.a(x), 0.2), F.leaky_relu(self.a2(x), 0.2))


def test_minimum_sharpness_of_a_bilinear_layer() -> None:
    """With a by s, a2 by t and the bilinear weight by 1/(st): 3 (A B C)^(1/3), and its bias."""
    torch.manual_seed(0)
    x, y = torch.randn(30, 6, dtype=d), torch.randint(0, 3, (30,))
    model = Bilinear().double()
    names = ["minimum_sharpness", "neuronwise_minimum_sharpness"]
    layer, neuron = (sf.measure(model, (x, y), measures=names)[n].value for n in names)
    trace = {}
    for name, p in model.named_parameters():
        loss = F.cross_entropy(model(x), y)
        (g,) = torch.autograd.grad(loss, p, create_graph=True)
        rows = [
            torch.autograd.grad(e, p, retain_graph=True)[0].flatten()[i]
            for i, e in enumerate(g.flatten())
        ]
        trace[name] = float(torch.stack(rows).sum())
    a, b = (trace[f"{n}.weight"] + trace[f"{n}.bias"] for n in ("a", "a2"))
    least = 3 * (a * b * trace["bl.weight"]) ** (1 / 3) + trace["bl.bias"]
    assert layer == pytest.approx(least, rel=1e-8)
    assert neuron <= layer


# A weight that meets itself.


class Itself(nn.Module):
    """A weight goes into a product from both sides, and the product is the layer's matrix."""

    def __init__(self, product: Callable[[Tensor], Tensor], rows: int) -> None:
        super().__init__()
        self.w, self.c, self.product = nn.Parameter(torch.randn(rows, 4)), nn.Linear(4, 3), product

    def forward(self, x: Tensor) -> Tensor:
        return self.c(F.leaky_relu(x @ self.product(self.w), 0.2))


ITSELF: list[tuple[str, Callable[[Tensor], Tensor], int, int]] = [
    ("WtW", lambda w: w.T @ w, 3, 1),
    ("linear", lambda w: F.linear(w, w), 4, 1),
    ("WW", lambda w: w @ w, 4, 1),
    ("WWW", lambda w: w @ w @ w, 4, 1),
    ("einsum", lambda w: torch.einsum("ki,kj->ij", w, w), 3, 1),
    ("matrix_power", lambda w: torch.linalg.matrix_power(w, 2), 4, 1),
    ("skew", lambda w: (w - w.T) @ (w - w.T), 4, 1),
    ("I+WtW", lambda w: torch.eye(4, dtype=w.dtype) + w.T @ w, 3, 0),
    ("rows", lambda w: w * (w @ w.T).sum(), 4, 1),
    ("dot", lambda w: w * torch.dot(w.flatten(), w.flatten()), 4, 1),
    ("bmm", lambda w: torch.bmm(w[:, None], w[:, :, None]).squeeze(2) * w, 4, 1),
    ("conv", lambda w: F.conv1d(w.T[:, None], w[:, :1, None], padding=1).sum(2), 4, 1),
    ("depthwise", lambda w: F.conv1d(w[None], w[:, None, :2], groups=4, padding=1)[0, :, :4], 4, 1),
]  # fmt: skip


@pytest.mark.parametrize(("name", "product", "rows", "least"), ITSELF, ids=named)
def test_a_weight_times_itself_keeps_both_constraints(
    name: str, product: Callable[[Tensor], Tensor], rows: int, least: int
) -> None:
    """As many as brute force counts; the layer after it can always take back one common factor."""
    case = Case(name, lambda: Itself(product, rows), lambda: torch.randn(20, 4, dtype=d))
    model, x = ready(case)
    group = kept(model, x)
    assert len(group) == brute_force(case)
    assert len(group) >= least


# Types, and what rules make of unusual arguments.


class Then(nn.Module):
    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc1, self.fc2, self.between = nn.Linear(6, 4), nn.Linear(4, 3), between

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.between(self.fc1(x)))


def autocast(h: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return (h @ torch.eye(4)).float()


CASTS: list[tuple[str, Callable[[Tensor], Tensor], int]] = [
    ("same", lambda h: h.to(torch.float32), 4),
    ("wider", lambda h: h.double().relu().double(), 4),
    ("bfloat16", lambda h: h.bfloat16().float(), 0),
    ("half", lambda h: h.half().float(), 0),
    ("wide and back", lambda h: h.double().float(), 0),
    ("sum", lambda h: h.cumsum(1, dtype=torch.float16).float(), 0),
    ("copy", lambda h: torch.zeros_like(h, dtype=torch.float16).copy_(h).float(), 0),
    ("autocast", autocast, 0),
    ("bits", lambda h: h.view(torch.int32).view(torch.float32), 0),
    ("bytes", lambda h: h.contiguous().view(torch.uint8).float()[:, :4], 0),
    ("integers", lambda h: h.detach().cumsum(1, dtype=torch.int64).float(), 0),
    ("complex", lambda h: torch.view_as_real(h * 1j)[..., 1], 0),
]


@pytest.mark.parametrize(("name", "between", "dimension"), CASTS, ids=named)
def test_casts_to_less_and_bits_let_no_scale_through(
    name: str, between: Callable[[Tensor], Tensor], dimension: int
) -> None:
    torch.manual_seed(0)
    model, x = Then(between), torch.randn(5, 6)
    model.fc2.to(between(torch.randn(5, 4)).dtype)
    group = symmetries(model, x)
    assert len(group) == dimension
    assert bool(group.pinned_by) == (dimension == 0), "what pinned is said"
    with torch.no_grad():
        assert torch.allclose(model(x), group.random(0, 4.0)(model)(x), atol=1e-5)


def padded(h: Tensor) -> Tensor:
    return F.pad(h, (0, 1))


def own_variance(h: Tensor) -> Tensor:
    with torch.no_grad():
        return F.batch_norm(h, h.mean(0), h.var(0))


def unpooled(h: Tensor) -> Tensor:
    largest, places = F.max_pool1d(h[:, None], 2, return_indices=True)
    return F.max_unpool1d(largest, places, 2)[:, 0]


ZEROS, FIRST = torch.zeros(4, dtype=d), torch.tensor([True, False, False, False])
INFINITE = float("-inf")
RULES: list[tuple[str, Callable[[Tensor], Tensor], int]] = [
    # zeros that are no longer zero
    ("zeros to the power of zero", lambda h: (h + padded(h[:, :3]).pow(0)), 0),
    ("zeros and an eps", lambda h: padded(h[:, 1:]) + 1e-4 + h, 0),
    ("zeros above an eps", lambda h: padded(h[:, 1:].detach()).clamp(min=1e-4) + h, 0),
    ("a norm times zero", lambda h: h + F.layer_norm(h.detach(), (4,), ZEROS, h[0]) * 2 + 1e-5, 0),
    # statistics that are none
    ("a constant variance", lambda h: F.batch_norm(h, ZEROS, ZEROS), 0),
    ("its own variance", own_variance, 0),
    ("the mean of a norm", lambda h: torch.native_layer_norm(h, [4], None, None, 1e-5)[1] + h, 0),
    # arguments
    ("a variance of all", lambda h: h * torch.var(h, unbiased=False), 1),
    ("a variance over zero", lambda h: h * torch.var(h, 0, correction=0), 4),
    ("the least entry", lambda h: h * torch.linalg.vector_norm(h, INFINITE, 1, keepdim=True), 1),
    ("beta and alpha", lambda h: torch.addmm(h, h, torch.eye(4, dtype=d), beta=0.5, alpha=2), 4),
    ("a scalar of no dimensions", lambda h: h * h.sum().cumsum(0).sort()[0].max(0)[0], 1),
    ("an eps with dimensions", lambda h: (h + torch.full((1, 1, 1), 1e-5, dtype=d))[0], 0),
    ("indices of a maximum", lambda h: h.gather(1, h.argmax(1, keepdim=True)) * h, 1),
    ("indices of a pool", unpooled, 1),
    ("a sum of nothing", lambda h: h + h[:, :0].sum(1, keepdim=True), 4),
    ("a product of a cumulation", lambda h: h.cumprod(1), 0),
    ("a logarithm of a sum", lambda h: h.logcumsumexp(1), 0),
    ("an operand as a filling", lambda h: h.masked_fill(FIRST, h.sum()), 1),
]  # fmt: skip


@pytest.mark.parametrize(("name", "between", "dimension"), RULES, ids=named)
def test_rules_know_their_arguments(
    name: str, between: Callable[[Tensor], Tensor], dimension: int
) -> None:
    torch.manual_seed(0)
    group = kept(Then(between).double(), torch.randn(5, 6, dtype=d))
    assert len(group) == dimension


def test_a_variance_that_is_a_parameter_stays() -> None:
    class Normed(Then):
        def __init__(self) -> None:
            super().__init__(torch.relu)
            self.mean, self.var = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                return self.fc2(F.batch_norm(self.fc1(x), self.mean, self.var))

    torch.manual_seed(0)
    assert "var" not in kept(Normed().double(), torch.randn(5, 6, dtype=d)).parameters()


def test_a_vector_that_is_read_in_part() -> None:
    class Part(Then):
        def __init__(self) -> None:
            super().__init__(torch.relu)
            self.offset = nn.Parameter(torch.randn(6))

        def forward(self, x: Tensor) -> Tensor:
            return self.fc2(F.relu(self.fc1(x) + self.offset[:4]))

    torch.manual_seed(0)
    group = kept(Part().double(), torch.randn(5, 6, dtype=d))
    assert len(group) == 1, "what is not read goes with its neighbours, and ties them"


def test_one_memory_under_two_names_stays() -> None:
    class Twice(Then):
        def __init__(self) -> None:
            super().__init__(torch.relu)
            self.double()
            self.again = nn.Parameter(self.fc1.weight.data)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc2(F.linear(x, self.again)) + self.fc2(F.relu(self.fc1(x)))

    torch.manual_seed(0)
    group = kept(Twice(), torch.randn(5, 6, dtype=d))
    assert not {"again", "fc1.weight"} & set(group.parameters())


# The group is verified where it is found.


def mlp(dtype: torch.dtype = d) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
    return model.to(dtype), torch.randn(5, 6, dtype=dtype)


def same(step: Any, x: Any, *args: Any) -> Tensor:
    return x.ids


@pytest.mark.parametrize("widest", [0, 10**7])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_wrong_rule_is_an_error(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, widest: int
) -> None:
    """In float64, and in the model's own precision where it has too many parameters for that."""
    monkeypatch.setattr(VERIFY, "WIDEST", widest)
    model, x = mlp(dtype)
    assert len(symmetries(model, x)) == 0
    monkeypatch.setitem(propagate.RULES, aten.tanh.default, same)
    with pytest.raises(SaltflatError, match=r"defect of saltflat.*layers around 0"):
        symmetries(model, x)


def narrow(h: Tensor) -> Tensor:
    """A model that cannot run in float64."""
    if h.dtype != torch.float32:
        raise RuntimeError("built for float32")
    return h.relu()


def test_a_check_in_the_models_own_precision_is_noted() -> None:
    torch.manual_seed(0)
    model, x = Then(narrow), torch.randn(5, 6)
    group = symmetries(model, x)
    assert len(group) == 4
    (note,) = group.notes
    assert note == "verified in its own precision: in float64 RuntimeError: built for float32"
    assert "built for float32" in " ".join(str(group).split())
    assert symmetries(Then(torch.relu), x).notes == ()


def test_nothing_is_concluded_from_a_pass_that_fails_once() -> None:
    """A failure that comes again is the model's: then the check is another one, as noted above."""
    made, failing = 0, 0

    def once(h: Tensor) -> Tensor:
        nonlocal made
        made += 1
        if made == failing:
            raise RuntimeError("by chance")
        return h.relu()

    torch.manual_seed(0)
    assert len(symmetries(Then(once), torch.randn(5, 6))) == 4
    assert made == 5
    for each in range(2, 6):  # the first is the exporter's, of whose failure there is a note
        made, failing = 0, each
        with pytest.raises(RuntimeError, match="by chance"):
            symmetries(Then(once), torch.randn(5, 6))


def test_nothing_is_concluded_from_memory_that_ran_out() -> None:
    """Of the features that are sliced away: the error, or all of the scales that they have."""
    made, failing = 0, 0

    def sliced(h: Tensor) -> Tensor:
        nonlocal made
        made += 1
        if made == failing:
            raise MemoryError("no room")
        return h.relu() * torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=h.dtype)

    torch.manual_seed(0)
    truth = symmetries(Then(sliced), torch.randn(5, 6))
    raised, passes = 0, made
    for each in range(2, passes + 1):
        made, failing = 0, each
        torch.manual_seed(0)
        try:
            group = symmetries(Then(sliced), torch.randn(5, 6))
        except MemoryError:
            raised += 1
        else:
            assert len(group) == len(truth)
            assert any("no room" in note for note in group.notes) or group.notes == truth.notes
    assert raised


def test_zeros_do_not_hide_a_wrong_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    class Biased(Then):
        def __init__(self) -> None:
            super().__init__(lambda h: h + self.offset)
            self.offset = nn.Parameter(torch.zeros(4))

    def first(step: Any, a: Any, b: Any) -> Tensor:
        step.scales.touch(b.ids)
        return a.ids

    torch.manual_seed(0)
    model, x = Biased().double(), torch.randn(5, 6, dtype=d)
    model.between = lambda h: h + model.offset
    assert len(symmetries(model, x)) == 4
    monkeypatch.setitem(propagate.RULES, aten.add.Tensor, first)
    with pytest.raises(SaltflatError, match="defect of saltflat"):
        symmetries(model, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_honest_models_pass_in_their_own_precision(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(VERIFY, "WIDEST", 0)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(96, 3)
    ).to(dtype)
    group = symmetries(model, torch.randn(4, 1, 6, 6, dtype=dtype))
    assert len(group) == 12
    assert group.notes == ()


class Sometimes(Then):
    """Answers that are not finite, or not the same twice."""

    def __init__(self, spoil: Callable[[Tensor], Tensor]) -> None:
        super().__init__(torch.relu)
        self.spoil = spoil

    def forward(self, x: Tensor) -> Tensor:
        return self.spoil(super().forward(x))


def noisy() -> Callable[[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    return lambda y: y + torch.rand(3, generator=generator, dtype=y.dtype)


SPOILED: list[tuple[Callable[[Tensor], Tensor], str]] = [
    (lambda y: y * torch.full_like(y, torch.nan), "not finite"),
    (noisy(), "differ from run to run"),
    (lambda y: torch.cat([y, torch.full_like(y, -torch.inf)], 1), ""),
    (lambda y: F.dropout(y, 0.5, training=True), ""),
]


@pytest.mark.parametrize(("spoil", "note"), SPOILED)
def test_what_cannot_be_compared_is_said(spoil: Callable[[Tensor], Tensor], note: str) -> None:
    torch.manual_seed(0)
    group = symmetries(Sometimes(spoil).double(), torch.randn(5, 6, dtype=d))
    assert len(group) == 4
    verified = [n for n in group.notes if "verified" in n]
    assert len(verified) == bool(note)
    assert all(note in n for n in verified)


def test_infinities_that_stay_are_no_change() -> None:
    torch.manual_seed(0)
    model = Sometimes(lambda y: torch.cat([y, y / 0], 1)).double()
    x = torch.randn(5, 6, dtype=d)
    assert verify(model, symmetries(model, x).random(0), x) <= 1e-9
    broken = Sometimes(lambda y: y / 0 * 0).double()
    element = symmetries(broken, x).random(0)
    with pytest.raises(SaltflatError, match="moved by nan"):
        verify(broken, element, x)


# Copies that compute with the original's parameters.


class Closure(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3)
        self.steps = [lambda t: self.a(t), torch.relu, lambda t: self.b(t)]

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x)
        return x


def patched(how: str) -> nn.Module:
    """`forward` replaced on the instance: by a closure, or by what deepcopy can follow."""
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    inner = model[0]
    old = inner.forward

    def forward(module: nn.Module, x: Tensor) -> Tensor:
        return nn.Linear.forward(module, x)

    if how == "closure":
        inner.forward = lambda x: old(x)
    elif how == "partial":
        inner.forward = functools.partial(forward, inner)
    else:
        inner.forward = old
    return model


COPIES = [
    (Closure, False),
    (lambda: patched("closure"), False),
    (lambda: patched("partial"), True),
    (lambda: patched("method"), True),
]


@pytest.mark.parametrize(("make", "follows"), COPIES)
def test_a_copy_that_uses_the_original_is_refused(
    make: Callable[[], nn.Module], follows: bool
) -> None:
    """The group is found all the same: for that nothing is copied."""
    torch.manual_seed(0)
    model, x, y = make(), torch.randn(8, 4), torch.randint(0, 3, (8,))
    group = symmetries(model, x)
    assert len(group) == 6
    assert group.dead == ()
    audit = functools.partial(sf.audit, model, (x, y), measures=["hessian_trace"], elements=1)
    if follows:
        moved = group.random(0)(model)
        assert torch.allclose(moved(x), model(x), atol=1e-5)
        assert not torch.equal(next(moved.parameters()), next(model.parameters()))
        audit()
        return
    refused: list[Callable[[], Any]] = [
        lambda: group.random(0)(model),
        lambda: group.only("layer").random(0)(model),
        lambda: group.balance(model, (x, y)),
        lambda: verify(model, group.random(0), x),
        audit,
    ]
    for call in refused:
        with pytest.raises(ModelError, match=r"deep copy of the model still computes with"):
            call()


def test_a_model_that_cannot_be_copied_has_a_group() -> None:
    class Locked(Then):
        def __deepcopy__(self, memo: Any) -> Any:
            raise RuntimeError("no copies")

    model, x = Locked(torch.relu), torch.randn(5, 6)
    group = symmetries(model, x)
    assert len(group) == 4
    with pytest.raises(ModelError, match="cannot be copied: no copies"):
        group.random(0)(model)
