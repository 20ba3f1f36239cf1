"""The mean loss of a model on a split, over any number of ranks."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lss.batch import shard
from lss.collectives import agree, agree_equal
from lss.config import Config
from lss.context import context_of
from lss.data import Bytes, Window, fingerprint, open_source, split, windows
from lss.data.sampler import batches, read
from lss.errors import ConfigError
from lss.losses import token_mean_cross_entropy
from lss.mesh import World, init_mesh
from lss.models import GPT
from lss.parallelize import parallelize
from lss.train.folder import RunFolder
from lss.train.metrics import Display, bits, display
from lss.train.optim import autocast


@dataclass(frozen=True)
class Evaluation:
    """The mean over all predicted bytes of all ranks.

    Args:
        loss: Nats a byte.
        num_tokens: Bytes predicted.
    """

    loss: float
    num_tokens: int

    @property
    def bits_per_byte(self) -> float:
        """Loss in bits."""
        return bits(self.loss)


def evaluate(
    model: nn.Module,
    mesh: DeviceMesh,
    data: Bytes,
    chosen: list[Window],
    config: Config,
    progress: Display | None = None,
) -> Evaluation:
    """Mean loss of a parallelized model over windows of `data`, the same on every rank. A collective call."""
    context, was_training = context_of(model), model.training
    device = next(model.parameters()).device
    total = torch.zeros(2, dtype=torch.float64, device=device)
    model.eval()
    for batch in batches(chosen, context.data.size, context.data.rank, config.train.batch):
        tensors = {name: tensor.to(device) for name, tensor in read(data, batch, config.data.length).items()}
        part = shard(tensors, mesh, shift_labels=0, layout=config.attention.layout)
        with torch.no_grad(), autocast(config.train.precision, device):
            logits = model(part["tokens"], segment=part["segment"])
        one = torch.ones((), device=device)  # a sum now, divided by the count of all batches at the end
        total[0] += token_mean_cross_entropy(logits, part["labels"], one)
        total[1] += (part["labels"] >= 0).sum()
        if progress:
            progress.advance()
    model.train(was_training)
    loss, count = context.sum_over_ranks(total).tolist()
    return Evaluation(loss / count, int(count))


def evaluate_run(world: World, folder: RunFolder, config: Config, part: str, limit: int) -> None:
    """Load a run's weights and print the bits per byte of a split. Runs on every rank.

    Args:
        world: Who this process is.
        folder: The run.
        config: The run's configuration, with what flags changed.
        part: `train`, `validation` or `test`.
        limit: Sequences, evenly spaced; 0 takes the whole split.
    """
    mesh = init_mesh(config.parallel.sequence, config.parallel.data, device=config.parallel.device, world=world)
    data = agree(lambda: open_source(config.data.source, config.data.cache()))
    agree_equal("the data", fingerprint(data), "give every rank the same data")
    device = torch.device(mesh.device_type)
    plain = agree(folder.build)
    agree(partial(_check_length, plain, config.data.length))
    model = parallelize(plain.to(device), mesh, **asdict(config.attention))
    chosen = agree(lambda: windows(split(data)[part], config.data.length, limit))
    num_batches = -(-len(chosen) // (config.train.batch * config.parallel.data))
    with display(world.rank, num_batches, "batch") as progress:
        result = evaluate(model, mesh, split(data)[part], chosen, config, progress)
    if world.rank == 0:
        print(f"{part}: {result.bits_per_byte:.4f} bits/byte (loss {result.loss:.4f}) over {result.num_tokens:,} bytes")


def _check_length(model: GPT, length: int) -> None:
    if model.positions is not None and length > model.config.max_length:
        raise ConfigError(
            f"data.length = {length}, and the run has a learned table of {model.config.max_length} positions",
            allowed=f"at most {model.config.max_length}",
            remedy="evaluate at a shorter length, or train with --model.positions rotary",
        )
