"""One contract for every optimizer and penalty: it works wherever torch's own optimizers do."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
from collections.abc import Iterator

import pytest
import torch
from optimizers import (
    CONTENDERS,
    OPTIMIZERS,
    RANDOM,
    Run,
    adam,
    assert_no_hooks,
    base,
    batches,
    close,
    every,
    every_optimizer,
    modes,
    network,
    neutral,
    quiet,
    same,
    sgd,
    start,
    without_batchnorm,
)
from torch import Tensor, nn

from saltflat.errors import SaltflatError
from saltflat.training.entropy_sgd import EntropySGD
from saltflat.training.monitor import _unheard
from saltflat.training.perturbing import PerturbedOptimizer
from saltflat.training.sam import SAM
from saltflat.training.sharpness_penalty import SharpnessPenalty

pytestmark = quiet


@pytest.fixture(autouse=True)
def no_hooks_are_left() -> Iterator[None]:
    yield
    assert_no_hooks()


# it is the base optimizer where it should be


@modes
@every
def test_neutral_setting_is_the_base_bit_for_bit(name: str, by_closure: bool) -> None:
    ends = []
    for run in (neutral(name, network()), base(name, network())):
        torch.manual_seed(7)
        run.advance(batches(5), by_closure=by_closure)
        ends.append((run.model, torch.get_rng_state()))
    assert same(ends[0][0], ends[1][0])  # parameters and running statistics
    assert torch.equal(ends[0][1], ends[1][1])


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "GradScaler"])
@every
def test_a_neutral_setting_takes_a_plain_step(name: str, scaled: bool) -> None:
    """One backward pass and `step()`, as the base optimizer has it."""
    ends = []
    for run in (neutral(name, network()), base(name, network())):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scaled)
        torch.manual_seed(7)
        for i, (x, y) in enumerate(batches(4)):
            run.optimizer.zero_grad()
            scaler.scale(run.loss(x, y) * (torch.inf if scaled and i == 2 else 1)).backward()
            scaler.step(run.optimizer)
            scaler.update()
        assert scaler.get_scale() == (2.0**9 if scaled else 1)
        ends.append((run.model, torch.get_rng_state()))
    assert same(ends[0][0], ends[1][0])
    assert torch.equal(ends[0][1], ends[1][1])


def test_entropy_sgd_without_momentum_is_sgd() -> None:
    model, twin = network(), network()
    one = Run(model, EntropySGD(model.parameters(), lr=0.1, steps=1, noise=0.0))
    for run in (one, Run(twin, torch.optim.SGD(twin.parameters(), lr=0.1))):
        torch.manual_seed(7)
        run.advance(batches(5))
    assert same(model, twin)


@every
def test_other_settings_are_not_the_base(name: str) -> None:
    ends = []
    for run in (start(name), base(name, network())):
        torch.manual_seed(7)
        run.advance(batches(4))
        ends.append(run.model)
    assert not close(*ends)


@every_optimizer
def test_is_an_optimizer(name: str) -> None:
    optimizer = start(name).optimizer
    assert isinstance(optimizer, torch.optim.Optimizer)
    if isinstance(optimizer, PerturbedOptimizer):
        assert optimizer.param_groups is optimizer.base.param_groups
        assert optimizer.state is optimizer.base.state


# what perturbed passes leave alone


def masks_of(model: nn.Module) -> list[Tensor]:
    masks: list[Tensor] = []
    model[3].register_forward_hook(
        lambda m, args, out: masks.append(out == 0) if m.training else None
    )
    return masks


@modes
@every
def test_running_statistics_and_random_numbers(name: str, by_closure: bool) -> None:
    """Statistics move once a step, and every pass of a step has the same dropout mask."""
    model = network()
    run, masks = start(name, model), masks_of(model)
    torch.manual_seed(7)
    run.advance(batches(2), by_closure=by_closure)
    if name == "EntropySGD":  # its passes are steps, on data of their own
        assert model[1].num_batches_tracked == (2 if by_closure else 1)
        return
    assert model[1].num_batches_tracked == 2
    first, second = masks[: len(masks) // 2], masks[len(masks) // 2 :]
    assert len(first) >= 2 if run.perturbs else len(first) == 1
    assert all(torch.equal(mask, first[0]) for mask in first)
    assert all(torch.equal(mask, second[0]) for mask in second)
    assert not torch.equal(first[0], second[0])
    end = torch.get_rng_state()
    other = base(name, network())
    torch.manual_seed(7)
    other.advance(batches(2))
    assert torch.equal(end, torch.get_rng_state())


@every_optimizer
def test_other_models_go_on(name: str) -> None:
    """Between perturb and step a second network, of another optimizer, keeps its statistics."""
    run, other = start(name), network()
    model, optimizer = run.model, run.optimizer
    x, y = next(batches(1))
    run.loss(x, y).backward()
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
    masks = masks_of(model)
    Run(model, optimizer).advance(batches(2), by_closure=by_closure)
    assert model[1].num_batches_tracked == 4
    assert not torch.equal(masks[0], masks[1])


@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if n != "EntropySGD"])
def test_random_numbers_drawn_before_the_first_pass(name: str) -> None:
    """In halves the first pass begins with the model, not with zero_grad."""
    run, other = start(name), nn.Dropout(0.5)
    masks = masks_of(run.model)
    for x, y in batches(2):
        run.optimizer.zero_grad()
        x = other(x + 0.1 * torch.randn(8, 4))
        run.loss(x, y).backward()
        while run.optimizer.perturb():
            run.loss(x, y).backward()
        run.optimizer.step()
    assert torch.equal(masks[0], masks[1])
    assert torch.equal(masks[-1], masks[-2])
    assert not torch.equal(masks[0], masks[-1])


@every
def test_an_exception_leaves_the_weights(name: str) -> None:
    run = start(name)
    before = copy.deepcopy(run.model.state_dict())
    calls = []

    def closure() -> Tensor:
        calls.append(1)
        run.optimizer.zero_grad()
        loss = run.loss(*next(batches(1)))
        if len(calls) == (2 if run.perturbs or name == "EntropySGD" else 1):
            raise KeyboardInterrupt
        loss.backward()
        return loss

    with pytest.raises(KeyboardInterrupt):
        run.optimizer.step(closure)
    if name != "EntropySGD":  # there it is a step like any other, with its state
        weights = dict(run.model.named_parameters())
        assert all(torch.equal(weights[n], before[n]) for n in weights)
    run.optimizer.step(closure)


@every_optimizer
def test_an_optimizer_that_goes_during_a_measurement(name: str) -> None:
    """Its hooks, which were set aside, do not come back."""
    run = start(name)
    run.loss(*next(batches(1))).backward()
    _ = run.optimizer.perturb() if run.perturbs else run.optimizer.step()
    with _unheard():
        del run
        gc.collect()
    assert_no_hooks()


# saving


@modes
@every
def test_state_dict_gives_the_same_trajectory(name: str, by_closure: bool) -> None:
    run = start(name)
    torch.manual_seed(7)
    run.advance(batches(3), by_closure=by_closure)
    for group in run.optimizer.param_groups:
        group["lr"] = 0.05
    file = io.BytesIO()
    torch.save(run.state_dict(), file)
    torch.manual_seed(9)
    run.advance(batches(3), by_closure=by_closure)

    other = start(name)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    torch.manual_seed(9)
    other.advance(batches(3), by_closure=by_closure)
    assert same(run.model, other.model)


@modes
@every
def test_pickle_and_deepcopy(name: str, by_closure: bool) -> None:
    run = start(name)
    run.advance(batches(3), by_closure=by_closure)
    copies = [pickle.loads(pickle.dumps(run)), copy.deepcopy(run)]
    torch.manual_seed(9)
    run.advance(batches(3), by_closure=by_closure)
    for other in copies:
        torch.manual_seed(9)
        other.advance(batches(3), by_closure=by_closure)
        assert same(run.model, other.model)


def test_no_copy_of_perturbed_weights() -> None:
    model = network()
    optimizer = SAM(sgd(model.parameters()))
    Run(model, optimizer).loss(*next(batches(1))).backward()
    optimizer.perturb()
    with pytest.raises(SaltflatError, match="perturb"):
        pickle.dumps(optimizer)
    optimizer.restore()
    pickle.dumps(optimizer)


def test_the_base_loads_what_the_wrapper_saves_and_back() -> None:
    model, twin = network(), network()
    optimizer, plain = SAM(adam(model.parameters()), rho=0.1), adam(twin.parameters())
    Run(model, optimizer).advance(batches(2))
    plain.load_state_dict(optimizer.state_dict())
    Run(twin, plain).advance(batches(2))
    optimizer.base.load_state_dict(plain.state_dict())
    assert optimizer.param_groups is optimizer.base.param_groups
    del optimizer.param_groups[0]["rho"]  # as in a file that a plain optimizer wrote
    Run(model, optimizer).advance(batches(2))
    assert optimizer.base.state[model[0].weight]["step"] == 6


@every_optimizer
def test_a_plain_state_leaves_the_settings(name: str) -> None:
    """A state that the base optimizer saved: its values, and the settings that it knows not of."""
    run, plain = start(name), base(name, network())
    plain.optimizer.param_groups[0]["lr"] = 0.07
    plain.advance(batches(2))
    own = {k: v for k, v in run.optimizer.param_groups[0].items() if k != "params"}
    known = plain.optimizer.param_groups[0].keys()
    special = {k: v for k, v in own.items() if k not in known}
    assert special
    for key in special.keys() & {"rho", "strength", "noise"}:
        special[key] = run.optimizer.param_groups[0][key] = own[key] if "noise" in key else 0.3
    run.optimizer.load_state_dict(plain.optimizer.state_dict())
    group = run.optimizer.param_groups[0]
    assert {k: group[k] for k in special} == special
    assert group["lr"] == 0.07
    run.advance(batches(2))
    assert run.optimizer.state_dict()["param_groups"][0]["lr"] == 0.07


# loops


@every
def test_schedulers(name: str) -> None:
    run = start(name)
    optimizer = run.optimizer
    rate = optimizer.param_groups[0]["lr"]
    schedulers = [
        torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch)),
    ]
    with warnings.catch_warnings():
        # "lr_scheduler.step() before optimizer.step()"
        warnings.filterwarnings("error", message=".*lr_scheduler")
        run.advance(batches(2))
        for scheduler in schedulers:
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(rate / 2)  # the last one decides
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=4)
    run.advance(batches(1))
    cycle.step()
    assert optimizer.param_groups[0]["lr"] == cycle.get_last_lr()[0]
    before = copy.deepcopy(run.model.state_dict())
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    run.advance(batches(1))
    assert all(torch.equal(p, before[n]) for n, p in run.model.named_parameters())


@every
def test_parameter_groups(name: str) -> None:
    """A learning rate for each group; a group added later; a frozen and an unused parameter."""
    model = network()
    model[1].bias.requires_grad_(False)
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.0}]
    run = start(name, model, groups)
    before = copy.deepcopy(model.state_dict())
    run.advance(batches(2))
    assert not torch.equal(model[0].weight, before["0.weight"])
    for key in ("1.weight", "1.bias", "4.weight"):
        assert torch.equal(model.state_dict()[key], before[key])
    unused = nn.Parameter(torch.ones(2))
    run.optimizer.add_param_group({"params": [*model[4].parameters(), unused]})
    run.advance(batches(2))
    assert not torch.equal(model[4].weight, before["4.weight"])
    assert torch.equal(unused, torch.ones(2))


@pytest.mark.parametrize("name", [n for n in CONTENDERS if "Adam" not in n])
def test_weight_decay_is_the_base_optimizers(name: str) -> None:
    """Where the loss is constant only the decay is left."""
    options = {"momentum": 0.0, "nesterov": False, "weight_decay": 0.5}
    run = start(name, **options)
    for group in run.optimizer.param_groups:
        if name == "EntropySGD":
            group |= {"noise": 0.0, "gamma": 0.0, "inner_lr": 1e-9, "averaging": 1.0}
    before = run.model[0].weight.detach().clone()

    def closure() -> Tensor:
        run.optimizer.zero_grad()
        loss = 0 * run.loss(*next(batches(1)))
        loss.backward()
        return loss

    run.optimizer.step(closure)
    # Two inner steps of Entropy-SGD add up.
    share = 2 if name == "EntropySGD" else 1
    assert torch.allclose(run.model[0].weight, before * (1 - share * 0.1 * 0.5))


@every
def test_the_loss_is_returned(name: str) -> None:
    run = start(name, network(dropout=0.0))
    x, y = next(batches(1))
    expected = start(name, network(dropout=0.0)).loss(x, y)

    def closure() -> Tensor:
        run.optimizer.zero_grad()
        loss = run.loss(x, y)
        loss.backward()
        return loss

    with torch.no_grad():  # gradients are switched on for the closure
        assert torch.equal(run.optimizer.step(closure), expected)


@modes
@pytest.mark.parametrize("name", [n for n in CONTENDERS if n != "FAM, estimated"])
def test_gradient_accumulation(
    name: str, by_closure: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two halves of a batch are the batch, where both halves draw the same random signs."""
    ends = []
    for parts in (1, 2):
        run = start(name, without_batchnorm())
        if isinstance(run.penalty, SharpnessPenalty):
            run.penalty.refresh = 1000
            same_signs(run.penalty, monkeypatch)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run.advance(batches(4, torch.float64), by_closure=by_closure, parts=parts)
        ends.append(run.model)
    assert close(ends[0], ends[1], rtol=1e-5)


def same_signs(penalty: SharpnessPenalty, monkeypatch: pytest.MonkeyPatch) -> None:
    probe, state = penalty._probe, penalty._generator.get_state()

    def again(name: str) -> Tensor:
        penalty._generator.set_state(state)
        return probe(name)

    monkeypatch.setattr(penalty, "_probe", again)


@pytest.mark.parametrize("name", RANDOM)
def test_accumulated_estimates_are_estimates(name: str) -> None:
    """Micro-batches draw random signs of their own: not the same numbers, and no bias."""
    run = start(name, without_batchnorm())
    if isinstance(run.penalty, SharpnessPenalty):
        run.penalty.refresh = 1000
    x, y = next(batches(1, torch.float64))
    draws: dict[int, list[float]] = {1: [], 2: []}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for parts, values in draws.items():
            for _ in range(200):
                pieces = zip(x.chunk(parts), y.chunk(parts), strict=True)
                values.append(sum(float(run.loss(a, b).detach()) / parts for a, b in pieces))
    whole, halves = torch.tensor(draws[1]), torch.tensor(draws[2])
    error = float((whole.var() / 200 + halves.var() / 200).sqrt())
    assert error > 0
    assert abs(float(whole.mean() - halves.mean())) < 4 * error


@every
def test_gradient_clipping(name: str) -> None:
    """In halves the gradients before `step` are those of the step: zeroed, nothing happens."""
    run = start(name, weight_decay=0.0)
    if name == "EntropySGD":
        run.optimizer.param_groups[0]["noise"] = 0.0
    before = copy.deepcopy(run.model.state_dict())

    def clip() -> None:
        assert nn.utils.clip_grad_norm_(run.model.parameters(), 0.0) > 0

    run.advance(batches(2), by_closure=False, between=clip)
    weights = dict(run.model.named_parameters())
    assert all(torch.allclose(weights[n], before[n], atol=1e-7) for n in weights)


@pytest.mark.parametrize("set_to_none", [True, False])
@every
def test_zero_grad(name: str, set_to_none: bool) -> None:
    run = start(name)
    run.advance(batches(1))
    assert run.model[0].weight.grad is not None
    run.optimizer.zero_grad(set_to_none)
    grad = run.model[0].weight.grad
    assert grad is None if set_to_none else torch.equal(grad, torch.zeros(6, 4))
    run.advance(batches(1))
    assert run.model[0].weight.grad.any()


@every
def test_step_hooks(name: str) -> None:
    run = start(name)
    called = []
    run.optimizer.register_step_pre_hook(lambda *_: called.append("pre"))
    run.optimizer.register_step_post_hook(lambda *_: called.append("post"))
    run.optimizer.register_state_dict_post_hook(lambda *_: called.append("saved"))
    run.advance(batches(1))
    run.optimizer.state_dict()
    assert called == ["pre", "post", "saved"]
