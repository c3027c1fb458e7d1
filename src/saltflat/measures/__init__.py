"""The catalogue: the measures of the papers. MEASURES holds each under its name."""

from typing import get_args

from saltflat.curvature import Layer, Quantity
from saltflat.errors import NotApplicable
from saltflat.measurement import EVERY_RESCALING, Symmetry
from saltflat.measures.ball_sharpness import AdaptiveSharpness, DeltaSharpness, SamSharpness
from saltflat.measures.base import INCLUDED, Context, Cost, Measure, Need
from saltflat.measures.bn_sharpness import BNSharpness
from saltflat.measures.fisher_rao_norm import FisherRaoNorm
from saltflat.measures.hessian import HessianMaxEigenvalue, HessianTrace
from saltflat.measures.minimum_sharpness import MinimumSharpness, NeuronwiseMinimumSharpness
from saltflat.measures.normalized_sharpness import (
    DirectObjective,
    MatrixNormalizedSharpness,
    NormalizedSharpness,
    PaperRecipe,
    balance_layer,
)
from saltflat.measures.relative_flatness import Kappa, KappaTrace, RelativeFlatness, Rho

MEASURES: dict[str, type[Measure]] = {
    "hessian_trace": HessianTrace,
    "hessian_max_eigenvalue": HessianMaxEigenvalue,
    "minimum_sharpness": MinimumSharpness,
    "neuronwise_minimum_sharpness": NeuronwiseMinimumSharpness,
    "normalized_sharpness": NormalizedSharpness,
    "matrix_normalized_sharpness": MatrixNormalizedSharpness,
    "kappa": Kappa,
    "kappa_trace": KappaTrace,
    "rho": Rho,
    "relative_flatness": RelativeFlatness,
    "bn_sharpness": BNSharpness,
    "delta_sharpness": DeltaSharpness,
    "sam_sharpness": SamSharpness,
    "adaptive_sharpness": AdaptiveSharpness,
    "fisher_rao_norm": FisherRaoNorm,
}


def table() -> str:
    """The catalogue in Markdown: names, formulas, costs in gradients, invariance and sources."""
    rows = ["| measure | formula | cost | invariant to | from |", "|---|---|---:|---|---|"]
    for name, kind in MEASURES.items():
        everything = kind.invariant_to == EVERY_RESCALING
        moves = [each for each in get_args(Symmetry) if each in kind.invariant_to]
        invariant = "every rescaling" if everything else ", ".join(moves) or "nothing"
        source = ", ".join(filter(None, (kind.paper, kind.equation)))
        cost = "sweep" if kind.cost == "sweep" else f"{kind().price():.0f}"
        title = kind.title.replace("|", chr(92) + "|")
        rows.append(f"| `{name}` | {title} | {cost} | {invariant} | {source} |")
    return "\n".join(rows)


__all__ = [
    "INCLUDED",
    "MEASURES",
    "AdaptiveSharpness",
    "BNSharpness",
    "Context",
    "Cost",
    "DeltaSharpness",
    "DirectObjective",
    "FisherRaoNorm",
    "HessianMaxEigenvalue",
    "HessianTrace",
    "Kappa",
    "KappaTrace",
    "Layer",
    "MatrixNormalizedSharpness",
    "Measure",
    "MinimumSharpness",
    "Need",
    "NeuronwiseMinimumSharpness",
    "NormalizedSharpness",
    "NotApplicable",
    "PaperRecipe",
    "Quantity",
    "RelativeFlatness",
    "Rho",
    "SamSharpness",
    "balance_layer",
    "table",
]
