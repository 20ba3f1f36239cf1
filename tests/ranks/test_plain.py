"""Models of torch.nn and of scaled_dot_product_attention, by two lines, against themselves untouched."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lss
from lss import losses
from tests.models import assert_same
from tests.plain import LENGTH, MASKS, VOCABULARY, WAYS, WIDTH, Block, Decoder, Sequences, Translator, padding, tokens


def made(kind: type, *args: object, **named: object) -> nn.Module:
    torch.manual_seed(0)
    return kind(*args, **named).double().train()


def gradients(model: nn.Module) -> dict:
    return {name: weight.grad for name, weight in model.named_parameters() if weight.requires_grad}


def assert_equal(found: tuple, expected: tuple) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-10)
    assert_same(found[1], expected[1], "outputs", 1e-9)
    assert found[2].keys() == expected[2].keys()
    for name, gradient in found[2].items():
        wanted = expected[2][name]
        if name.endswith(("in_proj_bias", "qkv.bias")) and wanted.chunk(3)[1].abs().max() < 1e-12:  # of keys: none
            gradient, wanted = (part.view(3, -1)[[0, 2]] for part in (gradient, wanted))
        assert_same(gradient, wanted, name, 1e-9)


# A language model, cut by tokens


def predicted(number: int, positions: str, dropout: float = 0.0, recomputes: str = "") -> tuple:
    mesh = lss.init_mesh(number, device="cpu")
    model = made(Decoder, positions, dropout)
    model = lss.parallelize(model, mesh)
    if recomputes:
        recompute(model, recomputes)
    whole = tokens()
    batch = lss.shard({"tokens": whole, "labels": whole}, mesh, shift_labels=1, step=0)
    logits = model(batch["tokens"], segment=batch["segment"])
    count = lss.count_tokens(model, batch["labels"])
    loss = lss.token_mean_cross_entropy(logits, batch["labels"], count)
    loss.backward()
    assert not torch.overrides._get_current_function_mode_stack()
    lss.average_gradients(model)
    total = lss.context_of(model).sum_over_ranks(loss.detach())
    return total.item(), lss.unshard(logits, batch["segment"], mesh), gradients(model)


class Recomputed(nn.ModuleList):
    def __iter__(self):
        return (partial(checkpoint, block, use_reentrant=False) for block in super().__iter__())


class Reentrant(nn.ModuleList):
    def __iter__(self):
        return (partial(checkpoint, block, use_reentrant=True) for block in super().__iter__())


def recompute(model: nn.Module, how: str) -> None:
    """Whole modules; or, as some do it, their forwards."""
    if how != "forwards":
        model.blocks.__class__ = Recomputed if how == "modules" else Reentrant
        return
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def alone(positions: str) -> tuple:
    model, whole = made(Decoder, positions), tokens()
    logits = model(whole)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), whole[:, 1:].flatten())
    loss.backward()
    return loss.item(), logits.detach(), gradients(model)


@pytest.mark.supports("own module with scaled_dot_product_attention", "whole")
@pytest.mark.parametrize("positions", WAYS)
def test_positions_that_a_model_makes_are_global(ranks, positions):
    for number in (2, 3):
        for found in ranks.run(predicted, number, number, positions):
            assert_equal(found, alone(positions))


def explained(number: int) -> str:
    mesh = lss.init_mesh(number, device="cpu")
    model = lss.parallelize(made(Decoder), mesh)
    model(**lss.shard({"tokens": tokens()}, mesh))
    return lss.explain(model)


def test_it_is_said_where_positions_were_made(ranks):
    for said in ranks.run(explained, 2, 2):
        assert "the model: torch.arange(0, 7) looked up by global position" in said


class Tagger(nn.Module):
    """nn.TransformerEncoder under a causal mask, cut by tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.table = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(32, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, 0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(WIDTH, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.table(torch.arange(tokens.size(1)))
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.size(1), dtype=torch.float64)
        return self.head(self.encoder(x, mask=mask, is_causal=True))


def tagged(number: int) -> tuple:
    mesh = lss.init_mesh(number, device="cpu")
    model = lss.parallelize(made(Tagger), mesh)
    batch = lss.shard({"tokens": tokens(), "labels": tokens() % 3}, mesh, shift_labels=0)
    logits = model(batch["tokens"], segment=batch["segment"])
    count = lss.count_tokens(model, batch["labels"])
    loss = lss.token_mean_cross_entropy(logits, batch["labels"], count)
    loss.backward()
    lss.average_gradients(model)
    total = lss.context_of(model).sum_over_ranks(loss.detach()).item()
    return total, lss.unshard(logits, batch["segment"], mesh), gradients(model)


def test_transformer_encoder_cut_by_tokens(ranks):
    model = made(Tagger)
    logits = model(tokens())
    loss = F.cross_entropy(logits.flatten(0, 1), (tokens() % 3).flatten())
    loss.backward()
    for number in (2, 3):
        for found in ranks.run(tagged, number, number):
            assert_equal(found, (loss.item(), logits.detach(), gradients(model)))


@pytest.mark.supports("own module with scaled_dot_product_attention", "activation checkpointing")
@pytest.mark.parametrize("how", ["modules", "forwards", "reentrant"])
def test_attention_of_a_model_of_ones_own_is_recomputed(ranks, how):
    for found in ranks.run(predicted, 2, 2, "arange", 0.0, how):
        assert_equal(found, alone("arange"))


@pytest.mark.supports("own module with scaled_dot_product_attention", "dropout")
def test_dropout_of_functions_is_the_same_over_any_ranks(ranks):
    (whole,) = ranks.run(predicted, 1, 1, "arange", 0.2)
    assert whole[0] != pytest.approx(alone("arange")[0], rel=1e-3)
    for number, recomputes in ((2, ""), (3, ""), (2, "modules"), (2, "forwards")):
        for found in ranks.run(predicted, number, number, "arange", 0.2, recomputes):
            assert_equal(found, whole)


# torch.nn, cut in its layers


def classified(number: int, mask: str, batch_first: bool, padded: bool, dropout: float = 0.0, groups: int = 1) -> tuple:
    mesh = lss.init_mesh(number, groups, device="cpu")
    model = lss.parallelize(made(Sequences, mask, batch_first, dropout), mesh, cut="layers")
    group = mesh.get_local_rank("data")
    whole = {"tokens": tokens(), "labels": torch.tensor([2, 0])} | ({"padding": padding()} if padded else {})
    whole = {name: part.chunk(groups)[group] for name, part in whole.items()}
    batch = lss.shard(whole, mesh, cut="layers", step=0)
    labels = batch.pop("labels")
    logits = model(**batch)
    loss = losses.share_of_mean(model, F.cross_entropy(logits, labels, reduction="none"))
    loss.backward()
    lss.average_gradients(model)
    total = lss.context_of(model).sum_over_ranks(loss.detach()).item()
    return total, lss.unshard(logits, batch["segment"], mesh, data_groups=True), gradients(model)


def classified_alone(mask: str, batch_first: bool, padded: bool) -> tuple:
    model = made(Sequences, mask, batch_first)
    logits = model(tokens(), padding() if padded else None)
    loss = F.cross_entropy(logits, torch.tensor([2, 0]))
    loss.backward()
    return loss.item(), logits.detach(), gradients(model)


@pytest.mark.supports("nn.TransformerEncoder", "{kind}", "cut in the layers")
@pytest.mark.parametrize("kind", ["whole", "padded"])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("mask", MASKS)
def test_transformer_encoder(ranks, mask, batch_first, kind):
    expected = classified_alone(mask, batch_first, kind == "padded")
    for number in (2, 3):
        for found in ranks.run(classified, number, number, mask, batch_first, kind == "padded"):
            assert_equal(found, expected)


@pytest.mark.supports("nn.TransformerEncoder", "data groups")
def test_data_groups_of_whole_batches(ranks):
    for found in ranks.run(classified, 4, 2, "causal", True, True, 0.0, 2):
        assert_equal(found, classified_alone("causal", True, True))


@pytest.mark.supports("nn.TransformerEncoder", "dropout")
@pytest.mark.parametrize("batch_first", [True, False])
def test_dropout_of_torch_nn_is_the_same_over_any_ranks(ranks, batch_first):
    (whole,) = ranks.run(classified, 1, 1, "causal", batch_first, True, 0.2)
    assert whole[0] != pytest.approx(classified_alone("causal", batch_first, True)[0], rel=1e-3)
    for number, groups in ((2, 1), (3, 1), (2, 2)):
        for found in ranks.run(classified, number * groups, number, "causal", batch_first, True, 0.2, groups):
            assert_equal(found, whole)


def translated(number: int, batch_first: bool, evaluating: bool = False) -> tuple:
    mesh = lss.init_mesh(number, device="cpu")
    model = lss.parallelize(made(Translator, batch_first), mesh, cut="layers")
    if evaluating:
        with torch.no_grad():
            return model.eval()(tokens(), tokens(9, 2), padding())
    logits = model(tokens(), tokens(9, 2), padding())
    count = lss.count_tokens(model, tokens(9, 3))
    loss = lss.token_mean_cross_entropy(logits, tokens(9, 3), count)
    loss.backward()
    lss.average_gradients(model)
    return lss.context_of(model).sum_over_ranks(loss.detach()).item(), logits.detach(), gradients(model)


@pytest.mark.supports("nn.Transformer", "whole", "padded", "cut in the layers")
@pytest.mark.parametrize("batch_first", [True, False])
def test_transformer_with_cross_attention(ranks, batch_first):
    model = made(Translator, batch_first)
    logits = model(tokens(), tokens(9, 2), padding())
    loss = F.cross_entropy(logits.flatten(0, 1), tokens(9, 3).flatten())
    loss.backward()
    for number in (2, 3):
        for found in ranks.run(translated, number, number, batch_first):
            assert_equal(found, (loss.item(), logits.detach(), gradients(model)))
        for found in ranks.run(translated, number, number, batch_first, True):
            assert_same(found, logits.detach(), "evaluation", 1e-9)


def multihead(number: int, named: dict) -> tuple:
    """Over `number` ranks; the plain module for 0."""
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64, **named)
    x, memory = torch.randn(2, LENGTH, 8).double(), torch.randn(2, 6, named.get("kdim", 8)).double()
    if number:
        module = lss.parallelize(module, lss.init_mesh(number, device="cpu"), cut="layers")
    key, value = (memory, memory[..., : named["vdim"]]) if named else (x, x)
    found = module(x, key, value)[0]
    (found.square().sum() / max(number, 1)).backward()
    if number:
        lss.average_gradients(module)
    return found.detach(), gradients(module)


@pytest.mark.supports("nn.MultiheadAttention", "whole", "cut in the layers")
@pytest.mark.parametrize("named", [{}, {"kdim": 6, "vdim": 5}])
def test_multihead_attention_alone(ranks, named):
    outputs, expected = multihead(0, named)
    for found, grads in (*ranks.run(multihead, 2, 2, named), *ranks.run(multihead, 3, 3, named)):
        assert_same(found, outputs, "outputs", 1e-9)
        for name, gradient in grads.items():
            part = slice(None) if name != "in_proj_bias" else slice(16, None)
            assert_same(gradient[part], expected[name][part], name, 1e-9)


class Positioned(nn.Module):
    """Positions are added to queries and keys alone, as in DETR."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.table = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(32, WIDTH)
        self.attention, self.head = nn.MultiheadAttention(WIDTH, 4, batch_first=True), nn.Linear(WIDTH, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, positions = self.tokens(tokens), self.table(torch.arange(tokens.size(1)))
        return self.head(self.attention(x + positions, x + positions, x, need_weights=False)[0])


def positioned(number: int) -> torch.Tensor:
    mesh = lss.init_mesh(number, device="cpu")
    model = lss.parallelize(made(Positioned), mesh)
    batch = lss.shard({"tokens": tokens()}, mesh)
    return lss.unshard(model(batch["tokens"], segment=batch["segment"]), batch["segment"], mesh)


def test_keys_may_be_another_tensor_than_queries(ranks):
    for number in (2, 3):
        for found in ranks.run(positioned, number, number):
            assert_same(found, made(Positioned)(tokens()).detach(), "outputs", 1e-9)


class Handed(nn.Module):
    """Hands angles and numbers of tokens to each of its blocks, under names of its own."""

    class Turned(Block):
        def forward(self, x: torch.Tensor, freqs: torch.Tensor, *, index: torch.Tensor) -> torch.Tensor:
            return super().forward(x * freqs.cos() + x.roll(1, -1) * freqs.sin() + 0.1 * index[..., None])

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(self.Turned() for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, index = self.tokens(tokens), torch.arange(tokens.size(1))
        freqs = index[:, None] / torch.arange(1, WIDTH + 1).double()
        for block in self.blocks:
            x = block(x, freqs, index=index.expand_as(tokens))
        return self.head(x.mean(1))


def handed(number: int) -> tuple[float, torch.Tensor, dict]:
    model = lss.parallelize(made(Handed), lss.init_mesh(number, device="cpu"), cut="layers")
    found = model(tokens())
    share = lss.losses.share_of_mean(model, found.square().mean(1))
    share.backward()
    lss.average_gradients(model)
    return lss.context_of(model).sum_over_ranks(share.detach()).item(), found.detach(), gradients(model)


def test_what_layers_are_handed_of_each_token_is_cut_too(ranks):
    model = made(Handed)
    expected = model(tokens())
    loss = expected.square().mean()
    loss.backward()
    for number in (2, 3):
        for found in ranks.run(handed, number, number):
            assert_equal(found, (loss.item(), expected.detach(), gradients(model)))
