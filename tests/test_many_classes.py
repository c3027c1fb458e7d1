"""Many classes: a tolerance that is given is reached by random mixes of directions."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from dense import Dense
from scipy.stats import norm
from scipy.stats import t as student
from test_adaptive import Behind, Reordered
from torch import Tensor, nn
from untouched import assert_untouched, fingerprint

import saltflat as sf
from saltflat.curvature import loss_hessian
from saltflat.curvature.sketch import Settled
from saltflat.losses import CrossEntropy, resolve

CLASSES = 210  # so many that all directions cost more than 70 gradients


def network(
    scale: float = 1.0, width: int = 2, samples: int = 64
) -> tuple[nn.Module, Tensor, Tensor]:
    """`scale` makes it confident; of few samples a few then dominate all others."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, CLASSES)).double()
    with torch.no_grad():
        for p in model[2].parameters():
            p.mul_(scale)
    x = torch.randn(samples, 3, dtype=torch.float64)
    return model, x, torch.arange(samples) % CLASSES


@pytest.mark.parametrize("top", [0, 1, 3, 9])
@pytest.mark.parametrize("shape", [(5, 10), (2, 10, 3)])
@pytest.mark.parametrize("scale", [1.0, 30.0, 1000.0])
def test_the_likeliest_columns_and_the_rest_make_the_whole(
    top: int, shape: tuple[int, ...], scale: float
) -> None:
    """A basis in place of the noise gives Σ u uᵀ of the rest."""
    torch.manual_seed(1)
    outputs = scale * torch.randn(shape, dtype=torch.float64)
    targets = torch.randint(10, (shape[0], *shape[2:]))
    loss = resolve("cross_entropy")
    assert isinstance(loss, CrossEntropy)
    sides = loss_hessian.SoftmaxSketch(loss, outputs, targets, top)
    logits = outputs.movedim(1, -1)
    found = torch.zeros(*logits.shape, 10, dtype=torch.float64)
    if top:
        columns = sides.columns(0, top)[0].movedim(2, -1)
        found += torch.einsum("d...i,d...j->...ij", columns, columns)
    for k in range(10):
        noise = torch.zeros_like(logits)
        noise[..., k] = 1
        (mixed,) = sides.sketch(noise.movedim(-1, 1))[0].movedim(2, -1)
        found += mixed.unsqueeze(-1) * mixed.unsqueeze(-2)
    p = logits.softmax(-1)
    wanted = torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-14)
    if 0 < top < 9 and scale == 1.0 and outputs.ndim == 2:
        out = torch.einsum("k...i,k...i->...", *[sides.columns(0, top)[0]] * 2)
        left = wanted.diagonal(dim1=-2, dim2=-1).sum(-1) / out - 1
        torch.testing.assert_close(sides.left(), left, rtol=1e-10, atol=0)


@pytest.mark.parametrize(("scale", "samples"), [(1.0, 64), (8.0, 640)])
def test_a_tolerance_is_reached_for_less(scale: float, samples: int) -> None:
    model, x, y = network(scale, samples=samples)
    dense = Dense(model, x, y)
    truth = float(dense.hessian.trace())
    before = fingerprint(model)
    whole = sf.trace(model, (x, y))
    assert whole.exact
    assert whole.total == pytest.approx(truth, rel=1e-10)
    found = sf.trace(model, (x, y), tolerance=0.05)
    assert_untouched(model, before)
    assert not found.exact
    assert found.stderr <= 0.05 * truth
    assert abs(found.total - truth) <= 4 * found.stderr
    for name, block in dense.blocks(dense.hessian).items():
        detail = found.details[name]
        assert detail.rule == "sketch"
        assert abs(detail.value - float(block.trace())) <= 4 * float(detail.stderr) + 1e-12
    assert "random mixes" in str(found.notes)
    report = sf.measure(model, (x, y), measures=["hessian_trace"], tolerance=0.05, standing=False)
    cost = report.provenance.gradients["curvature"]
    assert cost < 0.5 * 0.35 * CLASSES


def test_where_draws_cost_more_it_is_exact() -> None:
    model, x, y = network()
    whole = sf.trace(model, (x, y))
    found = sf.trace(model, (x, y), tolerance=1e-7)
    assert found.exact
    assert found.total == whole.total
    assert "random mixes would cost more than all 209 directions" in str(found.notes)


def test_errors_are_calibrated() -> None:
    """30 seeds and two networks: normal scores have a root mean square of 1 ± 0.1, and 95 %
    intervals hold 52 of 60 or more but for one time in a hundred."""
    scores, holds = [], 0
    for scale, samples in ((1.0, 64), (8.0, 300)):
        model, x, y = network(scale, samples=samples)
        truth = sf.trace(model, (x, y)).total
        for seed in range(30):
            found = sf.trace(model, (x, y), tolerance=0.1, seed=seed)
            assert found.stderr <= 0.1 * truth
            scores.append((found.total - truth) / found.stderr)
            holds += abs(scores[-1]) <= student.ppf(0.975, found.degrees)
    assert 0.7 < math.sqrt(sum(z**2 for z in scores) / len(scores)) < 1.35
    assert holds >= 52


def learnt(classes: int, epochs: int, samples: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A network trained on clusters, one a class, and some of the data that it has learnt."""
    torch.manual_seed(0)
    y = torch.randint(classes, (4000,))
    x = (torch.randn(classes, 4)[y] + 0.5 * torch.randn(4000, 4)).double()
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, classes)).double()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(epochs):
        for part in torch.randperm(len(x)).split(200):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[part]), y[part]).backward()
            optimizer.step()
    return model, x[:samples], y[:samples]


def outlying(model: Any, x: Tensor, count: int) -> tuple[nn.Module, Tensor]:
    """The first samples have a feature of their own, which no unit uses yet: outputs stay, and the
    first layer has thousands of times their curvature."""
    old = model[0]
    new = nn.Linear(old.in_features + 1, old.out_features).double()
    with torch.no_grad():
        new.bias.copy_(old.bias)
        new.weight.copy_(nn.functional.pad(old.weight, (0, 1)))
    own = torch.zeros(len(x), 1, dtype=x.dtype)
    own[:count] = 60.0
    return nn.Sequential(new, *model[1:]), torch.cat([x, own], 1)


def secret(model: Any, x: Tensor, count: int) -> tuple[nn.Module, Tensor]:
    """The first samples have a unit of their own, which feeds unlikely classes alone: it hardly
    moves the outputs, and the likeliest classes do not tell of the curvature in its weights."""
    (old, relu, last), classes = model, model(x[:1])[0].argsort(descending=True)[20:60]
    first = nn.Linear(x.shape[1] + 1, old.out_features + 1).double()
    new = nn.Linear(old.out_features + 1, last.out_features).double()
    with torch.no_grad():
        first.weight.copy_(nn.functional.pad(old.weight, (0, 1, 0, 1)))
        first.bias.copy_(nn.functional.pad(old.bias, (0, 1), value=-1e-7))
        new.weight.copy_(nn.functional.pad(last.weight, (0, 1)))
        new.bias.copy_(last.bias)
        first.weight[-1, -1] = 1e-6
        new.weight[classes, -1] = 80 * torch.randn(len(classes), dtype=x.dtype)
    own = torch.zeros(len(x), 1, dtype=x.dtype)
    own[:count] = 1.0
    return nn.Sequential(first, relu, new), torch.cat([x, own], 1)


@pytest.mark.parametrize(("change", "count"), [(outlying, 1), (outlying, 3), (secret, 1)])
def test_samples_that_dominate_are_sent_in_full(change: Any, count: int) -> None:
    """Their few draws would scatter little where they are too small. What is left to draw scatters
    in many samples: there are degrees of freedom."""
    model, x, y = network()
    model, x = change(model, x, count)
    dense = Dense(model, x, y)
    truth = {name: float(block.trace()) for name, block in dense.blocks(dense.hessian).items()}
    for seed in range(5):
        found = sf.trace(model, (x, y), tolerance=0.1, seed=seed)
        assert re.search(rf"all of [{count}-6] samples", str(found.notes))
        assert found.stderr < 0.01 * found.total
        assert found.degrees > 20
        for name, detail in found.details.items():
            assert detail.degrees > 20
            assert abs(float(detail.value) - truth[name]) <= 4 * float(detail.stderr)


def test_all_kinds_of_a_sample_that_dominates_are_nearly_exact() -> None:
    model, x, y = network()
    model, x = outlying(model, x, 1)
    names = ["hessian_trace", "normalized_sharpness", "rho"]
    options: dict[str, Any] = {"measures": names, "standing": False}
    truth = sf.measure(model, (x, y), **options)
    found = sf.measure(model, (x, y), tolerance=0.1, **options)
    assert "all of " in str(found.notes)
    for name in names:
        assert not found[name].exact
        assert found[name].value == pytest.approx(truth[name].value, rel=0.02)


def test_batches_do_not_matter_to_samples_that_dominate() -> None:
    """They are gathered from batches of any size, and known again by their outputs."""
    model, x, y = network()
    model, x = outlying(model, x, 3)
    order = torch.arange(64).roll(20)
    x, y = x[order], y[order]
    whole = sf.trace(model, (x, y), tolerance=0.1)
    parts = sf.trace(model, list(zip(x.split(7), y.split(7), strict=True)), tolerance=0.1)
    assert "all of " in str(whole.notes)
    assert list(parts.values()) == pytest.approx(list(whole.values()), rel=1e-10)
    with pytest.raises(sf.ChangedData, match="another order on another pass"):
        sf.trace(model, Reordered((x, y)), tolerance=0.1)


class Masked(nn.Module):
    """Every seventh class cannot be chosen."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.model(x)
        never = torch.arange(outputs.shape[1]) % 7 == 0
        return outputs.masked_fill(never, -1e9)


def test_masked_classes_do_not_hide_another_order() -> None:
    """Beside their scores those of all others are next to nothing."""
    model, x, _ = network()
    model, x = outlying(model, x, 3)
    model, data = Masked(model), (x.roll(30, 0), torch.ones(64, dtype=torch.long))
    truth = sf.trace(model, data).total
    found = sf.trace(model, data, tolerance=0.1)
    assert abs(found.total - truth) <= 4 * found.stderr
    with pytest.raises(sf.ChangedData, match="another order on another pass"):
        sf.trace(model, Behind(data), tolerance=0.1)


@pytest.mark.parametrize(
    ("shares", "chosen"),
    [
        ([0.0] * 40, []),
        ([1.0] * 40, []),
        ([9.0] + [1.0] * 39, [0]),
        ([1.0] * 20 + [9.0, 99.0] + [1.0] * 18, [20, 21]),  # the one hides the other
        ([1.0] * 38 + [99.0, 9.0], [38, 39]),
        ([2.0**k for k in range(40)], [*range(40)]),  # one is left to dominate, however many go
        ([1.0] * 9, [*range(9)]),
    ],
)
def test_which_samples_dominate(shares: list[float], chosen: list[int]) -> None:
    left = torch.tensor(shares)
    samples = len(left)
    for block in (0, 1):
        both = torch.stack([left, torch.ones(samples)][:: 1 - 2 * block], 1)
        settled = Settled.of(both, torch.zeros(samples, 8))
        assert settled.places.tolist() == chosen
        assert settled.are_many(samples) == (len(chosen) > samples / 10)


def test_who_dominates_what_others_have_left() -> None:
    """Those of one block are gone from the other one too, where the next one then has too much."""
    left = torch.full((60, 2), 0.01)
    left[:4, 0] = 1000.0
    left[:12, 1] = 1.0  # twelve that are alike, of which eight are left
    assert Settled.of(left, torch.zeros(60, 8)).places.tolist() == [*range(12)]


def test_where_many_dominate_there_are_no_random_mixes() -> None:
    """With samples that all differ by factors one would always be left to dominate; and these are
    so few that they do not vouch for each other either."""
    model, x, y = network()
    x = x * (1.5 ** torch.arange(64, dtype=x.dtype))[:, None]
    truth = sf.trace(model, (x, y))
    for seed in range(5):
        found = sf.trace(model, (x, y), tolerance=0.1, seed=seed)
        assert "no random mixes, since so many samples" in str(found.notes)
        assert "only 64 samples" in str(found.notes)
        assert found.exact
        assert dict(found) == pytest.approx(dict(truth), rel=1e-12)
    names = ["hessian_trace", "normalized_sharpness"]
    report = sf.measure(model, (x, y), measures=names, tolerance=0.1, standing=False)
    assert report["normalized_sharpness"].exact
    assert "would be biased by their noise" in str(report.notes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("classes", "epochs", "outliers"),
    [(220, 100, 0), (300, 10, 0), (300, 10, 1), (300, 10, 3), (300, 10, 10), (300, 0, 1)],
)
def test_errors_of_networks_that_have_learnt_are_calibrated(
    classes: int, epochs: int, outliers: int
) -> None:
    """Each block and the sum, 400 seeds: what Student's t with the stated degrees makes of an error
    is normal. The bounds would each be missed by chance about once in three hundred times."""
    model, x, y = learnt(classes, epochs, 200)
    if outliers:
        model, x = outlying(model, x, outliers)
    dense = Dense(model, x, y)
    truth = {name: float(block.trace()) for name, block in dense.blocks(dense.hessian).items()}
    tails: dict[str, list[float]] = {name: [] for name in (*truth, "")}
    for seed in range(400):
        found = sf.trace(model, (x, y), tolerance=0.1, seed=seed)
        assert not found.exact
        z = (found.total - sum(truth.values())) / found.stderr
        tails[""].append(2 * student.sf(abs(z), found.degrees))
        for name, detail in found.details.items():
            z = (float(detail.value) - truth[name]) / float(detail.stderr)
            tails[name].append(2 * student.sf(abs(z), detail.degrees))
    for each in tails.values():
        scores = [norm.isf(p / 2) for p in each]
        assert 0.89 < math.sqrt(sum(z**2 for z in scores) / len(scores)) < 1.11
        assert sum(p > 0.05 for p in each) >= 367
        assert sum(p > 0.01 for p in each) >= 390


def test_without_the_likeliest_classes_it_would_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A negative control: of a confident network they hold most of the trace."""
    model, x, y = network(8.0, samples=640)
    truth = sf.trace(model, (x, y)).total
    columns = loss_hessian.SoftmaxSketch.columns

    def nothing(self: loss_hessian.SoftmaxSketch, start: int, stop: int) -> tuple[Tensor, None]:
        return 0 * columns(self, start, stop)[0], None

    monkeypatch.setattr(loss_hessian.SoftmaxSketch, "columns", nothing)
    found = sf.trace(model, (x, y), tolerance=0.1)
    assert found.total < 0.75 * truth


def test_forms_and_slopes_come_along() -> None:
    """Everything that measures are made of, and what is not curvature at all, in one call."""
    model, x, y = network(8.0, samples=640)
    names = ["hessian_trace", "rho", "kappa_trace", "fisher_rao_norm"]
    truth = sf.measure(model, (x, y), measures=names, standing=False)
    # Of 200 seeds, 0 is the one that is 5 standard errors off (with 11 degrees of freedom).
    found = sf.measure(model, (x, y), measures=names, tolerance=0.02, standing=False, seed=1)
    for name in names[:-1]:
        assert not found[name].exact
        assert abs(found[name].value - truth[name].value) <= 5 * found[name].stderr
    assert found["fisher_rao_norm"].exact
    assert found["fisher_rao_norm"].value == pytest.approx(truth["fisher_rao_norm"].value)


def test_few_directions_are_all_sent() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5)).double()
    data = torch.randn(30, 3).double(), torch.arange(30) % 5
    assert sf.trace(model, data, tolerance=0.1, estimator=sf.PropagatedCurvature(4)).exact


def test_draws_serve_parts_of_the_data_too() -> None:
    """More directions than may be sent, and some of the samples: the interval has both errors."""
    model, _, _ = network()
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2000, 3, generator=generator, dtype=torch.float64)
    data = x, torch.randint(CLASSES, (2000,), generator=generator)
    truth = sf.trace(model, data).total
    with pytest.warns(UserWarning, match="more than max_directions"):
        drawn = sf.trace(model, data, max_directions=10, tolerance=0.1)
    assert not drawn.exact
    holds = 0
    for seed in range(20):
        found = sf.trace(model, data, max_directions=10, samples="auto", tolerance=0.1, seed=seed)
        assert found.interval is not None
        holds += found.interval[0] <= truth <= found.interval[1]
    assert holds >= 17
