"""The plan for a model: what a probe found out, and how the samples of a batch are laid out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from saltflat.curvature.layers import Rows, Use
from saltflat.curvature.matrix import Matrix
from saltflat.risk import Batch

GENERIC = "per-sample"
UNUSED = "unused"

Signature = tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """What a probe found; it holds for batches whose forward pass makes the same calls."""

    samples: int
    coupled: bool  # outputs of one sample depend on others
    rules: Mapping[str, str]  # parameter -> rule, GENERIC or UNUSED
    dims: Mapping[str, int]  # parameter of a fast rule -> dimension of its samples
    matrices: Mapping[str, Matrix]  # the weight matrices among the parameters
    curved: Mapping[str, str]  # parameter -> the operation through which it may be curved
    given: Mapping[str, str]  # parameter -> what was declared piecewise linear, and is relied on
    probed: frozenset[str]  # of the curved ones, those that seem linear on the probed samples
    reached: frozenset[str]  # the parameters that autograd reaches
    unseen: frozenset[str]  # parameters with no gradient on the probed samples: nothing is known
    signature: Signature
    trail: tuple[str, ...]  # the operations of the graph in which the rules were checked
    narrow: torch.dtype  # the least precise type on the way from parameters to outputs
    channels_last: bool
    seen: Tensor  # outputs of the probed samples
    places: tuple[int, ...]  # where in their batch these are
    width: int  # bytes of an output entry
    outputs: torch.Size  # a sample's
    activations: int  # output entries of the recorded operations, a sample
    kept: int  # of these, what is kept of every direction until it is contracted
    inputs: int  # input entries of the recorded operations, a sample
    patches: int  # entries of the largest patch matrix, a sample

    def allows(self, name: str) -> bool:
        """Whether the Gauss–Newton form may serve a parameter's block of the Hessian."""
        return name not in self.curved or name in self.probed

    def serves(self, uses: Sequence[Use], samples: int) -> bool:
        """Whether a forward pass made the calls that this plan was made for."""
        return signature(uses) == self.signature and all(
            fits(use, Rows(samples, self.dims[name]))
            for use in uses
            for name in use.names.values()
            if name in self.dims
        )


class NotCertified(Exception):
    """A chunk showed that the model is not what the first samples said."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan


def fits(use: Use, rows: Rows) -> bool:
    """Whether a use's input and output can have the samples where `rows` says."""
    both = rows.fits(use.shape) and rows.fits((*use.input.shape, 1))
    return both and rows.dim in use.dims


def signature(uses: Sequence[Use]) -> Signature:
    return tuple((use.rule, tuple(use.names.values())) for use in uses)


def channels_last(batch: Batch) -> Batch:
    """The batch with images laid out channels last, which convolutions like best."""

    def lay(leaf: Any) -> Any:
        image = isinstance(leaf, Tensor) and leaf.ndim == 4 and leaf.is_floating_point()
        return leaf.contiguous(memory_format=torch.channels_last) if image else leaf

    return replace(batch, inputs=tree_map(lay, batch.inputs))


def patch_entries(use: Use) -> int:
    """Entries of the patch matrix that a use of a parameter needs."""
    window = getattr(use, "window", None)
    if window is None:
        return use.input.numel()
    taps = 1
    for k in window.kernel:
        taps *= k
    positions = use.shape[2:].numel() if use.rule == "conv" else use.input.shape[2:].numel()
    channels = use.input.shape[1] if use.rule == "conv" else use.shape[1]
    return int(use.shape[0] * channels * taps * positions)
