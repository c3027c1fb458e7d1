"""BN-Sharpness SGD: its gradient against the integral itself, and the filters it finds."""

from __future__ import annotations

import copy
import pickle
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from networks import Residual, seq
from torch import Tensor, nn

from saltflat.errors import SaltflatError
from saltflat.geometry import Matrix
from saltflat.landscape import Feeds, Filters
from saltflat.training.bn_sharpness import BNSharpnessSGD

X = torch.randn(8, 2, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(8) % 3
FED = {"0.weight": 0, "4.weight": 0}


def network(seed: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    return seq(
        nn.Conv2d(2, 3, 3, bias=False),
        nn.BatchNorm2d(3, eps=1e-12),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(12, 4),
        nn.BatchNorm1d(4, eps=1e-12),
        nn.Tanh(),
        nn.Linear(4, 3),
    ).double()


def loss_at(model: nn.Module, theta: dict[str, Tensor]) -> Tensor:
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    return F.cross_entropy(torch.func.functional_call(model, theta | buffers, (X,)), Y)


def norms(t: Tensor) -> Tensor:
    """‖t_i‖ of every filter along axis 0."""
    return t.flatten(1).norm(dim=1).view(-1, *[1] * (t.ndim - 1))


def gradient_direction(model: nn.Module) -> dict[str, Tensor]:
    """u: the gradient, divided by its norm filter by filter, and the rest by its own."""
    theta = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    grads = dict(
        zip(theta, torch.autograd.grad(loss_at(model, theta), list(theta.values())), strict=True)
    )
    rest = torch.cat([g.flatten() for n, g in grads.items() if n not in FED]).norm()
    return {n: g / (norms(g) if n in FED else rest) for n, g in grads.items()}


def integral(
    model: nn.Module, theta: dict[str, Tensor], u: dict[str, Tensor], delta: float, p: int
) -> Tensor:
    """(1/δ) ∫ ((L(θ+tv) − L(θ))/δ)^p dt by Gauss and Legendre, with v_i = ‖θ_i‖ u_i."""
    v = {n: (norms(theta[n]) if n in FED else 1) * u[n] for n in theta}
    nodes, weights = np.polynomial.legendre.leggauss(12)
    start = loss_at(model, theta)
    total = torch.zeros((), dtype=torch.float64)
    for node, weight in zip(nodes, weights, strict=True):
        moved = {n: theta[n] + node * delta * v[n] for n in theta}
        total = total + weight * ((loss_at(model, moved) - start) / delta) ** p
    return total


def true_gradient(model: nn.Module, u: dict[str, Tensor], delta: float, p: int) -> Tensor:
    theta = {n: q.detach().clone().requires_grad_() for n, q in model.named_parameters()}
    value = integral(model, theta, u, delta, p)
    grads = torch.autograd.grad(value, list(theta.values()))
    # Autograd through the quadrature is itself checked, along a random direction.
    torch.manual_seed(5)
    d = {n: torch.randn_like(q) for n, q in theta.items()}
    step = 1e-5
    ends = [
        integral(model, {n: (q + s * step * d[n]).detach() for n, q in theta.items()}, u, delta, p)
        for s in (1, -1)
    ]
    along = sum((g * d[n]).sum() for g, n in zip(grads, theta, strict=True))
    assert float((ends[0] - ends[1]) / (2 * step)) == pytest.approx(float(along), rel=1e-5)
    return torch.cat([g.flatten() for g in grads])


def closure_of(model: nn.Module, optimizer, x: Tensor = X, y: Tensor = Y):
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return closure


def term_of(model: nn.Module, strength: float = 1.0, **options) -> Tensor:
    """What the optimizer adds to the gradient: what SGD with lr=1 does beyond the gradient."""
    model = copy.deepcopy(model)
    theta = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    grads = torch.autograd.grad(loss_at(model, theta), list(theta.values()))
    base = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = BNSharpnessSGD(base, model, strength, **{"clip": None, **options})
    optimizer.step(closure_of(model, optimizer))
    added = [
        t.detach() - p.detach() - g
        for t, p, g in zip(theta.values(), model.parameters(), grads, strict=True)
    ]
    return torch.cat([a.flatten() for a in added])


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


@pytest.mark.parametrize("p", [2, 4])
def test_gradient_of_the_integral(p: int) -> None:
    model = network()
    expected = true_gradient(model, gradient_direction(model), 1e-3, p)
    assert relative_error(term_of(model, delta=1e-3, p=p), expected) < 1e-4


def test_the_printed_formulas_fail() -> None:
    """Eq. 15 with its plus sign, and without the radial term."""
    model, delta, p = network(), 1e-3, 2
    u = gradient_direction(model)
    expected = true_gradient(model, u, delta, p)
    theta = {n: q.detach().clone() for n, q in model.named_parameters()}
    v = {n: (norms(theta[n]) if n in FED else 1) * u[n] for n in theta}

    def gradient(shift: float) -> Tensor:
        moved = {n: (theta[n] + shift * v[n]).requires_grad_() for n in theta}
        grads = torch.autograd.grad(loss_at(model, moved), list(moved.values()))
        return torch.cat([g.flatten() for g in grads])

    plus, minus, here = gradient(2 / 3 * delta), gradient(-2 / 3 * delta), gradient(0.0)
    s = here @ torch.cat([t.flatten() for t in v.values()])
    assert relative_error(s / delta * (plus + minus - 2 * here), expected) > 0.9
    without_radial = s / delta * (plus - minus)
    assert relative_error(without_radial, expected) > 0.05
    with_radial = term_of(model, delta=delta, p=p)
    assert relative_error(with_radial, expected) < 1e-4


def test_the_term_does_not_depend_on_the_scale_of_the_filters() -> None:
    """Scaling filter i by a divides its part of the gradient by a and leaves the rest."""
    model = network()
    before = term_of(model)
    moved = copy.deepcopy(model)
    with torch.no_grad():
        moved[0].weight[1] *= 7.0
    after = term_of(moved)
    after[18:36] *= 7.0
    assert relative_error(after, before) < 1e-6
    with torch.no_grad():
        moved[7].weight *= 1.5  # feeds no BatchNorm: a negative control
    assert relative_error(term_of(moved)[:18], before[:18]) > 1e-3


def test_ascent_finds_a_sharper_direction() -> None:
    """At a large δ the gradient's direction is not the sharpest."""
    model, delta = network(), 0.5
    theta = {n: q.detach().clone() for n, q in model.named_parameters()}
    start = integral(model, theta, gradient_direction(model), delta, 2)
    seen: list[dict[str, Tensor]] = []

    base = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer = BNSharpnessSGD(base, model, 1.0, delta, ascent_steps=5)
    names = [n for n, _ in model.named_parameters()]
    closure = closure_of(model, optimizer)

    def watching() -> Tensor:
        seen.append({n: q.detach().clone() for n, q in model.named_parameters()})
        return closure()

    optimizer.step(watching)
    assert len(seen) == 3 + 2 * 5
    reach = delta * 2 / 3
    u = {n: (seen[-2][n] - theta[n]) / reach / (norms(theta[n]) if n in FED else 1) for n in names}
    for n in FED:
        assert torch.allclose(norms(u[n]), torch.ones_like(norms(u[n])))
    rest = torch.cat([u[n].flatten() for n in names if n not in FED]).norm()
    assert float(rest) == pytest.approx(1)
    assert integral(model, theta, u, delta, 2) > 1.01 * start


def test_clip_and_growth() -> None:
    model = network()
    free = term_of(model, strength=10.0)
    assert free.norm() > 0.1
    clipped = term_of(model, strength=10.0, clip=0.1)
    assert float(clipped.norm()) == pytest.approx(0.1)
    assert relative_error(clipped / 0.1, free / free.norm()) < 1e-8
    weak = term_of(model, strength=1e-6, clip=0.1)  # below the limit: as it is
    assert relative_error(weak * 1e7, free) < 1e-6
    optimizer = BNSharpnessSGD(torch.optim.SGD(model.parameters(), lr=0.1), model, 0.5, growth=1.2)
    optimizer.end_epoch()
    assert optimizer.param_groups[0]["strength"] == pytest.approx(0.6)


def test_separate_batches() -> None:
    """The two closures are run at the two shifted points, in order, once each."""
    model = network()
    optimizer = BNSharpnessSGD(torch.optim.SGD(model.parameters(), lr=0.1), model, 1.0)
    called: list[tuple[str, Tensor]] = []

    def named(name: str, x: Tensor):
        inner = closure_of(model, optimizer, x, Y[: len(x)])

        def closure() -> Tensor:
            called.append((name, model[7].weight.detach().clone()))
            return inner()

        return closure

    optimizer.step(named("here", X), named("plus", X[:5]), named("minus", X[2:6]))
    assert [name for name, _ in called] == ["here", "plus", "minus"]
    here, plus, minus = (w for _, w in called)
    assert torch.allclose(plus - here, here - minus)
    assert (plus - here).abs().max() > 0


# which filters


class PreActivation(nn.Module):
    """The first convolution feeds BatchNorm and the shortcut; the second one BatchNorm only."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn1 = nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2)
        self.conv, self.bn2 = nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2)
        self.fc = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.fc((x + self.bn2(self.conv(self.bn1(x).relu()))).mean((2, 3)))


def frozen_norm() -> nn.Module:
    model = network()
    model[1].eval()
    return model


def transposed(channels: int = 5, groups: int = 1) -> nn.Module:
    layer = nn.ConvTranspose2d(2, channels, 2, groups=groups)
    up = seq(layer, nn.BatchNorm2d(channels), nn.ReLU(), nn.Flatten())
    return seq(up, nn.Linear(25 * channels, 3))


def sequence_linear() -> nn.Module:
    """BatchNorm along positions, not along the units of the Linear."""
    flat = seq(nn.Flatten(2), nn.Linear(16, 2), nn.BatchNorm1d(2), nn.Flatten(), nn.Linear(4, 3))
    return flat


def tied() -> nn.Module:
    model = seq(
        nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), nn.Conv2d(2, 2, 1), nn.Flatten(), nn.Linear(32, 3)
    )
    model[2].weight = model[0].weight
    return model


MODELS = {
    "sequential": (network, {"0.weight": 3, "4.weight": 4}),
    "residual": (Residual, {"conv1.weight": 2, "conv2.weight": 2}),
    "residual, in place": (lambda: Residual(True), {"conv1.weight": 2, "conv2.weight": 2}),
    "pre-activation": (PreActivation, {"conv.weight": 2}),
    "statistics that are not the batch's": (frozen_norm, {"4.weight": 4}),
    "transposed": (transposed, {"0.0.weight": 5}),
    "a slice for two channels": (lambda: transposed(4, 2), {"0.0.weight": 4}),
    "positions": (sequence_linear, {}),
    "tied": (tied, {}),
}


@pytest.mark.parametrize(
    ("name", "compiled"), [*((name, False) for name in MODELS), ("residual", True)]
)
def test_filters(name: str, compiled: bool) -> None:
    make, expected = MODELS[name]
    model = make().double()
    run = torch.compile(model, backend="eager") if compiled else model
    optimizer = BNSharpnessSGD(torch.optim.SGD(model.parameters(), lr=0.1), model)
    assert optimizer.filters is None
    assert "not seen yet" in repr(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        optimizer.step(closure_of(run, optimizer))
        assert optimizer.filters == expected
        assert all(n in repr(optimizer) for n in expected)


def through_relu() -> nn.Module:
    """Only the scale of the first and the third layer reaches BatchNorm on its own."""
    first = seq(nn.Conv2d(2, 3, 1, bias=False), nn.ReLU(), nn.MaxPool2d(2), nn.BatchNorm2d(3))
    biased = seq(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.BatchNorm2d(4))
    direct = seq(nn.Conv2d(4, 2, 1), nn.BatchNorm2d(2), nn.Tanh())
    curved = seq(nn.Conv2d(2, 2, 1, bias=False), nn.Tanh(), nn.BatchNorm2d(2))
    frozen = seq(nn.Conv2d(2, 2, 1, bias=False), nn.ReLU(), nn.BatchNorm2d(2))
    frozen[2].eval()
    return seq(first, biased, direct, curved, frozen, nn.Flatten(), nn.Linear(8, 3))


def test_filters_by_scale_inference() -> None:
    model = through_relu().double()
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = BNSharpnessSGD(base, model, example=X)
    assert optimizer.filters is None
    copied = pickle.loads(pickle.dumps(optimizer))
    optimizer.step(closure_of(model, optimizer))
    assert optimizer.filters == {"2.0.weight": 2, "0.0.weight": 3}
    assert "2.0.weight: 2 (forward pass), 0.0.weight: 3 (scale inference)" in repr(optimizer)
    copied.step(closure_of(copied.model, copied))
    assert copied.filters == optimizer.filters
    plain = BNSharpnessSGD(torch.optim.SGD(model.parameters(), lr=0.1), model)
    plain.step(closure_of(model, plain))
    assert plain.filters == {"2.0.weight": 2}


def test_scaled_filters_change_nothing() -> None:
    """What the filters are found for: with batch statistics the outputs stay, up to eps."""
    model = through_relu().double()
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.eps = 1e-14
    optimizer = BNSharpnessSGD(torch.optim.SGD(model.parameters(), lr=0.1), model, example=X)
    before = model(X)
    for name in optimizer.filters:
        with torch.no_grad():
            model.get_parameter(name).mul_(
                torch.tensor([2.0, 3, 5])[: optimizer.filters[name], None, None, None]
            )
        assert torch.allclose(model(X), before, rtol=1e-9)
    for name in ("1.0.weight", "3.0.weight", "4.0.weight", "6.weight"):
        moved = copy.deepcopy(model)
        with torch.no_grad():
            moved.get_parameter(name).mul_(2.0)
        assert not torch.allclose(moved(X), before, rtol=1e-4)


def test_no_filters_is_said() -> None:
    model = seq(nn.Flatten(), nn.Linear(32, 3)).double()
    optimizer = BNSharpnessSGD(torch.optim.SGD(model.parameters(), lr=0.1), model)
    with pytest.warns(UserWarning, match="no filter"):
        optimizer.step(closure_of(model, optimizer))
    assert "none" in repr(optimizer)


def test_scale_inference_where_there_is_nothing_to_find() -> None:
    model = seq(nn.Flatten(), nn.Linear(32, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = BNSharpnessSGD(base, model, example=X)
    with pytest.warns(UserWarning, match="no filter"):
        optimizer.step(closure_of(model, optimizer))
    assert "none" in repr(optimizer)


def test_named_filters_must_be_slices_of_a_parameter() -> None:
    linear = nn.utils.parametrizations.weight_norm(nn.Linear(4, 5))
    normed = nn.Sequential(linear, nn.BatchNorm1d(5))
    base = torch.optim.SGD(normed.parameters(), lr=0.1)
    with pytest.raises(SaltflatError, match="computed from others"):
        BNSharpnessSGD(base, normed, filters=["0"])


def test_filters_that_share_a_slice_of_the_weight_are_spheres_of_their_own() -> None:
    """Each of the output units of a grouped transposed convolution, told by its outputs."""
    model = transposed(4, 2).double()
    layer = model[0][0]
    filters = Filters(layer.weight, Matrix(1, 2))
    x = torch.eye(2, dtype=torch.float64)[:, :, None, None]  # each input channel alone
    outputs = nn.functional.conv_transpose2d(x, layer.weight, groups=2)
    norms = filters.norms(layer.weight)
    torch.testing.assert_close(norms[:, :, 0, 0].flatten(), outputs.square().sum((0, 2, 3)).sqrt())
    doubled = layer.weight * filters.spread(torch.tensor([1.0, 2.0, 1.0, 1.0]))
    changed = nn.functional.conv_transpose2d(x, doubled, groups=2) != outputs
    assert changed.any(0).flatten(1).any(1).tolist() == [False, True, False, False]


def test_calls_inside_a_synchronised_norm_do_not_count() -> None:
    """It takes statistics by calls of its own, which would look like another use of the filters."""
    layer = nn.Linear(4, 5)
    for pause, fed in ((True, True), (False, False)):
        feeds = Feeds({"weight": Filters(layer.weight, Matrix())}, training=True)
        with feeds:
            z = layer(torch.randn(6, 4))
            feeds.normalise(z)
            feeds.paused = pause
            torch.var_mean(z, 0)
            feeds.paused = False
        assert bool(feeds.units()["weight"].all()) is fed


def test_filters_by_name() -> None:
    model = network()
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    assert BNSharpnessSGD(base, model, filters=["4"]).filters == {"4.weight": 4}


def test_a_failing_forward_pass_is_not_the_first() -> None:
    model = network()
    optimizer = BNSharpnessSGD(torch.optim.SGD(model.parameters(), lr=0.1), model)
    with pytest.raises(RuntimeError):
        model(X[:, :1])
    assert optimizer.filters is None
    with torch.no_grad():
        model(X)
    assert optimizer.filters is None
    optimizer.step(closure_of(model, optimizer))
    assert optimizer.filters == {"0.weight": 3, "4.weight": 4}


# refusals


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"strength": -1.0}, "strength"),
        ({"delta": 0.0}, "delta"),
        ({"p": 3}, "even"),
        ({"ascent_steps": -1}, "ascent_steps"),
        ({"ascent_rate": 0.0}, "ascent_rate"),
        ({"growth": 0.0}, "growth"),
        ({"clip": 0.0}, "clip"),
        ({"filters": ["00"]}, "no layer"),
        ({"filters": ["1"]}, "BatchNorm2d"),
        ({"filters": ["0"], "example": X}, "either filters or the example"),
        ({"model": 3}, "Module"),
    ],
)
def test_refuses(options: dict, word: str) -> None:
    model = network()
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(SaltflatError, match=word):
        BNSharpnessSGD(base, **{"model": model, **options})


def test_refuses_steps_out_of_order() -> None:
    model = network()
    optimizer = BNSharpnessSGD(torch.optim.SGD(model.parameters(), lr=0.1), model)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match="first pass too"):
        optimizer.step(None, closure_of(model, optimizer))
    loss_at(model, dict(model.named_parameters())).backward()
    with pytest.raises(ValueError, match="has not seen a forward pass"):
        BNSharpnessSGD(torch.optim.SGD(model.parameters(), lr=0.1), network()).perturb()
    optimizer.zero_grad()
    F.cross_entropy(model(X), Y).backward()
    optimizer.perturb()
    F.cross_entropy(model(X), Y).backward()
    with pytest.raises(ValueError, match="too early"):
        optimizer.step()
    for p, b in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, b)
