"""The paper's Figures 4(a) to 4(c), and what it says of collectives, of its rival and of utilisation."""

from __future__ import annotations

from collections.abc import Callable

from lss.paper.facts import facts, table
from lss.paper.records import Record
from lss.paper.setting import SMALL_GPU, Run, machine
from lss.plan import Plan
from lss.plan.plan import traced
from lss.plan.trace import Operator

LARGEST = (864, 50112)  # GPUs and tokens of Table 3a's last row, which Figure 4(a) is of
ABLATION = {
    "fused_and_averaged": Run("small", *LARGEST),
    "averaged_only": Run("small", *LARGEST, gather="separate"),
    "neither": Run("small", *LARGEST, gather="separate", strategy="concatenated"),
}
COLLECTIVES = {
    "basic": ABLATION["neither"],
    "fused": Run("small", *LARGEST, strategy="concatenated"),
    "fused_and_averaged": ABLATION["fused_and_averaged"],
    "nvidia": Run("small", 36, 2088, strategy="megatron"),
}
# GPUs, tokens and data groups at which the paper has LSS and its rival side by side.
RIVALS = {"Table 3, 36 GPUs": (36, 2088, 1), "Table 4, 144 GPUs": (36, 2088, 4)}


def ablation() -> list[Record]:
    """Figure 4(a): the first is the paper's own, the others follow from their seconds."""
    stated: dict[str, float] = facts()["figure_4a_efficiency_percent_at_864"]
    seconds = {name: run.plan().timeline.total for name, run in ABLATION.items()}
    best = "fused_and_averaged"
    found = []
    for name, spent in seconds.items():
        planned = stated[best] * seconds[best] / spent
        words = name.replace("_", " ")
        found.append(Record("figure-4a", words, "efficiency_at_864", stated[name], planned, *LARGEST))
        found.append(Record("figure-4a", words, "step_ms", None, 1e3 * spent, *LARGEST))
    return found


def lengths() -> list[Record]:
    """Figure 4(b): the longest sequences that fit."""
    stated: dict[str, int] = facts()["figure_4b_max_length"]
    found = {int(ranks): (length, longest_length(int(ranks), length)) for ranks, length in stated.items()}
    return [Record("figure-4b", f"{ranks} GPUs", "longest", *both, ranks, 0) for ranks, both in found.items()]


def longest_length(ranks: int, guess: int) -> int:
    """The longest sequence, a multiple of the ranks, that fits a GPU of 16 GB."""
    memory = machine(SMALL_GPU).memory

    def excess(segment: int) -> float:
        return Run("small", ranks, ranks * segment).plan().peak.total - memory

    return ranks * largest_below_zero(excess, guess // ranks)


def largest_below_zero(function: Callable[[int], float], guess: int) -> int:
    """The largest number at which a function that grows is at most 0.

    It is called as rarely as can be: by the secant of the last two numbers, kept within those that are known to be too
    small and too large.

    >>> largest_below_zero(lambda number: number**2 - 50.0, 3)
    7
    """
    known = {guess: function(guess)}
    while True:
        low = max((number for number, value in known.items() if value <= 0), default=0)
        high = min((number for number, value in known.items() if value > 0), default=8 * max(known))
        if high - low <= 1:
            return low
        number = min(max(_next(known), low + 1), high - 1)
        known[number] = function(number)


def _next(known: dict[int, float]) -> int:
    (last, value), *others = reversed(known.items())
    if not others:
        return round(last * (0.9 if value > 0 else 1.1))
    before, value_before = others[0]
    return int(last - value * (last - before) / (value - value_before))


def shares() -> list[Record]:
    """Figure 4(c): what the seconds of a step are spent on."""
    stated = facts()["figure_4c_communication_share_percent"]
    found = []
    for fact in table("3a_lss_linear")[1:]:
        line = Run("small", fact.gpus, fact.length or 0).plan().timeline
        for part in ("computation", "communication", "waiting"):
            paper = stated.get(str(fact.gpus)) if part == "communication" else None
            share = 100 * getattr(line, part) / line.total
            run = f"{fact.gpus} x {fact.length:,}"
            found.append(Record("figure-4c", run, part, paper, share, fact.gpus, fact.length or 0))
    return found


def collectives() -> list[Record]:
    """Collectives of a layer, forward and backward."""
    stated = facts()["collectives_per_layer_forward_and_backward"]
    found = []
    for name, run in COLLECTIVES.items():
        counted, words = _collectives(run.plan()), name.replace("_", " ")
        found.append(Record("collectives", words, "collectives", stated[name], counted, run.ranks, run.length))
    return found


def _collectives(plan: Plan) -> float:
    sent = (message for message in plan.messages if message.axis == "sequence")
    count = sum(message.count for message in sent if message.phase in ("forward", "backward"))
    return count / plan.setup.config.gpt().layers


def rivals() -> list[Record]:
    """How much better LSS is than its rival: by FLOP/s in the paper, by seconds of a step in the plan."""
    smaller = _of(table("3b_nvidia_linear")[1].gigabytes, table("3a_lss_linear")[1].gigabytes)
    faster = {
        1: _of(table("3a_lss_linear")[1].tflops, table("3b_nvidia_linear")[1].tflops),
        4: _of(table("4a_lss_linear_4_data_groups")[1].tflops, table("4b_nvidia_linear_4_data_groups")[0].tflops),
    }
    found = []
    for name, (ranks, length, groups) in RIVALS.items():
        own = Run("small", ranks, length, groups).plan()
        rival = Run("small", ranks, length, groups, strategy="megatron").plan()
        size = ranks * groups, length
        by_time = rival.timeline.total / own.timeline.total
        found.append(Record("rival", name, "times_faster", faster[groups], by_time, *size))
        paper = smaller if groups == 1 else None
        found.append(Record("rival", name, "times_smaller", paper, rival.peak.total / own.peak.total, *size))
    return found


def _of(one: float | None, other: float | None) -> float | None:
    return one / other if one and other else None


def utilisation() -> list[Record]:
    """GPU utilisation, which a plan does not know, and what is nearest to it."""
    stated: dict[str, float] = facts()["gpu_utilisation_percent"]
    found = []
    for name, paper in stated.items():
        ranks, length = (int(word) for word in name.replace(" ranks,", "").split())
        plan = Run("small", ranks, length).plan()
        events = (event for event in traced(plan.setup).events if isinstance(event, Operator))
        busy = sum(plan.hardware.seconds(event) for event in events)
        with_messages = busy + plan.timeline.communication + plan.timeline.waiting
        shown = {
            "utilisation": (paper, None),
            "computing": (None, 100 * busy / plan.timeline.total),
            "computing_or_sending": (None, 100 * with_messages / plan.timeline.total),
        }
        run = f"{ranks} x {length:,}"
        found += [Record("utilisation", run, key, *both, ranks, length) for key, both in shown.items()]
    return found
