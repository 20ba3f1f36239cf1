"""A GPT-2 trained by the Trainer of transformers on the source of the standard library, one sequence over all ranks.

torchrun --nproc-per-node 2 examples/trainer.py --sequence 2 [--length 1024] [--steps 20]
"""

import statistics
import tempfile
from pathlib import Path

import torch
import transformers
from jsonargparse import auto_cli

import lss
from lss.adapters.trainer import Trainer


class Printed(transformers.TrainerCallback):
    """Prints the loss of each step, on rank 0."""

    def on_log(self, args: object, state: transformers.TrainerState, *others: object, **given: dict) -> None:
        """Called by the Trainer."""
        if state.is_world_process_zero and "loss" in given["logs"]:
            print(f"step {state.global_step}: {given['logs']['loss']:.3f} nats a byte", flush=True)


def main(sequence: int = 1, length: int = 1024, steps: int = 20) -> None:
    mesh = lss.init_mesh(sequence)
    torch.manual_seed(0)
    shape = transformers.GPT2Config(vocab_size=256, n_embd=128, n_layer=2, n_head=4, n_positions=length)
    model = lss.parallelize(transformers.GPT2LMHeadModel(shape).to(mesh.device_type), mesh)
    text = list(Path(statistics.__file__).read_bytes())
    pieces = [text[start : start + length] for start in range(0, len(text) - length, length)]
    data = [{"input_ids": piece, "labels": piece} for piece in pieces]
    arguments = transformers.TrainingArguments(
        output_dir=tempfile.gettempdir(),
        max_steps=steps,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=mesh.device_type == "cpu",
    )
    trainer = Trainer(model, arguments, train_dataset=data, mesh=mesh, callbacks=[Printed()])
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()


if __name__ == "__main__":
    auto_cli(main)
    torch.distributed.destroy_process_group()
