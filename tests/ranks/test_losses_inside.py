"""Losses that a model works out itself: of all ranks, or refused."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lss
from lss.errors import ModelError
from tests.models import gradients
from tests.plain import tokens
from tests.ranks.test_locality import Around, swapped


class Scored(Around):
    """Works out its loss inside."""

    def __init__(self, score: object) -> None:
        super().__init__(lambda model, x: x)
        self.score, self.loss = score, nn.CrossEntropyLoss()

    def forward(self, tokens: Tensor, labels: Tensor) -> object:
        return self.score(self, super().forward(tokens), labels)


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


OF_ONE_RANK = {
    "shifted inside": lambda model, y, t: mean_loss(y[:, :-1], t[:, 1:]),
    "shifted inside, by a module": lambda model, y, t: model.loss(y[:, :-1].flatten(0, 1), t[:, 1:].flatten()),
    "of a mean": lambda model, y, t: F.cross_entropy(y.mean(1), t[:, 0]),
    "of the last token": lambda model, y, t: F.cross_entropy(y[:, -1], t[:, -1]),
    "weighed by a mean": lambda model, y, t: mean_loss(y, t) * (1 + y.square().mean()),
    "and a term of one rank's tokens": lambda model, y, t: mean_loss(y, t) + 0.01 * y.logsumexp(-1).square().mean(),
    "and a term of weights": lambda model, y, t: mean_loss(y, t) + 0.01 * model.head.weight.square().mean(),
    "by code of one's own": lambda model, y, t: own_mean(y, t),
    "by code of one's own, of a head of zeros": lambda model, y, t: (y, own_mean(y * model.gate, t)),
    "and a term of weights, behind outputs": lambda model, y, t: (y, mean_loss(y, t) + model.gate.exp()),
    "and a term of weights, by another name": lambda model, y, t: {"ce": mean_loss(y, t) * model.gate.exp()},
    "kept as an attribute": lambda model, y, t: (vars(model).update(kept_loss=y.square().mean()), y)[1],
}
# of models whose layers cut the tokens: every rank has the outputs
OF_WHOLE_SEQUENCES = ["by code of one's own", "by code of one's own, of a head of zeros", "kept as an attribute"]
OF_ALL = {
    "and what is made of it": lambda model, y, t: {"loss": 2 * mean_loss(y, t), "more": mean_loss(y, t).detach().exp()},
    "and other numbers": lambda model, y, t: {"loss": mean_loss(y, t), "temperature": model.gate},
    "of a module": lambda model, y, t: {"loss": model.loss(y.flatten(0, 1), t.flatten())},
}


def own_mean(logits: Tensor, labels: Tensor) -> Tensor:
    return -logits.log_softmax(-1).gather(-1, labels[..., None]).mean()


def scored(what: str, cut: str = "tokens") -> tuple[float, Tensor] | str:
    mesh = lss.init_mesh(2, device="cpu")
    torch.manual_seed(0)
    model = lss.parallelize(Scored((OF_ONE_RANK | OF_ALL)[what]).double(), mesh, cut=cut)
    batch = {"tokens": tokens(), "labels": tokens(seed=2)}
    batch = lss.shard(batch, mesh, shift_labels=0, cut=cut) if cut == "tokens" else batch
    try:
        loss = model(**batch)
    except ModelError as error:
        return str(error)
    loss["loss"].backward()
    lss.average_gradients(model)
    return loss["loss"].item(), model.head.weight.grad


@pytest.mark.parametrize("what", OF_ONE_RANK)
def test_a_loss_of_one_rank_is_refused(ranks, what):
    for said in ranks.run(scored, 2, what):
        assert "other values for a token" in said or "a loss by code of its own" in said


@pytest.mark.parametrize("what", OF_WHOLE_SEQUENCES)
def test_a_loss_that_every_rank_would_count_is_refused(ranks, what):
    for said in ranks.run(scored, 2, what, "layers"):
        assert "a loss by code of its own" in said


@pytest.mark.parametrize("what", OF_ALL)
def test_a_loss_of_all_ranks_is_taken(ranks, what):
    torch.manual_seed(0)
    model = Scored(OF_ALL[what]).double()
    expected = model(tokens(), tokens(seed=2))["loss"]
    expected.backward()
    for loss, gradient in ranks.run(scored, 2, what):
        assert loss == pytest.approx(expected.item(), rel=1e-12)
        torch.testing.assert_close(gradient, model.head.weight.grad, rtol=1e-10, atol=1e-12)


IGNORING = {
    "nanoGPT's": lambda model, y, t: F.cross_entropy(y.view(-1, y.size(-1)), t.reshape(-1), ignore_index=-1),
    "of a module": lambda model, y, t: nn.CrossEntropyLoss(ignore_index=-1)(y.flatten(0, 1), t.flatten()),
    "slots first": lambda model, y, t: F.cross_entropy(swapped(y).flatten(0, 1), t.T.flatten(), ignore_index=-1),
    "classes second": lambda model, y, t: F.cross_entropy(y.mT, t, ignore_index=-1),
    "a sum": lambda model, y, t: F.cross_entropy(y.flatten(0, 1), t.flatten(), ignore_index=-1, reduction="sum"),
    "-100": lambda model, y, t: mean_loss(y, t),
}


def ignoring(number: int, what: str, name: str, shift: int) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients where a model ignores another label than `lss.shard` sets; of the plain one for no ranks."""
    torch.manual_seed(0)
    model = Scored(lambda model, y, t: {"loss": IGNORING[what](model, y, t)}).double()
    whole, fill = tokens(seed=2), -100 if what == "-100" else -1
    whole[0, 4] = whole[1, 8:] = fill
    if number:
        mesh = lss.init_mesh(number, device="cpu")
        model = lss.parallelize(model, mesh)
        batch = lss.shard({"tokens": tokens(), name: whole}, mesh, shift_labels=shift if name == "labels" else None)
        loss = model(batch["tokens"], batch[name], segment=batch["segment"])["loss"]
    else:
        loss = model(tokens(), F.pad(whole, (0, shift), value=fill)[:, shift:])["loss"]
    loss.backward()
    if number:
        lss.average_gradients(model)
    return loss.item(), gradients(model)


@pytest.mark.parametrize(
    ("what", "name", "shift"),
    [
        *((what, "labels", shift) for what in IGNORING for shift in (0, 1)),
        *((what, "answers", 0) for what in IGNORING if what != "slots first"),
    ],
)
def test_empty_slots_count_nowhere_whatever_label_is_ignored(ranks, what, name, shift):
    """Also where labels have another name, so that their empty slots repeat the last one."""
    loss, grads = ignoring(0, what, name, shift)
    for number in (2, 3):
        for found, found_grads in ranks.run(ignoring, number, number, what, name, shift):
            assert found == pytest.approx(loss, rel=1e-12)
            assert found_grads.keys() == grads.keys()
            for weight, gradient in grads.items():
                torch.testing.assert_close(found_grads[weight], gradient, rtol=1e-10, atol=1e-12)
