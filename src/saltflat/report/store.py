"""Measurements as plain JSON and back; files written whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from math import inf, isfinite, nan
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor

from saltflat.errors import InvalidValue
from saltflat.measurement import Measurement


def plain(value: Any) -> Any:
    """Anything a measurement holds, as what JSON knows; numbers that are not finite as strings."""
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, float):
        return value if isfinite(value) else str(value)
    if isinstance(value, Tensor | np.ndarray):
        return plain(value.tolist())
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, frozenset | set):
        return sorted(map(str, value))
    if isinstance(value, tuple | list):
        return [plain(v) for v in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    return str(value)


def encode(m: Measurement) -> dict[str, Any]:
    return {f.name: plain(getattr(m, f.name)) for f in fields(m)}


def decode(content: Mapping[str, Any]) -> Measurement:
    known = {f.name for f in fields(Measurement)}
    values = {k: v for k, v in content.items() if k in known}
    if content.get("lower_bound"):  # as written before bounds had a direction
        values["bound"] = "lower"
    values.setdefault("degrees", inf if values["exact"] or values.get("bound") else nan)
    for key in ("value", "stderr", "gap", "degrees"):
        values[key] = float(values[key])
    for key in ("by_parameter", "by_layer"):
        values[key] = {k: float(v) for k, v in values[key].items()}
    values["by_neuron"] = {
        k: torch.tensor([float(x) for x in v], dtype=torch.float64)
        for k, v in values["by_neuron"].items()
    }
    values |= {key: _numbers(values[key]) for key in ("settings", "details")}
    values["invariant_to"] = frozenset(values["invariant_to"])
    values["notes"] = tuple(values["notes"])
    return Measurement(**values)


def _numbers(value: Any) -> Any:
    """Plain values with the numbers that are not finite put back."""
    if isinstance(value, str) and value in ("nan", "inf", "-inf"):
        return float(value)
    if isinstance(value, list):
        return [_numbers(v) for v in value]
    return {k: _numbers(v) for k, v in value.items()} if isinstance(value, dict) else value


def write(path: Path, text: str) -> None:
    """Write beside the file and put it in its place in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not by tempfile, whose files nobody else may read.
    beside = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        with beside.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def read(path: Path) -> dict[str, Any]:
    """The content of a report file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InvalidValue(f"{path} is not a report: it is not JSON ({error}).") from error
    if not isinstance(content, dict) or content.get("saltflat") != 1:
        raise InvalidValue(f"{path} is not a report that saltflat saved.")
    return cast(dict[str, Any], content)
