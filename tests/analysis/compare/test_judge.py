"""Judges: every form of a number is read, nothing is evaluated, and the published judgements are met."""

import json
import sys
import time
from functools import partial

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.datasets import DATA, GSM8K
from support.results.builders import edit_requests, rewrite_lines, share_request_set, write_results
from support.results.comparing import compare_arms

from benchctl.analysis.analyzed import analyze_directory
from benchctl.analysis.compare.accuracy import quality_lines
from benchctl.analysis.compare.compare import CompareOptions
from benchctl.analysis.compare.judge import judge_named
from benchctl.cli.outcome import print_verdicts
from benchctl.errors import UsageError
from benchctl.profile.load import dump_profile, parse_profile
from benchctl.report.verdicts import directory_verdict
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


def test_numbers_are_equal_exactly_or_not_at_all_and_words_only_where_they_are_marked() -> None:
    assert not is_correct("0.1 + 0.2 = 0.30000000000000004", "0.3")
    assert is_correct("0.30", "0.3")
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
@pytest.mark.parametrize("mark", ["A: ", "boxed"])
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


def test_a_judge_that_is_not_installed_or_unknown_is_refused_with_its_remedy(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    for name, words in (("math-verify", r"pip install 'math-verify"), ("numerical", "did you mean 'numeric'")):
        with pytest.raises(UsageError, match=words):
            judge_named(name)
    assert str(NUMERIC) == "numeric 2"


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


def test_it_is_chosen_where_requests_ask_for_json_and_counts_the_answers_of_both_sides(tmp_path, capsys):
    """Two blocks of 4 questions without gold, with 2 answers each; guided, 3 are answered in JSON."""
    results = write_results(tmp_path / "r", block_factors=({"baseline": 1.0, "guided": 1.1},) * 2)
    rewrite_lines(results.path / "requests.jsonl", lambda line: line | {"answer": None})
    share_request_set(results, results)
    for run in results.plan().runs:
        edit_requests(results, run.run_id, partial(answered, num_valid=(0 if run.variant == "baseline" else 3)))
    profile = parse_profile(results.profile_yaml(), "p")
    asked = {"structured_outputs": {"json": {"type": "object"}}}
    guided = profile.variants["guided"].model_copy(update={"request": asked})
    results.write_profile(
        dump_profile(profile.model_copy(update={"variants": profile.variants | {"guided": guided}}))
    )
    options = {"allow": ("request.*",), "allow_altered": True}
    (cell,) = compare_arms(results, **options).cells
    assert (cell.quality.judge, cell.quality.a_accuracy, cell.quality.b_accuracy) == ("json 1", 0.0, 0.75)
    line = "valid JSON 0.0 % against 75.0 % (0 of 16 against 12 of 16 answers)"
    assert next(iter(quality_lines(cell.quality))).startswith(f"{line}: +75.0 points [")
    analysis = analyze_directory(results.path)
    print_verdicts(analysis, directory_verdict(analysis, CompareOptions(**options)))
    assert line in capsys.readouterr().out


def answered(record, num_valid):
    text = '{"a": 1} rest' if record.index < num_valid else "so {"
    choices = tuple(msgspec.structs.replace(choice, text=text) for choice in record.choices)
    return msgspec.structs.replace(record, choices=choices)
