"""SAM and ASAM against loops written by hand, and in a landscape with known curvatures."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from networks import seq
from torch import Tensor, nn

from saltflat.errors import SaltflatError
from saltflat.training.sam import SAM

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(12) % 3


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return seq(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)).double()


def sgd(model: nn.Module, **options) -> torch.optim.SGD:
    options = {"lr": 0.3, "momentum": 0.9, "weight_decay": 0.01, **options}
    return torch.optim.SGD(model.parameters(), **options)


def closure_of(model: nn.Module, optimizer, x: Tensor = X, y: Tensor = Y):
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return closure


def gradient(model: nn.Module, values: list[Tensor], x: Tensor = X, y: Tensor = Y) -> list[Tensor]:
    """By functional_call: no optimizer, no hook, no statistics are involved."""
    names = [name for name, _ in model.named_parameters()]
    leaves = [v.detach().clone().requires_grad_() for v in values]
    given = dict(zip(names, leaves, strict=True))
    given |= {name: b.clone() for name, b in model.named_buffers()}
    loss = F.cross_entropy(torch.func.functional_call(model, given, (x,)), y)
    return list(torch.autograd.grad(loss, leaves))


class ByHand:
    """SAM's two steps with SGD, momentum and weight decay, as the papers write them."""

    def __init__(self, model: nn.Module, rho: float, scale) -> None:
        self.model, self.rho, self.scale = model, rho, scale
        self.w = [p.detach().clone() for p in model.parameters()]
        self.momentum = [torch.zeros_like(w) for w in self.w]

    def ascended(self, x: Tensor, y: Tensor) -> list[Tensor]:
        g = gradient(self.model, self.w, x, y)
        t = [self.scale(w) for w in self.w]
        norm = torch.cat([(a * b).flatten() for a, b in zip(t, g, strict=True)]).norm()
        return [w + self.rho * a**2 * b / norm for w, a, b in zip(self.w, t, g, strict=True)]

    def step(self, batches) -> None:
        gradients = [gradient(self.model, self.ascended(x, y), x, y) for x, y in batches]
        for i, w in enumerate(self.w):
            g = sum(each[i] for each in gradients) / len(gradients) + 0.01 * w
            self.momentum[i] = 0.9 * self.momentum[i] + g
            self.w[i] = w - 0.3 * self.momentum[i]


VARIANTS = {
    "sam": ({"rho": 0.1}, lambda w: torch.ones_like(w)),
    "asam": ({"rho": 0.5, "adaptive": True}, lambda w: w.abs() + 0.01),
    "asam, eta=0": ({"rho": 0.5, "adaptive": True, "eta": 0.0}, lambda w: w.abs()),
    "asam, matrices": (
        {"rho": 0.5, "adaptive": True, "vectors": False},
        lambda w: w.abs() + 0.01 if w.ndim > 1 else torch.ones_like(w),
    ),
}


def distance(model: nn.Module, expected: list[Tensor]) -> float:
    pairs = zip(model.parameters(), expected, strict=True)
    return max(float((p - w).detach().abs().max()) for p, w in pairs)


@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_the_loop_by_hand(variant: str) -> None:
    options, scale = VARIANTS[variant]
    model = network()
    optimizer, hand = SAM(sgd(model), **options), ByHand(network(), options["rho"], scale)
    others = [ByHand(network(), v["rho"], s) for k, (v, s) in VARIANTS.items() if k != variant]
    for _ in range(3):
        optimizer.step(closure_of(model, optimizer))
        for loop in (hand, *others):
            loop.step([(X, Y)])
    assert distance(model, hand.w) < 1e-12
    assert all(distance(model, other.w) > 1e-6 for other in others)  # the variants do differ


def test_halves_equal_the_closure() -> None:
    models = network(), network()
    optimizers = [SAM(sgd(m), rho=0.1) for m in models]
    for _ in range(3):
        optimizers[0].step(closure_of(models[0], optimizers[0]))
        optimizers[1].zero_grad()
        F.cross_entropy(models[1](X), Y).backward()
        assert optimizers[1].perturb()
        F.cross_entropy(models[1](X), Y).backward()
        optimizers[1].step()
    assert distance(models[0], list(models[1].parameters())) == 0
    assert models[0][1].num_batches_tracked == models[1][1].num_batches_tracked == 3


def test_group_settings_give_the_authors_variant() -> None:
    """Normalisation weights are scaled, biases are not."""
    model = network()
    weights = [p for n, p in model.named_parameters() if "weight" in n]
    biases = [p for n, p in model.named_parameters() if "bias" in n]
    groups = [{"params": weights}, {"params": biases, "adaptive": False}]
    base = torch.optim.SGD(groups, lr=0.3, momentum=0.9, weight_decay=0.01)
    optimizer = SAM(base, rho=0.5, adaptive=True)
    optimizer.step(closure_of(model, optimizer))

    twin = network()
    kinds = iter(["weight" in n for n, _ in twin.named_parameters()] * 2)
    hand = ByHand(twin, 0.5, lambda w: w.abs() + 0.01 if next(kinds) else torch.ones_like(w))
    hand.step([(X, Y)])
    assert distance(model, hand.w) < 1e-12


# m-sharpness


HALVES = [(X[:6], Y[:6]), (X[6:], Y[6:])]


def test_m_sharpness_perturbs_every_micro_batch_for_itself() -> None:
    options, scale = VARIANTS["sam"]
    models = network(), network()
    listed, gathered = (SAM(sgd(m), **options) for m in models)
    hand = ByHand(network(), 0.1, scale)
    for _ in range(3):
        listed.step([closure_of(models[0], listed, x, y) for x, y in HALVES])
        for x, y in HALVES:
            gathered.zero_grad()
            (F.cross_entropy(models[1](x), y) / 2).backward()
            gathered.perturb()
            (F.cross_entropy(models[1](x), y) / 2).backward()
            gathered.gather()
        gathered.step()
        hand.step(HALVES)
    assert distance(models[0], hand.w) < 1e-12
    assert distance(models[1], hand.w) < 1e-12
    whole = ByHand(network(), 0.1, scale)
    for _ in range(3):
        whole.step([(X, Y)])
    assert distance(models[0], whole.w) > 1e-4  # it is not SAM on the whole batch


@pytest.mark.parametrize("by_closure", [True, False])
def test_m_sharpness_has_a_dropout_mask_for_each_micro_batch(by_closure: bool) -> None:
    model = network()
    model[2] = nn.Dropout(0.5)
    masks: list[Tensor] = []
    model[2].register_forward_hook(lambda m, args, out: masks.append(out == 0))
    optimizer = SAM(sgd(model))
    if by_closure:
        optimizer.step([closure_of(model, optimizer, x, y) for x, y in HALVES])
    else:
        for x, y in HALVES:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.perturb()
            F.cross_entropy(model(x), y).backward()
            optimizer.gather()
    assert torch.equal(masks[0], masks[1])
    assert torch.equal(masks[2], masks[3])
    assert not torch.equal(masks[0], masks[2])


def test_m_sharpness_returns_the_mean_loss() -> None:
    model = network()
    optimizer = SAM(sgd(model))
    expected = sum(F.cross_entropy(network()(x), y) for x, y in HALVES) / 2
    loss = optimizer.step([closure_of(model, optimizer, x, y) for x, y in HALVES])
    assert abs((loss - expected).item()) < 1e-12


# two valleys


def two_valleys(w: Tensor) -> Tensor:
    """Minima of value 0 at (−1, 0) and (1, 0); across, their curvatures are 196.5 and 8.5."""
    x, y = w
    return (x**2 - 1) ** 2 / 2 + (5 + 195 * torch.sigmoid(-4 * x)) * y**2 / 2


@pytest.mark.parametrize(
    ("rho", "minimum", "curvature"), [(0.0, -1, 196.49), (0.05, -1, 196.49), (0.3, 1, 8.507)]
)
def test_two_valleys(rho: float, minimum: float, curvature: float) -> None:
    """From the sharp valley SAM goes to the flat one; SGD, and SAM with a small radius, stay."""
    w = torch.tensor([-1.0, 0.1], dtype=torch.float64, requires_grad=True)
    optimizer = SAM(torch.optim.SGD([w], lr=0.002), rho=rho)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = two_valleys(w)
        loss.backward()
        return loss

    for _ in range(800):
        optimizer.step(closure)
    assert (w.detach() - torch.tensor([minimum, 0.0])).abs().max() < 0.02
    hessian = torch.autograd.functional.hessian(two_valleys, torch.tensor([float(minimum), 0.0]))
    assert float(hessian[1, 1]) == pytest.approx(curvature, rel=1e-3)


# refusals


def refuses(kind: type[Exception], *words: str):
    return pytest.raises(kind, match=".*".join(words))


def test_refuses_bad_settings() -> None:
    model = network()
    for options in ({"rho": -1.0}, {"rho": float("nan")}, {"rho": "a"}, {"eta": -0.1}):
        with pytest.raises(SaltflatError, match=next(iter(options))):
            SAM(sgd(model), **options)
    right = r"SAM\(torch.optim.SGD\(model.parameters\(\), lr=0.1"
    with refuses(TypeError, right, "Got Sequential"):
        SAM(model)
    with refuses(TypeError, "not its class. Write " + right):  # as another implementation has it
        SAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    with refuses(TypeError, "no option 'lr'", right):
        SAM(sgd(model), rho=0.1, lr=0.1)
    with refuses(TypeError, "LBFGS"):
        SAM(torch.optim.LBFGS(model.parameters()))
    with refuses(TypeError, "SAM"):
        SAM(SAM(sgd(model)))


def test_refuses_steps_out_of_order() -> None:
    model = network()
    optimizer = SAM(sgd(model))
    with refuses(ValueError, "no gradients"):
        optimizer.perturb()
    with refuses(ValueError, "only one gradient"):
        optimizer.step()
    with refuses(ValueError, "empty list"):
        optimizer.step([])
    F.cross_entropy(model(X), Y).backward()
    optimizer.perturb()
    with refuses(ValueError, "between perturb"):
        optimizer.step(closure_of(model, optimizer))
    F.cross_entropy(model(X), Y).backward()
    assert not optimizer.perturb()
    with refuses(ValueError, "passes of this step are over"):
        optimizer.perturb()
    optimizer.step()


def test_gather_needs_cleared_gradients() -> None:
    """Else the perturbation of the second micro-batch would hold the first one's gradients."""
    model = network()
    optimizer = SAM(sgd(model))
    F.cross_entropy(model(X), Y).backward()
    optimizer.perturb()
    F.cross_entropy(model(X), Y).backward()
    optimizer.gather()
    F.cross_entropy(model(X), Y).backward()
    with refuses(ValueError, "zero_grad"):
        optimizer.perturb()


def test_refuses_sparse_gradients() -> None:
    table = nn.Embedding(4, 3, sparse=True)
    optimizer = SAM(torch.optim.SGD(table.parameters(), lr=0.1))
    table(torch.tensor([1])).sum().backward()
    with refuses(ValueError, "Sparse"):
        optimizer.perturb()


def test_zero_gradient_is_no_perturbation() -> None:
    w = torch.zeros(3, requires_grad=True)
    optimizer = SAM(torch.optim.SGD([w], lr=0.1))
    (0 * w).sum().backward()
    optimizer.perturb()
    assert torch.equal(w, torch.zeros(3))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_closure_must_clear_the_gradients(set_to_none: bool) -> None:
    model = nn.Linear(2, 1)
    optimizer = SAM(torch.optim.SGD(model.parameters(), lr=0.1))
    cleared = True

    def closure() -> Tensor:
        if cleared:
            optimizer.zero_grad(set_to_none)
        loss = model(torch.ones(1, 2)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    optimizer.step(closure)
    cleared = False
    before = [p.detach().clone() for p in model.parameters()]
    kept = [p.grad.clone() for p in model.parameters()]
    with pytest.raises(SaltflatError, match="does not clear the gradients"):
        optimizer.step(closure)
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    assert torch.equal(model.weight.grad, kept[0])
    optimizer.zero_grad()
    optimizer.step(closure)


def test_an_error_in_the_closure_keeps_the_gradients() -> None:
    model = nn.Linear(2, 1)
    optimizer = SAM(torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.ones(1, 2)).sum().backward()

    def closure() -> Tensor:
        raise KeyError

    with pytest.raises(KeyError):
        optimizer.step(closure)
    assert torch.equal(model.weight.grad, torch.ones(1, 2))


def test_a_closure_must_make_gradients() -> None:
    model = nn.Linear(2, 1)
    optimizer = SAM(torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer.closure_accumulates = True  # as gradients are there already
    model(torch.ones(1, 2)).sum().backward()
    before = model.weight.detach().clone()
    with pytest.raises(SaltflatError, match="no gradients at the perturbed weights"):
        optimizer.step(lambda: None)
    assert torch.equal(model.weight, before)


def test_a_forgotten_second_backward_is_refused() -> None:
    """Without it the base optimizer would have nothing to step with, and nothing would train."""
    model = torch.nn.Linear(3, 2)
    optimizer = SAM(torch.optim.SGD(model.parameters(), lr=0.1))
    before = model.weight.detach().clone()
    model(torch.randn(4, 3)).square().sum().backward()
    optimizer.perturb()
    with pytest.raises(SaltflatError, match=r"call backward\(\) again"):
        optimizer.step()
    torch.testing.assert_close(model.weight.detach(), before)
