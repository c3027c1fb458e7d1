"""Which filters feed BatchNorm: seen in the first forward pass, or inferred from the scales."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from saltflat.errors import InvalidValue, nearest
from saltflat.landscape import Feeds, Partition
from saltflat.risk import unwrap
from saltflat.symmetries import Group, symmetries
from saltflat.training.perturbing import Listener

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_LAYERS = (nn.Linear, *_CONVOLUTIONS, *_TRANSPOSED)


@final
@dataclass(frozen=True, slots=True)
class Filters(Partition):
    """The weight `name` whose slices along `axis` are filters that feed BatchNorm.

    how : what told so, "forward pass" or "scale inference"; "named" if the user did.
    """

    name: str
    parameter: Tensor
    axis: int
    how: str

    @property
    def count(self) -> int:
        return self.parameter.shape[self.axis]

    def sums(self, entries: Tensor) -> Tensor:
        return entries.sum(dim=self._others(entries), keepdim=True)

    def norms(self, entries: Tensor) -> Tensor:
        dims = self._others(entries)
        result: Tensor = torch.linalg.vector_norm(entries, dim=dims, keepdim=True)
        return result

    def _others(self, entries: Tensor) -> list[int]:
        return [d for d in range(entries.ndim) if d != self.axis]


@final
class FilterSearch:
    """Watches the first forward pass with gradients of a model; `found` is None until then.

    A layer counts if its outputs go into BatchNorm with batch statistics and nowhere else: scaling
    a filter by a > 0 then changes nothing, whatever its bias.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = unwrap(model)
        self.found: tuple[Filters, ...] | None = None
        self._feeds: Feeds | None = None
        self._opened_by: nn.Module | None = None  # the model, or what wraps it
        self._stack = ExitStack()
        self._listener = Listener()
        self._listener.open(self._before, self._after)

    def close(self) -> None:
        self._listener.close()

    def _before(self, module: nn.Module, args: Any) -> None:
        if self._feeds is not None:
            # On several ranks it does not go through F.batch_norm, and what it calls is its own.
            if isinstance(module, nn.SyncBatchNorm) and module.training and args:
                self._feeds.normalise(args[0])
                self._feeds.paused = True
        elif torch.is_grad_enabled() and unwrap(module) is self.model:
            weights = _weights(self.model, "forward pass")
            units = {name: f.count for name, f in weights.items()}
            parameters = {name: f.parameter for name, f in weights.items()}
            self._feeds = Feeds(units, parameters, training=True)
            self._opened_by = module
            # A compiled model hides its layers.
            self._stack.enter_context(torch.compiler.set_stance("force_eager"))
            self._stack.enter_context(self._feeds)

    def _after(self, module: nn.Module, _: Any, output: Any) -> None:
        if self._feeds is None:
            return
        if isinstance(module, nn.SyncBatchNorm):
            self._feeds.paused = False
        if module is not self._opened_by:
            return
        feeds, self._feeds = self._feeds, None
        self._stack.close()
        if any(isinstance(t, Tensor) and t.requires_grad for t in tree_leaves(output)):
            # Otherwise it failed, or computed nothing that can be trained.
            feeds.use(output)
            weights = _weights(self.model, "forward pass")
            self.found = tuple(weights[name] for name, fed in feeds.units().items() if fed.all())
            self.close()


def scale_free(model: nn.Module, example: Any) -> tuple[Filters, ...]:
    """The weights each of whose filters can be scaled on its own, as scale inference finds it.

    A filter may be far from BatchNorm, with ReLU, pooling or dropout between, as long as its scale
    reaches it. Filters whose bias must be scaled with them are left out: a bias right before
    BatchNorm does nothing, which the forward pass shows, and any other belongs to no sphere.
    """
    inner = unwrap(model)
    group = symmetries(inner, example, parameters="trainable").only("batchnorm")
    if not len(group):
        return ()
    matrix, classes = group.exponents().matrix.tocsr(), group.exponents().classes
    alone = (np.diff(matrix.indptr) == 1) & (np.asarray(matrix.sum(1)).ravel() == 1)
    mover = np.where(alone, np.asarray(matrix.argmax(1)).ravel(), -1)  # of a class of entries
    entries = np.zeros(matrix.shape[0])
    for each in classes.values():
        entries += np.bincount(each.numpy().ravel(), minlength=len(entries))
    moved = (matrix != 0).T @ entries  # by each generator
    frozen = _frozen(inner, group)
    found = []
    for name, f in _weights(inner, "scale inference").items():
        if name in classes:
            units = mover[classes[name].movedim(f.axis, 0).flatten(1).numpy()]
            one = (units[:, :1] == units).all(1) & (units[:, 0] >= 0) & ~frozen[units[:, 0]]
            if (one & (moved[units[:, 0]] == units.shape[1])).all():
                found.append(f)
    return tuple(found)


def _frozen(model: nn.Module, group: Group) -> NDArray[np.bool_]:
    """Which generators move a BatchNorm that stays in evaluation mode while the model trains."""
    exponents = group.exponents()
    result = np.zeros(len(group), dtype=bool)
    for name, classes in exponents.deviations.items():
        norm = model.get_submodule(name.rpartition(".")[0])
        if model.training and not norm.training:
            result[exponents.matrix[classes.numpy()].nonzero()[1]] = True
    return result


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
        # Not `module.weight`, which a parametrization computes anew each time.
        weight = module._parameters.get("weight")
        if weight is None or _shares_slices(module):
            raise InvalidValue(
                f"The filters of {name!r} are not slices of a parameter: its weight is "
                + ("computed from others. " if weight is None else "shared by groups. ")
                + "Leave it out of `filters`."
            )
        full = f"{name}.weight".lstrip(".")
        found.append(Filters(full, weight, _axis(module), "named"))
    return tuple(found)


def _weights(model: nn.Module, how: str) -> dict[str, Filters]:
    """The weights of layers whose slices along an axis are filters, by name."""
    # Not `m.weight`, which may be computed anew each time.
    layers = {id(m._parameters.get("weight")): m for m in model.modules() if isinstance(m, _LAYERS)}
    return {
        name: Filters(name, parameter, _axis(layers[id(parameter)]), how)
        for name, parameter in model.named_parameters()
        if id(parameter) in layers and not _shares_slices(layers[id(parameter)])
    }


def _axis(layer: nn.Module) -> int:
    """The axis of the weight that counts the filters."""
    return 1 if isinstance(layer, _TRANSPOSED) else 0


def _shares_slices(layer: nn.Module) -> bool:
    """Whether a slice of the weight serves several output channels."""
    return isinstance(layer, _TRANSPOSED) and layer.groups > 1
