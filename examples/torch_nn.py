"""A causal classifier on nn.TransformerEncoder: which page of Python's manual is it? Pieces are padded.

torchrun --nproc-per-node 2 examples/torch_nn.py --sequence 2 [--length 256] [--steps 20]
"""

from pydoc_data.topics import topics

import torch
from jsonargparse import auto_cli
from torch import Tensor, nn

import lss


class Classifier(nn.Module):
    """Reads bytes, of which 0 is padding, and classifies their mean; only its layers are cut."""

    def __init__(self, width: int, layers: int, max_length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(max_length, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers)
        self.head = nn.Linear(width, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        """Of bytes [B, L], logits [B, 2]."""
        places = torch.arange(tokens.size(1), device=tokens.device)
        x = self.tokens(tokens) + self.positions(places)
        x = self.encoder(x, mask=places > places[:, None], src_key_padding_mask=tokens == 0, is_causal=True)
        real = (tokens != 0).unsqueeze(-1)
        return self.head((x * real).sum(1) / real.sum(1))


def main(sequence: int = 1, length: int = 256, steps: int = 20) -> None:
    mesh = lss.init_mesh(sequence)
    torch.manual_seed(0)
    model = lss.parallelize(Classifier(64, 2, length).to(mesh.device_type), mesh, cut="layers")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    texts = [torch.tensor(list(text.encode())) for text in (topics["types"], topics["formatstrings"])]
    labels = torch.arange(8, device=mesh.device_type) % 2
    for step in range(steps):
        starts = torch.randint(9999, (8,))
        tokens = torch.stack([texts[i % 2][start : start + length] for i, start in enumerate(starts)])
        tokens[4:, length // 2 :] = 0  # half of the pieces are half as long
        batch = lss.shard({"tokens": tokens.to(mesh.device_type), "labels": labels}, mesh, cut="layers", step=step)
        logits = model(batch["tokens"], segment=batch["segment"])
        share = lss.losses.share_of_mean(model, nn.functional.cross_entropy(logits, labels, reduction="none"))
        optimizer.zero_grad()
        share.backward()
        lss.average_gradients(model)
        optimizer.step()
        loss = lss.context_of(model).sum_over_ranks(share.detach())  # the mean over all sequences
        if torch.distributed.get_rank() == 0:
            print(f"step {step + 1}: {loss.item():.3f} nats a sequence", flush=True)


if __name__ == "__main__":
    auto_cli(main)
    torch.distributed.destroy_process_group()
