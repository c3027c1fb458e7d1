"""saltflat: scale-invariant sharpness for PyTorch."""

from saltflat.curvature.functions import diagonal, max_eigenvalue, trace
from saltflat.curvature.stochastic import Hutchinson, XTrace
from saltflat.errors import (
    DataError,
    InvalidType,
    InvalidValue,
    LossError,
    MissingDependency,
    ModelError,
    SaltflatError,
)
from saltflat.result import Certificate, Detail, Diagonal, Eigenvalue, Trace

__version__ = "0.1.0"

__all__ = [
    "Certificate",
    "DataError",
    "Detail",
    "Diagonal",
    "Eigenvalue",
    "Hutchinson",
    "InvalidType",
    "InvalidValue",
    "LossError",
    "MissingDependency",
    "ModelError",
    "SaltflatError",
    "Trace",
    "XTrace",
    "__version__",
    "diagonal",
    "max_eigenvalue",
    "trace",
]
