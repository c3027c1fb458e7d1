"""Where a report's numbers came from."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import blake2b
from typing import final

import numpy as np
import torch
from torch import nn

from saltflat.losses import Loss, with_settings
from saltflat.report.code import code_hash
from saltflat.result import Certificate
from saltflat.risk import Risk
from saltflat.sharded import state_of
from saltflat.vectors import dense_parts
from saltflat.version import __version__


@final
@dataclass(frozen=True)
class Provenance:
    """What was measured, on what, how, and with what.

    `seconds` are what each step took. `gradients` are its passes over the data, counted at fixed
    prices (see `saltflat.work`): "curvature" is shared by all measures, theirs come on top.

    `data_hash` is of the data's bytes, `values_hash` of their values in float32 and int64, by which
    data of other types (`data_types`) are known to be the same. `measured` is a hash of the names
    of the measured parameters, `loss_code` one of the code of a loss that is the user's own. All of
    these are empty in files of before they were recorded. `ranks` is how many processes shared the
    samples. `population` is how many samples there are of which `samples` were drawn at random and
    measured; 0 where all of them were.
    """

    model: str
    model_hash: str
    parameters: int
    frozen: tuple[str, ...]
    samples: int
    batches: int
    batch_size: int
    data_hash: str
    loss: str
    curvature: str
    dtype: str
    device: str
    seed: int
    certified_samples: int
    certified: bool
    versions: Mapping[str, str]
    seconds: Mapping[str, float] = field(default_factory=dict)
    gradients: Mapping[str, float] = field(default_factory=dict)
    created: str = ""
    values_hash: str = ""
    data_types: str = ""
    measured: str = ""
    loss_code: str = ""
    ranks: int = 1
    population: int = 0

    @property
    def whole(self) -> int:
        """How many samples the values are for."""
        return self.population or self.samples

    @property
    def used(self) -> str:
        """How many samples were measured, in words."""
        of = f" of {self.population:,}" if self.population else ""
        return f"{self.samples:,}{of} samples"


def provenance(
    risk: Risk,
    certificate: Certificate | None,
    curvature: str,
    seed: int,
    seconds: Mapping[str, float],
    spent: Mapping[str, float],
) -> Provenance:
    """Of what was measured just now, inside the session of the risk.

    `spent` is in gradients of one sample.
    """
    assert certificate is not None, "a sweep comes with one"
    seen = risk.seen()
    everywhere = risk.reduction.each(lambda: dict(spent))
    like = next(iter(risk.parameters.values()))
    return Provenance(
        model=type(risk.model).__name__,
        model_hash=model_hash(risk.model),
        parameters=sum(p.numel() for p in risk.parameters.values()),
        frozen=risk.frozen,
        samples=seen.samples,
        batches=seen.batches,
        batch_size=seen.largest,
        data_hash=f"{seen.checksum:016x}",
        loss=with_settings(risk.loss),
        curvature=curvature,
        dtype=str(like.dtype).removeprefix("torch."),
        device=str(risk.device),
        seed=seed,
        certified_samples=certificate.samples,
        certified=bool(certificate),
        versions=_versions(),
        seconds={step: round(s, 6) for step, s in seconds.items()},
        gradients={
            step: round(sum(one[step] for one in everywhere) / seen.samples, 3) for step in spent
        },
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        values_hash=f"{seen.values:016x}",
        data_types=", ".join(sorted(seen.types)),
        measured=blake2b("\n".join(risk.parameters).encode(), digest_size=8).hexdigest(),
        loss_code=_loss_code(risk.loss),
        ranks=risk.reduction.ranks,
    )


def _versions() -> dict[str, str]:
    import scipy

    return {
        "saltflat": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "scipy": scipy.__version__,
        "python": platform.python_version(),
    }


def _loss_code(loss: object) -> str:
    """Of a user's own loss; those of this package are known by their names and settings."""
    call = getattr(loss, "call", loss)
    return "" if isinstance(call, Loss) else code_hash(call)


def model_hash(model: nn.Module) -> str:
    """A hash (BLAKE2b) of all parameters and buffers, with their names, types and shapes."""
    digest = blake2b(digest_size=32)
    for name, tensor in state_of(model):
        if not isinstance(tensor, torch.Tensor):
            continue
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        for part in dense_parts(tensor):
            content = part.cpu().contiguous().reshape(-1)
            if content.numel():
                digest.update(content.view(torch.uint8).numpy().data)
    return digest.hexdigest()
