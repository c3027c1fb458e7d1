"""The measures of the papers, one a file; MEASURES holds each under its name."""

from saltflat.curvature.curvature import Layer
from saltflat.measures.adaptive_sharpness import AdaptiveSharpness
from saltflat.measures.base import Context, Measure, NotApplicable
from saltflat.measures.bn_sharpness import BNSharpness
from saltflat.measures.delta_sharpness import DeltaSharpness
from saltflat.measures.fisher_rao_norm import FisherRaoNorm
from saltflat.measures.hessian_max_eigenvalue import HessianMaxEigenvalue
from saltflat.measures.hessian_trace import HessianTrace
from saltflat.measures.kappa import Kappa
from saltflat.measures.kappa_trace import KappaTrace
from saltflat.measures.matrix_normalized_sharpness import MatrixNormalizedSharpness
from saltflat.measures.minimum_sharpness import MinimumSharpness
from saltflat.measures.neuronwise_minimum_sharpness import NeuronwiseMinimumSharpness
from saltflat.measures.normalized_sharpness import NormalizedSharpness
from saltflat.measures.normalized_strategies import DirectObjective, PaperRecipe
from saltflat.measures.relative_flatness import RelativeFlatness
from saltflat.measures.rho import Rho
from saltflat.measures.sam_sharpness import SamSharpness

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

__all__ = [
    "MEASURES",
    "AdaptiveSharpness",
    "BNSharpness",
    "Context",
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
    "NeuronwiseMinimumSharpness",
    "NormalizedSharpness",
    "NotApplicable",
    "PaperRecipe",
    "RelativeFlatness",
    "Rho",
    "SamSharpness",
]
