"""The certificate: who passes, who must not, and for how many samples it speaks."""

from __future__ import annotations

from functools import partial
from typing import Any

import networks as net
import pytest
import torch
from agree import agrees
from cases import BY_NAME, NETWORKS, Case
from dense import Dense
from torch import Tensor, nn

import saltflat as sf


@pytest.mark.parametrize("case", NETWORKS, ids=str)
def test_every_block_of_every_network(case: Case) -> None:
    estimator = sf.Hutchinson(probes=4)
    result = sf.trace(case.model(), case.data(), case.loss, estimator=estimator)
    verdict = result.certificate
    if verdict.piecewise_linear and result.exact and "products" not in _rules(result):
        assert verdict.samples == case.n
    for name, linear in verdict.piecewise_linear.items():
        assert linear is case.certified(name) or case.certified(name) is None, name
        assert linear or verdict.reasons[name]
    assert bool(verdict) == all(verdict.piecewise_linear.values())


def _rules(result: sf.Trace) -> set[str]:
    return {detail.rule for detail in result.details.values()}


@pytest.mark.parametrize(
    "name", ["mlp Tanh", "mlp GELU", "attention", "module called in a chain", "rnn relu"]
)
def test_the_formula_would_have_been_wrong(name: str) -> None:
    """Negative control: where a block is refused, the exact Gauss-Newton value is another."""
    case = BY_NAME[name]
    truth = case.dense().blocks(case.dense().hessian)
    hessian, ggn = (sf.trace(case.model(), case.data(), curvature=c) for c in ("hessian", "ggn"))
    off = {n: abs(ggn[n] - float(b.trace())) / float(b.abs().max()) for n, b in truth.items()}
    for n, linear in hessian.certificate.piecewise_linear.items():
        assert (off[n] < 1e-10) if linear else (off[n] > 1e-3), n


def test_an_interpolating_network_is_rejected() -> None:
    """Where the loss's gradient vanishes the Hessian IS the GGN, and proves nothing."""
    case = BY_NAME["mlp Tanh"]
    model, (x, _) = case.model(), case.data()
    fitted = model(x).detach()
    oracle = Dense(case.model(), x, fitted, "mse")
    assert torch.allclose(oracle.hessian, oracle.ggn, atol=1e-12)  # the trap is set
    result = sf.trace(model, (x, fitted), "mse")
    assert not result.certificate.piecewise_linear["0.weight"]
    assert not result.certificate.piecewise_linear["0.bias"]
    assert result.certificate.piecewise_linear["2.weight"]


def test_fitted_and_other_samples() -> None:
    case = BY_NAME["mlp Tanh"]
    model, (x, _) = case.model(), case.data(n=64)
    y = model(x).detach()
    y[32:] += 1
    oracle = Dense(case.model(), x, y, "mse")
    result = sf.trace(model, [(x[:32], y[:32]), (x[32:], y[32:])], "mse")
    assert not result.certificate
    agrees(result, oracle.blocks(oracle.hessian))


def test_no_verdict_is_carried_over() -> None:
    """Same class, shapes and names, another activation."""
    data = BY_NAME["mlp"].data()
    model = BY_NAME["mlp"].model()
    assert bool(sf.trace(model, data).certificate)
    assert not bool(sf.trace(BY_NAME["mlp Tanh"].model(), data).certificate)
    model[1] = nn.Tanh()
    assert not bool(sf.trace(model, data).certificate)
    model[1] = nn.ReLU()
    assert bool(sf.trace(model, data).certificate)
    handle = model[1].register_forward_hook(lambda module, args, out: out.tanh())
    assert not bool(sf.trace(model, data).certificate)
    handle.remove()
    assert bool(sf.trace(model, data).certificate)


class Switch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.act = nn.Linear(4, 5), nn.Linear(5, 3), "relu"
        self.config = {"act": "relu"}

    def forward(self, x: Tensor) -> Tensor:
        act = self.act if self.act != "config" else self.config["act"]
        return self.fc2(getattr(torch, act)(self.fc1(x)))


def test_what_the_modules_are_set_to() -> None:
    model, data = Switch().double(), BY_NAME["mlp"].data()
    for act, exact in (("relu", True), ("tanh", False), ("relu", True), ("config", True)):
        model.act = act
        assert bool(sf.trace(model, data).certificate) is exact
    model.config["act"] = "tanh"
    assert not bool(sf.trace(model, data).certificate)


class Sometimes(nn.Module):
    """Bends only for samples whose first entry is large."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h, large = self.fc1(x), x[:, :1] > 10
        return self.fc2(torch.where(large, h.tanh(), h.relu()) if bool(large.any()) else h.relu())


def test_the_last_batch_counts() -> None:
    torch.manual_seed(0)
    model, x = Sometimes().double(), torch.randn(200, 4, dtype=torch.float64).clamp(-9, 9)
    y = torch.zeros(20, dtype=torch.long)
    batches = [(x[i : i + 20], y) for i in range(0, 200, 20)]
    straight = sf.trace(model, batches)
    assert straight.exact
    assert straight.certificate.samples == 200
    x[-1, 0] = 11
    bent = sf.trace(model, batches, estimator=sf.Hutchinson(probes=4))
    assert not bent.certificate.piecewise_linear["fc1.weight"]
    assert bent.certificate.piecewise_linear["fc2.weight"]
    assert not bent.details["fc1.weight"].exact
    assert "tanh" in bent.details["fc1.weight"].reason


@pytest.mark.parametrize("n", [1, 3])
def test_speaks_for_no_more_samples_than_there_are(n: int) -> None:
    case = BY_NAME["mlp"]
    assert sf.trace(case.model(), case.data(n=n)).certificate.samples == n


def test_without_a_certificate_everything_is_estimated() -> None:
    case = BY_NAME["mlp"]
    oracle = case.dense()
    few = sf.Hutchinson(probes=30)
    result = sf.trace(case.model(), case.data(), certify="none", estimator=few)
    assert not any(detail.exact for detail in result.details.values())
    agrees(result, oracle.blocks(oracle.hessian))


def test_gauss_newton_needs_no_certificate() -> None:
    case = BY_NAME["mlp Tanh"]
    result = sf.trace(case.model(), case.data(), curvature="ggn")
    assert result.exact


@pytest.mark.parametrize("inner", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("outer", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_verdict_does_not_depend_on_units(inner, outer, dtype: torch.dtype) -> None:
    """Inputs and hidden values in other units, everything else to match: the same function."""

    class Rescaled(nn.Module):
        def __init__(self, act: nn.Module) -> None:
            super().__init__()
            self.act = act

        def forward(self, z: Tensor) -> Tensor:
            return self.act(z / inner)

    for act, linear in ((nn.ReLU(), True), (nn.Tanh(), False), (nn.LayerNorm(5), False)):
        torch.manual_seed(0)
        model = net.mlp(partial(Rescaled, act)).to(dtype)
        model[0].weight.data *= inner / outer
        model[0].bias.data *= inner
        x, y = outer * torch.randn(8, 4, dtype=dtype), torch.randint(3, (8,))
        details = sf.trace(model, (x, y), estimator=sf.Hutchinson(probes=4)).details
        assert details["0.weight"].exact is linear
        assert details["2.weight"].exact


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_deep_wide_relu_network_is_accepted(dtype: torch.dtype) -> None:
    """Rounding grows with depth and width; it must not be taken for curvature."""
    torch.manual_seed(0)
    layers = [m for _ in range(12) for m in (nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(64, 10)).to(dtype)
    assert sf.trace(model, (torch.randn(32, 64, dtype=dtype), torch.randint(10, (32,)))).exact


@pytest.mark.parametrize("slope", [1e-3, 1e-2])
def test_slight_curvature_is_seen(slope: float) -> None:
    """relu(h) + ε tanh(h) is rejected, or its value is right all the same."""

    class Slight(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.relu() + slope * x.tanh()

    torch.manual_seed(0)
    model = net.mlp(Slight).double()
    x, y = torch.randn(8, 4, dtype=torch.float64), torch.randint(3, (8,))
    assert not sf.trace(model, (x, y)).certificate.piecewise_linear["0.weight"]


def rare_pairs(outputs: Tensor, targets: Tensor) -> Tensor:
    """A mean over samples, but for one product between those two that carry the label 2."""
    rare = outputs[targets == 2].sum(0).square().sum() / len(outputs)
    return nn.functional.cross_entropy(outputs, targets) + rare


@pytest.mark.parametrize("pair", [(3, 37), (3, 5), (18, 19), (12, 13)])
@pytest.mark.parametrize("size", [8, 40])
def test_two_samples_that_interact(pair: tuple[int, int], size: int) -> None:
    """A loss is not separable if ANY two samples meet in it, in whatever batches they lie."""
    case = BY_NAME["mlp"]
    x, _ = case.data(n=40)
    y = torch.zeros(40, dtype=torch.long)
    y[list(pair)] = 2
    oracle = Dense(case.model(), x, y, rare_pairs)
    batches = list(zip(x.split(size), y.split(size), strict=True))
    result = sf.trace(case.model(), batches, rare_pairs, estimator=sf.Hutchinson(probes=30))
    assert not result.exact
    agrees(result, oracle.blocks(oracle.hessian))


class ScalarGain(nn.Module):
    """A gain without dimensions, ahead of what the graph does not show to be piecewise linear."""

    def __init__(self, bend: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.bend, self.out = nn.Linear(4, 5), bend, nn.Linear(5, 3)
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.out(self.bend(self.gain * self.fc(x)))
        return result


@pytest.mark.parametrize(("bend", "linear"), [(nn.Softshrink(0.1), True), (nn.Tanh(), False)])
def test_a_parameter_without_dimensions(bend: nn.Module, linear: bool) -> None:
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.arange(6) % 3
    result = sf.trace(ScalarGain(bend), (x, y))
    assert result.certificate.piecewise_linear["gain"] is linear
    assert "not available" not in result.certificate.reasons["gain"]
    oracle = Dense(ScalarGain(bend), x, y)
    agrees(result, oracle.blocks(oracle.hessian))


# What looks linear is not linear.


class TanhGELU(nn.GELU):
    def __init__(self) -> None:
        super().__init__("tanh")


class Power(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.abs() ** 1.000001


SMOOTH = [
    nn.CELU, nn.ELU, nn.GELU, TanhGELU, nn.Hardswish, nn.LogSigmoid, nn.Mish, nn.SELU, nn.SiLU,
    nn.Sigmoid, nn.Softplus, nn.Softsign, nn.Tanh, nn.Tanhshrink, Power,
    lambda: nn.LayerNorm(40), lambda: nn.GroupNorm(4, 40), lambda: nn.RMSNorm(40), nn.Softmax,
    lambda: nn.LogSoftmax(1), nn.Softmin,
]  # fmt: skip


@pytest.mark.parametrize("offset", [0.0, 30.0, 300.0])
@pytest.mark.parametrize("activation", SMOOTH)
@pytest.mark.filterwarnings("ignore:Implicit dimension choice")
def test_smooth_layers_are_never_exact(activation, offset: float) -> None:
    """Also far out, where they are linear to rounding."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 40), activation(), nn.Linear(40, 3)).double()
    with torch.no_grad():
        model[0].bias += offset
    x, y = torch.randn(24, 8, dtype=torch.float64), torch.randint(3, (24,))
    result = sf.trace(model, (x, y), estimator=sf.Hutchinson(probes=4))
    assert not result.details["0.weight"].exact
    assert not result.exact
    assert result.details["2.weight"].exact
    assert result.certificate.piecewise_linear["0.weight"] is False


def far_out() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 40), nn.ELU(), nn.Linear(40, 3)).double()
    with torch.no_grad():
        model[0].bias += 50
    return model, torch.randn(64, 4, dtype=torch.float64), torch.randint(3, (64,))


@pytest.mark.parametrize("measure", [sf.trace, sf.diagonal])
def test_probing_is_asked_for_and_not_exact(measure) -> None:
    model, x, y = far_out()
    result = measure(model, (x, y), certify="probe")
    detail = result.details["0.weight"]
    assert not detail.exact
    assert not result.exact
    assert torch.as_tensor(detail.stderr).isnan().all()
    assert torch.tensor(result.stderr).isnan()
    assert "probed on 8 of 64 samples" in detail.reason
    assert result.details["2.weight"].exact
    oracle = Dense(model, x, y)
    truth = oracle.blocks(oracle.hessian)["0.weight"].diagonal()
    value = torch.as_tensor(detail.value, dtype=torch.float64).reshape(-1)
    truth = truth if measure is sf.diagonal else truth.sum().reshape(1)
    assert torch.allclose(value, truth, rtol=1e-9, atol=1e-12)


def test_what_bends_on_the_probed_samples_is_estimated() -> None:
    model, x, y = far_out()
    with torch.no_grad():
        model[0].bias -= 50
    few = sf.Hutchinson(probes=4)
    detail = sf.trace(model, (x, y), certify="probe", estimator=few).details["0.weight"]
    assert detail.rule == "probes"
    assert detail.stderr > 0


def test_measures_of_what_was_probed_are_not_exact() -> None:
    model, x, y = far_out()
    report = sf.measure(model, (x, y), certify="probe", measures=["hessian_trace", "kappa_trace"])
    for measurement in report.values():
        assert not measurement.exact
        assert torch.tensor(measurement.stderr).isnan()


@sf.piecewise_linear
class Declared(torch.autograd.Function):
    """A ReLU of one's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x > 0)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * ctx.saved_tensors[0]


class Apply(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Declared.apply(x)


def test_exact_given_a_declaration() -> None:
    case = BY_NAME["mlp"]
    torch.manual_seed(0)
    model, (x, y) = net.mlp(Apply).double(), case.data()
    result = sf.trace(model, (x, y))
    assert result.exact
    assert "given that Declared is" in result.details["0.weight"].reason
    assert "given" not in result.details["2.weight"].reason
    oracle = Dense(model, x, y)
    agrees(result, oracle.blocks(oracle.hessian))
