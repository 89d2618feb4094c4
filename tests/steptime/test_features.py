"""Features of steps: laws of the structures, the published form, and the errors of that design that they avoid."""

import json
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from support.step_time import decoding, prompts

from benchctl.costs.hardware import hardware_for
from benchctl.costs.roofline import guided_floor
from benchctl.costs.shapes import shape_for
from benchctl.errors import UsageError
from benchctl.steptime.features import (
    COUNTS,
    all_reduce_us,
    feature_names,
    features,
    kernel_name,
    kv_elements,
    peak_times,
)
from benchctl.steptime.work import Deployment, StepWork

H100 = hardware_for("h100-sxm")
STRUCTURES = ("original", "overlap", "roofline")
FAST_MEMORY = replace(H100, bandwidth_bytes_per_s=1e30)
"""All of its steps are bound by arithmetic."""
MODELS = ("llama-3.1-8b", "mixtral-8x7b", "deepseek-v3", "qwen3-30b-a3b", "llama-4-scout")


def together(*steps):
    """One step that does all of the work."""
    return StepWork(**{field.name: sum(getattr(step, field.name) for step in steps) for field in fields(StepWork)})


def stacked(*steps):
    """The steps one after the other, as arrays."""
    names = [field.name for field in fields(StepWork)]
    return StepWork(**{name: np.array([float(getattr(step, name)) for step in steps]) for name in names})


def on_h100(model, tensor_parallel=1, **more):
    return Deployment(shape=shape_for(model), hardware=H100, tensor_parallel=tensor_parallel, **more)


def time_us(work, deployment, structure):
    """Sum of the times at peak, counts left out."""
    columns = features(work, deployment, structure)
    return float(sum(value for name, value in columns.items() if name not in COUNTS))


PROMPTS = st.builds(prompts, st.just(1), st.integers(1, 8192), st.integers(0, 8192))
DECODING = st.builds(decoding, st.integers(1, 256), st.integers(1, 8192))
STEPS = st.one_of(PROMPTS, DECODING, st.builds(together, PROMPTS, DECODING), st.just(StepWork()))


@settings(max_examples=50)
@given(st.lists(STEPS, min_size=1, max_size=4), st.sampled_from(STRUCTURES), st.sampled_from(MODELS))
def test_an_array_of_steps_has_the_features_of_each(steps, structure, model):
    """They are not negative, and in the order of their names."""
    for deployment in (on_h100(model), on_h100(model, 4)):
        columns = features(stacked(*steps), deployment, structure)
        assert tuple(columns) == feature_names(structure)
        for index, step in enumerate(steps):
            for name, value in features(step, deployment, structure).items():
                assert np.broadcast_to(columns[name], len(steps))[index] == pytest.approx(value, rel=1e-9)
                assert value >= 0


@settings(max_examples=50)
@given(st.integers(1, 200), st.integers(1, 4000), st.sampled_from(MODELS), st.sampled_from(STRUCTURES))
def test_more_rows_and_longer_contexts_never_take_less_time(rows, context, model, structure):
    base = time_us(decoding(rows, context), on_h100(model), structure)
    for more in (decoding(rows + 1, context), decoding(rows, context + 1)):
        assert time_us(more, on_h100(model), structure) >= base * (1 - 1e-12)


@settings(max_examples=50)
@given(st.integers(1, 4096), st.sampled_from(MODELS))
def test_compute_of_a_prompt_is_linear_in_tokens_and_quadratic_in_attention(tokens, model):
    deployment = replace(on_h100(model), hardware=FAST_MEMORY)
    times = peak_times(deployment)
    expected = tokens * times.token_us + tokens**2 / 2 * times.prefill_position_us + times.head_us
    assert features(prompts(1, tokens), deployment, "overlap")["compute"] == pytest.approx(expected)


@settings(max_examples=50)
@given(STEPS, st.sampled_from(MODELS))
def test_at_peak_the_overlap_is_the_roofline(work, model):
    assert time_us(work, on_h100(model), "roofline") == pytest.approx(time_us(work, on_h100(model), "overlap"))


@pytest.mark.parametrize("model", ["llama-3.1-70b", "mixtral-8x22b"])
def test_devices_divide_the_work_and_add_all_reduces(model: str) -> None:
    one, four = (features(decoding(32, 512), on_h100(model, tp), "overlap") for tp in (1, 4))
    assert four["memory"] == pytest.approx(one["memory"] / 4, rel=1e-3)  # routers are not divided
    assert one["all_reduce"] == 0
    assert four["all_reduce"] > 2 * shape_for(model).layers * 4.3


def test_a_step_without_tokens_costs_its_constant_only():
    columns = features(StepWork(), on_h100("mixtral-8x7b", 2), "overlap")
    assert columns == dict.fromkeys(feature_names("overlap"), 0.0) | {"steps": 1.0}


def test_key_value_heads_beyond_one_for_each_device_are_not_divided():
    shape = shape_for("qwen3-30b-a3b")  # of four heads
    assert kv_elements(shape, 8) == kv_elements(shape, 4) == kv_elements(shape, 1) / 4


@pytest.mark.parametrize(("rows", "missing"), [(1, 0), (64, 0), (64, 64), (256, 0)])
def test_the_pass_of_a_value_model_is_that_of_the_floor_of_a_guided_step(rows, missing):
    """Bound by weights, by arithmetic with reuse and without, and by arithmetic alone."""
    base, value_model = shape_for("qwen2.5-7b"), shape_for("qwen2.5-1.5b")
    scoring = "recompute" if missing else "reuse"
    floor = guided_floor(base, value_model, H100, batch=rows, candidates=5, context=500, scoring=scoring)
    guided = {"guided_rows": float(rows), "candidates": 5.0 * rows, "value_extend_tokens": float(missing)}
    work = replace(decoding(rows, 500), **guided)
    columns = features(work, Deployment(shape=base, hardware=H100, value_shape=value_model), "overlap")
    assert columns["value_model"] / 1e6 == pytest.approx(floor.value_s, rel=2e-3)


def test_a_value_model_adds_its_pass_and_nothing_to_unguided_steps():
    plain = on_h100("qwen2.5-7b")
    guided = replace(plain, value_shape=shape_for("qwen2.5-1.5b"))
    work = replace(decoding(16, 500), guided_rows=16.0, candidates=80.0, value_extend_tokens=16.0)
    columns = features(work, guided, "overlap")
    assert tuple(columns) == feature_names("overlap", is_guided=True)
    guidance = {"value_model": columns["value_model"], "guided_steps": 1, "guided_rows": 16, "candidates": 80}
    assert columns == features(work, plain, "overlap") | guidance
    assert features(decoding(16, 500), guided, "overlap")["value_model"] == 0


def test_measured_experts_are_interpolated_and_needed():
    measured = on_h100("mixtral-8x7b", measured_experts=((1.0, 2.0), (8.0, 6.0)))
    linear, columns = (
        features(decoding(4, 10), deployment, "original", rule)["expert_weights"]
        for deployment, rule in ((on_h100("mixtral-8x7b"), "linear"), (measured, "measured"))
    )
    assert columns == pytest.approx(linear / 8 * (2 + 4 * 3 / 7))
    with pytest.raises(UsageError, match="there is no table of them; state measured_experts"):
        features(decoding(1, 1), on_h100("mixtral-8x7b"), "overlap", "measured")


# The errors of the published design, by their numbers in docs/design/step-time-model.md.


def test_error_1_features_are_microseconds_and_tensor_parallelism_divides_once():
    # 6.48 billion multiply-adds for each of 512 tokens at 989 TFLOP/s are 6.7 ms.
    one, two = (features(prompts(1, 512), on_h100("llama-2-7b", tp), "overlap")["compute"] for tp in (1, 2))
    assert one == pytest.approx(6770, rel=0.01)
    assert two == pytest.approx(one / 2)


def test_errors_2_and_3_experts_are_counted_by_tokens_and_those_that_tokens_share_are_read_once():
    one_prompt = features(prompts(1, 1024), on_h100("mixtral-8x22b", 4), "original", "linear")["expert_weights"]
    assert one_prompt == pytest.approx(20_192.76, abs=0.01)  # by requests it would be 5,048
    deployment = on_h100("deepseek-v3", 8, weight_bytes_per_param=2.0)
    uniform, linear = (
        features(decoding(32, 4096), deployment, "original", rule)["expert_weights"]
        for rule in ("uniform", "linear")
    )
    assert uniform / linear == pytest.approx(163.3138 / 256, rel=1e-5)


@pytest.mark.parametrize(
    ("elements", "measured_us"),
    [(128, 4.58), (65_536, 5.84), (524_288, 12.8), (4_194_304, 63.3), (33_554_432, 322)],
)
def test_error_4_an_all_reduce_has_a_floor(elements, measured_us):
    """Against vLLM's custom all-reduce on four H100; bandwidth alone is 16 to 40 times too little."""
    assert all_reduce_us(2.0 * elements, H100, 4) == pytest.approx(measured_us, rel=0.1)


def test_errors_5_and_6_layers_have_a_term_and_heads_the_width_that_the_model_states():
    assert features(decoding(1, 1), on_h100("llama-3.1-70b"), "overlap")["layers"] == 80
    nemo = shape_for("mistral-nemo")
    assert (nemo.head_dim, nemo.hidden // nemo.q_heads) == (128, 160)
    wrong = peak_times(Deployment(shape=replace(nemo, head_dim=160), hardware=H100))
    assert peak_times(on_h100("mistral-nemo")).kv_token_us < wrong.kv_token_us


def test_error_9_prompts_are_expanded_and_only_decoding_is_absorbed():
    times = peak_times(on_h100("deepseek-v3"))
    assert times.decode_position_us / times.prefill_position_us == pytest.approx(1088 / 320)
    # A context that is not computed anew is expanded again, for each token of it once.
    expansion = 61 * 2 * 128 * 512 * (128 + 128) / H100.peak_of("fp8") * 1e6
    assert times.prefill_context_us == pytest.approx(expansion)


def test_error_10_the_head_is_read_and_computed():
    times = peak_times(on_h100("llama-3.1-8b"))
    assert times.head_weights_us == pytest.approx(313.7, abs=0.1)  # 1.05 GB
    assert times.head_weights_us / times.static_weights_us == pytest.approx(0.075, abs=0.001)


def test_error_11_compute_hides_behind_weights_that_take_longer():
    deployment = on_h100("llama-3.1-70b", 4)
    columns = features(decoding(64, 300), deployment, "overlap")
    parts = features(decoding(64, 300), replace(deployment, hardware=FAST_MEMORY), "overlap")
    assert columns["compute"] == parts["memory"] == 0
    assert columns["memory"] > 4 * parts["compute"] > 0


def test_bytes_of_quantised_weights_and_their_arithmetic_follow_the_checkpoint():
    shapes = [replace(shape_for("llama-3.1-8b"), weight_format=stored) for stored in ("bfloat16", "fp8", "int4")]
    plain, eight, four = (peak_times(Deployment(shape=shape, hardware=H100)) for shape in shapes)
    assert plain.static_weights_us / eight.static_weights_us == pytest.approx(2, rel=1e-3)
    assert plain.static_weights_us / four.static_weights_us == pytest.approx(3.85, rel=1e-2)
    assert (plain.token_us, four.token_us) == pytest.approx((eight.token_us * 1978.9 / 989.4, plain.token_us))
    # Heads and attention stay in bfloat16.
    of_plain, of_eight = ((each.head_weights_us, each.decode_position_us) for each in (plain, eight))
    assert of_plain == of_eight


@settings(max_examples=50)
@given(st.integers(1, 10**9), st.sampled_from([2, 4, 8]), st.sampled_from(["h100-sxm", "a100-sxm", "l40s"]))
def test_an_all_reduce_never_beats_its_links_nor_its_floor(num_bytes, devices, name):
    hardware = hardware_for(name)
    time_us = all_reduce_us(float(num_bytes), hardware, devices)
    assert time_us > max(4, 2 * (devices - 1) / devices * num_bytes / hardware.link_bytes_per_s * 1e6)
    assert all_reduce_us(np.full(2, float(num_bytes)), hardware, devices) == pytest.approx([time_us, time_us])


def test_engines_choose_the_kernel_by_size_and_devices():
    assert [kernel_name(size, 4) for size in (1e3, 6e5, 1e7)] == ["one_shot", "two_shot", "ring"]
    assert [kernel_name(size, 2) for size in (1e3, 6e5, 1e7)] == ["one_shot", "one_shot", "ring"]
    assert kernel_name(3e5, 8) == "two_shot"


ORACLES = Path(__file__).parents[2] / "../shared/oracles/steptime.json"
ILLUSTRATIVE = (1.5, 1.4, 1.3, 1.2, 4, 50, 200)
CASES = {
    "C1": ("llama-2-7b", 1, prompts(1, 512)),
    "C2": ("llama-3.1-8b", 1, prompts(1, 128)),
    "C3": ("llama-3.1-8b", 1, decoding(1, 1024)),
    "C5": ("llama-3.1-70b", 4, decoding(64, 300)),
    "C6": ("mixtral-8x7b", 2, decoding(1, 1024)),
    "C7": ("mixtral-8x7b", 2, decoding(4, 1024)),
    "C8": ("mixtral-8x22b", 4, prompts(1, 1024)),
    "C10": ("deepseek-v3", 1, prompts(1, 128)),
    "C11": ("deepseek-v3", 8, decoding(32, 4096)),
    "C12": ("deepseek-v3", 8, StepWork()),
}


@pytest.mark.skipif(not ORACLES.is_file(), reason=f"{ORACLES} is not on this machine")
@pytest.mark.parametrize("case", CASES)
def test_the_published_form_gives_the_worked_features_and_step_times(case):
    cases = json.loads(ORACLES.read_text())["cases"]
    expected = next(each for each in cases if each["name"].split()[0] == case)
    model, tensor_parallel, work = CASES[case]
    deployment = on_h100(model, tensor_parallel, weight_bytes_per_param=2.0)  # all weights are in bfloat16
    columns = features(work, deployment, "original", "linear")
    free = replace(H100, bandwidth_bytes_per_s=1e40), replace(H100, name="fast", peak_flops_per_s=1e40)
    compute, kv = (features(work, replace(deployment, hardware=each), "original", "linear") for each in free)
    parts = {
        "F_pf_compute": compute["prefill"],
        "F_pf_kv": kv["prefill"],
        "F_dc_compute": compute["decode"],
        "F_dc_kv": kv["decode"],
        "F_weight_static": columns["static_weights"],
        "F_weight_moe": columns["expert_weights"],
        "F_tp": columns["all_reduce"],
        "num_requests_per_step": columns["requests"],
    }
    assert parts == pytest.approx({name: expected["features_us"][name] for name in parts}, abs=1e-4)
    uniform = features(work, deployment, "original", "uniform")["expert_weights"]
    assert uniform == pytest.approx(expected["F_weight_moe_uniform"], abs=1e-4)
    # Step times are stated with three decimals.
    pure = sum(value for name, value in columns.items() if name not in {"requests", "steps"})
    assert pure == pytest.approx(expected["StepTime_pure_us"], abs=1e-3)
    illustrative = sum(weight * value for weight, value in zip(ILLUSTRATIVE, columns.values(), strict=True))
    assert illustrative == pytest.approx(expected["StepTime_illustr_us"], abs=1e-3)
