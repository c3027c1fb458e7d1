"""Results as tables and files; nothing here computes a measure."""

from saltflat.report import store
from saltflat.report.provenance import Provenance, provenance
from saltflat.report.report import ASK, WIDE, Comparison, Grid, Report, framed, invariance
from saltflat.report.standing import STANDING, Standing, standing_of
from saltflat.report.verdict import Verdict

__all__ = [
    "ASK",
    "STANDING",
    "WIDE",
    "Comparison",
    "Grid",
    "Provenance",
    "Report",
    "Standing",
    "Verdict",
    "framed",
    "invariance",
    "provenance",
    "standing_of",
    "store",
]
