"""Sharpness-aware minimization, plain and adaptive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any, Self, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from saltflat.checks import check_number
from saltflat.errors import InvalidType, InvalidValue, nearest
from saltflat.sharded import held
from saltflat.training.perturbing import Closure, PerturbedOptimizer, Walk, check_base
from saltflat.vectors import copies, put, scale, total_norm


@final
class SAM(PerturbedOptimizer):
    """The base optimizer, with gradients taken where the loss is highest nearby.

    SAM (Foret et al., 2021, eqs. 2 and 3) steps with ∇L(w + e), e = ρ g/‖g‖, g = ∇L(w), the norm
    over all parameters. `adaptive=True` is ASAM (Kwon et al., 2021, eqs. 7 and 8, elementwise):

        e = ρ T² g / ‖T g‖,      T = |w| + η

    so that ρ is relative to the weights; there ρ is usually ten times larger.

    Parameters
    ----------
    base_optimizer : any torch optimizer that takes no closure.
    rho : the radius; 0 is the base optimizer.
    adaptive : whether T is |w| + η or 1.
    eta : η. The authors' code has 0.01; a widely used other implementation has 0.
    vectors : whether ASAM scales parameters of at most one dimension too, that is biases and
        normalisation parameters. The authors' code does not scale biases, the other one does.
    freeze_batchnorm, same_randomness : see `PerturbedOptimizer`.

    `rho`, `adaptive`, `eta` and `vectors` are settings of a parameter group, like the learning
    rate: a group may have its own. A group of biases with `"adaptive": False` gives the authors'
    variant to the letter, in which normalisation weights are scaled and biases are not.

    m-sharpness, one perturbation for each micro-batch: give `step` a list of closures, one a
    micro-batch; the step takes the mean of their gradients. Or pass by pass, k micro-batches:

        for x, y in micro_batches:
            optimizer.zero_grad()
            (loss(model(x), y) / k).backward()
            optimizer.perturb()
            (loss(model(x), y) / k).backward()
            optimizer.gather()
        optimizer.step()

    With accelerate, prepare it like any optimizer; then `optimizer.step(closure)`, or
    `optimizer.optimizer.perturb()` and `optimizer.step()`. Under `accelerator.accumulate` keep the
    micro-batches, as accelerate drops all closures but the last one's, which is refused:

        with accelerator.accumulate(model):
            kept.append((x, y))
            accelerator.backward(loss(model(x), y))
            if accelerator.sync_gradients:
                while optimizer.optimizer.perturb(accelerator.scaler):
                    for x, y in kept:
                        accelerator.backward(loss(model(x), y))
                kept.clear()
            optimizer.step()
            optimizer.zero_grad()

    With the Trainer of transformers take `saltflat.integrations.SharpnessTrainer`. `first_step` and
    `second_step` are other names of `perturb` and `step`.

    Examples
    --------
    >>> import torch, saltflat as sf
    >>> w = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> optimizer = sf.SAM(torch.optim.SGD([w], lr=0.1), rho=5.0)
    >>> w.square().sum().backward()
    >>> optimizer.perturb()
    True
    >>> w.data
    tensor([6., 8.])
    >>> w.square().sum().backward()
    >>> optimizer.step()
    >>> w.data
    tensor([1.8000, 2.4000])
    """

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        # Before Python complains of two values for `rho`, the place of the class.
        classes = [a for a in (*arguments, *options.values()) if isinstance(a, type)]
        if classes:
            raise _class_for_optimizer(classes[0], options)
        return super().__new__(cls)

    def __init__(
        self,
        base_optimizer: Optimizer,
        rho: float = 0.05,
        adaptive: bool = False,
        *,
        eta: float = 0.01,
        vectors: bool = True,
        freeze_batchnorm: bool = True,
        same_randomness: bool = True,
        **unknown: Any,
    ) -> None:
        check_base(base_optimizer, "SAM")
        for name in unknown:
            hint = nearest(name, list(signature(SAM).parameters)[1:-1])
            raise InvalidType(
                f"SAM has no option {name!r}. {hint} Those of the base optimizer are its own: "
                "SAM(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), rho=0.05)."
            )
        defaults = {
            "rho": check_number("rho", rho),
            "adaptive": adaptive,
            "eta": check_number("eta", eta),
            "vectors": vectors,
        }
        super().__init__(
            base_optimizer,
            defaults,
            freeze_batchnorm=freeze_batchnorm,
            same_randomness=same_randomness,
        )

    def step(self, closure: Closure | Sequence[Closure] | None = None) -> Any:
        """One step; for a list of closures, with a perturbation for each; returns the loss."""
        if closure is None or callable(closure):
            return super().step(closure)
        if not closure:
            raise InvalidValue("step() needs at least one closure. Got an empty list.")
        losses = []
        for one in closure:
            self.zero_grad()
            losses.append(self._run(one))
            self.gather()
        self._multiply(1.0 / len(losses))
        self._base_step()
        return sum(losses) / len(losses)

    def first_step(self, zero_grad: bool = False) -> None:
        """`perturb()`, under the name that other implementations have for it.

        The gradients are cleared in any case: those of the next pass must be its own.
        """
        self.perturb()

    def second_step(self, zero_grad: bool = False) -> None:
        """`step()` after `first_step` and the second `backward()`."""
        self.step()
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def gather(self) -> None:
        """End the passes of one micro-batch: put the weights back and add its gradients up.

        The gradients that it leaves are the sum so far.
        """
        if self._walk is not None:
            self._advance()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    before = self._gathered.get(p)
                    self._gathered[p] = p.grad.clone() if before is None else before + p.grad
        for p, total in self._gathered.items():
            p.grad = total.clone()
        self._ready = True
        self._replay.arm()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, not the sum that `gather` keeps until the step."""
        if self._gathered:
            self._ready = False  # the next micro-batch begins
        super().zero_grad(set_to_none)

    def restore(self) -> None:
        self._gathered.clear()
        super().restore()

    def _base_step(self, skip: bool = False) -> None:
        self._gathered.clear()
        super()._base_step(skip)

    def _adopt(self, base: Optimizer) -> None:
        self._gathered: dict[Tensor, Tensor] = {}
        super()._adopt(base)

    def _neutral(self) -> bool:
        return all(self._setting(group, "rho") == 0 for group in self.param_groups)

    def _passes(self) -> Walk:
        entries = self._with_gradients()
        parameters = [p for p, _, _ in entries]
        start = copies(parameters)
        try:
            torch._foreach_add_(held(parameters), held(self._ascent(entries)))
            yield "ascent"
        finally:
            put(parameters, start)

    def _ascent(self, entries: Sequence[tuple[Tensor, Tensor, dict[str, Any]]]) -> list[Tensor]:
        """e = ρ T² g / ‖T g‖, parameter by parameter.

        After an overflow it is NaN, so are the gradients there, and a GradScaler skips the step.
        """
        scales = [self._scale(p, group) for p, _, group in entries]
        steps = copies([g for _, g, _ in entries])
        adaptive = [(step, t) for step, t in zip(steps, scales, strict=True) if t is not None]
        for step, t in adaptive:
            step.mul_(t)
        norm = total_norm(steps)
        for step, t in adaptive:
            step.mul_(t)
        radii = [self._setting(group, "rho") for _, _, group in entries]
        torch._foreach_mul_(held(steps), radii)
        scale(steps, 1.0 / norm.clamp_min(torch.finfo(norm.dtype).tiny))
        return steps

    def _scale(self, p: Tensor, group: dict[str, Any]) -> Tensor | None:
        """T of Kwon et al., or None where it is 1."""
        if not self._setting(group, "adaptive"):
            return None
        if p.ndim <= 1 and not self._setting(group, "vectors"):
            return None
        return p.abs().add_(self._setting(group, "eta"))


def _class_for_optimizer(base: type, options: Mapping[str, Any]) -> InvalidType:
    """The error for SAM(params, torch.optim.SGD, rho=…, lr=…), with the line to write."""
    own = list(signature(SAM).parameters)[1:-1]
    inner = "".join(f", {k}={v!r}" for k, v in options.items() if k not in own and not _long(v))
    outer = "".join(f", {k}={v!r}" for k, v in options.items() if k in own and not _long(v))
    return InvalidType(
        "SAM wraps an optimizer that is there already, not its class. Write "
        f"SAM(torch.optim.{base.__name__}(model.parameters(){inner}){outer})."
    )


def _long(value: Any) -> bool:
    return not isinstance(value, bool | int | float | tuple)


_INIT = signature(SAM.__init__)
# Otherwise help() would show that of __new__.
SAM.__signature__ = _INIT.replace(parameters=[*_INIT.parameters.values()][1:])  # type: ignore[attr-defined]
