"""Results as tables, files and pages; nothing here computes a measure."""

from saltflat.report import html, store
from saltflat.report.html import Cell, Figure, Section, Table
from saltflat.report.provenance import Provenance, model_hash, provenance
from saltflat.report.report import ASK, Comparison, Report
from saltflat.report.words import invariance

__all__ = [
    "ASK",
    "Cell",
    "Comparison",
    "Figure",
    "Provenance",
    "Report",
    "Section",
    "Table",
    "html",
    "invariance",
    "model_hash",
    "provenance",
    "store",
]
