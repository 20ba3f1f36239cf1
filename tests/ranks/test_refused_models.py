"""Models and modules that segments cannot honour: each is refused by name, before or in its first step."""

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

import lss
from lss.errors import LssError
from tests.plain import VOCABULARY, WIDTH, Block, Sequences, tokens

_SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}


def pretrained(kind: str, config: str, **given: object) -> nn.Module:
    return getattr(transformers, kind)(getattr(transformers, config)(**given)).train()


class Mixing(nn.Module):
    """A language model with one block, and something else done with its tokens."""

    def __init__(self, what: object, *modules: nn.Module) -> None:
        super().__init__()
        self.tokens, self.block, self.head = nn.Embedding(VOCABULARY, WIDTH), Block(), nn.Linear(WIDTH, VOCABULARY)
        self.what, self.others = what, nn.ModuleList(modules)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.what(self, self.block(self.tokens(tokens))))


def scores(x: torch.Tensor) -> torch.Tensor:
    return (torch.matmul(x, x.transpose(1, 2)) / x.size(-1)).softmax(-1)


def prefixed(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    keys = torch.cat([torch.ones(2, 2, WIDTH), x], 1)
    return F.scaled_dot_product_attention(x, keys, keys)


def window(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(x.size(1), x.size(1), dtype=torch.bool).tril().triu(-3)
    heads = x.view(*x.shape[:2], 4, -1).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask).transpose(1, 2).flatten(2)


def learned(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    heads, bias = x.view(*x.shape[:2], 4, -1).transpose(1, 2), nn.Parameter(torch.zeros(13, 13))
    return F.scaled_dot_product_attention(heads, heads, heads, attn_mask=bias).transpose(1, 2).flatten(2)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.lstm = Block(), nn.LSTM(WIDTH, WIDTH, batch_first=True)


class Padded(Sequences):
    """Without what else is refused."""

    def forward(self, tokens: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        return self.encoder(self.tokens(tokens), src_key_padding_mask=padding)


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.MultiheadAttention(8, 2, batch_first=True)
        self.other = nn.MultiheadAttention(8, 2)


# what is refused: the model, and a part of the message
MODELS = {
    # by what they are
    "Mamba": (lambda: pretrained("MambaForCausalLM", "MambaConfig", vocab_size=31, hidden_size=32), "Conv1d"),
    "FNet": (
        lambda: pretrained("FNetForMaskedLM", "FNetConfig", **_SMALL),
        "FNetForMaskedLM computes attention without",
    ),
    "DeBERTa": (
        lambda: pretrained("DebertaV2ForMaskedLM", "DebertaV2Config", **_SMALL),
        "computes attention without the library's interface",
    ),
    "a pooler": (lambda: pretrained("BertModel", "BertConfig", **_SMALL), "pooler makes one output"),
    "positions behind a padding row": (
        lambda: pretrained("EsmForMaskedLM", "EsmConfig", **_SMALL, pad_token_id=1),
        "position_embeddings counts positions from its padding_idx on",
    ),
    "angles that depend on the length": (
        lambda: pretrained(
            "LlamaForCausalLM",
            "LlamaConfig",
            **_SMALL,
            rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        ),
        "rotary angles that depend on the length",
    ),
    "a loss of routers": (
        lambda: pretrained("MixtralForCausalLM", "MixtralConfig", **_SMALL, output_router_logits=True),
        "a loss of routers",
    ),
    "a classifier": (
        lambda: pretrained("LlamaForSequenceClassification", "LlamaConfig", **_SMALL, pad_token_id=0),
        "LlamaForSequenceClassification makes one output of a whole sequence",
    ),
    "layers left out at random": (
        lambda: pretrained("BartModel", "BartConfig", d_model=32, encoder_layerdrop=0.1, vocab_size=31),
        "leaves out layers at random",
    ),
    "a recurrence": (Recurrent, "lstm is a LSTM, which may mix tokens"),
    "a convolution": (lambda: Mixing(None, nn.Conv1d(4, 4, 3)), "others.0 is a Conv1d"),
    "a batch norm": (lambda: Mixing(None, nn.BatchNorm1d(4)), "others.0 is a BatchNorm1d"),
    "pooling": (lambda: Mixing(None, nn.AvgPool1d(2)), "others.0 is a AvgPool1d"),
    "a group norm": (lambda: Mixing(None, nn.GroupNorm(2, 4)), "others.0 is a GroupNorm"),
    "keys of no token": (
        lambda: nn.MultiheadAttention(8, 2, batch_first=True, add_bias_kv=True),
        "add_bias_kv or add_zero_attn",
    ),
    "two orders of dims": (Both, "batch_first and without"),
    # by what their code does
    "soft caps": (
        lambda: pretrained(
            "Gemma2ForCausalLM", "Gemma2Config", **_SMALL, num_key_value_heads=2, head_dim=8, pad_token_id=0
        ),
        "asks for softcap",
    ),
    "a sum up to each token": (lambda: Mixing(lambda model, x: x.cumsum(1)), "calls cumsum"),
    "a mean over tokens": (lambda: Mixing(lambda model, x: x - x.mean(dim=1, keepdim=True)), "calls mean"),
    "a mean along an axis": (lambda: Mixing(lambda model, x: x - x.mean(axis=1, keepdim=True)), "calls mean"),
    "a mean over all": (lambda: Mixing(lambda model, x: x - x.mean()), "calls sub"),
    "every other token": (
        lambda: Mixing(lambda model, x: x + x[:, ::2].repeat(1, 2, 1)[:, : x.size(1)]),
        "calls __getitem__",
    ),
    "the last tokens": (
        lambda: Mixing(lambda model, x: x + x[torch.tensor([0, 1]), torch.tensor([6, 6])][:, None]),
        "calls __getitem__",
    ),
    "an average by a matrix": (
        lambda: Mixing(lambda model, x: (torch.ones(x.size(1), x.size(1)).tril() / 7) @ x),
        "calls matmul",
    ),
    "positions by other numbers": (
        lambda: Mixing(lambda model, x: x + torch.arange(x.size(1) + 1)[1:, None]),
        "calls torch.arange(0, 8, 1)",
    ),
    "keys of no token in a layer": (
        lambda: Mixing(prefixed),
        "attends to 9 keys",
    ),
    "the first token": (lambda: Mixing(lambda model, x: x + x[:, :1]), "calls __getitem__"),
    "the token before": (lambda: Mixing(lambda model, x: x + F.pad(x, (0, 0, 1, -1))), "calls pad"),
    "tokens rolled": (lambda: Mixing(lambda model, x: torch.roll(x, 1, dims=1)), "calls roll"),
    "scores of one's own": (lambda: Mixing(lambda model, x: scores(x) @ x), "calls matmul"),
    "linear attention": (
        lambda: Mixing(lambda model, x: torch.einsum("bse,bef->bsf", x, torch.einsum("bse,bsf->bef", x, x))),
        "calls einsum",
    ),
    "a convolution of functions": (
        lambda: Mixing(lambda model, x: F.avg_pool1d(x.mT, 3, 1, 1).mT),
        "calls avg_pool1d",
    ),
    "a Fourier transform": (lambda: Mixing(lambda model, x: torch.fft.fft(x, dim=1).real), "calls fft_fft"),
    "noise": (lambda: Mixing(lambda model, x: x + torch.randn_like(x)), "draws random numbers by randn_like"),
    "a mask of one segment": (lambda: Mixing(window), "for 13 queries and 13 keys"),
    "a learned mask": (lambda: Mixing(learned), "that needs a gradient"),
    "padding of one segment": (Padded, "an attention_mask of 7 tokens for 13 keys"),
}


def take_step(name: str) -> None:
    mesh = lss.init_mesh(2, device="cpu")
    torch.manual_seed(0)
    model = lss.parallelize(MODELS[name][0](), mesh)
    batch = lss.shard({"tokens": tokens()}, mesh)
    more = {"padding": torch.ones(2, 7, dtype=torch.bool).tril()} if name.startswith("padding") else {}
    model(batch["tokens"], segment=batch["segment"], **more)


def first_step(name: str) -> str:
    with pytest.raises(LssError) as raised:
        take_step(name)
    return str(raised.value)


@pytest.mark.parametrize("name", MODELS)
def test_it_is_refused_by_name_and_reason(ranks, name):
    for said in ranks.run(first_step, 2, name):
        assert MODELS[name][1] in said
        assert "allowed: " in said or "do this: " in said


class Noisy(Mixing):
    """Random numbers outside of its layers."""

    def __init__(self) -> None:
        super().__init__(None)
        self.blocks = nn.ModuleList([self.block])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x + torch.randn_like(x))
        return self.head(x)


def in_layers(what: str) -> str:
    mesh = lss.init_mesh(2, device="cpu")
    with pytest.raises(LssError) as raised:
        IN_LAYERS[what](mesh)
    return str(raised.value)


def own_loss(mesh) -> None:
    model = pretrained(
        "ViTForMaskedImageModeling", "ViTConfig", hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
        intermediate_size=48, image_size=12, patch_size=4, encoder_stride=4,
    )  # fmt: skip
    images, hidden = torch.randn(2, 3, 12, 12), torch.ones(2, 9, dtype=torch.bool)
    model = lss.parallelize(model, mesh)
    model(**lss.shard({"pixel_values": images}, mesh), bool_masked_pos=hidden)


IN_LAYERS = {
    "draws random numbers by randn_like": lambda mesh: lss.parallelize(Noisy(), mesh, cut="layers")(tokens()),
    "the model works out a loss by code of its own": own_loss,
    "shift_labels=1 with cut='layers'": lambda mesh: lss.shard(
        {"tokens": tokens(), "labels": tokens()}, mesh, shift_labels=1, cut="layers"
    ),
    "a batch that is cut by tokens": lambda mesh: lss.parallelize(Noisy(), mesh, cut="layers")(
        **lss.shard({"tokens": tokens()}, mesh)
    ),
}


@pytest.mark.parametrize("what", IN_LAYERS)
def test_it_is_refused_where_layers_cut_the_tokens(ranks, what):
    for said in ranks.run(in_layers, 2, what):
        assert what in said


def declared_safe() -> torch.Tensor:
    mesh = lss.init_mesh(2, device="cpu")
    torch.manual_seed(0)
    pointwise = nn.Conv1d(WIDTH, WIDTH, 1)
    model = Mixing(lambda model, x: model.others[0](x.mT).mT, pointwise).double()
    model = lss.parallelize(model, mesh, safe=["others.0"])
    batch = lss.shard({"tokens": tokens()}, mesh)
    return lss.unshard(model(batch["tokens"], segment=batch["segment"]), batch["segment"], mesh)


def test_what_the_user_declares_safe_is_taken(ranks):
    torch.manual_seed(0)
    pointwise = nn.Conv1d(WIDTH, WIDTH, 1)
    expected = Mixing(lambda model, x: model.others[0](x.mT).mT, pointwise).double()(tokens())
    for found in ranks.run(declared_safe, 2):
        torch.testing.assert_close(found, expected.detach())
