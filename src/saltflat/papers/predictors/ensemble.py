"""Networks of one shape that are trained together until each has the same training loss.

One step is SGD with momentum and weight decay on what the optimizer asks for: the loss (SGD), the
loss with the penalty of FAM on the last layer, or the loss at SAM's neighbour of the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from saltflat.sweep import Descent, Parameters, Replayed, beside, stacked, write_back

_CHUNK = 1000  # samples whose loss is evaluated at a time


def network(inputs: int, width: int, depth: int, outputs: int = 10) -> nn.Sequential:
    """`depth` hidden layers of `width` units with ReLU (the `body`), and a linear `head`."""
    body: list[nn.Module] = [nn.Flatten()]
    for size in [inputs] + [width] * (depth - 1):
        body += [nn.Linear(size, width), nn.ReLU()]
    model = nn.Sequential()
    model.add_module("body", nn.Sequential(*body))
    model.add_module("head", nn.Linear(width, outputs))
    return model


@final
@dataclass(frozen=True)
class Recipe:
    """How each member is trained: one number a member."""

    lr: Tensor
    weight_decay: Tensor
    rho: Tensor  # SAM's radius; 0 is none
    strength: Tensor  # of FAM's penalty; 0 is none
    augmented: Tensor  # whether its images are flipped, each with probability ½
    seeds: Sequence[int]  # of the order of its samples and of its augmentation
    momentum: float = 0.9

    def to(self, device: torch.device) -> Recipe:
        numbers: dict[str, Any] = {
            name: value.to(device)
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        return replace(self, **numbers)


def relative_flatness(features: Tensor, logits: Tensor, weight: Tensor) -> Tensor:
    """κ of the last layer for cross-entropy, in closed form.

    H = mean_i B_i ⊗ φ_i φ_iᵀ with B = diag(p) − p pᵀ, so that
    Σ ⟨w_s, w_s'⟩ Tr H_ss' = mean_i ‖φ_i‖² (Σ_s p_s ‖w_s‖² − ‖Wᵀ p‖²).
    """
    p = logits.softmax(-1)
    spread = p @ weight.square().sum(1) - (p @ weight).square().sum(1)
    return (features.square().sum(1) * spread).mean()


def train_until(
    models: Sequence[nn.Sequential],
    images: Tensor,
    labels: Tensor,
    recipe: Recipe,
    *,
    batch: int,
    target: float,
    epochs: int,
) -> list[int | None]:
    """Train each model until its training loss is at most `target`, and leave it there.

    `images` (n, height, width) are shared, `labels` (models, n) are each member's own. The loss is
    looked at after every epoch, on all images as they are. Returns the epoch after which each
    member had reached the target, None where `epochs` were not enough or the loss was not finite.
    """
    ensemble = _Ensemble(models, images, labels, recipe.to(images.device), batch)
    reached: list[int | None] = [None] * len(models)
    step = Replayed(ensemble.step, images.device)
    for epoch in range(1, epochs + 1):
        for order, flips in ensemble.draw_epoch():
            ensemble.order.copy_(order)
            ensemble.flips.copy_(flips)
            step()
        done = (ensemble.losses() <= target).tolist()
        for member, is_done in enumerate(done):
            if is_done and reached[member] is None:
                reached[member] = epoch
                ensemble.lr[member] = 0.0
        if all(each is not None for each in reached):
            break
    write_back(ensemble.parameters, models)
    return reached


class _Ensemble:
    """The stacked parameters of the models, and a step on them.

    What a step reads stays where it is in memory, for a CUDA graph reads it there.
    """

    def __init__(
        self,
        models: Sequence[nn.Sequential],
        images: Tensor,
        labels: Tensor,
        recipe: Recipe,
        batch: int,
    ) -> None:
        self.parameters = stacked(models)
        self.descent = Descent(self.parameters, recipe.momentum, recipe.weight_decay)
        self.template, self.recipe, self.lr = models[0], recipe, recipe.lr.clone()
        self.images, self.labels = images, labels
        self.members = torch.arange(len(models), device=images.device)[:, None]
        self.generators = [torch.Generator().manual_seed(seed) for seed in recipe.seeds]
        self.batch = batch
        self.order = torch.zeros(len(models), batch, dtype=torch.int64, device=images.device)
        self.flips = torch.zeros_like(self.order, dtype=torch.bool)
        self.penalised, self.perturbed = (
            bool((recipe.strength > 0).any()),
            bool((recipe.rho > 0).any()),
        )
        self.gradients = vmap(grad_and_value(self._objective))

    def _outputs(self, parameters: Parameters, x: Tensor) -> tuple[Tensor, Tensor]:
        """What enters the last layer, and what leaves it."""
        body = {n.removeprefix("body."): p for n, p in parameters.items() if n[:4] == "body"}
        features = functional_call(self.template[0], body, (x,))
        return features, F.linear(features, parameters["head.weight"], parameters["head.bias"])

    def _objective(self, parameters: Parameters, x: Tensor, y: Tensor, strength: Tensor) -> Tensor:
        features, logits = self._outputs(parameters, x)
        loss = F.cross_entropy(logits, y)
        if self.penalised:
            weight = parameters["head.weight"]
            loss = loss + strength * relative_flatness(features, logits, weight)
        return loss

    def draw_epoch(self) -> list[tuple[Tensor, Tensor]]:
        """The samples of each step of one epoch, and which of them are flipped; whole batches."""
        orders, flips = [], []
        for generator, is_augmented in zip(
            self.generators, self.recipe.augmented.tolist(), strict=True
        ):
            orders.append(torch.randperm(len(self.images), generator=generator))
            coins = torch.randint(2, (len(self.images),), generator=generator) > 0
            flips.append(coins & is_augmented)
        order = torch.stack(orders).to(self.images.device).split(self.batch, 1)
        flip = torch.stack(flips).to(self.images.device).split(self.batch, 1)
        steps = len(self.images) // self.batch
        return list(zip(order[:steps], flip[:steps], strict=True))

    def _inputs(self) -> Tensor:
        """The images of this step."""
        x = self.images[self.order]
        return torch.where(self.flips[..., None, None], x.flip(-1), x)

    @torch.no_grad()
    def step(self) -> None:
        x, y = self._inputs(), self.labels[self.members, self.order]
        gradients, _ = self.gradients(self.parameters, x, y, self.recipe.strength)
        if self.perturbed:
            there = self._neighbour(gradients)
            gradients, _ = self.gradients(there, x, y, self.recipe.strength)
        self.descent.step(gradients, self.lr)

    def _neighbour(self, gradients: Parameters) -> Parameters:
        """w + ρ g/‖g‖, the norm over all parameters (Foret et al. 2021, eq. 2)."""
        norm = torch.stack([g.flatten(1).square().sum(1) for g in gradients.values()]).sum(0).sqrt()
        scale = self.recipe.rho / norm.clamp_min(torch.finfo(norm.dtype).tiny)
        return {n: p + beside(scale, p) * gradients[n] for n, p in self.parameters.items()}

    @torch.no_grad()
    def losses(self) -> Tensor:
        """Of every member, on all its training images as they are."""

        def total(parameters: Parameters, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self._outputs(parameters, x)[1], y, reduction="sum")

        pieces = zip(self.images.split(_CHUNK), self.labels.split(_CHUNK, 1), strict=True)
        sums = [vmap(total, in_dims=(0, None, 0))(self.parameters, x, y) for x, y in pieces]
        return torch.stack(sums).sum(0) / len(self.images)
