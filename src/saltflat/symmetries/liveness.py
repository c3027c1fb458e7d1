"""Which entries of which parameters a function depends on."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from saltflat.memory import fails_again, out_of_memory
from saltflat.session import TensorValues
from saltflat.symmetries.element import Factors, Layout
from saltflat.symmetries.evaluate import Evaluation, evaluation
from saltflat.symmetries.solve import Array

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

#: relative to the largest derivative; rounding in float64 leaves about 1e-16
NOTHING = 1e-13
#: random points at which a unit must be without effect; one is inactive there by chance, not at all
POINTS = 12

#: of a larger parameter that stays as it is no derivative is taken, only whether it has an effect
LARGE = 1 << 20
#: rows of a larger tensor overlap in memory, each so many numbers further on
OVERLAPPING = 1 << 16
STEP = 17


@dataclass(frozen=True)
class Liveness:
    """`rows` span the exponents of all entries with an effect; `idle` names parameters."""

    rows: csr_matrix
    idle: set[str]


def liveness(
    model: nn.Module,
    example: Any,
    output: Callable[[Any], Any],
    factors: Factors,
    names: set[str],
    values: TensorValues | None = None,
) -> Liveness:
    """Look at derivatives at random points until every column of the matrix has shown an effect.

    Features that are sliced away have none, nor has the bias of attention's keys: it adds the same
    number to all scores of a query, which the softmax ignores. A model that does not run at such
    points (it takes a logarithm, a Cholesky factor, bits) is believed to use all of its parameters.
    """
    from scipy.sparse import vstack

    layouts = {n: layout for n, layout in factors.layouts.items() if n in names}

    def observe() -> Liveness:
        sizes = {n: _size(p.detach()) for n, p in model.named_parameters() if n in layouts}
        with (
            evaluation(
                model, example, output, wide=True, differentiable=True, values=values
            ) as lent,
            _Leaky(),
        ):
            still = set(layouts) - factors.moving
            return _observed(_Point(lent, layouts, sizes, still), factors, layouts)

    try:
        return observe()
    except Exception as error:
        if out_of_memory(error) or not fails_again(observe):
            raise  # which says nothing about the parameters
    return Liveness(vstack([factors.rows(t, star(t)) for t in factors.layouts.values()]), set())


def _observed(point: _Point, factors: Factors, layouts: Mapping[str, Layout]) -> Liveness:
    from scipy.sparse import vstack

    rows, seen = factors.matrix[:0], set[str]()
    for seed in range(POINTS):
        effects = point.effects(seed)
        seen |= set(effects)
        rows = vstack([rows, *[factors.rows(layouts[n], e) for n, e in effects.items()]], "csr")
        # A parameter without any derivative is looked at below.
        if seed > 0 or seen >= point.followed:
            columns = np.asarray(abs(rows).sum(0)).ravel() > 0
            if columns.all():
                break
    # What runs without gradients, or was not followed, may have an effect all the same.
    for name in set(layouts) - seen:
        if point.matters(name):
            seen.add(name)
            rows = vstack([rows, factors.rows(layouts[name], star(layouts[name]))], "csr")
    return Liveness(rows, set(layouts) - seen)


def star(layout: Layout) -> list[Array]:
    """Entries whose exponents span those of all: a row and a column are enough."""
    index = [i.numpy().reshape(-1) for i, _ in layout.terms]
    if len(index) == 1:
        return [np.unique(index[0])]
    a, b = index
    return [
        np.concatenate([a, np.full(len(b), a[0])]),
        np.concatenate([np.full(len(a), b[0]), b]),
    ]


def forest(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Entries of a matrix, rows and columns, whose p[row] + q[column] span those of all in `mask`.

    They are the edges of a spanning forest of the graph in which `mask` joins rows to columns:
    around a circle of edges the sum is nothing with alternating signs.
    """
    new, edges = mask.any(1), [torch.empty(2, 0, dtype=torch.int64)]
    unseen = mask.any(0)
    while new.any():
        level = new.nonzero()[:1, 0]
        while len(level):
            new[level] = False
            columns = (mask[level].any(0) & unseen).nonzero()[:, 0]
            unseen[columns] = False
            edges.append(torch.stack([level[mask[level][:, columns].byte().argmax(0)], columns]))
            if not len(columns):
                break
            level = (mask[:, columns].any(1) & new).nonzero()[:, 0]
            back = columns[mask[level][:, columns].byte().argmax(1)]
            edges.append(torch.stack([level, back]))
    rows, columns = torch.cat(edges, 1)
    return rows, columns


@final
class Sizes:
    """How large a derivative is, where that matters: for each kind of entry, or along a star.

    A matrix whose rows and columns have exponents of their own needs no more than one row and one
    column, if all of that is well away from zero; if not, all of it is kept, in units of `most`.
    """

    def __init__(self, sizes: Tensor, layout: Layout) -> None:
        self.layout, self.most = layout, float(sizes.max())
        self.part: Tensor | None = None
        dims = [d for d, n in enumerate(layout.shape) if layout.terms[0][0].shape[d] < n]
        if len(layout.terms) == 1:
            self.kept = sizes.amax(dims, keepdim=True).cpu() if dims else sizes.cpu()
            return
        matrix = self._matrix(sizes, dims)
        at = int(matrix.argmax())
        i, j = at // matrix.shape[1], at % matrix.shape[1]
        self.centre, self.kept = (i, j), torch.cat([matrix[:, j], matrix[i]]).cpu()
        if not bool((self.kept > NOTHING * self.most).all()):
            self.part = (matrix / (self.most or 1.0)).float().cpu()

    def _matrix(self, sizes: Tensor, dims: list[int]) -> Tensor:
        """Entries by the first term's index and by the second's; the largest of other ones."""
        second = self.layout.terms[1][0]
        other = [d for d in dims if second.shape[d] == 1]
        sizes = sizes.amax(other, keepdim=True) if other else sizes
        rows = [d for d in range(sizes.ndim) if d not in dims]
        return sizes.permute(*rows, *dims).reshape(self.layout.terms[0][0].numel(), -1)

    def above(self, limit: float) -> list[Array]:
        """The indices of entries above a limit, as many as it takes to span their exponents."""
        index = [i.reshape(-1) for i, _ in self.layout.terms]
        if len(index) == 1:
            return [index[0][~(self.kept.reshape(-1) <= limit)].unique().numpy()]
        if self.part is not None:
            rows, columns = forest(~(self.part * self.most <= limit))
        else:
            (i, j), (n, k) = self.centre, (len(index[0]), len(index[1]))
            rows = torch.cat([torch.arange(n), torch.full((k,), i)])
            columns = torch.cat([torch.full((n,), j), torch.arange(k)])
            alive = ~(self.kept <= limit)
            rows, columns = rows[alive], columns[alive]
        return [index[0][rows].numpy(), index[1][columns].numpy()]


@final
class _Leaky(TorchFunctionMode):
    """LeakyReLU for ReLU: the same parameters have an effect, and no unit is inactive."""

    RELU = (torch.relu, F.relu, torch.Tensor.relu, torch.relu_, torch.Tensor.relu_)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in self.RELU:
            return F.leaky_relu(args[0] if args else kwargs["input"], 0.5)
        return func(*args, **kwargs)


@final
class _Point:
    """A lent model at parameters that are drawn anew, with the size that they had."""

    def __init__(
        self,
        lent: Evaluation,
        layouts: Mapping[str, Layout],
        sizes: Mapping[str, float],
        still: set[str],
    ) -> None:
        self.lent, self.layouts, self.sizes, self.seed = lent, layouts, sizes, 0
        counts = {name: math.prod(layout.shape) for name, layout in layouts.items()}
        large = {n for n, c in counts.items() if c > max(LARGE, sum(counts.values()) // 8)}
        self.followed = set(layouts) - (large & still)  # which derivatives are looked at
        self.before: list[Tensor] = []
        self.again = ""  # drawn once more

    def _draw(self, name: str) -> Tensor | None:
        if name not in self.layouts:
            return None
        seed = self.seed + POINTS * (name == self.again)
        return _noise(self.lent.own[name], [seed, *name.encode()], self.sizes[name])

    def _answers(self) -> list[Tensor]:
        return [t for t in self.lent.answers(self._draw) if t.is_floating_point()]

    def effects(self, seed: int) -> dict[str, list[Array]]:
        """Entries at which the derivative of a random combination of outputs does not vanish."""
        self.seed = seed
        answers = self._answers()
        self.before = [t.detach() for t in answers]
        flowing = [t for t in answers if t.requires_grad]
        if not flowing:
            return {}
        total = torch.stack([(t * _noise(t, [seed, i])).sum() for i, t in enumerate(flowing)]).sum()
        try:
            sizes = self._derivatives(total)
        except RuntimeError:  # written in a way that has no derivative: all may have an effect
            return {name: star(layout) for name, layout in self.layouts.items() if _any(layout)}
        most = [s.most for s in sizes.values() if math.isfinite(s.most)]
        limit = NOTHING * max(most, default=0.0)
        return {n: s.above(limit) for n, s in sizes.items() if not s.most <= limit}

    def _derivatives(self, total: Tensor) -> dict[str, Sizes]:
        """Of every parameter; each is given up as soon as it was looked at."""
        leaves = {
            n: self.lent.parameters[n]
            for n, layout in self.layouts.items()
            if _any(layout) and n in self.followed
        }
        sizes: dict[str, Sizes] = {}
        if not self.lent.borrowed:  # the user may hold hooks on the model's own parameters
            grads = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
            named = zip(leaves, grads, strict=True)
            return {n: Sizes(g.abs(), self.layouts[n]) for n, g in named if g is not None}

        def keep(name: str, leaf: Tensor) -> None:
            grad, leaf.grad = leaf.grad, None
            if grad is not None:
                sizes[name] = Sizes(grad.detach().abs_(), self.layouts[name])

        hooks = [
            leaf.register_post_accumulate_grad_hook(partial(keep, name))
            for name, leaf in leaves.items()
        ]
        try:
            total.backward(inputs=list(leaves.values()))
        finally:
            for hook in hooks:
                hook.remove()
        return sizes

    @torch.no_grad()
    def matters(self, name: str) -> bool:
        """Do the outputs change with the parameter?"""
        self.again = name
        after = self._answers()
        self.again = ""
        return any(
            float((a - b).abs().max()) > NOTHING * float(a.abs().max())
            for a, b in zip(self.before, after, strict=True)
            if a.numel()
        )


def _size(p: Tensor) -> float:
    """The mean of the absolute values, and something where these are zero."""
    total = float(torch.linalg.vector_norm(p, 1, dtype=torch.promote_types(p.dtype, torch.float32)))
    return total / max(1, p.numel()) or 0.1


def _any(layout: Layout) -> bool:
    return 0 not in layout.shape


def _noise(like: Tensor, seed: list[int], scale: float = 1.0) -> Tensor:
    """Normal numbers. Those of a large tensor need little memory: its rows overlap."""
    generator = torch.Generator().manual_seed(zlib.crc32(bytes(seed)))
    rows, strides = (len(like), _strides(like)) if like.ndim else (1, ())
    row = like.numel() // max(1, rows)
    step = min(row, STEP) if like.numel() > OVERLAPPING else row
    count = (rows - 1) * step + row if like.numel() else 0
    numbers = torch.randn(count, generator=generator, dtype=torch.float64).mul_(scale)
    return numbers.to(like.device).as_strided(like.shape, (step, *strides[1:]) if strides else ())


def _strides(like: Tensor) -> tuple[int, ...]:
    return torch.empty(like.shape, device="meta").stride()
