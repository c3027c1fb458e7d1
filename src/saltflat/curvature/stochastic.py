"""Estimators: traces and diagonals from products with random vectors, with standard errors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from math import sqrt
from typing import final

import torch
from torch import Tensor

from saltflat.errors import InvalidValue

Product = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
Shapes = Mapping[str, tuple[torch.Size, torch.device]]


@dataclass(slots=True)
class Estimate:
    """Means over draws with standard errors; `total` is the sum over all names.

    Blocks in `exact` were small, or of so low a rank, that nothing had to be estimated. `draws`
    are independent estimates, stacked; there are some if they were to be kept.
    """

    values: dict[str, Tensor]
    stderr: dict[str, Tensor]
    total: float
    total_stderr: float
    exact: frozenset[str] = frozenset()
    draws: dict[str, Tensor] = field(default_factory=dict)


@final
@dataclass(slots=True)
class Draws:
    """Running mean and variance of independent draws (Welford), and of their sum over names.

    `groups` > 0 keeps the means of that many groups of draws, so that the error of anything made
    of them can be told.
    """

    groups: int = 0
    count: int = 0
    kept: dict[str, Tensor] = field(default_factory=dict)
    mean: dict[str, Tensor] = field(default_factory=dict)
    spread: dict[str, Tensor] = field(default_factory=dict)
    totals: list[float] = field(default_factory=list)

    def add(self, draw: Mapping[str, Tensor]) -> None:
        self.count += 1
        self.totals.append(sum(float(x.sum()) for x in draw.values()))
        for name, x in draw.items():
            mean = self.mean.setdefault(name, torch.zeros_like(x))
            spread = self.spread.setdefault(name, torch.zeros_like(x))
            change = x - mean
            mean += change / self.count
            spread += change * (x - mean)
            if self.groups:
                sums = self.kept.setdefault(name, x.new_zeros(self.groups, *x.shape))
                sums[(self.count - 1) % self.groups] += x

    def estimate(self) -> Estimate:
        degrees = self.count * (self.count - 1)
        totals = torch.tensor(self.totals, dtype=torch.float64)
        return Estimate(
            self.mean,
            {name: (s / degrees).sqrt() for name, s in self.spread.items()},
            float(totals.mean()),
            float(totals.std() / sqrt(self.count)),
            draws={name: self._means(sums) for name, sums in self.kept.items()},
        )

    def _means(self, sums: Tensor) -> Tensor:
        sizes = [len(range(k, self.count, self.groups)) for k in range(self.groups)]
        shape = (-1, *[1] * (sums.ndim - 1))
        return sums / torch.tensor(sizes, dtype=sums.dtype, device=sums.device).reshape(shape)


def _check(probes: int, seed: int, least: int) -> None:
    if not isinstance(probes, int) or isinstance(probes, bool) or probes < least:
        raise InvalidValue(
            f"probes must be an integer of at least {least}, so that a standard error can be "
            f"given. Got {probes!r}."
        )
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise InvalidValue(f"seed must be an integer. Got {seed!r}.")


def signs(shape: torch.Size, device: torch.device, generator: torch.Generator) -> Tensor:
    bits = torch.randint(0, 2, shape, generator=generator)
    return (bits * 2 - 1).to(device, torch.float64)


@final
@dataclass(frozen=True, slots=True)
class Hutchinson:
    """v ∘ (C v) for random signs v: every block's trace and diagonal from the same products."""

    probes: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        _check(self.probes, self.seed, 2)

    def estimate(
        self, product: Product, shapes: Shapes, kinds: Collection[str], groups: int = 0
    ) -> dict[str, Estimate]:
        """The wanted kinds, "trace" and "diagonal", from the same products.

        As many probes as there are entries would give them all, so then they do.
        """
        if sum(shape.numel() for shape, _ in shapes.values()) <= self.probes:
            return self._written_out(product, shapes, kinds)
        generator = torch.Generator().manual_seed(self.seed)
        # Numbers are kept draw by draw, tensors in groups.
        draws = {
            kind: Draws(min(groups, 1) * self.probes if kind == "trace" else groups)
            for kind in kinds
        }
        for _ in range(self.probes):
            v = {name: signs(*where, generator) for name, where in shapes.items()}
            cv = product(v)
            entries = {name: v[name] * cv[name] for name in shapes}
            for kind, each in draws.items():
                traced = kind == "trace"
                each.add({n: x.sum() for n, x in entries.items()} if traced else entries)
        return {kind: each.estimate() for kind, each in draws.items()}

    def _written_out(
        self, product: Product, shapes: Shapes, kinds: Collection[str]
    ) -> dict[str, Estimate]:
        zeros = {n: torch.zeros(s, device=d, dtype=torch.float64) for n, (s, d) in shapes.items()}
        diagonal = {name: torch.zeros_like(z) for name, z in zeros.items()}
        for name, entries in diagonal.items():
            for i in range(entries.numel()):
                unit = torch.zeros_like(entries).flatten()
                unit[i] = 1.0
                image = product(zeros | {name: unit.reshape(entries.shape)})[name]
                entries.view(-1)[i] = image.reshape(-1)[i]
        values = {"diagonal": diagonal, "trace": {n: d.sum() for n, d in diagonal.items()}}
        total = sum(float(d.sum()) for d in diagonal.values())
        return {
            kind: Estimate(
                values[kind],
                {name: torch.zeros_like(v) for name, v in values[kind].items()},
                total,
                0.0,
                frozenset(shapes),
            )
            for kind in kinds
        }


@final
@dataclass(frozen=True, slots=True)
class XTrace:
    """The exchangeable estimator of Epperly, Tropp and Webber (2024), block by block.

    Each block takes `probes` products of its own, half of them to find its dominant directions,
    whose trace is then exact. Best for few blocks with fast decaying spectra.
    """

    probes: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        _check(self.probes, self.seed, 4)

    def estimate(
        self, product: Product, shapes: Shapes, kinds: Collection[str], groups: int = 0
    ) -> dict[str, Estimate]:
        """Traces only: `kinds` is {"trace"}."""
        generator = torch.Generator().manual_seed(self.seed)
        values, stderr = {}, {}
        for name, (shape, device) in shapes.items():
            zeros = {n: torch.zeros(s, device=d) for n, (s, d) in shapes.items()}

            def block(
                columns: Tensor,
                name: str = name,
                shape: torch.Size = shape,
                zeros: dict[str, Tensor] = zeros,
            ) -> Tensor:
                images = [
                    product(zeros | {name: c.reshape(shape)})[name].flatten() for c in columns.T
                ]
                return torch.stack(images, 1)

            values[name], stderr[name] = self._block(block, shape, device, generator)
        total = float(sum(float(v) for v in values.values()))
        error = sqrt(sum(float(e) ** 2 for e in stderr.values()))
        known = frozenset(name for name, e in stderr.items() if float(e) == 0.0)
        return {"trace": Estimate(values, stderr, total, error, known)}

    def _writes_out(self, shape: torch.Size) -> bool:
        """Whether the whole block costs no more products than its estimate."""
        return shape.numel() <= self.probes

    def _block(
        self,
        block: Callable[[Tensor], Tensor],
        shape: torch.Size,
        device: torch.device,
        generator: torch.Generator,
    ) -> tuple[Tensor, Tensor]:
        size = shape.numel()
        half = self.probes // 2
        if self._writes_out(shape):
            exact = block(torch.eye(size, device=device, dtype=torch.float64)).trace()
            return exact, torch.zeros_like(exact)
        probes = signs(torch.Size((size, half)), device, generator)
        images = block(probes)
        q, r = torch.linalg.qr(images)
        bent = block(q)
        inner = q.mT @ bent
        if int(torch.linalg.matrix_rank(r)) < half:
            # The probes span all that the block acts on, so nothing is left to estimate.
            exact = inner.trace()
            return exact, torch.zeros_like(exact)
        # Columns s_i: leaving probe i out of the basis removes the direction q s_i.
        inverse = torch.linalg.pinv(r).mT
        s = inverse / torch.linalg.vector_norm(inverse, dim=0).clamp(min=1e-300)
        coordinates = q.mT @ probes
        coordinates = coordinates - s * (s * coordinates).sum(0)  # onto the reduced basis
        rest = probes - q @ coordinates
        image = images - bent @ coordinates
        draws = inner.trace() - (s * (inner @ s)).sum(0) + (rest * image).sum(0)
        return draws.mean(), draws.std() / sqrt(half)


Estimator = Hutchinson | XTrace
