"""Exact and estimated curvature of a risk, block by block."""

from saltflat.curvature.api import (
    Operator,
    checked_settings,
    density,
    diagonal,
    eigenvalues,
    ggn,
    hessian,
    max_eigenvalue,
    trace,
)
from saltflat.curvature.curvature import Curvature, Layer
from saltflat.curvature.estimators import (
    LEAST_DRAWS,
    ActivationProbes,
    Estimator,
    Hutchinson,
    PropagatedCurvature,
    Quantity,
    check_estimator,
    degrees_of_freedom,
    mean_error,
    mixed,
)
from saltflat.curvature.loss_hessian import (
    Additivity,
    classify,
    derivatives_explained,
    output_products,
    output_units,
)
from saltflat.curvature.plan import Certify, Company, Plan, Settings
from saltflat.curvature.products import MatrixName
from saltflat.curvature.proof import piecewise_linear
from saltflat.curvature.rules import Safe
from saltflat.curvature.sweep import CURVATURE, FISHER, Kind

__all__ = [
    "CURVATURE",
    "FISHER",
    "LEAST_DRAWS",
    "ActivationProbes",
    "Additivity",
    "Certify",
    "Company",
    "Curvature",
    "Estimator",
    "Hutchinson",
    "Kind",
    "Layer",
    "MatrixName",
    "Operator",
    "Plan",
    "PropagatedCurvature",
    "Quantity",
    "Safe",
    "Settings",
    "check_estimator",
    "checked_settings",
    "classify",
    "degrees_of_freedom",
    "density",
    "derivatives_explained",
    "diagonal",
    "eigenvalues",
    "ggn",
    "hessian",
    "max_eigenvalue",
    "mean_error",
    "mixed",
    "output_products",
    "output_units",
    "piecewise_linear",
    "trace",
]
