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
from saltflat.errors import InvalidType, InvalidValue, ModelError, listed
from saltflat.losses import LossLike, resolve, summary
from saltflat.risk import Output, answer_of, unwrap
from saltflat.sharded import unsharded
from saltflat.training.fam.capture import Capture, Forward, LayerCall, named_layers
from saltflat.training.fam.flatness import LayerModule
from saltflat.training.fam.penalty import Choices, Penalty, PenaltyPass

SHARE = 0.05
_MATTERS = 0.01  # of the objective


@final
class FAM:
    """Relative flatness of a layer, to be added to the loss.

    κ(W) = Σ_{s,s'} ⟨w_s, w_s'⟩ Tr H_{s,s'}, with w_s the rows of the layer's weight W and H the
    Hessian of the loss in W (Adilova et al., "FAM: Relative Flatness Aware Minimization", 2023,
    section 1). Its gradient has all the terms of Lemma 1: the third derivatives reach every layer.

        fam = FAM(model, layer="fc", share=0.05)
        loss = criterion(model(x), y) + fam(y)

    Parameters
    ----------
    layer : the name of a Linear or Conv1d/2d/3d layer, or a list of them, whose penalties are
        added. None takes the last Linear layer and warns which it is.
    strength, share : how much of it; one of the two, and either may be changed between steps.
        `strength` is what κ is multiplied by. As κ may be a hundredth of the loss or a hundred
        times it, no one strength serves all networks. `share` is the largest part that the penalty
        may have of the sum of loss and penalty: κ is multiplied by share/(1 − share) ×
        loss/(loss + |κ|), a constant in the gradient. So the penalty comes to have its share as κ
        outgrows the loss, and while κ is small, as in the first steps, it is one of fixed strength
        (held at its share from the start, it would drive the layer's inputs to zero before
        anything is learned). By default share = 0.05. `current_strength` and `current_share` are
        those of the last call, whichever was given.
    simplified : ‖W‖² Tr H (section 3.2) in place of the double sum.
    normalize_features : divide the layer's inputs by their standard deviation over the batch and
        multiply the columns of W by it, which makes κ invariant to rescalings of input units too.
    loss : the loss whose flatness is meant: a name, a module or a callable, as in `saltflat.trace`.
    estimator : `Hutchinson(probes, seed)` estimates the penalty, without bias, in place of
        computing it; with new random signs at every call.
    output : which of what the model returns are the outputs: the name of an entry or attribute, the
        place in a tuple, or a callable; by default a tensor, or its logits.

    The penalty is that of the last forward pass of the model that ran with gradients: in training
    mode, on that batch, with its dropout masks. A convolution with groups is the sum over its
    groups. BatchNorm in training mode ABOVE the layer couples the samples; its statistics are
    held constant in the second derivative (not in the gradient), which a warning says.

    The penalty is a mean over samples, as a loss with reduction "mean" is: micro-batches of equal
    size, and equal shards under DistributedDataParallel, add up to the whole batch. They do not
    where samples are coupled: with normalize_features, BatchNorm in training mode, weights of
    classes, or a loss that is not a mean over samples; and not with `share`, which every part has
    for itself. With an estimator each part draws random signs of its own, which leaves the estimate
    unbiased.

    Where the loss or the network is not convex κ may be negative. To lower it further bends the
    loss down instead of making it flat, and may keep the network from learning: a warning says so,
    once, where that makes a hundredth of the objective or more. (A GPU is asked at calls 1, 2, 4, 8
    and so on, since it has to wait for the answer.)

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
    >>> fam.share = 0.05
    >>> loss = torch.nn.functional.cross_entropy(model(x), y) + fam(y)
    >>> print(fam)
    FAM(relative flatness of '2', share=0.05; 0.00089 of the objective at strength 0.0517)
    """

    _strength: float | None
    _share: float | None  # one of the two

    def __init__(
        self,
        model: nn.Module,
        layer: str | Iterable[str] | None = None,
        strength: float | None = None,
        *,
        share: float | None = None,
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
        if strength is not None and share is not None:
            raise InvalidValue(
                f"FAM takes a strength or a share. Got strength={strength!r} and share={share!r}."
            )
        if strength is not None:
            self.strength = strength
        else:
            self.share = SHARE if share is None else share
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
        self._output = answer_of(output)
        self._calls, self._warned = 0, False
        self._last: dict[str, Penalty] = {}
        self._factor: float | Tensor = math.nan  # of the last call, and its loss
        self._loss_value = torch.tensor(math.nan)
        self._capture = Capture(self.model, self._layers)
        if layer is None:
            (name,) = self._layers
            said = f"the last Linear layer of the model. Pass layer={name!r} to say so yourself."
            warnings.warn(f"FAM regularizes {name!r}, {said}", stacklevel=2)

    @property
    def strength(self) -> float | None:
        """What κ is multiplied by; None where a share was asked for."""
        return self._strength

    @strength.setter
    def strength(self, value: float) -> None:
        self._strength, self._share = _number("strength", value), None

    @property
    def share(self) -> float | None:
        """The largest part of the objective for the penalty; None where a strength was given."""
        return self._share

    @share.setter
    def share(self, value: float) -> None:
        if _number("share", value) >= 1:
            raise InvalidValue(f"share must be below 1. Got {value}; 0.05 is five percent.")
        self._strength, self._share = None, float(value)

    @property
    def current_strength(self) -> float:
        """What κ was multiplied by in the last call; NaN before the first."""
        return float(self._factor)

    @property
    def current_share(self) -> float:
        """The penalty's part of loss and penalty in the last call; NaN before the first."""
        penalty = abs(float(self._factor) * sum(float(p.value) for p in self._last.values()))
        return penalty / (penalty + abs(float(self._loss_value))) if penalty else penalty

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
        outputs: Tensor = self._output(forward.returned)
        self._calls += 1
        if self._strength == 0.0 or self._share == 0.0:  # adds nothing, not even 0 × infinity
            self._last, self._factor = {}, 0.0
            return outputs.new_zeros((), dtype=torch.promote_types(outputs.dtype, torch.float32))
        calls = self._single_calls(forward, outputs)
        whole = unsharded(self.model, until_backward=torch.is_grad_enabled())
        with whole, torch.enable_grad(), torch.autocast(outputs.device.type, enabled=False):
            # Looking at targets makes a GPU wait, and the user's own loss looks at them too.
            here = outputs.device.type == "cpu"
            check = here or self._calls == 1
            generator = self._generator(outputs.device)
            step = PenaltyPass(outputs, targets, self._loss, generator, check=check)
            penalties = step.penalties(calls, self._choices)
            total = torch.stack([p.value for p in penalties.values()]).sum()
            self._loss_value = step.loss_value()
            self._factor = self._weigh(total.detach())
        self._last = {
            name: Penalty(p.value.detach(), p.stderr, p.rule) for name, p in penalties.items()
        }
        if here or self._calls.bit_count() == 1:
            self._warn_of_negative()
        penalty = self._factor * total
        return penalty if torch.is_grad_enabled() else penalty.detach()

    def _warn_of_negative(self) -> None:
        """Once, where the penalty is below zero beyond chance and matters."""
        penalties = self._last.values()
        value = sum(float(p.value) for p in penalties)
        chance = 4 * math.hypot(*(float(p.stderr) for p in penalties))
        # Of a pass that overflowed, as under a scaler of gradients, both are NaN or infinite.
        if self._warned or not -math.inf < value < -chance:
            return
        if not self.current_share >= _MATTERS:
            return
        self._warned = True
        kappa = "‖W‖² Tr H" if self._choices.simplified else "relative flatness"
        warnings.warn(
            f"The {kappa} of {listed(self.layers)} is negative ({value:.3g}), because the loss or "
            "the network above is not convex there. To lower it further does not make the minimum "
            "flat and may keep the network from learning; it is "
            f"{self.current_share:.2g} of the objective. Measure the flatness of a loss that is "
            "convex in the outputs (loss='bce', say), or take a smaller strength.",
            stacklevel=3,
        )

    def _weigh(self, total: Tensor) -> float | Tensor:
        """What κ is multiplied by: the strength, or what makes the penalty its share."""
        if self._strength is not None:
            return self._strength
        assert self._share is not None
        loss = self._loss_value.abs().to(total)
        both = (loss + total.abs()).clamp_min(torch.finfo(total.dtype).tiny)  # of data that are fit
        return self._share / (1 - self._share) * loss / both

    def _generator(self, device: torch.device) -> torch.Generator:
        seed = 0 if self._choices.estimator is None else self._choices.estimator.seed
        return torch.Generator(device).manual_seed(mixed(seed, self._calls))

    def _single_calls(
        self, forward: Forward, outputs: Any
    ) -> dict[str, tuple[LayerModule, LayerCall]]:
        """The one call of every layer, checked."""
        if not isinstance(outputs, Tensor) or not outputs.is_floating_point() or outputs.ndim == 0:
            raise ModelError(
                "The outputs must be a floating point tensor with a row for each sample. Got "
                f"{summary(outputs)}; pass output= the name of the entry that is, or a callable."
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
        """The strength or share, and the count of calls, which the random signs follow from."""
        return {"strength": self._strength, "share": self._share, "calls": self._calls}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        if state["strength"] is None:
            self.share = state["share"]
        else:
            self.strength = state["strength"]
        self._calls = int(state["calls"])

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.model, self.layers, self._arguments, self.state_dict())

    def __repr__(self) -> str:
        names = ", ".join(map(repr, self._layers))
        kind = "simplified " if self._choices.simplified else ""
        how = f"strength={self._strength:g}" if self._share is None else f"share={self._share:g}"
        now = f"{self.current_share:.2g} of the objective at strength {self.current_strength:.3g}"
        return f"FAM({kind}relative flatness of {names}, {how}{f'; {now}' * bool(self._last)})"


def _number(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidType(f"{name} must be a number. Got {type(value).__name__}.")
    if not (math.isfinite(value) and value >= 0):
        raise InvalidValue(f"{name} must be finite and not negative. Got {value}.")
    return float(value)


def _rebuild(
    model: nn.Module, layers: tuple[str, ...], arguments: dict[str, Any], state: dict[str, Any]
) -> FAM:
    fam = FAM(model, layers, **arguments)
    fam.load_state_dict(state)
    return fam
