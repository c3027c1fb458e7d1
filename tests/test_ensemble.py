"""Networks that are trained together come out as those that torch.optim.SGD trains one by one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import saltflat as sf
from saltflat.sweep import train_together

MEMBERS, SAMPLES, BATCH, STEPS = 3, 20, 5, 7


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))


def cnn() -> nn.Module:
    pooled = nn.Sequential(nn.Conv2d(1, 3, 2, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    return nn.Sequential(pooled, nn.Linear(3 * 2 * 1, 3))


def tied() -> nn.Module:
    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    net[2].weight = net[0].weight
    return net


def problem(make: Callable[[], nn.Module]) -> tuple[list[nn.Module], Tensor, Tensor, Tensor]:
    """Models, inputs, labels of each, and rows of every step."""
    torch.manual_seed(0)
    models = [make().double() for _ in range(MEMBERS)]
    x = torch.randn(SAMPLES, *((1, 3, 2) if make is cnn else (6,)), dtype=torch.float64)
    y = torch.randint(3, (MEMBERS, SAMPLES))
    return models, x, y, torch.randint(SAMPLES, (STEPS, MEMBERS, BATCH))


def one_by_one(
    models: list[nn.Module],
    x: Tensor,
    y: Tensor,
    rows: Tensor,
    rates: Tensor,
    decay: Tensor,
    momentum: float,
    loss: Any = F.cross_entropy,
) -> None:
    for m, model in enumerate(models):
        optimizer = torch.optim.SGD(
            model.parameters(), lr=1.0, momentum=momentum, weight_decay=float(decay[m])
        )
        for t in range(STEPS):
            optimizer.param_groups[0]["lr"] = float(rates[t, m])
            optimizer.zero_grad()
            loss(model(x[rows[t, m]]), y[m, rows[t, m]]).backward()
            optimizer.step()


def apart(models: list[nn.Module], others: list[nn.Module]) -> float:
    pairs = zip(models, others, strict=True)
    return max(
        float((p - q).detach().abs().max())
        for a, b in pairs
        for p, q in zip(a.parameters(), b.parameters(), strict=True)
    )


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("make", [mlp, cnn, tied])
def test_as_sgd_one_by_one(make: Callable[[], nn.Module], momentum: float) -> None:
    """With rates that differ between members and steps, and a weight decay of each."""
    models, x, y, rows = problem(make)
    truth = copy.deepcopy(models)
    rates = torch.rand(STEPS, MEMBERS, dtype=torch.float64) / 5
    decay = torch.tensor([0.0, 1e-2, 0.3], dtype=torch.float64)
    one_by_one(truth, x, y, rows, rates, decay, momentum)
    before = copy.deepcopy(models)
    train_together(
        models,
        x,
        y,
        lambda t: rows[t],
        STEPS,
        lr=lambda t: rates[t],
        momentum=momentum,
        weight_decay=decay,
    )
    assert apart(models, truth) < 1e-12
    assert apart(models, before) > 1e-2
    assert apart(models[1:] + models[:1], truth) > 1e-2  # the negative control


def test_one_rate_and_decay_for_all_and_another_loss() -> None:
    models, x, _, rows = problem(mlp)
    y = torch.randn(MEMBERS, SAMPLES, 3, dtype=torch.float64)
    truth = copy.deepcopy(models)
    rates = torch.full((STEPS, MEMBERS), 0.1, dtype=torch.float64)
    decay = torch.full((MEMBERS,), 0.01, dtype=torch.float64)
    one_by_one(truth, x, y, rows, rates, decay, 0.0, F.mse_loss)
    options = {"lr": lambda t: 0.1, "weight_decay": 0.01, "loss": F.mse_loss}
    train_together(models, x, y, lambda t: rows[t], STEPS, **options)
    assert apart(models, truth) < 1e-12


def test_models_are_otherwise_as_found() -> None:
    models, x, y, rows = problem(mlp)
    for model in models:
        model.eval()
    for p in models[1].parameters():
        p.grad = torch.ones_like(p)
    identities = [id(p) for model in models for p in model.parameters()]
    state = torch.get_rng_state()
    train_together(models, x, y, lambda t: rows[t], 2, lr=lambda t: 0.1)
    assert [id(p) for model in models for p in model.parameters()] == identities
    assert not any(module.training for model in models for module in model.modules())
    assert all(p.requires_grad and p.is_leaf for model in models for p in model.parameters())
    assert all(p.grad is None for p in models[0].parameters())
    assert all((p.grad == 1).all() for p in models[1].parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_failure_leaves_the_models_alone() -> None:
    models, x, y, rows = problem(mlp)
    before = copy.deepcopy(models)

    def broken(t: int) -> Tensor:
        if t == 3:
            raise RuntimeError("no more rows")
        return rows[t]

    with pytest.raises(RuntimeError, match="no more rows"):
        train_together(models, x, y, broken, STEPS, lr=lambda t: 0.1)
    assert apart(models, before) == 0


def refused(models: list[nn.Module], words: str, **changed: Any) -> None:
    torch.manual_seed(0)
    arguments = {
        "x": torch.randn(SAMPLES, 6),
        "y": torch.randint(3, (len(models) or 1, SAMPLES)),
        "rows": lambda t: torch.randint(SAMPLES, (len(models), BATCH)),
        "steps": 2,
        "lr": lambda t: 0.1,
        **changed,
    }
    before = copy.deepcopy(models)
    with pytest.raises(sf.SaltflatError, match=words):
        train_together(models, **arguments)
    if models:
        assert apart(models, before) == 0


def test_what_cannot_be_trained_together_is_refused() -> None:
    def twice(*layers: Callable[[], nn.Module]) -> list[nn.Module]:
        return [nn.Sequential(*(layer() for layer in layers)) for _ in range(2)]

    def linear() -> nn.Module:
        return nn.Linear(6, 3)

    refused([], "at least one")
    refused(twice(linear, lambda: nn.BatchNorm1d(3)), r"no buffers.*1\.running_mean.*one by one")
    refused(twice(linear, nn.Dropout), r"Dropout draws.*1 \(Dropout\).*one by one")
    refused([mlp(), mlp()[:2]], r"2\.weight: \(4, 5\) in model 0, none in model 1")
    refused([linear(), linear().eval()], "all be in train mode or all in eval mode")
    refused([*twice(linear, nn.ReLU), *twice(linear, nn.Tanh)], "(?s)built alike.*model 2.*Tanh")
    narrow = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
    wide = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    refused([narrow, wide], r"0\.weight.*\(4, 6\).*\(5, 6\)")
    same = twice(linear)
    refused([same[0], same[0]], "given once")
    refused(same, "meta", x=torch.randn(SAMPLES, 6, device="meta"))
    refused(same, r"\(2, 20", y=torch.randint(3, (SAMPLES,)))
    refused(same, r"\(2, batch\)", rows=lambda t: torch.arange(4))
    shrinking = (torch.arange(2 * k).reshape(2, k) for k in (4, 1))
    refused(same, r"same batch.*Got \(2, 1\) after \(2, 4\)", rows=lambda t: next(shrinking))
    for model in same:
        model.requires_grad_(False)
    refused(same, r"frozen ones: 0\.weight")


class Scaled(nn.Linear):
    """Does not show what it computes with."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(6, 3)
        vars(self).update(attributes)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(super().forward(x)) * self.factor


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"factor": 2.0}, {"factor": 5.0}),
        ({"factor": torch.ones(3)}, {"factor": torch.zeros(3)}),
        ({"act": torch.relu}, {"act": torch.tanh}),
        ({"act": lambda x: x}, {"act": lambda x: -x}),
    ],
)
def test_what_a_module_does_not_show_is_compared(one: Any, other: Any) -> None:
    plain: dict[str, Any] = {"factor": 1.0, "act": torch.sigmoid}
    refused([Scaled(**plain | one), Scaled(**plain | other)], rf"Scaled\.{next(iter(one))}: .* in")
    x, y = torch.randn(SAMPLES, 6), torch.zeros(2, SAMPLES, dtype=torch.long)
    rows = torch.zeros(2, BATCH, dtype=torch.long)
    alike = [Scaled(**plain | one) for _ in range(2)]
    train_together(alike, x, y, lambda t: rows, 1, lr=lambda t: 0.1)


def test_randomness_that_is_not_seen_is_refused_by_torch() -> None:
    class Hidden(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(super().forward(x))

    rows = torch.zeros(2, BATCH, dtype=torch.long)
    y = torch.zeros(2, SAMPLES, dtype=torch.long)
    with pytest.raises(RuntimeError, match="random"):
        train_together(
            [Hidden(6, 3) for _ in range(2)],
            torch.randn(SAMPLES, 6),
            y,
            lambda t: rows,
            1,
            lr=lambda t: 0.1,
        )


def test_dropout_that_is_off_is_allowed() -> None:
    models, x, y, rows = problem(mlp)
    still = [nn.Sequential(copy.deepcopy(m), nn.Dropout(0.5)).eval() for m in models]
    train_together(models, x, y, lambda t: rows[t], STEPS, lr=lambda t: 0.1)
    train_together(still, x, y, lambda t: rows[t], STEPS, lr=lambda t: 0.1)
    assert apart(still, models) == 0
