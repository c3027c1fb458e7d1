"""The exact path for parameters that no fast rule serves: per-sample gradients, written out.

Samples are taken together with `torch.func.vmap` where that gives what autograd gives, and one by
one where it does not (data-dependent control flow, parameters held in plain lists, scripts).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

import torch
from torch import Tensor
from torch.func import functional_call, vjp, vmap
from torch.utils._pytree import tree_map

from saltflat.curvature.memory import out_of_memory
from saltflat.curvature.record import Safe
from saltflat.risk import Batch, Risk

_ENTRIES = 1 << 24  # of the gradients that are held at a time


@final
class PerSample:
    """Gradients of the parameters `names`, for every sample and direction."""

    def __init__(self, risk: Risk, names: list[str], few: Batch) -> None:
        self.risk = risk
        self.parameters = {name: risk.parameters[name] for name in names}
        self.entries = sum(p.numel() for p in self.parameters.values())
        self.together = self._agrees(few)

    def gradients(self, batch: Batch, columns: Tensor) -> Iterator[tuple[slice, dict[str, Tensor]]]:
        """Blocks of samples with their gradients, each (D, samples, *shape)."""
        start = 0
        while start < batch.size:
            size = max(1, _ENTRIES // max(1, self.entries * len(columns))) if self.together else 1
            part = batch.part(start, start + size)
            rows = slice(start, start + part.size)
            try:
                compute = self._together if self.together else self._alone
                found = compute(part, columns[:, rows])
            except RuntimeError as error:
                if not self.together or out_of_memory(error):
                    raise
                self.together = False  # these samples it does not take
                continue
            yield rows, found
            start += part.size

    def _together(self, batch: Batch, columns: Tensor) -> dict[str, Tensor]:
        flags = tree_map(lambda t: _per_sample(t, batch.size), batch.inputs)
        inputs = tree_map(lambda t, yes: t.unsqueeze(1) if yes else t, batch.inputs, flags)
        dims = tree_map(lambda yes: 0 if yes else None, flags)
        fixed = {n: p.detach() for n, p in self.parameters.items()}

        def one(x: Any, cotangents: Tensor) -> dict[str, Tensor]:
            def outputs(parameters: dict[str, Tensor]) -> Tensor:
                return self._call(parameters, Batch(x, None, 1, batch.where))

            pull = vjp(outputs, fixed)[1]
            gradients: dict[str, Tensor] = vmap(lambda u: pull(u.unsqueeze(0))[0])(cotangents)
            return gradients

        result = vmap(one, in_dims=(dims, 1), out_dims=1)(inputs, columns)
        return {name: g.detach() for name, g in result.items()}

    def _call(self, parameters: dict[str, Tensor], batch: Batch) -> Tensor:
        with Safe():
            outputs: Tensor = functional_call(_Forward(self.risk), _prefixed(parameters), (batch,))
        return outputs

    def _alone(self, batch: Batch, columns: Tensor) -> dict[str, Tensor]:
        with Safe():
            outputs = self.risk.forward(batch)
        parameters = list(self.parameters.values())
        rows = [
            torch.autograd.grad(outputs, parameters, column, retain_graph=True, allow_unused=True)
            for column in columns
        ]
        found = {}
        for name, parameter, gradients in zip(
            self.parameters, parameters, zip(*rows, strict=True), strict=True
        ):
            dense = [torch.zeros_like(parameter) if g is None else g for g in gradients]
            found[name] = torch.stack([_dense(g) for g in dense]).unsqueeze(1).detach()
        return found

    def _agrees(self, few: Batch) -> bool:
        """Whether vmap gives, sample by sample, what autograd gives."""
        generator = torch.Generator().manual_seed(0)
        outputs = self.risk.forward(few)
        column = torch.randn((1, *outputs.shape), generator=generator).to(outputs)
        try:
            found = self._together(few, column)
        except Exception:  # vmap refuses in many ways; going sample by sample needs none of it
            return False
        tolerance = 1e-9 if outputs.dtype == torch.float64 else 1e-3
        for i in range(few.size):
            truth = self._alone(few.part(i, i + 1), column[:, i : i + 1])
            for name, gradient in truth.items():
                if not gradient.numel():
                    continue
                error = (found[name][:, i : i + 1] - gradient).abs().max()
                if not error <= tolerance * gradient.abs().max():
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


def _prefixed(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"model.{name}": p for name, p in parameters.items()}


def _per_sample(leaf: Any, size: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) == size


def _dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient
