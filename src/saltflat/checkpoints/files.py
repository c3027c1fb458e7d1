"""Tensors out of files that may be damaged, or made to do harm.

Nothing here runs what a file says. Safetensors and `.npz` (without pickles) hold numbers alone. A
`.pt` file is a pickle, which torch reads with `weights_only=True`; before that, it is gone through
without building anything, because torch believes the sizes in it: a number too large would have it
read memory that is not the file's. What a file claims to hold must be there.
"""

from __future__ import annotations

import io
import pickle
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from saltflat.errors import InvalidValue, LoadError, SaltflatError, listed

SUFFIXES = (".safetensors", ".pt", ".pth", ".ckpt", ".bin", ".npz")

# Compressed members may grow by this factor; more is let pass up to a size that hurts nobody.
_GROWTH = 100
_HARMLESS = 1 << 28

_ZIP = b"PK\x03\x04"
_MAGIC = 0x1950A86A20F9469CFC6C  # with which torch's older format begins


def tensors(path: Path) -> Any:
    """What a file holds: a tensor, or mappings and lists of them and of plain values."""
    path = existing(path)
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise LoadError(
            f"{path} is of a kind that is not read: {suffix or 'no suffix'}. Known are "
            f"{', '.join(SUFFIXES)}."
        )
    with explained(path):
        if suffix == ".safetensors":
            content: Any = _safetensors(path)
        elif suffix == ".npz":
            content = _npz(path)
        else:
            content = _torch(path)
        for leaf in leaves(content):
            _check(path, leaf)
        return content


def leaves(content: Any) -> Iterator[Tensor]:
    """All tensors; what is referred to many times, as a pickle may arrange, is seen once."""
    waiting, seen = [content], set[int]()
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, Mapping):
            waiting += each.values()
        elif isinstance(each, list | tuple | set):
            waiting += each


def existing(path: Path) -> Path:
    """The path, if a file is there."""
    if not path.exists():
        beside = path.parent if path.parent.is_dir() else None
        names = (
            sorted(p.name for p in beside.iterdir() if p.suffix == path.suffix) if beside else []
        )
        there = f" In that folder are {listed(names)}." if names else ""
        raise LoadError(f"There is no file {path}.{there}")
    if not path.is_file():
        raise LoadError(f"{path} is not a file.")
    return path


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """What goes wrong while a file is read, as a `LoadError` that names the file."""
    try:
        yield
    except SaltflatError:
        raise
    except (Exception, RecursionError) as error:
        words = (str(error) or "no message").splitlines()[0][:200]
        raise LoadError(
            f"{path} cannot be read: it is damaged, or not what its name says "
            f"({type(error).__name__}: {words}). Copy it again, or make it anew."
        ) from error


def _check(path: Path, leaf: Tensor) -> None:
    """Refuse tensors that would come to more than the file's bytes once they are used."""
    if leaf.layout is not torch.strided or leaf.is_meta or leaf.is_quantized or leaf.is_nested:
        raise LoadError(
            f"{path} holds a tensor that is sparse, quantised, nested or without values. Save "
            "dense tensors."
        )
    if leaf.numel() * leaf.element_size() > max(leaf.untyped_storage().nbytes(), 1):
        raise LoadError(
            f"{path} holds a tensor of shape {tuple(leaf.shape)} made of fewer numbers by "
            "repetition (expand). Save it with .contiguous()."
        )


def _safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    content: dict[str, Tensor] = load_file(str(path))
    return content


def _npz(path: Path) -> dict[str, Tensor]:
    with zipfile.ZipFile(path) as archive:
        check_growth(path, archive)
        names = [info.filename for info in archive.infolist()]
        return {name.removesuffix(".npy"): _npy(path, archive, name) for name in names}


def check_growth(path: Path, archive: zipfile.ZipFile) -> None:
    """Refuse an archive that unpacks to far more than it is."""
    total = sum(info.file_size for info in archive.infolist())
    if total > max(_HARMLESS, _GROWTH * path.stat().st_size):
        raise LoadError(
            f"{path} would unpack to {total / 2**30:.1f} GiB, more than {_GROWTH} times its size. "
            "Refused; save the arrays without compression if that is meant."
        )


def _npy(path: Path, archive: zipfile.ZipFile, name: str) -> Tensor:
    content = archive.read(name)
    file = io.BytesIO(content)
    version = np.lib.format.read_magic(file)
    header = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }.get(version)
    if header is None:
        raise LoadError(f"The array {name!r} of {path} has a format that is not read: {version}.")
    shape, _, dtype = header(file)
    if dtype.hasobject:
        raise LoadError(
            f"The array {name!r} of {path} holds Python objects, which only a pickle could build. "
            "Refused; save arrays of numbers."
        )
    if np.prod([float(n) for n in shape]) * dtype.itemsize > len(content):
        raise LoadError(
            f"The array {name!r} of {path} is damaged: its header says {shape} of {dtype}, and "
            f"there are {len(content)} bytes."
        )
    file.seek(0)
    array = np.lib.format.read_array(file, allow_pickle=False)
    if dtype.kind not in "biufc":
        raise LoadError(
            f"The array {name!r} of {path} must hold numbers. Got {dtype}; convert it first."
        )
    return torch.from_numpy(np.require(array, array.dtype.newbyteorder("="), ["C", "W"]))


def _torch(path: Path) -> Any:
    with path.open("rb") as file:
        archive = file.read(4) == _ZIP
    if archive:
        _check_archive(path)
    else:
        _check_legacy(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if wanted := _wanted(path, str(error), archive):
            raise refusal(path, wanted) from error
        raise


def refusal(path: Path, wanted: Iterable[str]) -> LoadError:
    """The error for a pickle that is more than weights."""
    return LoadError(
        f"{path} wants more than weights: reading it would call {listed(wanted)}, and a pickle "
        "that calls what it likes can do anything. Refused. In the program that made the file, "
        "save the weights alone: safetensors.torch.save_file(model.state_dict(), "
        "'weights.safetensors') or torch.save(model.state_dict(), 'weights.pt')."
    )


def _wanted(path: Path, message: str, archive: bool) -> list[str]:
    """What a pickle would call that torch does not let it."""
    if archive:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    return re.findall(r"GLOBAL (\S+)", message)


def _check_archive(path: Path) -> None:
    """Refuse a torch archive that is a program, or that claims more than it holds."""
    reader = torch._C.PyTorchFileReader(str(path))  # the one that torch.load uses
    names = reader.get_all_records()
    if "constants.pkl" in names:
        raise LoadError(
            f"{path} is a TorchScript program, which is code. Refused; save the weights alone: "
            "torch.save(module.state_dict(), path)."
        )
    if "data.pkl" not in names:
        raise LoadError(f"{path} is an archive, but not one that torch.save wrote.")
    sizes = _sizes(path)
    if sorted(sizes) != sorted(names):
        raise LoadError(f"{path} is damaged: two readers of archives find different files in it.")
    total, size = sum(sizes.values()), path.stat().st_size
    if total > size:
        raise LoadError(
            f"{path} would unpack to {total} bytes from {size}. torch does not compress, so it did "
            "not write this. Refused."
        )
    for key, nbytes in _storages(reader.get_record("data.pkl")).items():
        there = sizes.get(f"data/{key}", 0)
        if there < nbytes:
            raise LoadError(
                f"{path} is damaged: storage {key!r} should have {nbytes} bytes and has {there}."
            )


def _sizes(path: Path) -> dict[str, int]:
    """Of the files in an archive, without the folder that holds them all."""
    with zipfile.ZipFile(path) as archive:
        return {
            info.filename.partition("/")[2]: info.file_size
            for info in archive.infolist()
            if not info.is_dir()
        }


def _check_legacy(path: Path) -> None:
    """The same for the format before torch 1.6: pickles one after the other, and then numbers."""
    content = path.read_bytes()
    if _Dry(io.BytesIO(content), {}).load() != _MAGIC:
        raise LoadError(
            f"{path} is no file that torch.save wrote. If it is a plain pickle, it is refused "
            "unread, since a pickle can do anything; save the weights alone by torch.save."
        )
    if sum(_storages(content, pickles=4).values()) > len(content):
        raise LoadError(f"{path} is damaged: it claims more numbers than it has bytes.")


def _storages(content: bytes, pickles: int = 1) -> dict[str, int]:
    """The storages that pickles refer to, and how many bytes they claim to have."""
    file, storages = io.BytesIO(content), dict[str, int]()
    for _ in range(pickles):
        _Dry(file, storages).load()
    return storages


class _Inert:
    """Stands for whatever a pickle names: it takes everything and does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def __setitem__(self, *_: Any) -> None: ...
    def __setstate__(self, _: Any) -> None: ...
    def append(self, _: Any) -> None: ...
    def extend(self, _: Any) -> None: ...
    def add(self, _: Any) -> None: ...


@final
class _Dry(pickle._Unpickler):
    """Goes through a pickle without importing or calling anything, and notes its storages.

    Of the two unpicklers of Python it is the one whose memory does not grow by a number in the
    file alone.
    """

    def __init__(self, file: io.BytesIO, storages: dict[str, int]) -> None:
        super().__init__(file)
        self._storages = storages

    def find_class(self, module: str, name: str) -> type:
        return type(name, (_Inert,), {})

    def persistent_load(self, pid: Any) -> Any:
        _, kind, key, _, numel, *_ = pid
        size = _ITEM_SIZES[kind.__name__.removesuffix("Storage")]
        if not isinstance(numel, int) or numel < 0:
            raise ValueError(f"a storage of {numel} elements")
        self._storages[str(key)] = max(self._storages.get(str(key), 0), numel * size)
        return _Inert()


_ITEM_SIZES = {
    **dict.fromkeys(["Untyped", "Byte", "Char", "Bool", "QInt8", "QUInt8", "QUInt4x2"], 1),
    **dict.fromkeys(["Half", "BFloat16", "Short"], 2),
    **dict.fromkeys(["Float", "Int", "QInt32", "ComplexHalf"], 4),
    **dict.fromkeys(["Double", "Long", "ComplexFloat"], 8),
    **dict.fromkeys(["ComplexDouble"], 16),
}


def by_name(paths: Iterable[Path]) -> dict[str, Path]:
    """The paths by the parts in which they differ: runs/a/best.pt and runs/b/best.pt are a and b.

    Suffixes are left out where the rest tells the files apart.
    """
    files = list(paths)
    if len(set(files)) < len(files):
        twice = next(path for path in files if files.count(path) > 1)
        raise InvalidValue(f"Every checkpoint is measured once. Got twice: {twice}.")
    parts = [path.with_suffix("").parts for path in files]
    if len(set(parts)) < len(parts):
        parts = [path.parts for path in files]
    if len(parts) == 1:
        return {parts[0][-1]: files[0]}
    while all(len(each) > 1 for each in parts) and len({each[0] for each in parts}) == 1:
        parts = [each[1:] for each in parts]
    while all(len(each) > 1 for each in parts) and len({each[-1] for each in parts}) == 1:
        parts = [each[:-1] for each in parts]
    return {"/".join(each): path for each, path in zip(parts, files, strict=True)}
