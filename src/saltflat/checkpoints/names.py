"""Short names of files, by which they are told apart."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from saltflat.errors import InvalidValue


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
