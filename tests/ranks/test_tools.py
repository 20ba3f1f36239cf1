"""What users wrap around a parallelized model, or under it, against the same around the plain model alone."""

from contextlib import nullcontext
from functools import partial
from itertools import count

import peft
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import lss
from lss.errors import LssError
from lss.verification.precision import computing_in
from tests import pretrained
from tests.tools import MICRO_BATCHES, assert_equal, make, micro_batch, over, plainly

TARGETS = {
    "GPT": ["query", "value", "feed_forward.0"],
    "GPT-2": ["c_attn", "c_fc"],
    "Llama": ["q_proj", "v_proj", "down_proj"],
}


def adapted(name: str, checkpointing: bool = False, seed: int = 0, **options: object) -> peft.PeftModel:
    """The model with LoRA, whose weights are random and not zero."""
    model = make(name)
    if checkpointing and name == "GPT":
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    torch.manual_seed(seed)
    config = peft.LoraConfig(
        r=3, target_modules=TARGETS[name], init_lora_weights=False, fan_in_fan_out=name == "GPT-2", **options
    )
    model = peft.get_peft_model(model, config)
    if checkpointing and name != "GPT":
        model.activation_checkpointing_enable({"use_reentrant": False, "context_fn": in_float64})
    return model


def in_float64():
    """Contexts of a forward, which has one already, and of its recomputation, to which that does not reach."""
    return nullcontext(), computing_in(torch.float64)


def lora_over(sequence: int, data: int, name: str, checkpointing: bool, gather: str, options: dict):
    mesh = lss.init_mesh(sequence, data, device="cpu")
    model = adapted(name, checkpointing, seed=mesh.get_rank(), **options)  # the adapters of rank 0 are taken
    return over(mesh, lss.parallelize(model, mesh, gather=gather), name, "AdamW")


@pytest.mark.supports("{name}", "LoRA")
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("name", "gather", "options"),
    [
        ("GPT", "x", {}),
        ("GPT", "kv", {}),
        ("GPT-2", "auto", {}),
        ("Llama", "auto", {"use_dora": True, "modules_to_save": ["lm_head"]}),
        ("Llama", "auto", {"task_type": "CAUSAL_LM"}),
    ],
)
def test_lora(ranks, name, gather, options, checkpointing):
    model = adapted(name, checkpointing, **options)
    expected = plainly(model, name, "AdamW")
    trained = {weight for weight, parameter in model.named_parameters() if parameter.requires_grad}
    assert expected["gradients"].keys() == trained
    assert any("lora_" in weight for weight in trained)
    for found in ranks.run(lora_over, 4, 2, 2, name, checkpointing, gather, options):
        assert_equal(found, expected)


@pytest.mark.supports("{name}", "LoRA")
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", TARGETS)
def test_dropout_of_lora_is_the_same_over_any_ranks(ranks, name, checkpointing):
    (expected,) = ranks.run(lora_over, 1, 1, 1, name, False, "kv", {"lora_dropout": 0.1})
    plain = plainly(adapted(name), name, "AdamW")
    assert expected["told"]["loss 0.0"].item() != pytest.approx(plain["told"]["loss 0.0"].item(), rel=1e-6)
    for found in ranks.run(lora_over, 2, 2, 1, name, checkpointing, "kv", {"lora_dropout": 0.1}):
        assert_equal(found, expected)


def fully_shard_all(model, mesh=None, **options: object) -> None:
    """Blocks and root, as in torch's tutorial, the positional tables apart."""
    blocks = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    tables = set(lss.positional_tables(model))
    for part in (*blocks, model):
        fully_shard(part, mesh=mesh, ignored_params=tables, **options)


def fully_sharded_over(sequence: int, data: int, name: str, gather: str, optimizer: str, by: str):
    mesh = lss.init_mesh(sequence, data, device="cpu")
    model = lss.parallelize(make(name), mesh, gather=gather, keep=by != "gathered again")
    fully_shard_all(model, mesh if by == "groups" else None)
    held = sum(weight.to_local().numel() for weight in model.parameters() if isinstance(weight, DTensor))
    whole = sum(weight.numel() for weight in model.parameters() if isinstance(weight, DTensor))
    assert held / whole == pytest.approx(1 / sequence if by == "groups" else 1 / (sequence * data), rel=0.2)
    found = over(mesh, model, name, optimizer)
    assert lss.gradients.replicas_that_differ(model) == []
    whole = lss.full_state_dict(model)
    lss.load_full_state_dict(model, {name: 2 * tensor for name, tensor in whole.items()})
    for name, tensor in lss.full_state_dict(model).items():
        assert torch.equal(tensor, 2 * whole[name])
    return found


@pytest.mark.supports("{name}", "fully_shard")
@pytest.mark.parametrize(("sequence", "data", "by"), [(2, 2, "all"), (2, 2, "groups"), (2, 1, "gathered again")])
@pytest.mark.parametrize(
    ("name", "gather", "optimizer"),
    [("GPT", "x", "AdamW"), ("GPT", "kv", "SGD"), ("GPT-2", "auto", "SGD"), ("Llama", "auto", "AdamW")],
)
def test_fully_shard(ranks, name, gather, optimizer, sequence, data, by):
    expected = plainly(make(name), name, optimizer)
    for found in ranks.run(fully_sharded_over, sequence * data, sequence, data, name, gather, optimizer, by):
        assert_equal(found, expected)


def accumulating_over(sequence: int, data: int, name: str):
    """Gradients of the first micro-batch stay on their ranks; an evaluation comes before each call in training."""
    mesh = lss.init_mesh(sequence, data, device="cpu")
    model = lss.parallelize(adapted(name, True), mesh, gather="x")
    fully_shard_all(model)
    calls = count()

    def call(*args, **batch):
        with torch.no_grad():
            model.eval()(*args, **batch)
        model.train().set_requires_gradient_sync(next(calls) % MICRO_BATCHES == MICRO_BATCHES - 1)
        return model(*args, **batch)

    return over(mesh, model, name, "AdamW", call)


@pytest.mark.supports("{name}", "fully_shard")
@pytest.mark.parametrize("name", ["GPT", "Llama"])
def test_fully_shard_with_adapters_checkpoints_and_accumulation(ranks, name):
    expected = plainly(adapted(name), name, "AdamW")
    for found in ranks.run(accumulating_over, 4, 2, 2, name):
        assert_equal(found, expected)


def in_float32(num_ranks: int) -> float:
    mesh = lss.init_mesh(num_ranks, device="cpu")
    model = lss.parallelize(make("Llama").float(), mesh)
    if num_ranks > 1:
        fully_shard_all(model)
    model(**lss.shard(pretrained.batch(), mesh, shift_labels=1)).loss.backward()
    lss.average_gradients(model)
    return lss.gradient_norm(model).item()


def test_fully_shard_sums_in_float32_too(ranks):
    (expected,) = ranks.run(in_float32, 1, 1)
    assert ranks.run(in_float32, 2, 2) == pytest.approx([expected] * 2, rel=1e-5)


def sharded(mesh, over=None, sync: bool = True):
    model = lss.parallelize(make("Llama"), mesh)
    fully_shard(model, mesh=over).set_requires_gradient_sync(sync)
    model(**lss.shard(micro_batch("Llama", 0), mesh, shift_labels=1)).loss.backward()
    lss.average_gradients(model)


def under_ddp(sequence: int, data: int, name: str, form: str, static: bool):
    """By `form`: whether the first micro-batch is left to its ranks, and over which ranks gradients are averaged."""
    mesh = lss.init_mesh(sequence, data, device="cpu")
    model = lss.parallelize(make(name), mesh)
    group = mesh.get_group("sequence") if form == "groups" else None
    wrapped = DistributedDataParallel(model, static_graph=static, process_group=group)
    calls = count()

    def call(*args, **batch):
        wrapped.require_backward_grad_sync = form != "no_sync" or next(calls) % MICRO_BATCHES == MICRO_BATCHES - 1
        return wrapped(*args, **batch)

    return over(mesh, model, name, "SGD" if name == "GPT-2" else "AdamW", call)


@pytest.mark.supports("{name}", "DDP")
@pytest.mark.parametrize(("form", "static"), [("all", True), ("groups", True), ("no_sync", False)])
@pytest.mark.parametrize("name", ["GPT", "GPT-2", "Llama"])
def test_distributed_data_parallel(ranks, name, form, static):
    expected = plainly(make(name), name, "SGD" if name == "GPT-2" else "AdamW")
    for sequence, data in ((2, 1), (2, 2)):
        for found in ranks.run(under_ddp, sequence * data, sequence, data, name, form, static):
            assert_equal(found, expected)


def compiled_over(num_ranks: int, name: str, what: str):
    mesh = lss.init_mesh(num_ranks, device="cpu")
    model = lss.parallelize(make(name), mesh)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    call = torch.compile(model, backend="aot_eager").__call__ if what == "torch.compile" else None
    blocks = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    for part in {"layers": blocks, "in place": [model]}.get(what, []):
        part.compile(backend="aot_eager")
    found = over(mesh, model, name, "SGD", call, widened=False)
    ends = [reason for reason in torch._dynamo.utils.counters["graph_break"] if "logging.Logger" not in reason]
    return found, {reason.partition("the function `")[2].partition("`")[0] or reason for reason in ends}


@pytest.mark.supports("{name}", "torch.compile")
@pytest.mark.parametrize(("name", "what"), [("GPT-2", "layers"), ("Llama", "torch.compile")])
def test_compiled(ranks, name, what):
    expected = plainly(make(name), name, "SGD", widened=False)
    (eager, _), _ = ranks.run(compiled_over, 2, 2, name, "eager")
    for found, ends in ranks.run(compiled_over, 2, 2, name, what):
        assert_equal(found, expected, 1e-5)  # norms and losses are in float32
        assert_equal(found, eager)
        assert ends - {"Locality.require"} == {"attention"} | ({"Functions.taken"} if what != "layers" else set())


def before(mesh, wrap):
    return lss.parallelize(wrap(make("Llama")), mesh)


def flattened(mesh, use_orig_params: bool):
    model = lss.parallelize(make("Llama"), mesh)
    FullyShardedDataParallel(model, use_orig_params=use_orig_params, device_id=torch.device("cpu"))(
        **lss.shard(micro_batch("Llama", 0), mesh, shift_labels=1)
    ).loss.backward()
    lss.average_gradients(model)


def afterwards(mesh, call: bool, **options: object):
    plain = lss.parallelize(make("Llama"), mesh)
    model = peft.get_peft_model(plain, peft.LoraConfig(r=3, target_modules=TARGETS["Llama"], **options))
    if call:
        model(**lss.shard(pretrained.batch(), mesh, shift_labels=1))
    lss.average_gradients(plain)


def with_adapter(mesh, **options: object):
    return lss.parallelize(adapted("Llama", **options), mesh)


def dropping_in_projections(mesh):
    model = lss.parallelize(adapted("GPT", lora_dropout=0.1), mesh, gather="x")
    over(mesh, model, "GPT", "SGD")


def of_another_kind(mesh, config: peft.PeftConfig):
    return lss.parallelize(peft.get_peft_model(make("Llama"), config), mesh)


_PROMPT = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
MISTAKES = {
    "fully_shard of positions": lambda mesh: fully_shard(lss.parallelize(make("GPT"), mesh)),
    "parameters that are cut over the ranks": lambda mesh: sharded(mesh, over=mesh["data"]),
    "gradients that fully_shard was told not to sum": lambda mesh: sharded(mesh, sync=False),
    "the model has 1 parameters": lambda mesh: flattened(mesh, False),
    "of torch's wrappers take fully_shard": lambda mesh: flattened(mesh, True),
    "a model under DistributedDataParallel": lambda mesh: before(mesh, DistributedDataParallel),
    "a model under fully_shard": lambda mesh: before(mesh, fully_shard),
    "add adapters and resize embeddings before lss.parallelize": lambda mesh: afterwards(mesh, True),
    "the model has 33 parameters": lambda mesh: afterwards(mesh, False, lora_dropout=0.1),
    "a PeftModel that was not parallelized": lambda mesh: lss.average_gradients(
        peft.get_peft_model(lss.parallelize(make("Llama"), mesh), peft.LoraConfig(target_modules=TARGETS["Llama"]))
    ),
    "lora_dropout.default was given": dropping_in_projections,
    "LoRA with a ALoraLinearVariant": lambda mesh: with_adapter(
        mesh, task_type="CAUSAL_LM", alora_invocation_tokens=[5]
    ),
    "of the kind PROMPT_TUNING": lambda mesh: of_another_kind(mesh, peft.PromptTuningConfig(**_PROMPT)),
    "of the kind PREFIX_TUNING": lambda mesh: of_another_kind(mesh, peft.PrefixTuningConfig(**_PROMPT)),
    "of the kind ADALORA": lambda mesh: of_another_kind(
        mesh, peft.AdaLoraConfig(total_step=9, target_modules=TARGETS["Llama"])
    ),
}


def over_two(message: str) -> str:
    mesh = lss.init_mesh(2, device="cpu")
    with pytest.raises(LssError) as raised:
        MISTAKES[message](mesh)
    return str(raised.value)


@pytest.mark.parametrize("message", MISTAKES)
def test_what_would_be_wrong_is_refused(ranks, message):
    for said in ranks.run(over_two, 2, message):
        assert message in said
