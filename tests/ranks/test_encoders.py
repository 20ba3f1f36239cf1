"""Encoder-decoders and vision models of transformers over ranks, by two lines, against the plain ones."""

import pytest

from tests.encoders import MODELS, batch, over_ranks, serial
from tests.models import assert_same


def assert_equal(found: tuple, expected: tuple, labels) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-10)
    seen = labels != -100 if labels.dim() > 1 else slice(None)  # what a model says at padding is not compared
    assert_same(found[1][seen], expected[1][seen], "logits", 1e-9)
    assert found[2].keys() == expected[2].keys()
    nothing = 1e-12 * max(gradient.abs().max().item() for gradient in expected[2].values())
    for name, gradient in found[2].items():
        if expected[2][name].abs().max() <= nothing:
            assert name.endswith("k_proj.bias")  # whose true gradient is zero
            assert gradient.abs().max() <= nothing
        else:
            assert_same(gradient, expected[2][name], name, 1e-9)


@pytest.mark.supports("{name}", "{kind}")
@pytest.mark.parametrize("kind", ["whole", "padded"])
@pytest.mark.parametrize("name", MODELS)
def test_loss_outputs_and_gradients(ranks, name, kind):
    for number in (2, 3):
        for found in ranks.run(over_ranks, number, name, kind, number):
            assert_equal(found, serial(name, kind), batch(name, kind)["labels"])


@pytest.mark.supports("{name}", "cut in the layers")
@pytest.mark.parametrize("name", MODELS)
def test_tokens_cut_in_the_layers(ranks, name):
    for found in ranks.run(over_ranks, 2, name, "padded", 2, "layers"):
        assert_equal(found, serial(name, "padded"), batch(name, "padded")["labels"])


@pytest.mark.supports("{name}", "data groups")
@pytest.mark.parametrize("name", MODELS)
def test_data_groups(ranks, name):
    for found in ranks.run(over_ranks, 4, name, "padded", 2, None, False, 2):
        assert_equal(found, serial(name, "padded"), batch(name, "padded")["labels"])


@pytest.mark.supports("{name}", "activation checkpointing")
@pytest.mark.parametrize("cut", [None, "layers"])
@pytest.mark.parametrize("name", ["BART", "Whisper", "ViT"])
def test_activation_checkpointing(ranks, name, cut):
    for found in ranks.run(over_ranks, 2, name, "padded", 2, cut, True):
        assert_equal(found, serial(name, "padded"), batch(name, "padded")["labels"])


DROPOUT = {
    "T5": {"dropout_rate": 0.1},
    "BART": {"dropout": 0.1, "attention_dropout": 0.1, "activation_dropout": 0.1},
    "Whisper": {"dropout": 0.1, "attention_dropout": 0.1, "activation_dropout": 0.1},
    "ViT": {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},
}


def dropping(name: str, number: int, checkpointing: bool = False) -> tuple:
    return over_ranks(name, "padded", number, None, checkpointing, **DROPOUT[name])


@pytest.mark.supports("{name}", "dropout")
@pytest.mark.parametrize("name", MODELS)
def test_dropout_is_the_same_over_any_ranks(ranks, name):
    (whole,) = ranks.run(dropping, 1, name, 1)
    assert whole[0] != pytest.approx(serial(name, "padded")[0], rel=1e-4)
    for number, checkpointing in ((2, False), (3, False), (2, name != "T5")):
        for found in ranks.run(dropping, number, name, number, checkpointing):
            assert_equal(found, whole, batch(name, "padded")["labels"])
