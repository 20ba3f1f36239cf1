"""Seconds of a training step of gpt-20m over ranks of this machine, planned and measured.

lss calibrate here.toml --ranks 2
python benchmarks/plan_time.py here.toml --ranks 2 --lengths 1024,2048,4096

Over several hosts the same by torchrun, with a file that lss calibrate wrote over them.
"""

import argparse
import os
import time
from statistics import median

import torch

import lss
from lss.config import AttentionConfig, Config, DataConfig, ModelConfig, ParallelConfig, TrainConfig
from lss.launch import launch
from lss.mesh import World, detect_world
from lss.models import GPT
from lss.plan import Hardware, Setup, make_plan
from lss.train.model import prepare
from lss.train.optim import make_optimizer
from lss.train.update import update

WAYS = {
    "kv": {"gather": "kv"},
    "kv again": {"gather": "kv", "keep": False},
    "x": {"gather": "x"},
    "megatron": {},
}


def config_of(way: str, length: int, num_ranks: int) -> Config:
    strategy = "megatron" if way == "megatron" else "lss"
    return Config(
        model=ModelConfig("gpt-20m"),
        data=DataConfig(length=length),
        parallel=ParallelConfig(num_ranks, 1, "cpu", strategy=strategy),
        attention=AttentionConfig(**WAYS[way]),
        train=TrainConfig(batch=1),
    )


def steps(world: World, cases: list[tuple[str, int]], repeats: int, file: str) -> int:
    """Measure each case; rank 0 prints it beside the plan, which was made before."""
    planned = {}
    if world.rank == 0:
        with open(file) as plans:
            planned = dict(line.rsplit(" ", 1) for line in plans.read().splitlines())
    for way, length in cases:
        config = config_of(way, length, world.size)
        mesh = lss.init_mesh(world.size, device="cpu", world=world)
        torch.manual_seed(0)
        model = prepare(GPT(config.gpt()), mesh, config)
        optimizer, _ = make_optimizer(model, config.train, foreach=False)
        tokens = torch.randint(256, (1, length))
        batch = lss.shard({"tokens": tokens, "labels": tokens}, mesh, shift_labels=1)
        found = []
        for _ in range(repeats + 1):
            torch.distributed.barrier()
            started = time.perf_counter()
            update(model, optimizer, [batch], config.train)
            torch.distributed.barrier()
            found.append(time.perf_counter() - started)
        if world.rank == 0:
            real, plan = median(found[1:]), float(planned[f"{way} {length}"])
            print(
                f"{way:9} {length:6}  measured {real:7.3f} s  planned {plan:7.3f} s  {plan / real - 1:+.0%}", flush=True
            )
    return 0


def main() -> None:
    made = argparse.ArgumentParser()
    made.add_argument("hardware")
    made.add_argument("--ranks", type=int, default=2)
    made.add_argument("--lengths", default="1024,2048,4096")
    made.add_argument("--ways", default="kv")
    made.add_argument("--repeats", type=int, default=5)
    given = made.parse_args()
    world = detect_world(os.environ)
    size = world.size if world.launcher != "none" else given.ranks
    cases = [(way, int(length)) for way in given.ways.split(",") for length in given.lengths.split(",")]
    file = f"{given.hardware}.planned"
    if world.rank == 0:
        hardware = Hardware.named(given.hardware)
        with open(file, "w") as plans:
            for way, length in cases:
                plan = make_plan(Setup("", config_of(way, length, size), "cpu"), hardware)
                plans.write(f"{way} {length} {plan.timeline.total}\n")
    if world.launcher == "none":
        launch(steps, size, cases, given.repeats, file)
    else:
        steps(world, cases, given.repeats, file)


if __name__ == "__main__":
    main()
