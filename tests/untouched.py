"""What it means that a model, its hooks, its gradients and the generators are as they were."""

from __future__ import annotations

import random
import warnings
from typing import Any

import numpy as np
import scipy.sparse.linalg
import scipy.special  # noqa: F401, whatever these import has set its own filters of warnings by now
import torch
import torch._dynamo
from torch import Tensor, nn

HOOKS = [name for name in vars(nn.Module()) if name.endswith("hooks")]


def fingerprint(model: nn.Module) -> dict[str, Any]:
    """Everything that a measurement could disturb, as values and as identities."""
    state: dict[str, Any] = {
        "torch rng": torch.get_rng_state().tolist(),
        "python rng": random.getstate(),
        "numpy rng": str(np.random.get_state()),
        "grad mode": torch.is_grad_enabled(),
        "dtype": torch.get_default_dtype(),
        "warnings": list(warnings.filters),
        "TorchScript": torch._C._get_graph_executor_optimize(),
    }
    for name, t in [*model.named_parameters(), *model.named_buffers()]:
        places = [part.data_ptr() for part in dense_parts(t)]
        state[name] = (id(t), places, t.dtype, t.requires_grad, t._version, t.detach().clone())
        grad = t.grad
        state[f"{name}.grad"] = (id(grad), None if grad is None else grad.clone())
        state[f"{name} hooks"] = list((t._backward_hooks or {}).items())
    for name, m in model.named_modules():
        state[f"module {name}"] = (id(m), type(m), m.training)
        state[f"attributes {name}"] = {k: id(v) for k, v in vars(m).items() if k != "training"}
        state[f"contents {name}"] = {k: contents(v) for k, v in vars(m).items()}
        if isinstance(m, torch.jit.ScriptModule):
            names = m._concrete_type.get_attributes()
            state[f"script {name}"] = {k: contents(m._c.getattr(k)) for k in names}
        state[f"hooks {name}"] = {k: list(getattr(m, k).items()) for k in HOOKS}
    return state


def dense_parts(t: Tensor) -> list[Tensor]:
    return [t._indices(), t._values()] if t.is_sparse else [t]


def contents(value: Any, depth: int = 3) -> Any:
    """What is in a container, as identities; the values of a tensor; a number itself."""
    if isinstance(value, Tensor):
        return id(value), value._version, value.detach().clone()
    if isinstance(value, bool | int | float | str):
        return value
    if depth and isinstance(value, dict):
        return {id(k): contents(v, depth - 1) for k, v in value.items()}
    if (depth and isinstance(value, list | tuple | set | frozenset)) or hasattr(value, "maxlen"):
        return [contents(v, depth - 1) for v in value]
    return type(value)


def bits(t: Tensor) -> bytes:
    return bytes(t.contiguous().flatten().view(torch.uint8).tolist()) if t.numel() else b""


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        pairs = zip(dense_parts(a), dense_parts(b), strict=True)
        return a.shape == b.shape and all(bits(p) == bits(q) for p, q in pairs)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return bool(a == b)


def assert_untouched(model: nn.Module, before: dict[str, Any]) -> None:
    after = fingerprint(model)
    assert after.keys() == before.keys()
    changed = [key for key in before if not same(before[key], after[key])]
    assert not changed, changed


def dressed(model: nn.Module) -> nn.Module:
    """A model in the middle of a training: mixed modes, gradients, hooks."""
    for i, module in enumerate(model.modules()):
        module.training = i % 2 == 0
        if isinstance(module, torch.jit.ScriptModule):
            continue  # takes no hooks
        module.register_forward_hook(lambda m, args, out: None)
        module.register_forward_pre_hook(lambda m, args: None)
    for i, p in enumerate(p for p in model.parameters() if p.requires_grad):
        p.grad = torch.ones_like(p) if i % 2 else None
        p.register_hook(lambda grad: None)
    return model
