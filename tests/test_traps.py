"""Ways to be wrong without noticing: each of these once looked exact, or surely estimated."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import saltflat as sf

X = torch.randn(40, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(40) // 14  # sorted classes


def net(*layers: nn.Module) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        for layer in layers:
            if isinstance(layer, nn.Linear):
                layer.reset_parameters()
    return nn.Sequential(*layers).double()


def test_a_network_that_is_zero_is_not_linear() -> None:
    """f(θ) − f(θ₀) has no size to compare with at θ₀."""

    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
            self.start = [p.detach().clone() for p in self.net.parameters()]

        def forward(self, x: Tensor) -> Tensor:
            w, b, v, c = self.start
            return self.net(x) - F.linear(torch.tanh(F.linear(x, w, b)), v, c)

    found = sf.trace(Centred(), (X, Y), estimator=sf.Hutchinson(5))
    assert not found.details["net.0.weight"].exact


def test_a_unit_that_sleeps_on_the_probed_samples() -> None:
    """Where nothing flows back, nothing is known: tanh below a ReLU that wakes late."""
    model = net(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1), nn.ReLU(), nn.Linear(1, 3))
    with torch.no_grad():
        model[2].bias.fill_(-2.0)
        model[2].weight.fill_(1.0)
        model[0].weight.copy_(torch.eye(3, 4))
        model[0].bias.zero_()
    x = -X.abs()
    x[-1] = 3.0
    found = sf.trace(model, (x, Y), estimator=sf.Hutchinson(5))
    assert not found.details["0.weight"].exact


def test_class_weights_in_sorted_data_are_seen_by_products() -> None:
    """The first samples all have one weight, so a weighted mean looks like a plain one."""
    weight = torch.tensor([1.0, 5.0, 0.2], dtype=torch.float64)

    def loss(o: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(o, t, weight=weight)

    model = net(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3))
    top = sf.max_eigenvalue(model, (X, Y), loss).value
    same = sf.max_eigenvalue(model, (X, Y), nn.CrossEntropyLoss(weight=weight)).value
    assert top == pytest.approx(same, rel=1e-5)
    plain = sf.max_eigenvalue(model, (X, Y)).value
    assert top != pytest.approx(plain, rel=1e-2)


def test_a_sum_over_one_sample_at_a_time() -> None:
    model = net(nn.Linear(4, 3))
    singles = [(X[i : i + 1], Y[i : i + 1]) for i in range(6)]
    found = sf.trace(model, singles, lambda o, t: F.cross_entropy(o, t, reduction="sum"))
    truth = sf.trace(model, (X[:6], Y[:6]), nn.CrossEntropyLoss(reduction="sum"))
    assert found.total == pytest.approx(truth.total, rel=1e-10)


def test_normalized_cross_entropy_of_soft_targets() -> None:
    model = net(nn.Linear(4, 3))
    hard = sf.trace(model, (X, Y), "normalized_cross_entropy")
    soft = sf.trace(model, (X, F.one_hot(Y, 3).double()), "normalized_cross_entropy")
    assert soft.total == pytest.approx(hard.total, rel=1e-10)


def test_all_targets_ignored() -> None:
    with pytest.raises(sf.DataError, match="ignored"):
        sf.trace(net(nn.Linear(4, 3)), (X, torch.full((40,), -100)))


def test_directions_that_grow_with_the_batch() -> None:
    """Later batches may have more positions than may be sent one by one."""
    model = net(nn.Linear(4, 3))
    short, long = X[:4].reshape(2, 2, 4), X[:24].reshape(2, 12, 4)
    data = [(short, Y[:4].reshape(2, 2)), (long, Y[:24].reshape(2, 12))]
    found = sf.trace(model, data, max_directions=6, estimator=sf.Hutchinson(60))
    truth = sf.trace(model, data)
    assert not found.exact
    assert abs(found.total - truth.total) < 4 * found.stderr


def test_a_loss_that_holds_float32_tensors() -> None:
    model = net(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)).float()
    matrix = torch.tensor([[1.0, 0.5], [0.5, 2.0]])

    def loss(o: Tensor, t: Tensor) -> Tensor:
        return ((o @ matrix) * o).sum(1).mean()

    found = sf.trace(model, (X.float(), Y), loss)
    assert found.exact
    assert found["2.bias"] == pytest.approx(6.0, rel=1e-4)
