"""What the samples that are looked at first do not show, and the others do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from agree import agrees
from dense import Dense
from torch import Tensor, nn

import saltflat as sf
from saltflat.curvature.contractions import Term
from saltflat.curvature.plan import Plan, examine
from saltflat.curvature.rules import LinearUse, Rows
from saltflat.risk import Batch, Risk

N = 64
Y = torch.arange(N) % 3
QUIET = [n for n in range(N) if n % 8 == 0]  # the samples that are looked at first


def inputs(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(N, *shape, generator=torch.Generator().manual_seed(seed)).double()


class TwoWays(nn.Module):
    """One weight for two inputs; only `Linear` is an operation with a fast rule."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(5, 6, bias=False), nn.Linear(6, 3)
        self.alias = [self.body.weight]
        self.double()

    def other(self, b: Tensor) -> Tensor:
        return torch.einsum("ni,oi->no", b, self.body.weight)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.head(F.relu(self.body(a) + self.other(b)))


class Aliased(TwoWays):
    """Both ways go sample by sample, and `functional_call` does not know of the second."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        one = torch.einsum("ni,oi->no", a, self.body.weight)
        return self.head(F.relu(one + torch.einsum("ni,oi->no", b, self.alias[0])))


class Branching(TwoWays):
    """The second way is there for some samples, one by one."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        h = self.body(a)
        return self.head(F.relu(h + self.other(b) if bool(b.any()) else h))


def cut(data: Any, size: int) -> list[Any]:
    (a, b), y = data
    return [((a[i : i + size], b[i : i + size]), y[i : i + size]) for i in range(0, N, size)]


def missing() -> tuple[tuple[Tensor, Tensor], Tensor]:
    """The second input is zero for the samples that are looked at first, wherever they are."""
    a, b = inputs(5), inputs(5, seed=1)
    b[:8] = b[QUIET] = 0
    return (a, b), Y


WAYS: dict[str, Callable[[Any], Any]] = {
    "one batch": lambda data: data,
    "batches": lambda data: cut(data, 16),
    "batches of one": lambda data: cut(data, 1),
}


@pytest.mark.parametrize("form", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("kind", [TwoWays, Aliased, Branching])
def test_uses_that_add_nothing_at_first(kind: type[TwoWays], form: Callable[[Any], Any]) -> None:
    model, (x, y) = kind(), missing()
    oracle = Dense(model, x, y)
    blocks = oracle.blocks(oracle.hessian)
    for call in (sf.trace, sf.diagonal):
        result = call(model, form((x, y)))
        assert result.exact
        agrees(result, blocks)
    ggn = sf.trace(model, form((x, y)), curvature="ggn")
    agrees(ggn, oracle.blocks(oracle.ggn))


def test_sketches_look_too() -> None:
    model, (x, y) = TwoWays(), missing()
    with pytest.warns(UserWarning, match="sketched"):
        result = sf.trace(
            model, (x, y), curvature="ggn", max_directions=1, estimator=sf.Hutchinson(60)
        )
    oracle = Dense(model, x, y)
    agrees(result, oracle.blocks(oracle.ggn), sigmas=5)


class Places(nn.Module):
    """What is looked up once for all samples goes another way too, for some of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.place, self.up, self.head = nn.Embedding(5, 4), nn.Linear(1, 4), nn.Linear(4, 3)
        self.double()

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        places = self.place(torch.arange(5)[None])
        h = F.relu(self.up(a[..., None]) + places)
        return self.head((h + torch.einsum("nt,mtc->ntc", b, places)).sum(1))


@pytest.mark.parametrize("form", WAYS.values(), ids=WAYS)
def test_lookups_that_go_another_way_later(form: Callable[[Any], Any]) -> None:
    (a, b), y = missing()
    b[[n for n in range(N) if n % 16 not in (5, 6)]] = 0  # these two are not looked at
    model, oracle = Places(), Dense(Places(), (a, b), y)
    result = sf.diagonal(model, form(((a, b), y)))
    assert result.exact
    agrees(result, oracle.blocks(oracle.hessian))


class ChangedPlaces(Places):
    """What was looked up is changed in place, by nothing at first."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        places = self.place(torch.arange(5).expand(len(a), 5))
        places.mul_(1 + b[..., None])
        return self.head(F.relu(self.up(a[..., None]) + places).sum(1))


@pytest.mark.parametrize("form", WAYS.values(), ids=WAYS)
def test_lookups_that_are_changed_later(form: Callable[[Any], Any]) -> None:
    data = missing()
    model, oracle = ChangedPlaces(), Dense(ChangedPlaces(), *data)
    result = sf.diagonal(model, form(data))
    assert result.exact
    agrees(result, oracle.blocks(oracle.hessian))


class Asleep(nn.Module):
    """A residual branch that ends in zeros, for all samples or for those with an input of 0."""

    def __init__(self, *, for_good: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer, self.norm = nn.Linear(5, 6), nn.Linear(6, 5), nn.BatchNorm1d(5)
        self.head, self.for_good = nn.Linear(5, 3), for_good
        if for_good:
            nn.init.zeros_(self.norm.weight)
        self.eval().double()

    def branch(self, a: Tensor) -> Tensor:
        return self.outer(F.relu(self.inner(a)))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        gate = 1 if self.for_good else b[:, :1]
        return self.head(F.relu(a + gate * self.norm(self.branch(a))))


class AsleepInTwoWays(Asleep):
    """The second way is not recorded, and no cotangent of a recorded one comes by it."""

    def branch(self, a: Tensor) -> Tensor:
        return super().branch(a) + torch.einsum("ni,oi->no", F.relu(a), self.outer.weight[:, :5])


class AsleepTurned(Asleep):
    """The rows of the branch are other samples'."""

    def branch(self, a: Tensor) -> Tensor:
        return super().branch(a.flip(0)).flip(0)


INSIDE = ["inner.weight", "inner.bias", "outer.weight", "outer.bias"]


def test_branches_that_end_in_zeros_have_fast_rules() -> None:
    """As they do in residual networks at the start, whose last normalisations have weights 0."""
    model, (x, y) = Asleep(for_good=True), missing()
    result = sf.diagonal(model, (x, y))
    assert {result.details[name].rule for name in INSIDE} == {"linear"}
    agrees(result, Dense(model, x, y).blocks(Dense(model, x, y).hessian))


@pytest.mark.parametrize("form", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("kind", [Asleep, AsleepInTwoWays, AsleepTurned])
def test_branches_that_wake_up(kind: type[Asleep], form: Callable[[Any], Any]) -> None:
    model, (x, y) = kind(for_good=False), missing()
    result = sf.diagonal(model, form((x, y)))
    assert result.exact
    agrees(result, Dense(model, x, y).blocks(Dense(model, x, y).hessian))


def _looked_at(model: nn.Module, x: Any, y: Tensor) -> Plan:
    risk = Risk(model, (x, y))
    with risk.session():
        return examine(risk, next(risk.batches()), "proof")


@pytest.mark.parametrize(
    ("kind", "unserved"),
    [(Asleep, []), (AsleepInTwoWays, ["outer.weight"]), (AsleepTurned, INSIDE)],
)
def test_nothing_is_taken_for_granted_of_a_branch_that_sleeps(
    kind: type[Asleep], unserved: list[str]
) -> None:
    plan = _looked_at(kind(for_good=True), *missing())
    assert plan.dormant == set(INSIDE)
    assert [name for name in INSIDE if plan.rules[name] == "per-sample"] == unserved
    assert plan.unknown == set(unserved)


def test_wrong_rules_of_a_branch_that_sleeps_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    right = LinearUse.terms

    def wrong(self: LinearUse, deltas: Any, rows: Rows) -> Iterator[tuple[str, Term]]:
        return right(self, [2 * delta for delta in deltas], rows)

    monkeypatch.setattr(LinearUse, "terms", wrong)
    plan = _looked_at(Asleep(for_good=True), *missing())
    assert {plan.rules[name] for name in INSIDE} == {"per-sample"}
    model, (x, y) = Asleep(for_good=False), missing()
    result = sf.trace(model, (x, y))
    agrees(result, Dense(model, x, y).blocks(Dense(model, x, y).hessian))


class CurvedLater(nn.Module):
    """Piecewise linear on the first batch, curved on a later one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        late = x[:, :1] > 3
        h = torch.where(late, 2 * h.tanh(), h.relu()) if bool(late.any()) else h.relu()
        out: Tensor = self.c(self.b(h).relu())
        return out


@pytest.mark.filterwarnings("ignore:The outputs have")
@pytest.mark.parametrize("directions", [1, 1000])
@pytest.mark.parametrize(
    "estimator", [None, sf.Hutchinson(60), sf.PropagatedCurvature(60), sf.ActivationProbes(60)]
)
def test_estimates_of_what_is_curved_later(estimator: Any, directions: int) -> None:
    """Draws of the Gauss–Newton part alone would be wrong in silence."""
    model = CurvedLater()
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(0)).double()
    x[8:, 0] += 9
    y = torch.arange(16) % 4
    oracle = Dense(model, x, y)
    rest = float((oracle.hessian - oracle.ggn).trace())
    assert abs(rest) > 0.1 * float(oracle.ggn.trace()), "negative control: it is curved"
    data = [(x[:8], y[:8]), (x[8:], y[8:])]
    result = sf.trace(model, data, estimator=estimator, max_directions=directions)
    agrees(result, oracle.blocks(oracle.hessian), sigmas=5)


# company


class Longest(nn.Module):
    """Divides by the length of the longest sequence in the batch."""

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.act, self.body, self.head = act, nn.Linear(4, 6), nn.Linear(6, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        lengths = x[:, 0, 0]
        keep = (torch.arange(x.shape[1]) < lengths[:, None]).unsqueeze(-1)
        h = (self.act(self.body(x)) * keep)[:, : int(lengths.max())]
        return self.head(h.mean(1))


def sequences() -> Tensor:
    x = inputs(10, 4)
    x[:16, 0, 0] = 10
    x[16:, 0, 0] = 3.0 + torch.arange(N - 16) % 4
    return x


@pytest.mark.parametrize("act", [torch.relu, torch.tanh])
@pytest.mark.parametrize("small", [False, True])
def test_one_batch_holds_all_samples(act: Callable[[Tensor], Tensor], small: bool) -> None:
    model, x = Longest(act), sequences()
    data = (x, Y) if small else [(x[i : i + 16], Y[i : i + 16]) for i in range(0, N, 16)]
    options = {"memory_budget": 20_000} if small else {}
    oracle = Dense(model, x, Y)
    result = sf.trace(model, data, estimator=sf.Hutchinson(100), **options)
    agrees(result, oracle.blocks(oracle.hessian))
    assert "other samples" in result.details["body.weight"].reason
    found = sf.max_eigenvalue(model, data, **options)
    assert found.value == pytest.approx(float(torch.linalg.eigvalsh(oracle.hessian)[-1]))


def test_losses_around_the_minimum_know_it_too() -> None:
    model, x = Longest(torch.relu), sequences()
    batches = [(x[i : i + 16], Y[i : i + 16]) for i in range(0, N, 16)]
    one, many = (sf.measure(model, d, measures=["sam_sharpness"]) for d in ((x, Y), batches))
    assert many["sam_sharpness"].value == pytest.approx(one["sam_sharpness"].value)


def test_company_that_does_nothing() -> None:
    """The negative control: samples that keep to themselves stay with the fast rules."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    x = inputs(4)
    result = sf.trace(model, [(x[i : i + 9], Y[i : i + 9]) for i in range(0, N, 9)])
    assert {d.rule for d in result.details.values()} == {"linear"}


# what samples share


class Scaled(nn.Module):
    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.act, self.body, self.head = act, nn.Linear(7, 6), nn.Linear(6, 3)
        self.double()

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.head(self.act(self.body(x * scale)))


def scaled(sizes: list[int]) -> tuple[Tensor, Tensor, Iterator[Any]]:
    x, scale = inputs(7)[: sum(sizes)], torch.linspace(0.1, 3, 7).double()
    rows = zip(x.split(sizes), Y[: sum(sizes)].split(sizes), strict=True)
    return x, scale, (((part, scale), y) for part, y in rows)


@pytest.mark.parametrize("act", [torch.relu, torch.tanh])
def test_a_batch_as_long_as_what_its_samples_share(act: Callable[[Tensor], Tensor]) -> None:
    model, (x, scale, batches) = Scaled(act), scaled([9, 9, 7])
    data = list(batches)
    oracle = Dense(model, (x, scale), Y[:25])
    blocks = oracle.blocks(oracle.hessian)
    for options in ({}, {"memory_budget": 1}):
        agrees(sf.trace(model, data, estimator=sf.Hutchinson(100), **options), blocks)


def test_a_first_batch_of_that_length_is_refused() -> None:
    data = list(scaled([7, 9])[2])
    with pytest.raises(sf.DataError, match="one row for each sample in batch 0, but"):
        sf.trace(Scaled(torch.relu), data)


def test_parts_of_parts_keep_what_is_shared() -> None:
    batch = Batch((torch.zeros(9, 3), torch.arange(4)), torch.zeros(9), 9, "here")
    part = batch.spread(4)
    assert batch.places(4) == [0, 3, 4, 7]
    assert part.part(0, 1).inputs[1].tolist() == [0, 1, 2, 3]
    assert [len(t) for t in part.part(1, 4).leaves()] == [3, 4, 3]


class Sized(nn.Module):
    """Takes two numbers that all samples share."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(4, 3)
        self.double()

    def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        return self.head(x[:, : size[0], : size[1]].mean(1))


@pytest.mark.parametrize("budget", [None, 1])
def test_as_many_samples_as_shared_numbers(budget: int | None) -> None:
    x, model = inputs(5, 4), Sized()
    data = [((x[a:b], (3, 4)), Y[a:b]) for a, b in ((0, 9), (9, 18), (18, 20))]
    oracle = Dense(model, (x[:20], (3, 4)), Y[:20])
    result = sf.trace(model, data, memory_budget=budget)
    assert result.details["head.weight"].rule == "linear"
    agrees(result, oracle.blocks(oracle.hessian))


class Worded(nn.Module):
    """Takes lengths as a list of integers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 3)
        self.double()

    def forward(self, x: Tensor, lengths: list[int]) -> Tensor:
        h = F.relu(self.body(x))
        return self.head(torch.stack([row[:k].mean(0) for row, k in zip(h, lengths, strict=True)]))


@pytest.mark.parametrize("kind", [list, tuple])
def test_lists_with_an_entry_a_sample_are_cut_with_them(kind: type) -> None:
    x, model = inputs(10, 4), Worded()
    lengths = [10] * 16 + [3 + k % 4 for k in range(N - 16)]
    oracle = Dense(model, (x, lengths), Y)
    blocks = oracle.blocks(oracle.hessian)
    cut = [((x[i : i + 9], kind(lengths[i : i + 9])), Y[i : i + 9]) for i in range(0, N, 9)]
    for data, budget in ((((x, kind(lengths)), Y), 30_000), (cut, None)):
        result = sf.trace(model, [data] if budget else data, memory_budget=budget)
        assert result.details["body.weight"].rule == "linear"
        agrees(result, blocks)


class Recycling:
    """Yields every batch in the same memory."""

    def __init__(self, x: Tensor, size: int) -> None:
        self.x, self.size = x, size

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        inputs, targets = self.x[: self.size].clone(), Y[: self.size].clone()
        for i in range(0, N, self.size):
            inputs.copy_(self.x[i : i + self.size])
            targets.copy_(Y[i : i + self.size])
            yield inputs, targets


def weighted(o: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(o, y, weight=torch.tensor([1.0, 2.0, 5.0]).double())


@pytest.mark.parametrize("size", [1, 2, 16])
@pytest.mark.parametrize("loss", ["cross_entropy", weighted])
def test_loaders_that_write_to_the_same_memory(loss: Any, size: int) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double(), inputs(4)
    oracle = Dense(model, x, Y, loss)
    result = sf.trace(model, Recycling(x, size), loss, estimator=sf.Hutchinson(100))
    agrees(result, oracle.blocks(oracle.hessian))


def test_what_a_monitor_keeps_is_its_own() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double(), inputs(4)
    monitor = sf.Monitor(model, (x, Y), measures=["hessian_trace"])
    before = monitor.measure().values
    x.mul_(3)
    assert monitor.measure().values == before


# derivatives


class Detached(TwoWays):
    def other(self, b: Tensor) -> Tensor:
        with torch.no_grad():
            return F.linear(b, self.body.weight)


@pytest.mark.parametrize("quiet", [slice(0, 8), slice(0, None, 2), slice(1, None, 2)])
def test_detached_branches_that_are_off_for_some_samples(quiet: slice) -> None:
    a, b = inputs(5), inputs(5, seed=1)
    b[quiet] = 0
    with pytest.raises(sf.ModelError, match="not the derivative of its forward pass"):
        sf.trace(Detached(), ((a, b), Y))


class Whispering(nn.Module):
    """A straight-through branch that adds little, as with a LayerScale at its start."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.side, self.head = nn.Linear(5, 6), nn.Linear(5, 6), nn.Linear(6, 3)
        self.gain = gain
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.side(x)
        rounded = h + (4 * h.sin() - h).detach()
        return self.head(F.relu(self.body(x) + self.gain * rounded))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gain", [1.0, 1e-2, 1e-4, 1e-5])
def test_parameters_that_add_little_are_looked_at(gain: float, dtype: torch.dtype) -> None:
    with pytest.raises(sf.ModelError, match=r"along side\.weight"):
        sf.trace(Whispering(gain).to(dtype), (inputs(5).to(dtype), Y))


def test_casts_to_few_digits_are_noted() -> None:
    class Cast(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return super().forward(x).float()

    data = (inputs(5).float(), Y)
    layers = nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3)
    assert any("bfloat16" in note for note in sf.trace(Cast(*layers), data).notes)
    assert not sf.trace(nn.Sequential(*layers), data).notes
