"""`load` and `cite`: results from files, and what to cite for them."""

from __future__ import annotations

from pathlib import Path

from saltflat.audit import Audit
from saltflat.bibliography import bibtex
from saltflat.errors import InvalidValue, nearest
from saltflat.measures import MEASURES
from saltflat.report import Comparison, Report, store
from saltflat.reproduction import Reproduction
from saltflat.slices import Landscape

Saved = Report | Comparison | Audit | Landscape | Reproduction
SAVED: dict[str, type[Saved]] = {
    "report": Report,
    "comparison": Comparison,
    "audit": Audit,
    "landscape": Landscape,
    "reproduction": Reproduction,
}


def load(path: str | Path) -> Saved:
    """Read any result that was saved, whatever kind it is; files say so themselves.

    Examples
    --------
    >>> import torch, saltflat as sf
    >>> model, x, y = torch.nn.Linear(2, 1, bias=False), torch.eye(2), torch.zeros(2, 1)
    >>> report = sf.measure(model, (x, y), "mse", measures=["hessian_trace"])
    >>> sf.load(report.save("run.json")) == report
    True
    """
    kind = store.kind_of(store.read(path))
    if kind not in SAVED:
        known = ", ".join(SAVED)
        raise InvalidValue(
            f"{path} holds a {kind}, which this version cannot read. Known: {known}."
        )
    return SAVED[kind].load(path)


def cite(*measures: str) -> str:
    """BibTeX of saltflat, and of the papers that some measures are from.

    `report.cite()` and `measurement.cite()` give those of what was measured.

    Examples
    --------
    >>> import saltflat as sf
    >>> print(sf.cite("sam_sharpness").partition("@inproceedings")[2].splitlines()[1].strip())
    title = {Sharpness-Aware Minimization for Efficiently Improving Generalization},
    """
    for name in measures:
        if name not in MEASURES:
            raise InvalidValue(f"Unknown measure {name!r}. {nearest(name, MEASURES)}")
    keys = dict.fromkeys(key for name in measures for key in MEASURES[name].references)
    return bibtex("saltflat", *(key for key in keys if key != "saltflat"))
