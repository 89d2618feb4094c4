"""The floor of a guided step: numbers worked out by hand, and laws that hold whatever the numbers."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchctl.costs.hardware import HARDWARE, hardware_for
from benchctl.costs.roofline import (
    LAYER_OPERATIONS,
    SECOND_PASS_OPERATIONS,
    STEP_OPERATIONS,
    guided_floor,
)
from benchctl.costs.shapes import shape_for

BASE, VALUE, H200 = shape_for("qwen2.5-7b"), shape_for("qwen2.5-1.5b"), HARDWARE["h200-sxm"]
BASE_WEIGHTS = 28 * (2 * 3584 * 128 * (28 + 4) + 3 * 3584 * 18944) + 3584 * 152064
VALUE_WEIGHTS = 28 * (2 * 1536 * 128 * (12 + 2) + 3 * 1536 * 8960) + 1536 * 1536 + 1536
"""Without the embedding, which is a gather of a few rows, and with the head."""


def floor(batch=64, candidates=5, context=300, *, base=BASE, value=VALUE, device=H200, **options):
    return guided_floor(base, value, device, batch=batch, candidates=candidates, context=context, **options)


def test_the_base_step_of_64_rows_reads_its_weights_and_prefixes():
    prefixes = 64 * (301 + 1) * 28 * 2 * 4 * 128 * 2
    assert floor().base_s == pytest.approx((2 * BASE_WEIGHTS + prefixes) / 4.8e12)
    assert floor().base_s * 1e3 == pytest.approx(3.176, abs=1e-3)


@pytest.mark.parametrize(
    ("scoring", "tokens", "ratio"), [("reuse", 5 * 64, 1.278), ("recompute", 6 * 64, 1.332)], ids=["reuse", "all"]
)
def test_the_value_model_computes_longer_than_it_reads_at_64_rows_of_five(scoring, tokens, ratio):
    value_head, attention = 2 * 1536 * 1536 + 2 * 1536, 28 * 4 * 12 * 128
    flops = tokens * (2 * VALUE_WEIGHTS - value_head + 301 * attention) + 320 * value_head
    of_step = floor(scoring=scoring)
    assert of_step.value_tokens == tokens
    assert of_step.value_s == pytest.approx(flops / 989.4e12)
    assert of_step.ratio == pytest.approx(ratio, abs=1e-3)


def test_two_phases_read_the_weights_twice_and_each_prefix_twice():
    once, twice = floor(batch=1), floor(batch=1, scoring="two-phase")
    assert once.value_s == pytest.approx((2 * VALUE_WEIGHTS + (301 + 5) * 28672) / 4.8e12)
    assert twice.value_s == pytest.approx((4 * VALUE_WEIGHTS + (2 * 301 + 6) * 28672) / 4.8e12)


def test_rows_without_scores_bring_one_missing_token_and_one_candidate_leaves_nothing_to_guide():
    assert floor(unscored_frac=0.25).value_tokens == 48 * 5 + 16
    assert floor(unscored_frac=0.25, scoring="recompute").value_tokens == 48 * 5 + 64
    assert floor(candidates=1, scoring="two-phase", launch_s=1.0).ratio == 1
    assert floor().sampling_s == pytest.approx(64 * 152064 * 4 * 2 / 4.8e12)  # logits are read and written once


def test_launches_add_what_the_host_needs_beyond_the_device():
    num_operations = 28 * LAYER_OPERATIONS + STEP_OPERATIONS
    eager, replayed = floor(batch=1, launch_s=5e-6), floor(batch=1)
    assert eager.num_operations == replayed.num_operations == num_operations
    assert eager.launches_s == pytest.approx(num_operations * 5e-6 - eager.value_s - eager.sampling_s)
    assert replayed.launches_s == 0
    assert floor(batch=256, launch_s=5e-6).launches_s == 0, "256 rows keep the device busy for longer"
    second_pass = 28 * LAYER_OPERATIONS + SECOND_PASS_OPERATIONS
    assert floor(scoring="two-phase").num_operations == num_operations + second_pass


def test_a_row_is_bound_by_the_weights_of_both_models_and_many_without_prefixes_by_their_arithmetic():
    one, many = floor(batch=1, candidates=2, context=0), floor(batch=1_000_000, context=0)
    assert one.ratio == pytest.approx(1 + VALUE_WEIGHTS / BASE_WEIGHTS, rel=1e-3)
    attention = (28 * 4 * 12 * 128, 28 * 4 * 28 * 128)
    ratio = 5 * (2 * VALUE_WEIGHTS + attention[0]) / (2 * BASE_WEIGHTS + attention[1])
    assert many.ratio - many.parts["sampling"] == pytest.approx(1 + ratio, rel=1e-6)


def test_weights_of_eight_bits_are_read_in_half_the_time_and_multiplied_at_the_faster_peak():
    half = floor(batch=1, context=0, value=shape_for("Qwen2.5-1.5B-FP8")).value[0]
    head = 2 * (1536 * 1536 + 1536)
    assert half.weights_s == pytest.approx(((VALUE_WEIGHTS - head // 2) * (1 + 4 / 128**2) + head) / 4.8e12)
    assert half.compute_s == pytest.approx(floor(batch=1, context=0).value[0].compute_s * 989.4 / 1978.9)


def never_falls(*steps):
    """Each step costs at least what the one before does, but for rounding."""
    ratios = [floor(**step).ratio for step in steps]
    return all(after >= before * (1 - 1e-12) for before, after in pairwise(ratios))


VALUE_MODELS = [shape_for(f"qwen2.5-{size}") for size in ("0.5b", "1.5b", "3b", "7b")]
steps = st.fixed_dictionaries(
    {
        "value": st.sampled_from(VALUE_MODELS),
        "batch": st.integers(1, 1024),
        "candidates": st.integers(2, 64),
        "context": st.floats(0, 1e5),
        "scoring": st.sampled_from(["reuse", "recompute", "two-phase"]),
        "unscored_frac": st.floats(0, 1),
        "launch_s": st.none() | st.floats(0, 1e-4),
    }
)


@settings(max_examples=50)
@given(step=steps, device=st.sampled_from(list(HARDWARE.values())))
def test_guidance_costs_something_and_its_parts_add_up(step, device):
    of_step = floor(device=device, **step)
    assert of_step.ratio > 1
    assert min(of_step.parts.values()) >= 0
    assert 1 + sum(of_step.parts.values()) == pytest.approx(of_step.ratio)


@settings(max_examples=50)
@given(step=steps)
def test_more_work_never_costs_less(step):
    """One candidate more; and without launches, as 3B has more layers than 7B: a larger value model, rows that need
    scores, one pass over everything instead of reuse, and two instead of one.
    """
    assert never_falls(step, step | {"candidates": step["candidates"] + 1})
    alone = step | {"launch_s": None}
    assert never_falls(*(alone | {"value": value} for value in VALUE_MODELS))
    assert never_falls(alone, alone | {"unscored_frac": 0.0})
    assert never_falls(*(alone | {"scoring": scoring} for scoring in ("reuse", "recompute", "two-phase")))


@settings(max_examples=50)
@given(step=steps, factor=st.floats(0.1, 10))
def test_a_device_that_is_faster_at_everything_changes_no_ratio(step, factor):
    devices = [hardware_for(f"one:{500 * scale:.17g}:{2000 * scale:.17g}") for scale in (1.0, factor)]
    ratios = [floor(**step | {"launch_s": None, "device": device}).ratio for device in devices]
    assert ratios[0] == pytest.approx(ratios[1])
