"""Losses over segments equal torch's on whole sequences: value, and the gradient of every parameter."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lss
from lss import losses
from lss.errors import LayoutError
from tests.models import assert_same, tiny_gpt
from tests.ranks.test_parity import whole_gradients

LENGTH, NUM_SEQUENCES, VOCABULARY = 10, 4, 17


def data() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    shape = (NUM_SEQUENCES, LENGTH)
    valid = torch.ones(shape, dtype=torch.bool)
    valid[1, 6:] = False  # right padding
    return {
        "tokens": torch.randint(VOCABULARY, shape, generator=generator),
        "labels": torch.randint(VOCABULARY, shape, generator=generator).masked_fill(~valid, -100),
        "valid": valid,
        "targets": torch.randn(*shape, VOCABULARY, generator=generator, dtype=torch.float64),
        "reference": torch.randn(NUM_SEQUENCES, generator=generator, dtype=torch.float64),
    }


# What torch computes, of outputs [B, L, V] of the whole batch; padded sequences are cut to their length.


def pooled(outputs: Tensor) -> Tensor:
    valid = data()["valid"].unsqueeze(-1)
    return (outputs * valid).sum(1) / valid.sum(1)


def log_probabilities(outputs: Tensor) -> Tensor:
    labels = data()["labels"]
    chosen = outputs.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return (chosen * (labels >= 0)).sum(1)


def whole_loss(kind: str, model: nn.Module, outputs: Tensor) -> Tensor:
    given = data()
    valid, labels = given["valid"], given["labels"]
    first, second = pooled(outputs).view(2, 2, -1).unbind(1)
    if kind in ("cross_entropy", "chunked"):
        return F.cross_entropy(outputs.flatten(0, 1), labels.flatten())
    if kind == "squared_error":
        return F.mse_loss(outputs[valid], given["targets"][valid])
    if kind == "binary":
        return F.binary_cross_entropy_with_logits(outputs[valid], (given["targets"][valid] > 0).double())
    if kind == "classification":
        return F.cross_entropy(pooled(outputs), torch.arange(NUM_SEQUENCES))
    if kind == "ranking":
        return F.softplus(second.square().sum(-1) - first.square().sum(-1)).mean()
    if kind == "contrastive":
        return F.cross_entropy(F.normalize(first, dim=-1) @ F.normalize(second, dim=-1).T / 0.1, torch.arange(2))
    if kind == "preference":
        ratios = (log_probabilities(outputs) - given["reference"]).view(2, 2)
        return -F.logsigmoid(0.1 * (ratios[:, 0] - ratios[:, 1])).mean()
    assert kind == "ctc"
    targets = torch.tensor([[1, 2, 3]]).expand(NUM_SEQUENCES, -1)
    return F.ctc_loss(outputs.log_softmax(-1).transpose(0, 1), targets, valid.sum(1), torch.full((4,), 3))


def share(kind: str, model: nn.Module, batch: dict, rows: slice) -> Tensor:
    """What a rank computes, through this package."""
    outputs = model(batch["tokens"], segment=batch["segment"])
    labels, valid = batch["labels"], batch["valid"]
    if kind == "cross_entropy":
        return losses.token_mean_cross_entropy(outputs, labels, losses.count_tokens(model, labels))
    if kind == "chunked":
        hidden = outputs @ torch.eye(VOCABULARY, dtype=torch.float64)
        weight = torch.eye(VOCABULARY, dtype=torch.float64)
        return losses.linear_cross_entropy(hidden, weight, labels, losses.count_tokens(model, labels), chunk=3)
    if kind == "squared_error":
        count = losses.count_tokens(model, valid)
        return losses.token_mean_squared_error(outputs, batch["targets"], valid, count)
    if kind == "binary":
        count = losses.count_tokens(model, valid)
        return losses.token_mean_binary_cross_entropy(outputs, batch["targets"] > 0, valid, count)
    if kind == "preference":
        found = losses.sequence_log_probability(model, outputs, labels, batch["segment"]).view(-1, 2)
        reference = data()["reference"][rows].view(-1, 2)
        return losses.preference(model, found[:, 0], found[:, 1], reference[:, 0], reference[:, 1])
    if kind == "ctc":
        targets, size = torch.tensor([[1, 2, 3]]).expand(outputs.size(0), -1), torch.full((outputs.size(0),), 3)
        return losses.connectionist_temporal_classification(model, outputs, batch["segment"], targets, size)
    means = losses.sequence_mean(model, outputs, batch["segment"])
    if kind == "classification":
        targets = torch.arange(NUM_SEQUENCES)[rows]
        return losses.share_of_mean(model, F.cross_entropy(means, targets, reduction="none"))
    first, second = means.view(-1, 2, VOCABULARY).unbind(1)
    if kind == "ranking":
        return losses.ranking(model, first.square().sum(-1), second.square().sum(-1))
    assert kind == "contrastive"
    return losses.contrastive(model, first, second)


def over_ranks(kind: str, sequence: int, groups: int) -> tuple[float, dict[str, Tensor], list[dict]]:
    mesh = lss.init_mesh(sequence, groups, device="cpu")
    model = lss.parallelize(tiny_gpt(LENGTH), mesh)
    context = lss.context_of(model)
    size = NUM_SEQUENCES // groups
    rows = slice(context.data.rank * size, (context.data.rank + 1) * size)
    whole = {name: part[rows] for name, part in data().items() if name != "reference"}
    batch = lss.shard(whole | {"attention_mask": whole["valid"]}, mesh, shift_labels=0)
    loss = share(kind, model, batch, rows)
    loss.backward()
    lss.average_gradients(model)
    rows_of_loss = [row for row in context.ledger.rows() if row["layer"] == "losses" and row["pass"] != "step"]
    return context.sum_over_ranks(loss.detach()).item(), whole_gradients(model), rows_of_loss


# messages of a loss, forward and backward together, over (sequence, data)
MESSAGES = {
    "cross_entropy": (0, 0),
    "chunked": (0, 0),
    "squared_error": (0, 0),
    "binary": (0, 0),
    "classification": (2, 0),
    "ranking": (2, 0),
    "contrastive": (2, 2),
    "preference": (2, 0),
    "ctc": (2, 0),
}


@pytest.mark.parametrize(("sequence", "groups"), [(1, 1), (3, 1), (2, 2)])
@pytest.mark.parametrize("kind", MESSAGES)
def test_equals_torch_on_the_whole(ranks, kind, sequence, groups):
    model = tiny_gpt(LENGTH)
    given = data()
    # the padded sequence goes through the plain model without its padding
    outputs = torch.zeros(NUM_SEQUENCES, LENGTH, VOCABULARY, dtype=torch.float64)
    parts = []
    for row in range(NUM_SEQUENCES):
        size = int(given["valid"][row].sum())
        parts.append(F.pad(model(given["tokens"][row : row + 1, :size]), (0, 0, 0, LENGTH - size)))
    outputs = torch.cat(parts)
    expected = whole_loss(kind, model, outputs)
    expected.backward()
    for loss, gradients, rows in ranks.run(over_ranks, sequence * groups, kind, sequence, groups):
        assert loss == pytest.approx(expected.item(), rel=1e-10)
        for name, weight in model.named_parameters():
            assert_same(gradients[name], weight.grad, name)
        sent = [sum(row["count"] for row in rows if row["axis"] == axis) for axis in ("sequence", "data")]
        assert sent == [
            count if size > 1 else 0 for count, size in zip(MESSAGES[kind], (sequence, groups), strict=True)
        ]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_chunked_cross_entropy_is_that_of_the_head(bias, chunk):
    torch.manual_seed(0)
    head = nn.Linear(6, 11, bias=bias).double()
    hidden = torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(11, (2, 5))
    labels[0, 3] = -100
    expected = 3 * F.cross_entropy(head(hidden).flatten(0, 1), labels.flatten())
    wanted = torch.autograd.grad(expected, [hidden, *head.parameters()])
    count = torch.tensor(9.0)
    actual = 3 * losses.linear_cross_entropy(hidden, head.weight, labels, count, bias=head.bias, chunk=chunk)
    assert_same(actual, expected, "loss", 1e-13)
    with torch.no_grad():
        alone = losses.linear_cross_entropy(hidden, head.weight, labels, count, bias=head.bias, chunk=chunk)
    assert_same(3 * alone, expected, "loss without gradients", 1e-13)
    for found, reference in zip(torch.autograd.grad(actual, [hidden, *head.parameters()]), wanted, strict=True):
        assert_same(found, reference, "gradient", 1e-13)


class LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the largest tensor that any operation returns."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for part in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(part, Tensor):
                self.largest = max(self.largest, part.numel())
        return result


def test_logits_of_all_tokens_never_exist():
    hidden, weight = torch.randn(1, 512, 8, requires_grad=True), torch.randn(3000, 8, requires_grad=True)
    with LargestTensor() as seen:
        losses.linear_cross_entropy(
            hidden, weight, torch.zeros(1, 512).long(), torch.tensor(512.0), chunk=16
        ).backward()
    assert seen.largest <= 16 * 3000


def two_forwards(sequence: int) -> tuple[float, dict[str, Tensor]]:
    """Both sides of a preference go through the model before either loss is taken; only one is padded."""
    mesh = lss.init_mesh(sequence, device="cpu")
    model = lss.parallelize(tiny_gpt(LENGTH), mesh)
    found = []
    for rows in (slice(0, 1), slice(1, 2)):
        whole = {name: part[rows] for name, part in data().items() if name in ("tokens", "labels")}
        whole["attention_mask"] = data()["valid"][rows]
        batch = lss.shard(whole, mesh, shift_labels=0)
        found.append((model(batch["tokens"], segment=batch["segment"]), batch))
    better, worse = (losses.sequence_log_probability(model, out, b["labels"], b["segment"]) for out, b in found)
    loss = losses.preference(model, better, worse, data()["reference"][:1], data()["reference"][1:2])
    loss.backward()
    lss.average_gradients(model)
    return lss.context_of(model).sum_over_ranks(loss.detach()).item(), whole_gradients(model)


def test_losses_know_the_batch_that_they_come_from(ranks):
    model, given = tiny_gpt(LENGTH), data()
    found = []
    for row in (0, 1):
        size = int(given["valid"][row].sum())
        logits = model(given["tokens"][row : row + 1, :size])
        found.append(-F.cross_entropy(logits[0], given["labels"][row, :size], reduction="sum"))
    reference = given["reference"]
    expected = -F.logsigmoid(0.1 * ((found[0] - reference[0]) - (found[1] - reference[1])))
    expected.backward()
    for loss, gradients in ranks.run(two_forwards, 3, 3):
        assert loss == pytest.approx(expected.item(), rel=1e-10)
        for name, weight in model.named_parameters():
            assert_same(gradients[name], weight.grad, name)


def unequal_groups() -> tuple[float, str]:
    mesh = lss.init_mesh(1, 2, device="cpu")
    model = lss.parallelize(tiny_gpt(LENGTH), mesh)
    own = torch.tensor([[1.0, 2.0, 3.0], [5.0]][lss.context_of(model).data.rank])
    share_of_ranking = losses.ranking(model, own, torch.zeros_like(own))
    with pytest.raises(LayoutError) as raised:
        losses.contrastive(model, own[:, None], own[:, None])
    return lss.context_of(model).sum_over_ranks(share_of_ranking).item(), str(raised.value)


def test_means_are_over_the_pairs_of_all_groups(ranks):
    expected = F.softplus(-torch.tensor([1.0, 2.0, 3.0, 5.0])).mean().item()
    for loss, message in ranks.run(unequal_groups, 2):
        assert loss == pytest.approx(expected, rel=1e-6)
        assert "[3, 1] pairs" in message


def test_masks_of_numbers_and_other_shapes_are_refused():
    model = lss.parallelize(tiny_gpt(LENGTH), None)
    with pytest.raises(LayoutError, match="a mask of numbers"):
        losses.count_tokens(model, torch.ones(1, 4))
    with pytest.raises(LayoutError, match="one shape"):
        losses.token_mean_squared_error(torch.ones(1, 4, 1), torch.ones(1, 4), torch.ones(1, 4) > 0, torch.tensor(4))
