"""How much the samples' own parts of a quantity vary: what other samples would give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import sqrt
from typing import final

import torch
from torch import Tensor


@final
@dataclass(slots=True)
class Spread:
    """Mean and scatter over samples of one number a block, each sample counting alike.

    With t_i the numbers of sample i, Σ_k c_k times the k-th of their mean has the standard error
    sqrt(cᵀ S c / (n (n − 1))), S = Σ_i (t_i − t̄)(t_i − t̄)ᵀ, for samples that are independent
    draws. Smooth functions of the means have it with c their gradient.

    For sums of means its square is without bias, so that no factor would mend it; but where single
    samples are skewed it is small when the mean is low. Of 60 samples with skewness 3.7 and 7.1 (a
    network at random and trained), 92 and 87 % of the means are within 2 of it, of 400 samples 95
    and 93 %; Student's factor adds half a per cent to these. For functions that are not linear it
    is too small by up to a seventh with 60 samples (the jackknife has 88 % where this has 86).
    """

    blocks: tuple[str, ...]
    count: int = 0
    _mean: Tensor = field(default_factory=lambda: torch.zeros(()))
    _scatter: Tensor = field(default_factory=lambda: torch.zeros(()))
    _last: Tensor | None = None  # numbers that are not in these yet: until they are asked for
    _rows: list[Tensor] = field(default_factory=list)  # every `_stride`-th sample's numbers
    _stride: int = 1

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.blocks)

    def add(self, size: int, values: Mapping[str, Tensor]) -> None:
        """So many samples more; a block without values has zeros."""
        self._settle()
        if values:
            like = next(iter(values.values()))
            known = [
                values[name] if name in values else like.new_zeros(size) for name in self.blocks
            ]
            self._last = torch.stack([row.to(like.device) for row in known], 1).double()
        else:
            self._last = torch.zeros(size, len(self.blocks), dtype=torch.float64)
        self._keep(self._last)

    def _settle(self) -> None:
        """Take the last samples into mean and scatter."""
        if (rows := self._last) is not None:
            self._last = None
            mean = rows.mean(0)
            centred = rows - mean
            self.join(Spread(self.blocks, len(rows), mean, centred.mT @ centred))

    def join(self, other: Spread) -> None:
        """Its samples too, by the pairwise formula: no digits are lost to a mean that is large."""
        self._settle()
        other._settle()
        mean = other._mean
        change = mean - self._mean.to(mean)
        share = self.count * other.count / (self.count + other.count)
        self._scatter = self._scatter.to(mean) + other._scatter + share * change.outer(change)
        self.count += other.count
        self._mean = self._mean.to(mean) + change * (other.count / self.count)
        if other._rows:
            stride = max(self._stride, other._stride)
            self._rows = [part for each in (self, other) for part in each._thinned(stride)]
            self._stride = stride

    def _keep(self, rows: Tensor) -> None:
        """For the skewness; of more samples than fit in `_MOST_KEPT`, evenly fewer."""
        self._rows.append(rows[-self.count % self._stride :: self._stride])
        if sum(part.numel() for part in self._rows) > _MOST_KEPT:
            self._rows = [torch.cat(self._rows)[::2]]
            self._stride *= 2

    def _thinned(self, stride: int) -> list[Tensor]:
        """Every `stride`-th sample's numbers, a multiple of its own."""
        return [torch.cat(self._rows)[:: stride // self._stride]] if self._rows else []

    def scaled(self, factor: float) -> Spread:
        """Of the numbers times a factor, on the CPU; their skewness is the same."""
        mean, scatter = factor * self._mean.cpu(), factor**2 * self._scatter.cpu()
        last = None if self._last is None else factor * self._last.cpu()
        rows = [part.cpu() for part in self._rows]
        return replace(self, _mean=mean, _scatter=scatter, _last=last, _rows=rows)

    def stderr(self, weights: Mapping[str, float]) -> float | None:
        """Of Σ weights · means; None of a single sample."""
        self._settle()
        if self.count < 2:
            return None
        c = torch.tensor([weights.get(name, 0.0) for name in self.blocks], dtype=torch.float64)
        variance = float(c @ self._scatter @ c) / (self.count * (self.count - 1))
        return sqrt(max(0.0, variance))

    def skewness(self, weights: Mapping[str, float]) -> float:
        """Of Σ weights · the numbers of a sample; 0 where they are all the same."""
        rows = torch.cat(self._rows)
        values = rows @ torch.tensor([weights.get(n, 0.0) for n in self.blocks], dtype=rows.dtype)
        centred = values - values.mean()
        spread = float(centred.square().mean().sqrt())
        return float((centred / spread).pow(3).mean()) if spread > 0 else 0.0


_MOST_KEPT = 1 << 22  # numbers
