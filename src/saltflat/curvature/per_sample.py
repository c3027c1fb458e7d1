"""The exact path for parameters that no fast rule serves: per-sample gradients, written out.

Samples are taken together with `torch.func.vmap` where that gives what autograd gives, and one by
one where it does not (data-dependent control flow, parameters held in plain lists, scripts).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, final

import torch
from torch import Tensor
from torch.func import functional_call, vjp, vmap
from torch.utils._pytree import tree_flatten, tree_unflatten

from saltflat.curvature.rules import Safe
from saltflat.errors import listed
from saltflat.memory import out_of_memory
from saltflat.risk import Batch, Risk
from saltflat.sharded import ADVICE, refuse_sharded

_ENTRIES = 1 << 24  # of the gradients that are held at a time


@final
class PerSample:
    """Gradients of the parameters `names`, for every sample and direction."""

    def __init__(self, risk: Risk, names: list[str]) -> None:
        refuse_sharded(
            risk.model.parameters(),
            f"No fast rule serves {listed(names)}, and per-sample gradients need whole parameters",
            ADVICE,
        )
        self.risk = risk
        self.parameters = {name: risk.parameters[name] for name in names}
        self.entries = sum(p.numel() for p in self.parameters.values())
        self.together = True

    def gradients(self, batch: Batch, columns: Tensor) -> Iterator[tuple[slice, dict[str, Tensor]]]:
        """Blocks of samples with their gradients, each (D, samples, *shape)."""
        start = 0
        while start < batch.size:
            size = max(1, _ENTRIES // max(1, self.entries * len(columns))) if self.together else 1
            part = batch.part(start, start + size)
            rows = slice(start, start + part.size)
            take = self._checked if self.together else self._alone
            gradients = take(part, columns[:, rows])
            if gradients is None:
                self.together = False
                continue
            yield rows, gradients
            start += part.size

    def _checked(self, batch: Batch, columns: Tensor) -> dict[str, Tensor] | None:
        """The samples taken together, if these can be and that is right."""
        try:
            gradients = self._together(batch, columns)
        except Exception as error:  # vmap refuses in many ways
            if out_of_memory(error):
                raise
            return None
        return gradients if self._agrees(batch, columns, gradients) else None

    def _together(self, batch: Batch, columns: Tensor) -> dict[str, Tensor]:
        leaves, structure = tree_flatten(batch.inputs)
        rows = batch.rows[: len(leaves)]
        each = [t.unsqueeze(1) if yes else t for t, yes in zip(leaves, rows, strict=True)]
        inputs = tree_unflatten(each, structure)
        dims = tree_unflatten([0 if yes else None for yes in rows], structure)
        fixed = {n: p.detach() for n, p in self.parameters.items()}

        def one(x: Any, cotangents: Tensor) -> dict[str, Tensor]:
            def run(parameters: dict[str, Tensor]) -> Tensor:
                own = {f"model.{name}": p for name, p in parameters.items()}
                sample = Batch(x, None, 1, batch.where)
                with Safe():
                    outputs: Tensor = functional_call(_Forward(self.risk), own, (sample,))
                return outputs

            pull = vjp(run, fixed)[1]
            gradients: dict[str, Tensor] = vmap(lambda u: pull(u.unsqueeze(0))[0])(cotangents)
            return gradients

        with warnings.catch_warnings():  # torch's, which asks for a report of an operation to it
            warnings.filterwarnings("ignore", "There is a performance drop")
            result = vmap(one, in_dims=(dims, 1), out_dims=1)(inputs, columns)
        return {name: g.detach() for name, g in result.items()}

    def _alone(self, batch: Batch, columns: Tensor) -> dict[str, Tensor]:
        with Safe():
            outputs = self.risk.forward(batch)
        parameters = list(self.parameters.values())
        options: Any = {"retain_graph": True, "materialize_grads": True}
        rows = [torch.autograd.grad(outputs, parameters, c, **options) for c in columns]
        return {
            name: torch.stack([g.to_dense() for g in gradients]).unsqueeze(1).detach()
            for name, gradients in zip(self.parameters, zip(*rows, strict=True), strict=True)
        }

    def _agrees(self, batch: Batch, columns: Tensor, gradients: dict[str, Tensor]) -> bool:
        """Whether what vmap gave adds up to autograd's own gradient of the whole batch."""
        generator = torch.Generator().manual_seed(0)
        shares = torch.randn(columns.shape[:2], generator=generator).to(columns)
        weighted = shares.reshape(*shares.shape, *[1] * (columns.ndim - 2)) * columns
        truth = self._alone(batch, weighted.sum(0, keepdim=True))
        tolerance = 1e-9 if columns.dtype == torch.float64 else 1e-3
        for name, gradient in truth.items():
            if not gradient.numel():
                continue
            each = gradients[name].to(columns).reshape(*shares.shape, -1)
            error = torch.einsum("ds,dse->e", shares, each) - gradient.flatten()
            size = torch.einsum("ds,dse->e", shares.abs(), each.abs())
            if not error.abs().max() <= tolerance * max(size.max(), gradient.abs().max()):
                return False
        return True


class _Forward(torch.nn.Module):
    """`Risk.forward` as a module, so that parameters can be exchanged for a call."""

    def __init__(self, risk: Risk) -> None:
        super().__init__()
        self.risk = risk
        self.model = risk.model

    def forward(self, batch: Batch) -> Tensor:
        return self.risk.forward(batch)
