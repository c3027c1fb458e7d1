"""The layers that FAM speaks of, what it keeps of a forward pass, and the hooks that bring it.

The hooks belong to one model object. A copy of the model (deepcopy, pickle) gets silent ones in
their place, and a model whose capture is gone keeps none.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from saltflat.errors import InvalidType, InvalidValue, ModelError, nearest
from saltflat.sharded import is_sharded, parameters_of, refuse_flattened, refuse_sharded
from saltflat.training.fam.flatness import LayerModule, apply

_NOTHING = "There was no forward pass since FAM was made, or its hooks were removed"
_COMPILED = (
    " If a compiled model ran before FAM was made, its code does not know of FAM's hooks: make FAM "
    "before the first call of the compiled model, or call torch.compiler.reset() after making FAM."
)


def named_layers(model: nn.Module, layer: str | Iterable[str] | None) -> dict[str, LayerModule]:
    """The layers by name; None is the last Linear, the weights that leave the penultimate
    representation (the paper's section 4)."""
    known: dict[str, LayerModule] = {
        n: m for n, m in model.named_modules() if isinstance(m, LayerModule)
    }
    if layer is None:
        # Attention holds its output projection as a Linear that it never calls.
        called = [n for n, m in known.items() if type(m) is not NonDynamicallyQuantizableLinear]
        linear = [n for n in called if isinstance(known[n], nn.Linear)]
        if not linear:
            raise ModelError(
                "FAM found no Linear layer in the model. Name a layer: layer='features.0'."
            )
        return {linear[-1]: known[linear[-1]]}
    names = [layer] if isinstance(layer, str) else _listed(layer)
    for name in names:
        if name not in known:
            hint = nearest(name, known)
            raise InvalidValue(
                "The 'layer' argument of FAM must name a Linear or Conv layer of the model. "
                f"Got {name!r}; {hint[0].lower()}{hint[1:]}"
            )
    return {name: known[name] for name in names}


def _listed(layer: Iterable[str]) -> list[str]:
    names = list(layer) if isinstance(layer, Iterable) else [layer]
    if not names:
        raise InvalidValue("The 'layer' argument of FAM is an empty list. Name a layer.")
    for name in names:
        if not isinstance(name, str):
            raise InvalidType(
                "The 'layer' argument of FAM must be a name or a list of names. "
                f"Got {type(name).__name__}."
            )
    return names


@final
@dataclass(frozen=True, slots=True)
class LayerCall:
    """One call of a layer: its input, and the place of its output in the autograd graph.

    The place and not the output: an in-place activation would change that.
    """

    input: Tensor
    version: int  # of the input, to notice that it was changed in place
    edge: GradientEdge | None  # None: the output does not depend on anything trainable
    shape: torch.Size


@final
@dataclass(frozen=True, slots=True)
class Forward:
    """One forward pass: what the model returned and the calls of each layer."""

    returned: Any
    calls: Mapping[str, list[LayerCall]]


class Capture:
    """Keeps the last forward pass that ran with gradients, until it is taken."""

    def __init__(self, model: nn.Module, layers: Mapping[str, LayerModule]) -> None:
        refuse_flattened(model.parameters())
        self._calls: dict[str, list[LayerCall]] | None = None  # not None while the model runs
        self._forward: Forward | None = None
        self._missing = _NOTHING
        self._checked: set[str] = set()
        self._layers = dict(layers)
        shared = parameters_of(model)
        before = model.register_forward_pre_hook(_Hook(self, Capture._begin))
        within = [
            layer.register_forward_hook(
                _Hook(self, Capture._note, name),
                # Before FSDP2 frees the weights that it has gathered.
                prepend=is_sharded(shared.get(f"{name}.weight")),
                with_kwargs=True,
            )
            for name, layer in layers.items()
        ]
        after = model.register_forward_hook(_Hook(self, Capture._end))
        self._handles = [before, *within, after]
        self._finalizer = weakref.finalize(self, _remove, self._handles)

    def remove(self) -> None:
        """Take the hooks off and let go of what was kept."""
        self._finalizer()
        self._calls = self._forward = None
        self._missing = _NOTHING

    def take(self) -> Forward:
        """The kept pass, which is then forgotten."""
        forward, self._forward = self._forward, None
        if forward is None:
            raise ModelError(
                f"{self._missing}. Call fam(targets) once after each model(inputs) that runs with "
                "gradients."
                + _COMPILED
                * (self._missing is _NOTHING and "torch._dynamo" in sys.modules)
            )
        self._missing = "The last forward pass with gradients was already used"
        return forward

    def _begin(self, *_: Any) -> None:
        if torch.is_grad_enabled():
            self._calls, self._forward = {name: [] for name in self._layers}, None
        elif self._forward is None:
            self._missing = "The last forward pass ran without gradients"

    def _end(self, module: nn.Module, args: Any, returned: Any) -> None:
        if self._calls is not None and torch.is_grad_enabled():
            self._forward, self._calls = Forward(returned, self._calls), None

    def _note(self, name: str, _: nn.Module, args: Any, kwargs: Any, z: Any) -> None:
        """A layer ran; passes outside of the model's own (checkpointing) do not count."""
        if self._calls is None or not torch.is_grad_enabled():
            return
        x = args[0] if args else kwargs["input"]
        if name not in self._checked:
            _check(name, self._layers[name], x, z)
            self._checked.add(name)
        edge = get_gradient_edge(z) if z.requires_grad else None
        self._calls[name].append(LayerCall(x, x._version, edge, z.shape))


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


class _Hook:
    """Calls a method of the capture, as long as that lives."""

    def __init__(self, capture: Capture, method: Callable[..., None], *first: Any) -> None:
        self.capture, self.method, self.first = weakref.ref(capture), method, first

    def __call__(self, *arguments: Any) -> None:
        capture = self.capture()
        if capture is not None:
            self.method(capture, *self.first, *arguments)

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        return _make_silent, ()


def silent(*_: Any) -> None:
    """What a copy of the model has in place of a capture's hook."""


def _make_silent() -> Callable[..., None]:
    return silent


def _check(name: str, layer: LayerModule, x: Any, z: Any) -> None:
    """Refuse a layer whose output is not W x + b (a subclass, another hook)."""
    refuse_sharded(
        layer._parameters.values(),
        f"FAM needs the whole weight of layer {name!r} in its forward pass",
        "That is what fully_shard gives, and tensor parallelism does not; choose another layer.",
    )
    with torch.no_grad():
        expected = apply(layer, x)
        tolerance = 1e-3 if z.dtype in (torch.float32, torch.float64) else 5e-2
        if expected.shape == z.shape:
            far = (expected - z).abs().max() > tolerance * z.abs().max()
            if not far:  # nor where there are NaNs, which are somebody else's trouble
                return
    raise ModelError(
        f"Layer {name!r} ({type(layer).__name__}) does not compute W x + b with its own weight, "
        "which FAM relies on. Another hook or a subclass may change its output; choose another "
        "layer."
    )
