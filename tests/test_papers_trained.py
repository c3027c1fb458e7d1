"""The trainer of the papers' experiments, against a loop written out and by what it must leave."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import saltflat as sf
from saltflat.datasets import Batches, Data
from saltflat.papers import trained
from saltflat.papers.trained import accuracy, cosine, decays, fit, mean_loss, one_cycle, warmed

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def data() -> Data:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(70, 1, 6, 6, generator=generator)
    y = (x.mean((1, 2, 3)) > 0).long() + (x[:, 0, 0, 0] > 1).long()
    return Data(x[:50], y[:50], x[50:], y[50:])


def network() -> nn.Sequential:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
        )


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def written_out(model: nn.Module, some: Data, epochs: int, penalty: bool = False) -> list[float]:
    """Plain SGD with a cosine, the way a user would write it."""
    optimizer = sgd(model)
    batches = Batches(some.train_x, some.train_y, 16, seed=3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(batches))
    fam = sf.FAM(model, "4", 0.01) if penalty else None
    losses = []
    for _ in range(epochs):
        total = 0.0
        for x, y in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            (loss + fam(y) if fam else loss).backward()
            optimizer.step()
            scheduler.step()
            total += loss.item() * len(y)
        losses.append(total / len(some.train_x))
    return losses


@pytest.mark.parametrize("penalty", [False, True])
def test_it_does_what_a_loop_does(penalty: bool) -> None:
    ours, theirs, some = network(), network(), data()
    expected = written_out(theirs, some, 3, penalty)
    fam = sf.FAM(ours, "4", 0.01) if penalty else None
    history = fit(
        ours, some, epochs=3, batch=16, optimizer=sgd, schedule=cosine, penalty=fam, seed=3
    )
    assert history.losses == pytest.approx(expected, rel=1e-5)
    for (name, p), q in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5, msg=name)


def test_the_penalty_counts() -> None:
    """Negative control of the test above."""
    assert written_out(network(), data(), 2) != written_out(network(), data(), 2, penalty=True)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda model: sf.SAM(sgd(model), rho=0.05),
        lambda model: sf.BNSharpnessSGD(sgd(model), model),
        lambda model: sf.EntropySGD(model.parameters(), lr=0.1, steps=4),
    ],
    ids=["SAM", "BN-Sharpness", "Entropy-SGD"],
)
def test_every_optimizer_learns(optimizer) -> None:
    model, some = network(), data()
    before = mean_loss(model, some.train_x, some.train_y)
    epochs: list[int] = []
    fit(model, some, epochs=4, batch=16, optimizer=optimizer, after_epoch=epochs.append)
    assert mean_loss(model, some.train_x, some.train_y) < 0.8 * before
    assert epochs == [1, 2, 3, 4]


def test_entropy_sgd_has_a_batch_for_every_inner_step() -> None:
    model, calls = network(), []
    model.register_forward_hook(lambda *_: calls.append(1))
    entropy = lambda model: sf.EntropySGD(model.parameters(), lr=0.1, steps=4)  # noqa: E731
    fit(model, data(), epochs=1, batch=10, optimizer=entropy)
    assert len(calls) == 5


def test_the_strength_of_bn_sharpness_grows_by_the_epoch() -> None:
    model, made = network(), []

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        made.append(sf.BNSharpnessSGD(sgd(model), model, strength=1e-4, growth=2.0))
        return made[0]

    fit(model, data(), epochs=2, batch=25, optimizer=optimizer)
    assert made[0].param_groups[0]["strength"] == pytest.approx(4e-4)


def test_the_seed_fixes_it_and_the_generators_are_left_alone() -> None:
    state = torch.get_rng_state()
    results = []
    for seed in (0, 0, 1):
        model = nn.Sequential(network(), nn.Dropout(0.5))
        history = fit(model, data(), epochs=1, batch=16, optimizer=sgd, seed=seed)
        results.append(history.losses)
        assert model.training
    assert results[0] == results[1] != results[2]
    assert torch.equal(state, torch.get_rng_state())


def test_accuracy_and_loss_are_of_evaluation_mode_and_leave_the_model() -> None:
    model, some = network(), data()
    model[1].running_var.fill_(0.3)
    model.train()
    model[3].eval()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    found = accuracy(model, some.test_x, some.test_y, 7)
    lost = mean_loss(model, some.test_x, some.test_y, 7)
    assert model.training
    assert not model[3].training
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        outputs = model.eval()(some.test_x)
    assert found == pytest.approx(100 * (outputs.argmax(1) == some.test_y).float().mean().item())
    assert lost == pytest.approx(F.cross_entropy(outputs, some.test_y).item(), rel=1e-5)


def test_a_training_that_diverges_is_a_result() -> None:
    far = lambda model: torch.optim.SGD(model.parameters(), lr=math.inf)  # noqa: E731
    history = fit(network(), data(), epochs=2, batch=16, optimizer=far)
    assert math.isnan(history.losses[-1])


class FastAnywhere(trained._Pace):
    """The GPU's way of calling a model, on the CPU too."""

    def __init__(self, x: torch.Tensor, fast: bool) -> None:
        super().__init__(x, fast)
        self.fast = self.images = fast


@pytest.mark.parametrize("penalty", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_fast_training_learns_what_the_slow_one_does(device, penalty, monkeypatch) -> None:
    """Weights that autocast kept from the first step would leave the loss where it was."""
    monkeypatch.setattr(trained, "_Pace", FastAnywhere)
    histories = []
    for fast in (False, True):
        model, some = network().to(device), data().to(device)
        fam = sf.FAM(model, "4", 0.01) if penalty else None
        histories.append(
            fit(model, some, epochs=4, batch=16, optimizer=sgd, penalty=fam, fast=fast)
        )
    slow, quick = (history.losses for history in histories)
    assert quick != slow
    assert quick == pytest.approx(slow, rel=0.1)
    assert quick[-1] < 0.8 * quick[0]


def test_schedules() -> None:
    assert [one_cycle(0.5)(t) for t in (0.0, 0.25, 0.5, 0.75, 1.0)] == pytest.approx(
        [0, 0.5, 1, 0.5, 0]
    )
    assert [decays(0.3, 0.6, by=0.2)(t) for t in (0.0, 0.3, 0.7)] == pytest.approx([1, 0.2, 0.04])
    rising = warmed(decays(0.5, by=0.1), 0.2)
    assert [rising(t) for t in (0.0, 0.1, 0.2, 0.4, 0.5)] == pytest.approx([0.01, 0.505, 1, 1, 0.1])
