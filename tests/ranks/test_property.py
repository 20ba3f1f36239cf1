"""Any batch over any ranks: loss and every gradient equal those of the plain model run on each document alone.

The suite draws a few examples; `pytest tests/ranks/test_property.py --examples 2000` draws many.
"""

import pytest
from hypothesis import HealthCheck, given, settings

from tests.cases import cases, distributed, serial
from tests.models import assert_same

TOGETHER = 10


@pytest.mark.supports("GPT", "padded", "packed", "data groups")
def test_equals_the_plain_model_on_each_document(ranks, request):
    seen = {"examples": 0, "compared": 0}

    @settings(
        max_examples=max(1, request.config.getoption("--examples") // TOGETHER),
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(chosen=cases(TOGETHER))
    def check(chosen):
        references = [serial(case) for case in chosen]
        for results in ranks.run(distributed, chosen[0].sequence * chosen[0].data, chosen):
            for reference, result in zip(references, results, strict=True):
                seen["compared"] += compare(result, reference)
        seen["examples"] += len(chosen)

    check()
    assert seen["compared"] > 10 * seen["examples"]
    print(f"{seen['examples']} examples, {seen['compared']} gradients compared")


def compare(result, reference) -> int:
    """Fails unless loss, count and gradients are equal; the number of gradients that were not zero."""
    loss, gradients, count = result
    expected_loss, expected_gradients, expected_count = reference
    assert count == expected_count
    assert loss == pytest.approx(expected_loss, rel=1e-10)
    compared = 0
    for name, expected in expected_gradients.items():
        if expected.abs().max() < 1e-13:
            assert gradients[name].abs().max() < 1e-13, name
        else:
            assert_same(gradients[name], expected, name)
            compared += 1
    return compared
