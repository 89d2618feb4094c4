"""Cost models and noise: published constants, hand-computed numbers and laws."""

import statistics

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.servers.simulator import FILTERED, NEUTRAL, VALUE_MODEL, decode_batch, request_of, run, sequences_of

from benchctl.costs.hardware import hardware_for
from benchctl.costs.roofline import roofline_ns, weight_read_bytes
from benchctl.costs.shapes import shape_for
from benchctl.errors import UsageError
from benchctl.sim.config import SimConfig
from benchctl.sim.costs.cost_model import cost_model_for, published_noise
from benchctl.sim.costs.llm_mock import mock_length, mock_step_ns


def test_llm_mock_steps_take_their_published_time_and_answers_have_the_length_of_its_rule() -> None:
    for (num_seqs, longest, new), expected_s in {
        (1, 100, 100): 0.081368, (10, 500, 500): 5.401880, (10, 500, 1): 0.070684, (20, 1024, 1024): 44.870940,
        (0, 0, 0): 0.06,
    }.items():  # fmt: skip
        assert mock_step_ns(num_seqs, longest, new) / 1e9 == pytest.approx(expected_s, abs=5e-7)
    lengths = {0: 50, 4: 50, 5: 51, 12: 52, 100: 70, 499: 149, 500: 150, 1024: 150}
    assert {prompt: mock_length(prompt) for prompt in lengths} == lengths


def test_the_roofline_is_the_larger_of_compute_and_memory_time() -> None:
    h100 = hardware_for("h100-sxm")
    for flops, num_bytes, seconds in ((989.4e12, 0, 1), (1.0, 3350e9, 1), (989.4e12, 2 * 3350e9, 2)):
        assert roofline_ns(flops, num_bytes, h100) == seconds * 10**9


def test_roofline_decoding_of_one_row_takes_the_time_to_read_the_weights_but_not_the_embedding() -> None:
    step = run([request_of("r", prompt_tokens=10, max_tokens=3)], cost_model="roofline").steps[1]
    shape = shape_for("qwen2.5-7b")
    num_bytes = shape.weight_bytes() - 2 * shape.vocab * shape.hidden + shape.kv_bytes_per_token() * (11 + 1)
    assert step.sections_ns["model_forward"] == pytest.approx(num_bytes / 3350e9 * 1e9, rel=1e-3)


def test_a_long_roofline_prefill_is_bound_by_compute() -> None:
    step = run([request_of("r", prompt_tokens=4096, max_tokens=1)], cost_model="roofline").steps[0]
    shape = shape_for("qwen2.5-7b")
    flops = (
        shape.linear_flops_per_token() * 4096
        + shape.attention_flops_per_position() * 4096 * 4097 // 2
        + shape.lm_head_flops()
    )
    assert step.sections_ns["model_forward"] == pytest.approx(flops / 989.4e12 * 1e9, abs=1)


@pytest.mark.parametrize("cost_model", ["roofline", "lenvm-h100"])
def test_steps_cost_more_with_a_larger_base_or_value_model(cost_model: str) -> None:
    def total_ns(model: str, value_model: str) -> int:
        requests = [request_of(f"r{i}", max_tokens=30, sampling=FILTERED, guidance=NEUTRAL) for i in range(4)]
        return run(requests, model=model, value_model=value_model, cost_model=cost_model).makespan_ns()

    sizes = ["qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b", "qwen2.5-7b", "qwen2.5-14b"]
    by_model = [total_ns(size, VALUE_MODEL) for size in sizes]
    by_value_model = [total_ns("qwen2.5-7b", size) for size in sizes]
    assert by_model == sorted(set(by_model))
    assert by_value_model == sorted(set(by_value_model))


def test_guided_roofline_steps_price_the_value_model() -> None:
    requests = [request_of("r", prompt_tokens=50, max_tokens=20, sampling=FILTERED, guidance=NEUTRAL)]
    steps = run(requests, cost_model="roofline", value_model=VALUE_MODEL).steps
    weights_ns = weight_read_bytes(shape_for(VALUE_MODEL).as_value_model()) / 3350e9 * 1e9
    scored = [step for step in steps if step.guided_rows]
    assert "value_model_load" in scored[0].sections_ns
    assert all(step.sections_ns["lvm_forward"] >= weights_ns for step in scored)
    assert all("lvm_forward" not in step.sections_ns for step in steps if not step.guided_rows)


def test_llm_mock_gives_each_request_a_last_step_without_a_token_and_runs_ten_at_a_time() -> None:
    simulation = run([request_of("r", prompt_tokens=100, max_tokens=1000, ignore_eos=False)], cost_model="llm-mock")
    assert [step.output_tokens for step in simulation.steps] == [1] * 70 + [0]
    assert sequences_of(simulation)[0].num_output == 70
    times = [simulation.steps[place].dur_ns for place in (0, 1, -1)]
    assert times == [mock_step_ns(1, 100, 100), mock_step_ns(1, 101, 1), mock_step_ns(1, 170, 1)]
    requests = [request_of(f"r{i}", prompt_tokens=10 * (i + 1), max_tokens=3) for i in range(12)]
    steps = run(requests, cost_model="llm-mock").steps
    assert [step.num_seqs for step in steps] == [10] * 4 + [2] * 4
    assert steps[0].dur_ns == mock_step_ns(10, 100, 100)


def test_an_unknown_model_or_device_is_refused() -> None:
    for config, message in (
        ({"model": "qwen2.5-8b"}, "unknown model 'qwen2.5-8b'"),
        ({"value_model": "tiny"}, "unknown model 'tiny'"),
        ({"hardware": "abacus"}, "unknown hardware 'abacus'"),
    ):
        with pytest.raises(UsageError, match=message):
            cost_model_for(SimConfig(**config))


@pytest.mark.parametrize(("has_value_model", "cv"), [(False, 0.14), (True, 0.018)])
def test_server_lives_vary_as_published(has_value_model: bool, cv: float) -> None:
    lives = []
    for seed in range(400):
        noise = published_noise(seed, has_value_model=has_value_model)
        lives.append(statistics.fmean(noise() for _ in range(100)))
    assert statistics.fmean(lives) == pytest.approx(1.0, abs=0.02)
    assert statistics.stdev(lives) / statistics.fmean(lives) == pytest.approx(cv, rel=0.12)


def test_noise_changes_times_and_nothing_else() -> None:
    requests = [request_of("r", max_tokens=20)]
    quiet, noisy = run(requests).steps, run(requests, noise="published", noise_seed=3).steps
    assert [step.context_tokens for step in quiet] == [step.context_tokens for step in noisy]
    assert all(a.dur_ns != b.dur_ns for a, b in zip(quiet, noisy, strict=True))
    assert all(
        step.dur_ns == sum(step.sections_ns[name] for name in ("schedule", "model_forward", "sampler_total"))
        for step in noisy
    )


def test_without_overlap_a_step_takes_longer_by_its_scheduling() -> None:
    requests = [request_of("r", max_tokens=3)]
    on, off = run(requests).steps[1], run(requests, overlap_schedule=False).steps[1]
    assert off.dur_ns - on.dur_ns == off.sections_ns["schedule"] - on.sections_ns["schedule"] == 1_000_000


@pytest.mark.parametrize("name", ["lenvm-h100", "roofline", "llm-mock"])
@given(st.integers(1, 2000), st.integers(1, 8000), st.booleans())
def test_the_lines_of_a_decode_stretch_are_the_price_of_its_steps(
    name: str, rows: int, mean: int, greedy: bool
) -> None:
    model = cost_model_for(SimConfig(cost_model=name))
    context = rows * mean
    batch = decode_batch(rows, context, decode_context=0, is_greedy=greedy, longest_context=mean, most_new_tokens=1)
    first = msgspec.structs.replace(batch, context_tokens=rows, longest_context=1)
    assert model.decode(first).cost_at(mean if model.rules.pads_batches else context) == model.price(batch)
