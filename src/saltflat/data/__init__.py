"""Data sets for the demo and the examples."""

from saltflat.data.digits import digits

__all__ = ["digits"]
