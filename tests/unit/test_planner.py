"""`lss plan`: what is extrapolated equals what is planned whole, searches, what-ifs, and silly requests."""

import json
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lss.config import AttentionConfig, Config, DataConfig, ModelConfig, ParallelConfig, TrainConfig
from lss.errors import ConfigError
from lss.ledger import Entry
from lss.models import GPT
from lss.plan import Hardware, Setup, WhatIf, make_plan
from lss.plan.choice import command_of
from lss.plan.command import bytes_of
from lss.plan.hardware import Link
from lss.plan.layers import num_like_layers
from lss.plan.links import Group, seconds
from lss.plan.plan import EXACTLY, _played, traced
from lss.plan.timeline import play
from lss.plan.trace import Operator, Start, Wait

V100 = Hardware.named("v100-summit")


def setup_of(num_ranks: int, length: int, device: str = "cuda", **changed) -> Setup:
    parallel = {name: changed.pop(name) for name in ("data", "strategy", "shard_parameters") if name in changed}
    train = {name: changed.pop(name) for name in ("recompute", "batch") if name in changed}
    config = Config(
        model=ModelConfig("gpt-20m"),
        data=DataConfig(length=length),
        parallel=ParallelConfig(num_ranks // parallel.get("data", 1), **parallel),
        attention=AttentionConfig(**changed),
        train=TrainConfig(**{"batch": 2, **train}),
    )
    return Setup("", config, device)


@pytest.mark.parametrize(
    "setup",
    [
        setup_of(4, 4096),
        setup_of(1, 256, "cpu"),
        setup_of(64, 65536, recompute=True),
        setup_of(8, 8192, shard_parameters=True),
        setup_of(4, 2048, keep=False, chunks=2),
        setup_of(4, 64, batch=64),
    ],
    ids=["plain", "one rank", "recomputed", "cut", "chunks", "many sequences"],
)
def test_two_and_three_layers_tell_of_six(setup):
    told, whole = make_plan(setup, V100), _played(setup, traced(setup), V100, EXACTLY)
    assert num_like_layers(setup) == 6
    assert told.peak.total == pytest.approx(whole.peak.total, rel=2e-3)
    assert told.peak.phase == whole.peak.phase
    assert told.flops == pytest.approx(whole.flops, rel=1e-3)
    assert told.timeline.total == pytest.approx(whole.timeline.total, rel=5e-3)
    assert {(m.operation, m.phase): m.count for m in told.messages if m.phase != "step"} == {
        (m.operation, m.phase): m.count for m in whole.messages if m.phase != "step"
    }


def test_operations_are_those_of_torch():
    """One rank, all pairs stored: nothing is skipped or done twice, so that torch's own counter says the same."""
    setup = setup_of(1, 128, kernel="math", batch=1)
    model = GPT(replace(setup.config.gpt(), max_length=128))
    tokens = torch.zeros(1, 128, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    plain = counter.get_total_flops()
    assert make_plan(setup, V100).flops == pytest.approx(plain, rel=0.05)  # `math` computes scores again in backward


@pytest.mark.parametrize(
    ("operation", "group", "steps", "share"),
    [
        ("all_gather", Group.of(6, 1, 6, 6), 5, 1.0),
        ("all_reduce", Group.of(6, 1, 6, 6), 2 * 2.584962500721156, 1.0),
        ("reduce_scatter", Group.of(3, 1, 24, 6), 2, 1.0),
    ],
)
def test_messages_inside_of_a_node(operation, group, steps, share):
    link, sent = V100.node, 1e9
    assert seconds(V100, operation, sent, group) == pytest.approx(steps * link.latency + share * sent / link.bandwidth)


def test_groups_share_the_link_of_a_node():
    """Data groups of 864 x 4 ranks: each of a node's 6 ranks belongs to another one, and all use its link at once."""
    group = Group.of(4, 864, 3456, 6)
    assert (group.per_node, group.rivals, group.num_nodes) == (1, 6, 4)
    alone = Group.of(864, 1, 864, 6)
    assert (alone.per_node, alone.rivals, alone.num_nodes) == (6, 1, 144)
    across = Group.of(4, 1, 24, 6)  # ranks 4 to 7 are on two nodes of 6, and all wait for them
    assert (across.per_node, across.rivals, across.num_nodes) == (2, 2, 2)


def test_overlap_hides_what_can_be_hidden():
    setup, slow = setup_of(16, 4096), replace(V100, between=Link(1e-5, 2e9), node=Link(1e-5, 2e9))
    told, whole = (
        make_plan(setup, slow, WhatIf(overlap=True)),
        _played(setup, traced(setup), slow, WhatIf(overlap=True)),
    )
    assert told.timeline.communication >= 0
    assert told.timeline.total == pytest.approx(whole.timeline.total, rel=5e-3)


def test_a_message_is_hidden_behind_what_is_computed():
    work = Operator("mm", "product", int(14.9e12), 0, torch.float32)  # a second
    entry = Entry("sequence", "all_gather", "forward", "layer")
    line = play([work, Start(entry, 1), work, Wait(entry), work], replace(V100, jitter=0.0), lambda *_: 1.5, 2, 1.0)
    assert line.computation == pytest.approx(3.0, abs=1e-3)
    assert line.communication == pytest.approx(0.5, abs=1e-3)
    none = replace(V100, jitter=0.0, overlap=0.0)
    assert play([work, Start(entry, 1), work, Wait(entry)], none, lambda *_: 1.5, 2, 1.0).communication == 1.5
    slow = play([work, Start(entry, 1), Wait(entry)], replace(V100, jitter=0.0), lambda *_: 1.5, 2, 1.2)
    assert slow.waiting == pytest.approx(0.2, abs=1e-3)


def test_precisions():
    setup, held, sent = setup_of(4, 1024, gather="kv"), {}, {}
    for precision in ("fp64", "fp32", "bf16"):
        train = replace(setup.config.train, precision=precision)
        plan = make_plan(replace(setup, config=replace(setup.config, train=train)), V100)
        held[precision] = plan.peak.bytes["parameters"]
        (sent[precision],) = (message.bytes for message in plan.messages if message.operation == "all_gather")
    assert held["fp64"] == 2 * held["fp32"] == 2 * held["bf16"]
    assert sent["fp64"] == 2 * sent["fp32"] == 4 * sent["bf16"]  # autocast


def test_what_ifs_change_time_alone():
    setup = setup_of(36, 8192, gather="kv")
    plan = make_plan(setup, V100)
    for what_if in (WhatIf(hierarchical=True), WhatIf(overlap=True), WhatIf(compression=4.0)):
        other = make_plan(setup, V100, what_if)
        assert other.timeline.total < plan.timeline.total
        assert other.peak == plan.peak
        assert other.what_if.is_exact == (what_if.compression == 1.0)
    assert make_plan(setup, V100, WhatIf(straggler=1.5)).timeline.waiting > plan.timeline.waiting


@pytest.mark.parametrize(
    ("text", "size"), [("16GB", 16e9), ("80GiB", 80 * 2**30), ("1.6e10", 1.6e10), ("512 MB", 512e6), ("2T", 2e12)]
)
def test_bytes(text, size):
    assert bytes_of(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-3GB", "nan", "16 bananas", "0", "inf"])
def test_no_bytes(text):
    with pytest.raises(ConfigError, match="such as 16GB"):
        bytes_of(text)


def test_the_command_writes_what_it_prints(command, tmp_path):
    file = tmp_path / "plan.json"
    result = command(
        "plan", "gpt-20m", "--ranks", "36", "--length", "2088", "--hardware", "v100-summit", "--json", str(file)
    )
    assert result.returncode == 0, result.stderr
    plan = json.loads(file.read_text())
    assert plan["peak_bytes"] == sum(plan["bytes"].values())
    assert plan["step_seconds"] == pytest.approx(sum(plan["seconds"].values()))
    assert 0 < plan["communication_share"] < 1
    assert 0 < plan["efficiency"]["time"] <= 1
    assert plan["fits"]
    assert {row["operation"] for row in plan["collectives"]} == {"all_gather", "reduce_scatter", "all_reduce"}


def test_a_model_that_counts_its_layers_is_planned_whole():
    setup = replace(setup_of(2, 64), target="tests.planned:counting")
    assert make_plan(setup, V100).messages == _played(setup, traced(setup), V100, EXACTLY).messages


@pytest.mark.parametrize("strategy", ["lss", "ring", "ulysses"])
def test_recomputed_layers_keep_their_inputs_alone(strategy):
    setup = setup_of(4, 4096, recompute=True, strategy=strategy)
    two, three = (max(_kept_for_backward(replace(setup, depth=depth))) for depth in (2, 3))
    assert three - two == pytest.approx(2 * 1024 * 512 * 4, rel=0.01)  # sequences, tokens of a rank, width, bytes


def _kept_for_backward(setup: Setup) -> list[int]:
    return [peak.bytes["activations"] for peak in _played(setup, traced(setup), V100, EXACTLY).peaks]


def test_the_longest_that_fits(command, tmp_path):
    file = tmp_path / "plan.json"
    told = ("plan", "gpt-20m", "--ranks", "4", "--batch", "1", "--hardware", "v100-summit", "--json", str(file))
    result = command(*told, "--length", "4096", "--fit", "2GB")
    assert result.returncode == 0, result.stderr
    found = json.loads(file.read_text())
    assert found["peak_bytes"] <= 2e9
    assert found["length"] % 4 == 0
    result = command(*told, "--length", str(int(found["length"] * 1.02) // 4 * 4))
    assert json.loads(file.read_text())["peak_bytes"] > 2e9


def test_the_best_way_fits_and_is_the_fastest_of_its_plans(command, tmp_path):
    file = tmp_path / "best.json"
    result = command(
        *("plan", "gpt-20m", "--ranks", "4", "--batch", "4", "--length", "8192", "--hardware", "v100-summit"),
        *("--best", "--fit", "3GB", "--json", str(file)),
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(file.read_text())
    assert found["num_candidates"] >= 100
    times = [plan["step_seconds"] for plan in found["best"]]
    assert times == sorted(times)
    assert all(plan["peak_bytes"] <= 3e9 for plan in found["best"])
    assert "lss train --model.preset gpt-20m" in found["command"]
    first = found["best"][0]
    setup = setup_of(4, 8192, data=first["data_groups"], batch=first["batch"], **first["attention"])
    for changed in ({"keep": False}, {"keep": False, "chunks": 4}):  # by which messages may be hidden better
        attention = replace(setup.config.attention, **changed)
        other = make_plan(replace(setup, config=replace(setup.config, attention=attention)), V100)
        assert other.timeline.total >= 0.99 * times[0]


def test_a_file_is_planned_as_it_says_but_for_flags(command, tmp_path):
    file, found = tmp_path / "run.toml", tmp_path / "plan.json"
    file.write_text(
        '[model]\npreset = "gpt-tiny"\n[data]\nlength = 64\n'
        '[parallel]\nsequence = 2\ndata = 2\nstrategy = "concatenated"\nshard_parameters = true\n'
        '[attention]\ngather = "kv"\nkeep = false\nchunks = 2\nlayout = "contiguous"\n'
    )
    result = command("plan", str(file), "--chunks", "4", "--data-groups", "1", "--json", str(found))
    assert result.returncode == 0, result.stderr
    plan = json.loads(found.read_text())
    assert (plan["sequence"], plan["data_groups"]) == (2, 1)
    assert (plan["strategy"], plan["shard_parameters"]) == ("concatenated", True)
    attention = {"gather": "kv", "kernel": "auto", "keep": False, "chunks": 4, "layout": "contiguous"}
    assert plan["attention"] == attention


def test_the_command_starts_as_many_ranks_as_were_planned(command):
    result = command("plan", "gpt-tiny", "--length", "128", "--ranks", "6", "--batch", "1", "--best")
    assert result.returncode == 0, result.stderr
    assert "torchrun --nnodes 1 --nproc-per-node 6 " in result.stdout
    plan = make_plan(Setup("", replace(Config(), parallel=ParallelConfig(12)), "cuda"), Hardware.named("h100"))
    assert command_of(plan).startswith("torchrun --nnodes 2 --nproc-per-node 6 ")


SILLY = {
    "more ranks than tokens": (("gpt-tiny", "--ranks", "64", "--length", "8"), "64 ranks for a sequence of 8 tokens"),
    "unknown hardware": (("gpt-tiny", "--hardware", "abacus"), "hardware 'abacus'"),
    "unknown target": (("gpt-huge",), "target 'gpt-huge'"),
    "no such module": (("no_such_module:make",), "cannot be imported"),
    "a target that fails": (("tests.planned:failing", "--length", "64"), "failed: ValueError: broken"),
    "a target that reads values": (("tests.planned:reading", "--length", "64"), "reads values"),
    "a target that reads values at once": (("tests.planned:choosing", "--length", "64"), "choosing reads values"),
    "a model that is converted": (("tests.planned:converted", "--length", "64"), "converted is converted"),
    "labels that are a list": (("tests.planned:listed", "--length", "64"), "returned labels of []"),
    "no data groups": (("gpt-tiny", "--length", "64", "--data-groups", "0"), "data_groups = 0"),
    "a target of another length": (("tests.planned:fixed", "--length", "64"), "returned labels of [1, 32]"),
    "no ranks": (("gpt-tiny", "--ranks", "0"), "ranks = 0"),
    "groups that do not divide": (("gpt-tiny", "--ranks", "6", "--data-groups", "4"), "6 ranks in 4 data groups"),
    "a negative length": (("gpt-tiny", "--length", "-5"), "length = -5"),
    "no bytes": (("gpt-tiny", "--fit", "much"), "'much' bytes"),
    "a compression below 1": (("gpt-tiny", "--compression", "0.5"), "compression = 0.5"),
    "a kernel of another device": (("gpt-tiny", "--kernel", "flex", "--hardware", "cpu-gloo"), "flex"),
    "nowhere to write": (("gpt-tiny", "--json", "/no/such/folder/plan.json"), "a folder that exists"),
    "nothing fits": (("gpt-20m", "--fit", "1MB", "--length", "64"), "for one token a rank"),
}


@pytest.mark.parametrize("name", SILLY)
def test_silly_requests_end_with_one_message(command, name):
    arguments, said = SILLY[name]
    hardware = () if "--hardware" in arguments else ("--hardware", "v100-summit")
    result = command("plan", *arguments, *hardware)
    assert result.returncode == 2, result.stderr
    assert said in result.stderr.replace("\n", " ")
    assert "Traceback" not in result.stderr
