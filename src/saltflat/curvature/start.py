"""What has to be known before the first sweep: how the model behaves, and what the loss is."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from saltflat.curvature.certify import plan_for
from saltflat.curvature.factors import classify
from saltflat.curvature.memory import halving
from saltflat.curvature.plan import Plan
from saltflat.curvature.settings import Settings
from saltflat.errors import DataError
from saltflat.losses import CustomLoss, JointLoss, Loss, scalar
from saltflat.risk import Batch, Risk, join


def start(risk: Risk, first: Batch, settings: Settings) -> Plan:
    """Probe the model on the first batch, and the loss where it is a user's own."""
    # One sample alone does not show whether samples depend on each other.
    several = first if first.size > 1 else _gather(risk, first, 4)
    plan = plan_for(risk, several, settings.certify)
    if settings.certify == "none":
        plan = replace(plan, curved=dict.fromkeys(plan.rules, ""))
    if isinstance(risk.loss, Loss | JointLoss):
        return plan
    few, outputs = halving(lambda wanted: _few(risk, first, wanted), 8)
    with torch.no_grad():
        value = scalar(risk.loss, outputs, few.targets)
    if not torch.isfinite(value):
        raise DataError(f"The loss is not finite on {few.where}.")
    kind = classify(risk.loss, outputs, few)
    risk.loss = JointLoss(risk.loss) if kind is None else kind
    return plan


def give_up_on_samples(risk: Risk) -> None:
    """Take the loss for one that only all samples together have."""
    assert isinstance(risk.loss, CustomLoss)
    risk.loss = JointLoss(risk.loss.call)


def _few(risk: Risk, first: Batch, wanted: int) -> tuple[Batch, Tensor]:
    """Some samples and their outputs."""
    few = _gather(risk, first, wanted)
    with torch.no_grad():
        return few, risk.forward(few)


def _gather(risk: Risk, first: Batch, wanted: int) -> Batch:
    """Some samples, from several batches where one has too few."""
    gathered = [first.part(0, wanted)]
    if first.size < wanted:
        shapes = [t.shape[1:] for t in tree_leaves(first.inputs) if isinstance(t, Tensor)]
        for batch in islice(risk.batches(), 1, wanted):
            leaves = [t for t in tree_leaves(batch.inputs) if isinstance(t, Tensor)]
            if [t.shape[1:] for t in leaves] == shapes:
                gathered.append(batch.part(0, wanted))
    return join(gathered).part(0, wanted)
