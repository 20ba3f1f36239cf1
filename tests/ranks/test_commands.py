"""`lss train`, `lss eval` and `lss data`, over real processes."""

import json
import tomllib

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from lss.models import GPT, PRESETS
from tests.commands import LSS, SMALL, TORCHRUN, metrics, run, train


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_bytes(b"".join(b"line %d of a text\n" % number for number in range(400)))
    return path


@pytest.fixture(scope="module")
def serial(text, tmp_path_factory):
    """One rank, dropout on, float64: the run that all others must repeat."""
    folder = tmp_path_factory.mktemp("runs") / "serial"
    return folder, train(folder, "--data.source", text, "--train.dropout", "0.2", "--train.precision", "fp64")


def same_run(lines, reference):
    assert [line["step"] for line in lines] == [line["step"] for line in reference]
    for line, other in zip(lines, reference, strict=True):
        for name in {"loss", "grad_norm", "eval_loss"} & line.keys():
            assert line[name] == pytest.approx(other[name], rel=1e-9), (line["step"], name)


@pytest.mark.parametrize(
    "flags",
    [
        ["--parallel.sequence", "3", "--attention.gather", "kv"],
        ["--parallel.sequence", "2", "--parallel.data", "2", "--train.batch", "1"],
        ["--parallel.sequence", "2", "--train.accumulation", "2"],
    ],
    ids=["N=3", "MxN=2x2", "accumulated"],
)
def test_a_run_is_the_same_at_every_degree(serial, text, tmp_path, flags):
    source = ["--data.source", text, "--train.dropout", "0.2", "--train.precision", "fp64"]
    same_run(train(tmp_path / "run", *source, *flags), serial[1])


def test_metrics_have_the_promised_keys(serial):
    steps = [line for line in serial[1] if "loss" in line]
    evaluations = [line for line in serial[1] if "eval_loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert set(steps[0]) == {
        "step",
        "loss",
        "bits_per_byte",
        "grad_norm",
        "learning_rate",
        "step_seconds",
        "tokens_per_second",
        "peak_bytes",
        "collectives",
    }
    assert set(evaluations[0]) == {"step", "eval_loss", "eval_bits_per_byte"}
    assert steps[-1]["loss"] < steps[0]["loss"]
    rates = [line["learning_rate"] for line in steps]
    assert rates == sorted(set(rates))  # warming up
    assert steps[0]["bits_per_byte"] == pytest.approx(steps[0]["loss"] / 0.6931471805599453)


def test_torchrun_joins(serial, text, tmp_path):
    flags = ["--data.source", text, "--train.dropout", "0.2", "--train.precision", "fp64", "--parallel.sequence", "2"]
    done = run(*TORCHRUN, "--nproc-per-node", "2", "-m", "lss", "train", *SMALL, *flags, "--run.folder", tmp_path / "a")
    assert done.returncode == 0, done.stderr
    same_run(metrics(tmp_path / "a"), serial[1])


def test_the_log_counts_collectives(text, tmp_path):
    lines = train(tmp_path / "run", "--data.source", text, "--parallel.sequence", "2")
    rows = lines[0]["collectives"]
    layers = [row for row in rows if row["layer"].endswith("attention")]
    assert len(layers) == 2 * PRESETS["gpt-tiny"].layers
    assert {row["count"] for row in layers} == {1}


def test_weights_are_those_of_the_plain_model(serial, text, tmp_path):
    folder, lines = serial
    config = tomllib.loads((folder / "config.toml").read_text())
    assert config["train"]["steps"] == 4
    assert config["model"]["width"] == PRESETS["gpt-tiny"].width
    over_ranks = train(
        tmp_path / "run",
        *("--data.source", text, "--train.dropout", "0.2", "--train.precision", "fp64", "--parallel.sequence", "3"),
    )
    same_run(over_ranks, lines)
    mine, theirs = (load_file(path / "model.safetensors") for path in (tmp_path / "run", folder))
    assert mine.keys() == theirs.keys()
    for name, weight in mine.items():
        torch.testing.assert_close(weight, theirs[name], rtol=1e-6, atol=1e-9)
    assert mine["positions.weight"].shape == (40, 128)


@pytest.mark.parametrize(
    ("flags", "length"), [([], 40), (["--parallel.sequence", "3"], 40), (["--data.length", "17"], 17)]
)
def test_eval_is_the_loss_of_the_plain_model(command, serial, text, flags, length):
    folder, _ = serial
    done = command("eval", folder, *flags)
    assert done.returncode == 0, done.stderr
    shape = PRESETS["gpt-tiny"]
    model = GPT(type(shape)(shape.width, shape.layers, shape.heads, max_length=40)).double()
    model.load_state_dict(load_file(folder / "model.safetensors"))
    data = text.read_bytes()
    tokens = torch.tensor(list(data[len(data) * 95 // 100 :]))
    total = torch.zeros((), dtype=torch.float64)
    with torch.no_grad():
        for start in range(0, len(tokens) - 1, length):
            window = tokens[start : start + length + 1]
            total += F.cross_entropy(model(window[None, :-1])[0], window[1:], reduction="sum")
    expected = total / (len(tokens) - 1) / torch.log(torch.tensor(2.0))
    assert f"test: {expected:.4f} bits/byte" in done.stdout
    assert f"over {len(tokens) - 1:,} bytes" in done.stdout


def test_eval_beyond_a_learned_table_is_refused(command, serial):
    done = command("eval", serial[0], "--data.length", "41")
    assert done.returncode == 2
    assert "at most 40" in done.stderr


def test_tied_weights_and_rotary_positions_are_saved_and_evaluated(command, text, tmp_path):
    flags = ["--model.tie_weights", "true", "--model.positions", "rotary", "--model.key_value_heads", "2"]
    lines = train(tmp_path / "run", "--data.source", text, "--parallel.sequence", "2", *flags)
    done = command("eval", tmp_path / "run", "--split", "validation", "--data.length", "40", "--sequences", "3")
    assert done.returncode == 0, done.stderr
    assert f"validation: {lines[-1]['eval_bits_per_byte']:.4f} bits/byte" in done.stdout
    assert command("eval", tmp_path / "run", "--data.length", "64").returncode == 0


def test_bf16_and_tensorboard(text, tmp_path):
    flags = ["--train.precision", "bf16", "--run.tensorboard", "true", "--parallel.sequence", "2"]
    lines = train(tmp_path / "run", "--data.source", text, *flags)
    assert lines[0]["loss"] > 0
    assert list((tmp_path / "run").glob("events.out.tfevents.*"))


def test_attention_dropout_is_the_same_at_every_degree_and_says_which_kernel_it_takes(command, text, tmp_path):
    flags = ["--data.source", text, "--train.attention_dropout", "0.2", "--train.precision", "fp64"]
    reference = train(tmp_path / "serial", *flags)
    done = command("train", *SMALL, *flags, "--parallel.sequence", "3", "--run.folder", tmp_path / "run")
    assert "attention: kernel math (flash: it cannot drop attention weights)" in done.stdout
    same_run(metrics(tmp_path / "run"), reference)


def test_length_one(text, tmp_path):
    lines = train(tmp_path / "run", "--data.source", text, "--data.length", "1", "--parallel.sequence", "2")
    assert lines[-1]["eval_loss"] > 0


def test_a_run_can_be_repeated_from_its_own_configuration(command, serial, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = command("train", serial[0] / "config.toml")
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    same_run(metrics(folder), serial[1])


@pytest.mark.parametrize("flags", [[], ["--train.deterministic", "true", "--train.check_replicas", "true"]])
def test_two_runs_of_one_command_are_bit_identical(text, tmp_path, flags):
    degrees = ["--parallel.sequence", "2", "--parallel.data", "2", "--train.dropout", "0.1"]
    first, second = (train(tmp_path / name, "--data.source", text, *degrees, *flags) for name in ("a", "b"))
    measured = {"step_seconds", "tokens_per_second", "peak_bytes"}
    for line, other in zip(first, second, strict=True):
        assert {key: line[key] for key in line.keys() - measured} == {
            key: other[key] for key in other.keys() - measured
        }
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("a", "b")]
    assert weights[0] == weights[1]


def test_help_and_version(command):
    assert "lss train" in command("--help").stdout
    assert "--data.source" in command("train", "--help").stdout
    assert "--split" in command("eval", "--help").stdout
    assert run(*LSS, "--version").stdout == command("--version").stdout


@pytest.mark.parametrize(
    "flags", [["attention", "--lengths", "40,41"], ["step", "--preset", "gpt-tiny", "--gather", "x", "--chunks", "2"]]
)
def test_bench_writes_a_row_a_strategy_and_length(command, tmp_path, flags):
    lengths = [] if "--lengths" in flags else ["--lengths", "33,34"]
    done = command("bench", *flags, *lengths, "--repeats", "1", "--json", tmp_path / "rows.json")
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["strategy"] for row in rows] == ["serial", "lss"] * 2
    assert [row["sequence"] for row in rows] == [1, 2] * 2
    for row in rows:
        assert 0 < row["seconds_min"] <= row["seconds_median"]
        assert row["peak_bytes"] > 0
        assert row["flops_per_second"] > 0
    assert all(row["exposed_communication_seconds"] > 0 for row in rows if row["strategy"] == "lss")
