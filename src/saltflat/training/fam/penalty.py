"""Relative flatness of the layers of one forward pass: which way to compute it, and by it.

**Constants that are none.** Relative flatness is a second derivative in one layer. BatchNorm in
training mode couples the samples above that layer through its statistics; these are held constant
in the second derivative. What comes out still depends on them, and the training gradient must see
that. So they pass through a gate that is shut while the penalty takes its own derivatives, and open
afterwards.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from saltflat.curvature import Additivity, Hutchinson, classify, output_units
from saltflat.errors import LossError, ModelError
from saltflat.losses import CrossEntropy, CustomLoss, JointLoss, Loss, divisor
from saltflat.risk import Batch
from saltflat.training.fam.capture import LayerCall
from saltflat.training.fam.flatness import (
    Form,
    LayerModule,
    LayerPass,
    closed_form,
    joint,
    pull,
    rows_of,
    weigh,
    weight_of,
)

_MANY = 1024  # directions a sample: more is worth a warning
_JOINT = 4096  # outputs of a batch whose joint Hessian is written out at most


@final
@dataclass(frozen=True, slots=True)
class Choices:
    """How the penalty is computed; see `FAM`."""

    simplified: bool
    normalize_features: bool
    estimator: Hutchinson | None


@final
@dataclass(frozen=True, slots=True)
class Penalty:
    """Relative flatness of one layer on one batch.

    rule : "closed form", "loss" (the layers above are piecewise linear), "loss and network", or
    "hutchinson". stderr : 0 unless estimated.
    """

    value: Tensor
    stderr: Tensor
    rule: str


@final
class PenaltyPass:
    """One forward pass with its targets."""

    def __init__(
        self,
        outputs: Tensor,
        targets: Any,
        loss: Loss | Callable[..., Tensor],
        generator: torch.Generator,
        *,
        check: bool,
    ) -> None:
        self.edge = get_gradient_edge(outputs) if outputs.requires_grad else None
        # Half precision is for the network; what follows is done in float32.
        self.outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        self.targets, self.generator = targets, generator
        self.samples = len(outputs)
        if check and isinstance(loss, Loss):
            loss.check(self.outputs.detach(), targets, "this batch")
        self.loss = _settle(loss, self.outputs.detach(), targets)
        self.switch = Switch()

    def penalties(
        self, layers: Mapping[str, tuple[LayerModule, LayerCall]], choices: Choices
    ) -> dict[str, Penalty]:
        """The penalty of every layer, differentiable."""
        done: dict[str, Penalty] = {}
        for name, (layer, call) in layers.items():
            site = self._site(layer, call)
            if choices.estimator is None and self._is_output(site, call):
                done[name] = self._closed(site, choices)
        rest = {name: layers[name] for name in layers if name not in done}
        if rest:
            done |= self._general(rest, choices)
        return {name: done[name] for name in layers}

    def _site(self, layer: LayerModule, call: LayerCall, dim: int = 0) -> LayerPass:
        wide = self.outputs.dtype
        x, w = call.input.to(wide), weight_of(layer).to(wide)
        return LayerPass(layer, x, w, call.shape, self.samples, dim)

    def _is_output(self, site: LayerPass, call: LayerCall) -> bool:
        """Whether the layer's output is the model's, each of its units the logit of a class."""
        assert self.edge is not None
        assert call.edge is not None
        same = call.edge.node is self.edge.node and call.edge.output_nr == self.edge.output_nr
        if not (same and isinstance(self.loss, CrossEntropy) and site.groups == 1):
            return False
        features = len(call.shape) - 1 if isinstance(site.layer, nn.Linear) else 1
        return self.loss.dim(self.outputs, self.targets) == features

    def _closed(self, site: LayerPass, choices: Choices) -> Penalty:
        assert isinstance(self.loss, CrossEntropy)
        site = site.normalized() if choices.normalize_features else site
        value = closed_form(self.loss, self.outputs, self.targets, site, choices.simplified)
        value = value / self._divisor()
        return Penalty(value, torch.zeros_like(value), "closed form")

    def _divisor(self) -> float | Tensor:
        loss, targets = self.loss, self.targets
        assert isinstance(loss, Loss)
        integer = isinstance(targets, Tensor) and not targets.is_floating_point()
        if isinstance(loss, CrossEntropy) and loss.mean and loss.weight is None and integer:
            # A tensor, so that a GPU is not waited for; NaN, as from PyTorch, if it is 0.
            count: Tensor = (targets != loss.ignore_index).sum()
            return count
        return divisor(loss, loss.normaliser(self.outputs.detach(), targets))

    def loss_value(self) -> Tensor:
        """The loss of this batch, without gradients."""
        with torch.no_grad():
            return self._risk(self.outputs.detach()).detach()

    def _risk(self, outputs: Tensor) -> Tensor:
        if isinstance(self.loss, JointLoss):
            return self.loss.value(outputs, self.targets)
        return self.loss.total(outputs, self.targets) / self._divisor()

    def _general(
        self, layers: Mapping[str, tuple[LayerModule, LayerCall]], choices: Choices
    ) -> dict[str, Penalty]:
        edges = {name: call.edge for name, (_, call) in layers.items() if call.edge is not None}
        places = list(edges.values())
        with constant_statistics(self.outputs, places, self.samples, self.switch) as held:
            if held:
                warnings.warn(
                    "BatchNorm in training mode lies above a layer that FAM regularizes: its "
                    "batch statistics are held constant in the penalty's second derivative.",
                    stacklevel=4,
                )
            sites = self._sites(layers, edges)
            if choices.normalize_features:
                sites = {name: site.normalized() for name, site in sites.items()}
            forms = {name: Form.of(site, choices.simplified) for name, site in sites.items()}
            if choices.estimator is not None:
                result = self._estimate(sites, forms, edges, choices.estimator.probes)
            else:
                result = self._exact(sites, forms, edges)
        self.switch.shut = False
        return result

    def _sites(
        self, layers: Mapping[str, tuple[LayerModule, LayerCall]], edges: Mapping[str, GradientEdge]
    ) -> dict[str, LayerPass]:
        """Find out where the samples lie, by what half of them sends back to each layer."""
        half = torch.arange(self.samples, device=self.outputs.device) % 2 == 0
        mask = half.reshape(-1, *[1] * (self.outputs.ndim - 1))
        arrived = torch.autograd.grad(
            self.outputs,
            list(edges.values()),
            self._noise(self.outputs) * mask,
            retain_graph=True,
            allow_unused=True,
        )
        sites = {}
        for (name, (layer, call)), delta in zip(layers.items(), arrived, strict=True):
            if delta is None:
                raise ModelError(f"The outputs do not depend on layer {name!r}; choose another.")
            for dim in rows_of(layer, call.shape, self.samples):
                site = self._site(layer, call, dim)
                foreign = site.split(delta.unsqueeze(0))[0, ~half]
                # NaNs are no evidence; a loop with a GradScaler survives them.
                if self.samples == 1 or not (foreign.abs() > 0).any():
                    sites[name] = site
                    break
            else:
                raise ModelError(
                    f"FAM cannot tell which rows of layer {name!r} (output {tuple(call.shape)}) "
                    f"belong to which of the {self.samples} samples: the samples must be its "
                    "first dimension and must not interact in the layers above."
                )
        return sites

    def _noise(self, like: Tensor) -> Tensor:
        noise = torch.randn(like.shape, generator=self.generator, device=like.device)
        return noise.to(like.dtype)

    def _exact(
        self,
        sites: Mapping[str, LayerPass],
        forms: Mapping[str, Form],
        edges: Mapping[str, GradientEdge],
    ) -> dict[str, Penalty]:
        _warn_if_many(prod(self.outputs.shape[1:]), "outputs")
        deltas = pull(self.outputs, list(edges.values()), output_units(self.outputs))
        nonlinear = self._nonlinear(edges)
        result = {}
        for (name, site), delta in zip(sites.items(), deltas, strict=True):
            assert delta is not None
            value = self._loss_part(site.split(delta.to(self.outputs.dtype)), forms[name])
            if nonlinear[name]:
                value = value + self._network_part(site, forms[name], edges[name])
            rule = "loss and network" if nonlinear[name] else "loss"
            result[name] = Penalty(value, torch.zeros_like(value), rule)
        return result

    def _loss_part(self, deltas: Tensor, form: Form) -> Tensor:
        """Jᵀ B J contracted."""
        if isinstance(self.loss, Loss):
            left, right = weigh(self.loss, self.outputs, self.targets, deltas)
            return form.contract(left, right) / self._divisor()
        if self.outputs.numel() > _JOINT:
            raise LossError(
                f"The loss {self.loss.name} couples the samples of a batch, and its Hessian in "
                f"{self.outputs.numel()} outputs is too large. Pass estimator=Hutchinson(probes)."
            )
        return joint(self._risk, self.outputs, deltas, form)

    def _nonlinear(self, edges: Mapping[str, GradientEdge]) -> dict[str, bool]:
        """Whether the network above is not piecewise linear: r·∇²o·v is then not zero for random
        r and v. Not the loss's own gradient for r, which may vanish where its derivative does not.
        """
        places = list(edges.values())
        r = self._noise(self.outputs)
        first = torch.autograd.grad(self.outputs, places, r, create_graph=True)
        nonlinear = {}
        for (name, edge), h in zip(edges.items(), first, strict=True):
            second = None
            if h.requires_grad:
                v = self._noise(h)
                (second,) = torch.autograd.grad(h, [edge], v, retain_graph=True, allow_unused=True)
            nonlinear[name] = second is not None and bool(second.any())
        return nonlinear

    def _network_part(self, site: LayerPass, form: Form, edge: GradientEdge) -> Tensor:
        """Σ_k g_k ∇²_z o_k contracted, g held constant in these derivatives."""
        groups, positions, width = form.inputs.shape[1:]
        count = groups * min(positions, width) * min(form.columns.shape[1:])
        _warn_if_many(count, "directions at the layer")
        (g,) = torch.autograd.grad(self._risk(self.outputs), self.outputs, create_graph=True)
        held = gate(g, self.switch)
        (h,) = torch.autograd.grad(self.outputs, [edge], held, create_graph=True)
        total = h.new_zeros((), dtype=self.outputs.dtype)
        for u, mate in form.directions():
            (image,) = pull(h, [edge], site.place(u).to(h.dtype))
            assert image is not None
            total = total + (mate * site.split(image.to(total.dtype))).sum()
        return total

    def _estimate(
        self,
        sites: Mapping[str, LayerPass],
        forms: Mapping[str, Form],
        edges: Mapping[str, GradientEdge],
        probes: int,
    ) -> dict[str, Penalty]:
        risk = self._risk(self.outputs)
        first = torch.autograd.grad(risk, list(edges.values()), create_graph=True)
        result = {}
        for (name, site), h in zip(sites.items(), first, strict=True):
            u = forms[name].probes(probes, self.generator, isinstance(self.loss, Loss))
            image = None
            if h.requires_grad:
                (image,) = pull(h, [edges[name]], site.place(u).to(h.dtype))
            if image is None:
                draws = u.new_zeros(probes)
            else:
                draws = (u * site.split(image.to(u.dtype))).flatten(1).sum(1)
            stderr = draws.detach().std() / probes**0.5
            result[name] = Penalty(draws.mean(), stderr, "hutchinson")
        return result


def _settle(loss: Loss | Callable[..., Tensor], outputs: Tensor, targets: Any) -> Loss | JointLoss:
    """The loss as a sum over samples, if it is one on this batch."""
    if isinstance(loss, Loss):
        return loss
    if not torch.isfinite(outputs).all():
        return CustomLoss(loss, mean=True)  # the penalty is NaN either way
    batch = Batch(None, targets, len(outputs), "this batch")
    candidate = classify(loss, outputs, batch)
    if isinstance(candidate, CustomLoss) and Additivity(candidate).holds(outputs, batch):
        return candidate
    return JointLoss(loss)


def _warn_if_many(count: int, what: str) -> None:
    if count > _MANY:
        warnings.warn(
            f"FAM is exact at the price of {count} {what} per sample. "
            "estimator=Hutchinson(probes) costs a fixed number of products instead.",
            stacklevel=6,
        )


@final
@dataclass(slots=True)
class Switch:
    """Whether gates are shut."""

    shut: bool = True


class _Gate(torch.autograd.Function):
    """The identity, through which no derivative passes while its switch is shut."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, switch: Switch) -> Tensor:
        ctx.switch = switch
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:
        return (None if ctx.switch.shut else gradient), None


def gate(value: Tensor, switch: Switch) -> Tensor:
    """`value`, a constant to derivatives that are taken while `switch` is shut."""
    gated: Tensor = _Gate.apply(value, switch)  # type: ignore[no-untyped-call]
    return gated


@contextmanager
def constant_statistics(
    outputs: Tensor, edges: Iterable[GradientEdge], samples: int, switch: Switch
) -> Iterator[bool]:
    """Within, derivatives of the outputs at the edges take batch statistics for constants.

    Yields whether there are any between the outputs and the edges. BatchNorm's own node is left
    to run, and what it returns is replaced by γ/σ times what arrived.
    """
    handles: list[RemovableHandle] = []
    try:
        for node in _between(outputs, edges):
            _check(node)
            if _couples(node, samples):
                handles.append(_hold(node, switch))
        yield bool(handles)
    finally:
        for handle in handles:
            handle.remove()


def _between(outputs: Tensor, edges: Iterable[GradientEdge]) -> list[Node]:
    """The nodes of the graph on the way from the outputs to any of the edges."""
    parents: dict[Node, list[Node]] = {}
    stack = [outputs.grad_fn] if outputs.grad_fn is not None else []
    seen = set(stack)
    while stack:
        node = stack.pop()
        for child, _ in node.next_functions:
            if child is None:
                continue
            parents.setdefault(child, []).append(node)
            if child not in seen:
                seen.add(child)
                stack.append(child)
    above: dict[Node, None] = {}
    stack = [edge.node for edge in edges]
    while stack:
        for parent in parents.get(stack.pop(), []):
            if parent not in above:
                above[parent] = None
                stack.append(parent)
    return list(above)


def _check(node: Node) -> None:
    name = node.name()
    if "ScaledDotProduct" in name:
        raise ModelError(
            "Fused attention above the layer has no second derivative. Run the model within "
            "torch.nn.attention.sdpa_kernel(SDPBackend.MATH)."
        )
    if "CompiledFunction" in name:
        raise ModelError(
            "The layers above are compiled to a kernel without second derivatives. Compile with "
            "backend='eager' or not at all, or choose the output layer."
        )


def _couples(node: Any, samples: int) -> bool:
    """BatchNorm with batch statistics. InstanceNorm runs as the same operation on one row."""
    name = node.name()
    if "BatchNorm" not in name or not hasattr(node, "_saved_input"):
        return False
    return bool(node._saved_training) and len(node._saved_input) > 1 and samples > 1


def _hold(node: Any, switch: Switch) -> RemovableHandle:
    x = node._saved_input
    wide = torch.promote_types(x.dtype, torch.float32)
    others = [d for d in range(x.ndim) if d != 1]
    variance = x.to(wide).var(others, correction=0, keepdim=True)
    eps = node._saved_eps if hasattr(node, "_saved_eps") else node._saved_epsilon
    factor = gate((variance + eps).rsqrt(), switch)
    if node._saved_weight is not None:
        factor = factor * node._saved_weight.reshape(variance.shape)

    def replace(below: tuple[Tensor, ...], above: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return ((above[0] * factor).to(above[0].dtype), *below[1:])

    handle: RemovableHandle = node.register_hook(replace)
    return handle
