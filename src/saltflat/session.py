"""Lend a model for measurement and give it back exactly as it was.

The measurement needs evaluation mode, gradients on, no autocast, one floating dtype and attention
kernels that can be differentiated twice. All of that is set here and undone here, also when an
exception passes through.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

_Tensor = TypeVar("_Tensor", bound=Tensor)


class _Snapshot:
    """Everything of a model that a measurement could disturb."""

    def __init__(
        self, modules: list[nn.Module], parameters: list[nn.Parameter], buffers: list[Tensor]
    ) -> None:
        self.modules = [(m, dict(m.__dict__), _registries(m)) for m in modules]
        self.parameters = [
            (p, p.data, p.requires_grad, p.grad, p._backward_hooks) for p in parameters
        ]
        self.buffers = [(b, b.data) for b in buffers]
        self.values = [_joined(each) for each in self._alike()]

    def restore(self) -> None:
        for module, attributes, registries in self.modules:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for name, content in registries.items():
                registry = attributes[name]
                registry.clear()
                registry.update(content)
        for p, data, requires_grad, grad, hooks in self.parameters:
            if p.data_ptr() != data.data_ptr() or p.dtype != data.dtype:
                p.data = data
            if p.requires_grad != requires_grad:
                p.requires_grad_(requires_grad)
            if p.grad is not grad:
                p.grad = grad
            if p._backward_hooks is not hooks:
                p._backward_hooks = hooks
        for b, data in self.buffers:
            b.data = data
        for each, values in zip(self._alike(), self.values, strict=True):
            if len(each) > 1 and torch.equal(_joined(each), values):
                continue
            sizes = [data.numel() for data in each]
            parts = values.split(sizes) if len(each) > 1 else [values]
            for data, part in zip(each, parts, strict=True):
                before = part.reshape(data.shape) if len(each) > 1 else part
                if not torch.equal(data, before):
                    data.copy_(before)

    def _alike(self) -> list[list[Tensor]]:
        """The buffers' values: small ones of a kind are compared at once, the others one by one."""
        found: dict[Any, list[Tensor]] = {}
        for _, data in self.buffers:
            plain = data.layout == torch.strided and not data.is_quantized
            small = plain and data.numel() <= _SMALL
            key = (data.dtype, data.device) if small else id(data)
            found.setdefault(key, []).append(data)
        return list(found.values())


_SMALL = 1 << 16


def _joined(tensors: list[Tensor]) -> Tensor:
    """A copy of them all."""
    if len(tensors) == 1:
        return tensors[0].detach().clone()
    return torch.cat([t.reshape(-1) for t in tensors])


class RandomState:
    """The state of the global random generators, and of those that a data loader owns."""

    def __init__(self, data: Any, device: torch.device) -> None:
        self.device = device
        self.torch = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self.python = random.getstate()
        self.numpy = np.random.get_state()
        self.own = [(g, g.get_state()) for g in _generators(data)]

    def restore(self) -> None:
        torch.set_rng_state(self.torch)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        for generator, state in self.own:
            generator.set_state(state)


def _generators(data: Any) -> list[torch.Generator]:
    """The generators of a DataLoader and of its samplers."""
    found: dict[int, torch.Generator] = {}
    owners = [data, getattr(data, "sampler", None), getattr(data, "batch_sampler", None)]
    owners.append(getattr(owners[-1], "sampler", None))
    for owner in owners:
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator):
            found[id(generator)] = generator
    return list(found.values())


def _registries(module: nn.Module) -> dict[str, dict[str, Any]]:
    kept = ("_parameters", "_buffers", "_modules")
    return {name: dict(module.__dict__[name]) for name in kept}


def _distinct(tensors: Iterable[_Tensor | None]) -> list[_Tensor]:
    return list({id(t): t for t in tensors if t is not None}.values())


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Switch TensorFloat-32 off: three digits are too few to compare two computations by."""
    if device.type != "cuda":
        yield
        return
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = False
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


@contextmanager
def lend(model: nn.Module, measured: set[int], dtype: torch.dtype | None) -> Iterator[None]:
    """Put the model into the state in which it is measured; undo it on the way out.

    `measured` are the ids of the parameters to differentiate by; `dtype`, when given, is the
    floating dtype in which everything is computed.
    """
    modules = list(model.modules())  # one walk for all three
    parameters = _distinct(p for m in modules for p in m._parameters.values())
    buffers = _distinct(b for m in modules for b in m._buffers.values())
    snapshot = _Snapshot(modules, parameters, buffers)
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            for device in {"cpu"} | {p.device.type for p in parameters}:
                if torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            # Fused attention has no second derivative.
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            if "torch._dynamo" in sys.modules:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            # cuDNN's recurrent kernels differentiate neither twice nor in evaluation mode.
            if any(isinstance(m, nn.RNNBase) for m in modules):
                stack.enter_context(torch.backends.cudnn.flags(enabled=False))
            _prepare(modules, parameters, buffers, measured, dtype)
            yield
    finally:
        snapshot.restore()


def _prepare(
    modules: list[nn.Module],
    parameters: list[nn.Parameter],
    buffers: list[Tensor],
    measured: set[int],
    dtype: torch.dtype | None,
) -> None:
    for module in modules:
        module.training = False
        # Hooks on the backward pass could return something that is not the derivative.
        for hooks in ("_backward_hooks", "_backward_pre_hooks"):
            if module.__dict__.get(hooks):
                module.__dict__[hooks] = type(module.__dict__[hooks])()
        # `max_norm` renormalises the embedding in place, in the forward pass: work on a copy.
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            module.weight.data = module.weight.data.clone()
    for parameter in parameters:
        if dtype is not None and parameter.dtype != dtype and parameter.is_floating_point():
            parameter.grad = None
            parameter.data = parameter.data.to(dtype)
        if parameter._backward_hooks is not None:
            parameter._backward_hooks = None
        wanted = id(parameter) in measured and parameter.is_floating_point()
        if parameter.requires_grad != wanted:
            parameter.requires_grad_(wanted)
    for buffer in buffers:
        if dtype is not None and buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)
