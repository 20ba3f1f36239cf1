"""Rivals over ranks equal the serial run, send what docs/strategies.md says, and refuse what their method cannot do."""

import math
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import lss
from lss.config import AttentionConfig
from lss.errors import LssError, ModelError
from lss.models import GPT, GPTConfig
from lss.state import full_gradients
from lss.strategies import STRATEGY_NAMES, parallelize_as
from lss.verification import Report
from tests import pretrained
from tests.models import assert_same, tiny_gpt, tokens_and_labels

LENGTH = 13  # a multiple of no number of ranks
OF_GPT = ("megatron", "megatron-tp", "concatenated")
OVER_RANKS = [name for name in STRATEGY_NAMES if name != "serial"]


def gpt(strategy: str, is_causal: bool) -> GPT:
    """With dropout of both kinds, and fewer key-value heads than there are ranks where the strategy takes them."""
    torch.manual_seed(0)
    grouped = 4 if strategy == "megatron-tp" else 2
    model = GPT(GPTConfig(32, 1, 8, grouped, 17, LENGTH, dropout=0.1, attention_dropout=0.1))
    for block in model.blocks:
        block.attention.is_causal = is_causal
    return model


def verified(strategy: str, kind: str, sequence: int, data: int, layout: str) -> Report:
    mesh = lss.init_mesh(sequence, data, device="cpu")
    if kind == "BERT":
        rates = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
        model, batch = pretrained.make("BERT", **rates), pretrained.batch()
    else:
        model = gpt(strategy, kind == "causal")
        batch = dict(zip(("tokens", "labels"), tokens_and_labels(max(2, data), LENGTH), strict=True))
    return lss.verify(model, batch, mesh, attention=AttentionConfig(layout=layout), strategy=strategy)


def allowed() -> list[tuple[str, str, int, int, str]]:
    """Of each strategy: models of both kinds over 2, 4 and 2 x 2 ranks, in both layouts."""
    found = [("serial", "causal", 1, data, "zigzag") for data in (2, 4)]
    for strategy in OVER_RANKS:
        if strategy == "lightseq":
            found += [(strategy, "causal", *degrees, "contiguous") for degrees in ((2, 1), (4, 1), (2, 2))]
            continue
        whole = "BERT" if strategy in ("ring", "ulysses") else "bidirectional"
        found += [
            (strategy, "causal", 2, 1, "zigzag"),
            (strategy, "causal", 4, 1, "contiguous"),
            (strategy, "causal", 2, 2, "zigzag"),
            (strategy, whole, 2, 1, "contiguous"),
            (strategy, whole, 4, 1, "zigzag"),
        ]
    return found


@pytest.mark.parametrize(("strategy", "kind", "sequence", "data", "layout"), allowed())
def test_each_equals_the_serial_run(ranks, strategy, kind, sequence, data, layout):
    for report in ranks.run(verified, sequence * data, strategy, kind, sequence, data, layout):
        assert report.passed, report.to_dict()
        assert "float64" in report.title
        assert max(check.error for check in report.checks) < 1e-12
        assert {"loss, dropout", "gradient, dropout"} <= {check.kind for check in report.checks}


def run_megatron(layout: str, kernel: str) -> tuple[dict[str, torch.Tensor], list[dict]]:
    mesh = lss.init_mesh(torch.distributed.get_world_size(), device="cpu")
    model = parallelize_as("megatron", tiny_gpt(LENGTH), mesh, layout=layout, kernel=kernel)
    tokens, labels = tokens_and_labels(2, LENGTH)
    batch = lss.shard({"tokens": tokens, "labels": labels}, mesh, shift_labels=0, layout=layout)
    logits = model(batch["tokens"], segment=batch["segment"])
    count = lss.count_tokens(model, batch["labels"])
    lss.token_mean_cross_entropy(logits, batch["labels"], count).backward()
    lss.average_gradients(model)
    return full_gradients(model), lss.context.context_of(model).ledger.rows()


@pytest.mark.parametrize(("layout", "kernel"), [("contiguous", "stored"), ("zigzag", "auto")])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_megatron_as_the_paper_describes_it(ranks, num_ranks, layout, kernel):
    model = tiny_gpt(LENGTH)
    tokens, labels = tokens_and_labels(2, LENGTH)
    F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=-100).backward()
    for gradients, rows in ranks.run(run_megatron, num_ranks, layout, kernel):
        for name, weight in model.named_parameters():
            assert_same(gradients[name], weight.grad, name)
        of_blocks = [row for row in rows if row["layer"].startswith("blocks.")]
        sent = {(row["operation"], row["pass"]): 0 for row in of_blocks}
        for row in of_blocks:
            sent[row["operation"], row["pass"]] += row["count"]
        number = 2 * len(model.blocks)  # one of each for attention, one for the feed-forward
        assert sent == {
            ("all_gather", "forward"): number,
            ("reduce_scatter", "forward"): number,
            ("all_gather", "backward"): number,
            ("reduce_scatter", "backward"): number,
        }


def refused(*setting: object) -> str:
    with pytest.raises(LssError) as raised:
        verified(*setting)
    assert raised.value.allowed
    return str(raised.value)


@pytest.mark.parametrize(
    ("strategy", "kind", "num_ranks", "layout", "reason"),
    [
        ("serial", "causal", 2, "zigzag", "strategy serial over 2 ranks a sequence"),
        ("lightseq", "causal", 2, "zigzag", "blocks.0.attention by the order of LightSeq, not in a row"),
        ("lightseq", "bidirectional", 2, "contiguous", "by the order of LightSeq, with a mask that is not causal"),
        ("ulysses", "causal", 3, "zigzag", "blocks.0.attention has 8 heads, for 3 ranks"),
        ("megatron-tp", "causal", 3, "zigzag", "8 heads, 4 of them with keys, over 3 ranks"),
    ],
)
def test_what_a_method_cannot_do_is_refused_on_all_ranks(ranks, strategy, kind, num_ranks, layout, reason):
    for said in ranks.run(refused, num_ranks, strategy, kind, num_ranks, 1, layout):
        assert reason in said.splitlines()[0]


@pytest.mark.parametrize(
    ("strategy", "options", "reason"),
    [(strategy, {"gather": "x"}, "gather='x' and chunks=1") for strategy in ("ring", "lightseq", "ulysses")]
    + [(strategy, {"chunks": 2}, "gather='auto' and chunks=2") for strategy in ("ring", "lightseq", "ulysses")]
    + [(strategy, {"kernel": "stored"}, "kernel='stored'") for strategy in ("ring", "lightseq")],
)
def test_schedules_that_a_method_does_not_have_are_refused(strategy, options, reason):
    with pytest.raises(ModelError, match=f"strategy='{strategy}' with {reason}"):
        lss.parallelize(gpt(strategy, True), None, strategy=strategy, **options)


@pytest.mark.parametrize("strategy", OF_GPT)
def test_models_of_others_are_refused(strategy):
    other = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8), 1, enable_nested_tensor=False)
    with pytest.raises(ModelError, match=f"a TransformerEncoder with the strategy {strategy}"):
        parallelize_as(strategy, other, None)
    assert isinstance(parallelize_as(strategy, tiny_gpt(LENGTH), None), GPT)


def test_unknown_strategies_are_refused():
    with pytest.raises(ModelError, match=r"strategy='pipeline'[\s\S]*allowed: lss, serial, ring"):
        parallelize_as("pipeline", gpt("lss", True), None)


def test_weights_are_cut_once(command):
    flags = ["--parallel.strategy", "megatron-tp", "--parallel.shard_parameters", "true", "--parallel.sequence", "2"]
    done = command("train", *flags, "--data.length", "40")
    assert done.returncode == 2
    assert "strategy megatron-tp with shard_parameters" in done.stderr
    assert done.stderr.count("lss:") == 1, done.stderr


def explained() -> str:
    return lss.explain(parallelize_as("megatron-tp", tiny_gpt(LENGTH), lss.init_mesh(2, device="cpu")))


def test_weights_that_are_cut_are_explained(ranks):
    for said in ranks.run(explained, 2):
        assert re.search(r"averaged over the data groups: .* in 23 tensors", said)  # 11 of each block, and the table
        assert re.search(r"averaged over all ranks: .* in 12 tensors", said)  # norms, embedding, head


# What leaves a rank of n, of the first arguments of torch's operators. Any other that sends is an error.
LEAVES = {
    "send": lambda n, tensors, group: sum(part.nbytes for part in tensors),
    "recv_": lambda n, tensors, group: 0,
    "_allgather_base_": lambda n, whole, part: (n - 1) * part.nbytes,
    "alltoall_base_": lambda n, received, parts: (n - 1) * parts.nbytes // n,
}


class Dispatched(TorchDispatchMode):
    """Bytes that leave this rank by torch.distributed, whoever calls it."""

    def __init__(self, num_ranks: int) -> None:
        super().__init__()
        self.num_ranks, self.bytes = num_ranks, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "c10d" in function.namespace:
            self.bytes += LEAVES[function.overloadpacket.__name__](self.num_ranks, *args[:2])
        return function(*args, **(kwargs or {}))


Sent = dict[tuple[str, str], tuple[int, int]]  # by block and phase: messages, bytes


def one_step(row: str, dtype: torch.dtype, heads: tuple[int, int]) -> tuple[Sent, int]:
    """What the ledger counts, and what the dispatcher of torch sees."""
    num_ranks, (strategy, _, gather) = torch.distributed.get_world_size(), row.partition(", gather ")
    options = {"gather": gather or "auto", "layout": "contiguous" if strategy == "lightseq" else "zigzag"}
    mesh = lss.init_mesh(num_ranks, device="cpu")
    plain = tiny_gpt(LENGTH, dtype, heads=heads[0], key_value_heads=heads[1])
    model = parallelize_as(strategy, plain, mesh, **options)
    batch = dict(zip(("tokens", "labels"), tokens_and_labels(2, LENGTH), strict=True))
    batch = lss.shard(batch, mesh, shift_labels=0, layout=options["layout"])
    count, labels = lss.count_tokens(model, batch["labels"]), batch.pop("labels")
    model(**batch)  # the first call tries the model's code, and its ranks agree
    ledger = lss.context_of(model).ledger
    ledger.clear()
    with Dispatched(num_ranks) as dispatched:
        lss.token_mean_cross_entropy(model(**batch), labels, count).backward()
    sent: Sent = {}
    for entry, number in ledger.counts.items():
        place = ".".join(entry.layer.split(".")[:2]), entry.phase
        before = sent.get(place, (0, 0))
        sent[place] = before[0] + number, before[1] + ledger.bytes[entry]
    return sent, dispatched.bytes


PAGE = (Path(__file__).parents[2] / "docs/strategies.md").read_text().split("## What is sent")[1].split("\n## ")[0]
DEFINITIONS = re.findall(r"`(\w) = (.+?)`", PAGE)
TABLE = {
    name: formulas for name, *formulas in re.findall(r"^\| (.+) \|" + r" `(.+?)` \|" * 4 + "$", PAGE, re.MULTILINE)
}


def of_page(row: str, **letters: int) -> dict[str, tuple[int, int]]:
    """Messages and bytes that the page says of a layer, forward and backward."""
    known: dict[str, object] = {"lcm": math.lcm, "max": max, "min": min, **letters}
    for letter, formula in DEFINITIONS:
        known[letter] = eval(formula, known)
    found = [eval(formula, known) for formula in TABLE[row]]
    return {"forward": tuple(found[:2]), "backward": tuple(found[2:])}


@pytest.mark.parametrize(("num_ranks", "dtype"), [(2, torch.float64), (3, torch.bfloat16), (4, torch.float64)])
@pytest.mark.parametrize("row", TABLE)
def test_messages_and_bytes_are_those_of_the_page(ranks, row, num_ranks, dtype):
    heads = (12, 12 if row == "megatron-tp" else 2)
    shape = {"B": 2, "S": -(-LENGTH // num_ranks), "E": 24, "H": heads[0], "K": heads[1], "D": 2}
    sizes = {"b": dtype.itemsize, "w": max(4, dtype.itemsize), "s": dtype.itemsize}
    for rank, (sent, dispatched) in enumerate(ranks.run(one_step, num_ranks, row, dtype, heads)):
        of_layer = of_page(row, N=num_ranks, r=rank, **shape, **sizes)
        assert sent == {(f"blocks.{layer}", phase): of_layer[phase] for layer in (0, 1) for phase in of_layer}
        assert dispatched == sum(num_bytes for _, num_bytes in sent.values())


def test_the_page_counts_as_the_papers_do():
    """Over 4 ranks: the paper's ablation is 6, 4 and 2 messages a layer, and 8 a block in Megatron's."""
    letters = dict.fromkeys("BSEHKDbwsr", 1) | {"N": 4}
    found = {row: tuple(messages for messages, _ in of_page(row, **letters).values()) for row in TABLE}
    assert found == {
        "lss, gather x": (1, 1),
        "lss, gather kv": (1, 1),
        "lss, gather separate": (2, 2),
        "ring": (3, 6),
        "lightseq": (2, 4),
        "ulysses": (4, 4),
        "megatron": (4, 4),
        "megatron-tp": (4, 4),
        "concatenated, gather x": (2, 2),
        "concatenated, gather kv": (2, 2),
        "concatenated, gather separate": (3, 3),
    }
