"""The schedule, and what is decayed."""

import pytest
from transformers import get_cosine_with_min_lr_schedule_with_warmup

from lss.config import TrainConfig
from lss.train.optim import learning_rate_share, make_optimizer
from tests.models import tiny_gpt


def test_the_cosine_is_transformers():
    config = TrainConfig(steps=50, warmup_steps=0)
    optimizer, ours = make_optimizer(tiny_gpt(8), config, foreach=False)
    theirs = get_cosine_with_min_lr_schedule_with_warmup(optimizer, 0, 50, min_lr_rate=0.1)
    for step in range(50):
        assert learning_rate_share(step, 0, 50) == pytest.approx(theirs.lr_lambdas[0](step))
        assert ours.lr_lambdas[0](step) == learning_rate_share(step, 0, 50)


def test_the_warm_up_is_linear_and_never_zero():
    assert [learning_rate_share(step, 4, 10) for step in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


def test_only_matrices_decay():
    model = tiny_gpt(8)
    optimizer, _ = make_optimizer(model, TrainConfig(), foreach=False)
    decayed, kept = optimizer.param_groups
    assert {weight.dim() for weight in decayed["params"]} == {2}
    assert {weight.dim() for weight in kept["params"]} == {1}
    assert len(decayed["params"]) + len(kept["params"]) == len(list(model.parameters()))
