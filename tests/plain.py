"""Models of plain PyTorch, written without any thought of sequence parallelism."""

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, LENGTH, WIDTH, HEADS = 23, 13, 16, 4


class Block(nn.Module):
    """Attention by scaled_dot_product_attention, as in many a lab's code."""

    def __init__(self, dropout: float = 0.0, makes_mask: bool = False) -> None:
        super().__init__()
        self.makes_mask = makes_mask
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.rate = dropout
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, angles: Tensor | None = None) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = (
            part.view(batch, length, HEADS, -1).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, -1)
        )
        if angles is not None:
            query, key = turned(query, angles), turned(key, angles)
        rate = self.rate if self.training else 0.0
        mask = torch.ones(length, length, dtype=torch.bool).tril() if self.makes_mask else None
        y = F.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None, dropout_p=rate)
        x = x + self.drop(self.out(y.transpose(1, 2).reshape(batch, length, WIDTH)))
        return x + self.drop(F.dropout(self.down(F.gelu(self.up(self.norm_2(x)))), self.rate, self.training))


def turned(heads: Tensor, angles: Tensor) -> Tensor:
    """Rotary positions as in Meta's Llama, in float32 or wider and left so."""
    wide = heads.to(torch.promote_types(heads.dtype, torch.float32))
    numbers = torch.view_as_complex(wide.reshape(*wide.shape[:-1], -1, 2))
    return torch.view_as_real(numbers * angles).flatten(3)


def angles_of_positions() -> Tensor:
    angles = torch.outer(torch.arange(32), 100.0 ** -(torch.arange(0, WIDTH // HEADS, 2) / (WIDTH // HEADS)))
    return torch.polar(torch.ones_like(angles), angles)


class Decoder(nn.Module):
    """A language model whose positions are made in one of the ways that people make them."""

    def __init__(self, positions: str = "arange", dropout: float = 0.0) -> None:
        super().__init__()
        self.kind = positions
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.table = nn.Embedding(32, WIDTH)
        self.free = nn.Parameter(0.1 * torch.randn(1, 32, WIDTH))
        angles = torch.arange(32)[:, None] * torch.exp(torch.arange(0, WIDTH, 2) * (-math.log(100.0) / WIDTH))
        self.register_buffer("waves", torch.stack((angles.sin(), angles.cos()), -1).flatten(1))
        self.blocks = nn.ModuleList(Block(dropout, makes_mask=makes_mask) for makes_mask in (False, True))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.freqs_cis = None if positions == "attribute made late" else angles_of_positions()
        self.free.requires_grad_(positions in SLICES)
        self.table.requires_grad_(positions in ("arange", "buffer"))

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.size(1)
        x = self.tokens(tokens)
        if self.kind == "arange":
            x = x + self.table(torch.arange(length, device=tokens.device))
        elif self.kind in SLICES:
            x = x + SLICES[self.kind](self.free, length)
        elif self.kind == "buffer":
            x = x + self.waves[:length] + self.table(torch.arange(0, length))
        angles = ANGLES[self.kind](self, length) if self.kind in ANGLES else None
        for block in self.blocks:
            x = block(x, angles)
        return self.head(self.norm(x))


# Ways of taking the first rows of a table [1, P, E].
SLICES = {
    "parameter": lambda table, length: table[:, :length],
    "ellipsis": lambda table, length: table[..., :length, :],
    "number": lambda table, length: table[0, :length],
    "view": lambda table, length: table.squeeze(0)[:length],
    "new dim": lambda table, length: table[0][None, :length],
}


def _moved(model: Decoder, length: int) -> Tensor:
    model.freqs_cis = model.freqs_cis.clone()  # as to another device
    return model.freqs_cis[:length]


def _made_late(model: Decoder, length: int) -> Tensor:
    if model.freqs_cis is None:
        model.freqs_cis = angles_of_positions()
    return model.freqs_cis[:length]


# Ways of keeping a rotary table in an attribute that is no buffer.
ANGLES = {
    "attribute": lambda model, length: model.freqs_cis[0 : 0 + length],
    "attribute that is moved": _moved,
    "attribute made late": _made_late,
}
WAYS = ("arange", "buffer", *SLICES, *ANGLES)


class Sequences(nn.Module):
    """A classifier on nn.TransformerEncoder, with a mask and padding as its modules take them."""

    def __init__(self, mask: str = "none", batch_first: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.kind, self.batch_first = mask, batch_first
        self.tokens, self.table = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(32, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, tokens: Tensor, padding: Tensor | None = None) -> Tensor:
        length = tokens.size(1)
        x = self.tokens(tokens) + self.table(torch.arange(length))
        mask = MASKS[self.kind](length)
        if padding is not None and mask is not None and mask.is_floating_point():
            padding = torch.zeros(padding.shape, dtype=mask.dtype).masked_fill(padding, -torch.inf)
        x = self.encoder(
            x if self.batch_first else x.transpose(0, 1),
            mask=mask,
            src_key_padding_mask=padding,
            is_causal=self.kind == "hinted",
        )
        return self.head(x.mean(1) if self.batch_first else x.mean(0))


def _window(length: int) -> Tensor:
    index = torch.arange(length)
    return (index[:, None] - index).abs() > 3


MASKS = {
    "none": lambda length: None,
    "causal": partial(nn.Transformer.generate_square_subsequent_mask, dtype=torch.float64),
    "hinted": partial(nn.Transformer.generate_square_subsequent_mask, dtype=torch.float64),
    "boolean": _window,
    "float": lambda length: torch.linspace(-1, 1, length * length).view(length, length).double(),
}


class Translator(nn.Module):
    """nn.Transformer as in its tutorial."""

    def __init__(self, batch_first: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.tokens, self.table = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(32, WIDTH)
        layers = (
            kind(WIDTH, HEADS, 2 * WIDTH, dropout, batch_first=batch_first)
            for kind in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
        )
        encoder = nn.TransformerEncoder(next(layers), 2, enable_nested_tensor=False)
        decoder = nn.TransformerDecoder(next(layers), 2)
        self.transformer = nn.Transformer(
            WIDTH, HEADS, custom_encoder=encoder, custom_decoder=decoder, batch_first=batch_first
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor, padding: Tensor | None = None) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.size(1), dtype=torch.float64)
        parts = [self.tokens(part) + self.table(torch.arange(part.size(1))) for part in (source, target)]
        parts = parts if self.batch_first else [part.transpose(0, 1) for part in parts]
        x = self.transformer(
            *parts, tgt_mask=mask, src_key_padding_mask=padding, memory_key_padding_mask=padding, tgt_is_causal=True
        )
        return self.head(x if self.batch_first else x.transpose(0, 1))


def tokens(length: int = LENGTH, seed: int = 1) -> Tensor:
    return torch.randint(VOCABULARY, (2, length), generator=torch.Generator().manual_seed(seed))


def padding(length: int = LENGTH) -> Tensor:
    """True on padding."""
    found = torch.zeros(2, length, dtype=torch.bool)
    found[1, 9:] = True
    return found
