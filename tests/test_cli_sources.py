"""Models, weights and data from files: what fits, what is refused, and that nothing is run."""

from __future__ import annotations

import json
import random
import resource
import signal
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from damage import Canary, damaged, network, sound, with_text
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import saltflat as sf
from saltflat.checkpoints import load_weights, tensors
from saltflat.cli.app import _saved
from saltflat.cli.data import load_data
from saltflat.cli.models import load_model
from saltflat.errors import InvalidValue, LoadError, SaltflatError


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return sound(tmp_path_factory.mktemp("sound"))


def folder(files: list[Path]) -> Path:
    return files[0].parent


# weights

WRAPPED = {
    "plain": "{}",
    "data parallel": "module.{}",
    "lightning": "model.{}",
    "compiled": "_orig_mod.{}",
    "several": "model._orig_mod.module.{}",
}


@pytest.mark.parametrize("wrapper", WRAPPED.values(), ids=WRAPPED)
@pytest.mark.parametrize("inside", [False, True])
def test_names_are_made_to_fit(wrapper: str, inside: bool, tmp_path: Path) -> None:
    state = {wrapper.format(k): v + 1 for k, v in network().state_dict().items()}
    torch.save({"state_dict": state, "epoch": 1} if inside else state, tmp_path / "w.pt")
    model = network()
    notes = load_weights(model, tmp_path / "w.pt")
    assert bool(notes) == (wrapper != "{}")
    for name, value in network().state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value + 1)


def test_names_without_the_prefix_of_the_model(tmp_path: Path) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = network()

    save_file(network().state_dict(), str(tmp_path / "w.safetensors"))
    assert load_weights(Outer(), tmp_path / "w.safetensors")


def test_what_does_not_fit_is_listed(tmp_path: Path) -> None:
    state = network().state_dict()
    state["0.wieght"] = state.pop("0.weight")
    state["2.bias"] = torch.zeros(7)
    torch.save(state, tmp_path / "w.pt")
    model = network()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(LoadError) as caught:
        load_weights(model, tmp_path / "w.pt", strict=False)
    for words in ("0.weight (nearest: 0.wieght)", "2.bias: (7,), not (3,)", "not in the model (1)"):
        assert words in str(caught.value)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])  # nothing was loaded
    state["2.bias"] = torch.zeros(3)
    torch.save(state, tmp_path / "w.pt")
    with pytest.raises(LoadError, match="--no-strict"):
        load_weights(model, tmp_path / "w.pt")
    assert len(load_weights(model, tmp_path / "w.pt", strict=False)) == 2


def test_rounding_is_told(tmp_path: Path) -> None:
    torch.save(network().double().state_dict(), tmp_path / "w.pt")
    assert "rounded" in load_weights(network(), tmp_path / "w.pt")[0]


def test_files_without_weights(tmp_path: Path) -> None:
    torch.save({"epoch": 3, "metrics": [1.0]}, tmp_path / "w.pt")
    with pytest.raises(LoadError, match="'epoch', 'metrics'"):
        load_weights(network(), tmp_path / "w.pt")
    torch.save({"a.weight": torch.zeros(3)}, tmp_path / "w.pt")
    with pytest.raises(LoadError, match="does not fit"):
        load_weights(network(), tmp_path / "w.pt", strict=False)


# files that do harm

EVIL = {
    "evil.ckpt": "wants more than weights.*posix.system",
    "evil.pth": "wants more than weights.*posix.system",
    "evil.bin": "refused unread",
}


@pytest.mark.parametrize("name", EVIL)
def test_pickles_that_want_more_are_refused(name: str, files: list[Path]) -> None:
    with pytest.raises(LoadError, match=EVIL[name]):
        tensors(folder(files) / name)
    assert not (folder(files) / "harmed").exists()


def test_whole_modules_and_programs_are_refused(tmp_path: Path) -> None:
    torch.save(network(), tmp_path / "m.pt")
    with pytest.raises(LoadError, match=r"torch\.nn\.modules.*state_dict"):
        tensors(tmp_path / "m.pt")
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), tmp_path / "s.pt")
    with pytest.raises(LoadError, match="TorchScript"):
        tensors(tmp_path / "s.pt")


def test_claims_of_more_than_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"x": torch.zeros(1).expand(10**10)}, tmp_path / "expanded.pt")
    with pytest.raises(LoadError, match="repetition"):
        tensors(tmp_path / "expanded.pt")
    np.savez_compressed(tmp_path / "bomb.npz", x=np.zeros(1 << 22, dtype=np.uint8))
    tensors(tmp_path / "bomb.npz")
    monkeypatch.setattr("saltflat.checkpoints.files._HARMLESS", 1 << 20)
    with pytest.raises(LoadError, match="more than 100 times its size"):
        tensors(tmp_path / "bomb.npz")
    with zipfile.ZipFile(tmp_path / "claims.npz", "w") as archive:
        header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (99999999999,), }\n"
        content = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
        archive.writestr("x.npy", content)
    with pytest.raises(LoadError, match="99999999999"):
        tensors(tmp_path / "claims.npz")
    np.savez(tmp_path / "objects.npz", x=np.array([Canary(tmp_path / "harmed")], dtype=object))
    with pytest.raises(LoadError, match="Python objects"):
        tensors(tmp_path / "objects.npz")
    torch.save(torch.eye(3).to_sparse(), tmp_path / "sparse.pt")
    with pytest.raises(LoadError, match="sparse"):
        tensors(tmp_path / "sparse.pt")
    assert not (tmp_path / "harmed").exists()


def test_a_storage_must_be_as_long_as_the_pickle_says(tmp_path: Path) -> None:
    """torch takes the pickle's word, and would read past the end of what it has read."""
    torch.save({"x": torch.arange(300.0)}, tmp_path / "w.pt")
    with zipfile.ZipFile(tmp_path / "w.pt") as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    long = (60_000).to_bytes(2, "little")
    with zipfile.ZipFile(tmp_path / "long.pt", "w") as archive:
        for name, value in members.items():
            short = (300).to_bytes(2, "little")
            archive.writestr(
                name, value.replace(b"M" + short, b"M" + long) if "pkl" in name else value
            )
    with pytest.raises(LoadError, match="should have 240000 bytes and has 1200"):
        tensors(tmp_path / "long.pt")


def test_many_references_to_one_thing(tmp_path: Path) -> None:
    """A pickle of a few bytes that stands for 10³⁰ tensors."""
    content: Any = [torch.zeros(2)]
    for _ in range(30):
        content = [content] * 10
    torch.save(content, tmp_path / "many.pt")
    assert isinstance(tensors(tmp_path / "many.pt"), list)


@contextmanager
def patience(seconds: int) -> Iterator[None]:
    def late(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def read(path: Path, model: nn.Module) -> None:
    """As the command reads a file of that kind."""
    if path.suffix == ".pt2":
        program = load_model(str(path))
        with torch.no_grad():
            program(torch.ones(2, 4))
    elif path.suffix == ".json":
        _saved(path)
    elif "data" in path.name or path.suffix == ".npz":
        load_data(str(path))
    else:
        load_weights(model, path)


def survives(files: list[Path], folder: Path, seeds: range) -> None:
    """Damaged files are read or refused: no crash, no hang, no large allocation, no code run."""
    model = network()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused = 0
    for seed in seeds:
        chance = random.Random(seed)
        file = chance.choice(files)
        path = folder / file.name
        path.write_bytes(damaged(file.read_bytes(), chance))
        try:
            with patience(20):
                read(path, model)
        except SaltflatError:
            refused += 1
        except (RuntimeError, IndexError, TypeError, ValueError, KeyError):
            # Where a program's graph still loads, its run may fail, as any model's may.
            if file.suffix != ".pt2":
                raise
    assert len(seeds) > refused > len(seeds) / 2  # some were read, and most damage was seen
    assert not (files[0].parent / "harmed").exists()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 300_000  # kilobytes


def test_damaged_files(files: list[Path], tmp_path: Path) -> None:
    survives(files, tmp_path, range(400))


@pytest.mark.slow
def test_ten_thousand_damaged_files(files: list[Path], tmp_path: Path) -> None:
    survives(files, tmp_path, range(1000, 11_000))


# programs of torch.export


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.head = nn.Linear(8, 3)
        self.register_buffer("places", torch.arange(16))

    def forward(self, x: Tensor, shift: Tensor) -> dict[str, Tensor]:
        h = self.layer(self.embed(x) + self.embed(self.places[: x.shape[1]] % 7))
        return {"logits": self.head(h.mean(1)) + shift, "flat": h.reshape(x.shape[0], -1)}


def exported(model: nn.Module, path: Path, *inputs: Tensor) -> Path:
    dynamic = tuple({0: torch.export.Dim("batch")} for _ in inputs)
    torch.export.save(torch.export.export(model.eval(), inputs, dynamic_shapes=dynamic), path)
    return path


def test_programs_compute_what_the_model_does(tmp_path: Path) -> None:
    torch.manual_seed(0)
    convolutions = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
    )
    images = torch.randn(5, 1, 8, 8)
    program = load_model(str(exported(convolutions, tmp_path / "c.pt2", images)))
    more = torch.randn(7, 1, 8, 8)
    assert torch.equal(program(more), convolutions(more))
    assert list(program.state_dict()) == list(convolutions.state_dict())
    attention, x, shift = Attention(), torch.randint(0, 7, (4, 6)), torch.randn(4, 3)
    program = load_model(str(exported(attention, tmp_path / "a.pt2", x, shift)))
    assert torch.equal(program(x[:3], shift[:3])["logits"], attention(x[:3], shift[:3])["logits"])
    assert torch.equal(program(x=x, shift=shift)["flat"], attention(x, shift)["flat"])
    with pytest.raises(SaltflatError, match="takes 2 tensors"):
        program(x)


def test_programs_are_measured_as_the_model_is(files: list[Path]) -> None:
    data = torch.randn(9, 4).double(), torch.arange(9) % 3
    program = load_model(str(folder(files) / "net.pt2")).double()
    truth = sf.trace(network().double(), data)
    found = sf.trace(program, data)
    assert found.exact
    assert {k: pytest.approx(v, rel=1e-12) for k, v in truth.items()} == dict(found)
    assert len(sf.symmetries(program, data[0])) == 5


def test_programs_run_nothing_of_their_own(files: list[Path], tmp_path: Path) -> None:
    """Expressions, guards and targets that are code, which torch.export.load would run."""
    harm = tmp_path / "harmed"
    call = f"__import__('os').system('touch {harm}')"
    path = folder(files) / "net.pt2"
    sly = with_text(path, "models/model.json", _expression(path), call)
    assert torch.equal(load_model(str(sly))(torch.ones(2, 4)), network()(torch.ones(2, 4)))
    assert not harm.exists()
    # The control: torch's own reader does run it.
    with pytest.raises(Exception):  # noqa: B017, PT011
        torch.export.load(sly)
    assert harm.exists()
    aten = "torch.ops.aten"
    for target in (
        "torch.os.system",
        "builtins.exec",
        f"{aten}.from_file.default",
        f"{aten}._reshape_alias.default",  # which does not look where memory ends
        f"{aten}.relu.default.__class__",
    ):
        with pytest.raises(LoadError, match="is not run"):
            load_model(
                str(with_text(path, "models/model.json", "torch.ops.aten.relu.default", target))
            )


def _expression(path: Path) -> str:
    """One of the archive's expressions of sizes."""
    with zipfile.ZipFile(path) as archive:
        name = next(name for name in archive.namelist() if name.endswith("models/model.json"))
        graph = json.loads(archive.read(name))["graph_module"]["graph"]
    sizes = [size for value in graph["tensor_values"].values() for size in value["sizes"]]
    return str(next(size["as_expr"]["expr_str"] for size in sizes if "as_expr" in size))


def test_programs_that_are_refused(files: list[Path], tmp_path: Path) -> None:
    path = folder(files) / "net.pt2"
    config = "weights/model_weights_config.json"
    with pytest.raises(LoadError, match="as a pickle"):
        load_model(str(with_text(path, config, '"use_pickle": false', '"use_pickle": true')))
    with pytest.raises(LoadError, match="cannot be read"):
        load_model(str(with_text(path, config, "weight_0", "../../weight_0")))
    with pytest.raises(LoadError, match="version 9"):
        load_model(str(with_text(path, "models/model.json", '"major": 8', '"major": 9')))
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)).train()
    torch.export.save(torch.export.export(model, (torch.ones(2, 4),)), tmp_path / "t.pt2")
    with pytest.raises(LoadError, match="training mode"):
        load_model(str(tmp_path / "t.pt2"))
    (tmp_path / "n.pt2").write_bytes(b"nothing")
    with pytest.raises(LoadError, match=r"n\.pt2 cannot be read"):
        load_model(str(tmp_path / "n.pt2"))
    with zipfile.ZipFile(tmp_path / "e.pt2", "w") as archive:  # as torch 2.6 writes it
        archive.writestr("serialized_exported_program.json", "{}")
        archive.writestr("version", "8.2")
    with pytest.raises(LoadError, match=r"format of torch before 2\.8"):
        load_model(str(tmp_path / "e.pt2"))


# Hugging Face folders


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=20,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=12,
        num_labels=3,
    )
    place = tmp_path_factory.mktemp("bert")
    transformers.BertForSequenceClassification(config).save_pretrained(place)
    return place


def test_a_folder_is_a_model(bert: Path, tmp_path: Path) -> None:
    model = load_model(str(bert))
    stored = load_file(str(bert / "model.safetensors"))
    assert torch.equal(model.state_dict()["classifier.weight"], stored["classifier.weight"])
    ids = torch.randint(0, 20, (6, 5))
    content = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    save_file({**content, "labels": torch.arange(6) % 3}, str(tmp_path / "d.safetensors"))
    data = load_data(str(tmp_path / "d.safetensors"))
    trace = sf.trace(model, data, parameters=["classifier.weight", "classifier.bias"])
    assert trace.exact


def changed(bert: Path, place: Path, **settings: Any) -> str:
    for file in bert.iterdir():
        (place / file.name).write_bytes(file.read_bytes())
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**config, **settings}))
    return str(place)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"auto_map": {"AutoModel": "harm.Model"}}, "code that came with the folder"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"architectures": ["BertForSomething"]}, "none of transformers"),
        ({"architectures": ["logging"]}, "none of transformers"),
        ({"architectures": []}, "no 'architectures'"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000"),
        ({"num_hidden_layers": 2}, "lacks weights"),
        ({"vocab_size": 10**12}, "parameters, and the weights"),
        ({"hidden_size": 7}, "cannot be read"),
        ({"hidden_size": "eight"}, "cannot be read"),
    ],
)
def test_folders_that_are_refused(
    bert: Path, tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(LoadError, match=words):
        load_model(changed(bert, tmp_path, **settings))


def test_a_folder_fetches_no_attention(bert: Path, tmp_path: Path) -> None:
    model = load_model(changed(bert, tmp_path, attn_implementation="someone/kernels"))
    assert model.config._attn_implementation == "eager"
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(LoadError, match="adapter"):
        load_model(str(tmp_path))


def test_an_index_cannot_leave_its_folder(bert: Path, tmp_path: Path) -> None:
    place = changed(bert, tmp_path)
    index = {"metadata": {}, "weight_map": {"classifier.weight": "../../other.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(LoadError, match="not in its folder"):
        load_model(place)
    for file in tmp_path.glob("model.safetensors*"):
        file.unlink()
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(LoadError, match=r"no \.safetensors"):
        load_model(place)


# data


def test_forms_of_data(tmp_path: Path) -> None:
    x, y = torch.randn(6, 4), (torch.arange(6) % 3).int()
    torch.save([x, y], tmp_path / "d.pt")
    save_file({"images": x, "labels": y}, str(tmp_path / "d.safetensors"))
    np.savez(tmp_path / "d.npz", X=x.numpy().astype(">f4"), y=y.numpy())
    for name in ("d.pt", "d.safetensors", "d.npz"):
        inputs, targets = load_data(str(tmp_path / name), samples=5)
        assert torch.equal(inputs, x[:5])
        assert torch.equal(targets, y[:5].long())


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([torch.zeros(6, 4), torch.zeros(3)], "first dimension"),
        ({"a": torch.zeros(6, 4)}, "'a'"),
        ([[torch.zeros(6, 4)], torch.zeros(6)], "must be tensors"),
        ([torch.zeros(6, 4).byte(), torch.zeros(6)], "uint8"),
    ],
)
def test_data_that_are_refused(content: Any, words: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "d.pt")
    with pytest.raises(InvalidValue, match=words):
        load_data(str(tmp_path / "d.pt"))


def test_arrays_of_text_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=np.array(["a"]), y=np.zeros(1))
    with pytest.raises(LoadError, match="must hold numbers"):
        load_data(str(tmp_path / "d.npz"))
