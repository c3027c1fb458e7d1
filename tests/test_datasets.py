"""Data sets: files are found, checked, decoded and kept; batches, augmentations, noisy labels."""

from __future__ import annotations

import torch

from saltflat.datasets import Batches


def test_an_epoch_has_every_sample_once_in_an_order_of_its_own() -> None:
    x = torch.arange(23)
    batches = Batches(x, x, 5, seed=3)
    first, second = ([int(i) for each, _ in batches for i in each] for _ in range(2))
    assert sorted(first) == sorted(second) == x.tolist()
    assert first != second
    again = Batches(x, x, 5, seed=3)
    assert first == [int(i) for each, _ in again for i in each]
