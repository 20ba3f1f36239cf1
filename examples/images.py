"""A ViT of transformers that tells which colour is the brightest; the patches of an image are spread over all ranks.

torchrun --nproc-per-node 2 examples/images.py --sequence 2 [--length 257] [--steps 20]
"""

import math

import torch
import transformers
from jsonargparse import auto_cli
from torch import Tensor

import lss

PATCH = 4  # pixels a side


def images(number: int, side: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Noise in which one of three colours is brighter, and which one."""
    pixels = torch.randn(number, 3, side, side, generator=generator)
    labels = torch.randint(3, (number,), generator=generator)
    pixels[range(number), labels] += 0.5
    return {"pixel_values": pixels, "labels": labels}


def main(sequence: int = 1, length: int = 257, steps: int = 20) -> None:
    mesh = lss.init_mesh(sequence)
    torch.manual_seed(0)
    side = PATCH * math.isqrt(length - 1)
    shape = transformers.ViTConfig(
        image_size=side,
        patch_size=PATCH,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_labels=3,
    )
    model = lss.parallelize(transformers.ViTForImageClassification(shape).to(mesh.device_type), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        batch = {name: part.to(mesh.device_type) for name, part in images(16, side, generator).items()}
        loss = model(**lss.shard(batch, mesh, step=step)).loss  # images stay whole: the model cuts their patches
        optimizer.zero_grad()
        loss.backward()
        lss.average_gradients(model)
        optimizer.step()
        if torch.distributed.get_rank() == 0:
            print(f"step {step + 1}: {loss.item():.3f} nats an image", flush=True)


if __name__ == "__main__":
    auto_cli(main)
    torch.distributed.destroy_process_group()
