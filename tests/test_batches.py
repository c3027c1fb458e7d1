"""Batches, augmentations, noise in labels and parts of data, each against a plain loop."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from saltflat import DataError, InvalidValue
from saltflat.datasets import Batches, Data, compose, crop, cutout, digits, flip, noisy

SEEDS = st.integers(0, 2**31)
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def images(seed: int, count: int, height: int, width: int, channels: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, channels, height, width, generator=generator) + 1  # nowhere 0


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def shifted(image: torch.Tensor, down: int, right: int) -> torch.Tensor:
    """Entry by entry."""
    result = torch.zeros_like(image)
    _, height, width = image.shape
    for i in range(height):
        for j in range(width):
            if 0 <= i + down < height and 0 <= j + right < width:
                result[:, i, j] = image[:, i + down, j + right]
    return result


@settings(max_examples=15, deadline=None)
@given(SEEDS, st.integers(1, 3), st.integers(2, 5), st.integers(2, 5))
def test_crop_shifts_every_image(seed, padding, height, width) -> None:
    x = images(seed, 3, height, width)
    before = x.clone()
    result = crop(padding)(x, generator(seed))
    assert torch.equal(x, before)
    shifts = range(-padding, padding + 1)
    for image, cropped in zip(x, result, strict=True):
        assert any(torch.equal(shifted(image, i, j), cropped) for i in shifts for j in shifts)


def test_crop_has_every_shift_equally_often() -> None:
    x = torch.arange(1.0, 26).reshape(1, 1, 5, 5).expand(9000, 1, 5, 5)
    centre = crop(1)(x, generator())[:, 0, 2, 2]
    counts = [int((centre == v).sum()) for v in (7, 8, 9, 12, 13, 14, 17, 18, 19)]
    assert sum(counts) == 9000
    assert min(counts) > 850  # 1000 each, with a deviation of 30


@settings(max_examples=15, deadline=None)
@given(SEEDS, st.integers(1, 20))
def test_flip_mirrors_whole_images(seed, count) -> None:
    x = images(seed, count, 3, 4)
    for image, flipped in zip(x, flip()(x, generator(seed)), strict=True):
        mirrored = torch.stack([image[:, :, 3 - j] for j in range(4)], dim=2)
        assert torch.equal(flipped, image) or torch.equal(flipped, mirrored)


def test_flip_mirrors_one_half() -> None:
    x = torch.tensor([1.0, 2.0]).expand(4000, 1, 1, 2)
    assert 1850 < int((flip()(x, generator())[..., 0] == 2).sum()) < 2150


@settings(max_examples=25, deadline=None)
@given(SEEDS, st.integers(1, 9), st.integers(2, 6), st.integers(2, 6))
def test_cutout_is_one_square(seed, size, height, width) -> None:
    x = images(seed, 3, height, width)
    for image, cut in zip(x, cutout(size)(x, generator(seed)), strict=True):
        squares = []
        for row in range(height):
            for column in range(width):
                square = image.clone()
                for i in range(row - size // 2, row - size // 2 + size):
                    for j in range(column - size // 2, column - size // 2 + size):
                        if 0 <= i < height and 0 <= j < width:
                            square[:, i, j] = 0
                squares.append(square)
        assert any(torch.equal(square, cut) for square in squares)


def test_the_centre_of_a_cutout_is_anywhere_with_equal_chances() -> None:
    x = torch.ones(9000, 1, 3, 3)
    counts = (cutout(1)(x, generator()) == 0).sum((0, 1)).flatten()
    assert int(counts.sum()) == 9000
    assert int(counts.min()) > 850


AUGMENT = compose(crop(2), flip(), cutout(3))


@pytest.mark.parametrize("device", DEVICES)
def test_augmentations_follow_the_generator_alone(device: str) -> None:
    x = images(0, 8, 6, 6)
    wanted = x
    shared = generator(5)
    for step in (crop(2), flip(), cutout(3)):
        wanted = step(wanted, shared)
    state = torch.get_rng_state()
    assert torch.equal(AUGMENT(x.to(device), generator(5)).cpu(), wanted)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(AUGMENT(x, generator(6)), wanted)


@pytest.mark.parametrize("make", [lambda: crop(0), lambda: cutout(0)])
def test_augmentations_refuse_sizes(make) -> None:
    with pytest.raises(InvalidValue, match=r"at least 1\. Got 0"):
        make()


def test_augmentations_refuse_what_are_no_images() -> None:
    with pytest.raises(DataError, match=r"\(3, 4\)"):
        flip()(torch.zeros(3, 4), generator())


@settings(max_examples=30, deadline=None)
@given(SEEDS, st.integers(1, 30), st.integers(1, 35), st.booleans(), st.booleans())
def test_an_epoch_has_every_sample_once(seed, count, size, shuffle, drop_last) -> None:
    if drop_last and size > count:
        size = count
    x, y = torch.arange(count) * 10, torch.arange(count)
    batches = Batches(x, y, size, seed=seed, shuffle=shuffle, drop_last=drop_last)
    got = list(batches)
    assert len(got) == len(batches)
    assert all(torch.equal(inputs, labels * 10) for inputs, labels in got)
    full = count // size
    assert [len(labels) for _, labels in got] == [size] * full + (
        [count % size] if count % size and not drop_last else []
    )
    seen = torch.cat([labels for _, labels in got]).tolist()
    assert len(set(seen)) == len(seen)
    if not drop_last:
        assert sorted(seen) == y.tolist()
    if not shuffle:
        assert seen == y[: len(seen)].tolist()


@pytest.mark.parametrize("device", DEVICES)
def test_batches_follow_the_seed_and_the_epoch(device: str) -> None:
    x, y = images(0, 20, 6, 6), torch.arange(20)

    def epochs(seed: int, start: int = 0, device: str = "cpu") -> list[list[torch.Tensor]]:
        batches = Batches(x.to(device), y.to(device), 6, seed=seed, augment=AUGMENT)
        batches.epoch = start
        return [[t.cpu() for pair in batches for t in pair] for _ in range(3)]

    def same(one, other) -> bool:
        return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))

    wanted = epochs(3)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    assert all(same(a, b) for a, b in zip(wanted, epochs(3, device=device), strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    assert same(epochs(3, start=2)[0], wanted[2])
    assert not same(wanted[0], wanted[1])
    assert not same(epochs(4)[0], wanted[0])
    assert not same(epochs(2, start=1)[0], wanted[0])  # seeds and epochs are not added up


def test_random_labels_are_not_what_an_epoch_of_the_same_seed_begins_with() -> None:
    labels = torch.arange(1000)
    moved = noisy(labels, 0.3, seed=7) != labels
    for _ in range(2):
        first, *_ = Batches(labels, labels, 300, seed=7)
        assert 50 < int(moved[first[0]].sum()) < 130  # 90 by chance, and 300 of one stream


def test_an_epoch_that_is_not_finished_counts() -> None:
    batches = Batches(torch.arange(9), torch.arange(9), 2)
    next(iter(batches))
    assert batches.epoch == 1


def test_the_data_are_not_lent_out() -> None:
    x = torch.ones(4, 2)
    for batch, _ in Batches(x, torch.zeros(4), 4, shuffle=False):
        batch.zero_()
    assert bool((x == 1).all())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"y": torch.zeros(2)}, "Got 3 and 2"),
        ({"x": torch.zeros(0), "y": torch.zeros(0)}, "Got 0 and 0"),
        ({"size": 0}, "Got 0"),
        ({"size": 4, "drop_last": True}, "Got 4"),
        ({"seed": -1}, "Got -1"),
    ],
)
def test_batches_refuse(arguments, words) -> None:
    with pytest.raises(InvalidValue, match=words):
        Batches(**{"x": torch.zeros(3), "y": torch.zeros(3), "size": 2, **arguments})


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.integers(1, 60), st.floats(0, 1))
def test_permuted_labels_keep_the_classes(seed, count, ratio) -> None:
    labels = torch.arange(count)  # all different, so that every move is seen
    result = noisy(labels, ratio, seed)
    assert sorted(result.tolist()) == labels.tolist()
    assert int((result != labels).sum()) <= round(ratio * count)
    assert torch.equal(result, noisy(labels, ratio, seed))
    assert torch.equal(labels, torch.arange(count))


def test_permuted_labels_are_a_random_subset_in_random_order() -> None:
    labels = torch.arange(1000)
    result = noisy(labels, 0.5, 1)
    moved = (result != labels).nonzero().flatten()
    assert 480 < len(moved) <= 500  # a random permutation fixes one on average
    assert 200 < int((moved < 500).sum()) < 300
    assert set(result[moved].tolist()) == set(moved.tolist())
    assert not torch.equal(result, noisy(labels, 0.5, 2))
    assert torch.equal(noisy(labels, 0, 1), labels)


def test_uniform_labels() -> None:
    labels = torch.zeros(10000, dtype=torch.int64)
    labels[0] = 3
    result = noisy(labels, 0.8, 0, how="uniform")
    counts = result.bincount(minlength=4)
    assert len(counts) == 4
    assert int(counts[1:].min()) > 1850  # 2000 each
    assert 3850 < int(counts[0]) < 4150
    assert int(noisy(labels, 1.0, 0, classes=7, how="uniform").max()) == 6


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"ratio": 1.5}, "Got 1.5"),
        ({"how": "shuffle"}, "'shuffle'"),
        ({"classes": 2}, "largest label, 2. Got 2"),
        ({"seed": -3}, "Got -3"),
        ({"labels": torch.zeros(3)}, "float32"),
        ({"labels": torch.tensor([0, 1, -100])}, "Got -100"),  # what a loss ignores
        ({"labels": torch.zeros(3, 2, dtype=torch.int64)}, r"\(3, 2\)"),
    ],
)
def test_noise_refuses(arguments, words) -> None:
    with pytest.raises(InvalidValue, match=words):
        noisy(**{"labels": torch.arange(3), "ratio": 0.5, "seed": 0, **arguments})


def test_standardised_by_the_training_part_of_every_channel() -> None:
    x, other = images(0, 50, 4, 5, channels=3), images(1, 20, 4, 5, channels=3)
    x[:, 1] = x[:, 1] * 7 + 3
    y = torch.zeros(50, dtype=torch.int64)
    data = Data(x, y, other, y[:20]).standardised()
    for channel in range(3):
        entries = x[:, channel].double().flatten()
        mean, deviation = entries.mean(), entries.std(correction=0)
        for before, got in [(x, data.train_x), (other, data.test_x)]:
            wanted = (before[:, channel].double() - mean) / deviation
            assert torch.allclose(got[:, channel].double(), wanted, atol=1e-5)
    whole = digits().standardised().train_x
    assert (float(whole.mean()), float(whole.std())) == pytest.approx((0, 1), abs=1e-4)
    x[:, 0] = 0.5
    with pytest.raises(DataError, match="constant"):
        Data(x, y, other, y[:20]).standardised()


def test_scaled_and_moved() -> None:
    data = digits()
    scaled = data.scaled(-1, 1)
    assert (float(scaled.train_x.min()), float(scaled.test_x.max())) == (-1, 1)
    assert torch.equal(scaled.train_y, data.train_y)
    assert isinstance(data.to("cpu"), Data)
    with pytest.raises(InvalidValue, match="1 and 0"):
        data.scaled(1, 0)


def test_first_draws_samples_with_their_labels() -> None:
    x = torch.arange(40)
    data = Data(x, x * 2, x[:20] + 100, x[:20] * 3)
    some = data.first(10, 5)
    assert torch.equal(some.train_y, some.train_x * 2)
    assert torch.equal(some.test_y, (some.test_x - 100) * 3)
    assert len(set(some.train_x.tolist())) == 10
    assert torch.equal(data.first(12, 5).train_x[:10], some.train_x)
    assert torch.equal(data.first(12, 5).test_x, some.test_x)
    assert not torch.equal(data.first(10, 5, seed=1).train_x, some.train_x)
    with pytest.raises(InvalidValue, match=r"train must be from 1 to 40\. Got 41"):
        data.first(41, 5)
