"""Names of earlier versions: whoever asks for one is told what took its place."""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from typing import Any, final

PLACES = {
    "saltflat.XTrace": "saltflat.Hutchinson: the error of XTrace did not hold",
    "saltflat.curvature.blocks": "saltflat.trace, saltflat.diagonal and saltflat.max_eigenvalue",
    "saltflat.curvature.functions": "saltflat.trace, saltflat.diagonal and saltflat.max_eigenvalue",
    "saltflat.curvature.stochastic": "saltflat.Hutchinson",
    "saltflat.data": "saltflat.datasets",
    **{
        f"saltflat.measures.{family}": "saltflat.measures, which has every measure's class"
        for family in (
            "adaptive_sharpness",
            "delta_sharpness",
            "hessian_max_eigenvalue",
            "hessian_trace",
            "kappa",
            "kappa_trace",
            "matrix_normalized_sharpness",
            "neuronwise_minimum_sharpness",
            "rho",
            "sam_sharpness",
        )
    },
    "saltflat.measures.planner": "saltflat.measure and saltflat.compare",
    "saltflat.symmetries.NegativeCurvature": "saltflat.NegativeCurvature",
    "saltflat.symmetries.verify": "saltflat.symmetries, which has the function verify",
    "saltflat.training.wrapper": "saltflat.training.PerturbedOptimizer",
}


def advice(name: str) -> str | None:
    """What to say to whoever asks for this name, if it was one."""
    return f"{name} is gone. Use {PLACES[name]}." if name in PLACES else None


@final
class Signpost(MetaPathFinder):
    """Comes last among Python's finders, so that only imports that fail reach it.

    `from saltflat import XTrace` does too, where a module's `__getattr__` is not heard.
    """

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        if (words := advice(fullname)) is not None:
            raise ImportError(words, name=fullname)


sys.meta_path.append(Signpost())
