"""Counts and rates of speculative decoding, from planted steps."""

import pytest

from benchctl.analysis.metrics.run import run_metrics
from benchctl.analysis.metrics.speculation import (
    DraftCounts,
    PositionAcceptance,
    draft_counts,
    run_drafts,
)
from benchctl.records.columns import columns_from
from benchctl.records.loaded import LoadedRun
from benchctl.records.record import RunRecord
from benchctl.records.schema import PrometheusSample, StepRecord


def step(number, **changed):
    return StepRecord(
        step=number, start_ns=10 * number, dur_ns=7, clock="host", phase="decode", num_seqs=4, **changed
    )


def run_with(samples):
    """A run without a step log."""
    record = RunRecord(schema_version=3, index=0, run_id="r", block=0, position=0, variant="v")
    return LoadedRun(record=record, prometheus=tuple(samples))


STEPS = (
    step(0, drafts=4, draft_tokens=12, accepted_tokens=6, accepted_by_position=(3, 2, 1)),
    step(1),
    step(2, drafts=4, draft_tokens=8, accepted_tokens=4, accepted_by_position=(3, 1)),
)


def test_counts_are_sums_over_the_steps_that_drafted():
    assert draft_counts(columns_from(STEPS)) == DraftCounts(
        drafts=8, draft_tokens=20, accepted_tokens=10, accepted_by_position=(6, 3, 1)
    )


def test_acceptance_is_what_vllm_calls_so():
    metrics = draft_counts(columns_from(STEPS)).metrics
    assert metrics["acceptance_rate"] == 10 / 20
    assert metrics["acceptance_length"] == 1 + 10 / 8
    assert (metrics["drafts"], metrics["draft_tokens"], metrics["accepted_tokens"]) == (8, 20, 10)


def test_each_position_has_a_share_of_all_drafts_and_of_those_that_came_so_far():
    first, second, third = draft_counts(columns_from(STEPS)).positions
    assert first == PositionAcceptance(position=1, accepted=6, survival=0.75, conditional=0.75)
    assert second == PositionAcceptance(position=2, accepted=3, survival=0.375, conditional=0.5)
    assert third == PositionAcceptance(position=3, accepted=1, survival=0.125, conditional=pytest.approx(1 / 3))


def test_a_position_that_no_draft_reached_has_no_conditional_acceptance():
    counts = DraftCounts(drafts=5, draft_tokens=10, accepted_tokens=0, accepted_by_position=(0, 0))
    assert [at.conditional for at in counts.positions] == [0, None]
    assert [at.survival for at in counts.positions] == [0, 0]


def test_a_server_without_a_step_log_has_its_counters():
    prefix = "vllm:spec_decode_num"
    names = [f"{prefix}_{name}_total" for name in ("drafts", "draft_tokens", "accepted_tokens")]
    names += [f'{prefix}_accepted_tokens_per_pos_total{{position="{position}"}}' for position in range(2)]
    samples = [
        PrometheusSample(t_ns=t_ns, values=dict(zip(names, values, strict=True)))
        for t_ns, values in ((0, (5.0, 10.0, 6.0, 4.0, 2.0)), (9, (9.0, 18.0, 12.0, 8.0, 4.0)))
    ]
    run = run_with(samples)
    assert run_drafts(run) == DraftCounts(drafts=4, draft_tokens=8, accepted_tokens=6, accepted_by_position=(4, 2))
    assert run_drafts(run_with(samples[:1])) == DraftCounts()
    assert run_metrics(run)["acceptance_length"] == 2.5


def test_nothing_is_known_of_steps_that_count_no_drafts_and_no_rate_of_drafts_without_tokens():
    counts = draft_counts(columns_from([step(0)]))
    assert counts == DraftCounts()
    assert set(counts.metrics.values()) == {None}
    assert counts.positions == ()
    metrics = DraftCounts(drafts=0, draft_tokens=0, accepted_tokens=0).metrics
    assert (metrics["drafts"], metrics["acceptance_rate"], metrics["acceptance_length"]) == (0, None, None)
