"""What the Trainer of transformers and its plain counterpart are given in tests."""

import os
import random
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
import transformers
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor

_SHAPE = {"vocab_size": 256, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
_NO_DROPOUT = {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
_ARGUMENTS = {
    "max_steps": 9,  # one more than an epoch
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
    "gradient_accumulation_steps": 3,
    "learning_rate": 1e-2,
    "max_grad_norm": 1.0,
    "logging_steps": 1,
    "eval_strategy": "steps",
    "eval_steps": 5,
    "save_strategy": "no",
    "disable_tqdm": True,
    "use_cpu": True,
    "report_to": "none",
}


def model(**changed: float) -> transformers.PreTrainedModel:
    """A GPT-2 in float64, the same on every call; its biases are not zero."""
    torch.manual_seed(0)
    made = transformers.GPT2LMHeadModel(transformers.GPT2Config(**_SHAPE | _NO_DROPOUT | changed)).double()
    for weight in made.parameters():
        weight.data += 0.05 * torch.randn_like(weight)
    return made


def documents(number: int, seed: int) -> list[dict[str, list[int]]]:
    """Pieces of the standard library, of 9 to 40 bytes."""
    text, draw = list(Path(statistics.__file__).read_bytes()), random.Random(seed)
    starts = [draw.randrange(len(text) - 40) for _ in range(number)]
    return [{"input_ids": text[start : start + draw.randint(9, 40)]} for start in starts]


def padded(pieces: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """A batch, as long as its longest piece."""
    length = max(len(piece["input_ids"]) for piece in pieces)
    batch = {
        name: torch.full((len(pieces), length), fill)
        for name, fill in {"input_ids": 0, "attention_mask": 0, "labels": -100}.items()
    }
    for row, piece in enumerate(pieces):
        tokens = torch.tensor(piece["input_ids"])
        for name in ("input_ids", "labels"):
            batch[name][row, : len(tokens)] = tokens
        batch["attention_mask"][row, : len(tokens)] = 1
    return batch


def accuracy(found: transformers.EvalPrediction) -> dict[str, float]:
    """How often the next byte is the likeliest one, and the mean of its logits."""
    real = found.label_ids[:, 1:] != -100
    logits, wanted = found.predictions[:, :-1][real], found.label_ids[:, 1:][real]
    return {"accuracy": (logits.argmax(-1) == wanted).mean(), "logit": logits[range(len(wanted)), wanted].mean()}


def options(folder: str, **changed: object) -> dict[str, object]:
    """Arguments of either Trainer. 41 pieces in batches of 4: the last has one, and the epoch's last step two."""
    return {
        "args": transformers.TrainingArguments(output_dir=folder, **_ARGUMENTS | changed),
        "data_collator": padded,
        "train_dataset": documents(41, seed=1),
        "eval_dataset": documents(11, seed=2),
        "compute_metrics": accuracy,
    }


@contextmanager
def in_float64() -> Iterator[None]:
    """The Trainer adds losses up in the default dtype, and the models' loss casts logits to float32."""
    torch.set_default_dtype(torch.float64)
    with patch.object(Tensor, "float", Tensor.double):
        yield
    torch.set_default_dtype(torch.float32)


@contextmanager
def launched() -> Iterator[None]:
    """What torchrun tells a rank, by which accelerate sees the others."""
    rank, size = str(torch.distributed.get_rank()), str(torch.distributed.get_world_size())
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    told |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    with patch.dict(os.environ, told):
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
