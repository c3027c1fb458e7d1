"""The documentation says what is so, without building it: pages, names, files and commands exist.

`make docs` builds it, runs the gallery and the pages' own code, and takes warnings for errors.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

import saltflat
import saltflat.integrations
from saltflat.cli.app import app
from saltflat.cli.running import EXIT_CODES
from saltflat.curvature import Kind
from saltflat.measures import MEASURES
from saltflat.papers import EXPERIMENTS

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.glob("*.md"), *(DOCS / "reference").glob("*.md")])
GALLERY = sorted((DOCS / "gallery").glob("plot_*.py"))
TEXTS = {path: path.read_text() for path in [*PAGES, *GALLERY]}
TARGETS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
COMMANDS = {each.callback.__name__ for each in app.registered_commands}


def ids(path: Path) -> str:
    return path.relative_to(DOCS).as_posix()


def links(path: Path) -> Iterator[str]:
    """Other pages and what the gallery becomes, without the place within."""
    yield from re.findall(r"\]\(([^)#]+?\.(?:md|rst))(?:#[^)]*)?\)", TEXTS[path])


def test_every_page_is_in_a_toctree() -> None:
    listed = set()
    for path in PAGES:
        for tree in re.findall(r"```\{toctree\}\n(.*?)```", TEXTS[path], re.DOTALL):
            names = [x for x in tree.split() if not x.startswith(":") and not x.isdigit()]
            listed |= {(path.parent / name).relative_to(DOCS).as_posix() for name in names}
    assert listed == {ids(p).removesuffix(".md") for p in PAGES} - {"index"} | {"examples/index"}


@pytest.mark.parametrize("path", PAGES, ids=ids)
def test_links_lead_somewhere(path: Path) -> None:
    for target in links(path):
        if "examples/" in target:
            made = "GALLERY_HEADER.rst" if target.endswith("index.rst") else Path(target).stem
            assert list((DOCS / "gallery").glob(f"{made}*")), target
        elif target.startswith("reproduced/"):  # a page that is made of the results, one a paper
            paper = target.removeprefix("reproduced/").removesuffix(".md")
            assert any(name.startswith(f"{paper}/") for name in EXPERIMENTS), target
        else:
            assert (path.parent / target).is_file(), target


@pytest.mark.parametrize("path", PAGES, ids=ids)
def test_files_and_tests_exist(path: Path) -> None:
    files = r"\b(?:(?:tests|bench|docs|src)/[\w/.-]+?\.(?:py|md)|[A-Z]+\.md|constraints\.txt)\b"
    for name in re.findall(files, TEXTS[path]):
        assert (ROOT / name).is_file(), name
    for name, test in re.findall(r"\{test\}`([^`:]+)::(\w+)`", TEXTS[path]):
        assert f"def {test}(" in (ROOT / name).read_text(), test


@pytest.mark.parametrize("path", [*PAGES, *GALLERY], ids=ids)
def test_commands_exist(path: Path) -> None:
    text = TEXTS[path]
    shell = re.findall(r"```(?:sh|\{command\})\n(.*?)```", text, re.DOTALL)
    lines = [*"\n".join(shell).splitlines(), *re.findall(r"`([^`\n]+)`", text)]
    words = [line.split() for line in lines if line.startswith(("make ", "saltflat "))]
    assert {each[1] for each in words if each[0] == "make"} <= TARGETS
    assert {each[1] for each in words if each[0] == "saltflat"} <= COMMANDS | {"COMMAND", "…"}
    for module in re.findall(r"python -m (bench\.\w+)", text):
        assert (ROOT / f"{module.replace('.', '/')}.py").is_file(), module


@pytest.mark.parametrize("path", [*PAGES, *GALLERY], ids=ids)
def test_names_exist(path: Path) -> None:
    """Of saltflat and its modules, wherever they are written out."""
    for name in re.findall(r"\bsf\.(\w+)", TEXTS[path]):
        assert hasattr(saltflat, name), name
    for module, name in re.findall(r"\bsaltflat\.(zoo|datasets|measures)\.(\w+)", TEXTS[path]):
        assert hasattr(importlib.import_module(f"saltflat.{module}"), name), name


@pytest.mark.parametrize("path", [*PAGES, *GALLERY], ids=ids)
def test_no_places_of_a_machine(path: Path) -> None:
    assert not re.search(r"/(?:work|home|tmp|root|usr)/|https?://", TEXTS[path])


@pytest.mark.parametrize("path", GALLERY, ids=ids)
def test_the_gallery_imports_what_exists(path: Path) -> None:
    tree = ast.parse(TEXTS[path])
    assert ast.get_docstring(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("saltflat"):
            module = importlib.import_module(node.module)
            known = getattr(module, "__all__", None) or dir(module)
            assert {each.name for each in node.names} <= set(known), ast.unparse(node)


def test_the_reference_has_every_public_name() -> None:
    told = re.findall(
        r"auto(?:class|function|exception):: saltflat\.([\w.]+)", "".join(TEXTS.values())
    )
    assert len(told) == len(set(told))
    wanted = {*saltflat.__all__} - {"__version__"}
    wanted |= {f"integrations.{name}" for name in saltflat.integrations.__all__}
    wanted |= {f"measures.{kind.__name__}" for kind in MEASURES.values()}
    assert wanted <= set(told), f"not in docs/reference: {sorted(wanted - set(told))}"


def test_every_measure_is_described() -> None:
    text = TEXTS[DOCS / "choose.md"]
    sections = re.findall(r"^### (\w+)\n\n```\{formula\} (\w+)$", text, re.MULTILINE)
    assert sections == [(name, name) for name in MEASURES]
    assert text.count("\n**Misleads** ") == len(MEASURES)
    kinds = {kind for each in MEASURES.values() for kind in each.needs}
    assert "trace" in kinds
    assert all(f"`{kind}`" in text for kind in kinds), kinds
    assert kinds - {"passes"} <= set(get_args(Kind))


def test_exit_codes_are_those_of_the_command() -> None:
    assert " ".join(EXIT_CODES.split()) in " ".join(TEXTS[DOCS / "command-line.md"].split())
