"""
FAM, SAM and measuring in Hugging Face's Trainer
================================================

`SharpnessTrainer` is the Trainer of transformers that also takes an optimizer which perturbs the
weights, and a penalty. `SharpnessTrainerCallback` measures during training.

Needs `pip install saltflat[transformers]`. The model is a tiny BERT with random weights, the task
synthetic, so that nothing is downloaded.
"""

import tempfile

import matplotlib.pyplot as plt
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PrinterCallback,
    TrainingArguments,
)
from transformers.utils import logging

import saltflat as sf
from saltflat.integrations import SharpnessTrainer, SharpnessTrainerCallback

logging.set_verbosity_error()
logging.disable_progress_bar()

# %%
# Is token 5 in the sentence?

torch.manual_seed(0)
tokens = torch.randint(1, 20, (256, 8))
labels = (tokens == 5).any(1).long()
data = [{"input_ids": t, "labels": y} for t, y in zip(tokens, labels, strict=True)]

model = BertForSequenceClassification(
    BertConfig(
        vocab_size=20,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=8,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
)

# %%
# A batch for the callback is a dict with `labels`, as from the Trainer's own loaders. By default
# it measures the relative flatness of the last Linear, which costs less than a gradient on the
# data.

probe = [{"input_ids": tokens[:64], "labels": labels[:64]}]
trainer = SharpnessTrainer(
    model=model,
    args=TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        num_train_epochs=10,
        per_device_train_batch_size=32,
        learning_rate=5e-3,
        logging_strategy="epoch",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    ),
    train_dataset=data,
    perturb=lambda base: sf.SAM(base, rho=0.05),
    fam=sf.FAM(model, layer="classifier", share=0.05),
    callbacks=[SharpnessTrainerCallback(probe, budget=None)],
)
trainer.remove_callback(PrinterCallback)  # what it prints is printed below
_ = trainer.train()

# %%
for entry in trainer.state.log_history:
    for name, value in entry.items():
        if name == "loss" or name.startswith("saltflat/"):
            print(f"epoch {entry['epoch']:.0f}: {name} = {value:.4g}")

# %%
name = "saltflat/relative_flatness"
found = [entry for entry in trainer.state.log_history if name in entry]
figure, axis = plt.subplots(figsize=(7, 3.5))
axis.plot([entry["epoch"] for entry in found], [entry[name] for entry in found], "o-")
axis.set(xlabel="epoch", ylabel="relative flatness of the classifier")
figure.tight_layout()

# %%
# After training, anything else that is wanted: the model is an `nn.Module` like any other.

model.eval()
report = sf.measure(model, probe, measures=["relative_flatness", "fisher_rao_norm"], progress=False)
print(report)
