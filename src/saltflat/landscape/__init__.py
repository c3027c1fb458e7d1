"""The loss around a model's parameters: its surface, and the largest growth in a region of it."""

from saltflat.landscape.batchnorm import BatchStatistics, Feeds, batch_mode
from saltflat.landscape.descent import Descent, descend
from saltflat.landscape.neighbourhoods import (
    Ball,
    Neighbourhood,
    Point,
    Region,
    ascend,
    check_draws,
    check_search,
    gaussian,
    near_rounding,
)
from saltflat.landscape.spheres import Filters, Spheres, at_least_tiny
from saltflat.landscape.surfaces import BatchSurface, RiskSurface, shifted

__all__ = [
    "Ball",
    "BatchStatistics",
    "BatchSurface",
    "Descent",
    "Feeds",
    "Filters",
    "Neighbourhood",
    "Point",
    "Region",
    "RiskSurface",
    "Spheres",
    "ascend",
    "at_least_tiny",
    "batch_mode",
    "check_draws",
    "check_search",
    "descend",
    "gaussian",
    "near_rounding",
    "shifted",
]
