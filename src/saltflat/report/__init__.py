"""Results as tables, files and pages; nothing here computes a measure."""

from saltflat.report import html, store
from saltflat.report.code import code_hash
from saltflat.report.html import Cell, Figure, Section, Table
from saltflat.report.provenance import Provenance, model_hash, provenance
from saltflat.report.report import WIDE, Comparison, Grid, Report, framed
from saltflat.report.standing import STANDING, Standing, standing_of
from saltflat.report.verdict import Verdict
from saltflat.report.words import ASK, INTERRUPTED, invariance

__all__ = [
    "ASK",
    "INTERRUPTED",
    "STANDING",
    "WIDE",
    "Cell",
    "Comparison",
    "Figure",
    "Grid",
    "Provenance",
    "Report",
    "Section",
    "Standing",
    "Table",
    "Verdict",
    "code_hash",
    "framed",
    "html",
    "invariance",
    "model_hash",
    "provenance",
    "standing_of",
    "store",
]
