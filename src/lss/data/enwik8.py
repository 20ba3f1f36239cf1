"""The first 100,000,000 bytes of an English Wikipedia dump (Mahoney, http://mattmahoney.net/dc/textdata.html)."""

from __future__ import annotations

import gzip
import hashlib
import lzma
import urllib.request
import zipfile
import zlib
from collections.abc import Callable
from contextlib import closing
from http.client import HTTPException
from pathlib import Path
from typing import BinaryIO, cast

from lss.errors import DataError

ADDRESS = "http://mattmahoney.net/dc/enwik8.zip"
LENGTH = 100_000_000
SHA1 = "57b8363b814821dc9d47aa4d41f58733519076b2"
_CHUNK = 2**20
# What opening and reading packed files raises, damaged and encrypted ones among them.
UNREADABLE = (
    OSError,
    EOFError,
    ValueError,
    KeyError,
    RuntimeError,
    NotImplementedError,
    HTTPException,
    lzma.LZMAError,
    zipfile.BadZipFile,
    zlib.error,
)

Report = Callable[[int, int], None]  # (bytes done, bytes in all)


def cached(cache_folder: Path) -> Path:
    """The checked file in the cache folder.

    Raises:
        DataError: It is not there, or is not enwik8.
    """
    path = cache_folder / "enwik8"
    if not path.exists():
        raise DataError(
            f"enwik8 is not in {cache_folder}",
            remedy="lss data enwik8 (downloads 36 MB), or lss data enwik8 --from FILE",
        )
    if path.stat().st_size != LENGTH:
        raise _wrong(path, f"{path.stat().st_size} bytes")
    with path.open("rb") as file:
        found = hashlib.file_digest(file, lambda: hashlib.sha1(usedforsecurity=False)).hexdigest()
    if found != SHA1:
        raise _wrong(path, f"SHA-1 {found}")
    return path


def install(cache_folder: Path, file: Path | None, report: Report) -> Path:
    """Put enwik8 into the cache folder, from a file (plain, .zip, .gz) or from its official address.

    Args:
        cache_folder: Made if it does not exist.
        file: Taken instead of a download.
        report: Called with the bytes done and the bytes in all.

    Raises:
        DataError: The download fails, or length or SHA-1 are wrong; the cache is left as it was.
    """
    try:
        cache_folder.mkdir(parents=True, exist_ok=True)
        archive = file or _download(cache_folder / "enwik8.zip", report)
        partial = cache_folder / "enwik8.partial"
        with closing(_opened(archive)) as source, partial.open("wb") as out:
            _copy_checked(source, out, archive, report)
    except DataError:
        (cache_folder / "enwik8.partial").unlink(missing_ok=True)
        raise
    except UNREADABLE as error:
        (cache_folder / "enwik8.partial").unlink(missing_ok=True)
        raise DataError(
            f"enwik8 could not be taken from {file or ADDRESS}: {error}",
            allowed=f"{LENGTH:,} bytes with SHA-1 {SHA1}, plain, .zip or .gz",
            remedy="" if file else "download it elsewhere, then lss data enwik8 --from FILE",
        ) from error
    return partial.replace(cache_folder / "enwik8")


def _download(target: Path, report: Report) -> Path:
    with urllib.request.urlopen(ADDRESS, timeout=60) as response, target.open("wb") as out:
        total, done = int(response.headers.get("Content-Length", 0)), 0
        while chunk := response.read(_CHUNK):
            out.write(chunk)
            done += len(chunk)
            report(done, total)
    return target


def _opened(path: Path) -> BinaryIO:
    if zipfile.is_zipfile(path):
        return cast(BinaryIO, zipfile.ZipFile(path).open("enwik8"))
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    return cast(BinaryIO, gzip.open(path) if packed else path.open("rb"))


def _copy_checked(source: BinaryIO, out: BinaryIO, path: Path, report: Report) -> None:
    digest, done = hashlib.sha1(usedforsecurity=False), 0
    while chunk := source.read(_CHUNK):
        out.write(chunk)
        digest.update(chunk)
        done += len(chunk)
        report(done, LENGTH)
        if done > LENGTH:
            raise _wrong(path, f"more than {LENGTH:,} bytes")
    if done != LENGTH or digest.hexdigest() != SHA1:
        raise _wrong(path, f"{done:,} bytes with SHA-1 {digest.hexdigest()}")


def _wrong(path: Path, found: str) -> DataError:
    return DataError(
        f"{path} is not enwik8: {found}",
        allowed=f"{LENGTH:,} bytes with SHA-1 {SHA1}",
        remedy="lss data enwik8, or lss data enwik8 --from FILE",
    )
