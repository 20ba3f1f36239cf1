"""What goes wrong without a word in other hands: it is right here, or it is refused."""

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lss
from lss.errors import LayoutError, LssError, ModelError
from lss.gradients import replicas_that_differ
from lss.losses import linear_cross_entropy
from tests.models import assert_same, tiny_gpt
from tests.ranks.test_parity import whole_gradients

LENGTH = 11


@dataclass
class Outputs:
    logits: Tensor


class Wrapped(nn.Module):
    """Recomputes its blocks, and hands out its logits in some way that the library does not see through."""

    def __init__(self, way: str, recompute: bool) -> None:
        super().__init__()
        self.gpt, self.way, self.recompute = tiny_gpt(LENGTH, positions="rotary", dropout=0.2), way, recompute

    def forward(self, tokens):
        gpt = self.gpt
        x = gpt.tokens(tokens)
        for block in gpt.blocks:
            x = checkpoint(block, x, None, use_reentrant=False) if self.recompute else block(x, None)
        logits = gpt.head(gpt.norm(x))
        self.kept = logits
        return {"dataclass": Outputs(logits), "nested": ((logits,),), "kept": None, "tensor": logits}[self.way]


def two_batches_in_flight(way: str, recompute: bool) -> dict[str, Tensor]:
    mesh = lss.init_mesh(2, device="cpu")
    model = lss.parallelize(Wrapped(way, recompute), mesh)
    losses = []
    for documents in ([[4, 7]], [[9, 2]]):
        batch = lss.shard({"tokens": torch.arange(LENGTH)[None]}, mesh, documents=documents)
        model(batch["tokens"], segment=batch["segment"])
        losses.append(model.kept.square().sum())
    for loss in losses:
        loss.backward()
    lss.average_gradients(model)
    return whole_gradients(model)


@pytest.mark.parametrize("way", ["dataclass", "nested", "kept", "tensor"])
def test_recomputation_takes_the_segment_of_its_own_batch(ranks, way):
    (expected, _), (found, _) = (ranks.run(two_batches_in_flight, 2, way, recompute) for recompute in (False, True))
    for name, gradient in expected.items():
        assert_same(found[name], gradient, name)


class Normalized(nn.Module):
    """Divides by the length of its input, which is never zero in a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = tiny_gpt(LENGTH)
        self.gpt.tokens = nn.Linear(3, 24).double()

    def forward(self, x):
        return self.gpt(x / x.norm(dim=-1, keepdim=True))


def empty_slots() -> list[bool]:
    mesh = lss.init_mesh(2, device="cpu")
    model = lss.parallelize(Normalized(), mesh)
    batch = lss.shard({"x": torch.randn(1, LENGTH, 3, dtype=torch.float64)}, mesh, layout="contiguous")
    model(batch["x"], segment=batch["segment"]).sum().backward()
    return [bool(weight.grad.isfinite().all()) for weight in model.parameters() if weight.grad is not None]


def test_empty_slots_hold_what_a_model_can_be_run_on(ranks):
    assert all(all(finite) for finite in ranks.run(empty_slots, 2))


def averaging(mistake: str) -> str:
    mesh = lss.init_mesh(2, device="cpu")
    model = lss.parallelize(tiny_gpt(LENGTH), mesh)
    batch = lss.shard({"tokens": torch.zeros(1, LENGTH, dtype=torch.int64)}, mesh)
    model(batch["tokens"], segment=batch["segment"]).sum().backward()
    if mistake == "twice":
        lss.average_gradients(model)
    with pytest.raises(ModelError) as raised:
        lss.average_gradients(model) if mistake == "twice" else lss.clip_gradient_norm(model, 1.0)
    return str(raised.value)


def test_averaging_twice_or_not_at_all_is_refused(ranks):
    assert all("averaged already" in message for message in ranks.run(averaging, 2, "twice"))
    assert all("not averaged yet" in message for message in ranks.run(averaging, 2, "never"))


def copied() -> tuple[Tensor, Tensor, dict, dict]:
    """A copy of a parallelized model, as for an average of weights, works and is apart from the first."""
    mesh = lss.init_mesh(2, device="cpu")
    model = lss.parallelize(tiny_gpt(LENGTH, dropout=0.1), mesh)
    other = copy.deepcopy(model)
    with torch.no_grad():
        model.head.weight.zero_()
    batch = lss.shard({"tokens": torch.arange(LENGTH)[None]}, mesh)
    logits = other(batch["tokens"], segment=batch["segment"])
    logits.sum().backward()
    lss.average_gradients(other)
    return (
        logits.detach(),
        lss.full_gradients(other)["positions.weight"],
        *(lss.context_of(each).ledger.total(phase="forward") for each in (model, other)),
    )


def test_a_parallelized_model_can_be_copied(ranks):
    for logits, gradient, first, second in ranks.run(copied, 2):
        assert logits.abs().max() > 0
        assert gradient.abs().max() > 0
        assert first == (0, 0)
        assert second[0] == 2


def saved_and_loaded(sequence: int, state: dict | None) -> dict:
    mesh = lss.init_mesh(sequence, device="cpu")
    torch.manual_seed(sequence)
    model = lss.parallelize(tiny_gpt(LENGTH), mesh)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(1.0)
    if state:
        lss.load_full_state_dict(model, state)
    return lss.full_state_dict(model)


def test_a_whole_state_is_loaded_at_any_number_of_ranks(ranks):
    whole = {name: torch.randn_like(part) for name, part in tiny_gpt(LENGTH).state_dict().items()}
    for sequence in (1, 3):
        for found in ranks.run(saved_and_loaded, sequence, sequence, whole):
            assert all(torch.equal(found[name], part) for name, part in whole.items())
    with pytest.raises(ModelError, match="does not fit"):
        lss.load_full_state_dict(lss.parallelize(tiny_gpt(LENGTH + 1), None), whole)


def replicas(change: str) -> list[str]:
    mesh = lss.init_mesh(2, device="cpu")
    model = lss.parallelize(tiny_gpt(LENGTH), mesh)
    with torch.no_grad():
        if lss.context_of(model).sequence.rank == 1:
            model.head.weight.copy_(model.head.weight.roll(1, 0) if change == "rolled" else model.head.weight.flip(1))
    return replicas_that_differ(model)


@pytest.mark.parametrize("change", ["rolled", "flipped"])
def test_replicas_whose_values_change_places_differ(ranks, change):
    assert ranks.run(replicas, 2, change) == [["head.weight"]] * 2


def test_positions_of_padding_are_not_looked_at():
    tokens = torch.arange(6)[None]
    mask = torch.tensor([[0, 0, 1, 1, 1, 1]])
    for of_padding in (-1, 99):
        positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, of_padding)
        batch = lss.shard({"tokens": tokens, "attention_mask": mask, "position_ids": positions}, None)
        assert batch["segment"].num_positions == 4
        assert batch["segment"].documents == (((2, 6),),)


def test_the_norm_of_narrow_gradients_is_exact():
    model = lss.parallelize(tiny_gpt(LENGTH, torch.bfloat16), None)
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        weight.grad = torch.randn(weight.shape, generator=generator).to(torch.bfloat16)
    exact = torch.cat([weight.grad.double().flatten() for weight in model.parameters()]).norm()
    assert lss.gradient_norm(model).item() == pytest.approx(exact.item(), rel=1e-12)


@pytest.mark.parametrize("count", [900, 3000])
def test_narrow_chunked_cross_entropy_has_no_error_of_scale(count):
    torch.manual_seed(0)
    hidden, weight = torch.randn(1, count, 16), torch.randn(31, 16)
    labels = torch.randint(31, (1, count))
    gradients = []
    for dtype in (torch.float64, torch.bfloat16):
        rows = hidden.to(torch.bfloat16).to(dtype).requires_grad_()
        linear_cross_entropy(rows, weight.to(torch.bfloat16).to(dtype), labels, torch.tensor(float(count))).backward()
        gradients.append(rows.grad.double())
    scale = (gradients[0] * gradients[1]).sum() / gradients[0].square().sum()
    assert abs(scale - 1) < 1e-3


def verified(kind: str) -> tuple[bool, str, list[str]]:
    mesh = lss.init_mesh(2, device="cpu")
    torch.manual_seed(torch.distributed.get_rank() if kind == "other seeds" else 0)
    model = copy.deepcopy(lss.models.GPT(lss.models.GPTConfig(24, 1, 4, vocabulary=17, max_length=4)))
    length, num_sequences = {"one token": (1, 2), "square": (4, 4)}.get(kind, (4, 2))
    if kind == "key bias":
        key = model.blocks[0].attention.key
        model.blocks[0].attention.key = nn.Linear(key.in_features, key.out_features)
        nn.init.zeros_(model.blocks[0].attention.key.bias)
    if kind == "complex":
        model.register_buffer("turns", torch.polar(torch.ones(4), torch.arange(4.0)))
        model.forward = lambda tokens: turned(model, tokens)
    tokens = torch.arange(length * num_sequences).view(num_sequences, length)
    try:
        report = lss.verify(model, {"tokens": tokens, "labels": tokens}, mesh, shift_labels=0)
    except LssError as error:
        return False, str(error), []
    return report.passed, report.first_forward, [check.name for check in report.checks if not check.passed]


def turned(model: nn.Module, tokens: Tensor) -> Tensor:
    """Multiplies by a table of complex numbers at the slots of the segment: wrong over ranks."""
    return lss.models.GPT.forward(model, tokens) * model.turns[: tokens.size(1)].imag[:, None]


@pytest.mark.parametrize("kind", ["one token", "key bias"])
def test_what_is_only_rounding_is_no_difference(ranks, kind):
    for passed, _, failed in ranks.run(verified, 2, kind):
        assert passed, failed


def test_complex_buffers_keep_their_imaginary_parts(ranks):
    assert not any(passed for passed, *_ in ranks.run(verified, 2, "complex"))


def test_ranks_that_made_other_models_are_told_so(ranks):
    assert all("the model differs between ranks" in message for _, message, _ in ranks.run(verified, 2, "other seeds"))


def pooled() -> tuple[Tensor, Tensor]:
    """Dropout of pooled sequences, in a head of the model, falls alike on every rank."""

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gpt, self.dropout = tiny_gpt(LENGTH), nn.Dropout(0.5)

        def forward(self, tokens):
            return self.gpt(tokens)

    mesh = lss.init_mesh(2, device="cpu")
    model = lss.parallelize(Classifier(), mesh)
    batch = lss.shard({"tokens": torch.arange(2 * LENGTH).view(2, LENGTH) % 17}, mesh)
    mean = lss.losses.sequence_mean(model, model(batch["tokens"], segment=batch["segment"]), batch["segment"])
    return mean.detach(), model.dropout(mean).detach()


def test_dropout_of_pooled_sequences(ranks):
    (mean, dropped), (_, other) = ranks.run(pooled, 2)
    assert torch.equal(dropped, other)
    assert 0.2 < (dropped == 0).double().mean() < 0.8
    kept = dropped != 0
    assert_same(dropped[kept], 2 * mean[kept], "kept")


def test_a_part_called_apart_is_refused():
    model = lss.parallelize(tiny_gpt(LENGTH), None)
    batch = lss.shard({"tokens": torch.arange(LENGTH)[None]}, None)
    model(batch["tokens"], segment=batch["segment"])
    with pytest.raises(LayoutError, match="called apart"):
        model.blocks[0](torch.zeros(1, LENGTH, 24, dtype=torch.float64), None)
