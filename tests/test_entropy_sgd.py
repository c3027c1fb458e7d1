"""Entropy-SGD against the published algorithm, transcribed."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from networks import seq
from torch import Tensor, nn

from saltflat.datasets import digits
from saltflat.errors import SaltflatError
from saltflat.training.entropy_sgd import EntropySGD
from saltflat.zoo import mlp

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(12) % 3
BATCHES = [(X[i : i + 4], Y[i : i + 4]) for i in (0, 4, 8)]


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return seq(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)).double()


def gradient(model: nn.Module, values: list[Tensor], x: Tensor, y: Tensor) -> list[Tensor]:
    names = [name for name, _ in model.named_parameters()]
    leaves = [v.detach().clone().requires_grad_() for v in values]
    given = dict(zip(names, leaves, strict=True))
    given |= {name: b.clone() for name, b in model.named_buffers()}
    loss = F.cross_entropy(torch.func.functional_call(model, given, (x,)), y)
    return list(torch.autograd.grad(loss, leaves))


def published(
    rounds: int, *, eta: float, alpha: float, inner_lr: float, gamma: float
) -> list[Tensor]:
    """Algorithm 1 of Chaudhari et al. without noise: x ← x − η (x − μ), three inner steps."""
    model = network()
    x = [p.detach().clone() for p in model.parameters()]
    for _ in range(rounds):
        moving, mean = list(x), list(x)
        for data in BATCHES:
            g = gradient(model, moving, *data)
            moving = [
                m - inner_lr * (dm - gamma * (a - m)) for m, dm, a in zip(moving, g, x, strict=True)
            ]
            mean = [(1 - alpha) * u + alpha * m for u, m in zip(mean, moving, strict=True)]
        x = [a - eta * (a - u) for a, u in zip(x, mean, strict=True)]
    return x


def distance(model: nn.Module, expected: list[Tensor]) -> float:
    pairs = zip(model.parameters(), expected, strict=True)
    return max(float((p - w).detach().abs().max()) for p, w in pairs)


def train(model: nn.Module, optimizer: EntropySGD, rounds: int, closure: bool) -> None:
    for _ in range(rounds):
        waiting = iter(BATCHES)

        def one(waiting=waiting) -> Tensor:
            x, y = next(waiting)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        if closure:
            optimizer.step(one)
        else:
            for _ in BATCHES:
                one()
                optimizer.step()
        assert optimizer.at_center
        assert next(waiting, None) is None


@pytest.mark.parametrize("closure", [True, False])
@pytest.mark.parametrize("as_published", [True, False])
def test_equals_the_published_algorithm(closure: bool, as_published: bool) -> None:
    eta, alpha, inner_lr, gamma = 0.8, 0.3, 0.2, 0.7
    model = network()
    optimizer = EntropySGD(
        model.parameters(),
        lr=eta if as_published else eta * inner_lr * (1 - (1 - alpha) ** 3),
        steps=3,
        gamma=gamma,
        noise=0,
        inner_lr=inner_lr,
        averaging=alpha,
        published=as_published,
    )
    train(model, optimizer, 4, closure)
    constants = {"eta": eta, "alpha": alpha, "inner_lr": inner_lr}
    assert distance(model, published(4, gamma=gamma, **constants)) < 1e-12
    assert distance(model, published(4, gamma=0.0, **constants)) > 1e-5  # γ matters
    assert model[1].num_batches_tracked == 4  # of the passes at x only


def test_noise_has_the_published_size() -> None:
    """Where the loss is flat and γ = 0, x' is a random walk of variance steps η' ε²."""
    w = torch.zeros(20000, dtype=torch.float64, requires_grad=True)
    optimizer = EntropySGD([w], lr=0.04, steps=5, gamma=0.0, noise=0.3, inner_lr=0.04)
    for _ in range(4):
        w.grad = torch.zeros_like(w)
        optimizer.step()
    assert float(w.detach().var()) == pytest.approx(4 * 0.04 * 0.3**2, rel=0.04)
    assert not optimizer.at_center


def test_noise_depends_on_the_seed_and_not_on_the_global_generator() -> None:
    ends = []
    for seed, global_seed in ((0, 1), (0, 2), (3, 1)):
        model = network()
        torch.manual_seed(global_seed)
        optimizer = EntropySGD(model.parameters(), lr=0.01, steps=3, noise=0.1, seed=seed)
        state = torch.get_rng_state()
        train(model, optimizer, 2, closure=True)
        assert torch.equal(state, torch.get_rng_state())
        ends.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(ends[0], ends[1], strict=True))
    assert not torch.equal(ends[0][0], ends[2][0])


def test_scoping_and_inner_momentum() -> None:
    """On a quadratic with one unknown, written out for two rounds of two inner steps."""
    eta, gamma, scoping, beta = 0.1, 0.5, 0.2, 0.9
    w = torch.tensor([2.0], dtype=torch.float64, requires_grad=True)
    optimizer = EntropySGD(
        [w],
        lr=0.05,
        steps=2,
        gamma=gamma,
        noise=0,
        inner_lr=eta,
        averaging=0.25,
        scoping=scoping,
        inner_momentum=beta,
        momentum=0.5,
    )
    x, outer = 2.0, None
    for t in range(2):
        for _ in range(2):
            optimizer.zero_grad()
            (w**2 / 2).sum().backward()
            optimizer.step()
        now = gamma * (1 + scoping) ** t
        first = x - eta * x
        buffer = beta * x + first
        second = first - eta * (buffer - now * (x - first))
        mean = 0.75 * (0.75 * x + 0.25 * first) + 0.25 * second
        d = (x - mean) / ((1 - 0.75**2) * eta)
        outer = d if outer is None else 0.5 * outer + d
        x -= 0.05 * outer
        assert math.isclose(float(w.detach()), x, rel_tol=1e-12)


def test_goes_to_the_average_of_the_inner_steps_where_both_rates_are_the_same() -> None:
    model, reference = network(), network()
    optimizer = EntropySGD(model.parameters(), lr=0.2, steps=3, gamma=0.0, noise=0)
    train(model, optimizer, 1, closure=True)
    moving = [p.detach().clone() for p in reference.parameters()]
    seen = []
    for data in BATCHES:
        moving = [
            m - 0.2 * g for m, g in zip(moving, gradient(reference, moving, *data), strict=True)
        ]
        seen.append(moving)
    weights = [0.75**2, 0.75, 1.0]
    average = [
        sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
        for values in zip(*seen, strict=True)
    ]
    assert distance(model, average) < 1e-12


def test_every_group_has_its_own_inner_rate() -> None:
    first, second = network().parameters(), network().parameters()
    optimizer = EntropySGD([{"params": first, "lr": 0.5}, {"params": second}], lr=0.2)
    assert [group["inner_lr"] for group in optimizer.param_groups] == [0.5, 0.2]
    assert EntropySGD(network().parameters(), lr=1.0, published=True).param_groups[0][
        "inner_lr"
    ] == pytest.approx(0.1)


@pytest.mark.parametrize("options", [{"lr": 1.0, "inner_lr": 0.1}, {"lr": 4.0, "published": True}])
def test_warns_of_a_step_far_beyond_the_average(options: dict) -> None:
    with pytest.warns(UserWarning, match="the way to the average") as heard:
        EntropySGD(network().parameters(), **options)
    assert heard[0].filename == __file__


def accuracy_on_digits(make: Callable[[nn.Module], torch.optim.Optimizer], seed: int) -> float:
    train_x, train_y, test_x, test_y = digits()
    torch.manual_seed(seed)
    model = mlp([64, 32, 10])
    optimizer = make(model)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(400):
        chosen = torch.randint(len(train_x), (64,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(train_x[chosen]), train_y[chosen]).backward()
        optimizer.step()
    with torch.no_grad():
        return float((model(test_x).argmax(1) == test_y).float().mean())


def test_learns_the_digits_at_the_rate_of_sgd() -> None:
    """README's line; without the division by the weight of the average it diverges."""

    def mean(make: Callable[[nn.Module], torch.optim.Optimizer]) -> float:
        return sum(accuracy_on_digits(make, seed) for seed in range(4)) / 4

    plain = mean(lambda m: torch.optim.SGD(m.parameters(), lr=0.1))
    entropy = mean(lambda m: EntropySGD(m.parameters(), lr=0.1, steps=20))
    assert entropy > plain - 0.02
    assert plain > 0.85
    with pytest.warns(UserWarning, match="diverges"):
        far = mean(lambda m: EntropySGD(m.parameters(), lr=4.0, steps=20, published=True))
    assert far < 0.5


@pytest.mark.parametrize("call", range(3))
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_an_exception_in_the_closure_puts_the_weights_back(kind: type, call: int) -> None:
    model, other = network(), network()
    options = {"momentum": 0.9, "inner_momentum": 0.5, "noise": 0.1}
    optimizer = EntropySGD(model.parameters(), 0.1, 3, **options)
    untouched = EntropySGD(other.parameters(), 0.1, 3, **options)
    for m, o in ((model, optimizer), (other, untouched)):
        train(m, o, 1, closure=True)  # so that there is momentum
    before = [p.detach().clone() for p in model.parameters()]
    waiting = iter(BATCHES)
    seen = []

    def closure() -> Tensor:
        seen.append(distance(model, before))
        if len(seen) > call:
            raise kind
        x, y = next(waiting)
        optimizer.zero_grad()
        loss = F.cross_entropy(model.eval()(x), y)
        loss.backward()
        return loss

    with pytest.raises(kind):
        optimizer.step(closure)
    model.train()
    assert (seen[-1] > 0) == (call > 0)  # they were elsewhere
    assert distance(model, before) == 0
    assert optimizer.at_center
    for m, o in ((model, optimizer), (other, untouched)):
        train(m, o, 2, closure=True)  # as if it had not been
    assert distance(model, list(other.parameters())) == 0


def test_running_statistics_on_request() -> None:
    model = network()
    optimizer = EntropySGD(model.parameters(), lr=0.01, steps=3, freeze_batchnorm=False)
    train(model, optimizer, 2, closure=True)
    assert model[1].num_batches_tracked == 6


def test_an_optimizer_that_is_gone_freezes_nothing() -> None:
    model = network()
    optimizer = EntropySGD(model.parameters(), lr=0.01, steps=3)
    F.cross_entropy(model(X), Y).backward()
    optimizer.step()
    model(X)
    assert model[1].num_batches_tracked == 1
    del optimizer
    model(X)
    assert model[1].num_batches_tracked == 2


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"steps": 0}, "steps"),
        ({"lr": -1.0}, "lr"),
        ({"gamma": -1.0}, "gamma"),
        ({"noise": -1.0}, "noise"),
        ({"inner_lr": 0.0}, "inner_lr"),
        ({"averaging": 1.5}, "averaging"),
        ({"averaging": 0.0}, "averaging"),
        ({"scoping": -0.1}, "scoping"),
        ({"momentum": -0.1}, "momentum"),
        ({"nesterov": True}, "nesterov"),
        ({"inner_momentum": -0.1}, "inner_momentum"),
        ({"weight_decay": -0.1}, "weight_decay"),
    ],
)
def test_refuses(options: dict, word: str) -> None:
    with pytest.raises(SaltflatError, match=word):
        EntropySGD(network().parameters(), **{"lr": 0.1, **options})
