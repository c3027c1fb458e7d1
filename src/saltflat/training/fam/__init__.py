"""FAM: relative flatness of a layer, as a training penalty."""

from saltflat.training.fam.regularizer import FAM

__all__ = ["FAM"]
