"""What a guided step asks of its device: few operations, passes of few sizes, kernels, and no number in between."""

import importlib.util
import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.guided.tensors import torch

pytest.importorskip("transformers", reason="value models are read by transformers, which is not installed here")
from support.guided.operation_counts import OperationCounts
from support.guided.plain_values import VOCABULARY, random_tensors, tiny_config

from benchctl.costs.roofline import LAYER_OPERATIONS, SECOND_PASS_OPERATIONS, STEP_OPERATIONS
from benchctl.guided.guide import Guide, GuideSettings
from benchctl.guided.kernels.check import largest_differences, tolerance
from benchctl.guided.operations import FUSED, NAMES, PLAIN
from benchctl.guided.params import CONSTRAINTS, MODES, GuidanceParams
from benchctl.guided.rows import GuideRow
from benchctl.guided.timing import StepTimer
from benchctl.guided.value_model.checkpoint import Checkpoint
from benchctl.guided.value_model.scoring import Scorer
from benchctl.guided.value_model.value_model import ValueModel, ValueModelConfig
from benchmarks.guided.graph_shapes import LEAST_REPLAYED, MOST_PADDING, decode

ROOT = Path(__file__).parents[2]
PER_LAYER, BESIDE = 10, 30
"""With kernels. Written out in torch a layer had 32, and a step 155 beside its layers (305 in mode mul)."""
BUDGETED = {
    "centered_exp": GuidanceParams(mode="centered_exp", value_scale=-3.0),
    "mul": GuidanceParams(mode="mul", value_scale=1.7),
    "target": GuidanceParams(target_length=30),
}
ALL_RULES = (
    *(GuidanceParams(mode=mode, value_scale=1.7, value_min=0.01, value_entropy_threshold=0.1) for mode in MODES),
    *(GuidanceParams(target_length=30, value_constraint=constraint) for constraint in CONSTRAINTS),
    GuidanceParams(value_scale=-3.0, stride=2),
)


def steps_of(
    rules,
    *,
    device="cpu",
    layers=2,
    operations=PLAIN,
    skips_early=False,
    draws_candidates=True,
    timer=None,
    **scorer,
):
    """Guided steps of a batch with these rules: the first computes the prompts, then it is steady."""
    config = tiny_config("qwen2")
    config.num_hidden_layers, config.layer_types = layers, ["full_attention"] * layers
    tensors = {name: tensor.to(device) for name, tensor in random_tensors(config, torch.float32).items()}
    model = ValueModel(Checkpoint(config, tensors, frozenset({2})), operations)
    made = Scorer(model, len(rules), 64, timer=timer, **scorer)
    guide = Guide(lambda: made, GuideSettings(skips_early=skips_early), timer)
    rows = [
        GuideRow(
            index=index, key=index, params=params, tokens=[index + 3] * 12, num_prompt=12, temperature=0.9,
            top_k=2 + index % 5, top_p=0.95, min_p=0.001, draws_candidates=draws_candidates,
        )
        for index, params in enumerate(rules)
    ]  # fmt: skip
    # The very same logits each time: drawn here, so that the step itself has nothing but guidance in it.
    logits = torch.randn(len(rows) + 1, VOCABULARY, generator=torch.Generator().manual_seed(1)).to(device)
    for copy in [logits.clone() for _ in range(8)]:
        guide.apply(copy, rows)
        for row in rows:
            row.tokens.append(7)
        yield guide.pending


def operations_of_a_step(layers, params, *, operations=FUSED, num_rows=8, **options):
    """Of the fifth step, when their prompts are long computed."""
    steps = steps_of([params] * num_rows, layers=layers, operations=operations, **options)
    for _ in range(4):
        next(steps)
    with OperationCounts() as counts:
        next(steps)
    return counts


def per_layer_and_beside(params, **options):
    few, many = (operations_of_a_step(layers, params, **options).total for layers in (2, 4))
    per_layer = (many - few) / 2
    return per_layer, few - 2 * per_layer


@pytest.mark.parametrize("scorer", [{}, {"graphs": True}, {"reuse": False}], ids=["exact", "rounded", "no reuse"])
@pytest.mark.parametrize("rule", BUDGETED)
def test_a_step_keeps_its_budget_of_operations_and_launches_what_its_floor_counts(rule, scorer):
    per_layer, beside = per_layer_and_beside(BUDGETED[rule], skips_early=True, **scorer)
    assert per_layer <= PER_LAYER
    assert beside <= BESIDE
    if scorer != {"graphs": True}:
        assert per_layer_and_beside(BUDGETED[rule], **scorer) == (LAYER_OPERATIONS, STEP_OPERATIONS)


def test_two_passes_launch_what_their_floor_counts_and_torch_alone_many_times_as_much():
    two_passes = (2 * LAYER_OPERATIONS, STEP_OPERATIONS + SECOND_PASS_OPERATIONS)
    assert per_layer_and_beside(BUDGETED["mul"], fused=False) == two_passes
    per_layer, beside = per_layer_and_beside(BUDGETED["mul"], operations=PLAIN)
    assert per_layer > 2 * PER_LAYER
    assert beside > 2 * BESIDE
    few, many = (operations_of_a_step(2, BUDGETED["mul"], num_rows=rows) for rows in (2, 8))
    assert few.by_name == many.by_name, "a step of more rows asks for nothing more"


@pytest.mark.parametrize("scorer", [{}, {"fused": False}, {"graphs": True}], ids=["fused", "two-phase", "rounded"])
@pytest.mark.parametrize("draws_candidates", [True, False])
def test_steps_need_nothing_of_what_the_device_computes(scorer, draws_candidates, tmp_path):
    """The device is torch's ``meta``: it knows shapes and has no numbers, so that to ask it for one is an error."""
    timer = StepTimer(tmp_path / "steps.jsonl")
    options = {"device": "meta", "draws_candidates": draws_candidates, "timer": timer, **scorer}
    for pending in itertools.islice(steps_of(ALL_RULES, **options), 3):
        with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
            _ = pending.step
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        next(steps_of(ALL_RULES, skips_early=True, **options))


READING = (
    "item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__contains__",
    "nonzero", "masked_select", "unique", "equal", "allclose",
)  # fmt: skip


def noted_reads(monkeypatch):
    """A list that gets the name of whatever gives numbers of a tensor to Python."""
    seen = []
    for name in READING:
        original = getattr(torch.Tensor, name)

        def noted(*arguments, original=original, name=name, **options):
            seen.append(name)
            return original(*arguments, **options)

        monkeypatch.setattr(torch.Tensor, name, noted)
    return seen


@pytest.mark.parametrize("scorer", [{}, {"fused": False}], ids=["fused", "two-phase"])
@pytest.mark.parametrize(("skips_early", "reads"), [(True, ["tolist"]), (False, [])])
def test_a_steady_step_that_may_skip_rows_reads_once_and_any_other_never(monkeypatch, scorer, skips_early, reads):
    steps = steps_of(ALL_RULES, skips_early=skips_early, **scorer)
    next(steps)
    seen = noted_reads(monkeypatch)
    for number in range(1, 4):
        next(steps)
        assert seen == number * reads


@pytest.mark.parametrize(
    ("share", "batch", "candidates", "reuse"),
    [(0.0, 33, 2, True), (0.3, 40, 5, True), (0.7, 3, 5, False), (0.5, 20, 3, False)],
)
def test_whichever_rows_have_no_choice_nearly_every_step_repeats_a_recorded_pass(share, batch, candidates, reuse):
    cell = decode(share, batch, candidates, 30, reuse=reuse)
    # A batch whose rows all have no choice scores nothing.
    assert cell.steps >= 30 * (1 - share**batch) * 0.9
    assert cell.replayed >= LEAST_REPLAYED * cell.steps
    assert (cell.recorded, cell.eager) == (0, 0)
    assert cell.padding <= MOST_PADDING


needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed here")


def output_of(program, *given, **variables):
    finished = subprocess.run(
        [sys.executable, ROOT / "tests/support/guided" / program, *given],
        capture_output=True, text=True, timeout=600, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize(
    ("dtype", "norm", "head_dim"),
    [
        ("float32", "normed", 16),
        pytest.param("float32", "plain", 24, marks=pytest.mark.nightly),
        pytest.param("float16", "normed", 16, marks=pytest.mark.nightly),
    ],
)
def test_every_kernel_gives_what_torch_gives_in_triton_s_interpreter(dtype, norm, head_dim):
    by_name = output_of("interpreted_kernels.py", dtype, norm, str(head_dim))
    assert by_name.keys() == set(NAMES)
    assert {name for name in NAMES if not by_name[name] <= tolerance(name, getattr(torch, dtype))} == set()


def test_an_operation_that_computes_something_else_is_noticed():
    config = ValueModelConfig(
        layers=1,
        hidden=24,
        heads=3,
        kv_heads=1,
        head_dim=8,
        vocab=64,
        ffn=16,
        has_head_norm=True,
        norm_epsilon=1e-6,
    )
    for name in ("tree_attention", "tilt_candidates"):
        given = getattr(PLAIN, name)
        spoilt = replace(PLAIN, **{name: lambda *arguments, given=given: given(*arguments) * 1.5})
        by_name = largest_differences(spoilt, config, torch.device("cpu"), torch.float32)
        assert by_name[name] > 10 * tolerance(name, torch.float32)


@pytest.mark.nightly
@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize(
    ("target", "model", "dtype"),
    [("80", "qwen2.5-7b", "bfloat16"), ("89", "qwen3-0.6b", "float32"), ("90", "qwen2.5-1.5b", "float16")],
)
def test_every_kernel_is_compiled_for_gpus_before_the_first_request_and_never_after(tmp_path, target, model, dtype):
    compiled = output_of("compiled_kernels.py", target, model, dtype, TRITON_CACHE_DIR=str(tmp_path))
    kernels = {each["kernel"] for each in compiled["by_check"]}
    missing = {name for name in NAMES if not {name, f"_{name}"} & kernels}
    # One is called tilt_row.
    assert missing == {"tilt_candidates"}
    assert compiled["later"] == []
    assert {each["kernel"] for each in compiled["by_check"] if each["stack"]} == set()
