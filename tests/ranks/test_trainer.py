"""The Trainer of transformers over ranks, against the plain one in a single process."""

from functools import partial
from pathlib import Path

import numpy
import pytest
import torch
import transformers
from accelerate import Accelerator
from torch import Tensor

import lss
from lss.adapters.trainer import Trainer
from lss.errors import LssError
from lss.testing import RanksFailedError
from tests.models import assert_same, tiny_gpt
from tests.pretrained import make
from tests.training import documents, in_float64, launched, model, options, padded


def results(trainer: transformers.Trainer) -> dict[str, object]:
    """What a user sees of a training, evaluation and prediction."""
    with in_float64():
        trained = trainer.train().training_loss
        evaluated = trainer.evaluate()
        predicted = trainer.predict(documents(7, seed=3))
    return {
        "loss": trained,
        "history": trainer.state.log_history,
        "evaluated": evaluated,
        "predictions": predicted.predictions,
        "labels": predicted.label_ids,
        "weights": {name: weight.detach() for name, weight in trainer.model.named_parameters()},
    }


def plain(folder: str, changed: dict[str, object]) -> dict[str, object]:
    return results(transformers.Trainer(model(), **options(folder, **changed)))


def over_ranks(sequence: int, data: int, folder: str, changed: dict[str, object]) -> dict[str, object]:
    mesh = lss.init_mesh(sequence, data, device="cpu")
    return results(Trainer(lss.parallelize(model(), mesh), **options(folder, **changed), mesh=mesh))


def assert_equal(found: dict[str, object], expected: dict[str, object]) -> None:
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-9)
    assert len(found["history"]) == len(expected["history"])
    for said, wanted in zip(found["history"], expected["history"], strict=True):
        assert_same_numbers(said, wanted)
    assert_same_numbers(found["evaluated"], expected["evaluated"])
    assert (found["labels"] == expected["labels"]).all()
    real = expected["labels"] != -100
    assert found["predictions"].shape == expected["predictions"].shape == (*real.shape, 256)
    numpy.testing.assert_allclose(found["predictions"][real], expected["predictions"][real], rtol=1e-9, atol=1e-9)
    for name, weight in expected["weights"].items():
        assert_same(found["weights"][name], weight, name, 1e-9)


def assert_same_numbers(found: dict[str, float], expected: dict[str, float]) -> None:
    """All but speeds."""
    assert found.keys() == expected.keys()
    timed = [name for name in expected if name.endswith(("_time", "_runtime", "_per_second"))]
    for name in expected.keys() - timed:
        assert found[name] == pytest.approx(expected[name], rel=1e-9), name


CHANGES = {
    "AdamW": {"max_steps": 30},
    "SGD": {"optim": "sgd", "max_grad_norm": 0.1},
    "no clipping": {"max_grad_norm": 0.0},
    "checkpointing": {"activation_checkpointing": True},
    "by length": {"train_sampling_strategy": "group_by_length"},
    "counted": {"eval_accumulation_steps": 2, "include_num_input_tokens_seen": "all"},
}


@pytest.mark.supports("GPT-2", "Trainer")
@pytest.mark.parametrize("change", CHANGES)
def test_two_ranks_are_one_process(ranks, tmp_path, change):
    (expected,) = ranks.run(plain, 1, str(tmp_path), CHANGES[change])
    for found in ranks.run(over_ranks, 2, 2, 1, str(tmp_path), CHANGES[change]):
        assert_equal(found, expected)


def in_bf16(sequence: int, name: str, folder: str, bf16: bool = True) -> list[dict[str, float]]:
    """What is logged by a training of a float32 model under autocast; of the plain Trainer for no ranks."""
    made = (model() if name == "GPT-2" else make(name, vocab_size=256)).float()
    given = options(folder, bf16=bf16, learning_rate=1e-3)
    mesh = lss.init_mesh(sequence, device="cpu") if sequence else None
    kind = partial(Trainer, lss.parallelize(made, mesh), mesh=mesh) if sequence else partial(transformers.Trainer, made)
    trainer = kind(**given)
    trainer.train()
    assert trainer.predict(documents(7, seed=3)).predictions.dtype == numpy.float32  # as accelerate gives outputs
    return trainer.state.log_history


@pytest.mark.parametrize("name", ["GPT-2", "Llama"])
def test_mixed_precision_is_that_of_one_process(ranks, tmp_path, name):
    (expected,), (wide,) = (ranks.run(in_bf16, 1, 0, name, str(tmp_path), bf16) for bf16 in (True, False))
    for found in ranks.run(in_bf16, 2, 2, name, str(tmp_path)):
        for what, within in {"loss": 2e-4, "eval_loss": 2e-4, "grad_norm": 2e-3}.items():
            said, wanted, exact = ([row[what] for row in rows if what in row] for rows in (found, expected, wide))
            assert said == pytest.approx(wanted, rel=within)
            assert said != exact


HALF = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2}


@pytest.mark.supports("GPT-2", "Trainer")
@pytest.mark.parametrize(("sequence", "data"), [(2, 2), (1, 3)])
def test_data_groups_share_out_the_batch(ranks, tmp_path, sequence, data):
    """Some last batches have one sequence, fewer than there are groups."""
    whole = {"per_device_train_batch_size": 2 * data, "per_device_eval_batch_size": 2 * data}
    (expected,) = ranks.run(plain, 1, str(tmp_path), whole)
    for found in ranks.run(over_ranks, sequence * data, sequence, data, str(tmp_path), HALF):
        assert_equal(found, expected)


def under_torchrun(folder: str) -> tuple[int, dict[str, object]]:
    with launched():
        seen = transformers.TrainingArguments(output_dir=folder, use_cpu=True).world_size
        return seen, over_ranks(2, 2, folder, HALF)


def test_what_accelerate_is_told_by_a_launcher_changes_nothing(ranks, tmp_path):
    (expected,) = ranks.run(plain, 1, str(tmp_path), {})
    for seen, found in ranks.run(under_torchrun, 4, str(tmp_path)):
        assert seen == 4
        assert_equal(found, expected)


def dropping(sequence: int, data: int, folder: str, batch: int, resume: bool) -> dict[str, Tensor]:
    """Weights after training with dropout, perhaps in two parts."""
    mesh = lss.init_mesh(sequence, data, device="cpu")
    changed = {"per_device_train_batch_size": batch, "eval_strategy": "no"}
    if resume:
        changed |= {"save_strategy": "steps", "save_steps": 5}
    made = Trainer(lss.parallelize(dropped(), mesh), **options(folder, **changed), mesh=mesh)
    with in_float64():
        made.train()
        if resume:
            again = Trainer(lss.parallelize(dropped(), mesh), **options(folder, **changed), mesh=mesh)
            again.train(resume_from_checkpoint=f"{folder}/checkpoint-5")
            made = again
    return {name: weight.detach() for name, weight in made.model.named_parameters()}


def dropped() -> transformers.PreTrainedModel:
    return model(resid_pdrop=0.1, attn_pdrop=0.1, embd_pdrop=0.1)


@pytest.mark.supports("GPT-2", "Trainer")
@pytest.mark.parametrize(("sequence", "data", "resume"), [(2, 1, False), (2, 2, False), (2, 1, True)])
def test_dropout_is_the_same_over_any_ranks(ranks, tmp_path, sequence, data, resume):
    (expected,) = ranks.run(dropping, 1, 1, 1, str(tmp_path), 4, False)
    for found in ranks.run(dropping, sequence * data, sequence, data, str(tmp_path), 4 // data, resume):
        for name, weight in expected.items():
            assert_same(found[name], weight, name, 1e-9)


SAVING = {
    "save_strategy": "steps",
    "save_steps": 5,
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_loss",
    "greater_is_better": True,  # the best is the first one
    "learning_rate": 1e-3,
}


def resumed(folder: str, changed: dict[str, object]) -> dict[str, Tensor]:
    """Weights of the plain Trainer that goes on from a checkpoint, or does all of it."""
    trainer = transformers.Trainer(model(), **options(folder, **changed))
    with in_float64():
        trainer.train(resume_from_checkpoint=changed.get("resume_from_checkpoint"))
    return {name: weight.detach() for name, weight in trainer.model.named_parameters()}


def test_checkpoints_are_those_of_the_plain_trainer(ranks, tmp_path):
    folder = str(tmp_path / "ranks")
    for found in ranks.run(over_ranks, 2, 2, 1, folder, SAVING):
        best = transformers.GPT2LMHeadModel.from_pretrained(f"{folder}/checkpoint-5", dtype=torch.float64)
        for name, weight in best.named_parameters():
            assert torch.equal(found["weights"][name], weight), name
    assert {path.name for path in Path(folder).iterdir()} == {"checkpoint-5", "checkpoint-9"}
    assert "lss" not in Path(f"{folder}/checkpoint-5/config.json").read_text()
    kept = {"eval_strategy": "no", "learning_rate": 1e-3}
    (expected,) = ranks.run(resumed, 1, str(tmp_path / "plain"), kept)
    (found,) = ranks.run(resumed, 1, folder, kept | {"resume_from_checkpoint": f"{folder}/checkpoint-5"})
    for name, weight in expected.items():
        assert_same(found[name], weight, name, 1e-9)


def masked(sequence: int, folder: str) -> dict[str, object]:
    """A masked language model; labels are not shifted, and there are none to predict with. No ranks: the plain one."""
    given = options(folder, max_steps=3, eval_steps=3)
    given["train_dataset"], given["eval_dataset"] = (
        [{"input_ids": [token % 28 + 3 for token in piece["input_ids"]]} for piece in documents(number, number)]
        for number in (20, 5)
    )
    given["data_collator"] = lambda pieces: padded(pieces) | {"token_type_ids": padded(pieces)["attention_mask"]}
    mesh = lss.init_mesh(sequence, device="cpu") if sequence else None
    made = Trainer(lss.parallelize(make("BERT"), mesh), **given, mesh=mesh) if sequence else plain_bert(given)
    with in_float64():
        loss = made.train().training_loss
        made.data_collator = lambda pieces: {"input_ids": padded(pieces)["input_ids"]}
        predicted = made.predict(given["eval_dataset"][:1])
    return {"loss": loss, "history": made.state.log_history, "predictions": predicted.predictions}


def plain_bert(given: dict[str, object]) -> transformers.Trainer:
    return transformers.Trainer(make("BERT"), **given)


@pytest.mark.supports("BERT", "Trainer")
def test_masked_language_model_and_predictions_without_labels(ranks, tmp_path):
    (expected,) = ranks.run(masked, 1, 0, str(tmp_path))
    for found in ranks.run(masked, 2, 2, str(tmp_path)):
        for said, wanted in zip(found["history"], expected["history"], strict=True):
            assert_same_numbers(said, wanted)
        numpy.testing.assert_allclose(found["predictions"], expected["predictions"], rtol=1e-9, atol=1e-9)


def by_accelerate(number: int, wrong: bool = False) -> dict[str, Tensor]:
    """A loop of accelerate with accumulation; over no ranks by a plain model."""
    with launched():
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
        mesh = lss.init_mesh(number, device="cpu") if number else None
        made = lss.parallelize(model(), mesh) if number else model()
        optimizer = accelerator.prepare(torch.optim.AdamW(made.parameters(), lr=1e-2))
        made = accelerator.prepare(made) if wrong else made
        for step in range(6):
            batch = padded(documents(4, seed=step))
            batch = lss.shard(batch, mesh, shift_labels=1) if number else batch
            with accelerator.accumulate(made), in_float64():
                accelerator.backward(made(**batch).loss)
                if accelerator.sync_gradients and number:
                    lss.average_gradients(made)
                optimizer.step()
                optimizer.zero_grad()
        return {name: weight.detach() for name, weight in made.named_parameters()}


def test_a_loop_of_accelerate(ranks):
    (expected,) = ranks.run(by_accelerate, 1, 0)
    for found in ranks.run(by_accelerate, 2, 2):
        for name, weight in expected.items():
            assert_same(found[name], weight, name, 1e-9)


def test_a_model_prepared_by_accelerate_is_refused(ranks):
    with pytest.raises(RanksFailedError, match="a DistributedDataParallel that was not parallelized"):
        ranks.run(by_accelerate, 2, 2, True)


def refused(case: str, folder: str) -> str:
    mesh = lss.init_mesh(2, device="cpu")
    with pytest.raises(LssError) as raised:
        MISTAKES[case](mesh, folder)
    return str(raised.value)


def trained(mesh, folder, made=None, more=None, **changed):
    made = made or lss.parallelize(model(), mesh)
    Trainer(made, **options(folder, **changed) | (more or {}), mesh=mesh).train()


def of_rank(mesh):
    """A dataset that was split by rank before."""
    return {"train_dataset": documents(8, seed=mesh.get_rank())}


def after_others(mesh, folder):
    made = Trainer(lss.parallelize(model(), mesh), **options(folder), mesh=mesh)
    with launched():
        transformers.Trainer(model(), **options(folder))
        made.train()


MISTAKES = {
    "a GPT2LMHeadModel that was not parallelized": lambda mesh, folder: trained(mesh, folder, model()),
    "a GPT": lambda mesh, folder: trained(mesh, folder, lss.parallelize(tiny_gpt(8), mesh)),
    "label_smoothing_factor=0.1": lambda mesh, folder: trained(mesh, folder, label_smoothing_factor=0.1),
    "neftune_noise_alpha=5.0": lambda mesh, folder: trained(mesh, folder, neftune_noise_alpha=5.0),
    "torch_compile=True": lambda mesh, folder: trained(mesh, folder, torch_compile=True),
    "auto_find_batch_size=True": lambda mesh, folder: trained(mesh, folder, auto_find_batch_size=True),
    "optim=adalomo": lambda mesh, folder: trained(mesh, folder, optim="adalomo"),
    "compute_loss_func": lambda mesh, folder: trained(mesh, folder, more={"compute_loss_func": print}),
    "a hyperparameter search": lambda mesh, folder: Trainer(
        lss.parallelize(model(), mesh), **options(folder), mesh=mesh
    ).hyperparameter_search(),
    "ranks read batches with different": lambda mesh, folder: trained(mesh, folder, more=of_rank(mesh)),
    "accelerate is set to": after_others,
}


@pytest.mark.parametrize("message", MISTAKES)
def test_what_cannot_be_honoured_is_refused(ranks, tmp_path, message):
    for said in ranks.run(refused, 2, message, str(tmp_path)):
        assert message in said
