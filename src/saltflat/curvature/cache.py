"""Plans are kept: a model is probed once for each shape of its inputs."""

from __future__ import annotations

import weakref
from collections.abc import Hashable

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from saltflat.curvature.certify import probe
from saltflat.curvature.memory import halving
from saltflat.curvature.plan import Plan
from saltflat.curvature.traits import traits
from saltflat.risk import Batch, Risk

_CACHE: weakref.WeakKeyDictionary[nn.Module, dict[Hashable, Plan]] = weakref.WeakKeyDictionary()


def clear_cache() -> None:
    """Forget every certificate."""
    _CACHE.clear()


def plan_for(risk: Risk, batch: Batch) -> Plan:
    """The plan for batches like this one, from the cache or by probing its first samples."""
    few = batch.part(0, probe_size(batch.size))
    key = (_shapes(few), tuple(risk.parameters), risk.dtype, traits(risk.model))
    known = _CACHE.setdefault(risk.model, {})
    if key in known:
        return known[key]
    plan = halving(lambda size: probe(risk, few.part(0, size)), few.size)
    size = few.size
    while plan.unseen and size < min(batch.size, _ENOUGH):
        size *= 4
        plan = halving(lambda most: probe(risk, batch.part(0, most)), min(size, batch.size))
    if not plan.unseen:
        known[key] = plan
    return plan


_ENOUGH = 32  # samples to look through for one that moves every parameter


def probe_size(samples: int) -> int:
    """How many samples to probe: a few, and no more than a small share of the work ahead."""
    return samples if samples <= 4 else min(8, max(2, samples // 32))


def _shapes(batch: Batch) -> Hashable:
    return batch.size > 1, tuple(
        (tuple(t.shape[1:]), t.dtype, t.device) if isinstance(t, Tensor) else type(t)
        for t in tree_leaves(batch.inputs)
    )
