"""Batches as people have them, drawn at random; the serial reference runs the plain model on each document alone."""

from dataclasses import dataclass, field
from itertools import pairwise

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

import lss
from lss.models import GPT
from tests.models import tiny_gpt
from tests.ranks.test_parity import whole_gradients

TABLE, VOCABULARY = 24, 17


@dataclass(frozen=True)
class MicroBatch:
    """Whole sequences: documents of each, how they are told, and labels that are ignored."""

    length: int
    documents: tuple[tuple[int, ...], ...]  # lengths, from the first slot on; for left padding, from the last
    told_by: str  # "nothing", "lengths", "position_ids", "attention_mask" (right or left)
    ignored: tuple[int, ...]
    seed: int

    def tensors(self) -> dict[str, Tensor]:
        """Tokens, and labels equal to them."""
        generator = torch.Generator().manual_seed(self.seed)
        tokens = torch.randint(VOCABULARY, (len(self.documents), self.length), generator=generator)
        labels = tokens.clone()
        labels.view(-1)[[index % labels.numel() for index in self.ignored]] = -100
        return {"tokens": tokens, "labels": labels}

    def spans(self) -> list[list[tuple[int, int]]]:
        """Slots of each document."""
        found = []
        for lengths in self.documents:
            first = self.length - sum(lengths) if self.told_by == "left" else 0
            edges = [first + sum(lengths[:index]) for index in range(len(lengths) + 1)]
            found.append(list(pairwise(edges)))
        return found


@dataclass(frozen=True)
class Case:
    """A step of accumulated micro-batches over ranks."""

    sequence: int
    data: int
    gather: str
    positions: str
    key_value_heads: int
    is_causal: bool
    offset: int
    shifted_by: str  # "lss" or "user"
    layout: str
    keep: bool
    chunks: int
    groups: tuple[tuple[MicroBatch, ...], ...] = field(default=())  # micro-batches of each data group

    def model(self) -> GPT:
        """The plain model."""
        model = tiny_gpt(TABLE, positions=self.positions, key_value_heads=self.key_value_heads)
        for block in model.blocks:
            block.attention.is_causal = self.is_causal
        return model


@st.composite
def micro_batches(draw: st.DrawFn) -> MicroBatch:
    length = draw(st.integers(1, TABLE))
    told_by = draw(st.sampled_from(["nothing", "lengths", "position_ids", "right", "left"]))
    documents = []
    for _ in range(draw(st.integers(1, 2))):
        if told_by == "nothing":
            documents.append((length,))
        elif told_by in ("left", "right"):
            real = draw(st.integers(0, length))
            documents.append((real,) if real else ())
        else:
            cuts = sorted(draw(st.sets(st.integers(1, max(1, length - 1)), max_size=4)) - {length})
            edges = [0, *cuts, length]
            lengths = [stop - start for start, stop in pairwise(edges)]
            documents.append(tuple(lengths[:-1] if told_by == "lengths" and draw(st.booleans()) else lengths))
    ignored = draw(st.lists(st.integers(0, 2 * TABLE), max_size=draw(st.sampled_from([0, 3, 60]))))
    return MicroBatch(length, tuple(documents), told_by, tuple(ignored), draw(st.integers(0, 2**20)))


@st.composite
def cases(draw: st.DrawFn, number: int) -> list[Case]:
    """Cases of one pair of degrees, so that one process group serves them all."""
    sequence, data = draw(st.sampled_from([(1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (2, 2)]))
    return [draw(_cases(sequence, data)) for _ in range(number)]


@st.composite
def _cases(draw: st.DrawFn, sequence: int, data: int) -> Case:
    parts = draw(st.integers(1, 3))
    return Case(
        sequence,
        data,
        draw(st.sampled_from(["x", "kv", "separate"])),
        draw(st.sampled_from(["learned", "rotary"])),
        draw(st.sampled_from([1, 2, 4])),
        draw(st.booleans()),
        draw(st.sampled_from([1, 1, 2])),
        draw(st.sampled_from(["lss", "user"])),
        draw(st.sampled_from(["contiguous", "zigzag", "balanced"])),
        draw(st.booleans()),
        draw(st.sampled_from([1, 1, 2, 3])),
        tuple(tuple(draw(micro_batches()) for _ in range(parts)) for _ in range(data)),
    )


def serial(case: Case) -> tuple[float, dict[str, Tensor], int]:
    """Mean loss, gradients and count: every document goes through the plain model by itself."""
    model = case.model()
    total, count = torch.zeros((), dtype=torch.float64), 0
    for micro_batch in (part for group in case.groups for part in group):
        given = micro_batch.tensors()
        for row, spans in enumerate(micro_batch.spans()):
            for start, stop in spans:
                tokens, labels = given["tokens"][row, start:stop], given["labels"][row, start:stop]
                logits = model(tokens[None])[0]
                if stop - start > case.offset:
                    wanted = labels[case.offset :]
                    total = total + F.cross_entropy(logits[: -case.offset], wanted, ignore_index=-100, reduction="sum")
                    count += int((wanted >= 0).sum())
    loss = total / max(count, 1)
    if loss.requires_grad:
        loss.backward()
    gradients = {name: torch.zeros_like(w) if w.grad is None else w.grad for name, w in model.named_parameters()}
    return loss.item(), gradients, count


def distributed(chosen: list[Case]) -> list[tuple[float, dict[str, Tensor], int]]:
    """The same over ranks, case by case."""
    mesh = lss.init_mesh(chosen[0].sequence, chosen[0].data, device="cpu")
    return [_distributed(case, mesh) for case in chosen]


def _distributed(case: Case, mesh: DeviceMesh) -> tuple[float, dict[str, Tensor], int]:
    options = {"gather": case.gather, "keep": case.keep, "chunks": case.chunks, "layout": case.layout}
    model = lss.parallelize(case.model(), mesh, **options)
    context = lss.context_of(model)
    parts = [_sharded(case, micro_batch, mesh) for micro_batch in case.groups[context.data.rank]]
    count = lss.count_tokens(model, *(part["labels"] for part in parts))
    total = torch.zeros((), dtype=torch.float64)
    for part in parts:
        loss = lss.token_mean_cross_entropy(model(part["tokens"], segment=part["segment"]), part["labels"], count)
        loss.backward()
        total += loss.detach()
    lss.average_gradients(model)
    return context.sum_over_ranks(total).item(), whole_gradients(model), int(count)


def _sharded(case: Case, micro_batch: MicroBatch, mesh: DeviceMesh) -> dict:
    batch, spans = micro_batch.tensors(), micro_batch.spans()
    shape = batch["tokens"].shape
    offset = case.offset
    if case.shifted_by == "user":
        wanted = torch.full(shape, -100)
        for row, edges in enumerate(spans):
            for start, stop in edges:
                wanted[row, start : max(start, stop - offset)] = batch["labels"][row, min(stop, start + offset) : stop]
        batch["labels"], offset = wanted, 0
    if micro_batch.told_by in ("left", "right"):
        batch["attention_mask"] = torch.zeros(shape, dtype=torch.int64)
        for row, edges in enumerate(spans):
            for start, stop in edges:
                batch["attention_mask"][row, start:stop] = 1
    if micro_batch.told_by == "position_ids":
        rows = [torch.cat([torch.arange(stop - start) for start, stop in edges]) for edges in spans]
        batch["position_ids"] = torch.stack(rows)
    lengths = micro_batch.documents if micro_batch.told_by == "lengths" else None
    return lss.shard(batch, mesh, shift_labels=offset, documents=lengths, layout=case.layout)
