"""Results as plain JSON and back; files written whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from math import isfinite
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor

from saltflat.errors import InvalidValue

T = TypeVar("T")
Upgrade = Callable[[dict[str, Any]], Mapping[str, Any]]


def plain(value: Any) -> Any:
    """Anything a result holds, as what JSON knows; numbers that are not finite as strings."""
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, float):
        return value if isfinite(value) else str(value)
    if isinstance(value, Tensor | np.ndarray):
        return plain(value.tolist())
    if isinstance(value, np.generic):
        return plain(value.item())
    if is_dataclass(value) and not isinstance(value, type):  # before mappings, which it may be too
        names = [*(f.name for f in fields(value)), *getattr(value, "derived", ())]
        return {name: plain(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, frozenset | set):
        return sorted(map(str, value))
    if isinstance(value, tuple | list):
        return [plain(v) for v in value]
    return str(value)


def restored(kind: Any, value: Any) -> Any:
    """A plain value as what the annotation `kind` says it was."""
    origin, arguments = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        values = {key: restored(hint, value[key]) for key, hint in hints.items() if key in value}
        for field in fields(kind):
            if field.default is MISSING and field.default_factory is MISSING:
                values[field.name]  # a KeyError tells which one is missing
        return cast(Any, kind)(**values)
    if origin in (Union, UnionType):  # with None
        return None if value is None else restored(arguments[0], value)
    if origin is Mapping:
        return {restored(arguments[0], k): restored(arguments[1], v) for k, v in value.items()}
    if origin in (tuple, frozenset):
        return origin(restored(arguments[0], v) for v in value)
    if kind is Tensor:
        return torch.tensor([float(x) for x in value], dtype=torch.float64)
    return float(value) if kind is float else _numbers(value) if kind is Any else value


def _numbers(value: Any) -> Any:
    """Plain values with the numbers that are not finite put back."""
    if isinstance(value, str) and value in ("nan", "inf", "-inf"):
        return float(value)
    if isinstance(value, list):
        return [_numbers(v) for v in value]
    return {k: _numbers(v) for k, v in value.items()} if isinstance(value, dict) else value


def write(path: Path, content: str | bytes) -> None:
    """Write beside the file and put it in its place in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not by tempfile, whose files nobody else may read.
    beside = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        with beside.open("xb") as file:
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


# Of the files. What only adds to it does not change it.
FORMAT = 1


def save(path: str | Path, what: str, kind: str, content: Mapping[str, Any]) -> Path:
    """Write the content to a .json file, whole or not at all; `what` it is, e.g. "A report"."""
    path = Path(path)
    if path.suffix != ".json":
        raise InvalidValue(f"{what} is saved as .json or .html. Got {path.name!r}.")
    head = {"saltflat": FORMAT, "kind": kind}
    write(path, json.dumps(plain({**head, **content}), indent=1, allow_nan=False))
    return path


def decoded(kind: type[T], content: Any, complaint: str, upgrade: Upgrade = dict) -> T:
    """What `save` wrote, once `upgrade` has brought an older format up to date."""
    try:
        return cast(T, restored(kind, upgrade(content)))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidValue(f"{complaint}: {error!r}.") from error


def read(path: str | Path, kind: str = "") -> dict[str, Any]:
    """The content of a file that `save` wrote, which must be of this kind, if one is given."""
    what = _a(kind or "result")
    if Path(path).suffix == ".html":
        raise InvalidValue(f"{path} is a page, which is to be looked at: save {what} as .json too.")
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InvalidValue(f"{path} is not {what}: it is not JSON ({error}).") from error
    if not isinstance(content, dict) or not isinstance(content.get("saltflat"), int):
        raise InvalidValue(f"{path} is not {what} that saltflat saved.")
    if content["saltflat"] > FORMAT:
        raise InvalidValue(
            f"{path} was saved by a newer version of saltflat, in format {content['saltflat']}; "
            f"this one reads up to {FORMAT}. Update saltflat."
        )
    if kind and kind_of(content) != kind:
        raise InvalidValue(f"{path} is not {what}: it holds {_a(kind_of(content))}. Use sf.load.")
    return cast(dict[str, Any], content)


def _a(kind: str) -> str:
    return f"{'an' if kind[:1] in 'aeiou' else 'a'} {kind}"


def kind_of(content: Mapping[str, Any]) -> str:
    """What a file holds; older ones do not say so themselves."""
    return str(content.get("kind") or ("audit" if "audit" in content else "report"))
