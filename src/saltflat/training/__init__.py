"""Training toward flat minima: regularizers, optimizers and a monitor."""

from saltflat.training.bn_sharpness import BNSharpnessSGD
from saltflat.training.entropy_sgd import EntropySGD
from saltflat.training.fam import FAM
from saltflat.training.history import Record
from saltflat.training.monitor import CHEAP, Budget, Monitor, MonitorCallback
from saltflat.training.perturbing import PerturbedOptimizer, random_states
from saltflat.training.sam import SAM
from saltflat.training.sharpness_penalty import SharpnessPenalty

__all__ = [
    "CHEAP",
    "FAM",
    "SAM",
    "BNSharpnessSGD",
    "Budget",
    "EntropySGD",
    "Monitor",
    "MonitorCallback",
    "PerturbedOptimizer",
    "Record",
    "SharpnessPenalty",
    "random_states",
]
