"""The trial of a model's code: what it sees besides the values of tokens, and that it leaves no trace."""

import functools
import random
import warnings
from collections import Counter, defaultdict, deque
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import lss
from lss.errors import ModelError
from tests.plain import WIDTH, tokens
from tests.ranks.test_locality import Around


def outcome(make, *, what: object = None, batches=None, dtype=torch.float64, training: bool = True, **options: object):
    """Outputs of some batches over ranks, or the message of what is refused; and what was warned of."""
    mesh = lss.init_mesh(torch.distributed.get_world_size(), device="cpu")
    torch.manual_seed(0)
    model = lss.parallelize((make(what) if what else make()).to(dtype).train(training), mesh, **options)
    found = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            for batch in batches or [tokens()]:
                part = lss.shard({"tokens": batch}, mesh)
                found.append(lss.unshard(model(**part), part["segment"], mesh).detach())
        except ModelError as error:
            found.append(str(error))
    return found, " ".join(str(warning.message) for warning in told)


class Gated(Around):
    """Adds something by weights that are nothing yet."""

    def __init__(self, what) -> None:
        super().__init__(lambda model, x: x + what(model, x))
        self.scale = nn.Parameter(torch.full((WIDTH,), 1e-6))


GATED = {
    "a sum": lambda model, x: model.gate * x.sum(1, keepdim=True),
    "rows in another order": lambda model, x: (model.gate * x.reshape(-1, WIDTH).roll(1, 0)).view_as(x),
    "a mean": lambda model, x: model.scale * x.mean(1, keepdim=True),
    "what torch does not see": lambda model, x: model.gate * torch.from_numpy(x.detach().numpy().cumsum(1)),
}


@pytest.mark.parametrize("what", GATED)
def test_what_is_behind_a_shut_gate_is_refused(ranks, what):
    for (said,), _ in ranks.run(gated, 2, what):
        assert "other values for a token" in said


def gated(what: str):
    return outcome(Gated, what=GATED[what])


def path(model: Around, x: Tensor) -> Tensor:
    return x * (torch.rand(1, 1, 1) < 0.9) / 0.9


DRAWN = {
    "a path": path,
    "a number for all": lambda model, x: x + torch.rand(()) if torch.rand(()) < 0.5 else x,
    "a place": lambda model, x: x * (1 + torch.randint(10**6, (1,))),
    "a number of Python": lambda model, x: x if random.random() < 2 else -x,
}


def drawn(what: str):
    return outcome(Around, what=DRAWN[what])


@pytest.mark.parametrize("what", DRAWN)
def test_a_single_random_number_that_decides_something_is_refused(ranks, what):
    for (said,), _ in ranks.run(drawn, 2, what):
        assert "other values for a token" in said


def in_vain() -> tuple:
    return outcome(Around, what=lambda model, x: x if torch.rand(()) < 0.0 else x + 1)


def test_one_that_decides_nothing_is_let_alone(ranks):
    for (found,), told in ranks.run(in_vain, 2):
        assert isinstance(found, Tensor)
        assert not told


def counted(model: Around, x: Tensor) -> Tensor:
    model.seen += (x.sum(-1) > 0).sum()
    return x


def averaged(model: Around, x: Tensor) -> Tensor:
    model.seen.lerp_(x.detach().abs().amax().to(model.seen.dtype), 0.5)
    return x


KEPT = {"counts": counted, "averages": averaged}


def in_buffer(what: str, safe: tuple[str, ...]):
    return outcome(Around, what=KEPT[what], safe=safe)


@pytest.mark.parametrize("what", KEPT)
def test_what_is_kept_of_the_tokens_of_a_rank_is_refused(ranks, what):
    for (said,), _ in ranks.run(in_buffer, 2, what, ()):
        assert "the model keeps in seen what it makes of its rank's tokens" in said
    for (found,), told in ranks.run(in_buffer, 2, what, ("seen",)):
        assert isinstance(found, Tensor)
        assert not told


class Keeping(Around):
    """Counts its calls in every kind of thing that a module may hold."""

    def __init__(self) -> None:
        super().__init__(lambda model, x: x)
        self._log, self._by_name, self.by_default = [], {"calls": 0, "more": [0]}, defaultdict(int)
        self.counter, self.queue, self.names = Counter(), deque(), set()
        self.space, self.plain = SimpleNamespace(calls=0), torch.zeros(())
        self.output = transformers.modeling_outputs.BaseModelOutput(last_hidden_state=torch.zeros(1))
        self.register_buffer("average", torch.zeros(()))

    def forward(self, tokens: Tensor) -> Tensor:
        self._log.append(1)
        self._by_name["calls"] += 1
        self._by_name["more"][0] += 1
        self.by_default["calls"] += 1
        self.counter["calls"] += 1
        self.queue.append(1)
        self.names.add(len(self.names))
        self.space.calls += 1
        self.plain += 1
        self.average.data.add_(1)
        return super().forward(tokens)

    def told(self) -> list:
        listed = [len(part) for part in (self._log, self.queue, self.names)]
        counts = [self._by_name["calls"], self._by_name["more"][0], self.by_default["calls"], self.counter["calls"]]
        return [*listed, *counts, self.space.calls, self.plain.item(), self.average.item()]


def kept_after_a_call() -> tuple[list, bool]:
    mesh = lss.init_mesh(2, device="cpu")
    torch.manual_seed(0)
    model = Keeping()
    before = {name: weight.clone() for name, weight in model.state_dict().items() if name != "average"}
    lss.parallelize(model, mesh)(**lss.shard({"tokens": tokens()}, mesh)).sum().backward()
    after = model.state_dict()
    same = all(torch.equal(weight, after[name]) for name, weight in before.items() if name != "seen")
    return model.told(), same


def test_the_trial_leaves_no_trace(ranks):
    for told, same in ranks.run(kept_after_a_call, 2):
        assert told == [1] * len(told)
        assert same  # also weights that are nothing, which are other ones in the trial


def centred(model: Around, x: Tensor) -> Tensor:
    return x - 0.5 * x.mean(1, keepdim=True)


def after_equal_tokens() -> tuple:
    return outcome(Around, what=centred, batches=[torch.zeros(2, 13, dtype=torch.int64), tokens()])


def test_a_first_batch_of_equal_tokens_tells_nothing(ranks):
    for rank, ((_, said), told) in enumerate(ranks.run(after_equal_tokens, 2)):
        assert "other values for a token" in said
        assert rank or "not tried: all tokens of a segment are the same" in told


def one_token_each() -> tuple:
    return outcome(Around, what=centred, batches=[tokens(2), tokens(13)])


def test_segments_of_one_token_tell_nothing(ranks):
    for rank, ((_, said), told) in enumerate(ranks.run(one_token_each, 2)):
        assert "other values for a token" in said
        assert rank or "not tried: a segment has one token" in told


class Declared(Around):
    """Has a module that is declared safe, and something behind it."""

    def __init__(self, inside, behind) -> None:
        super().__init__(lambda model, x: x)
        self.inner = nn.Identity()
        self.inner.forward = inside
        self.behind = behind

    def forward(self, tokens: Tensor) -> Tensor:
        return self.behind(self.inner(super().forward(tokens)))


def sorted_twice(y: Tensor) -> Tensor:
    order = y.sum(-1).argsort(1)
    return y.take_along_dim(order[..., None], 1).take_along_dim(order.argsort(1)[..., None], 1)


def mixed(y: Tensor) -> Tensor:
    return y - y.mean(1, keepdim=True)


def same(y: Tensor) -> Tensor:
    return y


def declared(inside, behind) -> tuple:
    return outcome(functools.partial(Declared, inside, behind), safe=("inner",))


def test_a_module_that_is_declared_safe_hides_nothing_behind_it(ranks):
    for (found,), told in ranks.run(declared, 2, sorted_twice, same):
        assert isinstance(found, Tensor)
        assert not told
    for (said,), _ in ranks.run(declared, 2, sorted_twice, mixed):
        assert "the model calls mean" in said
    for rank, ((found,), told) in enumerate(ranks.run(declared, 2, mixed, same)):
        assert isinstance(found, Tensor)
        assert rank or "tried up to inner, which is declared safe and makes other values" in told


def numbers(count: int) -> Tensor:
    return torch.arange(count)


class Counting(Around):
    """Numbers tokens, and as many rates, by one function; takes no more than 32 tokens."""

    def __init__(self) -> None:
        super().__init__(lambda model, x: x + numbers(x.size(1))[:, None] / 50 + (numbers(7) / 7).sum())

    def forward(self, tokens: Tensor) -> Tensor:
        assert tokens.size(1) <= 32
        return super().forward(tokens)


def counting() -> tuple:
    return outcome(Counting)


def test_one_function_may_number_tokens_and_other_things(ranks):
    torch.manual_seed(0)
    expected = Counting().double()(tokens()).detach()
    for (found,), told in ranks.run(counting, 2):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        assert not told


class Empty(Around):
    """Has biases of zeros, as models are made."""

    def __init__(self) -> None:
        super().__init__(lambda model, x: x)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)


def of_zeros(how: str) -> Tensor:
    mesh = lss.init_mesh(2, device="cpu")
    torch.manual_seed(0)
    model = lss.parallelize(Empty(), mesh)
    if how == "fully_shard":
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh["sequence"], reshard_after_forward=False, ignored_params={model.gate})
    batch = lss.shard({"tokens": tokens()}, mesh)
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        return lss.unshard(model(**batch), batch["segment"], mesh)


@pytest.mark.parametrize("how", ["autocast", "fully_shard"])
def test_numbers_of_the_trial_are_used_in_no_call(ranks, how):
    torch.manual_seed(0)
    model = Empty()
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        expected = model(tokens()).detach()
    for found in ranks.run(of_zeros, 2, how):
        torch.testing.assert_close(found, expected, rtol=0, atol=0.01 if how == "autocast" else 1e-5)


def one_group_evaluates() -> float:
    mesh = lss.init_mesh(2, 2, device="cpu")
    torch.manual_seed(0)
    model = lss.parallelize(Around(lambda model, x: x), mesh)
    batch = lss.shard({"tokens": tokens(), "labels": tokens(seed=2)}, mesh, shift_labels=1)
    labels = batch.pop("labels")
    if mesh.get_local_rank("data") == 0:
        model.eval()(**batch)
    loss = lss.token_mean_cross_entropy(model.train()(**batch), labels, lss.count_tokens(model, labels))
    loss.backward()
    lss.average_gradients(model)
    return lss.context_of(model).sum_over_ranks(loss.detach()).item()


def test_one_data_group_may_evaluate_first(ranks):
    assert len(set(ranks.run(one_group_evaluates, 4))) == 1
