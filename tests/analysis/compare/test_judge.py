"""Judges: every form of a number is read, nothing is evaluated, and the published judgements are met."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.datasets import DATA, GSM8K

from benchctl.analysis.compare.judge import Judge, judge_named
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


def test_numbers_are_equal_exactly_or_not_at_all() -> None:
    assert not is_correct("0.1 + 0.2 = 0.30000000000000004", "0.3")
    assert is_correct("0.30", "0.3")


def test_a_gold_answer_in_words_is_compared_with_the_marked_words() -> None:
    assert is_correct("so\n####  Next monday", "Next Monday")
    assert not is_correct("it is Monday", "monday")
    assert not is_correct("#### Tuesday", "monday")


# Laws

numbers = st.one_of(
    st.integers(-(10**12), 10**12).map(str),
    st.integers(0, 10**9).map(lambda value: f"{value:,}"),
    st.decimals(-(10**6), 10**6, places=3).map(str),
)
around = st.sampled_from(["", " ", "  ", "$", " $", "**", "\t", "€"])
after = st.sampled_from(["", " ", ".", ",", " dollars", "%", "**", "\n", " ,"])


@settings(deadline=None)
@given(numbers)
def test_a_number_is_judged_equal_to_itself(number: str) -> None:
    assert is_correct(number, number)
    assert is_correct(f"#### {number}", number)


@settings(deadline=None)
@given(numbers, numbers, around, after)
def test_spaces_commas_and_currency_around_a_number_change_no_judgement(
    number: str, gold: str, before: str, behind: str
) -> None:
    wrapped = f"{before}{number}{behind}"
    for form in ("{}", "so\n#### {}", "the answer is {}"):
        assert is_correct(form.format(wrapped), gold) == is_correct(form.format(number), gold)


marks = [
    "#### ",
    "\\boxed{",
    "\\frac{",
    "}",
    "{",
    "A: ",
    "answer is ",
    "<<",
    ">>",
    "1",
    ",",
    "/",
    "e9",
    "^",
    "-",
    "\n",
]


@settings(deadline=None)
@given(st.one_of(st.text(), st.lists(st.sampled_from(marks), max_size=60).map("".join)), st.text(max_size=8))
def test_no_text_whatever_makes_the_judge_raise(text: str, gold: str) -> None:
    assert isinstance(is_correct(text, gold), bool)


@pytest.mark.parametrize(
    "piece", [r"\boxed{", "<<", "1,", "111,", r"\frac{", "1 ", "answer is ", "#### ", "1/", "^{1", r"\text{", " "]
)
def test_time_grows_with_the_length_of_a_text_and_not_with_its_square(piece: str) -> None:
    is_correct(piece * 1000, "5")
    began = time.process_time()
    is_correct(piece * 20_000, "5")
    assert time.process_time() - began < 60  # the square of it would take minutes


# Against the published judgements


@needs_solutions
@pytest.mark.parametrize("mark", ["A: ", "#### ", "The answer is ", "boxed"])
def test_the_numeric_judge_agrees_with_all_published_judgements_in_every_form_of_answer(mark: str) -> None:
    disagreements = []
    num_judged = num_correct = 0
    for line in SOLUTIONS.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        gold = row["ground_truth"].rpartition("\nA: ")[2]
        for model in (key for key in row if isinstance(row[key], dict)):
            reasoning, mark_found, answer = row[model]["solution"].rpartition("\nA: ")
            marked = rf"\boxed{{{answer}}}" if mark == "boxed" else mark + answer
            given_text = f"{reasoning}\n{marked}" if mark_found else row[model]["solution"]
            expected = row[model]["is_correct"]
            num_judged, num_correct = num_judged + 1, num_correct + expected
            if is_correct(given_text, gold) != expected:
                disagreements.append((model, gold, given_text[-60:]))
    assert num_judged == 4 * 1319
    assert 0.2 < num_correct / num_judged < 0.8
    assert disagreements == []


@needs_solutions
def test_every_gold_answer_of_gsm8k_is_a_number_that_its_own_solution_reaches() -> None:
    for line in GSM8K.read_text(encoding="utf-8").splitlines():
        solution = json.loads(line)["answer"]
        gold = gold_answer(solution)
        assert gold is not None
        assert is_correct(solution, gold)


# Other judges


def test_math_verify_judges_when_it_is_asked_by_name() -> None:
    pytest.importorskip("math_verify")
    judge = judge_named("math-verify")
    assert (judge.name, judge.version[0].isdigit()) == ("math-verify", True)
    assert judge.is_correct(r"it is \boxed{\frac{6}{4}}", "1.5")
    assert not judge.is_correct(r"it is \boxed{2}", "1.5")


def test_a_judge_that_is_not_installed_is_refused_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "math_verify", None)
    with pytest.raises(UsageError, match=r"pip install 'math-verify"):
        judge_named("math-verify")


def test_an_unknown_judge_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UsageError, match="did you mean 'numeric'"):
        judge_named("numerical")


def test_a_judge_says_which_it_is() -> None:
    assert isinstance(NUMERIC, Judge)
    assert str(NUMERIC) == "numeric 2"
