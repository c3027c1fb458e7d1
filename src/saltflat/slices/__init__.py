"""Slices of the loss: along lines and planes through a model's parameters."""

from saltflat.slices.procedure import landscape
from saltflat.slices.result import Landscape

__all__ = ["Landscape", "landscape"]
