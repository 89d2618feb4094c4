"""Which way of backfill is cheaper, on passes whose true times are planted."""

from dataclasses import replace

import numpy as np
import pytest

from benchctl.analysis.bonus import (
    bonus_design,
    cheaper_from,
    decode_point,
    judge_backfill,
    measured_design,
    points_of,
    verdict_sentences,
)
from benchctl.errors import UsageError
from benchmarks.verdict.bonus_truth import ROW_NS, Planted, events_of, modes_of, true_ns, verdicts
from benchmarks.verdict.shares import COVERS_AT_LEAST, SELDOM, row

BOTH = ("eager", "graph")
CONTEXT = 256


def design(*batch_sizes, modes=("eager",), **more):
    return bonus_design(batch_sizes, CONTEXT, modes, **more)


def planted_times(case, *, num_blocks=8, scatter=0.01):
    return Planted(design=case, num_blocks=num_blocks, scatter=scatter).times(np.random.default_rng(4212))


def rows_of_all(verdict):
    """Without graphs, the rows in which every sequence lacks a token."""
    return [row for row in verdict.rows("eager", "eager") if row.bonus_tokens == row.batch_size]


def exact_times(case, num_blocks=8):
    return {
        (p, mode): dict.fromkeys(range(num_blocks), true_ns(p, mode))
        for p in points_of(case)
        for mode in modes_of(case)
    }


def test_a_design_measures_each_pass_once_and_can_be_recognised_in_its_points():
    points = points_of(design(5, 10))
    sizes = [(p.phase, p.batch_size) for p in points]
    decodes, prefills = (5, 6, 7, 9, 10, 11, 12, 14, 18, 20), (1, 2, 4, 5, 8, 10)
    assert sorted(sizes) == [*(("decode", size) for size in decodes), *(("prefill", size) for size in prefills)]
    passes = [(point, mode) for point in points for mode in BOTH]
    assert measured_design(passes) == design(5, 10, modes=BOTH)
    assert {row.batch_size for row in measured_design(passes[:-1])} == {5}, "10 tokens lack a mode"
    assert measured_design([]) == ()


def test_every_count_of_bonus_tokens_can_be_asked_for_and_an_impossible_design_is_refused():
    assert [row.bonus_tokens for row in design(5, every_count=True)] == [1, 2, 3, 4, 5]
    assert [row.bonus_tokens for row in design(1, 8)] == [1, 1, 2, 4, 8]
    for sizes, context in (((), 8), ((0, 5), 8), ((5,), 0)):
        with pytest.raises(UsageError, match=r"give at least one|1 or more"):
            bonus_design(sizes, context, ("eager",))


def test_without_noise_every_cost_is_the_planted_one():
    case = design(5, 10, modes=BOTH)
    verdict = judge_backfill(exact_times(case), case)
    for each in verdict.comparisons:
        costs = [each.decode_ns.value, each.expansion_ns.value, each.difference_ns.value]
        decode_ns = true_ns(decode_point(each.batch_size, CONTEXT), each.decode_mode)
        difference_ns = Planted(design=case).true_difference_ns(each)
        assert costs == pytest.approx([decode_ns, ROW_NS * each.bonus_tokens, difference_ns])
        assert each.cheaper == "expansion"
    assert cheaper_from(verdict.rows("graph", "eager")) == ("expansion", 5, 10)


def test_the_batch_from_which_a_prefill_pass_is_cheaper_is_found():
    case = design(2, 8, 32, 128)
    times = planted_times(case, scatter=0.002)
    for (point, _), by_block in times.items():
        if point.phase == "decode":  # attention over a long cache: rows of a decode are dear
            for block in by_block:
                by_block[block] += 50_000 * point.batch_size
    verdict = judge_backfill(times, case)
    rows = rows_of_all(verdict)
    assert [row.cheaper for row in rows] == ["expansion", "expansion", "prefill", "prefill"]
    assert cheaper_from(rows) == ("prefill", 32, 128)
    assert cheaper_from(verdict.rows("eager", "eager")) is None, "with one bonus token expansion stays cheaper"


def test_five_blocks_give_costs_but_no_verdict_one_no_intervals_and_one_without_a_pass_no_part_of_its_row():
    case = design(5)
    five = judge_backfill(planted_times(case, num_blocks=5), case)
    assert {row.cheaper for row in five.comparisons} == {None}
    assert all(row.difference_ns.high < 0 for row in five.comparisons)
    (*_, row) = judge_backfill(planted_times(case, num_blocks=1), case).comparisons
    assert (row.difference_ns.low, row.cheaper, row.num_blocks) == (None, None, 1)
    assert {cost.high for cost in (row.decode_ns, row.expansion_ns, row.prefill_ns)} == {None}
    times = planted_times(case)
    del times[decode_point(10, CONTEXT), "eager"][3]
    assert {row.bonus_tokens: row.num_blocks for row in judge_backfill(times, case).comparisons}[5] == 7


def test_more_rows_widen_the_interval_of_each_and_share_one_level():
    times = planted_times(design(2, 5, 10, 20))
    alone, among = (judge_backfill(times, case) for case in (design(5), design(2, 5, 10, 20)))
    wide = next(r for r in among.comparisons if (r.batch_size, r.bonus_tokens) == (5, 5))
    narrow = alone.comparisons[-1]
    assert wide.difference_ns.value == narrow.difference_ns.value
    assert wide.difference_ns.high >= narrow.difference_ns.high
    assert 0.95 <= among.row_confidence <= 1 - 0.05 / len(among.comparisons)


@pytest.mark.parametrize(("scatter", "outlier_share"), [(0.05, 0.0), (0.02, 0.1)])
def test_all_intervals_of_an_experiment_hold_the_truth_together(scatter, outlier_share):
    """A small version of ``benchmarks/verdict/bonus_truth.py``: 9 rows of two batch sizes share one level."""
    case = Planted(design=design(2, 10), num_blocks=6, scatter=scatter, outlier_share=outlier_share)
    shares = row({}, [events_of(case, verdict) for verdict in verdicts(case, 50)]).shares
    assert COVERS_AT_LEAST.is_met(shares["all rows cover"])
    assert SELDOM.is_met(shares["any wrong way"])


def test_near_the_crossing_a_wrong_way_is_seldom_named_and_far_from_it_the_right_one_always():
    case = Planted(design=design(4, 16), num_blocks=6, scatter=0.02, excess_ns=0.0)
    equal = row({}, [events_of(case, verdict) for verdict in verdicts(case, 50)]).shares
    assert SELDOM.is_met(equal["any wrong way"])
    for excess_ns in (-400_000.0, 400_000.0):
        apart = replace(case, excess_ns=excess_ns)
        shares = row({}, [events_of(apart, verdict) for verdict in verdicts(apart, 8)]).shares
        assert (shares["all ways named"].hits, shares["any wrong way"].hits) == (8, 0)


def test_the_cheaper_way_is_said_with_the_batch_from_which_on_and_reasons_for_silence_are_said():
    def sentences_of(case, times):
        return verdict_sentences(judge_backfill(times, case))

    both, case, lone = design(5, 10, modes=BOTH), design(32), design(5)
    first, *_, together = sentences_of(both, planted_times(both, scatter=0.005))
    assert first == (
        "decode and prefill without graphs: batch expansion is cheaper from batch 5 on (measured up to 10), for "
        "every number of tokens"
    )
    assert together.startswith("all intervals hold at the same time with 95% confidence")
    times = planted_times(case, scatter=0.005)
    dear = times[decode_point(64, CONTEXT), "eager"]
    dear.update({block: time_ns + 5_000_000 for block, time_ns in dear.items()})
    sentence = sentences_of(case, times)[0]
    assert "where every sequence lacks a token, a prefill pass is cheaper at batch 32; for fewer tokens" in sentence
    noisy = {key: {b: 1e6 * (1 + b % 3) for b in range(8)} for key in planted_times(lone)}
    noisy[decode_point(10, CONTEXT), "eager"] = {b: 1e6 * (1 + (b + 1) % 3) + 1e6 for b in range(8)}
    assert "inconclusive at batch 5, whose interval holds 0; more blocks" in sentences_of(lone, noisy)[0]
    three = sentences_of(lone, planted_times(lone, num_blocks=3))
    assert "no verdict from 3 blocks; 6 are the least" in three[0]
