"""
The same function, a Hessian trace 100,000 times as large
=========================================================

A ReLU network computes the same function when the weights into a layer are multiplied by a number
and the weights out of it are divided by it. Its Hessian does not stay the same. So the trace of
the Hessian, or its largest eigenvalue, can be made anything without touching what the network
predicts (Dinh et al. 2017). Here the attack is carried out on a trained network.
"""

import matplotlib.pyplot as plt
import torch

import saltflat as sf
from saltflat.datasets import digits
from saltflat.zoo import mlp

# %%
# A network, trained on handwritten digits.

torch.manual_seed(0)
x, y, test_x, test_y = digits()
model = mlp([64, 32, 32, 10])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for _ in range(20):
    for rows in torch.randperm(len(x)).split(64):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()

# %%
# `sf.symmetries` finds every positive rescaling of its weights that keeps the function: one for
# each of the 64 hidden units.

group = sf.symmetries(model, x[:8])
print(len(group))

# %%
# The attack takes the rescalings of whole layers only. Dividing a weight matrix by α multiplies
# its block of the Hessian by α².

names = [name for name, p in model.named_parameters() if p.ndim == 2]
first, last = names[0], names[-1]
alphas = [1.0, 4.0, 20.0, 100.0, 400.0]
measures = [
    "hessian_trace",
    "kappa_trace",
    "minimum_sharpness",
    "normalized_sharpness",
    "relative_flatness",
    "rho",
]

reports, outputs = {}, {}
for alpha in alphas:
    twin = group.alpha_scaling({first: 1 / alpha, last: alpha})(model.double())
    outputs[alpha] = twin(test_x.double()).detach()
    reports[alpha] = sf.measure(twin, (x.double(), y), measures=measures, progress=False)

change = (outputs[400.0] - outputs[1.0]).abs().max() / outputs[1.0].abs().max()
print(f"largest change of an output on the test images: {float(change):.1e} of the largest output")
before, after = (reports[alpha]["hessian_trace"].value for alpha in (1.0, 400.0))
print(f"Tr H: {before:.4g} before, {after:.4g} after: {after / before:.3g} times as large")

# %%
# The trace goes up with α². Measures that are invariant to rescaling layers stay where they were,
# to the last digits of float64.

figure, axis = plt.subplots(figsize=(7, 4))
for name in measures:
    ratios = [reports[alpha][name].value / reports[1.0][name].value for alpha in alphas]
    moved = name == "hessian_trace"
    axis.loglog(alphas, ratios, "o-" if moved else ".--", label=name, lw=2 if moved else 1)
axis.set(xlabel="α", ylabel="value / value of the trained network")
axis.legend()
figure.tight_layout()

# %%
for name in measures:
    ratio = reports[400.0][name].value / reports[1.0][name].value
    print(f"{name:22} × {ratio:.12g}")
