"""Batches of tensors that are in memory, in an order that a seed fixes; and noise in labels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

import numpy as np
import torch
from torch import Generator, Tensor

from saltflat.datasets.augmentation import Step
from saltflat.errors import DataError, InvalidValue


@final
class Batches:
    """Batches of inputs and labels; every iteration is one epoch.

    The order of an epoch, and what `augment` draws, follow from the seed and the number of the
    epoch alone. They are drawn on the CPU, so that they are the same on every device. There are no
    worker processes: the tensors are in memory already, on the device where the batches are wanted.

    To measure a model, give `(x, y)` or `shuffle=False` and no `augment`: a measurement passes over
    the data several times and refuses data that change.

    Parameters
    ----------
    x, y
        As many inputs as labels, on one device.
    size
        How many samples a batch has; the last one may have fewer, unless `drop_last`.
    augment
        A step of this module's augmentations, or any callable of the inputs of a batch and a
        generator.

    Attributes
    ----------
    epoch
        The number of the next epoch. Set it to go on where an earlier run stopped.

    Examples
    --------
    >>> import torch
    >>> from saltflat.datasets import Batches
    >>> batches = Batches(torch.arange(5), torch.arange(5), size=2, shuffle=False)
    >>> len(batches), [x.tolist() for x, y in batches]
    (3, [[0, 1], [2, 3], [4]])
    """

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        augment: Step | None = None,
        drop_last: bool = False,
    ) -> None:
        if len(x) != len(y) or len(x) == 0:
            raise DataError(f"As many inputs as labels are needed. Got {len(x)} and {len(y)}.")
        if x.device != y.device:
            raise DataError(f"Inputs are on {x.device} and labels on {y.device}.")
        if size < 1 or (drop_last and size > len(x)):
            raise InvalidValue(f"size must be from 1 to {len(x)}. Got {size}.")
        _generator(seed)  # refuses it, if it must
        self.x, self.y, self.size, self.seed = x, y, size, seed
        self.shuffle, self.augment, self.drop_last = shuffle, augment, drop_last
        self.epoch = 0

    def __len__(self) -> int:
        """How many batches an epoch has."""
        whole, rest = divmod(len(self.x), self.size)
        return whole + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of the next epoch."""
        epoch, self.epoch = self.epoch, self.epoch + 1
        return self._batches(epoch)

    def _batches(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        generator = _generator(self.seed, epoch)
        count = len(self.x)
        order = torch.randperm(count, generator=generator) if self.shuffle else torch.arange(count)
        for some in order.to(self.x.device).split(self.size)[: len(self)]:
            x = self.x[some]
            yield x if self.augment is None else self.augment(x, generator), self.y[some]


def noisy(
    labels: Tensor, ratio: float, seed: int, *, classes: int | None = None, how: str = "permute"
) -> Tensor:
    """Labels of which a part is random; the part and its labels follow from the seed.

    Parameters
    ----------
    labels
        Whole numbers from 0 on.
    ratio
        The part that is made random: `round(ratio * len(labels))` labels. Some of them keep their
        value by chance.
    classes
        How many classes there are, for `how="uniform"`; by default one more than the largest label.
    how
        "permute" exchanges the labels of a random subset among themselves, so that every class
        keeps its size. "uniform" draws them anew, each class with equal chances.

    Examples
    --------
    >>> import torch
    >>> from saltflat.datasets import noisy
    >>> labels = torch.arange(10).repeat(100)
    >>> changed = noisy(labels, 0.5, seed=0)
    >>> changed.bincount().tolist() == labels.bincount().tolist()
    True
    >>> 400 < int((changed != labels).sum()) <= 500
    True
    """
    if not 0 <= ratio <= 1:
        raise InvalidValue(f"ratio must be from 0 to 1. Got {ratio}.")
    if how not in ("permute", "uniform"):
        raise InvalidValue(f"how must be 'permute' or 'uniform'. Got {how!r}.")
    if labels.ndim != 1 or labels.is_floating_point() or not len(labels):
        raise DataError(
            f"labels must be whole numbers, one a sample. Got {labels.dtype} of shape "
            f"{tuple(labels.shape)}."
        )
    if int(labels.min()) < 0:
        raise DataError(f"labels must be whole numbers from 0 on. Got {int(labels.min())}.")
    largest = int(labels.max())
    if classes is not None and classes <= largest:
        raise InvalidValue(f"classes must exceed the largest label, {largest}. Got {classes}.")
    generator = _generator(seed)
    chosen = torch.randperm(len(labels), generator=generator)[: round(ratio * len(labels))]
    result = labels.clone()
    if how == "permute":
        other = chosen[torch.randperm(len(chosen), generator=generator)]
        result[chosen.to(labels.device)] = labels[other.to(labels.device)]
    else:
        drawn = torch.randint(classes or largest + 1, (len(chosen),), generator=generator)
        result[chosen.to(labels.device)] = drawn.to(labels)
    return result


def _generator(seed: int, *key: int) -> Generator:
    """A generator of the CPU whose stream is a different one for every seed and every key."""
    if seed < 0:
        raise InvalidValue(f"seed must not be negative. Got {seed}.")
    # As a key to spawn by: NumPy takes the seeds (3,) and (3, 0) for the same.
    state = np.random.SeedSequence(seed, spawn_key=key).generate_state(1, np.uint64)
    return Generator().manual_seed(int(state[0]))
