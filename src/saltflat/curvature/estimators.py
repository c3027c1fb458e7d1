"""Estimators: traces and diagonals from products with random vectors, with standard errors.

**The vectors.** Any v with E[v vᵀ] = 1 makes v ∘ (C v) unbiased for the diagonal of C. Random signs
have the least variance, but so few values that a handful of draws may all agree and be wrong: of
[[0, 1], [1, 0]] four draws agree once in eight times, on 2 or −2, with a spread of 0. So every
entry has a random magnitude too: its square is uniform on (0, 2), and the vector of a block of n
entries is given the length sqrt(n). Draws that agree then agree for a reason (a multiple of the
identity is still had without error), and the price is a variance of c²/3 on a diagonal entry c.

**The degrees of freedom.** The draws of a quadratic form are skewed where few directions dominate
it, up to the χ² of a single one, and their spread is then itself uncertain: for R draws of excess
kurtosis κ, Var(s²)/σ⁴ = κ/R + 2/(R−1). The degrees of freedom 2σ⁴/Var(s²) are stated for κ = 1,

    1 / (1/(2R) + 1/(R−1)),

about two thirds of R − 1. Student's t with these turns error/stderr into a normal score. Its root
mean square, from R = 4 on, is 0.9 to 1 for normal draws, at most 1.2 where two directions dominate
and 1.31 for one alone; with R − 1 it would be 1.44 for one, and 1.3 for two.

Quadratic forms of a layer's Hessian, estimated by products with random vectors.

For v made of the weight and random noise, ⟨v, H v⟩ restricted to a block has as its mean

    columns    w(j)ᵀ H_jj w(j)          v = W times a number an input unit
    rows       w_oᵀ H_oo w_o            v = W times a number an output unit
    flatness   Σ ⟨w_s, w_s'⟩ Tr H_ss'   v = L S with L Lᵀ = W Wᵀ and S all noise

Blocks of all layers are probed by the same products: what one layer has to do with another
averages out, and the standard errors say how far.

Random signs and numbers that belong to samples: the same on every device, whatever the chunks are.

Every sample of a draw has a key of its own; the k-th 64 signs of it are the bits of a hash of key
and k (SplitMix64, Steele, Lea and Flood, 2014).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product as product_of
from math import hypot, inf, nan, sqrt
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from saltflat.curvature.contractions import Form, Weight, divide
from saltflat.curvature.spread import Spread
from saltflat.errors import InvalidType, InvalidValue
from saltflat.geometry import Matrix
from saltflat.result import Detail, Value

Product = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
Shapes = Mapping[str, tuple[torch.Size, torch.device]]

# With fewer draws the spread says next to nothing of their error.
LEAST_DRAWS = 4


def degrees_of_freedom(draws: int, groups: int | None = None) -> float:
    """Those of a standard error from the spread of `draws`, or of their means in `groups`."""
    return 1 / (0.5 / draws + 1 / ((groups or draws) - 1))


def combined_degrees(parts: Iterable[tuple[float, float]]) -> float:
    """The degrees of freedom of a sum of independent parts (Welch–Satterthwaite), each given by
    its standard error and its own; inf where nothing is uncertain."""
    known = [(stderr, degrees) for stderr, degrees in parts if stderr > 0]
    if not known:
        return inf
    whole = hypot(*(stderr for stderr, _ in known))  # squares of small ones may underflow
    terms = sum((stderr / whole) ** 4 / degrees for stderr, degrees in known)
    return 1 / terms if terms > 0 else inf


def group_sizes(draws: int, groups: int) -> tuple[int, ...]:
    """How many draws each of the groups holds, draw k being in group k mod `groups`."""
    return tuple(len(range(k, draws, groups)) for k in range(groups))


def mean_error(draws: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The mean of stacked estimates and its standard error; each is a mean of so many draws.

    A mean of k draws has a k-th of one draw's variance, so its square counts k times.
    """
    draws = draws.double()
    each = torch.tensor(counts, dtype=draws.dtype, device=draws.device)
    each = each.reshape(-1, *[1] * (draws.ndim - 1))
    mean = (draws * each).sum(0) / sum(counts)
    variance = (each * (draws - mean).square()).sum(0) / (len(counts) - 1)
    return mean, (variance / sum(counts)).sqrt()


@final
@dataclass(slots=True)
class Quantity:
    """One curvature quantity of every parameter or layer, by parameter name.

    What was estimated has `errors`, the standard errors of its entries, NaN for parameters in
    `unknown`, which are neither proved nor estimated. If they were kept it has `draws` too:
    independent estimates stacked along the first dimension, as many for every parameter, whose mean
    is the value. Each may be the mean of several draws, of `sizes` in turn; without sizes it is
    one. `freedom` are degrees of freedom of single parameters' errors that come from elsewhere than
    the draws. `total_stderr` and `total_degrees` are those of the sum of all values. `rules` and
    `reasons` say what computed a value, and why that and not another. `spread` is how the samples'
    parts of what is exact vary, where that is known.
    """

    values: dict[str, Tensor]
    draws: dict[str, Tensor] = field(default_factory=dict)
    sizes: tuple[int, ...] = ()
    errors: dict[str, Tensor] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)
    freedom: dict[str, float] = field(default_factory=dict)
    total_stderr: float = 0.0
    total_degrees: float = inf
    rules: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    spread: Spread | None = None

    def add(self, other: Quantity) -> None:
        """The same of other parameters, whose noise comes from a generator of its own."""
        for part in ("values", "draws", "errors", "unknown", "freedom", "rules", "reasons"):
            getattr(self, part).update(getattr(other, part))
        self.sizes = self.sizes or other.sizes
        self.spread = self.spread or other.spread
        parts = [(each.total_stderr, each.total_degrees) for each in (self, other)]
        self.total_stderr, self.total_degrees = (
            hypot(*(e for e, _ in parts)),
            combined_degrees(parts),
        )

    @property
    def total(self) -> float:
        return sum(float(value.sum()) for value in self.values.values())

    def exact(self, names: Iterable[str]) -> bool:
        return not any(name in self.draws or name in self.errors for name in names)

    @property
    def counts(self) -> tuple[int, ...]:
        """How many draws each of the stacked estimates is the mean of."""
        return self.sizes or (1,) * (len(next(iter(self.draws.values()))) if self.draws else 0)

    @property
    def degrees(self) -> float:
        """The degrees of freedom of a standard error from the spread of the draws."""
        return degrees_of_freedom(sum(self.counts), len(self.counts)) if self.counts else inf

    def details(self, cast: Callable[[Tensor], Value]) -> dict[str, Detail[Value]]:
        """What is known of every parameter's value."""
        known = {}
        for name, value in self.values.items():
            exact = self.exact([name])
            stderr = 0.0 if exact else cast(self.errors[name])
            known_by = self.freedom.get(name, self.degrees)
            degrees = inf if exact or name in self.unknown else known_by
            rule, reason = self.rules[name], self.reasons[name]
            known[name] = Detail(cast(value), exact, stderr, rule, reason, degrees)
        return known

    def sums(self, weights: Mapping[str, Tensor | float]) -> dict[str, Tensor]:
        """Σ weights · draws of every parameter that was estimated, draw by draw."""
        return {
            name: (self.draws[name] * weight).reshape(len(self.counts), -1).sum(1)
            for name, weight in weights.items()
            if name in self.draws
        }

    def stderr(self, weights: Mapping[str, Tensor | float]) -> float:
        """The standard error of Σ weights · values; draws of different parameters are not
        independent, so they are added up draw by draw."""
        if not self.unknown.isdisjoint(weights):
            return nan
        sums = self.sums(weights)
        if not sums:
            return 0.0
        return float(mean_error(torch.stack(list(sums.values())).sum(0), self.counts)[1])

    def certainty(self, weights: Mapping[str, float]) -> dict[str, Any]:
        """How exact Σ weights · values is, as fields of a measurement."""
        exact = self.exact(weights)
        return {
            "exact": exact,
            "stderr": self.stderr(weights),
            "degrees": inf if exact else self.degrees,
            **self.sampled(weights),
        }

    def sampled(self, weights: Mapping[str, float]) -> dict[str, Any]:
        """The standard error of Σ weights · values as an estimate of what the population has, and
        the skewness of single samples, as fields of a measurement; none where they are not known.
        """
        known = self.spread is not None and self.spread.names >= weights.keys()
        if not known or not self.unknown.isdisjoint(weights):
            return {}
        assert self.spread is not None
        error = self.spread.stderr(weights)
        if error is None:
            return {}
        return {"sampling": error, "skewness": self.spread.skewness(weights)}


@final
@dataclass(slots=True)
class Draws:
    """Running mean and variance of independent draws (Welford), and of their sum over names.

    `groups` > 0 keeps the means of that many groups of draws, so that the error of anything made
    of them can be told.
    """

    groups: int = 0
    count: int = 0
    sums: dict[str, Tensor] = field(default_factory=dict)
    mean: dict[str, Tensor] = field(default_factory=dict)
    spread: dict[str, Tensor] = field(default_factory=dict)
    totals: list[float] = field(default_factory=list)

    def add(self, draw: Mapping[str, Tensor]) -> None:
        self.count += 1
        self.totals.append(sum(float(x.sum()) for x in draw.values()))
        for name, x in draw.items():
            if name not in self.mean:  # zeros of many groups of large blocks take their time
                self.mean[name], self.spread[name] = torch.zeros_like(x), torch.zeros_like(x)
                if self.groups:
                    self.sums[name] = x.new_zeros(self.groups, *x.shape)
            change = x - self.mean[name]
            self.mean[name].add_(change, alpha=1 / self.count)
            self.spread[name].addcmul_(change, change, value=1 - 1 / self.count)
            if self.groups:
                self.sums[name][(self.count - 1) % self.groups] += x

    def quantity(self) -> Quantity:
        pairs = self.count * (self.count - 1)
        totals = torch.tensor(self.totals, dtype=torch.float64)
        sizes = group_sizes(self.count, self.groups or self.count)
        each = torch.tensor(sizes)
        return Quantity(
            self.mean,
            {n: s / each.reshape(-1, *[1] * (s.ndim - 1)).to(s) for n, s in self.sums.items()},
            sizes,
            {name: (s / pairs).sqrt() for name, s in self.spread.items()},
            total_stderr=float(totals.std() / sqrt(self.count)),
            total_degrees=degrees_of_freedom(self.count),
        )


def mixed(*parts: int) -> int:
    """One seed from several integers, the same on every machine."""
    words = [part % 2**64 for part in parts]
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0] >> 1)


def noise(shape: torch.Size, device: torch.device, generator: torch.Generator) -> Tensor:
    """A random v in float64 with E[v vᵀ] = 1, of signs and magnitudes; Σ v² is the size."""
    squares = torch.rand(shape, generator=generator, dtype=torch.float64) * 4 - 2
    v = squares.sign() * squares.abs().sqrt()
    return (v * (v.numel() / v.square().sum()).sqrt()).to(device)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class OwnNoise:
    """A fixed number of draws with noise of every sample's own (see `sketch`)."""

    draws: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        if not _is_integer(self.draws) or self.draws < LEAST_DRAWS:
            raise InvalidValue(
                f"draws must be an integer of at least {LEAST_DRAWS}. Got {self.draws!r}."
            )
        if not _is_integer(self.seed):
            raise InvalidValue(f"seed must be an integer. Got {self.seed!r}.")


@final
@dataclass(frozen=True, slots=True)
class PropagatedCurvature(OwnNoise):
    """So many draws of propagated curvature: two backward passes each, nothing twice.

    On few samples there are more of them, until samples times draws are 64: fewer signs may all
    agree by chance, which hides the error.

    Examples
    --------
    >>> import torch, saltflat as sf
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Linear(9, 9), torch.nn.Tanh(), torch.nn.Linear(9, 9))
    >>> data = torch.randn(8, 9), torch.arange(8)
    >>> trace = sf.trace(model, data, estimator=sf.PropagatedCurvature(draws=8))
    >>> trace.details["0.weight"].rule, trace.details["2.weight"].exact
    ('propagated', True)
    """


@final
@dataclass(frozen=True, slots=True)
class ActivationProbes(OwnNoise):
    """So many probes of the activations: one pass backwards through a gradient each.

    Of weights that are used several times, propagated curvature is drawn. On few samples there are
    more draws, until samples times draws are 64.

    Examples
    --------
    >>> import torch, saltflat as sf
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Linear(9, 9), torch.nn.Tanh(), torch.nn.Linear(9, 9))
    >>> data = torch.randn(8, 9), torch.arange(8)
    >>> trace = sf.trace(model, data, estimator=sf.ActivationProbes(draws=8))
    >>> trace.details["0.weight"].rule
    'activation probes'
    """


@final
@dataclass(frozen=True, slots=True)
class Hutchinson:
    """v ∘ (C v) for random v: every block's trace and diagonal from the same products.

    Examples
    --------
    >>> import torch, saltflat as sf
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Linear(90, 90), torch.nn.Tanh())
    >>> x, y = torch.randn(8, 90), torch.arange(8)
    >>> trace = sf.trace(model, (x, y), estimator=sf.Hutchinson(probes=50, seed=1))
    >>> trace.details["0.weight"].exact, trace.details["0.weight"].rule
    (False, 'probes')
    """

    probes: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        if not _is_integer(self.probes) or self.probes < LEAST_DRAWS:
            raise InvalidValue(
                f"probes must be an integer of at least {LEAST_DRAWS}: the samples share the noise "
                "of a probe, so the standard error comes from the spread of the probes alone, and "
                f"from fewer it would not hold. Got {self.probes!r}."
            )
        if not _is_integer(self.seed):
            raise InvalidValue(f"seed must be an integer. Got {self.seed!r}.")

    def estimate(
        self, product: Product, shapes: Shapes, kinds: Collection[str], groups: int = 0
    ) -> dict[str, Quantity]:
        """The wanted kinds, "trace" and "diagonal", from the same products.

        As many probes as there are entries would give them all, so then they do.
        """
        if sum(shape.numel() for shape, _ in shapes.values()) <= self.probes:
            return self._written_out(product, shapes, kinds)
        generator = torch.Generator().manual_seed(self.seed)
        draws = {kind: Draws(min(groups, self.probes)) for kind in kinds}
        for _ in range(self.probes):
            v = {name: noise(*where, generator) for name, where in shapes.items()}
            cv = product(v)
            entries = {name: v[name] * cv[name] for name in shapes}
            for kind, each in draws.items():
                traced = kind == "trace"
                each.add({n: x.sum() for n, x in entries.items()} if traced else entries)
        return {kind: each.quantity() for kind, each in draws.items()}

    def _written_out(
        self, product: Product, shapes: Shapes, kinds: Collection[str]
    ) -> dict[str, Quantity]:
        zeros = {n: torch.zeros(s, device=d, dtype=torch.float64) for n, (s, d) in shapes.items()}
        diagonal = {name: torch.zeros_like(z) for name, z in zeros.items()}
        for name, entries in diagonal.items():
            for i in range(entries.numel()):
                unit = torch.zeros_like(entries).flatten()
                unit[i] = 1.0
                image = product(zeros | {name: unit.reshape(entries.shape)})[name]
                entries.view(-1)[i] = image.reshape(-1)[i]
        values = {"diagonal": diagonal, "trace": {n: d.sum() for n, d in diagonal.items()}}
        return {kind: Quantity(values[kind]) for kind in kinds}


def estimate_form(
    product: Product,
    weights: Mapping[str, Weight],
    form: Form,
    estimator: Hutchinson,
    groups: int,
    in_full: bool,
) -> Quantity:
    """One form of every weight; `in_full` where that costs no more products than probes."""
    if in_full:
        return _written_out(product, weights, form)
    generator = torch.Generator().manual_seed(estimator.seed)
    draws = Draws(groups)
    for _ in range(estimator.probes):
        v = {name: _vector(weight, form, generator) for name, weight in weights.items()}
        hv = product(v)
        draws.add({n: reduce_entries(v[n] * hv[n], w.matrix, form) for n, w in weights.items()})
    return draws.quantity()


def _written_out(product: Product, weights: Mapping[str, Weight], form: Form) -> Quantity:
    zeros = {n: torch.zeros_like(w.values, dtype=torch.float64) for n, w in weights.items()}
    values = {}
    for name, weight in weights.items():
        values[name] = reduce_entries(zeros[name], weight.matrix, form)
        for at, left, right in _units(weight, form):
            values[name][at] += (left * product(zeros | {name: right})[name]).sum()
    return Quantity(values)


def _units(weight: Weight, form: Form) -> Iterator[tuple[int | tuple[()], Tensor, Tensor]]:
    """(place in the result, u, v) such that the sums of ⟨u, H v⟩ are the form."""
    values, matrix = weight.values.double(), weight.matrix
    w = matrix.grouped(values)
    groups, outputs, inputs, kernel = w.shape
    if form != "flatness":
        side = (groups, 1, inputs, 1) if form == "columns" else (groups, outputs, 1, 1)
        count = torch.Size(side).numel()
        unit = torch.arange(count, device=w.device).reshape(side)
        for k in range(count):
            part = matrix.ungrouped(w.where(unit == k, 0.0), values.shape)
            yield k, part, part
        return
    spread = _scale(weight)
    scale, scaled = spread[:, 0, :, 0], (w * spread).flatten(-2)
    square = scaled @ scaled.mT
    for g, o, i, k in product_of(*map(range, (groups, outputs, inputs, kernel))):
        if scale[g, i] > 0:
            left, right = torch.zeros_like(w), torch.zeros_like(w)
            left[g, :, i, k], right[g, o, i, k] = square[g, :, o] / scale[g, i], 1 / scale[g, i]
            yield (), matrix.ungrouped(left, values.shape), matrix.ungrouped(right, values.shape)


def reduce_entries(entries: Tensor, matrix: Matrix, form: Form) -> Tensor:
    """The entries of a weight's shape added up to that of a form."""
    if form == "flatness":
        return entries.sum()
    return matrix.columns(entries) if form == "columns" else matrix.rows(entries)


def _vector(weight: Weight, form: Form, generator: torch.Generator) -> Tensor:
    values, matrix = weight.values.double(), weight.matrix
    shape = matrix.grouped(values).shape  # groups, outputs, inputs, kernel
    if form == "flatness":
        return _mixed(weight, generator)
    side = (shape[0], 1, shape[2], 1) if form == "columns" else (shape[0], shape[1], 1, 1)
    each = noise(torch.Size(side), values.device, generator)
    return matrix.ungrouped(matrix.grouped(values) * each, values.shape)


def _mixed(weight: Weight, generator: torch.Generator) -> Tensor:
    """L S for W Wᵀ = L Lᵀ, group by group; features are divided by their scale."""
    values, matrix = weight.values.double(), weight.matrix
    scale = _scale(weight)
    w = matrix.grouped(values) * scale
    upper = torch.linalg.qr(w.flatten(-2).mT, mode="r").R
    size = torch.Size((len(w), upper.shape[1], w.shape[2:].numel()))
    mixed = (upper.mT @ noise(size, w.device, generator)).reshape(w.shape)
    return matrix.ungrouped(divide(mixed, scale), values.shape)


def _scale(weight: Weight) -> Tensor:
    """That of the features, (groups, 1, inputs of a group, 1); ones where there is none."""
    like = weight.matrix.grouped(weight.values)[:, :1, :, :1].double()
    return (
        torch.ones_like(like) if weight.scale is None else weight.scale.double().reshape(like.shape)
    )


Estimator = Hutchinson | OwnNoise


def check_estimator(estimator: object) -> None:
    if estimator is not None and not isinstance(estimator, Estimator):
        raise InvalidType(
            "estimator must be PropagatedCurvature(…), ActivationProbes(…) or Hutchinson(…). Got "
            f"{type(estimator).__name__}."
        )


def _signed(value: int) -> int:
    """An unsigned 64-bit number as torch writes it."""
    return value - 2**64 if value >= 2**63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FIRST, _SECOND = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)


def _shifted(z: Tensor, by: int) -> Tensor:
    """z ^ (z >> by), shifting in zeros."""
    return z ^ ((z >> by) & ((1 << (64 - by)) - 1))


def _hashed(z: Tensor) -> Tensor:
    z = _shifted(z, 30) * _FIRST
    z = _shifted(z, 27) * _SECOND
    return _shifted(z, 31)


def uniforms(samples: range, count: int, *key: int) -> Tensor:
    """Numbers from [0, 1) that belong to samples, so many to each: (samples, count), float64."""
    index = torch.arange(samples.start, samples.stop)
    keys = _hashed((index + 1) * _GOLDEN + mixed(*key))
    hashes = _hashed(keys[:, None] + torch.arange(1, count + 1) * _GOLDEN)
    return ((hashes >> 11) & ((1 << 53) - 1)).double() * 2.0**-53


@final
class Signs:
    """Signs for the samples from `first` of a batch on; every call gives new ones."""

    def __init__(self, like: Tensor, samples: int, first: int, *key: int) -> None:
        index = torch.arange(first, first + samples, device=like.device)
        self.keys = _hashed((index + 1) * _GOLDEN + mixed(*key))
        self.like, self.words = like, 0
        self._bits = torch.empty(samples, 0, dtype=torch.uint8, device=like.device)

    def __call__(self, shape: torch.Size) -> Tensor:
        """±1, the entries dealt to the samples in turn, so many consecutive ones to each."""
        each = -(-shape.numel() // len(self.keys))
        if self._bits.shape[1] < each:
            self._bits = self._more(each)
        chosen, self._bits = self._bits[:, :each], self._bits[:, each:]
        flat = chosen.reshape(-1)[: shape.numel()].reshape(shape)
        return flat.to(self.like.dtype).mul_(-2).add_(1)

    def _more(self, least: int) -> Tensor:
        """Bits for every sample; ever more at a time, as small portions cost as much."""
        words = max(-(-least // 64), min(self.words, _PORTION))
        count = torch.arange(self.words + 1, self.words + 1 + words, device=self.keys.device)
        self.words += words
        hashes = _hashed(self.keys[:, None] + count * _GOLDEN)
        places = torch.arange(8, dtype=torch.uint8, device=hashes.device)
        bits = (hashes.view(torch.uint8)[..., None] >> places) & 1
        return bits.reshape(len(self.keys), -1)


_PORTION = 1 << 15  # words, of 64 bits
