"""
A picture of the loss that no rescaling changes
===============================================

Pictures of the loss around a minimum depend on the directions that are drawn. Directions whose
filters are as long as those of the weights undo a rescaling of what enters a unit, and not of what
leaves it. `directions="balanced"` draws around the balanced twin: networks that are rescalings of
each other have the same one, and so the same picture.
"""

import matplotlib.pyplot as plt
import torch

import saltflat as sf
from saltflat.datasets import digits
from saltflat.zoo import mlp

torch.manual_seed(0)
x, y, *_ = digits()
model = mlp([64, 24, 16, 10])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for _ in range(10):
    for rows in torch.randperm(len(x)).split(64):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
model, data = model.double(), (x[:300].double(), y[:300])

# %%
# The same network twice: as it was trained, and rescaled by factors of up to 10 a unit.

twin = sf.symmetries(model, data[0][:8]).random(seed=0, spread=10.0)(model)
twins = {"trained": model, "rescaled": twin}
kinds = ["random", "filter", "balanced"]
lines = {
    (kind, name): sf.landscape(
        each, data, directions=kind, dimensions=1, points=31, span=0.5, progress=False
    )
    for kind in kinds
    for name, each in twins.items()
}

figure, axes = plt.subplots(1, 3, figsize=(10, 3.5), sharey=True)
for axis, kind in zip(axes, kinds, strict=True):
    for name, style in zip(twins, ("-", "--"), strict=True):
        line = lines[kind, name]
        axis.plot(line.axes[0], line.values, style, lw=2, label=name)
    axis.set(title=kind, xlabel="step, in lengths of the weights", yscale="log")
axes[0].set_ylabel("loss")
axes[0].legend()
figure.tight_layout()

# %%
# In numbers: the largest difference between the two lines, relative to the loss.

for kind in kinds:
    a, b = (lines[kind, name].values for name in twins)
    print(f"{kind:10} {float(((a - b).abs() / a).max()):.1e}")

# %%
# A plane, with `plot` for a picture and `save` for a file or a page.

plane = sf.landscape(model, data, directions="balanced", points=15, span=0.5, progress=False)
print(plane)
