"""The sentences of a verdict on backfill."""

import numpy as np

from benchctl.analysis.bonus import bonus_design, decode_point, judge_backfill, verdict_sentences
from benchmarks.verdict.bonus_truth import Planted

CONTEXT = 256


def sentences_of(case, times):
    return verdict_sentences(judge_backfill(times, case))


def times_of(case, num_blocks=8, scatter=0.005):
    return Planted(design=case, num_blocks=num_blocks, scatter=scatter).times(np.random.default_rng(4212))


def test_a_way_that_is_cheaper_in_every_row_is_named_with_the_batch_from_which_on():
    case = bonus_design((5, 10), CONTEXT, ("eager", "graph"))
    first, *others, together = sentences_of(case, times_of(case))
    assert first == (
        "decode and prefill without graphs: batch expansion is cheaper from batch 5 on (measured up to 10), for "
        "every number of tokens"
    )
    assert [sentence.partition(":")[0] for sentence in others] == [
        "decode without graphs, prefill with graphs",
        "decode with graphs, prefill without graphs",
        "decode and prefill with graphs",
    ]
    assert together.startswith("all differences lie in their intervals together with 95% confidence")


def test_a_way_that_is_cheaper_only_where_every_sequence_lacks_a_token_is_said_to_be():
    case = bonus_design((32,), CONTEXT, ("eager",))
    times = times_of(case)
    for block in times[decode_point(64, CONTEXT), "eager"]:
        times[decode_point(64, CONTEXT), "eager"][block] += 5_000_000
    sentence = sentences_of(case, times)[0]
    assert "where every sequence lacks a token, a prefill pass is cheaper at batch 32; for fewer tokens" in sentence


def test_an_interval_with_0_and_too_few_blocks_are_different_reasons_for_silence():
    case = bonus_design((5,), CONTEXT, ("eager",))
    noisy = {key: {b: 1e6 * (1 + b % 3) for b in by_block} for key, by_block in times_of(case).items()}
    noisy[decode_point(10, CONTEXT), "eager"] = {b: 1e6 * (1 + (b + 1) % 3) + 1e6 for b in range(8)}
    assert "inconclusive at batch 5, whose interval holds 0; more blocks" in sentences_of(case, noisy)[0]
    assert "no verdict from 3 blocks; 6 are the least" in sentences_of(case, times_of(case, num_blocks=3))[0]
    (two,) = sentences_of(case, times_of(case, num_blocks=2))
    assert "no verdict from 2 blocks" in two
