"""Quality: the same questions to both sides, judged, paired by question, with failures in every denominator.

`benchctl compare` tells it beside speed, and lets it decide where that is asked for. Divergence: which texts are
the same, where the others part, and what one side has in common with itself.
"""

import json
from fractions import Fraction

import msgspec
import pytest
from hypothesis import given, strategies as st
from scipy.stats import binomtest
from support.cli import in_process
from support.results.builders import GUIDED, change_requests, edit_requests, edit_run
from support.results.planted import right, write_answers, wrong

from benchctl.analysis.compare.accuracy import (
    MCNEMAR,
    SIGN_FLIP,
    compare_divergence,
    compare_quality,
    compare_texts,
    divergence_sentence,
    quality_lines,
    quality_verdict,
)
from benchctl.analysis.compare.judge import grade, judge_named
from benchctl.analysis.statistics.intervals import newcombe_interval
from benchctl.records.loaded import load_results
from benchctl.records.record import ChoiceRecord, RequestError, RequestRecord

JUDGE = judge_named("numeric")


def sides(results):
    return tuple([run for run in results.runs if run.record.variant == name] for name in ("baseline", "guided"))


def quality_of(directory):
    results = load_results(directory.path)
    return compare_quality(results.requests, *sides(results), JUDGE, 1.0)


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
    assert (quality.difference_points, quality.p_value) == pytest.approx((-17.5, binomtest(2, 11).pvalue))
    interval = [100 * end for end in newcombe_interval(27, 9, 2, 2, 0.95)]
    assert [quality.ci_low, quality.ci_high] == pytest.approx(interval)
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
    assert (quality.method, mirrored.difference_points) == (SIGN_FLIP, -quality.difference_points)
    assert mirrored.p_value == pytest.approx(quality.p_value)
    assert (mirrored.only_a, mirrored.only_b) == (quality.only_b, quality.only_a)
    # Resampling draws other questions for the mirror image: the bounds agree but for its noise.
    assert (mirrored.ci_low, mirrored.ci_high) == pytest.approx((-quality.ci_high, -quality.ci_low), abs=1.0)


def test_blocks_that_repeat_their_answers_make_no_result_more_certain(tmp_path):
    """Greedy answers of a second block are the same ones: the question is the unit, not the answer."""
    once, often = (
        quality_of(write_answers(tmp_path / f"{blocks}", worse, num_questions=200, blocks=blocks))
        for blocks in (1, 6)
    )
    assert (once.a_answers, often.a_answers) == (200, 1200)
    for name in ("difference_points", "p_value", "minimum_detectable_points"):
        assert getattr(often, name) == pytest.approx(getattr(once, name)), name
    assert often.ci_high - often.ci_low == pytest.approx(once.ci_high - once.ci_low, rel=0.2)


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
    assert (cut.a_truncated, cut.b_truncated, cut.b_accuracy, cut.note is None) == (0, 40, 1.0, False)
    assert "answers cut off at the token limit: 0 of 40 against 40 of 40" in quality_lines(cut)
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
    assert min(quality.ci_high, quality.minimum_detectable_points) > 5
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
    assert [grades.share(question) for question in grades.correct] == [Fraction(1, 2)] * 20
    assert (grades.num_samples, grades.pass_at(1), grades.pass_at(2)) == (2, 0.5, 1.0)


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


def run_compare(results, *options):
    """Exit code, and output and messages, of a comparison with a margin for times that no answer exceeds."""
    arms = [f"{results.path}:{variant}" for variant in ("baseline", "guided")]
    code, text, error = in_process("compare", *arms, "--metrics", "ttft_ms", "--threshold", "80%", *options)
    return code, text + " ".join(error.split())


def directory_of(path, answers, stop="natural"):
    return write_answers(path, answers, num_questions=60, blocks=6, stop=stop)


def test_worse_answers_are_told_and_decide_only_where_a_margin_of_quality_is_given(tmp_path):
    results = directory_of(tmp_path / "r", worse)
    code, output = run_compare(results)
    assert code == 0
    for words in (
        "accuracy 100.0 % against 66.7 %: -33.3 points",
        "decides nothing without --quality-margin",
        "identical texts 66.7 % (240 of 360), A against itself in the next block 100.0 %",
    ):
        assert words in output
    code, output = run_compare(results, "--quality-margin", "2")
    assert code == 1
    assert output.startswith(
        "regression: guided against baseline (simulated): top_k=5: accuracy 100.0 % against 66.7 %"
    )
    assert "regression at a margin of 2" in output
    document = json.loads(run_compare(results, "--json", "--quality-margin", "2")[1])
    (cell,) = document["cells"]
    told = {"num_questions": 60, "verdict": "regression", "judge": "numeric 2", "decides": True, "only_a": 20}
    assert cell["quality"].items() >= told.items()
    assert cell["quality"]["pass_at"]["1"] == {"a": 1.0, "b": pytest.approx(2 / 3)}
    identical = [cell["divergence"][pair]["identical_frac"] for pair in ("b_against_a", "a_against_a")]
    assert identical == [pytest.approx(2 / 3), 1.0]
    assert document["reasons"] != []


def test_answers_that_could_be_worse_by_more_than_the_margin_leave_it_open_and_senseless_options_are_refused(
    tmp_path,
):
    results = directory_of(tmp_path / "r", alike)
    for option, value, exit_code, words in (
        (
            "--quality-margin",
            "0.5",
            3,
            "inconclusive: guided against baseline (simulated): top_k=5: accuracy 100",
        ),
        ("--quality-margin", "20", 0, "equivalent: guided against baseline"),
        ("--judge", "numerik", 2, "did you mean 'numeric'"),
        ("--quality-margin", "-1", 2, "percentage points from 0 to below 100"),
    ):
        code, output = run_compare(results, option, value)
        assert (code, words in output) == (exit_code, True), output


def test_forced_and_simulated_answers_are_not_judged_and_the_reason_is_told(tmp_path):
    forced = directory_of(tmp_path / "forced", worse, stop="forced")
    output = run_compare(forced)[1]
    assert "answers are not judged: " in output
    assert "measured with stop: forced, where answers run on past their end" in output
    assert "accuracy" not in output
    simulated = directory_of(tmp_path / "simulated", worse)
    for run in simulated.runs():
        edit_run(simulated, run.path.name, clock="virtual")
    cell = json.loads(run_compare(simulated, "--json")[1])["cells"][0]
    assert (cell["quality"], cell["divergence"]) == (None, None)
    for results, words in (
        (forced, "--quality-margin cannot decide"),
        (simulated, "a simulator invents its texts"),
    ):
        code, error = run_compare(results, "--quality-margin", "1")
        assert (code, words in error) == (2, True), error


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


def compare_directory(directory, temperature=0.0):
    return compare_divergence(*sides(load_results(directory.path)), temperature)


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
    a, b = (request(text, (1,) * len(text), (1,) * len(text)) for text in (head + one, head + other))
    there, back = compare_texts(a, b, 0), compare_texts(b, a, 0)
    assert there[:2] == back[:2]
    assert (there.longer_tokens, there.after_tokens) == (-(back.longer_tokens or 0), there.after_chars)
    assert there.after_chars is None or there.after_chars >= len(head)


def test_b_against_a_stands_beside_a_against_itself(tmp_path):
    """Eight texts of 16 characters in 8 chunks. B differs in every second; A in the next block in one of eight."""

    def answers(variant, block, i, sample):
        if variant == "guided" and i % 2:
            return "same text at fXX"
        return "sameX text at fi" if variant == "baseline" and block == 1 and i == 0 else "same text at fir"

    divergence = compare_directory(write_answers(tmp_path / "r", answers, num_questions=8, blocks=2))
    for pairs, expected in ((divergence.b_against_a, (16, 7, 7, 14)), (divergence.a_against_a, (8, 7, 2, 4))):
        medians = (pairs.median_after_tokens, pairs.median_after_chars)
        assert (pairs.num_pairs, pairs.num_identical, *medians) == expected
    assert divergence_sentence(divergence) == (
        "identical texts 43.8 % (7 of 16), A against itself in the next block 87.5 % (7 of 8); others part after "
        "7 tokens (median), those of A and A after 2 tokens (median)"
    )


def test_one_block_says_nothing_of_a_against_itself_and_answers_that_one_side_lacks_are_counted(tmp_path):
    directory = write_answers(tmp_path / "r", lambda variant, block, i, sample: "alike", num_questions=5, n=2)
    divergence = compare_directory(directory, temperature=0.7)
    assert (divergence.a_against_a, divergence.b_against_a.identical_frac) == (None, 1)
    assert "unknown without a second block" in divergence_sentence(divergence)
    assert "sampled tokens (temperature 0.7) differ" in divergence_sentence(divergence)
    change_requests(directory, GUIDED, 1, error=RequestError(kind="reset", message="the connection broke"))
    edit_requests(directory, GUIDED, lambda r: None if r.index == 2 else r)
    pairs = compare_directory(directory).b_against_a
    assert (pairs.num_pairs, pairs.num_missing) == (6, 4)
