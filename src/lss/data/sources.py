"""From a name, a file or a folder to memory-mapped bytes."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import lzma
import os
import shutil
import sys
import sysconfig
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import numpy.typing as npt
from filelock import FileLock

from lss.data import enwik8
from lss.errors import DataError

Bytes = npt.NDArray[np.uint8]

# Up to this size a fingerprint covers every byte; beyond it, as many bytes in evenly spaced pieces.
FINGERPRINT_BYTES = 2**30
_PIECE = 2**20


def default_cache_folder() -> Path:
    """`lss` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lss"


def open_source(source: str, cache: Path) -> Bytes:
    """Memory-map a data source, unpacking it into the cache folder first where that is needed.

    Args:
        source: `stdlib`, `enwik8`, a file (plain, .gz, .bz2, .xz, .zip) or a folder, whose files are joined in order
            of their names.
        cache: Folder where unpacked data is kept.

    Returns:
        uint8 [bytes], read-only.

    Raises:
        DataError: The source is missing, empty, unreadable or not what it should be.
    """
    with _readable(source):
        if source == "stdlib":
            name = f"stdlib-{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"
            return _map(_cached(cache / name, lambda: _read_files(_stdlib_files())), source)
        if source == "enwik8":
            return _map(enwik8.cached(cache), source)
        path = Path(source).expanduser()
        if path.is_dir():
            files = [file for file in sorted(path.rglob("*")) if file.is_file()]
            return _map(_cached(_cache_name(cache, files or [path]), lambda: _read_files(files)), source)
        if not path.exists():
            raise DataError(
                f"data source {source!r} does not exist", allowed="stdlib, enwik8, a file or a folder", remedy=""
            )
        if not path.is_file():
            raise DataError(
                f"data source {source!r} is neither a file nor a folder", allowed="a regular file or a folder"
            )
        suffix = path.suffix.lower()
        if suffix in _UNPACK and not path.stem.lower().endswith(".tar"):
            return _map(_cached(_cache_name(cache, [path]), lambda: _unpacked(path)), source)
        if suffix in _REFUSED or suffix in _UNPACK:
            raise DataError(
                f"data source {source!r} is packed in a way that is not read",
                allowed="plain, .gz, .bz2, .xz or .zip of one file, or a folder",
                remedy="unpack it first",
            )
        return _map(path, source)


def split(data: Bytes) -> dict[str, Bytes]:
    """The first 90 % for training, 5 % for validation, 5 % for test: enwik8's usual 90, 5 and 5 million bytes."""
    first, second = len(data) * 90 // 100, len(data) * 95 // 100
    return {"train": data[:first], "validation": data[first:second], "test": data[second:]}


def fingerprint(data: Bytes) -> str:
    """Length and SHA-1 of the data (of evenly spaced pieces beyond 1 GiB); equal on ranks that read the same."""
    digest = hashlib.sha1(usedforsecurity=False)
    stride = max(_PIECE, len(data) // (FINGERPRINT_BYTES // _PIECE))
    mapped = getattr(data, "filename", None)
    with open(mapped, "rb") if mapped else BytesIO(data.tobytes()) as file:
        for start in range(0, len(data), stride):  # not through the map, whose pages would count as this process's
            file.seek(start)
            digest.update(file.read(_PIECE))
    return f"{len(data)} bytes, sha1 {digest.hexdigest()}"


def _map(path: Path, source: str) -> Bytes:
    if not path.stat().st_size:
        raise DataError(f"data source {source!r} is empty", allowed="at least two bytes")
    return cast(Bytes, np.memmap(path, dtype=np.uint8, mode="r"))


def _stdlib_files() -> list[Path]:
    """Python sources of the standard library, without its tests and without installed packages."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    return [file for file in sorted(folder.rglob("*.py")) if not skipped & set(file.relative_to(folder).parts)]


def _read_files(files: Iterable[Path]) -> Iterator[BinaryIO]:
    for file in files:
        with file.open("rb") as opened:
            yield opened


def _unpacked(path: Path) -> Iterator[BinaryIO]:
    with _UNPACK[path.suffix.lower()](path) as opened:
        yield opened


def _open_zip(path: Path) -> BinaryIO:
    archive = zipfile.ZipFile(path)
    names = [entry.filename for entry in archive.infolist() if not entry.is_dir()]
    if len(names) != 1:
        raise DataError(
            f"{path} holds {len(names)} files", allowed="an archive of one file", remedy="unpack it yourself"
        )
    return cast(BinaryIO, archive.open(names[0]))


_UNPACK: dict[str, Callable[[Path], BinaryIO]] = {
    ".gz": cast(Callable[[Path], BinaryIO], gzip.open),
    ".bz2": cast(Callable[[Path], BinaryIO], bz2.open),
    ".xz": cast(Callable[[Path], BinaryIO], lzma.open),
    ".zip": _open_zip,
}
_REFUSED = {".zst", ".7z", ".rar", ".tar", ".tgz", ".tbz2", ".txz", ".lz4", ".br"}


def _cache_name(cache: Path, files: Iterable[Path]) -> Path:
    """A name that changes when a file is added, removed, resized or written."""
    stats = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return cache / f"unpacked-{hashlib.sha1(repr(stats).encode(), usedforsecurity=False).hexdigest()}"


def _cached(target: Path, parts: Callable[[], Iterator[BinaryIO]]) -> Path:
    """The file `target`, made whole from `parts` by one of the processes that ask for it at a time."""
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{target}.lock"):
        if not target.exists():
            partial = target.with_suffix(".partial")
            with partial.open("wb") as out:
                for part in parts():
                    shutil.copyfileobj(part, out)
            partial.replace(target)
    return target


@contextmanager
def _readable(source: str) -> Iterator[None]:
    try:
        yield
    except enwik8.UNREADABLE as error:
        raise DataError(
            f"data source {source!r} cannot be read: {error}",
            allowed="a readable file or folder, and a writable cache folder",
        ) from error
