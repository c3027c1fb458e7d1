"""Memory: want of it and other errors out of a user's code, on with less, and blocks kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch

from saltflat.errors import SaltflatError

Result = TypeVar("Result")


def out_of_memory(error: Exception) -> bool:
    """Whether torch could not allocate, on any device, or Python."""
    said = isinstance(error, RuntimeError) and "allocate memory" in str(error)
    return said or isinstance(error, torch.OutOfMemoryError | MemoryError)


def ordinary(error: Exception) -> bool:
    """Whether an error out of a user's code is of torch's kinds, and not for want of memory.

    Errors of the user's own making, and those of saltflat, pass as they are.
    """
    kinds = RuntimeError | TypeError | ValueError | IndexError | AttributeError
    theirs = type(error).__module__.partition(".")[0] in ("builtins", "torch")
    ours = isinstance(error, SaltflatError)
    return theirs and isinstance(error, kinds) and not ours and not out_of_memory(error)


def fails_again(call: Callable[[], Any]) -> bool:
    """Whether a call that failed does so again: for what it was given, and not by chance.

    A failure from which something is concluded must; any other is the user's to see.
    """
    try:
        call()
    except Exception as error:
        if out_of_memory(error):
            raise
        return True
    return False


def halving(call: Callable[[int], Result], size: int) -> Result:
    """call(size), with half the size each time that memory runs out."""
    while True:
        try:
            return call(size)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error) or size == 1:
                raise
        size //= 2
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


_KEPT = (1 << 25) - (1 << 16)  # bytes: glibc learns from blocks of up to 32 MiB


@cache
def keep_blocks() -> None:
    """Let the allocator keep freed blocks for the next use, once for the process.

    Passes take and free the same blocks again and again. glibc gives those of 128 KiB and more back
    to the system at once, and every page of the next one comes as a fault: a third of the time of a
    small CNN. It learns from the blocks that are freed how large those are that come and go. So one
    is, of which no page is ever touched. Thresholds that the user has set stay as they are.
    """
    torch.UntypedStorage(_KEPT, device="cpu")
