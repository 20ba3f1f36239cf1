"""A GPT-2 trained by the Trainer of transformers on the source of the standard library, one sequence over all ranks.

torchrun --nproc-per-node 2 examples/trainer.py --sequence 2 [--length 1024] [--steps 20]
"""

import argparse
import statistics
import tempfile
from pathlib import Path

import torch
import transformers

import lss
from lss.adapters.trainer import Trainer


class Printed(transformers.TrainerCallback):
    """Prints the loss of each step, on rank 0."""

    def on_log(self, args: object, state: transformers.TrainerState, *others: object, **given: dict) -> None:
        """Called by the Trainer."""
        if state.is_world_process_zero and "loss" in given["logs"]:
            print(f"step {state.global_step}: {given['logs']['loss']:.3f} nats a byte", flush=True)


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--length", type=int, default=1024, help="bytes of a sequence")
    made.add_argument("--sequence", type=int, default=1, help="ranks that hold one sequence together")
    made.add_argument("--steps", type=int, default=20)
    given = made.parse_args()
    mesh = lss.init_mesh(given.sequence)
    torch.manual_seed(0)
    shape = transformers.GPT2Config(vocab_size=256, n_embd=128, n_layer=2, n_head=4, n_positions=given.length)
    model = lss.parallelize(transformers.GPT2LMHeadModel(shape).to(mesh.device_type), mesh)
    text = list(Path(statistics.__file__).read_bytes())
    pieces = [text[start : start + given.length] for start in range(0, len(text) - given.length, given.length)]
    data = [{"input_ids": piece, "labels": piece} for piece in pieces]
    arguments = transformers.TrainingArguments(
        output_dir=tempfile.gettempdir(),
        max_steps=given.steps,
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
    main()
    torch.distributed.destroy_process_group()
