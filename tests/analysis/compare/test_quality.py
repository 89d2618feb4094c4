"""Quality: the same questions to both sides, judged, paired by question, with failures in every denominator."""

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest
from support.results.answered_questions import right, write_answers, wrong
from support.results.builders import edit_requests

from benchctl.analysis.compare.accuracy import (
    MCNEMAR,
    SIGN_FLIP,
    QualityComparison,
    compare_quality,
    quality_lines,
    quality_verdict,
)
from benchctl.analysis.compare.judge import grade, judge_named
from benchctl.analysis.statistics.intervals import newcombe_interval
from benchctl.records.directory import ResultDirectory
from benchctl.records.loaded import LoadedResults, LoadedRun, load_results
from benchctl.records.record import RequestError

JUDGE = judge_named("numeric")


def sides(results: LoadedResults) -> tuple[list[LoadedRun], list[LoadedRun]]:
    return (
        [run for run in results.runs if run.record.variant == "baseline"],
        [run for run in results.runs if run.record.variant == "guided"],
    )


def compare_answers(directory: ResultDirectory, margin_points: float = 1.0) -> QualityComparison:
    results = load_results(directory.path)
    quality = compare_quality(results.requests, *sides(results), JUDGE, margin_points)
    assert quality is not None
    return quality


def test_one_answer_per_question_is_compared_by_mcnemar_and_newcombe(tmp_path: Path) -> None:
    """Of 40 questions A fails 0 to 3, B fails 2 to 12: 2 are wrong on both sides, A is better on 9, B on 2."""

    def answers(variant: str, block: int, i: int, sample: int) -> str:
        fails = i < 4 if variant == "baseline" else 2 <= i < 13
        return wrong(i) if fails else right(i)

    quality = compare_answers(write_answers(tmp_path / "r", answers))
    assert (quality.num_questions, quality.a_accuracy, quality.b_accuracy) == (40, 36 / 40, 29 / 40)
    assert (quality.only_a, quality.only_b, quality.method, quality.judge) == (9, 2, MCNEMAR, "numeric 2")
    assert quality.difference_points == pytest.approx(-17.5)
    assert quality.p_value == pytest.approx(binomtest(2, 11).pvalue)
    low, high = newcombe_interval(27, 9, 2, 2, 0.95)
    assert (quality.ci_low, quality.ci_high) == pytest.approx((100 * low, 100 * high))
    assert quality.pass_at == {1: (36 / 40, 29 / 40)}
    assert (quality.a_failed, quality.b_failed, quality.a_truncated, quality.b_truncated) == (0, 0, 0, 0)
    assert next(quality_lines(quality)).startswith("accuracy 90.0 % against 72.5 %: -17.5 points [")


def test_swapping_the_sides_mirrors_everything(tmp_path: Path) -> None:
    def answers(variant: str, block: int, i: int, sample: int) -> str:
        return wrong(i) if (i * 7 + sample * (3 if variant == "guided" else 2)) % 5 == 0 else right(i)

    results = load_results(write_answers(tmp_path / "r", answers, n=3, blocks=2).path)
    a_runs, b_runs = sides(results)
    quality = compare_quality(results.requests, a_runs, b_runs, JUDGE)
    mirrored = compare_quality(results.requests, b_runs, a_runs, JUDGE)
    assert quality is not None
    assert mirrored is not None
    assert quality.method == SIGN_FLIP
    assert mirrored.difference_points == -quality.difference_points
    assert mirrored.p_value == pytest.approx(quality.p_value)
    assert (mirrored.only_a, mirrored.only_b) == (quality.only_b, quality.only_a)
    # Resampling draws other questions for the mirror image: the bounds agree but for its noise.
    assert (mirrored.ci_low, mirrored.ci_high) == pytest.approx((-quality.ci_high, -quality.ci_low), abs=1.0)


def test_blocks_that_repeat_their_answers_make_no_result_more_certain(tmp_path: Path) -> None:
    """Greedy answers of a second block are the same ones: the question is the unit, not the answer."""

    def answers(variant: str, block: int, i: int, sample: int) -> str:
        return wrong(i) if variant == "guided" and i % 4 == 0 else right(i)

    once = compare_answers(write_answers(tmp_path / "once", answers, num_questions=200))
    often = compare_answers(write_answers(tmp_path / "often", answers, num_questions=200, blocks=6))
    assert often.difference_points == once.difference_points == -25
    assert often.p_value == pytest.approx(once.p_value)
    assert often.minimum_detectable_points == pytest.approx(once.minimum_detectable_points)
    assert often.ci_high - often.ci_low == pytest.approx(once.ci_high - once.ci_low, rel=0.2)
    assert (often.a_answers, once.a_answers) == (1200, 200)
    assert often.pass_at.keys() == {1}


def test_pass_at_k_counts_the_samples_of_a_run(tmp_path: Path) -> None:
    """Question i is answered right by samples 0 to i mod 4: shares 1/4, 2/4, 3/4 and 1."""

    def answers(variant: str, block: int, i: int, sample: int) -> str:
        return right(i) if sample <= i % 4 and variant == "baseline" else wrong(i)

    quality = compare_answers(write_answers(tmp_path / "r", answers, num_questions=8, n=4))
    assert quality.pass_at.keys() == {1, 2, 4}
    assert quality.pass_at[1][0] == pytest.approx((1 + 2 + 3 + 4) / 16)
    assert quality.pass_at[2][0] == pytest.approx((3 / 6 + 5 / 6 + 1 + 1) / 4)
    assert quality.pass_at[4] == (1.0, 0.0)
    assert any(line.startswith("pass@1 62.5 % against 0.0 %, pass@2") for line in quality_lines(quality))


def test_an_answer_that_never_came_is_wrong_and_told(tmp_path: Path) -> None:
    results = write_answers(tmp_path / "r", lambda variant, block, i, sample: right(i))
    reset = RequestError(kind="reset", message="the connection broke")
    run_id = load_results(results.path).runs[1].record.run_id
    edit_requests(results, run_id, lambda r: msgspec.structs.replace(r, error=reset) if r.index < 3 else r)
    edit_requests(results, run_id, lambda r: None if r.index == 5 else r)
    quality = compare_answers(results)
    assert (quality.b_failed, quality.b_accuracy, quality.only_a) == (4, 0.9, 4)
    assert "answers that never arrived, counted as wrong: 0 of 40 against 4 of 40" in quality_lines(quality)


@pytest.mark.parametrize("finish_reason", ["error", "abort", "content_filter", "sudden_death"])
def test_what_a_finish_reason_calls_no_answer_is_not_judged(tmp_path: Path, finish_reason: str) -> None:
    results = write_answers(tmp_path / "r", lambda variant, block, i, sample: right(i))

    def failed(record):
        choices = tuple(msgspec.structs.replace(c, finish_reason=finish_reason) for c in record.choices)
        return msgspec.structs.replace(record, choices=choices) if record.index < 3 else record

    edit_requests(results, load_results(results.path).runs[1].record.run_id, failed)
    quality = compare_answers(results)
    assert (quality.b_failed, quality.b_accuracy) == (3, 0.925)


def test_answers_cut_off_at_their_limit_are_judged_and_told(tmp_path: Path) -> None:
    results = write_answers(tmp_path / "r", lambda variant, block, i, sample: right(i))

    def cut(record):
        choices = tuple(msgspec.structs.replace(c, finish_reason="length") for c in record.choices)
        return msgspec.structs.replace(record, choices=choices)

    edit_requests(results, load_results(results.path).runs[1].record.run_id, cut)
    quality = compare_answers(results)
    assert (quality.a_truncated, quality.b_truncated, quality.b_accuracy) == (0, 40, 1.0)
    assert "answers cut off at the token limit: 0 of 40 against 40 of 40" in quality_lines(quality)
    assert quality.note is not None


def test_equal_sides_are_not_said_to_be_certain(tmp_path: Path) -> None:
    for n in (1, 2):
        quality = compare_answers(
            write_answers(tmp_path / f"n{n}", lambda variant, block, i, sample: right(i), n=n)
        )
        assert (quality.difference_points, quality.p_value) == (0, 1)
        assert quality.ci_low < -5
        assert quality.ci_high > 5
        assert quality.verdict == "inconclusive"
        assert quality.minimum_detectable_points > 5


def test_a_workload_without_gold_answers_has_no_quality(tmp_path: Path) -> None:
    results = load_results(write_answers(tmp_path / "r", lambda variant, block, i, sample: right(i)).path)
    unanswerable = [msgspec.structs.replace(request, answer=None) for request in results.requests]
    assert compare_quality(unanswerable, *sides(results), JUDGE) is None
    assert compare_quality(results.requests, (), results.runs, JUDGE) is None


def test_samples_sent_as_requests_belong_to_one_question(tmp_path: Path) -> None:
    results = load_results(
        write_answers(tmp_path / "r", lambda variant, block, i, sample: right(i) if i % 2 else wrong(i)).path
    )
    paired = [
        msgspec.structs.replace(r, source=f"generated:{r.index // 2}", sample=r.index % 2) for r in results.requests
    ]
    grades = grade(paired, results.runs[:1], JUDGE)
    assert grades is not None
    assert (len(grades.correct), grades.num_samples) == (20, 2)
    assert {grades.share(question) for question in grades.correct} == {Fraction(1, 2)}
    assert (grades.pass_at(1), grades.pass_at(2)) == (0.5, 1.0)


@pytest.mark.parametrize(
    ("ci_low", "ci_high", "verdict"),
    [
        (-0.9, 0.9, "equivalent"),
        (-5, -1.1, "regression"),
        (1.1, 5, "improvement"),
        (-1.9, 0.9, "inconclusive"),
        (-5, -0.5, "inconclusive"),
        (-5, 5, "inconclusive"),
    ],
)
def test_the_verdict_is_the_interval_against_the_margin(ci_low: float, ci_high: float, verdict: str) -> None:
    assert quality_verdict(ci_low, ci_high, 1.0) == verdict


@settings(deadline=None)
@given(st.floats(-50, 50), st.floats(0, 50), st.floats(0, 20))
def test_mirrored_intervals_have_mirrored_verdicts(low: float, width: float, margin: float) -> None:
    mirror = {"regression": "improvement", "improvement": "regression"}
    verdict = quality_verdict(low, low + width, margin)
    assert quality_verdict(-low - width, -low, margin) == mirror.get(verdict, verdict)


def test_the_judge_may_be_another_and_travels_with_the_result(tmp_path: Path) -> None:
    pytest.importorskip("math_verify")
    directory = write_answers(tmp_path / "r", lambda variant, block, i, sample: right(i), num_questions=4)
    results = load_results(directory.path)
    quality = compare_quality(results.requests, *sides(results), judge_named("math-verify"))
    assert quality is not None
    assert quality.judge.startswith("math-verify 0.")
    assert replace(quality, judge="numeric 2") == compare_answers(directory)
