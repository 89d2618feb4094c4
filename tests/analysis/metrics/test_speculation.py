"""Counts and rates of speculative decoding, from planted steps."""

import pytest

from benchctl.analysis.metrics.run import run_metrics
from benchctl.analysis.metrics.speculation import (
    DraftCounts,
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


def test_counts_are_sums_over_the_steps_that_drafted_and_rates_are_what_vllm_calls_so():
    counts = draft_counts(columns_from(STEPS))
    assert counts == DraftCounts(drafts=8, draft_tokens=20, accepted_tokens=10, accepted_by_position=(6, 3, 1))
    assert counts.metrics == {
        "drafts": 8,
        "draft_tokens": 20,
        "accepted_tokens": 10,
        "acceptance_rate": 10 / 20,
        "acceptance_length": 1 + 10 / 8,
    }
    shares = [(each.position, each.accepted, each.survival, each.conditional) for each in counts.positions]
    assert shares == [(1, 6, 0.75, 0.75), (2, 3, 0.375, 0.5), (3, 1, 0.125, pytest.approx(1 / 3))]
    unreached = DraftCounts(drafts=5, draft_tokens=10, accepted_tokens=0, accepted_by_position=(0, 0))
    assert [(each.survival, each.conditional) for each in unreached.positions] == [(0, 0), (0, None)]


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
