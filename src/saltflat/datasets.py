"""Data sets for the demo and the examples."""

from __future__ import annotations

import torch
from torch import Tensor

from saltflat.errors import MissingDependency

_TRAIN = 1437  # four fifths
_SEED = 0


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`(train_x, train_y, test_x, test_y)`: pixels in [0, 1], float32 of shape (n, 64), and labels.

    The 8×8 handwritten digits that come with scikit-learn: no download, 1797 images.
    The split is the same on every call and on every machine, and leaves the global random state
    alone.
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
    return x[train], y[train], x[test], y[test]
