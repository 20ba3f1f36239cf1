"""`verify` passes what is right and catches every seeded fault."""

import json
import sys

import pytest
import torch
from torch import nn

import lss
from lss.config import AttentionConfig
from lss.errors import ConfigError, LayoutError
from lss.models import GPT, GPTConfig
from lss.target import Target
from lss.verification import Report
from tests.faults import FAULTS, nothing

LENGTH = 12
# faults that only show with other degrees, positions or gathers than (sequence 2, data 1, learned, x)
SETTINGS = {
    "positional_table_left_out_of_the_data_axis": {"sequence": 1, "data": 2},
    "data_axis_left_out": {"data": 2},
    "dropout_masks_repeated_in_every_data_group": {"data": 2},
    "keys_and_values_swapped": {"gather": "kv"},
    "key_heads_in_the_wrong_order": {"gather": "kv"},
    "positions_start_anew_in_every_segment": {"positions": "rotary", "gather": "kv"},
    "key_positions_start_anew": {"positions": "rotary"},
}


def verified(name: str, sequence: int = 2, data: int = 2, positions: str = "learned", gather: str = "x") -> Report:
    mesh = lss.init_mesh(sequence, data, device="cpu")
    model, batch = target(positions)
    with FAULTS.get(name, nothing)():
        return lss.verify(model, batch, mesh, attention=AttentionConfig(gather=gather), shift_labels=1)


def target(positions: str = "learned") -> tuple[nn.Module, dict]:
    torch.manual_seed(0)
    rates = {"dropout": 0.1, "attention_dropout": 0.1}
    model = GPT(GPTConfig(24, 2, 4, 2, 17, LENGTH, positions, tie_weights=True, **rates))
    text = torch.randint(17, (2, LENGTH))
    labels = text.clone()
    labels[0, 1:6] = -100
    return model, {"tokens": text, "labels": labels}


@pytest.mark.parametrize("positions", ["learned", "rotary"])
@pytest.mark.parametrize("gather", ["x", "kv", "separate"])
def test_what_is_right_passes(ranks, positions, gather):
    for report in ranks.run(verified, 4, "nothing", 2, 2, positions, gather):
        assert report.passed, report.to_dict()
        kinds = {check.kind for check in report.checks}
        assert kinds == {
            "loss",
            "output",
            "gradient",
            "norm",
            "parameter",
            "sanity",
            "loss, dropout",
            "gradient, dropout",
        }


def test_there_are_enough_faults():
    assert len(FAULTS) >= 25


@pytest.mark.parametrize("name", FAULTS)
def test_every_seeded_fault_is_caught(ranks, name):
    setting = {"sequence": 2, "data": 1, "positions": "learned", "gather": "x"} | SETTINGS.get(name, {})
    reports = ranks.run(verified, setting["sequence"] * setting["data"], name, *setting.values())
    assert not any(report.passed for report in reports)
    assert len({json.dumps(report.to_dict()) for report in reports}) == 1


@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    [
        # where outputs differ, so does the gradient of the loss by the logits
        ("border_key_not_seen", "blocks.0.attention.output", "head"),
        ("positional_rows_off_by_one", "positions", "head"),
        ("labels_not_shifted", "", "head"),
        ("reduce_scatter_left_out", "", "blocks.1.attention_norm"),
    ],
)
def test_the_first_module_is_named(ranks, name, forward, backward):
    for report in ranks.run(verified, 4, name):
        assert report.first_forward == forward
        assert report.first_backward == backward


def useless(kind: str) -> Report:
    mesh = lss.init_mesh(1 if kind == "alone" else 2, device="cpu")
    model, batch = target()
    with torch.no_grad():
        if kind == "zero head":
            model.head.weight = nn.Parameter(torch.zeros_like(model.head.weight))
        if kind == "ignored":
            batch["labels"].fill_(-100)
    return lss.verify(model, batch, mesh, shift_labels=1)


@pytest.mark.parametrize(
    ("kind", "check"),
    [("zero head", "the loss can move"), ("ignored", "some gradient is not zero"), ("alone", "more than one rank")],
)
def test_comparisons_that_prove_nothing_fail(ranks, kind, check):
    for report in ranks.run(useless, 1 if kind == "alone" else 2, kind):
        assert not report.passed
        assert check in [found.name for found in report.checks if not found.passed]


def misuse() -> list[str]:
    mesh = lss.init_mesh(1, 2, device="cpu")
    model, batch = target()
    found = []
    for wrong in ({"tokens": batch["tokens"]}, {name: part[:1] for name, part in batch.items()}):
        with pytest.raises(LayoutError) as raised:
            lss.verify(model, wrong, mesh)
        found.append(str(raised.value))
    return found


def test_misuse_is_refused(ranks):
    for messages in ranks.run(misuse, 2):
        assert "`labels`" in messages[0]
        assert "1 sequences over 2 data groups" in messages[1]


def test_the_command(command, tmp_path):
    report = tmp_path / "report.json"
    done = command("verify", "gpt-tiny", "--length", "21", "--json", report)
    assert done.returncode == 0, done.stderr
    assert "EQUAL to the serial run" in done.stdout
    written = json.loads(report.read_text())
    assert written["passed"]
    excesses = [check["error"] / check["bound"] if check["bound"] else 0.0 for check in written["checks"]]
    assert excesses == sorted(excesses, reverse=True)
    assert excesses[0] > 0


USER_MODULE = """
import torch
from torch import nn
from lss.models import GPT, GPTConfig

class Wrong(GPT):
    '''Looks at the number of tokens, in a way that a trial on more of them does not see.'''

    def forward(self, tokens):
        logits = super().forward(tokens)
        return logits * (2 if logits.size(1) < 9 else 1)

def make(kind):
    torch.manual_seed(0)
    text = torch.randint(17, (1, 10))
    return kind(GPTConfig(16, 1, 2, vocabulary=17, max_length=9)), {"tokens": text[:, :-1], "labels": text[:, 1:]}

def right():
    return make(GPT)

def wrong():
    return make(Wrong)

def nonsense():
    return 3

def rotary():
    class Mixed(GPT):
        def forward(self, tokens):
            logits = super().forward(tokens)
            return logits * (2 if logits.size(1) < 9 else 1)
    torch.manual_seed(0)
    text = torch.randint(17, (1, 10))
    shape = GPTConfig(16, 1, 2, vocabulary=17, max_length=9, positions="rotary")
    return Mixed(shape), {"tokens": text[:, :-1], "labels": text[:, 1:]}

class Mixing(GPT):
    def forward(self, tokens):
        logits = super().forward(tokens)
        return logits + logits.reshape(logits.size(0), logits.size(2), logits.size(1)).transpose(1, 2)

def mixing():
    return make(Mixing)

def buffered():
    model, batch = make(GPT)
    model.register_buffer("mask", torch.ones(3, dtype=torch.bool))
    model.blocks.requires_grad_(False)
    model.positions.requires_grad_(False)
    return model, batch

def boom():
    raise ArithmeticError("no")

def badly_named():
    model, batch = make(GPT)
    return model, {"input": batch["tokens"], "labels": batch["labels"]}
"""


def test_the_command_on_a_users_function(command, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(USER_MODULE)
    monkeypatch.chdir(tmp_path)
    assert command("verify", "mine:right").returncode == 0
    done = command("verify", "mine:wrong", "--sequence", "3", "--json", "r.json")
    assert done.returncode == 4
    assert "NOT EQUAL" in done.stdout
    assert not json.loads((tmp_path / "r.json").read_text())["passed"]
    assert command("verify", "mine:buffered").returncode == 0
    done = command("verify", "mine:rotary")
    assert done.returncode == 4
    assert "first module whose output differs: Mixed" in done.stdout
    done = command("verify", "mine:mixing")
    assert done.returncode == 2
    assert "the model calls reshape, which gives other values for a token" in done.stderr
    done = command("verify", "mine:badly_named")
    assert done.returncode == 2
    assert "the plain model cannot be run on the batch: TypeError" in done.stderr
    assert done.stderr.count("lss:") == 1


@pytest.mark.parametrize(
    ("name", "part"),
    {
        "mine:boom": "failed: ArithmeticError: no",
        ":f": "cannot be imported",
        "mine:nonsense": "returned a int",
        "mine:missing": "cannot be imported",
        "nowhere:f": "cannot be imported",
        "gpt-huge": "gpt-20m",
    }.items(),
)
def test_targets_that_are_none_are_refused(tmp_path, monkeypatch, name, part):
    (tmp_path / "mine.py").write_text(USER_MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    with pytest.raises(ConfigError) as raised:
        Target(name, 0, 1).load()
    assert part in str(raised.value)
