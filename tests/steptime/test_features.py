"""Features of steps: laws of the corrected structures, and the errors of the published design that they avoid."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchctl.costs.hardware import hardware_for
from benchctl.costs.roofline import guided_floor
from benchctl.costs.shapes import ModelShape, shape_for
from benchctl.errors import UsageError
from benchctl.steptime.features import COUNTS, all_reduce_us, feature_names, features, kv_elements, peak_times
from benchctl.steptime.work import Deployment, StepWork, Structure

H100 = hardware_for("h100-sxm")
STRUCTURES: tuple[Structure, ...] = ("original", "overlap", "roofline")
FAST_MEMORY = replace(H100, bandwidth_bytes_per_s=1e30)
"""All of its steps are bound by arithmetic."""
MODELS = ("llama-3.1-8b", "mixtral-8x7b", "deepseek-v3", "qwen3-30b-a3b", "llama-4-scout")


def prompt(tokens: int, context: int = 0) -> StepWork:
    return StepWork(
        num_prefills=1.0,
        prefill_tokens=float(tokens),
        prefill_context=float(context),
        prefill_positions=tokens * (context + tokens / 2),
        num_sampled=1.0,
    )


def decoding(rows: int, context: int) -> StepWork:
    return StepWork(
        num_decodes=float(rows),
        decode_tokens=float(rows),
        decode_context=float(rows * context),
        decode_positions=rows * (context + 0.5),
        num_sampled=float(rows),
    )


def together(*steps: StepWork) -> StepWork:
    """One step that does all of the work."""
    sums: dict[str, Any] = {
        field.name: sum(getattr(step, field.name) for step in steps) for field in fields(StepWork)
    }
    return StepWork(**sums)


def stacked(*steps: StepWork) -> StepWork:
    """The steps one after the other, as arrays."""
    columns: dict[str, Any] = {
        field.name: np.array([getattr(step, field.name) for step in steps], dtype=float)
        for field in fields(StepWork)
    }
    return StepWork(**columns)


def on_h100(model: str, tensor_parallel: int = 1, **more: Any) -> Deployment:
    return Deployment(shape=shape_for(model), hardware=H100, tensor_parallel=tensor_parallel, **more)


def time_us(work: StepWork, deployment: Deployment, structure: Structure = "overlap") -> float:
    """Sum of the times at peak, counts left out."""
    columns = features(work, deployment, structure)
    return float(sum(value for name, value in columns.items() if name not in COUNTS))


steps_of_work = st.one_of(
    st.builds(prompt, st.integers(1, 8192), st.integers(0, 8192)),
    st.builds(decoding, st.integers(1, 256), st.integers(1, 8192)),
    st.builds(
        lambda tokens, rows, context: together(prompt(tokens), decoding(rows, context)),
        st.integers(1, 2048),
        st.integers(1, 128),
        st.integers(1, 4096),
    ),
    st.just(StepWork()),
)


@given(st.lists(steps_of_work, min_size=1, max_size=4), st.sampled_from(STRUCTURES), st.sampled_from(MODELS))
def test_an_array_of_steps_has_the_features_of_each(
    steps: list[StepWork], structure: Structure, model: str
) -> None:
    for tensor_parallel in (1, 4):
        deployment = on_h100(model, tensor_parallel)
        together_columns = features(stacked(*steps), deployment, structure)
        for index, step in enumerate(steps):
            for name, value in features(step, deployment, structure).items():
                assert np.broadcast_to(together_columns[name], len(steps))[index] == pytest.approx(value, rel=1e-9)


@given(steps_of_work, st.sampled_from(STRUCTURES), st.sampled_from(MODELS))
def test_features_are_not_negative_and_in_the_order_of_their_names(
    work: StepWork, structure: Structure, model: str
) -> None:
    columns = features(work, on_h100(model, 2), structure)
    assert tuple(columns) == feature_names(structure)
    assert all(value >= 0 for value in columns.values())


@given(st.integers(1, 200), st.integers(1, 4000), st.sampled_from(MODELS))
def test_more_rows_and_longer_contexts_never_take_less_time(rows: int, context: int, model: str) -> None:
    for structure in STRUCTURES:
        base = time_us(decoding(rows, context), on_h100(model), structure)
        assert time_us(decoding(rows + 1, context), on_h100(model), structure) >= base * (1 - 1e-12)
        assert time_us(decoding(rows, context + 1), on_h100(model), structure) >= base * (1 - 1e-12)


@given(st.integers(1, 4096), st.sampled_from(MODELS))
def test_compute_of_a_prompt_is_linear_in_tokens_and_quadratic_in_attention(tokens: int, model: str) -> None:
    deployment = replace(on_h100(model), hardware=FAST_MEMORY)
    times = peak_times(deployment)
    compute = features(prompt(tokens), deployment, "overlap")["compute"]
    expected = tokens * times.token_us + tokens**2 / 2 * times.prefill_position_us + times.head_us
    assert compute == pytest.approx(expected)


@given(steps_of_work, st.sampled_from(MODELS))
def test_at_peak_the_overlap_is_the_roofline(work: StepWork, model: str) -> None:
    deployment = on_h100(model)
    assert time_us(work, deployment, "roofline") == pytest.approx(time_us(work, deployment, "overlap"))


@pytest.mark.parametrize("model", ["llama-3.1-70b", "mixtral-8x22b"])
def test_devices_divide_the_work_and_add_all_reduces(model: str) -> None:
    one, four = (features(decoding(32, 512), on_h100(model, tp), "overlap") for tp in (1, 4))
    assert four["memory"] == pytest.approx(one["memory"] / 4, rel=1e-3)  # routers are not divided
    assert one["all_reduce"] == 0
    assert four["all_reduce"] > 2 * shape_for(model).layers * 4.3


def test_a_step_without_tokens_costs_its_constant_only() -> None:
    columns = features(StepWork(), on_h100("mixtral-8x7b", 2), "overlap")
    assert columns == dict.fromkeys(feature_names("overlap"), 0.0) | {"steps": 1.0}


def test_key_value_heads_beyond_one_for_each_device_are_not_divided() -> None:
    shape = shape_for("qwen3-30b-a3b")
    assert shape.kv_heads == 4
    assert kv_elements(shape, 4) == kv_elements(shape, 1) / 4
    assert kv_elements(shape, 8) == kv_elements(shape, 4)


@pytest.mark.parametrize(("rows", "missing"), [(1, 0), (64, 0), (64, 64), (256, 0)])
def test_the_pass_of_a_value_model_is_that_of_the_floor_of_a_guided_step(rows: int, missing: int) -> None:
    """Bound by weights, by arithmetic with reuse and without, and by arithmetic alone."""
    base, value_model = shape_for("qwen2.5-7b"), shape_for("qwen2.5-1.5b")
    floor = guided_floor(
        base,
        value_model,
        H100,
        batch=rows,
        candidates=5,
        context=500,
        scoring="recompute" if missing else "reuse",
    )
    work = replace(
        decoding(rows, 500), guided_rows=float(rows), candidates=5.0 * rows, value_extend_tokens=float(missing)
    )
    columns = features(work, Deployment(shape=base, hardware=H100, value_shape=value_model), "overlap")
    assert columns["value_model"] / 1e6 == pytest.approx(floor.value_s, rel=2e-3)


def test_a_value_model_adds_its_pass_at_its_roofline() -> None:
    plain = on_h100("qwen2.5-7b")
    guided = replace(plain, value_shape=shape_for("qwen2.5-1.5b"))
    unguided_work = decoding(16, 500)
    guided_work = replace(unguided_work, guided_rows=16.0, candidates=80.0, value_extend_tokens=16.0)
    columns = features(guided_work, guided, "overlap")
    assert tuple(columns) == feature_names("overlap", is_guided=True)
    # 1.31 billion weights of 2 bytes and a value head, and 16 prefixes of 500 tokens.
    value_model = shape_for("qwen2.5-1.5b").as_value_model()
    weights = 2 * (value_model.active_params() + value_model.value_head_flops() // 2)
    cache = (16 * 500 + 96) * value_model.kv_bytes_per_token()
    assert columns["value_model"] == pytest.approx((weights + cache) / 3350e9 * 1e6, rel=1e-6)
    assert (columns["guided_rows"], columns["candidates"]) == (16, 80)
    assert features(unguided_work, guided, "overlap")["value_model"] == 0
    assert {name: columns[name] for name in feature_names("overlap")} == features(guided_work, plain, "overlap")


def test_measured_experts_are_interpolated_and_needed() -> None:
    measured = on_h100("mixtral-8x7b", measured_experts=((1.0, 2.0), (8.0, 6.0)))
    linear = features(decoding(4, 10), on_h100("mixtral-8x7b"), "original", "linear")["expert_weights"]
    columns = features(decoding(4, 10), measured, "original", "measured")
    assert columns["expert_weights"] == pytest.approx(linear / 8 * (2 + 4 * 3 / 7))
    with pytest.raises(UsageError, match="there is no table of them; state measured_experts"):
        features(decoding(1, 1), on_h100("mixtral-8x7b"), "overlap", "measured")


# The errors of the published design, by their numbers in docs/design/step-time-model.md.


def test_error_1_features_are_microseconds_and_tensor_parallelism_divides_once() -> None:
    deployment = on_h100("llama-2-7b")
    # 6.48 billion multiply-adds for each of 512 tokens at 989 TFLOP/s are 6.7 ms.
    compute = features(prompt(512), deployment, "overlap")["compute"]
    assert compute == pytest.approx(6770, rel=0.01)
    assert features(prompt(512), on_h100("llama-2-7b", 2), "overlap")["compute"] == pytest.approx(compute / 2)


def test_error_2_experts_are_counted_by_tokens_not_by_requests() -> None:
    deployment = on_h100("mixtral-8x22b", 4)
    one_prompt = features(prompt(1024), deployment, "original", "linear")["expert_weights"]
    assert one_prompt == pytest.approx(20_192.76, abs=0.01)  # by requests it would be 5,048


def test_error_3_experts_that_tokens_share_are_read_once() -> None:
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
def test_error_4_an_all_reduce_has_a_floor(elements: int, measured_us: float) -> None:
    """Against vLLM's custom all-reduce on four H100; bandwidth alone is 16 to 40 times too little."""
    assert all_reduce_us(2.0 * elements, H100, 4) == pytest.approx(measured_us, rel=0.1)
    assert measured_us / (2 * elements / 3350e9 * 1e6) > 15


def test_error_5_layers_have_a_term_of_their_own() -> None:
    assert features(decoding(1, 1), on_h100("llama-3.1-70b"), "overlap")["layers"] == 80


def test_error_6_the_width_of_a_head_is_the_one_that_the_model_states() -> None:
    nemo, qwen = shape_for("mistral-nemo"), shape_for("qwen3-30b-a3b")
    assert (nemo.head_dim, nemo.hidden // nemo.q_heads) == (128, 160)
    assert (qwen.head_dim, qwen.hidden // qwen.q_heads) == (128, 64)
    wrong = replace(nemo, head_dim=160)
    assert (
        peak_times(on_h100("mistral-nemo")).kv_token_us
        < peak_times(Deployment(shape=wrong, hardware=H100)).kv_token_us
    )


def test_error_8_the_query_of_a_latent_attention_has_its_low_rank() -> None:
    shape = shape_for("deepseek-v2")
    assert shape.latent is not None
    with_square = shape.hidden**2
    query = shape.latent.q_rank * (shape.hidden + shape.q_heads * (128 + 64)) if shape.latent.q_rank else 0
    assert query / with_square == pytest.approx(45.613 / 26.214, rel=1e-3)


def test_error_9_prompts_are_expanded_and_only_decoding_is_absorbed() -> None:
    times = peak_times(on_h100("deepseek-v3"))
    assert times.decode_position_us / times.prefill_position_us == pytest.approx(1088 / 320)
    # A context that is not computed anew is expanded again, for each token of it once.
    expansion = 61 * 2 * 128 * 512 * (128 + 128) / H100.peak_of("fp8") * 1e6
    assert times.prefill_context_us == pytest.approx(expansion)


def test_error_10_the_head_is_read_and_computed() -> None:
    times = peak_times(on_h100("llama-3.1-8b"))
    assert times.head_weights_us == pytest.approx(313.7, abs=0.1)  # 1.05 GB
    assert times.head_weights_us / times.static_weights_us == pytest.approx(0.075, abs=0.001)


def test_error_11_compute_hides_behind_weights_that_take_longer() -> None:
    deployment = on_h100("llama-3.1-70b", 4)
    columns = features(decoding(64, 300), deployment, "overlap")
    assert columns["compute"] == 0
    parts = features(decoding(64, 300), replace(deployment, hardware=FAST_MEMORY), "overlap")
    assert columns["memory"] > 4 * parts["compute"] > 0 == parts["memory"]


def test_error_12_a_model_that_does_not_fit_is_seen_in_its_bytes() -> None:
    shape = shape_for("deepseek-v3")
    assert H100.memory_bytes is not None
    assert shape.weight_bytes() > 4 * H100.memory_bytes
    assert shape.weight_bytes() == pytest.approx(671e9, rel=0.01)


def test_error_13_a_chunk_attends_to_what_precedes_it_not_to_the_whole_prompt() -> None:
    times = peak_times(on_h100("llama-3.1-8b"))
    chunks = [prompt(512, context) for context in range(0, 4096, 512)]
    whole = 4096**2 / 2 * times.prefill_position_us
    assert sum(chunk.prefill_positions for chunk in chunks) * times.prefill_position_us == pytest.approx(whole)


def test_bytes_of_quantised_weights_and_their_arithmetic_follow_the_checkpoint() -> None:
    bf16: ModelShape = shape_for("llama-3.1-8b")
    fp8, int4 = (replace(bf16, weight_format=stored) for stored in ("fp8", "int4"))
    plain, eight, four = (peak_times(Deployment(shape=shape, hardware=H100)) for shape in (bf16, fp8, int4))
    assert plain.static_weights_us / eight.static_weights_us == pytest.approx(2, rel=1e-3)
    assert plain.static_weights_us / four.static_weights_us == pytest.approx(3.85, rel=1e-2)
    assert plain.token_us / eight.token_us == pytest.approx(1978.9 / 989.4)
    assert four.token_us == plain.token_us
    # Heads and attention stay in bfloat16.
    assert plain.head_weights_us == eight.head_weights_us
    assert plain.decode_position_us == eight.decode_position_us
