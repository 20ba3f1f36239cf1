"""A T5 of transformers that learns to write text backwards; encoder and decoder are both cut, pairs are padded.

torchrun --nproc-per-node 2 examples/translation.py --sequence 2 [--length 256] [--steps 20]
"""

import statistics
from pathlib import Path

import torch
import transformers
from jsonargparse import auto_cli
from torch.nn.utils.rnn import pad_sequence

import lss


def main(sequence: int = 1, length: int = 256, steps: int = 20) -> None:
    mesh = lss.init_mesh(sequence)
    torch.manual_seed(0)
    shape = transformers.T5Config(
        vocab_size=256, d_model=128, d_kv=32, d_ff=256, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    model = lss.parallelize(transformers.T5ForConditionalGeneration(shape).to(mesh.device_type), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = torch.tensor(list(Path(statistics.__file__).read_bytes()))
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        starts = torch.randint(len(text) - length, (2,), generator=generator)
        lengths = (length, length // 2)
        pieces = [text[start : start + length] for start, length in zip(starts, lengths, strict=True)]
        sources = pad_sequence(pieces, batch_first=True, padding_value=0)
        labels = pad_sequence([piece.flip(0) for piece in pieces], batch_first=True, padding_value=-100)
        batch = {
            "input_ids": sources,
            "attention_mask": (sources != 0).long(),
            "labels": labels,
            "decoder_input_ids": model.prepare_decoder_input_ids_from_labels(labels),  # of whole labels, before the cut
            "decoder_attention_mask": (labels != -100).long(),
        }
        batch = {name: part.to(mesh.device_type) for name, part in batch.items()}
        loss = model(**lss.shard(batch, mesh, shift_labels=0, step=step)).loss  # the mean over all tokens
        optimizer.zero_grad()
        loss.backward()
        lss.average_gradients(model)
        optimizer.step()
        if torch.distributed.get_rank() == 0:
            print(f"step {step + 1}: {loss.item():.3f} nats a byte", flush=True)


if __name__ == "__main__":
    auto_cli(main)
    torch.distributed.destroy_process_group()
