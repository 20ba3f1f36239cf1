"""Code that works on tokens outside attention: refused if it is wrong, however it is written; else let alone."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lss
from lss.errors import ModelError
from tests.plain import VOCABULARY, WIDTH, Block, tokens

TABLE = torch.randn(64, WIDTH)


class Around(nn.Module):
    """A language model that does something with its tokens before its block, and after it."""

    def __init__(self, what: object) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList([Block()])
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.what, self.calls, self.kept, self.numbers = what, 0, [], {"calls": 0}
        self.gate = nn.Parameter(torch.zeros(()))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        self.numbers["calls"] += 1
        self.kept.append(tokens)
        self.seen += 1
        x = self.what(self, self.embed(tokens))
        for block in self.blocks:
            x = block(x)
        return self.head(self.what(self, x))


def swapped(x: Tensor) -> Tensor:
    return x.transpose(0, 1)


def subtracted(x: Tensor) -> Tensor:
    x -= x.mean(1, keepdim=True)
    return x


def scattered(x: Tensor) -> Tensor:
    place = torch.zeros(x.shape, dtype=torch.int64)
    return x + torch.zeros_like(x).scatter_add(1, place, x)[:, :1]


def spread(x: Tensor) -> Tensor:
    return x + torch.tensordot(torch.ones(x.size(1), x.size(1)).tril().double(), x, ([1], [1])).transpose(0, 1)


MIXING = {
    "sums, tokens first": lambda model, x: swapped(swapped(x).cumsum(0)),
    "sums, tokens last": lambda model, x: x.mT.cumsum(-1).mT,
    "sums of what is flat": lambda model, x: x.reshape(x.size(0), -1).cumsum(1).view_as(x),
    "a product with tokens last": lambda model, x: F.linear(x.mT, torch.ones(x.size(1), x.size(1)).double()).mT,
    "a product over the first dim": lambda model, x: spread(x),
    "two statistics": lambda model, x: x - torch.std_mean(x, 1, keepdim=True)[1],
    "a quantile": lambda model, x: x - x.quantile(0.3, dim=1, keepdim=True),
    "tokens taken": lambda model, x: x + torch.take_along_dim(x, x.argsort(1), 1),
    "tokens added": lambda model, x: scattered(x),
    "halves": lambda model, x: torch.cat([part.flip(1) for part in x.tensor_split(2, 1)], 1),
    "a norm over tokens": lambda model, x: F.normalize(x, dim=1),
    "a softmin over tokens": lambda model, x: F.softmin(x, 1),
    "a mean in place": lambda model, x: subtracted(x.clone()),
    "the first of each sequence": lambda model, x: x + swapped(x)[0][:, None],
    "any token": lambda model, x: x * (x > 1).any(1, keepdim=True),
    "tokens far ahead": lambda model, x: x + torch.cat([torch.zeros(len(x), 16, WIDTH), x], 1)[:, : x.size(1)],
    "a gate that is shut": lambda model, x: x + model.gate * x.cumsum(1),
}
RANDOM = {
    "normal_": lambda model, x: x + torch.empty_like(x).normal_(),
    "bernoulli_": lambda model, x: x * torch.ones_like(x).bernoulli_(0.5),
    "rand": lambda model, x: torch.where(torch.rand(*x.shape[:2], 1) < 1e-9, 0.0, x),
}
MISCOUNTING = {
    "evenly spaced": lambda model, x: x + torch.linspace(0, 1, x.size(1))[:, None],
    "a share of the length": lambda model, x: x + (torch.arange(x.size(1)) / x.size(1))[:, None],
    "counted": lambda model, x: x + torch.ones(x.size(1)).cumsum(0)[:, None],
    "found": lambda model, x: x + torch.ones(x.size(1)).nonzero(),
    "numbers of Python": lambda model, x: x + torch.tensor(list(range(x.size(1))))[:, None],
    "a table of a file": lambda model, x: x + TABLE[: x.size(1)],
    "a table narrowed": lambda model, x: x + TABLE.narrow(0, 0, x.size(1)),
}


def first_call(what: str) -> str:
    mesh = lss.init_mesh(2, device="cpu")
    torch.manual_seed(0)
    model = lss.parallelize(Around((MIXING | MISCOUNTING | RANDOM)[what]).double(), mesh)
    batch = lss.shard({"tokens": tokens()}, mesh)
    with pytest.raises(ModelError) as raised:
        model(**batch)
    return str(raised.value)


@pytest.mark.parametrize("what", MIXING | MISCOUNTING | RANDOM)
def test_what_sees_one_rank_alone_is_refused(ranks, what):
    for said in ranks.run(first_call, 2, what):
        assert said.startswith(f"the model draws random numbers by {what}" if what in RANDOM else "the model calls")
        assert "cut='layers'" in said


class Residual(Around):
    """Uses what its layers gave behind them, of each rank's own tokens."""

    def forward(self, tokens: Tensor) -> Tensor:
        x, kept = self.embed(tokens), []
        for block in self.blocks:
            block.norm_1.register_forward_hook(lambda module, args, y: kept.append(y))
            x = block(x)
        return self.head(x.mean(1) + kept[0].mean(1))


def kept() -> str:
    mesh = lss.init_mesh(2, device="cpu")
    model = lss.parallelize(Residual(None).double(), mesh, cut="layers")
    with pytest.raises(ModelError) as raised:
        model(tokens())
    return str(raised.value)


def test_what_is_kept_of_a_layer_for_behind_the_last_one_is_refused(ranks):
    for said in ranks.run(kept, 2):
        assert "other values for a token" in said


def routed(model: Around, x: Tensor) -> Tensor:
    flat = x.reshape(-1, WIDTH)
    shares, chosen = flat[:, :4].softmax(-1).topk(2)
    mixed = torch.zeros_like(flat)
    for number, expert in enumerate(model.experts):
        row, place = (chosen == number).nonzero(as_tuple=True)
        mixed.index_add_(0, row, expert(flat[row]) * shares[row, place, None])
    return x + mixed.view_as(x)


def with_angles(model: Around, x: Tensor) -> Tensor:
    """Rotary-like: numbers of features, as many as the segment has slots, beside numbers of tokens."""
    rates = torch.exp(torch.arange(7) * (-math.log(100.0) / 7))
    angles = torch.arange(x.size(1))[:, None] * rates
    return x + angles.sin().sum(-1, keepdim=True) + torch.arange(x.size(0))[:, None, None]


RIGHT = {
    "experts": routed,
    "numbers of features and sequences, as many as slots": with_angles,
    "features that are as many as slots": lambda model, x: torch.cat([x[..., :7].softmax(-1), x[..., 7:]], -1),
    "heads": lambda model, x: x.view(*x.shape[:2], 4, -1).softmax(2).reshape(x.shape),
    "parts of features": lambda model, x: torch.cat(x.split(7, -1)[::-1], -1),
    "a norm of each token": lambda model, x: F.normalize(x, dim=-1) * x.std(-1, keepdim=True),
}


def over_ranks(what: str, num_sequences: int) -> tuple:
    mesh = lss.init_mesh(2, device="cpu")
    torch.manual_seed(0)
    model = lss.parallelize(Around(RIGHT[what]).double(), mesh)
    torch.manual_seed(1)
    batch = lss.shard({"tokens": torch.randint(VOCABULARY, (num_sequences, 14))}, mesh)
    torch.manual_seed(2)
    found = lss.unshard(model(**batch), batch["segment"], mesh)
    kept = [model.calls, model.numbers["calls"], len(model.kept), model.seen.item()]
    return found, kept, torch.rand(1)


@pytest.mark.parametrize("num_sequences", [2, 7, 13])
@pytest.mark.parametrize("what", RIGHT)
def test_what_is_right_is_taken_and_the_trial_leaves_no_trace(ranks, what, num_sequences):
    torch.manual_seed(0)
    model = Around(RIGHT[what]).double()
    torch.manual_seed(1)
    expected = model(torch.randint(VOCABULARY, (num_sequences, 14)))
    torch.manual_seed(2)
    number = torch.rand(1)
    for found, kept, drawn in ranks.run(over_ranks, 2, what, num_sequences):
        torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=1e-12)
        assert kept == [1, 1, 1, 1]
        assert drawn == number


@dataclass
class Batch:
    tokens: Tensor


class Unpacked(Around):
    """Is called with something else than a tensor [B, S]."""

    def forward(self, *given: object, form: str) -> Tensor:
        tokens = {"dataclass": lambda: given[0].tokens, "channels": lambda: given[0].argmax(1)}.get(
            form, lambda: given[0]
        )()
        length = given[1] if form == "length" else tokens.size(-1)
        self.form = form
        x = super().forward(tokens[None] if form == "one sequence" else tokens)
        return x + torch.arange(length)[:, None]


FORMS = {
    "dataclass": lambda tokens: (Batch(tokens),),
    "channels": lambda tokens: (F.one_hot(tokens, VOCABULARY).mT,),
    "length": lambda tokens: (tokens, tokens.size(1)),
    "one sequence": lambda tokens: (tokens[0],),
}


def in_form(form: str, what: str) -> Tensor | str:
    mesh = lss.init_mesh(2, device="cpu")
    torch.manual_seed(0)
    model = lss.parallelize(Unpacked((RIGHT | MIXING)[what]).double(), mesh)
    batch = lss.shard({"tokens": tokens()}, mesh)
    try:
        found = model(*FORMS[form](batch["tokens"]), form=form, segment=batch["segment"])
    except ModelError as error:
        return str(error)
    return lss.unshard(found, batch["segment"], mesh)


@pytest.mark.parametrize("form", FORMS)
def test_arguments_may_have_any_form(ranks, form):
    torch.manual_seed(0)
    model = Unpacked(RIGHT["experts"]).double()
    expected = model(*FORMS[form](tokens()), form=form).detach()
    for found in ranks.run(in_form, 2, form, "experts"):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for said in ranks.run(in_form, 2, form, "a norm over tokens"):
        assert "other values for a token" in said


class Stacks(Around):
    """Two stacks of layers; the second, or what is behind it, may do something else with tokens."""

    def __init__(self, inside: bool, what: object) -> None:
        super().__init__(what)
        self.inside, self.others = inside, nn.ModuleList([Block()])
        self.others[0].register_forward_hook(lambda module, args, x: what(self, x) if inside else x)

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        target.mul_(0.5)
        x = self.embed(tokens) + target
        for block in (*self.blocks, *self.others):
            x = block(x)
        return self.head(x if self.inside else self.what(self, x))


BEHIND = {
    "rolled inside": (True, lambda model, x: x + x.roll(1, 1)),
    "random behind": (False, lambda model, x: x * (torch.rand_like(x) > 0.5)),
    "right": (False, lambda model, x: x - x.mean(1, keepdim=True)),
}


def in_stacks(what: str) -> Tensor | str:
    mesh = lss.init_mesh(2, device="cpu")
    torch.manual_seed(0)
    model = lss.parallelize(Stacks(*BEHIND[what]).double(), mesh, cut="layers")
    try:
        return model(tokens(), torch.ones(2, 13, WIDTH).double()).detach()
    except ModelError as error:
        return str(error)


@pytest.mark.parametrize("what", BEHIND)
def test_what_is_behind_a_stack_is_tried_too(ranks, what):
    torch.manual_seed(0)
    expected = Stacks(*BEHIND["right"]).double()(tokens(), torch.ones(2, 13, WIDTH).double()).detach()
    for found in ranks.run(in_stacks, 2, what):
        if what == "right":
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        else:
            assert "other values for a token" in found


@dataclass
class Logits:
    logits: Tensor


RETURNED = {
    "a dataclass": lambda y: Logits(y.cumsum(1)),
    "integers": lambda y: y.argmax(1),
    "fewer tokens": lambda y: y[:, 1:],
}


class Returning(Around):
    def __init__(self, what: object) -> None:
        super().__init__(lambda model, x: x)
        self.returned = what

    def forward(self, tokens: Tensor, smooth: bool = False) -> object:
        y = super().forward(tokens)
        return y - y.mean(1, keepdim=True) if smooth else self.returned(y)


def returned(what: str) -> str:
    mesh = lss.init_mesh(2, device="cpu")
    model = lss.parallelize(Returning(RETURNED.get(what, lambda y: y)).double(), mesh)
    batch = lss.shard({"tokens": tokens()}, mesh)
    if what == "called otherwise":
        model(**batch)
    with pytest.raises(ModelError) as raised:
        model(**batch, smooth=what == "called otherwise")
    return str(raised.value)


@pytest.mark.parametrize("what", [*RETURNED, "called otherwise"])
def test_whatever_is_returned_is_looked_at(ranks, what):
    for said in ranks.run(returned, 2, what):
        assert "other values for a token" in said


def in_one_data_group() -> str:
    mesh = lss.init_mesh(2, 2, device="cpu")
    mixes = Around(lambda model, x: x - x.mean(1, keepdim=True) if mesh.get_local_rank("data") else x)
    model = lss.parallelize(mixes, mesh)
    with pytest.raises(ModelError) as raised:
        model(**lss.shard({"tokens": tokens().repeat(2, 1)}, mesh))
    return str(raised.value)


def test_what_one_data_group_refuses_ends_the_others(ranks):
    assert all("other values for a token" in said for said in ranks.run(in_one_data_group, 4))
