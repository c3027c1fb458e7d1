"""
FAM, SAM and measuring in Lightning
===================================

`SharpnessCallback` measures during training and logs what it finds as `saltflat/<measure>`. SAM
is returned from `configure_optimizers`; `SharpnessModuleMixin` makes gradient accumulation and
mixed precision right with it. FAM is a term of the loss, as everywhere.

Needs `pip install saltflat[lightning]`.
"""

import logging
import warnings

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

import saltflat as sf
from saltflat.datasets import digits
from saltflat.integrations import SharpnessCallback, SharpnessModuleMixin
from saltflat.zoo import mlp

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)  # no notes on the machine
warnings.filterwarnings("ignore", message=".*LeafSpec")  # Lightning's own use of torch


class Classifier(SharpnessModuleMixin, LightningModule):
    def __init__(self):
        super().__init__()
        self.net = mlp([64, 32, 10])
        last = [n for n, m in self.net.named_modules() if isinstance(m, torch.nn.Linear)][-1]
        self.fam = sf.FAM(self.net, layer=last, share=0.05)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, index):
        x, y = batch
        return F.cross_entropy(self.net(x), y) + self.fam(y)

    def configure_optimizers(self):
        return sf.SAM(torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9), rho=0.05)


# %%
# Two micro-batches a step: both of SAM's passes go over both of them. The callback measures a
# fixed part of the data after every epoch, and writes what it finds to a file too.

torch.manual_seed(0)
x, y, test_x, test_y = digits()
loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
callback = SharpnessCallback((x[:200], y[:200]), path="lightning.jsonl", budget=None, module="net")
module = Classifier()
trainer = Trainer(
    max_epochs=4,
    accumulate_grad_batches=2,
    callbacks=[callback],
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(module, loader)

# %%
# What was logged last is in `trainer.callback_metrics`, where early stopping and checkpoints
# look.

for name, value in sorted(trainer.callback_metrics.items()):
    print(f"{name}: {float(value):.4g}")
print(f"test accuracy {float((module(test_x).argmax(1) == test_y).float().mean()):.3f}")

# %%
# The course is in the file, one record a line.

with open("lightning.jsonl") as lines:
    print(lines.readline()[:200], "…")
