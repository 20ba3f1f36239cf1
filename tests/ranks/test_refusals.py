"""Misuse is refused by name, before anything is computed."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import lss
from lss.errors import LssError
from lss.models import GPTConfig
from lss.models.gpt import Attention
from tests.models import tiny_gpt


def messages_of(attempts: list[Callable]) -> list[str]:
    """What each attempt raises."""
    found = []
    for attempt in attempts:
        with pytest.raises(LssError) as raised:
            attempt()
        found.append(str(raised.value))
    return found


def assert_say(messages: list[str], parts: list[str]) -> None:
    for message, part in zip(messages, parts, strict=True):
        assert part in message


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gpt = tiny_gpt(4)
        self.mix = nn.Conv1d(4, 4, 3)


class MaskedAttention(Attention):
    """Takes a mask, as many models' attention does."""

    def forward(self, x, positions, mask=None):
        return super().forward(x, positions)


class Masked(nn.Module):
    """Hands its attention a mask that no segment can honour."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(17, 24)
        self.attention = MaskedAttention(GPTConfig(24, 1, 4))

    def forward(self, tokens):
        return self.attention(self.tokens(tokens), None, mask=torch.ones(4, 4))


def padded_table() -> nn.Module:
    model = tiny_gpt(4)
    model.positions.padding_idx = 1
    return model


class OwnDropout(nn.Dropout):
    def forward(self, values):
        return values * (1 + self.p)


def own_dropout() -> nn.Module:
    model = tiny_gpt(4)
    model.embedding_dropout = OwnDropout(0.5)
    return model


def without(attribute: str) -> nn.Module:
    model = tiny_gpt(4)
    delattr(model.blocks[0].attention, attribute)
    return model


def narrow_keys(mesh) -> nn.Module:
    model = tiny_gpt(4)
    attention = model.blocks[0].attention
    original = attention.project_key_value
    attention.project_key_value = lambda x, positions: (original(x, positions)[0][..., :3], original(x, positions)[1])
    return lss.parallelize(model, mesh)


def with_table(**options: object) -> None:
    model = tiny_gpt(4)
    model.tokens = nn.Embedding(17, 24, **options)
    lss.parallelize(model, None)


class OwnWeights(nn.Module):
    """Its attention drops weights in a forward that is replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(17, 24)
        self.attention = Attention(GPTConfig(24, 1, 4))
        self.attention.weights_dropout = nn.Dropout(0.5)

    def forward(self, tokens):
        return self.attention(self.tokens(tokens), None)


def four_dimensions(mesh) -> nn.Module:
    class Unsqueezed(nn.Sequential):
        def forward(self, tokens):
            return self[1](self[0](tokens)[:, None])

    return lss.parallelize(Unsqueezed(tiny_gpt(4), nn.Dropout(0.5)), mesh)


def models_and_calls() -> list[str]:
    mesh = lss.init_mesh(1, device="cpu")
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    good = lss.parallelize(tiny_gpt(4), mesh)
    segment = lss.shard({"tokens": tokens}, mesh)["segment"]
    attempts = [
        lambda: lss.parallelize(good, mesh),
        lambda: lss.parallelize(tiny_gpt(4), mesh, gather="all"),
        lambda: lss.parallelize(nn.Linear(2, 2), mesh),
        lambda: lss.parallelize(Convolution(), mesh),
        lambda: good(tokens),
        lambda: good(torch.zeros(1, 3, dtype=torch.int64), segment=segment),
        lambda: good(
            torch.zeros(1, 9, dtype=torch.int64), segment=lss.shard({"t": torch.zeros(1, 9)}, mesh)["segment"]
        ),
        lambda: lss.parallelize(tiny_gpt(4, positions="rotary"), mesh)(tokens[:, 1:], segment=segment),
        lambda: lss.parallelize(Masked(), mesh)(tokens, segment=segment),
        lambda: lss.parallelize(without("is_causal"), mesh),
        lambda: narrow_keys(mesh)(tokens, segment=segment),
        lambda: lss.average_gradients(tiny_gpt(4)),
        lambda: lss.shard({}, mesh),
        lambda: lss.shard({"a": torch.zeros(2, 3), "b": torch.zeros(2, 4)}, mesh),
        lambda: lss.shard({"a": torch.zeros(3)}, mesh),
        lambda: lss.shard({"tokens": tokens, "targets": tokens}, mesh),
        lambda: lss.parallelize(tiny_gpt(4), DeviceMesh("cpu", [0], mesh_dim_names=("tensor",))),
        lambda: lss.parallelize(padded_table(), mesh),
        lambda: lss.parallelize(own_dropout(), mesh),
        lambda: with_table(scale_grad_by_freq=True),
        lambda: with_table(sparse=True),
        lambda: lss.parallelize(nn.Sequential(tiny_gpt(4), nn.Softmax(dim=1)), mesh),
        lambda: lss.parallelize(OwnWeights(), mesh)(tokens, segment=segment),
        lambda: four_dimensions(mesh)(tokens, segment=segment),
        lambda: lss.unshard(torch.zeros(1, 5, 2), segment, mesh),
        lambda: lss.losses.linear_cross_entropy(torch.zeros(1, 4, 2), torch.zeros(3, 2), tokens, tokens.sum(), chunk=0),
        lambda: lss.count_tokens(good),
        lambda: lss.init_mesh(2, device="cpu"),
        lambda: lss.init_mesh(1, device="tpu"),
    ]
    return messages_of(attempts)


def test_models_and_calls_are_refused_by_name(ranks):
    (messages,) = ranks.run(models_and_calls, 1)
    expected = [
        "parallelized already",
        "auto, x, kv, separate",
        "no attention was found in Linear",
        "mix is a Conv1d",
        "without a segment",
        "positions was asked for indices of shape (3,)",
        "positions up to 8, and positions has 4 rows",
        "blocks.0.attention was given 3 tokens of a segment that has 4 slots",
        "attention was called with mask=...",
        "blocks.0.attention does not say who sees whom",
        "blocks.0.attention has queries, keys and values of [(1, 4, 4, 6), (1, 4, 4, 3)",
        "was not parallelized",
        "an empty batch",
        "a batch of shapes",
        "a batch of shapes",
        "integer 'targets'",
        "a DeviceMesh with the axes tensor",
        "positions has padding_idx=1",
        "embedding_dropout is a OwnDropout",
        "tokens has scale_grad_by_freq=True",
        "tokens has sparse=True",
        "1 is a Softmax over dim 1",
        "the dropout attention.weights_dropout is not used",
        "the dropout 1 was given 1 tokens of a segment that has 4 slots",
        "outputs of shape (1, 5, 2) of a segment of 4 slots",
        "chunk=0",
        "no labels to count",
        "the world has 1",
        "'tpu'",
    ]
    assert_say(messages, expected)


def batches() -> list[str]:
    mesh = lss.init_mesh(1, device="cpu")
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    attempts = [
        lambda: lss.shard({"tokens": tokens, "labels": tokens}, mesh),
        lambda: lss.shard({"tokens": tokens, "labels": tokens}, mesh, shift_labels=-1),
        lambda: lss.shard({"tokens": tokens, "attention_mask": tokens}, mesh, documents=[[4]]),
        lambda: lss.shard({"tokens": tokens, "attention_mask": torch.ones(1, 4, 4)}, mesh),
        lambda: lss.shard({"tokens": tokens, "position_ids": torch.tensor([[0, 1, 3, 4]])}, mesh),
        lambda: lss.shard({"tokens": tokens, "position_ids": torch.tensor([[0, 1, 0, 1]])}, mesh, documents=[[4]]),
        lambda: lss.shard({"tokens": tokens, "position_ids": torch.tensor([[-1, 0, 1, 2]])}, mesh),
        lambda: lss.shard({"tokens": tokens, "attention_mask": torch.tensor([[0, 0, -9, -9]])}, mesh),
        lambda: lss.shard({"tokens": tokens, "labels": tokens.double()}, mesh, shift_labels=1),
        lambda: lss.shard({"tokens": tokens, "labels": tokens}, mesh, shift_labels=True),
        lambda: lss.shard({"tokens": tokens, "segment": tokens}, mesh),
        lambda: lss.shard({"tokens": tokens, "number": 3}, mesh),
        lambda: lss.shard({"tokens": tokens[:0]}, mesh),
        lambda: lss.shard({"tokens": tokens}, mesh, documents=[[1.5, 2]]),
        lambda: lss.shard({"tokens": tokens}, mesh, layout="striped"),
    ]
    return messages_of(attempts)


def test_unclear_batches_are_refused(ranks):
    (messages,) = ranks.run(batches, 1)
    expected = ["shift_labels=None", "shift_labels=-1", "one of them", "a padding mask [B, L]", "go from 1 to 3"]
    expected += [
        "start again inside a document",
        "position_ids (1, 4) of",
        "with values from -9 to 0",
        "shift_labels=1 with labels",
        "shift_labels=True",
        "a batch with segment",
        "a batch with number",
        "at least one sequence",
        "documents of lengths [1.5, 2]",
        "the layout 'striped'",
    ]
    assert_say(messages, expected)
