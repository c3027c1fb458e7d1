"""What forward passes leave behind: harmless and measured, or refused; never in a result."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from agree import agrees
from dense import Dense
from stateful import (
    MODELS,
    Annealed,
    Average,
    AverageBuffer,
    ScriptedPart,
    Sparse,
    data_for,
    scripted,
    traced,
)
from torch import Tensor, nn

import saltflat as sf
from saltflat.errors import ModelError
from saltflat.session import Loan, lend

X, Y = data_for("any")

# a function that changes with every pass

DRIFTING: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "parameters": (lambda: Average(0.9999), "slow.weight, slow.bias"),
    "a buffer bound anew": (lambda: AverageBuffer(0.9999), "centre"),
    "a Python number": (lambda: Annealed(1e-5), "passes"),
}


@pytest.mark.parametrize("name", DRIFTING)
def test_a_slow_drift_is_refused(name: str) -> None:
    """Below what a comparison of two passes in float32 can tell from rounding."""
    make, names = DRIFTING[name]
    torch.manual_seed(0)
    with pytest.raises(ModelError, match=f"writes into .*{names}"):
        sf.trace(make().float(), (X.float(), Y))


def test_a_drift_in_the_loss_is_refused() -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("centre", torch.zeros(3))

        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            self.centre.mul_(0.9999).add_(outputs.detach().mean(0), alpha=1e-4)
            return (outputs - self.centre - targets[:, None]).pow(4).mean()

    loss = Centred().double()
    with pytest.raises(sf.LossError, match="has a state"):
        sf.trace(MODELS["tied"](), (X, Y), loss)
    assert not loss.centre.any()


@pytest.mark.parametrize(
    "model", [Average(1.0), AverageBuffer(1.0), Annealed(0.0)], ids=lambda m: type(m).__name__
)
def test_the_same_models_at_rest_are_measured(model: nn.Module) -> None:
    model = copy.deepcopy(model).double()
    oracle = Dense(copy.deepcopy(model), X, Y)
    agrees(sf.trace(model, (X, Y)), oracle.blocks(oracle.hessian))


def test_what_passes_leave_behind_stops_the_next_one() -> None:
    class Once(nn.Linear):
        """Goes wrong on a batch of another size than the last one's."""

        last: int | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.last == 6 and len(x) == 2:
                raise RuntimeError("another size")
            self.last = len(x)
            return super().forward(x)

    model = nn.Sequential(Once(4, 3)).double()
    with pytest.raises(ModelError, match=r"writes into 0\.last"):
        sf.trace(model, [(X, Y)])
    assert model[0].last is None


def test_a_model_that_needs_its_whole_batch() -> None:
    """A graph cannot be cut to two nodes; then it is the first batch that is looked at."""
    model, sizes = nn.Linear(4, 3).double(), []

    def answers(samples: int | None) -> list[Tensor]:
        sizes.append(samples)
        if samples is not None:
            raise RuntimeError("the adjacency does not fit")
        return [model(X).detach()]

    loan = Loan()
    loan.left["passes"] = lambda: None
    loan.check_steady(lambda: lend(model, set(), None), answers)
    assert sizes == [2, None, None]
    loan.left["weight"] = lambda: model.weight.data.mul_(1.001)
    with pytest.raises(ModelError, match="writes into passes, weight"):
        loan.check_steady(lambda: lend(model, set(), None), answers)


# projections: the first pass changes the weights, the second one does not


@pytest.mark.parametrize("dtype", [None, torch.float64])
@pytest.mark.parametrize("name", ["clipped", "rebound", "max_norm", "max_norm of a layer"])
def test_projected_weights_are_what_is_measured(name: str, dtype: torch.dtype | None) -> None:
    torch.manual_seed(0)
    model, (x, y) = MODELS[name](), data_for(name)
    if dtype is not None:
        model.float()
    projected = copy.deepcopy(model).double()
    projected(x)
    oracle = Dense(projected, x, y)
    result = sf.trace(model, (x, y), dtype=dtype)
    agrees(result, oracle.blocks(oracle.hessian))
    assert result.exact


# state that does no harm


@pytest.mark.parametrize("name", ["diary", "pruned", "parametrized"])
def test_state_that_outputs_do_not_follow(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    twin = MODELS[name]()
    twin.load_state_dict(model.state_dict())
    oracle = Dense(twin, X, Y)
    agrees(sf.trace(model, (X, Y)), oracle.blocks(oracle.hessian))


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_sparse_buffers(layout: torch.layout) -> None:
    torch.manual_seed(0)
    model, twin = Sparse(layout).double().train(), Sparse(layout).double()
    for p, q in zip(twin.parameters(), model.parameters(), strict=True):
        p.data.copy_(q)
    oracle = Dense(twin, X, Y)
    agrees(sf.trace(model, (X, Y)), oracle.blocks(oracle.hessian))
    assert model.training
    assert torch.equal(model.log.to_dense(), torch.eye(2).double())
    report = sf.measure(model, (X, Y), measures=["hessian_trace"])
    assert report["hessian_trace"].value == pytest.approx(float(oracle.hessian.trace()))


# TorchScript


def loaded(part: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(part), file)
    file.seek(0)
    made: nn.Module = torch.jit.load(file)
    return made


MAKERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "scripted": torch.jit.script,
    "loaded": loaded,
    "traced": traced,
}


def twins(maker: str, smooth: bool) -> tuple[nn.Module, nn.Module]:
    """A model around a script that was used before, and one of ordinary modules."""
    torch.manual_seed(0)
    model = scripted(MAKERS[maker], smooth).double()
    for _ in range(4):  # now TorchScript has compiled it
        F.cross_entropy(model(X), Y).backward()
    plain = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), ScriptedPart(smooth), nn.Linear(5, 3))
    plain.double().load_state_dict(model.state_dict())
    return model.train(), plain


@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("maker", MAKERS)
def test_scripts_are_measured(maker: str, smooth: bool) -> None:
    model, plain = twins(maker, smooth)
    model[2].fc.bias.requires_grad_(False)
    plain[2].fc.bias.requires_grad_(False)
    oracle = Dense(plain, X, Y)
    agrees(sf.trace(model, (X, Y)), oracle.blocks(oracle.hessian))
    agrees(sf.diagonal(model, (X, Y), curvature="ggn"), oracle.blocks(oracle.ggn))
    top = sf.max_eigenvalue(model, (X, Y)).value
    assert top == pytest.approx(float(torch.linalg.eigvalsh(oracle.hessian)[-1]), rel=1e-6)
    assert all(m.training for m in model.modules())


@pytest.mark.parametrize("maker", ["scripted", "loaded"])
def test_scripts_are_measured_in_another_dtype(maker: str) -> None:
    model, plain = twins(maker, smooth=True)
    model.float()
    plain.float().double()
    oracle = Dense(plain, X, Y)
    agrees(sf.trace(model, (X, Y), dtype=torch.float64), oracle.blocks(oracle.hessian))
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def gate(h: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(h) * torch.sigmoid(x[:, :1])


class Gated(nn.Module):
    """Calls a function, compiled or not."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.fc1, self.fc2, self.function = nn.Linear(4, 5), nn.Linear(5, 3), function

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.function(self.fc1(x), x))
        return out


def test_scripted_functions_are_measured() -> None:
    model, plain = Gated(torch.jit.script(gate)).double(), Gated(gate).double()
    plain.load_state_dict(model.state_dict())
    for _ in range(4):
        F.cross_entropy(model(X), Y).backward()
    oracle = Dense(plain, X, Y)
    agrees(sf.trace(model, (X, Y)), oracle.blocks(oracle.hessian))


class GatedNorm(nn.Module):
    """Once TorchScript has compiled it, torch's own second derivatives of it are wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)
        self.d = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(x[:, :1])
        return self.c(self.d(torch.tanh(self.b(self.a(x))) * gate))


def test_a_script_that_was_compiled_for_second_derivatives() -> None:
    torch.manual_seed(0)
    model = torch.jit.script(GatedNorm().double()).eval()
    x, y = torch.randn(10, 4, dtype=torch.float64), torch.randint(3, (10,))
    for _ in range(4):
        loss = F.cross_entropy(model(x), y)
        gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        sum(g.sum() for g in gradients).backward()
    plain = GatedNorm().double()
    plain.load_state_dict(model.state_dict())
    oracle = Dense(plain, x, y)
    agrees(sf.trace(model, (x, y)), oracle.blocks(oracle.hessian))


@pytest.mark.parametrize("maker", MAKERS)
def test_symmetries_of_scripts(maker: str) -> None:
    model, plain = twins(maker, smooth=False)
    model[2].fc.bias.requires_grad_(False)
    group = sf.symmetries(model, X)
    assert len(group) == len(sf.symmetries(plain, X)) > 0
    moved = group.random(seed=0)(model)
    assert torch.allclose(moved.eval()(X), plain.eval()(X), rtol=1e-9)
    expected = [(True, p.requires_grad) for p in model.parameters()]
    assert [(p.is_leaf, p.requires_grad) for p in moved.parameters()] == expected
    assert not torch.equal(moved[2].fc.weight, model[2].fc.weight)


def test_a_copy_would_not_keep_what_a_script_shares() -> None:
    class Shares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = torch.jit.script(nn.Linear(4, 4)), nn.Linear(4, 4)
            self.outer.weight = self.inner.weight

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.outer(self.inner(x).relu())
            return out

    model = Shares().double()
    group = sf.symmetries(model, X)
    with pytest.raises(ModelError, match="shares parameters"):
        group.random(seed=0)(model)
    oracle = Dense(model, X, Y)
    agrees(sf.trace(model, (X, Y)), oracle.blocks(oracle.hessian))


class Switching(nn.Module):
    """Does more than set a flag when it is put into evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.scale = nn.Linear(4, 3), 2.0

    def train(self, mode: bool = True) -> Switching:
        self.scale = 2.0 if mode else 1.0
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.body(x)


def test_switches_that_are_not_pulled_are_noted() -> None:
    model, data = nn.Sequential(Switching(), nn.ReLU()), (torch.randn(6, 4), torch.arange(6) % 3)
    (note,) = [note for note in sf.trace(model, data).notes if "eval() of their own" in note]
    assert note.endswith(": 0; call model.eval() first if they do more than set a flag")
    assert not sf.trace(model.eval(), data).notes
    assert not sf.trace(nn.Sequential(nn.Linear(4, 3)).train(), data).notes
