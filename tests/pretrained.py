"""Small models of transformers with random weights, and what the plain ones give for each document alone."""

import torch
import transformers
from torch import Tensor
from torch.nn import functional as F

import lss
from lss.verification.precision import computing_in

VOCABULARY, LENGTH = 31, 13
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GROUPED = _SHAPE | {"num_key_value_heads": 2}
_MIXED = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 8}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
# each architecture: configuration, model, what its configuration is given
MODELS = {
    "GPT-2": ("GPT2Config", "GPT2LMHeadModel", _GPT2 | {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}),
    "Llama": ("LlamaConfig", "LlamaForCausalLM", _GROUPED),
    "Qwen3": ("Qwen3Config", "Qwen3ForCausalLM", _GROUPED | {"head_dim": 8}),
    "Mistral": ("MistralConfig", "MistralForCausalLM", _GROUPED | {"sliding_window": 5}),
    "Gemma 3": ("Gemma3TextConfig", "Gemma3ForCausalLM", _GROUPED | _MIXED),
    "gpt-oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        _GROUPED
        | _MIXED
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"},  # else no float64
    ),
    "BERT": ("BertConfig", "BertForMaskedLM", _SHAPE | _NO_DROPOUT),
    "RoBERTa": ("RobertaConfig", "RobertaForMaskedLM", _SHAPE | _NO_DROPOUT | {"pad_token_id": 1, "bos_token_id": 0}),
    "ModernBERT": (
        "ModernBertConfig",
        "ModernBertForMaskedLM",
        _SHAPE | {"global_attn_every_n_layers": 2, "local_attention": 6},
    ),
}


def make(name: str, **changed: object) -> transformers.PreTrainedModel:
    """A model in float64 and in training, the same on every call."""
    return build(*MODELS[name], changed)


def build(config: str, kind: str, given: dict, changed: dict) -> transformers.PreTrainedModel:
    """A model of this kind with this configuration, in float64 and in training, the same on every call."""
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, config)(**given | changed)).double()
    for weight in model.parameters():
        if weight.dim() == 1:
            weight.data += 0.1 * torch.randn_like(weight)  # biases are made as zeros
    return model.train()


def predicts_next(model: transformers.PreTrainedModel) -> bool:
    """Whether the model's own loss shifts labels."""
    return not type(model).__name__.endswith("ForMaskedLM")


def batch() -> dict[str, Tensor]:
    """Two sequences; some labels are ignored."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, VOCABULARY, (2, LENGTH), generator=generator)
    labels = tokens.clone()
    labels[0, 3] = labels[1, 7] = -100
    return {"input_ids": tokens, "labels": labels}


# spans of the documents of each sequence, and what tells lss.shard of them
KINDS = {
    "whole": [[(0, LENGTH)], [(0, LENGTH)]],
    "padded right": [[(0, LENGTH)], [(0, 9)]],
    "padded left": [[(0, LENGTH)], [(4, LENGTH)]],
    "packed": [[(0, 5), (5, 12)], [(0, 1), (1, LENGTH)]],
}


def told(kind: str) -> tuple[dict[str, Tensor], list[list[int]] | None]:
    """The batch with its padding mask, and the lengths of its documents."""
    given = batch()
    if kind.startswith("padded"):
        mask = torch.zeros(2, LENGTH, dtype=torch.int64)
        for row, spans in enumerate(KINDS[kind]):
            for start, stop in spans:
                mask[row, start:stop] = 1
        given["attention_mask"] = mask
    lengths = [[stop - start for start, stop in spans] for spans in KINDS[kind]] if kind == "packed" else None
    return given, lengths


def alone(name: str, kind: str) -> tuple[float, Tensor, dict[str, Tensor]]:
    """Mean loss over all labels, logits [2, L, V], gradients: of the plain model, called for each document alone."""
    model = make(name)
    model.set_attn_implementation("eager")
    shift = int(predicts_next(model))
    given = batch()
    total, number, logits = torch.zeros((), dtype=torch.float64), 0, torch.zeros(2, LENGTH, VOCABULARY).double()
    for row, spans in enumerate(KINDS[kind]):
        for start, stop in spans:
            with computing_in(torch.float64):
                found = model(input_ids=given["input_ids"][row : row + 1, start:stop]).logits[0]
            logits[row, start:stop] = found.detach()
            wanted = given["labels"][row, start + shift : stop]
            total = total + F.cross_entropy(found[: len(wanted)], wanted, ignore_index=-100, reduction="sum")
            number += int((wanted != -100).sum())
    (total / number).backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return (total / number).item(), logits, gradients


def over_ranks(
    name: str, kind: str, num_ranks: int, checkpointing: bool = False, groups: int = 1, **changed: object
) -> tuple[float, Tensor, dict[str, Tensor]]:
    """The same by two lines more than the plain model needs."""
    mesh = lss.init_mesh(num_ranks, groups, device="cpu")
    model = lss.parallelize(make(name, **changed), mesh)
    if checkpointing:
        model.activation_checkpointing_enable()
    given, lengths = told(kind)
    given = {key: tensor.chunk(groups)[mesh.get_local_rank("data")] for key, tensor in given.items()}
    part = lss.shard(given, mesh, shift_labels=int(predicts_next(model)), documents=lengths, step=0)
    with computing_in(torch.float64):
        found = model(**part)
        found.loss.backward()
    lss.average_gradients(model)
    logits = lss.unshard(found.logits, part["segment"], mesh, data_groups=True)
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return found.loss.item(), logits, gradients


def real(kind: str) -> Tensor:
    """Slots that hold a token of a document: bool [2, L]."""
    found = torch.zeros(2, LENGTH, dtype=torch.bool)
    for row, spans in enumerate(KINDS[kind]):
        for start, stop in spans:
            found[row, start:stop] = True
    return found
