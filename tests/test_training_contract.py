"""One contract for every optimizer: it works wherever torch's own optimizers do."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Iterator

import pytest
import torch
from optimizers import (
    NEUTRAL,
    OPTIMIZERS,
    adam,
    advance,
    assert_no_hooks,
    batches,
    close,
    every,
    loss_of,
    modes,
    network,
    same,
    sgd,
)
from torch import Tensor, nn

from saltflat.errors import SaltflatError
from saltflat.training.sam import SAM
from saltflat.training.wrapper import PerturbedOptimizer


@pytest.fixture(autouse=True)
def no_hooks_are_left() -> Iterator[None]:
    yield
    assert_no_hooks()


# it is the base optimizer where it should be


@modes
@pytest.mark.parametrize("name", NEUTRAL)
def test_neutral_setting_is_the_base_bit_for_bit(name: str, by_closure: bool) -> None:
    make, base = NEUTRAL[name]
    model, twin = network(), network()
    optimizer, plain = make(model, model.parameters()), base(twin.parameters())
    torch.manual_seed(7)
    advance(model, optimizer, batches(5), by_closure=by_closure)
    end = torch.get_rng_state()
    torch.manual_seed(7)
    advance(twin, plain, batches(5))
    assert same(model, twin)  # parameters and running statistics
    assert torch.equal(end, torch.get_rng_state())


@every
def test_other_settings_are_not_the_base(name: str) -> None:
    model, twin = network(), network()
    base = adam if "Adam" in name else sgd
    torch.manual_seed(7)
    advance(model, OPTIMIZERS[name](model, model.parameters()), batches(4))
    torch.manual_seed(7)
    advance(twin, base(twin.parameters()), batches(4))
    assert not close(model, twin)


@every
def test_is_an_optimizer(name: str) -> None:
    model = network()
    optimizer = OPTIMIZERS[name](model, model.parameters())
    assert isinstance(optimizer, torch.optim.Optimizer)
    if isinstance(optimizer, PerturbedOptimizer):
        assert optimizer.param_groups is optimizer.base.param_groups
        assert optimizer.state is optimizer.base.state


# what perturbed passes leave alone


@modes
@every
def test_running_statistics_and_random_numbers(name: str, by_closure: bool) -> None:
    """Statistics move once a step, and every pass of a step has the same dropout mask."""
    model = network()
    optimizer = OPTIMIZERS[name](model, model.parameters())
    masks: list[Tensor] = []
    model[3].register_forward_hook(lambda m, args, out: masks.append(out == 0))
    advance(model, optimizer, batches(2), by_closure=by_closure)
    if name == "EntropySGD":  # its passes are steps, on data of their own
        assert model[1].num_batches_tracked == (2 if by_closure else 1)
        return
    assert model[1].num_batches_tracked == 2
    first, second = masks[: len(masks) // 2], masks[len(masks) // 2 :]
    assert len(first) >= 2
    assert all(torch.equal(mask, first[0]) for mask in first)
    assert all(torch.equal(mask, second[0]) for mask in second)
    assert not torch.equal(first[0], second[0])


@every
def test_other_models_go_on(name: str) -> None:
    """Between perturb and step a second network, of another optimizer, keeps its statistics."""
    model, other = network(), network()
    optimizer = OPTIMIZERS[name](model, model.parameters())
    x, y = next(batches(1))
    loss_of(model, x, y).backward()
    _ = optimizer.perturb() if isinstance(optimizer, PerturbedOptimizer) else optimizer.step()
    other(x)
    model(x)
    assert other[1].num_batches_tracked == 1
    assert model[1].num_batches_tracked == 1
    if isinstance(optimizer, PerturbedOptimizer):
        optimizer.restore()
        model(x)
        assert model[1].num_batches_tracked == 2


@modes
def test_unless_asked(by_closure: bool) -> None:
    model = network()
    optimizer = SAM(sgd(model.parameters()), freeze_batchnorm=False, same_randomness=False)
    masks: list[Tensor] = []
    model[3].register_forward_hook(lambda m, args, out: masks.append(out == 0))
    advance(model, optimizer, batches(2), by_closure=by_closure)
    assert model[1].num_batches_tracked == 4
    assert not torch.equal(masks[0], masks[1])


@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if n != "EntropySGD"])
def test_random_numbers_drawn_before_the_first_pass(name: str) -> None:
    """In halves the first pass begins with the model, not with zero_grad."""
    model, other = network(), nn.Dropout(0.5)
    optimizer = OPTIMIZERS[name](model, model.parameters())
    masks: list[Tensor] = []
    model[3].register_forward_hook(lambda m, args, out: masks.append(out == 0))
    for x, y in batches(2):
        optimizer.zero_grad()
        x = other(x + 0.1 * torch.randn(8, 4))
        loss_of(model, x, y).backward()
        while optimizer.perturb():
            loss_of(model, x, y).backward()
        optimizer.step()
    assert torch.equal(masks[0], masks[1])
    assert torch.equal(masks[-1], masks[-2])
    assert not torch.equal(masks[0], masks[-1])


@every
def test_an_exception_leaves_the_weights(name: str) -> None:
    model = network()
    optimizer = OPTIMIZERS[name](model, model.parameters())
    before = copy.deepcopy(model.state_dict())
    calls = []

    def closure() -> Tensor:
        calls.append(1)
        optimizer.zero_grad()
        loss = loss_of(model, *next(batches(1)))
        loss.backward()
        if len(calls) == 2:
            raise KeyboardInterrupt
        return loss

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(closure)
    if name != "EntropySGD":  # there it is a step like any other, with its state
        weights = dict(model.named_parameters())
        assert all(torch.equal(weights[n], before[n]) for n in weights)
    optimizer.step(closure)


# saving


@modes
@every
def test_state_dict_gives_the_same_trajectory(name: str, by_closure: bool) -> None:
    model = network()
    optimizer = OPTIMIZERS[name](model, model.parameters())
    torch.manual_seed(7)
    advance(model, optimizer, batches(3), by_closure=by_closure)
    for group in optimizer.param_groups:
        group["lr"] = 0.05
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    torch.manual_seed(9)
    advance(model, optimizer, batches(3), by_closure=by_closure)

    twin = network()
    loaded = OPTIMIZERS[name](twin, twin.parameters())
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    twin.load_state_dict(saved["model"])
    loaded.load_state_dict(saved["optimizer"])
    torch.manual_seed(9)
    advance(twin, loaded, batches(3), by_closure=by_closure)
    assert same(model, twin)


@modes
@every
def test_pickle_and_deepcopy(name: str, by_closure: bool) -> None:
    model = network()
    optimizer = OPTIMIZERS[name](model, model.parameters())
    advance(model, optimizer, batches(3), by_closure=by_closure)
    pairs = [pickle.loads(pickle.dumps((model, optimizer))), copy.deepcopy((model, optimizer))]
    torch.manual_seed(9)
    advance(model, optimizer, batches(3), by_closure=by_closure)
    for twin, copied in pairs:
        torch.manual_seed(9)
        advance(twin, copied, batches(3), by_closure=by_closure)
        assert same(model, twin)


def test_no_copy_of_perturbed_weights() -> None:
    model = network()
    optimizer = SAM(sgd(model.parameters()))
    loss_of(model, *next(batches(1))).backward()
    optimizer.perturb()
    with pytest.raises(SaltflatError, match="perturb"):
        pickle.dumps(optimizer)
    optimizer.restore()
    pickle.dumps(optimizer)


def test_the_base_loads_what_the_wrapper_saves_and_back() -> None:
    model, twin = network(), network()
    optimizer, plain = SAM(adam(model.parameters()), rho=0.1), adam(twin.parameters())
    advance(model, optimizer, batches(2))
    plain.load_state_dict(optimizer.state_dict())
    advance(twin, plain, batches(2))
    optimizer.base.load_state_dict(plain.state_dict())
    assert optimizer.param_groups is optimizer.base.param_groups
    del optimizer.param_groups[0]["rho"]  # as in a file that a plain optimizer wrote
    advance(model, optimizer, batches(2))
    assert optimizer.base.state[model[0].weight]["step"] == 6


# loops


@every
def test_schedulers(name: str) -> None:
    model = network()
    optimizer = OPTIMIZERS[name](model, model.parameters())
    rate = optimizer.param_groups[0]["lr"]
    schedulers = [
        torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch)),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "lr_scheduler.step() before optimizer.step()"
        advance(model, optimizer, batches(2))
        for scheduler in schedulers:
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(rate / 2)  # the last one decides
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=4)
    advance(model, optimizer, batches(1))
    cycle.step()
    assert optimizer.param_groups[0]["lr"] == cycle.get_last_lr()[0]
    before = copy.deepcopy(model.state_dict())
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    advance(model, optimizer, batches(1))
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


@every
def test_parameter_groups(name: str) -> None:
    """A learning rate for each group; a group added later; a frozen and an unused parameter."""
    model = network()
    model[1].bias.requires_grad_(False)
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.0}]
    optimizer = OPTIMIZERS[name](model, groups)
    before = copy.deepcopy(model.state_dict())
    advance(model, optimizer, batches(2))
    assert not torch.equal(model[0].weight, before["0.weight"])
    for key in ("1.weight", "1.bias", "4.weight"):
        assert torch.equal(model.state_dict()[key], before[key])
    unused = nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [*model[4].parameters(), unused]})
    advance(model, optimizer, batches(2))
    assert not torch.equal(model[4].weight, before["4.weight"])
    assert torch.equal(unused, torch.ones(2))


@pytest.mark.parametrize("name", ["SAM", "ASAM", "BNSharpnessSGD", "EntropySGD"])
def test_weight_decay_is_the_base_optimizers(name: str) -> None:
    """Where the loss is constant only the decay is left."""
    model = network()
    options = {"momentum": 0.0, "nesterov": False, "weight_decay": 0.5}
    optimizer = OPTIMIZERS[name](model, model.parameters(), **options)
    for group in optimizer.param_groups:
        if name == "EntropySGD":
            group |= {"noise": 0.0, "gamma": 0.0, "inner_lr": 1e-9, "averaging": 1.0}
    before = model[0].weight.detach().clone()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = 0 * loss_of(model, *next(batches(1)))
        loss.backward()
        return loss

    optimizer.step(closure)
    # Two inner steps of Entropy-SGD add up.
    share = 2 if name == "EntropySGD" else 1
    assert torch.allclose(model[0].weight, before * (1 - share * 0.1 * 0.5))


@every
def test_the_loss_is_returned(name: str) -> None:
    model = network(dropout=0.0)
    optimizer = OPTIMIZERS[name](model, model.parameters())
    x, y = next(batches(1))
    expected = loss_of(network(dropout=0.0), x, y)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        return loss

    with torch.no_grad():  # gradients are switched on for the closure
        assert torch.equal(optimizer.step(closure), expected)


@modes
@every
def test_gradient_accumulation(name: str, by_closure: bool) -> None:
    """Two halves of a batch are the batch; without BatchNorm, which sees the halves."""
    ends = []
    for parts in (1, 2):
        model = network(dropout=0.0, dtype=torch.float64)
        model[1] = nn.Identity()
        optimizer = OPTIMIZERS[name](model, list(model.parameters()))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            data = batches(4, torch.float64)
            advance(model, optimizer, data, by_closure=by_closure, parts=parts)
        ends.append(model)
    assert close(*ends, rtol=1e-5)


@every
def test_gradient_clipping(name: str) -> None:
    """In halves the gradients before `step` are those of the step: zeroed, nothing happens."""
    model = network()
    optimizer = OPTIMIZERS[name](model, model.parameters(), weight_decay=0.0)
    if name == "EntropySGD":
        optimizer.param_groups[0]["noise"] = 0.0
    before = copy.deepcopy(model.state_dict())

    def clip() -> None:
        assert nn.utils.clip_grad_norm_(model.parameters(), 0.0) > 0

    advance(model, optimizer, batches(2), by_closure=False, between=clip)
    weights = dict(model.named_parameters())
    assert all(torch.allclose(weights[n], before[n], atol=1e-7) for n in weights)


@pytest.mark.parametrize("set_to_none", [True, False])
@every
def test_zero_grad(name: str, set_to_none: bool) -> None:
    model = network()
    optimizer = OPTIMIZERS[name](model, model.parameters())
    advance(model, optimizer, batches(1))
    assert model[0].weight.grad is not None
    optimizer.zero_grad(set_to_none)
    grad = model[0].weight.grad
    assert grad is None if set_to_none else torch.equal(grad, torch.zeros(6, 4))


@every
def test_step_hooks(name: str) -> None:
    model = network()
    optimizer = OPTIMIZERS[name](model, model.parameters())
    called = []
    optimizer.register_step_pre_hook(lambda *_: called.append("pre"))
    optimizer.register_step_post_hook(lambda *_: called.append("post"))
    optimizer.register_state_dict_post_hook(lambda *_: called.append("saved"))
    advance(model, optimizer, batches(1))
    optimizer.state_dict()
    assert called == ["pre", "post", "saved"]
