"""What a run is made of: defaults, then a TOML file, then flags."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

import tomli_w

from lss.attention import Gather, KernelName
from lss.data import default_cache_folder
from lss.models import PRESETS, GPTConfig
from lss.strategies import StrategyName


@dataclass(frozen=True)
class ModelConfig:
    """The model.

    Args:
        preset: Shape to start from; the keys below change it where they are given.
        positions: Learned table or rotary.
        tie_weights: Whether the head shares the weight of the token embedding.
        width: Embedding width.
        layers: Number of blocks.
        heads: Query heads.
        key_value_heads: Key-value heads, a divisor of the query heads.
    """

    preset: Literal["gpt-tiny", "gpt-20m", "gpt-1.5b"] = "gpt-tiny"
    positions: Literal["learned", "rotary"] | None = None
    tie_weights: bool | None = None
    width: int | None = None
    layers: int | None = None
    heads: int | None = None
    key_value_heads: int | None = None


@dataclass(frozen=True)
class DataConfig:
    """The data: bytes as tokens.

    Args:
        source: `stdlib` (source text of the running Python's standard library), `enwik8`, a file (plain, .gz, .bz2,
            .xz, .zip) or a folder.
        length: Tokens of a sequence, on all ranks together.
        cache_folder: Where unpacked and downloaded data is kept; by default `lss` in the user's cache folder.
    """

    source: str = "stdlib"
    length: int = 512
    cache_folder: str = ""

    def cache(self) -> Path:
        """The cache folder as a path."""
        return Path(self.cache_folder).expanduser() if self.cache_folder else default_cache_folder()


@dataclass(frozen=True)
class ParallelConfig:
    """The ranks.

    Args:
        sequence: Ranks that hold one sequence together (context parallel degree).
        data: Sequence groups, each with other sequences.
        device: auto (CUDA where there is a GPU), cpu or cuda.
        timeout: Seconds that a collective may wait for its slowest rank.
        strategy: lss; or to compare: serial (one rank a sequence), ring, lightseq and ulysses (keys and values sent
            otherwise), megatron (the paper's baseline, attention and feed-forward whole on every rank), megatron-tp
            (its real form, their weights cut), concatenated (the paper's method without averaging: outputs of
            attention are gathered too).
        shard_parameters: Whether parameters, gradients and optimizer states are cut over all ranks (fully_shard).
    """

    sequence: int = 1
    data: int = 1
    device: Literal["auto", "cpu", "cuda"] = "auto"
    timeout: float = 1800.0
    strategy: StrategyName = "lss"
    shard_parameters: bool = False


@dataclass(frozen=True)
class AttentionConfig:
    """Attention over segments.

    Args:
        gather: What a layer gathers: x (its input, one message), kv (packed, one message), separate (two), or auto,
            whichever of x and kv takes fewer seconds.
        kernel: What computes; auto takes the fastest that can; stored keeps all scores for backward, as the paper ran.
        keep: Whether what was gathered is kept for backward; else it is gathered again, in less memory.
        chunks: Pieces in which it is gathered, in less memory still; with more than one, none is kept.
        layout: Which tokens a rank holds: zigzag (equal work under a causal mask) or contiguous (the paper's).
    """

    gather: Gather = "auto"
    kernel: KernelName = "auto"
    keep: bool = True
    chunks: int = 1
    layout: Literal["zigzag", "contiguous"] = "zigzag"


@dataclass(frozen=True)
class TrainConfig:
    """Training.

    Args:
        steps: Optimizer steps.
        batch: Sequences a data group and step.
        accumulation: Micro-batches into which a batch is cut.
        recompute: Whether layers are computed again in backward, so that only their inputs are kept.
        precision: fp32, bf16 (autocast over float32 weights) or fp64.
        learning_rate: Peak of the schedule.
        warmup_steps: Steps of linear warm-up, then a cosine down to a tenth.
        weight_decay: AdamW's decay, on matrices.
        clip_norm: Largest global gradient norm; 0 turns clipping off.
        dropout: Rate after the embedding, in the feed-forward and on residual branches.
        attention_dropout: Rate on attention weights; the kernel that stores scores is taken for it.
        seed: Of weights, data order and dropout.
        eval_every: Steps between evaluations on the validation split; 0 evaluates at the end only.
        eval_sequences: Sequences of such an evaluation; 0 takes the whole split.
        deterministic: Whether all sums have a fixed order, so that a run repeats bit by bit on any device.
        check_replicas: Whether to check after every step that shared parameters are bit-identical on all ranks.
    """

    steps: int = 100
    batch: int = 4
    accumulation: int = 1
    recompute: bool = False
    precision: Literal["fp32", "bf16", "fp64"] = "fp32"
    learning_rate: float = 1e-3
    warmup_steps: int = 10
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    dropout: float = 0.0
    attention_dropout: float = 0.0
    seed: int = 0
    eval_every: int = 50
    eval_sequences: int = 32
    deterministic: bool = False
    check_replicas: bool = False


@dataclass(frozen=True)
class RunConfig:
    """The run.

    Args:
        folder: Where configuration, metrics and weights are written; by default a new folder under `runs`.
        tensorboard: Whether to write TensorBoard events too.
    """

    folder: str = ""
    tensorboard: bool = False


@dataclass(frozen=True)
class Config:
    """Everything that a run can be told."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def gpt(self) -> GPTConfig:
        """The shape of the model: the preset, changed where a key is given."""
        given = {name: value for name, value in asdict(self.model).items() if name != "preset" and value is not None}
        return replace(
            PRESETS[self.model.preset],
            max_length=self.data.length,
            dropout=self.train.dropout,
            attention_dropout=self.train.attention_dropout,
            **given,
        )

    def resolved(self) -> Config:
        """The same with every key of the model given."""
        shape = self.gpt()
        return replace(
            self,
            model=ModelConfig(
                self.model.preset,
                shape.positions,
                shape.tie_weights,
                shape.width,
                shape.layers,
                shape.heads,
                shape.num_key_value_heads,
            ),
        )

    def to_toml(self) -> str:
        """The resolved configuration, as `lss train` reads it, for another run: without the folder of this one."""
        sections = asdict(replace(self.resolved(), run=replace(self.run, folder="")))
        return tomli_w.dumps(sections)
