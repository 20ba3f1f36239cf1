"""What `lss.explain` says of plain and parallelized models."""

import torch
import transformers
from torch import nn

import lss
from tests.models import tiny_gpt
from tests.pretrained import batch, make


def test_a_plain_model():
    said = lss.explain(tiny_gpt(12, dropout=0.1))
    assert "GPT, 2 attention layers" in said
    assert "blocks.1.attention: Causal(offset=0)" in said
    assert "positions: 12 rows, to be cut over the ranks" in said
    assert "embedding_dropout: rate 0.1, keyed by position" in said
    assert said.endswith("refused\n  nothing")
    rows, numbers = 12 * 24, sum(weight.numel() for weight in tiny_gpt(12).parameters())
    assert f"averaged over all ranks: {numbers - rows:,} numbers" in said
    assert f"averaged over the data groups: {rows} numbers in 1 tensors" in said


def test_all_that_is_refused_is_said():
    model = tiny_gpt(12)
    model.first, model.second = nn.Conv1d(1, 1, 3), nn.LSTM(4, 4)
    said = lss.explain(model)
    assert "first is a Conv1d, which may mix tokens" in said
    assert "second is a LSTM, which may mix tokens" in said


def test_a_parallelized_model():
    model = lss.parallelize(tiny_gpt(12), None)
    assert "blocks.0.attention: Causal(offset=0), not called yet" in lss.explain(model)
    part = lss.shard({"tokens": torch.zeros(1, 12, dtype=torch.int64)}, None)
    model(part["tokens"], segment=part["segment"])
    assert "blocks.0.attention: Causal(offset=0), kernel flash" in lss.explain(model)


def test_models_of_transformers():
    model = make("Gemma 3")
    assert "model.layers.1.self_attn: masked as it is called" in lss.explain(model)
    model = lss.parallelize(model, None)
    model(**lss.shard(batch(), None, shift_labels=1))
    assert "model.layers.1.self_attn: masked as it is called, kernel flash" in lss.explain(model)
    shape = transformers.BertConfig(vocab_size=31, hidden_size=32, num_attention_heads=4, num_hidden_layers=1)
    said = lss.explain(transformers.BertModel(shape))
    assert "pooler makes one output of a whole sequence" in said
