"""Divergence: which texts are the same, where the others part, and what one side has in common with itself."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.results.answered_questions import write_answers
from support.results.builders import GUIDED, change_requests, edit_requests

from benchctl.analysis.compare.accuracy import (
    DivergenceComparison,
    compare_divergence,
    compare_texts,
    divergence_sentence,
)
from benchctl.records.directory import ResultDirectory
from benchctl.records.loaded import load_results
from benchctl.records.record import ChoiceRecord, RequestError, RequestRecord


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
