"""Models by name: Python code, a program of torch.export, a Hugging Face folder, or the zoo."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from saltflat import zoo
from saltflat.checkpoints import explained
from saltflat.cli import exported
from saltflat.cli.named import called, is_named, named
from saltflat.errors import LoadError, listed, nearest, optional

FORMS = "package.module:callable, path/to/file.py:callable, program.pt2, a folder, or zoo:NAME"

ZOO: dict[str, Callable[[], nn.Module]] = {
    "ibayashi_mlp": zoo.ibayashi_mlp,
    "ibayashi_fcnn": zoo.ibayashi_fcnn,
    "ibayashi_cnn": zoo.ibayashi_cnn,
    "petzka_mlp": zoo.petzka_mlp,
    "lenet5": zoo.lenet5,
    "vgg11": zoo.vgg11,
    "resnet18": zoo.resnet18,
    "wide_resnet16_4": zoo.wide_resnet16_4,
    "wide_resnet28_10": zoo.wide_resnet28_10,
    "shape_autoencoder": zoo.shape_autoencoder,
}


def load_model(text: str, *, seed: int = 0) -> nn.Module:
    """The model that was named, in evaluation mode; what is drawn at random follows the seed."""
    torch.manual_seed(seed)
    if text.startswith("zoo:"):
        model: Any = _from_zoo(text)
    elif text.lower().endswith(".pt2"):
        model = exported.load(Path(text))
    elif Path(text).is_dir():
        model = _folder(Path(text))
    elif is_named(text):
        found = named(text)
        torch.manual_seed(seed)  # whatever the import drew
        model = found if isinstance(found, nn.Module) else _made(text, found)
    else:
        raise LoadError(_unknown(text))
    if not isinstance(model, nn.Module):
        raise LoadError(f"{text} is not a model: it gives {type(model).__name__}, no nn.Module.")
    return model.eval()


def _made(text: str, found: Any) -> Any:
    if not callable(found):
        raise LoadError(
            f"{text} must be a model, or a callable that returns one. Got {type(found).__name__}."
        )
    return called(text, "a model", found)


def _unknown(text: str) -> str:
    if Path(text).suffix in (".safetensors", ".pt", ".pth", ".ckpt", ".bin"):
        return (
            f"{text} holds weights, and what they are the weights of is not in it. Name the model, "
            f"and give the file by --checkpoint {text}."
        )
    if Path(text).suffix == ".py":
        return f"{text} is a file; which name in it makes the model? Write {text}:NAME."
    return f"{text!r} names no model. Known forms: {FORMS}."


def _from_zoo(text: str) -> nn.Module:
    _, name, *rest = text.split(":")
    if name != "mlp":
        if name not in ZOO:
            raise LoadError(f"The zoo has no {name!r}. {nearest(name, ['mlp', *ZOO])}")
        if rest:
            raise LoadError(f"zoo:{name} takes no settings. Got {':'.join(rest)!r}.")
        return ZOO[name]()
    sizes = rest[0].split("-") if len(rest) == 1 else []
    if len(sizes) < 2 or not all(s.isdecimal() and 0 < int(s) <= 100_000 for s in sizes):
        raise LoadError(
            f"zoo:mlp needs the sizes of its layers, e.g. zoo:mlp:64-32-10. Got {text!r}."
        )
    return zoo.mlp([int(size) for size in sizes])


def _folder(folder: Path) -> nn.Module:
    """A model of transformers from its folder, without code of the folder and without network."""
    config = _config(folder)
    os.environ["HF_HUB_OFFLINE"] = "1"
    transformers = optional("transformers", "A Hugging Face folder")
    (name, *_) = config["architectures"]
    kind = getattr(transformers, name, None)
    base = transformers.PreTrainedModel
    if not (isinstance(kind, type) and issubclass(kind, base) and kind is not base):
        raise LoadError(
            f"The architecture {name!r} of {folder / 'config.json'} is none of transformers "
            f"{transformers.__version__}. Install a version that has it, or name your own code: "
            "file.py:make_model."
        )
    with explained(folder):
        _check_size(folder, kind, config)
        model, info = kind.from_pretrained(  # type: ignore[attr-defined]
            folder,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            **_HERE,
        )
    if missing := [*info["missing_keys"], *info["mismatched_keys"]]:
        raise LoadError(
            f"{folder} lacks weights of {name}, or has them in another shape: "
            f"{listed(map(str, missing))}. They would be random. Save the whole model with "
            "save_pretrained()."
        )
    result: nn.Module = model
    return result


def _config(folder: Path) -> dict[str, Any]:
    """The folder's config.json, with all in the folder that is needed and nothing that is code."""
    path = folder / "config.json"
    if not path.is_file():
        raise LoadError(f"{folder} is a folder without config.json, so no Hugging Face model.")
    with explained(path):
        config = json.loads(path.read_text(encoding="utf-8"))
    names = config.get("architectures") if isinstance(config, dict) else None
    if not (isinstance(names, list) and names and isinstance(names[0], str)):
        raise LoadError(f"{path} does not say what the model is: it has no 'architectures'.")
    for key, why in _REFUSED.items():
        if key in config:
            raise LoadError(f"{path} has {key!r}: {why}")
    if (folder / "adapter_config.json").exists():
        raise LoadError(
            f"{folder} is an adapter to another model. Merge the two in your own code, or name "
            "that: file.py:make_model."
        )
    if not _files(folder):
        raise LoadError(
            f"{folder} has no .safetensors file. Pickles (pytorch_model.bin) are not read: load "
            "the model in your own code and save it with save_pretrained()."
        )
    settings: dict[str, Any] = config
    return settings


# A configuration may name an implementation of attention that is fetched from elsewhere.
_HERE = {"local_files_only": True, "attn_implementation": "eager"}

_REFUSED = {
    "auto_map": "the model is code that came with the folder, which is never run from here. Name "
    "your own code that loads it: file.py:make_model.",
    "quantization_config": "the weights are quantised and have no derivatives. Dequantise first.",
}


def _files(folder: Path) -> list[Path]:
    """The files of weights; an index may name those of the folder and no others."""
    files = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        with explained(index):
            named_there = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        if outside := [str(n) for n in named_there if n not in {f.name for f in files}]:
            raise LoadError(f"{index} names files that are not in its folder: {listed(outside)}.")
    return files


def _check_size(folder: Path, kind: Any, config: Mapping[str, Any]) -> None:
    """Refuse a configuration of a model that the folder's weights cannot be those of."""
    size = sum(file.stat().st_size for file in _files(folder))
    entries = sum(_count(file) for file in _files(folder))
    for key, value in _numbers(config):
        if "layers" in key and value > entries:
            raise LoadError(
                f"{folder / 'config.json'} says {key}={value}; there are {entries} weights."
            )
    with torch.device("meta"):
        model = kind(kind.config_class.from_pretrained(folder, **_HERE))
    numbers = sum(p.numel() for p in model.parameters())
    if numbers > size:  # of a byte or more each
        raise LoadError(
            f"{folder / 'config.json'} is of a model of {numbers} parameters, and the weights "
            f"beside it have {size} bytes."
        )


def _count(file: Path) -> int:
    from safetensors import safe_open

    with safe_open(str(file), framework="pt") as opened:
        return len(opened.keys())


def _numbers(config: Mapping[str, Any]) -> list[tuple[str, int]]:
    """The whole numbers of a configuration, also of configurations inside it."""
    found = []
    for key, value in config.items():
        if isinstance(value, dict):
            found += _numbers(value)
        elif isinstance(value, int):
            found.append((key, value))
    return found
