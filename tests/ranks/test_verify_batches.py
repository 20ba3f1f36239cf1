"""`verify` on padded and packed batches, in evaluation, and on models that cast."""

import pytest
import torch
from torch import Tensor, nn

import lss
from lss.errors import LayoutError, ModelError
from lss.verification import Report
from tests.faults import FAULTS, nothing
from tests.faults.attention import documents_seen_across
from tests.ranks.test_verify import LENGTH, target

FAULTS_OF_DOCUMENTS = FAULTS | {"documents_seen_across": documents_seen_across}
TOLD = {
    "lengths": {"documents": [[5, 7], [1, 6]]},
    "right": {"attention_mask": [12, 4]},
    "left": {"attention_mask": [-3, 12]},
    "position_ids": {"position_ids": [[5, 7], [1, 11]]},
}


def packed(told: str, positions: str = "learned", fault: str = "nothing") -> Report:
    mesh = lss.init_mesh(2, 2, device="cpu")
    model, batch = target(positions)
    documents = TOLD[told].get("documents")
    if "attention_mask" in TOLD[told]:
        batch["attention_mask"] = torch.stack([mask(real) for real in TOLD[told]["attention_mask"]])
    if "position_ids" in TOLD[told]:
        rows = [torch.cat([torch.arange(size) for size in sizes]) for sizes in TOLD[told]["position_ids"]]
        batch["position_ids"] = torch.stack(rows)
    with FAULTS_OF_DOCUMENTS.get(fault, nothing)():
        return lss.verify(model, batch, mesh, documents=documents, shift_labels=1)


def mask(real: int) -> Tensor:
    """Real tokens first; negative: last."""
    slots = torch.arange(LENGTH)
    return (slots < real).long() if real > 0 else (slots >= LENGTH + real).long()


@pytest.mark.parametrize("positions", ["learned", "rotary"])
@pytest.mark.parametrize("told", TOLD)
def test_packed_and_padded_batches_pass(ranks, told, positions):
    for report in ranks.run(packed, 4, told, positions):
        assert report.passed, report.to_dict()
        assert "documents" in report.title


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        *(("border_key_not_seen", told) for told in TOLD),
        # under a causal mask, padding on the right is seen by padding alone
        *(("documents_seen_across", told) for told in ("lengths", "left", "position_ids")),
    ],
)
def test_faults_in_them_are_caught_and_placed(ranks, fault, told):
    for report in ranks.run(packed, 4, told, "learned", fault):
        assert not report.passed
        assert report.first_forward == "blocks.0.attention.output"


class FloatNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        one = torch.arange(3) / 3 + torch.ones(())  # float32 by default
        return super().forward(x.float()).to(x.dtype) * (one[1] * 3 / 4)


class RefusesFloat64(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            raise RuntimeError("not implemented for 'Double'")
        return super().forward(x)


class MixesInEvaluation(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        mixed = x.reshape(x.size(0), x.size(2), x.size(1)).transpose(1, 2)
        return super().forward(x if self.training else x - mixed)


class LooksInEvaluation(nn.LayerNorm):
    """At the number of tokens, in a way that a trial on more of them does not see."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if x.size(1) < LENGTH and not self.training else 1)


def changed(norm: type[nn.LayerNorm], fault: str = "nothing") -> Report:
    mesh = lss.init_mesh(2, device="cpu")
    model, batch = target()
    model.norm = norm(24)
    with FAULTS.get(fault, nothing)():
        return lss.verify(model, batch, mesh, shift_labels=1)


def test_casts_to_float32_do_not_blur_the_comparison(ranks):
    for report in ranks.run(changed, 2, FloatNorm):
        assert report.passed, report.to_dict()
        assert "float64" in report.title
        assert max(check.error for check in report.checks) < 1e-13


def test_a_model_that_refuses_float64_is_compared_in_float32(ranks):
    for report in ranks.run(changed, 2, RefusesFloat64):
        assert report.passed, report.to_dict()
        assert "float32" in report.title
        assert max(check.error for check in report.checks) > 1e-9
    for report in ranks.run(changed, 2, RefusesFloat64, "border_key_not_seen"):
        assert not report.passed


def test_what_differs_in_evaluation_alone_is_seen(ranks):
    for report in ranks.run(changed, 2, LooksInEvaluation):
        failed = {(check.kind, check.name) for check in report.checks if not check.passed}
        assert failed == {("output", "in evaluation, joined"), ("loss", "in evaluation")}


def refused() -> str:
    with pytest.raises(ModelError) as raised:
        changed(MixesInEvaluation)
    return str(raised.value)


def test_what_mixes_in_evaluation_alone_is_refused(ranks):
    for said in ranks.run(refused, 2):
        assert "norm calls" in said


def refusals() -> list[str]:
    mesh = lss.init_mesh(2, device="cpu")
    model, batch = target()
    later = torch.arange(2, LENGTH + 2).expand(2, -1)
    attempts = [
        (LayoutError, lambda: lss.verify(model, batch | {"position_ids": later}, mesh)),
        (LayoutError, lambda: lss.verify(model, batch, mesh, documents=[[5, 9], [1]])),
        (LayoutError, lambda: lss.verify(model, batch | {"length": 3}, mesh)),
        (LayoutError, lambda: lss.verify(model, batch | {"attention_mask": torch.zeros(2, LENGTH)}, mesh)),
    ]
    found = []
    for kind, attempt in attempts:
        with pytest.raises(kind) as raised:
            attempt()
        found.append(str(raised.value))
    return found


def test_batches_that_cannot_be_compared_are_refused(ranks):
    for messages in ranks.run(refusals, 2):
        for message, part in zip(
            messages, ["start from 2", "[5, 9]", "length cannot be cut", "padding alone"], strict=True
        ):
            assert part in message
