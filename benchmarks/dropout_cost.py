"""What keyed dropout costs, against torch's own: nanoseconds an element, one thread, smallest of several runs.

python benchmarks/dropout_cost.py
"""

import time
from collections.abc import Callable

import torch
from torch.nn import functional as F

import lss
from lss.dropout import PositionDropout, Site, keep_weights
from lss.models import GPT, GPTConfig

LENGTH, WIDTH, HEADS, RUNS = 2048, 512, 8, 7


def nanoseconds(function: Callable[[], object], elements: int) -> float:
    """Time of an element."""
    times = []
    for _ in range(RUNS):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return min(times) / elements * 1e9


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    model = lss.parallelize(GPT(GPTConfig(16, 1, 2, max_length=LENGTH)), None)
    context = lss.context_of(model)
    segment = lss.shard({"tokens": torch.zeros(1, LENGTH, dtype=torch.int64)}, None, step=0)["segment"]
    values = torch.randn(1, LENGTH, WIDTH)
    dropout = PositionDropout(Site("dropout", 0.1, 0, context))

    def keyed() -> torch.Tensor:
        context.begin(segment, training=True)
        return dropout(values)

    weights = 128 * LENGTH * HEADS
    rows = {
        "torch's F.dropout, activations": nanoseconds(lambda: F.dropout(values, 0.1), values.numel()),
        "keyed, activations": nanoseconds(keyed, values.numel()),
        "keyed mask alone": nanoseconds(lambda: dropout.site.keep(0, 0, LENGTH, WIDTH, values.device), values.numel()),
        "keyed mask of attention weights": nanoseconds(
            lambda: keep_weights(dropout.site, range(1), 0, 128, HEADS, values.device), weights
        ),
    }
    for name, time_of_element in rows.items():
        print(f"{name:34} {time_of_element:6.2f} ns/element")


if __name__ == "__main__":
    main()
