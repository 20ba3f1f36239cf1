"""Tables of positions that a model's code slices, wherever they are by then."""

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import lss
from lss.errors import LayoutError
from tests.models import assert_same
from tests.plain import Decoder, angles_of_positions, tokens
from tests.ranks.test_plain import alone, made


def cast(model, mesh) -> None:
    """Buffers are then other tensors."""
    model.float().double()


def sharded(model, mesh) -> None:
    """Parameters are then put together for each call."""
    fully_shard(model, mesh=mesh["sequence"])


CHANGES = {"cast": cast, "sharded": sharded}


def changed(number: int, positions: str, change: str) -> torch.Tensor:
    """Logits of a model that was changed after it was parallelized."""
    mesh = lss.init_mesh(number, device="cpu")
    model = lss.parallelize(made(Decoder, positions), mesh)
    CHANGES[change](model, mesh)
    batch = lss.shard({"tokens": tokens()}, mesh)
    with torch.no_grad():
        return lss.unshard(model(**batch), batch["segment"], mesh)


@pytest.mark.parametrize(("positions", "change"), [("buffer", "cast"), ("parameter", "sharded"), ("view", "sharded")])
def test_tables_are_found_after_a_change_of_the_model(ranks, positions, change):
    for number in (2, 3):
        for found in ranks.run(changed, number, number, positions, change):
            assert_same(found, alone(positions)[1], "logits", 1e-12)


class Cached(Decoder):
    """Keeps angles for as many tokens as it has seen; `rows` from the start."""

    def __init__(self, rows: int) -> None:
        super().__init__("attribute")
        self.freqs_cis = angles_of_positions()[:rows]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if tokens.size(1) > len(self.freqs_cis):
            index = torch.arange(tokens.size(1))
            self.freqs_cis = torch.polar(
                torch.ones(len(index), 2), torch.outer(index, 100.0 ** -torch.tensor([0, 0.5]))
            )
        return super().forward(tokens)


def cached(number: int, rows: int, lengths: tuple[int, ...]) -> list[torch.Tensor] | str:
    mesh = lss.init_mesh(number, device="cpu")
    model = lss.parallelize(made(Cached, rows), mesh)
    batches = [lss.shard({"tokens": tokens(length)}, mesh) for length in lengths]
    try:
        return [lss.unshard(model(**batch), batch["segment"], mesh) for batch in batches]
    except LayoutError as error:
        return str(error)


@pytest.mark.parametrize(("rows", "lengths"), [(32, (16, 12, 13)), (0, (16, 16))])
def test_tables_that_code_makes_longer(ranks, rows, lengths):
    """Longer ones are made in the trial alone; or one for each segment, in the same way in every call."""
    model = made(Cached, 32)
    for found in ranks.run(cached, 2, 2, rows, lengths):
        for logits, length in zip(found, lengths, strict=True):
            assert_same(logits, model(tokens(length)).detach(), "logits", 1e-12)


@pytest.mark.parametrize(("rows", "lengths"), [(8, (12,)), (0, (16, 12))])
def test_rows_of_a_segment_are_no_table_of_another(ranks, rows, lengths):
    for said in ranks.run(cached, 2, 2, rows, lengths):
        assert "positions up to 11, and a table (8, 2)[0:6] in the model" in said
