"""Where a model stands: its loss, and whether that is a minimum at all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, isfinite, sqrt
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor

from saltflat.landscape import RiskSurface, descend
from saltflat.losses import CrossEntropy, JointLoss, Loss, divisor
from saltflat.printed import Told
from saltflat.risk import Batch
from saltflat.work import FORWARD

# What it costs at most, in gradients.
STANDING = 2 + 8 * FORWARD

# The share of the loss by which a step downhill may lower it at a minimum, and near one …
_AT, _NEAR = 0.01, 0.1
# … and the share of the chance level: by more it is no minimum, by less than the second it is near
# one in any case.
_MOST, _LEAST = 0.01, 0.001
# The share of the loss that nothing downhill takes where the gradient vanishes.
_STILL = 1e-6
# Whether it is a minimum: the answer in tables and files, and what a sentence calls it.
Word = Literal["yes", "nearly", "stationary", "not shown", "no"]
PHRASES: Mapping[Word, str] = {
    "yes": "a minimum",
    "nearly": "nearly a minimum",
    "stationary": "a stationary point, perhaps a minimum",
    "not shown": "not shown to be a minimum",
    "no": "not a minimum",
}
# Rows of outputs that are probabilities add up to 1 to within this.
_ONE = 1e-4
# Frequencies of the cosines that outputs are projected on; nothing depends on what they are.
_FREQUENCIES = (0.7, 1.9, 2.6)
# By how much of itself an entry is changed at most before they are.
_CHANGED = 0.1

PROBABILITIES = (
    "the outputs are probabilities already, on all samples, and the cross-entropy takes the "
    "softmax of them once more: return logits, or pass output=lambda p: p.log()"
)


@final
@dataclass(frozen=True, repr=False)
class Standing(Told):
    """Whether a model is at a minimum of its loss, and what that loss is compared with.

    A measure of flatness is of a minimum. That the gradient be 0 is no criterion: it depends on the
    scale of the parameters, and a network that fits its data by cross-entropy has no minimum at
    all. So what is asked is how much there is still to gain nearby: the loss is followed downhill
    along −θ² ∘ ∇L, a line that no rescaling of the parameters changes, to where it is lowest
    (`saltflat.landscape.descend`; at most three places are tried). It is

    - "no", not a minimum, if that takes more than 1 % of the chance level, or more than 10 % of the
      loss and 0.1 % of the chance level (of a loss without a chance level, 10 % of the loss),
    - "yes", a minimum, if it takes at most 1 % of the loss, and "nearly" between,
    - "stationary", perhaps a minimum, if it takes nothing: the gradient vanishes, which it does at
      saddles too, and a second line, from beside the model, has found no lower loss either,
    - "not shown" to be a minimum if it takes so little, but the loss is no lower than that of the
      best constant outputs: symmetry holds a network there whose weights are 0.

    A decrease was seen, so that "no" is certain; "yes" says that these lines found no more.
    Negative curvature is not looked for. The limits are conventions. `word` is the answer, which
    tables, pages and files have under "a minimum?"; `verdict` is a sentence, with what was seen.

    Attributes
    ----------
    loss : the risk, over all samples.
    sampling : its standard error as an estimate of the population's; None where samples do not
        count alike or depend on one another, or for a loss of the user's own.
    accuracy : the share of positions whose largest output is at the target; None if targets are no
        classes.
    chance : the loss of the best outputs that are the same for all samples (the logarithms of the
        classes' shares, the mean of the targets); None if it is not known.
    gradient_norm : Euclidean, over the measured parameters.
    decrease : how much lower the loss was seen downhill.
    outputs : projections of the outputs after a change of all parameters, by which two models are
        known to be rescalings of one another.

    Examples
    --------
    >>> import torch, saltflat as sf
    >>> _ = torch.manual_seed(0)
    >>> model, x, y = torch.nn.Linear(3, 2), torch.randn(8, 3), torch.arange(8) % 2
    >>> standing = sf.measure(model, (x, y), measures=["hessian_trace"]).standing
    >>> standing.minimum, round(standing.loss, 3), standing.accuracy
    (False, 0.775, 0.5)
    """

    loss: float
    sampling: float | None
    accuracy: float | None
    chance: float | None
    gradient_norm: float
    decrease: float
    outputs: tuple[float, ...] = ()

    #: What files say beside the fields, of which it follows.
    derived: ClassVar[tuple[str, ...]] = ("word", "minimum", "verdict")

    @property
    def minimum(self) -> bool:
        """Whether it is a minimum, or nearly one, as far as was seen; never at chance level."""
        return self._low and not self.above_chance

    @property
    def _low(self) -> bool:
        """Whether next to nothing is to be gained nearby."""
        if self._whole is None:
            return self.share <= _NEAR
        return self._whole <= _LEAST or (self._whole <= _MOST and self.share <= _NEAR)

    @property
    def _whole(self) -> float | None:
        """The decrease as a share of the chance level."""
        return self.decrease / self.chance if self.chance is not None and self.chance > 0 else None

    @property
    def share(self) -> float:
        """The decrease as a share of the loss."""
        return self.decrease / abs(self.loss) if self.loss else (inf if self.decrease else 0.0)

    @property
    def above_chance(self) -> bool:
        """Whether the best constant outputs do as well, or better; not where they do perfectly."""
        return self.chance is not None and self.loss >= self.chance * (1 - 1e-6) > 0

    @property
    def word(self) -> Word:
        """Whether it is a minimum, in a word."""
        if not self.minimum:
            return "not shown" if self._low else "no"
        if self.share <= _STILL and self.loss:
            return "stationary"
        return "yes" if self.share <= _AT else "nearly"

    @property
    def phrase(self) -> str:
        """What it is called, e.g. `nearly a minimum`."""
        return PHRASES[self.word]

    @property
    def verdict(self) -> str:
        """In words, e.g. `not a minimum: a step downhill lowers the loss by 31 %`."""
        norm = f"(gradient norm {self.gradient_norm:.2g})"
        still = f"the gradient vanishes, and no lower loss was seen nearby {norm}"
        if self.word == "stationary":
            return f"{self.phrase}: {still}"
        found = f"{100 * self.share:.2g} %" if self.share <= 1 else f"{self.decrease:.2g}"
        if self.word == "nearly" and self.share > _NEAR and self._whole is not None:
            found += f", which is {100 * self._whole:.2g} % of the chance level"
        text = f"a step downhill lowers the loss by {found} {norm}"
        if not self.above_chance:
            return f"{self.phrase}: {text}"
        text = still if self.share <= _STILL else text
        return f"{self.phrase}: {text}; the loss is at or above chance level, {self.chance:.4g}"

    def same_function(self, other: Standing, digits: float) -> bool:
        """Whether the outputs are the same but for rounding, relative errors of `digits`.

        Those of the models as they are would not tell: all that fit their data have the same. So
        every entry was changed by a share of itself, which rescalings of it carry along.
        """
        if not self.outputs or len(self.outputs) != len(other.outputs):
            return False
        size = max(map(abs, self.outputs))
        pairs = zip(self.outputs, other.outputs, strict=True)
        return all(abs(a - b) <= digits * size for a, b in pairs)

    def __str__(self) -> str:
        error = "" if self.sampling is None else f" ± {self.sampling:.2g} for the population"
        right = "" if self.accuracy is None else f", accuracy {100 * self.accuracy:.4g} %"
        return f"loss {self.loss:.4g}{error}{right}: {self.verdict}"


def standing_of(surface: RiskSurface) -> tuple[Standing, list[str]]:
    """Of the model as it is, in the session of its risk, and what is to be said of its outputs.

    Costs one gradient and up to five forward passes.
    """
    descent, loss = descend(surface), surface.loss
    assert loss is not None, "it was looked at"
    seen = _seen(surface, loss)
    found = Standing(
        descent.loss,
        None if surface.coupled else seen.sampling(),
        seen.accuracy(),
        seen.chance(),
        descent.gradient_norm,
        descent.decrease,
        seen.projections(),
    )
    return found, [PROBABILITIES] if seen.probabilities else []


def _seen(surface: RiskSurface, loss: Loss | JointLoss) -> _Seen:
    """What two passes show, over the samples of all ranks."""
    here = _Seen(loss)

    def look() -> None:
        for batch, outputs in surface.answers():
            here.add(batch, outputs)

    def look_again() -> _Seen:
        for _, outputs in surface.answers():
            here.project(outputs)
        return here

    reduction = surface.risk.reduction
    with surface.at({}):
        reduction.each(look)
    with surface.at({name: _changed(p) for name, p in surface.parameters.items()}):
        parts = reduction.each(look_again)
    first, *others = (part for part in parts if part.samples)
    first.loss = loss
    for other in others:
        first.join(other)
    return first


@torch.no_grad()
def _changed(p: Tensor) -> Tensor:
    """A share of every entry, in a pattern of no meaning."""
    places = torch.arange(p.numel(), dtype=torch.float32, device=p.device).reshape(p.shape)
    return p * (_CHANGED * torch.cos(_FREQUENCIES[0] * places)).to(p.dtype)


@final
@dataclass
class _Seen:
    """Sums over the samples, of what their outputs and targets tell."""

    loss: Loss | JointLoss
    samples: int = 0
    normaliser: float = 0.0
    probabilities: bool = field(init=False)
    moments: dict[str, Tensor] = field(default_factory=dict)  # sums of powers
    right: list[int] | None = field(default_factory=lambda: [0, 0])
    tally: Tensor | None = None
    even: bool = True  # whether samples count alike
    _tallied: bool = True

    def __post_init__(self) -> None:
        self.probabilities = isinstance(self.loss, CrossEntropy)

    def add(self, batch: Batch, outputs: Tensor) -> None:
        self.samples += batch.size
        loss, targets = self.loss, batch.targets
        if isinstance(loss, JointLoss):
            return
        normaliser = loss.normaliser(outputs, targets)
        share = (self.normaliser + normaliser) / self.samples
        alike = abs(normaliser - share * batch.size) <= 1e-9 * normaliser
        self.even = self.even and alike and loss.evenly(outputs, targets)
        self.normaliser += normaliser
        each = loss.each(outputs.double(), targets)
        if each is not None:
            self._sum("losses", each)
        right = loss.right(outputs, targets)
        if right is None or self.right is None:
            self.right = None
        else:
            self.right = [a + b for a, b in zip(self.right, right, strict=True)]
        self._count(loss, loss.tally(outputs, targets))
        if self.probabilities and isinstance(loss, CrossEntropy):
            rows = outputs.detach().movedim(loss.dim(outputs, targets), -1)
            off = (rows.sum(-1, dtype=torch.float64) - 1).abs().max()
            self.probabilities = bool((rows >= 0).all()) and float(off) <= _ONE

    def _count(self, loss: Loss, tally: Tensor | None) -> None:
        """Targets of another shape, or of none, leave the chance level unknown."""
        if tally is None or (self.tally is not None and self.tally.shape != tally.shape):
            self._tallied = False
        elif self._tallied:
            tally = tally.cpu()
            self.tally = tally if self.tally is None else loss.joined(self.tally, tally)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "loss": None}  # other ranks have their own

    def join(self, other: _Seen) -> None:
        """The samples of another rank too."""
        own, its = self.normaliser * other.samples, other.normaliser * self.samples
        self.even = self.even and other.even and abs(own - its) <= 1e-9 * abs(own)
        self.samples += other.samples
        self.normaliser += other.normaliser
        self.probabilities = self.probabilities and other.probabilities
        for name, sums in other.moments.items():
            self.moments[name] = self.moments[name] + sums if name in self.moments else sums
        if self.right is None or other.right is None:
            self.right = None
        else:
            self.right = [a + b for a, b in zip(self.right, other.right, strict=True)]
        if isinstance(self.loss, Loss):
            self._count(self.loss, other.tally if other._tallied else None)

    def project(self, outputs: Tensor) -> None:
        rows = outputs.detach().reshape(len(outputs), -1).double()
        places = torch.arange(rows.shape[1], dtype=torch.float64, device=rows.device)
        for frequency in _FREQUENCIES:
            self._sum(f"outputs {frequency}", rows @ torch.cos(frequency * (places + 1)))

    def _sum(self, name: str, values: Tensor) -> None:
        powers = torch.stack([values.double().pow(k).sum() for k in (1, 2, 3)]).cpu()
        self.moments[name] = self.moments.get(name, torch.zeros(3, dtype=torch.float64)) + powers

    def projections(self) -> tuple[float, ...]:
        """Mean, root mean square and mean cube over mean square: in whatever order samples came."""
        found = list[float]()
        for frequency in _FREQUENCIES:
            first, second, third = (self.moments[f"outputs {frequency}"] / self.samples).tolist()
            found += [first, sqrt(second), third / second if second > 0 else 0.0]
        return tuple(found) if all(map(isfinite, found)) else ()

    def accuracy(self) -> float | None:
        return self.right[0] / self.right[1] if self.right and self.right[1] else None

    def chance(self) -> float | None:
        if not self._tallied or self.tally is None or isinstance(self.loss, JointLoss):
            return None
        return self.loss.chance(self.tally) / divisor(self.loss, self.normaliser)

    def sampling(self) -> float | None:
        """The standard error of a mean over samples that count alike, each once."""
        mean = isinstance(self.loss, Loss) and self.loss.mean
        if not mean or not self.even or "losses" not in self.moments or self.samples < 2:
            return None
        first, second, _ = (self.moments["losses"] / self.samples).tolist()
        variance = max(0.0, second - first**2) * self.samples / (self.samples - 1)
        return sqrt(variance / self.samples) * self.samples / self.normaliser
