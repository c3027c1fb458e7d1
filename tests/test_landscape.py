"""The loss and its gradient at shifted parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from perturbed import compute, context_of, normed, points, relu, seeded, tiny, unflatten_all
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from untouched import assert_untouched, fingerprint

import saltflat as sf
from saltflat.errors import DataError
from saltflat.landscape import BatchSurface, RiskSurface
from saltflat.losses import CustomLoss, JointLoss
from saltflat.measures import (
    AdaptiveSharpness,
    BNSharpness,
    Measure,
    NormalizedSharpness,
    PaperRecipe,
    SamSharpness,
)


def centered(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss that does not add up over samples."""
    return F.cross_entropy(outputs - outputs.mean(0), targets)


def mean_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none").pow(2).mean()


LOSSES = [
    "cross_entropy",
    nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0], dtype=torch.float64)),
    nn.CrossEntropyLoss(reduction="sum"),
    centered,
    mean_of,
]


def called(loss: Any, outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets) if loss == "cross_entropy" else loss(outputs, targets)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: getattr(loss, "__name__", str(loss)))
@pytest.mark.parametrize("chunk", [5, 100])
def test_value_and_gradient_of_the_whole_at_once(loss: Any, chunk: int) -> None:
    model, (x, y) = seeded(tiny), points()
    batches = [(x[:5], y[:5]), (x[5:6], y[5:6]), (x[6:], y[6:])]
    v = {"0.weight": torch.full((3, 2), 0.3, dtype=torch.float64)}
    moved = {n: (p.detach() + v.get(n, 0.0)).requires_grad_() for n, p in model.named_parameters()}
    expected = called(loss, functional_call(model, moved, (x,)), y)
    gradient = torch.autograd.grad(expected, [moved["0.weight"], moved["2.weight"]])
    with context_of(model, batches, loss) as context:
        landscape = RiskSurface(context.risk, ["0.weight", "2.weight"])
        landscape.chunk = chunk // 2
        value, found = landscape.gradient(v)
        assert landscape.value(v) == pytest.approx(value, rel=1e-14)
    assert value == pytest.approx(expected.item(), rel=1e-12)
    for each, g in zip(found.values(), gradient, strict=True):
        assert each.dtype == torch.float64
        torch.testing.assert_close(each, g, rtol=1e-11, atol=1e-14)


def test_a_loss_that_was_classified_before_is_the_same() -> None:
    model, data = seeded(tiny), points()
    found = []
    for loss in (mean_of, CustomLoss(mean_of, mean=True), JointLoss(mean_of)):
        with context_of(model, data, mean_of) as context:
            context.risk.loss = loss
            found.append(BatchSurface(context.risk, ["0.weight"]).gradient())
            found.append(RiskSurface(context.risk, ["0.weight"]).gradient())
    for value, gradient in found:
        assert value == pytest.approx(found[0][0], rel=1e-13)
        torch.testing.assert_close(gradient, found[0][1], rtol=1e-12, atol=1e-14)


def test_small_memory_does_not_change_the_value() -> None:
    model, data = seeded(tiny), points()
    with context_of(model, data) as context:
        wide = RiskSurface(context.risk, ["0.weight"])
        narrow = RiskSurface(context.risk, ["0.weight"], memory_budget=1)
        assert narrow.chunk == 1 < wide.chunk
        assert narrow.value() == pytest.approx(wide.value(), rel=1e-13)


@pytest.mark.parametrize(
    "measure",
    [
        SamSharpness(steps=2, restarts=0),
        AdaptiveSharpness(average=True, draws=8),
        NormalizedSharpness(strategy=PaperRecipe(draws=8, steps=2)),
    ],
    ids=lambda measure: measure.name,
)
def test_a_memory_budget_reaches_the_measures(measure: Measure) -> None:
    model, data = seeded(tiny), points()
    sizes: list[int] = []
    model.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
    values, ones = [], []
    for budget in (None, 1):
        sizes.clear()
        report = sf.measure(model, data, measures=[measure], memory_budget=budget)
        values.append(report[measure.name].value)
        ones.append(sizes.count(1))
    assert values[1] == pytest.approx(values[0], rel=1e-9)
    assert ones[1] >= ones[0] + 2 * len(data[0])


def test_running_out_of_memory_halves_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (x, y) = seeded(tiny), points()
    with context_of(model, [(x[:3], y[:3]), (x[3:], y[3:])]) as context:
        landscape = RiskSurface(context.risk, ["0.weight"])
        landscape.chunk = 12
        expected = landscape.gradient()
        forward = context.risk.forward

        def starved(batch: Any) -> Tensor:
            if batch.size > 4:
                raise torch.OutOfMemoryError("no memory")
            return forward(batch)

        monkeypatch.setattr(context.risk, "forward", starved)
        value, gradient = landscape.gradient()
        assert landscape.chunk == 3
        assert value == pytest.approx(expected[0], rel=1e-13)
        torch.testing.assert_close(gradient, expected[1], rtol=1e-12, atol=1e-14)
        monkeypatch.setattr(context.risk, "forward", _no_memory)
        with pytest.raises(torch.OutOfMemoryError):
            landscape.value()
        with pytest.raises(DataError, match="smaller batches"):
            BatchSurface(context.risk, ["0.weight"]).value()


def _no_memory(batch: Any) -> Tensor:
    raise torch.OutOfMemoryError("no memory")


def _broken(batch: Any) -> Tensor:
    raise RuntimeError("something else")


def test_other_errors_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    with context_of(seeded(tiny), points()) as context:
        surfaces = RiskSurface(context.risk, ["0.weight"]), BatchSurface(context.risk, ["0.weight"])
        monkeypatch.setattr(context.risk, "forward", _broken)
        for surface in surfaces:
            with pytest.raises(RuntimeError, match="something else"):
                surface.value()


def test_overflow_is_an_error_that_says_so() -> None:
    model, data = seeded(relu), points(features=4, classes=3)
    huge = {n: 1e200 * torch.ones_like(w) for n, w in unflatten_all(model).items()}
    with context_of(model, data) as context:
        landscape = RiskSurface(context.risk, list(huge))
        landscape.value()
        with pytest.raises(DataError, match="smaller radius"):
            landscape.value(huge)


def test_bad_data_are_named() -> None:
    x, y = points()
    with context_of(seeded(tiny), (x, y + 5)) as context, pytest.raises(DataError, match="range"):
        SamSharpness().compute(context)


class Coupled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        z = self.fc(x)
        return z * z.square().mean()


def test_samples_that_depend_on_each_other_are_taken_together() -> None:
    model, (x, y) = seeded(Coupled), points()
    with context_of(model, [(x[:5], y[:5]), (x[5:], y[5:])]) as context:
        value = RiskSurface(context.risk, ["fc.weight"]).value()
    assert value == pytest.approx(F.cross_entropy(model(x), y).item(), rel=1e-12)


# Batch statistics


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = normed()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=False)


class OwnNorm(nn.Module):
    """A user's own module around the function."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.mean, self.var, training=self.training)


def own_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), OwnNorm(), nn.Tanh(), nn.Linear(4, 2))


@pytest.mark.parametrize("make", [normed, Checkpointed, own_norm])
def test_batch_statistics_are_those_of_training_without_dropout(
    make: Callable[[], nn.Module],
) -> None:
    model, (x, y) = seeded(make), points(features=3)
    batches = [(x[:5], y[:5]), (x[5:], y[5:])]
    oracle = copy.deepcopy(model)
    for m in oracle.modules():
        m.training = not isinstance(m, nn.Dropout)
    expected = sum(F.cross_entropy(oracle(a), b) for a, b in batches) / 2
    assert isinstance(expected, Tensor)
    parameters = dict(oracle.named_parameters())
    gradient = dict(
        zip(parameters, torch.autograd.grad(expected, list(parameters.values())), strict=True)
    )
    before, buffers = fingerprint(model), [b.tolist() for b in model.buffers()]
    with context_of(model, batches) as context:
        surface = BatchSurface(context.risk, list(parameters))
        value, found = surface.gradient()
        assert surface.value() == value
        assert buffers == [b.tolist() for b in context.risk.model.buffers()]
        plain = RiskSurface(context.risk, list(parameters)).value()
    assert value == pytest.approx(expected.item(), rel=1e-12)
    assert abs(plain - value) > 1e-3  # running statistics are something else
    torch.testing.assert_close(found, gradient, rtol=1e-10, atol=1e-14)
    assert_untouched(model, before)


def test_a_batch_of_one_has_no_statistics() -> None:
    x, y = points(features=3)
    batches = [(x[:11], y[:11]), (x[11:], y[11:])]
    with pytest.raises(DataError, match=r"batch 1.*leave that batch out"):
        compute(BNSharpness(), seeded(normed), batches)
