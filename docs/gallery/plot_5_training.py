"""
FAM and SAM in plain PyTorch
============================

SAM takes its gradients where the loss is highest nearby (Foret et al. 2021). FAM adds the
relative flatness of one layer to the loss (Adilova et al. 2023). Both go into a loop that is
there already: one line for the optimizer or the penalty, one where it is used.

Small networks, one data set and a fifth of the labels random: an example of how to write it down,
not evidence for one or the other. `make demo` repeats such a comparison over five seeds.
"""

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

import saltflat as sf
from saltflat.datasets import digits
from saltflat.zoo import mlp

x, y, test_x, test_y = digits()
noise = torch.Generator().manual_seed(0)
wrong = torch.rand(len(y), generator=noise) < 0.2
y = torch.where(wrong, torch.randint(10, y.shape, generator=noise), y)
probe = x[:300], y[:300]  # what flatness is measured on


def run(name, make):
    """Train with what `make` returns for a model: a function that takes one step on a batch."""
    torch.manual_seed(0)
    model = mlp([64, 32, 10])
    step = make(model)
    monitor = sf.Monitor(model, probe, measures=["minimum_sharpness"], budget=None)
    for _ in range(10):
        for rows in torch.randperm(len(x)).split(64):
            step(x[rows], y[rows])
        monitor.epoch()
    accuracy = (model(test_x).argmax(1) == test_y).float().mean()
    print(f"{name}: test accuracy {float(accuracy):.3f}")
    return [record.values["minimum_sharpness"] for record in monitor.history]


# %%
# Plain SGD, to compare with.


def sgd(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(inputs, targets):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    return step


# %%
# SAM wraps any torch optimizer. It needs a closure, since each step takes two passes.


def sam(model):
    optimizer = sf.SAM(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), rho=0.1)

    def step(inputs, targets):
        def closure():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            return loss

        optimizer.step(closure)

    return step


# %%
# FAM is a term of the loss. It belongs to the forward pass that was made last. `share` is the
# largest part of the objective that it may have.


def fam(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    last = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)][
        -1
    ]
    penalty = sf.FAM(model, layer=last, share=0.05)

    def step(inputs, targets):
        optimizer.zero_grad()
        (F.cross_entropy(model(inputs), targets) + penalty(targets)).backward()
        optimizer.step()

    return step


# %%
courses = {name: run(name, make) for name, make in {"SGD": sgd, "SAM": sam, "FAM": fam}.items()}

figure, axis = plt.subplots(figsize=(7, 4))
for values in courses.values():
    axis.semilogy(range(1, 11), values, "o-")
axis.set(xlabel="epoch", ylabel="minimum sharpness")
axis.legend(list(courses))
figure.tight_layout()
