"""One call of attention, by any strategy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from lss.attention.attend import attend
from lss.attention.lightseq import attend_in_order, require_order
from lss.attention.schedule import Scene, Schedule, check, describe, prepare
from lss.attention.sources import KeyValue, Source
from lss.attention.stored import attend_stored
from lss.attention.ulysses import attend_by_heads
from lss.collectives import Axis

Tensors = tuple[Tensor, Tensor, Tensor]


def run(
    schedule: Schedule,
    scene: Scene,
    tensors: Tensors,
    axis: Axis,
    name: str,
    *,
    source: Source | None = None,
    sinks: Tensor | None = None,
    inputs: tuple[Tensor, ...] = (),
    tell: Callable[[str], object] | None = None,
) -> Tensor:
    """Attention of this rank's queries over the keys of all ranks: [B, H, S, D], in the dtype of the query.

    Args:
        schedule: What the user chose.
        scene: Who sees whom.
        tensors: Query [B, H, S, D], key and value [B, K, S, D], of this rank's segment.
        axis: The sequence axis.
        name: Of the layer, for messages and the ledger.
        source: What is gathered; None for keys and values.
        sinks: [H], a score a head that every query sees besides, without a value.
        inputs: What the source needs besides.
        tell: Told how it is computed, in a line; None for nobody.

    Raises:
        LssError: Tensors, mask and bias do not fit each other, or what was chosen cannot do it.
    """
    check(scene, tensors, name)
    query, key, value = tensors
    if schedule.strategy == "ulysses" and axis.size > 1:
        alone, serial = replace(axis, size=1, rank=0, group=None), replace(schedule, strategy="lss")
        tell_more = tell and (lambda choice: tell(f"by heads, {choice}"))

        def on_heads(tensors: Tensors, scene: Scene, sinks: Tensor | None) -> Tensor:
            return run(serial, scene, tensors, alone, name, sinks=sinks, tell=tell_more)

        return attend_by_heads(tensors, scene, sinks, axis, name, on_heads)
    if schedule.strategy == "lightseq" and axis.size > 1:
        require_order(scene, name)
    separate = schedule.gather == "separate" or key.size(-1) != value.size(-1)  # what is packed has one width
    call = prepare(schedule, scene, tensors, source or KeyValue(separate), axis, name)
    if tell:
        tell(describe(call))
    if call.is_stored:
        return attend_stored(query, key, value, call, sinks, inputs)
    if schedule.strategy == "lightseq":
        return attend_in_order(query, key, value, call, sinks)
    return attend(query, key, value, call, sinks, inputs)
