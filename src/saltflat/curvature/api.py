"""`trace`, `diagonal` and `max_eigenvalue`: the engine's front door."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any, get_args

import torch
from torch import Tensor, nn

from saltflat.curvature.curvature import Curvature, Findings
from saltflat.curvature.estimators import Hutchinson
from saltflat.curvature.loss_hessian import derivatives_explained
from saltflat.curvature.plan import Certify, Settings
from saltflat.curvature.products import MatrixName
from saltflat.curvature.sweep import Kind
from saltflat.errors import InvalidType, InvalidValue
from saltflat.losses import LossLike
from saltflat.result import Diagonal, Eigenvalue, Trace, Value
from saltflat.risk import Output, Risk, Unpack


def trace(
    model: nn.Module,
    data: Any,
    loss: LossLike = "cross_entropy",
    *,
    curvature: MatrixName = "hessian",
    parameters: str | Iterable[str] = "trainable",
    estimator: Hutchinson | None = None,
    certify: Certify = "proof",
    max_directions: int = 1000,
    memory_budget: int | None = None,
    dtype: torch.dtype | None = None,
    unpack: Unpack | None = None,
    output: Output | None = None,
) -> Trace:
    """The trace of every parameter's block of the Hessian (or of the Gauss–Newton matrix).

    Parameters
    ----------
    model : any `torch.nn.Module`; it is measured in evaluation mode and left as it was found.
    data : a DataLoader, a pair (inputs, targets) of tensors or numpy arrays, any re-iterable of
        such pairs, or a map-style Dataset, which is read in batches of 128. All but a pair and a
        list are read once more from another random state, to see that they are the same samples.
    loss : a name ("cross_entropy", "mse", "bce", "normalized_cross_entropy"), a module, or any
        twice differentiable callable of outputs and targets, and of nothing else that is measured.
    curvature : "hessian" or "ggn".
    parameters : "trainable", "all" (frozen ones too) or a list of names.
    estimator : `Hutchinson(probes, seed)`, for what cannot be had exactly.
    certify : "proof" takes for piecewise linear what the graph of every pass proves so; "probe"
        also takes what seems so on a few samples, which is then not called exact and has no
        standard error; "none" takes nothing, so that every block of the Hessian is estimated.
    max_directions : outputs with more directions a sample than this are sketched.
    memory_budget : bytes that a chunk of samples may take.
    dtype : compute in this dtype; half precision models are computed in float32 by default.
    unpack, output : callables that split an item of the data, and choose the outputs.

    Examples
    --------
    >>> import torch, saltflat as sf
    >>> _ = torch.manual_seed(0)
    >>> model, x, y = torch.nn.Linear(3, 2), torch.randn(8, 3), torch.arange(8) % 2
    >>> trace = sf.trace(model, (x, y))
    >>> {name: round(value, 3) for name, value in trace.items()}
    {'weight': 0.807, 'bias': 0.437}
    >>> trace.exact, trace.details["weight"].rule
    (True, 'linear')
    """
    risk = Risk(model, data, loss, parameters=parameters, dtype=dtype, unpack=unpack, output=output)
    settings = checked_settings(max_directions, memory_budget, certify)
    return Trace(**_blocks(risk, "trace", curvature, estimator, settings, float))


def diagonal(
    model: nn.Module,
    data: Any,
    loss: LossLike = "cross_entropy",
    *,
    curvature: MatrixName = "hessian",
    parameters: str | Iterable[str] = "trainable",
    estimator: Hutchinson | None = None,
    certify: Certify = "proof",
    max_directions: int = 1000,
    memory_budget: int | None = None,
    dtype: torch.dtype | None = None,
    unpack: Unpack | None = None,
    output: Output | None = None,
) -> Diagonal:
    """The diagonal of the Hessian (or of the Gauss–Newton matrix), a tensor for every parameter.

    Arguments as in `trace`.

    Examples
    --------
    >>> import torch, saltflat as sf
    >>> model, x, y = torch.nn.Linear(2, 1, bias=False), torch.eye(2), torch.zeros(2, 1)
    >>> sf.diagonal(model, (x, y), "mse")["weight"].round(decimals=3)
    tensor([[1., 1.]], dtype=torch.float64)
    """
    risk = Risk(model, data, loss, parameters=parameters, dtype=dtype, unpack=unpack, output=output)
    settings = checked_settings(max_directions, memory_budget, certify)
    return Diagonal(**_blocks(risk, "diagonal", curvature, estimator, settings, Tensor.cpu))


def max_eigenvalue(
    model: nn.Module,
    data: Any,
    loss: LossLike = "cross_entropy",
    *,
    curvature: MatrixName = "hessian",
    parameters: str | Iterable[str] = "trainable",
    tol: float = 1e-6,
    seed: int = 0,
    memory_budget: int | None = None,
    dtype: torch.dtype | None = None,
    unpack: Unpack | None = None,
    output: Output | None = None,
) -> Eigenvalue:
    """The largest eigenvalue of the whole Hessian, or of the blocks in `parameters` together.

    For one block pass its name: `parameters=["fc.weight"]`. Found by SciPy's `eigsh`; the residual
    norm ‖Hv − λv‖ bounds the distance to an eigenvalue.

    Examples
    --------
    >>> import torch, saltflat as sf
    >>> model, x, y = torch.nn.Linear(2, 1, bias=False), torch.eye(2), torch.zeros(2, 1)
    >>> round(sf.max_eigenvalue(model, (x, y), "mse").value, 4)
    1.0
    """
    risk = Risk(model, data, loss, parameters=parameters, dtype=dtype, unpack=unpack, output=output)
    settings = checked_settings(1000, memory_budget, "proof")
    whole = Curvature(risk, curvature, settings=settings, seed=seed)
    with risk.session(), derivatives_explained():
        return Eigenvalue(*whole.largest_eigenvalue(list(risk.parameters), tol), curvature)


def _blocks(
    risk: Risk,
    kind: Kind,
    curvature: MatrixName,
    estimator: Hutchinson | None,
    settings: Settings,
    cast: Callable[[Tensor], Value],
) -> dict[str, Any]:
    """What a result holds."""
    if estimator is not None and not isinstance(estimator, Hutchinson):
        raise InvalidType(f"estimator must be Hutchinson(…). Got {type(estimator).__name__}.")
    with risk.session(), derivatives_explained():
        findings: Findings = Curvature(risk, curvature, estimator, settings).find(frozenset({kind}))
    for warning in findings.warnings:
        warnings.warn(warning, stacklevel=3)
    quantity = findings.quantities[kind]
    return {
        "details": quantity.details(cast),
        "total": quantity.total,
        "stderr": quantity.total_stderr,
        "curvature": curvature,
        "certificate": findings.certificate,
        "frozen": risk.frozen,
        "notes": (*risk.notes, *findings.notes),
        "degrees": quantity.total_degrees,
    }


def checked_settings(max_directions: int, memory_budget: int | None, certify: Certify) -> Settings:
    if certify not in get_args(Certify):
        raise InvalidValue(f"certify must be 'proof', 'probe' or 'none'. Got {certify!r}.")
    if not isinstance(max_directions, int) or max_directions < 1:
        raise InvalidValue(f"max_directions must be a positive integer. Got {max_directions!r}.")
    if memory_budget is not None and memory_budget < 1:
        raise InvalidValue(f"memory_budget must be a positive number. Got {memory_budget!r}.")
    return Settings(max_directions, memory_budget, certify)
