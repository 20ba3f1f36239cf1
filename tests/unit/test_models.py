"""The plain GPT computes what transformers' GPT-2 and Llama's rotary embedding compute."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from lss.errors import ModelError
from lss.models import GPT, PRESETS, GPTConfig
from lss.models.positions import Rotary
from tests.gpt2 import as_gpt, random_gpt2
from tests.models import assert_same


def test_equals_gpt2():
    reference = random_gpt2(length=11)
    tokens = torch.randint(17, (2, 11))
    assert_same(as_gpt(reference)(tokens), reference(tokens).logits, "logits", 1e-12)


def test_rotary_equals_llamas():
    heads = torch.randn(1, 2, 7, 8)
    positions = torch.tensor([0, 1, 5, 6, 90, 1000, 30000])
    config = LlamaConfig(hidden_size=16, num_attention_heads=2, head_dim=8, max_position_embeddings=65536)
    cosine, sine = LlamaRotaryEmbedding(config)(heads, positions[None])
    expected, _ = apply_rotary_pos_emb(heads, heads, cosine, sine)
    # their angles are computed in float32, ours in float64
    assert_same(Rotary(8)(heads, positions), expected, "rotated", 5e-3)
    assert_same(Rotary(8)(heads, positions)[..., :4, :], expected[..., :4, :], "rotated, near", 1e-6)


def test_presets_are_the_papers():
    weights = {name: sum(w.numel() for w in _on_meta(config).blocks.parameters()) for name, config in PRESETS.items()}
    assert 18.8e6 < weights["gpt-20m"] < 19.0e6  # 12 * layers * width**2
    assert 1.20e9 < weights["gpt-1.5b"] < 1.22e9


def _on_meta(config: GPTConfig) -> GPT:
    with torch.device("meta"):
        return GPT(config)


@pytest.mark.parametrize(
    "changes",
    [{"width": 0}, {"layers": 0}, {"heads": 3}, {"key_value_heads": 3}, {"positions": "rotary", "heads": 32}],
)
def test_impossible_shapes_are_refused(changes):
    with pytest.raises(ModelError):
        GPTConfig(**({"width": 32, "layers": 1, "heads": 4} | changes))
