"""Where papers, their code or torch are wrong: as printed it fails, as corrected it holds.

`docs/errata.md` lists these, and the tests elsewhere that show others.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from dense import Dense
from papers import layers, least
from scipy.optimize import minimize
from torch import Tensor, nn


def chain() -> tuple[nn.Module, Tensor, Tensor]:
    """A ReLU network without biases, and data."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        parts = nn.Linear(4, 5, False), nn.ReLU(), nn.Linear(5, 6, False), nn.ReLU()
        model = nn.Sequential(*parts, nn.Linear(6, 3, False)).double()
        return model, torch.randn(7, 4, dtype=torch.float64), torch.arange(7) % 3


def traces(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, float]:
    oracle = Dense(model, x, y)
    return {name: float(b.trace()) for name, b in oracle.blocks(oracle.hessian).items()}


def test_proposition_1_of_minimum_sharpness_needs_squared_norms() -> None:
    """Tr H_d = mean Σ_l p_l ‖∂o_l/∂W_d‖² − ‖∂ ln Z/∂W_d‖²; printed without the squares."""
    model, x, y = chain()
    want = traces(model, x, y)
    squared, printed = dict.fromkeys(want, 0.0), dict.fromkeys(want, 0.0)
    for each in x:
        outputs = model(each)
        shares = outputs.softmax(0).detach()
        values = [*outputs, outputs.logsumexp(0)]
        for value, share in zip(values, [*shares, -1.0], strict=True):
            found = torch.autograd.grad(value, list(model.parameters()), retain_graph=True)
            for name, g in zip(want, found, strict=True):
                squared[name] += float(share * g.norm() ** 2) / len(x)
                printed[name] += float(share * g.norm()) / len(x)
    assert squared == pytest.approx(want, rel=1e-10)
    assert all(abs(printed[name] / want[name] - 1) > 0.05 for name in want)


def test_the_scales_of_minimum_sharpness_are_inverse_squares() -> None:
    """α*_d of appendix C is α_d^{−2}, as its proof renames it on the way."""
    model, x, y = chain()
    blocks = list(traces(model, x, y).values())
    root = math.prod(blocks) ** (1 / len(blocks))
    star = [root / t for t in blocks]

    def trace_at(alphas: list[float]) -> float:
        twin = copy.deepcopy(model)
        for p, a in zip(twin.parameters(), alphas, strict=True):
            p.data *= a
        return sum(traces(twin, x, y).values())

    minimum = len(blocks) * root
    assert trace_at([a**-0.5 for a in star]) == pytest.approx(minimum, rel=1e-10)
    assert trace_at(star) > 1.05 * minimum


def test_equation_19_of_normalized_flat_minima_is_of_the_square() -> None:
    """(19) has e^y = σ'; the objective (48) is (17) for e^y = σ'², as (47) has it."""
    generator = np.random.default_rng(0)
    h, squares = generator.random((3, 4)) + 0.1, generator.random((3, 4)) + 0.1

    def objective(v: np.ndarray) -> float:
        s = v[:3, None] + v[None, 3:]
        return float((h * np.exp(s) + squares * np.exp(-s)).sum())  # (48), λ = ½

    def at(sigma: np.ndarray, prime: np.ndarray) -> float:
        s = (sigma[:, None] * prime[None]) ** 2
        return float((h * s + squares / s).sum())  # (17), λ = ½

    v = minimize(objective, np.zeros(7), method="BFGS", options={"gtol": 1e-9}).x
    want = least(h, squares)
    assert at(np.exp(v[:3] / 2), np.exp(v[3:] / 2)) == pytest.approx(want, rel=1e-8)
    assert at(np.exp(v[:3] / 2), np.exp(v[3:])) > 1.01 * want


def test_simplified_relative_flatness_needs_the_squared_norm() -> None:
    """‖W‖² Tr H is invariant to rescaling layers; ‖W‖ Tr H, as in public code of FAM, is not."""
    model, x, y = chain()
    twin = copy.deepcopy(model)
    twin[2].weight.data *= 10
    twin[4].weight.data /= 10
    before, after = (layers(Dense(each, x, y)) for each in (model, twin))
    for name in ("2", "4"):
        a, b = before[name], after[name]
        assert b.norm * b.trace == pytest.approx(a.norm * a.trace, rel=1e-9)
        ratio = b.norm**0.5 * b.trace / (a.norm**0.5 * a.trace)
        assert ratio == pytest.approx(0.1 if name == "2" else 10, rel=1e-9)


def test_the_gradient_of_relative_flatness_reaches_layers_below() -> None:
    """With H detached, as in public code of FAM, Lemma 1's second term and these layers go."""
    model, x, _ = chain()
    first, last = model[0].weight, model[4].weight

    def kappa(detached: bool) -> Tensor:
        features = model[:4](x)
        p = F.linear(features, last).softmax(1)
        size = features.square().sum(1)
        if detached:
            p, size = p.detach(), size.detach()
        gram = last @ last.T
        inner = p @ gram.diagonal() - ((p @ gram) * p).sum(1)
        return (size * inner).mean()

    right = torch.autograd.grad(kappa(False), [first, last])
    wrong = torch.autograd.grad(kappa(True), [first, last], materialize_grads=True)
    step = 1e-6 * torch.randn(first.shape, generator=torch.Generator().manual_seed(0)).double()
    with torch.no_grad():
        first += step
        up = kappa(False)
        first -= 2 * step
        down = kappa(False)
        first += step
    assert float((right[0] * step).sum()) == pytest.approx(float(up - down) / 2, rel=1e-5)
    assert right[0].norm() > 0.1 * right[1].norm()
    assert wrong[0].norm() == 0


def sharpness_along(loss: Callable[[np.ndarray], np.ndarray], delta: float, p: float) -> float:
    """δ^{−1/p} (∫_{−δ}^{δ} |(L(t) − L(0))/δ|^p dt)^{1/p}, (5) of BN-Sharpness for one v."""
    nodes, weights = np.polynomial.legendre.leggauss(200)
    t, w = np.append(nodes - 1, nodes + 1) / 2 * delta, np.append(weights, weights) / 2 * delta
    rises = np.abs(loss(t) - loss(np.zeros(1))) / delta
    return float(((w @ rises**p) / delta) ** (1 / p))


@pytest.mark.parametrize("p", [1.0, 2.0, 4.0])
def test_theorem_b_2_of_bn_sharpness(p: float) -> None:
    """At a minimum it is (δ/2) (2/(2p+1))^{1/p} vᵀHv, at most the bound; printed: twice, and ≥."""
    h, v, delta = np.diag([3.0, 1.0]), np.array([0.8, 0.6]), 1e-2
    found = sharpness_along(lambda t: t**2 * (v @ h @ v) / 2, delta, p)
    factor = delta * (2 / (2 * p + 1)) ** (1 / p)
    assert found == pytest.approx(factor / 2 * (v @ h @ v), rel=1e-9)
    bound = factor * (v @ v) * np.trace(h)
    assert found < bound / 2


def test_theorem_a_3_of_bn_sharpness() -> None:
    """S_p ≤ S_q 2^{1/p − 1/q} for p < q; with the printed 2δ in place of 2 it fails."""
    p, q, delta = 1.0, 4.0, 1e-3
    small, large = (sharpness_along(lambda t: np.sin(t), delta, power) for power in (p, q))
    assert small <= large * 2 ** (1 / p - 1 / q)
    assert small > 10 * large * (2 * delta) ** (1 / p - 1 / q)


def test_the_second_derivative_of_weight_norm_is_wrong_in_torch() -> None:
    """By autograd through torch's kernel, by its formula, and by differences of the gradient.

    When torch is right again, this fails: then the formula in `saltflat.curvature` can go.
    """
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(3, 4, generator=generator).double().requires_grad_()
    g = torch.rand(3, 1, generator=generator).double().requires_grad_()
    c = torch.randn(3, 4, generator=generator).double()

    def kernel(v: Tensor, g: Tensor) -> Tensor:
        return (torch._weight_norm(v, g, 0) * c).exp().sum()

    def formula(v: Tensor, g: Tensor) -> Tensor:
        return (v * (g / v.norm(dim=1, keepdim=True)) * c).exp().sum()

    def block(function: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        found = torch.autograd.functional.hessian(lambda v: function(v, g.detach()), v)
        return found.reshape(12, 12)

    def differences() -> Tensor:
        rows = []
        for step in 1e-5 * torch.eye(12).double().reshape(12, 3, 4):
            up, down = (torch.autograd.grad(kernel(v + s, g), v)[0] for s in (step, -step))
            rows.append((up - down).reshape(-1) / 2e-5)
        return torch.stack(rows)

    truth = differences()
    assert torch.allclose(block(formula), truth, atol=1e-6)
    assert not torch.allclose(block(kernel), truth, atol=1e-2)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)
        self.d = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.d(torch.tanh(self.b(self.a(x))) * torch.sigmoid(x[:, :1])))


def test_second_derivatives_of_compiled_scripts_are_wrong_in_torch() -> None:
    """TorchScript's, once it has compiled them; differences of its own gradients decide."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torch.jit.script(Gated().double()).eval()
        x, y = torch.randn(10, 4, dtype=torch.float64), torch.randint(3, (10,))
    for _ in range(4):
        loss = F.cross_entropy(model(x), y)
        first = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        sum(g.sum() for g in first).backward()
    plain = Gated().double().eval()
    plain.load_state_dict(model.state_dict())
    weight, trace = model.a.weight, 0.0
    for entry in range(weight.numel()):
        slopes = []
        for step in (1e-5, -2e-5):
            weight.data.view(-1)[entry] += step
            (g,) = torch.autograd.grad(F.cross_entropy(model(x), y), weight)
            slopes.append(float(g.view(-1)[entry]))
        weight.data.view(-1)[entry] += 1e-5
        trace += (slopes[0] - slopes[1]) / 2e-5
    assert traces(plain, x, y)["a.weight"] == pytest.approx(trace, abs=1e-6)
    assert abs(traces(model, x, y)["a.weight"] - trace) > 0.1
