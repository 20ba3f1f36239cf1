"""A Llama of transformers, trained on the source of the standard library, one sequence over all ranks.

torchrun --nproc-per-node 2 examples/causal_lm.py --sequence 2 [--length 1024] [--steps 20]
"""

import statistics
from pathlib import Path

import torch
import transformers
from jsonargparse import auto_cli

import lss


def main(sequence: int = 1, length: int = 1024, steps: int = 20) -> None:
    mesh = lss.init_mesh(sequence)
    torch.manual_seed(0)
    shape = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=length,
    )
    model = transformers.LlamaForCausalLM(shape).to(mesh.device_type)
    model = lss.parallelize(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = torch.tensor(list(Path(statistics.__file__).read_bytes()))
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        start = int(torch.randint(len(text) - length, (), generator=generator))
        tokens = text[start : start + length].unsqueeze(0).to(mesh.device_type)
        batch = lss.shard({"input_ids": tokens, "labels": tokens}, mesh, shift_labels=1, step=step)
        loss = model(**batch).loss  # the mean over all tokens, on every rank
        optimizer.zero_grad()
        loss.backward()
        lss.average_gradients(model)
        lss.clip_gradient_norm(model, 1.0)
        optimizer.step()
        if torch.distributed.get_rank() == 0:
            print(f"step {step + 1}: {loss.item():.3f} nats a byte", flush=True)


if __name__ == "__main__":
    auto_cli(main)
    torch.distributed.destroy_process_group()
