"""Judges: every form of a number is read, nothing is evaluated, and the published judgements are met.

Shares of the same questions: each law that the formulas promise, and their published examples.
"""

import json
import math
import sys
import time
from fractions import Fraction
from functools import partial
from statistics import fmean

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy.stats import binomtest
from support.datasets import DATA, GSM8K
from support.results.builders import edit_requests, rewrite_lines, share_request_set, write_results
from support.results.comparing import compare_arms

from benchctl.analysis.compare.accuracy import quality_lines
from benchctl.analysis.compare.judge import judge_named
from benchctl.analysis.statistics.intervals import (
    mean_interval,
    minimum_detectable_difference,
    newcombe_interval,
    pass_at,
    sign_flip_p,
    wilson_interval,
)
from benchctl.errors import UsageError
from benchctl.workload.datasets.published import gold_answer

NUMERIC = judge_named("numeric")
SOLUTIONS = DATA / "gsm8k/example_model_solutions.jsonl"
needs_solutions = pytest.mark.skipif(not SOLUTIONS.is_file(), reason=f"the judged answers are not at {SOLUTIONS}")


def is_correct(text: str, gold: str) -> bool:
    return NUMERIC.is_correct(text, gold)


@pytest.mark.parametrize(
    "text",
    [
        "First 3 + 4 = 7.\n#### 18",
        "#### 3\nno, it is\n#### 18",
        r"so it is \boxed{18}.",
        "She has 3 left.\nA: 18",
        "The final answer is:\n\n**$18**",
        "5 + 13 = $<<5+13=18>>18",
        "<think>The answer is 3. #### 4</think>18",
        "#### 18 eggs, as 3 are gone: 18",
        "18.",
    ],
)
def test_the_answer_is_behind_the_mark_or_the_last_number(text: str) -> None:
    assert is_correct(text, "18")
    assert not is_correct(text, "3")


@pytest.mark.parametrize("text", ["", "no idea", "18\n#### none", "18 of 3", "18" * 5000])
def test_what_ends_in_no_number_or_another_one_is_wrong(text: str) -> None:
    assert not is_correct(text, "18")


@pytest.mark.parametrize(
    ("text", "gold"),
    [
        ("70,000", "70000"),
        ("$18.00", "18"),
        (r"\$18", "18"),
        ("18 dollars.", "18"),
        ("-$3", "-3"),
        ("$-3", "-3"),
        (".5", "0.5"),
        ("it is 10-5", "5"),
        ("it is 10 -5", "-5"),
    ],
)
def test_a_number_is_the_same_in_all_its_forms(text: str, gold: str) -> None:
    assert is_correct(f"#### {text}", gold)
    assert is_correct(f"The answer is {text}", gold)
    assert not is_correct(f"#### {text}", "17")


@pytest.mark.parametrize(
    ("text", "gold", "expected"),
    [
        ("0.1 + 0.2 = 0.30000000000000004", "0.3", False),
        ("0.30", "0.3", True),
        ("so\n####  Next monday", "Next Monday", True),
        ("it is Monday", "monday", False),
        ("#### Tuesday", "monday", False),
    ],
)
def test_numbers_are_equal_exactly_or_not_at_all_and_words_only_where_they_are_marked(text, gold, expected):
    assert is_correct(text, gold) is expected


# Laws

numbers = st.one_of(
    st.integers(-(10**12), 10**12).map(str),
    st.integers(0, 10**9).map(lambda value: f"{value:,}"),
    st.decimals(-(10**6), 10**6, places=3).map(str),
)
around = st.sampled_from(["", " ", "  ", "$", " $", "**", "\t", "€"])
after = st.sampled_from(["", " ", ".", ",", " dollars", "%", "**", "\n", " ,"])


@given(numbers, numbers, around, after)
def test_spaces_commas_and_currency_around_a_number_change_no_judgement(
    number: str, gold: str, before: str, behind: str
) -> None:
    wrapped = f"{before}{number}{behind}"
    assert is_correct(number, number)
    for form in ("{}", "so\n#### {}", "the answer is {}"):
        assert is_correct(form.format(wrapped), gold) == is_correct(form.format(number), gold)


marks = [
    "#### ", "\\boxed{", "\\frac{", "}", "{", "A: ", "answer is ", "<<", ">>", "1", ",", "/", "e9", "^", "-", "\n",
]  # fmt: skip


@given(st.one_of(st.text(), st.lists(st.sampled_from(marks), max_size=60).map("".join)), st.text(max_size=8))
def test_no_text_whatever_makes_the_judge_raise(text: str, gold: str) -> None:
    assert isinstance(is_correct(text, gold), bool)


def test_time_grows_with_the_length_of_a_text_and_not_with_its_square() -> None:
    for piece in (
        r"\boxed{",
        "<<",
        "1,",
        "111,",
        r"\frac{",
        "1 ",
        "answer is ",
        "#### ",
        "1/",
        "^{1",
        r"\text{",
        " ",
    ):
        began = time.process_time()
        is_correct(piece * 20_000, "5")
        assert time.process_time() - began < 60, piece  # the square of it would take minutes


# Against the published judgements


@needs_solutions
@pytest.mark.parametrize("form", ["A: {}", r"\boxed{{{}}}"])
def test_the_numeric_judge_agrees_with_all_published_judgements_in_every_form_of_answer(form: str) -> None:
    rows = [json.loads(line) for line in SOLUTIONS.read_text(encoding="utf-8").splitlines()]
    judged = [(row["ground_truth"], model) for row in rows for model in row.values() if isinstance(model, dict)]
    assert len(judged) == 4 * 1319
    assert 0.2 < fmean(model["is_correct"] for _, model in judged) < 0.8
    for gold, model in judged:
        reasoning, mark, answer = model["solution"].rpartition("\nA: ")
        text = f"{reasoning}\n{form.format(answer)}" if mark else model["solution"]
        assert is_correct(text, gold.rpartition("\nA: ")[2]) == model["is_correct"], (gold, text[-60:])


@needs_solutions
def test_every_gold_answer_of_gsm8k_is_a_number_that_its_own_solution_reaches() -> None:
    for line in GSM8K.read_text(encoding="utf-8").splitlines():
        solution = json.loads(line)["answer"]
        assert is_correct(solution, gold_answer(solution)), solution


# Other judges


def test_math_verify_judges_when_it_is_asked_by_name() -> None:
    pytest.importorskip("math_verify")
    judge = judge_named("math-verify")
    assert (judge.name, judge.version[0].isdigit()) == ("math-verify", True)
    boxed = (r"it is \boxed{\frac{6}{4}}", r"it is \boxed{2}")
    assert [judge.is_correct(text, "1.5") for text in boxed] == [True, False]


@pytest.mark.parametrize(
    ("name", "words"), [("math-verify", r"pip install 'math-verify"), ("numerical", "did you mean 'numeric'")]
)
def test_a_judge_that_is_not_installed_or_unknown_is_refused_with_its_remedy(monkeypatch, name, words) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(UsageError, match=words):
        judge_named(name)


# JSON documents, whatever the question was

WHOLE = judge_named("json").is_correct
BEGINNING = judge_named("json", runs_on=True).is_correct


@pytest.mark.parametrize("text", ['{"a": [1, 2.5e3, null]}', " \n[]\t", '{"a": "}"}', '{"a": {"b": true}}'])
def test_a_document_is_valid_with_blanks_around_it_and_more_behind_it_where_lengths_are_forced(text):
    assert WHOLE(text, "")
    assert BEGINNING(text + " and so on {", "")
    assert not WHOLE(text + " done", "")
    assert not BEGINNING("Sure: " + text, "")


@pytest.mark.parametrize(
    "text",
    ["", "yes", "12", '"text"', '{"a": 1', "{'a': 1}", '{"a": NaN}', '{"a": 1,}', '{"a": "\x1d"}', "[" * 100_000],
)
def test_what_is_no_object_or_array_of_json_is_not_valid(text):
    assert not WHOLE(text, "")
    assert not BEGINNING(text, "")


def test_it_is_chosen_where_requests_ask_for_json_and_counts_the_answers_of_both_sides(tmp_path):
    """Two blocks of 4 questions without gold, with 2 answers each; guided, 3 are answered in JSON."""
    results = write_results(tmp_path / "r", block_factors=({"baseline": 1.0, "guided": 1.1},) * 2)
    rewrite_lines(results.path / "requests.jsonl", lambda line: line | {"answer": None})
    share_request_set(results, results)
    for run in results.plan().runs:
        edit_requests(results, run.run_id, partial(answered, num_valid=(0 if run.variant == "baseline" else 3)))
    asked = "guided:\n    request: {structured_outputs: {json: {type: object}}}\n"
    results.write_profile(results.profile_yaml().replace("guided:\n", asked))
    (cell,) = compare_arms(results, allow=("request.*",), allow_altered=True).cells
    assert (cell.quality.judge, cell.quality.a_accuracy, cell.quality.b_accuracy) == ("json 1", 0.0, 0.75)
    line = "valid JSON 0.0 % against 75.0 % (0 of 16 against 12 of 16 answers)"
    assert next(iter(quality_lines(cell.quality))).startswith(f"{line}: +75.0 points [")


def answered(record, num_valid):
    text = '{"a": 1} rest' if record.index < num_valid else "so {"
    choices = tuple(msgspec.structs.replace(choice, text=text) for choice in record.choices)
    return msgspec.structs.replace(record, choices=choices)


tables = st.tuples(*[st.integers(0, 60)] * 4).filter(any)


def differences_of(num_better: int, num_worse: int, num_equal: int = 0) -> list[Fraction]:
    return [Fraction(1)] * num_better + [Fraction(-1)] * num_worse + [Fraction(0)] * num_equal


@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.integers(1, n), st.integers(0, n), st.just(n))))
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_correct_sample(count: tuple[int, int, int]) -> None:
    k, num_correct, n = count
    wrong = Fraction(math.comb(n - num_correct, k), math.comb(n, k))
    assert pass_at(k, num_correct, n) == pytest.approx(float(1 - wrong), abs=1e-12)


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        # The table of R. G. Newcombe 1998 with 20 + 12 + 2 + 16 pairs.
        ((20, 12, 2, 16), (-0.3292, -0.0562)),
        # Airway hyper-responsiveness (Bentur 2009), in M. Fagerland et al., Statistics in Medicine 33, 2014.
        ((1, 1, 7, 12), (0.0256, 0.5069)),
    ],
)
def test_newcombes_interval_is_that_of_published_tables(
    table: tuple[int, int, int, int], expected: tuple[float, float]
) -> None:
    assert newcombe_interval(*table, 0.95) == pytest.approx(expected, abs=1e-4)


def test_wilsons_interval_is_the_one_of_scipy() -> None:
    for num_correct, n in ((0, 10), (7, 10), (10, 10), (312, 1319)):
        expected = binomtest(num_correct, n).proportion_ci(0.9, method="wilson")
        assert wilson_interval(num_correct, n, 0.9) == pytest.approx((expected.low, expected.high))


@given(tables, st.sampled_from([0.8, 0.95, 0.99]))
def test_swapping_the_sides_mirrors_newcombes_interval(table: tuple[int, int, int, int], confidence: float) -> None:
    both, only_a, only_b, neither = table
    low, high = newcombe_interval(both, only_a, only_b, neither, confidence)
    assert newcombe_interval(both, only_b, only_a, neither, confidence) == pytest.approx((-high, -low))
    assert -1 <= low <= (only_b - only_a) / sum(table) + 1e-12
    assert low < high <= 1


@settings(max_examples=40)
@given(st.lists(st.fractions(-1, 1, max_denominator=8), min_size=2, max_size=40))
def test_the_mean_interval_holds_the_mean_or_reaches_it(differences: list[Fraction]) -> None:
    low, high = mean_interval(differences, 0.95)
    assert -1 <= low <= float(sum(differences) / len(differences)) <= high <= 1
    assert low < high or len(set(differences)) > 1


def test_the_mean_interval_covers_the_truth_in_a_simulation() -> None:
    """Four answers to questions of varied difficulty; B is worse by 5 points on each."""
    stream, num_covered = np.random.default_rng(3), 0
    for _ in range(100):
        ability = stream.beta(2, 1, size=120) * 0.9 + 0.05
        a, b = (stream.binomial(4, np.clip(ability - worse, 0, 1)) for worse in (0, 0.05))
        low, high = mean_interval([Fraction(int(difference), 4) for difference in b - a], 0.9)
        num_covered += low <= -0.05 <= high
    assert 0.80 <= num_covered / 100 <= 0.97


@settings(max_examples=40)
@given(st.integers(0, 200), st.integers(0, 200))
def test_with_one_answer_per_question_the_test_is_mcnemars(num_better: int, num_worse: int) -> None:
    p_value = sign_flip_p(differences_of(num_better, num_worse, 7))
    discordant = num_better + num_worse
    assert p_value == pytest.approx(binomtest(num_better, discordant).pvalue if discordant else 1.0)


@settings(max_examples=40)
@given(st.lists(st.fractions(-1, 1, max_denominator=6), min_size=1, max_size=10))
def test_the_test_counts_all_choices_of_signs(differences: list[Fraction]) -> None:
    sums = [Fraction(0)]
    for value in differences:
        sums = [one + sign * value for one in sums for sign in (1, -1)]
    observed = abs(sum(differences))
    p_value = sum(abs(one) >= observed for one in sums) / len(sums)
    assert sign_flip_p(differences) == pytest.approx(p_value)
    assert sign_flip_p([-value for value in differences]) == pytest.approx(p_value)


def test_the_detectable_difference_follows_from_the_questions_on_which_the_sides_disagree() -> None:
    differences = differences_of(66, 66, 1319 - 132)
    assert minimum_detectable_difference(differences, 0.95) == pytest.approx(
        2.8016 * math.sqrt(132) / 1319, rel=1e-3
    )
    none = minimum_detectable_difference(differences_of(0, 0, 100), 0.95)
    assert none == pytest.approx(minimum_detectable_difference(differences_of(1, 0, 99), 0.95))
