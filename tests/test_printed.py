"""What results look like: in eighty columns, in notebooks, in formats; files and citations."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import BY_NAME
from rich.console import Console
from rich.table import Table
from torch import nn

import saltflat as sf
from saltflat.bibliography import ENTRIES, bibtex
from saltflat.measures import MEASURES
from saltflat.printed import columns, html_table

CASE = BY_NAME["mlp"]
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def report() -> sf.Report:
    return sf.measure(CASE.model(), CASE.data())


@pytest.mark.parametrize(
    ("fields", "certainty", "known"),
    [
        ({"exact": True}, "exact", True),
        ({"exact": False, "stderr": 0.25}, "± 0.25", True),
        ({"exact": False, "stderr": 0.52}, "± 0.52, sign unknown", False),
        ({"exact": False, "stderr": 0.25, "degrees": 2.0}, "± 0.25, sign unknown", False),
        ({"exact": False, "stderr": 0.52, "bound": "upper"}, "≤, ± 0.52, sign unknown", False),
        ({"exact": False, "stderr": float("nan")}, "± nan", True),
        ({"exact": False, "stderr": 0.2, "degrees": float("nan")}, "± 0.2", True),
        ({"exact": False, "stderr": 1.0, "interval": (-0.1, 3.0)}, "-0.1 to 3", False),
    ],
)
def test_an_estimate_whose_sign_is_unknown_says_so(
    fields: dict[str, Any], certainty: str, known: bool, report: sf.Report, tmp_path: Path
) -> None:
    """1 ± 0.52 holds 0 by the normal distribution, 1 ± 0.25 by Student's t of two degrees."""
    m = sf.Measurement(name="rho", value=-1.0, **fields)
    assert (m.certainty, m.sign_known) == (certainty, known)
    other = replace(report, measurements={"rho": m})
    assert certainty in str(other)
    content = json.loads(other.save(tmp_path / "r.json").read_text())
    assert content["measurements"]["rho"]["sign_known"] is known
    assert certainty in other.save(tmp_path / "r.html").read_text()
    if "interval" not in fields:
        assert sf.load(tmp_path / "r.json") == other


def test_traces_whose_sign_is_unknown_say_so() -> None:
    detail = sf.Detail(0.5, exact=False, stderr=0.4, rule="probes", reason="tanh")
    text = str(sf.Trace({"weight": detail}, total=0.5, stderr=0.4, curvature="hessian"))
    assert text.count("± 0.4, sign unknown") == 2


def test_text_is_plain_in_notebooks_and_where_colours_are_forced(
    report: sf.Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There rich would show an empty page beside it, and write escape sequences into it."""
    plain = str(report)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert str(report) == plain
    assert "\x1b" not in plain


@pytest.fixture(scope="module")
def results(report: sf.Report) -> dict[str, Any]:
    model, data = CASE.model(), CASE.data()
    eigenvalues = sf.eigenvalues(model, data, k=2)
    both = report.compare(report)
    return {
        "report": report,
        "comparison": both,
        "audit": sf.audit(model, data, measures=["rho", "hessian_trace"], elements=1),
        "measurement": report["rho"],
        "standing": report.standing,
        "verdict": both.verdicts[0],
        "trace": sf.trace(model, data),
        "diagonal": sf.diagonal(model, data),
        "eigenvalues": eigenvalues,
        "eigenvalue": eigenvalues[0],
        "density": sf.density(model, data, probes=2, steps=3),
        "group": sf.symmetries(model, data[0]),
        "layers": report.layers(),
        "neurons": report.neurons("0"),
    }


TOLD = ["measurement", "standing", "verdict", "eigenvalue", "density"]
DRAWN = ["report", "comparison", "audit", "trace", "diagonal", "eigenvalues", "group", "layers"]
KINDS = [*TOLD, *DRAWN, "neurons"]
TABLES = set(KINDS) - set(TOLD)


class Balanced(HTMLParser):
    """Sees that every tag is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("kind", KINDS)
def test_every_result_shows_itself_in_a_notebook(kind: str, results: dict[str, Any]) -> None:
    html = results[kind]._repr_html_()
    parser = Balanced()
    parser.feed(html)
    assert not parser.open
    assert ("<table>" in html) == (kind in TABLES)
    assert "\x1b" not in html
    assert "[dim]" not in parser.text


def test_pages_are_escaped(report: sf.Report) -> None:
    evil = "<script>alert(1)</script>"
    m = sf.Measurement(name=evil, value=1.0, exact=True)
    assert evil not in m._repr_html_()
    spoilt = sf.Report({evil: m}, {evil: evil}, report.provenance, notes=(evil,))
    for html in (
        spoilt._repr_html_(),
        spoilt.compare(spoilt, (evil, "b"))._repr_html_(),
        sf.trace(
            nn.ModuleDict({evil: nn.Linear(1, 1)}) and CASE.model(), CASE.data()
        )._repr_html_(),
    ):
        assert evil not in html
    assert "&lt;script&gt;" in spoilt._repr_html_()
    table = Table("a", title="[b]<i>[/b]", caption="<u>\nline")
    table.add_row("[red]<b>[/red]")
    html = html_table(table)
    assert "&lt;i&gt;" in html
    assert "&lt;u&gt;<br>" in html
    assert '<td style="text-align: left">&lt;b&gt;</td>' in html


@pytest.mark.parametrize("width", [60, 80, 100, 140])
@pytest.mark.parametrize("kind", sorted(TABLES))
def test_tables_fit_the_terminal(
    kind: str, width: int, results: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    text = str(results[kind])
    assert max(map(len, text.splitlines())) <= width
    assert not any(line != line.rstrip() for line in text.splitlines())
    console = Console(width=width, no_color=True)
    with console.capture() as capture:
        console.print(results[kind])
    assert capture.get().split() == text.split()


def test_eighty_columns_have_all_that_matters(
    report: sf.Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = str(report)
    assert "…" not in text
    lines = text.splitlines()
    for m in report.values():
        (row,) = [line for line in lines if line.split()[:1] == [m.name] and " exact" in line]
        assert f"{m.value:.6g}" in row
        assert m.certainty in row
        assert m.sampled in row
    joined = " ".join(text.split())
    assert str(report.standing) in joined
    assert "kappa (about 60 gradients)" in joined
    assert 'measures="all"' in joined
    assert "lam=0.5" in joined


@pytest.mark.parametrize("width", [60, 70, 80])
def test_what_a_value_is_invariant_to_is_never_cut(
    width: int, report: sf.Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long words for certainty take its room: it is told below the table then."""
    monkeypatch.setenv("COLUMNS", str(width))
    short = replace(report["rho"], gap=0.1, exact=True)
    assert short.certainty.startswith("exact to")
    told = " ".join(str(replace(report, measurements={"rho": short})).split())
    wide = " ".join(str(replace(report, measurements={**report, "rho": short})).split())
    assert "…" not in told + wide
    assert all(f"{m.value:.6g}" in wide for m in report.values())
    assert "invariant" in told
    assert "rho all" in wide or width == 80
    assert ("invariant to: " in wide) == (width < 80)


def test_without_a_terminal_there_are_eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("sys.__stdout__", None)
    assert columns() == 80
    monkeypatch.setenv("COLUMNS", "7")
    assert columns() == 40


def test_grids(report: sf.Report) -> None:
    layers = report.layers()
    assert layers.columns["kappa_trace"]["0"] == report["kappa_trace"].by_layer["0"]
    assert "By layer" in str(layers)
    pytest.importorskip("pandas")
    frame = layers.to_pandas()
    assert frame.loc["2", "rho"] == report["rho"].by_layer["2"]
    assert frame.index.name == "layer"


def test_measurements_in_formats() -> None:
    m = sf.Measurement(name="mine", value=2.0, exact=True, sampling=0.1)
    assert f"{m:.3f}" == "2.000"
    assert f"{m:10.1e}" == "   2.0e+00"
    assert f"{m}" == str(m) == "mine = 2 (exact; ± 5 % for the population)"
    assert repr(m) == "<Measurement mine = 2 (exact; ± 5 % for the population)>"
    with pytest.raises(ValueError, match="format"):
        f"{m:nonsense}"
    assert sf.Measurement(name="m", value=0.0, exact=True, sampling=0.0).sampled == "± 0"
    assert sf.Measurement(name="m", value=1.0, exact=True).sampled == ""


def test_representations_are_short(results: dict[str, Any]) -> None:
    for kind in TOLD:
        assert len(repr(results[kind])) < 300
        assert "tensor" not in repr(results[kind])


# Files


@pytest.mark.parametrize("kind", ["report", "comparison", "audit"])
def test_everything_saved_is_loaded(kind: str, results: dict[str, Any], tmp_path: Path) -> None:
    path = results[kind].save(tmp_path / "run.json")
    content = json.loads(path.read_text())
    assert content["kind"] == kind
    assert content["saltflat"] == 1
    assert sf.load(path) == results[kind]
    assert type(results[kind]).load(str(path)) == results[kind]
    content["saltflat"] = 2
    path.write_text(json.dumps(content))
    with pytest.raises(sf.InvalidValue, match="newer version of saltflat, in format 2; this one"):
        sf.load(path)


@pytest.mark.parametrize("kind", ["report", "audit"])
def test_older_files_do_not_say_their_kind(
    kind: str, results: dict[str, Any], tmp_path: Path
) -> None:
    path = results[kind].save(tmp_path / "run.json")
    content = json.loads(path.read_text())
    del content["kind"]
    path.write_text(json.dumps(content))
    assert sf.load(path) == results[kind]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("no json", "is not a result: it is not JSON"),
        ("[]", "is not a result that saltflat saved"),
        ('{"saltflat": 1, "kind": "movie"}', "holds a movie, which this version cannot read"),
        ('{"saltflat": 1, "kind": "report"}', "is a damaged report: KeyError"),
        ('{"saltflat": 1, "kind": "comparison"}', "is a damaged comparison: KeyError"),
        ('{"saltflat": 1, "kind": "audit"}', "is a damaged audit: TypeError"),
    ],
)
def test_files_that_are_nothing(content: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(sf.InvalidValue, match=words):
        sf.load(path)


def test_audits_as_tables(results: dict[str, Any]) -> None:
    pytest.importorskip("pandas")
    frame = results["audit"].to_pandas()
    assert frame.index.names == ["measure", "kind"]
    assert frame.loc[("hessian_trace", "neuron"), "verdict"] == "moved"


# Citations


def test_every_measure_is_cited_as_its_paper_says() -> None:
    """The names and years that a measure gives are those of its entries."""
    for name, kind in MEASURES.items():
        text = kind.cite()
        for author, year in re.findall(r"(\w+) et al\. (\d{4})", f"{kind.paper}; {kind.equation}"):
            entries = [ENTRIES[key] for key in kind.references]
            fitting = [e for e in entries if f"{{{author}," in e and f"year = {{{year}}}" in e]
            assert fitting, (name, author, year)
        assert text.count("@") == len(kind.references) > 0


def test_entries_are_bibtex() -> None:
    for key, entry in ENTRIES.items():
        assert re.match(rf"@\w+\{{{key},\n", entry)
        assert entry.count("{") == entry.count("}")
        assert "title = {" in entry
        assert "author = {" in entry


def test_cite(report: sf.Report) -> None:
    assert report["rho"].cite() == ENTRIES["petzka2019reparameterization"]
    assert report.cite().count("tsuzuku2020normalized,") == 1
    assert sf.cite().startswith("@software{saltflat,")
    assert sf.cite("neuronwise_minimum_sharpness").count("@software") == 1
    assert MEASURES["kappa"]().cite() in sf.cite("kappa", "rho")
    with pytest.raises(sf.InvalidValue, match=r"Unknown measure 'roh'. Nearest is 'rho'"):
        sf.cite("roh")
    with pytest.raises(sf.InvalidValue, match="no references"):
        sf.Measurement(name="mine", value=1.0, exact=True).cite()
    with pytest.raises(sf.InvalidValue, match="no paper 'foo'"):
        bibtex("foo")


def test_the_citation_file_has_the_version() -> None:
    assert f"\nversion: {sf.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_long_names_are_folded_and_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    long = "a_layer_with_a_name_that_is_far_too_long_for_any_table_of_sixty"
    model = nn.Sequential()
    model.add_module(long, nn.Linear(2, 2).double())
    text = str(sf.trace(model, (torch.eye(2).double(), torch.arange(2))))
    assert f"{long}.weight" in "".join(re.findall(r"^│\s*(\S*)", text, re.MULTILINE))


def test_results_are_dicts_to_dataclasses(report: sf.Report) -> None:
    """Views that answer unknown names are made anew by it, from what they hold alone."""
    for measurement in report.values():
        fields = asdict(measurement)
        assert fields["by_parameter"] == measurement.by_parameter
        assert fields["details"].keys() == measurement.details.keys()
    trace = sf.trace(CASE.model(), CASE.data())
    assert asdict(trace)["details"].keys() == trace.keys()
