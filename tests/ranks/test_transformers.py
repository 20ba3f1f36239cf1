"""Models of transformers over ranks, by two lines, against the plain ones called for each document alone."""

import pytest
import torch
import transformers

import lss
from lss.errors import LssError
from tests.models import assert_same
from tests.pretrained import KINDS, MODELS, alone, batch, make, over_ranks, real


@pytest.mark.supports("{name}", "{kind}")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_loss_outputs_and_gradients(ranks, name, kind):
    loss, logits, gradients = alone(name, kind)
    for number in (2, 3):
        for found in ranks.run(over_ranks, number, name, kind, number):
            assert_equal(found, loss, logits, gradients, kind)


@pytest.mark.supports("{name}", "data groups")
@pytest.mark.parametrize("name", MODELS)
def test_data_groups(ranks, name):
    for found in ranks.run(over_ranks, 4, name, "padded right", 2, False, 2):
        assert_equal(found, *alone(name, "padded right"), "padded right")


@pytest.mark.supports("{name}", "activation checkpointing")
@pytest.mark.parametrize("name", ["GPT-2", "BERT"])
def test_activation_checkpointing(ranks, name):
    for found in ranks.run(over_ranks, 2, name, "packed", 2, True):
        assert_equal(found, *alone(name, "packed"), "packed")


DROPOUT = {
    "GPT-2": {"resid_pdrop": 0.1, "attn_pdrop": 0.1, "embd_pdrop": 0.1},
    "BERT": {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},
    "Llama": {"attention_dropout": 0.1},
}


def dropping(name: str, number: int, checkpointing: bool = False):
    return over_ranks(name, "packed", number, checkpointing, **DROPOUT[name])


@pytest.mark.supports("{name}", "dropout")
@pytest.mark.parametrize("name", DROPOUT)
def test_dropout_is_the_same_over_any_ranks(ranks, name):
    (whole,) = ranks.run(dropping, 1, name, 1)
    assert whole[0] != pytest.approx(alone(name, "packed")[0], rel=1e-4)
    for number, checkpointing in ((2, False), (3, False), (2, name != "Llama")):
        for found in ranks.run(dropping, number, name, number, checkpointing):
            assert_equal(found, *whole, "packed")


def assert_equal(found, loss, logits, gradients, kind):
    assert found[0] == pytest.approx(loss, rel=1e-10)
    assert_same(found[1][real(kind)], logits[real(kind)], "logits", 1e-9)
    assert found[2].keys() == gradients.keys()
    nothing = 1e-12 * max(gradient.abs().max().item() for gradient in gradients.values())
    for name, gradient in found[2].items():
        if gradients[name].abs().max() <= nothing:
            assert name.endswith("key.bias")  # whose true gradient is zero, without rotary positions
            assert gradient.abs().max() <= nothing
        else:
            assert_same(gradient, gradients[name], name, 1e-9)


def over_two(action: str) -> str:
    mesh = lss.init_mesh(2, device="cpu")
    with pytest.raises(LssError) as raised:
        MISTAKES[action](mesh)
    return str(raised.value)


def call(mesh, name="Llama", **more):
    model = lss.parallelize(make(name), mesh)
    return model(**lss.shard(batch(), mesh, shift_labels=1), **more)


def configured(mesh, kind, config, **given):
    return lss.parallelize(getattr(transformers, kind)(getattr(transformers, config)(**given)), mesh)


MISTAKES = {
    "the model was called with attention_mask": lambda mesh: call(mesh, attention_mask=torch.ones(2, 7)),
    "the model was called with position_ids": lambda mesh: call(mesh, position_ids=torch.arange(7)[None]),
    "the model was called with past_key_values": lambda mesh: call(mesh, past_key_values=transformers.DynamicCache()),
    "integer labels with shift_labels=None": lambda mesh: lss.shard(batch(), mesh),
    "without a segment": lambda mesh: lss.parallelize(make("Llama"), mesh)(batch()["input_ids"]),
    "padding tokens 1 that no attention_mask tells of": lambda mesh: lss.parallelize(make("RoBERTa"), mesh)(
        **lss.shard(batch() | {"input_ids": torch.ones(2, 13, dtype=torch.int64)}, mesh, shift_labels=0)
    ),
    "a batch of one sequence for an encoder and a decoder": lambda mesh: configured(
        mesh, "T5ForConditionalGeneration", "T5Config", vocab_size=31, d_model=32, d_kv=8, d_ff=48, num_layers=1
    )(**lss.shard(batch(), mesh, shift_labels=0)),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_what_cannot_be_honoured_is_refused(ranks, message):
    for said in ranks.run(over_two, 2, message):
        assert message in said
