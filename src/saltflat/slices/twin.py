"""The balanced twin: one model that stands for all rescalings of it that keep the function.

An element with log-factors u multiplies an entry of class c by exp(C_c·u), its square by the square
of that, and its diagonal entry of the Gauss–Newton matrix by the inverse square. With the masses
A_c = Σ diag G and W_c = Σ θ² of the classes, the twin has the least

    Σ_c A_c exp(−2 C_c·u) + Σ_c W_c exp(2 C_c·u),

the trace of G plus the squared length of the parameters that the group moves, which is convex in u.
Rescaled models have the same orbit, and so the same twin.

The trace alone, which `Group.balance` minimises, does not decide: filters that feed BatchNorm can
grow for ever, and what comes before them follows. Here the length holds them back, and units that
no sample activates too; only the scale of units with no weight but zero before or behind them stays
open.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from saltflat.convex import minimise
from saltflat.curvature import diagonal
from saltflat.losses import LossLike
from saltflat.risk import unwrap
from saltflat.symmetries import Group


def balanced_twin(
    group: Group, model: nn.Module, data: Any, loss: LossLike, options: dict[str, Any]
) -> tuple[nn.Module, tuple[str, ...]]:
    """A rescaled copy, and what there is to say of it. Options as in `saltflat.diagonal`."""
    from scipy.sparse import vstack

    with warnings.catch_warnings():  # what is estimated is told in a note
        warnings.simplefilter("ignore")
        curvature = diagonal(model, data, loss, curvature="ggn", **options)
    notes = [f"balanced over {len(group)} rescalings"]
    if not curvature.exact:
        notes.append("the twin is balanced by estimates: rescaled models have nearly the same")
    parameters = dict(unwrap(model).named_parameters())
    exponents = group.exponents()
    classes, matrix = exponents.classes, exponents.matrix
    bends, sizes = np.zeros((2, matrix.shape[0]))
    for name in (name for name in curvature if name in classes):
        bends += _sums(classes[name], curvature[name].clamp_min(0.0), len(bends))
        sizes += _sums(classes[name], parameters[name].detach().double().square(), len(sizes))
    minimum = minimise(np.concatenate([bends, sizes]), vstack([matrix, -matrix]).tocsr())
    if not minimum.attained:
        notes.append(
            "trace and length leave the scale of some units open (all weights before or behind "
            "them are zero, say): they are left as they are, and the picture changes with it"
        )
    element = group.element(torch.from_numpy(minimum.point))
    return element(model), (*notes, *element.notes)


def _sums(classes: Tensor, values: Tensor, count: int) -> Any:
    """Sums over the entries of every class."""
    return np.bincount(classes.reshape(-1).numpy(), values.reshape(-1).cpu().numpy(), count)
