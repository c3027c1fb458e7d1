"""saltflat: scale-invariant sharpness for PyTorch."""

from saltflat.audit import Audit, Tolerances, audit
from saltflat.curvature.functions import diagonal, max_eigenvalue, trace
from saltflat.curvature.proof import piecewise_linear
from saltflat.curvature.stochastic import Hutchinson
from saltflat.errors import (
    DataError,
    InvalidType,
    InvalidValue,
    LossError,
    MissingDependency,
    ModelError,
    SaltflatError,
)
from saltflat.measure import compare, measure
from saltflat.measurement import Measurement
from saltflat.report import Comparison, Report
from saltflat.result import Certificate, Detail, Diagonal, Eigenvalue, Trace
from saltflat.symmetries.find import symmetries
from saltflat.symmetries.group import Group
from saltflat.training.bn_sharpness import BNSharpnessSGD
from saltflat.training.entropy_sgd import EntropySGD
from saltflat.training.fam import FAM
from saltflat.training.monitor import Budget, Monitor
from saltflat.training.sam import SAM
from saltflat.training.sharpness_penalty import SharpnessPenalty
from saltflat.version import __version__

__all__ = [
    "FAM",
    "SAM",
    "Audit",
    "BNSharpnessSGD",
    "Budget",
    "Certificate",
    "Comparison",
    "DataError",
    "Detail",
    "Diagonal",
    "Eigenvalue",
    "EntropySGD",
    "Group",
    "Hutchinson",
    "InvalidType",
    "InvalidValue",
    "LossError",
    "Measurement",
    "MissingDependency",
    "ModelError",
    "Monitor",
    "Report",
    "SaltflatError",
    "SharpnessPenalty",
    "Tolerances",
    "Trace",
    "__version__",
    "audit",
    "compare",
    "diagonal",
    "max_eigenvalue",
    "measure",
    "piecewise_linear",
    "symmetries",
    "trace",
]
