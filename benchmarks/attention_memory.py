"""Memory of gpt-20m over four ranks against the serial run, and of one call of attention against stored scores.

python -m benchmarks.attention_memory [--length 16384] [--attention-length 8192]
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.ranks.test_memory import activations

import lss
from lss.masks import Causal
from lss.models import PRESETS
from lss.testing import RankPool

NUM_RANKS = 4
HEADS, WIDTH = 8, 64
MEGA = 1e6


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--length", type=int, default=16384, help="tokens of the model's sequence")
    made.add_argument("--attention-length", type=int, default=8192, help="tokens of the call of attention")
    given = made.parse_args()
    with RankPool() as pool:
        of_model(pool, given.length)
        of_attention(pool, given.attention_length)


def of_model(pool: RankPool, length: int) -> None:
    """Activations at the end of forward and at the peak of a step, batch 1, float32."""
    shape = replace(PRESETS["gpt-20m"], max_length=length)
    one_layer = length * 2 * shape.width * 4  # bytes of gathered keys and values
    (serial,) = pool.run(activations, 1, 1, "serial", True, 1, shape, 1, timeout=1800)
    print(f"serial, {length} tokens: {serial[0] / MEGA:.0f} MB after forward, {serial[1] / MEGA:.0f} MB at the peak")
    for keep, chunks in ((True, 1), (False, 1), (False, 4)):
        found = pool.run(activations, NUM_RANKS, NUM_RANKS, "kv", keep, chunks, shape, 1, timeout=1800)
        now, peak = (max(rank[index] for rank in found) for index in (0, 1))
        layers = shape.layers if keep else 1 if chunks == 1 else 2 / chunks
        bound = 1.15 * serial[1] / NUM_RANKS + layers * one_layer
        said = f"1.15 x serial / {NUM_RANKS} + {layers:g} x {one_layer / MEGA:.0f} = {bound / MEGA:.0f} MB"
        print(f"N = {NUM_RANKS}, keep={keep}, chunks={chunks}: {now / MEGA:.0f} MB after forward")
        print(f"    peak {peak / MEGA:.0f} MB, bound {said}")


def of_attention(pool: RankPool, length: int) -> None:
    """Peak of forward and backward of a causal call, 8 heads 64 wide, float32, whose own tensors are among them."""
    (stored,) = pool.run(attention_peak, 1, 1, length, "stored", timeout=1800)
    print(f"scores stored whole (torch's math), {length} tokens: {stored / MEGA:.0f} MB")
    for ranks, kernel in ((1, "flash"), (1, "math"), (2, "flash"), (4, "flash")):
        peak = max(pool.run(attention_peak, ranks, ranks, length, kernel, timeout=1800))
        print(f"lss.attention, N = {ranks}, {kernel}: {peak / MEGA:.0f} MB, {stored / peak:.1f} times less")


def attention_peak(sequence: int, length: int, kernel: str) -> int:
    """Bytes of tensors at the peak."""
    mesh = lss.init_mesh(sequence, device="cpu")
    layout = lss.Layout.zigzag(length, sequence)
    tracker = MemTracker()
    with tracker:
        query, key, value = (torch.randn(1, HEADS, layout.segment_length, WIDTH).requires_grad_() for _ in range(3))
        if kernel == "stored":
            with sdpa_kernel(SDPBackend.MATH):
                output = scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            output = lss.attention(query, key, value, mask=Causal(), mesh=mesh, layout=layout, kernel=kernel)
        output.sum().backward()
    (kinds,) = tracker.get_tracker_snapshot("peak").values()
    return next(size for kind, size in kinds.items() if str(kind).endswith("Total"))


if __name__ == "__main__":
    main()
