"""
Comparing checkpoints
=====================

Which of several networks lies in the flatter minimum? `sf.compare` measures them on the same data
and puts them side by side. It says so where the numbers cannot be compared: other data, another
loss, another number of samples.
"""

import copy

import matplotlib.pyplot as plt
import torch

import saltflat as sf
from saltflat.datasets import digits
from saltflat.zoo import mlp

x, y, test_x, test_y = digits()


def train(batch_size, epochs, keep=()):
    """The last network, and copies of it after the epochs in `keep`."""
    torch.manual_seed(0)
    model, kept = mlp([64, 32, 10]), {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(1, epochs + 1):
        for rows in torch.randperm(len(x)).split(batch_size):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
        if epoch in keep:
            kept[epoch] = copy.deepcopy(model)
    return model, kept


# %%
# One network trained with small batches, one with large ones.

small, checkpoints = train(batch_size=32, epochs=20, keep=(1, 2, 5, 10, 20))
large, _ = train(batch_size=512, epochs=100)
comparison = sf.compare({"batch 32": small, "batch 512": large}, (x, y), progress=False)
print(comparison)

# %%
# Numbers of different data are not comparable, and are not passed off as such:

mixed = sf.compare(
    {"batch 32": small, "batch 512": large},
    {"batch 32": (x, y), "batch 512": (x[:500], y[:500])},
    measures=["hessian_trace"],
    progress=False,
)
for problem in mixed.problems:
    print(problem)

# %%
# Along one training: the trace of the Hessian, and its minimum over the rescalings that keep the
# function. `report.to_pandas()` gives the same numbers as a table.

names = ["hessian_trace", "minimum_sharpness", "neuronwise_minimum_sharpness"]
course = sf.compare(
    {f"epoch {epoch}": model for epoch, model in checkpoints.items()},
    (x, y),
    measures=names,
    progress=False,
)
figure, axis = plt.subplots(figsize=(7, 4))
for name in names:
    axis.semilogy(list(checkpoints), [report[name].value for report in course.values()], "o-")
axis.set(xlabel="epoch", ylabel="value")
axis.legend(names)
figure.tight_layout()

# %%
# A report can be kept: it has hashes of the model and of the data, versions, seeds and times in
# it.

report = comparison["batch 32"]
path = report.save("batch-32.json")
print(sf.Report.load(path) == report)
print(report.to_pandas()[["value", "exact", "stderr"]])
