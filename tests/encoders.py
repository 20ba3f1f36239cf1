"""Encoder-decoders and vision models of transformers with random weights, serial and over ranks."""

import torch
import transformers
from torch import Tensor, nn

import lss
from lss.verification.precision import computing_in
from tests.pretrained import build

VOCABULARY, SOURCE, TARGET = 31, 13, 9
_BART = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
_T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 10,
}
_WHISPER = {"num_mel_bins": 8, "max_source_positions": SOURCE, "max_target_positions": 16}
_VIT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 12,
    "patch_size": 4,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
MODELS = {
    "T5": ("T5Config", "T5ForConditionalGeneration", _T5),
    "BART": ("BartConfig", "BartForConditionalGeneration", _BART),
    "Whisper": ("WhisperConfig", "WhisperForConditionalGeneration", _BART | _WHISPER),
    "ViT": ("ViTConfig", "ViTForImageClassification", _VIT | {"num_labels": 5}),
}


def make(name: str, **changed: object) -> transformers.PreTrainedModel:
    """A model in float64 and in training, the same on every call."""
    return build(*MODELS[name], changed)


def batch(name: str, kind: str) -> dict[str, Tensor]:
    """What the plain model is called with: `whole` or `padded`."""
    generator = torch.Generator().manual_seed(1)

    def tokens(length: int) -> Tensor:
        return torch.randint(3, VOCABULARY, (2, length), generator=generator)

    if name == "ViT":
        return {
            "pixel_values": torch.randn(2, 3, 12, 12, generator=generator, dtype=torch.float64),
            "labels": torch.tensor([3, 1]),
        }
    labels = tokens(TARGET)
    labels[0, 3] = -100
    given = {"labels": labels, "decoder_input_ids": tokens(TARGET)}
    if name == "Whisper":
        given["input_features"] = torch.randn(2, 8, 2 * SOURCE, generator=generator, dtype=torch.float64)
    else:
        given["input_ids"] = tokens(SOURCE)
    if kind == "padded":
        labels[1, 6:] = -100
        given["decoder_attention_mask"] = torch.ones(2, TARGET, dtype=torch.int64)
        given["decoder_attention_mask"][1, 6:] = 0
        if name != "Whisper":
            given["attention_mask"] = torch.ones(2, SOURCE, dtype=torch.int64)
            given["attention_mask"][0, 10:] = 0
    return given


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def serial(name: str, kind: str, cut: str | None = None) -> tuple[float, Tensor, dict[str, Tensor]]:
    """Loss, logits and gradients of the untouched model."""
    model = make(name)
    model.set_attn_implementation("eager")
    with computing_in(torch.float64):
        found = model(**batch(name, kind))
        found.loss.backward()
    return found.loss.item(), found.logits.detach(), gradients_of(model)


def over_ranks(
    name: str,
    kind: str,
    num_ranks: int,
    cut: str | None = None,
    checkpointing: bool = False,
    groups: int = 1,
    **changed: object,
) -> tuple[float, Tensor, dict[str, Tensor]]:
    """The same by two lines more than the plain model needs."""
    mesh = lss.init_mesh(num_ranks, groups, device="cpu")
    model = lss.parallelize(make(name, **changed), mesh, cut=cut)
    if checkpointing:
        model.activation_checkpointing_enable()
    group = mesh.get_local_rank("data")
    given = {key: tensor.chunk(groups)[group] for key, tensor in batch(name, kind).items()}
    part = lss.shard(given, mesh, shift_labels=0, step=0, cut=cut or "tokens")
    with computing_in(torch.float64):
        found = model(**part)
        found.loss.backward()
    lss.average_gradients(model)
    logits = lss.unshard(found.logits, part["segment"], mesh, data_groups=True)
    return found.loss.item(), logits, gradients_of(model)
