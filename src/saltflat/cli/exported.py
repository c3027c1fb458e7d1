"""Programs of `torch.export` (.pt2), run from their description and never by their own code.

`torch.export.load` unpickles what the archive holds, evaluates the expressions of its symbolic
sizes and compiles its guards, so that a file can run what it likes. Here the graph is data: a list
of calls, each of an operator of `torch.ops.aten` on values that earlier calls have returned. The
sizes in it are found by calls too, so that no expression needs to be understood.
"""

from __future__ import annotations

import json
import operator
import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from saltflat.checkpoints import check_growth, existing, explained
from saltflat.errors import InvalidValue, LoadError

_SCHEMA = 8  # the major version of torch's schema that is read
_AGAIN = (
    "Export the model again with torch 2.11 to 2.13, or name it by its code: file.py:make_model"
)
_EARLIER = "serialized_exported_program.json"  # is in what earlier versions wrote

# The numbers that the schema gives to types, memory formats and layouts.
_DTYPES: dict[int, torch.dtype] = {
    1: torch.uint8,
    2: torch.int8,
    3: torch.int16,
    4: torch.int32,
    5: torch.int64,
    6: torch.float16,
    7: torch.float32,
    8: torch.float64,
    12: torch.bool,
    13: torch.bfloat16,
}
_FORMATS = {
    1: torch.contiguous_format,
    2: torch.channels_last,
    3: torch.channels_last_3d,
    4: torch.preserve_format,
}
_STRIDED = 7

# What is called besides aten's operators: arithmetic of sizes.
_SIZES = "add sub mul floordiv truediv mod neg pos getitem eq ne lt le gt ge"
_ARITHMETIC: dict[str, Callable[..., Any]] = {
    f"_operator.{name}": getattr(operator, name) for name in _SIZES.split()
}
_ATEN = re.compile(r"torch\.ops\.aten\.([A-Za-z_]\w*)\.([A-Za-z_]\w*)")
# Operators that touch the disk, or believe sizes and indices that they are given.
_REFUSED = re.compile(r"from_file|save|load|set_.*|resize.*|.*sparse.*|.*unsafe.*|__.*|_.*")
_HARMLESS = re.compile(
    "_assert_.*|_softmax|_log_softmax|_to_copy|_unsafe_view|_adaptive_avg_pool[123]d|_weight_norm.*"
    "|_native_batch_norm_legit_no_training|_scaled_dot_product_.*|_local_scalar_dense"
)
_NAME = re.compile(r"[A-Za-z_]\w*|\d+")


@final
class Program(nn.Module):
    """An exported program. Parameters and buffers have the names that they were exported with."""

    def __init__(self, path: Path, content: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        super().__init__()
        module = content["graph_module"]
        graph, signature = module["graph"], module["signature"]
        self._inputs: list[str] = []
        self._held: dict[str, str] = {}  # names in the graph of what the program holds
        for spec in signature["input_specs"]:
            self._take(path, spec, state)
        self._calls = [_Call(path, node) for node in graph["nodes"]]
        self._outputs = [_user_output(path, spec) for spec in signature["output_specs"]]
        calls = {each["fqn"]: each["signature"] for each in module["module_call_graph"]}
        self._names: list[str] = list(calls[""].get("forward_arg_names") or [])
        self._structure = json.loads(calls[""]["out_spec"])[1]

    def _take(self, path: Path, spec: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        ((kind, what),) = spec.items()
        if kind == "user_input":
            self._inputs.append(what["arg"]["as_tensor"]["name"])
        elif kind in ("parameter", "buffer", "tensor_constant"):
            name = what[f"{kind}_name"]
            self._held[what["arg"]["name"]] = name
            _register(self, name, state[name])
        elif kind != "constant_input":
            raise LoadError(f"{path} takes an input of a kind that is not run: {kind}.")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = tree_leaves((args, [kwargs[n] for n in self._names if n in kwargs]))
        given = [leaf for leaf in given if isinstance(leaf, Tensor)]
        if len(given) != len(self._inputs) or not set(kwargs) <= set(self._names):
            raise InvalidValue(
                f"The exported program takes {len(self._inputs)} tensors "
                f"({', '.join(self._names or self._inputs)}). Got {len(given)}."
            )
        values: dict[str, Any] = dict(zip(self._inputs, given, strict=True))
        values |= {key: _attribute(self, name) for key, name in self._held.items()}
        for call in self._calls:
            call.run(values)
        return _structured(self._structure, iter([_value(arg, values) for arg in self._outputs]))


def _register(root: nn.Module, name: str, value: Tensor) -> None:
    """Under a name with dots, as if modules were inside each other."""
    *folders, last = name.split(".")
    for folder in folders:
        if not _NAME.fullmatch(folder):
            raise InvalidValue(f"a parameter is named {name!r}")
        if folder not in root._modules:
            root.add_module(folder, nn.Module())
        root = root.get_submodule(folder)
    if isinstance(value, nn.Parameter):
        root.register_parameter(last, value)
    else:
        root.register_buffer(last, value)


def _attribute(root: nn.Module, name: str) -> Any:
    folder, _, last = name.rpartition(".")
    return getattr(root.get_submodule(folder), last)


@final
class _Call:
    """One call: of what, on which arguments, and the names of what it returns."""

    def __init__(self, path: Path, node: Mapping[str, Any]) -> None:
        self._function = _function(path, node["target"])
        self._arguments = [(i["name"], i["arg"], i.get("kind")) for i in node["inputs"]]
        for name, argument, _ in self._arguments:
            if name in ("training", "train") and argument.get("as_bool"):
                raise LoadError(
                    f"{path} was exported in training mode ({node['target']} has {name}=True). "
                    "Call model.eval() before torch.export.export."
                )
        self._results = [_names(output) for output in node["outputs"]]

    def run(self, values: dict[str, Any]) -> None:
        args, kwargs = [], {}
        for name, argument, kind in self._arguments:
            value = _value(argument, values)
            if kind == 2:  # by keyword
                kwargs[name] = value
            else:
                args.append(value)
        result = self._function(*args, **kwargs)
        single = len(self._results) == 1
        for names, each in zip(self._results, [result] if single else result, strict=True):
            if isinstance(names, str):
                values[names] = each
            elif names is not None:
                values.update(zip(names, each, strict=True))


def _function(path: Path, target: str) -> Callable[..., Any]:
    if target in _ARITHMETIC:
        return _ARITHMETIC[target]
    match = _ATEN.fullmatch(target)
    if match is None or (_REFUSED.fullmatch(match[1]) and not _HARMLESS.fullmatch(match[1])):
        raise LoadError(
            f"{path} calls {target[:80]}, which is not run: only torch.ops.aten's public operators "
            "and the arithmetic of sizes are. Name the model by its Python code instead: "
            "file.py:make_model."
        )
    function: Callable[..., Any] = getattr(getattr(torch.ops.aten, match[1]), match[2])
    return function


def _names(output: Mapping[str, Any]) -> str | list[str] | None:
    """What a returned value, or each of a list of them, is called."""
    ((kind, what),) = output.items()
    if kind == "as_tensors":
        return [each["name"] for each in what]
    if kind == "as_none":
        return None
    name: str = what["name"] if kind == "as_tensor" else what["as_name"]
    return name


def _user_output(path: Path, spec: Mapping[str, Any]) -> Mapping[str, Any]:
    ((kind, what),) = spec.items()
    if kind != "user_output":
        raise LoadError(
            f"{path} changes its own state when it runs ({kind}), so it cannot be measured. Export "
            "it in evaluation mode: model.eval() before torch.export.export."
        )
    argument: Mapping[str, Any] = what["arg"]
    return argument


def _value(argument: Mapping[str, Any], values: Mapping[str, Any]) -> Any:
    """What an argument stands for."""
    ((kind, what),) = argument.items()
    if kind in ("as_int", "as_float", "as_bool", "as_string"):
        return what
    if kind in ("as_ints", "as_floats", "as_bools"):
        return list(what)
    if kind == "as_none":
        return None
    if kind in ("as_tensor", "as_custom_obj"):
        return values[what["name"]]
    if kind == "as_name":
        return values[what]
    if kind in ("as_sym_int", "as_sym_bool", "as_sym_float", "as_optional_tensor"):
        return _value(what, values)
    if kind in ("as_sym_ints", "as_sym_bools", "as_sym_floats", "as_optional_tensors"):
        return [_value(each, values) for each in what]
    if kind == "as_tensors":
        return [values[each["name"]] for each in what]
    return _setting(kind, what, values)


def _setting(kind: str, what: Any, values: Mapping[str, Any]) -> Any:
    """Types, formats and places; the place is wherever the program's inputs are."""
    if kind == "as_scalar_type":
        return _DTYPES[what]
    if kind == "as_memory_format":
        return _FORMATS[what]
    if kind == "as_layout" and what == _STRIDED:
        return torch.strided
    if kind == "as_device":
        return next(v.device for v in values.values() if isinstance(v, Tensor))
    raise InvalidValue(f"The exported program has an argument that is not run: {kind}.")


def _structured(spec: Mapping[str, Any], leaves: Any) -> Any:
    """Outputs in the mappings and tuples that they were returned in."""
    if spec["type"] is None:
        return next(leaves)
    children = [_structured(child, leaves) for child in spec["children_spec"]]
    context = spec["context"]
    keys = json.loads(context) if isinstance(context, str) else context
    if isinstance(keys, Sequence) and len(keys) == len(children) and children:
        return dict(zip(keys, children, strict=True))
    return tuple(children)


def load(path: Path) -> Program:
    """The program of a .pt2 file."""
    with explained(existing(path)), zipfile.ZipFile(path) as archive:
        check_growth(path, archive)
        names = archive.namelist()
        if _EARLIER in names:
            raise LoadError(
                f"{path} is in the format of torch before 2.8, which is not read. {_AGAIN}."
            )
        roots = {name.split("/")[0] for name in names}
        if len(roots) != 1:
            raise LoadError(f"{path} is not an archive that torch.export.save wrote.")
        root = roots.pop()
        content = json.loads(archive.read(f"{root}/models/model.json"))
        version = content["schema_version"]["major"]
        if version != _SCHEMA:
            raise LoadError(
                f"{path} has version {version} of torch's format; {_SCHEMA} is read. {_AGAIN}."
            )
        state: dict[str, Tensor] = {}
        for folder in ("weights", "constants"):
            state |= _payload(path, archive, f"{root}/data/{folder}", f"model_{folder}_config.json")
        return Program(path, content, state)


def _payload(path: Path, archive: zipfile.ZipFile, folder: str, config: str) -> dict[str, Tensor]:
    """The tensors of one folder of the archive."""
    if f"{folder}/{config}" not in archive.namelist():
        raise LoadError(f"{path} was written by an older torch, as a pickle. {_AGAIN}.")
    entries = json.loads(archive.read(f"{folder}/{config}"))["config"]
    return {name: _tensor(path, archive, folder, name, e) for name, e in entries.items()}


def _tensor(
    path: Path, archive: zipfile.ZipFile, folder: str, name: str, entry: Mapping[str, Any]
) -> Tensor:
    if entry["use_pickle"] or entry["tensor_meta"] is None:
        raise LoadError(
            f"{path} holds {name!r} as a pickle, which can do anything. Refused; name the model by "
            "its Python code instead: file.py:make_model."
        )
    meta = entry["tensor_meta"]
    sizes = [size["as_int"] for size in meta["sizes"]]
    strides = [stride["as_int"] for stride in meta["strides"]]
    dtype, content = _DTYPES[meta["dtype"]], archive.read(f"{folder}/{entry['path_name']}")
    if min(sizes, default=0) < 0 or prod(sizes) * dtype.itemsize > len(content):
        raise LoadError(f"{path} is damaged: {name!r} has {len(content)} bytes for {sizes}.")
    flat = torch.frombuffer(bytearray(content), dtype=dtype) if content else torch.empty(0)
    tensor = flat.to(dtype).as_strided(sizes, strides, meta["storage_offset"]["as_int"])
    if entry["is_param"]:
        return nn.Parameter(tensor, requires_grad=meta["requires_grad"])
    return tensor
