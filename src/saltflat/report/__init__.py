"""Results as tables and files; nothing here computes a measure."""

from saltflat.report.comparison import Comparison
from saltflat.report.report import Provenance, Report, invariance

__all__ = ["Comparison", "Provenance", "Report", "invariance"]
