"""Where gathering keys and values ends: planned, not measured. `python benchmarks/plan_limits.py docs/limits.md`."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from lss.config import AttentionConfig, Config, DataConfig, ModelConfig, ParallelConfig, TrainConfig
from lss.errors import LssError
from lss.models import GPT, GPTConfig
from lss.page import Heading, Paragraph, Part, Points, Table, markdown
from lss.plan import Hardware, Plan, Setup, make_plan
from lss.plan.hardware import shipped
from lss.plan.links import Group, seconds
from lss.plan.report import efficiency
from lss.plan.setup import trace_step
from lss.plan.trace import Event, Operator, Start
from lss.strategies import StrategyName

ABOUT = (
    "Planned, not measured: `lss plan` plays one rank's step, taken on tensors without values, on the rates of a "
    "hardware file. It leaves out fragmentation of the allocator, other jobs on the network, and thermal throttling. "
    "No figure of a GPU has been compared with a GPU yet. Made by `python benchmarks/plan_limits.py FILE`."
)
WIDTHS, RANKS, MILLION = (1024, 4096, 8192), 64, 2**20
LENGTHS = {"cuda": [2**power for power in range(10, 25, 2)], "cpu": [2**power for power in range(10, 19, 2)]}


def config_of(ranks: int, groups: int, length: int, batch: int, precision: str = "fp32") -> Config:
    train = TrainConfig(batch=batch, precision=precision)  # type: ignore[arg-type]
    parallel = ParallelConfig(ranks // groups, groups)
    return Config(ModelConfig("gpt-20m"), DataConfig(length=length), parallel, AttentionConfig(), train)


def eight_billion(length: int, batch: int) -> tuple[GPT, dict[str, Tensor]]:
    """The shape of an 8B model but for its feed-forward, which has two matrices: 6.7 billion parameters."""
    shape = GPTConfig(4096, 32, 32, 8, vocabulary=128_256, max_length=length, positions="rotary")
    tokens = torch.zeros(batch, length, dtype=torch.int64)
    return GPT(shape), {"tokens": tokens, "labels": tokens}


# Ceiling of the all-gather.


@lru_cache(maxsize=256)
def events(device: str, precision: str, width: int, length: int) -> list[Event]:
    """Of a GPT of one layer, but for its optimizer's."""
    config = config_of(RANKS, 1, length, 1, precision)
    model = ModelConfig("gpt-20m", "rotary", width=width, heads=width // 128, layers=1)
    config = replace(config, model=model, attention=AttentionConfig("kv"))
    setup = Setup("", config, device, foreach=True)  # type: ignore[arg-type]
    return [event for event in trace_step(setup).events if not getattr(event, "name", "").startswith("_foreach")]


def layer(name: str, per_node: int, width: int, length: int) -> float:
    """Seconds of attention's messages over those in which the device computes, forward and backward."""
    hardware = Hardware.named(name)
    group = Group.of(RANKS, 1, RANKS, per_node)
    found = events(hardware.device, precision_of(hardware), width, length)
    sent = (event for event in found if isinstance(event, Start) and event.entry.phase in ("forward", "backward"))
    sending = sum(seconds(hardware, event.entry.operation, event.num_bytes, group) for event in sent)
    return sending / sum(hardware.seconds(event) for event in found if isinstance(event, Operator))


def precision_of(hardware: Hardware) -> str:
    return "fp32" if hardware.device == "cpu" or hardware.name == "v100-summit" else "bf16"


def crossing(name: str, per_node: int, width: int) -> str:
    """From where on a layer computes for longer than it sends: on a straight line of logarithms, between lengths."""
    lengths = LENGTHS[Hardware.named(name).device]
    for shorter, longer in reversed(list(pairwise(lengths))):
        one, other = (math.log2(layer(name, per_node, width, length)) for length in (shorter, longer))
        if other > 0:
            return f"> {longer:,}"
        if one > 0:
            return f"{round(shorter * 2 ** (one / (one - other)), -3):,.0f}"
    return f"< {lengths[0]:,}"


def ceiling() -> Iterator[Part]:
    yield Heading("Ceiling of the all-gather")
    yield Paragraph(
        f"A causal layer over N = {RANKS} ranks computes O(L² / N) and receives O(L): above some length L its messages "
        "take less time than its computation, so they can be hidden; below it they cannot. Full multi-head attention, "
        "heads 128 wide, gather kv (x sends half as much and repeats projections), one sequence, bfloat16 (float32 on "
        "v100-summit and cpu-gloo); seconds of the device, without the host's and the optimizer's. Twice as many ranks "
        "take twice the length. A row: `crossing(name, ranks_per_node, width)` of the benchmark."
    )
    rows = []
    for name in sorted(shipped()):
        hardware = Hardware.named(name)
        inside = [crossing(name, RANKS, width) for width in WIDTHS]
        rows.append((name, f"inside, {hardware.node.bandwidth / 1e9:g} GB/s a rank", *inside))
        if hardware.ranks_per_node < RANKS:
            across = [crossing(name, hardware.ranks_per_node, width) for width in WIDTHS]
            link = f"between, {hardware.between.bandwidth / 1e9:g} GB/s a node of {hardware.ranks_per_node}"
            rows.append((name, link, *across))
    head = ("machine", "link", *(f"width {width:,}" for width in WIDTHS))
    yield Table("Tokens at which messages and computation of a layer take as long", head, tuple(rows))
    yield Paragraph(
        "Inside: as if all 64 ranks were on one node. Below 1,024 tokens a rank has 16 or fewer, and its time is that "
        "of reading the weights, behind which messages fit. Where both grow nearly alike, lengths are rough."
    )


# The paper's ranks, divided otherwise.


def divided() -> Iterator[Part]:
    yield Heading("864 GPUs in data groups")
    yield Paragraph(
        "gpt-20m, 50,112 tokens, 16 sequences a step, torch's kernels. A row of G groups: `lss plan gpt-20m --ranks "
        "864 --data-groups G --batch 16/G --length 50112 --hardware v100-summit`."
    )
    hardware, rows = Hardware.named("v100-summit"), []
    for groups in (1, 2, 4, 8, 16):
        plan = make_plan(Setup("", config_of(864, groups, 50_112, 16 // groups), "cuda"), hardware)
        tokens = f"{plan.tokens_per_second:,.0f}"
        rows.append((f"{groups} x {864 // groups}", str(16 // groups), *outcome(plan), tokens))
    head = ("groups x ranks of a sequence", "batch", *OUTCOME, "tokens/s")
    yield Table("The same step in more groups", head, tuple(rows))


OUTCOME = ("GB", "fits", "s / step", "communication")


def outcome(plan: Plan) -> tuple[str, ...]:
    fits, seconds = "yes" if plan.fits else "no", f"{plan.timeline.total:.3f}"
    return f"{plan.peak.total / 1e9:.1f}", fits, seconds, f"{plan.communication_share:.0%}"


# Efficiency, and what it is measured from.


def efficiencies() -> Iterator[Part]:
    yield Heading("Efficiency depends on its base")
    yield Paragraph(
        "gpt-20m on h100, bfloat16, 4 sequences. By time: T_base N_base / (N T), times the growth of tokens where "
        "they grow. By throughput: operations a second of a rank over those of the base's. Work that ranks repeat "
        "counts for the second, not for the first. A row: `lss plan gpt-20m --precision bf16 --length L --ranks N`."
    )
    hardware = Hardware.named("h100")

    def planned(ranks: int, length: int) -> Plan:
        return make_plan(Setup("", config_of(ranks, 1, length, 4, "bf16"), "cuda"), hardware)

    alone = planned(1, 65_536)
    strong = (planned(ranks, 65_536) for ranks in (1, 2, 4, 8, 16, 32, 64))
    rows = tuple(efficiency_row(plan, efficiency(plan, alone)) for plan in strong)
    head = ("N x tokens", "s / step", "utilisation", "communication", "by time", "by throughput")
    yield Table("One length, from a GPU that is well used", head, rows)
    base, grown = planned(6, 348), []
    for ranks in (6, 36, 108, 324, 864):
        plan = planned(ranks, 58 * ranks)
        by_time = base.timeline.total / plan.timeline.total
        by_rate = plan.flops / plan.timeline.total / (base.flops / base.timeline.total)
        grown.append(efficiency_row(plan, {"time": by_time, "throughput": by_rate}))
    yield Table("Lengths that grow as the ranks, from 6 ranks that are hardly used, as the paper's", head, tuple(grown))


def efficiency_row(plan: Plan, found: dict[str, float] | None) -> tuple[str, ...]:
    config, by = plan.setup.config, found or {}
    shares = (plan.utilisation, plan.communication_share, by["time"], by["throughput"])
    run = f"{config.parallel.sequence} x {config.data.length:,}"
    return run, f"{plan.timeline.total:.4f}", *(f"{share:.0%}" for share in shares)


# Rivals.

RIVALS: tuple[StrategyName, ...] = ("lss", "ring", "ulysses", "megatron", "megatron-tp")


def rivals() -> Iterator[Part]:
    yield Heading("Beside rivals")
    yield Paragraph(
        "gpt-20m on h100, bfloat16, 8,192 tokens, 4 sequences. `megatron` is the paper's baseline, whose ranks compute "
        "all of attention and feed-forward each; `megatron-tp` cuts them by its 8 heads, as Ulysses does. A row: `lss "
        "plan gpt-20m --precision bf16 --length 8192 --ranks N --strategy S`."
    )
    hardware, rows = Hardware.named("h100"), []
    for ranks in (2, 8, 64):
        config = config_of(ranks, 1, 8192, 4, "bf16")
        for strategy in RIVALS:
            parallel = replace(config.parallel, strategy=strategy)
            setup = Setup("", replace(config, parallel=parallel), "cuda")
            rows.append((f"{ranks}, {strategy}", *outcome_of(setup, hardware)))
    yield Table("The same sequences", ("ranks, strategy", *OUTCOME), tuple(rows))


def outcome_of(setup: Setup, hardware: Hardware) -> tuple[str, ...]:
    try:
        return outcome(make_plan(setup, hardware))
    except LssError:
        return ("refused", *[""] * (len(OUTCOME) - 1))


# A million tokens.


def million() -> Iterator[Part]:
    yield Heading("A million tokens of an 8B model")
    yield Paragraph(
        "4096 wide, 32 layers, 32 query and 8 key-value heads, a vocabulary of 128,256, rotary, bfloat16 over float32 "
        "weights, layers computed again, parameters cut over all ranks; one sequence of 1,048,576 tokens, h100. Its "
        "feed-forward has two matrices: 6.7 billion parameters. Logits of a rank's tokens are whole. A row, from the "
        "repository's root: `lss plan benchmarks.plan_limits:eight_billion --length 1048576 --batch 1 --precision bf16 "
        "--recompute --shard-parameters --gather kv --ranks N`, with `--regather`, `--chunks 4` or `--strategy S`."
    )
    ways = {"kv, kept": {}, "kv, gathered again": {"keep": False}, "kv, 4 chunks": {"keep": False, "chunks": 4}}
    rows = [million_row(ranks, name, "kv", **way) for ranks in GPUS for name, way in ways.items()]
    rows += [million_row(ranks, "x, kept", "x") for ranks in (64, 512)]
    rows += [million_row(ranks, "ring", strategy="ring") for ranks in GPUS if ranks <= 128]
    rows += [million_row(ranks, "ulysses", strategy="ulysses") for ranks in GPUS if ranks <= 64]
    yield Table("One step", ("GPUs, gather or strategy", *OUTCOME), tuple(rows))
    yield Paragraph(
        "Ulysses has at most as many ranks as the model has query heads, 32. Ring attention: up to 128 ranks."
    )
    yield Paragraph(
        "What is gathered is of one layer at a time in all of these, as layers are computed again: `kept` sends least. "
        "On few GPUs the logits take the memory, which chunks of keys do not help."
    )


GPUS = (8, 16, 32, 64, 128, 256, 512, 1024)


def million_row(
    ranks: int, name: str, gather: str = "kv", strategy: StrategyName = "lss", **way: bool | int
) -> tuple[str, ...]:
    train = TrainConfig(batch=1, precision="bf16", recompute=True)
    attention = replace(AttentionConfig(gather=gather), **way)  # type: ignore[arg-type]
    parallel = ParallelConfig(ranks, strategy=strategy, shard_parameters=True)
    config = Config(data=DataConfig(length=MILLION), parallel=parallel, attention=attention, train=train)
    setup = Setup("benchmarks.plan_limits:eight_billion", config, "cuda")
    return f"{ranks:,}, {name}", *outcome_of(setup, Hardware.named("h100"))


def main(file: str) -> None:
    parts = [Paragraph(ABOUT), *ceiling(), *divided(), *efficiencies(), *rivals(), *million(), *sources()]
    Path(file).write_text(markdown("Limits, planned", parts), encoding="utf-8")


def sources() -> Iterator[Part]:
    yield Heading("Machines")
    yield Points(tuple(f"{name}: {Hardware.named(name).source}" for name in sorted(shipped())))


if __name__ == "__main__":
    main(sys.argv[1])
