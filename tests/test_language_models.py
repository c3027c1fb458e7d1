"""Language models of transformers as they are: labels, batches, precision, checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dense import Dense
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

import saltflat as sf
from saltflat.risk import Risk

transformers = pytest.importorskip("transformers")

VOCABULARY = 7
NOTE = "compared with the next token"


def gpt2(**options: Any) -> nn.Module:
    config = transformers.GPT2Config(
        n_layer=1, n_embd=4, n_head=2, vocab_size=VOCABULARY, n_positions=8, **options
    )
    return transformers.GPT2LMHeadModel(config)


def llama(**options: Any) -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=4,
        intermediate_size=6,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=VOCABULARY,
        max_position_embeddings=8,
        **options,
    )
    return transformers.LlamaForCausalLM(config)


def _bert(kind: str, **options: Any) -> nn.Module:
    config = transformers.BertConfig(
        hidden_size=4,
        intermediate_size=6,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=8,
        **options,
    )
    return getattr(transformers, kind)(config)


def xlnet() -> nn.Module:
    config = transformers.XLNetConfig(
        n_layer=1, d_model=4, n_head=2, d_inner=4, vocab_size=VOCABULARY
    )
    return transformers.XLNetLMHeadModel(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        d_model=4, d_kv=2, d_ff=6, num_layers=1, num_heads=2, vocab_size=VOCABULARY
    )
    config.decoder_start_token_id = 0
    return transformers.T5ForConditionalGeneration(config)


def bart() -> nn.Module:
    config = transformers.BartConfig(
        d_model=4,
        encoder_layers=1,
        decoder_layers=1,
        encoder_ffn_dim=6,
        decoder_ffn_dim=6,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=8,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
        decoder_start_token_id=2,
    )
    return transformers.BartForConditionalGeneration(config)


SHIFTED = {
    "gpt2": gpt2,
    "llama": llama,
    "bert as a decoder": lambda: _bert("BertLMHeadModel", is_decoder=True),
}
PLAIN = {
    "masked": lambda: _bert("BertForMaskedLM"),
    "xlnet": xlnet,  # its own loss does not shift
    "t5": t5,
    "bart": bart,
}


def built(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make().double().eval()
        with torch.no_grad():
            for p in model.parameters():  # so that every block is felt
                p.add_(0.3 * torch.randn_like(p))
    return model


def batch(start: int = 0, stop: int = 4) -> Any:
    """Tokens with labels, some ignored, all of the third sample's among them."""
    g = torch.Generator().manual_seed(1)
    x = torch.randint(3, VOCABULARY, (4, 5), generator=g)
    y = x.clone()
    y[0, :2] = y[2] = -100
    mask = torch.ones_like(x)
    part = slice(start, stop)
    fields = {"input_ids": x[part], "attention_mask": mask[part], "labels": y[part]}
    return transformers.BatchEncoding(fields)


def risk_of(model: nn.Module, data: Any, **options: Any) -> tuple[float, list[str]]:
    """The value of the risk, and its notes."""
    risk, total, divisor = Risk(model, data, **options), 0.0, 0.0
    with risk.session(), torch.no_grad():
        for each in risk.batches():
            outputs = risk.forward(each)
            total += float(risk.loss.total(outputs, each.targets))
            divisor += risk.loss.normaliser(outputs, each.targets)
    return total / divisor, risk.notes


@pytest.mark.parametrize("name", [*SHIFTED, *PLAIN])
def test_the_risk_is_the_models_own_loss(name: str) -> None:
    model = built({**SHIFTED, **PLAIN}[name])
    value, notes = risk_of(model, batch())
    with torch.no_grad():
        own = float(model(**batch()).loss)  # in float32, for some of them
    assert value == pytest.approx(own, rel=1e-6)
    assert any(NOTE in note for note in notes) == (name in SHIFTED)
    # Uneven batches, the mean over all tokens: what the model says of all samples together.
    assert risk_of(model, [batch(0, 1), batch(1, 4)])[0] == pytest.approx(value, rel=1e-12)


def test_the_two_losses_are_told_apart() -> None:
    model = built(gpt2)
    own, data = float(model(**batch()).loss.detach()), dict(batch())
    plain = F.cross_entropy(model(data["input_ids"]).logits.flatten(0, 1), data["labels"].flatten())
    assert abs(float(plain.detach()) - own) > 1e-2 * own


def next_token(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@pytest.mark.parametrize("make", [gpt2, llama], ids=["gpt2", "llama"])
def test_curvature_is_that_of_the_next_token(make) -> None:
    model, data = built(make), dict(batch())
    labels = data.pop("labels")
    dense = Dense(model, data, labels, next_token)
    exact = dense.blocks(dense.hessian)
    # The rotary angles and the norms of Llama are computed in float32.
    rel = 1e-9 if make is gpt2 else 1e-5
    last = ["transformer.ln_f.weight"] if make is gpt2 else ["model.norm.weight", "lm_head.weight"]
    result = sf.trace(model, batch(), parameters=last)
    assert result.exact
    assert any(NOTE in note for note in result.notes)
    for name in last:
        assert result[name] == pytest.approx(float(exact[name].trace()), rel=rel)
    v = torch.randn(len(dense.hessian), generator=torch.Generator().manual_seed(3)).double()
    product = sf.hessian(model, [batch(0, 2), batch(2, 4)]) @ v
    torch.testing.assert_close(product, dense.hessian @ v, rtol=100 * rel, atol=10 * rel)


def test_labels_that_are_shifted_already() -> None:
    model, data = built(gpt2), dict(batch())
    data["labels"] = F.pad(data["labels"][:, 1:], (0, 1), value=-100)
    value, notes = risk_of(model, data)
    assert value == pytest.approx(float(model(**batch()).loss.detach()), rel=1e-6)
    assert not any(NOTE in note for note in notes)


def test_a_first_batch_without_labels_tells_nothing() -> None:
    model = built(gpt2)
    value, notes = risk_of(model, [batch(2, 3), batch(0, 2), batch(3, 4)])
    assert value == pytest.approx(float(model(**batch()).loss.detach()), rel=1e-6)
    assert any(NOTE in note for note in notes)


def test_batches_of_both_kinds_are_refused() -> None:
    other = dict(batch(2, 4))
    other["labels"] = other["input_ids"].roll(-1, 1)
    with pytest.raises(sf.DataError, match="of all batches, or of none"):
        sf.trace(built(gpt2), [batch(0, 2), other])


def test_a_loss_of_the_users_own_gets_the_labels_as_they_are() -> None:
    model, seen = built(gpt2), []

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        seen.append(labels)
        return next_token(outputs, labels)

    data = {k: v[[0, 1, 3]] for k, v in batch().items()}
    result = sf.trace(model, data, loss, parameters=["transformer.ln_f.weight"])
    whole = sf.trace(model, data, parameters=["transformer.ln_f.weight"])
    assert torch.equal(seen[0][0], data["labels"][0])
    assert result.total == pytest.approx(whole.total, rel=0.3)  # its mean is one over tokens


def test_classification_is_untouched() -> None:
    config = transformers.GPT2Config(
        n_layer=1, n_embd=4, n_head=2, vocab_size=VOCABULARY, n_positions=8, pad_token_id=0
    )
    model = built(lambda: transformers.GPT2ForSequenceClassification(config))
    data = {**batch(), "labels": torch.tensor([0, 1, 1, 0])}
    value, notes = risk_of(model, data)
    assert value == pytest.approx(float(model(**data).loss.detach()), rel=1e-6)
    assert not any(NOTE in note for note in notes)


class Tagger(nn.Module):
    """Takes a batch of transformers without being one of its models."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.fc = nn.Embedding(VOCABULARY, 3), nn.Linear(3, VOCABULARY)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        return {"logits": self.fc(self.embedding(input_ids).relu() * attention_mask[..., None])}


def loader() -> DataLoader[Any]:
    items = [{k: v[0] for k, v in batch(i, i + 1).items()} for i in range(4)]
    encode = transformers.BatchEncoding
    return DataLoader(items, batch_size=2, collate_fn=lambda few: encode(default_collate(few)))


FORMS = {
    "batch": batch,
    "feature": lambda: transformers.BatchFeature(dict(batch())),
    "list": lambda: [batch(0, 1), batch(1, 4)],
    "loader": loader,
}
DOORS: dict[str, Callable[..., Any]] = {
    "trace": lambda *a: sf.trace(*a).total,
    "diagonal": lambda *a: float(sf.diagonal(*a)["fc.weight"].sum()),
    "eigenvalues": lambda *a: float(sf.eigenvalues(*a, k=1, tol=1e-8).values[0]),
    "density": lambda *a: float(torch.cat(sf.density(*a, probes=2, steps=3).nodes).sum()),
    "hessian": lambda *a: float((sf.hessian(*a) @ torch.ones(49).double()).sum()),
    "ggn": lambda *a: float((sf.ggn(*a) @ torch.ones(49).double()).sum()),
    "measure": lambda *a: sf.measure(*a, measures=["sam_sharpness"])["sam_sharpness"].value,
    "compare": lambda m, d: sf.compare({"a": m}, d, measures=["rho"])["a"]["rho"].value,
    "audit": lambda *a: sf.audit(*a, measures=["hessian_trace"])["hessian_trace"].value,
    "symmetries": lambda *a: len(sf.symmetries(*a)),
    "Monitor": lambda *a: sf.Monitor(*a, measures=["rho"]).epoch(1).values["rho"],
}


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
def test_batches_of_transformers_are_taken_everywhere(door) -> None:
    data = dict(batch())
    pair = {k: data[k] for k in ("input_ids", "attention_mask")}, data["labels"]
    want = door(built(Tagger), [pair])
    for form in FORMS.values():
        assert door(built(Tagger), form()) == pytest.approx(want, rel=1e-6)


LAST = ["model.norm.weight", "lm_head.weight"]


def last_blocks(model: nn.Module) -> dict[str, float]:
    """The traces of the last blocks, by the oracle in float64."""
    data = dict(batch())
    labels = data.pop("labels")
    dense = Dense(model.float().double(), data, labels, next_token, names=LAST)
    return {name: float(block.trace()) for name, block in dense.blocks(dense.hessian).items()}


def test_half_precision_and_fused_attention() -> None:
    model = built(lambda: llama(attn_implementation="sdpa")).to(torch.bfloat16)
    result = sf.trace(model, batch(), parameters=LAST)
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    assert result.exact
    for name, want in last_blocks(model).items():
        assert result[name] == pytest.approx(want, rel=1e-4)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_of_transformers(reentrant: bool) -> None:
    model = built(llama).float()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    own = {name: p for name, p in model.named_parameters() if "layers.1.mlp.down" in name}
    v = torch.randn(24, generator=torch.Generator().manual_seed(3))
    product = sf.hessian(model, batch(), parameters=list(own)) @ v
    result = sf.trace(model, batch(), parameters=LAST)
    assert model.training
    assert model.is_gradient_checkpointing
    data = dict(batch())
    labels = data.pop("labels")
    dense = Dense(model.double(), data, labels, next_token, names=own)
    torch.testing.assert_close(product.double(), dense.hessian @ v.double(), rtol=1e-3, atol=1e-5)
    for name, want in last_blocks(model).items():
        assert result[name] == pytest.approx(want, rel=1e-4)


@pytest.mark.parametrize("curvature", ["hessian", "ggn"])
def test_samples_go_in_portions_where_logits_do_not_fit(curvature, monkeypatch) -> None:
    """Also where a gradient is timed first, as on a machine on which this takes long."""
    monkeypatch.setattr("saltflat.curvature.curvature.LONG", 0.0)
    model, sizes = built(llama), []
    model.lm_head.register_forward_hook(lambda module, given, logits: sizes.append(len(logits)))
    data = {k: v.repeat(10, 1) for k, v in batch().items()}
    options = {"curvature": curvature, "parameters": ["model.norm.weight"]}
    whole = sf.trace(model, data, **options)
    assert max(sizes) == 40
    sizes.clear()
    logits = 8 * data["input_ids"][0].numel() * VOCABULARY
    parts = sf.trace(model, data, memory_budget=40 * logits, **options)
    assert max(sizes) <= 8
    assert parts.total == pytest.approx(whole.total, rel=1e-6)


def same_position(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), labels.flatten(), reduction="sum") / 15


def test_fam_of_a_causal_model(tmp_path) -> None:
    """A penalty is of the loss that is trained, and so is the measure of the same layer."""
    pytest.importorskip("accelerate")
    from saltflat.integrations.transformers import SharpnessTrainer

    model, data = built(llama), dict(batch())
    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    fam = sf.FAM(model, layer="lm_head", strength=0.5)
    trainer = SharpnessTrainer(model=model, args=arguments, fam=fam)
    model.train()
    own = model(**data).loss
    penalty = trainer.compute_loss(model, dict(data)) - own
    flatness = sf.measure(model, batch(), measures=["relative_flatness"])["relative_flatness"]
    assert flatness.details["layer"] == "lm_head"
    assert float(penalty.detach()) == pytest.approx(0.5 * flatness.value, rel=1e-5)
    same = sf.measure(model, batch(), same_position, measures=["relative_flatness"])
    assert same["relative_flatness"].value != pytest.approx(flatness.value, rel=1e-2)


@pytest.mark.parametrize("make", [lambda: _bert("BertForMaskedLM"), gpt2])
def test_no_block_is_left_to_shared_noise(make) -> None:
    """Neither places, looked up once for all samples, nor key biases, whose gradients vanish."""
    found = sf.trace(built(make), batch(), estimator=sf.ActivationProbes(4), curvature="hessian")
    tied = {n for n, d in found.details.items() if d.rule in ("probes", "products")}
    assert not [n for n in tied if "position" in n or "wpe" in n or n.endswith("bias")], tied
