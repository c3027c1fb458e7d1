"""The spread of each layer's inputs over the data, unit by unit."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from saltflat.curvature.layers import EmbeddingUse, LinearUse, Use
from saltflat.curvature.matrix import Matrix
from saltflat.curvature.record import Recorder
from saltflat.risk import Risk


def feature_scale(risk: Risk, matrices: Mapping[str, Matrix], chunk: int) -> dict[str, Tensor]:
    """The standard deviation of every input unit over samples and positions.

    A unit that never changes has the size of its value instead, and one that is always 0 has 0.
    Embeddings, whose inputs are rows looked up, and layers that no rule knows have no scale.
    """
    moments: dict[str, Tensor] = {}  # (3, inputs): count, Σ x, Σ x²
    for batch in risk.batches():
        for start in range(0, batch.size, chunk):
            part = batch.part(start, start + chunk)
            with Recorder(risk.parameters) as recorder:
                risk.forward(part)
            for use in recorder.uses:
                name = use.names.get("weight")
                if name in matrices and not isinstance(use, EmbeddingUse):
                    found = _moments(use)
                    moments[name] = moments[name] + found if name in moments else found
    return {name: _scale(m) for name, m in moments.items()}


def _moments(use: Use) -> Tensor:
    x = use.input.double()
    x = x.flatten(0, -2) if isinstance(use, LinearUse) else x.movedim(1, -1).flatten(0, -2)
    return torch.stack([torch.full_like(x[0], len(x)), x.sum(0), x.square().sum(0)])


def _scale(moments: Tensor) -> Tensor:
    count, first, second = moments
    mean = first / count
    variance = second / count - mean.square()
    varies = variance > 1e-12 * second / count
    return torch.where(varies, variance.clamp(min=0).sqrt(), mean.abs())
