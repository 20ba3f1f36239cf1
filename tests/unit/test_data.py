"""Sources, splits, the sampler, and windows of an evaluation."""

import bz2
import gzip
import hashlib
import lzma
import os
import zipfile

import numpy as np
import pytest
import torch

from lss.data import Sampler, Window, enwik8, fingerprint, open_source, split, windows
from lss.data.sampler import batches, read
from lss.errors import DataError

TEXT = bytes(range(256)) * 5


def test_plain_files_are_mapped_where_they_are(tmp_path):
    (tmp_path / "a.bin").write_bytes(TEXT)
    data = open_source(str(tmp_path / "a.bin"), tmp_path / "cache")
    assert isinstance(data, np.memmap)
    assert bytes(data) == TEXT
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zip"])
def test_packed_files_are_unpacked_once(tmp_path, suffix):
    file = tmp_path / f"a{suffix}"
    if suffix == ".zip":
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("inner.txt", TEXT)
    else:
        pack = {".gz": gzip, ".bz2": bz2, ".xz": lzma}[suffix]
        file.write_bytes(pack.compress(TEXT))
    for _ in range(2):
        assert bytes(open_source(str(file), tmp_path / "cache")) == TEXT
    assert len(list((tmp_path / "cache").glob("unpacked-*[!k]"))) == 1


def test_a_folder_is_joined_in_order_of_names(tmp_path):
    (tmp_path / "in" / "sub").mkdir(parents=True)
    for name, text in {"b": b"2", "a": b"1", "sub/c": b"3"}.items():
        (tmp_path / "in" / name).write_bytes(text)
    assert bytes(open_source(str(tmp_path / "in"), tmp_path / "cache")) == b"123"
    (tmp_path / "in" / "d").write_bytes(b"new")
    assert bytes(open_source(str(tmp_path / "in"), tmp_path / "cache")) == b"12new3"


def test_the_standard_library_is_python(tmp_path):
    data = open_source("stdlib", tmp_path)
    assert len(data) > 5_000_000
    assert b"class Thread:" in bytes(data)


def test_bad_sources_are_named(tmp_path):
    (tmp_path / "empty").touch()
    (tmp_path / "broken.gz").write_bytes(b"not packed at all")
    (tmp_path / "cut.xz").write_bytes(lzma.compress(TEXT)[:-9])
    (tmp_path / "folder").mkdir()
    for name in ("a.tar.gz", "a.ZST"):
        (tmp_path / name).write_bytes(TEXT)
    os.mkfifo(tmp_path / "pipe.gz")
    with zipfile.ZipFile(tmp_path / "two.zip", "w") as archive:
        archive.writestr("a", "1")
        archive.writestr("b", "2")
    for name, message in {
        "missing": "does not exist",
        "empty": "is empty",
        "folder": "is empty",
        "broken.gz": "cannot be read",
        "cut.xz": "cannot be read",
        "two.zip": "holds 2 files",
        "a.tar.gz": "packed in a way that is not read",
        "a.ZST": "packed in a way that is not read",
        "pipe.gz": "neither a file nor a folder",
    }.items():
        with pytest.raises(DataError, match=message):
            open_source(str(tmp_path / name), tmp_path / "cache")


def test_an_interrupted_unpacking_is_not_taken_for_the_whole(tmp_path):
    (tmp_path / "cut.xz").write_bytes(lzma.compress(TEXT)[:-9])
    for _ in range(2):
        with pytest.raises(DataError):
            open_source(str(tmp_path / "cut.xz"), tmp_path / "cache")


def test_splits_are_enwik8s():
    data = np.zeros(100_000_000, np.uint8)
    assert {name: len(part) for name, part in split(data).items()} == {
        "train": 90_000_000,
        "validation": 5_000_000,
        "test": 5_000_000,
    }


def test_fingerprint_sees_one_byte():
    data = np.frombuffer(TEXT, np.uint8).copy()
    before = fingerprint(data)
    assert before == f"{len(TEXT)} bytes, sha1 {hashlib.sha1(TEXT).hexdigest()}"
    data[77] ^= 1
    assert fingerprint(data) != before


def test_wrong_enwik8_is_refused_and_leaves_the_cache_alone(tmp_path):
    (tmp_path / "short").write_bytes(TEXT)
    with pytest.raises(DataError, match="is not enwik8"):
        enwik8.install(tmp_path / "cache", tmp_path / "short", lambda done, total: None)
    with pytest.raises(DataError, match="lss data enwik8"):
        open_source("enwik8", tmp_path / "cache")
    (tmp_path / "cache" / "enwik8").write_bytes(TEXT)
    with pytest.raises(DataError, match="1280 bytes"):
        open_source("enwik8", tmp_path / "cache")


def test_a_file_of_the_right_length_is_not_taken_for_enwik8(tmp_path, monkeypatch):
    monkeypatch.setattr(enwik8, "LENGTH", len(TEXT))
    (tmp_path / "enwik8").write_bytes(TEXT)
    with pytest.raises(DataError, match="is not enwik8: SHA-1"):
        open_source("enwik8", tmp_path)
    for name, content in {"no.zip": "other", "bad.gz": None}.items():
        if content:
            with zipfile.ZipFile(tmp_path / name, "w") as archive:
                archive.writestr(content, TEXT)
        else:
            (tmp_path / name).write_bytes(gzip.compress(TEXT)[:-20] + bytes(20))
        with pytest.raises(DataError, match="could not be taken"):
            enwik8.install(tmp_path / "cache", tmp_path / name, lambda done, total: None)
        assert not list((tmp_path / "cache").iterdir())


def test_enwik8_is_taken_plain_packed_and_zipped(tmp_path, monkeypatch):
    monkeypatch.setattr(enwik8, "LENGTH", len(TEXT))
    monkeypatch.setattr(enwik8, "SHA1", hashlib.sha1(TEXT).hexdigest())
    (tmp_path / "plain").write_bytes(TEXT)
    (tmp_path / "packed").write_bytes(gzip.compress(TEXT))
    with zipfile.ZipFile(tmp_path / "zipped", "w") as archive:
        archive.writestr("enwik8", TEXT)
    for name in ("plain", "packed", "zipped"):
        cache = tmp_path / f"cache-{name}"
        enwik8.install(cache, tmp_path / name, lambda done, total: None)
        assert bytes(open_source("enwik8", cache)) == TEXT


def test_the_step_is_the_whole_state_of_the_sampler():
    data = np.arange(1000, dtype=np.int64).astype(np.uint8)
    sampler = Sampler(data, 10, 4, seed=3)
    assert sampler.windows(5) == Sampler(data, 10, 4, seed=3).windows(5)
    assert sampler.windows(5) != sampler.windows(6)
    assert sampler.windows(5) != Sampler(data, 10, 4, seed=4).windows(5)
    batch = sampler.batch(5, slice(2, 4))
    for row, window in enumerate(sampler.windows(5)[2:4]):
        assert batch["tokens"][row].tolist() == data[window.start : window.stop].tolist()
        assert batch["labels"][row].tolist() == data[window.start + 1 : window.stop + 1].tolist()


@pytest.mark.parametrize(("num_bytes", "num_sequences"), [(14, 4), (15, 3), (1000, 7)])
def test_sequences_of_a_step_differ_and_reach_everywhere(num_bytes, num_sequences):
    sampler = Sampler(np.zeros(num_bytes, np.uint8), 10, num_sequences, seed=0)
    seen = set()
    for step in range(2000):
        starts = [window.start for window in sampler.windows(step)]
        assert len(set(starts)) == num_sequences
        seen.update(starts)
    assert seen == set(range(num_bytes - 10))


def test_a_short_split_is_refused():
    assert Sampler(np.zeros(11, np.uint8), 10, 5, seed=0).windows(0) == [Window(0, 10)] * 5
    with pytest.raises(DataError, match=r"data\.length of at most 9"):
        Sampler(np.zeros(10, np.uint8), 10, 1, seed=0)
    with pytest.raises(DataError, match="at least 2"):
        windows(np.zeros(1, np.uint8), 10)


@pytest.mark.parametrize("num_bytes", [2, 9, 10, 11, 12, 31])
def test_an_evaluation_predicts_each_byte_once(num_bytes):
    data = np.arange(num_bytes, dtype=np.uint8)
    batch = read(data, windows(data, 10), 10)
    assert batch["labels"][batch["labels"] >= 0].tolist() == list(range(1, num_bytes))


def test_a_limited_evaluation_is_spread_evenly():
    starts = [window.start for window in windows(np.zeros(1001, np.uint8), 10, limit=4)]
    assert starts == [0, 250, 500, 750]


@pytest.mark.parametrize("num_windows", [1, 5, 6, 7])
def test_groups_share_an_evaluation_in_equal_rounds(num_windows):
    chosen = [Window(index, index + 1) for index in range(num_windows)]
    groups = [list(batches(chosen, 3, group, 2)) for group in range(3)]
    assert len({len(group) for group in groups}) == 1
    assert {len(batch) for group in groups for batch in group} == {2}
    seen = [window for group in groups for batch in group for window in batch if window.stop]
    assert sorted(seen, key=lambda window: window.start) == chosen
    assert torch.equal(read(np.zeros(3, np.uint8), [Window(0, 0)], 2)["labels"], torch.full((1, 2), -100))
