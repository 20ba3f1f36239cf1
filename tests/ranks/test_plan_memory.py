"""What a plan says of memory and of messages, against runs over ranks watched by torch's own tracker.

`python -m benchmarks.plan_memory` does the full product.
"""

import pytest

from tests.planned import config_of, messages_of, planned, run

BOUND = 0.05
# model, ranks, kernel, whether gathered tensors are kept
RUNS = [
    ("gpt", 1, "flash", True),
    ("gpt", 4, "math", False),
    ("grouped_gpt", 2, "flash", False),
    ("grouped_gpt", 4, "math", True),
    ("gpt2", 4, "flash", True),
    ("gpt2", 2, "math", False),
    ("llama", 4, "flash", False),
    ("llama", 1, "math", True),
    ("bert", 2, "auto", True),
]
# what else a run may be told
FURTHER = {
    "recompute": {"recompute": True},
    "data groups": {"data": 2},
    "bf16": {"precision": "bf16"},
    "chunks": {"chunks": 2},
    "gather x": {"gather": "x"},
    "stored": {"kernel": "stored", "gather": "x", "layout": "contiguous"},
    "megatron": {"strategy": "megatron", "kernel": "stored", "layout": "contiguous"},
    "concatenated": {"strategy": "concatenated", "gather": "separate"},
}


def compare(ranks, num_ranks: int, name: str, **changed) -> None:
    config = config_of(num_ranks, **changed)
    plan = planned(name, config)
    results = ranks.run(run, num_ranks, name, config)
    busiest = max(size for size, _ in results)
    assert abs(plan.peak.total - busiest) <= BOUND * busiest, (plan.peak, busiest)
    found = {
        (message.axis, message.operation, message.phase): [message.count, message.bytes] for message in plan.messages
    }
    assert found == messages_of(results[0][1])


@pytest.mark.parametrize(("name", "num_ranks", "kernel", "kept"), RUNS)
def test_memory_and_messages_are_those_of_a_run(ranks, num_ranks, name, kernel, kept):
    compare(ranks, num_ranks, name, kernel=kernel, keep=kept)


@pytest.mark.parametrize("told", FURTHER)
def test_whatever_a_run_is_told(ranks, told):
    compare(ranks, 2, "gpt", **FURTHER[told])


def test_cut_parameters(ranks):
    """What `fully_shard` sends is no part of the ledger; what it holds is."""
    config = config_of(2, shard_parameters=True)
    plan = planned("grouped_gpt", config)
    busiest = max(size for size, _ in ranks.run(run, 2, "grouped_gpt", config))
    assert abs(plan.peak.total - busiest) <= BOUND * busiest, (plan.peak, busiest)
    assert {message.operation for message in plan.messages if message.axis == "all"} == {"all_gather", "reduce_scatter"}
