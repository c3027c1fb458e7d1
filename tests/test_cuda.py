"""The same cases on a GPU."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from agree import agrees
from cases import CASES, Case, cast
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard

import saltflat as sf
from saltflat.curvature.fused import patches, sums_over_positions
from saltflat.curvature.proof import prove
from saltflat.sweep import train_together

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def full_precision() -> Iterator[None]:
    """TensorFloat-32 keeps three digits, too few for the tolerances here."""
    with torch.backends.cudnn.flags(allow_tf32=False):
        yield


def moved(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: moved(v) for k, v in value.items()}
    if isinstance(value, tuple):
        return tuple(map(moved, value))
    return value.to("cuda") if isinstance(value, Tensor | nn.Module) else value


def on_gpu(case: Case, dtype: torch.dtype) -> nn.Module:
    return case.model(dtype).to("cuda")


@pytest.mark.parametrize("curvature", ["hessian", "ggn"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case: Case, dtype: torch.dtype, curvature: str) -> None:
    if case.name == "weight norm" and dtype == torch.float64:
        pytest.skip("torch's weight norm itself differs by 3e-8 between CPU and GPU")
    oracle = case.dense(dtype)
    blocks = oracle.blocks(getattr(oracle, curvature))
    loss = moved(cast(case.loss, dtype))
    for measure in (sf.trace, sf.diagonal):
        result = measure(on_gpu(case, dtype), moved(case.data(dtype)), loss, curvature=curvature)
        agrees(result, blocks, dtype)
        for name, detail in result.details.items():
            certified = case.certified(name)
            written = detail.rule == "products"  # few enough entries for a product each
            linear = detail.exact and not written
            assert linear is certified or certified is None or curvature == "ggn", name


def test_data_on_the_cpu_follow_the_model() -> None:
    case = CASES[0]
    oracle = case.dense()
    agrees(sf.trace(on_gpu(case, torch.float64), case.data()), oracle.blocks(oracle.hessian))


@pytest.mark.parametrize("name", ["mlp", "residual", "mlp Tanh"])
def test_spectra_and_operators(name: str) -> None:
    case = next(c for c in CASES if c.name == name)
    model, data = on_gpu(case, torch.float64), moved(case.data())
    matrix = case.dense().hessian
    want = torch.linalg.eigvalsh(matrix).flip(0)
    found = sf.eigenvalues(model, data, k=3, tol=1e-8)
    assert found.values == pytest.approx(want[:3].tolist(), rel=1e-8)
    assert {v.device.type for v in found[0].vector.values()} == {"cuda"}
    v = torch.ones(len(matrix), dtype=torch.float64)
    for vector in (v, v.cuda()):
        image = sf.hessian(model, data) @ vector
        assert image.device == vector.device
        torch.testing.assert_close(image.cpu(), matrix @ v, rtol=1e-8, atol=1e-10)
    mean, error = sf.density(model, data, probes=20).moment(1)
    assert abs(mean - float(matrix.trace()) / len(matrix)) < 4 * error
    kappas = [sf.measure(m, data, measures=["kappa"])["kappa"] for m in (model, case.model())]
    assert kappas[0].value == pytest.approx(kappas[1].value, rel=1e-6)


def test_random_state_of_the_device() -> None:
    case = CASES[0]
    before = torch.cuda.get_rng_state()
    sf.trace(on_gpu(case, torch.float64), case.data())
    assert torch.equal(before, torch.cuda.get_rng_state())


def test_the_caching_allocator_gets_everything_back() -> None:
    case = CASES[0]
    model = on_gpu(case, torch.float64)
    sf.trace(model, case.data())
    gc.collect()  # what other tests left behind
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        sf.trace(model, case.data())
    gc.collect()
    assert torch.cuda.memory_allocated() == before


def test_autocast_is_ignored() -> None:
    case = next(c for c in CASES if c.name == "residual")
    oracle = case.dense(torch.float32)
    with torch.autocast("cuda", torch.float16):
        result = sf.trace(on_gpu(case, torch.float32), moved(case.data(torch.float32)))
    agrees(result, oracle.blocks(oracle.hessian), torch.float32)


def test_batch_norm_of_the_device_is_read_off_the_graph() -> None:
    """Whichever node it has; with the statistics of the batch it is not proven."""
    norm = nn.BatchNorm2d(3).cuda()
    x = torch.randn(4, 3, 5, 5, device="cuda", requires_grad=True)
    parameters = dict(norm.named_parameters()) | {"x": x}
    assert not prove(norm.eval()(x), parameters, frozenset).curved
    assert "x" in prove(norm.train()(x), parameters, frozenset).curved


@pytest.mark.parametrize("directions", ["random", "filter", "balanced", "eigenvectors"])
def test_landscapes_are_those_of_the_cpu(directions: Any) -> None:
    """Normal entries are drawn on the CPU; eigenvectors are found to a thousandth."""
    case = next(case for case in CASES if case.name == "mlp")
    options = {"directions": directions, "points": 3, "span": 0.1, "accuracy": True}
    here, there = (
        sf.landscape(model, data, case.loss, **options)
        for model, data in (
            (case.model(torch.float64), case.data(torch.float64)),
            (on_gpu(case, torch.float64), moved(case.data(torch.float64))),
        )
    )
    close = 1e-3 if directions == "eigenvectors" else 1e-9
    assert there.losses == pytest.approx(here.losses, rel=close)
    assert there.accuracies == here.accuracies


@pytest.mark.parametrize("steps", [2, 12])  # before there is a CUDA graph, and with one
def test_ensembles_are_trained_as_one_by_one(steps: int) -> None:
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double() for _ in range(3)]
    x, y = torch.randn(20, 6, dtype=torch.float64), torch.randint(3, (3, 20))
    rows, rates = torch.randint(20, (steps, 3, 4)), torch.rand(steps, 3, dtype=torch.float64) / 5
    truth = copy.deepcopy(models)
    for m, model in enumerate(truth):
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, weight_decay=0.01 * m)
        for t in range(steps):
            optimizer.param_groups[0]["lr"] = float(rates[t, m])
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows[t, m]]), y[m, rows[t, m]]).backward()
            optimizer.step()
    there = [model.to("cuda") for model in models]
    train_together(
        there,
        x.to("cuda"),
        y.to("cuda"),
        lambda t: rows[t],
        steps,
        lr=lambda t: rates[t],
        momentum=0.9,
        weight_decay=torch.tensor([0.0, 0.01, 0.02], dtype=torch.float64),
    )
    for model, other in zip(there, truth, strict=True):
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.allclose(p.cpu(), q, rtol=0, atol=1e-12)
    with pytest.raises(sf.InvalidValue, match=r"one device. Got cpu, cuda:0"):
        train_together(there, x, y.to("cuda"), lambda t: rows[t], steps, lr=lambda t: rates[t])


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    "shape", [(3, 5, 7), (2, 70, 11, 3), (2, 3, 1500), (4, 130, 1), (9, 64, 4, 4)]
)
def test_sums_over_positions_are_torchs(shape: tuple[int, ...], last: bool) -> None:
    delta, by = torch.randn(2, *shape, device="cuda")
    if last:
        delta, by = (x.movedim(1, -1).contiguous().movedim(-1, 1) for x in (delta, by))
    sums = sums_over_positions(delta, by)
    assert sums is not None
    spread = tuple(range(2, len(shape)))
    expected = ((delta * by).double().sum(spread), delta.double().sum(spread))
    for got, exact in zip(sums, expected, strict=True):
        torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-4)
    assert sums_over_positions(delta.double(), by.double()) is None


GEOMETRIES = [
    # kernel, stride, padding, dilation
    ((3, 3), (1, 1), (1, 1), (1, 1)),
    ((3, 2), (2, 1), (1, 0), (1, 2)),
    ((1, 5), (1, 3), (0, 4), (1, 2)),
    ((5, 1), (4, 1), (3, 0), (2, 1)),
    ((2, 2), (3, 3), (0, 0), (3, 1)),
    ((7, 7), (2, 2), (3, 3), (1, 1)),
]


@pytest.mark.parametrize("shape", [(3, 5, 17, 19), (1, 1, 11, 11), (2, 3, 64, 48), (130, 2, 13, 9)])
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_patches_are_torchs(shape: tuple[int, ...], geometry: tuple[tuple[int, int], ...]) -> None:
    pytest.importorskip("triton")
    kernel, stride, padding, dilation = geometry
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).cuda()
    unfold = nn.Unfold(kernel, dilation=dilation, padding=padding, stride=stride)
    sides = zip(shape[2:], kernel, stride, padding, dilation, strict=True)
    size = [(side + 2 * p - d * (k - 1) - 1) // s + 1 for side, k, s, p, d in sides]
    seen = patches(x, kernel, stride, padding, dilation, size)
    assert seen is not None
    assert torch.equal(seen.flatten(1, 2), unfold(x))
    # Fewer positions than there are, as where the input ends between two of them.
    fewer = [max(1, count - 1) for count in size]
    expected = unfold(x).unflatten(1, (shape[1], -1)).unflatten(3, size)
    expected = expected[..., : fewer[0], : fewer[1]].flatten(3)
    seen = patches(x, kernel, stride, padding, dilation, fewer)
    assert seen is not None
    assert torch.equal(seen, expected)


def test_patches_of_other_layouts_are_left_to_torch() -> None:
    x = torch.randn(2, 3, 8, 8, device="cuda")
    geometry = (3, 3), (1, 1), (1, 1), (1, 1), (8, 8)
    for other in (x.double(), x.mT, x.to(memory_format=torch.channels_last), x.cpu(), x[:0]):
        assert patches(other, *geometry) is None


@pytest.fixture
def nccl(tmp_path: Path) -> Iterator[None]:
    """A group of one rank: nccl takes no two on the same GPU."""
    where = f"file://{tmp_path / 'group'}"
    dist.init_process_group("nccl", init_method=where, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.usefixtures("nccl")
def test_sums_by_way_of_nccl(sharded: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 6, generator=generator, dtype=torch.float64).cuda()
    batches = [*zip(x.split(16), (torch.arange(30).cuda() % 3).split(16), strict=True)]
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).double().cuda()
    alone = sf.trace(model, batches)
    other = copy.deepcopy(model)
    if sharded:
        fully_shard(other[0])
        fully_shard(other)
    together = sf.trace(other, batches, distributed=True)
    assert together.exact
    assert together.keys() == alone.keys()
    for name, value in alone.items():
        assert together[name] == pytest.approx(value, rel=1e-12), name
