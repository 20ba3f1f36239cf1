"""Hardware files: those that are shipped, and what is wrong with others."""

import pytest

from lss.errors import ConfigError
from lss.plan.hardware import Hardware, shipped

NAMES = {"a100", "cpu-gloo", "h100", "h200", "mi250x", "v100-summit"}
LATENCY = "latency = 4.0e-6\n"
# A change to the file of h100, and what is said of it.
WRONG = {
    "unknown key": ("jitter =", "jiter =", "'jiter' is not accepted"),
    "unknown key of a link": ("[node]", "[node]\nspeed = 3", "does not accept option 'speed'"),
    "unknown dtype": ("[rates.attention]", "[rates.attention]\nfloat32 = 1.0", "rates.attention.float32"),
    "unknown collective": ("all_reduce =", "allreduce =", "collectives.allreduce"),
    "unknown algorithm": ('"tree"', '"star"', "Got value: star"),
    "unknown device": ('"cuda"', '"tpu"', "Got value: tpu"),
    "missing key": ('device = "cuda"\n', "", "required: device"),
    "missing key of a link": (LATENCY, "", "required: node.latency"),
    "no products of float32": ("fp32 = 50.0e12\n", "", "rates.product without fp32"),
    "negative rate": ("2750.0e9", "-1.0", "rates.memory = -1.0"),
    "rate of 0": ("690.0e12", "0.0", "rates.product.bf16 = 0.0"),
    "negative time": (LATENCY, "latency = -1.0\n", "node.latency = -1.0"),
    "infinite": ("78.0e9", "inf", "memory = inf"),
    "a word for a number": ("78.0e9", '"much"', "key \"memory\": Expected a <class 'float'>. Got value: much"),
    "half a rank": ("ranks_per_node = 8", "ranks_per_node = 1.5", "Got value: 1.5"),
    "no ranks on a node": ("ranks_per_node = 8", "ranks_per_node = 0", "ranks_per_node = 0"),
    "more overlap than all": ("jitter =", "overlap = 2.0\njitter =", "overlap = 2.0"),
    "no TOML": ("name =", "name = =", "Invalid value (at line"),
}


@pytest.mark.parametrize("name", sorted(NAMES))
def test_shipped(name):
    hardware = Hardware.named(name)
    assert hardware.name == name
    assert len(hardware.source) > 40
    assert hardware.rates.product["bf16"] >= hardware.rates.product["fp32"]
    assert set(hardware.collectives) == {"all_gather", "reduce_scatter", "all_reduce"}


def test_all_are_here():
    assert set(shipped()) == NAMES


def test_a_file_is_read_as_a_shipped_one(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(shipped()["h100"].read_text().replace('name = "h100"', 'name = "mine"'))
    assert Hardware.named(str(file)).rates == Hardware.named("h100").rates


@pytest.mark.parametrize(("old", "new", "said"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_said_in_one_line(tmp_path, old, new, said):
    text = shipped()["h100"].read_text()
    key = f"\n{old}" if f"\n{old}" in text else old
    assert key in text
    file = tmp_path / "wrong.toml"
    file.write_text(text.replace(key, key.replace(old, new), 1))
    with pytest.raises(ConfigError) as caught:
        Hardware.named(str(file))
    first, second, *_ = str(caught.value).splitlines()
    assert said in first
    assert second.startswith("  allowed: ")


def test_an_unknown_name():
    with pytest.raises(ConfigError, match="hardware 'h900'\n  allowed: a100, cpu-gloo, h100"):
        Hardware.named("h900")
