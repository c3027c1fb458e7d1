"""The Trainer of transformers with SAM, FAM and the callback, against loops written by hand.

The model is a stand-in: a BERT of two small layers with random weights. So are the data: pairs of
token sequences that are about the same topic or not, in the place of RTE. The slow test takes a
real model and the real RTE from SALTFLAT_MINILM and SALTFLAT_RTE, two folders.
"""

from __future__ import annotations

import csv
import importlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

import saltflat as sf
from saltflat.integrations.transformers import (
    SharpnessTrainer,
    SharpnessTrainerCallback,
    SharpnessTrainerMixin,
)
from saltflat.training.fam import FAM
from saltflat.training.sam import SAM

STEPS = 3


def stand_in(dropout: float = 0.0, hidden: int = 8) -> BertForSequenceClassification:
    torch.manual_seed(1)
    config = BertConfig(  # type: ignore[call-arg]
        vocab_size=20,
        hidden_size=hidden,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=hidden,
        max_position_embeddings=16,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=0.0,
        num_labels=2,
    )
    return BertForSequenceClassification(config)


def stand_in_pairs(count: int, seed: int = 0) -> list[dict[str, Tensor]]:
    """Two sentences of one topic (1) or of two (0); a topic is a half of the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    topic = torch.randint(2, (count, 2), generator=generator)
    words = torch.randint(8, (count, 6), generator=generator)
    start, end = torch.full((count, 1), 1), torch.full((count, 1), 2)
    first, second = 4 + words[:, :4] + 8 * topic[:, :1], 4 + words[:, 4:] + 8 * topic[:, 1:]
    ids = torch.cat([start, first, end, second, end], 1)
    kinds = (torch.arange(9) > 5).long()
    labels = (topic[:, 0] == topic[:, 1]).long()
    return [
        {"input_ids": ids[i], "token_type_ids": kinds, "labels": labels[i]} for i in range(count)
    ]


DATA = stand_in_pairs(24)
PROBE = [default_data_collator(DATA[:8])]
CLASSIFIER = ["classifier.weight"]


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    defaults = {
        "per_device_train_batch_size": 8,
        "max_steps": STEPS,
        "optim": "sgd",
        "learning_rate": 0.3,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "logging_steps": 1,
        "train_sampling_strategy": "sequential",
    }
    return TrainingArguments(output_dir=str(folder), **{**defaults, **options})


def train(
    folder: Path,
    model: nn.Module,
    *,
    rho: float | None = 0.1,
    kind: type[Trainer] = SharpnessTrainer,
    data: Any = DATA,
    callbacks: Any = None,
    scaler: Any = None,
    resume: bool = False,
    others: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    extra = dict(others or {})
    if rho is not None:
        extra["perturb"] = lambda base: SAM(base, rho=rho)
    trainer = kind(
        model, arguments(folder, **options), train_dataset=data, callbacks=callbacks, **extra
    )
    trainer.accelerator.scaler = scaler or trainer.accelerator.scaler
    torch.manual_seed(3)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def by_hand(
    strength: float = 0.0, rho: float = 0.1, clip: float | None = None
) -> BertForSequenceClassification:
    """Plain SGD and SAM as the paper has it, on whole batches of 8."""
    model = stand_in().double()
    fam = FAM(model, "classifier", strength)
    for step in range(STEPS):
        batch = default_data_collator(DATA[8 * step : 8 * step + 8])
        labels = batch.pop("labels")

        def gradient(batch: Any = batch, labels: Tensor = labels) -> list[Tensor]:
            logits = model(**batch).logits
            loss = F.cross_entropy(logits, labels) + fam(labels)
            return list(torch.autograd.grad(loss, list(model.parameters())))

        g = gradient()
        norm = torch.cat([each.flatten() for each in g]).norm()
        with torch.no_grad():
            kept = [p.clone() for p in model.parameters()]
            for p, each in zip(model.parameters(), g, strict=True):
                p.add_(rho * each / norm)
        g = gradient()
        norm = torch.cat([each.flatten() for each in g]).norm()
        shrink = 1.0 if clip is None else min(1.0, clip / (float(norm) + 1e-6))  # as torch has it
        with torch.no_grad():
            for p, before, each in zip(model.parameters(), kept, g, strict=True):
                p.copy_(before - 0.3 * shrink * each)
    return model


def distance(a: nn.Module, b: nn.Module) -> float:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return max(float((p - q).detach().abs().max()) for p, q in pairs)


# SAM and FAM


@pytest.mark.parametrize("strength", [0.0, 0.5], ids=["SAM", "SAM and FAM"])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_against_a_loop(tmp_path: Path, strength: float, parts: int) -> None:
    """The same with the batch in several micro-batches."""
    model = stand_in().double()
    model.accepts_loss_kwargs = False  # or this version would not divide by the micro-batches
    fam = FAM(model, "classifier", strength)
    options = {"per_device_train_batch_size": 8 // parts, "gradient_accumulation_steps": parts}
    trainer = train(tmp_path, model, others={"fam": fam}, **options)
    assert distance(model, by_hand(strength)) < 1e-10
    assert distance(model, by_hand(strength, rho=0.0)) > 1e-4
    assert distance(model, by_hand(strength + 0.5)) > 1e-4
    assert trainer.state.global_step == STEPS


def test_the_penalty_and_the_loss_have_one_measure(tmp_path: Path) -> None:
    """The loss of a BERT classifier is a mean although it says that it takes loss arguments."""
    model = stand_in().double()
    fam = FAM(model, "classifier", 0.5)
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    train(tmp_path, model, others={"fam": fam}, **options)
    assert distance(model, by_hand(0.5)) < 1e-10


def test_fam_without_sam(tmp_path: Path) -> None:
    model = stand_in().double()
    train(tmp_path, model, rho=None, others={"fam": FAM(model, "classifier", 0.5)})
    assert distance(model, by_hand(0.5, rho=0.0)) < 1e-10


def test_neither_is_the_plain_trainer(tmp_path: Path) -> None:
    model, plain = stand_in(0.3), stand_in(0.3)
    train(tmp_path, model, rho=None)
    train(tmp_path, plain, rho=None, kind=Trainer)
    assert distance(model, plain) == 0.0


def test_clipping_is_of_the_gradient_of_the_step(tmp_path: Path) -> None:
    model = stand_in().double()
    train(tmp_path, model, max_grad_norm=0.05)
    assert distance(model, by_hand(clip=0.05)) < 1e-10
    assert distance(model, by_hand()) > 1e-4


def test_grad_scaler(tmp_path: Path) -> None:
    """As with fp16, which needs a GPU; the scale must cancel."""
    model = stand_in().double()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    train(tmp_path, model, scaler=scaler)
    assert scaler.get_scale() == 2.0**10
    assert distance(model, by_hand()) < 1e-10


def test_bfloat16(tmp_path: Path) -> None:
    model = stand_in()
    train(tmp_path, model, bf16=True, others={"fam": FAM(model, "classifier", 0.5)})
    assert distance(model, by_hand(0.5)) < 0.02
    assert distance(stand_in(), by_hand(0.5)) > 0.05


def test_all_passes_have_the_same_dropout(tmp_path: Path) -> None:
    model, masks = stand_in(dropout=0.5), []
    model.dropout.register_forward_hook(lambda m, args, out: masks.append(out == 0))
    train(tmp_path, model, per_device_train_batch_size=4, gradient_accumulation_steps=2)
    assert len(masks) == 4 * STEPS
    for first in range(0, len(masks), 4):
        a, b, again_a, again_b = masks[first : first + 4]
        assert torch.equal(a, again_a)
        assert torch.equal(b, again_b)
        assert not torch.equal(a, b)


def test_an_optimizer_that_is_handed_over(tmp_path: Path) -> None:
    model = stand_in().double()
    optimizer = SAM(torch.optim.SGD(model.parameters(), lr=0.3), rho=0.1)
    train(tmp_path, model, rho=None, others={"optimizers": (optimizer, None)})
    assert distance(model, by_hand()) < 1e-10


def test_resuming(tmp_path: Path) -> None:
    options = {"optim": "adamw_torch", "learning_rate": 0.01, "save_steps": 2}
    model, again = stand_in(0.3), stand_in(0.3)
    train(tmp_path, model, save_strategy="steps", **options)
    for p in again.parameters():
        p.data.zero_()
    (tmp_path / f"checkpoint-{STEPS}").rename(tmp_path / "end")
    train(tmp_path, again, save_strategy="steps", resume=True, **options)
    assert distance(model, again) < 1e-7


def test_evaluation_has_no_penalty(tmp_path: Path) -> None:
    model = stand_in()
    fam = FAM(model, "classifier", 100.0)
    trainer = SharpnessTrainer(model, arguments(tmp_path), eval_dataset=DATA, fam=fam)
    plain = Trainer(stand_in(), arguments(tmp_path), eval_dataset=DATA).evaluate()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(plain["eval_loss"], rel=1e-5)


def test_fine_tuning_on_the_stand_in_for_rte(tmp_path: Path) -> None:
    """SAM and FAM on the classifier, until pairs that were not seen are told apart."""
    model = stand_in(hidden=32)
    fam = FAM(model, "classifier", 0.01)
    probe = {"every_n_steps": 50, "parameters": CLASSIFIER, "budget": None}
    callback = SharpnessTrainerCallback(PROBE, ["relative_flatness"], **probe)
    options = {"optim": "adamw_torch", "learning_rate": 3e-3, "per_device_train_batch_size": 32}
    train(
        tmp_path,
        model,
        rho=0.01,
        data=stand_in_pairs(256),
        others={"fam": fam},
        callbacks=[callback],
        max_steps=150,
        **options,
    )
    batch = default_data_collator(stand_in_pairs(256, seed=1))
    labels = batch.pop("labels")
    found = model.eval()(**batch).logits.argmax(1)
    assert float((found == labels).double().mean()) > 0.9
    assert [record.step for record in callback.history] == [50, 100, 150]


# what is refused


def test_without_the_mixin_sam_refuses(tmp_path: Path) -> None:
    model = stand_in()
    optimizer = SAM(torch.optim.SGD(model.parameters(), lr=0.3))
    with pytest.raises(sf.InvalidValue, match="only one gradient"):
        train(tmp_path, model, rho=None, kind=Trainer, others={"optimizers": (optimizer, None)})


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"perturb": 0.1}, "perturb must be a function"),
        ({"fam": 0.1}, "fam must be a saltflat FAM"),
        ({"perturb": lambda base: base}, "perturb must return"),
    ],
)
def test_wrong_arguments(tmp_path: Path, others: dict[str, Any], message: str) -> None:
    with pytest.raises(sf.InvalidType, match=message):
        train(tmp_path, stand_in(), rho=None, others=others)


def test_fam_needs_a_loss_whose_measure_is_known(tmp_path: Path) -> None:
    model = stand_in()
    others = {"fam": FAM(model, "classifier", 0.1), "compute_loss_func": lambda *a, **k: None}
    with pytest.raises(sf.InvalidValue, match="compute_loss_func"):
        train(tmp_path, model, others=others, gradient_accumulation_steps=2)


def test_fam_needs_labels(tmp_path: Path) -> None:
    model = stand_in()
    trainer = SharpnessTrainer(model, arguments(tmp_path), fam=FAM(model, "classifier", 0.1))
    trainer.compute_loss_func = lambda outputs, labels, **_: outputs.logits.sum()
    model.train()
    with pytest.raises(sf.InvalidValue, match="has no 'labels'"):
        trainer.compute_loss(model, {"input_ids": DATA[0]["input_ids"][None]})


@pytest.mark.parametrize("kind", ["deepspeed", "fsdp"])
def test_no_shards(tmp_path: Path, kind: str) -> None:
    class Sharded(SharpnessTrainer):
        def training_step(self, *arguments: Any, **options: Any) -> Tensor:
            setattr(self, f"is_{kind}_enabled", True)
            return super().training_step(*arguments, **options)

    with pytest.raises(sf.InvalidValue, match="use DDP"):
        train(tmp_path, stand_in(), kind=Sharded)


def test_an_error_leaves_the_weights(tmp_path: Path) -> None:
    calls = []

    class Failing(SharpnessTrainer):
        def compute_loss(self, *arguments: Any, **options: Any) -> Any:
            calls.append(1)
            if len(calls) == 2:
                raise KeyboardInterrupt
            return super().compute_loss(*arguments, **options)

    model = stand_in()
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, model, kind=Failing)
    assert distance(model, stand_in()) == 0.0


# the callback


@pytest.mark.parametrize("kind", [SharpnessTrainer, Trainer])
def test_callback(tmp_path: Path, kind: type[Trainer]) -> None:
    model, plain = stand_in(0.3), stand_in(0.3)
    names = ["hessian_trace", "relative_flatness"]
    options = {"parameters": CLASSIFIER, "budget": None, "path": tmp_path / "log.jsonl"}
    callback = SharpnessTrainerCallback(PROBE, names, **options)
    assert callback.history == []
    trainer = train(tmp_path, model, rho=None, kind=kind, callbacks=[callback], max_steps=6)
    train(tmp_path, plain, rho=None, kind=kind, max_steps=6)
    assert distance(model, plain) == 0.0
    assert [(r.step, r.epoch) for r in callback.history] == [(3, 1), (6, 2)]
    expected = sf.measure(model, PROBE, measures=names, parameters=CLASSIFIER)
    logs = [log for log in trainer.state.log_history if "saltflat/hessian_trace" in log]
    assert [log["step"] for log in logs] == [3, 6]
    # and the trainer still logs what it logs
    assert [log["step"] for log in trainer.state.log_history if "loss" in log] == [*range(1, 7)]
    for name in names:
        assert callback.history[-1].values[name] == pytest.approx(expected[name].value, rel=1e-5)
        assert logs[-1][f"saltflat/{name}"] == callback.history[-1].values[name]


def test_callback_by_default_is_affordable_and_not_silent(tmp_path: Path) -> None:
    """Of the classifier alone, with what it does told to whoever asks."""
    model, told = stand_in(), []
    callback = SharpnessTrainerCallback(PROBE, progress=lambda step, *_: told.append(step))
    train(tmp_path, model, rho=None, kind=Trainer, callbacks=[callback])
    (record,) = callback.history
    exact = sf.measure(model, PROBE, measures=["relative_flatness"], parameters=CLASSIFIER)
    assert dict(record.values) == {
        "relative_flatness": pytest.approx(exact["relative_flatness"].value, rel=1e-5)
    }
    assert "relative_flatness" in told


def test_callback_logs_where_the_trainer_does(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model = stand_in()
    options = {"every_n_steps": 2, "parameters": CLASSIFIER, "budget": 1e-9}
    callback = SharpnessTrainerCallback(PROBE, ["relative_flatness"], **options)
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(tmp_path)
    try:
        trainer = train(
            tmp_path, model, callbacks=[callback], report_to=["tensorboard"], max_steps=4
        )
    finally:
        del os.environ["TENSORBOARD_LOGGING_DIR"]
    events = EventAccumulator(str(tmp_path)).Reload()
    tag = next(t for t in events.Tags()["scalars"] if t.endswith("saltflat/relative_flatness"))
    assert [event.step for event in events.Scalars(tag)] == [2]
    assert [log["step"] for log in trainer.state.log_history if "loss" in log] == [1, 2, 3, 4]
    assert [r.skipped is None for r in callback.history] == [True, False]
    (skip,) = [log for log in trainer.state.log_history if "saltflat/skipped" in log]
    assert "saltflat/relative_flatness" not in skip  # no value of an earlier step


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    integrations = importlib.import_module("saltflat.integrations")
    assert integrations.SharpnessTrainerMixin is SharpnessTrainerMixin
    for missing in ("transformers.trainer", "accelerate"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, missing, None)
            patch.delitem(sys.modules, "saltflat.integrations.transformers")
            with pytest.raises(sf.MissingDependency, match=r"pip install saltflat\[transformers\]"):
                _ = integrations.SharpnessTrainer


# the real thing, where it is


def rte(path: Path, tokenizer: Any, count: int) -> list[dict[str, Tensor]]:
    """The first rows of a file of RTE: index, sentence1, sentence2, label, separated by tabs."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))[:count]
    firsts, seconds = [row["sentence1"] for row in rows], [row["sentence2"] for row in rows]
    options = {"truncation": True, "max_length": 64, "padding": "max_length"}
    encoded = tokenizer(firsts, seconds, return_tensors="pt", **options)
    labels = torch.tensor([row["label"] == "entailment" for row in rows]).long()
    return [
        {**{name: values[i] for name, values in encoded.items()}, "labels": labels[i]}
        for i in range(len(rows))
    ]


@pytest.mark.slow
@pytest.mark.skipif(
    "SALTFLAT_MINILM" not in os.environ or "SALTFLAT_RTE" not in os.environ,
    reason="needs SALTFLAT_MINILM (a folder that transformers loads) and SALTFLAT_RTE (of tsv)",
)
@pytest.mark.parametrize("rho", [None, 0.05], ids=["FAM", "SAM and FAM"])
def test_fine_tuning_on_rte(tmp_path: Path, rho: float | None) -> None:
    folder, files = os.environ["SALTFLAT_MINILM"], Path(os.environ["SALTFLAT_RTE"])
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=2, local_files_only=True
    )
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    fam = FAM(model, "classifier", 0.1)
    probe = [default_data_collator(rte(files / "dev.tsv", tokenizer, 16))]
    callback = SharpnessTrainerCallback(
        probe,
        ["relative_flatness"],
        every_n_steps=20,
        budget=None,
        parameters=CLASSIFIER,
    )
    data = rte(files / "train.tsv", tokenizer, 48)
    trainer = train(
        tmp_path,
        model,
        rho=rho,
        data=data,
        others={"fam": fam},
        callbacks=[callback],
        optim="adamw_torch",
        learning_rate=2e-4,
        max_steps=60,
    )
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    assert sum(losses[-6:]) < 0.5 * sum(losses[:6])  # the slice is learned by heart
    assert [record.step for record in callback.history] == [20, 40, 60]
    assert all(record.values for record in callback.history)
