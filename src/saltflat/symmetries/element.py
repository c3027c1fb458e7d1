"""A rescaling, and how it is applied: a new model with the same function."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, final

import numpy as np
import torch
from scipy.sparse import csr_matrix
from torch import Tensor, nn

from saltflat.errors import ModelError
from saltflat.risk import unwrap


@final
@dataclass(frozen=True, repr=False)
class Exponents:
    """What a group does to every entry of every parameter.

    With the class `c` of an entry (`classes[name]`, an integer tensor of the parameter's shape)
    and an element `u`,

        parameter'  = parameter · exp(matrix[c] · u)
        mean'       = mean · exp(matrix[c] · u)                     c from `means`
        var' + eps  = (var + eps) · exp(2 · matrix[c] · u)          c from `deviations`

    where mean and var are BatchNorm's running statistics. `floors` holds, for each class of a
    variance, the least exponent that keeps var' ≥ 0; `uncopied` says why the model cannot be
    copied, if it cannot.
    """

    classes: Mapping[str, Tensor]
    means: Mapping[str, Tensor]
    deviations: Mapping[str, Tensor]
    eps: Mapping[str, float]
    matrix: csr_matrix
    floors: Mapping[int, float] = field(default_factory=dict)
    uncopied: str = ""

    def all_classes(self) -> dict[str, Tensor]:
        """Those of parameters and of statistics."""
        return {**self.classes, **self.means, **self.deviations}

    def element(self, u: Tensor) -> Element:
        """The element, clipped where a running variance would become negative."""
        rows = np.array(sorted(self.floors), dtype=int)
        floor = np.array([self.floors[i] for i in rows.tolist()])
        values, clipped = u.numpy().copy(), np.zeros(len(u), bool)
        part = self.matrix[rows]
        while len(rows):
            low = np.flatnonzero(part @ values < floor - 1e-12)
            if len(low) == 0:
                break
            for i in low:
                columns = part.indices[part.indptr[i] : part.indptr[i + 1]]
                exponent = float((part[i] @ values)[0])
                if exponent < floor[i]:
                    # u = 0 is allowed, so that a shorter step in the same direction is, too.
                    values[columns] *= floor[i] / exponent
                    clipped[columns] = True
        note = f"{int(clipped.sum())} factors clipped: a running variance would be negative."
        return Element(self, torch.from_numpy(values), (note,) if clipped.any() else ())


@final
@dataclass(frozen=True, repr=False)
class Element:
    """A rescaling: `logs` is one log-factor a generator; call it with a model to apply it."""

    exponents: Exponents
    logs: Tensor
    notes: tuple[str, ...] = ()

    def __call__(self, model: nn.Module) -> nn.Module:
        """A deep copy of the model, rescaled; the model itself stays as it is."""
        if self.exponents.uncopied:
            raise ModelError(self.exponents.uncopied)
        moved = duplicate(model)
        self.rescale(moved)
        return moved

    def rescale(self, model: nn.Module) -> None:
        """Rescale the model in place."""
        inner = unwrap(model)
        self._check(inner)
        tensors = {**dict(inner.named_parameters()), **dict(inner.named_buffers())}
        with torch.no_grad():
            for name, value in self.moved(tensors):
                tensors[name].copy_(value)

    def moved(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """What becomes of those of the tensors that move, one by one, in float64."""
        for name, factor in self._factors():
            value = tensors[name].double()
            if name in self.exponents.eps:
                # Rounding may leave less than nothing of a variance that was clipped.
                yield name, self._variance(name, value, factor).clamp(min=0)
            else:
                yield name, value * factor.to(value.device)

    def factors(self) -> dict[str, Tensor]:
        """The factor of every entry of parameters and means, and of √(var + eps)."""
        return dict(self._factors())

    def _factors(self) -> Iterator[tuple[str, Tensor]]:
        e = self.exponents
        factor = torch.from_numpy(np.exp(e.matrix @ self.logs.numpy()))
        moving = np.diff(e.matrix.indptr) > 0
        for name, classes in e.all_classes().items():
            if name not in e.classes or bool(moving[classes.numpy()].any()):
                yield name, factor[classes]

    def _variance(self, name: str, var: Tensor, factor: Tensor) -> Tensor:
        """var' with √(var' + eps) = factor · √(var + eps)."""
        eps = self.exponents.eps[name]
        return factor.to(var.device) ** 2 * (var.double() + eps) - eps

    def inverse(self) -> Element:
        """The element that undoes this one."""
        return replace(self, logs=-self.logs)

    def _check(self, model: nn.Module) -> None:
        e = self.exponents
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        for name, classes in e.all_classes().items():
            if name not in tensors or tensors[name].shape != classes.shape:
                raise ModelError(
                    f"The model is not the one that the group was found for: it has no {name!r} "
                    f"of shape {tuple(classes.shape)}. Find the group of this model."
                )
        factors = self.factors()
        for name, eps in e.eps.items():
            if bool((self._variance(name, tensors[name], factors[name]) < -1e-12 * eps).any()):
                raise ModelError(
                    f"The running variance {name!r} would become negative: the group was found "
                    "for other statistics. Find the group of this model."
                )

    def __repr__(self) -> str:
        size = self.logs.abs().max().exp().item() if len(self.logs) else 1.0
        notes = "".join(f"; {n}" for n in self.notes)
        return f"Element of {len(self.logs)} factors, at most {size:.3g}{notes}"


def duplicate(model: nn.Module) -> nn.Module:
    """A deep copy, also where a module keeps a tensor that it computed (pruning does)."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach().clone()
    with torch.no_grad():  # or else the parameters of a ScriptModule's copy have a history
        copied = copy.deepcopy(model, memo)
    if len(list(copied.parameters())) != len(list(model.parameters())):
        raise ModelError(
            "A ScriptModule shares parameters with the rest of the model, and a copy of it does "
            "not. Use the module that was scripted instead."
        )
    for before, p in zip(model.parameters(), copied.parameters(), strict=True):
        p.requires_grad_(before.requires_grad)
    return copied
