"""The training loop of `lss train`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lss.batch import shard
from lss.collectives import agree, agree_equal, from_first_rank
from lss.config import Config
from lss.context import SequenceContext, context_of
from lss.data import Bytes, Sampler, fingerprint, open_source, split, windows
from lss.errors import ReplicaError
from lss.gradients import replicas_that_differ
from lss.mesh import World, init_mesh
from lss.models import GPT
from lss.state import full_state_dict
from lss.train.evaluate import Evaluation, evaluate
from lss.train.folder import RunFolder, with_folder
from lss.train.metrics import Display, Metrics, bits, display, peak_bytes, step_text
from lss.train.model import prepare
from lss.train.optim import make_optimizer
from lss.train.update import update


@dataclass(frozen=True)
class Trainer:
    """What a training step works with on one rank."""

    config: Config
    mesh: DeviceMesh
    model: nn.Module
    context: SequenceContext
    sampler: Sampler
    optimizer: Optimizer
    scheduler: LRScheduler
    device: torch.device

    @classmethod
    def build(cls, config: Config, world: World, data: Bytes) -> Trainer:
        """Make mesh, model and optimizer. A collective call."""
        parallel, seed = config.parallel, config.train.seed
        mesh = init_mesh(parallel.sequence, parallel.data, device=parallel.device, world=world)
        device = torch.device(mesh.device_type)
        sampler = agree(lambda: Sampler(data, config.data.length, config.train.batch * parallel.data, seed))
        torch.manual_seed(seed)
        plain = GPT(config.gpt())
        plain = (plain.double() if config.train.precision == "fp64" else plain).to(device)
        torch.use_deterministic_algorithms(config.train.deterministic)
        model = agree(lambda: prepare(plain, mesh, config))
        optimizer, scheduler = make_optimizer(model, config.train, foreach=device.type == "cuda")
        return cls(config, mesh, model, context_of(model), sampler, optimizer, scheduler, device)

    def step(self, step: int) -> dict[str, Any]:
        """Train on the batch of one step; its metrics, the same on every rank."""
        started = time.perf_counter()
        self.context.ledger.clear()
        learning_rate = self.scheduler.get_last_lr()[0]
        done = update(self.model, self.optimizer, list(self._micro_batches(step)), self.config.train)
        if self.config.train.check_replicas:
            self._check_replicas()
        self.scheduler.step()
        own = torch.stack((done.loss, done.loss.new_tensor(peak_bytes(self.device))))
        ranks = self.context.gather_from_ranks(own)
        total, num_tokens = ranks[:, 0].sum().item(), int(done.count.item())
        seconds = time.perf_counter() - started
        return {
            "step": step + 1,
            "loss": total,
            "bits_per_byte": bits(total),
            "grad_norm": done.norm.item(),
            "learning_rate": learning_rate,
            "step_seconds": seconds,
            "tokens_per_second": num_tokens / seconds,
            "peak_bytes": int(ranks[:, 1].max().item()),
            "collectives": self.context.ledger.rows(),
        }

    def evaluate(self, validation: Bytes) -> Evaluation:
        """Mean loss on a part of the validation split."""
        chosen = windows(validation, self.config.data.length, self.config.train.eval_sequences)
        return evaluate(self.model, self.mesh, validation, chosen, self.config)

    def _micro_batches(self, step: int) -> Iterator[dict[str, Any]]:
        size, parts = self.config.train.batch, self.config.train.accumulation
        first = self.context.data.rank * size
        for part in range(parts):
            start, stop = first + part * size // parts, first + (part + 1) * size // parts
            whole = self.sampler.batch(step, slice(start, stop))
            layout = self.config.attention.layout
            on_device = {name: tensor.to(self.device) for name, tensor in whole.items()}
            yield shard(on_device, self.mesh, shift_labels=0, layout=layout, first_sample=start, step=step)

    def _check_replicas(self) -> None:
        different = replicas_that_differ(self.model)
        if different:
            error = ReplicaError(
                f"parameters differ between ranks that share them: {', '.join(different[:5])}",
                allowed="the same bits on every rank after every step",
                remedy="lss verify the model; look for memory or hardware faults if it passes",
            )
            error.on_all_ranks = True
            raise error


def train(world: World, config: Config) -> None:
    """Train as the configuration says, on every rank; rank 0 shows and writes.

    Raises:
        LssError: Something is wrong with configuration, data or folder; raised on all ranks.
    """
    config = from_first_rank(with_folder(config))
    folder = RunFolder(Path(config.run.folder))
    data = agree(lambda: open_source(config.data.source, config.data.cache()))
    agree_equal("the data", fingerprint(data), "give every rank the same data")
    parts = split(data)
    agree(lambda: windows(parts["validation"], config.data.length))
    trainer = Trainer.build(config, world, parts["train"])
    agree(lambda: folder.create(config) if world.rank == 0 else None)
    metrics = agree(lambda: Metrics(folder if world.rank == 0 else None, config.run.tensorboard))
    with display(world.rank, config.train.steps, "step") as progress:
        progress.say(config.to_toml())
        last = _steps(trainer, parts["validation"], metrics, progress)
        state = full_state_dict(trainer.model)
        if world.rank == 0:
            folder.save(state)
        metrics.close()
    if world.rank == 0:
        print(f"validation: {last.bits_per_byte:.4f} bits/byte over {last.num_tokens:,} bytes")
        print(f"run folder: {folder.path}")


def _steps(trainer: Trainer, validation: Bytes, metrics: Metrics, progress: Display) -> Evaluation:
    every, steps = trainer.config.train.eval_every, trainer.config.train.steps
    for step in range(steps):
        line = trainer.step(step)
        metrics.write(line)
        progress.advance(*step_text(line, trainer.context.ledger))
        if step == 0:
            for choice, layers in Counter(trainer.context.choices.values()).items():
                progress.say(f"attention: {choice}, in {layers} layers")
        if step + 1 == steps or (every and (step + 1) % every == 0):
            result = trainer.evaluate(validation)
            metrics.write({"step": step + 1, "eval_loss": result.loss, "eval_bits_per_byte": result.bits_per_byte})
            progress.say(f"eval at step {step + 1}: loss {result.loss:.4f}  {result.bits_per_byte:.4f} bits/byte")
    return result
