"""Losses as the engine needs them: a sum over samples, its normaliser, and a check of the targets.

The risk is what the loss would return on ONE batch that holds every sample. A loss with
`reduction="mean"` divides by a normaliser (samples, elements, class weights), which is itself a
sum over batches; so each loss here gives the two sums and the risk divides one by the other.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import Node

from saltflat.errors import (
    CriterionError,
    DataError,
    InvalidType,
    InvalidValue,
    LossError,
    listed,
)
from saltflat.memory import ordinary
from saltflat.vectors import bounds

LossLike = str | Callable[..., Tensor]


class Loss(ABC):
    """A twice differentiable loss that adds up over samples."""

    name: str
    mean: bool  # divide by the summed `normaliser`, or take the plain sum

    @abstractmethod
    def total(self, outputs: Tensor, targets: Any) -> Tensor:
        """The loss summed over samples, differentiable in the outputs."""

    @abstractmethod
    def normaliser(self, outputs: Tensor, targets: Any) -> float:
        """What these samples add to the divisor of a mean."""

    def counted(self, outputs: Tensor, targets: Any) -> int:
        """How many of the samples count at all."""
        return len(outputs)

    def each(self, outputs: Tensor, targets: Any) -> Tensor | None:
        """The parts of `total` that are the samples' own, or None where these are not known."""
        return None

    def evenly(self, outputs: Tensor, targets: Any) -> bool:
        """Whether each of these samples adds as much to the normaliser as any other."""
        return False

    def census(self, outputs: Tensor, targets: Any) -> tuple[float, int, bool]:
        """All three: `normaliser`, `counted` and `evenly`."""
        each = (outputs, targets)
        return self.normaliser(*each), self.counted(*each), self.evenly(*each)

    def right(self, outputs: Tensor, targets: Any) -> tuple[int, int] | None:
        """How many classes the largest outputs name rightly, and of how many; None if it has none.

        A position that is ignored is not counted.
        """
        return None

    def tally(self, outputs: Tensor, targets: Any) -> Tensor | None:
        """What `chance` needs of the targets of a batch; None if it cannot tell."""
        return None

    def joined(self, one: Tensor, two: Tensor) -> Tensor:
        """The tally of two batches together: sums over samples add up."""
        return one + two

    def chance(self, tally: Tensor) -> float:
        """The least sum over samples that outputs can have which are the same for all of them."""
        raise NotImplementedError

    def class_dimension(self, outputs: Tensor, targets: Any) -> int | None:
        """The dimension over which a log-softmax before this loss is a part of it; None if none.

        The cross-entropy is the same with and without it: log-softmax is idempotent.
        """
        return None

    def check(self, outputs: Tensor, targets: Any, where: str) -> None:  # noqa: B027
        """Refuse targets that do not fit the outputs; `where` names the batch."""


def _reduction(reduction: str) -> bool:
    if reduction not in ("mean", "sum"):
        raise LossError(
            f"The loss must reduce to one number. Got reduction={reduction!r}; "
            "use reduction='mean' or 'sum'."
        )
    return reduction == "mean"


@final
class CrossEntropy(Loss):
    """Softmax cross-entropy as `torch.nn.functional.cross_entropy` defines it.

    With a_k the weight on −log p_k (one-hot, smoothed or soft targets, times class weights) the
    output-side Hessian is (Σ_k a_k)(diag p − p pᵀ), so `scale` is all that a factor needs.
    """

    name = "cross_entropy"

    def __init__(
        self,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        class_dim: int | None = 1,
    ) -> None:
        self.mean = _reduction(reduction)
        self.weight = weight
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.class_dim = class_dim  # None: find out from the shapes

    def class_last(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs as (n, positions…, K), and targets to match (soft targets likewise)."""
        dim = self.dim(outputs, targets)
        soft = targets.is_floating_point()
        return outputs.movedim(dim, -1), targets.movedim(dim, -1) if soft else targets

    def dim(self, outputs: Tensor, targets: Tensor) -> int:
        """The dimension of the classes."""
        if self.class_dim is not None or outputs.ndim == 2:
            return 1
        if targets.is_floating_point() and targets.shape == outputs.shape:
            raise DataError(
                "With soft targets and outputs of more than two dimensions the class dimension "
                f"is not known. Got outputs of shape {tuple(outputs.shape)}; pass "
                "loss=torch.nn.CrossEntropyLoss(), whose classes are dimension 1."
            )
        first = outputs.shape[:1] + outputs.shape[2:] == targets.shape
        last = outputs.shape[:-1] == targets.shape
        if first and last:
            raise DataError(
                "The class dimension of the outputs is ambiguous: shape "
                f"{tuple(outputs.shape)} with targets {tuple(targets.shape)} fits classes first "
                "and classes last. Pass loss=torch.nn.CrossEntropyLoss() for dimension 1, or "
                "output=lambda out: out.movedim(-1, 1) with it for the last one."
            )
        return outputs.ndim - 1 if last else 1

    def class_dimension(self, outputs: Tensor, targets: Any) -> int | None:
        return self.dim(outputs, targets)

    def _soft(self, logits: Tensor, targets: Tensor) -> Tensor:
        """a[…, k], which multiplies −log p_k, of probabilities as targets."""
        spread = self.label_smoothing / logits.shape[-1]
        soft = targets.double() * (1 - self.label_smoothing) + spread
        return soft if self.weight is None else soft * self.weight.to(soft)

    def _hard(self, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The positions that count, their classes, and their weights (float64), of classes."""
        kept = targets != self.ignore_index
        classes = targets.where(kept, 0)
        weight = None if self.weight is None else self.weight.to(targets.device, torch.float64)
        return kept, classes, kept.double() if weight is None else weight[classes] * kept

    def _smoothing(self, logits: Tensor) -> tuple[float, float, Tensor | float]:
        """(1 − ε, ε/K, class weights)."""
        weight = 1.0 if self.weight is None else self.weight.to(logits)
        return 1 - self.label_smoothing, self.label_smoothing / logits.shape[-1], weight

    def scale(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Σ_k a_k for every position, shape (n, positions…), float64."""
        logits, targets = self.class_last(outputs, targets)
        if targets.is_floating_point():
            return self._soft(logits, targets).sum(-1)
        kept = targets != self.ignore_index
        share = kept.double() if self.weight is None else self._hard(targets)[2]
        if self.label_smoothing == 0.0:
            return share
        own, spread, _ = self._smoothing(logits)
        whole = logits.shape[-1] if self.weight is None else float(self.weight.double().sum())
        return own * share + spread * whole * kept.double()

    def total(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self._positions(outputs, targets).sum()

    def _positions(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of every position, (n, positions…)."""
        logits, targets = self.class_last(outputs, targets)
        logs = logits.log_softmax(-1)
        if targets.is_floating_point():
            return -(self._soft(logits.detach(), targets).to(logs) * logs).sum(-1)
        kept, classes, share = self._hard(targets)
        own, spread, weight = self._smoothing(logits)
        likelihood = logs.gather(-1, classes.unsqueeze(-1)).squeeze(-1) * share.to(logs)
        if self.label_smoothing == 0.0:
            return -likelihood
        return -own * likelihood - spread * (logs * weight).sum(-1) * kept

    def each(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return _by_sample(self._positions(outputs, targets))

    def evenly(self, outputs: Tensor, targets: Tensor) -> bool:
        if targets.is_floating_point():
            return True
        return self.weight is None and not bool((targets == self.ignore_index).any())

    def census(self, outputs: Tensor, targets: Tensor) -> tuple[float, int, bool]:
        if self.weight is None and not targets.is_floating_point():
            least, most = bounds(targets)
            if not least <= self.ignore_index <= most:  # none is ignored
                return float(targets.numel()), len(targets), True
        return super().census(outputs, targets)

    def right(self, outputs: Tensor, targets: Tensor) -> tuple[int, int] | None:
        if targets.is_floating_point():
            return None
        kept = targets != self.ignore_index
        named = outputs.argmax(self.dim(outputs, targets)) == targets
        return int((named & kept).sum()), int(kept.sum())

    def tally(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Σ a_k over all positions, of every class."""
        logits, targets = self.class_last(outputs, targets)
        if targets.is_floating_point():
            return self._soft(logits, targets).flatten(0, -2).sum(0)
        kept, classes, share = self._hard(targets)
        own, spread, _ = self._smoothing(logits)
        weight = 1.0 if self.weight is None else self.weight.to(logits.device, torch.float64)
        whole = torch.zeros(logits.shape[-1], dtype=torch.float64, device=logits.device)
        whole.index_add_(0, classes.flatten(), share.flatten())
        return own * whole + spread * weight * kept.sum()

    def chance(self, tally: Tensor) -> float:
        """Of the logarithms of the classes' shares: −Σ_k A_k log(A_k / Σ A), with A the tally."""
        return -float(torch.special.xlogy(tally, tally / tally.sum()).sum())

    def normaliser(self, outputs: Tensor, targets: Tensor) -> float:
        if targets.is_floating_point():
            return float(outputs.numel() // outputs.shape[1])
        return float(self._hard(targets)[2].sum())

    def counted(self, outputs: Tensor, targets: Tensor) -> int:
        if targets.is_floating_point():
            return len(outputs)
        return int((targets != self.ignore_index).reshape(len(targets), -1).any(1).sum())

    def check(self, outputs: Tensor, targets: Any, where: str) -> None:
        _check_tensor(targets, self.name, where)
        if outputs.ndim < 2:
            raise DataError(
                f"Cross-entropy needs outputs of shape (n, classes, …). Got "
                f"{tuple(outputs.shape)} in {where}; for a single logit use loss='bce'."
            )
        if targets.is_floating_point():
            self._check_probabilities(outputs, targets, where)
            return
        if targets.dtype != torch.int64:
            raise DataError(
                f"Class targets must be int64. Got {targets.dtype} in {where}; "
                "convert them with targets.long()."
            )
        dim = self.dim(outputs, targets)
        expected = outputs.shape[:dim] + outputs.shape[dim + 1 :]
        if expected != targets.shape:
            raise DataError(
                f"Targets do not fit the outputs in {where}: outputs {tuple(outputs.shape)} "
                f"need targets of shape {tuple(expected)}. Got {tuple(targets.shape)}."
            )
        classes = outputs.shape[dim]
        if self.weight is not None and self.weight.numel() != classes:
            raise LossError(
                f"The loss has {self.weight.numel()} class weights and the model has "
                f"{classes} outputs ({where})."
            )
        least, most = bounds(targets) if targets.numel() else (0, 0)
        if least >= 0 and most < classes:
            return
        wrong = (targets != self.ignore_index) & ((targets < 0) | (targets >= classes))
        if wrong.any():
            raise DataError(
                f"Target {int(targets[wrong][0])} in {where} is out of range: the model has "
                f"{classes} outputs, so targets run from 0 to {classes - 1}."
            )

    def _check_probabilities(self, outputs: Tensor, targets: Tensor, where: str) -> None:
        if targets.ndim < outputs.ndim:
            raise DataError(
                f"Class targets must be int64. Got {targets.dtype} of shape "
                f"{tuple(targets.shape)} in {where}; convert them with targets.long(), give "
                f"probabilities of the outputs' shape {tuple(outputs.shape)}, or, if they are "
                "numbers to be met, another loss: mse."
            )
        _check_shape(outputs, targets, self.name, where)
        if (self.scale(outputs, targets) < 0).any():
            raise DataError(
                f"Class probabilities must not be negative. Those of a sample in {where} have a "
                "negative sum."
            )


class ElementwiseLoss(Loss):
    """A sum over elements: its output-side Hessian is diagonal."""

    def normaliser(self, outputs: Tensor, targets: Tensor) -> float:
        return float(outputs.numel())

    def evenly(self, outputs: Tensor, targets: Tensor) -> bool:
        return True

    @abstractmethod
    def curvature(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The diagonal of the output-side Hessian."""

    def check(self, outputs: Tensor, targets: Any, where: str) -> None:
        _check_tensor(targets, self.name, where)
        _check_shape(outputs, targets, self.name, where)


@final
class NegativeLogLikelihood(ElementwiseLoss):
    """−Σ w_y o_y of log-probabilities o, as `torch.nn.functional.nll_loss` defines it.

    It is linear in the outputs. Of outputs that end in a log-softmax over the classes it is the
    cross-entropy of what goes into that, and is measured so (see `Curvature.look`).
    """

    name = "nll"

    def __init__(
        self, weight: Tensor | None = None, ignore_index: int = -100, reduction: str = "mean"
    ) -> None:
        self.mean = _reduction(reduction)
        self.weight = weight
        self.ignore_index = ignore_index

    @property
    def cross_entropy(self) -> CrossEntropy:
        """The loss with a log-softmax before it."""
        reduction = "mean" if self.mean else "sum"
        return CrossEntropy(self.weight, self.ignore_index, reduction=reduction)

    def total(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self._positions(outputs, targets).sum()

    def _positions(self, outputs: Tensor, targets: Tensor) -> Tensor:
        _, classes, share = self.cross_entropy._hard(targets)
        return -outputs.gather(1, classes.unsqueeze(1)).squeeze(1) * share.to(outputs)

    def each(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return _by_sample(self._positions(outputs, targets))

    def evenly(self, outputs: Tensor, targets: Tensor) -> bool:
        return self.cross_entropy.evenly(outputs, targets)

    def right(self, outputs: Tensor, targets: Tensor) -> tuple[int, int] | None:
        return self.cross_entropy.right(outputs, targets)

    def curvature(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return torch.zeros_like(outputs, dtype=torch.float64)

    def normaliser(self, outputs: Tensor, targets: Tensor) -> float:
        return self.cross_entropy.normaliser(outputs, targets)

    def counted(self, outputs: Tensor, targets: Tensor) -> int:
        return self.cross_entropy.counted(outputs, targets)

    def check(self, outputs: Tensor, targets: Any, where: str) -> None:
        _check_tensor(targets, self.name, where)
        if targets.is_floating_point():
            raise DataError(
                f"The negative log-likelihood needs classes as targets, int64. Got "
                f"{targets.dtype} in {where}; for probabilities use loss='cross_entropy'."
            )
        self.cross_entropy.check(outputs, targets, where)


@final
class MeanSquaredError(ElementwiseLoss):
    """Squared error over elements; its output-side Hessian is 2 I."""

    name = "mse"

    def __init__(self, reduction: str = "mean") -> None:
        self.mean = _reduction(reduction)

    def total(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().sum()

    def each(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return _by_sample((outputs - targets).square())

    def tally(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Count, mean and squares around it, of every element of the outputs."""
        y = targets.double()
        mean = y.mean(0)
        return torch.stack([torch.full_like(mean, len(y)), mean, (y - mean).square().sum(0)])

    def joined(self, one: Tensor, two: Tensor) -> Tensor:
        """By the pairwise formula, which loses no digits to a mean that is large."""
        count, change = one[0] + two[0], two[1] - one[1]
        squares = one[2] + two[2] + change.square() * (one[0] * two[0] / count)
        return torch.stack([count, one[1] + change * (two[0] / count), squares])

    def chance(self, tally: Tensor) -> float:
        """Of the mean targets: the sum of the squares around them."""
        return float(tally[2].sum())

    def curvature(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return torch.full_like(outputs, 2.0, dtype=torch.float64)


@final
class BinaryCrossEntropy(ElementwiseLoss):
    """Binary cross-entropy on logits; its output-side Hessian is diagonal."""

    name = "bce"

    def __init__(
        self,
        weight: Tensor | None = None,
        pos_weight: Tensor | None = None,
        reduction: str = "mean",
    ) -> None:
        self.mean = _reduction(reduction)
        self.weight = weight
        self.pos_weight = pos_weight

    def total(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self._elements(outputs, targets, "sum")

    def _elements(self, outputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
        def like(t: Tensor | None) -> Tensor | None:
            return None if t is None else t.to(outputs)

        return F.binary_cross_entropy_with_logits(
            outputs,
            targets.to(outputs.dtype),
            weight=like(self.weight),
            pos_weight=like(self.pos_weight),
            reduction=reduction,
        )

    def each(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return _by_sample(self._elements(outputs, targets, "none"))

    def tally(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """Σ y and Σ 1 − y of every element of the outputs."""
        if self.weight is not None or self.pos_weight is not None:
            return None
        y = targets.double()
        return torch.stack([y.sum(0), (1 - y).sum(0)])

    def chance(self, tally: Tensor) -> float:
        """Of the logits of the elements' mean targets."""
        return -float(torch.special.xlogy(tally, tally / tally.sum(0)).sum())

    def curvature(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The diagonal: w (1 + (w₊ − 1) y) σ(o) σ(−o)."""
        o = outputs.double()
        diagonal = o.sigmoid() * (-o).sigmoid()
        if self.pos_weight is not None:
            diagonal = diagonal * (1 + (self.pos_weight.to(o) - 1) * targets.double())
        if self.weight is not None:
            diagonal = diagonal * self.weight.to(o)
        return diagonal

    def check(self, outputs: Tensor, targets: Any, where: str) -> None:
        super().check(outputs, targets, where)
        if ((targets < 0) | (targets > 1)).any():
            raise DataError(f"Targets of binary cross-entropy must lie in [0, 1] ({where}).")


@final
class NormalizedCrossEntropy(Loss):
    """Cross-entropy of logits divided by their population standard deviation over classes.

    Normalized Sharpness, eq. 20–22. Its output-side Hessian is indefinite.
    """

    name = "normalized_cross_entropy"
    mean = True

    def total(self, outputs: Tensor, targets: Tensor) -> Tensor:
        scaled = outputs / outputs.std(dim=1, correction=0, keepdim=True)
        return F.cross_entropy(scaled, targets, reduction="sum")

    def each(self, outputs: Tensor, targets: Tensor) -> Tensor:
        scaled = outputs / outputs.std(dim=1, correction=0, keepdim=True)
        return _by_sample(F.cross_entropy(scaled, targets, reduction="none"))

    def evenly(self, outputs: Tensor, targets: Tensor) -> bool:
        return CrossEntropy().evenly(outputs, targets)

    def right(self, outputs: Tensor, targets: Tensor) -> tuple[int, int] | None:
        return CrossEntropy().right(outputs, targets)

    def normaliser(self, outputs: Tensor, targets: Tensor) -> float:
        return CrossEntropy().normaliser(outputs, targets)

    def check(self, outputs: Tensor, targets: Any, where: str) -> None:
        CrossEntropy().check(outputs, targets, where)
        if (outputs.std(dim=1, correction=0) == 0).any():
            raise DataError(
                "The normalized cross-entropy divides by the spread of the logits over classes, "
                f"which is zero for a sample in {where}."
            )


@dataclass(eq=False)
class UserLoss:
    """A user's callable. What it may depend on is the outputs and the targets, nothing else.

    Attributes
    ----------
    measured : the parameters that are measured, by name. A loss that contains one of them is an
        error, because its derivatives in the parameters are not those through the outputs alone.
    missing : torch's words for the second derivative that it does not have; empty if it has one.
    """

    call: Callable[..., Tensor]
    measured: Mapping[str, Tensor] = field(default_factory=dict)
    missing: str = ""

    def __post_init__(self) -> None:
        self.name = describe(self.call)

    def value(self, outputs: Tensor, targets: Any) -> Tensor:
        """One number, differentiable in the outputs.

        Where the outputs are cut off from the model, what its graph still reaches is looked at:
        on every batch, since a loss may contain parameters on some of them only.
        """
        value = scalar(self.call, outputs, targets)
        if outputs.grad_fn is None:
            refuse_parameters(self.name, value, self.measured)
        return value


@final
@dataclass(eq=False)
class CustomLoss(UserLoss, Loss):
    """A user's callable, found to be a mean or a sum over samples.

    Whether it is one is checked on every batch (see `curvature.loss_hessian`), because a weighted
    mean looks like a mean as long as the weights happen to agree.
    """

    mean: bool = True

    def total(self, outputs: Tensor, targets: Any) -> Tensor:
        value = self.value(outputs, targets)
        return value * len(outputs) if self.mean else value

    def normaliser(self, outputs: Tensor, targets: Any) -> float:
        return float(len(outputs))

    def evenly(self, outputs: Tensor, targets: Any) -> bool:
        return True


@final
@dataclass(eq=False)
class JointLoss(UserLoss):
    """A user's callable that does not add up over samples: only the whole batch has a value."""


def _by_sample(values: Tensor) -> Tensor:
    """Summed over all but the first dimension."""
    return values.reshape(len(values), -1).sum(1)


def divisor(loss: Loss, normaliser: float) -> float:
    """What the sum over all samples is divided by."""
    if loss.mean and normaliser == 0.0:
        raise DataError(f"The loss {loss.name} has nothing to average: all targets are ignored.")
    return normaliser if loss.mean else 1.0


def describe(call: object) -> str:
    """A readable name of a callable."""
    name: str = getattr(call, "__name__", type(call).__name__)
    return name


def with_settings(loss: object) -> str:
    """The loss's name, with the settings that change its value."""
    name = getattr(loss, "name", None) or describe(loss)
    settings = []
    for key, value in sorted(vars(loss).items() if hasattr(loss, "__dict__") else ()):
        if isinstance(value, Tensor):
            value = value.tolist()
        plain = isinstance(value, bool | int | float | str | list)
        if plain and key not in ("name", "class_dim", "missing") and (key, value) not in _USUAL:
            settings.append(f"{key}={value}")
    return f"{name}({', '.join(settings)})" if settings else str(name)


_USUAL = [("mean", True), ("ignore_index", -100), ("label_smoothing", 0.0)]


def scalar(call: Callable[..., Tensor], outputs: Tensor, targets: Any) -> Tensor:
    """Call a user's loss and insist on one number."""
    try:
        value = call(outputs, targets)
    except Exception as error:
        if not ordinary(error):
            raise
        raise CriterionError(
            f"The loss {describe(call)} failed on {summary(outputs)} as outputs and "
            f"{summary(targets)} as targets: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(value, Tensor) or value.numel() != 1:
        got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise LossError(
            f"The loss {describe(call)} must return a tensor with one element. Got {got}; "
            "reduce it by its mean or sum."
        )
    return value.reshape(())


def nodes(values: Iterable[Tensor]) -> Iterator[Node]:
    """The nodes of the graph that autograd keeps of some values, each once."""
    waiting = [value.grad_fn for value in values if value.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)


def leaves(value: Tensor) -> Iterator[Tensor]:
    """The tensors that a value was computed from and that autograd differentiates by."""
    if value.grad_fn is None and value.requires_grad:
        yield value
    for node in nodes([value]):
        if isinstance(variable := getattr(node, "variable", None), Tensor):
            yield variable


def reached_from(value: Tensor, parameters: Mapping[str, Tensor]) -> list[str]:
    """The parameters that a value was computed from."""
    reached = {id(leaf) for leaf in leaves(value)}
    return [name for name, p in parameters.items() if id(p) in reached]


def refuse_parameters(loss: str, value: Tensor, measured: Mapping[str, Tensor]) -> None:
    """Refuse the loss if its value depends on measured parameters, other than by the outputs."""
    if names := reached_from(value, measured):
        raise LossError(
            f"The loss {loss} depends on parameters of the model beside its outputs: "
            f"{listed(names)}. Measured is the loss as a function of outputs and targets. Drop "
            "weight decay from it and add its curvature to the result: λ‖θ‖² adds 2λ to every "
            "entry of the diagonal and 2λ times the number of entries to the trace of each "
            "block, λ/2 ‖θ‖² half of that. Move a temperature or a second forward pass into the "
            "model, or freeze what is a constant (requires_grad=False)."
        )


def own_parameters(call: Callable[..., Any], value: Tensor, outputs: Tensor) -> list[str]:
    """What else a loss's value depends on that could be trained: names, or shapes for want of them.

    Only for a value in which no measured parameter was found.
    """
    names = {id(p): n for n, p in call.named_parameters()} if isinstance(call, nn.Module) else {}
    others = [leaf for leaf in leaves(value) if leaf is not outputs]
    return [names.get(id(leaf), f"a tensor of shape {tuple(leaf.shape)}") for leaf in others]


def summary(content: Any) -> str:
    """What was passed, by dtypes and shapes: `float32 (6, 4)`, `{ids: int64 (2, 7)}`."""
    if isinstance(content, Tensor):
        return f"{str(content.dtype).removeprefix('torch.')} {tuple(content.shape)}"
    if isinstance(content, Mapping):
        return "{" + ", ".join(f"{k}: {summary(v)}" for k, v in content.items()) + "}"
    if isinstance(content, tuple | list):
        return "(" + ", ".join(map(summary, content)) + ")"
    return type(content).__name__


def _check_tensor(targets: Any, loss: str, where: str) -> None:
    if not isinstance(targets, Tensor):
        raise InvalidType(
            f"The loss {loss!r} needs targets that are one tensor. Got "
            f"{type(targets).__name__} in {where}; pass unpack= to choose it."
        )
    if targets.is_floating_point() and not torch.isfinite(targets).all():
        raise DataError(f"The targets of {where} hold NaN or infinite values.")


def _check_shape(outputs: Tensor, targets: Tensor, loss: str, where: str) -> None:
    if outputs.shape != targets.shape:
        raise DataError(
            f"The loss {loss!r} needs targets of the outputs' shape {tuple(outputs.shape)}. "
            f"Got {tuple(targets.shape)} in {where}; reshape them (broadcasting would pair "
            "every output with every target)."
        )


NAMED: dict[str, Callable[[], Loss]] = {
    "cross_entropy": lambda: CrossEntropy(class_dim=None),
    "mse": MeanSquaredError,
    "bce": BinaryCrossEntropy,
    "normalized_cross_entropy": NormalizedCrossEntropy,
}

# Torch's modules and functions, with the options that the classes above take of them.
_KNOWN: tuple[tuple[type, Callable[..., Tensor], Callable[..., Loss], set[str]], ...] = (
    (
        nn.CrossEntropyLoss,
        F.cross_entropy,
        CrossEntropy,
        {"weight", "ignore_index", "label_smoothing", "reduction"},
    ),
    (
        nn.NLLLoss,
        F.nll_loss,
        NegativeLogLikelihood,
        {"weight", "ignore_index", "reduction"},
    ),
    (nn.MSELoss, F.mse_loss, MeanSquaredError, {"reduction"}),
    (
        nn.BCEWithLogitsLoss,
        F.binary_cross_entropy_with_logits,
        BinaryCrossEntropy,
        {"weight", "pos_weight", "reduction"},
    ),
)


def resolve(loss: LossLike) -> Loss | Callable[..., Tensor]:
    """The `Loss` that a name, a module or a function stands for, or the callable itself."""
    if isinstance(loss, str):
        if loss not in NAMED:
            known = ", ".join(map(repr, NAMED))
            raise InvalidValue(f"Unknown loss {loss!r}. Known: {known}.")
        return NAMED[loss]()
    if isinstance(loss, type):
        raise InvalidType(f"The loss is a class. Pass an instance: {loss.__name__}().")
    call, given = loss, {}
    if isinstance(loss, functools.partial) and not loss.args:
        call, given = loss.func, loss.keywords
    for module, function, kind, options in _KNOWN:
        if type(loss) is module:
            return kind(**{name: getattr(loss, name) for name in options})
        if call is function and set(given) <= options:
            return kind(**given)
    if getattr(loss, "reduction", "mean") == "none":
        _reduction("none")
    if not callable(loss):
        raise InvalidType(
            f"The loss must be a name, a module or a callable. Got {type(loss).__name__}."
            + (" Measures go by keyword: measures=[…]." if isinstance(loss, list | tuple) else "")
        )
    return loss
