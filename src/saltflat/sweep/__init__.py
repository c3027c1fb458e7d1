"""Many runs of one function: a grid of settings, one file a run, on this machine or on Ray."""

from __future__ import annotations

from saltflat.sweep.ensemble import train_together
from saltflat.sweep.jobs import Failure, versions
from saltflat.sweep.runner import Where, sweep
from saltflat.sweep.runs import Folder, Outcome, Run, Settings, Work, grid
from saltflat.sweep.stacked import Descent, Parameters, Replayed, beside, stacked, write_back

__all__ = [
    "Descent",
    "Failure",
    "Folder",
    "Outcome",
    "Parameters",
    "Replayed",
    "Run",
    "Settings",
    "Where",
    "Work",
    "beside",
    "grid",
    "stacked",
    "sweep",
    "train_together",
    "versions",
    "write_back",
]
