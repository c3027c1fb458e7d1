"""The log of a monitor: records, and the file of JSON lines that holds them."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import final

from saltflat.errors import DataError


@final
@dataclass(frozen=True, slots=True)
class Record:
    """What one measurement found; one line of the log.

    step, epoch : how many were done when it was made.
    values, stderr : by measure; a standard error of 0 is an exact value.
    seconds : what it took. elapsed : since the monitor was made, measuring included.
    failed : why a measure has no value, e.g. minimum sharpness where curvature is negative.
    skipped : why nothing was measured, if the budget was exceeded.
    """

    step: int
    epoch: int
    values: Mapping[str, float]
    stderr: Mapping[str, float]
    seconds: float
    elapsed: float
    failed: Mapping[str, str] = field(default_factory=dict)
    skipped: str | None = None

    def metrics(self) -> dict[str, float]:
        """What a logger gets: `saltflat/<measure>`, and `saltflat/skipped` for what was not."""
        values = {f"saltflat/{name}": value for name, value in self.values.items()}
        return values if self.skipped is None else {**values, "saltflat/skipped": 1.0}

    def to_json(self) -> str:
        """One line; numbers that are not finite, which JSON has none of, are null."""
        content = asdict(self)
        for name in ("values", "stderr"):
            numbers = content[name].items()
            content[name] = {k: v if math.isfinite(v) else None for k, v in numbers}
        return json.dumps(content, allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> Record:
        content = json.loads(line)
        for name in ("values", "stderr"):
            numbers = content[name].items()
            content[name] = {k: math.nan if v is None else v for k, v in numbers}
        return cls(**content)


def continued(path: Path, measures: Collection[str]) -> list[Record]:
    """The records of a log that is to be continued; none if there is no such file.

    A last line that was not finished (the machine stopped as it was written) is removed. A log of
    other measures than these is one of another run, and refused; otherwise a warning tells what is
    continued, as nothing else shows whose it is.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        return []
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        warnings.warn(
            f"The last line of {path} was not finished, and is removed: "
            f"{content[len(whole) :].decode(errors='replace')[:60]!r}.",
            stacklevel=3,
        )
        os.truncate(path, len(whole))
    records = [
        _record(path, number, line)
        for number, line in enumerate(whole.decode(errors="replace").splitlines(), start=1)
    ]
    _check(path, records, measures)
    return records


def _record(path: Path, number: int, line: str) -> Record:
    try:
        return Record.from_json(line)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(
            f"Line {number} of {path} is not a record of a monitor: {line[:60]!r}. Give "
            "another path, or remove the file."
        ) from error


def _check(path: Path, records: list[Record], measures: Collection[str]) -> None:
    if not records:
        return
    last = records[-1]
    known = {name for each in records for name in (*each.values, *each.failed)}
    if known and known != set(measures):
        raise DataError(
            f"{path} is the log of another run: it holds {', '.join(sorted(known))}, and this "
            f"monitor measures {', '.join(sorted(measures))}. Give another path, or remove the "
            "file."
        )
    warnings.warn(
        f"{path} is continued: it holds {len(records)} records, up to step {last.step} and epoch "
        f"{last.epoch}. If they are not of this run, give another path or remove the file.",
        stacklevel=4,
    )
