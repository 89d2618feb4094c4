"""Guided rows drawn together count what single rows count, in distribution."""

import math
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from support.servers.simulator import FILTERED, NEUTRAL, VALUE_MODEL, request_of, run

from benchctl.guided.params import GuidanceParams
from benchctl.sim.core import Simulation
from benchctl.sim.guidance import CandidateLaw, scoring_threshold
from benchctl.sim.requests import SamplingParams

TILTED = GuidanceParams(mode="centered_exp", value_scale=-10.0)
UNCERTAIN = GuidanceParams(mode="centered_exp", value_scale=-10.0, value_entropy_threshold=0.4)
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
def guided_run(case: str, mode: str, seed: int = 0) -> Simulation:
    sampling, guidance, revision = CASES[case]
    requests = [
        request_of(f"r{i}", prompt_tokens=30, max_tokens=4000, sampling=sampling, guidance=guidance, seed=seed + i)
        for i in range(12)
    ]
    config = {"value_model": VALUE_MODEL, "revision": revision, "noise_seed": seed}
    return run(requests, guided_rows=mode, **config)


def sample(case: str, mode: str, column: str) -> np.ndarray:
    values = guided_run(case, mode).step_columns().optional(column)
    return np.zeros(1) if values is None else np.nan_to_num(values[50::EVERY], nan=-1.0)


@cases
@pytest.mark.parametrize("column", ["guided_rows", "candidates", "value_extend_tokens", "fused"])
def test_counts_have_one_distribution_whether_rows_are_drawn_singly_or_together(case: str, column: str) -> None:
    one, other = sample(case, "exact", column), sample(case, "aggregate", column)
    if np.ptp(np.concatenate((one, other))) == 0:
        return
    assert stats.ks_2samp(one, other).pvalue > 0.001


@cases
def test_the_number_of_scored_rows_is_binomial(case: str) -> None:
    sampling, guidance, revision = CASES[case]
    share = scoring_threshold(CandidateLaw.of(guidance, sampling, revision))
    scored = guided_run(case, "aggregate").step_columns().optional("guided_rows")
    observed = np.bincount(scored[1:].astype(int), minlength=13)
    expected = stats.binom.pmf(np.arange(13), 12, share) * observed.sum()
    common = expected >= 5
    rest = observed[~common].sum(), expected[~common].sum()
    if common.sum() > 1:
        pairs = [*zip(observed[common], expected[common], strict=True), *([rest] if rest[1] > 1 else [])]
        counts, means = map(np.array, zip(*pairs, strict=True))
        assert stats.chisquare(counts, means * counts.sum() / means.sum()).pvalue > 0.001
    else:
        assert observed[common].sum() == observed.sum()


@cases
def test_scored_rows_have_the_candidates_that_the_law_gives_them_and_what_is_followed_adds_up(case: str) -> None:
    sampling, guidance, revision = CASES[case]
    law = CandidateLaw.of(guidance, sampling, revision)
    columns = guided_run(case, "aggregate").step_columns()
    assert columns.total("value_prefill_tokens") == 12 * 30
    # all tokens but those after the last time that a row was scored
    assert 12 * (4000 - 1) - 12 * 300 <= columns.total("value_extend_tokens") <= 12 * (4000 - 1)
    if case != "whole vocabulary":  # there a row may have 152,064
        scored, threshold = columns.total("guided_rows"), scoring_threshold(law)
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
