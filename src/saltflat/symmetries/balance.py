"""The least trace of the Hessian over all rescalings of a group.

An entry of class c is multiplied by exp(C_c·u), so its diagonal entry of the Hessian is divided by
the square of that: with the mass A_c = Σ diag H over the entries of a class, minimise

    Σ_c A_c exp(−2 C_c·u),

which is convex in u (Ibayashi et al. 2021 for layers; matrix balancing for units). Parameters that
the group does not move add a constant.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from inspect import signature
from math import inf
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from saltflat.checks import check_options
from saltflat.convex import Minimum, minimise
from saltflat.curvature import diagonal as curvature_diagonal
from saltflat.errors import NegativeCurvature
from saltflat.symmetries.element import Element, Exponents

if TYPE_CHECKING:
    from saltflat.symmetries.group import Group

Floats = NDArray[np.float64]

# Estimates below zero by so many standard errors, of many degrees of freedom, are so for real.
_SURE = 4.0
# Curvature may come out below zero by rounding; by more than this share of the largest it is real.
_ROUNDING = 1e-10


@final
@dataclass(frozen=True)
class Least:
    """The least trace over a group.

    Attributes
    ----------
    value : the infimum, at most `gap` too large; of estimates, the trace where it was chosen.
    element : the rescaling that attains it; where it is not attained, the one that does so for
        what does not vanish.
    by_parameter : what each parameter's curvature is there.
    slopes : the derivative of `value` in every parameter's diagonal (of its shape, or a number).
    vanishing : parameters whose curvature can be driven to zero, and how much of it at the start.
    negative : parameters with estimates below zero, by no more than their errors allow.
    """

    value: float
    gap: float
    element: Element
    by_parameter: Mapping[str, float]
    slopes: Mapping[str, Tensor | float]
    vanishing: Mapping[str, float]
    negative: tuple[str, ...] = ()


def uniform_parameters(group: Group, names: Mapping[str, object]) -> set[str]:
    """The parameters that every element multiplies by one number: a trace is all they need."""
    exponents = group.exponents()
    moved = set(exponents.names)
    return {name for name in names if name not in moved or exponents.factors.uniform(name)}


def least_trace(
    group: Group,
    curvature: Mapping[str, Tensor],
    noise: Mapping[str, Tensor] | Floats | None = None,
    degrees: float = inf,
) -> Least:
    """Minimise over the group; `curvature` holds diagonals, or traces of uniform parameters.

    `noise` holds the standard errors of those that are estimates, of so many `degrees` of freedom:
    by entry, if noise is independent between entries, or by class as `class_masses` are. What is
    below zero by more than four of them is refused; for Student's t, by what is as unlikely that
    any of the masses is. Of the rest, `noisy_scaling`.
    """
    masses = _Masses.of(group, curvature, {} if noise is None else noise)
    return masses.least(group, masses.refuse_negative(degrees))


def noisy_scaling(
    group: Group, curvature: Mapping[str, Tensor], masses: Floats, errors: Floats
) -> Least:
    """The rescaling that is least where a mass A with the standard error s counts as
    sqrt(A² + s²): one that is near nothing, or below it, is not blown up for a little of another.

    `masses` and `errors` are by class. `value` is the trace there, in which masses are what they
    are, so that it may be negative.
    """
    return replace(_Masses.of(group, curvature, errors), masses=masses).least(group, ())


def class_masses(
    group: Group, curvature: Mapping[str, Tensor], draws: Mapping[str, Tensor]
) -> Floats:
    """Σ diag H over the entries of every class, draw by draw; without draws, what is known."""
    exponents = group.exponents()
    count = len(next(iter(draws.values())))
    masses = np.zeros((count, exponents.matrix.shape[0]))
    for name, known in curvature.items():
        if name in exponents.classes:
            for k, row in enumerate(masses):
                where, each = _pairs(
                    exponents.classes[name], draws[name][k] if name in draws else known
                )
                row += np.bincount(where, each, len(row))
    return masses


@final
@dataclass(frozen=True)
class _Masses:
    """Curvature by class of the group, with standard errors, and what the group does not move."""

    masses: Floats
    errors: Floats
    exponents: Exponents
    moved: Mapping[str, Tensor]
    fixed: Mapping[str, float]
    names: tuple[str, ...]  # of both, in order

    @classmethod
    def of(
        cls, group: Group, curvature: Mapping[str, Tensor], noise: Mapping[str, Tensor] | Floats
    ) -> _Masses:
        exponents = group.exponents()
        moved = {n: v.double() for n, v in curvature.items() if n in exponents.classes}
        fixed = {n: float(v.sum()) for n, v in curvature.items() if n not in exponents.classes}
        masses, variance = np.zeros((2, exponents.matrix.shape[0]))
        for name, values in moved.items():
            np.add.at(masses, *_pairs(exponents.classes[name], values))
            if isinstance(noise, Mapping) and name in noise:
                where, each = _pairs(exponents.classes[name], noise[name].double())
                np.add.at(variance, where, each**2)
        errors = np.sqrt(variance) if isinstance(noise, Mapping) else noise
        return cls(masses, errors, exponents, moved, fixed, tuple(curvature))

    def refuse_negative(self, degrees: float) -> tuple[str, ...]:
        """Refuse what is negative beyond rounding and noise; the names of what is within noise."""
        from scipy.special import ndtr, stdtrit

        rounding = _ROUNDING * np.abs(self.masses).max(initial=0.0)
        limit = _SURE
        if degrees < inf:
            unlikely = ndtr(-_SURE) / max(1, np.count_nonzero(self.errors))
            limit = -float(stdtrit(degrees, unlikely))
        bad = self.masses < -rounding - limit * self.errors
        if not bad.any():
            return tuple(self._named(self.masses < -rounding))
        names = self._named(bad)
        listed = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
        raise NegativeCurvature(
            f"The curvature of {listed} is negative, so the least trace may be −∞. The "
            "Gauss–Newton matrix has none: curvature='ggn'."
        )

    def _named(self, which: NDArray[np.bool_]) -> list[str]:
        return [n for n in self.moved if which[self.exponents.kinds(n)].any()]

    def least(self, group: Group, negative: tuple[str, ...]) -> Least:
        noisy = np.hypot(self.masses, self.errors)
        positive = np.where(self.errors > 0, noisy, self.masses.clip(min=0))
        minimum = minimise(positive, self.exponents.matrix)
        powers = np.exp(-2 * (self.exponents.matrix @ minimum.point))
        gone = _gone(minimum, len(positive))
        powers[gone] = 0.0
        slopes: dict[str, Tensor | float] = dict.fromkeys(self.fixed, 1.0)
        by_parameter, vanishing = dict(self.fixed), {}
        for name, values in self.moved.items():
            classes, each = _pairs(self.exponents.classes[name], values)
            by_parameter[name] = float((powers[classes] * each).sum())
            lost = float(each[gone[classes]].sum())
            if lost > 0:
                vanishing[name] = lost
            shaped = torch.from_numpy(powers[classes])
            slopes[name] = float(shaped[0]) if values.ndim == 0 else shaped.reshape(values.shape)
        exact = not self.errors.any()
        return Least(
            (minimum.value if exact else float(powers @ self.masses)) + sum(self.fixed.values()),
            minimum.gap,
            group.element(torch.from_numpy(minimum.point)),
            {name: by_parameter[name] for name in self.names},
            slopes,
            vanishing,
            negative,
        )


def balanced(group: Group, model: nn.Module, data: Any, *args: Any, **options: Any) -> nn.Module:
    """The model at the least trace over the group, as a copy."""
    check_options("balance", options, signature(curvature_diagonal).parameters)
    diagonal = curvature_diagonal(model, data, *args, **options)
    noise = {n: d.stderr for n, d in diagonal.details.items() if isinstance(d.stderr, Tensor)}
    least = least_trace(group, diagonal, noise, diagonal.degrees)
    if least.vanishing:
        warnings.warn(
            "The least trace is only approached: rescaling drives the curvature of "
            f"{', '.join(list(least.vanishing)[:5])} to zero. What does so is left where it is.",
            stacklevel=3,
        )
    for note in least.element.notes:
        warnings.warn(note, stacklevel=3)
    return least.element(model)


def _pairs(classes: Tensor, values: Tensor) -> tuple[NDArray[np.int64], Floats]:
    """The class and the value of every entry; a trace stands for its parameter's first entry."""
    if values.ndim == 0 and classes.numel() > 1:
        first = classes[(0,) * classes.ndim]
        return first.reshape(1).numpy(), values.reshape(1).cpu().numpy()
    return classes.reshape(-1).numpy(), values.reshape(-1).cpu().numpy()


def _gone(minimum: Minimum, size: int) -> NDArray[np.bool_]:
    gone = np.zeros(size, dtype=bool)
    if minimum.degenerate is not None:
        gone[minimum.degenerate.groups] = True
    return gone
