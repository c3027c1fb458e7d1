"""Which filters feed BatchNorm: seen in the autograd graph of the first forward pass."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from saltflat.errors import InvalidValue, nearest
from saltflat.risk import unwrap
from saltflat.training.perturb import listen

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_LAYERS = (nn.Linear, *_CONVOLUTIONS, *_TRANSPOSED)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
# Autocast puts a cast between a layer and what follows.
_COPIES = ("ToCopyBackward0",)


@final
@dataclass(frozen=True, slots=True)
class Filters:
    """The weight `name` whose slices along `axis` are filters that feed BatchNorm."""

    name: str
    parameter: Tensor
    axis: int

    @property
    def count(self) -> int:
        return self.parameter.shape[self.axis]

    def norms(self, tensor: Tensor) -> Tensor:
        """‖t_i‖ of every filter, in a shape that broadcasts against the weight."""
        dims = [d for d in range(tensor.ndim) if d != self.axis]
        result: Tensor = torch.linalg.vector_norm(tensor, dim=dims, keepdim=True)
        return result


@final
class FilterSearch:
    """Watches the first forward pass with gradients of a model; `found` is None until then.

    A layer counts if its outputs go into BatchNorm with batch statistics and nowhere else: scaling
    a filter by a > 0 then changes nothing, whatever its bias.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = unwrap(model)
        self.found: tuple[Filters, ...] | None = None
        self._calls: list[tuple[nn.Module, Node, int]] = []  # layer, its node, dimensions
        self._stack = ExitStack()
        self._running = False
        self._handles: list[RemovableHandle] = listen(self._before, self._after)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _before(self, module: nn.Module, _: Any) -> None:
        if self._running or not torch.is_grad_enabled() or unwrap(module) is not self.model:
            return
        self._running = True
        # A compiled model hides its layers.
        self._stack.enter_context(torch.compiler.set_stance("force_eager"))

    def _after(self, module: nn.Module, _: Any, output: Any) -> None:
        if not self._running:
            return
        if isinstance(module, _LAYERS + _BATCH_NORMS) and isinstance(output, Tensor):
            node = output.grad_fn  # now, as an in-place operation may change it
            self._calls += [(module, node, output.ndim)] if node is not None else []
        if module is self.model:
            nodes = [t.grad_fn for t in tree_leaves(output) if isinstance(t, Tensor)]
            roots = [node for node in nodes if node is not None]
            if roots:  # else it failed, or computed nothing that can be trained
                self.found = self._conclude(_consumers(roots))
                self.close()
            self._calls, self._running = [], False
            self._stack.close()

    def _conclude(self, consumers: dict[Node, list[Node]]) -> tuple[Filters, ...]:
        normalised = {
            node
            for module, node, _ in self._calls
            if isinstance(module, _BATCH_NORMS) and (module.training or not _tracks(module))
        }
        good: dict[nn.Module, bool] = {}
        for module, node, ndim in self._calls:
            if isinstance(module, _LAYERS):
                takers = _skip_copies(consumers[node], consumers)
                fits = bool(takers) and all(taker in normalised for taker in takers)
                fits = fits and _one_filter_a_channel(module, ndim)
                good[module] = good.get(module, True) and fits
        return self._name(good)

    def _name(self, good: dict[nn.Module, bool]) -> tuple[Filters, ...]:
        """The weights of the good layers, without those that another module uses too."""
        owners: dict[Tensor, list[nn.Module]] = defaultdict(list)
        for module in self.model.modules():
            for parameter in module._parameters.values():
                if parameter is not None:
                    owners[parameter].append(module)
        return tuple(
            Filters(name, parameter, _axis(owners[parameter][0]))
            for name, parameter in self.model.named_parameters()
            if name.rpartition(".")[2] == "weight"
            and all(good.get(owner, False) for owner in owners[parameter])
        )


def named_filters(model: nn.Module, names: Sequence[str]) -> tuple[Filters, ...]:
    """The filters of the layers with these names."""
    modules = dict(unwrap(model).named_modules())
    found = []
    for name in names:
        if name not in modules:
            raise InvalidValue(f"The model has no layer {name!r}. {nearest(name, modules)}")
        module = modules[name]
        if not isinstance(module, _LAYERS):
            raise InvalidValue(
                f"A filter belongs to a Linear or a convolution. Got {name!r}, which is "
                f"{type(module).__name__}."
            )
        found.append(Filters(f"{name}.weight".lstrip("."), module.weight, _axis(module)))
    return tuple(found)


def _axis(layer: nn.Module) -> int:
    """The axis of the weight that counts the filters."""
    return 1 if isinstance(layer, _TRANSPOSED) else 0


def _one_filter_a_channel(layer: nn.Module, ndim: int) -> bool:
    """Whether axis 1 of the output, which BatchNorm normalises along, counts the filters."""
    if isinstance(layer, nn.Linear):
        return ndim == 2
    return not isinstance(layer, _TRANSPOSED) or layer.groups == 1


def _tracks(norm: nn.Module) -> bool:
    return norm._buffers.get("running_mean") is not None


def _consumers(roots: Sequence[Node]) -> dict[Node, list[Node]]:
    """For every node of the graph above `roots`, the nodes that take its output."""
    consumers: dict[Node, list[Node]] = defaultdict(list)
    seen, waiting = set(roots), list(roots)
    while waiting:
        node = waiting.pop()
        for child, _ in node.next_functions:
            if child is not None:
                consumers[child].append(node)
                if child not in seen:
                    seen.add(child)
                    waiting.append(child)
    return consumers


def _skip_copies(nodes: Sequence[Node], consumers: dict[Node, list[Node]]) -> list[Node]:
    result: list[Node] = []
    for node in nodes:
        if node.name() in _COPIES:
            result += _skip_copies(consumers[node], consumers)
        else:
            result.append(node)
    return result
