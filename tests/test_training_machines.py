"""The contract of the optimizers, continued: precision, compilation, devices, processes."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from optimizers import (
    NEUTRAL,
    OPTIMIZERS,
    advance,
    assert_no_hooks,
    batches,
    close,
    every,
    loss_of,
    modes,
    network,
    same,
)
from torch import Tensor, nn

from saltflat.errors import SaltflatError
from saltflat.training.wrapper import PerturbedOptimizer


@pytest.fixture(autouse=True)
def no_hooks_are_left() -> Iterator[None]:
    yield
    assert_no_hooks()


# precision and compilation


@modes
@every
def test_bfloat16_autocast(name: str, by_closure: bool) -> None:
    model, exact = network(dropout=0.0), network(dropout=0.0)
    optimizer = OPTIMIZERS[name](model, model.parameters())
    reference = OPTIMIZERS[name](exact, exact.parameters())
    start = copy.deepcopy(model)
    for group in (*optimizer.param_groups, *reference.param_groups):
        group["strength"] = 0.0  # a difference of gradients over δ is noise in bfloat16

    def cast() -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16)

    advance(model, optimizer, batches(4), by_closure=by_closure, cast=cast)
    advance(exact, reference, batches(4), by_closure=by_closure)
    assert model[0].weight.dtype == torch.float32
    assert close(model, exact, rtol=0.03)
    assert not close(start, exact, rtol=0.03)


@modes
@every
def test_autocast_around_the_step(name: str, by_closure: bool) -> None:
    """Autocast keeps the weights it has cast until its end; perturbed ones are cast anew."""
    inside, around = network(), network()
    optimizers = [OPTIMIZERS[name](m, m.parameters()) for m in (inside, around)]

    def cast() -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16)

    data = list(batches(2))
    torch.manual_seed(7)
    advance(inside, optimizers[0], data, by_closure=by_closure, cast=cast)
    torch.manual_seed(7)
    for one in data:
        with cast():
            advance(around, optimizers[1], [one], by_closure=by_closure)
    assert same(inside, around)


def scaled_steps(model: nn.Module, optimizer: Any, scaler: Any, data: Any, cast: Any) -> None:
    """As torch's documentation has it, with the passes of perturb."""
    for x, y in data:
        optimizer.zero_grad()

        def backward(x: Tensor = x, y: Tensor = y) -> None:
            with cast():
                loss = loss_of(model, x, y)
            scaler.scale(loss).backward()

        backward()
        while isinstance(optimizer, PerturbedOptimizer) and optimizer.perturb(scaler):
            backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, None], ids=str)
@every
def test_grad_scaler(name: str, dtype: torch.dtype | None) -> None:
    model, exact = network(dropout=0.0), network(dropout=0.0)
    optimizer = OPTIMIZERS[name](model, model.parameters())
    reference = OPTIMIZERS[name](exact, exact.parameters())
    if dtype is not None:
        for group in (*optimizer.param_groups, *reference.param_groups):
            group["strength"] = 0.0
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaled_steps(
        model,
        optimizer,
        scaler,
        batches(4),
        lambda: torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None),
    )
    advance(exact, reference, batches(4), by_closure=False)
    assert close(model, exact, rtol=1e-5 if dtype is None else 0.05)


@pytest.mark.parametrize("name", ["SAM", "ASAM", "SAM, Adam"])
def test_grad_scaler_without_the_loop(name: str) -> None:
    """perturb, backward, scaler.step: the gradients are unscaled by the step."""
    model, exact = network(dropout=0.0), network(dropout=0.0)
    optimizer = OPTIMIZERS[name](model, model.parameters())
    reference = OPTIMIZERS[name](exact, exact.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for x, y in batches(3):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, x, y)).backward()
        optimizer.perturb()
        scaler.scale(loss_of(model, x, y)).backward()
        scaler.step(optimizer)
        scaler.update()
    advance(exact, reference, batches(3))
    assert close(model, exact)


@every
def test_an_overflow_skips_the_step(name: str) -> None:
    """In the first pass or in the last: weights and state stay, the scale falls."""
    for failing in (0, -1):
        model = network(dropout=0.0)
        optimizer = OPTIMIZERS[name](model, model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        before = [p.detach().clone() for p in model.parameters()]
        x, y = next(batches(1))
        passes = 1
        if isinstance(optimizer, PerturbedOptimizer):
            passes += 2 * getattr(optimizer, "ascent_steps", 0) + (1 if "SAM" in name else 2)
        for i in range(passes):
            loss = loss_of(model, x, y)
            scaler.scale(loss * (float("inf") if i == failing % passes else 1)).backward()
            if isinstance(optimizer, PerturbedOptimizer):
                optimizer.perturb(scaler)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0**9
        assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
        assert not optimizer.state


def test_the_scale_is_asked_for() -> None:
    model = network()
    optimizer = OPTIMIZERS["BNSharpnessSGD"](model, model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    x, y = next(batches(1))
    scaler.scale(loss_of(model, x, y)).backward()
    while optimizer.perturb():
        scaler.scale(loss_of(model, x, y)).backward()
    with pytest.raises(SaltflatError, match=r"perturb\(scaler\)"):
        scaler.step(optimizer)


@pytest.mark.parametrize(
    ("way", "by_closure"), [("torch.compile", True), ("torch.compile", False), ("in place", True)]
)
@every
def test_compiled_models(name: str, way: str, by_closure: bool) -> None:
    torch._dynamo.reset()
    model, twin = network(dropout=0.0), network(dropout=0.0)
    if way == "in place":
        model.compile(backend="eager")
        run = model
    else:
        run = torch.compile(model, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        optimizer = OPTIMIZERS[name](model, model.parameters())
        advance(run, optimizer, batches(4), by_closure=by_closure)
    advance(twin, OPTIMIZERS[name](twin, twin.parameters()), batches(4), by_closure=by_closure)
    assert close(model, twin)
    assert torch.allclose(model[1].running_mean, twin[1].running_mean, rtol=1e-5, atol=1e-6)
    assert model[1].num_batches_tracked == twin[1].num_batches_tracked


# a GPU


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@every
def test_cuda(name: str) -> None:
    """fp16 with GradScaler, dropout masks, a checkpoint and the neutral setting."""
    model, twin = network().cuda(), network().cuda()
    optimizer = OPTIMIZERS[name](model, model.parameters())
    masks: list[Tensor] = []
    model[3].register_forward_hook(lambda m, args, out: masks.append(out == 0))
    data = [(x.cuda(), y.cuda()) for x, y in batches(3)]
    advance(model, optimizer, data, by_closure=False)
    if name != "EntropySGD":
        assert torch.equal(masks[0], masks[1])
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    half = lambda: torch.autocast("cuda", torch.float16)  # noqa: E731
    scaled_steps(model, optimizer, scaler, data, half)
    assert all(torch.isfinite(p).all() for p in model.parameters())
    loaded = OPTIMIZERS[name](twin, twin.parameters())
    twin.load_state_dict(model.state_dict())
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, its in ((model, optimizer), (twin, loaded)):
        torch.manual_seed(3)
        advance(each, its, data)
    assert close(model, twin)

    make, base = NEUTRAL[name]
    model, twin = network().cuda(), network().cuda()
    for each, its in ((model, make(model, model.parameters())), (twin, base(twin.parameters()))):
        torch.manual_seed(3)
        advance(each, its, data, by_closure=False)
    assert close(model, twin)


# two processes


def without_batchnorm() -> nn.Sequential:
    """BatchNorm normalises on each rank for itself, so two ranks are not one process."""
    model = network(dropout=0.0, dtype=torch.float64)
    model[1] = nn.Identity()
    return model


def train_all(wrap: Callable[[nn.Module], nn.Module], part: slice) -> dict[str, Any]:
    ends = {}
    for name, make in OPTIMIZERS.items():
        model = without_batchnorm()
        run = wrap(model)
        optimizer = make(model, list(model.parameters()))
        data = [(x[part], y[part]) for x, y in batches(3, torch.float64)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            advance(run, optimizer, data)
            advance(run, optimizer, data, by_closure=False)
        ends[name] = model.state_dict()
    return ends


def one_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2
    )
    ends = train_all(nn.parallel.DistributedDataParallel, slice(4 * rank, 4 * rank + 4))
    torch.save(ends, os.path.join(folder, f"{rank}.pt"))
    torch.distributed.destroy_process_group()


def test_two_processes_are_one(tmp_path) -> None:
    torch.multiprocessing.spawn(one_rank, (str(tmp_path),), nprocs=2)
    alone = train_all(lambda model: model, slice(None))
    half = train_all(lambda model: model, slice(0, 4))
    for rank in (0, 1):
        ends = torch.load(tmp_path / f"{rank}.pt")
        for name, expected in alone.items():
            for key, value in expected.items():
                assert torch.allclose(ends[name][key], value, rtol=1e-8, atol=1e-10), (name, key)
            assert not torch.allclose(ends[name]["0.weight"], half[name]["0.weight"], rtol=1e-4)
