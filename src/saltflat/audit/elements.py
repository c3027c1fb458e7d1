"""Random and adversarial rescalings of every kind that a model admits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import numpy as np
import torch
from torch import Tensor, nn

from saltflat.symmetries import KINDS, Element, Group, Kind, null_space

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix


@final
@dataclass(frozen=True)
class Family:
    """The rescalings of one kind; `basis` has a column of log-factors for each direction."""

    kind: Kind
    group: Group
    basis: csr_matrix
    names: tuple[str, ...]
    places: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.names)

    def element(self, logs: Tensor) -> Element:
        return self.group.element(torch.from_numpy(self.basis @ logs.numpy()))

    def heaviest(self, model: nn.Module) -> tuple[int, str]:
        """The direction, and the place of several, that moves the largest weights.

        A unit whose weights are zero (pruned, say) would put nothing to the test.
        """
        e = self.group.exponents()
        masses = np.zeros(e.matrix.shape[0])
        for name, p in model.named_parameters():
            if name in e.classes:
                squares = p.detach().double().square().cpu().numpy().ravel()
                np.add.at(masses, e.classes[name].numpy().ravel(), squares)
        scores = np.asarray(abs(e.matrix @ self.basis).T @ masses).ravel()
        by_place: dict[str, float] = {}
        for place, score in zip(self.places, scores, strict=True):
            by_place[place] = by_place.get(place, 0.0) + float(score)
        return int(scores.argmax()), max(by_place, key=lambda place: by_place[place])


@final
@dataclass(frozen=True)
class Trial:
    """One rescaling to put the measures to; `along` if it belongs to the curve of its kind."""

    kind: Kind
    name: str
    spread: float
    element: Element
    along: bool = False


def families(group: Group) -> list[Family]:
    """The kinds of rescaling that the model has."""
    from scipy.sparse import identity

    kinds = [_layers(group)]
    for kind in KINDS[1:]:
        part = group.only(kind)
        names = tuple(g.name for g in part)
        places = tuple(g.label for g in part)
        kinds.append(Family(kind, part, identity(len(part), format="csr"), names, places))
    return [family for family in kinds if len(family)]


def _layers(group: Group) -> Family:
    """The layer-wise rescalings that multiply every weight matrix by one number.

    That is what the papers mean by rescaling layers. Where activations are concatenated, or one
    matrix holds queries, keys and values, one factor for each activation would give one matrix
    several; those rescalings belong to the units.
    """
    from scipy.sparse import csr_matrix, vstack

    layers = group.only("layer")
    e = layers.exponents()
    rows = [csr_matrix((0, len(layers)))]
    for name, classes in e.classes.items():
        if classes.ndim > 1:
            part = e.matrix[e.kinds(name)]
            rows.append(part[1:] - part[[0] * (part.shape[0] - 1)])
    basis = null_space(vstack(rows).tocsr())
    columns = basis.tocsc()
    columns.sort_indices()
    firsts = [int(columns.indices[start]) for start in columns.indptr[:-1]]
    names = tuple(layers.generators[i].name for i in firsts)
    return Family("layer", layers, basis, names, names)


def trials(
    family: Family, model: nn.Module, spreads: Sequence[float], elements: int, seed: int
) -> list[Trial]:
    """Random rescalings, the first of them at every spread, and one unit, one layer at ±.

    Log-factors are uniform in ±log(spread); at a smaller spread the same ones, shortened.
    """
    widest = max(spreads)
    generator = torch.Generator().manual_seed(seed)
    draws = 2 * torch.rand(elements, len(family), generator=generator, dtype=torch.float64) - 1
    plan = []
    for i, draw in enumerate(draws):
        for spread in spreads if i == 0 else [widest]:
            element = family.element(draw * math.log(spread))
            plan.append(Trial(family.kind, f"random {i + 1}", spread, element, along=i == 0))
    unit, place = family.heaviest(model)
    one = torch.zeros(len(family), dtype=torch.float64)
    one[unit] = 1.0
    plan += _both_ways(family, family.names[unit], one, widest)
    together = torch.tensor([p == place for p in family.places], dtype=torch.float64)
    if together.sum() > 1:
        plan += _both_ways(family, f"all of {place}", together, widest)
    return plan


def _both_ways(family: Family, name: str, direction: Tensor, spread: float) -> list[Trial]:
    signs: tuple[tuple[str, float], ...] = (("×", 1.0), ("÷", -1.0))
    return [
        Trial(
            family.kind,
            f"{name} {sign} {spread:g}",
            spread,
            family.element(direction * power * math.log(spread)),
        )
        for sign, power in signs
    ]
