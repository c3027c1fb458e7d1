"""The convex problems that the measures stand on: pure functions of numbers, no models."""

from saltflat.convex.balancing import Balanced, balance, components
from saltflat.convex.geometric import Degenerate, Minimum, minimise

__all__ = ["Balanced", "Degenerate", "Minimum", "balance", "components", "minimise"]
