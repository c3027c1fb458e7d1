"""What a data set is: tensors for training and for testing, or pairs of sentences."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from saltflat.errors import DataError, InvalidValue


class Data(NamedTuple):
    """Inputs and labels for training and for testing; a tuple of four tensors.

    Examples
    --------
    >>> from saltflat.datasets import digits
    >>> train_x, train_y, test_x, test_y = digits()
    >>> train_x.shape, test_x.shape
    (torch.Size([1437, 64]), torch.Size([360, 64]))
    >>> digits().first(100, 50).train_x.shape
    torch.Size([100, 64])
    """

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor

    def to(self, device: torch.device | str) -> Data:
        """The same data on a device."""
        return Data(*(each.to(device) for each in self))

    def scaled(self, low: float, high: float) -> Data:
        """Inputs mapped from [0, 1] to [low, high]."""
        if not low < high:
            raise InvalidValue(f"low must be less than high. Got {low} and {high}.")
        return self._mapped(high - low, low)

    def standardised(self) -> Data:
        """Inputs with mean 0 and standard deviation 1 in every channel, over the training part.

        Inputs of shape (n, channels, height, width) have a mean for each channel; others have one.
        """
        images = self.train_x.ndim == 4
        x = self.train_x.flatten(2) if images else self.train_x.flatten(1)[:, None]
        # Sums over an image in float32, which is fast, and over the images in float64.
        mean = x.mean(2).double().mean(0)
        centre = mean.to(x.dtype)[:, None]
        squares = [(part - centre).square().mean(2) for part in x.split(1024)]
        deviation = torch.cat(squares).double().mean(0).sqrt()
        if not (deviation > 0).all():
            raise DataError("A channel of the training inputs is constant: it has no deviation.")
        shape = (1, -1, 1, 1) if images else ()
        factor, shift = (
            each.to(self.train_x.dtype).reshape(shape)
            for each in (1 / deviation, -mean / deviation)
        )
        return self._mapped(factor, shift)

    def first(self, train: int, test: int, seed: int = 0) -> Data:
        """So many samples of each part, drawn at random by `seed`, without replacement.

        With the same seed, those of a smaller number are among those of a larger one.
        """
        for name, wanted, there in [("train", train, self.train_y), ("test", test, self.test_y)]:
            if not 0 < wanted <= len(there):
                raise InvalidValue(f"{name} must be from 1 to {len(there)}. Got {wanted}.")
        generator = torch.Generator().manual_seed(seed)
        some = torch.randperm(len(self.train_y), generator=generator)[:train]
        others = torch.randperm(len(self.test_y), generator=generator)[:test]
        some, others = some.to(self.train_y.device), others.to(self.test_y.device)
        return Data(
            self.train_x[some], self.train_y[some], self.test_x[others], self.test_y[others]
        )

    def _mapped(self, factor: float | Tensor, shift: float | Tensor) -> Data:
        train, test = ((x * factor).add_(shift) for x in (self.train_x, self.test_x))
        return Data(train, self.train_y, test, self.test_y)


class Pairs(NamedTuple):
    """Pairs of sentences with labels."""

    first: list[str]
    second: list[str]
    labels: Tensor


class RTE(NamedTuple):
    """Recognizing Textual Entailment: label 0 is "entailment" and 1 is "not_entailment"."""

    train: Pairs
    dev: Pairs
