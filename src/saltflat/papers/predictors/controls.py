"""What a measure of sharpness has to beat: simple numbers of a trained ReLU network."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy

import torch
from torch import Tensor, nn

# name -> what it is; `training_loss` and `epochs` are known from training.
CONTROLS: Mapping[str, str] = {
    "weight_norm": "√Σ θ², over all parameters",
    "path_norm": "√ of the sum of outputs for inputs of 1 and squared parameters",
    "margin": "10th percentile over training samples of the label's logit less the largest other",
    "normalized_margin": "margin / path_norm",
    "parameter_count": "number of parameters",
    "training_loss": "mean cross-entropy on the training set",
    "epochs": "epochs until the training loss was reached",
}


@torch.no_grad()
def controls(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, float]:
    """Those that the weights and the training samples give."""
    path = path_norm(model, x[:1])
    tenth = float(margins(model(x), y).double().quantile(0.1))
    return {
        "weight_norm": sum(float(p.double().square().sum()) for p in model.parameters()) ** 0.5,
        "path_norm": path,
        "margin": tenth,
        "normalized_margin": tenth / path,
        "parameter_count": float(sum(p.numel() for p in model.parameters())),
    }


@torch.no_grad()
def path_norm(model: nn.Module, example: Tensor) -> float:
    """√ Σ over paths from an input or a bias to an output of the product of squared weights.

    Of a network of linear layers and ReLU: with squared parameters and inputs of 1 nothing is
    negative, so that ReLU does nothing and the outputs add up all paths.
    """
    squared = deepcopy(model).double()
    for parameter in squared.parameters():
        parameter.square_()
    return float(squared(torch.ones_like(example, dtype=torch.float64)).sum().sqrt())


def margins(logits: Tensor, y: Tensor) -> Tensor:
    """The logit of the label less the largest other one."""
    own = logits.gather(1, y[:, None]).squeeze(1)
    others = logits.scatter(1, y[:, None], -torch.inf)
    return own - others.max(1).values
