"""
A transformer: estimates that carry their errors
================================================

Attention and layer normalisation are not piecewise linear, so most of a transformer's Hessian
cannot be had by the Gauss–Newton form. Small blocks are written out; for the others noise is
drawn until the standard error is small enough, and the error is part of the answer.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn

import saltflat as sf


class Block(nn.Module):
    """Attention with two heads, and a feed-forward network with GELU."""

    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        heads = self.qkv(self.norm1(x)).unflatten(2, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*heads)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Classifier(nn.Module):
    """Two blocks over short sequences, the mean over positions, two classes."""

    def __init__(self, tokens=12, width=16, length=8):
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.positions = nn.Parameter(0.1 * torch.randn(length, width))
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.head = nn.Linear(width, 2)

    def forward(self, tokens):
        return self.head(self.blocks(self.embedding(tokens) + self.positions).mean(1))


# %%
# The task: is the first token seen again later in the sequence?

torch.manual_seed(0)
x = torch.randint(12, (256, 8))
y = (x[:, 1:] == x[:, :1]).any(1).long()
model = Classifier()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for _ in range(60):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
print(f"training loss {loss.item():.3f}")

# %%
# Each parameter says how its number came about. With `tolerance=0.1` draws go on until the
# standard error of a block is at most 10 % of its own trace, or 2 % of the Gauss–Newton trace of
# the network.

trace = sf.trace(model, (x, y), tolerance=0.1, progress=False)
for name, detail in trace.details.items():
    error = "exact" if detail.exact else f"± {detail.stderr:.2g}"
    print(f"{name:24} {detail.value:9.3g}  {error:10} {detail.rule}")

# %%
# The Gauss–Newton trace has one direction a sample here, so it is exact. It is another number,
# and is called by its own name.

gauss_newton = sf.trace(model, (x, y), curvature="ggn", progress=False)
print(f"Hessian       {trace.total:.4g} ± {trace.stderr:.2g}")
print(f"Gauss–Newton  {gauss_newton.total:.4g}, exact: {gauss_newton.exact}")

# %%
names = [name for name, p in model.named_parameters() if p.ndim == 2]
figure, axis = plt.subplots(figsize=(8, 4.5))
places = torch.arange(len(names))
errors = [trace.details[name].stderr for name in names]
axis.errorbar(places, [trace[n] for n in names], [2 * e for e in errors], fmt="o", capsize=4)
axis.plot(places, [gauss_newton[n] for n in names], "x")
axis.set_xticks(places, names, rotation=45, ha="right")
axis.legend(["Gauss–Newton trace, exact", "Hessian trace ± 2 standard errors"])
figure.tight_layout()

# %%
# The rescalings that keep its function: queries against keys, values against what follows them,
# units of the feed-forward layers, and what layer normalisation leaves free.

group = sf.symmetries(model, x[:4])
print(group)
