"""Defaults, then TOML, then flags; and errors that name what was meant."""

import dataclasses

import pytest

from lss.config import Config
from lss.errors import LssError
from lss.flags import parse, parser


def read(*arguments):
    return parse(parser("train"), arguments)[0]


def test_flags_win_over_toml_over_defaults(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text("[train]\nsteps = 7\nbatch = 3\n[data]\nlength = 33\n")
    config = read("--train.steps", "9", str(file), "--train.learning_rate=1e-2")
    assert (config.train.steps, config.train.batch, config.data.length) == (9, 3, 33)
    assert config.train.learning_rate == 0.01
    assert config.attention.gather == Config().attention.gather


def test_the_resolved_configuration_reads_back_the_same(tmp_path):
    config = read("--model.heads", "8", "--data.source", 'a "quoted" name', "--train.precision", "fp64")
    file = tmp_path / "config.toml"
    file.write_text(config.to_toml())
    assert read(str(file)) == config.resolved()


def test_a_preset_can_be_changed():
    shape = read("--model.preset", "gpt-20m", "--model.positions", "rotary", "--model.key_value_heads", "2").gpt()
    assert (shape.width, shape.layers, shape.heads, shape.key_value_heads) == (512, 6, 8, 2)
    assert shape.positions == "rotary"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--train.stepz", "3"], r"unknown key 'train.stepz'[\s\S]*'train.steps'"),
        (["--train.step", "3"], r"unknown key 'train.step'[\s\S]*'train.steps'"),
        (["--steps", "3"], r"unknown key 'steps'[\s\S]*'train.steps'"),
        (["--train.steps", "many"], r"train.steps = many[\s\S]*a whole number"),
        (["--train.steps", "1.5"], r"train.steps = 1.5[\s\S]*a whole number"),
        (["--train.steps"], "expected one argument"),
        (["--train.steps", "0"], r"train.steps = 0[\s\S]*at least 1"),
        (["--train.learning_rate", "fast"], r"train.learning_rate = fast[\s\S]*a number"),
        (["--train.learning_rate", "inf"], "train.learning_rate"),
        (["--train.precision", "fp8"], r"train.precision = fp8[\s\S]*'fp32', 'bf16', 'fp64'"),
        (["--train.dropout", "1"], "train.dropout = 1"),
        (["--train.accumulation", "9"], "train.accumulation = 9"),
        (["--train.seed", "-1"], "train.seed = -1"),
        (["--train.clip_norm", "-1"], "train.clip_norm = -1"),
        (["--data.source", ""], "data.source is empty"),
        (["--parallel.timeout", "1e300"], "parallel.timeout"),
        (["--train.steps", "99999999999999999999"], "train.steps"),
        (["--print_config"], "print_config"),
        (["--data.length", "0"], r"data.length = 0[\s\S]*at least 1"),
        (["--parallel.sequence", "0"], "sequence=0"),
        (["--model.preset", "gpt-5"], r"model.preset = gpt-5[\s\S]*gpt-20m"),
        (["--model.heads", "5"], "width=128 with heads=5"),
        (["--model.width", "wide"], r"model.width = wide[\s\S]*a whole number"),
        (["--model.key_value_heads", "3"], "key_value_heads=3"),
        (["--model.tie_weights", "perhaps"], r"model.tie_weights = perhaps[\s\S]*true or false"),
        (["--attention.gather", "y"], r"attention.gather = y[\s\S]*'x', 'kv', 'separate'"),
        (["missing.toml"], "missing.toml"),
    ],
)
def test_wrong_input_is_named(arguments, message):
    with pytest.raises(LssError, match=message):
        read(*arguments)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[train]\nstep = 3\n", r"unknown key 'train.step' in .*[\s\S]*'train.steps'"),
        ("[trian]\nsteps = 3\n", r"unknown key 'trian.steps'[\s\S]*'train.steps'"),
        ("[train]\nsteps = 'x'\n", r"train.steps = x[\s\S]*a whole number"),
        ("[train\n", "cannot be read"),
        ("train = 3\n", "train"),
    ],
)
def test_wrong_toml_is_named(tmp_path, text, message):
    file = tmp_path / "a.toml"
    file.write_text(text)
    with pytest.raises(LssError, match=message):
        read(str(file))


def test_few_flags():
    sections = [section.default_factory for section in dataclasses.fields(Config)]
    assert sum(len(dataclasses.fields(section)) for section in sections) <= 40
