"""Can a number be trusted? Which measures move under rescalings that keep the function."""

from saltflat.audit.procedure import audit
from saltflat.audit.result import Audit, Audited, Drift, Tolerances

__all__ = ["Audit", "Audited", "Drift", "Tolerances", "audit"]
