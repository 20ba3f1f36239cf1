"""`lss bench compare`: every row is of a run that equals plain torch, and says what it sends and takes."""

import json

import pytest

from lss.compare.way import Way
from lss.errors import ConfigError

TOLD = ("bench", "compare", "--preset", "gpt-tiny", "--repeats", "1")
# Collectives of a layer over three ranks, forward and backward together.
SENT = {"serial": 0, "lss/kv/regather": 3, "ring": 6, "concatenated/separate": 6}


def test_rows(command, tmp_path):
    file, shown = tmp_path / "rows.json", tmp_path / "page.html"
    told = ("--strategies", ",".join([*SENT, "ulysses"]), "--lengths", "65", "--sequence", "3")
    result = command(*TOLD, *told, "--hardware", "cpu-gloo", "--json", str(file), "--html", str(shown))
    assert result.returncode == 0, result.stderr
    rows = {row["strategy"]: row for row in json.loads(file.read_text())}
    assert "4 heads, for 3 ranks" in rows.pop("ulysses")["refused"]
    assert {name: row["collectives_a_layer"] for name, row in rows.items()} == SENT
    for name, row in rows.items():
        assert 0 < row["difference"] < 1e-5, name
        assert row["peak_bytes"] == pytest.approx(row["planned_bytes"], rel=0.05), name
        assert 0 < row["seconds_min"] <= row["seconds_median"]
    assert "ulysses at 65 tokens: refused: " in result.stdout
    assert shown.read_text().count("<svg") == 2


def test_what_needs_more_memory_is_not_run(command, tmp_path):
    file = tmp_path / "rows.json"
    result = command(
        *TOLD, "--strategies", "serial,lss", "--lengths", "64,512", "--memory", "25MB", "--json", str(file)
    )
    assert result.returncode == 0, result.stderr
    ran = {(row["strategy"], row["length"]): "seconds_min" in row for row in json.loads(file.read_text())}
    assert ran == {("serial", 64): True, ("lss", 64): True, ("serial", 512): False, ("lss", 512): True}
    assert "serial at 512 tokens: out of memory: 0.0" in result.stdout
    assert "planned_seconds" not in file.read_text()  # of no machine that was named


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (("--strategies", "rings"), "strategy 'rings'"),
        (("--strategies", "lss/y"), "lss/y: setting 'y'"),
        (("--strategies", "lss,lss"), "each once"),
        (("--lengths", "64,-1"), "lengths = -1"),
        (("--memory", "lots"), "'lots' bytes"),
        (("--hardware", "abacus"), "hardware 'abacus'"),
        (("--json", "nowhere/rows.json"), "json = nowhere/rows.json"),
    ],
)
def test_silly_requests(command, told, words):
    result = command(*TOLD, *told)
    assert result.returncode == 2
    assert words in result.stderr


def test_settings_stand_behind_a_strategy():
    attention = Way.of("lss/kv/regather/contiguous").attention
    assert (attention.gather, attention.keep, attention.layout) == ("kv", False, "contiguous")
    assert Way.of("lightseq").attention.layout == "contiguous"
    with pytest.raises(ConfigError, match="strategy ''"):
        Way.of("")
