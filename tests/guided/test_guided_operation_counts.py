"""A guided step asks its device for few operations: each costs a GPU microseconds, however little it computes."""

import pytest
from support.guided.tensors import torch

pytest.importorskip("transformers", reason="value models are read by transformers, which is not installed here")
from support.guided.operation_counts import OperationCounts
from support.guided.plain_values import VOCABULARY, random_tensors, tiny_config

from benchctl.costs.roofline import LAYER_OPERATIONS, SECOND_PASS_OPERATIONS, STEP_OPERATIONS
from benchctl.guided.guide import Guide, GuideSettings
from benchctl.guided.operations import FUSED, PLAIN
from benchctl.guided.params import GuidanceParams
from benchctl.guided.rows import GuideRow
from benchctl.guided.value_model.checkpoint import Checkpoint
from benchctl.guided.value_model.scoring import Scorer
from benchctl.guided.value_model.value_model import ValueModel

PER_LAYER, BESIDE = 10, 30
"""With kernels. Written out in torch a layer had 32, and a step 155 beside its layers (305 in mode mul)."""
RULES = {
    "centered_exp": GuidanceParams(mode="centered_exp", value_scale=-3.0),
    "mul": GuidanceParams(mode="mul", value_scale=1.7),
    "target": GuidanceParams(target_length=30),
}


def value_model(layers, operations):
    config = tiny_config("qwen2")
    config.num_hidden_layers, config.layer_types = layers, ["full_attention"] * layers
    return ValueModel(Checkpoint(config, random_tensors(config, torch.float32), frozenset({2})), operations)


def operations_of_a_step(layers, params, *, operations=FUSED, skips_early=False, num_rows=8, **scorer):
    """Of the fifth step, when their prompts are long computed."""
    made = Scorer(value_model(layers, operations), num_rows, 64, **scorer)
    guide = Guide(lambda: made, GuideSettings(skips_early=skips_early))
    rows = [
        GuideRow(
            index=index, key=index, params=params, tokens=[index + 3] * 12, num_prompt=12, temperature=0.9, top_k=5,
            top_p=0.95, min_p=0.001, draws_candidates=True,
        )
        for index in range(num_rows)
    ]  # fmt: skip
    logits = torch.randn(num_rows, VOCABULARY, generator=torch.Generator().manual_seed(1))
    for _ in range(5):
        guided = logits.clone()
        with OperationCounts() as counts:
            guide.apply(guided, rows)
        for row in rows:
            row.tokens.append(int(guided[row.index].argmax()))
    return counts


def per_layer_and_beside(params, **options):
    few, many = (operations_of_a_step(layers, params, **options).total for layers in (2, 4))
    per_layer = (many - few) / 2
    return per_layer, few - 2 * per_layer


@pytest.mark.parametrize("scorer", [{}, {"graphs": True}, {"reuse": False}], ids=["exact", "rounded", "no reuse"])
@pytest.mark.parametrize("rule", RULES)
def test_a_step_keeps_its_budget_of_operations_and_launches_what_its_floor_counts(rule, scorer):
    per_layer, beside = per_layer_and_beside(RULES[rule], skips_early=True, **scorer)
    assert per_layer <= PER_LAYER
    assert beside <= BESIDE
    if scorer != {"graphs": True}:
        assert per_layer_and_beside(RULES[rule], **scorer) == (LAYER_OPERATIONS, STEP_OPERATIONS)


def test_two_passes_launch_what_their_floor_counts_and_torch_alone_many_times_as_much():
    two_passes = (2 * LAYER_OPERATIONS, STEP_OPERATIONS + SECOND_PASS_OPERATIONS)
    assert per_layer_and_beside(RULES["mul"], fused=False) == two_passes
    per_layer, beside = per_layer_and_beside(RULES["mul"], operations=PLAIN)
    assert per_layer > 2 * PER_LAYER
    assert beside > 2 * BESIDE
    few, many = (operations_of_a_step(2, RULES["mul"], num_rows=rows) for rows in (2, 8))
    assert few.by_name == many.by_name, "a step of more rows asks for nothing more"
