"""
Balancing a network
===================

Of all networks that compute the same function by other scales, one has the least Hessian trace.
`group.balance` finds it: a convex problem, solved to a stated gap. Here a network is first put
out of balance, by factors of up to 30 a unit, and then balanced.
"""

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

import saltflat as sf
from saltflat.datasets import digits
from saltflat.zoo import mlp

torch.manual_seed(0)
x, y, test_x, test_y = digits()
model = mlp([64, 32, 32, 10])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for _ in range(10):
    for rows in torch.randperm(len(x)).split(64):
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
model = model.double()
x, test_x = x.double(), test_x.double()

# %%
# Three networks, one function.

group = sf.symmetries(model, x[:8])
scattered = group.random(seed=0, spread=30.0)(model)
balanced = group.balance(scattered, (x, y))
twins = {"trained": model, "scattered": scattered, "balanced": balanced}

outputs = model(test_x).detach()
for name, twin in twins.items():
    change = (twin(test_x).detach() - outputs).abs().max() / outputs.abs().max()
    trace = sf.trace(twin, (x, y)).total
    print(f"{name:10} Tr H = {trace:10.4f}   outputs moved by {float(change):.0e}")

# %%
# The trace of the balanced network is the neuron-wise minimum sharpness of all three.

names = ["hessian_trace", "minimum_sharpness", "neuronwise_minimum_sharpness"]
print(sf.compare(twins, (x, y), measures=names, progress=False))

# %%
# Gradient descent does see the scales: at one learning rate the three go on differently.


def course(twin, steps=60):
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.05)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(twin(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


figure, axis = plt.subplots(figsize=(7, 4))
for twin in twins.values():
    axis.semilogy(course(twin))
axis.set(xlabel="further steps of gradient descent, learning rate 0.05", ylabel="training loss")
axis.legend(list(twins))
figure.tight_layout()
