"""From the bytes of the original files to tensors of unsigned bytes, without running any code.

CIFAR's "python version" and others that are pickled are not read: unpickling runs what the file
says.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Collection, Mapping
from io import BytesIO
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from saltflat.datasets.data import Pairs
from saltflat.errors import LoadError, MissingDependency

Contents = Mapping[str, bytes]
Tensors = dict[str, Tensor]

_HUNDRED = ("train.bin", "test.bin")
_PIXELS = 3 * 32 * 32
_ENTAILMENT = {"entailment": 0, "not_entailment": 1}


def idx_set(contents: Contents) -> Tensors:
    """The four idx files of MNIST and of what has its format."""
    result = {}
    for part, name in [("train", "train"), ("test", "t10k")]:
        result[f"{part}_x"] = idx(contents[f"{name}-images-idx3-ubyte"])[:, None]
        result[f"{part}_y"] = idx(contents[f"{name}-labels-idx1-ubyte"])
    return result


def idx(content: bytes) -> Tensor:
    """An array of unsigned bytes: 0, 0, 8, the number of axes, their lengths, and the entries."""
    axes = content[3] if len(content) > 3 else 0
    start = 4 + 4 * axes
    if content[:3] != b"\0\0\x08" or len(content) < start:
        raise LoadError(f"These are not unsigned bytes in the idx format: {content[:4]!r}….")
    shape = np.frombuffer(content, ">u4", axes, offset=4).astype(int).tolist()
    if len(content) - start != int(np.prod(shape)):
        raise LoadError(
            f"The idx file says that it has shape {shape} and has {len(content) - start} entries."
        )
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=start).reshape(shape).copy())


def cifar10_binary(contents: Contents) -> Tensors:
    """The six files of CIFAR-10's binary version."""
    train = b"".join(contents[f"data_batch_{i}.bin"] for i in range(1, 6))
    return _records(train, contents["test_batch.bin"], labels=1)


def cifar100_binary(contents: Contents) -> Tensors:
    """The archive of CIFAR-100's binary version; its finer labels, of a hundred classes."""
    files = members(BytesIO(contents["cifar-100-binary.tar.gz"]), "cifar-100-binary/", _HUNDRED)
    if len(files) < len(_HUNDRED):
        raise LoadError(f"cifar-100-binary.tar.gz must hold {', '.join(_HUNDRED)}.")
    return _records(files["train.bin"], files["test.bin"], labels=2)


def members(archive: BinaryIO, folder: str, names: Collection[str]) -> dict[str, bytes]:
    """Those plain files of a tar archive that have these names in a folder; nothing is unpacked."""
    result = {}
    with tarfile.open(fileobj=archive, mode="r:*") as tar:
        for member in tar:  # in their order: going back would unpack it again
            name = member.name.removeprefix(folder)
            file = tar.extractfile(member) if member.isfile() and name in names else None
            if file is not None and member.name == folder + name:
                result[name] = file.read()
    return result


def _records(train: bytes, test: bytes, labels: int) -> Tensors:
    """A record is its labels, the last of which counts, then the planes of red, green and blue."""
    result = {}
    for part, content in [("train", train), ("test", test)]:
        if len(content) % (labels + _PIXELS):
            raise LoadError(f"The CIFAR file ends within a record: it has {len(content)} bytes.")
        records = np.frombuffer(content, np.uint8).reshape(-1, labels + _PIXELS)
        pixels = records[:, labels:].reshape(-1, 3, 32, 32).copy()
        result[f"{part}_x"] = torch.from_numpy(pixels)
        result[f"{part}_y"] = torch.from_numpy(records[:, labels - 1].copy())
    return result


def cifar10_png(contents: Contents) -> Tensors:
    """CIFAR-10 as big PNG files in which every row is an image, and lists of labels in JSON."""
    batches = [_png(contents[f"data_batch_{i}.png"]) for i in range(1, 6)]
    labels = {
        part: torch.tensor(json.loads(contents[f"{part}_lables.json"]), dtype=torch.uint8)
        for part in ("train", "test")
    }
    return {
        "train_x": torch.cat(batches),
        "train_y": labels["train"],
        "test_x": _png(contents["test_batch.png"]),
        "test_y": labels["test"],
    }


def _png(content: bytes) -> Tensor:
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingDependency(
            "Reading PNG files needs Pillow, which is not installed. "
            "Install it with: pip install pillow"
        ) from error
    rows = np.asarray(Image.open(BytesIO(content), formats=["PNG"]))
    if rows.ndim != 3 or rows.shape[1:] != (1024, 3) or rows.dtype != np.uint8:
        raise LoadError(f"A row of 1024 pixels is an image. Got shape {rows.shape}, {rows.dtype}.")
    return torch.from_numpy(rows.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2).copy())


def svhn_matlab(contents: Contents) -> Tensors:
    """The cropped digits of SVHN, in MATLAB's format; its class 10 is the digit 0."""
    from scipy.io import loadmat

    result = {}
    for part in ("train", "test"):
        arrays = loadmat(BytesIO(contents[f"{part}_32x32.mat"]), variable_names=["X", "y"])
        pixels = np.ascontiguousarray(arrays["X"].transpose(3, 2, 0, 1))
        result[f"{part}_x"] = torch.from_numpy(pixels)
        result[f"{part}_y"] = torch.from_numpy((arrays["y"].ravel() % 10).astype(np.uint8))
    return result


def sentence_pairs(content: bytes) -> Pairs:
    """GLUE's tab-separated index, first sentence, second sentence and label, below a header."""
    lines = content.decode("utf-8").removesuffix("\n").split("\n")
    rows = [line.removesuffix("\r").split("\t") for line in lines]
    wrong = next((i for i, row in enumerate(rows) if len(row) != 4), None)
    if wrong is not None or rows[0][3] != "label":
        raise LoadError(
            "A line must have an index, two sentences and a label, with tabs between, below a "
            f"header. Got {lines[wrong or 0][:80]!r} in line {(wrong or 0) + 1}."
        )
    unknown = {row[3] for row in rows[1:]} - set(_ENTAILMENT)
    if unknown:
        raise LoadError(f"A label must be one of {list(_ENTAILMENT)}. Got {sorted(unknown)}.")
    labels = torch.tensor([_ENTAILMENT[row[3]] for row in rows[1:]])
    return Pairs([row[1] for row in rows[1:]], [row[2] for row in rows[1:]], labels)
