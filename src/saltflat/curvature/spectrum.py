"""The largest eigenvalue, through SciPy's Lanczos method on products."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh
from torch import Tensor

from saltflat.errors import InvalidValue, SaltflatError

Product = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


def largest(
    product: Product, parameters: Mapping[str, Tensor], tol: float, seed: int
) -> tuple[float, float, dict[str, Tensor]]:
    """(eigenvalue, residual norm, unit eigenvector) of the largest algebraic eigenvalue."""
    if tol < 0:
        raise InvalidValue(f"tol must not be negative. Got {tol}.")
    sizes = [p.numel() for p in parameters.values()]
    size = sum(sizes)

    def split(flat: np.ndarray) -> dict[str, Tensor]:
        parts = torch.from_numpy(np.ascontiguousarray(flat.reshape(-1))).split(sizes)
        return {
            name: part.reshape(p.shape).to(p.device)
            for part, (name, p) in zip(parts, parameters.items(), strict=True)
        }

    def apply(flat: np.ndarray) -> np.ndarray:
        image = product(split(flat))
        joined = torch.cat([image[name].flatten().cpu() for name in parameters])
        return joined.double().numpy()

    if size == 1:
        vector = np.ones(1)
        value = float(apply(vector)[0])
        return value, 0.0, split(vector)
    start = np.random.default_rng(seed).standard_normal(size)
    start /= np.linalg.norm(start)
    if not apply(start).any():  # no random vector is in the kernel of anything but zero
        return 0.0, 0.0, split(start)
    operator = LinearOperator((size, size), matvec=apply, dtype=np.float64)
    try:
        values, vectors = eigsh(operator, k=1, which="LA", v0=start, tol=tol)
    except ArpackNoConvergence as error:
        raise SaltflatError(
            f"The largest eigenvalue did not converge to tol={tol:g}. Pass a larger tol."
        ) from error
    value, vector = float(values[0]), vectors[:, 0]
    residual = float(np.linalg.norm(apply(vector) - value * vector))
    return value, residual, split(vector)
