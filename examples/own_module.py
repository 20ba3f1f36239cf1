"""A GPT of one's own, written without a thought of lss, trained on the source of the standard library.

torchrun --nproc-per-node 2 examples/own_module.py --sequence 2 [--length 1024] [--steps 20]
"""

import statistics
from pathlib import Path

import torch
from jsonargparse import auto_cli
from torch import Tensor, nn

import lss


class GPT(nn.Module):
    """Layers of causal attention with 4 heads, each followed by a feed-forward network."""

    def __init__(self, width: int, layers: int, max_length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(max_length, width)
        self.qkv = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 3 * width)) for _ in range(layers))
        self.up = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width)) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(layers))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))

    def forward(self, tokens: Tensor) -> Tensor:
        """Bytes [B, S] to logits [B, S, 256]."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.size(1), device=tokens.device))
        for qkv, up, down in zip(self.qkv, self.up, self.down, strict=True):
            heads = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in qkv(x).chunk(3, -1))  # [B, 4, S, E / 4]
            x = x + nn.functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
            x = x + down(nn.functional.gelu(up(x)))
        return self.head(x)


def main(sequence: int = 1, length: int = 1024, steps: int = 20) -> None:
    mesh = lss.init_mesh(sequence)
    torch.manual_seed(0)
    model = lss.parallelize(GPT(128, 2, length).to(mesh.device_type), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = torch.tensor(list(Path(statistics.__file__).read_bytes()), device=mesh.device_type)
    for step in range(steps):
        tokens = text.roll(-step * length)[None, :length]
        batch = lss.shard({"tokens": tokens, "labels": tokens}, mesh, shift_labels=1, step=step)
        logits = model(batch["tokens"], segment=batch["segment"])
        share = lss.token_mean_cross_entropy(logits, batch["labels"], lss.count_tokens(model, batch["labels"]))
        optimizer.zero_grad()
        share.backward()
        lss.average_gradients(model)
        optimizer.step()
        loss = lss.context_of(model).sum_over_ranks(share.detach())  # the mean over all tokens
        if torch.distributed.get_rank() == 0:
            print(f"step {step + 1}: {loss.item():.3f} nats a byte", flush=True)


if __name__ == "__main__":
    auto_cli(main)
    torch.distributed.destroy_process_group()
