"""saltflat: scale-invariant sharpness for PyTorch."""

from saltflat.audit import Audit, Tolerances, audit
from saltflat.curvature import Hutchinson, diagonal, max_eigenvalue, piecewise_linear, trace
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
from saltflat.symmetries import Group, symmetries
from saltflat.training import (
    FAM,
    SAM,
    BNSharpnessSGD,
    Budget,
    EntropySGD,
    Monitor,
    SharpnessPenalty,
)
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
