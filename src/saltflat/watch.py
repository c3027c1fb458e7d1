"""A watch on the data: whether every pass sees the same samples, in whatever order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from saltflat.errors import DataError

_WORD = 0x9E3779B97F4A7C15 - (1 << 64)  # as a signed integer
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class ChangedData(DataError):
    """The data were not the same on two passes."""


@final
@dataclass(slots=True)
class Tally:
    """What one pass has seen so far."""

    checksum: int = 0
    samples: int = 0
    batches: int = 0
    largest: int = 0  # samples of the largest batch


@final
class Watch:
    """Checksums of passes over the data; off until `on` is set.

    A pass's checksum is the sum over samples of a hash of each sample's bytes, so that the order
    does not matter; integers wrap around, so that rounding does not either.
    """

    def __init__(self) -> None:
        self.on = False
        self.first: Tally | None = None  # the first full pass
        self._words: dict[tuple[int, torch.device], Tensor] = {}

    def see(self, tally: Tally, content: Any, size: int) -> None:
        if not self.on:
            return
        hashes = torch.zeros(size, dtype=torch.int64)
        for leaf in tree_leaves(content):
            if not isinstance(leaf, Tensor):
                continue
            # What all samples share (a mask) is part of each of them.
            own = leaf.ndim > 0 and len(leaf) == size
            hashes = hashes * 31 + self._hash(leaf if own else leaf.reshape(1, -1)).cpu()
        mixed = (hashes ^ (hashes >> 29)) * _WORD
        tally.checksum = (tally.checksum + int(mixed.sum())) % 2**64
        tally.samples += size
        tally.batches += 1
        tally.largest = max(tally.largest, size)

    def end(self, tally: Tally) -> None:
        if not self.on:
            return
        if self.first is None:
            self.first = tally
        elif tally.checksum != self.first.checksum:
            raise ChangedData(
                f"The data differ between two passes ({self.first.samples} samples, then "
                f"{tally.samples}): random augmentation, perhaps. What is measured needs several "
                "passes over the same samples; switch the augmentation off, or pass list(loader)."
            )

    def _hash(self, leaf: Tensor) -> Tensor:
        """One integer a sample, from the bytes of its entries, eight at a time."""
        flat = leaf.detach().reshape(len(leaf), -1).contiguous()
        if flat.is_complex():
            flat = torch.view_as_real(flat).flatten(1)
        size = flat.element_size()
        if missing := -flat.shape[1] * size % 8:
            flat = torch.nn.functional.pad(flat.view(_INTEGERS[size]), (0, missing // size))
        elif flat.storage_offset() * size % 8:
            flat = flat.clone()
        bits = flat.view(torch.int64)
        words = self._weights(bits.shape[1], bits.device)
        # There is no product of integer matrices on a GPU; on a CPU it is the fastest way.
        return bits @ words if bits.is_cpu else (bits * words).sum(1)

    def _weights(self, size: int, device: torch.device) -> Tensor:
        key = size, device
        if key not in self._words:
            generator = torch.Generator().manual_seed(0)
            words = torch.randint(-(2**62), 2**62, (size,), generator=generator) * 2 + 1
            self._words[key] = words.to(device)
        return self._words[key]
