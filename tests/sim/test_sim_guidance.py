"""What guidance does in the core: who is scored, who lags, what it takes to ask for it."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.servers.simulator import FILTERED, NEUTRAL, VALUE_MODEL, request_of, run, sequences_of

from benchctl.errors import UsageError
from benchctl.guided.params import GuidanceParams
from benchctl.sim.core import Simulation
from benchctl.sim.guidance import CandidateLaw, GuidedRow, candidate_bound, candidate_entropy, score_rows
from benchctl.sim.http.api import parse_custom_params
from benchctl.sim.requests import SamplingParams

TILTED = GuidanceParams(mode="centered_exp", value_scale=-10.0)


def guided_run(
    *,
    sampling: SamplingParams = FILTERED,
    guidance: GuidanceParams = NEUTRAL,
    num_requests: int = 6,
    **config: object,
) -> Simulation:
    requests = [
        request_of(f"r{i}", prompt_tokens=20 + i, max_tokens=40, sampling=sampling, guidance=guidance, seed=i)
        for i in range(num_requests)
    ]
    return run(requests, value_model=VALUE_MODEL, **config)


def test_guided_steps_count_what_the_value_model_did() -> None:
    steps = guided_run().steps
    assert all(0 <= (step.guided_rows or 0) <= step.num_seqs for step in steps)
    for step in steps:
        assert 2 * step.guided_rows <= step.candidates <= 5 * step.guided_rows
        assert ("lvm_forward" in step.sections_ns) == (step.guided_rows > 0)
        assert "lvm_build_pending" in step.sections_ns
    # The opening token of every answer has a choice, so each prompt is prefilled at once, and once.
    assert steps[0].value_prefill_tokens == sum(20 + i for i in range(6))
    assert sum(step.value_prefill_tokens or 0 for step in steps) == sum(20 + i for i in range(6))


def test_rows_that_were_skipped_are_caught_up_when_they_are_scored() -> None:
    steps = guided_run(num_requests=1).steps
    scored = [step.step for step in steps if step.guided_rows]
    assert 1 < len(scored) < len(steps)
    extended = [step.value_extend_tokens for step in steps if step.guided_rows]
    assert extended == [0, *(after - before for before, after in itertools.pairwise(scored))]


def test_each_sample_of_a_prompt_is_prefilled_by_the_value_model() -> None:
    request = request_of("r", prompt_tokens=64, n=4, sampling=FILTERED, guidance=NEUTRAL)
    steps = run([request], value_model=VALUE_MODEL).steps
    assert sum(step.value_prefill_tokens or 0 for step in steps) == 4 * 64
    assert sum(step.num_prefill_tokens or 0 for step in steps) < 2 * 64


@pytest.mark.parametrize("sampling", [SamplingParams(top_k=1), SamplingParams(temperature=0.0, top_k=5)])
def test_a_greedy_request_is_never_guided(sampling: SamplingParams) -> None:
    steps = guided_run(sampling=sampling).steps
    assert all(step.is_greedy for step in steps)
    assert sum(step.guided_rows or 0 for step in steps) == 0
    assert {name for step in steps for name in step.sections_ns} == {"schedule", "model_forward", "sampler_total"}


def test_the_value_model_is_loaded_by_the_first_scored_step_and_only_there() -> None:
    plain = request_of("plain", max_tokens=3)
    guided = request_of("guided", max_tokens=5, sampling=FILTERED, guidance=NEUTRAL)
    steps = run([plain, guided], arrival_ns=[0, 10**12], value_model=VALUE_MODEL).steps
    loading = [step.step for step in steps if "value_model_load" in step.sections_ns]
    assert loading == [4]
    assert steps[3].sections_ns["value_model_load"] == pytest.approx(3.1e9, rel=0.05)


def test_only_v2_skips_the_value_model_at_a_neutral_scale() -> None:
    scored = {
        revision: sum(step.guided_rows or 0 for step in guided_run(revision=revision).steps)
        for revision in ("V1", "V2", "V4")
    }
    assert scored["V1"] == scored["V4"] > 0
    assert scored["V2"] == 0
    assert sum(step.guided_rows or 0 for step in guided_run(revision="V2", guidance=TILTED).steps) > 0


def test_v2_fuses_when_no_scored_row_lags_and_v4_always() -> None:
    v2 = guided_run(revision="V2", guidance=TILTED).steps
    assert {step.fused for step in v2 if step.guided_rows} == {True, False}
    assert all((step.fused is None) == (step.guided_rows == 0) for step in v2)
    assert all(step.fused for step in guided_run(revision="V4").steps if step.guided_rows)
    assert {step.fused for step in guided_run(revision="V1").steps} == {None}


def test_a_fused_forward_is_shorter() -> None:
    steps = [s for s in guided_run(revision="V2", guidance=TILTED).steps if s.guided_rows]
    fused = {step.sections_ns["lvm_forward"] for step in steps if step.fused}
    unfused = {step.sections_ns["lvm_forward"] for step in steps if not step.fused}
    assert max(fused) < min(unfused)


def test_a_high_entropy_threshold_skips_rows() -> None:
    def scored(threshold: float | None) -> int:
        guidance = GuidanceParams(mode="centered_exp", value_scale=0.0, value_entropy_threshold=threshold)
        return sum(step.guided_rows or 0 for step in guided_run(guidance=guidance).steps)

    assert scored(None) == scored(0.0) > scored(0.5) > scored(math.log(5)) == 0


def test_without_filters_every_row_has_top_k_candidates() -> None:
    steps = guided_run(sampling=SamplingParams(top_k=5)).steps
    assert all(step.candidates == 5 * step.num_seqs for step in steps)


def test_neutral_guidance_changes_no_token_and_a_tilt_does() -> None:
    def texts(guidance: GuidanceParams | None) -> list[str]:
        requests = [request_of("r", max_tokens=30, sampling=FILTERED, guidance=guidance)]
        return [seq.answer.text() for seq in sequences_of(run(requests, value_model=VALUE_MODEL))]

    assert texts(NEUTRAL) == texts(None)
    assert texts(TILTED) != texts(None)


@given(st.floats(1e-6, 0.99), st.floats(0.05, 0.999))
def test_the_bound_is_that_of_the_stricter_filter(min_p: float, top_p: float) -> None:
    bound = candidate_bound(SamplingParams(min_p=min_p, top_p=top_p))
    assert bound == pytest.approx(min(-math.log(min_p), -math.log(1 - top_p)))
    assert candidate_bound(SamplingParams()) == math.inf


@given(st.floats(1e-6, 30), st.integers(2, 50))
def test_the_entropy_formula_is_the_entropy(gap: float, count: int) -> None:
    weights = [math.exp(-gap * rank) for rank in range(count)]
    total = sum(weights)
    expected = -sum(w / total * math.log(w / total) for w in weights if w > 0)
    assert candidate_entropy(gap, count) == pytest.approx(expected, abs=1e-6)
    assert candidate_entropy(1e-20, count) == math.log(count)


def test_a_stronger_filter_leaves_more_rows_without_a_choice() -> None:
    def share(min_p: float) -> float:
        stream = iter([(i + 0.5) / 1000 for i in range(1000)])
        sampling = SamplingParams(top_k=5, min_p=min_p)
        law = CandidateLaw.of(NEUTRAL, sampling, "V1")
        row = GuidedRow(law, prompt_tokens=1, draw=lambda: next(stream))
        return sum(row.num_candidates(5) == 1 for _ in range(1000)) / 1000

    assert share(0.01) == pytest.approx(0.75, abs=0.01)  # S / (S + ln 100), S = 13.8
    assert share(0.1) > share(0.01) > share(0.001)


def test_a_natural_answer_that_repeats_itself_leaves_no_choice() -> None:
    row = GuidedRow(CandidateLaw.of(NEUTRAL, FILTERED, "V1"), prompt_tokens=10, draw=lambda: 0.0, repeats_from=20)
    assert row.num_candidates(19) == 5
    assert row.num_candidates(20) == 1
    assert score_rows([(row, 25)], "V1").scored_rows == 0


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, None),
        ({"gamma": 0.9, "value_entropy_threshold": 1.0, "value_min": 0.1}, None),
        ({"scale": -2}, GuidanceParams(mode="mul", value_scale=-2.0)),
        ({"mode": "exp", "value_mode": "mul"}, GuidanceParams(mode="exp")),
        (
            {"value_scale": 0.5, "gamma": 0.5, "length_gamma": 0.9, "entropy_threshold": 0.2},
            GuidanceParams(mode="mul", value_scale=0.5, gamma=0.9, value_entropy_threshold=0.2),
        ),
        ({"target_length": 100, "op": "le"}, GuidanceParams(mode="mul", target_length=100, value_constraint="le")),
        ({"op": "=="}, GuidanceParams(mode="mul")),
    ],
)
def test_custom_params_are_understood(params: dict[str, object], expected: GuidanceParams | None) -> None:
    assert parse_custom_params(params, top_k=5, revision="V1") == expected


@pytest.mark.parametrize(
    ("params", "top_k", "revision", "message"),
    [
        ({"value_scal": 1}, 5, "V1", "unknown key 'value_scal'; did you mean 'value_scale'"),
        ({"zzz": 1}, 5, "V1", "unknown key 'zzz'; known keys are"),
        ({"mode": "harder"}, 5, "V1", "mode is 'harder'; it must be one of mul, linear"),
        ({"value_scale": "1"}, 5, "V1", "value_scale is '1'; it must be a finite number"),
        ({"value_scale": float("nan")}, 5, "V1", "it must be a finite number"),
        ({"scale": True}, 5, "V1", "scale is True; it must be a finite number"),
        ({"scale": 1, "gamma": 1.0}, 5, "V1", "gamma is 1.0; it must lie strictly between 0 and 1"),
        ({"op": "near"}, 5, "V1", "op is 'near'; it must be one of"),
        ({"target_value": 1.5}, 5, "V1", "target_value is 1.5; it must lie between 0"),
        ({"target_length": -1}, 5, "V1", "target_length is -1; it is a number of tokens and must be 0 or more"),
        ({"boosted_token_ids": [1]}, 5, "V1", "boosted_token_ids and token_temp_divisor must come together"),
        ({"mode": "centered_exp"}, -1, "V1", "mode 'centered_exp' with top_k -1; set a finite top_k"),
        ({"mode": "mul"}, -1, "V4", "mode 'mul' with top_k -1; set a finite top_k"),
        ({"target_value": 0.5}, 5, "V4", "revision V4 has no hard constraints"),
    ],
)
def test_custom_params_that_cannot_work_are_refused(
    params: dict[str, object], top_k: int, revision: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        parse_custom_params(params, top_k=top_k, revision=revision)


@pytest.mark.parametrize(
    ("guidance", "is_neutral"),
    [
        (NEUTRAL, True),
        (GuidanceParams(mode="value_bias", value_scale=1e-13), True),
        (GuidanceParams(mode="centered_exp", value_scale=0.001), False),
        (GuidanceParams(mode="mul", value_scale=1.0), True),
        (GuidanceParams(mode="mul", value_scale=-1.0), True),
        (GuidanceParams(mode="linear", value_scale=-1.0), False),
        (GuidanceParams(mode="exp", value_scale=1.0), True),
        (GuidanceParams(mode="exp", target_value=0.5), False),
    ],
)
def test_neutral_guidance_is_recognised(guidance: GuidanceParams, is_neutral: bool) -> None:
    assert guidance.is_neutral == is_neutral
