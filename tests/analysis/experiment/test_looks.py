"""The declared rule for ending early: its looks, their levels, what they see, and what they cost."""

import math
import shutil
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given, strategies as st
from support.results.builders import edit_manifest, edit_run, write_results
from support.results.comparing import compare_arms, messages

from benchctl.analysis.analyzed import analyze_directory
from benchctl.analysis.compare.decide import chance_of_verdict, margins_of, verdict_of
from benchctl.analysis.compare.looks import take_look, widest_interval
from benchctl.analysis.experiment.experiment import load_experiment
from benchctl.analysis.experiment.looks import num_looks_of
from benchctl.analysis.statistics.estimate import estimate_paired
from benchctl.errors import ProfileError
from benchctl.profile.load import load_profile
from benchctl.profile.looks import SHARES, look_alpha, look_weights
from benchctl.profile.planning import look_blocks, stopping_rule
from benchctl.records.record import StoppingRecord
from benchctl.report.experiment_tables import headline, runs_table
from benchctl.report.export import list_directories
from benchmarks.verdict.look_levels import p_values

LOOKS = (6, 8, 10, 12)
NIGHTLY = pytest.mark.nightly
EARLY, LAST = (look_alpha(0.05, 4, 12, is_last=is_last) for is_last in (False, True))
RULE = StoppingRecord(precision_frac=0.02, confidence=1 - EARLY, last_confidence=1 - LAST, look_blocks=LOOKS)
FOR_VERDICT = msgspec.structs.replace(RULE, precision_frac=None)
SCATTER = (0.01, -0.012, 0.004, -0.007, 0.013, -0.008, 0.002, 0.006)
FOUR_MORE = (-0.003, 0.001, 0.002, 0.003)


def measured(path, by=1.0, scatter=SCATTER, rule=RULE):
    """Blocks whose guided step times scatter around ``by`` times those of the law, which are the baseline's."""
    factors = [{"baseline": 1.0, "guided": by * math.exp(noise)} for noise in scatter]
    results = write_results(path, block_factors=factors, cells=({"top_k": 1},))
    edit_manifest(results, stopping=rule)
    return results


def look_at(results, num_blocks, *metrics, rule=RULE, **options):
    return take_look(load_experiment(results.path), rule, num_blocks, metrics or ("step_ms",), **options)


@given(most=st.integers(6, 10_000), num_looks=st.integers(1, 20))
def test_every_plan_of_looks_increases_and_ends_at_the_last_block(most, num_looks):
    looks = look_blocks(most, num_looks)
    assert list(looks) == sorted(set(looks))
    assert (looks[-1], looks[0] >= 6, len(looks) <= num_looks) == (most, True, True)


def test_looks_are_even_from_six_blocks_to_the_most_and_the_last_has_the_larger_level():
    plans = {(12, 4): (6, 8, 10, 12), (24, 4): (6, 12, 18, 24), (20, 1): (20,), (8, 4): (6, 7, 8), (6, 4): (6,)}
    assert {plan: look_blocks(*plan) for plan in plans} == plans
    rule = stopping_rule(load_profile("topk-sweep", blocks=12, overrides=["stopping.precision=0.01"]))
    assert (rule.look_blocks, rule.looks, rule.precision_frac) == (LOOKS, (), 0.01)
    assert (rule.confidence, rule.last_confidence) == pytest.approx((1 - EARLY, 1 - LAST))
    assert 0.05 / 4 < EARLY < LAST < 0.05
    alone = stopping_rule(load_profile("topk-sweep", blocks=12, overrides=["stopping={until: verdict, looks: 1}"]))
    assert (alone.precision_frac, alone.look_blocks, alone.last_confidence) == (None, (12,), pytest.approx(0.95))
    assert stopping_rule(load_profile("topk-sweep")) is None


@given(
    num_looks=st.integers(2, 30),
    most=st.integers(6, 5_000),
    alpha=st.sampled_from([0.2, 0.1, 0.05, 0.03, 0.01, 0.001]),
)
def test_a_level_is_never_less_than_the_union_bound_needs_nor_that_of_fewer_looks_or_blocks(num_looks, most, alpha):
    early, last = (look_alpha(alpha, num_looks, most, is_last=is_last) for is_last in (False, True))
    assert 0.999999 * alpha / sum(look_weights(num_looks)) < early < last < alpha
    assert early <= look_alpha(alpha, num_looks - 1, most, is_last=False)
    assert early >= look_alpha(alpha, num_looks, most + 10, is_last=False)


@pytest.mark.parametrize(
    ("most", "num_looks"),
    [
        (7, 2),
        (12, 7),
        pytest.param(24, 4, marks=NIGHTLY),
        pytest.param(30, 9, marks=NIGHTLY),
        (100, 10),
        pytest.param(400, 20, marks=NIGHTLY),
    ],
)
def test_all_looks_together_miss_in_five_per_cent_whether_or_not_the_blocks_show_the_position(most, num_looks):
    """60,000 experiments of their own each: three standard errors are 0.27 %."""
    looks = look_blocks(most, num_looks)
    levels = np.array([look_alpha(0.05, len(looks), most, is_last=look == most) for look in looks])
    for is_own_slope in (False, True):
        p = p_values(looks, 60_000, is_own_slope=is_own_slope, name="test")
        assert 0.035 < np.mean(np.any(p < levels[:, None], axis=0)) < 0.0527


def test_with_many_blocks_equal_levels_are_those_of_published_tables():
    """Four looks, 5 %: Pocock's constant is 2.361; C. Jennison, B. W. Turnbull 1999, table 2.1."""
    p = p_values((10_000, 20_000, 30_000, 40_000), 200_000, is_own_slope=False, name="published")
    level = math.erfc(2.361 / math.sqrt(2))
    assert np.mean(np.any(p < level, axis=0)) == pytest.approx(0.05, abs=0.0016)
    assert all(a >= b for row in SHARES.values() for a, b in pairwise(row))


@pytest.mark.parametrize(
    ("overrides", "blocks", "words"),
    [
        (["stopping.precision=0.01"], 5, "the first look is after 6 blocks"),
        (["stopping.precision=0.01", "variants.guided=null", "sweep.top_k=null"], 8, "nothing to look at"),
        (["stopping.precision=1.5"], 8, "stopping.precision"),
        (["stopping.looks=3"], 8, "belongs to until: precision, which needs it"),
        (["stopping={until: verdict, precision: 0.01}"], 8, "leave it out with until: verdict"),
    ],
)
def test_a_rule_that_nothing_can_fulfil_is_refused(overrides, blocks, words):
    with pytest.raises(ProfileError, match=words):
        load_profile("topk-sweep", blocks=blocks, overrides=overrides)


def test_a_look_sees_half_the_interval_of_its_level_over_the_blocks_before_it(tmp_path):
    results = measured(tmp_path, scatter=(*SCATTER, *FOUR_MORE))
    for num_blocks, level in ((6, EARLY), (8, EARLY), (12, LAST)):
        (width,) = look_at(results, num_blocks).half_widths
        half = estimate_paired((*SCATTER, *FOUR_MORE)[:num_blocks], 1 - level).half_width
        assert width.half_width_frac == pytest.approx(math.expm1(half), rel=1e-4)
        assert (width.cell, width.metric, width.num_blocks) == ("guided top_k=1", "step_ms", num_blocks)
    worst = widest_interval(look_at(results, 8, "step_ms", "wall_s")).half_width_frac
    for factor, ends in ((1.01, True), (0.99, False)):
        rule = msgspec.structs.replace(RULE, precision_frac=factor * worst)
        assert look_at(results, 8, "step_ms", "wall_s", rule=rule).is_precise is ends


@pytest.mark.parametrize("by", [0.25, 4.0])
def test_only_the_width_ends_an_experiment_for_precision_and_never_what_it_saw(tmp_path, by):
    plain, other = (
        look_at(measured(tmp_path / f"{factor}", factor), 8, "step_ms", "wall_s") for factor in (1.0, by)
    )
    assert other.is_precise == plain.is_precise
    for left, right in zip(plain.half_widths, other.half_widths, strict=True):
        assert right.half_width_frac == pytest.approx(left.half_width_frac, rel=1e-3)


def test_a_block_with_a_run_that_is_not_done_does_not_count_and_what_no_block_can_tell_is_not_waited_for(tmp_path):
    results = measured(tmp_path / "r")
    for state in ("suspect", "failed"):
        edit_run(results, results.plan().runs[5].run_id, state=state)
        early, late = (look_at(results, num_blocks) for num_blocks in (6, 8))
        assert (early.half_widths[0].num_blocks, early.is_precise, late.half_widths[0].num_blocks) == (5, False, 7)
    still = measured(tmp_path / "still", scatter=(0.0,) * 6)
    assert look_at(still, 6, "step_ms", "gpu_energy_j").is_precise
    assert not look_at(still, 6, "gpu_energy_j").is_precise
    assert not look_at(still, 6, left_out={"guided top_k=1"}).is_precise


def test_blocks_that_the_rule_made_unnecessary_are_no_gaps_and_one_before_the_end_is(tmp_path):
    """Twelve planned blocks, of which the rule made six unnecessary."""
    rule = msgspec.structs.replace(RULE, precision_frac=0.5)
    results = measured(tmp_path, scatter=(*SCATTER, *FOUR_MORE), rule=rule)
    for planned in results.plan().runs[12:]:
        shutil.rmtree(results.run(planned.run_id).path)
    edit_manifest(results, stopping=msgspec.structs.replace(rule, looks=(look_at(results, 6, rule=rule),)))
    comparison, analysis = compare_arms(results), analyze_directory(tmp_path)
    codes = {warning.code for warning in comparison.warnings}
    assert not codes & {"excluded-block", "experiment-unfinished", "unmatched"}
    assert (comparison.cells[0].num_blocks, len(runs_table(analysis).rows), analysis.runs_not_begun) == (6, 12, ())
    (entry,) = list_directories(tmp_path)
    assert (entry["num_done"], entry["num_planned"]) == (12, 12)
    confidences = {estimate.confidence for row in analysis.sweep for estimate in row.estimates.values()}
    assert list(confidences) == [pytest.approx(1 - EARLY)]
    for words in ("12 of 12 runs done", "6 of at most 12 blocks (±50% reached)"):
        assert words in headline(analysis)
    lost = results.plan().runs[3]
    (results.run(lost.run_id).path / "run.json").unlink()
    assert messages(compare_arms(results), "excluded-block")
    assert analyze_directory(tmp_path).runs_not_begun == (lost,)


def test_a_comparison_pays_for_every_look_that_could_have_been_taken(tmp_path):
    results, other = (measured(tmp_path / name, scatter=(*SCATTER, *FOUR_MORE), rule=None) for name in "ab")
    fixed = compare_arms(results, metrics=("step_ms",))
    edit_manifest(results, stopping=RULE)
    declared = compare_arms(results, metrics=("step_ms",))
    (before,), (after,) = fixed.cells[0].deciding, declared.cells[0].deciding
    assert (fixed.num_looks, declared.num_looks) == (1, 4)
    assert after.estimate.log_interval == pytest.approx(before.estimate.interval_at(1 - LAST))
    assert declared.rules.confidence == after.judged_confidence == pytest.approx(1 - LAST)
    strict = compare_arms(results, metrics=("step_ms",), confidence=0.99)
    assert strict.rules.confidence == pytest.approx(1 - look_alpha(0.01, 4, 12, is_last=True))
    edit_manifest(other, stopping=RULE, label="another")
    assert num_looks_of(results.manifest(), other.manifest()) == 16, "each end of one may meet each of the other"
    assert num_looks_of(results.manifest(), results.manifest()) == 4
    of_both = compare_arms(results, other, metrics=("step_ms",))
    assert of_both.rules.confidence == pytest.approx(1 - look_alpha(0.05 / 4, 4, 12, is_last=True))


def test_a_rule_about_widths_alone_makes_intervals_too_narrow_and_its_levels_mend_that():
    """Experiments whose last interval holds the truth, where the width of an interval ended each of them."""
    stream, covered, num = np.random.default_rng(5), {(0.05, 0.05): 0, (EARLY, LAST): 0}, 250
    for _ in range(num):
        blocks = stream.normal(0.0, 0.01, size=12).tolist()
        for early, last in covered:
            for look in LOOKS:
                low, high = estimate_paired(blocks[:look], 1 - (last if look == 12 else early)).log_interval
                if (high - low) / 2 <= 0.006:
                    break
            covered[early, last] += low <= 0.0 <= high
    plain, corrected = (hits / num for hits in covered.values())
    assert plain < 0.945
    assert corrected > 0.955


@pytest.mark.parametrize(
    ("by", "factor", "ends_for", "words"),
    [
        (1.5, 1.0, "verdict", "regression: every metric that decides has its verdict"),
        (0.8, 1.0, "verdict", "improvement: every metric that decides has its verdict"),
        (1.0, 0.1, "verdict", "equivalent: every metric that decides has its verdict"),
        (1.015, 10.0, "futility", "inconclusive: a verdict by block 12 is unlikely: chance"),
        (1.02, 1.0, None, "chance of a verdict by block 12:"),
    ],
)
def test_a_rule_for_a_verdict_ends_with_it_or_where_none_is_likely_and_compare_says_the_same(
    tmp_path, by, factor, ends_for, words
):
    """Scatter of 1 % and a tenth and ten times of it, beside a margin of 1 %."""
    scatter = [factor * each for each in (*SCATTER, *FOUR_MORE)]
    results = measured(tmp_path, by, scatter, FOR_VERDICT)
    look = look_at(results, 6, "step_ms", "tpot_ms", "wall_s", rule=FOR_VERDICT)
    assert (look.ends_for, look.is_precise, words in look.reason) == (ends_for, False, True), look.reason
    edit_manifest(results, stopping=msgspec.structs.replace(FOR_VERDICT, looks=(look,)))
    ended = results.manifest().stopping.ended_after
    assert ended == (None if ends_for is None else 6)
    if ended is not None:
        for planned in results.plan().runs[12:]:
            shutil.rmtree(results.run(planned.run_id).path)
        comparison = compare_arms(results)
        assert look.reason.startswith(comparison.verdict)
        assert comparison.rules.confidence == pytest.approx(1 - EARLY)
        reached = "a verdict unlikely" if ends_for == "futility" else "a verdict reached"
        assert f"6 of at most 12 blocks ({reached})" in headline(analyze_directory(tmp_path))


def test_a_look_for_a_verdict_leaves_out_what_it_was_told_to_and_goes_on_where_nothing_can_be_judged(tmp_path):
    results = measured(tmp_path, 1.5, rule=FOR_VERDICT)
    nothing = look_at(results, 6, rule=FOR_VERDICT, left_out={"guided top_k=1"})
    assert (nothing.ends_for, nothing.reason) == (None, "nothing can be judged")
    for run in results.plan().runs[:2]:
        edit_run(results, run.run_id, state="failed")
    few = look_at(results, 6, rule=FOR_VERDICT)
    assert (few.ends_for, few.reason) == (
        None,
        "step_ms in guided top_k=1 has too few blocks that count (3 metrics open)",
    )
    results.write_profile("no profile")
    assert (look_at(results, 6, rule=FOR_VERDICT).reason or "").startswith("nothing can be judged: ")


def test_the_chance_of_a_verdict_is_the_share_of_futures_that_end_in_one():
    """Futures of 24 blocks, drawn as the first eight leave them possible."""
    stream, margins = np.random.default_rng(3), margins_of(0.01)
    for centre in (0.0, 0.01, 0.02, 0.04):
        first = stream.normal(0.0, 0.02, size=8)
        first += centre - first.mean()
        estimate = estimate_paired(first.tolist(), estimator="mean")
        chance = chance_of_verdict(estimate, margins, 24, 0.95)
        squares = float(((first - first.mean()) ** 2).sum())
        hits, trials = 0, 800
        for _ in range(trials):
            sd = math.sqrt(squares / stream.chisquare(7))
            rest = stream.normal(stream.normal(centre, sd / math.sqrt(8)), sd, size=16)
            blocks = np.concatenate([first, rest])
            half = 2.069 * blocks.std(ddof=1) / math.sqrt(24)
            interval = (blocks.mean() - half, blocks.mean() + half)
            hits += verdict_of(interval, margins, "lower") != "inconclusive"
        assert chance == pytest.approx(hits / trials, abs=0.07), centre
    assert chance_of_verdict(estimate_paired([0.1]), margins, 24, 0.95) == 0
    certain = estimate_paired([0.5] * 6, estimator="mean")
    assert chance_of_verdict(certain, margins, 24, 0.95) == 1
