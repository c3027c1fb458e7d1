"""The oracle: dense Hessians and Gauss-Newton matrices by plain autograd.

One batch holds all the samples, every derivative is taken row by row, and nothing is imported
from the library under test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel


def normalized_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Equations 20 to 22 of Normalized Flat Minima, as printed."""
    mu = outputs.mean(1, keepdim=True)  # (21)
    f = outputs / ((outputs - mu) ** 2).mean(1, keepdim=True).sqrt()  # (22)
    p = f.exp() / f.exp().sum(1, keepdim=True)
    return -p.gather(1, targets.unsqueeze(1)).log().mean()  # (20)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": F.cross_entropy,
    "mse": F.mse_loss,
    "bce": F.binary_cross_entropy_with_logits,
    "normalized_cross_entropy": normalized_cross_entropy,
}


def flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([(t.to_dense() if t.is_sparse else t).reshape(-1) for t in tensors])


def gradient(value: Tensor, parameters: list[Tensor], **options: Any) -> Tensor:
    return flat(torch.autograd.grad(value, parameters, materialize_grads=True, **options))


def jacobian(outputs: Tensor, parameters: list[Tensor]) -> Tensor:
    return torch.stack(
        [gradient(o, parameters, retain_graph=True).detach() for o in outputs.reshape(-1)]
    )


def second_derivatives(value: Tensor, parameters: list[Tensor]) -> Tensor:
    first = gradient(value, parameters, create_graph=True)
    if not first.requires_grad:
        return first.new_zeros(len(first), len(first))
    return jacobian(first, parameters)


class Dense:
    """Full matrices of the risk of `model` on the one batch (x, y), over `names` jointly."""

    def __init__(
        self,
        model: nn.Module,
        x: Any,
        y: Any,
        loss: Callable[[Tensor, Tensor], Tensor] | str = "cross_entropy",
        *,
        names: Iterable[str] | None = None,
        output: Callable[[Any], Tensor] | None = None,
    ) -> None:
        self.model, self.x, self.y, self.output = model.eval(), x, y, output
        self.loss = LOSSES[loss] if isinstance(loss, str) else loss
        named = dict(model.named_parameters())
        chosen = [n for n, p in named.items() if p.requires_grad] if names is None else list(names)
        self.parameters = {n: named[n] for n in chosen}

    @property
    def names(self) -> list[str]:
        return list(self.parameters)

    @cached_property
    def outputs(self) -> Tensor:
        # the fused attention kernels have no second derivative
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            if isinstance(self.x, dict):
                out = self.model(**self.x)
            else:
                out = self.model(*self.x) if isinstance(self.x, tuple) else self.model(self.x)
        if self.output is not None:
            return self.output(out)
        return out if isinstance(out, Tensor) else out["logits"]

    @cached_property
    def hessian(self) -> Tensor:
        return second_derivatives(self.loss(self.outputs, self.y), [*self.parameters.values()])

    @cached_property
    def ggn(self) -> Tensor:
        free = self.outputs.detach().requires_grad_()
        curvature = second_derivatives(self.loss(free, self.y), [free])
        rows = jacobian(self.outputs, [*self.parameters.values()])
        return rows.T @ curvature @ rows

    @cached_property
    def bend(self) -> Tensor:
        """The second derivatives of <r, outputs> for a random r: zero where outputs are linear."""
        r = torch.randn(self.outputs.shape, generator=torch.Generator().manual_seed(7)).double()
        value = (r.to(self.outputs) * self.outputs).sum()
        return second_derivatives(value, [*self.parameters.values()])

    def blocks(self, matrix: Tensor) -> dict[str, Tensor]:
        """The diagonal blocks of a joint matrix, by parameter name."""
        sizes = [p.numel() for p in self.parameters.values()]
        rows = matrix.split(sizes)
        return {
            n: r.split(sizes, 1)[i] for i, (n, r) in enumerate(zip(self.names, rows, strict=True))
        }
