"""samples="auto": against the value on all samples, and how often its interval holds that."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dense import Dense
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from untouched import assert_untouched, fingerprint

import saltflat as sf
from saltflat.subsample import Part, Population, Rule, grown

NAMES = ["hessian_trace", "minimum_sharpness", "kappa_trace", "rho", "fisher_rao_norm"]


def network(width: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 3)
    return nn.Sequential(*layers).double()


def samples(size: int = 4000) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size, 6, generator=generator, dtype=torch.float64)
    return 3 * x, torch.randint(3, (size,), generator=generator)


def test_the_value_is_that_of_a_random_part() -> None:
    """The samples that were drawn, by the dense Hessian on them; every entry of its own."""
    model, data = network(2), samples()
    found = sf.trace(model, data, samples="auto", tolerance=0.2, seed=5)
    assert found.certificate is not None
    assert found.certificate.samples == 256
    ((x, y),) = Population(data, None, 5).first(256)
    assert len(x.unique(dim=0)) == 256
    dense = Dense(model, x, y)
    for name, block in dense.blocks(dense.hessian).items():
        assert found[name] == pytest.approx(float(block.trace()), rel=1e-10)
    assert not found.exact
    assert not any(detail.exact for detail in found.details.values())
    assert found.interval is not None
    assert found.interval[0] < found.total < found.interval[1]
    assert "256 of 4,000 samples" in str(found)


def test_a_report_says_what_it_used_and_holds_the_truth() -> None:
    model, data = network(), samples()
    before = fingerprint(model)
    found = sf.measure(model, data, measures=NAMES, samples="auto", tolerance=0.1, seed=3)
    assert_untouched(model, before)
    truth = sf.measure(model, data, measures=NAMES)
    assert found.provenance.population == 4000
    assert found.provenance.samples in Rule(4000, 0.1).sizes
    assert f"{found.provenance.samples:,} of 4,000 samples" in str(found)
    left = math.sqrt(1 - found.provenance.samples / 4000)
    for name, m in found.items():
        assert m.interval is not None
        low, high = m.interval
        assert low < truth[name].value < high
        assert max(high - m.value, m.value - low) <= 0.2 * m.value
        assert not m.exact
        assert m.stderr == pytest.approx(left * m.sampling)
    assert found.standing is not None
    again = sf.measure(model, data, measures=NAMES, samples="auto", tolerance=0.1, seed=3)
    assert {n: m.value for n, m in again.items()} == {n: m.value for n, m in found.items()}
    other = sf.measure(model, data, measures=["rho"], samples="auto", tolerance=0.1, seed=4)
    assert other["rho"].value != found["rho"].value


def test_a_report_is_saved_with_its_intervals(tmp_path: Any) -> None:
    report = sf.measure(network(), samples(), measures=["rho"], samples="auto")
    assert sf.Report.load(report.save(tmp_path / "report.json")) == report


def test_parts_of_unlike_sizes_are_compared_as_what_they_are_parts_of() -> None:
    """One network has its interval on 256 samples, the other on twice as many or more."""
    even, steep = network(), network()
    with torch.no_grad():
        steep[2].weight.mul_(6.0)
    options = {"measures": ["hessian_trace"], "tolerance": 0.1}
    both = sf.compare({"even": even, "steep": steep}, samples(), samples="auto", **options)
    sizes = [report.provenance.samples for report in both.values()]
    assert sizes[0] < sizes[1]
    assert both.problems == ()
    assert f"on {sizes[0]} of 4,000 samples, drawn at random: even" in " ".join(str(both).split())
    # Of as many samples in all: fewer are other data.
    few = sf.measure(steep, samples(600), **options)
    other = sf.Comparison({"even": both["even"], "few": few})
    assert other.problems == ("the number of samples differs (even: 4000, few: 600)",)


def test_a_verdict_says_that_parts_are_of_unlike_sizes() -> None:
    options = {"measures": ["rho"], "standing": False}
    part, all_ = (sf.measure(network(), samples(), samples=s, **options) for s in ("auto", "all"))
    sharper = replace(all_["rho"], value=2 * all_["rho"].value)
    both = sf.Comparison({"a": part, "b": replace(all_, measurements={"rho": sharper})})
    verdict = both.verdict("rho", "a", "b")
    assert verdict.flatter == "a"
    assert "taken for the same data" in verdict.reason


def collate(pairs: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    x, y = zip(*pairs, strict=True)
    return {"input": torch.stack(x), "labels": torch.stack(y)}


def test_all_forms_of_data_have_the_same_samples_drawn() -> None:
    x, y = samples(1000)
    set_ = TensorDataset(x, y)
    forms: list[Any] = [
        (x, y),
        (x.numpy(), y.numpy()),
        {"input": x, "labels": y},
        [(x[:300], y[:300]), (x[300:301], y[300:301]), (x[301:], y[301:])],
        set_,
        DataLoader(set_, 100),
        DataLoader(set_, 7, shuffle=True),
        DataLoader(set_, 64, collate_fn=collate, shuffle=True),
        DataLoader(set_, 64, sampler=SubsetRandomSampler(range(1000))),
    ]
    found = [sf.trace(network(), data, samples="auto", tolerance=0.2) for data in forms]
    assert found[0].certificate is not None
    assert found[0].certificate.samples == 256
    for other in found[1:]:
        assert other.total == pytest.approx(found[0].total, rel=1e-12)
        assert other.interval == pytest.approx(found[0].interval, rel=1e-10)


def test_a_loader_is_read_as_it_reads_and_its_generators_are_left_alone() -> None:
    x, y = samples(1000)
    generator = torch.Generator().manual_seed(7)
    half = SubsetRandomSampler(range(600), generator=generator)
    loader = DataLoader(TensorDataset(x, y), 50, sampler=half, generator=generator)
    before, model = generator.get_state(), network()
    seen = fingerprint(model)
    found = sf.trace(model, loader, samples="auto", tolerance=0.2)
    assert torch.equal(generator.get_state(), before)
    assert_untouched(model, seen)
    same = sf.trace(network(), (x[:600], y[:600]), samples="auto", tolerance=0.2)
    assert found.total == pytest.approx(same.total, rel=1e-12)


class Pairs(Dataset[tuple[Tensor, Tensor]]):
    """Sums of two samples, by two indices; one index gives one sample."""

    def __init__(self) -> None:
        self.tensors = samples(1000)

    def __getitem__(self, index: Any) -> tuple[Tensor, Tensor]:
        x, y = self.tensors
        first, *second = index if isinstance(index, tuple | list) else [index]
        return x[first] + sum(x[k] for k in second), y[first]

    def __len__(self) -> int:
        return 1000


@pytest.mark.parametrize("kind", [tuple, list])
def test_indices_may_be_pairs(kind: type) -> None:
    indices = [kind((k, 7 * k % 1000)) for k in range(600)]
    pairs = Pairs()
    loader = DataLoader(pairs, 50, sampler=indices)
    found = sf.trace(network(), loader, samples="auto", tolerance=0.2)
    rows, targets = zip(*(pairs[k] for k in indices), strict=True)
    data = torch.stack(rows), torch.stack(targets)
    same = sf.trace(network(), data, samples="auto", tolerance=0.2)
    assert found.total == pytest.approx(same.total, rel=1e-12)
    assert found.interval == pytest.approx(same.interval, rel=1e-10)


def test_all_samples_where_half_are_not_enough() -> None:
    model, data = network(), samples(600)
    whole = sf.trace(model, data, tolerance=1e-3)
    found = sf.trace(model, data, samples="auto", tolerance=1e-3)
    assert found == whole
    assert found.exact
    # Fewer samples than there are at a first look, and measures without parts among those asked.
    few = samples(500)
    names = ["rho", "normalized_sharpness"]
    reports = [sf.measure(model, few, measures=names, samples=s) for s in ("all", "auto")]
    assert dict(reports[0]) == dict(reports[1])
    assert reports[1].provenance.population == 0


def test_samples_that_all_agree_do_not_stop_it() -> None:
    """They say nothing of those that do not: one sample of 2000 holds all of the trace."""
    x = torch.zeros(2000, 1, dtype=torch.float64)
    x[-1] = 100.0
    model = nn.Linear(1, 1, bias=False).double()
    found = sf.trace(model, (x, torch.zeros(2000, 1).double()), "mse", samples="auto")
    assert found.exact
    assert found.total == pytest.approx(10.0)


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        x, y = samples(600)
        return zip(x, y, strict=True)


class Again:
    def __iter__(self) -> Iterator[Any]:
        yield samples(600)


def test_data_that_cannot_be_indexed_are_refused() -> None:
    x, y = samples(600)
    batched = TensorDataset(x.reshape(6, 100, -1), y.reshape(6, 100))
    for data in (DataLoader(Stream(), 50), Again(), DataLoader(batched, batch_size=None)):
        with pytest.raises(sf.InvalidType, match="samples='auto' draws single samples"):
            sf.trace(network(), data, samples="auto")
    with pytest.raises(sf.InvalidValue, match="samples must be 'all' or 'auto'"):
        sf.measure(network(), (x, y), samples=100)


def test_a_sampler_that_draws_others_each_time_is_refused() -> None:
    set_ = TensorDataset(*samples(600))
    loader = DataLoader(set_, 50, sampler=WeightedRandomSampler([1.0] * 600, 600))
    with pytest.raises(sf.ChangedData, match="WeightedRandomSampler"):
        sf.trace(network(), loader, samples="auto")


def test_what_has_no_part_for_each_sample_is_refused() -> None:
    data, model = samples(), network()
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5]).double())
    with pytest.raises(sf.NotApplicable, match="each sample's own part of the trace"):
        sf.trace(model, data, weighted, samples="auto")
    with pytest.raises(sf.NotApplicable, match=r"No measure can be had .* each sample's own part"):
        sf.measure(model, data, weighted, samples="auto")
    with pytest.raises(sf.NotApplicable, match="part of normalized_sharpness"):
        sf.measure(model, data, measures=["rho", "normalized_sharpness"], samples="auto")
    found = sf.measure(model, data, samples="auto", tolerance=0.1, standing=False)
    assert "each sample's own part" in found.skipped["normalized_sharpness"]
    assert set(NAMES) <= found.keys()
    assert all(m.interval is not None for m in found.values())


def test_what_is_sketched_is_told_as_on_all_samples() -> None:
    for which in ("all", "auto"):
        with pytest.warns(UserWarning, match="more than max_directions=1: sketched") as caught:
            found = sf.trace(network(), samples(), samples=which, max_directions=1, tolerance=0.2)
        assert (found.interval is not None) == (which == "auto")
        assert [Path(each.filename).name for each in caught] == ["test_subsample.py"]


def test_an_interruption_keeps_what_there_is_as_an_estimate() -> None:
    calls = 0

    def stop(step: str, done: int, total: int) -> None:
        nonlocal calls
        calls += step == "rho"
        if calls == 2:
            raise KeyboardInterrupt

    names = ["hessian_trace", "rho"]
    with pytest.raises(sf.Interrupted) as caught:
        sf.measure(
            network(), samples(), measures=names, samples="auto", tolerance=0.03, progress=stop
        )
    kept = caught.value.partial
    assert kept.provenance.population == 4000
    assert not kept["hessian_trace"].exact


# How often intervals hold the value on all samples.


def skewed(size: int = 20_000) -> Tensor:
    """As skewed as the traces of single samples of a network that has fitted its data."""
    generator = torch.Generator().manual_seed(2)
    return torch.randn(size, generator=generator, dtype=torch.float64).mul(1.5).exp()


def part(values: Tensor) -> Part:
    centred = values - values.mean()
    skewness = centred.pow(3).mean() / centred.square().mean() ** 1.5
    stderr = values.std() / math.sqrt(len(values))
    return Part(float(values.mean()), float(stderr), float(skewness))


def held(values: Tensor, tolerance: float, seed: int) -> tuple[bool, int]:
    """Whether the interval holds the mean, where it stopped."""
    rule = Rule(len(values), tolerance)

    def look(data: Any) -> tuple[Part, list[Part]]:
        found = part(data[0][0])
        return found, [found]

    found = grown(Population((values, values), None, seed), rule, look)
    if found is None:
        return True, len(values)
    low, high = rule.interval(*found)
    return low <= float(values.mean()) <= high, found[1]


def naive(values: Tensor, tolerance: float, seed: int) -> bool:
    """Look at every 32 samples, and stop when two standard errors are small enough."""
    generator = torch.Generator().manual_seed(seed)
    values = values[torch.randperm(len(values), generator=generator)]
    for size in range(32, len(values), 32):
        mean, error = float(values[:size].mean()), float(values[:size].std()) / math.sqrt(size)
        if 1.96 * error <= 2 * tolerance * mean:
            break
    return abs(mean - float(values.mean())) <= 1.96 * error


def test_intervals_hold_as_often_as_they_say() -> None:
    """Of 200 runs at least 184: with a probability of 95 % in each, fewer have one of 2.4 %. The
    negative control is a rule that stops when an error looks small."""
    values, tolerance = skewed(), 0.15
    runs = [held(values, tolerance, seed) for seed in range(200)]
    assert sum(hold for hold, _ in runs) >= 184
    assert sum(size < len(values) for _, size in runs) > 190
    assert sum(naive(values, tolerance, seed) for seed in range(200)) < 176


def test_a_part_that_is_small_for_its_skewness_is_not_enough() -> None:
    """As the samples of the Fisher–Rao norm of a network that has fitted 10,000 images, skewness
    55: Hall's interval alone holds in 168 of 200 runs here."""
    generator = torch.Generator().manual_seed(2)
    values = torch.rand(10_000, generator=generator, dtype=torch.float64).pow(-1 / 1.3)
    assert 40 < part(values).skewness < 60
    assert sum(held(values, 0.25, seed)[0] for seed in range(200)) >= 184


def test_a_network_s_intervals_hold() -> None:
    """End to end, 60 runs: fewer than 52 have a probability of 0.3 % at 95 %."""
    model, data = network(), samples()
    truth = sf.trace(model, data).total
    holds = 0
    for seed in range(60):
        found = sf.trace(model, data, samples="auto", tolerance=0.05, seed=seed)
        assert found.interval is not None
        holds += found.interval[0] <= truth <= found.interval[1]
    assert holds >= 52


def test_intervals_hold_on_half_of_the_samples() -> None:
    """Where the skewness of the mean vanishes, and that of the studentised mean does not."""
    generator, holds = torch.Generator().manual_seed(3), 0
    rule = Rule(512, 0.05)
    assert rule.sizes == [256]
    for _ in range(400):
        values = torch.randn(512, generator=generator, dtype=torch.float64).mul(2.0).exp()
        some = values[torch.randperm(512, generator=generator)[:256]]
        low, high = rule.interval(part(some), 256)
        holds += low <= float(values.mean()) <= high
    assert holds >= 352


def test_the_interval_is_student_s_where_nothing_is_skewed() -> None:
    from scipy.stats import t

    rule = Rule(10_000, 0.05)
    low, high = rule.interval(Part(2.0, 0.1, 0.0), 512)
    q = t.ppf(1 - 0.025 / len(rule.sizes), 511) * math.sqrt(1 - 512 / 10_000)
    assert (low, high) == pytest.approx((2 - 0.1 * q, 2 + 0.1 * q))
    long = rule.interval(Part(2.0, 0.1, 5.0), 512)
    assert long[1] - 2 > high - 2
    assert 2 - long[0] < 2 - low
    assert np.allclose([4 - x for x in reversed(long)], rule.interval(Part(2.0, 0.1, -5.0), 512))
