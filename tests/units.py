"""Which entry of a weight belongs to which units, told from the module's type alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class Units:
    """For every entry of a flattened weight: its output unit, input unit and kernel position."""

    out: Tensor
    into: Tensor
    place: Tensor

    def columns(self, w: Tensor, block: Tensor) -> Tensor:
        """w(j)ᵀ H_jj w(j), one an input unit."""
        return self._forms(w, block, self.into)

    def rows(self, w: Tensor, block: Tensor) -> Tensor:
        return self._forms(w, block, self.out)

    def _forms(self, w: Tensor, block: Tensor, unit: Tensor) -> Tensor:
        parts = [w.reshape(-1) * (unit == j) for j in range(int(unit.max()) + 1)]
        return torch.stack([v @ block @ v for v in parts])


def units(module: nn.Module) -> Units:
    weight = module.weight
    shape = weight.shape
    axes = torch.meshgrid(*[torch.arange(s) for s in shape], indexing="ij")
    place = torch.zeros(shape, dtype=torch.long)
    for axis, size in zip(axes[2:], shape[2:], strict=True):
        place = place * size + axis
    first, second = axes[0], axes[1]
    groups = getattr(module, "groups", 1)
    if "Transpose" in type(module).__name__:
        out, into = first // (shape[0] // groups) * shape[1] + second, first
    elif isinstance(module, nn.Embedding) or type(module).__name__ == "Conv1D":
        out, into = second, first
    else:
        out, into = first, first // (shape[0] // groups) * shape[1] + second
    return Units(out.reshape(-1), into.reshape(-1), place.reshape(-1))


KNOWN = (nn.Linear, nn.Embedding, nn.modules.conv._ConvNd)


def matrices(model: nn.Module) -> dict[str, Units]:
    """The weights of the modules whose layout is known, by parameter name, tied ones left out."""
    found: dict[Any, Any] = {}
    owners: dict[Any, Any] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, KNOWN) or type(module).__name__ == "Conv1D":
            key = f"{name}.weight" if name else "weight"
            owners.setdefault(id(module.weight), set()).add(type(module))
            found[key] = (module.weight, units(module))
    named = dict(model.named_parameters())
    return {
        key: u for key, (w, u) in found.items() if named.get(key) is w and len(owners[id(w)]) == 1
    }
