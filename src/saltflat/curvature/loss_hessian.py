"""The loss's side: factors of the output Hessian, B = Σ_c s_c u_c u_cᵀ with s_c = ±1.

A `Factor` gives the directions u_c that are sent backwards. Where the output has several positions
(tokens, pixels), each (position, class) is a direction of its own. `sketch` mixes all of them
with random noise into one or two directions whose outer product is B on average.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, Self, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import Node
from torch.utils._pytree import tree_map

from saltflat.distributed import Reduction
from saltflat.errors import DataError, LossError, NoSecondDerivative
from saltflat.losses import (
    CrossEntropy,
    CustomLoss,
    ElementwiseLoss,
    JointLoss,
    Loss,
    NegativeLogLikelihood,
    UserLoss,
    nodes,
    scalar,
)
from saltflat.memory import ordinary
from saltflat.risk import Batch, alike, join


class Factor:
    """Directions for n samples with outputs of shape (n, …)."""

    count: int

    def columns(self, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        """Directions start…stop as (D, n, …), and their signs as (D, n) or None for all +."""
        raise AssertionError("too many directions to write out; this factor is only sketched")

    def sketch(self, noise: Tensor) -> tuple[Tensor, Tensor | None]:
        """One draw: directions whose signed outer products average to B; E[noise noiseᵀ] = 1."""
        raise AssertionError("this factor has few directions and is never sketched")

    def sizes(self) -> Tensor:
        """The squared lengths of the directions, (n, count), in float64."""
        raise AssertionError("this factor is never mixed")

    def mixed(self, signs: Tensor, rows: Tensor | None = None) -> Tensor:
        """Of every sample, or of some `rows`, sums of all directions, (D, n, …), by the numbers
        that each is taken with, (D, n, count)."""
        raise AssertionError("this factor is never mixed")

    def joined(self, others: Sequence[Factor]) -> Self:
        """The factor of several batches of samples."""
        whole = copy(self)
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(whole, name, torch.cat([value, *(getattr(o, name) for o in others)]))
        return whole


@final
class SoftmaxFactor(Factor):
    """Closed form of the factor of s (diag p − p pᵀ), K−1 columns a position.

    With q_c = Σ_{j>c} p_j and tail_c = p_c + q_c: column c is sqrt(p_c q_c / tail_c) at c and
    −p_j sqrt(p_c / (q_c tail_c)) at j > c. The suffix sums are formed from small to large and
    never by subtraction, so that confident samples lose no digits.
    """

    def __init__(self, loss: CrossEntropy, outputs: Tensor, targets: Tensor) -> None:
        logits, _ = loss.class_last(outputs, targets)
        self.shape, self.dim = logits.shape, loss.dim(outputs, targets)
        n, self.classes = len(outputs), logits.shape[-1]
        # Samples last, (positions, K, n): what runs over classes is then done for all of them.
        flat = logits.double().reshape(n, -1, self.classes).permute(1, 2, 0).contiguous()
        self.positions = len(flat)
        self.count = self.positions * (self.classes - 1)
        self.p = flat.softmax(1)
        rest = self.p.flip(1).cumsum(1).flip(1)[:, 1:]
        root = loss.scale(outputs, targets).sqrt().reshape(n, 1, -1).permute(2, 1, 0)
        at, below = self.column_entries(self.p[:, :-1], rest, root)
        # Entries below c are p_j · below_c ≤ 1 though below_c alone may be beyond float32's range;
        # there p_j is 0 in float32, so a bound on below_c changes nothing.
        self.p, self.at = self.p.to(outputs.dtype), at.to(outputs.dtype)
        narrow = outputs.dtype != torch.float64
        self.below = below.clamp(max=1e30).to(outputs.dtype) if narrow else below

    @staticmethod
    def column_entries(p: Tensor, rest: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
        """The entry at c and the common factor of those below it; 0/0 of a saturated softmax is 0.

        One root after the other: the product of two small numbers may underflow.
        """
        share, spread, safe = (p / (p + rest)).sqrt_() * root, rest.sqrt(), rest > 0
        return (share * spread).where(safe, 0.0), (share / spread).where(safe, 0.0)

    def _place(self, values: Tensor) -> Tensor:
        """(D, positions, K, n) as directions in the outputs' own layout."""
        directions = values.permute(0, 3, 1, 2)
        placed = directions.reshape(len(values), *self.shape).movedim(-1, self.dim + 1)
        return placed.contiguous()

    def columns(self, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        if self.positions == 1:
            lower = self.p.new_full((stop - start, self.classes), -1.0).triu_(start + 1)
            values = (self.p * self.below[0, start:stop, None]).mul_(lower.unsqueeze(-1))
            torch.diagonal(values, start, 0, 1).copy_(self.at[0, start:stop].T)
            return self._place(values.unsqueeze(1)), None
        index = torch.arange(start, stop, device=self.p.device)
        where, which = index // (self.classes - 1), index % (self.classes - 1)
        every = torch.arange(self.classes, device=self.p.device)
        lower = (every > which[:, None]).to(self.p).neg_().unsqueeze(-1)  # (D, K, 1)
        values = self.p[where] * self.below[where, which].unsqueeze(1) * lower
        rows = torch.arange(len(index), device=index.device)
        values[rows, which] = self.at[where, which]
        spread = values.new_zeros(len(index), self.positions, *values.shape[1:])
        spread[rows, where] = values
        return self._place(spread), None

    def sketch(self, noise: Tensor) -> tuple[Tensor, Tensor | None]:
        raise AssertionError("columns one by one; SoftmaxSketch mixes them")


@final
class RankedSoftmax(Factor):
    """The factor of `SoftmaxFactor` with the classes from the unlikeliest up, its columns from the
    last, that of the second likeliest class, to the first.

    Those of a confident sample end in next to nothing. What a class of small probability alone
    gains is in one column, its own, but for its probability: other columns cannot take it away when
    they are mixed. Outputs are (n, classes).
    """

    def __init__(self, loss: CrossEntropy, outputs: Tensor, targets: Tensor) -> None:
        self.dtype, self.count = outputs.dtype, outputs.shape[1] - 1
        self.p, self.order = outputs.double().softmax(1).sort(1)
        rest = self.p.flip(1).cumsum(1).flip(1)[:, 1:]
        root = loss.scale(outputs, targets).sqrt().reshape(-1, 1)
        self.at, self.below = SoftmaxFactor.column_entries(self.p[:, :-1], rest, root)

    def sizes(self) -> Tensor:
        left = self.p.square().flip(1).cumsum(1).flip(1)[:, 1:]
        return (self.at.square() + self.below.square() * left).flip(1)

    def mixed(self, signs: Tensor, rows: Tensor | None = None) -> Tensor:
        parts = self.p, self.order, self.at, self.below
        p, order, at, below = parts if rows is None else (each[rows] for each in parts)
        z = signs.to(p).flip(-1)
        before = torch.cat([torch.zeros_like(z[..., :1]), (z * below).cumsum(-1)], -1)
        values = before.mul_(p).neg_()
        values[..., :-1] += z * at
        places = order.expand_as(values)
        return torch.empty_like(values).scatter_(-1, places, values).to(self.dtype)


@final
class SoftmaxSketch(Factor):
    """s (diag p − p pᵀ) = R Rᵀ with R = sqrt(s) (diag r − p rᵀ), r = sqrt(p).

    Nothing larger than the outputs is held. What a column gives to the likeliest class is minus
    what it gives to the others, of which no digits are lost where p is near 1.

    The columns of `SoftmaxFactor` that belong to the `top` likeliest classes can be taken out, as
    `columns`; what is left is diag p − p pᵀ/q of the other classes, q the sum of these p. Of a
    network that has learnt something they hold nearly all of the noise.
    """

    def __init__(self, loss: CrossEntropy, outputs: Tensor, targets: Tensor, top: int = 0) -> None:
        logits, _ = loss.class_last(outputs, targets)
        self.dim, self.count = loss.dim(outputs, targets), top
        self.p = logits.softmax(-1)
        self.root = loss.scale(outputs, targets).sqrt().to(outputs.dtype).unsqueeze(-1)
        self.likeliest, self.others = self.p.argmax(-1, keepdim=True), self.p
        if top:
            # The same classes in every pass, also where some are equally likely.
            ranks = torch.sort(self.p, dim=-1, descending=True, stable=True).indices
            self.order, self.likeliest = ranks[..., :top], ranks[..., top : top + 1]
            self.others = self.p.scatter(-1, self.order, 0.0)
        self.rest = self.others.sum(-1, keepdim=True)
        if top:
            self._rank()

    def _rank(self) -> None:
        """The entries of the columns that are taken out."""
        high = self.p.gather(-1, self.order).double()
        tails = torch.cat([high, self.rest.double()], -1).flip(-1).cumsum(-1).flip(-1)
        one = torch.ones((), dtype=high.dtype, device=high.device)
        at, below = SoftmaxFactor.column_entries(high, tails[..., 1:], one)
        self.at, self.below = at.to(self.p), below.clamp(max=1e30).to(self.p)

    def left(self) -> Tensor:
        """The squares of what is left, for those of the columns that are taken out: of every place
        of every sample, in float64."""
        others, high = self.others.double(), self.p.gather(-1, self.order).double()
        q, last = self.rest[..., 0].double(), others.square().sum(-1, keepdim=True)
        squares = torch.cat([high.square(), last], -1).flip(-1).cumsum(-1).flip(-1)[..., 1:]
        out = (self.at.double().square() + self.below.double().square() * squares).sum(-1)
        return ((q - last[..., 0] / q).clamp(min=0) / out).nan_to_num(0, 0, 0)

    def columns(self, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        found = []
        for c in range(start, stop):
            lower = self.p.scatter(-1, self.order[..., : c + 1], 0.0)
            column = lower * -self.below[..., c : c + 1]
            column.scatter_(-1, self.order[..., c : c + 1], self.at[..., c : c + 1])
            found.append(column.mul_(self.root).movedim(-1, self.dim))
        return torch.stack(found), None

    def sketch(self, noise: Tensor) -> tuple[Tensor, Tensor | None]:
        mixed = self.others.sqrt().mul_(noise.movedim(self.dim, -1))
        share = self.others / self.rest.clamp(min=torch.finfo(self.p.dtype).tiny)
        mixed = mixed.addcmul_(share, mixed.sum(-1, keepdim=True), value=-1)
        mixed.scatter_(-1, self.likeliest, 0.0)
        mixed.scatter_(-1, self.likeliest, -mixed.sum(-1, keepdim=True))
        return mixed.mul_(self.root).movedim(-1, self.dim).unsqueeze(0), None


@final
class DiagonalFactor(Factor):
    """B is diagonal (squared error, binary cross-entropy): one direction an output element."""

    def __init__(self, diagonal: Tensor, like: Tensor, count: int) -> None:
        self.negative = bool((diagonal < 0).any())
        self.sign = torch.where(diagonal < 0, -1.0, 1.0).reshape(len(like), -1).to(like)
        self.root = diagonal.abs().sqrt().to(like.dtype)
        self.count = count

    def columns(self, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        n, count = len(self.root), stop - start
        index = torch.arange(start, stop, device=self.root.device)
        values = self.root.new_zeros(count, n, self.root[0].numel())
        values[torch.arange(count, device=index.device), :, index] = self.root.reshape(n, -1)[
            :, start:stop
        ].T
        sign = self.sign[:, start:stop].T if self.negative else None
        return values.reshape(count, *self.root.shape), sign

    def sketch(self, noise: Tensor) -> tuple[Tensor, Tensor | None]:
        mixed = noise.to(self.root) * self.root
        if not self.negative:
            return mixed.unsqueeze(0), None
        up = self.sign.reshape(self.root.shape) > 0
        return _signed(mixed * up, mixed * ~up)


@final
class DenseFactor(Factor):
    """B by autograd, for any loss, factored by its eigenvectors; indefinite allowed."""

    def __init__(self, hessian: Tensor, like: Tensor) -> None:
        values, vectors = torch.linalg.eigh(hessian.double())
        order = values.abs().argsort(dim=-1, descending=True)
        values = values.gather(-1, order)
        vectors = vectors.gather(-1, order.unsqueeze(1).expand_as(vectors))
        largest = values.abs().amax(-1, keepdim=True)
        matters = (values.abs() > 1e-15 * largest).any(0)
        self.count = int(matters.sum())
        self.sign = values.sign().to(like)
        self.columns_ = (vectors * values.abs().sqrt().unsqueeze(1)).to(like.dtype)
        self.shape = like.shape

    def columns(self, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        part = self.columns_[:, :, start:stop].movedim(-1, 0)
        return part.reshape(stop - start, *self.shape), self.sign[:, start:stop].T


@final
class ProductFactor(Factor):
    """B known only through products: B = E[b aᵀ] with a = c z and b = B z/c for signs z.

    c balances the two, sample by sample; (a + b)/2 and (a − b)/2 are the directions.
    """

    def __init__(self, loss: Loss, outputs: Tensor, targets: Any) -> None:
        self.loss, self.outputs, self.targets = loss, outputs, targets
        self.count = outputs[0].numel()
        generator = torch.Generator().manual_seed(20_250_102)
        tried = torch.randn(outputs.shape[1:], generator=generator).to(outputs)
        size = torch.linalg.vector_norm(self._product(tried.expand_as(outputs)).flatten(1), dim=1)
        root = torch.where(size > 0, size / self.count**0.5, 1.0).sqrt()
        self.root = root.reshape(-1, *[1] * (outputs.ndim - 1))

    def _product(self, vector: Tensor) -> Tensor:
        return output_product(self.loss.total, self.outputs, self.targets, vector)

    def sketch(self, noise: Tensor) -> tuple[Tensor, Tensor | None]:
        z = noise.to(self.outputs)
        a, b = z * self.root, self._product(z / self.root)
        return _signed((a + b) / 2, (a - b) / 2)


def _signed(plus: Tensor, minus: Tensor) -> tuple[Tensor, Tensor]:
    sign = torch.ones(2, len(plus), device=plus.device, dtype=plus.dtype)
    sign[1] = -1
    return torch.stack([plus, minus]), sign


def direction_count(loss: Loss, outputs: Tensor, targets: Any) -> int:
    """How many directions a sample has at most."""
    entries = outputs[0].numel()
    if isinstance(loss, CrossEntropy):
        return entries - entries // outputs.shape[loss.dim(outputs, targets)]
    return 0 if isinstance(loss, NegativeLogLikelihood) else entries


def factor(loss: Loss, outputs: Tensor, batch: Batch, *, sketched: bool, top: int = 0) -> Factor:
    """The factor of the (unnormalised) output Hessian, for its columns or to be sketched; a
    cross-entropy's also for the columns of its `top` likeliest classes and a sketch of the rest."""
    outputs = outputs.detach()
    if isinstance(loss, CrossEntropy):
        if sketched:
            return SoftmaxSketch(loss, outputs, batch.targets, top)
        return SoftmaxFactor(loss, outputs, batch.targets)
    if isinstance(loss, ElementwiseLoss):
        count = direction_count(loss, outputs, batch.targets)
        return DiagonalFactor(loss.curvature(outputs, batch.targets), outputs, count)
    check_derivatives(loss)
    if sketched:
        return ProductFactor(loss, outputs, batch.targets)
    try:
        hessian = output_hessian(loss, outputs, batch, torch.float64)
    except RuntimeError:  # the loss holds tensors of another dtype
        hessian = output_hessian(loss, outputs, batch, outputs.dtype)
    if not torch.isfinite(hessian).all():
        raise NoSecondDerivative(
            f"The second derivative of the loss {loss.name} is not finite on {batch.where}."
        )
    return DenseFactor(hessian, outputs)


def ranked(loss: Loss, outputs: Tensor, batch: Batch) -> RankedSoftmax | None:
    """A factor whose directions are mixed by their size, for the classes of one place a sample."""
    if not isinstance(loss, CrossEntropy) or outputs.ndim != 2:
        return None
    return RankedSoftmax(loss, outputs.detach(), batch.targets)


def output_product(
    total: Callable[[Tensor, Any], Tensor], outputs: Tensor, targets: Any, vector: Tensor
) -> Tensor:
    """B v by differentiating the loss twice in the outputs."""
    o = outputs.detach().requires_grad_()
    return output_products(lambda o: total(o, targets), o, vector.unsqueeze(0))[0]


def output_products(
    call: Callable[[Tensor], Tensor],
    outputs: Tensor,
    vectors: Tensor,
    *,
    create_graph: bool = False,
) -> Tensor:
    """B v for a stack of v, one by one; with a graph, all of them at once where that can be."""
    value = call(outputs)
    insist_on_derivatives(value, [outputs])
    (slope,) = torch.autograd.grad(value, outputs, create_graph=True)
    if not slope.requires_grad:
        return torch.zeros_like(vectors)
    options: Any = {"create_graph": create_graph, "retain_graph": True, "materialize_grads": True}
    if create_graph:
        with suppress(RuntimeError):  # an operation cannot be batched
            return torch.autograd.grad(slope, outputs, vectors, is_grads_batched=True, **options)[0]
    return torch.stack([torch.autograd.grad(slope, outputs, v, **options)[0] for v in vectors])


def output_units(outputs: Tensor) -> Tensor:
    """A unit vector for every output of a sample, the same for all samples: (M, n, …)."""
    count = outputs[0].numel()
    eye = torch.eye(count, dtype=outputs.dtype, device=outputs.device)
    return eye.reshape(count, 1, *outputs.shape[1:]).expand(-1, len(outputs), *outputs.shape[1:])


def output_hessian(loss: Loss, outputs: Tensor, batch: Batch, dtype: torch.dtype) -> Tensor:
    """(n, M, M) Hessians of the samples' losses in their M outputs.

    The samples do not interact, so one product gives one column of every sample's Hessian.
    """
    cast = _cast(batch.answered(outputs), dtype)
    wide = cast.inputs.detach().requires_grad_()
    columns = output_products(lambda o: loss.total(o, cast.targets), wide, output_units(wide))
    hessian = columns.flatten(2).movedim(0, -1)
    return (hessian + hessian.mT) / 2


def _cast(samples: Batch, dtype: torch.dtype) -> Batch:
    """Outputs and targets in another precision; classes stay what they are."""

    def to(leaf: Any) -> Any:
        floating = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.to(dtype) if floating else leaf

    inputs, targets = tree_map(to, (samples.inputs, samples.targets))
    return replace(samples, inputs=inputs, targets=targets)


def classify(
    call: Callable[..., Tensor],
    outputs: Tensor,
    batch: Batch,
    measured: Mapping[str, Tensor] | None = None,
) -> CustomLoss | JointLoss:
    """A user's loss as a mean or a sum over samples, or as one that only all have together.

    Compared on mixtures of neighbouring outputs, which keep to the loss's domain and where
    accidental agreement would be a coincidence.
    """
    missing = _missing_derivative(call, outputs, batch)
    if batch.size == 1:  # a mean and a sum differ only from two samples on
        batch, outputs = join([batch, batch]), torch.cat([outputs, outputs])
    mixed = torch.lerp(outputs.detach(), outputs.detach().roll(1, 0), 0.1)
    for mean in (True, False):
        candidate = CustomLoss(call, measured or {}, missing, mean)
        if _adds_up(candidate, batch.answered(mixed)):
            return candidate
    return JointLoss(call, measured or {}, missing)


def _missing_derivative(call: Callable[..., Tensor], outputs: Tensor, batch: Batch) -> str:
    """What torch says of a loss that cannot be differentiated twice; empty for one that can."""
    try:
        output_product(partial(scalar, call), outputs, batch.targets, torch.ones_like(outputs))
    except RuntimeError as error:
        if not lacks_derivative(error):
            raise
        return str(error).splitlines()[0]
    return ""


def lacks_derivative(error: RuntimeError) -> bool:
    """Whether torch says that an operation cannot be differentiated (again)."""
    said = any(words in str(error) for words in _NO_DERIVATIVE)
    return ordinary(error) and (said or isinstance(error, NotImplementedError))


_NO_DERIVATIVE = (
    "derivative",
    "double backward",
    "differentiate twice",
    "automatic differentiation",
)


def insist_on_derivatives(value: Tensor, by: Iterable[Tensor]) -> None:
    """Fail where a function marked `once_differentiable` lies between a value and some tensors.

    Torch means to raise an error when its gradient is differentiated, and does so in `backward()`
    only: `torch.autograd.grad` finds no way through it to what it differentiates by, and gives
    zero.
    """
    above: dict[Node, list[Node]] = {}
    waiting = []
    wanted = {id(t) for t in by}
    for node in nodes([value]):
        for following, _ in node.next_functions:
            if following is not None:
                above.setdefault(following, []).append(node)
        if id(getattr(node, "variable", None)) in wanted:
            waiting.append(node)
    seen = set(waiting)
    while waiting:
        for node in above.get(waiting.pop(), ()):
            insist_on_derivative(node)
            if node not in seen:
                seen.add(node)
                waiting.append(node)


def insist_on_derivative(node: Node) -> None:
    """The same of one node."""
    function = getattr(node, "_forward_cls", None)
    if getattr(getattr(function, "backward", None), "__code__", None) is _ONCE:
        raise RuntimeError(
            f"cannot differentiate twice {node.name()}, which is marked @once_differentiable"
        )


# What `once_differentiable` wraps around every function is one and the same code.
_ONCE = once_differentiable(lambda context, *gradients: gradients).__code__


@contextmanager
def derivatives_explained() -> Iterator[None]:
    """Torch's own error about a derivative that it does not have, as one of ours."""
    try:
        yield
    except RuntimeError as error:
        if not lacks_derivative(error):
            raise
        raise NoSecondDerivative(
            "An operation of the model or of the loss cannot be differentiated as often as it must "
            f"be ({(str(error) or type(error).__name__).splitlines()[0]}). Write it with "
            "operations that can."
        ) from error


def check_derivatives(loss: object) -> None:
    """Refuse a user's loss that cannot be differentiated twice."""
    if isinstance(loss, UserLoss) and loss.missing:
        raise NoSecondDerivative(
            f"The loss {loss.name} has no second derivative in torch ({loss.missing}), which "
            "Hessian and Gauss–Newton matrix need. Write it with operations that have one, e.g. "
            "a margin loss as (margin - o.gather(1, y) + o).clamp(min=0), or use measures that "
            "need none: delta_sharpness, sam_sharpness, adaptive_sharpness, fisher_rao_norm."
        )


def repeats(loss: str, first: Tensor, second: Tensor, where: str) -> None:
    """Refuse a loss with two values on the same outputs, up to the order of a GPU's sums."""
    tolerance = 1e-12 if first.dtype == torch.float64 else 1e-5
    before, after = first.item(), second.item()
    if not abs(before - after) <= tolerance * abs(before):
        raise LossError(
            f"The loss {loss} is random, or has a state: on the same outputs and targets of "
            f"{where} it is first {before:.6g}, then {after:.6g}. Switch its dropout or noise "
            "off, or draw it once and hold it fixed."
        )


@final
class Additivity:
    """Checks that a user's loss is the mean or sum over samples that it was taken for.

    On every chunk, and at the end on all samples together (as many as `_GALLERY` entries hold):
    a weighted mean looks like a plain one as long as the weights agree, as they may within a chunk,
    and two samples that interact may lie in different ones.
    """

    def __init__(self, loss: CustomLoss) -> None:
        self.loss = loss
        self.gallery: list[Batch] = []  # outputs of the model, with their targets
        self.entries = 0

    def holds(self, outputs: Tensor, batch: Batch) -> bool:
        """Whether it is one on this chunk."""
        here = batch.answered(outputs.detach())
        value, again = (self.loss.value(here.inputs, here.targets) for _ in range(2))
        if not torch.isfinite(value):
            raise DataError(f"The loss {self.loss.name} is not finite on {batch.where}.")
        repeats(self.loss.name, value, again, batch.where)
        alike = not self.gallery or self.gallery[0].inputs.shape[1:] == outputs.shape[1:]
        if alike and self.entries + outputs.numel() <= _GALLERY:
            self.gallery.append(here)
            self.entries += outputs.numel()
        return self._of(here)

    def holds_together(self, reduction: Reduction, device: torch.device) -> bool:
        """Whether it is one on all chunks together, those of other ranks too."""
        gallery = self.gallery
        if reduction.ranks > 1:
            cpu = torch.device("cpu")
            told = reduction.each(lambda: [chunk.on(cpu) for chunk in self.gallery])
            every = [chunk.on(device) for chunks in told for chunk in chunks]
            gallery = [c for c in every if c.inputs.shape[1:] == every[0].inputs.shape[1:]]
        several = len(gallery) > 1 and alike(gallery)
        return not several or self._of(join(gallery))

    def _of(self, samples: Batch) -> bool:
        return _adds_up(self.loss, samples) and _apart(self.loss, samples)


_GALLERY = 1 << 24


def _adds_up(loss: CustomLoss, samples: Batch) -> bool:
    """Whether the whole is the sum of its parts: the first, the last, and the rest in halves."""
    try:
        return _sums_up(loss, _cast(samples, torch.float64))
    except RuntimeError:  # the loss holds tensors of another dtype
        return _sums_up(loss, samples)


def _sums_up(loss: CustomLoss, samples: Batch) -> bool:
    n = samples.size
    whole, slope = _with_slope(loss, samples)
    cuts = pairwise(sorted({0, 1, n // 2, n - 1, n} - {-1}))
    values, slopes = zip(*[_with_slope(loss, samples.part(a, b)) for a, b in cuts], strict=True)
    tolerance = 1e-9 if samples.inputs.dtype == torch.float64 else 1e-4
    scale = max(abs(whole), sum(map(abs, values)), 1e-300)
    # A term that is small beside another's value moves outputs of its own.
    error, size = (torch.cat(slopes) - slope).abs().amax(0), slope.abs().amax(0)
    right = error <= tolerance * (size + 1e-6 * size.max())
    return abs(whole - sum(values)) <= tolerance * scale and bool(right.all())


def _with_slope(loss: CustomLoss, samples: Batch) -> tuple[float, Tensor]:
    """The loss summed over samples, and its gradient in their outputs."""
    o = samples.inputs.detach().requires_grad_()
    with torch.enable_grad():
        value = loss.total(o, samples.targets)
    if not value.requires_grad:
        return float(value.detach()), torch.zeros_like(o)
    (slope,) = torch.autograd.grad(value, o, materialize_grads=True)
    return float(value.detach()), slope


def _apart(loss: CustomLoss, samples: Batch) -> bool:
    """Whether no two samples interact: B z stays where z is, for halves that part every pair.

    Two samples differ in some binary digit of their positions, so log₂ n halves suffice. Where B is
    not to be had, the gradient's change from outputs to outputs + z takes the place of B z.
    """
    n, outputs = samples.size, samples.inputs
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(outputs.shape, generator=generator).to(outputs)
    index = torch.arange(n, device=outputs.device)
    change = _gradient_change if loss.missing else output_product
    for digit in range((n - 1).bit_length()):
        half = (index >> digit) & 1 == 1
        shape = (-1, *[1] * (outputs.ndim - 1))
        product = change(loss.total, outputs, samples.targets, z * half.reshape(shape))
        tolerance = 1e-9 if outputs.dtype == torch.float64 else 1e-4
        if product[~half].abs().max() > tolerance * product.abs().max():
            return False
    return True


def _gradient_change(
    total: Callable[[Tensor, Any], Tensor], outputs: Tensor, targets: Any, vector: Tensor
) -> Tensor:
    """How the loss's gradient changes when the outputs move by a vector."""
    ends = []
    for at in (outputs.detach().clone(), outputs.detach() + vector):
        (gradient,) = torch.autograd.grad(total(at.requires_grad_(), targets), at)
        ends.append(gradient)
    return ends[1] - ends[0]
