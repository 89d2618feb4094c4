"""Quality: the same questions to both sides, judged, paired by question, with failures in every denominator.

`benchctl compare` tells it beside speed, and lets it decide where that is asked for. Divergence: which texts are
the same, where the others part, and what one side has in common with itself.
"""

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import msgspec
import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest
from support.results.answered_questions import right, write_answers, wrong
from support.results.builders import GUIDED, change_requests, edit_requests, edit_run
from typer.testing import CliRunner

from benchctl.analysis.compare.accuracy import (
    MCNEMAR,
    SIGN_FLIP,
    DivergenceComparison,
    compare_divergence,
    compare_quality,
    compare_texts,
    divergence_sentence,
    quality_lines,
    quality_verdict,
)
from benchctl.analysis.compare.judge import grade, judge_named
from benchctl.analysis.statistics.intervals import newcombe_interval
from benchctl.cli.commands.compare import compare
from benchctl.errors import BenchctlError
from benchctl.records.directory import ResultDirectory
from benchctl.records.loaded import load_results
from benchctl.records.record import ChoiceRecord, RequestError, RequestRecord

JUDGE = judge_named("numeric")
app = typer.Typer()
app.command()(compare)


def sides(results):
    return tuple([run for run in results.runs if run.record.variant == name] for name in ("baseline", "guided"))


def quality_of(directory, judge=JUDGE):
    results = load_results(directory.path)
    return compare_quality(results.requests, *sides(results), judge, 1.0)


def alike(variant, block, i, sample):
    return right(i)


def worse(variant, block, i, sample):
    return wrong(i) if variant == "guided" and i % 3 == 0 else right(i)


def test_one_answer_per_question_is_compared_by_mcnemar_and_newcombe(tmp_path):
    """Of 40 questions A fails 0 to 3, B fails 2 to 12: 2 are wrong on both sides, A is better on 9, B on 2."""

    def answers(variant, block, i, sample):
        return wrong(i) if (i < 4 if variant == "baseline" else 2 <= i < 13) else right(i)

    quality = quality_of(write_answers(tmp_path / "r", answers))
    assert (quality.num_questions, quality.a_accuracy, quality.b_accuracy) == (40, 36 / 40, 29 / 40)
    assert (quality.only_a, quality.only_b, quality.method, quality.judge) == (9, 2, MCNEMAR, "numeric 2")
    assert quality.difference_points == pytest.approx(-17.5)
    assert quality.p_value == pytest.approx(binomtest(2, 11).pvalue)
    low, high = newcombe_interval(27, 9, 2, 2, 0.95)
    assert (quality.ci_low, quality.ci_high) == pytest.approx((100 * low, 100 * high))
    assert quality.pass_at == {1: (36 / 40, 29 / 40)}
    assert (quality.a_failed, quality.b_failed, quality.a_truncated, quality.b_truncated) == (0, 0, 0, 0)
    assert next(quality_lines(quality)).startswith("accuracy 90.0 % against 72.5 %: -17.5 points [")


def test_swapping_the_sides_mirrors_everything(tmp_path):
    def answers(variant, block, i, sample):
        return wrong(i) if (i * 7 + sample * (3 if variant == "guided" else 2)) % 5 == 0 else right(i)

    results = load_results(write_answers(tmp_path / "r", answers, n=3, blocks=2).path)
    a_runs, b_runs = sides(results)
    quality = compare_quality(results.requests, a_runs, b_runs, JUDGE)
    mirrored = compare_quality(results.requests, b_runs, a_runs, JUDGE)
    assert quality.method == SIGN_FLIP
    assert mirrored.difference_points == -quality.difference_points
    assert mirrored.p_value == pytest.approx(quality.p_value)
    assert (mirrored.only_a, mirrored.only_b) == (quality.only_b, quality.only_a)
    # Resampling draws other questions for the mirror image: the bounds agree but for its noise.
    assert (mirrored.ci_low, mirrored.ci_high) == pytest.approx((-quality.ci_high, -quality.ci_low), abs=1.0)


def test_blocks_that_repeat_their_answers_make_no_result_more_certain(tmp_path):
    """Greedy answers of a second block are the same ones: the question is the unit, not the answer."""

    def answers(variant, block, i, sample):
        return wrong(i) if variant == "guided" and i % 4 == 0 else right(i)

    once, often = (
        quality_of(write_answers(tmp_path / f"{blocks}", answers, num_questions=200, blocks=blocks))
        for blocks in (1, 6)
    )
    assert often.difference_points == once.difference_points == -25
    assert often.p_value == pytest.approx(once.p_value)
    assert often.minimum_detectable_points == pytest.approx(once.minimum_detectable_points)
    assert often.ci_high - often.ci_low == pytest.approx(once.ci_high - once.ci_low, rel=0.2)
    assert (often.a_answers, once.a_answers, often.pass_at.keys()) == (1200, 200, {1})


def test_pass_at_k_counts_the_samples_of_a_run(tmp_path):
    """Question i is answered right by samples 0 to i mod 4: shares 1/4, 2/4, 3/4 and 1."""

    def answers(variant, block, i, sample):
        return right(i) if sample <= i % 4 and variant == "baseline" else wrong(i)

    quality = quality_of(write_answers(tmp_path / "r", answers, num_questions=8, n=4))
    assert quality.pass_at == {
        1: (pytest.approx((1 + 2 + 3 + 4) / 16), 0.0),
        2: (pytest.approx((3 / 6 + 5 / 6 + 1 + 1) / 4), 0.0),
        4: (1.0, 0.0),
    }
    assert any(line.startswith("pass@1 62.5 % against 0.0 %, pass@2") for line in quality_lines(quality))


def finish(directory, reason, *indices):
    """Let the answers of the guided run end for a reason."""

    def finished(record):
        choices = tuple(msgspec.structs.replace(choice, finish_reason=reason) for choice in record.choices)
        return msgspec.structs.replace(record, choices=choices) if record.index in indices else record

    edit_requests(directory, GUIDED, finished)


def test_an_answer_that_never_came_is_wrong_and_one_that_was_cut_off_judged_and_both_are_told(tmp_path):
    directory = write_answers(tmp_path / "r", alike)
    finish(directory, "length", *range(40))
    cut = quality_of(directory)
    assert (cut.a_truncated, cut.b_truncated, cut.b_accuracy) == (0, 40, 1.0)
    assert "answers cut off at the token limit: 0 of 40 against 40 of 40" in quality_lines(cut)
    assert cut.note is not None
    for index, reason in enumerate(("error", "abort", "content_filter", "sudden_death")):
        finish(directory, reason, index)
    change_requests(directory, GUIDED, 4, error=RequestError(kind="reset", message="the connection broke"))
    edit_requests(directory, GUIDED, lambda r: None if r.index == 5 else r)
    quality = quality_of(directory)
    assert (quality.b_failed, quality.b_accuracy, quality.only_a) == (6, 34 / 40, 6)
    assert "answers that never arrived, counted as wrong: 0 of 40 against 6 of 40" in quality_lines(quality)


@pytest.mark.parametrize("n", [1, 2])
def test_equal_sides_are_not_said_to_be_certain_and_questions_without_gold_not_judged(tmp_path, n):
    directory = write_answers(tmp_path / "r", alike, n=n)
    quality = quality_of(directory)
    assert (quality.difference_points, quality.p_value, quality.verdict) == (0, 1, "inconclusive")
    assert quality.ci_low < -5
    assert quality.ci_high > 5
    assert quality.minimum_detectable_points > 5
    results = load_results(directory.path)
    unanswerable = [msgspec.structs.replace(request, answer=None) for request in results.requests]
    assert compare_quality(unanswerable, *sides(results), JUDGE) is None
    assert compare_quality(results.requests, (), results.runs, JUDGE) is None


def test_samples_sent_as_requests_belong_to_one_question(tmp_path):
    answers = write_answers(tmp_path / "r", lambda variant, block, i, sample: right(i) if i % 2 else wrong(i))
    results = load_results(answers.path)
    paired = [
        msgspec.structs.replace(r, source=f"generated:{r.index // 2}", sample=r.index % 2) for r in results.requests
    ]
    grades = grade(paired, results.runs[:1], JUDGE)
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
def test_the_verdict_is_the_interval_against_the_margin(ci_low, ci_high, verdict):
    assert quality_verdict(ci_low, ci_high, 1.0) == verdict


@given(st.floats(-50, 50), st.floats(0, 50), st.floats(0, 20))
def test_mirrored_intervals_have_mirrored_verdicts(low, width, margin):
    mirror = {"regression": "improvement", "improvement": "regression"}
    verdict = quality_verdict(low, low + width, margin)
    assert quality_verdict(-low - width, -low, margin) == mirror.get(verdict, verdict)


def test_the_judge_may_be_another_and_travels_with_the_result(tmp_path):
    pytest.importorskip("math_verify")
    directory = write_answers(tmp_path / "r", alike, num_questions=4)
    quality = quality_of(directory, judge_named("math-verify"))
    assert quality.judge.startswith("math-verify 0.")
    assert replace(quality, judge="numeric 2") == quality_of(directory)


def run_compare(results, *options):
    """Exit code, and output or error, of a comparison with a margin for times that guided answers are within."""
    arms = [f"{results.path}:{variant}" for variant in ("baseline", "guided")]
    result = CliRunner().invoke(app, [*arms, "--metrics", "ttft_ms", "--threshold", "80%", *options])
    if isinstance(result.exception, BenchctlError):
        return result.exception.exit_code, " ".join(str(result.exception).split())
    return result.exit_code, result.stdout


def directory_of(path, answers, stop="natural"):
    return write_answers(path, answers, num_questions=60, blocks=6, stop=stop)


def test_worse_answers_are_told_and_decide_only_where_a_margin_of_quality_is_given(tmp_path):
    results = directory_of(tmp_path / "r", worse)
    code, output = run_compare(results)
    assert code == 0
    assert "accuracy 100.0 % against 66.7 %: -33.3 points" in output
    assert "decides nothing without --quality-margin" in output
    assert "identical texts 66.7 % (240 of 360), A against itself in the next block 100.0 %" in output
    code, output = run_compare(results, "--quality-margin", "2")
    assert code == 1
    assert output.startswith("regression: guided against baseline: top_k=5: accuracy 100.0 % against 66.7 %")
    assert "regression at a margin of 2" in output
    document = json.loads(run_compare(results, "--json", "--quality-margin", "2")[1])
    quality, divergence = document["cells"][0]["quality"], document["cells"][0]["divergence"]
    assert (quality["num_questions"], quality["a_accuracy"], quality["verdict"]) == (60, 1.0, "regression")
    assert (quality["judge"], quality["decides"], quality["only_a"]) == ("numeric 2", True, 20)
    assert quality["pass_at"]["1"]["b"] == pytest.approx(2 / 3)
    assert divergence["b_against_a"]["identical_frac"] == pytest.approx(2 / 3)
    assert divergence["a_against_a"]["identical_frac"] == 1.0
    assert document["reasons"] != []


def test_answers_that_could_be_worse_by_more_than_the_margin_leave_it_open_and_senseless_options_are_refused(
    tmp_path,
):
    results = directory_of(tmp_path / "r", alike)
    code, output = run_compare(results, "--quality-margin", "0.5")
    assert code == 3
    assert output.startswith("inconclusive: guided against baseline: top_k=5: accuracy 100.0 % against 100.0 %")
    assert run_compare(results, "--quality-margin", "20")[0] == 0
    for option, value, words in (
        ("--judge", "numerik", "did you mean 'numeric'"),
        ("--quality-margin", "-1", "percentage points from 0 to below 100"),
    ):
        code, error = run_compare(results, option, value)
        assert code == 2
        assert words in error


def test_forced_and_simulated_answers_are_not_judged_and_the_reason_is_told(tmp_path):
    forced = directory_of(tmp_path / "forced", worse, stop="forced")
    output = run_compare(forced)[1]
    assert "answers are not judged: " in output
    assert "measured with stop: forced, where answers run on past their end" in output
    assert "accuracy" not in output
    simulated = directory_of(tmp_path / "simulated", worse)
    for run in load_results(simulated.path).runs:
        edit_run(simulated, run.record.run_id, clock="virtual")
    cell = json.loads(run_compare(simulated, "--json")[1])["cells"][0]
    assert (cell["quality"], cell["divergence"]) == (None, None)
    for results, words in (
        (forced, "--quality-margin cannot decide"),
        (simulated, "a simulator invents its texts"),
    ):
        code, error = run_compare(results, "--quality-margin", "1")
        assert code == 2
        assert words in error


def request(text, chars, tokens=None, num_tokens=None) -> RequestRecord:
    choice = ChoiceRecord(
        index=0,
        chunk_ns=tuple(range(len(chars or "abc"))),
        chunk_chars=chars,
        chunk_tokens=tokens,
        output_tokens=num_tokens,
        text=text,
    )
    return RequestRecord(
        request_id="r", index=0, scheduled_ns=0, done_ns=9, choices=(choice,), completion_tokens=num_tokens
    )


def compare_directory(directory: ResultDirectory, temperature: float | None = 0.0) -> DivergenceComparison:
    runs = load_results(directory.path).runs
    sides = ([run for run in runs if run.record.variant == variant] for variant in ("baseline", "guided"))
    divergence = compare_divergence(*sides, temperature)
    assert divergence is not None
    return divergence


SIX, TEN = "one two six", "one two ten"


@pytest.mark.parametrize(
    ("a", "b", "after_chars", "after_tokens", "longer_tokens"),
    [
        pytest.param(
            request("abcd", (1, 3), (1, 2)), request("abcd", (2, 2), (1, 1)), None, None, -1, id="equal texts"
        ),
        pytest.param(
            request(SIX, (3, 4, 4), (1, 1, 1)), request(TEN, (3, 4, 4), (1, 1, 1)), 8, 2, 0,
            id="tokens before the first character that differs",
        ),
        pytest.param(
            request(SIX, (7, 4), (2, 2)), request(TEN, (3, 4, 1, 3), (1, 1, 1, 1)), 8, 3, 0,
            id="chunks of several tokens, by the finer side",
        ),
        pytest.param(
            request(TEN, (3, 4, 1, 3), (1, 1, 1, 1)), request(SIX, (7, 4), (2, 2)), 8, 3, 0, id="and the other way"
        ),
        pytest.param(
            request("one", (3,), (1,)), request("one two", (3, 4), (1, 1)), 3, 1, 1, id="a text that goes on"
        ),
        pytest.param(
            request(SIX, (3, 4, 4), num_tokens=3), request(TEN, (3, 4, 4), num_tokens=3), 8, 2, 0,
            id="chunks are tokens where there are as many of both",
        ),
        pytest.param(request(SIX, None), request(TEN, None), 8, None, None, id="unknown chunks"),
        pytest.param(request(SIX, (3, 4, 4)), request(TEN, (3, 4, 4)), 8, None, None, id="unknown tokens"),
    ],
)  # fmt: skip
def test_texts_part_where_their_first_character_differs(a, b, after_chars, after_tokens, longer_tokens) -> None:
    assert compare_texts(a, b, 0) == (after_chars, after_tokens, longer_tokens)


@given(st.text(max_size=20), st.text(max_size=20), st.text(max_size=20))
def test_swapping_the_sides_changes_no_place_and_turns_the_length(head: str, one: str, other: str) -> None:
    a = request(head + one, (1,) * len(head + one), (1,) * len(head + one))
    b = request(head + other, (1,) * len(head + other), (1,) * len(head + other))
    there, back = compare_texts(a, b, 0), compare_texts(b, a, 0)
    assert there[:2] == back[:2]
    assert there.longer_tokens == -(back.longer_tokens or 0)
    assert there.after_tokens == there.after_chars
    assert there.after_chars is None or there.after_chars >= len(head)


def test_b_against_a_stands_beside_a_against_itself(tmp_path: Path) -> None:
    """Eight texts of 16 characters in 8 chunks. B differs in every second; A in the next block in one of eight."""

    def answers(variant: str, block: int, i: int, sample: int) -> str:
        if variant == "guided" and i % 2:
            return "same text at fXX"
        return "sameX text at fi" if variant == "baseline" and block == 1 and i == 0 else "same text at fir"

    divergence = compare_directory(write_answers(tmp_path / "r", answers, num_questions=8, blocks=2))
    assert (divergence.b_against_a.num_pairs, divergence.b_against_a.num_identical) == (16, 7)
    assert divergence.a_against_a is not None
    assert (divergence.a_against_a.num_pairs, divergence.a_against_a.num_identical) == (8, 7)
    assert (divergence.b_against_a.median_after_tokens, divergence.b_against_a.median_after_chars) == (7, 14)
    assert (divergence.a_against_a.median_after_tokens, divergence.a_against_a.median_after_chars) == (2, 4)
    assert divergence_sentence(divergence) == (
        "identical texts 43.8 % (7 of 16), A against itself in the next block 87.5 % (7 of 8); others part after "
        "7 tokens (median), those of A and A after 2 tokens (median)"
    )


def test_one_block_says_nothing_of_a_against_itself_and_answers_that_one_side_lacks_are_counted(
    tmp_path: Path,
) -> None:
    directory = write_answers(tmp_path / "r", lambda variant, block, i, sample: "alike", num_questions=5, n=2)
    divergence = compare_directory(directory, temperature=0.7)
    assert divergence.a_against_a is None
    assert divergence.b_against_a.identical_frac == 1
    assert "unknown without a second block" in divergence_sentence(divergence)
    assert "sampled tokens (temperature 0.7) differ" in divergence_sentence(divergence)
    change_requests(directory, GUIDED, 1, error=RequestError(kind="reset", message="the connection broke"))
    edit_requests(directory, GUIDED, lambda r: None if r.index == 2 else r)
    short = compare_directory(directory).b_against_a
    assert (short.num_pairs, short.num_missing) == (6, 4)
    assert compare_divergence(load_results(directory.path).runs[:1], ()) is None
