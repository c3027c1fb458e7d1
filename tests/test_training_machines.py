"""The contract of the optimizers, continued: precision, compilation, devices, processes."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from optimizers import (
    CONTENDERS,
    Run,
    assert_no_hooks,
    base,
    batches,
    close,
    every,
    modes,
    network,
    neutral,
    quiet,
    same,
    start,
    without_batchnorm,
)
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

from saltflat.errors import ModelError, SaltflatError
from saltflat.measure import measure
from saltflat.training.fam import FAM
from saltflat.training.sharpness_penalty import SharpnessPenalty

pytestmark = quiet


@pytest.fixture(autouse=True)
def no_hooks_are_left() -> Iterator[None]:
    yield
    assert_no_hooks()


# precision and compilation


def pair(name: str) -> tuple[Run, Run]:
    """Two runs to be compared, one of them in low precision."""
    runs = start(name, network(dropout=0.0)), start(name, network(dropout=0.0))
    for run in runs:
        for group in run.optimizer.param_groups:
            if "strength" in group:
                group["strength"] = 0.0  # a difference of gradients over δ is noise in bfloat16
    return runs


@modes
@every
def test_bfloat16_autocast(name: str, by_closure: bool) -> None:
    run, exact = pair(name)
    before = copy.deepcopy(run.model)

    def cast() -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16)

    run.advance(batches(4), by_closure=by_closure, cast=cast)
    exact.advance(batches(4), by_closure=by_closure)
    assert run.model[0].weight.dtype == torch.float32
    assert close(run.model, exact.model, rtol=0.03)
    assert not close(before, exact.model, rtol=0.03)


@modes
@every
def test_autocast_around_the_step(name: str, by_closure: bool) -> None:
    """Autocast keeps the weights it has cast until its end; perturbed ones are cast anew."""
    inside, around = start(name), start(name)

    def cast() -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16)

    data = list(batches(2))
    torch.manual_seed(7)
    inside.advance(data, by_closure=by_closure, cast=cast)
    torch.manual_seed(7)
    for one in data:
        with cast():
            around.advance([one], by_closure=by_closure)
    if isinstance(inside.penalty, FAM):  # its float32 part goes backward in bfloat16 too, around
        assert close(inside.model, around.model, rtol=0.005)
    else:
        assert same(inside.model, around.model)


def scaled_steps(run: Run, scaler: Any, data: Any, cast: Any) -> None:
    """As torch's documentation has it, with the passes of perturb."""
    for x, y in data:
        run.optimizer.zero_grad()

        def backward(x: Tensor = x, y: Tensor = y) -> None:
            with cast():
                loss = run.loss(x, y)
            scaler.scale(loss).backward()

        backward()
        while run.perturbs and run.optimizer.perturb(scaler):
            backward()
        scaler.unscale_(run.optimizer)
        nn.utils.clip_grad_norm_(run.model.parameters(), 10.0)
        scaler.step(run.optimizer)
        scaler.update()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, None], ids=str)
@every
def test_grad_scaler(name: str, dtype: torch.dtype | None) -> None:
    runs = pair(name) if dtype else [start(name, network(dropout=0.0)) for _ in range(2)]
    run, exact = runs
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6)
    scaled_steps(
        run,
        scaler,
        batches(4),
        lambda: torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None),
    )
    assert scaler.get_scale() == 2.0**6
    exact.advance(batches(4), by_closure=False)
    assert close(run.model, exact.model, rtol=1e-5 if dtype is None else 0.05)


@pytest.mark.parametrize("name", ["SAM", "ASAM", "SAM, Adam", "SAM with FAM"])
def test_grad_scaler_without_the_loop(name: str) -> None:
    """perturb, backward, scaler.step: the gradients are unscaled by the step."""
    run, exact = (start(name, network(dropout=0.0)) for _ in range(2))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for x, y in batches(3):
        run.optimizer.zero_grad()
        scaler.scale(run.loss(x, y)).backward()
        run.optimizer.perturb()
        scaler.scale(run.loss(x, y)).backward()
        scaler.step(run.optimizer)
        scaler.update()
    exact.advance(batches(3))
    assert close(run.model, exact.model)


@every
def test_an_overflow_skips_the_step(name: str) -> None:
    """In the first pass or in the last: weights and state stay, the scale falls."""
    for failing in (0, -1):
        run = start(name, network(dropout=0.0))
        model, optimizer = run.model, run.optimizer
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        before = [p.detach().clone() for p in model.parameters()]
        x, y = next(batches(1))
        passes = 1
        if run.perturbs:
            passes += 2 * getattr(optimizer, "ascent_steps", 0) + (1 if "SAM" in name else 2)
        for i in range(passes):
            loss = run.loss(x, y)
            scaler.scale(loss * (float("inf") if i == failing % passes else 1)).backward()
            if run.perturbs:
                optimizer.perturb(scaler)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0**9
        assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
        assert not optimizer.state


@pytest.mark.parametrize("name", ["SAM", "ASAM", "SAM with FAM", "BNSharpnessSGD"])
def test_unscaled_too_early(name: str) -> None:
    """`unscale_` works once a step: before the last pass it would leave the others scaled."""
    x, y = next(batches(1))
    for known in (True, False):
        run = start(name, network(dropout=0.0))
        before = copy.deepcopy(run.model)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        scaler.scale(run.loss(x, y)).backward()
        scaler.unscale_(run.optimizer)
        if known:
            with pytest.raises(SaltflatError, match=r"unscale_.* came before the last pass"):
                run.optimizer.perturb(scaler)
        else:
            while run.optimizer.perturb():
                scaler.scale(run.loss(x, y)).backward()
            with pytest.raises(SaltflatError, match=r"perturb\(scaler\)"):
                scaler.step(run.optimizer)
        assert close(run.model, before, rtol=0)
        scaler.update()
        scaled_steps(run, scaler, [(x, y)], nullcontext)  # it can go on
        assert not close(run.model, before)


@pytest.mark.parametrize("name", ["SAM", "BNSharpnessSGD"])
def test_a_refused_step_leaves_no_scale_behind(name: str) -> None:
    """GradScaler would multiply it into the next step."""
    x, y = next(batches(1))
    models = []
    for forgotten in (False, True):
        run = start(name, network(dropout=0.0))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        if forgotten:
            scaler.scale(run.loss(x, y)).backward()
            with pytest.raises(SaltflatError, match="only one gradient"):
                scaler.step(run.optimizer)
            run.optimizer.zero_grad()
            scaler.update()
        scaled_steps(run, scaler, [(x, y)], nullcontext)
        models.append(run.model)
    assert close(*models)


@pytest.mark.parametrize("name", ["SAM", "BNSharpnessSGD", "EntropySGD"])
def test_a_scaler_takes_no_closure(name: str) -> None:
    """It would not unscale the gradients that the closure leaves in the step."""
    x, y = next(batches(1))
    models = []
    for refused in (False, True):
        run = start(name, network(dropout=0.0))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

        def closure(run: Run = run) -> Tensor:
            run.optimizer.zero_grad()
            loss = run.loss(x, y)
            loss.backward()
            return loss

        if refused:
            scaler.scale(run.loss(x, y)).backward()
            with pytest.raises(SaltflatError, match="does not unscale"):
                scaler.step(run.optimizer, closure)
            run.optimizer.zero_grad()
        torch.amp.GradScaler("cpu", enabled=False).step(run.optimizer, closure)
        models.append(run.model)
    assert close(*models)


@pytest.mark.parametrize("name", ["SAM", "BNSharpnessSGD"])
def test_unscaled_in_the_loop(name: str) -> None:
    """After the last pass of SAM it is in time; other passes are lost."""
    run, plain = (start(name, network(dropout=0.0)) for _ in range(2))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    x, y = next(batches(1))
    scaler.scale(run.loss(x, y)).backward()
    run.optimizer.perturb(scaler)
    scaler.scale(run.loss(x, y)).backward()
    scaler.unscale_(run.optimizer)
    if name == "SAM":
        assert not run.optimizer.perturb(scaler)
        scaler.step(run.optimizer)
        plain.advance([(x, y)])
    else:
        with pytest.raises(SaltflatError, match="came before the last pass"):
            run.optimizer.perturb(scaler)
    assert close(run.model, plain.model)


def test_the_scale_is_asked_for() -> None:
    run = start("BNSharpnessSGD")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    x, y = next(batches(1))
    scaler.scale(run.loss(x, y)).backward()
    while run.optimizer.perturb():
        scaler.scale(run.loss(x, y)).backward()
    with pytest.raises(SaltflatError, match=r"perturb\(scaler\)"):
        scaler.step(run.optimizer)


@pytest.mark.parametrize(
    ("way", "by_closure"), [("torch.compile", True), ("torch.compile", False), ("in place", True)]
)
@every
def test_compiled_models(name: str, way: str, by_closure: bool) -> None:
    torch._dynamo.reset()
    model, plain = network(dropout=0.0), start(name, network(dropout=0.0))
    if way == "in place":
        model.compile(backend="eager")
        called = model
    else:
        called = torch.compile(model, backend="eager")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*torch.compile")
        run = start(name, model)
        run.called = called
        run.advance(batches(4), by_closure=by_closure)
    plain.advance(batches(4), by_closure=by_closure)
    twin = plain.model
    assert close(model, twin)
    assert torch.allclose(model[1].running_mean, twin[1].running_mean, rtol=1e-5, atol=1e-6)
    assert model[1].num_batches_tracked == twin[1].num_batches_tracked


def test_a_penalty_on_code_without_second_derivatives() -> None:
    torch._dynamo.reset()
    run = start("SharpnessPenalty", network(dropout=0.0))
    run.called = torch.compile(run.model, backend="aot_eager")
    with pytest.raises(ModelError, match="backend='eager' or not at all"):
        run.loss(*next(batches(1)))


# a GPU


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@every
def test_cuda(name: str) -> None:
    """fp16 with GradScaler, dropout masks, a checkpoint and the neutral setting."""
    run = start(name, network().cuda())
    masks: list[Tensor] = []
    run.model[3].register_forward_hook(
        lambda m, args, out: masks.append(out == 0) if m.training else None
    )
    data = [(x.cuda(), y.cuda()) for x, y in batches(3)]
    run.advance(data, by_closure=False)
    if run.perturbs:
        assert torch.equal(masks[0], masks[1])
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    half = lambda: torch.autocast("cuda", torch.float16)  # noqa: E731
    scaled_steps(run, scaler, data, half)
    assert all(torch.isfinite(p).all() for p in run.model.parameters())
    loaded = start(name, network().cuda())
    loaded.load_state_dict(copy.deepcopy(run.state_dict()))
    for each in (run, loaded):
        torch.manual_seed(3)
        each.advance(data)
    assert close(run.model, loaded.model)

    runs = neutral(name, network().cuda()), base(name, network().cuda())
    for each in runs:
        torch.manual_seed(3)
        each.advance(data, by_closure=False)
    assert close(runs[0].model, runs[1].model)


# two processes

# Random signs are drawn for the samples at hand, so that shards are estimates of their own.
EQUAL = [name for name in CONTENDERS if name != "FAM, estimated"]


def train_all(wrap: Callable[[nn.Module], nn.Module], part: slice) -> dict[str, Any]:
    ends = {}
    for name in EQUAL:
        run = start(name, without_batchnorm())
        run.called = wrap(run.model)
        data = [(x[part], y[part]) for x, y in batches(3, torch.float64)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run.advance(data)
            run.advance(data, by_closure=False)
        ends[name] = run.model.state_dict()
    return ends


def of_shards(rank: int, wrap: Callable[[nn.Module], nn.Module]) -> list[Tensor]:
    """Gradients of a penalty whose scales are found on the shard of the rank, not on all data."""
    x, y = next(batches(1, torch.float64))
    part = slice(4 * rank, 4 * rank + 4)
    model = without_batchnorm()
    called, penalty = wrap(model), SharpnessPenalty(model, (x[part], y[part]), strength=1.0)
    penalty(nn.functional.cross_entropy(called(x[part]), y[part])).backward()
    return [p.grad for p in model.parameters()]  # type: ignore[misc]


def one_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2
    )
    parallel = nn.parallel.DistributedDataParallel
    ends = train_all(parallel, slice(4 * rank, 4 * rank + 4))
    torch.save((ends, of_shards(rank, parallel)), os.path.join(folder, f"{rank}.pt"))
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What two processes made of their halves of the batches."""
    folder = tmp_path_factory.mktemp("ranks")
    spawn(one_rank, (str(folder),), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in (0, 1)]


def test_two_processes_are_one(ranks: list[Any]) -> None:
    alone = train_all(lambda model: model, slice(None))
    half = train_all(lambda model: model, slice(0, 4))
    for ends, _ in ranks:
        for name, expected in alone.items():
            for key, value in expected.items():
                assert torch.allclose(ends[name][key], value, rtol=1e-8, atol=1e-10), (name, key)
            assert not torch.allclose(ends[name]["0.weight"], half[name]["0.weight"], rtol=1e-4)


def test_two_processes_with_scales_of_their_own(ranks: list[Any]) -> None:
    """Sharpness is a minimum over scales: that of all data is at least the mean of the shards'."""
    shards = [of_shards(rank, lambda model: model) for rank in (0, 1)]
    x, y = next(batches(1, torch.float64))
    model = without_batchnorm()
    penalty = SharpnessPenalty(model, (x, y), strength=1.0)
    penalty(nn.functional.cross_entropy(model(x), y)).backward()
    for _, gradients in ranks:
        for p, got, one, two in zip(model.parameters(), gradients, *shards, strict=True):
            assert torch.allclose(got, (one + two) / 2, rtol=1e-8, atol=1e-12)
            assert not torch.allclose(got, p.grad, rtol=1e-4)

    def sharpness(part: slice) -> float:
        found = measure(model, (x[part], y[part]), measures=["minimum_sharpness"])
        return found["minimum_sharpness"].value

    halves = (sharpness(slice(0, 4)) + sharpness(slice(4, 8))) / 2
    assert halves < sharpness(slice(None)) * (1 - 1e-4)
