"""Random changes of a batch of images.

A step takes the batch and a generator of the CPU, draws what it needs from the generator, and
changes all images at once on the device that they are on. It never changes its input.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from saltflat.errors import DataError, InvalidValue

Step = Callable[[Tensor, Generator], Tensor]


def crop(padding: int = 4) -> Step:
    """Every image moved by up to `padding` pixels in both directions; zeros come in at the borders.

    The image is padded by zeros on all sides, and a part of its own size is cut out of that.

    Examples
    --------
    >>> import torch
    >>> from saltflat.datasets import crop
    >>> generator = torch.Generator().manual_seed(0)
    >>> crop(2)(torch.rand(5, 3, 8, 8), generator).shape
    torch.Size([5, 3, 8, 8])
    """
    _positive("padding", padding)

    def step(x: Tensor, generator: Generator) -> Tensor:
        count, channels, height, width = _shape(x)
        drawn = torch.randint(2 * padding + 1, (2, count, 1), generator=generator)
        down, across = drawn.to(x.device)
        rows = down + torch.arange(height, device=x.device)
        columns = across + torch.arange(width, device=x.device)
        pixel = rows[:, :, None] * (width + 2 * padding) + columns[:, None, :]
        place = pixel.reshape(count, 1, -1).expand(-1, channels, -1)
        return F.pad(x, (padding,) * 4).flatten(2).gather(2, place).reshape(x.shape)

    return step


def flip() -> Step:
    """Every image mirrored from left to right, or not, with equal chances.

    Examples
    --------
    >>> import torch
    >>> from saltflat.datasets import flip
    >>> x = flip()(torch.tensor([[[[1, 2]]]]), torch.Generator().manual_seed(0))
    >>> x.flatten().tolist() in ([1, 2], [2, 1])
    True
    """

    def step(x: Tensor, generator: Generator) -> Tensor:
        mirrored = torch.randint(2, (_shape(x)[0], 1, 1, 1), generator=generator) == 1
        return torch.where(mirrored.to(x.device), x.flip(-1), x)

    return step


def cutout(size: int) -> Step:
    """A square of `size` × `size` pixels of every image set to zero (DeVries & Taylor, 2017).

    Its centre is anywhere in the image, with equal chances: what lies outside is cut off.

    Examples
    --------
    >>> import torch
    >>> from saltflat.datasets import cutout
    >>> x = cutout(2)(torch.ones(1, 1, 4, 4), torch.Generator().manual_seed(1))
    >>> 1 <= int((x == 0).sum()) <= 4
    True
    """
    _positive("size", size)

    def step(x: Tensor, generator: Generator) -> Tensor:
        count, _, height, width = _shape(x)
        rows = _covered(size, height, count, generator).to(x.device)
        columns = _covered(size, width, count, generator).to(x.device)
        return x.masked_fill(rows[:, None, :, None] & columns[:, None, None, :], 0)

    return step


def compose(*steps: Step) -> Step:
    """One step after the other.

    Examples
    --------
    >>> import torch
    >>> from saltflat.datasets import compose, crop, cutout, flip
    >>> augment = compose(crop(4), flip(), cutout(16))
    >>> augment(torch.rand(2, 3, 32, 32), torch.Generator().manual_seed(0)).shape
    torch.Size([2, 3, 32, 32])
    """

    def step(x: Tensor, generator: Generator) -> Tensor:
        for each in steps:
            x = each(x, generator)
        return x

    return step


def _covered(size: int, length: int, count: int, generator: Generator) -> Tensor:
    """Which positions along one axis the square of every image covers: (count, length)."""
    start = torch.randint(length, (count, 1), generator=generator) - size // 2
    position = torch.arange(length)
    return (position >= start) & (position < start + size)


def _shape(x: Tensor) -> torch.Size:
    if x.ndim != 4:
        raise DataError(
            "Images of shape (count, channels, height, width) can be augmented. "
            f"Got shape {tuple(x.shape)}."
        )
    return x.shape


def _positive(name: str, value: int) -> None:
    if value < 1:
        raise InvalidValue(f"{name} must be at least 1. Got {value}.")
