"""What has to be known before the first sweep: how the model behaves, and what the loss is."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from saltflat.curvature.certify import plan_for
from saltflat.curvature.derivative import check_bend, check_slope
from saltflat.curvature.factors import classify, repeats
from saltflat.curvature.memory import halving
from saltflat.curvature.plan import Plan
from saltflat.curvature.settings import Settings
from saltflat.errors import DataError, LossError
from saltflat.losses import (
    CustomLoss,
    JointLoss,
    Loss,
    describe,
    leaves,
    listed,
    own_parameters,
    refuse_parameters,
    scalar,
)
from saltflat.risk import Batch, Risk, alike, join


def start(risk: Risk, first: Batch, settings: Settings) -> Plan:
    """Probe the model on the first batch, and the loss where it is a user's own."""
    # One sample alone does not show whether samples depend on each other.
    several = first if first.size > 1 else _gather(risk, first, 4)
    plan = plan_for(risk, several, settings.certify)
    if settings.certify == "none":
        plan = replace(plan, curved=dict.fromkeys(plan.rules, ""))
    if isinstance(risk.loss, Loss | JointLoss):
        return plan
    # A part of a batch whose samples depend on each other may make no sense.
    wanted = first.size if plan.coupled else 8
    few, outputs = halving(lambda most: _few(risk, first, most), wanted)
    _look_at_loss(risk, outputs, few)
    risk.loss = classify(risk.loss, outputs, few, risk.parameters)
    if not risk.loss.missing:
        check_bend(risk.loss.call, risk.loss.name, outputs.detach(), few)
    return plan


def _look_at_loss(risk: Risk, outputs: Tensor, few: Batch) -> None:
    """Refuse a user's loss that is not a function of outputs and targets alone."""
    assert not isinstance(risk.loss, Loss | JointLoss)
    call, name = risk.loss, describe(risk.loss)
    at = outputs.detach().requires_grad_()
    with torch.enable_grad():
        value = scalar(call, at, few.targets)
    if not torch.isfinite(value):
        raise DataError(f"The loss is not finite on {few.where}.")
    refuse_parameters(name, value, risk.parameters)
    repeats(name, value, scalar(call, at, few.targets), few.where)
    if all(leaf is not at for leaf in leaves(value)):
        raise LossError(
            f"The loss {name} does not depend on the outputs by operations that autograd follows, "
            f"on {few.where}: it has no derivative to measure. Look for argmax, item() or numpy."
        )
    check_slope(call, name, outputs.detach(), few)
    if own := own_parameters(call, value, at):
        risk.notes.append(
            f"the loss {name} has parameters of its own, held fixed and not measured: {listed(own)}"
        )


def give_up_on_samples(risk: Risk) -> None:
    """Take the loss for one that only all samples together have."""
    assert isinstance(risk.loss, CustomLoss)
    risk.loss = JointLoss(risk.loss.call, risk.loss.measured, risk.loss.missing)


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
            inputs = [t for t in tree_leaves(batch.inputs) if isinstance(t, Tensor)]
            if [t.shape[1:] for t in inputs] == shapes and alike([first, batch]):
                gathered.append(batch.part(0, wanted))
    return join(gathered).part(0, wanted)
