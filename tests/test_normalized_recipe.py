"""The paper's own way to normalized sharpness, against dense matrices and L-BFGS."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from perturbed import (
    Convolutions,
    context_of,
    flat_weights,
    layers_of,
    linear,
    loss_at,
    points,
    seeded,
    tiny,
    unflatten,
)
from scipy.optimize import minimize
from torch import Tensor, nn
from torch.func import functional_call

from saltflat.errors import InvalidValue
from saltflat.measures.normalized_sharpness import (
    by_channel,
    direct_objective,
    paper_descent,
    stochastic_diagonal,
)


def dense_diagonal(model: nn.Module, function: Callable[[dict[str, Tensor]], Tensor]) -> Tensor:
    return torch.autograd.functional.hessian(
        lambda flat: function(unflatten(model, flat)), torch.zeros_like(flat_weights(model))
    ).diagonal()


def test_the_stochastic_diagonal_is_right_within_its_error() -> None:
    model, data = seeded(tiny), points()
    expected = unflatten(model, dense_diagonal(model, lambda v: loss_at(model, data, v)))
    with context_of(model, data) as context:
        found = stochastic_diagonal(context, draws=300, seed=3)
        again = stochastic_diagonal(context, draws=300, seed=3)
    for name, values in found.values.items():
        assert torch.equal(values, again.values[name])
        assert found.draws[name].shape == (300, *values.shape)
        error = found.draws[name].std(0) / 300**0.5
        assert ((values - expected[name]).abs() < 4 * error).all()
    total = sum(float(v.sum()) for v in found.values.values())
    stderr = found.stderr(dict.fromkeys(found.values, 1.0))
    trace = sum(float(v.sum()) for v in expected.values())
    assert abs(total - trace) < 4 * stderr < trace


def test_the_radius_follows_the_weights() -> None:
    """For a quadratic loss any radius is right, and so it is for a matrix of zeros."""
    model, (x, _) = seeded(linear), points()
    nn.init.zeros_(model[0].weight)
    with context_of(model, (x, torch.zeros_like(x)), "mse") as context:
        found = stochastic_diagonal(context, draws=300)
    expected = x.square().mean(0).expand(2, 2)
    error = found.draws["0.weight"].std(0) / 300**0.5
    assert ((found.values["0.weight"] - expected).abs() < 4 * error).all()


def test_by_channel_sums_kernels_and_keeps_groups() -> None:
    model = seeded(Convolutions)
    grouped, up, head = layers_of(model)
    w = grouped.weight.square()
    assert by_channel(grouped, w)[1, 0, 0] == pytest.approx(float(w[2, 0].sum()))
    w = up.weight.square()  # (inputs, outputs of a group, kernel)
    assert by_channel(up, w)[1, 2, 0] == pytest.approx(float(w[2, 2].sum()))
    assert by_channel(head, head.weight).shape == (1, 2, 6)


def normalized_minimum(h: Tensor, w2: Tensor, lam: float) -> float:
    n, m = h.shape

    def objective(z: np.ndarray) -> tuple[float, np.ndarray]:
        t = torch.tensor(z, requires_grad=True)
        e = t[:n, None] + t[None, n:]
        value = (h * e.exp() + w2 / (2 * lam) * (-e).exp()).sum()
        (gradient,) = torch.autograd.grad(value, t)
        return value.item(), gradient.numpy()

    options = {"gtol": 1e-12, "ftol": 1e-15}
    return float(
        minimize(objective, np.zeros(n + m), jac=True, method="L-BFGS-B", options=options).fun
    )


def test_the_papers_descent_comes_down_to_the_minimum_slowly() -> None:
    generator = torch.Generator().manual_seed(0)
    h, w2 = torch.rand(2, 2, 3, 4, generator=generator, dtype=torch.float64)
    for lam in (0.5, 1.0):
        expected = sum(normalized_minimum(a, b, lam) for a, b in zip(h, w2, strict=True))
        value, x, y = paper_descent(h, w2, steps=3000, lr=0.05, lam=lam)
        assert value == pytest.approx(expected, rel=1e-8)
        assert (x.shape, y.shape) == ((2, 3), (2, 4))
        early, _, _ = paper_descent(h, w2, steps=10, lr=1e-3, lam=lam)
        assert early > expected * 1.001


def test_the_papers_descent_clips_and_says_when_it_diverges() -> None:
    h = torch.tensor([[-1.0, 1.0], [1.0, 1.0]])
    w2 = torch.ones(2, 2)
    clipped, _, _ = paper_descent(h.clamp(min=0), w2)
    assert paper_descent(h, w2)[0] == clipped
    with pytest.raises(InvalidValue, match="smaller lr"):
        paper_descent(h, w2, lr=1e3)


def deconvolution() -> nn.Module:
    return nn.Sequential(nn.ConvTranspose1d(4, 6, 2, groups=2, bias=False), nn.Flatten())


@pytest.mark.parametrize("make", [linear, deconvolution])
def test_the_direct_objective_of_a_quadratic_loss(make: Callable[[], nn.Module]) -> None:
    """E[L(θ+σε)] − L(θ) is Σ ½ h σ² then, so the minimum is that of normalized sharpness."""
    model = seeded(make)
    x = points(features=2)[0] if make is linear else points(features=8)[0].view(12, 4, 2)
    y = torch.zeros_like(model(x)).detach()
    (layer,) = layers_of(model)

    def mse(v: dict[str, Tensor]) -> Tensor:
        moved = {n: p.detach() + v[n] for n, p in model.named_parameters()}
        return F.mse_loss(functional_call(model, moved, (x,)), y)

    h = by_channel(layer, dense_diagonal(model, mse).view(layer.weight.shape) / 2)
    w2 = by_channel(layer, layer.weight.square())
    expected = sum(normalized_minimum(a, b, 0.5) for a, b in zip(h, w2, strict=True))
    with context_of(model, (x, y), "mse") as context:
        value, stderr = direct_objective(context, steps=300, draws=400)
        untrained, _ = direct_objective(context, steps=0, draws=400)
    assert abs(value - expected) < 4 * stderr + 0.01 * expected
    assert 0 < stderr < 0.1 * expected
    assert untrained > value + 4 * stderr


def test_a_matrix_of_zeros_adds_nothing_to_the_direct_objective() -> None:
    model, data = seeded(tiny), points()
    nn.init.zeros_(model[2].weight)
    with context_of(model, data) as context:
        value, _ = direct_objective(context, steps=60, draws=4)
    assert value < 1.0  # with nothing behind it, the first matrix may be drowned in noise


def test_too_few_draws() -> None:
    with context_of(seeded(tiny), points()) as context:
        for call in (
            lambda: stochastic_diagonal(context, draws=3),
            lambda: stochastic_diagonal(context, radius=0.0),
            lambda: direct_objective(context, draws=3),
        ):
            with pytest.raises(InvalidValue, match="Got"):
                call()
