"""What users wrap around a parallelized model, or under it, against the same around the plain model alone."""

from contextlib import nullcontext
from functools import partial

import peft
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import lss
from lss.errors import LssError
from lss.verification.precision import computing_in
from tests import pretrained
from tests.tools import assert_equal, make, over, plainly

# peft asks it of the model
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

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
    for sequence, data in ((2, 1), (2, 2)):
        for found in ranks.run(lora_over, sequence * data, sequence, data, name, checkpointing, gather, options):
            assert_equal(found, expected)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", TARGETS)
def test_dropout_of_lora_is_the_same_over_any_ranks(ranks, name, checkpointing):
    (expected,) = ranks.run(lora_over, 1, 1, 1, name, False, "kv", {"lora_dropout": 0.1})
    plain = plainly(adapted(name), name, "AdamW")
    assert expected["told"]["loss 0.0"].item() != pytest.approx(plain["told"]["loss 0.0"].item(), rel=1e-6)
    for found in ranks.run(lora_over, 2, 2, 1, name, checkpointing, "kv", {"lora_dropout": 0.1}):
        assert_equal(found, expected)


def afterwards(mesh, call: bool, **options: object):
    plain = lss.parallelize(make("Llama"), mesh)
    model = peft.get_peft_model(plain, peft.LoraConfig(r=3, target_modules=TARGETS["Llama"], **options))
    if call:
        model(**lss.shard(pretrained.batch(), mesh, shift_labels=1))
    lss.average_gradients(plain)


def with_adapter(mesh, **options: object):
    return lss.parallelize(adapted("Llama", **options), mesh)


def of_another_kind(mesh, config: peft.PeftConfig):
    return lss.parallelize(peft.get_peft_model(make("Llama"), config), mesh)


_PROMPT = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
MISTAKES = {
    "add adapters and resize embeddings before lss.parallelize": lambda mesh: afterwards(mesh, True),
    "the model has 33 parameters": lambda mesh: afterwards(mesh, False, lora_dropout=0.1),
    "a PeftModel that was not parallelized": lambda mesh: lss.average_gradients(
        peft.get_peft_model(lss.parallelize(make("Llama"), mesh), peft.LoraConfig(target_modules=TARGETS["Llama"]))
    ),
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
