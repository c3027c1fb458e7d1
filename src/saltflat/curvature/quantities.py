"""The quantities that one sweep over the data can add up, and how a term gives them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from saltflat.curvature.quadratic import Form, Weight
from saltflat.curvature.terms import Term

Kind = Literal[
    "trace",
    "diagonal",
    "magnitude",
    "columns",
    "rows",
    "flatness",
    "normalized_flatness",
    "fisher",
]

# Quadratic in the directions of the loss's Hessian …
CURVATURE: frozenset[Kind] = frozenset(
    {"trace", "diagonal", "magnitude", "columns", "rows", "flatness", "normalized_flatness"}
)
# … and in its gradient: Σ_i θ_i² (∂ℓ/∂θ_i)².
FISHER: frozenset[Kind] = frozenset({"fisher"})
# What every parameter has; the others belong to weight matrices.
EVERY_PARAMETER: frozenset[Kind] = frozenset({"trace", "diagonal"})

FORMS: dict[Kind, Form] = {
    "columns": "columns",
    "rows": "rows",
    "flatness": "flatness",
    "normalized_flatness": "flatness",
}


def shape(kind: Kind, parameter: Tensor, weight: Weight | None) -> torch.Size:
    """The shape of a quantity of one parameter."""
    if kind == "diagonal":
        return parameter.shape
    if kind in ("columns", "rows"):
        assert weight is not None
        side = weight.matrix.columns if kind == "columns" else weight.matrix.rows
        return side(parameter.detach()).shape
    return torch.Size()


def reduce(
    term: Term, kinds: frozenset[Kind], weight: Weight | None, sign: Tensor | None
) -> Iterator[tuple[Kind, Tensor]]:
    """The wanted quantities of one term; each is a sum over directions and samples.

    The magnitude is Σ |s| G² beside the diagonal's Σ s G²: what the diagonal's rounding is relative
    to. Where no term is negative it is the diagonal itself, and left out; its sum then stays 0.
    (Of a sum in which some chunks have negative terms and some have not, at most half of what can
    cancel is left out.)
    """
    if "diagonal" in kinds:
        diagonal = term.diagonal(sign)
        yield "diagonal", diagonal
        if "trace" in kinds:
            yield "trace", diagonal.sum(dtype=torch.float64)
    elif "trace" in kinds:
        yield "trace", term.trace(sign)
    if "magnitude" in kinds and sign is not None:
        yield "magnitude", term.diagonal(None)
    for kind, form in FORMS.items():
        if kind in kinds:
            assert weight is not None
            plain = kind != "normalized_flatness"
            matrix = Weight(weight.values, weight.matrix) if plain else weight
            yield kind, term.form(form, matrix, sign)
    if "fisher" in kinds:
        assert weight is not None
        yield "fisher", (term.diagonal(sign).double() * weight.values.double().square()).sum()
