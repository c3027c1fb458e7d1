"""Results as tables and files; nothing here computes a measure."""

from saltflat.report import store
from saltflat.report.provenance import Provenance, provenance
from saltflat.report.report import ASK, Comparison, Report, invariance

__all__ = ["ASK", "Comparison", "Provenance", "Report", "invariance", "provenance", "store"]
