"""A BERT of transformers: bytes are hidden and predicted, sequences of unequal length are padded.

torchrun --nproc-per-node 2 examples/masked_lm.py --sequence 2 [--length 512] [--steps 20]
"""

import statistics
from pathlib import Path

import torch
import transformers
from jsonargparse import auto_cli

import lss

HIDDEN = 256  # the token that stands for a hidden byte


def main(sequence: int = 1, length: int = 512, steps: int = 20) -> None:
    mesh = lss.init_mesh(sequence)
    torch.manual_seed(0)
    shape = transformers.BertConfig(
        vocab_size=257,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=length,
    )
    model = lss.parallelize(transformers.BertForMaskedLM(shape).to(mesh.device_type), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = torch.tensor(list(Path(statistics.__file__).read_bytes()))
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        starts = torch.randint(len(text) - length, (2,), generator=generator)
        tokens = torch.stack([text[start : start + length] for start in starts])
        mask = torch.ones_like(tokens)
        mask[1, length // 2 :] = 0  # the second sequence is half as long
        hidden = (torch.rand(tokens.shape, generator=generator) < 0.15) & mask.bool()
        batch = {"input_ids": tokens.where(~hidden, HIDDEN), "labels": tokens.where(hidden, -100)}
        batch = {name: part.to(mesh.device_type) for name, part in (batch | {"attention_mask": mask}).items()}
        loss = model(**lss.shard(batch, mesh, shift_labels=0, step=step)).loss
        optimizer.zero_grad()
        loss.backward()
        lss.average_gradients(model)
        optimizer.step()
        if torch.distributed.get_rank() == 0:
            print(f"step {step + 1}: {loss.item():.3f} nats a hidden byte", flush=True)


if __name__ == "__main__":
    auto_cli(main)
    torch.distributed.destroy_process_group()
