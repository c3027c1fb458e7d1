"""What a model is traced on: inputs as they are given, or those of the first samples of data."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset

from saltflat.errors import InvalidType
from saltflat.risk import Risk, Unpack
from saltflat.session import RandomState, arguments

_SAMPLES = 2  # as the scales do not depend on the values
_HALF = (torch.float16, torch.bfloat16)


def inputs_of(model: nn.Module, data: Any, unpack: Unpack | None, parameters: Iterable[str]) -> Any:
    """Inputs of the model: `data` itself, or the inputs of its first samples.

    A tuple or a dict is inputs where the signature of `forward` takes it, and (inputs, targets) or
    a batch with labels otherwise. A list of pairs, a loader and a dataset are always data.
    """
    if unpack is None and not _is_data(model, data):
        return data
    own = next(p.dtype for p in model.parameters())
    dtype = own if own in _HALF else None
    risk = Risk(model, data, parameters=parameters, dtype=dtype, unpack=unpack)
    risk.watched.on = False  # one batch is read
    with risk.session():
        return next(risk.batches()).part(0, _SAMPLES).inputs


def _is_data(model: nn.Module, data: Any) -> bool:
    if isinstance(data, DataLoader | Dataset | Iterator):
        return True
    if isinstance(data, Mapping):
        return _is_batch(data) and not _binds(model, data)
    if isinstance(data, list) and data and all(map(_is_batch, data)):
        return True
    if not isinstance(data, tuple | list):
        return _yields_batches(data)
    if _binds(model, data):
        return False
    if _is_batch(data) or (data and all(map(_is_batch, data))):
        return True
    raise InvalidType(
        f"The model cannot be called on a {type(data).__name__} of {len(data)} inputs, and it is "
        "not (inputs, targets) nor a list of such pairs. Pass inputs (a tensor, a tuple for "
        "model(*x), a dict for model(**x)) or data as for saltflat.measure."
    )


def _binds(model: nn.Module, example: Any) -> bool:
    """Whether the signature of the model takes these inputs."""
    args, kwargs = arguments(example)
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _is_batch(item: Any) -> bool:
    """Whether this is a pair of inputs and targets, or a dict with labels."""
    if isinstance(item, Mapping):
        return "labels" in item
    arrays = Tensor | np.ndarray
    pair = isinstance(item, tuple | list) and len(item) == 2
    return pair and any(isinstance(leaf, arrays) for leaf in tree_leaves(item[0]))


def _yields_batches(data: Any) -> bool:
    """Whether an object of the user's own is something to read batches from."""
    if isinstance(data, Tensor | np.ndarray) or not isinstance(data, Iterable):
        return False
    state = RandomState(data, torch.device("cpu"))
    try:
        return _is_batch(next(iter(data), None))
    finally:
        state.restore()
