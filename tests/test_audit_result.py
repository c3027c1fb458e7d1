"""Verdicts, and audits as tables, files and pictures."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest
from rich.console import Console

from saltflat.audit import Audit, Audited, Drift, Tolerances
from saltflat.audit.result import judge
from saltflat.errors import InvalidValue, MissingDependency
from saltflat.measurement import Measurement


def reading(value: float, **fields: Any) -> Measurement:
    return Measurement(name="", value=value, exact=True, **fields)


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        # closed forms
        (reading(2.0), reading(2.0 + 1e-8), "invariant"),
        (reading(2.0), reading(2.0 + 3e-8), "moved"),
        (reading(0.0), reading(0.0), "invariant"),
        (reading(0.0), reading(1e-30), "moved"),
        (reading(1.0), reading(math.nan), "moved"),
        (reading(1.0), reading(math.inf), "moved"),
        # gaps
        (reading(1.0, gap=1e-3), reading(1.0019, gap=1e-3), "invariant"),
        (reading(1.0, gap=1e-3), reading(1.0021, gap=1e-3), "moved"),
        (reading(1.0, gap=math.inf), reading(5.0), "undecided"),
        # standard errors: 4 · √(0.03² + 0.04²) = 0.2
        (reading(1.0, stderr=0.03), reading(1.19, stderr=0.04), "invariant"),
        (reading(1.0, stderr=0.03), reading(1.21, stderr=0.04), "moved"),
        (reading(1.0, stderr=0.2), reading(1.1, stderr=0.2), "undecided"),
        # far away, but not told from zero; or made larger by setting noise to zero
        (reading(1.0, stderr=0.5), reading(5.0, stderr=0.1), "undecided"),
        (reading(1.0, stderr=0.01), reading(-50.0, stderr=12.6), "undecided"),
        (reading(1.0, stderr=0.01), reading(-50.0, stderr=12.0), "moved"),
        (reading(1.0, stderr=0.01), reading(50.0, stderr=0.1, bound="upper"), "undecided"),
        (reading(1.0, stderr=0.01), reading(50.0, stderr=0.1), "moved"),
        # searched suprema
        (reading(1.0, bound="lower"), reading(1.0099, bound="lower"), "invariant"),
        (reading(1.0, bound="lower"), reading(1.011, bound="lower"), "moved"),
    ],
)
def test_verdicts(before: Measurement, after: Measurement, verdict: str) -> None:
    assert judge(before, after, Tolerances()).verdict == verdict


def test_what_the_function_itself_moved_by_is_excused() -> None:
    found = judge(reading(1.0), reading(1.01), Tolerances(), excuse=2e-4)
    assert found.verdict == "invariant"
    assert judge(reading(1.0), reading(1.03), Tolerances(), excuse=2e-4).verdict == "moved"
    assert judge(reading(1.0), reading(3.0), Tolerances(), excuse=0.1).verdict == "undecided"


def example(**fields: Any) -> Audit:
    def row(name: str, declared: tuple[str, ...] | None, drift: float, verdict: Any) -> Audited:
        promised = None if declared is None else "neuron" in declared
        curve = {10.0: drift / 100, 100.0: drift / 10, 1000.0: drift}
        one = Drift(drift, 1e-8, verdict, "fc[1] × 1000", promised, "", curve)
        return Audited(name, 0.5, "exact", declared, {"neuron": one})

    every = ("layer", "neuron", "batchnorm", "attention")
    rows = [
        row("fine", every, 0.0, "invariant"),
        row("false", ("layer", "neuron"), 3.0, "moved"),
        row("honest", (), math.inf, "moved"),
        row("mine", None, 1e3, "moved"),
        row("noisy", ("neuron",), 0.2, "undecided"),
    ]
    values: dict[str, Any] = {
        "rows": {r.name: r for r in rows},
        "skipped": {"bn_sharpness": "no BatchNorm"},
        "kinds": {"neuron": 4},
        "spread": 1e3,
        "elements": {"neuron": 9},
        "output_drift": 2e-15,
        "tolerances": Tolerances(closed=1e-7),
        "model": "Net",
        "notes": ("a note",),
    }
    return Audit(**values | fields)


def test_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "130")
    found = example()
    assert not found.ok
    text = str(found)
    assert repr(found) == text
    assert "\x1b" not in text
    lines = {line.split()[1]: line for line in text.splitlines() if line.startswith("│")}
    assert "invariant" in lines["fine"]
    assert "every rescaling" in lines["fine"]
    assert "0 ✓" in lines["fine"]
    assert "DISAGREES: moved by neuron" in lines["false"]
    assert "3.0e+00 ✗" in lines["false"]
    assert "layer, neuron" in lines["false"]
    assert "nothing" in lines["honest"]
    assert "DISAGREES" not in lines["honest"] + lines["mine"] + lines["noisy"] + lines["fine"]
    assert "undecided: neuron" in lines["noisy"]
    assert "does not apply" in lines["bn_sharpness"]
    for part in ("4 neuron", "a note", "no BatchNorm", "2e-15", "9 rescalings"):
        assert part in text
    colourful = Console(force_terminal=True, color_system="standard", width=130)
    with colourful.capture() as capture:
        colourful.print(found)
    assert "\x1b[1;31mDISAGREES" in capture.get()


def test_it_is_a_mapping() -> None:
    found = example()
    assert len(found) == 5
    assert "fine" in found
    assert "bn_sharpness" not in found
    assert [row.ok for row in found.values()] == [True, False, True, True, True]
    assert example(rows={"fine": found["fine"]}).ok


def test_saved_and_read_again(tmp_path: Path) -> None:
    found = example()
    path = found.save(tmp_path / "deep" / "audit.json")
    assert Audit.load(path) == found
    assert json.loads(path.read_text())["saltflat"] == 1
    assert [p.name for p in path.parent.iterdir()] == ["audit.json"]
    assert str(Audit.load(path)) == str(found)


def test_files_that_are_no_audits(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match=r"\.json"):
        example().save(tmp_path / "audit.txt")
    other = tmp_path / "report.json"
    other.write_text('{"saltflat": 1, "measurements": {}}')
    with pytest.raises(InvalidValue, match="not an audit"):
        Audit.load(other)


def without(monkeypatch: pytest.MonkeyPatch, module: str, instead: Any) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, instead)


def test_what_is_drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Against a recorder in place of matplotlib: one line a measure, its drift by spread."""
    axis, figure = MagicMock(), MagicMock()
    figure.subplots.return_value = [[axis]]
    axis.get_legend_handles_labels.return_value = ([], [])
    without(monkeypatch, "matplotlib", ModuleType("matplotlib"))
    recorder = ModuleType("matplotlib.figure")
    recorder.Figure = MagicMock(return_value=figure)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "matplotlib.figure", recorder)
    path = example().plot(tmp_path / "new" / "drift.png")
    figure.savefig.assert_called_once()
    assert figure.savefig.call_args.args == (path,)
    lines = {call.kwargs["label"]: call.args for call in axis.plot.call_args_list}
    assert list(lines) == ["fine", "false", "honest", "mine", "noisy"]
    assert lines["mine"] == ([10.0, 100.0, 1000.0], [10.0, 100.0, 1000.0])
    assert min(lines["fine"][1]) > 0  # no drift at all has no logarithm, but has a place
    assert all(math.isfinite(y) or math.isnan(y) for _, ys in lines.values() for y in ys)


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = example().plot(tmp_path / "drift.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000


def test_a_picture_needs_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without(monkeypatch, "matplotlib", None)
    with pytest.raises(MissingDependency, match="matplotlib"):
        example().plot(tmp_path / "drift.png")


def test_nothing_to_draw(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="nothing to draw"):
        example(kinds={}).plot(tmp_path / "drift.png")
