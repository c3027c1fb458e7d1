"""Results as tables and files; nothing here computes a measure."""

from saltflat.report import store
from saltflat.report.provenance import Provenance, provenance
from saltflat.report.report import ASK, Comparison, Report, invariance
from saltflat.report.standing import STANDING, Standing, standing

__all__ = [
    "ASK",
    "STANDING",
    "Comparison",
    "Provenance",
    "Report",
    "Standing",
    "invariance",
    "provenance",
    "standing",
    "store",
]
