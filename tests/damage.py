"""Files that are damaged at random, and files that are made to do harm."""

from __future__ import annotations

import io
import os
import pickle
import random
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

import saltflat as sf


class Canary:
    """Leaves a file behind if it is ever unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


def sound(folder: Path) -> list[Path]:
    """One good file of every kind that is read, and pickles with a canary."""
    model, x = network(), torch.randn(6, 4)
    state, y = model.state_dict(), torch.arange(6) % 3
    save_file(state, str(folder / "w.safetensors"))
    torch.save(state, folder / "w.pt")
    torch.save(state, folder / "legacy.pth", _use_new_zipfile_serialization=False)
    training = {"state_dict": state, "epoch": 3, "hyper_parameters": {"lr": 0.1}}
    torch.save(training, folder / "lightning.ckpt")
    np.savez(folder / "data.npz", x=x.numpy(), y=y.numpy())
    np.savez_compressed(folder / "small.npz", x=x.numpy(), y=y.numpy())
    torch.save({"inputs": x, "targets": y}, folder / "data.pt")
    dynamic = ({0: torch.export.Dim("batch")},)
    torch.export.save(torch.export.export(model, (x,), dynamic_shapes=dynamic), folder / "net.pt2")
    sf.measure(model, (x, y), measures=["rho"]).save(folder / "run.json")
    evil = {"state_dict": state, "canary": Canary(folder / "harmed")}
    torch.save(evil, folder / "evil.ckpt")
    torch.save(evil, folder / "evil.pth", _use_new_zipfile_serialization=False)
    (folder / "evil.bin").write_bytes(pickle.dumps(evil["canary"]))
    return sorted(path for path in folder.iterdir() if path.is_file())


def damaged(content: bytes, chance: random.Random) -> bytes:
    """The content with a few changes of a random kind."""
    kind = chance.choice((_bytes, _bytes, _words, _words, _cut, _grown, _moved, _digits, _inside))
    for _ in range(chance.choice((1, 1, 2, 8))):
        content = kind(content, chance)
    return content


def _bytes(content: bytes, chance: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(chance.randint(1, 8)):
        changed[chance.randrange(len(changed))] = chance.randrange(256)
    return bytes(changed)


def _words(content: bytes, chance: random.Random) -> bytes:
    """A number of four or eight bytes that is far too large, or negative."""
    number = chance.choice((2**31 - 1, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1, 0))
    word = struct.pack("<Q", number)[: chance.choice((4, 8))]
    place = chance.randrange(len(content))
    return content[:place] + word + content[place + len(word) :]


def _cut(content: bytes, chance: random.Random) -> bytes:
    return content[: chance.randrange(1, len(content))] if len(content) > 1 else content


def _grown(content: bytes, chance: random.Random) -> bytes:
    place = chance.randrange(len(content))
    return content[:place] + chance.randbytes(chance.randint(1, 64)) + content[place:]


def _moved(content: bytes, chance: random.Random) -> bytes:
    a, b = sorted(chance.randrange(len(content)) for _ in range(2))
    place = chance.randrange(len(content))
    return content[:place] + content[a:b][:512] + content[place:]


def _digits(content: bytes, chance: random.Random) -> bytes:
    """Another digit where there is one, as in the JSON that many formats have inside."""
    places = [i for i, byte in enumerate(content) if 48 <= byte <= 57]
    if not places:
        return content
    place = chance.choice(places)
    digits = chance.choice((b"0", b"7", b"-1", b"999999999", b"9" * 30, b"1e999"))
    return content[:place] + digits + content[place + 1 :]


def _inside(content: bytes, chance: random.Random) -> bytes:
    """Damage to one member of an archive whose checksums are then right."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = {i.filename: archive.read(i) for i in archive.infolist()}
    except Exception:
        return _bytes(content, chance)
    if not members:
        return content
    name = chance.choice(sorted(members))
    simple = chance.choice((_bytes, _words, _cut, _grown, _moved, _digits))
    members[name] = simple(members[name] or b"0", chance)
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        for each, value in members.items():
            archive.writestr(each, value)
    return target.getvalue()


def with_text(path: Path, member: str, old: str, new: str) -> Path:
    """An archive with a member in which one text stands for another."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = next(each for each in members if each.endswith(member))
    text = members[name].decode()
    assert old in text
    target = path.with_name(f"changed_{path.name}")
    with zipfile.ZipFile(target, "w") as archive:
        for each, value in members.items():
            archive.writestr(each, text.replace(old, new).encode() if each == name else value)
    return target
