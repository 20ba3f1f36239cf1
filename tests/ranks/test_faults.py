"""Bad input and lost ranks: every rank ends, with one message, and none hangs."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import chdir, redirect_stderr
from io import StringIO
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from lss.cli import main
from tests.commands import LSS, SMALL, TORCHRUN, run, train


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_bytes(bytes(range(256)) * 20)
    return path


def assert_refused(done: subprocess.CompletedProcess[str], *parts: str) -> None:
    """One message, with what is given and what is allowed or to be done, and no traceback."""
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("lss:") == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert "allowed:" in done.stderr or "do this:" in done.stderr
    for part in parts:
        assert part in done.stderr


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--train.stepz", "3"], ["train.stepz", "train.steps"]),
        (["--train.steps", "x"], ["train.steps = x", "a whole number"]),
        (["--train.precision", "fp8"], ["fp8", "fp32"]),
        (["--data.length", "0"], ["data.length = 0", "at least 1"]),
        (["--data.source", "/no/such/file"], ["/no/such/file", "does not exist"]),
        (["--data.source", "EMPTY"], ["is empty"]),
        (["--data.length", "9999"], ["4608 bytes", "data.length of at most 4607"]),
        (["--data.source", "enwik8", "--data.cache_folder", "WRONG"], ["is not enwik8"]),
        (["--run.folder", "USED"], ["already holds a run"]),
        (["--run.folder", "EMPTY/run"], ["cannot be made"]),
        (["missing.toml"], ["missing.toml"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_bad_input_over_two_ranks(command, tmp_path, text, flags, parts):
    (tmp_path / "empty").touch()
    (tmp_path / "wrong").mkdir()
    (tmp_path / "wrong" / "enwik8").write_bytes(b"not it")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "metrics.jsonl").touch()
    places = {"EMPTY": tmp_path / "empty", "WRONG": tmp_path / "wrong", "USED": tmp_path / "used"}
    for word, path in places.items():
        flags = [flag.replace(word, str(path)) for flag in flags]
    common = ["--data.source", text, "--run.folder", tmp_path / "run", "--parallel.sequence", "2"]
    assert_refused(command("train", *SMALL, *common, *flags), *parts)


def test_unknown_command_and_missing_run(command, tmp_path):
    assert_refused(command("trian"), "trian", "train")
    assert_refused(command("eval", tmp_path), "holds no config.toml")
    assert_refused(command("eval"), "no run was given")
    assert_refused(command("train", "--parallel.sequence", "600"), "600 ranks on a machine")


def test_damaged_weights(command, tmp_path, text):
    train(tmp_path / "run", "--data.source", text)
    assert_refused(command("eval", tmp_path / "run", "--model.width", "64"), "'model.width' has no effect here")
    weights = tmp_path / "run" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert_refused(command("eval", tmp_path / "run", "--parallel.sequence", "2"), "do not fit")


@pytest.mark.parametrize(
    ("flags", "part"), [(["--parallel.sequence", "3"], "the world has 2"), (["--parallel.sequenze", "2"], "sequenze")]
)
def test_under_torchrun_one_rank_speaks_for_all(text, flags, part):
    done = run(*TORCHRUN, "--nproc-per-node", "2", "-m", "lss", "train", "--data.source", text, *flags)
    assert done.returncode != 0
    assert done.stderr.count("lss: ") == 1
    assert part in done.stderr
    assert "exitcode  : 2" in done.stderr or "exitcode: 2" in done.stderr.replace(" ", "")


def by_hand(folders: list[Path], commands: list[list[str]], port: int) -> tuple[int, str]:
    """A rank with torchrun's variables, a folder and a command of its own: exit code and stderr."""
    rank, size = dist.get_rank(), len(folders)
    dist.barrier()
    dist.destroy_process_group()  # the command makes its own
    world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    variables = mock.patch.dict(os.environ, {name: str(value) for name, value in world.items()})
    with variables, chdir(folders[rank]), redirect_stderr(StringIO()) as errors:
        return main(commands[rank]), errors.getvalue()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize(
    ("second", "part"),
    [(b"abcdefgh" * 50, "the data differs between ranks"), (None, "rank 1: data source 'data.bin' does not exist")],
    ids=["different", "missing"],
)
def test_a_rank_with_other_data_ends_all(ranks, tmp_path, second, part):
    folders = [tmp_path / "0", tmp_path / "1"]
    for folder, content in zip(folders, (b"abcdefgh" * 51, second), strict=True):
        folder.mkdir()
        if content:
            (folder / "data.bin").write_bytes(content)
    words = ["train", *SMALL, "--data.source", "data.bin", "--parallel.sequence", "2"]
    results = ranks.run(by_hand, 2, folders, [words, words], free_port())
    assert [code for code, _ in results] == [2, 2]
    assert part in results[0][1]
    assert [text.count("lss:") for _, text in results] == [1, 0]


def test_a_rank_with_another_configuration_ends_all(ranks, tmp_path):
    folders = [tmp_path / "0", tmp_path / "1"]
    for folder, seed in zip(folders, (3, 4), strict=True):
        folder.mkdir()
        (folder / "a.toml").write_text(f"[train]\nseed = {seed}\n[parallel]\nsequence = 2\n")
    words = ["train", *SMALL, "a.toml"]
    results = ranks.run(by_hand, 2, folders, [words, words], free_port())
    assert [code for code, _ in results] == [2, 2]
    assert "the configuration differs between ranks" in results[0][1]
    assert [text.count("lss:") for _, text in results] == [1, 0]


def test_ranks_that_evaluate_differently_end(ranks, tmp_path, text):
    train(tmp_path / "run", "--data.source", text)
    words = ["eval", str(tmp_path / "run"), "--parallel.sequence", "2"]
    for other in ([*words, "--split", "validation"], [*words, "--data.length", "9"], ["verify", "gpt-tiny"]):
        results = ranks.run(by_hand, 2, [tmp_path, tmp_path], [words, other], free_port())
        assert [code for code, _ in results] == [2, 2]
        assert "differs between ranks" in results[0][1]


def descendants(parent: int) -> dict[int, int]:
    """Process id to parent's, for all below `parent` (Linux)."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(stat.parent.name)] = int(fields[1])
    below, frontier = {}, {parent}
    while frontier:
        frontier = {child for child, above in parents.items() if above in frontier and child not in below}
        below.update({child: parents[child] for child in frontier})
    return below


def rank_processes(parent: int) -> list[int]:
    """The ranks: children of the fork server, which is the child that has children."""
    below = descendants(parent)
    servers = set(below.values()) - {parent}
    return sorted(child for child, above in below.items() if above in servers)


@pytest.fixture
def running(tmp_path, text):
    """A run over two ranks that has made a step."""
    folder = tmp_path / "run"
    flags = [*SMALL, "--data.source", str(text), "--parallel.sequence", "2", "--train.steps", "100000"]
    process = subprocess.Popen(
        [*LSS, "train", *flags, "--run.folder", str(folder)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 150
    while not (folder / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert (folder / "metrics.jsonl").exists()
    yield process
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stderr.close()


linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@linux_only
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_run_and_is_named(running, victim):
    ranks = rank_processes(running.pid)
    assert len(ranks) == 2
    os.kill(ranks[victim], signal.SIGKILL)
    assert running.wait(timeout=30) not in (0, 2)
    message = running.stderr.read()
    assert f"rank {victim} (process {ranks[victim]}) was lost: killed by SIGKILL" in message
    assert "Traceback" not in message
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)


@linux_only
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_ranks_end_with_the_command(running, number):
    ranks = rank_processes(running.pid)
    running.send_signal(number)
    running.wait(timeout=30)
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{rank}").exists() for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)
    assert "Traceback" not in running.stderr.read()
