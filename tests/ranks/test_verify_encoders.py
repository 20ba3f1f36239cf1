"""`verify` of encoder-decoders, and of models that are cut in their layers."""

import pytest
import torch
import transformers

import lss
from lss.errors import LayoutError
from lss.verification import Report
from tests import encoders
from tests.faults import FAULTS, nothing
from tests.plain import Sequences, padding, tokens
from tests.pretrained import build

RATES = {
    "T5": {"dropout_rate": 0.1},
    "BART": {"attention_dropout": 0.1},
    "Whisper": {"attention_dropout": 0.1},
    "ViT": {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},
}
_CLASSIFIER = {
    "vocab_size": 31,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "pad_token_id": 0,
    "num_labels": 3,
}


NO_PADDING = ("ViT", "padded")  # images have none


def target(name: str, kind: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor], str | None]:
    if name in RATES:
        return encoders.make(name, **RATES[name]), encoders.batch(name, kind), None
    classes = torch.tensor([2, 0])
    if name == "torch.nn":
        torch.manual_seed(0)
        given = {"padding": padding()} if kind == "padded" else {}
        return Sequences("causal"), {"tokens": tokens(), "labels": classes, **given}, "layers"
    model = build("BertConfig", "BertForSequenceClassification", _CLASSIFIER, {})
    given = {"attention_mask": (~padding()).long()} if kind == "padded" else {}
    return model, {"input_ids": tokens() + 3, "labels": classes, **given}, "layers"


def verified(name: str, kind: str, sequence: int, data: int = 1, fault: str = "") -> Report:
    mesh = lss.init_mesh(sequence, data, device="cpu")
    model, batch, cut = target(name, kind)
    with FAULTS[fault]() if fault else nothing():
        return lss.verify(model, batch, mesh, cut=cut)


NAMES = (*RATES, "torch.nn", "BERT")


@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for name in NAMES for kind in ("whole", "padded") if (name, kind) != NO_PADDING]
)
def test_they_pass(ranks, name, kind):
    for sequence, data in ((2, 1), (3, 1), (2, 2))[: 3 if name in ("BERT", "T5") else 2]:
        for report in ranks.run(verified, sequence * data, name, kind, sequence, data):
            assert report.passed, report.to_dict()
            assert "float64" in report.title
            assert max(check.error for check in report.checks) < 1e-12
            kinds = {check.kind for check in report.checks}
            assert {"loss", "output", "gradient", "norm", "parameter"} <= kinds
            assert (name == "torch.nn") != ("gradient, dropout" in kinds)


@pytest.mark.parametrize("name", ["T5", "ViT", "BERT", "torch.nn"])
@pytest.mark.parametrize("fault", ["averaging_left_out", "reduce_scatter_left_out", "merged_without_weights"])
def test_seeded_faults_are_caught(ranks, name, fault):
    for report in ranks.run(verified, 2, name, "whole", 2, 1, fault):
        assert not report.passed


def named_module() -> Report:
    mesh = lss.init_mesh(2, device="cpu")
    model, batch, cut = target("BERT", "whole")
    with FAULTS["merged_without_weights"]():
        return lss.verify(model, batch, mesh, cut=cut)


def test_the_first_layer_that_differs_is_named(ranks):
    for report in ranks.run(named_module, 2):
        assert report.first_forward == "bert.encoder.layer.0.attention.self"


@pytest.mark.parametrize("named", [{"shift_labels": 1}, {"documents": [[7, 6]] * 2}])
def test_what_whole_batches_do_not_take_is_refused(named):
    model, batch, cut = target("BERT", "whole")
    with pytest.raises(LayoutError, match="that the plain model is given as it is"):
        lss.verify(model, batch, lss.init_mesh(1, device="cpu"), cut=cut, **named)


def test_the_default_is_that_of_parallelize():
    shape = transformers.ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48)
    assert "tokens cut between the first layer and the last" in lss.explain(transformers.ViTModel(shape))
