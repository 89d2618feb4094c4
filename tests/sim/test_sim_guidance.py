"""Guidance in the core: who is scored, who lags, what it takes to ask for it, and rows that are drawn together."""

import itertools
import math
from functools import cache

import numpy as np
import pytest
from hypothesis import given, strategies as st
from scipy import stats
from support.servers.simulator import FILTERED, NEUTRAL, VALUE_MODEL, request_of, run, sequences_of

from benchctl.errors import UsageError
from benchctl.guided.params import GuidanceParams
from benchctl.sim.aggregate import scoring_threshold
from benchctl.sim.guidance import (
    CandidateLaw,
    GuidedRow,
    candidate_bound,
    candidate_entropy,
    score_rows,
)
from benchctl.sim.http.api import parse_custom_params
from benchctl.sim.requests import SamplingParams
from benchctl.sim.simulation import Simulation

TILTED = GuidanceParams(mode="centered_exp", value_scale=-10.0)
UNCERTAIN = GuidanceParams(mode="centered_exp", value_scale=-10.0, value_entropy_threshold=0.4)


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


def test_a_greedy_request_is_never_guided() -> None:
    for sampling in (SamplingParams(top_k=1), SamplingParams(temperature=0.0, top_k=5)):
        steps = guided_run(sampling=sampling).steps
        assert all(step.is_greedy and not step.guided_rows for step in steps)
        names = {name for step in steps for name in step.sections_ns}
        assert names == {"schedule", "model_forward", "sampler_total"}


def test_the_value_model_is_loaded_by_the_first_scored_step_and_only_there() -> None:
    plain = request_of("plain", max_tokens=3)
    guided = request_of("guided", max_tokens=5, sampling=FILTERED, guidance=NEUTRAL)
    steps = run([plain, guided], arrival_ns=[0, 10**12], value_model=VALUE_MODEL).steps
    loading = [step.step for step in steps if "value_model_load" in step.sections_ns]
    assert loading == [4]
    assert steps[3].sections_ns["value_model_load"] == pytest.approx(3.1e9, rel=0.05)


def test_only_v2_skips_the_value_model_at_a_neutral_scale_and_fuses_when_no_scored_row_lags() -> None:
    v1, v2, v4 = (guided_run(revision=revision).steps for revision in ("V1", "V2", "V4"))
    scored = [sum(step.guided_rows or 0 for step in steps) for steps in (v1, v2, v4)]
    assert scored[0] == scored[2] > scored[1] == 0
    assert {step.fused for step in v1} == {None}
    assert all(step.fused for step in v4 if step.guided_rows)
    tilted = [step for step in guided_run(revision="V2", guidance=TILTED).steps if step.guided_rows]
    fused, unfused = ({s.sections_ns["lvm_forward"] for s in tilted if s.fused is fuses} for fuses in (True, False))
    assert max(fused) < min(unfused)


def test_neutral_guidance_changes_no_token_and_a_tilt_does() -> None:
    def texts(guidance: GuidanceParams | None) -> list[str]:
        requests = [request_of("r", max_tokens=30, sampling=FILTERED, guidance=guidance)]
        return [seq.answer.text() for seq in sequences_of(run(requests, value_model=VALUE_MODEL))]

    assert texts(NEUTRAL) == texts(None)
    assert texts(TILTED) != texts(None)


def test_a_stronger_filter_and_an_answer_that_repeats_itself_leave_more_rows_without_a_choice() -> None:
    for min_p, top_p in ((0.01, 0.9), (0.3, 0.999)):
        bound = candidate_bound(SamplingParams(min_p=min_p, top_p=top_p))
        assert bound == pytest.approx(min(-math.log(min_p), -math.log(1 - top_p)))
    assert candidate_bound(SamplingParams()) == math.inf

    def share(min_p: float) -> float:
        stream = iter([(i + 0.5) / 1000 for i in range(1000)])
        law = CandidateLaw.of(NEUTRAL, SamplingParams(top_k=5, min_p=min_p), "V1")
        row = GuidedRow(law, prompt_tokens=1, draw=lambda: next(stream))
        return sum(row.num_candidates(5) == 1 for _ in range(1000)) / 1000

    assert share(0.01) == pytest.approx(0.75, abs=0.01)  # S / (S + ln 100), S = 13.8
    assert share(0.1) > share(0.01) > share(0.001)
    row = GuidedRow(CandidateLaw.of(NEUTRAL, FILTERED, "V1"), prompt_tokens=10, draw=lambda: 0.0, repeats_from=20)
    assert (row.num_candidates(19), row.num_candidates(20)) == (5, 1)
    assert score_rows([(row, 25)], "V1").scored_rows == 0


@given(st.floats(1e-6, 30), st.integers(2, 50))
def test_the_entropy_formula_is_the_entropy(gap: float, count: int) -> None:
    weights = [math.exp(-gap * rank) for rank in range(count)]
    total = sum(weights)
    expected = -sum(w / total * math.log(w / total) for w in weights if w > 0)
    assert candidate_entropy(gap, count) == pytest.approx(expected, abs=1e-6)
    assert candidate_entropy(1e-20, count) == math.log(count)


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


CASES = {
    "v1": (FILTERED, NEUTRAL, "V1"),
    "v2": (FILTERED, TILTED, "V2"),
    "v4 with threshold": (SamplingParams(top_k=20, min_p=0.01), UNCERTAIN, "V4"),
    "whole vocabulary": (SamplingParams(top_p=0.9), NEUTRAL, "V1"),
    "unfiltered": (SamplingParams(top_k=5), NEUTRAL, "V1"),
}
EVERY = 25
"""Steps between two that are compared: lags of rows are all but independent by then."""
cases = pytest.mark.parametrize("case", CASES)


@cache
def long_run(case: str, mode: str) -> Simulation:
    sampling, guidance, revision = CASES[case]
    requests = [
        request_of(f"r{i}", prompt_tokens=30, max_tokens=4000, sampling=sampling, guidance=guidance, seed=i)
        for i in range(12)
    ]
    return run(requests, guided_rows=mode, value_model=VALUE_MODEL, revision=revision)


@cases
@pytest.mark.parametrize("column", ["guided_rows", "candidates", "value_extend_tokens", "fused"])
def test_counts_have_one_distribution_whether_rows_are_drawn_singly_or_together(case: str, column: str) -> None:
    columns = [long_run(case, mode).step_columns().optional(column) for mode in ("exact", "aggregate")]
    samples = [np.zeros(1) if each is None else np.nan_to_num(each[50::EVERY], nan=-1.0) for each in columns]
    assert np.array_equal(*samples) or stats.ks_2samp(*samples).pvalue > 0.001


@cases
def test_as_many_rows_and_candidates_are_scored_as_the_law_gives_and_what_is_followed_adds_up(case: str) -> None:
    sampling, guidance, revision = CASES[case]
    law = CandidateLaw.of(guidance, sampling, revision)
    columns = long_run(case, "aggregate").step_columns()
    scored, threshold = columns.total("guided_rows"), scoring_threshold(law)
    num_drawn = columns.num_seqs[1:].sum()  # the opening token of every answer has a choice
    assert stats.binomtest(int(scored) - 12, int(num_drawn), threshold).pvalue > 0.001
    assert columns.total("value_prefill_tokens") == 12 * 30
    # all tokens but those after the last time that a row was scored
    assert 12 * (4000 - 1) - 12 * 300 <= columns.total("value_extend_tokens") <= 12 * (4000 - 1)
    if case != "whole vocabulary":  # there a row may have 152,064
        counts = np.array([law.count_at((i + 0.5) / 200_000 * threshold) for i in range(200_000)])
        margin = 4 * counts.std() / math.sqrt(scored) + 1e-9
        assert columns.total("candidates") / scored == pytest.approx(counts.mean(), abs=margin)


@given(st.floats(0.001, 0.5), st.integers(2, 50), st.none() | st.floats(0.01, 1.0), st.booleans(), st.floats(0, 1))
def test_a_row_is_scored_below_its_threshold_and_never_above(
    min_p: float, top_k: int, entropy: float | None, is_v4: bool, u: float
) -> None:
    guidance = GuidanceParams(mode="centered_exp", value_scale=1.0, value_entropy_threshold=entropy)
    law = CandidateLaw.of(guidance, SamplingParams(min_p=min_p, top_k=top_k), "V4" if is_v4 else "V1")
    threshold = scoring_threshold(law)
    if u < 1 and abs(u - threshold) > 1e-12:
        assert (law.count_at(u) > 1) == (u < threshold)
