"""Models that keep positions for later calls: right for batches that are cut alike, else refused."""

import functools

import pytest
import torch
from torch import Tensor, nn

import lss
from lss.errors import ModelError
from tests.plain import VOCABULARY, WIDTH, Block, tokens
from tests.ranks.test_trial import outcome


@functools.lru_cache
def angles(length: int) -> Tensor:
    return torch.arange(length)[:, None] * torch.linspace(0, 1, WIDTH)


class Remembering(nn.Module):
    """Keeps angles for later calls: by length, in a cache of functions, or as long as ever was needed."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.embed, self.block = nn.Embedding(VOCABULARY, WIDTH), Block()
        self.head, self.how, self._by_length, self.longest = nn.Linear(WIDTH, VOCABULARY), how, {}, None

    def angles(self, length: int) -> Tensor:
        if self.how == "a cache of functions":
            return angles(length)
        if self.how == "by length":
            if length not in self._by_length:
                self._by_length[length] = angles.__wrapped__(length)
            return self._by_length[length]
        if self.longest is None or len(self.longest) < length:
            self.longest = angles.__wrapped__(length)
        return self.longest[:length]

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.block(self.embed(tokens) + self.angles(tokens.size(1)).sin()))


def remembering(how: str, lengths: tuple[int, ...], clear: bool = True) -> tuple:
    angles.cache_clear()
    return outcome(functools.partial(Remembering, how), batches=[tokens(length) for length in lengths])


HOW = ["a cache of functions", "by length", "as long as ever"]


@pytest.mark.parametrize("how", HOW)
def test_positions_that_are_kept_are_right_for_batches_of_one_length(ranks, how):
    torch.manual_seed(0)
    model = Remembering(how).double()
    angles.cache_clear()
    for found, told in ranks.run(remembering, 2, how, (14, 14)):
        for outputs in found:
            torch.testing.assert_close(outputs, model(tokens(14)).detach(), rtol=1e-12, atol=1e-12)
        assert not told


@pytest.mark.parametrize(("how", "lengths"), [*((how, (14, 13)) for how in HOW), ("as long as ever", (40, 8))])
def test_positions_that_are_kept_are_refused_for_another_length(ranks, how, lengths):
    for (_, said), _ in ranks.run(remembering, 2, how, lengths):
        assert "the model keeps positions" in said


@pytest.mark.parametrize("how", HOW)
def test_positions_that_layers_keep_are_refused_for_another_length(ranks, how):
    for found in ranks.run(in_layers, 2, how):
        assert "the model keeps positions" in found


class Turning(nn.Module):
    """A layer that makes its positions itself."""

    def __init__(self, kept: Remembering) -> None:
        super().__init__()
        self.kept, self.block = kept, Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x + self.kept.angles(x.size(1)).sin())


class InLayers(nn.Module):
    """Embeddings, layers, a head."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList([Turning(Remembering(how))])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def in_layers(how: str) -> str:
    mesh = lss.init_mesh(2, device="cpu")
    angles.cache_clear()
    model = lss.parallelize(InLayers(how).double(), mesh, cut="layers")
    model(tokens(14))
    with pytest.raises(ModelError) as raised:
        model(tokens(13))
    return str(raised.value)
