"""Entropy-SGD: descent on the local entropy of the loss."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from math import sqrt
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT
from torch.optim.sgd import sgd

from saltflat.checks import check_integer, check_number
from saltflat.curvature import mixed
from saltflat.errors import InvalidType, InvalidValue
from saltflat.sharded import held, refuse_flattened, shard_like
from saltflat.training.perturbing import FrozenStatistics, refuse_wrapped_closure
from saltflat.vectors import copies, put

_PUBLISHED_INNER_LR = 0.1
_OF_A_ROUND = ("center", "pull", "average", "weight", "inner_buffer")  # what the state holds in it


@final
class EntropySGD(Optimizer):
    """SGD on the local entropy −log ∫ exp(−L(x') − γ/2 ‖x − x'‖²) dx' (Chaudhari et al., 2017).

    Its gradient γ(x − ⟨x'⟩) is estimated by `steps` steps of Langevin dynamics (algorithm 1):

        x' ← x' − η' (∇L(x') − γ (x − x')) + √η' ε N(0, 1),      μ ← (1 − α) μ + α x'

    from x' = μ = x, η' = `inner_lr`, ε = `noise`, α = `averaging`, and γ = `gamma`
    (1 + `scoping`)^t in round t of L = `steps`. Then SGD steps with

        (x − μ) / (η' (1 − (1 − α)^L))

    the distance to the average of the x', x left out of it, for each unit of η'. So `lr` is what it
    is to SGD: lr = η', the default, takes x to that average, less stays behind it, and
    `steps=1, noise=0` is torch.optim.SGD. More than 2 η' goes past it by more than there was to go,
    which mostly diverges and is warned of.

    `published=True` is the step as published, x ← x − lr (x − μ): the paper has lr = ηγ, its public
    code takes lr as given, and 1 goes to μ. There η' is 0.1 by default, as in both.

    `momentum` and `nesterov` belong to the outer step, `inner_momentum` (heavy ball, from rest in
    every round) to the inner ones. `weight_decay` is part of L.

    A step is one inner step, on a batch of its own: call `backward()` and `step()` as with SGD.
    Every `steps` of them x moves; in between the weights are x', so evaluate and save when
    `at_center`. `step(closure)` calls the closure until the round is complete; an exception in it
    takes the weights back to x, and the round begins anew.

    BatchNorm's running statistics follow the passes at x only, unless `freeze_batchnorm=False`.
    Every inner step is a draw of its own, so the passes do not share random numbers. The noise
    depends on `seed` and the number of the step, not on the global generators: it is the same on
    every rank, and after loading a checkpoint.

    Examples
    --------
    >>> import torch, saltflat as sf
    >>> w = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> optimizer = sf.EntropySGD([w], lr=0.1, steps=1, noise=0.0)
    >>> w.square().sum().backward()
    >>> optimizer.step()
    >>> w.data, optimizer.at_center
    (tensor([2.4000, 3.2000]), True)
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor | None = None,
        steps: int = 20,
        gamma: float = 1e-4,
        noise: float = 1e-4,
        *,
        inner_lr: float | None = None,
        averaging: float = 0.25,
        scoping: float = 0.0,
        momentum: float = 0.0,
        nesterov: bool = False,
        inner_momentum: float = 0.0,
        weight_decay: float = 0.0,
        published: bool = False,
        freeze_batchnorm: bool = True,
        seed: int = 0,
    ) -> None:
        if isinstance(params, nn.Module):
            raise InvalidType(
                "EntropySGD takes parameters, as the optimizers of torch do. Got "
                f"{type(params).__name__}; write EntropySGD(model.parameters(), lr=0.1)."
            )
        self.steps = check_integer("steps", steps)
        self.freeze_batchnorm = freeze_batchnorm
        if check_number("averaging", averaging, above=True) > 1:
            raise InvalidValue(f"averaging must be at most 1. Got {averaging!r}.")
        if nesterov and momentum == 0:
            raise InvalidValue("nesterov needs a momentum above 0. Got momentum=0.")
        defaults = {
            "lr": lr if isinstance(lr, Tensor) else check_number("lr", lr),
            "gamma": check_number("gamma", gamma),
            "noise": check_number("noise", noise),
            "inner_lr": inner_lr,
            "published": published,
            "averaging": averaging,
            "scoping": check_number("scoping", scoping),
            "momentum": check_number("momentum", momentum),
            "nesterov": nesterov,
            "inner_momentum": check_number("inner_momentum", inner_momentum),
            "weight_decay": check_number("weight_decay", weight_decay),
            "seed": seed,
            "inner": 0,  # steps made in this round
            "round": 0,
        }
        self._adopt_watch()
        super().__init__(params, defaults)
        refuse_flattened(p for group in self.param_groups for p in group["params"])

    @property
    def at_center(self) -> bool:
        """Whether the weights are x, and not those of the Langevin dynamics."""
        return bool(self.param_groups[0]["inner"] == 0)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One inner step; with a closure, as many as complete the round. Returns the first loss."""
        if closure is None:
            self._inner_step()
            return None
        refuse_wrapped_closure()
        losses: list[Any] = []
        try:
            while not losses or not self.at_center:
                with torch.enable_grad():
                    losses.append(closure())
                self._inner_step()
        except BaseException:
            self.restore()
            raise
        return losses[0]

    @torch.no_grad()
    def restore(self) -> None:
        """Put the weights back to x and forget the inner steps of this round."""
        away = [p for group in self.param_groups for p in group["params"]]
        away = [p for p in away if "center" in self.state[p]]
        if away:
            put(away, self._load("center", away))
        self._forget(away)
        for group in self.param_groups:
            group["inner"] = 0
        torch.clear_autocast_cache()
        self._watch()

    @torch.no_grad()
    def _inner_step(self) -> None:
        inner = self.param_groups[0]["inner"] + 1
        last = inner >= self.steps
        generators: dict[torch.device, torch.Generator] = {}
        for group in self.param_groups:
            moved = [p for p in group["params"] if p.grad is not None]
            new = [p for p in moved if "center" not in self.state[p]]
            known = [p for p in moved if "center" in self.state[p]]
            if new:
                self._set_out(new, group)
            if known:
                self._pull(known, group)
            if moved:
                self._move(moved, group, generators)
            if last:
                self._descend([p for p in group["params"] if "center" in self.state[p]], group)
        for group in self.param_groups:
            group["inner"] = 0 if last else inner
            group["round"] += int(last)
        torch.clear_autocast_cache()  # it holds the weights from before they moved
        self._watch()

    def _set_out(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """The first inner step of a round. x' is kept as the pull (x − x')/η'."""
        gradients = _gradients(parameters, group)
        self._store("center", parameters, copies(parameters))
        self._store("pull", parameters, copies(gradients))
        if group["inner_momentum"] != 0:
            self._store("inner_buffer", parameters, copies(gradients))

    def _pull(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """A later inner step: pull ← (1 − η' γ) pull + ∇L(x')."""
        gradients, pulls = _gradients(parameters, group), self._load("pull", parameters)
        if group["inner_momentum"] != 0:
            buffers = self._load("inner_buffer", parameters)
            torch._foreach_mul_(held(buffers), group["inner_momentum"])
            torch._foreach_add_(held(buffers), held(gradients))
            gradients = buffers
        gamma = group["gamma"] * (1 + group["scoping"]) ** group["round"]
        torch._foreach_mul_(held(pulls), 1 - group["inner_lr"] * gamma)
        torch._foreach_add_(held(pulls), held(gradients))

    def _move(
        self,
        parameters: list[Tensor],
        group: dict[str, Any],
        generators: dict[torch.device, torch.Generator],
    ) -> None:
        """Add the noise, go to x' = x − η' pull, and average: (x − μ)/(α η') is kept."""
        pulls = self._load("pull", parameters)
        if group["noise"] != 0:
            draws = held(self._noise(p, group, generators) for p in parameters)
            torch._foreach_add_(held(pulls), draws, alpha=group["noise"] / sqrt(group["inner_lr"]))
        new = [p for p in parameters if "average" not in self.state[p]]
        known = [p for p in parameters if "average" in self.state[p]]
        if new:
            self._store("average", new, copies(self._load("pull", new)))
        if known:
            averages = held(self._load("average", known))
            torch._foreach_mul_(averages, 1 - group["averaging"])
            torch._foreach_add_(averages, held(self._load("pull", known)))
        for p in parameters:  # (1 − (1 − α)^L)/α after L of them
            weight = self.state[p].get("weight", 0.0)
            self.state[p]["weight"] = 1 + (1 - group["averaging"]) * weight
        centers = held(self._load("center", parameters))
        moved = torch._foreach_add(centers, held(pulls), alpha=-group["inner_lr"])
        put(held(parameters), moved)

    def _noise(
        self, p: Tensor, group: dict[str, Any], generators: dict[torch.device, torch.Generator]
    ) -> Tensor:
        if p.device not in generators:
            count = group["round"] * self.steps + group["inner"]
            seed = mixed(group["seed"], count)
            generators[p.device] = torch.Generator(p.device).manual_seed(seed)
        generator = generators[p.device]
        draws = torch.randn(p.shape, generator=generator, dtype=p.dtype, device=p.device)
        return shard_like(draws, p)

    def _descend(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """The outer step: torch.optim.SGD's, from the center, with the average as gradient."""
        if not parameters:
            return
        put(parameters, self._load("center", parameters))
        gradients = self._load("average", parameters)
        unit = group["averaging"] * group["inner_lr"]
        factors = [unit if group["published"] else 1 / self.state[p]["weight"] for p in parameters]
        torch._foreach_mul_(held(gradients), factors)
        self._forget(parameters)
        options: dict[str, Any] = {name: group[name] for name in ("momentum", "nesterov")}
        options |= {"lr": float(group["lr"]), "weight_decay": 0, "dampening": 0, "maximize": False}
        buffers = [self.state[p].get("momentum_buffer") for p in parameters]
        sgd(parameters, gradients, buffers, **options)
        if group["momentum"] != 0:
            self._store("momentum_buffer", parameters, buffers)

    def _forget(self, parameters: list[Tensor]) -> None:
        for p in parameters:
            for name in _OF_A_ROUND:
                self.state[p].pop(name, None)

    def _store(self, name: str, parameters: list[Tensor], values: list[Tensor]) -> None:
        for p, value in zip(parameters, values, strict=True):
            self.state[p][name] = value

    def _load(self, name: str, parameters: list[Tensor]) -> list[Tensor]:
        return [self.state[p][name] for p in parameters]

    def _watch(self) -> None:
        """Freeze the running statistics while the weights are not at the center."""
        if self.freeze_batchnorm and not self.at_center:
            self._frozen.open()
        else:
            self._frozen.close()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for name in ("inner", "round"):
            group[name] = self.param_groups[0][name]
        _settle_inner_lr(group)

    def __getstate__(self) -> dict[str, Any]:
        own = {"steps": self.steps, "freeze_batchnorm": self.freeze_batchnorm}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        before = self.__dict__.get("param_groups", ())
        super().__setstate__(state)
        for old, group in zip(before, self.param_groups, strict=False):
            for name in self.defaults.keys() & old.keys():  # a plain optimizer's state lacks some
                group.setdefault(name, old[name])
        if "_frozen" not in self.__dict__:
            self._adopt_watch()
        self._watch()

    def _adopt_watch(self) -> None:
        self._frozen = FrozenStatistics(self)
        weakref.finalize(self, self._frozen.close)


def _settle_inner_lr(group: dict[str, Any]) -> None:
    """The step size of the dynamics: as given, or that of SGD. Warns where x would overshoot."""
    lr, published = float(group["lr"]), group["published"]
    if group["inner_lr"] is None:
        group["inner_lr"] = _PUBLISHED_INNER_LR if published or lr == 0 else lr
    inner_lr = check_number("inner_lr", group["inner_lr"], above=True)
    ratio = lr if published else lr / inner_lr
    if ratio > 2:
        there = 1 if published else inner_lr
        warnings.warn(
            f"EntropySGD would go {ratio:.3g} times the way to the average of its inner steps, "
            f"which mostly diverges. lr={there:g} goes there.",
            stacklevel=5,
        )


def _gradients(parameters: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
    """Those of the loss with its weight decay."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if group["weight_decay"] == 0:
        return gradients
    decayed = copies(gradients)
    torch._foreach_add_(held(decayed), held(parameters), alpha=group["weight_decay"])
    return decayed
