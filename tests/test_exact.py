"""Every case against the dense oracle, and every way of giving the same data."""

from __future__ import annotations

import copy
from fnmatch import fnmatch

import networks as net
import pytest
import torch
from agree import FLOOR, TOLERANCE, agrees, uncertain
from cases import BY_NAME, CASES, LOSSES, NETWORKS, WEIGHTS, Case, cast, class_last, classes, sine
from dense import Dense
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import saltflat as sf

QUICK = sf.Hutchinson(probes=30)


#: what computes an estimate
ESTIMATES = {"probes", "propagated", "activation probes", "sketch"}


@pytest.mark.parametrize("measure", [sf.trace, sf.diagonal])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_hessian(case: Case, measure) -> None:
    oracle = case.dense()
    blocks = oracle.blocks(oracle.hessian)
    result = measure(case.model(), case.data(), case.loss)
    agrees(result, blocks)
    for name, block in blocks.items():
        detail, certified = result.details[name], case.certified(name)
        written = detail.rule == "products"  # few enough entries for a product each
        assert detail.exact is certified or certified is None or written, (name, detail.reason)
        assert (detail.rule in ESTIMATES) is not detail.exact, name
        if not detail.exact:
            uncertain(result, name, block)
        for pattern, rule in case.rules.items():
            assert detail.rule == rule or not fnmatch(name, pattern), (name, detail.rule)
    assert result.exact == all(d.exact for d in result.details.values())
    assert result.exact == (result.stderr == 0.0)


@pytest.mark.parametrize("measure", [sf.trace, sf.diagonal])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_ggn(case: Case, measure) -> None:
    oracle = case.dense()
    result = measure(case.model(), case.data(), case.loss, curvature="ggn")
    agrees(result, oracle.blocks(oracle.ggn))
    assert result.exact or not case.separable
    assert result.curvature == "ggn"


@pytest.mark.parametrize("measure", [sf.trace, sf.diagonal])
@pytest.mark.parametrize("case", [*NETWORKS, *LOSSES], ids=str)
def test_float32(case: Case, measure) -> None:
    dtype = torch.float32
    oracle = case.dense(dtype)
    loss = cast(case.loss, dtype)
    result = measure(case.model(dtype), case.data(dtype), loss, estimator=QUICK)
    agrees(result, oracle.blocks(oracle.hessian), dtype)
    for name, detail in result.details.items():
        written = detail.rule == "products"
        assert detail.exact is case.certified(name) or case.certified(name) is None or written, name


def test_float32_model_measured_in_float64() -> None:
    case = BY_NAME["residual"]
    oracle = case.dense(torch.float32)
    model, data = case.model(torch.float32), case.data(torch.float32)
    agrees(sf.trace(model, data, dtype=torch.float64), oracle.blocks(oracle.hessian))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_are_measured_in_float32(dtype: torch.dtype) -> None:
    case = BY_NAME["conv2d padding"]
    model, data = case.model(dtype), case.data(dtype)
    oracle = case.dense(dtype)
    agrees(sf.diagonal(model, data), oracle.blocks(oracle.hessian), torch.float32)
    agrees(
        sf.diagonal(model, cast(data, torch.float32)), oracle.blocks(oracle.hessian), torch.float32
    )


def test_an_embedding_bag_is_proved_linear() -> None:
    """Torch differentiates it once only, which is all that the Gauss-Newton form needs."""
    case = Case("embedding bag", net.Bags, classes(6, 3), twin=lambda: net.Bags(bag=False))
    oracle = case.dense()
    agrees(sf.trace(case.model(), case.data(), curvature="ggn"), oracle.blocks(oracle.ggn))
    agrees(sf.diagonal(case.model(), case.data(), curvature="ggn"), oracle.blocks(oracle.ggn))
    result = sf.trace(case.model(), case.data())
    agrees(result, oracle.blocks(oracle.hessian))
    assert result.exact


class Distances(nn.Module):
    """Distances to points, which torch differentiates once only."""

    def __init__(self) -> None:
        super().__init__()
        self.points, self.fc = nn.Parameter(torch.randn(5, 4)), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.cdist(x, self.points, p=3.0))


def cdist_is_differentiated_twice() -> bool:
    x = torch.zeros(1, 2, requires_grad=True)
    (slope,) = torch.autograd.grad(torch.cdist(x, torch.ones(1, 2), p=3.0), x, create_graph=True)
    try:
        torch.autograd.grad(slope.sum(), x)
    except RuntimeError:
        return False
    return True


@pytest.mark.skipif(
    cdist_is_differentiated_twice(), reason="this torch has cdist's second derivative, as 2.15 does"
)
def test_without_a_second_derivative() -> None:
    torch.manual_seed(0)
    model = Distances().double()
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.arange(6) % 3
    oracle = Dense(copy.deepcopy(model), x, y, names=["fc.weight", "fc.bias"])
    with pytest.raises(sf.SaltflatError, match="ggn"):
        sf.trace(model, (x, y))
    assert sf.trace(model, (x, y), curvature="ggn").exact
    result = sf.trace(model, (x, y), parameters=["fc.weight", "fc.bias"])
    agrees(result, oracle.blocks(oracle.hessian))
    assert result.exact


def test_totals() -> None:
    model, data = BY_NAME["mlp"].model(), BY_NAME["mlp"].data()
    trace, diagonal = sf.trace(model, data), sf.diagonal(model, data)
    assert trace.total == pytest.approx(sum(trace.values()), rel=1e-12)
    for name, p in model.named_parameters():
        assert diagonal[name].shape == p.shape
        assert float(diagonal[name].sum()) == pytest.approx(trace[name], rel=1e-12)
    with pytest.raises(TypeError):
        trace["0.weight"] = 0.0


def test_a_batch_that_is_sorted_only_later() -> None:
    """The order inside changes after the probed samples, under a loss with signs of its own."""
    case = BY_NAME["sorted inside"]
    x, y = case.data(n=24)
    x[:8] = x[x[:8, 0].argsort()]
    oracle = Dense(case.model(), x, y, sine)
    agrees(sf.trace(case.model(), (x, y), sine), oracle.blocks(oracle.hessian))


# which parameters


def test_frozen_parameters() -> None:
    case = BY_NAME["frozen"]
    model, (x, y) = case.model(), case.data()
    assert sf.trace(model, (x, y)).frozen == ("0.weight", "2.bias")
    everything = Dense(case.model().requires_grad_(), x, y)
    result = sf.trace(model, (x, y), parameters="all")
    agrees(result, everything.blocks(everything.hessian))
    assert result.frozen == ()


@pytest.mark.parametrize("names", [["2.weight"], ["2.bias", "0.weight"], ["0.bias", "0.weight"]])
def test_parameters_by_name(names: list[str]) -> None:
    case = BY_NAME["mlp"]
    model, data = case.model(), case.data()
    blocks = case.dense().blocks(case.dense().hessian)
    agrees(sf.diagonal(model, data, parameters=names), {n: blocks[n] for n in blocks if n in names})


# how the data are cut

CUT = [
    "mlp",
    "residual",
    "attention",
    "sequences",
    "segmentation weights ignored",
    "cross entropy sum",
    "cross entropy weights",
    "cross entropy ignored",
    "cross entropy everything",
    "cross entropy soft weights",
    "mse",
    "bce pos weight",
    "weighted mean function",
    "dice",
]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", CUT)
def test_batches_do_not_matter(name: str, size: int) -> None:
    case = BY_NAME[name]
    oracle, loader = case.dense(), DataLoader(TensorDataset(*case.data()), batch_size=size)
    for curvature in ("hessian", "ggn"):
        arguments = {"loss": case.loss, "curvature": curvature, "estimator": QUICK}
        result = sf.trace(case.model(), loader, **arguments)
        agrees(result, oracle.blocks(getattr(oracle, curvature)))
        whole = sf.trace(case.model(), case.data(), **arguments)
        for n, detail in result.details.items():
            assert detail.exact == whole.details[n].exact
            assert result[n] == pytest.approx(whole[n], rel=1e-9, abs=1e-13)


def test_batches_of_different_lengths() -> None:
    """Sequences of 2 and of 4 tokens: every token counts the same."""
    case = BY_NAME["sequences"]
    model, (x, y) = case.model(), case.data(n=3)
    u = torch.randint(6, (4, 4), generator=torch.Generator().manual_seed(2))
    v = u % 3
    parts = [
        Dense(case.model(), a, b, lambda o, y: len(o) * o.shape[1] * class_last(o, y))
        for a, b in ((x, y), (u, v))
    ]
    mean = sum(part.hessian for part in parts) / (3 * 2 + 4 * 4)
    for batches in ([(x, y), (u, v)], [(u, v), (x, y)]):
        result = sf.diagonal(model, batches)
        agrees(result, parts[0].blocks(mean))
        assert result.exact


def test_images_of_different_sizes() -> None:
    case = BY_NAME["residual"]
    x, y = case.data()
    wide = torch.nn.functional.pad(x, (0, 2))
    parts = [Dense(case.model(), images, y) for images in (x, wide)]
    result = sf.trace(case.model(), [(x, y), (wide, y)])
    agrees(result, parts[0].blocks((parts[0].hessian + parts[1].hessian) / 2))
    assert result.exact


def test_a_batch_that_is_ignored_altogether() -> None:
    case = BY_NAME["mlp"]
    x, y = case.data(n=6)
    y = y.where(torch.arange(6) >= 2, -100)
    loss = nn.CrossEntropyLoss(weight=WEIGHTS)
    oracle = Dense(case.model(), x, y, loss)
    loader = list(zip(x.split(2), y.split(2), strict=True))
    agrees(sf.trace(case.model(), loader, loss), oracle.blocks(oracle.hessian))


def test_the_mean_counts_samples_and_not_batches() -> None:
    """Negative control: the average of batch averages is a different number."""
    case = BY_NAME["mlp"]
    x, y = case.data(n=5)
    parts = [Dense(case.model(), x[s], y[s]).hessian.trace() for s in (slice(4), slice(4, 5))]
    right = sf.trace(case.model(), [(x[:4], y[:4]), (x[4:], y[4:])]).total
    assert right == pytest.approx(float(0.8 * parts[0] + 0.2 * parts[1]), rel=1e-10)
    assert right != pytest.approx(float(sum(parts) / 2), rel=1e-3)


def test_sum_is_n_times_mean() -> None:
    case = BY_NAME["mlp"]
    total = sf.trace(case.model(), case.data(), nn.CrossEntropyLoss(reduction="sum")).total
    assert total == pytest.approx(case.n * sf.trace(case.model(), case.data()).total, rel=1e-12)


@pytest.mark.parametrize("budget", [1, 1 << 14])
@pytest.mark.parametrize("name", ["mlp", "residual", "segmentation", "raw parameters", "attention"])
def test_memory_budget_does_not_matter(name: str, budget: int) -> None:
    case = BY_NAME[name]
    model, data = case.model(), case.data(n=8)
    for measure, curvature in ((sf.trace, "hessian"), (sf.diagonal, "ggn")):
        arguments = {"curvature": curvature, "estimator": sf.Hutchinson(probes=4)}
        whole = measure(model, data, **arguments)
        parts = measure(model, data, **arguments, memory_budget=budget)
        for n, value in whole.items():
            torch.testing.assert_close(parts[n], value, rtol=1e-9, atol=1e-13)
            assert whole.details[n].exact == parts.details[n].exact


# extreme numbers: closed forms of a last layer, H_W = mean_i B_i ⊗ x_i x_iᵀ


def last_layer(logits: torch.Tensor, dtype: torch.dtype) -> tuple[nn.Module, torch.Tensor]:
    """A Linear layer whose weight is `logits`: the inputs are unit vectors, one for each row."""
    layer = nn.Linear(len(logits), logits.shape[1], bias=False, dtype=dtype)
    layer.weight.data = logits.T.to(dtype).clone()
    return layer, torch.eye(len(logits), dtype=dtype)


@pytest.mark.parametrize("measure", [sf.trace, sf.diagonal])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("gap", [0.0, 1.0, 16.0, 40.0, 200.0, 1e4])
def test_confident_softmax(gap: float, dtype: torch.dtype, measure) -> None:
    rows = [[0, gap, 0, 1], [gap, 0, -gap, -2 * gap], [-gap, -3 * gap, 0, 1], [-gap, gap, gap, 0]]
    logits = torch.tensor(rows, dtype=torch.float64)
    model, x = last_layer(logits, dtype)
    p = logits.log_softmax(1)
    others = [p[:, [j for j in range(4) if j != c]].logsumexp(1) for c in range(4)]
    want = (p + torch.stack(others, 1)).exp().T / 4  # p (1 - p) without cancellation
    result = measure(model, (x, torch.tensor([0, 1, 2, 3])))
    got = torch.as_tensor(result["weight"], dtype=torch.float64)
    want = want if measure is sf.diagonal else want.sum()
    torch.testing.assert_close(got, want, rtol=TOLERANCE[dtype], atol=1e-40)
    assert result.exact


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("logit", [0.0, 16.0, -16.0, 40.0, -40.0, 1e4])
def test_confident_sigmoid(logit: float, dtype: torch.dtype) -> None:
    model, x = last_layer(torch.tensor([[logit, -logit]]), dtype)
    z = torch.tensor([logit, -logit], dtype=torch.float64)
    want = (z.sigmoid() * (-z).sigmoid() / 2).reshape(2, 1)
    got = sf.diagonal(model, (x, torch.tensor([[1.0, 0.0]], dtype=dtype)), "bce")["weight"]
    torch.testing.assert_close(got, want, rtol=TOLERANCE[dtype], atol=1e-40)


@pytest.mark.parametrize("loss", ["cross_entropy", "bce", "mse", "normalized_cross_entropy"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_huge_logits_stay_finite(loss: str, dtype: torch.dtype) -> None:
    logits = torch.tensor([[1e4, 1e4, -1e4], [-1e4, 0, 1e4]], dtype=torch.float64)
    model, x = last_layer(logits, dtype)
    y = torch.tensor([0, 2])
    y = y if "entropy" in loss else nn.functional.one_hot(y, 3).to(dtype)
    got = sf.diagonal(model, (x, y), loss)["weight"]
    oracle = Dense(model.double(), x.double(), y if "entropy" in loss else y.double(), loss)
    want = oracle.ggn.diagonal().reshape(got.shape)
    if loss == "normalized_cross_entropy":  # B(s o) = B(o) / s²
        small, x = last_layer(logits / 1e4, torch.float64)
        want = Dense(small, x, y, loss).ggn.diagonal().reshape(got.shape) / 1e8
    rounding = FLOOR[dtype] * float(want.abs().max())
    torch.testing.assert_close(got, want, rtol=TOLERANCE[dtype], atol=rounding)


def test_a_thousand_classes() -> None:
    torch.manual_seed(0)
    model = net.seq(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1000)).double()
    x, y = torch.randn(3, 3, dtype=torch.float64), torch.tensor([0, 500, 999])
    result = sf.diagonal(model, (x, y))
    hidden, p = model[1](model[0](x)), model(x).softmax(1)
    last = torch.einsum("nk,nd->kd", p * (1 - p), hidden**2) / 3
    torch.testing.assert_close(result["2.weight"], last.detach(), rtol=1e-10, atol=1e-16)
    first = Dense(model, x, y, names=["0.weight"]).hessian.diagonal().reshape(4, 3)
    torch.testing.assert_close(result["0.weight"], first, rtol=1e-10, atol=1e-14)
    assert result.exact
