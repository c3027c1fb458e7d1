"""The alternatives: one gradient, BackPACK, per-sample gradients, Hutchinson probes.

Each function prepares what is not to be timed and returns the run that is. A run returns a value
for every parameter, so that its error can be taken.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

from bench.cases import CLASSES, Problem

Values = dict[str, Tensor]
Run = Callable[[], Values]


def gradient(problem: Problem) -> Run:
    """One gradient of the mean cross-entropy, all samples in one batch: the unit of all ratios."""
    params = dict(problem.model.named_parameters())

    def run() -> Values:
        loss = cross_entropy(problem.model(problem.x), problem.y)
        return dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))

    return run


def backpack_diagonal(problem: Problem, chunk: int) -> Run:
    """BackPACK's DiagGGNExact. The graph converter makes it run on residual networks as well."""
    from backpack import backpack, extend
    from backpack.extensions import DiagGGNExact

    warnings.filterwarnings("ignore", message="Full backward hook")
    model = copy.deepcopy(problem.model)
    names = {id(p): name for name, p in model.named_parameters()}  # the converter renames some
    branches = any(not isinstance(m, nn.Sequential) and any(m.children()) for m in model.modules())
    extended = extend(model, use_converter=branches).eval()
    loss = extend(nn.CrossEntropyLoss())

    def run() -> Values:
        total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        for x, y in zip(torch.split(problem.x, chunk), torch.split(problem.y, chunk), strict=True):
            extended.zero_grad()
            with backpack(DiagGGNExact()):
                loss(extended(x), y).backward()
            for parameter in extended.parameters():
                diagonal = parameter.diag_ggn_exact
                total[names[id(parameter)]] += diagonal * (len(x) / len(problem.x))
                del parameter.diag_ggn_exact
        return total

    return run


def per_sample_trace(problem: Problem, chunk: int) -> Run:
    """Minimum Sharpness, Proposition 1: K + 1 backward passes with per-sample gradients.

    Tr H_d = mean_i ( Σ_l p_l ‖∂o_l/∂W_d‖² − ‖∂ ln Z/∂W_d‖² ), Z = Σ_l exp o_l. (The paper prints
    norms where it must have squared norms.) Samples are vectorised with vmap.
    """
    model = problem.model
    params = {name: p.detach() for name, p in model.named_parameters()}
    buffers = dict(model.named_buffers())

    def outputs(values: Values, x: Tensor) -> Tensor:
        result: Tensor = functional_call(model, (values, buffers), (x[None],))[0]
        return result

    def squared_norms(scalar: Callable[[Values, Tensor], Tensor], x: Tensor) -> Values:
        per_sample = vmap(grad(scalar), in_dims=(None, 0))(params, x)
        return {name: g.flatten(1).square().sum(1) for name, g in per_sample.items()}

    def logit(label: int) -> Callable[[Values, Tensor], Tensor]:
        return lambda values, x: outputs(values, x)[label]

    def log_partition(values: Values, x: Tensor) -> Tensor:
        return outputs(values, x).logsumexp(0)

    def run() -> Values:
        total = {name: problem.x.new_zeros(()) for name in params}
        for x in torch.split(problem.x, chunk):
            with torch.no_grad():
                p = model(x).softmax(1)
            for label in range(CLASSES):
                for name, norms in squared_norms(logit(label), x).items():
                    total[name] += (p[:, label] * norms).sum()
            for name, norms in squared_norms(log_partition, x).items():
                total[name] -= norms.sum()
        return {name: t / len(problem.x) for name, t in total.items()}

    return run


def hutchinson_draws(problem: Problem, probes: int) -> Run:
    """One draw of vᵀHv a probe and parameter, v of random signs, by plain double backward.

    The graph of the first backward pass is shared by all probes, which is the best case.
    """
    params = dict(problem.model.named_parameters())
    generator = torch.Generator(problem.x.device).manual_seed(2)

    def signs(p: Tensor) -> Tensor:
        bits = torch.randint(2, p.shape, generator=generator, device=p.device)
        return bits.to(p.dtype).mul_(2).sub_(1)

    def run() -> Values:
        values = list(params.values())
        loss = cross_entropy(problem.model(problem.x), problem.y)
        first = torch.autograd.grad(loss, values, create_graph=True)
        draws: list[list[Tensor]] = []
        for _ in range(probes):
            v = [signs(p) for p in values]
            second = torch.autograd.grad(first, values, v, retain_graph=True)
            draws.append([(a * b).sum() for a, b in zip(v, second, strict=True)])
        columns = zip(*draws, strict=True)
        return {name: torch.stack(column) for name, column in zip(params, columns, strict=True)}

    return run
