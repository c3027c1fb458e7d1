"""
Auditing a measure of your own
==============================

A measure of sharpness that somebody wrote for a project, is it invariant? `sf.audit` finds the
rescalings that keep the function of a model, checks in float64 that its outputs stay, applies
them, and says which measures moved. Functions of your own are audited beside the built-in
measures.
"""

import matplotlib.pyplot as plt
import torch

import saltflat as sf
from saltflat.datasets import digits
from saltflat.zoo import mlp

torch.manual_seed(0)
x, y, *_ = digits()
model = mlp([64, 24, 16, 10])
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for _ in range(100):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()

# %%
# A function gets a copy of the model and the data, and returns a number. The first one is the
# norm of the gradient. The second measures every weight on its own scale: ``Σ |w ∂L/∂w|``.


def gradients(model, data):
    inputs, targets = data
    loss = torch.nn.functional.cross_entropy(model(inputs), targets)
    parameters = list(model.parameters())
    return list(zip(parameters, torch.autograd.grad(loss, parameters), strict=True))


def gradient_norm(model, data):
    return float(torch.stack([g.norm() for _, g in gradients(model, data)]).norm())


def weighted_gradient(model, data):
    return float(sum((w * g).abs().sum() for w, g in gradients(model, data)).detach())


audit = sf.audit(
    model,
    (x[:200], y[:200]),
    measures=["hessian_trace", "minimum_sharpness", "rho"],
    functions={"gradient_norm": gradient_norm, "weighted_gradient": weighted_gradient},
    elements=2,
    progress=False,
)
print(audit)

# %%
# `ok` is about promises: it is False where a built-in measure moved under a rescaling to which it
# declares itself invariant. A function declares nothing; its verdicts stand in its row.

print(audit.ok)
print({kind: drift.verdict for kind, drift in audit["gradient_norm"].items()})
print({kind: drift.verdict for kind, drift in audit["weighted_gradient"].items()})

# %%
# How far each went, as the rescaling grows.

audit.plot("drift.png")
figure, axis = plt.subplots(figsize=(9, 4.5))
axis.imshow(plt.imread("drift.png"))
axis.axis("off")
figure.tight_layout()
