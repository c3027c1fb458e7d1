"""saltflat: scale-invariant sharpness for PyTorch."""

from saltflat.audit import Audit, Tolerances, audit
from saltflat.curvature import (
    ActivationProbes,
    Hutchinson,
    Operator,
    PropagatedCurvature,
    density,
    diagonal,
    eigenvalues,
    ggn,
    hessian,
    max_eigenvalue,
    piecewise_linear,
    trace,
)
from saltflat.errors import (
    ChangedData,
    CriterionError,
    DataError,
    DistributedError,
    ForwardError,
    Interrupted,
    InvalidType,
    InvalidValue,
    LoadError,
    LossError,
    MissingData,
    MissingDependency,
    ModelError,
    NegativeCurvature,
    NoSecondDerivative,
    NotApplicable,
    NotMeasured,
    SaltflatError,
)
from saltflat.many import measure_many
from saltflat.measure import compare, measure
from saltflat.measurement import Measurement
from saltflat.moved import advice
from saltflat.report import Comparison, Report, Standing, Verdict
from saltflat.result import Certificate, Density, Detail, Diagonal, Eigenvalue, Eigenvalues, Trace
from saltflat.saved import cite, load
from saltflat.session import gathered
from saltflat.shards import ShardSampler
from saltflat.slices import Landscape, landscape
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
    "ActivationProbes",
    "Audit",
    "BNSharpnessSGD",
    "Budget",
    "Certificate",
    "ChangedData",
    "Comparison",
    "CriterionError",
    "DataError",
    "Density",
    "Detail",
    "Diagonal",
    "DistributedError",
    "Eigenvalue",
    "Eigenvalues",
    "EntropySGD",
    "ForwardError",
    "Group",
    "Hutchinson",
    "Interrupted",
    "InvalidType",
    "InvalidValue",
    "Landscape",
    "LoadError",
    "LossError",
    "Measurement",
    "MissingData",
    "MissingDependency",
    "ModelError",
    "Monitor",
    "NegativeCurvature",
    "NoSecondDerivative",
    "NotApplicable",
    "NotMeasured",
    "Operator",
    "PropagatedCurvature",
    "Report",
    "SaltflatError",
    "ShardSampler",
    "SharpnessPenalty",
    "Standing",
    "Tolerances",
    "Trace",
    "Verdict",
    "__version__",
    "audit",
    "cite",
    "compare",
    "density",
    "diagonal",
    "eigenvalues",
    "gathered",
    "ggn",
    "hessian",
    "landscape",
    "load",
    "max_eigenvalue",
    "measure",
    "measure_many",
    "piecewise_linear",
    "symmetries",
    "trace",
]


def __getattr__(name: str) -> object:
    words = advice(f"saltflat.{name}")
    raise AttributeError(words or f"module 'saltflat' has no attribute {name!r}")
