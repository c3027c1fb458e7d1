"""The options that commands share, declared once."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Annotated, Any, final, get_type_hints

import torch
import typer
from torch import nn

from saltflat.checkpoints import load_weights
from saltflat.cli.data import BUILT_IN, divides, load_data
from saltflat.cli.data import FORMS as DATA_FORMS
from saltflat.cli.models import FORMS as MODEL_FORMS
from saltflat.cli.models import load_model
from saltflat.cli.named import is_named, named
from saltflat.cli.running import Voice, World
from saltflat.errors import InvalidValue, LoadError, nearest
from saltflat.losses import NAMED, resolve
from saltflat.measures import MEASURES
from saltflat.subsample import shard

MEASURED = "What is measured"
MANY = "Many checkpoints"
_HOW = "How"
_OUT = "What comes out"
AUTO = "auto"  # as many samples as it takes


@final
class Precision(StrEnum):
    float32 = "float32"
    float64 = "float64"


@final
class Matrix(StrEnum):
    hessian = "hessian"
    ggn = "ggn"


@final
class Proof(StrEnum):
    """What is taken for piecewise linear."""

    proof = "proof"
    probe = "probe"
    none = "none"


@final
class Chosen(StrEnum):
    trainable = "trainable"
    all = "all"


@final
class Directions(StrEnum):
    """Of `sf.landscape`, where the first is the default."""

    filter = "filter"
    random = "random"
    balanced = "balanced"
    eigenvectors = "eigenvectors"


@final
class Scale(StrEnum):
    """Sizes of an experiment."""

    small = "small"
    full = "full"


@final
class Cluster(StrEnum):
    """Where a sweep runs."""

    here = "here"
    ray = "ray"


def _option(*names: str, help: str, panel: str, **settings: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **settings)


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help=f"{MODEL_FORMS}. Code that you name is imported, which runs it; nothing else is run.",
        show_default=False,
    ),
]
Checkpoint = Annotated[
    Path | None,
    _option(
        "--checkpoint",
        "--weights",
        help="Weights: .safetensors, .pt, .pth, or Lightning's .ckpt. Read without running them.",
        panel=MEASURED,
    ),
]
Each = Annotated[
    list[str] | None,
    _option(
        "--each",
        help="Measure every file that matches, e.g. 'runs/*.safetensors', into one table.",
        panel=MANY,
    ),
]
Measures = Annotated[
    list[str] | None,
    _option(
        "--measures",
        "-m",
        help='Names with commas, or "all". By default what one sweep over the data gives.',
        panel=_HOW,
        autocompletion=lambda incomplete: [n for n in MEASURES if n.startswith(incomplete)],
    ),
]
_DATA = _option(
    "--data",
    "-d",
    help=f"{DATA_FORMS}.",
    panel=MEASURED,
    autocompletion=lambda incomplete: [n for n in BUILT_IN if n.startswith(incomplete)],
)


def written(*suffixes: str) -> Callable[[Path | None], Path | None]:
    """Checks a path that is written to in the end, before anything is computed."""

    def check(path: Path | None) -> Path | None:
        if path is not None and path.suffix not in suffixes:
            raise typer.BadParameter(f"It must end in {' or '.join(suffixes)}. Got {path.name!r}.")
        if path is not None and path.is_dir():
            raise typer.BadParameter(f"{path} is a folder.")
        if path is not None and not path.absolute().parent.is_dir():
            raise typer.BadParameter(f"There is no folder {path.parent}.")
        return path

    return check


def above(least: float) -> Callable[[float | None], float | None]:
    """Checks a number that must be finite and above another one."""

    def check(value: float | None) -> float | None:
        if value is not None and not least < value < inf:
            raise typer.BadParameter(f"It must be a finite number above {least:g}. Got {value:g}.")
        return value

    return check


def counted(samples: str | None) -> str | None:
    """Checks how many samples are asked for."""
    good = samples in (None, AUTO) or (samples.isdecimal() and int(samples) > 0)
    if not good:
        raise typer.BadParameter(
            f"It must be a whole number of at least 1, or {AUTO}. Got {samples!r}."
        )
    return samples


Save = Annotated[
    Path | None,
    _option("--save", help="Write the result to FILE.json.", panel=_OUT, callback=written(".json")),
]
Html = Annotated[
    Path | None,
    _option("--html", help="Write a page FILE.html.", panel=_OUT, callback=written(".html")),
]
Weights = Annotated[
    Path | None,
    _option(
        "--save",
        help="Write the weights to FILE.safetensors.",
        panel=_OUT,
        callback=written(".safetensors"),
    ),
]


@final
@dataclass(frozen=True)
class Request:
    """What the user asks of a computation."""

    data: Annotated[str | None, _DATA] = None
    loss: Annotated[
        str,
        _option(
            "--loss",
            help=f"{', '.join(NAMED)}, or file.py:callable.",
            panel=MEASURED,
            autocompletion=lambda incomplete: [n for n in NAMED if n.startswith(incomplete)],
        ),
    ] = "cross_entropy"
    samples: Annotated[
        str | None,
        _option(
            "--samples",
            metavar="N|auto",
            help="The first N only; auto: random ones, as many as --tolerance takes.",
            panel=MEASURED,
            callback=counted,
        ),
    ] = None
    parameters: Annotated[
        Chosen, _option("--parameters", help="Frozen ones too, with all.", panel=MEASURED)
    ] = Chosen.trainable
    output: Annotated[
        str | None,
        _option(
            "--output",
            help="Which of the model's outputs: name, place or callable.",
            panel=MEASURED,
        ),
    ] = None
    unpack: Annotated[
        str | None,
        _option("--unpack", help="file.py:callable, a batch to (inputs, targets).", panel=MEASURED),
    ] = None
    lenient: Annotated[
        bool,
        _option(
            "--no-strict", help="Load the weights that fit, and list the others.", panel=MEASURED
        ),
    ] = False
    curvature: Annotated[Matrix, _option("--curvature", help="The matrix.", panel=_HOW)] = (
        Matrix.hessian
    )
    tolerance: Annotated[
        float | None,
        _option(
            "--tolerance",
            help="Relative error of estimates, 0.05; if given, of what could be exact too.",
            panel=_HOW,
            callback=above(0.0),
        ),
    ] = None
    seed: Annotated[int, _option("--seed", help="Of all that is random.", panel=_HOW, min=0)] = 0
    certify: Annotated[
        Proof,
        _option(
            "--certify",
            help="Exact is what graphs prove; probe: not exact, what seems linear; none: estimate.",
            panel=_HOW,
        ),
    ] = Proof.proof
    memory_budget: Annotated[
        int | None,
        _option(
            "--memory-budget",
            metavar="BYTES",
            help="That a chunk of samples may take.",
            panel=_HOW,
            min=1,
        ),
    ] = None
    device: Annotated[str, _option("--device", help="cpu, cuda, cuda:1, mps.", panel=_HOW)] = "cpu"
    dtype: Annotated[
        Precision | None, _option("--dtype", help="Default: the model's own.", panel=_HOW)
    ] = None
    distributed: Annotated[
        bool,
        _option(
            "--distributed",
            help="Under torchrun: each process measures its part of the data.",
            panel=_HOW,
        ),
    ] = False
    json: Annotated[
        bool, _option("--json", help="JSON and nothing else on stdout.", panel=_OUT)
    ] = False
    quiet: Annotated[bool, _option("--quiet", "-q", help="No progress, no notes.", panel=_OUT)] = (
        False
    )
    traceback: Annotated[
        bool, _option("--traceback", help="Where errors come from.", panel=_OUT)
    ] = False

    @cached_property
    def voice(self) -> Voice:
        return Voice(self.json, self.quiet, self.traceback, self._world())

    def _world(self) -> World | None:
        """The other processes, if this one is to measure with them."""
        if self.distributed:
            return World(self.device)
        if "RANK" in os.environ and int(os.environ.get("WORLD_SIZE") or 1) > 1:
            raise typer.BadParameter(
                f"This is one of {os.environ['WORLD_SIZE']} processes (RANK and WORLD_SIZE are in "
                "the environment, as torchrun puts them there), and each of them would measure all "
                "the data and write the same files. Add --distributed to divide the data among "
                "them, or start the command without torchrun, and without RANK.",
                param_hint="--distributed",
            )
        return None

    def load_model(self, name: str, checkpoint: Path | None) -> nn.Module:
        """The model with its weights, on the device."""
        model = load_model(name, seed=self.seed)
        if checkpoint is not None:
            for note in load_weights(model, checkpoint, strict=not self.lenient):
                self.voice.note(note)
        elif name.startswith("zoo:"):
            self.voice.note("the model has random weights; give trained ones by --checkpoint")
        world = self.voice.world
        return model.to(usable(self.device if world is None else world.device))

    def load_data(self) -> Any:
        if self.data is None:
            raise typer.BadParameter(f"It is needed: {DATA_FORMS}.", param_hint="--data")
        world = self.voice.world
        if world is None or world.size == 1:
            return load_data(self.data, self.first)
        return load_data(self.data, rank=world.rank, world=world.size)

    def shard(self, data: Any) -> Any:
        """What this process is to measure of the data."""
        world = self.voice.world
        if world is None or world.size == 1:
            return data
        assert self.data is not None
        if not (is_named(self.data) and divides(named(self.data))):
            return shard(data, world.reduction, self._unpack(), self.first)
        if self.first is not None:
            words = "Not with a function that divides the data itself, by rank and world."
            raise typer.BadParameter(words, param_hint="--samples")
        return data

    @property
    def first(self) -> int | None:
        """How many samples from the first on; None for all."""
        return None if self.samples in (None, AUTO) else int(self.samples)

    def refuse_auto(self) -> None:
        """For what is computed on all samples alone."""
        if self.samples == AUTO:
            words = "This command takes a number: auto goes with measure and compare."
            raise typer.BadParameter(words, param_hint="--samples")

    def refuse(self, *names: str) -> None:
        """Options that a command has no use for are not passed over in silence."""
        for field in fields(self):
            if field.name in names and getattr(self, field.name) != field.default:
                hint = f"--{field.name.replace('_', '-')}"
                raise typer.BadParameter("This command has no use for it.", param_hint=hint)

    def sampling(self) -> dict[str, Any]:
        """Keywords of the functions that may measure on some of the samples."""
        samples = AUTO if self.samples == AUTO else "all"
        return {"samples": samples, "certify": self.certify.value, **self.search()}

    def search(self) -> dict[str, Any]:
        """Keywords of the functions that may have to estimate."""
        return {
            "curvature": self.curvature.value,
            "tolerance": self.tolerance,
            "seed": self.seed,
        }

    def arguments(self, model: nn.Module) -> dict[str, Any]:
        """Keywords of saltflat's functions."""
        return {
            "loss": self._loss(),
            "parameters": self.parameters.value,
            "output": _output(self.output),
            "unpack": self._unpack(),
            "dtype": getattr(torch, self.dtype.value) if self.dtype else _own_dtype(model),
            "memory_budget": self.memory_budget,
            **({"progress": False} if self.quiet else {}),
            **({"distributed": True} if self.distributed else {}),
        }

    def _unpack(self) -> Callable[..., Any] | None:
        return None if self.unpack is None else _callable("--unpack", self.unpack)

    def _loss(self) -> Any:
        if is_named(self.loss):
            return _callable("--loss", self.loss)
        try:
            resolve(self.loss)
        except InvalidValue as error:
            raise typer.BadParameter(str(error), param_hint="--loss") from None
        return self.loss


def _own_dtype(model: nn.Module) -> torch.dtype | None:
    """The model's, to which data are converted; None for half precision, which is widened."""
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return next((d for d in (torch.float64, torch.float32) if dtypes == {d}), None)


def usable(name: str) -> torch.device:
    """The device of that name, if there is one."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        known = ", ".join(devices())
        raise typer.BadParameter(
            f"{name!r} cannot be used here; there are: {known}.", param_hint="--device"
        ) from error
    return device


def devices() -> list[str]:
    """The devices that torch can use here."""
    found = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    return [*found, "mps"] if torch.backends.mps.is_available() else found


def _callable(option: str, text: str) -> Callable[..., Any]:
    found = named(text) if is_named(text) else None
    if not callable(found):
        raise LoadError(f"{option} must name a callable, as file.py:name. Got {text!r}.")
    # A loss may be given as a class, which is made without settings.
    made: Callable[..., Any] = found() if isinstance(found, type) else found
    return made


def _output(text: str | None) -> str | Callable[..., Any] | None:
    """A callable, or a name, as the functions take it."""
    return _callable("--output", text) if text is not None and is_named(text) else text


def measure_names(measures: list[str] | None) -> Any:
    """The names given by commas or one by one; unknown ones are wrong usage."""
    if measures is None:
        return None
    names = [name.strip() for text in measures for name in text.split(",") if name.strip()]
    if names == ["all"]:
        return "all"
    for name in names:
        if name not in MEASURES:
            words = f"Unknown measure {name!r}. {nearest(name, ['all', *MEASURES])}"
            raise typer.BadParameter(words, param_hint="--measures")
    return names


def with_request(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose last parameter, `request`, stands for the options of `Request`."""
    own = list(inspect.signature(command).parameters.values())[:-1]
    hints = {**get_type_hints(command, include_extras=True)}
    shared = get_type_hints(Request, include_extras=True)
    parameters = [p.replace(annotation=hints[p.name], kind=p.KEYWORD_ONLY) for p in own]
    parameters += [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=shared[field.name],
        )
        for field in fields(Request)
    ]

    def wrapped(**given: Any) -> None:
        request = Request(**{field.name: given.pop(field.name) for field in fields(Request)})
        command(**given, request=request)

    wrapped.__name__, wrapped.__doc__ = command.__name__, command.__doc__
    wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapped
