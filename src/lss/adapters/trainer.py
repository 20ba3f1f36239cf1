"""The Trainer of transformers for a parallelized model: each rank runs it as if it were the only process.

What makes one training of all ranks lies below it: the model is given this rank's segment of the batch, and its loss is
that of the whole batch; gradients are summed over ranks before they are used; predictions are put together.
"""

from __future__ import annotations

from copy import copy
from typing import Any, cast

import torch
import transformers
from accelerate import PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, find_batch_size, recursively_apply
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.trainer_utils import has_length

from lss.adapters.transformers import is_pretrained, shifts_labels
from lss.batch import IGNORE_INDEX, shard, unshard
from lss.collectives import Axis
from lss.context import SequenceContext, context_of
from lss.errors import ConfigError, LayoutError, ModelError
from lss.gradients import average_gradients
from lss.ledger import Ledger
from lss.mesh import DATA

# Arguments that cannot be honoured, and why.
_REFUSED = {
    "deepspeed": "the ranks of the mesh hold all parameters",
    "fsdp": "the ranks of the mesh hold all parameters",
    "parallelism_config": "the mesh says what the ranks do",
    "label_smoothing_factor": "the loss is the model's own",
    "use_liger_kernel": "the loss is the model's own",
    "neftune_noise_alpha": "its noise knows no position",
    "torch_compile": "the model is called with segments of many lengths",
    "auto_find_batch_size": "a rank that is out of memory cannot tell the others",
    "use_cache": "a rank has the keys of its own segment only",
}
# Optimizers that step while gradients are still being computed.
_STEPPING = ("lomo", "adalomo")


class Trainer(transformers.Trainer):
    """`transformers.Trainer` for a model of `lss.parallelize`.

    Logged losses, gradient norms, metrics, predictions and weights are those of `transformers.Trainer` in one process
    with the batch of all data groups: M * `per_device_train_batch_size` sequences, which are padded together, of which
    each group computes as many. No sequence is taken twice, and a last batch may be smaller. Datasets and collators
    must give the same on every rank, as the Trainer's seed has them do; a dataset is not split by rank before.

    Predictions [samples, L, V] are put together on every rank, of real tokens: what is predicted at padding is not that
    of one process. Rank 0 writes logs and checkpoints, from which any number of ranks may resume.

    Args:
        model: Of `lss.parallelize`, one of transformers; or else `model_init`, which returns such a one.
        args: As they are; batch sizes are those of one data group.
        others: Further arguments of `transformers.Trainer`.
        mesh: The mesh that the model was parallelized over; None for one rank alone.
        named: Further arguments of `transformers.Trainer`.

    Raises:
        ConfigError: An argument cannot be honoured.
        ModelError: The model was not parallelized, or is not one of transformers.
        LayoutError: Ranks read different batches.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        args: transformers.TrainingArguments | None = None,
        *others: Any,
        mesh: DeviceMesh | None,
        **named: Any,
    ) -> None:
        args = args or transformers.TrainingArguments("tmp_trainer")
        _refuse(args, mesh)
        if model is not None:
            _parallelized(model)
        self.mesh = mesh
        super().__init__(model, _alone(args, mesh), *others, **named)
        self._require_alone()
        if self.compute_loss_func is not None:
            raise ConfigError("compute_loss_func", allowed="the model's own loss, which is taken of all ranks' tokens")

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward of whole sequences; gradients are completed after the last one before a step."""
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        if self.accelerator.sync_gradients:
            average_gradients(model)
        return loss

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """The loss of whole sequences, of which the model is given this rank's segment."""
        return super().compute_loss(model, self._cut(inputs), *args, **kwargs)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Any, Any, Any]:
        """Loss, outputs and labels of whole sequences; outputs are put together only where they are asked for."""

        def called(**batch: Any) -> Any:
            return model(**self._cut(batch))

        loss, outputs, labels = super().prediction_step(
            cast(nn.Module, called), inputs, prediction_loss_only, ignore_keys
        )
        segment, number = self._context.last, find_batch_size(inputs)

        def whole(part: Tensor) -> Tensor:
            return unshard(part, segment, self.mesh, data_groups=True)[:number]

        return loss, recursively_apply(whole, outputs), labels

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the plain model by rank 0; no rank goes on before it is there. A collective call."""
        super().save_model(output_dir, _internal_call)
        self._context.sum_over_ranks(torch.zeros((), device=self.args.device))

    def is_world_process_zero(self) -> bool:
        """Whether this is rank 0 of all."""
        return bool(self.is_local_process_zero())

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: ranks would try different parameters."""
        raise ConfigError("a hyperparameter search", allowed="one set of hyperparameters on all ranks")

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save:
            super()._save_rng_state(output_dir)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Dropout is keyed by the number of batches trained on, and by nothing that torch would have to remember."""
        super()._load_rng_state(checkpoint)
        loader = self.callback_handler.train_dataloader
        in_epoch = len(loader) if has_length(loader) else self.state.max_steps * self.args.gradient_accumulation_steps
        self._context.num_trained = round((self.state.epoch or 0) * in_epoch)

    @property
    def _context(self) -> SequenceContext:
        return context_of(_parallelized(self.model))

    def _require_alone(self) -> None:
        """Raise ConfigError if accelerate, whose state is the process's, would have a part in what ranks do."""
        kind, number = self.accelerator.distributed_type, self.accelerator.num_processes
        if (kind, number) != (DistributedType.NO, 1):
            raise ConfigError(
                f"accelerate is set to {kind} over {number} processes",
                allowed="accelerate in each rank by itself, which this Trainer sees to",
                remedy="launch without plugins of accelerate, and make no TrainingArguments and no other Trainer later",
            )

    def _cut(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The sequences of all data groups, [B, L, ...], to this rank's segment of those of its own group."""
        if "segment" in inputs:
            return inputs
        self._require_alone()
        cut_in_layers = self._context.cut == "layers"  # of which a tensor may be one value a sequence
        batch = {
            name: part for name, part in inputs.items() if isinstance(part, Tensor) and part.dim() > 1 - cut_in_layers
        }
        context = self._context
        if context.num_calls == 0:
            _require_one_batch(batch, context.gather_from_ranks(_sums(batch)))
        own = {name: _of_group(name, tensor, context.data) for name, tensor in batch.items()}
        cut = shard(
            own, self.mesh, shift_labels=None if cut_in_layers else int(shifts_labels(self.model)), cut=context.cut
        )
        return {name: value for name, value in inputs.items() if name not in batch} | cut


def _parallelized(model: nn.Module | None) -> nn.Module:
    """The model, unless it cannot be trained here."""
    if model is None or not is_pretrained(model):
        raise ModelError(f"a {type(model).__name__}", allowed="models of transformers, which work out their loss")
    context_of(model)
    return model


def _refuse(args: transformers.TrainingArguments, mesh: DeviceMesh | None) -> None:
    """Raise ConfigError for what would have no effect or a wrong one."""
    for name, reason in _REFUSED.items():
        if value := getattr(args, name, None):
            raise ConfigError(f"{name}={value!r}", allowed=f"none with a parallelized model: {reason}")
    if args.optim in _STEPPING or "layerwise" in args.optim:
        raise ConfigError("optim=" + args.optim, allowed="optimizers that step after the gradients are averaged")
    if args.n_gpu > 1:
        raise ConfigError(
            f"{args.n_gpu} GPUs in one process", allowed="one GPU a rank", remedy="start the ranks by torchrun"
        )
    if mesh is not None and args.device.type != mesh.device_type:
        raise ConfigError(
            f"a mesh of {mesh.device_type} and arguments for {args.device.type}",
            allowed="one kind of device",
            remedy="TrainingArguments(use_cpu=True) with lss.init_mesh(device='cpu'), or a GPU for both",
        )


def _alone(args: transformers.TrainingArguments, mesh: DeviceMesh | None) -> transformers.TrainingArguments:
    """The arguments of a process that knows no other, with the batches of all data groups; accelerate is told the same.

    Only who writes is settled by rank: Trainer asks for the local index, which is that of all ranks here.
    """
    AcceleratorState._reset_state()
    state = PartialState()
    state.distributed_type, state.num_processes, state.process_index = DistributedType.NO, 1, 0
    state.local_process_index = 0 if mesh is None else mesh.get_rank()
    alone = copy(args)
    alone.save_on_each_node = alone.log_on_each_node = True
    groups = Axis.of(mesh, DATA, Ledger()).size
    alone.per_device_train_batch_size *= groups
    alone.per_device_eval_batch_size *= groups
    return alone


def _sums(batch: dict[str, Tensor]) -> Tensor:
    return torch.stack([tensor.double().sum() for tensor in batch.values()])


def _require_one_batch(batch: dict[str, Tensor], sums: Tensor) -> None:
    """Raise LayoutError unless all ranks read the same sequences, of which each data group takes its own."""
    if (sums != sums[0]).any():
        raise LayoutError(
            f"ranks read batches with different {', '.join(batch)}",
            allowed="the same sequences in the same order on every rank; the Trainer gives each data group its own",
            remedy="do not split the dataset by rank, and take one seed for all",
        )


def _of_group(name: str, tensor: Tensor, data: Axis) -> Tensor:
    """A data group's share of a batch, [B, ...] to [ceil(B / M), ...]; what is missing repeats the last, unlabelled."""
    number = -(-len(tensor) // data.size)
    index = torch.arange(data.rank * number, (data.rank + 1) * number, device=tensor.device)
    own = tensor[index.clamp(max=len(tensor) - 1)]
    if name == "labels":
        own[index >= len(tensor)] = IGNORE_INDEX
    return own
