"""What is sent: counts and bytes of every collective of a step."""

import pytest
import torch

import lss
from lss.gradients import BUCKET_BYTES
from tests.models import tiny_gpt, tokens_and_labels

LAYERS = ["blocks.0.attention", "blocks.1.attention"]
WIDTH, LENGTH, NUM_SEQUENCES, ITEM = 24, 12, 2, 8


def one_step(sequence: int, data: int, gather: str, length: int, changes: dict) -> list[dict]:
    """The ledger of a step: count, forward, backward, averaging, norm."""
    mesh = lss.init_mesh(sequence, data, device="cpu")
    model = lss.parallelize(tiny_gpt(LENGTH, **changes), mesh, gather=gather)
    ledger = lss.context_of(model).ledger
    setup = ledger.rows()
    ledger.clear()
    tokens, labels = tokens_and_labels(NUM_SEQUENCES, length)
    batch = lss.shard({"tokens": tokens, "labels": labels}, mesh, shift_labels=0)
    for _ in range(2):  # the first call of a model also checks that its ranks cut the same batch
        setup += [row for row in ledger.rows() if row["layer"] in ("weights", "batch")]
        ledger.clear()
        count = lss.count_tokens(model, batch["labels"])
        logits = model(batch["tokens"], segment=batch["segment"])
        lss.token_mean_cross_entropy(logits, batch["labels"], count).backward()
        lss.average_gradients(model)
        lss.clip_gradient_norm(model, 1.0)
    assert {row["pass"] for row in setup} <= {"setup"}
    return ledger.rows()


def chosen(rows: list[dict], **where) -> list[dict]:
    return [row for row in rows if all(row[name] == value for name, value in where.items())]


@pytest.mark.parametrize(
    ("gather", "messages", "width"), [("x", 1, WIDTH), ("kv", 1, 2 * WIDTH), ("separate", 2, 2 * WIDTH)]
)
def test_messages_of_an_attention_layer(ranks, gather, messages, width):
    segment_bytes = LENGTH // 3 * NUM_SEQUENCES * width * ITEM
    for rows in ranks.run(one_step, 3, 3, 1, gather, LENGTH, {}):
        for layer in LAYERS:
            assert chosen(rows, layer=layer) == [
                {
                    "axis": "sequence",
                    "operation": operation,
                    "pass": phase,
                    "layer": layer,
                    "count": messages,
                    "bytes": 2 * segment_bytes,
                }
                for operation, phase in (("all_gather", "forward"), ("reduce_scatter", "backward"))
            ]


def test_grouped_heads_make_kv_smaller_than_x(ranks):
    changes = {"key_value_heads": 1}
    sent = {g: chosen(ranks.run(one_step, 2, 2, 1, g, LENGTH, changes)[0], layer=LAYERS[0]) for g in ("x", "kv")}
    assert sent["kv"][0]["bytes"] * 2 == sent["x"][0]["bytes"]  # 2 heads of width 6 against a width of 24


def test_nothing_else_is_sent(ranks):
    weights = {name: w.numel() for name, w in tiny_gpt(LENGTH).named_parameters()}
    table = weights.pop("positions.weight")
    for rows in ranks.run(one_step, 4, 2, 2, "x", LENGTH, {}):
        others = [row for row in rows if row["layer"] not in LAYERS]
        assert {(row["axis"], row["operation"], row["pass"], row["layer"], row["count"]) for row in others} == {
            ("sequence", "all_reduce", "step", "scalars", 1),
            ("data", "all_reduce", "step", "scalars", 1),
            ("sequence", "all_reduce", "step", "gradients", 1),
            ("data", "all_reduce", "step", "gradients", 2),  # the shared weights, and the rows of the table
            ("sequence", "all_reduce", "step", "norm", 1),
        }
        # each message carries a flag for each weight; in the ring form over 2 ranks it is sent once
        shared = (sum(weights.values()) + len(weights)) * ITEM
        rows_of_table = (table // 2 + 1) * ITEM
        sizes = {row["axis"]: row["bytes"] for row in chosen(rows, layer="gradients")}
        assert sizes == {"sequence": shared, "data": shared + rows_of_table}


def test_rotary_positions_need_no_scalar_for_the_norm(ranks):
    for rows in ranks.run(one_step, 2, 2, 1, "x", LENGTH, {"positions": "rotary"}):
        assert not chosen(rows, layer="norm")


def test_one_rank_sends_nothing(ranks):
    assert ranks.run(one_step, 1, 1, 1, "x", LENGTH, {}) == [[]]


def test_a_table_longer_than_the_sequence_is_gathered_once(ranks):
    for rows in ranks.run(one_step, 3, 3, 1, "x", LENGTH - 5, {}):
        of_table = [(row["operation"], row["pass"], row["count"]) for row in chosen(rows, layer="positions")]
        assert of_table == [("all_gather", "forward", 1), ("reduce_scatter", "backward", 1)]


def messages_of_a_large_model() -> tuple[int, int]:
    mesh = lss.init_mesh(2, device="cpu")
    model = lss.parallelize(tiny_gpt(4, torch.float32, width=512, layers=4, positions="rotary"), mesh)
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    context = lss.context_of(model)
    context.ledger.clear()
    lss.average_gradients(model)
    assert all((weight.grad == 2).all() for weight in model.parameters())
    count, _ = context.ledger.total(axis="sequence", layer="gradients")
    return count, sum(weight.numel() * weight.element_size() for weight in model.parameters())


def test_gradients_travel_in_buckets(ranks):
    for count, num_bytes in ranks.run(messages_of_a_large_model, 2):
        assert num_bytes > BUCKET_BYTES
        assert count == -(-num_bytes // BUCKET_BYTES)
