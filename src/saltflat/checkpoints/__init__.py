"""Weights from files: read without running what is in them, put into models, told apart by name."""

from saltflat.checkpoints.files import SUFFIXES, by_name, check_growth, existing, explained, tensors
from saltflat.checkpoints.weights import load_weights

__all__ = [
    "SUFFIXES",
    "by_name",
    "check_growth",
    "existing",
    "explained",
    "load_weights",
    "tensors",
]
