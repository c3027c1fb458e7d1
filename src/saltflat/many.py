"""Many checkpoints of one model, one table: measured here, in processes, or on Ray."""

from __future__ import annotations

import copy
import hashlib
import io
import os
import pickle
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from inspect import signature
from pathlib import Path
from typing import Any, final

import torch
from torch import nn
from torch.utils.data import Dataset

from saltflat.checkpoints import by_name, load_weights
from saltflat.checks import check_options
from saltflat.errors import Interrupted, InvalidType, InvalidValue, SaltflatError, listed
from saltflat.losses import LossLike, with_settings
from saltflat.measure import measure, measure_objects
from saltflat.report import Comparison, Report, code_hash, store
from saltflat.risk import Risk
from saltflat.session import RandomState
from saltflat.sweep import Failure, Folder, Run, Settings, Where, sweep
from saltflat.version import __version__
from saltflat.watch import kept
from saltflat.work import QUIET

# A file of weights, or what model.state_dict() returns.
Source = str | Path | Mapping[str, Any]
Make = Callable[[], nn.Module]
_TOLD = 5  # failures, if there is nothing else
_KEYWORDS = (p.name for p in signature(measure).parameters.values() if p.kind is p.KEYWORD_ONLY)
_OPTIONS = [name for name in _KEYWORDS if name not in ("progress", "distributed")]


def measure_many(
    checkpoints: Iterable[str | Path] | Mapping[str, Source],
    data: Any,
    loss: LossLike = "cross_entropy",
    *,
    model: nn.Module | Make,
    on: Where = "here",
    workers: int = 1,
    folder: str | Path | None = None,
    device: torch.device | str | None = None,
    strict: bool = True,
    progress: bool | None = None,
    **options: Any,
) -> Comparison:
    """Measure many checkpoints of one model on the same data, and put them into one table.

    What is found of each is what `measure` finds, given the same seed and number of threads. A
    checkpoint that cannot be loaded or measured does not stop the others: the result has it in
    `failed`, with the reason. One whose process is killed is measured again, three times at most.
    If all of them fail, that is an error.

    Parameters
    ----------
    checkpoints : files of weights (.safetensors, .pt, .pth, .ckpt), which are read without running
        what is in them and named by the parts of their paths in which they differ; or a mapping
        from names to files or state dicts
    data, loss : as in `measure`; or a callable without arguments that makes the data, once in every
        process and for every checkpoint on Ray
    model : a callable without arguments that makes a new network, or a network, of which copies are
        taken. With several workers it lies at the top of a module, and so does what makes the data
        or computes the loss
    on : "here", or "ray": the cluster that Ray is connected to or finds, which sees the same files
    workers : processes at a time, if more than one, which share this process's number of threads;
        on Ray, how many tasks share one GPU
    folder : where every result is kept as soon as it is there, so that the same call goes on where
        it was stopped. What was measured of other weights, data, options or code is not taken for
        it; to know that, the data are read once more
    device : to put the models on; by default they stay where they are made. On Ray, tasks get a GPU
        if it is "cuda"
    strict : whether a file must have all of the model's weights and no others
    progress : whether to tell on the error stream how far it is; yes, by default, unless
        SALTFLAT_PROGRESS is 0 in the environment
    Other options as in `measure`.

    Ctrl-C raises `Interrupted` once one checkpoint is done: its `partial` has those that are.

    Examples
    --------
    >>> import torch, saltflat as sf
    >>> model, x, y = torch.nn.Linear(3, 2), torch.randn(8, 3), torch.arange(8) % 2
    >>> for epoch in (1, 2):
    ...     torch.save(torch.nn.Linear(3, 2).state_dict(), f"epoch-{epoch}.pt")
    >>> files = ["epoch-1.pt", "epoch-2.pt", "epoch-3.pt"]
    >>> found = sf.measure_many(files, (x, y), model=model, measures=["rho"], progress=False)
    >>> list(found)
    ['epoch-1', 'epoch-2']
    >>> found.failed["epoch-3"].startswith("LoadError: There is no file")
    True
    """
    check_options("measure_many", options, _OPTIONS)
    if not callable(model):
        raise InvalidType(
            "model must be a callable that makes the network, or a network. "
            f"Got {type(model).__name__}."
        )
    if progress is not None and not isinstance(progress, bool):
        raise InvalidType(f"progress must be True, False or None. Got {type(progress).__name__}.")
    alone = on == "here" and workers == 1
    work = _Measuring(
        _named(checkpoints),
        model,
        _made(data) if alone else data,  # so that what is wrong with it is no checkpoint's failure
        loss,
        _listed(options),
        torch.device(device) if device else None,
        strict,
    )
    shown = os.environ.get(QUIET) != "0" if progress is None else progress
    how = {"on": on, "workers": workers, "device": device or "cpu", "progress": shown}
    with ExitStack() as stack:
        place = folder or stack.enter_context(tempfile.TemporaryDirectory(prefix="saltflat-"))
        settings = _settings(work, resumed=folder is not None)
        sent = _packed(work) if on == "here" and workers > 1 else work
        return _swept(settings, sent, Folder(Path(place)), how)


def _named(checkpoints: Any) -> dict[str, Path | Mapping[str, Any]]:
    """The checkpoints by name; files by their whole path, for other processes."""
    if isinstance(checkpoints, str | bytes | os.PathLike) or not isinstance(checkpoints, Iterable):
        raise InvalidType(
            "checkpoints must be a list of files, or a mapping from names to files or state dicts. "
            f"Got {checkpoints!r}."
        )
    if not isinstance(checkpoints, Mapping):
        checkpoints = by_name([_file(each) for each in checkpoints])
    if not checkpoints:
        raise InvalidValue("checkpoints is empty: there is nothing to measure.")
    if wrong := [name for name in checkpoints if not isinstance(name, str)]:
        raise InvalidType(f"Names of checkpoints must be words. Got {wrong[0]!r}.")
    return {
        name: source if isinstance(source, Mapping) else _file(source)
        for name, source in checkpoints.items()
    }


def _file(source: Any) -> Path:
    if not isinstance(source, str | Path):
        raise InvalidType(
            "A checkpoint must be a path, or in a mapping a state dict too. "
            f"Got {type(source).__name__}."
        )
    return Path(source).expanduser().absolute()


def _listed(options: Mapping[str, Any]) -> dict[str, Any]:
    """With iterables that can be gone through for every checkpoint, and measures that exist."""
    once = {"measures", "parameters"}
    options = {
        name: value if name not in once or value is None or isinstance(value, str) else [*value]
        for name, value in options.items()
    }
    measure_objects(options.get("measures"))
    return options


def _made(data: Any) -> Any:
    """The data, or what a callable makes them to be."""
    if callable(data) and not isinstance(data, Iterable | Dataset):
        data = data()
    return kept(data)


@final
@dataclass(frozen=True)
class _Measuring:
    """What is done with a checkpoint."""

    sources: Mapping[str, Path | Mapping[str, Any]]
    model: nn.Module | Make
    data: Any
    loss: LossLike
    options: Mapping[str, Any]
    device: torch.device | None
    strict: bool

    def __call__(self, settings: Sequence[Settings], _: torch.device) -> list[dict[str, Any]]:
        return [self._measured(self.sources[str(each["name"])]) for each in settings]

    def _measured(self, source: Path | Mapping[str, Any]) -> dict[str, Any]:
        network = self.network()
        notes = load_weights(network, source, strict=self.strict)
        report = measure(network, self._data, self.loss, **self.options, progress=False)
        return {"report": store.plain(report), "notes": notes}

    @cached_property
    def _data(self) -> Any:
        return _made(self.data)

    def network(self) -> nn.Module:
        """A new one; weights that no file will replace follow the seed."""
        if isinstance(self.model, nn.Module):
            return self._placed(copy.deepcopy(self.model))
        before = RandomState(None, self.device or torch.device("cpu"))
        try:
            torch.default_generator.manual_seed(self.options.get("seed", 0))
            network = self.model()
        finally:
            before.restore()
        if not isinstance(network, nn.Module):
            raise InvalidType(f"model must make an nn.Module. It made {type(network).__name__}.")
        return self._placed(network)

    def _placed(self, network: nn.Module) -> nn.Module:
        return network if self.device is None else network.to(self.device)

    def conditions(self) -> str:
        """A hash of all that the results depend on but the weights."""
        asked = {"parameters", "dtype", "unpack", "output"} & {*self.options}
        network = self.network()
        risk = Risk(
            network, _made(self.data), self.loss, **{name: self.options[name] for name in asked}
        )
        risk.watched.on = True
        with risk.session():
            for _ in risk.batches():
                pass
        assert risk.watched.first is not None
        words = [
            __version__,
            repr(network),
            _told(self.model),
            code_hash(type(network).forward),
            str(risk.watched.first.checksum),
            with_settings(risk.loss),
            *(f"{name} {_told(value)}" for name, value in sorted(self.options.items())),
            f"{_told(self.loss)} {self.device} {self.strict}",
        ]
        return hashlib.sha256("\n".join(words).encode()).hexdigest()


def _told(value: Any) -> str:
    """The same for the same value in every process."""
    return code_hash(value) if callable(value) else repr(value)


def _settings(work: _Measuring, resumed: bool) -> list[Settings]:
    """What the results are found again by, where that is wanted."""
    if not resumed:
        return [{"name": name} for name in work.sources]
    conditions = work.conditions()
    return [
        {"name": name, "weights": _weights_hash(source), "conditions": conditions}
        for name, source in work.sources.items()
    ]


def _weights_hash(source: Path | Mapping[str, Any]) -> str:
    """Of a file or a state dict; nothing for a file that is not there, which will fail."""
    if isinstance(source, Mapping):
        content = io.BytesIO()
        torch.save(dict(source), content)
        return hashlib.sha256(content.getbuffer()).hexdigest()
    if not source.is_file():
        return ""
    with source.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@final
@dataclass(frozen=True)
class _Packed:
    """The work for processes of this machine, as bytes: torch would put tensors that are sent to
    them into shared memory, of which a container may have little."""

    parts: tuple[tuple[str, bytes], ...] = field(repr=False)

    def __call__(self, settings: Sequence[Settings], device: torch.device) -> list[dict[str, Any]]:
        return _unpacked(self.parts)(settings, device)


@lru_cache(maxsize=1)
def _unpacked(parts: tuple[tuple[str, bytes], ...]) -> _Measuring:
    return _Measuring(**{name: pickle.loads(content) for name, content in parts})


def _packed(work: _Measuring) -> _Packed:
    parts = []
    for part in fields(work):
        try:
            parts.append((part.name, pickle.dumps(getattr(work, part.name))))
        except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as error:
            raise InvalidValue(
                f"{part.name} cannot be sent to other processes ({error}). Functions must lie at "
                "the top of a module, and what makes the model or the data can be given in their "
                "place; or take workers=1."
            ) from error
    return _Packed(tuple(parts))


def _swept(
    settings: Sequence[Settings],
    work: Callable[..., list[dict[str, Any]]],
    folder: Folder,
    how: Mapping[str, Any],
) -> Comparison:
    failed: dict[str, str] = {}

    def fail(failure: Failure) -> None:
        failed[str(failure.job.settings[0]["name"])] = failure.why

    try:
        runs = sweep(settings, work, folder, title="checkpoints", failed=fail, **how)
    except KeyboardInterrupt as stop:
        runs = [run for each in settings if (run := folder.find(each))]
        if not runs:
            raise
        done = {run["name"] for run in runs}
        left = [str(each["name"]) for each in settings if each["name"] not in done]
        why = dict.fromkeys(left, "interrupted before it was measured") | failed
        raise Interrupted(_compared(runs, why)) from stop
    if not runs:
        raise _all_failed(failed)
    order = [str(each["name"]) for each in settings]
    return _compared(runs, {name: failed[name] for name in order if name in failed})


def _compared(runs: Sequence[Run], failed: Mapping[str, str]) -> Comparison:
    """With what was done to make weights fit in the notes of the reports, and told once."""
    reports, told = dict[str, Report](), dict[str, list[str]]()
    for run in runs:
        name, notes = str(run["name"]), [str(note) for note in run["notes"]]
        report = store.decoded(Report, run["report"], f"The result of {name} is damaged")
        reports[name] = replace(report, notes=(*report.notes, *notes))
        for note in notes:
            told.setdefault(note, []).append(name)
    for note, names in told.items():
        warnings.warn(f"{listed(names)}: {note}", stacklevel=4)
    return Comparison(reports, failed)


def _all_failed(failed: Mapping[str, str]) -> SaltflatError:
    """Each reason once."""
    names: dict[str, list[str]] = {}
    for name, why in failed.items():
        names.setdefault(why, []).append(name)
    shown = [f"{listed(who)}: {why}" for why, who in list(names.items())[:_TOLD]]
    rest = f"\n… and {len(names) - _TOLD} more reasons" if len(names) > _TOLD else ""
    return SaltflatError(
        f"None of the {len(failed)} checkpoints could be measured.\n" + "\n".join(shown) + rest
    )
