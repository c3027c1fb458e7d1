"""Running out of memory, and going on with less at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from saltflat.errors import SaltflatError

Result = TypeVar("Result")


def out_of_memory(error: Exception) -> bool:
    """Whether torch could not allocate, on any device."""
    said = isinstance(error, RuntimeError) and "allocate memory" in str(error)
    return said or isinstance(error, torch.OutOfMemoryError)


def ordinary(error: Exception) -> bool:
    """Whether an error out of a user's code is of torch's kinds, and not for want of memory.

    Errors of the user's own making, and those of saltflat, pass as they are.
    """
    kinds = RuntimeError | TypeError | ValueError | IndexError | AttributeError
    theirs = type(error).__module__.partition(".")[0] in ("builtins", "torch")
    ours = isinstance(error, SaltflatError)
    return theirs and isinstance(error, kinds) and not ours and not out_of_memory(error)


def halving(call: Callable[[int], Result], size: int) -> Result:
    """call(size), with half the size each time that memory runs out."""
    while True:
        try:
            return call(size)
        except RuntimeError as error:
            if not out_of_memory(error) or size == 1:
                raise
        size //= 2
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
