"""Measurement: one measure of one model, with how exact it is and what it is invariant to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from math import inf, isfinite
from typing import Any, ClassVar, Literal, final, get_args

import numpy as np
from torch import Tensor

from saltflat.bibliography import bibtex
from saltflat.errors import InvalidValue, NotMeasured, listed, nearest
from saltflat.printed import Told

Bound = Literal["lower", "upper"]
Symmetry = Literal["layer", "neuron", "batchnorm", "attention"]
EVERY_RESCALING: frozenset[Symmetry] = frozenset(get_args(Symmetry))


class Named(dict[str, Any]):
    """A mapping `what` that answers a name it does not have with those that it has."""

    # What it holds comes first, as in a dict: `dataclasses.asdict` makes another one by that alone.
    def __init__(self, entries: Any = (), what: str = "This") -> None:
        super().__init__(entries)
        self.what = what

    def __missing__(self, name: object) -> Any:
        raise unknown(self.what, name, self)


def unknown(what: str, name: object, known: Iterable[object]) -> NotMeasured:
    """The error for a name that `what` does not have."""
    names = [str(each) for each in known]
    return NotMeasured(
        f"{what} has no {name!r}. {nearest(str(name), names) if names else 'It is empty.'}"
    )


@final
@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Measurement(Told):
    """The value of a measure. Two are equal if all they hold is, tensors by their entries.

    Attributes
    ----------
    value : the number; views of it by parameter, layer or neuron where the measure has them.
    neurons : which units `by_neuron` is of, e.g. "input units", where the measure says so.
    max_over : what `max` is the largest of, "neurons" only where there are values of neurons.
    exact : True if nothing was sampled: equal to the definition up to rounding and `gap`.
    stderr : standard error of `value`, 0.0 if exact.
    degrees : degrees of freedom of `stderr`, for Student's t; inf if exact.
    sampling : standard error of `value` as an estimate for the population that the samples come
        from, taken as independent draws; None where it is not known. Beside `stderr`, which is of
        the value on these samples. Of fewer than some hundred samples, ± 2 of it hold less often
        than 95 %, because single samples are skewed.
    skewness : that of the single samples' parts of the value, to first order; None where `sampling`
        is.
    interval : holds the value on all samples with a probability of 95 %, where it was measured on
        some of them (`samples="auto"` of `measure`); None where it was measured on all. `stderr` is
        then the standard error of that, so that nothing is exact.
    gap : a bound on the distance of `value` to the minimum that defines it, 0.0 for closed forms.
    bound : "lower" for a supremum that was searched for, which is at least `value`; "upper" for a
        minimum over estimated curvature, which is at most what `value` ± `stderr` estimates.
    invariant_to : the kinds of rescaling that leave the measure as it is.
    settings : what the measure was computed with (δ, ρ, p, …).
    references : keys of the papers that the measure is from, which `cite` gives in BibTeX.
    details : what else the measure found, e.g. the optimal α of minimum sharpness.

    Examples
    --------
    >>> import saltflat as sf
    >>> print(sf.Measurement(name="mine", value=2.0, exact=False, stderr=0.25))
    mine = 2 (± 0.25)
    """

    name: str
    value: float
    exact: bool
    stderr: float = 0.0
    degrees: float = inf
    gap: float = 0.0
    bound: Bound | None = None
    invariant_to: frozenset[Symmetry] = frozenset()
    settings: Mapping[str, Any] = field(default_factory=dict)
    by_parameter: Mapping[str, float] = field(default_factory=dict)
    by_layer: Mapping[str, float] = field(default_factory=dict)
    by_neuron: Mapping[str, Tensor] = field(default_factory=dict)
    neurons: str = ""
    max_over: Literal["neurons", "layers"] = "neurons"
    details: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    sampling: float | None = None
    references: tuple[str, ...] = ()
    skewness: float | None = None
    interval: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        for view in ("by_parameter", "by_layer", "by_neuron", "details"):
            named = Named(getattr(self, view), f"{self.name}.{view}")
            object.__setattr__(self, view, named)

    #: What files say beside the fields, of which it follows.
    derived: ClassVar[tuple[str, ...]] = ("sign_known",)

    @property
    def sign_known(self) -> bool:
        """Whether the 95 % interval around the value leaves out 0, or there is none."""
        if self.interval is not None:
            low, high = self.interval
            return not low <= 0 <= high
        return sign_known(self.value, self.stderr, self.degrees)

    @property
    def max(self) -> float:
        """The largest value of a neuron (ρ^max), or of a layer (κ^max, κ_τ^max, …)."""
        neurons = self.by_neuron and self.max_over == "neurons"
        values = self.by_layer_max if neurons else self.by_layer
        if not values:
            raise InvalidValue(f"{self.name} has no values by layer to take the largest of.")
        return max(values.values())

    @property
    def by_layer_max(self) -> dict[str, float]:
        """The largest value of a neuron in every layer: ρ^l."""
        return {layer: float(values.max()) for layer, values in self.by_neuron.items()}

    @property
    def lower_bound(self) -> bool:
        """Whether the measure is a supremum that was searched for."""
        return self.bound == "lower"

    @property
    def certainty(self) -> str:
        """`exact`, `± 0.03`, `≥` for a searched supremum, `≤` for an upper bound, or two of them:
        with `≤`, the measure is at most the number that the value ± its error estimates. Of a value
        on some of the samples, its interval."""
        if self.interval is not None:
            low, high = self.interval
            return f"{low:.4g} to {high:.4g}"
        error = with_error(self.value, self.stderr, self.degrees)
        if self.bound is not None:
            words = "≥, searched" if self.bound == "lower" else "≤"
            return words + (f", {error}" if self.stderr else "")
        if not self.exact:
            return error
        if not isfinite(self.gap):
            return "not converged"
        small = self.gap <= 1e-9 * abs(self.value)
        return "exact" if small else f"exact to {self.gap:.1g}"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Measurement):
            return NotImplemented
        return all(_same(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))

    __hash__ = None  # type: ignore[assignment]

    def __float__(self) -> float:
        return self.value

    def __format__(self, spec: str) -> str:
        """The value by a number's format, `f"{m:.3f}"`; without one, what is printed."""
        return format(self.value, spec) if spec else str(self)

    def __str__(self) -> str:
        others = f"; {self.sampled} for the population" if self.sampling is not None else ""
        return f"{self.name} = {self.value:.6g} ({self.certainty}{others})"

    @property
    def sampled(self) -> str:
        """`± 4 %`, the sampling error as a share of the value; empty if it is not known."""
        if self.sampling is None:
            return ""
        return f"± {100 * self.sampling / abs(self.value):.2g} %" if self.value else "± 0"

    def cite(self) -> str:
        """BibTeX of the papers that the measure is from."""
        return bibtex(*self.references)


def sign_known(value: float, stderr: float, degrees: float) -> bool:
    """Whether the 95 % interval around an estimate leaves out 0; True where no error is known."""
    from scipy.stats import t

    if not stderr > 0:
        return True
    reach = float(t.ppf(0.975, degrees)) if degrees < inf else 1.96
    return abs(value) > stderr * (reach if isfinite(reach) else 2.0)


def with_error(value: float, stderr: float, degrees: float) -> str:
    """`± 0.03` of an estimate, and a word where not even its sign is known."""
    return f"± {stderr:.2g}" + ("" if sign_known(value, stderr, degrees) else ", sign unknown")


_MANY_PROBES = 100_000


def shortfall(
    tolerance: float, errors: Mapping[str, tuple[float, float]], why: str, probes: int
) -> str:
    """What is to be said of values whose standard errors the tolerance does not allow, if any.

    `errors` are values and their standard errors by name, `why` what is known of their blocks,
    `probes` how many there were if all blocks are Hutchinson's, else 0.
    """
    shares = {n: s / abs(v) if v else inf for n, (v, s) in errors.items() if s > 0}
    far = sorted((n for n in shares if shares[n] > tolerance), key=lambda n: -shares[n])
    if not far and not why:
        return ""
    told = listed(f"{_percent(shares[name])} of {name}" for name in far)
    told = f": standard errors are {told}" if told else ""
    if not why and probes and far:
        more = float(f"{probes * (shares[far[0]] / tolerance) ** 2:.1e}")
        enough = f"About {more:,.0f}" if more <= _MANY_PROBES else f"More than {_MANY_PROBES:,}"
        why = (
            f"Of the {probes} probes of Hutchinson there are as many at every tolerance. {enough} "
            "should do: estimator=saltflat.Hutchinson(probes=…)."
        )
    why = why or (
        "More draws (estimator=) make them smaller, and so does a smaller tolerance= where draws "
        "are not Hutchinson's."
    )
    return f"The tolerance of {_percent(tolerance)} was NOT reached{told}. {why}"


def _percent(share: float) -> str:
    return f"{100 * share:,.0f} %" if share >= 0.1 else f"{100 * share:.2g} %"


def _same(a: Any, b: Any) -> bool:
    """Equal entry by entry; a number that is NaN equals itself."""
    a, b = (v.tolist() if isinstance(v, Tensor | np.ndarray) else v for v in (a, b))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b) or (a != a and b != b)
