"""The comparison of the serial run with the run over ranks."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lss.adapters import transformers
from lss.batch import Cut, shard
from lss.collectives import agree, agree_equal
from lss.config import AttentionConfig
from lss.context import SequenceContext
from lss.errors import LayoutError, LssError, ModelError
from lss.refusals import default_cut, refusals
from lss.strategies import StrategyName
from lss.verification.checks import bound_of, compare, compare_gradients, compare_losses, sanity, worst_of_ranks
from lss.verification.compare import Check, Report, report
from lss.verification.precision import computing_in
from lss.verification.reference import with_serial_dropout
from lss.verification.runs import CLIP_SHARE, FIRST_STEP, Run, evaluate_over_ranks, run_over_ranks, run_plainly
from lss.verification.setting import LossSum, Setting, without_dropout
from lss.verification.trace import first_differences


def verify(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    mesh: DeviceMesh,
    *,
    attention: AttentionConfig | None = None,
    steps: int = 2,
    loss_sum: LossSum | None = None,
    documents: Sequence[Sequence[int]] | None = None,
    shift_labels: int = 0,
    cut: Cut | None = None,
    strategy: StrategyName = "lss",
    title: str = "",
    progress: Callable[[str], None] = lambda stage: None,
) -> Report:
    """Compare a model over the ranks of `mesh` with the same model run serially. A collective call.

    Every rank runs the plain model on the whole batch by itself, then all run the parallelized one together. Compared
    are the loss of every step, outputs in training and in evaluation, each parameter's gradient, the gradient norm, and
    parameters and buffers after `steps` steps of SGD with clipping, all without dropout; then, if the model has
    dropout, loss and gradients with it: on the CPU against masks written out again for the plain model,
    elsewhere against one rank alone. If anything differs, both are run again to name the first module that does.

    All is computed in float64, also what the model itself casts to float32; in float32 if the model cannot be run so.
    Of packed or padded batches the plain model is given each document by itself.

    Args:
        model: A plain model, which is left as it is.
        batch: Whole sequences of all data groups: tensors [B, L, ...] under the names of the model's arguments, and
            integer `labels`; also `attention_mask` and `position_ids`, as `shard` takes them in.
        mesh: The mesh to run over.
        attention: How attention is computed, as `parallelize` takes it, and the layout that `shard` cuts by.
        steps: Steps of SGD.
        loss_sum: The loss of `logits`, or of the first output, and labels, as a sum over tokens. By default a model
            whose forward takes `labels` is given them, and its own loss is taken if it returns one, else cross-entropy.
        documents: Lengths of packed documents, as `shard` takes them.
        shift_labels: As `shard` takes it; by default labels are shifted already.
        cut: As `parallelize` takes it. In `layers`, and of an encoder and a decoder, the plain model is given the batch
            as it is: masks too, images, labels of sequences [B].
        strategy: `lss`, or a rival, as of `lss.strategies.parallelize_as`.
        title: The report's title.
        progress: Told what is being done.

    Returns:
        A report; `report.passed` says whether all checks hold. The same on every rank.

    Raises:
        LayoutError: The batch cannot be cut.
        ModelError: The plain model cannot be run on the batch, or not be parallelized.
    """
    if steps < 1:
        raise LayoutError(f"steps={steps}", allowed="at least 1")
    whole, attention = _in(torch.float64, batch, mesh), attention or AttentionConfig()
    cut = cut or default_cut(model)
    setting = Setting(whole, mesh, attention, loss_sum, documents, torch.float64, shift_labels, cut, strategy)
    _check(setting)
    agree(lambda: _refuse(model, cut))
    agree_equal("the model", _digest(model), "make it from one seed on every rank, or load one file")
    progress("serial run")
    serial, setting = agree(lambda: _run_serially(model, setting, steps))
    with computing_in(setting.dtype):
        plain = _plain(model, setting)
        bare, has_dropout = without_dropout(plain)
        bound = bound_of(plain, setting)
        progress("run over ranks")
        max_norm = CLIP_SHARE * serial.norm
        ranks, context = agree(lambda: run_over_ranks(copy.deepcopy(bare), setting, mesh, steps, max_norm))
        agree(lambda: _require_no_functions(context))
        ranks.evaluated = evaluate_over_ranks(copy.deepcopy(plain), setting)
        checks = compare(ranks, serial, setting, context, bound)
        checks += sanity(serial, ranks, setting, context)
        if has_dropout:
            progress("dropout on: serial run, then all ranks")
            checks += _compare_dropout(plain, setting, bound)
        checks = worst_of_ranks(checks, context, torch.device(mesh.device_type))
        names = ("", "", "")
        if not all(check.passed for check in checks):
            progress("both again, to find the first difference")
            names = first_differences(bare, setting, bound)
    title = title or setting.title(type(model).__name__)
    return report(title, checks, names, serial.outputs.left_out)


def _refuse(model: nn.Module, cut: Cut) -> None:
    """Raise what `parallelize` would, before the serial run."""
    for refusal in refusals(model, cut=cut):
        raise refusal


def _in(dtype: torch.dtype, batch: Mapping[str, Tensor], mesh: DeviceMesh) -> dict[str, Any]:
    """The batch on the mesh's device, floating tensors in `dtype`; what is no tensor is refused later, by name."""

    def moved(part: Any) -> Any:
        if not isinstance(part, Tensor):
            return part
        return part.to(mesh.device_type, _like(dtype, part))

    return {name: moved(part) for name, part in batch.items()}


def _require_no_functions(context: SequenceContext) -> None:
    """Raise ModelError if a function dropped values, which the plain model cannot be given the masks of."""
    if context.drops_by_function:
        raise ModelError(
            f"{context.drops_by_function} drops values at a rate that is no nn.Dropout's, and the plain model cannot "
            "be given the same masks",
            allowed="rates of 0 in a function or an nn.MultiheadAttention; it trains exactly all the same",
            remedy="set the rate to 0 in what is verified",
        )


def _check(setting: Setting) -> None:
    """Raise LayoutError where the batch cannot be cut, or the plain model cannot have its positions."""
    shift, documents = setting.shift_labels, setting.documents
    segment = shard(setting.batch, None, shift_labels=shift, documents=documents, cut=setting.cut)["segment"]
    if setting.is_as_given:
        return
    if "position_ids" in setting.batch and (segment.position_ids is not None or not setting.is_whole):
        given = setting.batch["position_ids"]
        first = [given[row, start].item() for row, pieces in enumerate(setting.pieces) for start, _ in pieces]
        if any(first):
            raise LayoutError(
                f"documents whose position_ids start from {max(first)}",
                allowed="documents from position 0 on: the plain model, which is compared, knows no other positions",
            )


def _plain(model: nn.Module, setting: Setting) -> nn.Module:
    plain = copy.deepcopy(model).to(setting.mesh.device_type)
    plain._apply(lambda part: part.to(_like(setting.dtype, part)))
    if transformers.is_pretrained(plain):
        cast(Any, plain).set_attn_implementation("eager")
    return plain.train()


def _like(dtype: torch.dtype, tensor: Tensor) -> torch.dtype:
    """`dtype` for floating tensors, its complex partner for complex ones, their own for others."""
    if tensor.is_complex():
        return dtype.to_complex()
    return dtype if tensor.is_floating_point() else tensor.dtype


def _digest(model: nn.Module) -> str:
    sums = [(name, tuple(part.shape), str(part.double().sum().item())) for name, part in _real_parts(model)]
    return hashlib.sha256(repr(sums).encode()).hexdigest()[:16]


def _real_parts(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, part in model.state_dict().items():
        yield name, torch.view_as_real(part) if part.is_complex() else part


def _run_serially(model: nn.Module, setting: Setting, steps: int) -> tuple[Run, Setting]:
    """The serial run in float64, or in float32 where the model refuses float64.

    Raises:
        ModelError: The plain model cannot be run on the batch in either: what went wrong is said in a line.
    """
    cause: Exception = RuntimeError()
    for dtype in (torch.float64, torch.float32):
        found = replace(setting, batch=_in(dtype, setting.batch, setting.mesh), dtype=dtype)
        try:
            with computing_in(dtype):
                plain = _plain(model, found)
                run = run_plainly(without_dropout(plain)[0], found, steps)
                with torch.no_grad():
                    run.evaluated = found.run_plainly(plain.eval())
        except LssError:
            raise
        except Exception as error:  # whatever the user's code raises
            cause = error
            continue
        return run, found
    raise ModelError(
        f"the plain model cannot be run on the batch: {type(cause).__name__}: {_first_line(cause)}",
        allowed="a model that returns outputs [B, L, ...] of the batch's tensors, given by name without attention_mask "
        "and position_ids, which lss.shard takes in, and labels only where its forward takes them; and a loss",
        remedy="take arguments that are taken in out of the model's forward, or give them defaults",
    ) from cause


def _compare_dropout(plain: nn.Module, setting: Setting, bound: float) -> list[Check]:
    """With dropout on: the plain model with the same masks, or one rank alone, against all."""
    if setting.mesh.device_type == "cpu":
        model = copy.deepcopy(plain)
        alone = run_plainly(model, setting, 1, math.inf, with_serial_dropout(model))
    else:
        alone, _ = run_over_ranks(copy.deepcopy(plain), setting, None, 1, math.inf, FIRST_STEP)
    mesh = setting.mesh
    ranks, _ = agree(lambda: run_over_ranks(copy.deepcopy(plain), setting, mesh, 1, math.inf, FIRST_STEP))
    return [
        *compare_losses(ranks, alone, bound, "loss, dropout"),
        *compare_gradients(ranks, alone, bound, "gradient, dropout"),
    ]


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]
