"""Pages: one file that opens offline, in a browser that is not allowed to ask for anything."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import shutil
import subprocess
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import saltflat as sf
from saltflat.measures import MEASURES
from saltflat.report import Cell, Figure, Section, Table, html, sections

EVIL = "<script>alert(1)</script>"
QUOTES = "a\"b'c&lt;\\"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layers = OrderedDict([(EVIL, nn.Linear(3, 4)), ("act", nn.ReLU()), (QUOTES, nn.Linear(4, 2))])
    return type(f"Net</script>{EVIL}", (nn.Sequential,), {})(layers).double()


DATA = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)).double(), torch.arange(8) % 2
PARTS = ["audit", "density", "diagonal", "landscape", "comparison", "history"]


@dataclass(frozen=True)
class Results:
    report: sf.Report
    parts: dict[str, Any]


@pytest.fixture(scope="module")
def results() -> Results:
    model = network()
    monitor = sf.Monitor(model, DATA, measures=["hessian_trace", "rho"], budget=None)
    for _ in range(3):
        monitor.epoch()
    report = sf.measure(model, DATA, measures=["hessian_trace", "rho", "kappa", "kappa_trace"])
    report = replace(report, skipped={"bn_sharpness": f"no {EVIL}"}, left_out={"sam_sharpness": 21})
    parts = {
        "audit": sf.audit(model, DATA, measures=["hessian_trace", "rho"], elements=1),
        "density": sf.density(model, DATA, probes=3, steps=5),
        "diagonal": sf.diagonal(model, DATA),
        "landscape": [
            sf.landscape(model, DATA, dimensions=1, points=5),
            sf.landscape(model, DATA, points=4),
        ],
        "comparison": sf.compare(
            {EVIL: model, QUOTES: network(1)}, DATA, measures=["hessian_trace", "rho"]
        ),
        "history": monitor,
    }
    return Results(report, parts)


@pytest.fixture(scope="module")
def page_file(results: Results, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return results.report.save(tmp_path_factory.mktemp("page") / "run.html", **results.parts)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("there is no chromium on this machine")
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as driver:
        flags = ["--no-sandbox", "--headless", "--disable-gpu"]
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield chromium
        chromium.close()


@dataclass(frozen=True)
class Opened:
    """A page in the browser, with what it asked for and complained of."""

    page: Any
    asked: list[str]
    wrong: list[str]

    def assert_quiet(self) -> None:
        assert self.asked == []
        assert self.wrong == []


@contextmanager
def opened(browser: Any, path: Path) -> Iterator[Opened]:
    """Nothing but the file itself is let through."""
    asked: list[str] = []
    wrong: list[str] = []

    def route(each: Any) -> None:
        if each.request.url == path.as_uri():
            each.continue_()
        else:
            asked.append(each.request.url)
            each.abort()

    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.route("**/*", route)
    page = context.new_page()
    page.on("console", lambda m: wrong.append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("dialog", lambda dialog: wrong.append(f"dialog: {dialog.message}"))
    page.goto(path.as_uri())
    page.wait_for_function(
        "[...document.querySelectorAll('.plot')].every(p => p.querySelector('svg, .missing'))"
    )
    yield Opened(page, asked, wrong)
    context.close()


@pytest.fixture(scope="module")
def view(browser: Any, page_file: Path) -> Iterator[Opened]:
    """The page of everything, for all tests: reading its scripts takes seconds."""
    with opened(browser, page_file) as view:
        yield view


# In the browser


def test_the_page_opens_offline_and_shows_every_part(view: Opened) -> None:
    assert view.page.locator("h2").all_inner_texts() == [
        "Summary",
        "Measures",
        "By layer",
        "By neuron",
        "Comparison",
        "Distribution of the diagonal",
        "Spectral density",
        "Audit",
        "Loss along a filter-normalised random direction",
        "Loss along filter-normalised random directions",
        "Training",
    ]
    view.assert_quiet()


def test_a_page_that_asks_for_something_would_be_seen(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "loud.html"
    path.write_text("<img src='http://example.org/x.png'><script>undefined.x</script>")
    with opened(browser, path) as view:
        assert view.asked == ["http://example.org/x.png"]
        assert any("undefined" in words for words in view.wrong)


def test_hovering_shows_a_value(view: Opened, results: Results) -> None:
    plot = view.page.locator("#section-2 .plot").first
    plot.scroll_into_view_if_needed()
    box = plot.locator(".points path").first.bounding_box()
    view.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    label = plot.locator(".hoverlayer .hovertext").first
    label.wait_for()
    first = next(m for m in results.report.values() if len(m.by_layer) > 1)
    assert label.text_content() == f"{EVIL}: {first.by_layer[EVIL]:.5g}"
    view.assert_quiet()


def test_tables_are_sorted(view: Opened, results: Results) -> None:
    table = view.page.locator("#section-1 table")

    def names() -> list[str]:
        return [text.split("\n")[0] for text in table.locator("tbody th").all_inner_texts()]

    start = names()
    by_value = sorted(results.report, key=lambda name: results.report[name].value)
    assert start[:4] == list(results.report) != by_value
    head = table.locator("thead th", has_text="value")
    head.locator("button").click()
    assert names()[:4] == by_value
    assert head.get_attribute("aria-sort") == "ascending"
    head.locator("button").click()
    assert names()[-4:] == by_value[::-1]
    table.locator("thead th", has_text="measure").locator("button").click()
    assert names() == sorted(start)
    view.assert_quiet()


def test_hostile_names_come_out_as_text(view: Opened) -> None:
    page, title = view.page, f"Flatness of Net</script>{EVIL}"
    assert page.title() == page.locator("h1").inner_text() == title
    assert page.locator("script").count() == 3  # the data, plotly, ours
    shown = page.locator("#section-2 .ytick text, #section-3 .ytick text").all_text_contents()
    assert set(shown) == {EVIL, QUOTES}
    assert page.locator("#section-4 thead th").all_inner_texts()[1:3] == [EVIL, QUOTES]
    assert page.locator("#section-4 .legendtext").all_text_contents() == [EVIL, QUOTES]
    assert f"no {EVIL}" in page.locator("#section-1 .notes").inner_text()
    view.assert_quiet()


def test_figures_are_saved_as_csv_and_png(view: Opened, results: Results, tmp_path: Path) -> None:
    for kind in ("csv", "png"):
        with view.page.expect_download() as found:
            view.page.locator(f"#section-8 [data-save={kind}]").click()
        assert found.value.suggested_filename == f"Along-a-line.{kind}"
        found.value.save_as(tmp_path / f"figure.{kind}")
    rows = list(csv.reader((tmp_path / "figure.csv").read_text().splitlines()))
    assert rows[0] == ["coordinate", "loss"]
    assert [float(row[1]) for row in rows[1:]] == list(results.parts["landscape"][0].losses)
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    view.assert_quiet()


def test_light_and_dark(view: Opened) -> None:
    page = view.page

    def becomes(paper: str, marks: str) -> None:
        """The paper and the marks of an axis."""
        for what, colour in (
            ("getComputedStyle(document.body).backgroundColor", paper),
            ("getComputedStyle(document.querySelector('#section-2 .ytick text')).fill", marks),
        ):
            page.wait_for_function(f"{what} == {colour!r}")

    light = "rgb(255, 255, 255)", "rgb(89, 99, 110)"
    dark = "rgb(20, 23, 26)", "rgb(160, 168, 176)"
    becomes(*light)
    page.emulate_media(color_scheme="dark")
    becomes(*dark)
    assert page.pdf().startswith(b"%PDF")
    becomes(*dark)
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    becomes(*light)
    page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    becomes(*dark)
    assert page.locator("#theme").inner_text() == "Light"
    page.locator("#theme").click()
    becomes(*light)
    view.assert_quiet()


def test_a_phone_scrolls_in_one_direction(view: Opened) -> None:
    page = view.page
    names, legend = (page.locator(f"#section-7 .{c}") for c in ("annotation-text", "legendtext"))
    assert names.count() == 4  # two measures in two figures
    assert legend.count() == 0
    page.set_viewport_size({"width": 390, "height": 844})
    page.wait_for_function("document.querySelectorAll('#section-7 .legendtext').length == 4")
    assert names.count() == 0
    page.wait_for_function("document.documentElement.scrollWidth == 390")
    view.assert_quiet()


def test_results_make_pages_of_their_own(browser: Any, results: Results, tmp_path: Path) -> None:
    comparison = results.parts["comparison"].save(tmp_path / "comparison.html")
    with opened(browser, comparison) as view:
        assert view.page.locator("h2").all_inner_texts() == ["Comparison"]
        view.assert_quiet()
    plane = results.parts["landscape"][1]
    for result, title in ((results.parts["audit"], "Audit of"), (plane, "Loss landscape of")):
        text = result.save(tmp_path / "page.html").read_text()
        assert f"<h1>{title} Net&lt;/script&gt;" in text
        assert text.count('class="plot"') == 2


# What is written


def test_plotly_is_in_the_file_once(page_file: Path) -> None:
    text = page_file.read_text(encoding="utf-8")
    assert len(re.findall(r"\* plotly\.js v", text)) == 1
    assert text.count("</script>") == 3
    assert not re.search(r"<(link|img|iframe)\b", text.split("plotly.js v")[0])


def test_the_data_of_figures_are_json(page_file: Path) -> None:
    found = re.search(
        r'<script type="application/json" id="figures">(.*?)</script>', page_file.read_text(), re.S
    )
    figures = json.loads(found.group(1), parse_constant=pytest.fail)
    assert all(set(each) == {"traces", "layout", "csv", "name"} for each in figures)


def test_parts_are_taken_alone_and_in_lists(results: Results) -> None:
    lines, monitor = results.parts["landscape"], results.parts["history"]
    for parts, titles in (
        ({"landscape": lines[0]}, [lines[0].title]),
        ({"landscape": tuple(lines)}, [line.title for line in lines]),
        ({"history": monitor}, ["Training"]),
        ({"history": monitor.history}, ["Training"]),
    ):
        assert [section.title for section in sections.further(parts)] == titles


def test_the_summary_shows_where_the_model_stands(results: Results) -> None:
    standing = sf.Standing(0.123456789, 0.01, 0.75, 1.4, gradient_norm=1e-3, decrease=0.1)
    section = sections.summary(results.report.provenance, standing, ("a note",))
    assert section.text.startswith("Not a minimum: a step downhill lowers the loss by 81 %")
    assert section.facts["loss at the model"] == "0.1235 ± 0.01 for the population"
    assert section.facts["accuracy on these data"] == "75.00%"
    assert section.facts["loss of constant outputs"] == "1.4"
    assert section.facts["length of the gradient"] == "0.001"
    assert section.notes == ("a note",)
    assert (
        "accuracy on these data" not in sections.summary(results.report.provenance, None, ()).facts
    )


def test_measures_that_are_not_there_are_told(results: Results) -> None:
    table = results.report.sections()[1].table
    assert table is not None
    rows = {row[0].text: row for row in table.rows}
    assert rows["bn_sharpness"][2].text == "does not apply"
    assert [cell.text for cell in rows["sam_sharpness"]][1:] == [
        *("–", "not computed", "", "", "about 21", "")
    ]


def test_wide_layers_are_shown_in_blocks(results: Results) -> None:
    values = torch.linspace(0, 1, 1000, dtype=torch.float64)
    values[::2] = 0.0
    m = sf.Measurement(name="rho", value=1.0, exact=True, by_neuron={"fc": values})
    report = replace(results.report, measurements={"rho": m})
    figure = report.sections()[-1].figures[0]
    shown = figure.traces[0]["z"][0]
    assert len(shown) == 250
    assert shown == pytest.approx(values.reshape(250, 4).max(1).values.log10().tolist())
    assert "largest of 4 neighbouring units" in figure.caption
    assert figure.columns["rho"] == tuple(values.tolist())


def test_a_long_spectrum_keeps_its_peaks(results: Results) -> None:
    density = replace(results.parts["density"], width=1e-5)
    figure = sections.spectrum(density).figures[0]
    assert len(figure.columns["eigenvalue"]) <= 2000 < len(density.grid)
    assert max(figure.columns["density"]) == float(density.density.max())


def test_csv_quotes_what_needs_it() -> None:
    figure = Figure("", "", [], {}, {'a "b"': ["x,y", "1\n2"], "n": [0.1, math.inf]})
    assert list(csv.reader(io.StringIO(figure.csv()))) == [
        ['a "b"', "n"],
        ["x,y", "0.1"],
        ["1\n2", "inf"],
    ]


def test_names_beside_lines_keep_apart() -> None:
    heights = {("a", 0): 1.0, ("b", 1): 1.0, ("c", 2): 1.0, ("d", 3): 0.0}
    places = {each["text"]: each["y"] for each in html.ends(heights, 0.0, 1.0, 0.1)}
    assert sorted(places.values()) == pytest.approx([0.0, 0.8, 0.9, 1.0])
    assert places["d"] == 0.0


def test_marks_of_logarithmic_axes() -> None:
    assert html.ticks([0.3, 4.0])["ticktext"][:6] == ["0.01", "0.02", "0.05", "0.1", "0.2", "0.5"]
    assert html.ticks([1e-9, 1e9])["ticktext"][:3] == ["1e-09", "1e-06", "0.001"]
    assert html.ticks([0.0, math.nan]) == {}


def test_pages_without_figures_need_no_plotly() -> None:
    table = Table(["x"], [[Cell("<b>")]])
    text = html.render("T & U", [Section("S", table=table)])
    assert "&lt;b&gt;" in text
    assert "<title>T &amp; U</title>" in text
    assert len(text) < 50_000


@pytest.mark.parametrize("part", PARTS)
def test_json_holds_the_report_alone(part: str, results: Results, tmp_path: Path) -> None:
    with pytest.raises(sf.InvalidValue, match=f"without {part}, which only a .html file shows"):
        results.report.save(tmp_path / "run.json", **{part: results.parts[part]})
    assert not (tmp_path / "run.json").exists()


def test_other_endings_are_refused(results: Results, tmp_path: Path) -> None:
    with pytest.raises(sf.InvalidValue, match=r"saved as .json or .html. Got 'run.txt'"):
        results.report.save(tmp_path / "run.txt")
    with pytest.raises(sf.InvalidValue, match=r"A page is saved as .html. Got 'x.json'"):
        html.write(tmp_path / "x.json", "", [])


def test_every_measure_is_explained_in_a_sentence() -> None:
    for kind in MEASURES.values():
        assert re.fullmatch(r"[A-Z][^.]{30,150}\.", kind.explanation), kind
    assert len({kind.explanation for kind in MEASURES.values()}) == len(MEASURES)


def test_the_wheel_holds_the_page(tmp_path: Path) -> None:
    root = Path(__file__).parent.parent
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=root, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    source = root / "src"
    own = [
        p for p in (source / "saltflat").rglob("*") if p.is_file() and "__pycache__" not in p.parts
    ]
    assert {p.relative_to(source).as_posix() for p in own} <= names
    assert {f"saltflat/report/page/page.{end}" for end in ("html", "css", "js")} <= names
