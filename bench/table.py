"""The table, for a terminal, as Markdown and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.bars import checks, ratio
from bench.cases import CASES, Case
from bench.contenders import CONTENDERS
from bench.contest import Entry

Results = Mapping[str, Mapping[str, Entry]]  # case name → contender → entry

HEADER = (
    "network", "n", "method", "ms, best", "ms, median", "gradients", "gradients, median",
    "BackPACK ÷ this", "rel. error", "peak MiB", "must reach",
)  # fmt: skip

LEGEND = """\
Ratios are of the best times of one run, in which all methods took turns; one gradient is a backward
pass of the mean cross-entropy over the same data in one batch. saltflat keeps
nothing from one call to the next: every check is in every time. Peers run at the batch size that
was fastest for them. The error is Σ|value − exact| / Σ|exact| against BackPACK in float64, over
layer traces or over the entries of a diagonal; for fewer than 100 probes, the standard error that
100 would have.
Where an input of a ReLU is all but zero, float32 rounding may take the other side: one such flip in
a deep network makes an error near 1e-4, for whichever method met it.
Peak memory is what one run, in a process of its own, adds to what was resident before.
"""


def rows(results: Results) -> Iterator[tuple[str, ...]]:
    """The cells, one row for a case and contender."""
    for case_name, entries in results.items():
        for name in entries:
            yield _row(CASES[case_name], name, entries)


def _row(case: Case, name: str, entries: Mapping[str, Entry]) -> tuple[str, ...]:
    entry = entries[name]
    head = (case.network, str(case.n), CONTENDERS[name].title)
    if entry.times is None:
        return (*head, *[""] * 7, f"{entry.failure}")
    unit = entries["gradient"].times
    middle = entry.times.median / unit.median if unit else None
    return (
        *head,
        _number(1e3 * entry.times.best),
        _number(1e3 * entry.times.median),
        _number(ratio(entries, name, "gradient")),
        _number(middle),
        _number(ratio(entries, "backpack", name)),
        "" if entry.error is None else f"{entry.error:.1e}",
        "" if entry.mib is None else _number(entry.mib),
        _demands(case, name, entries),
    )


def _demands(case: Case, name: str, entries: Mapping[str, Entry]) -> str:
    """The demands, or what else there is to say of the row."""
    said = [f"{check.demand} {'✓' if check.met else '✗'}" for check in checks(case, name, entries)]
    if case.n == 10 and name in ("trace", "diagonal"):
        said.append(_fixed_cost(name, entries))
    return "; ".join([*said, *filter(None, [entries[name].note])])


def _fixed_cost(name: str, entries: Mapping[str, Entry]) -> str:
    """At ten samples nearly all of the time is spent on what does not grow with them."""
    times = entries[name].times
    assert times is not None
    return f"fixed cost {1e3 * times.best:.3g} ms"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def terminal(results: Results, title: str) -> Table:
    """For rich; a line between cases."""
    table = Table(title=title, caption=LEGEND.replace("\n", " "), caption_justify="left")
    for place, column in enumerate(HEADER):
        table.add_column(column, justify="left" if place in (0, 2, 10) else "right")
    previous = None
    for row in rows(results):
        if previous not in (None, row[:2]):
            table.add_section()
        table.add_row(*row)
        previous = row[:2]
    return table


def save(results: Results, title: str, stem: Path) -> None:
    """`stem`.md and `stem`.json."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"# {title}", "", "| " + " | ".join(HEADER) + " |", "|" + "---|" * len(HEADER)]
    lines += [
        "| " + " | ".join(cell.replace("|", "\\|") for cell in r) + " |" for r in rows(results)
    ]
    stem.with_suffix(".md").write_text("\n".join(lines) + "\n\n" + LEGEND)
    stem.with_suffix(".json").write_text(json.dumps(_as_json(results, title), indent=1) + "\n")


def _as_json(results: Results, title: str) -> dict[str, Any]:
    cases = {
        case: {
            name: {
                **asdict(entry),
                "gradients": ratio(entries, name, "gradient"),
                "checks": [asdict(check) for check in checks(CASES[case], name, entries)],
            }
            for name, entry in entries.items()
        }
        for case, entries in results.items()
    }
    return {"title": title, "cases": cases}
