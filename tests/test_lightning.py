"""Lightning's own trainer with SAM, FAM and the callback, against loops written by hand."""

from __future__ import annotations

import importlib
import json
import logging
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import saltflat as sf
from saltflat.integrations.lightning import (
    SharpnessCallback,
    SharpnessModuleMixin,
    _check_optimizers,
)
from saltflat.training.bn_sharpness import BNSharpnessSGD
from saltflat.training.entropy_sgd import EntropySGD
from saltflat.training.fam import FAM
from saltflat.training.sam import SAM

X = torch.randn(24, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.arange(24) % 3
EPOCHS = 2


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        yield


def network(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(dropout), nn.Linear(6, 3)).double()


def sam(model: nn.Module) -> SAM:
    return SAM(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), rho=0.3)


class Net(LightningModule):
    """An ordinary module; `way` is how it optimizes."""

    def __init__(self, way: str = "automatic", fam: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.net = network(dropout)
        self.fam = FAM(self.net, "3", 0.3) if fam else None
        self.way = way
        self.make: Callable[[nn.Module], torch.optim.Optimizer] = sam
        self.automatic_optimization = way == "automatic"
        self.masks: list[Tensor] = []
        self.net[2].register_forward_hook(self.keep_mask)

    def keep_mask(self, module: nn.Module, args: Any, out: Tensor) -> None:
        if module.training:
            self.masks.append(out == 0)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, batch: Any) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        return loss if self.fam is None else loss + self.fam(batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.automatic_optimization:
            loss = self.loss(batch)
            self.log("loss", loss, on_step=True, on_epoch=True, batch_size=len(batch[0]))
            return loss
        optimizer = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        if self.way == "closure":
            optimizer.step(closure)
            return None
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        closure()
        while optimizer.optimizer.perturb(scaler):
            self.manual_backward(self.loss(batch))
        (optimizer.optimizer if scaler is None else optimizer).step()
        return None

    def configure_optimizers(self) -> Any:
        return self.make(self.net)


class Mixed(SharpnessModuleMixin, Net):
    pass


def fit(module: Net, batch: int = 8, validation: bool = False, **options: Any) -> Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    defaults = {"logger": False, "enable_checkpointing": False, "max_epochs": EPOCHS}
    trainer = Trainer(accelerator="cpu", devices=1, **{**quiet, **defaults, **options})
    torch.manual_seed(3)
    loader = DataLoader(TensorDataset(X, Y), batch_size=batch)
    trainer.fit(module, loader, loader if validation else None)
    return trainer


def by_hand(
    batch: int = 8, fam: bool = False, clip: float | None = None, rho: float = 0.3
) -> tuple[nn.Module, list[float]]:
    """The weights and the unperturbed losses of a loop without Lightning."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    penalty = FAM(model, "3", 0.3) if fam else None
    losses = []

    def gradient(x: Tensor, y: Tensor) -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss = loss if penalty is None else loss + penalty(y)
        loss.backward()
        return float(loss.detach())

    for _ in range(EPOCHS):
        for x, y in zip(X.split(batch), Y.split(batch), strict=True):
            losses.append(gradient(x, y))
            g = [p.grad.clone() for p in model.parameters()]
            norm = torch.cat([each.flatten() for each in g]).norm()
            with torch.no_grad():
                kept = [p.clone() for p in model.parameters()]
                for p, each in zip(model.parameters(), g, strict=True):
                    p.add_(rho * each / norm)
            gradient(x, y)
            with torch.no_grad():
                for p, each in zip(model.parameters(), kept, strict=True):
                    p.copy_(each)
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    return model, losses


def assert_same(model: nn.Module, expected: nn.Module, tolerance: float = 1e-10) -> None:
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=tolerance, atol=tolerance)


def far(model: nn.Module, other: nn.Module) -> bool:
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return any((p - q).abs().max() > 1e-3 for p, q in pairs)


# SAM and FAM in an ordinary module


@pytest.mark.parametrize("fam", [False, True], ids=["", "FAM"])
@pytest.mark.parametrize("way", ["automatic", "closure", "passes"])
def test_an_ordinary_module(way: str, fam: bool) -> None:
    module = Net(way, fam)
    trainer = fit(module)
    assert_same(module.net, by_hand(fam=fam)[0])
    assert far(module.net, by_hand(rho=0.0, fam=fam)[0])
    assert far(module.net, by_hand(fam=not fam)[0])
    assert trainer.global_step == (0 if way == "passes" else 6)  # as the docstring says


@pytest.mark.parametrize("kind", [Net, Mixed])
def test_clipping_by_norm(kind: type[Net]) -> None:
    module = kind()
    fit(module, gradient_clip_val=0.1)
    assert_same(module.net, by_hand(clip=0.1)[0])
    assert far(module.net, by_hand()[0])


def test_accumulation_without_the_mixin_is_refused() -> None:
    with pytest.raises(sf.InvalidValue, match="does not clear the gradients"):
        fit(Net(), batch=4, accumulate_grad_batches=2)


def test_a_manual_step_without_a_closure_is_refused() -> None:
    class Plain(Net):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    with pytest.raises(sf.InvalidValue, match=r"optimizer.step\(closure\)"):
        fit(Plain("closure"))


@pytest.mark.parametrize("fam", [False, True], ids=["", "FAM"])
def test_accumulation(fam: bool) -> None:
    module = Mixed(fam=fam)
    trainer = fit(module, batch=4, accumulate_grad_batches=2)
    assert_same(module.net, by_hand(batch=8, fam=fam)[0])
    assert trainer.global_step == 6


def test_an_unfinished_accumulation() -> None:
    """6 batches by 4: Lightning steps with the last 2 of an epoch, divided by 4 all the same."""
    module = Mixed()
    fit(module, batch=4, accumulate_grad_batches=4)
    model = network()
    optimizer = sam(model)
    for _ in range(EPOCHS):
        for part, share in ((slice(0, 16), 1.0), (slice(16, 24), 0.5)):

            def closure(part: slice = part, share: float = share) -> Tensor:
                optimizer.zero_grad()
                loss = share * F.cross_entropy(model(X[part]), Y[part])
                loss.backward()
                return loss

            optimizer.step(closure)
    assert_same(module.net, model)


@pytest.mark.parametrize(("way", "batch"), [("automatic", 8), ("automatic", 4), ("passes", 8)])
def test_grad_scaler(way: str, batch: int) -> None:
    """Double precision weights under a GradScaler: the scale must cancel."""
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10))
    module = Mixed(way)
    trainer = fit(module, batch, plugins=[plugin], accumulate_grad_batches=8 // batch)
    assert_same(module.net, by_hand()[0])
    assert trainer.global_step == 6


def test_grad_scaler_without_the_mixin_is_refused() -> None:
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    with pytest.raises(sf.InvalidValue, match="only one gradient"):
        fit(Net(), plugins=[plugin])


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_bfloat16(precision: str) -> None:
    module = Net()
    if precision == "bf16-mixed":
        module.net.float()
        module.loss = lambda b: F.cross_entropy(module.net(b[0].float()).float(), b[1])
    fit(module, precision=precision)
    for p, q in zip(module.net.parameters(), by_hand()[0].parameters(), strict=True):
        assert torch.allclose(p.double(), q, atol=0.1)


def test_all_passes_have_the_same_dropout() -> None:
    module = Mixed(dropout=0.5)
    fit(module, batch=4, accumulate_grad_batches=2, max_epochs=1)
    assert len(module.masks) == 12
    for first in (0, 4, 8):
        a, b, again_a, again_b = module.masks[first : first + 4]
        assert torch.equal(a, again_a)
        assert torch.equal(b, again_b)
        assert not torch.equal(a, b)


def test_what_is_logged() -> None:
    """With the mixin the losses are the unperturbed ones, without it they are not."""
    _, losses = by_hand()
    logged = fit(Mixed()).callback_metrics
    assert float(logged["loss_step"]) == pytest.approx(losses[-1], rel=1e-6)
    assert float(logged["loss_epoch"]) == pytest.approx(sum(losses[-3:]) / 3, rel=1e-6)
    assert float(fit(Net()).callback_metrics["loss_step"]) > losses[-1] + 0.01


def test_a_batch_that_is_left_out() -> None:
    """training_step returns None for the second of two micro-batches."""

    class Half(Mixed):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx % 2 else {"loss": self.loss(batch)}

    module = Half()
    fit(module, batch=4, accumulate_grad_batches=2, max_epochs=1)
    model = network()
    optimizer = sam(model)
    for start in (0, 8, 16):

        def closure(part: slice = slice(start, start + 4)) -> Tensor:
            optimizer.zero_grad()
            loss = 0.5 * F.cross_entropy(model(X[part]), Y[part])
            loss.backward()
            return loss

        optimizer.step(closure)
    assert_same(module.net, model)


def test_other_optimizers_pass_through_the_mixin() -> None:
    module, plain = Mixed(), network()
    module.make = lambda net: EntropySGD(net.parameters(), lr=0.5, steps=1, noise=0.0)
    fit(module, max_epochs=1)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    for x, y in zip(X.split(8), Y.split(8), strict=True):
        optimizer.zero_grad()
        F.cross_entropy(plain(x), y).backward()
        optimizer.step()
    assert_same(module.net, plain)


# what is refused


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (Net, {"accumulate_grad_batches": 2}, "SharpnessModuleMixin"),
        (Net, {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}, "or by norm"),
        (Mixed, {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}, "or by norm"),
    ],
)
def test_refused_settings(kind: type[Net], options: dict[str, Any], message: str) -> None:
    module = kind()
    callbacks = [SharpnessCallback((X, Y))] if kind is Net else []
    with pytest.raises(sf.InvalidValue, match=message):
        fit(module, callbacks=callbacks, **options)
    assert_same(module.net, network(), 0.0)


def test_no_clipping_for_bn_sharpness() -> None:
    module = Mixed()
    base = torch.optim.SGD(module.parameters(), lr=0.1)
    module.make = lambda net: BNSharpnessSGD(base, module.net, filters=["0"])
    with pytest.raises(sf.InvalidValue, match="direction in which BNSharpnessSGD perturbs"):
        fit(module, gradient_clip_val=1.0)


def test_no_sharded_strategies() -> None:
    strategy = type("FSDPStrategy", (), {})()
    trainer = SimpleNamespace(optimizers=[sam(network())], strategy=strategy)
    with pytest.raises(sf.InvalidValue, match="use DDPStrategy"):
        _check_optimizers(trainer, Net())
    plain = torch.optim.SGD(network().parameters())
    _check_optimizers(SimpleNamespace(optimizers=[plain], strategy=strategy), Net())


def test_a_hook_that_does_not_call_super() -> None:
    class Forgetful(Mixed):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            pass

    with pytest.raises(sf.InvalidValue, match="on_train_batch_start"):
        fit(Forgetful())


# the callback


def test_callback_logs_to_loggers_and_metrics(tmp_path: Path) -> None:
    module = Net()
    callback = SharpnessCallback((X, Y), budget=None, path=tmp_path / "log.jsonl")
    best = ModelCheckpoint(tmp_path, monitor="saltflat/hessian_trace", save_top_k=1)
    logger = CSVLogger(tmp_path)
    options = {"callbacks": [callback, best], "logger": logger, "enable_checkpointing": True}
    trainer = fit(module, **options)
    assert [(r.step, r.epoch) for r in callback.history] == [(3, 1), (6, 2)]
    expected = sf.measure(module.net, (X, Y), measures=["hessian_trace", "minimum_sharpness"])
    last = callback.history[-1].values
    for name in expected:
        assert last[name] == pytest.approx(expected[name].value, rel=1e-10)
        assert float(trainer.callback_metrics[f"saltflat/{name}"]) == pytest.approx(last[name])
    traces = [r.values["hessian_trace"] for r in callback.history]
    assert float(best.best_model_score) == pytest.approx(min(traces))
    header, *rows = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    column = header.split(",").index("saltflat/hessian_trace")
    logged = [float(row.split(",")[column]) for row in rows if row.split(",")[column]]
    assert logged == pytest.approx(traces, rel=1e-6)
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["values"]["hessian_trace"] for line in lines] == traces


def test_callback_does_not_change_training() -> None:
    plain, watched = Mixed(dropout=0.5), Mixed(dropout=0.5)
    fit(plain)
    callback = SharpnessCallback((X, Y), ["hessian_trace"], every_n_steps=1, budget=None)
    fit(watched, callbacks=[callback])
    assert len(callback.history) == 6
    assert_same(plain.net, watched.net, 0.0)


@pytest.mark.parametrize("module", [None, "net", lambda pl: pl.net])
def test_callback_steps_and_modules(module: Any) -> None:
    net = Mixed()
    options = {"every_n_steps": 2, "budget": None, "module": module}
    callback = SharpnessCallback((X, Y), ["hessian_trace"], **options)
    assert callback.history == []
    fit(net, batch=4, accumulate_grad_batches=2, callbacks=[callback])
    assert [r.step for r in callback.history] == [2, 4, 6]
    expected = sf.measure(net.net, (X, Y), measures=["hessian_trace"])["hessian_trace"].value
    assert callback.history[-1].values["hessian_trace"] == pytest.approx(expected, rel=1e-10)


def test_skipped_measurements_are_logged() -> None:
    callback = SharpnessCallback((X, Y), ["hessian_trace"], budget=1e-9)
    trainer = fit(Net(), callbacks=[callback])
    assert [r.skipped is None for r in callback.history] == [True, False]
    assert float(trainer.callback_metrics["saltflat/skipped"]) == 1.0
    assert TRACE not in trainer.callback_metrics


# what other callbacks see of it

TRACE = "saltflat/hessian_trace"


def skipping(epochs: Iterable[int]) -> SharpnessCallback:
    """Skips the measurements of these epochs."""

    def start(model: nn.Module) -> None:
        SharpnessCallback._start(callback, model)
        monitor = callback.monitor
        assert monitor is not None
        forbidden = dict.fromkeys(epochs, "for a test")
        monitor._forbidden = lambda: forbidden.get(monitor._epoch)

    callback = SharpnessCallback((X, Y), ["hessian_trace"])
    callback._start = start
    return callback


class Seen(Callback):
    """What the key holds at the end of every epoch."""

    def __init__(self) -> None:
        self.values: list[float | None] = []

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        value = trainer.callback_metrics.get(TRACE)
        self.values.append(None if value is None else float(value))


def test_a_skipped_epoch_counts_for_no_decision(tmp_path: Path) -> None:
    """With the value of the first epoch in its place, patience would end at the third."""
    callback, seen = skipping(range(2, 6)), Seen()
    stop = EarlyStopping(TRACE, mode="max", patience=2, strict=False, min_delta=1e9)
    best = ModelCheckpoint(tmp_path, monitor=TRACE, save_top_k=-1, filename="{epoch}")
    options = {"callbacks": [callback, seen, stop, best], "enable_checkpointing": True}
    with pytest.warns(UserWarning, match="skips a measurement: for a test"):
        trainer = fit(Net(), max_epochs=8, **options)
    done = {r.epoch: r.values["hessian_trace"] for r in callback.history if r.values}
    assert list(done) == [1, 6, 7]
    assert trainer.current_epoch == 7  # two measurements that were no better
    assert seen.values == pytest.approx([done.get(epoch) for epoch in range(1, 8)])
    saved = sorted(path.name for path in tmp_path.glob("*.ckpt"))
    assert saved == ["epoch=0.ckpt", "epoch=5.ckpt", "epoch=6.ckpt"]
    assert [float(v) for v in best.best_k_models.values()] == pytest.approx(list(done.values()))


def test_a_checkpoint_beside_validation_waits(tmp_path: Path) -> None:
    """Where validation has run, a key that is not there is an error to ModelCheckpoint."""

    class Validated(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.net(batch[0]).sum())

    callback = skipping([1, 3])
    best = ModelCheckpoint(tmp_path, monitor=TRACE, save_top_k=-1, filename="{epoch}")
    options = {"callbacks": [callback, best], "enable_checkpointing": True, "max_epochs": 3}
    with pytest.warns(UserWarning, match="skips"):
        trainer = fit(Validated(), validation=True, **options)
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["epoch=1.ckpt"]
    assert all(isinstance(value, Tensor) for value in trainer.callback_metrics.values())


def test_epochs_between_two_measurements_count_for_no_decision() -> None:
    callback = SharpnessCallback((X, Y), ["hessian_trace"], every_n_epochs=3, budget=None)
    seen = Seen()
    fit(Net(), max_epochs=6, callbacks=[callback, seen])
    assert [value is None for value in seen.values] == [True, True, False] * 2


def refused(message: str, *callbacks: Callback) -> None:
    with pytest.raises(sf.InvalidValue, match=message):
        fit(Net(), callbacks=list(callbacks))


def test_early_stopping_that_would_end_training_is_refused() -> None:
    trace = ["hessian_trace"]
    waits = r"EarlyStopping\('saltflat/hessian_trace', strict=False\) waits"
    refused(waits, SharpnessCallback((X, Y), trace), EarlyStopping(TRACE))
    rare = SharpnessCallback((X, Y), trace, every_n_epochs=2, budget=None)
    refused(waits, rare, EarlyStopping(TRACE))
    late = SharpnessCallback((X, Y), trace, budget=None)
    refused("Put it behind", EarlyStopping(TRACE), late)
    refused("monitors 'saltflat/kappa'", late, EarlyStopping("saltflat/kappa"))
    every = SharpnessCallback((X, Y), trace, budget=None)
    fit(Net(), callbacks=[every, EarlyStopping(TRACE), EarlyStopping("train_loss", strict=False)])
    assert len(every.history) == 2


# the extra


def test_without_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    monkeypatch.delitem(sys.modules, "saltflat.integrations.lightning")
    integrations = importlib.import_module("saltflat.integrations")
    with pytest.raises(sf.MissingDependency, match=r"pip install saltflat\[lightning\]"):
        _ = integrations.SharpnessCallback
    with pytest.raises(AttributeError, match="Nothing"):
        _ = integrations.Nothing


def test_saltflat_imports_neither_framework() -> None:
    code = (
        "import sys, saltflat, saltflat.integrations, saltflat.training.monitor;"
        "print([m for m in ('lightning', 'transformers', 'accelerate') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
