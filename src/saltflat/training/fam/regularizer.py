"""FAM, relative flatness aware minimization: the flatness of a layer as a training penalty."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Self, final

import torch
from torch import Tensor, nn

from saltflat.curvature import Hutchinson, mixed
from saltflat.errors import InvalidType, InvalidValue, ModelError
from saltflat.losses import LossLike, resolve
from saltflat.risk import Output, logits, unwrap
from saltflat.training.fam.capture import Capture, Forward, LayerCall, named_layers
from saltflat.training.fam.flatness import LayerModule
from saltflat.training.fam.penalty import Choices, Penalty, PenaltyPass


@final
class FAM:
    """Relative flatness of a layer, to be added to the loss.

    κ(W) = Σ_{s,s'} ⟨w_s, w_s'⟩ Tr H_{s,s'}, with w_s the rows of the layer's weight W and H the
    Hessian of the loss in W (Adilova et al., "FAM: Relative Flatness Aware Minimization", 2023,
    section 1). Its gradient has all the terms of Lemma 1: the third derivatives reach every layer.

        fam = FAM(model, layer="fc", strength=0.1)
        loss = criterion(model(x), y) + fam(y)

    Parameters
    ----------
    layer : the name of a Linear or Conv1d/2d/3d layer, or a list of them, whose penalties are
        added. None takes the last Linear layer and warns which it is.
    strength : what the penalty is multiplied by; may be changed between steps.
    simplified : ‖W‖² Tr H (section 3.2) in place of the double sum.
    normalize_features : divide the layer's inputs by their standard deviation over the batch and
        multiply the columns of W by it, which makes κ invariant to rescalings of input units too.
    loss : the loss whose flatness is meant: a name, a module or a callable, as in `saltflat.trace`.
    estimator : `Hutchinson(probes, seed)` estimates the penalty, without bias, in place of
        computing it; with new random signs at every call.
    output : picks the outputs out of what the model returns; by default a tensor, or its logits.

    The penalty is that of the last forward pass of the model that ran with gradients: in training
    mode, on that batch, with its dropout masks. A convolution with groups is the sum over its
    groups. BatchNorm in training mode ABOVE the layer couples the samples; its statistics are
    held constant in the second derivative (not in the gradient), which a warning says.

    The penalty is a mean over samples, as a loss with reduction "mean" is: micro-batches of equal
    size, and equal shards under DistributedDataParallel, add up to the whole batch. They do not
    where samples are coupled: with normalize_features, BatchNorm in training mode, weights of
    classes, or a loss that is not a mean over samples. With an estimator each part draws random
    signs of its own, which leaves the estimate unbiased.

    Where the loss or the network is not convex κ may be negative; strength then has a limit.

    Copies of the model (deepcopy, pickle) carry no penalty; copies of the FAM object carry their
    own model.

    Examples
    --------
    >>> import torch, saltflat as sf
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    >>> x, y = torch.randn(8, 3), torch.arange(8) % 2
    >>> fam = sf.FAM(model, layer="2", strength=0.1)
    >>> loss = torch.nn.functional.cross_entropy(model(x), y)
    >>> penalty = fam(y)
    >>> f"{penalty.item():.3g}"
    '0.0012'
    >>> (loss + penalty).backward()
    """

    def __init__(
        self,
        model: nn.Module,
        layer: str | Iterable[str] | None = None,
        strength: float = 0.1,
        *,
        simplified: bool = False,
        normalize_features: bool = False,
        loss: LossLike = "cross_entropy",
        estimator: Hutchinson | None = None,
        output: Output | None = None,
    ) -> None:
        if estimator is not None and not isinstance(estimator, Hutchinson):
            raise InvalidType(
                "The estimator of FAM must be saltflat.Hutchinson or None. "
                f"Got {type(estimator).__name__}."
            )
        self.strength = strength
        self._arguments = {
            "simplified": simplified,
            "normalize_features": normalize_features,
            "loss": loss,
            "estimator": estimator,
            "output": output,
        }
        self.model = unwrap(model)
        self._layers = named_layers(self.model, layer)
        self._choices = Choices(simplified, normalize_features, estimator)
        self._loss = resolve(loss)
        self._output = output or logits
        self._calls = 0
        self._last: dict[str, Penalty] = {}
        self._capture = Capture(self.model, self._layers)
        if layer is None:
            (name,) = self._layers
            said = f"the last Linear layer of the model. Pass layer={name!r} to say so yourself."
            warnings.warn(f"FAM regularizes {name!r}, {said}", stacklevel=2)

    @property
    def strength(self) -> float:
        return self._strength

    @strength.setter
    def strength(self, value: float) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidType(f"strength must be a number. Got {type(value).__name__}.")
        if not (math.isfinite(value) and value >= 0):
            raise InvalidValue(f"strength must be finite and not negative. Got {value}.")
        self._strength = float(value)

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the layers."""
        return tuple(self._layers)

    @property
    def last(self) -> Mapping[str, Penalty]:
        """The penalties of the last call by layer, without `strength` and without gradients."""
        return MappingProxyType(self._last)

    def __call__(self, targets: Any) -> Tensor:
        """`strength` × the penalty of the last forward pass; its activations are then freed."""
        forward = self._capture.take()
        outputs = self._output(forward.returned)
        self._calls += 1
        if self._strength == 0.0:  # adds nothing, not even 0 × infinity
            self._last = {}
            return outputs.new_zeros((), dtype=torch.promote_types(outputs.dtype, torch.float32))
        calls = self._single_calls(forward, outputs)
        with torch.enable_grad(), torch.autocast(outputs.device.type, enabled=False):
            # Looking at targets makes a GPU wait, and the user's own loss looks at them too.
            check = outputs.device.type == "cpu" or self._calls == 1
            generator = self._generator(outputs.device)
            step = PenaltyPass(outputs, targets, self._loss, generator, check=check)
            penalties = step.penalties(calls, self._choices)
            total = torch.stack([p.value for p in penalties.values()]).sum()
        self._last = {
            name: Penalty(p.value.detach(), p.stderr, p.rule) for name, p in penalties.items()
        }
        penalty = self._strength * total
        return penalty if torch.is_grad_enabled() else penalty.detach()

    def _generator(self, device: torch.device) -> torch.Generator:
        seed = 0 if self._choices.estimator is None else self._choices.estimator.seed
        return torch.Generator(device).manual_seed(mixed(seed, self._calls))

    def _single_calls(
        self, forward: Forward, outputs: Any
    ) -> dict[str, tuple[LayerModule, LayerCall]]:
        """The one call of every layer, checked."""
        if not isinstance(outputs, Tensor) or not outputs.is_floating_point() or outputs.ndim == 0:
            raise ModelError(
                "The outputs must be a floating point tensor with a row for each sample; pass "
                "output=callable."
            )
        result = {}
        for name, layer in self._layers.items():
            calls = forward.calls[name]
            if len(calls) != 1:
                raise ModelError(
                    f"Layer {name!r} ran {len(calls)} times in the forward pass. FAM needs a "
                    "layer that is called once, as a module; choose another."
                )
            if calls[0].edge is None:
                raise ModelError(
                    f"Layer {name!r} and all below it are frozen (requires_grad=False). Choose a "
                    "layer that training reaches."
                )
            if calls[0].input._version != calls[0].version:
                raise ModelError(
                    f"The input of layer {name!r} was changed in place after the layer ran. Make "
                    "that operation out of place, or choose another layer."
                )
            result[name] = (layer, calls[0])
        return result

    def remove(self) -> None:
        """Take the hooks off the model."""
        self._capture.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def state_dict(self) -> dict[str, Any]:
        """The strength and the count of calls, which the random signs follow from."""
        return {"strength": self._strength, "calls": self._calls}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        self.strength = state["strength"]
        self._calls = int(state["calls"])

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.model, self.layers, self._arguments, self.state_dict())

    def __repr__(self) -> str:
        names = ", ".join(map(repr, self._layers))
        kind = "simplified " if self._choices.simplified else ""
        return f"FAM({kind}relative flatness of {names}, strength={self._strength:g})"


def _rebuild(
    model: nn.Module, layers: tuple[str, ...], arguments: dict[str, Any], state: dict[str, Any]
) -> FAM:
    fam = FAM(model, layers, **arguments)
    fam.load_state_dict(state)
    return fam
