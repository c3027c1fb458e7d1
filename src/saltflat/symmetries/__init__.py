"""Which rescalings of the parameters keep a network's function, found, applied and verified."""

from saltflat.symmetries.balance import (
    Least,
    class_masses,
    least_trace,
    noisy_scaling,
    uniform_parameters,
)
from saltflat.symmetries.element import Element, Exponents, duplicate
from saltflat.symmetries.evaluate import answers, change, check_copy, run, verify, widened
from saltflat.symmetries.find import symmetries
from saltflat.symmetries.group import KINDS, Generator, Group, Kind
from saltflat.symmetries.solve import null_space

__all__ = [
    "KINDS",
    "Element",
    "Exponents",
    "Generator",
    "Group",
    "Kind",
    "Least",
    "answers",
    "change",
    "check_copy",
    "class_masses",
    "duplicate",
    "least_trace",
    "noisy_scaling",
    "null_space",
    "run",
    "symmetries",
    "uniform_parameters",
    "verify",
    "widened",
]
