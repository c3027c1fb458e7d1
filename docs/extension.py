"""What these pages need of Sphinx: code that is run, tables and pages made of it, docstrings."""

from __future__ import annotations

import inspect
import io
import os
import re
import shlex
import subprocess
import sys
from contextlib import chdir, redirect_stdout
from pathlib import Path
from typing import Any, ClassVar, get_args

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective, SphinxRole

from saltflat.bibliography import title
from saltflat.cli.app import app
from saltflat.measurement import EVERY_RESCALING, Symmetry
from saltflat.measures import MEASURES, Measure
from saltflat.papers import EXPERIMENTS, Experiment, Reproduction
from saltflat.report import store

ROOT = Path(__file__).parent.parent
logger = logging.getLogger(__name__)


class Executed(SphinxDirective):
    """Runs its code, in one namespace for all blocks of a page, and shows what it prints.

    Files that it writes are in the folder `made` of the pages.
    """

    has_content = True
    namespaces: ClassVar[dict[str, dict[str, Any]]] = {}

    def run(self) -> list[nodes.Node]:
        source, printed = "\n".join(self.content), io.StringIO()
        namespace = self.namespaces.setdefault(self.env.docname, {"__name__": "__main__"})
        with chdir(_made(self.env.app)), redirect_stdout(printed):
            exec(compile(source, f"{self.env.docname}.md", "exec"), namespace)
        code = nodes.literal_block(source, source, language="python")
        return [code, *_printed(printed.getvalue())]


class Command(SphinxDirective):
    """Runs `saltflat …` and shows what it prints; files as above."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        command = "\n".join(self.content)
        words = shlex.split(command.replace("\\\n", " "))
        done = subprocess.run(
            [sys.executable, "-m", "saltflat", *words[1:]],
            cwd=_made(self.env.app),
            env=os.environ | {"NO_COLOR": "1"},
            capture_output=True,
            text=True,
        )
        if words[0] != "saltflat" or done.returncode:
            logger.warning("%s failed: %s", command, done.stderr, location=self.get_location())
        code = nodes.literal_block(command, command, language="sh")
        return [code, *_printed(done.stdout)]


class CommandsTable(SphinxDirective):
    """The commands, from what they say of themselves."""

    def run(self) -> list[nodes.Node]:
        rows = ["| command | what it does |", "|---|---|"]
        for command in app.registered_commands:
            assert command.callback is not None
            name, words = command.callback.__name__, inspect.getdoc(command.callback)
            rows.append(f"| `saltflat {name}` | {words} |")
        return self.parse_text_to_nodes("\n".join(rows))


def _made(app: Sphinx) -> Path:
    folder = Path(app.outdir) / "made"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _printed(text: str) -> list[nodes.Node]:
    text = "\n".join(line.rstrip() for line in text.rstrip().splitlines())
    if not text:
        return []
    return [nodes.literal_block(text, text, language="text", classes=["printed"])]


class MeasuresTable(SphinxDirective):
    """The catalogue, from what its classes say of themselves."""

    def run(self) -> list[nodes.Node]:
        lines = [
            "| measure | invariant to | cost | needs | from |",
            "|---|---|---:|---|---|",
            *(_row(name, kind) for name, kind in MEASURES.items()),
        ]
        return self.parse_text_to_nodes("\n".join(lines))


def _row(name: str, kind: type[Measure]) -> str:
    everything = kind.invariant_to == EVERY_RESCALING
    moves = [each for each in get_args(Symmetry) if each in kind.invariant_to]
    invariant = "every rescaling" if everything else ", ".join(moves) or "nothing"
    cost = "sweep" if kind.cost == "sweep" else f"{kind().price():.0f}"
    source = ", ".join(filter(None, (kind.paper, kind.equation)))
    link = f"[`{name}`](#{name.replace('_', '-')})"
    return f"| {link} | {invariant} | {cost} | {', '.join(sorted(kind.needs))} | {source} |"


class Formula(SphinxDirective):
    """The formula, the paper and the settings of one measure."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        kind = MEASURES[self.arguments[0]]
        source = ", ".join(filter(None, (kind.paper, kind.equation)))
        settings = ", ".join(f"{n}={v!r}" for n, v in kind().settings().items())
        call = f"`saltflat.measures.{kind.__name__}({settings})`"
        return self.parse_text_to_nodes(
            f"{kind.explanation}\n\n`{kind.title}`\n\n{source}. {call}\n"
        )


class Reproduced(SphinxDirective):
    """The experiments, with links to the pages that `reproduced_pages` made."""

    def run(self) -> list[nodes.Node]:
        if not EXPERIMENTS:
            return self.parse_text_to_nodes("There are no experiments yet.")
        rows = ["| experiment | what | run |", "|---|---|---|"]
        for name, experiment in EXPERIMENTS.items():
            link = f"[{name}](reproduced/{name.replace('/', '.md#')})"
            result = _result(name)
            when = f"{result.size}, {result.finished[:10]}" if result else "not yet"
            rows.append(f"| {link} | {experiment.title} | {when} |")
        pages = [f"reproduced/{paper}" for paper in _papers()]
        tree = ["```{toctree}", ":hidden:", "", *pages, "```"]
        return self.parse_text_to_nodes("\n".join([*rows, "", *tree]))


RESULTS = ROOT / "docs" / "results"


def _result(name: str) -> Reproduction | None:
    """Of the largest size that was run, if it is among these pages."""
    path = RESULTS / f"{name}.json"
    return Reproduction.load(path) if path.exists() else None


def _papers() -> dict[str, list[Experiment]]:
    papers: dict[str, list[Experiment]] = {}
    for name, experiment in EXPERIMENTS.items():
        papers.setdefault(name.partition("/")[0], []).append(experiment)
    return papers


def reproduced_pages(app: Sphinx) -> None:
    """Writes a page for each paper, with the figures drawn anew from the results."""
    folder = Path(app.srcdir) / "reproduced"
    folder.mkdir(exist_ok=True)
    for paper, experiments in _papers().items():
        sections = [_section(experiment, folder) for experiment in experiments]
        page = "\n\n".join([f"# {title(experiments[0].paper)}", *sections])
        store.write(folder / f"{paper}.md", page)
    known = {RESULTS / f"{name}.json" for name in EXPERIMENTS}
    for path in set(RESULTS.rglob("*.json")) - known:
        logger.warning("there is no experiment for %s", path)


def _section(experiment: Experiment, folder: Path) -> str:
    """An experiment: figure, table, what was changed, how it was made."""
    figure = experiment.name.partition("/")[2]
    head, result = f"## {figure}\n\n{experiment.title}", _result(experiment.name)
    if result is None:
        changed = "\n".join(f"- {sentence}" for sentence in experiment.changed)
        command = f"saltflat reproduce {experiment.name}"
        return f"{head}\n\nNot run yet: `{command}`.\n\n{changed}\n"
    picture = f"{experiment.name.replace('/', '-')}.png"
    experiment.draw(result.runs).savefig(folder / picture, dpi=150)
    return f"{head}\n\n![{experiment.title}]({picture})\n\n{result.markdown()}"


class Test(SphinxRole):
    """The name of a test, `tests/test_x.py::test_y`, which must exist."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        path, _, name = self.text.partition("::")
        file = ROOT / path
        if not file.is_file() or f"def {name}(" not in file.read_text():
            logger.warning("there is no test %s", self.text, location=self.get_location())
        return [nodes.literal(self.text, self.text)], []


_ENTRY = re.compile(r"^(\w[\w, ]*?) :(?: (.*))?$")
_AFTER_CODE = frozenset(" .,;:!?)]}/'\"-") | {""}
_BAR = re.compile(r"(?<!\|)\|(?!\|)")


def plain_docstring(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Says to napoleon what our docstrings mean, before it reads them.

    Entries of a section are `name : what it is`, without a type, which the signature has; other
    text at the margin ends the section. Indented blocks elsewhere are code or formulas. Bars are
    absolute values, not substitutions.
    """
    inside = False
    result: list[str] = []
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        header = re.fullmatch("-{3,}", following) is not None
        entry = _ENTRY.match(line) if inside else None
        margin = bool(line) and not line.startswith((" ", "-"))
        if header:
            inside = line in ("Parameters", "Attributes")
        elif entry:
            result += [entry[1], "    " + _escaped(entry[2] or "")]
            continue
        elif inside and margin:
            result += ["", ""]
            inside = False
        elif not inside and line.startswith("    ") and result and not result[-1]:
            literal = any(each.startswith("    ") for each in result[-2:]) or result[-2:-1] == [
                "::"
            ]
            result += [] if literal else ["::", ""]
        result.append(line if line.startswith("    ") and not inside else _escaped(line))
    lines[:] = result


def _escaped(line: str) -> str:
    """Code as literals, apart from a word that it runs into, and bars elsewhere escaped."""
    if line.lstrip().startswith((">>>", "...")) or "``" in line:
        return line
    parts = line.split("`")
    for k in range(0, len(parts), 2):
        text = _BAR.sub(r"\|", parts[k])
        parts[k] = r"\ " + text if k and text[:1] not in _AFTER_CODE else text
    return "``".join(parts)


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("executed", Executed)
    app.add_directive("command", Command)
    app.add_directive("commands-table", CommandsTable)
    app.add_directive("measures-table", MeasuresTable)
    app.add_directive("formula", Formula)
    app.add_directive("reproduced", Reproduced)
    app.connect("builder-inited", reproduced_pages)
    app.add_role("test", Test())
    app.connect("autodoc-process-docstring", plain_docstring, priority=400)
    return {"version": "1", "parallel_read_safe": False}
