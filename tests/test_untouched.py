"""The model, its hooks, its gradients and the random generators are left as they were found."""

from __future__ import annotations

import functools
import gc
import random
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo  # whatever it imports has set its own filters of warnings by now
from agree import agrees
from cases import BY_NAME, CASES, Case
from stateful import MODELS, Explosion, Fuse, Fused, NormLoss, data_for
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint
from untouched import assert_untouched, dressed, fingerprint, same

import saltflat as sf
from saltflat import session


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_case(case: Case) -> None:
    model = dressed(case.model())
    before = fingerprint(model)
    sf.trace(model, case.data(), case.loss, estimator=sf.Hutchinson(probes=4))
    sf.diagonal(model, case.data(), case.loss, curvature="ggn")
    sf.max_eigenvalue(model, case.data(), case.loss)
    assert_untouched(model, before)


class Busy(nn.Module):
    """Train-mode dropout and batch statistics, a cache, a counter, its own random numbers."""

    def __init__(self, after: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.fc1, self.norm, self.drop = nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.5)
        self.fc2 = weight_norm(nn.Linear(5, 3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(4))
        self.cache: Tensor | None = None
        self.count, self.after = 0, after

    def forward(self, x: Tensor) -> Tensor:
        self.cache, self.count = x, self.count + 1
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        torch.rand(1), random.random(), np.random.rand()
        self.after()
        return self.fc2(self.drop(self.norm(self.fc1(x)).relu()))


def busy(**options: Any) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = Busy(**options).double()
    return model, (torch.randn(6, 4, dtype=torch.float64), torch.randint(3, (6,)))


@pytest.mark.parametrize("measure", [sf.trace, sf.diagonal, sf.max_eigenvalue])
def test_state_that_forward_sets(measure) -> None:
    model, data = busy()
    before = fingerprint(model)
    measure(model, data)
    assert_untouched(model, before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_measured_in_another_dtype(dtype: torch.dtype) -> None:
    """bfloat16 models are measured in float32, others in what is asked for."""
    model, data = busy()
    model.to(torch.bfloat16 if dtype is torch.bfloat16 else torch.float32)
    before = fingerprint(model)
    sf.trace(model, data, dtype=None if dtype is torch.bfloat16 else dtype)
    assert_untouched(model, before)


def test_an_embedding_that_renormalises_itself() -> None:
    """max_norm rewrites the looked-up rows, in place, in every forward pass."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(6, 3, max_norm=0.1), nn.Flatten(), nn.Linear(6, 3)).double()
    data = (torch.randint(6, (5, 2)), torch.randint(3, (5,)))
    before = fingerprint(model)
    sf.trace(model, data)
    assert_untouched(model, before)


def again_and_again(*arguments: Any) -> None:
    """A measurement may well need only one or two forward passes."""
    for _ in range(4):
        sf.trace(*arguments)


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_exception_in_forward(steps: int) -> None:
    model, (x, y) = busy(after=Fuse(steps))
    before = fingerprint(model)
    with pytest.raises(Explosion):
        again_and_again(model, [(x[:3], y[:3]), (x[3:], y[3:])])
    assert_untouched(model, before)


class Breaking(nn.Module):
    """Its block, which would be computed once more in the backward pass, fails."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 3)

    def block(self, x: Tensor) -> Tensor:
        raise ValueError(f"{self.body(x).shape} is too much")

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = checkpoint(self.block, x, use_reentrant=False)
        return answer


@pytest.mark.parametrize("call", [sf.trace, sf.symmetries])
def test_exception_in_a_checkpointed_block(call: Callable[..., Any]) -> None:
    """Until torch 2.12 its hooks stay as long as the error, and then others go in their place."""
    x, seen = torch.randn(6, 4), list[Tensor]()

    def keep(saved: Tensor) -> Tensor:
        seen.append(saved)
        return saved

    with pytest.raises(Exception, match=r"is too much|Functionalize rule") as caught:
        call(Breaking(), (x, torch.arange(6) % 3) if call is sf.trace else x)
    with saved_tensors_hooks(keep, lambda saved: saved):
        del caught
        gc.collect()
        nn.Linear(4, 3)(x).tanh()
    assert seen


class Circular(nn.Linear):
    """It raises an error that was being handled when it was raised, by way of another."""

    def forward(self, x: Tensor) -> Tensor:
        one, other = ValueError("is too much"), KeyError("x")
        one.__context__, other.__context__ = other, one
        raise one


def test_exceptions_in_a_circle() -> None:
    with pytest.raises(sf.ForwardError, match="is too much"):
        sf.trace(Circular(4, 3), (torch.randn(6, 4), torch.arange(6) % 3))


@pytest.mark.parametrize("steps", [0, 1])
def test_exception_in_the_loss(steps: int) -> None:
    model, data = busy()
    burn, before = Fuse(steps), fingerprint(model)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        burn()
        return nn.functional.cross_entropy(outputs, targets)

    with pytest.raises(Explosion):
        again_and_again(model, data, loss)
    assert_untouched(model, before)


# models whose forward pass writes, and the entry points of the library

ENTRIES: dict[str, Callable[..., Any]] = {
    "trace": sf.trace,
    "measure": lambda *a: sf.measure(*a, measures=["hessian_trace", "sam_sharpness"]),
    "symmetries": lambda model, data, loss: sf.symmetries(model, data[0]),
}
SLOW: dict[str, Callable[..., Any]] = {
    "diagonal": lambda *a: sf.diagonal(*a, curvature="ggn"),
    "max_eigenvalue": sf.max_eigenvalue,
    "measure everything": sf.measure,
    "audit": sf.audit,
    "balance": lambda model, data, loss: sf.symmetries(model, data[0]).balance(model, data, loss),
}
OUTCOMES: dict[str, tuple[str, int, type[BaseException]]] = {
    "success": ("nowhere", 0, Explosion),
    "error in forward": ("model", 0, Explosion),
    "error in a later pass": ("model", 2, Explosion),
    "error in the loss": ("loss", 0, Explosion),
    "interrupted": ("model", 1, KeyboardInterrupt),
}


def contract(name: str, entry: Callable[..., Any], outcome: str) -> None:
    where, steps, kind = OUTCOMES[outcome]
    fuses = {place: Fuse(steps if place == where else 10**9, kind) for place in ("model", "loss")}
    torch.manual_seed(0)
    inner, loss = MODELS[name](), NormLoss(fuses["loss"]).double()
    model = nn.ModuleDict({"model": dressed(Fused(inner, fuses["model"])), "loss": dressed(loss)})
    data = data_for(name)
    before = fingerprint(model), [t.clone() for t in data], [t._version for t in data]
    with warnings.catch_warnings():
        filters = list(warnings.filters)
        # What cannot be measured is refused; torch has errors of its own where it cannot trace.
        with suppress(KeyboardInterrupt, sf.SaltflatError, RuntimeError):
            entry(model["model"], data, model["loss"])
        assert list(warnings.filters) == filters
    assert fuses["model"].left < 0 or outcome != "error in forward"
    assert_untouched(model, before[0])
    assert same([list(data), [t._version for t in data]], [before[1], before[2]])


# A search for symmetries takes seconds, needs no loss and makes few passes.
CALLS = [
    (entry, outcome)
    for entry in ENTRIES
    for outcome in (OUTCOMES if entry != "symmetries" else ("success", "interrupted"))
]


@pytest.mark.parametrize(("entry", "outcome"), CALLS)
@pytest.mark.parametrize("name", MODELS)
def test_models_that_write(name: str, entry: str, outcome: str) -> None:
    contract(name, ENTRIES[entry], outcome)


@pytest.mark.slow
@pytest.mark.parametrize("outcome", OUTCOMES)
@pytest.mark.parametrize("entry", SLOW)
@pytest.mark.parametrize("name", MODELS)
def test_models_that_write_in_long_calls(name: str, entry: str, outcome: str) -> None:
    contract(name, SLOW[entry], outcome)


def test_the_warnings_filter_of_an_optimizer_goes_with_its_hooks() -> None:
    """torch.compile warns of global hooks, where a user calls the model."""
    with warnings.catch_warnings():
        before = list(warnings.filters)
        model, (x, y) = busy()
        optimizers = [sf.SAM(torch.optim.SGD(model.parameters(), lr=0.1)) for _ in range(2)]
        for optimizer in optimizers:
            nn.functional.cross_entropy(model(x), y).backward()
            while optimizer.perturb():
                nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        model(x)  # what awaits the next step has seen a first pass
        assert list(warnings.filters) == before


@pytest.mark.parametrize("wrap", ["compiled", "parallel"])
def test_wrapped_models(wrap: str) -> None:
    inner, data = busy()
    dressed(inner)
    compiled = wrap == "compiled"
    model: Any = torch.compile(inner, backend="eager") if compiled else nn.DataParallel(inner)
    model.training = True
    before = fingerprint(model)
    sf.trace(model, data)
    sf.symmetries(model, data[0].to(next(model.parameters()).device))
    assert_untouched(model, before)


FORMS: dict[str, Callable[[nn.Module], Callable[..., Tensor]]] = {
    "module": lambda m: m,
    "partial": lambda m: functools.partial(m),
    "partial of a function": lambda m: functools.partial(lambda crit, o, t: crit(o, t), m),
    "bound method": lambda m: m.forward,
    "closure": lambda m: lambda o, t: m(o, t),
    "object": lambda m: type("Call", (), {"__call__": lambda self, o, t: self.m(o, t)})(),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_loss_with_state_is_lent(form: str) -> None:
    """In evaluation mode while it is used: batch statistics would make samples depend."""
    torch.manual_seed(0)
    norm = dressed(NormLoss(Fuse(10**9)).double())
    loss: Any = FORMS[form](norm)
    if form == "object":
        loss.m = norm
    model, data = busy()
    before = fingerprint(norm)
    result = sf.trace(model, data, loss)
    assert_untouched(norm, before)
    assert result.total == pytest.approx(sf.trace(model, data, norm.eval()).total, rel=1e-12)


def test_one_step_that_fails_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    put_back = session._Place.restore

    def fails(place: Any) -> Any:
        if place.name == "fc1.bias":
            raise Explosion
        return put_back(place)

    model, data = busy()
    dressed(model)
    before = fingerprint(model)
    monkeypatch.setattr(session._Place, "restore", fails)
    with pytest.raises(Explosion):
        sf.trace(model, data)
    after = fingerprint(model)
    changed = {key for key in before if not same(before[key], after[key])}
    assert changed <= {"fc1.bias", "fc1.bias.grad", "fc1.bias hooks"}


def test_nothing_is_retained() -> None:
    """Neither copies of the state nor the state that a call left behind."""

    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)
            self.history: list[Any] = []

        def forward(self, x: Tensor) -> Tensor:
            out = self.fc(x)
            seen.append(weakref.ref(out))
            self.history.append(out)
            return out

    seen: list[Any] = []
    model, data = Keeps(), (torch.randn(6, 4), torch.arange(6) % 3)
    sf.trace(model, data)
    gc.collect()
    before = sum(isinstance(o, Tensor) for o in gc.get_objects())
    for _ in range(3):
        sf.trace(model, data)
    gc.collect()
    assert sum(isinstance(o, Tensor) for o in gc.get_objects()) <= before
    assert seen
    assert all(ref() is None for ref in seen)


class Mine(torch.autograd.Function):
    """A user's own function whose backward pass fails."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise Explosion


class Bad(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Mine.apply(x)


def test_exception_in_the_backward_pass() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), Bad(), nn.Linear(5, 3)).double()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    before = fingerprint(model)
    with pytest.raises(Explosion):
        sf.trace(model, BY_NAME["mlp"].data())
    assert_untouched(model, before)


def test_exception_in_the_data() -> None:
    model, (x, y) = busy()
    before = fingerprint(model)

    class Broken:
        def __iter__(self):
            yield x, y
            raise Explosion

    with pytest.raises(Explosion):
        sf.trace(model, Broken())
    assert_untouched(model, before)


# the surroundings of the call


@pytest.mark.parametrize(
    "surroundings",
    [
        nullcontext,
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.set_grad_enabled(False),
    ],
)
@pytest.mark.parametrize("name", ["residual", "attention", "mlp Tanh", "embedding", "dice"])
def test_surroundings_do_not_matter(name: str, surroundings) -> None:
    case = BY_NAME[name]
    model, oracle = case.model(), case.dense()
    before = fingerprint(model)
    with surroundings():
        x, y = case.data()  # inference tensors, where that is on
        results: list[Any] = [
            sf.trace(model, (x, y), case.loss, estimator=sf.Hutchinson(probes=30)),
            sf.diagonal(model, (x, y), case.loss, estimator=sf.Hutchinson(probes=30)),
        ]
        top = sf.max_eigenvalue(model, (x, y), case.loss)
    for result in results:
        agrees(result, oracle.blocks(oracle.hessian))
        for value in result.values():
            assert isinstance(value, float) or not (value.requires_grad or value.is_inference())
    assert top.value == pytest.approx(float(torch.linalg.eigvalsh(oracle.hessian)[-1]), rel=1e-6)
    assert_untouched(model, before)


def test_autocast_in_float32() -> None:
    """bfloat16 would be off by a percent."""
    case = BY_NAME["residual"]
    oracle = case.dense(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        result = sf.trace(case.model(torch.float32), case.data(torch.float32))
    agrees(result, oracle.blocks(oracle.hessian), torch.float32)


class Counting(nn.Module):
    """Counts its passes in a buffer, also in evaluation mode; other buffers are unusual."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(4, 3)
        self.register_buffer("mask", torch.ones(1).expand(4))
        self.register_buffer("passes", torch.zeros(()))
        self.register_buffer("unknown", torch.full((2,), torch.nan))
        self.register_buffer("turned", torch.arange(6.0).reshape(2, 3).T)
        self.register_buffer("nothing", torch.zeros(0))
        self.register_buffer("large", torch.arange(70_000.0))
        self.register_buffer("order", torch.arange(3))

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        self.large[5] = -1
        self.turned[1, 1] = 9
        result: Tensor = self.fc(x * self.mask)[:, self.order]
        return result


def test_unusual_buffers() -> None:
    model, before = Counting(), Counting()
    x, y = torch.randn(6, 4), torch.arange(6) % 3
    sf.trace(model, (x, y))
    for (name, a), b in zip(model.named_buffers(), before.buffers(), strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num()), name
        assert a.stride() == b.stride(), name


@pytest.mark.parametrize("training", [True, False])
def test_train_and_eval_mode_give_the_same(training: bool) -> None:
    model, data = busy()
    model.train(training)
    result = sf.trace(model, data)
    reference = busy()[0].eval()
    assert result.total == sf.trace(reference, data).total
    assert model.training is training


def test_results_hold_no_part_of_the_model() -> None:
    case = BY_NAME["mlp"]
    model = case.model()
    result = sf.diagonal(model, case.data())
    kept = {n: v.clone() for n, v in result.items()}
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert all(torch.equal(kept[n], result[n]) for n in kept)


def test_training_goes_on_afterwards() -> None:
    """A step after a measurement is the step without one."""
    steps = []
    for measured in (False, True):
        model, (x, y) = busy()
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            torch.manual_seed(1)
            loss = nn.functional.cross_entropy(model(x), y)
            if measured:  # between forward and backward, on purpose
                sf.trace(model, (x, y))
            loss.backward()
            optimizer.step()
        steps.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*steps, strict=True))


@pytest.mark.parametrize("call", [sf.trace, sf.measure, lambda m, data: sf.symmetries(m, data[0])])
def test_graphs_that_the_user_holds_still_reach_the_parameters(call) -> None:
    """A parameter that changes its dtype for a while is cut off from them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    x, y = torch.randn(6, 4), torch.arange(6) % 3
    loss = nn.functional.cross_entropy(model(x), y)
    edges = [torch.autograd.graph.get_gradient_edge(p).node for p in model.parameters()]
    call(model, (x, y))
    assert all(g is not None for g in torch.autograd.grad(loss, list(model.parameters())))
    for p, node in zip(model.parameters(), edges, strict=True):
        assert torch.autograd.graph.get_gradient_edge(p).node is node
