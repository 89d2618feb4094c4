"""The declared rule for ending early: when there is a look, what it sees, and what it costs."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.results.builders import edit_manifest, edit_run, write_results

from benchctl.analysis.analyzed import analyze_directory
from benchctl.analysis.compare.compare import CompareOptions, compare_sides
from benchctl.analysis.experiment.experiment import load_experiment
from benchctl.analysis.experiment.ladder import num_looks_of, take_look, widest_interval
from benchctl.analysis.experiment.pairing import Side
from benchctl.analysis.statistics.estimate import estimate_paired
from benchctl.analysis.stopping_rule import look_blocks, stopping_rule
from benchctl.errors import ProfileError
from benchctl.profile.load import load_profile
from benchctl.records.directory import ResultDirectory
from benchctl.records.record import StoppingRecord
from benchctl.report.experiment_tables import headline, runs_table
from benchctl.report.export import list_directories

RULE = StoppingRecord(precision_frac=0.02, confidence=0.9875, look_blocks=(6, 8, 10, 12))
SCATTER = (0.01, -0.012, 0.004, -0.007, 0.013, -0.008, 0.002, 0.006)


def measured(path: Path, *, by: float = 1.0, scatter: tuple[float, ...] = SCATTER) -> ResultDirectory:
    """Blocks whose guided step times scatter around ``by`` times those of the law."""
    return write_results(
        path, block_factors=[{"baseline": 1.0, "guided": by * math.exp(noise)} for noise in scatter]
    )


def test_looks_are_even_from_six_blocks_to_the_most() -> None:
    assert look_blocks(12, 4) == (6, 8, 10, 12)
    assert look_blocks(24, 4) == (6, 12, 18, 24)
    assert look_blocks(20, 1) == (20,)


def test_where_fewer_numbers_lie_between_there_are_fewer_looks() -> None:
    assert look_blocks(8, 4) == (6, 7, 8)
    assert look_blocks(6, 4) == (6,)


@given(most=st.integers(6, 10_000), num_looks=st.integers(1, 20))
def test_every_plan_of_looks_increases_and_ends_at_the_last_block(most: int, num_looks: int) -> None:
    looks = look_blocks(most, num_looks)
    assert list(looks) == sorted(set(looks))
    assert looks[-1] == most
    assert looks[0] >= 6
    assert 1 <= len(looks) <= num_looks


def test_a_profile_says_the_rule_and_each_look_has_its_share_of_alpha() -> None:
    profile = load_profile("topk-sweep", blocks=12, overrides=["stopping.precision=0.01"])
    rule = stopping_rule(profile)
    assert rule is not None
    assert rule.look_blocks == (6, 8, 10, 12)
    assert rule.confidence == pytest.approx(1 - 0.05 / 4)
    assert rule.looks == ()
    assert stopping_rule(load_profile("topk-sweep")) is None


@pytest.mark.parametrize(
    ("overrides", "blocks", "words"),
    [
        (["stopping.precision=0.01"], 5, "the first look is after 6 blocks"),
        (["stopping.precision=0.01", "variants.guided=null", "sweep.top_k=null"], 8, "nothing to look at"),
        (["stopping.precision=1.5"], 8, "stopping.precision"),
        (["stopping.looks=3"], 8, "precision"),
    ],
)
def test_a_rule_that_nothing_can_fulfil_is_refused(overrides: list[str], blocks: int, words: str) -> None:
    with pytest.raises(ProfileError, match=words):
        load_profile("topk-sweep", blocks=blocks, overrides=overrides)


def test_a_look_sees_half_the_interval_of_its_share_of_alpha(tmp_path: Path) -> None:
    look = take_look(load_experiment(measured(tmp_path).path), RULE, 8, ["step_ms"])
    (width,) = look.half_widths
    half = estimate_paired(SCATTER, 1 - 0.0125).half_width
    assert half is not None
    assert width.half_width_frac == pytest.approx(math.expm1(half), rel=1e-4)
    assert (width.cell, width.metric, width.num_blocks) == ("guided top_k=5", "step_ms", 8)


def test_a_look_counts_only_the_blocks_before_it(tmp_path: Path) -> None:
    results = load_experiment(measured(tmp_path).path)
    (width,) = take_look(results, RULE, 6, ["step_ms"]).half_widths
    half = estimate_paired(SCATTER[:6], 1 - 0.0125).half_width
    assert half is not None
    assert width.half_width_frac == pytest.approx(math.expm1(half), rel=1e-4)


@pytest.mark.parametrize("by", [0.25, 1.0, 4.0])
def test_only_the_width_ends_an_experiment_and_never_what_it_found(tmp_path: Path, by: float) -> None:
    plain = take_look(load_experiment(measured(tmp_path / "a").path), RULE, 8, ["step_ms", "wall_s"])
    other = take_look(load_experiment(measured(tmp_path / "b", by=by).path), RULE, 8, ["step_ms", "wall_s"])
    assert other.is_precise == plain.is_precise
    for left, right in zip(plain.half_widths, other.half_widths, strict=True):
        assert right.half_width_frac == pytest.approx(left.half_width_frac, rel=1e-3)


def test_an_experiment_ends_where_every_metric_is_within_the_precision(tmp_path: Path) -> None:
    results = load_experiment(measured(tmp_path).path)
    look = take_look(results, RULE, 8, ["step_ms", "wall_s"])
    worst = widest_interval(look)
    assert worst is not None
    assert worst.half_width_frac is not None
    for precision, ends in ((worst.half_width_frac * 1.01, True), (worst.half_width_frac * 0.99, False)):
        rule = StoppingRecord(precision_frac=precision, confidence=0.9875, look_blocks=(6, 8, 10, 12))
        assert take_look(results, rule, 8, ["step_ms", "wall_s"]).is_precise is ends


@pytest.mark.parametrize("state", ["suspect", "failed"])
def test_a_block_with_a_run_that_is_not_done_does_not_count(tmp_path: Path, state: str) -> None:
    results = measured(tmp_path)
    edit_run(results, results.plan().runs[5].run_id, state=state)
    look = take_look(load_experiment(tmp_path), RULE, 6, ["step_ms"])
    assert look.half_widths[0].num_blocks == 5
    assert look.half_widths[0].half_width_frac is None
    assert not look.is_precise
    assert take_look(load_experiment(tmp_path), RULE, 8, ["step_ms"]).half_widths[0].num_blocks == 7


def test_nothing_is_waited_for_that_no_block_can_tell(tmp_path: Path) -> None:
    results = load_experiment(measured(tmp_path, scatter=(0.0,) * 6).path)
    assert take_look(results, RULE, 6, ["step_ms", "gpu_energy_j"]).is_precise
    assert not take_look(results, RULE, 6, ["gpu_energy_j"]).is_precise
    assert not take_look(results, RULE, 6, ["step_ms"], left_out={"guided top_k=5"}).is_precise


def ended_early(path: Path) -> ResultDirectory:
    """Twelve planned blocks of which the rule made six unnecessary."""
    results = measured(path, scatter=(*SCATTER, 0.0, 0.001, 0.002, 0.003))
    look = take_look(load_experiment(path), StoppingRecord(
        precision_frac=0.5, confidence=0.9875, look_blocks=(6, 8, 10, 12)
    ), 6, ["step_ms"])  # fmt: skip
    assert look.is_precise
    for planned in results.plan().runs:
        if planned.block >= 6:
            for file in sorted(results.run(planned.run_id).path.iterdir()):
                file.unlink()
    stopping = StoppingRecord(precision_frac=0.5, confidence=0.9875, look_blocks=(6, 8, 10, 12), looks=(look,))
    edit_manifest(results, stopping=stopping)
    return results


def test_blocks_that_the_rule_made_unnecessary_are_no_gaps(tmp_path: Path) -> None:
    ended_early(tmp_path)
    comparison = compare_sides(Side(tmp_path, "baseline"), Side(tmp_path, "guided"), CompareOptions())
    codes = {warning.code for warning in comparison.warnings}
    assert not codes & {"excluded-block", "experiment-unfinished", "unmatched"}
    assert comparison.cells[0].num_blocks == 6
    (entry,) = list_directories(tmp_path)
    assert (entry["num_done"], entry["num_planned"]) == (12, 12)
    analysis = analyze_directory(tmp_path)
    assert analysis.runs_not_begun == ()
    confidences = {estimate.confidence for row in analysis.sweep for estimate in row.estimates.values()}
    assert list(confidences) == [pytest.approx(0.9875)]
    assert "12 of 12 runs done" in headline(analysis)
    assert "6 of at most 12 blocks" in headline(analysis)
    assert len(runs_table(analysis).rows) == 12


def test_a_block_missing_before_the_end_is_a_gap_all_the_same(tmp_path: Path) -> None:
    results = ended_early(tmp_path)
    (results.run(results.plan().runs[3].run_id).path / "run.json").unlink()
    comparison = compare_sides(Side(tmp_path, "baseline"), Side(tmp_path, "guided"), CompareOptions())
    assert [w.message for w in comparison.warnings if w.code == "excluded-block"]
    assert analyze_directory(tmp_path).runs_not_begun == (results.plan().runs[3],)


def test_a_comparison_pays_for_every_look_that_could_have_been_taken(tmp_path: Path) -> None:
    results = measured(tmp_path)
    sides = Side(tmp_path, "baseline"), Side(tmp_path, "guided")
    fixed = compare_sides(*sides, CompareOptions(metrics=("step_ms",)))
    edit_manifest(results, stopping=RULE)
    declared = compare_sides(*sides, CompareOptions(metrics=("step_ms",)))
    assert (fixed.num_looks, declared.num_looks) == (1, 4)
    assert declared.rules.confidence == pytest.approx(0.9875)
    (before,), (after,) = fixed.cells[0].deciding, declared.cells[0].deciding
    assert before.estimate is not None
    assert after.estimate is not None
    assert after.estimate.log_interval == pytest.approx(before.estimate.interval_at(0.9875))
    assert after.judged_confidence == pytest.approx(0.9875)


def test_each_end_of_one_experiment_may_meet_each_end_of_another(tmp_path: Path) -> None:
    one, other = measured(tmp_path / "a"), measured(tmp_path / "b")
    edit_manifest(one, stopping=RULE)
    edit_manifest(other, stopping=RULE, label="another")
    assert num_looks_of(one.manifest(), other.manifest()) == 16
    assert num_looks_of(one.manifest(), one.manifest()) == 4


def covered_share(confidence: float) -> float:
    """Experiments whose last interval holds the truth (0), where the width of an interval ended each of them."""
    stream = np.random.default_rng(5)
    covered = 0
    for _ in range(1500):
        blocks = stream.normal(0.0, 0.01, size=12).tolist()
        for look in look_blocks(12, 4):
            low, high = estimate_paired(blocks[:look], confidence).log_interval or (0.0, 0.0)
            if (high - low) / 2 <= 0.006:
                break
        covered += low <= 0.0 <= high
    return covered / 1500


@pytest.mark.slow
def test_a_rule_about_widths_alone_makes_intervals_too_narrow_and_its_correction_mends_that() -> None:
    assert covered_share(0.95) < 0.945
    assert covered_share(1 - 0.05 / 4) > 0.955
