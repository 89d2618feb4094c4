"""The floor of a guided step counts the operations that a step launches: here they are counted."""

import pytest
from support.guided.tensors import torch

pytest.importorskip("transformers", reason="value models are read by transformers, which is not installed here")
from test_guided_operation_counts import RULES, per_layer_and_beside

from benchctl.costs.roofline import LAYER_OPERATIONS, SECOND_PASS_OPERATIONS, STEP_OPERATIONS

assert torch is not None


@pytest.mark.parametrize("scorer", [{}, {"reuse": False}], ids=["reuse", "recompute"])
@pytest.mark.parametrize("rule", RULES)
def test_a_step_with_one_pass_launches_as_many_operations_as_its_floor_counts(rule, scorer):
    assert per_layer_and_beside(RULES[rule], **scorer) == (LAYER_OPERATIONS, STEP_OPERATIONS)


def test_so_does_a_step_with_two_passes():
    beside = STEP_OPERATIONS + SECOND_PASS_OPERATIONS
    assert per_layer_and_beside(RULES["mul"], fused=False) == (2 * LAYER_OPERATIONS, beside)
