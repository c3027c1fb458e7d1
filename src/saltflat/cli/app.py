"""The commands: the same words as saltflat's functions."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from torch import nn

import saltflat as sf
from saltflat.cli import balancing
from saltflat.cli import bench as speed
from saltflat.cli import doctor as health
from saltflat.cli.data import BUILT_IN, described, load_data
from saltflat.cli.each import measured
from saltflat.cli.options import (
    MANY,
    MEASURED,
    Checkpoint,
    Cluster,
    Directions,
    Each,
    Html,
    Measures,
    Model,
    Request,
    Save,
    Scale,
    Weights,
    above,
    measure_names,
    usable,
    with_request,
    written,
)
from saltflat.cli.running import EXIT_CODES, Code, Voice, keep, speaking
from saltflat.errors import Interrupted, LoadError
from saltflat.version import __version__

app = typer.Typer(
    name="saltflat",
    help="How flat is a minimum, and would the answer survive a rescaling of the weights?\n\n"
    f"{' '.join(EXIT_CODES.split())}",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

T = TypeVar("T")

Json = Annotated[bool, typer.Option("--json", help="JSON and nothing else on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no notes.")]
Traceback = Annotated[bool, typer.Option("--traceback", help="Where errors come from.")]


def _example(*lines: str) -> str:
    """What --help ends with."""
    return "\n\n".join(["[bold]Example[/]", *(f"[cyan]saltflat {line}[/]" for line in lines)])


def _version(asked: bool) -> None:
    if asked:
        print(f"saltflat {__version__}")
        raise typer.Exit


@app.callback()
def main_options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print it and leave."),
    ] = False,
) -> None:
    """Options before the command."""


@app.command(epilog=_example("demo", "demo --html first.html --all"))
def demo(
    html: Annotated[
        Path, typer.Option(metavar="FILE", help="The page to write.", callback=written(".html"))
    ] = Path("demo.html"),
    everything: Annotated[
        bool, typer.Option("--all", help="Networks on random labels, too: a minute more.")
    ] = False,
    traceback: Traceback = False,
) -> None:
    """Run the main jobs on digits that come with scikit-learn; a minute or two."""
    with speaking(Voice(traceback=traceback)):
        # Not before: it brings SciPy, and --help should not wait for that.
        import_module("saltflat.demo.__main__").run(html, everything)


@app.command(
    epilog=_example(
        "measure zoo:mlp:64-32-10 --data digits",
        "measure net.py:make_model --checkpoint net.safetensors --data test.npz -m rho,kappa",
        "measure net.py:make_model --each 'runs/*.pt' --data test.npz --workers 2 --html many.html",
    )
)
@with_request
def measure(
    model: Model,
    checkpoint: Checkpoint = None,
    each: Each = None,
    on: Annotated[
        Cluster, typer.Option(help="This machine, or a Ray cluster.", rich_help_panel=MANY)
    ] = Cluster.here,
    workers: Annotated[
        int,
        typer.Option(
            help="Processes; on Ray, how many share one GPU.", min=1, rich_help_panel=MANY
        ),
    ] = 1,
    folder: Annotated[
        Path | None,
        typer.Option(help="Keep each result, and go on where it stopped.", rich_help_panel=MANY),
    ] = None,
    measures: Measures = None,
    save: Save = None,
    html: Html = None,
    *,
    request: Request,
) -> None:
    """Measure how flat a model's minimum is, each measure with how exact it is."""
    how = {"on": on.value, "workers": workers, "folder": folder}
    with speaking(request.voice, (save, html)):
        names = measure_names(measures)
        if each:
            _refuse("--checkpoint", checkpoint is not None, "Not beside --each.")
            _refuse("--distributed", request.distributed, "Not with --each: it has --workers.")
            comparison = measured(request, model, each, names, **how)
            request.voice.result(comparison)
            keep(request.voice, comparison, save, html)
            raise typer.Exit(Code.FAILED if comparison.failed else Code.OK)
        for option, usual in {"on": "here", "workers": 1, "folder": None}.items():
            _refuse(f"--{option}", how[option] != usual, "It goes with --each.")
        data = request.load_data()
        report = _measured(request, request.load_model(model, checkpoint), data, names)
        request.voice.result(report)
        keep(request.voice, report, save, html)


def _refuse(option: str, given: bool, words: str) -> None:
    if given:
        raise typer.BadParameter(words, param_hint=option)


def _measured(request: Request, model: nn.Module, data: Any, names: Any) -> sf.Report:
    options = {**request.sampling(), **request.arguments(model)}
    return sf.measure(model, request.shard(data), measures=names, **options)


@app.command(
    epilog=_example(
        "compare net.py:make_model --checkpoint sgd.pt --checkpoint sam.pt --data test.npz",
        "compare sgd=a.py:model sam=b.py:model --data test.npz",
        "compare monday.json tuesday.json",
    )
)
@with_request
def compare(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL",
            help="Models as for measure, or saved reports, .json; each may be written NAME=….",
            show_default=False,
        ),
    ],
    checkpoint: Annotated[
        list[Path] | None,
        typer.Option(
            "--checkpoint",
            "--weights",
            help="Weights: one file a model, or several of the one model.",
            rich_help_panel=MEASURED,
        ),
    ] = None,
    measures: Measures = None,
    save: Save = None,
    html: Html = None,
    *,
    request: Request,
) -> None:
    """Put several models side by side, and say if their numbers can be compared."""
    with speaking(request.voice, (save, html)):
        if all(name.endswith(".json") for name in models):
            request.refuse("data", "loss", "samples", "output", "unpack", "dtype", "device")
            request.refuse("certify", "memory_budget", "distributed")
            named = _unique([_report_named(text) for text in models])
            comparison = sf.Comparison({name: _saved(path) for name, path in named.items()})
        else:
            contenders = _contenders(models, checkpoint or [])
            comparison = _compared(request, contenders, measure_names(measures))
        request.voice.result(comparison)
        keep(request.voice, comparison, save, html)


def _report_named(text: str) -> tuple[str, Path]:
    """NAME=FILE.json, or a file by the name that it has."""
    name, equals, rest = text.partition("=")
    if not equals or Path(text).exists():
        return Path(text).stem, Path(text)
    return name, Path(rest)


def _saved(path: Path) -> sf.Report:
    try:
        return sf.Report.load(path)
    except Exception as error:  # whatever a damaged file may lead to
        raise LoadError(f"{path} is no report: {error}") from error


def _contenders(models: list[str], checkpoints: list[Path]) -> dict[str, tuple[str, Path | None]]:
    """Name, model and weights of each."""
    if len(models) == 1 and len(checkpoints) > 1:
        pairs: list[tuple[str, tuple[str, Path | None]]]
        pairs = [(path.stem, (models[0], path)) for path in checkpoints]
    elif checkpoints and len(checkpoints) != len(models):
        raise typer.BadParameter(
            f"There are {len(models)} models and {len(checkpoints)} checkpoints: give one model, "
            "or one checkpoint a model.",
            param_hint="--checkpoint",
        )
    else:
        paths: list[Path | None] = [*checkpoints] or [None for _ in models]
        pairs = []
        for text, path in zip(models, paths, strict=True):
            name, equals, rest = text.partition("=")
            pairs.append((name, (rest if equals else text, path)))
    return _unique(pairs)


def _unique(pairs: list[tuple[str, T]]) -> dict[str, T]:
    """By name, if no two have the same."""
    if len(dict(pairs)) < len(pairs):
        names = ", ".join(name for name, _ in pairs)
        raise typer.BadParameter(f"Names must differ: write NAME=… before them. Got {names}.")
    return dict(pairs)


def _compared(
    request: Request, contenders: dict[str, tuple[str, Path | None]], names: Any
) -> sf.Comparison:
    """One model after the other, so that no two need to fit into memory."""
    data, reports = request.load_data(), dict[str, sf.Report]()
    try:
        for name, (text, path) in contenders.items():
            request.voice.note(f"{name} ({len(reports) + 1} of {len(contenders)})")
            reports[name] = _measured(request, request.load_model(text, path), data, names)
    except KeyboardInterrupt as stop:
        if isinstance(stop, Interrupted):
            reports[f"{name} (partial)"] = stop.partial
        if reports:
            raise Interrupted(sf.Comparison(reports)) from stop
        raise
    return sf.Comparison(reports)


@app.command(epilog=_example("audit net.py:make_model --checkpoint net.pt --data test.npz"))
@with_request
def audit(
    model: Model,
    checkpoint: Checkpoint = None,
    measures: Measures = None,
    elements: Annotated[int, typer.Option(help="Rescalings of each kind.", min=1)] = 2,
    spread: Annotated[float, typer.Option(help="The largest factor.", callback=above(1.0))] = 1e3,
    save: Save = None,
    html: Html = None,
    *,
    request: Request,
) -> None:
    """See which measures move under rescalings that keep the function (in float64)."""
    with speaking(request.voice, (save, html)):
        request.refuse("dtype", "certify")
        request.refuse_auto()
        names, data = measure_names(measures), request.load_data()
        loaded = request.load_model(model, checkpoint)
        options = {**request.search(), **request.arguments(loaded)}
        options |= {"measures": names, "elements": elements, "spread": spread}
        del options["dtype"]
        found = sf.audit(loaded, request.shard(data), **options)
        request.voice.result(found)
        keep(request.voice, found, save, html)
    if not found.ok:
        raise typer.Exit(Code.DISAGREES)


@app.command(
    epilog=_example("balance net.py:make_model --data test.npz --save balanced.safetensors")
)
@with_request
def balance(
    model: Model,
    checkpoint: Checkpoint = None,
    save: Weights = None,
    *,
    request: Request,
) -> None:
    """Rescale the weights to the least trace of the Hessian, with the same function."""
    request.refuse("distributed")
    with speaking(request.voice):
        request.refuse("certify")
        request.refuse_auto()
        data = request.load_data()
        loaded = request.load_model(model, checkpoint)
        options = {**request.search(), **request.arguments(loaded)}
        result = balancing.balanced(loaded, data, options)
        request.voice.result(result, result.content)
        if save is not None:
            result.save(save)
            request.voice.note(f"wrote {save}")


@app.command(
    epilog=_example(
        "landscape net.py:make_model --data test.npz --save plane.json --plot plane.png"
    )
)
@with_request
def landscape(
    model: Model,
    checkpoint: Checkpoint = None,
    directions: Annotated[Directions, typer.Option(help="Of the line or plane.")] = (
        Directions.filter
    ),
    dimensions: Annotated[int, typer.Option(help="A line or a plane.", min=1, max=2)] = 2,
    points: Annotated[int, typer.Option(help="Along each direction.", min=2)] = 25,
    span: Annotated[
        float | None, typer.Option(help="From -span to span.", callback=above(0.0))
    ] = None,
    accuracy: Annotated[bool, typer.Option("--accuracy", help="That of the labels too.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw a picture: .png, .svg, .pdf.")] = None,
    save: Annotated[
        Path | None,
        typer.Option(help="FILE.json, written after every point, and gone on with if it is there."),
    ] = None,
    html: Html = None,
    *,
    request: Request,
) -> None:
    """Compute the loss on a line or a plane through the model's parameters."""
    with speaking(request.voice, (html,)):
        request.refuse("curvature", "tolerance", "certify")
        request.refuse_auto()
        data, loaded = request.load_data(), request.load_model(model, checkpoint)
        options = {"seed": request.seed, "path": save, **request.arguments(loaded)}
        options |= {"dimensions": dimensions, "points": points, "span": span}
        options |= {"directions": directions.value, "accuracy": accuracy}
        try:
            found = sf.landscape(loaded, request.shard(data), **options)
        except KeyboardInterrupt as stop:
            if save is None or not save.exists():
                raise
            raise Interrupted(sf.Landscape.load(save)) from stop
        request.voice.result(found)
        keep(request.voice, found, html)
        if plot is not None and request.voice.first:
            request.voice.note(f"wrote {found.plot(plot)}")
        if (save, html, plot) == (None, None, None) and not request.voice.json:
            request.voice.note("nothing was kept: --html and --plot draw it, --save keeps it.")


@app.command(epilog=_example("bench net.py:make_model --data test.npz --samples 512"))
@with_request
def bench(
    model: Model,
    checkpoint: Checkpoint = None,
    repeats: Annotated[int, typer.Option(help="The fastest of so many counts.", min=1)] = 3,
    *,
    request: Request,
) -> None:
    """Time the main calls on your model, as multiples of one gradient over the same data."""
    request.refuse("distributed")
    with speaking(request.voice):
        request.refuse("certify")
        request.refuse_auto()
        data = request.load_data()
        loaded = request.load_model(model, checkpoint)
        options = {**request.search(), **request.arguments(loaded)}
        result = speed.bench(loaded, data, options, repeats)
        request.voice.result(result, result.content)


@app.command(
    epilog=_example(
        "reproduce",
        "reproduce minimum-sharpness --workers 2",
        "reproduce minimum-sharpness/figure-1 --size full --device cuda",
    )
)
def reproduce(
    name: Annotated[
        str | None,
        typer.Argument(help="An experiment, a paper, or all.", show_default=False),
    ] = None,
    size: Annotated[Scale, typer.Option(help="Minutes on two cores, or a GPU's.")] = Scale.small,
    on: Annotated[Cluster, typer.Option(help="This machine, or a Ray cluster.")] = Cluster.here,
    workers: Annotated[
        int, typer.Option(help="Processes; on Ray, how many share one GPU.", min=1)
    ] = 1,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1.")] = "cpu",
    folder: Annotated[Path, typer.Option(help="Results, by experiment and size.")] = (
        Path("reproduced")
    ),
    json: Json = False,
    quiet: Quiet = False,
    traceback: Traceback = False,
) -> None:
    """Run experiments of the papers, or go on with them; without a name, list them."""
    voice = Voice(json, quiet, traceback)
    with speaking(voice):
        # Not before: it brings all the experiments, and --help should not wait for them.
        reproducing = import_module("saltflat.cli.reproducing")
        if name is None:
            listing = reproducing.Listing()
            voice.result(listing, listing.content)
            return
        how = {"on": on.value, "device": usable(device), "workers": workers}
        reproducing.run(voice, name, size.value, folder, how)


@app.command(epilog=_example("data", "data test.npz"))
def data(
    name: Annotated[
        str | None, typer.Argument(help="Look at these data.", show_default=False)
    ] = None,
    json: Json = False,
    traceback: Traceback = False,
) -> None:
    """List the built-in data sets and where they come from, or look at some data."""
    voice = Voice(json=json, traceback=traceback)
    with speaking(voice):
        if name is not None:
            content = {name: described(load_data(name))}
        else:
            content = {
                each: {"what": what, "from": source} for each, (what, source, _) in BUILT_IN.items()
            }
        lines = [
            f"{k}\n" + "\n".join(f"  {a}: {b}" for a, b in v.items()) for k, v in content.items()
        ]
        voice.result("\n".join(lines), lambda: content)


@app.command(epilog=_example("doctor"))
def doctor(json: Json = False, traceback: Traceback = False) -> None:
    """Show versions, devices, what is missing and how to install it, and try a computation."""
    voice = Voice(json=json, traceback=traceback)
    with speaking(voice):
        findings = health.examine()
        voice.result(findings, findings.content)
        if not findings.ok:
            raise typer.Exit(Code.FAILED)


def main() -> None:
    """The entry point."""
    app(prog_name="saltflat")
