"""transformers' GPT-2 as a reference that this project did not write, and its weights in the plain GPT."""

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from lss.models import GPT, GPTConfig

WIDTH, HEADS, LAYERS, VOCABULARY = 24, 4, 2, 17


def random_gpt2(length: int) -> GPT2LMHeadModel:
    """A small GPT-2 in float64 without dropout; its key biases are zero, as the plain GPT has none."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=length,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config).double()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
        for block in model.transformer.h:
            block.attn.c_attn.bias[WIDTH : 2 * WIDTH] = 0
    return model


def renamed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights or gradients of GPT-2 under the names and in the shapes of the plain GPT."""
    names = {
        "tokens.weight": state["transformer.wte.weight"],
        "positions.weight": state["transformer.wpe.weight"],
        "norm.weight": state["transformer.ln_f.weight"],
        "norm.bias": state["transformer.ln_f.bias"],
        "head.weight": state["transformer.wte.weight"],
    }
    for layer in range(LAYERS):
        theirs, ours = f"transformer.h.{layer}", f"blocks.{layer}"
        weights = state[f"{theirs}.attn.c_attn.weight"].T.chunk(3)
        biases = state[f"{theirs}.attn.c_attn.bias"].chunk(3)
        for name, weight, bias in zip(("query", "key", "value"), weights, biases, strict=True):
            names[f"{ours}.attention.{name}.weight"] = weight
            if name != "key":
                names[f"{ours}.attention.{name}.bias"] = bias
        for their_name, our_name in {
            "attn.c_proj": "attention.output",
            "mlp.c_fc": "feed_forward.0",
            "mlp.c_proj": "feed_forward.3",
        }.items():
            names[f"{ours}.{our_name}.weight"] = state[f"{theirs}.{their_name}.weight"].T
            names[f"{ours}.{our_name}.bias"] = state[f"{theirs}.{their_name}.bias"]
        for their_name, our_name in {"ln_1": "attention_norm", "ln_2": "feed_forward_norm"}.items():
            names[f"{ours}.{our_name}.weight"] = state[f"{theirs}.{their_name}.weight"]
            names[f"{ours}.{our_name}.bias"] = state[f"{theirs}.{their_name}.bias"]
    return {name: tensor.detach().clone() for name, tensor in names.items()}


def as_gpt(reference: GPT2LMHeadModel) -> GPT:
    """A plain GPT with the weights of a GPT-2."""
    return gpt_of(renamed(reference.state_dict()))


def gpt_of(state: dict[str, Tensor]) -> GPT:
    """A plain GPT in float64 with the given weights."""
    length = state["positions.weight"].size(0)
    shape = GPTConfig(WIDTH, LAYERS, HEADS, vocabulary=VOCABULARY, max_length=length, tie_weights=True)
    model = GPT(shape).double()
    model.load_state_dict(state)
    return model
