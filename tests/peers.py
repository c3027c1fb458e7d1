"""The same quantities from BackPACK and curvlinops, for the cases that they can run."""

from __future__ import annotations

import torch
from cases import Case
from torch import Tensor, nn

BACKPACK = [
    "mlp",
    "mlp without bias",
    "dropout",
    "mlp LeakyReLU",
    "mlp Tanh",
    "mse",
    "cross entropy sum",
    "conv1d",
    "conv1d stride dilation",
    "conv2d padding",
    "conv2d stride uneven",
    "conv2d dilated",
    "conv2d groups",
    "conv3d",
    "transposed 1d",
    "transposed 2d",
    "batch norm 1d",
    "batch norm 2d",
]
CURVLINOPS = [
    "mlp",
    "mlp GELU",
    "residual",
    "branches",
    "siamese",
    "tied weights",
    "module called in a chain",
    "embedding",
    "segmentation",
    "layer norm",
    "lstm",
    "rnn tanh",
    "bilinear gate",
    "cross entropy weights sum",
    "cross entropy soft",
    "mse",
    "bce",
]
MODULES = {"cross_entropy": nn.CrossEntropyLoss, "mse": nn.MSELoss, "bce": nn.BCEWithLogitsLoss}


def loss_module(case: Case) -> nn.Module:
    return MODULES[case.loss]() if isinstance(case.loss, str) else case.loss


def backpack_diagonal(case: Case) -> dict[str, Tensor]:
    """BackPACK's DiagGGNExact."""
    import backpack

    model = backpack.extend(case.model().eval())
    loss = backpack.extend(loss_module(case))
    x, y = case.data()
    with backpack.backpack(backpack.extensions.DiagGGNExact()):
        loss(model(x), y).backward()
    return {name: p.diag_ggn_exact for name, p in model.named_parameters()}


def curvlinops_matrix(case: Case, curvature: str) -> Tensor:
    """curvlinops' Hessian or GGN over all trainable parameters, multiplied out."""
    import curvlinops

    model, data = case.model().eval(), [case.data()]
    parameters = [p for p in model.parameters() if p.requires_grad]
    kind = {"hessian": "HessianLinearOperator", "ggn": "GGNLinearOperator"}[curvature]
    operator = getattr(curvlinops, kind)(model, loss_module(case), parameters, data)
    return operator @ torch.eye(operator.shape[1], dtype=torch.float64)
