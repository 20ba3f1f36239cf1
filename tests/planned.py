"""Models that are planned and run over ranks, watched by torch's own tracker: functions of length and batch."""

import importlib

import torch
import transformers
from torch.distributed._tools.mem_tracker import MemTracker

import lss
from lss.config import AttentionConfig, Config, DataConfig, ParallelConfig, TrainConfig
from lss.context import context_of
from lss.models import GPT, GPTConfig
from lss.plan import Hardware, Plan, Setup, make_plan
from lss.target import shift_labels
from lss.train.model import prepare
from lss.train.optim import make_optimizer
from lss.train.update import update

VOCABULARY = 300
LENGTH, BATCH = 400, 2


def tokens(length: int, batch: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (batch, length))


def gpt(length: int, batch: int):
    """Learned positions, full multi-head attention."""
    config = GPTConfig(width=96, layers=3, heads=6, vocabulary=VOCABULARY, max_length=length, dropout=0.1)
    whole = tokens(length, batch)
    return GPT(config), {"tokens": whole, "labels": whole}


def grouped_gpt(length: int, batch: int):
    """Rotary positions, grouped heads."""
    config = GPTConfig(width=96, layers=5, heads=6, key_value_heads=2, vocabulary=VOCABULARY, positions="rotary")
    whole = tokens(length, batch)
    return GPT(config), {"tokens": whole, "labels": whole}


def gpt2(length: int, batch: int):
    """GPT-2 of transformers, with its own loss."""
    config = transformers.GPT2Config(
        n_embd=96, n_layer=3, n_head=4, vocab_size=VOCABULARY, n_positions=length, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    whole = tokens(length, batch)
    return transformers.GPT2LMHeadModel(config), {"input_ids": whole, "labels": whole}


def llama(length: int, batch: int):
    """Llama of transformers, with its own loss."""
    config = transformers.LlamaConfig(
        hidden_size=96, intermediate_size=256, num_hidden_layers=4, num_attention_heads=6, num_key_value_heads=2,
        vocab_size=VOCABULARY, max_position_embeddings=length, use_cache=False,
    )  # fmt: skip
    whole = tokens(length, batch)
    return transformers.LlamaForCausalLM(config), {"input_ids": whole, "labels": whole}


def bert(length: int, batch: int):
    """BERT of transformers, whose tokens see both ways."""
    config = transformers.BertConfig(
        hidden_size=96, num_hidden_layers=4, num_attention_heads=4, intermediate_size=256, vocab_size=VOCABULARY,
        max_position_embeddings=length, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    whole = tokens(length, batch)
    return transformers.BertForMaskedLM(config), {"input_ids": whole, "labels": whole}


def config_of(num_ranks: int, **changed) -> Config:
    parallel = {name: changed.pop(name) for name in ("data", "strategy", "shard_parameters") if name in changed}
    train = {name: changed.pop(name) for name in ("recompute", "precision", "accumulation") if name in changed}
    return Config(
        data=DataConfig(length=LENGTH),
        parallel=ParallelConfig(num_ranks // parallel.get("data", 1), **parallel),
        attention=AttentionConfig(**changed),
        train=TrainConfig(batch=BATCH, **train),
    )


def run(name: str, config: Config) -> tuple[int, list[dict]]:
    """Bytes at the peak of the second step, by torch's tracker, and what this rank sent in it."""
    mesh = lss.init_mesh(config.parallel.sequence, config.parallel.data, device="cpu")
    function = getattr(importlib.import_module("tests.planned"), name)
    torch.manual_seed(0)
    plain, whole = function(LENGTH, BATCH // config.train.accumulation)
    shift = shift_labels(f"tests.planned:{name}", plain)
    model = prepare(plain, mesh, config)
    optimizer, _ = make_optimizer(model, config.train, foreach=False)
    parts = range(config.train.accumulation)
    batches = [lss.shard(whole, mesh, shift_labels=shift, layout=config.attention.layout) for _ in parts]
    model.train()
    update(model, optimizer, batches, config.train)
    context_of(model).ledger.clear()
    tracker = MemTracker()
    tensors = [part for batch in batches for part in batch.values() if isinstance(part, torch.Tensor)]
    tracker.track_external(model, optimizer, *tensors)
    with tracker:
        update(model, optimizer, batches, config.train)
    (kinds,) = tracker.get_tracker_snapshot("peak").values()
    return kinds["Total"], context_of(model).ledger.rows()


def planned(name: str, config: Config) -> Plan:
    return make_plan(Setup(f"tests.planned:{name}", config, "cpu"), Hardware.named("v100-summit"))


def messages_of(rows: list[dict]) -> dict[tuple[str, str, str], list[int]]:
    """Count and bytes of a ledger's rows, by axis, operation and pass."""
    sent: dict[tuple[str, str, str], list[int]] = {}
    for row in rows:
        total = sent.setdefault((row["axis"], row["operation"], row["pass"]), [0, 0])
        total[0] += row["count"]
        total[1] += row["bytes"]
    return sent


def failing(length: int, batch: int):
    """A target that cannot be made."""
    raise ValueError("broken")


class Reading(GPT):
    """A model that reads a value."""

    def forward(self, tokens):
        return super().forward(tokens) * (2 if tokens.sum().item() > 3 else 1)


def reading(length: int, batch: int):
    """A target whose step reads values."""
    whole = tokens(length, batch)
    return Reading(GPTConfig(width=32, layers=2, heads=2, vocabulary=VOCABULARY, max_length=length)), {
        "tokens": whole,
        "labels": whole,
    }


class Counting(GPT):
    """A model that counts its layers itself."""

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.size(1)))
        for number in range(self.config.layers):
            x = self.blocks[number](x, torch.arange(tokens.size(1)))
        return self.head(self.norm(x))


def counting(length: int, batch: int):
    """Five layers."""
    whole = tokens(length, batch)
    config = GPTConfig(width=32, layers=5, heads=2, vocabulary=VOCABULARY, max_length=length)
    return Counting(config), {"tokens": whole, "labels": whole}


def listed(length: int, batch: int):
    """Labels that are no tensor."""
    model, whole = gpt(length, batch)
    return model, {**whole, "labels": [[0] * length] * batch}


def converted(length: int, batch: int):
    """A model that is converted."""
    model, whole = gpt(length, batch)
    return model.to(torch.bfloat16), whole


def choosing(length: int, batch: int):
    """A target that reads values to make its model."""
    return GPT(GPTConfig(width=32, layers=int(torch.ones(3).sum().item()), heads=2)), {}


def fixed():
    """A target of one length."""
    whole = torch.zeros(1, 32, dtype=torch.int64)
    return GPT(GPTConfig(width=32, layers=2, heads=2)), {"tokens": whole, "labels": whole}
