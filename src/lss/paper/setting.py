"""How the paper's runs are taken to have been: one set of assumptions for all of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from lss.attention import Gather
from lss.config import AttentionConfig, Config, DataConfig, ModelConfig, ParallelConfig, TrainConfig
from lss.plan import Hardware, Plan, Setup, make_plan

GIGABYTE = 2**30
OF_CUDA = 0.7e9  # bytes that CUDA and NCCL take for themselves: context, kernels, buffers of channels
BATCH = {"small": 4, "large": 2}
LARGE_GPU, SMALL_GPU = 32, 16  # gigabytes of a V100

ASSUMPTIONS = (
    "Small model: preset gpt-20m (512 wide, 6 layers, 8 heads), 4 sequences a data group. Large model: gpt-1.5b "
    "(2048 wide, 24 layers, 16 heads), 2 sequences; the paper does not say how many.",
    "A vocabulary of 256 bytes, a learned table of positions, a feed-forward layer 4 times as wide as the model.",
    "Dropout 0.1 everywhere, on attention weights too. All scores are stored for backward. No activation is computed "
    "twice. float32.",
    "Segments are contiguous. Attention gathers x, its input (fused); Figure 4(a) and the counts of collectives say "
    "where it is otherwise.",
    "AdamW in float32, one tensor at a time. Gradients, and the messages in which they are sent, stay in memory "
    "between steps, as in torch 1.x. Gradients are not clipped.",
    "A GB is 2^30 bytes. A V100 of 16 or 32 GB holds so many, less 0.7 billion bytes that CUDA and NCCL take for "
    "themselves; a plan above that is out of memory (OOM).",
    "Tables 5a and 5b give no length at 6 and 108 GPUs: 360 and 1,512 are assumed, the latter that of Table 6a at as "
    "many GPUs.",
    "The machine is v100-summit: its rates are from data sheets and typical efficiencies, but for the seconds that "
    "the host takes for an operator, which are fitted to the ratios of FLOP/s in Table 3a. Those of products and of "
    "memory were chosen, within what is plausible, with Figure 4(a) in sight, which two nearly equal runs decide; the "
    "large model's batch, the size of a GB and what stays between steps with the tables of memory in sight.",
)

UNKNOWN = (
    "FLOP/s in absolute terms: the paper does not say which operations it counts. The plan counts every operation of "
    "every rank, also where ranks repeat each other's: keys and values of fused attention, all of the rival's "
    "attention. Both figures are shown; only their ratios, to the first row for which the paper has one, are compared.",
    "The paper's efficiencies: (FLOP/s of N / N) / (FLOP/s of the first / its N) does not give them from the paper's "
    "own FLOP/s, and seconds of the first / seconds of N does not in the plan. Both are shown, neither is compared.",
    "GPU utilisation as the paper reports it: it does not say how it was sampled. The nearest is shown: the share of "
    "a step in which the device runs an operator, without and with messages, whose kernels run too.",
    "Losses, bits per byte and what else depends on values: a plan has none.",
)


@dataclass(frozen=True)
class Run:
    """One of the paper's runs.

    Args:
        model: Which of its two.
        ranks: That hold one sequence.
        length: Tokens of a sequence.
        groups: Data groups.
        gather: `x` (fused) or `separate`.
        strategy: `lss`; `concatenated`, which does not average gradients; `megatron`, the rival.
    """

    model: Literal["small", "large"]
    ranks: int
    length: int
    groups: int = 1
    gather: Gather = "x"
    strategy: Literal["lss", "concatenated", "megatron"] = "lss"

    @property
    def setup(self) -> Setup:
        """What is to be planned."""
        config = Config(
            ModelConfig("gpt-20m" if self.model == "small" else "gpt-1.5b"),
            DataConfig(length=self.length),
            ParallelConfig(self.ranks, self.groups, strategy=self.strategy),
            AttentionConfig(self.gather, "stored", layout="contiguous"),
            TrainConfig(batch=BATCH[self.model], dropout=0.1, attention_dropout=0.1, clip_norm=0.0),
        )
        return Setup("", config, "cuda", foreach=False, keeps_gradients=True)

    def plan(self) -> Plan:
        """On the paper's machine."""
        return make_plan(self.setup, machine(SMALL_GPU if self.model == "small" else LARGE_GPU))


def machine(gigabytes: int) -> Hardware:
    """The paper's, with V100s of so much memory."""
    return replace(Hardware.named("v100-summit"), memory=gigabytes * GIGABYTE - OF_CUDA)
