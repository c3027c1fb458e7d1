"""The records of a monitor: its log in a file, a table of them, and a picture."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from saltflat.errors import DataError, InvalidValue, optional
from saltflat.report import store

if TYPE_CHECKING:
    import pandas


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

    def __str__(self) -> str:
        when = f"step {self.step}, epoch {self.epoch}" if self.step else f"epoch {self.epoch}"
        values = [f"{name} {value:.4g}" for name, value in self.values.items()]
        values += [f"{name}: {reason}" for name, reason in self.failed.items()]
        return f"{when}: {self.skipped or ', '.join(values)}"

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


def rows(records: Sequence[Record], measures: Sequence[str]) -> list[dict[str, Any]]:
    """One row a record: when, every measure with its standard error, what it took, why not."""
    return [
        {
            "step": record.step,
            "epoch": record.epoch,
            **{name: record.values.get(name, math.nan) for name in measures},
            **{f"{name}_stderr": record.stderr.get(name, math.nan) for name in measures},
            "seconds": record.seconds,
            "elapsed": record.elapsed,
            "skipped": record.skipped or "",
            "failed": "; ".join(f"{name}: {why}" for name, why in record.failed.items()),
        }
        for record in records
    ]


def frame(records: Sequence[Record], measures: Sequence[str]) -> pandas.DataFrame:
    """The rows as a DataFrame; numbers that are not there are NaN."""
    result: pandas.DataFrame = optional("pandas", "A DataFrame").DataFrame(rows(records, measures))
    return result


def saved(path: Path, records: Sequence[Record], measures: Sequence[str]) -> Path:
    """Write the records, whole or not at all: as lines of JSON like the log, or as a table."""
    if path.suffix == ".jsonl":
        text = "".join(record.to_json() + "\n" for record in records)
    elif path.suffix == ".csv":
        file = io.StringIO()
        table = rows(records, measures)
        writer = csv.DictWriter(file, list(table[0]) if table else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)
        text = file.getvalue()
    else:
        raise InvalidValue(f"A history is saved as .jsonl or .csv. Got {path.name!r}.")
    store.write(path, text)
    return path


def drawn(path: Path, records: Sequence[Record], measures: Sequence[str]) -> Path:
    """A panel for each measure, over steps, or over epochs where no step was counted.

    Bars are two standard errors; grey lines are measurements that were skipped.
    """
    if not any(record.values for record in records):
        raise InvalidValue("There is nothing to draw: nothing was measured yet.")
    figures = optional("matplotlib.figure", "A picture")
    word = "step" if any(record.step for record in records) else "epoch"
    figure = figures.Figure(figsize=(7.0, 0.6 + 2.2 * len(measures)), layout="constrained")
    axes = figure.subplots(len(measures), 1, sharex=True, squeeze=False)[:, 0]
    for axis, name in zip(axes, measures, strict=True):
        known = [record for record in records if name in record.values]
        axis.errorbar(
            [getattr(record, word) for record in known],
            [record.values[name] for record in known],
            [2 * record.stderr[name] for record in known],
            marker="o",
            markersize=4,
            linewidth=1.4,
            capsize=2,
        )
        for record in records:
            if record.skipped is not None:
                axis.axvline(getattr(record, word), color="0.85", linewidth=0.8, zorder=0)
        axis.set_ylabel(name.replace("_", " "))
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    axes[-1].set_xlabel(word)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)
    return path


def appended(path: Path, record: Record) -> None:
    """Add a line to the log, whole or not at all: after a full disk it is as it was."""
    size = path.stat().st_size if path.exists() else None
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(record.to_json() + "\n")
    except OSError:
        if size is None:
            path.unlink(missing_ok=True)
        else:
            os.truncate(path, size)
        raise


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
    _check_log(path, records, measures)
    return records


def _record(path: Path, number: int, line: str) -> Record:
    try:
        return Record.from_json(line)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(
            f"Line {number} of {path} is not a record of a monitor: {line[:60]!r}. Give "
            "another path, or remove the file."
        ) from error


def _check_log(path: Path, records: list[Record], measures: Collection[str]) -> None:
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
