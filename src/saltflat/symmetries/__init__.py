"""Which rescalings of the parameters keep a network's function, found, applied and verified."""

from saltflat.symmetries.find import symmetries
from saltflat.symmetries.group import Generator, Group
from saltflat.symmetries.rescale import Element, Exponents
from saltflat.symmetries.verify import verify

__all__ = ["Element", "Exponents", "Generator", "Group", "symmetries", "verify"]
