"""Which of two models is flatter, or why that cannot be said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import hypot, inf
from typing import TYPE_CHECKING, Literal, final

import torch

from saltflat.measurement import EVERY_RESCALING, Measurement
from saltflat.printed import Told

if TYPE_CHECKING:
    from saltflat.report.provenance import Provenance
    from saltflat.report.report import Report
    from saltflat.report.standing import Standing

Word = Literal["flatter", "not distinguishable", "same function", "not comparable"]

# Standard errors by which two values must differ.
_ERRORS = 2.0
# What a supremum that was searched for may miss of it, relative to its value.
_SEARCHED = 0.01
# A loss that is this many times another is another loss level.
_LEVEL = 2.0

# What must be equal for numbers to be comparable, and how to say that it is not.
SAME = {
    "data_hash": "the data differ",
    "whole": "the number of samples differs",
    "loss": "the loss differs",
    "curvature": "the curvature differs",
}


@final
@dataclass(frozen=True, repr=False)
class Verdict(Told):
    """What one measure says of two models.

    "flatter" needs the same data, loss, settings and kind of model; two minima, or nearly so;
    losses that do not differ by more than a factor of 2, because curvature falls with the loss; and
    values that differ by more than 2 standard errors, of the numbers and, where it is known, of the
    samples. The reason says what is wanting, or what else is to be said. "same function" are models
    with the same outputs, also after every parameter is changed by the same share of itself: what
    differs between them is the scale of their parameters.

    Errors of the samples are taken as if each model had samples of its own. Both have the same,
    which as a rule move their values alike, so that this errs toward "not distinguishable".

    Examples
    --------
    >>> import torch, saltflat as sf
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    >>> x, y = torch.randn(8, 3), torch.arange(8) % 2
    >>> twin = sf.symmetries(model, x).random(seed=0)(model)
    >>> both = sf.compare({"a": model, "b": twin}, (x, y), measures=["hessian_trace"])
    >>> both.verdict("hessian_trace", "a", "b").word
    'same function'
    """

    measure: str
    first: str
    second: str
    word: Word
    flatter: str = ""
    reason: str = ""

    def __str__(self) -> str:
        if self.word == "flatter":
            other = self.second if self.flatter == self.first else self.first
            text = f"{self.flatter} is flatter than {other}"
        else:
            text = f"{self.first} and {self.second}: {self.word}"
        return f"{self.measure}: {text}" + (f" ({self.reason})" if self.reason else "")


def judged(measure: str, names: tuple[str, str], reports: tuple[Report, Report]) -> Verdict:
    """What a measure says of two models, by their reports."""
    if missing := [n for n, r in zip(names, reports, strict=True) if measure not in r]:
        reason = f"{measure} of {' and '.join(missing)} was not measured"
        return Verdict(measure, *names, "not comparable", reason=reason)
    if reason := _conditions(measure, reports):
        return Verdict(measure, *names, "not comparable", reason=reason)
    if _same_function(reports):
        return Verdict(measure, *names, "same function")
    if reason := _models(names, reports):
        return Verdict(measure, *names, "not comparable", reason=reason)
    one, two = (report[measure] for report in reports)
    digits = 10 * max(map(_digits, reports))
    if not abs(one.value - two.value) > _room(one, two, digits):  # also where one is NaN
        return Verdict(measure, *names, "not distinguishable")
    flatter = names[0] if one.value < two.value else names[1]
    doubts = []
    if None in (one.sampling, two.sampling):
        doubts.append("on these samples; for others it is not known")
    if _unlike_parts(*(report.provenance for report in reports)):
        doubts.append("on random parts of as many samples, taken for the same data")
    if EVERY_RESCALING - one.invariant_to:
        doubts.append("a rescaling that keeps the function could reverse this")
    return Verdict(measure, *names, "flatter", flatter, "; ".join(doubts))


def _conditions(measure: str, reports: tuple[Report, Report]) -> str:
    """Why numbers that were measured in these ways mean different things, if they do."""
    one, two = (report.provenance for report in reports)
    for key, text in SAME.items():
        if not alike(key, one, two):
            return text
    first, second = (repr(dict(report[measure].settings)) for report in reports)
    return "" if first == second else f"the settings of {measure} differ"


def alike(key: str, one: Provenance, two: Provenance) -> bool:
    """Whether two reports are of the same data, loss, ….

    Data of other types are the same if they are so in float32; of random parts that are unlike in
    size no hash can tell. A user's losses of one name are the same if their code is; other versions
    of Python cannot tell, nor files without a hash of it.
    """
    same = bool(getattr(one, key) == getattr(two, key))
    if key == "data_hash" and not same:
        if _unlike_parts(one, two):
            return True
        retyped = one.data_types != two.data_types
        return retyped and one.values_hash == two.values_hash != ""
    if key == "loss" and same and one.loss_code and two.loss_code:
        pythons = (p.versions.get("python", "").split(".")[:2] for p in (one, two))
        return one.loss_code == two.loss_code or next(pythons) != next(pythons)
    return same


def _unlike_parts(one: Provenance, two: Provenance) -> bool:
    """Whether one was measured on a random part of the samples, and the other on more or fewer."""
    return one.samples != two.samples and bool(one.population or two.population)


def _models(names: tuple[str, str], reports: tuple[Report, Report]) -> str:
    """Why the models themselves are not to be compared, if they are not."""
    one, two = (report.provenance for report in reports)
    if (one.model, one.parameters) != (two.model, two.parameters):
        kinds = (f"{p.model} of {p.parameters:,} parameters" for p in (one, two))
        return f"the architecture differs: {' and '.join(kinds)}"
    if one.measured != two.measured and one.measured and two.measured:
        return "other parameters were measured"
    stands = [report.standing for report in reports]
    first, second = stands
    if first is None or second is None:
        return ""
    if away := without_minimum(dict(zip(names, stands, strict=True))):
        return "; ".join(f"{phrase}: {' and '.join(who)}" for phrase, who in away.items())
    apart = abs(first.loss - second.loss)
    error = hypot(first.sampling or 0.0, second.sampling or 0.0)
    low, high = sorted((abs(first.loss), abs(second.loss)))
    if high > _LEVEL * low and apart > _ERRORS * error:
        return f"the loss level differs: {first.loss:.3g} and {second.loss:.3g}"
    return ""


def without_minimum(stands: Mapping[str, Standing | None]) -> dict[str, list[str]]:
    """Those that are no minimum or not shown to be one, by what each is called."""
    away: dict[str, list[str]] = {}
    for name, stand in stands.items():
        if stand is not None and not stand.minimum:
            away.setdefault(stand.phrase, []).append(name)
    return away


def _same_function(reports: tuple[Report, Report]) -> bool:
    """Whether outputs are the same but for rounding."""
    one, two = (report.standing for report in reports)
    digits = max(map(_digits, reports))
    return one is not None and two is not None and one.same_function(two, digits)


def _digits(report: Report) -> float:
    """The relative size of rounding that two ways to the same outputs may leave: ε^(3/4)."""
    eps: float = torch.finfo(getattr(torch, report.provenance.dtype)).eps
    return float(eps**0.75)


def _room(one: Measurement, two: Measurement, digits: float) -> float:
    """How far two values may be apart and still be taken for equal."""
    size = max(abs(one.value), abs(two.value))
    stated = _ERRORS * hypot(one.stderr, two.stderr) + one.gap + two.gap
    drawn = _ERRORS * hypot(one.sampling or 0.0, two.sampling or 0.0)
    searched = _SEARCHED * size if "lower" in (one.bound, two.bound) else 0.0
    room = max(stated, drawn) + searched + digits * size
    return room if room == room else inf
